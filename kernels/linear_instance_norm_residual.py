# SPDX-License-Identifier: MIT
"""A linear layer, then a norm over each row, then (z + y) * y, fused: a drop-in for the Model of the same name.

    h = x W^T + b;    z = (h - mean) * rstd over each row;    out = (z + y) * y

The Model's `InstanceNorm2d` is given each row as a channel of 1 x F pixels. So `mean` and `rstd` are the row's own:
rstd = 1 / sqrt(sum((h - mean)^2) / F + eps).

The rows take the fast path (`_is_supported`) when y and h, the linear layer's output, are 2-D, of one shape and dtype
(float32, float16 or bfloat16), F is a multiple of 8 (on a CPU 24 or more), eps >= 2^-126, and there are no hooks,
autocast or transforms. Others, and on a CPU those that need gradients, take the plain path: the Model's own lines.

On a GPU a large float32 product (`_is_large`) runs on tensor cores if the GPU is one of `_SPLIT_GPUS` and TF32 is not
allowed: each number is split into two fp16 numbers, and three fp16 products take the place of the float32 one, with
less error (of gradients, too, unless features or rows differ by factors above 2^19). nn.Linear (cuBLAS) does all other
products, before Python checks the rows, so that the GPU starts early. Some small 16-bit layers are computed in float32
(`_in_float32`). `finish_rows` then reads h and y, each value once if F <= 8192, and writes the output.

In the backward `row_gradients` reads h, y and the output's gradient, again each value once if F <= 8192, and
writes y's gradient and G, h's gradient. Then dX = G W and dW = G^T x: as three fp16 products if the forward's product
was and they are large, else by cuBLAS.

On a CPU, nn.Linear computes h, and threads finish its rows. 16-bit inputs are computed in float32 where that is faster,
even if they need gradients (`_in_float32`). CUDA_SOURCE begins with the rows; then comes the product.

At the benchmark shape, 1024 x 8192 to 8192: 137 GFLOP, done three times; 0.37 GB of x, W, y and the output; the split
reads 0.3 GB and writes 0.3 GB. `python harness.py linear_instance_norm_residual --backward`, H200: float32 1.17 ms,
2.37x eager, with backward 3.51 ms, 2.35x; TF32 allowed (`--precision high`) 0.360 ms, 1.20x; bfloat16 (`--dtype
bfloat16`) 0.188 ms, 1.25x.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import sys
import types

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import cpp_extension

CUDA_SOURCE = r"""
#line 1 "CUDA_SOURCE in linear_instance_norm_residual.py"
#undef __CUDA_NO_HALF_CONVERSIONS__  // PyTorch defines both; without them float(v) and T(v) convert all three types
#undef __CUDA_NO_BFLOAT16_CONVERSIONS__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// ---- What all sections use. The same text in both linear_*.py here. ----
// V neighbouring values, which one instruction loads or stores.
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T value[V]; };
// Combines the v of each aligned group of `lanes` lanes, a power of two, by op. All 32 lanes must call it.
template <class Op> __device__ __forceinline__ float reduce(float v, int lanes, Op op) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}
static __host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Of the functions that C++ calls, pointers are to device memory, 16-byte aligned. An int that they return is a
// cudaError_t.
template <class Call> static int with_dtype(int dtype, const Call& call) {  // 0 float32, 1 float16, 2 bfloat16
    if (dtype == 0) call(float());
    if (dtype == 1) call(__half());
    if (dtype == 2) call(__nv_bfloat16());
    return cudaGetLastError();
}

// ---- The rows: out = (z + y) * y with z = (h - mean) * rstd, and its gradients. ----
// To change the formula, change finish_rows, row_gradients, finish_rows_cpu in C++, in Python _finish_plainly and the
// lines for torch.jit.script in ModelNew.forward, and the Model.
//
// A row is needed three times (in the backward four): for its mean, for its deviations from the mean, and for the
// results. (mean(h^2) - mean(h)^2 would need it once less, but loses digits where the mean is far from zero.) A row of
// up to 8192 values is read from memory only once. A group of threads, 8 to 256 (a whole block), owns a row and issues
// all its loads at the start. Each thread keeps 32 values of each tensor in registers. A pack is 16 bytes. With P
// threads in the group:
//
//     pack of the row       0   1  ...  P - 1    P   P + 1  ...  2 P - 1   ...    those beyond 32 P values
//     kept by thread        0   1  ...  P - 1    0   1      ...  P - 1     ...    none: read again from memory or L2
//
// A row's group is the smallest of 8, 16, ..., 256 threads that holds it, or else 256.
constexpr int kBlockThreads = 256;
// Values of each tensor that a thread keeps in registers. (With 0 the rows take 1.005 to 1.19 times as long, H200.)
constexpr int kThreadValues = 32;

// Adds up each of COUNT values over the threads of a group, and gives each thread the COUNT totals. All threads of the
// block must call it. Shuffles add within a warp. Then lane 0 of each warp puts its COUNT sums in shared memory, and
// every warp of the group adds up these.
template <int COUNT> __device__ __forceinline__ void sum_group(float (&v)[COUNT], int group_threads) {
    __shared__ float warp_sums[COUNT][kBlockThreads / 32];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) v[c] = reduce(v[c], min(group_threads, 32), __fadd_rn);
    if (group_threads <= 32) return;
    __syncthreads();  // all warps have read what an earlier call left in warp_sums
    const int warps = group_threads / 32;
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        if (threadIdx.x % 32 == 0) warp_sums[c][threadIdx.x / 32] = v[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        v[c] = reduce(warp_sums[c][threadIdx.x / group_threads * warps + threadIdx.x % warps], warps, __fadd_rn);
    }
}

// Makes the compiler believe that the pack changed. Otherwise it would convert bfloat16 to float once and keep the
// floats, in twice the registers: at the benchmark shape row_gradients would take 46 us instead of 32 (H200).
template <class Pack16> __device__ __forceinline__ void optimization_barrier(Pack16& pack) {
    uint4& words = reinterpret_cast<uint4&>(pack);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}
// A thread's part of one row of several (m, n) tensors. `rank` is the thread's number in its group, from 0 on. If the
// row is m or more, its threads have no packs.
template <typename T, int TENSORS> struct ThreadRow {
    static constexpr int V = 16 / sizeof(T), kThreadPacks = kThreadValues / V;
    using RowPack = Pack<T, V>;
    int64_t row;
    int n, group_threads, rank, packs_of_row;
    const RowPack* from[TENSORS];
    RowPack packs[TENSORS][kThreadPacks];  // the first of the thread's packs of each tensor

    __device__ __forceinline__ ThreadRow(const T* const (&tensors)[TENSORS], int64_t m, int n, int group_threads)
        : row(int64_t(blockIdx.x) * (kBlockThreads / group_threads) + threadIdx.x / group_threads),
          n(n),
          group_threads(group_threads),
          rank(threadIdx.x % group_threads),
          packs_of_row(row < m ? n / V : 0) {
#pragma unroll
        for (int t = 0; t < TENSORS; ++t) {
            from[t] = reinterpret_cast<const RowPack*>(tensors[t] + row * n);
#pragma unroll
            for (int i = 0; i < kThreadPacks; ++i) {
                const int index = rank + i * group_threads;
                if (index < packs_of_row) packs[t][i] = from[t][index];
            }
        }
    }
    // Calls use(pack, index) for each of this thread's packs of the row: pack[t] is that of tensor t, index its number.
    template <class Use> __device__ __forceinline__ void for_each_pack(const Use& use) const {
        RowPack pack[TENSORS];
#pragma unroll
        for (int i = 0; i < kThreadPacks; ++i) {
            const int index = rank + i * group_threads;
#pragma unroll
            for (int t = 0; t < TENSORS; ++t) {
                pack[t] = packs[t][i];
                optimization_barrier(pack[t]);
            }
            if (index < packs_of_row) use(pack, index);
        }
        for (int index = rank + kThreadPacks * group_threads; index < packs_of_row; index += group_threads) {
#pragma unroll
            for (int t = 0; t < TENSORS; ++t) pack[t] = from[t][index];
            use(pack, index);
        }
    }
    // Calls formula(v) for each of the thread's columns, where v[t] is the value of tensor t, and stores the results to
    // row `row` of `to`, if that is not null.
    template <class Formula> __device__ __forceinline__ void store(T* to, const Formula& formula) const {
        for_each_pack([&](const auto& pack, int index) {
            RowPack result;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                float v[TENSORS];
#pragma unroll
                for (int t = 0; t < TENSORS; ++t) v[t] = float(pack[t].value[j]);
                result.value[j] = T(formula(v));
            }
            if (to != nullptr) reinterpret_cast<RowPack*>(to + row * n)[index] = result;
        });
    }
};

// The row's mean is mean + mean_lo: `mean` is rounded to float32, and `mean_lo`, the mean of the deviations from it, is
// what the rounding left over.
struct RowStatistics {
    float mean, mean_lo, rstd;
    __device__ __forceinline__ float normalise(float h) const { return ((h - mean) - mean_lo) * rstd; }
};
// The statistics of the first tensor's row. Deviations and their squares are summed within a pack first, then added to
// the thread's sums: so a sum is rounded fewer times.
template <class Row> __device__ __forceinline__ RowStatistics row_statistics(const Row& row, float eps) {
    const float inverse_n = 1.0f / row.n;  // multiplies each term of the mean: the plain sum could overflow
    float mean[1] = {};
    row.for_each_pack([&](const auto& pack, int) {
        for (const auto v : pack[0].value) mean[0] = fmaf(float(v), inverse_n, mean[0]);
    });
    sum_group(mean, row.group_threads);
    float sums[2] = {};  // of deviations, of their squares
    row.for_each_pack([&](const auto& pack, int) {
        float deviations = 0, squares = 0;
        for (const auto v : pack[0].value) {
            const float deviation = float(v) - mean[0];
            deviations += deviation;
            squares = fmaf(deviation, deviation, squares);
        }
        sums[0] += deviations;
        sums[1] += squares;
    });
    sum_group(sums, row.group_threads);
    const float mean_square = sums[1] * inverse_n;
    // If mean_square is infinite, rstd is 0, as PyTorch's is. An infinite mean_lo would make a NaN of the difference,
    // inf - inf.
    const float mean_lo = isinf(mean_square) ? 0 : sums[0] * inverse_n;
    // fmaxf turns a NaN into 0. But then mean_lo is NaN, too, and so is the whole row of the output.
    const float variance = fmaxf(mean_square - mean_lo * mean_lo, 0);
    return {mean[0], mean_lo, 1 / sqrtf(variance + eps)};
}

// A group of threads owns a row.
template <typename T> __global__ void __launch_bounds__(kBlockThreads)
    finish_rows(const T* h, const T* y, T* out, int64_t m, int n, float eps, int group_threads) {
    const ThreadRow<T, 2> row({h, y}, m, n, group_threads);
    const RowStatistics statistics = row_statistics(row, eps);
    row.store(out, [&](const float (&v)[2]) {
        const auto& [h, y] = v;
        return (statistics.normalise(h) + y) * y;
    });
}

// With z as above and d = grad * y, which is z's gradient:
//     grad_y = grad * (z + y) + d;    G = rstd * (d - mean(d) - z * mean(d z))
// A group of threads owns a row. Tensor cores truncate, so |h| is a little too small, and the statistics' rstd too
// large, by the fraction `truncation` (see _truncation_of in Python). G, written to g, is computed from a corrected
// rstd. grad_y is null if it is not wanted.
template <typename T> __global__ void __launch_bounds__(kBlockThreads) row_gradients(const T* h, const T* y,
    const T* grad, T* g, T* grad_y, int64_t m, int n, float eps, float truncation, int group_threads) {
    const ThreadRow<T, 3> row({h, y, grad}, m, n, group_threads);
    const RowStatistics statistics = row_statistics(row, eps);
    float sums[2] = {};  // of d, of d z
    row.store(grad_y, [&](const float (&v)[3]) {
        const auto& [h, y, grad] = v;
        const float z = statistics.normalise(h), d = grad * y;
        sums[0] += d;
        sums[1] = fmaf(d, z, sums[1]);
        return fmaf(grad, z + y, d);
    });
    sum_group(sums, group_threads);
    const float mean_d = sums[0] / n, mean_dz = sums[1] / n;
    const float rstd = fmaf(statistics.rstd, -truncation, statistics.rstd);
    row.store(g, [&](const float (&v)[3]) {
        const auto& [h, y, grad] = v;
        const float z = statistics.normalise(h), d = grad * y;
        return rstd * (d - mean_d - z * mean_dz);
    });
}

// If grad is null, writes the network's output to out_or_g. Otherwise writes G to out_or_g, and y's gradient to grad_y,
// unless that is null. All tensors are (m, n), contiguous and 16-byte aligned; n is a multiple of 8.
extern "C" int launch_rows(int dtype, const void* h, const void* y, const void* grad, void* out_or_g, void* grad_y,
    int64_t m, int64_t n, float eps, float truncation, cudaStream_t stream) {
    int group_threads = 8;
    while (group_threads < kBlockThreads && group_threads * kThreadValues < n) group_threads *= 2;
    const unsigned blocks = unsigned(divide_up(m * group_threads, kBlockThreads));
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const auto as = [](const void* p) { return static_cast<const T*>(p); };
        T* const to = static_cast<T*>(out_or_g);
        if (grad == nullptr) {
            finish_rows<<<blocks, kBlockThreads, 0, stream>>>(as(h), as(y), to, m, int(n), eps, group_threads);
        } else {
            row_gradients<<<blocks, kBlockThreads, 0, stream>>>(
                as(h), as(y), as(grad), to, static_cast<T*>(grad_y), m, int(n), eps, truncation, group_threads);
        }
    });
}

// ---- The product C = A B^T on tensor cores, as accurate as float32. The same text in both linear_*.py here. ----
//
//     x (m, k) --.
//                 split_rows --> pieces, inverse_scale, threshold    in device memory
//     W (n, k) --'                  |
//                                   |  cp.async
//                      stages: one line of each row of a tile     in shared memory
//                                   |  ldmatrix
//                      mma.sync -> accumulators -> sums           in registers
//                                   |
//                      epilogue: h, and what follows it -> device memory
//
// Pieces. Each value of C is a sum of K terms x w, where x is from a row of A and w from a row of B. (In the forward A
// is the layer's input and B its weight.) Tensor cores multiply fp16 numbers, of 11 bits, exactly, and add the products
// up in about float32 (see Restarts). So a float32 number x, of 24 bits, is split into two fp16 numbers, its pieces: hi
// is x rounded to fp16, and lo is x - hi rounded to fp16. Let u be the unit of x's last bit, at most 2^-23 |x|. Then
// |x - hi| is at most 2^12 u. fp16 numbers of that size are 2 u apart, so lo is off by at most u. With w = hi' + lo'
// split likewise:
//
//     x = hi + lo up to 2^-23 |x|,    |lo| <= 2^-11 |x|
//     x w = hi hi' + hi lo' + lo hi' + lo lo',    |lo lo'| <= 2^-22 |x w|
//
// lo lo' is dropped, and three products remain. With S for the sum of the K |x w|, splitting and dropping change C's
// value by at most (2^-23 + 2^-23 + 2^-22) S = 2^-21 S, and by far less in practice, as the terms' errors have
// different signs. (What tensor cores truncate comes on top: see Restarts.) SGEMM, cuBLAS's float32 product, rounds its
// sum after each of K additions, by up to 2^-24 of it, so by up to K 2^-24 S in all. This bound is at least 16 times
// 2^-21 S, since K is 128 or more (`_is_large`). On the GPUs of `_SPLIT_GPUS` mma.sync multiplies fp16 7 or 16 times as
// fast as SGEMM multiplies float32.
//
// Scales. The largest fp16 number is 65504. So each row is first multiplied by its scale, the power of two that brings
// its largest finite magnitude to [2^14, 2^15). Each sum is multiplied by both rows' `inverse_scale`. For example, 0.3
// in a row whose largest value is 0.9 becomes 0.3 * 2^15 = 9830.400391 = 9832 - 1.599609: hi is 9832, as fp16 numbers
// of that size are 8 apart, and lo is -1.599609. A w of 0.7 in such a row becomes 22937.6: hi' is 22944, lo' is -6.398,
// and 0.002 is lost. Of x w, 2.25e8 when scaled, lo lo' is 10.2, or 2^-24 of it.
//
// Restarts. A tensor core truncates its sums towards zero instead of rounding them, so its errors do not cancel but
// grow with K. So a thread has two registers for each of its values of C: the accumulator, to which mma.sync adds, and
// the sum. After every 32 of K the thread multiplies the accumulator by `inverse_scale` of A's row (which in the
// gradients changes every 128 of K, so this cannot wait for the epilogue), adds it to the sum, in float32 with
// rounding, and restarts it at zero. If K is 1024 or more it does so after every 64, if 4096 or more after every 128,
// since SGEMM's errors grow with K as well. (With 64 in place of 32 the product would take 9% less time, and with 128
// in place of 64 4% less. But then its errors could be 1.2 times SGEMM's.)
//
// The pieces are due to Markidis et al. (2018), the sums outside the tensor cores to Ootomo and Yokota (2022).
//
// Thresholds. A row's largest value is scaled to at least 2^14 and below 2^15. Of a value that is below 2^-2 when
// scaled, over 2^16 times smaller, lo has too few bits: fp16 numbers below 2^-14 are multiples of 2^-24 instead of
// having 11 significant bits, so rounding errs by up to 2^-25. (Of a value between 2^-14 and 2^-2, hi still has its 11
// bits, but lo is at most 2^-14.) If other terms make the sum large, that does no harm. If the sum is small, it may be
// wrong: in the forward a warp recomputes it in float32. (If nearly all sums are such, as where W ignores a feature
// that is 2^20 times larger than the rest, that takes far longer than SGEMM.)
//   - A value other than 0 is "coarse" if its magnitude is below 2^-2 when scaled. Then lo's error of up to 2^-25 may
//     be more than 2^-23 of the value, the error that splitting has anyway.
//   - A coarse value is multiplied by a value below 2^15, so its rounding changes the sum by less than 2^-25 * 2^15 =
//     2^-10. If two rows have c coarse values, taken together, the sum changes by less than c * 2^-10.
//   - A sum may err by 2^-24 of itself, as float32 does. If |sum| is c * 2^14 or more, this error is c * 2^-10 or more:
//     the coarse values do no harm.
//   - So split_rows counts each row's coarse values and stores that number times 2^14 as the row's `threshold`. If
//     |sum| is below its two rows' thresholds added up, the epilogue recomputes it in float32, from x and W. By an
//     estimate that happens to 3 of 10^6 sums of normally distributed operands at K = 8192, less often at smaller K.
//   - Scaled sums are below 2^15 2^15 K < 2^54, as check_product takes K below 2^24. Times an `inverse_scale` of up to
//     2^60 they are finite. A row with a finite value of 2^75 or more has an `inverse_scale` above 2^60. So its
//     threshold is +infinity, and its sums are recomputed. If a row's values are all 0, infinite or NaN, its threshold
//     is -infinity. Its sums are 0 or not finite, and are not recomputed. (With a threshold of +infinity it adds up to
//     NaN, and no sum is below NaN.) (With two pieces an infinity makes NaN, as its lo is inf - inf. So would the norm;
//     but gradients are NaN where SGEMM's are infinite.)
//
// Lines. Pieces are stored in lines. A line holds hi and lo of 32 consecutive values of a row: 128 bytes, four quarters
// of 16 numbers. One mma.sync multiplies a quarter of 16 rows of A by a quarter of 8 rows of B:
//
//     quarter         0             1              2             3
//                | hi of 0..15 | hi of 16..31 | lo of 0..15 | lo of 16..31 |
//
// PIECES is the number of a value's pieces: 2, or 1 in linear_swish_group_norm where TF32 is allowed. If it is 1, a
// line is hi of 64 values, cuBLAS multiplies, and hi hi' is the whole product, as hi has TF32's 11 bits. (Rounding to
// 11 bits errs by more, so smaller thresholds would do, as in hopper/linear_*.py.)
//
// Tiles. A block of four warps computes a tile of C, 64 rows by 128 columns. Two blocks share an SM: while one waits,
// or is in its epilogue, the other multiplies. A stage is 24 KiB of shared memory, and holds one line each of the
// tile's 64 rows of A and 128 rows of B. cp.async fills three stages in turn: while line L of each row is multiplied,
// lines L + 1 and L + 2 arrive. Line L + 3 follows as soon as all warps have read L.
//
// Swizzle. ldmatrix reads one 16-byte chunk of each of eight rows at once. A row of a stage has 128 bytes, which is all
// 32 banks of shared memory. If chunk c were at the same place in all rows, the eight would lie in the same four banks
// and be read one after another. So chunk c of row r is stored at place c ^ (r % 8):
//
//     place             0 1 2 3 4 5 6 7
//     chunk in row 0    0 1 2 3 4 5 6 7
//     chunk in row 1    1 0 3 2 5 4 7 6
//     chunk in row 2    2 3 0 1 6 7 4 5
//     ...
//     chunk in row 7    7 6 5 4 3 2 1 0
//
// So chunk 0 is at place r % 8 of row r. Chunk 3 of row 5 is at place 3 ^ 5 = 6, which is byte 5 * 128 + 6 * 16 = 736.
//
// MN-major: neighbours in memory have the same k, not the same row. The gradients are C = A B, where B is (K, columns
// of C): a line holds 32 columns of one of its rows. Beside A's 64 lines, a stage holds 32 rows of B, four lines of
// each: the tile's 128 columns. First comes line 0 of all 32 rows, then line 1 of all, and so on. ldmatrix.trans
// transposes B on its way to registers.

constexpr int kLineK = 32;  // K of a stage: a line holds two pieces each of 32 values
constexpr int kLineHalves = 64, kLineBytes = kLineHalves * 2;  // fp16 numbers in a line, and their bytes: 128
constexpr int kTileRows = 64, kTileColumns = 128;
constexpr int kStages = 3;  // two blocks use 144 of the 164 KiB that an SM of 8.0 has (four stages: 2% slower, H200)
constexpr int kStageBytes = (kTileRows + kTileColumns) * kLineBytes;
constexpr int kBandHeight = 16;  // in tiles (see multiply): 32 MiB of A's pieces at K = 8192, which L2 holds
constexpr int kLinesPerScale = 4;  // in the gradients every four lines of a row of A, 128 of K, have their own scale
// Four warps, two down and two across. A warp computes 32 rows and 64 columns of the tile. A thread keeps 64 sums and
// as many accumulators in registers: 128 of the 255 that it may have.
constexpr int kMultiplyThreads = 128;
constexpr int kMmasDown = 2, kMmasAcross = 8;  // of 16 rows and 8 columns each: a warp's 32 rows and 64 columns
// The fp16 numbers that a row of k values takes: its pieces, rounded up to whole lines.
static __host__ __device__ constexpr int64_t stride_of(int64_t k, int pieces) {
    return divide_up(k * pieces, kLineHalves) * kLineHalves;
}
__device__ __forceinline__ float finite_magnitude(float v) { return fabsf(v) < INFINITY ? fabsf(v) : 0; }
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }
// The exponent of the power of two that brings `largest` to [2^14, 2^15). At most 126, so that this scale and its
// inverse are normal numbers. So a `largest` below 2^-112 stays below 2^14 when scaled.
__device__ __forceinline__ int scale_exponent(float largest) {
    return min(14 + 127 - int(__float_as_uint(largest) >> 23), 126);
}
// Splits two neighbouring scaled values of a row, `index` (even) and index + 1, and stores their pieces in its lines.
template <int PIECES> __device__ __forceinline__ void store_pieces(__half* row, int64_t index, float a, float b) {
    constexpr int kValues = kLineHalves / PIECES;
    const __half2 hi = __floats2half2_rn(a, b);
    auto* const to = reinterpret_cast<__half2*>(row + index / kValues * kLineHalves + index % kValues);
    to[0] = hi;
    if (PIECES == 2) to[kValues / 2] = __floats2half2_rn(a - __low2float(hi), b - __high2float(hi));
}
// Splits rows of k values: first the m of x, then those of W. Block r finds the largest finite magnitude of row r; then
// it scales and splits the row, and stores its pieces, inverse_scale[r] and threshold[r]. For the second step each of
// its at most 256 threads keeps 32 values in registers. What a row has beyond 8192 values is read twice. (If all values
// were read twice, the forward would take 2% to 7% longer on an H200.)
constexpr int kThreadPairs = 16;  // pairs of neighbouring values that a thread keeps in registers
template <int PIECES> __global__ void __launch_bounds__(256) split_rows(const float* __restrict__ x,
    const float* __restrict__ w, int m, int k, __half* __restrict__ pieces, float* inverse_scale, float* threshold) {
    // The bits of the largest magnitude: for non-negative floats the unsigned order of the bits is that of the floats.
    __shared__ unsigned largest_bits;
    __shared__ int coarse_count;  // of the row
    const int64_t row = blockIdx.x, stride = stride_of(k, PIECES);
    const float* const row_values = row < m ? x + row * k : w + (row - m) * k;
    __half* const row_pieces = pieces + row * stride;
    const int step = 2 * blockDim.x, first_value = 2 * threadIdx.x, padded_k = int(stride / PIECES);
    const auto load_pair = [&](int i) {  // values i and i + 1 of the row, i even; zeros beyond its end
        if (i >= k) return make_float2(0, 0);
        if (k % 2 == 0) return *reinterpret_cast<const float2*>(row_values + i);
        return make_float2(row_values[i], i + 1 < k ? row_values[i + 1] : 0);
    };
    float2 pairs[kThreadPairs];
#pragma unroll
    for (int p = 0; p < kThreadPairs; ++p) pairs[p] = load_pair(first_value + p * step);
    const auto for_each_pair = [&](const auto& use) {  // of this thread; beyond the row they are zeros
#pragma unroll
        for (int p = 0; p < kThreadPairs; ++p) use(first_value + p * step, pairs[p]);
        for (int i = first_value + kThreadPairs * step; i < padded_k; i += step) use(i, load_pair(i));
    };
    if (threadIdx.x == 0) largest_bits = coarse_count = 0;
    __syncthreads();
    float largest = 0;
    for_each_pair([&](int, const float2& pair) {
        largest = fmaxf(largest, fmaxf(finite_magnitude(pair.x), finite_magnitude(pair.y)));
    });
    largest = reduce(largest, 32, fmaxf);
    if (threadIdx.x % 32 == 0) atomicMax(&largest_bits, __float_as_uint(largest));
    __syncthreads();
    const int exponent = scale_exponent(__uint_as_float(largest_bits));
    const float scale = power_of_two(exponent);
    int thread_coarse_count = 0;
    for_each_pair([&](int i, const float2& pair) {
        if (i >= padded_k) return;  // zeros beyond the row's last line; those within it are stored
        const float a = pair.x * scale, b = pair.y * scale;
        thread_coarse_count += (pair.x != 0 && fabsf(a) < 0x1p-2f) + (pair.y != 0 && fabsf(b) < 0x1p-2f);
        store_pieces<PIECES>(row_pieces, i, a, b);
    });
    if (thread_coarse_count > 0) atomicAdd(&coarse_count, thread_coarse_count);
    __syncthreads();
    if (threadIdx.x > 0) return;
    inverse_scale[row] = power_of_two(-exponent);
    // An exponent below -60: `inverse_scale` is above 2^60. Largest bits of 0: there is no finite value other than 0.
    threshold[row] = exponent < -60 ? INFINITY : largest_bits == 0 ? -INFINITY : coarse_count * 0x1p14f;
}

// Starts a copy of 16 bytes from device to shared memory, past L1. If !exists, writes zeros and reads nothing.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
        :
        : "r"(to), "l"(from), "r"(exists ? 16 : 0)
        : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}
// Loads four 8 x 8 matrices of fp16 numbers. Lane 8 i + j points at row j of matrix i in shared memory.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "r"(from)
            : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "r"(from)
            : "memory");
    }
}
// d += a b, by all lanes of a warp: 16 rows and 8 columns of C, 16 of K.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rows of pieces in device memory, `stride` fp16 numbers from one to the next.
struct Operand {
    const __half* pieces;
    int rows;
    int64_t stride;
};
// This thread's part of the copies to the stages: the same 16-byte chunk of every 16th row, so that eight threads copy
// a row's 128 bytes. Where A or B has no such row or, MN-major, B no such line, cp.async reads nothing and writes zeros
// to the stage. Past the last line of K, start copies nothing, but moves from_a and from_b past the end, unread.
template <bool MN_MAJOR> struct StageCopies {
    static constexpr int kRowStep = kMultiplyThreads / 8;
    const Operand &a, &b;
    int first_row, first_column, columns, lines;
    int stage_row = threadIdx.x / 8;  // the first of this thread's rows of a stage
    uint32_t to_stages;  // where this thread's first chunk goes in the first stage
    const __half *from_a, *from_b;
    __device__ __forceinline__ StageCopies(
        const Operand& a, const Operand& b, int first_row, int first_column, int columns, int lines, uint32_t stages)
        : a(a), b(b), first_row(first_row), first_column(first_column), columns(columns), lines(lines) {
        const int chunk = threadIdx.x % 8;
        to_stages = stages + stage_row * kLineBytes + (chunk ^ stage_row % 8) * 16;
        from_a = a.pieces + (first_row + stage_row) * a.stride + chunk * 8;
        from_b = b.pieces +
            (MN_MAJOR ? stage_row * b.stride + first_column * 2 : (first_column + stage_row) * b.stride) + chunk * 8;
    }
    __device__ __forceinline__ void start(int line) {  // must be called for line 0, 1, 2, ... in this order
        const uint32_t to = to_stages + line % kStages * kStageBytes;
#pragma unroll
        for (int i = 0; i < kTileRows && line < lines; i += kRowStep) {
            copy_async(to + i * kLineBytes, from_a + i * a.stride, first_row + stage_row + i < a.rows);
        }
#pragma unroll
        for (int i = 0; i < kTileColumns && line < lines; i += kRowStep) {
            // MN-major: copies line mn_line of the row of B that is mn_row below stage_row.
            const int mn_line = i / kLineK, mn_row = i % kLineK;
            const __half* const source = from_b + (MN_MAJOR ? mn_row * b.stride + mn_line * kLineHalves : i * b.stride);
            const bool mn_row_exists = line * kLineK + stage_row + mn_row < b.rows;
            const bool mn_exists = mn_row_exists && (first_column + mn_line * kLineK) * 2 < b.stride;
            const bool exists = MN_MAJOR ? mn_exists : first_column + stage_row + i < columns;
            copy_async(to + (kTileRows + i) * kLineBytes, source, exists);
        }
        from_a += kLineHalves;
        from_b += MN_MAJOR ? kLineK * b.stride : kLineHalves;
        commit_copies();  // past the last line an empty group, so that wait_copies counts one a line
    }
};
// Loads a quarter from a stage, as operands of mma. to[i] gets numbers 16 i to 16 i + 15 of the warp's rows of A or,
// from B, of its columns of C. `from` is where this lane points ldmatrix for i = 0 and quarter 0:
//
//     lanes    0..7                     8..15                    16..23                   24..31
//     A        rows 0..7, K 0..7        rows 8..15, K 0..7       rows 0..7, K 8..15       rows 8..15, K 8..15
//     B        columns 0..7, K 0..7     columns 0..7, K 8..15    columns 8..15, K 0..7    columns 8..15, K 8..15
//
// Not MN-major, quarters 0 and 1 are hi of K 0..15 and 16..31, and quarters 2 and 3 their lo. A row of the stage is a
// row of A or of B (a column of C). MN-major, `quarter` has the same meaning, but is no quarter of a stored line: a row
// of the stage is 32 columns of one k. So 16 of K are 16 rows, and a warp's 64 columns are two lines. to[i] gets hi or
// lo of 16 columns: those of half i % 2 of line i / 2. A lane starts at chunk c, which is 0 or 1, and wants chunk c + s
// with an even s. As c + s = c ^ s, this chunk lies at `from` ^ 16 s: (c ^ s) ^ (r % 8) = (c ^ (r % 8)) ^ s. This needs
// stages that begin at multiples of 128 bytes.
template <bool MN_MAJOR, int COUNT> __device__ __forceinline__ void load_quarter(
    uint32_t (&to)[COUNT][4], uint32_t from, int quarter) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int xor_bytes = MN_MAJOR ? quarter / 2 * 64 + i % 2 * 32 : quarter * 32;
        const int row_offset = MN_MAJOR ? i / 2 * kLineK + quarter % 2 * 16 : i * 16;
        load_matrices<MN_MAJOR>(to[i], (from ^ xor_bytes) + row_offset * kLineBytes);
    }
}
__device__ __forceinline__ void multiply_add(float (&acc)[kMmasDown][kMmasAcross][4], const uint32_t (&a)[kMmasDown][4],
    const uint32_t (&b)[kMmasAcross / 2][4]) {
#pragma unroll
    for (int i = 0; i < kMmasDown; ++i) {
#pragma unroll
        for (int j = 0; j < kMmasAcross; ++j) mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}
// Row and column of sum [i][j] of a thread's 4 x 16, from those of its sum [0][0].
__device__ __forceinline__ int row_of(int thread_row, int i) { return thread_row + i * 8; }
__device__ __forceinline__ int column_of(int thread_column, int j) { return thread_column + j / 2 * 8 + j % 2; }
// C = A B^T or, MN_MAJOR, C = A B. C is (A's rows, columns). K is `lines` lines. After every `lines_per_restart` lines
// the accumulators are multiplied by inverse_scale[line / kLinesPerScale * scale_stride + A's row], where `line` is the
// first of these lines, and added to the sums. (With scale_stride 0 a row of A has one scale. In the forward the
// epilogue multiplies by the inverse_scale of B's rows; in the gradients split_gradient has multiplied A by it.) At the
// end each thread calls epilogue(thread_row, thread_column, values) once, with its 4 x 16 sums, some of which may be
// outside C. Four neighbouring lanes together hold 64 consecutive columns of the same four rows.
template <bool MN_MAJOR, class Epilogue> __global__ void __launch_bounds__(kMultiplyThreads, 2) multiply(
    const __grid_constant__ Operand a, const __grid_constant__ Operand b, const float* __restrict__ inverse_scale,
    int scale_stride, int columns, int lines, int lines_per_restart, const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ < 800
    __trap();  // there is no cp.async
#else
    extern __shared__ __align__(128) unsigned char stages[];
    const uint32_t base = uint32_t(__cvta_generic_to_shared(stages));
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 64 * 32, warp_column = threadIdx.x / 32 % 2 * 64;
    // Blocks compute the tiles of a band, kBandHeight rows of tiles, column by column. So L2 still holds the band's
    // part of A, and the column's part of B, when the next tile needs them.
    const int tiles_across = int(divide_up(columns, kTileColumns)), tiles_down = int(divide_up(a.rows, kTileRows));
    const int band_tiles = kBandHeight * tiles_across, band_start = blockIdx.x / band_tiles * kBandHeight;
    const int index_in_band = blockIdx.x % band_tiles, band_height = min(kBandHeight, tiles_down - band_start);
    const int first_column = index_in_band / band_height * kTileColumns;
    const int first_row = (band_start + index_in_band % band_height) * kTileRows;
    StageCopies<MN_MAJOR> copies(a, b, first_row, first_column, columns, lines, base);
    // Three slots of registers for quarters. Slot 0 holds hi of K 0..15, and slot 1 hi of K 16..31. Slot 2 holds lo of
    // K 0..15 first, and lo of K 16..31 later.
    uint32_t slot_a[3][kMmasDown][4], slot_b[3][kMmasAcross / 2][4];
    const int row_b = MN_MAJOR ? lane % 16 : lane % 8 + lane / 16 * 8, chunk_b = MN_MAJOR ? lane / 16 : lane / 8 % 2;
    // MN-major too, the warp's part of B begins warp_column rows of the stage down: 64 columns are two lines of 32 rows
    // each.
    const uint32_t address_a = base + (warp_row + lane % 16) * kLineBytes + (lane / 16 ^ lane % 8) * 16;
    const uint32_t address_b = base + (kTileRows + warp_column + row_b) * kLineBytes + (chunk_b ^ lane % 8) * 16;
    const auto load_a = [&](int slot, uint32_t stage_offset, int quarter) {
        load_quarter<false>(slot_a[slot], address_a + stage_offset, quarter);
    };
    const auto load_b = [&](int slot, uint32_t stage_offset, int quarter) {
        load_quarter<MN_MAJOR>(slot_b[slot], address_b + stage_offset, quarter);
    };
    for (int line = 0; line < kStages; ++line) copies.start(line);
    wait_copies<kStages - 1>();
    __syncthreads();
    load_a(2, 0, 2);
    load_b(0, 0, 0);
    float sum[4][16] = {};
    int line = 0;
    do {
        float acc[kMmasDown][kMmasAcross][4] = {}, inverse_scale_a[4];  // of the thread's four rows of A
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = min(row_of(first_row + warp_row + lane / 4, i), a.rows - 1);
            inverse_scale_a[i] = inverse_scale[int64_t(line / kLinesPerScale) * scale_stride + row];
        }
        const int end = min(line + lines_per_restart, lines);
        // A line's products of A and B in order, with hi0 for hi of K 0..15 and hi1 for hi of K 16..31:
        //     lo0 hi0,   hi0 lo0,   lo1 hi1,   hi1 lo1,   then the barrier,   hi0 hi0,   hi1 hi1
        // A tensor core drops bits below the last bit of the largest number in its sum, usually the accumulator. So the
        // small products come first, which helps in the first line after a restart, while the accumulator is small.
        // Loads come before the multiply_add that they overlap.
        for (; line < end; ++line) {
            const uint32_t stage_offset = line % kStages * kStageBytes;
            const uint32_t next_offset = (line + 1) % kStages * kStageBytes;
            load_a(0, stage_offset, 0);
            load_b(2, stage_offset, 2);
            multiply_add(acc, slot_a[2], slot_b[0]);
            load_a(2, stage_offset, 3);
            load_b(1, stage_offset, 1);
            multiply_add(acc, slot_a[0], slot_b[2]);
            load_a(1, stage_offset, 1);
            load_b(2, stage_offset, 3);
            multiply_add(acc, slot_a[2], slot_b[1]);
            multiply_add(acc, slot_a[1], slot_b[2]);
            // After the wait this thread's copies of line + 1 have arrived. After the barrier all threads' copies of
            // line + 1 have arrived. All warps have read this line, too, as the last two multiply_adds read registers
            // alone. So copies.start may overwrite its stage. (The last round's loads from next_offset get old numbers
            // or, with fewer than three lines, uninitialised ones. They are not used.)
            wait_copies<kStages - 2>();
            __syncthreads();
            copies.start(line + kStages);
            multiply_add(acc, slot_a[0], slot_b[0]);
            load_a(2, next_offset, 2);
            load_b(0, next_offset, 0);
            multiply_add(acc, slot_a[1], slot_b[1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 16; ++j)
                sum[i][j] = fmaf(acc[i / 2][j / 2][i % 2 * 2 + j % 2], inverse_scale_a[i], sum[i][j]);
        }
    } while (line < lines);
    epilogue(first_row + warp_row + lane / 4, first_column + warp_column + lane % 4 * 2, sum);
#endif
}
// Stores a thread's sums to C (m, n), leaving out what lies outside C.
__device__ __forceinline__ void store_values(
    float* c, int thread_row, int thread_column, int m, int n, const float (&values)[4][16]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = row_of(thread_row, i);
        float* const c_row = c + row * int64_t(n);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const int column = column_of(thread_column, j);
            const float first = values[i][j], second = values[i][j + 1];
            const bool stores_first = row < m && column < n, stores_second = row < m && column + 1 < n;
            if (stores_first && n % 2 == 0) *reinterpret_cast<float2*>(c_row + column) = make_float2(first, second);
            if (stores_first && n % 2 == 1) c_row[column] = first;
            if (stores_second && n % 2 == 1) c_row[column + 1] = second;
        }
    }
}
// Turns a thread's sums of x W^T into h = x W^T + b, in an epilogue, and recomputes sums below their limit: their two
// rows' thresholds added up, scaled as the sum is. All lanes of a warp must call to_h, as they recompute together.
struct LinearLayer {
    const float *x, *weight, *linear_bias;
    int m, n, k;
    const float *inverse_scale, *threshold;  // of x's m rows, then of W's n rows
    // The sums are already multiplied by inverse_scale of x's row, not yet by that of W's.
    __device__ __forceinline__ void to_h(int thread_row, int thread_column, float (&values)[4][16]) const {
        uint64_t to_recompute = 0;  // bit 16 i + j: values[i][j] is below its limit, or its limit is infinite
        float inverse_scale_x[4], threshold_x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = row_of(thread_row, i);
            inverse_scale_x[i] = row < m ? inverse_scale[row] : 1;
            threshold_x[i] = row < m ? threshold[row] : -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const int column = column_of(thread_column, j), row_w = min(column, n - 1);
            const float inverse_scale_w = inverse_scale[m + row_w], bias_w = linear_bias[row_w];
            const float threshold_w = column < n ? threshold[m + row_w] : -INFINITY;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float limit = (threshold_x[i] + threshold_w) * inverse_scale_x[i];
                if (fabsf(values[i][j]) < limit || limit == INFINITY) to_recompute |= uint64_t(1) << (16 * i + j);
                values[i][j] = fmaf(values[i][j], inverse_scale_w, bias_w);
            }
        }
        // The warp recomputes its lanes' sums one at a time: all 32 lanes compute one, and its owner keeps it. (The
        // loop over constant indices keeps `values` in registers.)
        while (const unsigned lanes = __ballot_sync(~0u, to_recompute != 0)) {
            const int owner = __ffs(lanes) - 1;
            const int index = __shfl_sync(~0u, __ffsll(to_recompute) - 1, owner);
            const int64_t row_x = row_of(__shfl_sync(~0u, thread_row, owner), index / 16);
            const int64_t row_w = __shfl_sync(~0u, column_of(thread_column, index % 16), owner);
            float sum = 0;
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < k; i += 32) sum = fmaf(x[row_x * k + i], weight[row_w * k + i], sum);
            sum = reduce(sum, 32, __fadd_rn) + linear_bias[row_w];
            if (threadIdx.x % 32 != owner) continue;
            to_recompute &= to_recompute - 1;  // clears the lowest bit
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                float& value = values[i / 16][i % 16];
                value = i == index ? sum : value;
            }
        }
    }
};

// ---- Launching the product ----
template <bool MN_MAJOR, class Epilogue> static int launch_multiply(const Operand& a, const Operand& b,
    const float* inverse_scale, int scale_stride, int columns, int64_t terms, const Epilogue& epilogue,
    cudaStream_t stream) {
    constexpr int kBytes = kStages * kStageBytes;
    const auto kernel = multiply<MN_MAJOR, Epilogue>;
    const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    const unsigned tiles = unsigned(divide_up(a.rows, kTileRows) * divide_up(columns, kTileColumns));
    // See Restarts. lines_per_restart divides kLinesPerScale, as the scale may change after these.
    const int lines = int(stride_of(terms, 2) / kLineHalves);
    const int lines_per_restart = terms < 1024 ? 1 : terms < 4096 ? 2 : 4;
    kernel<<<tiles, kMultiplyThreads, kBytes, stream>>>(
        a, b, inverse_scale, scale_stride, columns, lines, lines_per_restart, epilogue);
    return cudaGetLastError();
}
// Splits x (m, k) and W, `rows` rows in all. inverse_scales_thresholds (2, rows): their inverse_scale, then threshold.
template <int PIECES> static void launch_split(const float* x, const float* w, int64_t m, int64_t rows, int64_t k,
    __half* pieces, float* inverse_scales_thresholds, cudaStream_t stream) {
    int threads = 32;  // becomes the fewest that keep a whole row in registers, or 256
    while (threads < 256 && 2 * kThreadPairs * threads < k) threads *= 2;
    split_rows<PIECES><<<unsigned(rows), threads, 0, stream>>>(
        x, w, int(m), int(k), pieces, inverse_scales_thresholds, inverse_scales_thresholds + rows);
}

// ---- The gradients dX = G W and dW = G^T x, of G, the gradient of h. The same text in both linear_*.py here. ----
//
// A is G for dX, and G^T for dW. B is W, or x, split by split_rows and read MN-major. Each row of B has its own scale
// and gives every sum one term, so no one factor can undo the scales afterwards. So G is multiplied by those rows'
// inverse_scale before it is split: for dX column j by that of W's row j, for dW row i by that of x's row i. A row of B
// with small values is scaled up like any other: its inverse_scale makes G's column (or row) small instead.
//
// Each 128 values of a row of A have a scale of their own. That is possible because the accumulators restart after at
// most 128 of K. So a block can split a square of 128 x 128 values of G without knowing any others. No sum is
// recomputed, so B's thresholds are not used: a coarse value of A or B is off by at most 2^-25 when scaled. That is
// 2^-39 of the largest value that shares its scale, and 2^-20 of a value that is 2^19 times smaller. So where values of
// a row of B, or the inverse_scale of 128 neighbouring rows, differ by factors of 2^19 or more, as with a feature in
// seconds since 1970, or where G times an inverse_scale is below 2^-112, the gradients of the small ones are less
// accurate than SGEMM's.
//
//                      for dX                        for dW
//     row of A         a row of G, K = n             a column of G, K = m
//     B, split         W (n, k)                      x (m, k)
//     inverse_scale_a  [n / 128, rounded up][m]      [m / 128, rounded up][n]
constexpr int kSquareSide = 128;  // a block splits a square of G, of as many rows and columns
static_assert(kSquareSide == kLinesPerScale * kLineK, "a block knows all values that have one scale");
constexpr int kSquareStride = kSquareSide + 1;  // floats from row to row in shared memory: odd, against bank conflicts
constexpr int kSplitGradientThreads = 256;
// A block reads its square of G (m, n) to shared memory, with zeros outside G. Then every 16 lanes take one row of A
// after another: 128 values, of which a lane has two neighbours of every 32. They multiply the values by the
// inverse_scale_b of B's rows, find the largest, scale and split them, and write four lines of pieces and one
// inverse_scale_a.
__global__ void __launch_bounds__(kSplitGradientThreads)
    split_gradient(const float* __restrict__ g, int m, int n, bool wgrad, const float* __restrict__ inverse_scale_b,
        __half* __restrict__ pieces, float* __restrict__ inverse_scale_a) {
    extern __shared__ float square[];
    const int first_row = blockIdx.y * kSquareSide, first_column = blockIdx.x * kSquareSide;
#pragma unroll 8
    for (int i = threadIdx.x; i < kSquareSide * kSquareSide; i += kSplitGradientThreads) {
        const int row = first_row + i / kSquareSide, column = first_column + i % kSquareSide;
        square[i / kSquareSide * kSquareStride + i % kSquareSide] =
            row < m && column < n ? g[int64_t(row) * n + column] : 0;
    }
    __syncthreads();
    // The distances in shared memory from one row of A to the next, and along a row from one value to the next.
    const int row_stride = wgrad ? 1 : kSquareStride, k_stride = wgrad ? kSquareStride : 1;
    const int rows = wgrad ? n : m, terms = wgrad ? m : n, row_lane = threadIdx.x % 16;
    const int first_a_row = wgrad ? first_column : first_row, first_k = wgrad ? first_row : first_column;
    const int64_t stride = stride_of(terms, 2);
    for (int i = threadIdx.x / 16; i < kSquareSide; i += kSplitGradientThreads / 16) {
        const int row = first_a_row + i;
        float values[kSquareSide / 16], largest = 0;
#pragma unroll
        for (int j = 0; j < kSquareSide / 16; ++j) {
            const int k_in_square = j / 2 * 32 + row_lane * 2 + j % 2;
            const float factor = first_k + k_in_square < terms ? inverse_scale_b[first_k + k_in_square] : 0;
            values[j] = square[i * row_stride + k_in_square * k_stride] * factor;
            largest = fmaxf(largest, finite_magnitude(values[j]));
        }
        const int exponent = scale_exponent(reduce(largest, 16, fmaxf));
        const float scale = power_of_two(exponent);
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < kSquareSide / 16; j += 2) {
            const int k = first_k + j / 2 * 32 + row_lane * 2;
            if (2 * k < stride) store_pieces<2>(pieces + row * stride, k, values[j] * scale, values[j + 1] * scale);
        }
        if (row_lane == 0) inverse_scale_a[int64_t(first_k / kSquareSide) * rows + row] = power_of_two(-exponent);
    }
}
struct StoreProduct {  // the epilogue of the gradients: stores C as it is
    float* out;
    int m, n;
    __device__ __forceinline__ void operator()(int thread_row, int thread_column, float (&values)[4][16]) const {
        store_values(out, thread_row, thread_column, m, n, values);
    }
};
// Writes dX = G W or, if wgrad, dW = G^T x to `out`. w_or_x is W (n, k) or x (m, k). The four after `out` are scratch.
extern "C" int launch_gradient_product(bool wgrad, const float* g, const float* w_or_x, float* out, void* pieces_a,
    float* inverse_scale_a, void* pieces_b, float* inverse_scales_thresholds_b, int64_t m, int64_t n, int64_t k,
    cudaStream_t stream) {
    const int64_t rows = wgrad ? n : m, terms = wgrad ? m : n;  // A is (rows, terms), B (terms, k)
    __half *const halves_a = static_cast<__half*>(pieces_a), *const halves_b = static_cast<__half*>(pieces_b);
    launch_split<2>(w_or_x, nullptr, terms, terms, k, halves_b, inverse_scales_thresholds_b, stream);
    constexpr int kBytes = kSquareSide * kSquareStride * int(sizeof(float));
    const int error = cudaFuncSetAttribute(split_gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    const dim3 blocks(unsigned(divide_up(n, kSquareSide)), unsigned(divide_up(m, kSquareSide)));
    split_gradient<<<blocks, kSplitGradientThreads, kBytes, stream>>>(
        g, int(m), int(n), wgrad, inverse_scales_thresholds_b, halves_a, inverse_scale_a);
    const Operand a = {halves_a, int(rows), stride_of(terms, 2)}, b = {halves_b, int(terms), stride_of(k, 2)};
    const StoreProduct epilogue = {out, int(rows), int(k)};
    return launch_multiply<true>(a, b, inverse_scale_a, int(rows), int(k), terms, epilogue, stream);
}

// ---- The product's epilogue: stores h = x W^T + bias ----

struct StoreLinear {
    LinearLayer linear;
    float* h;
    __device__ __forceinline__ void operator()(int thread_row, int thread_column, float (&values)[4][16]) const {
        linear.to_h(thread_row, thread_column, values);
        store_values(h, thread_row, thread_column, linear.m, linear.n, values);
    }
};
extern "C" int launch_product(const float* x, const float* weight, const float* linear_bias, float* h, void* pieces,
    float* inverse_scales_thresholds, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    __half* const halves = static_cast<__half*>(pieces);
    launch_split<2>(x, weight, m, m + n, k, halves, inverse_scales_thresholds, stream);
    const int64_t stride = stride_of(k, 2);
    const Operand a = {halves, int(m), stride}, b = {halves + m * stride, int(n), stride};
    const LinearLayer linear = {
        x, weight, linear_bias, int(m), int(n), int(k), inverse_scales_thresholds, inverse_scales_thresholds + m + n};
    return launch_multiply<false>(a, b, inverse_scales_thresholds, 0, int(n), k, StoreLinear{linear, h}, stream);
}
"""

CPP_SOURCE = r"""
#line 1 "CPP_SOURCE in linear_instance_norm_residual.py"
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace {
// ---- The product in C++: the same text in both linear_*.py. ----

// dX = G W or, if wgrad, dW = G^T x, in float32. G is (m, n), and w_or_x is W (n, k) or, if wgrad, x (m, k).
at::Tensor gradient_product_meta(const at::Tensor& g, const at::Tensor& w_or_x, bool wgrad) {
    TORCH_CHECK(g.dim() == 2 && w_or_x.dim() == 2 && g.sym_size(wgrad ? 0 : 1) == w_or_x.sym_size(0),
        "g (m, n), and W (n, k) or x (m, k)");
    return at::empty_symint({g.sym_size(wgrad ? 1 : 0), w_or_x.sym_size(1)}, g.options());
}

#ifdef WITH_CUDA
extern "C" int launch_gradient_product(bool wgrad, const float* g, const float* w_or_x, float* out, void* pieces_a,
    float* inverse_scale_a, void* pieces_b, float* inverse_scales_thresholds_b, int64_t m, int64_t n, int64_t k,
    cudaStream_t stream);
at::Tensor aligned(const at::Tensor& t) {  // contiguous, and 16-byte aligned
    const at::Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
// Memory for the pieces of rows of k values, in whole lines, as stride_of in the kernels has them.
at::Tensor empty_pieces(int64_t rows, int64_t k, int pieces, const at::Tensor& like) {
    return at::empty({rows, (k * pieces + 63) / 64 * 64}, like.options().dtype(at::kHalf));
}
float* floats(const at::Tensor& t) { return t.data_ptr<float>(); }
cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream(); }
// Raises an error if a launch failed, and clears it: else the runtime would report it after the next launch, too.
void check_launch(int error) {
    if (error == 0) return;
    cudaGetLastError();
    TORCH_CHECK(false, "launch failed: ", cudaGetErrorString(cudaError_t(error)));
}
int kernel_dtype(const at::Tensor& t) {  // the number that with_dtype expects
    if (t.scalar_type() == at::kFloat) return 0;
    if (t.scalar_type() == at::kHalf) return 1;
    TORCH_CHECK(t.scalar_type() == at::kBFloat16, "float32, float16 or bfloat16");
    return 2;
}
// Checks what the product's kernels rely on. Python decides what they are given (_is_large).
void check_product(const at::Tensor& x, int64_t m, int64_t n, int64_t k) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && m > 0 && n > 0 && k > 0 && (m | n | k) >> 24 == 0,
        "float32 matrices of 1 to 2^24 - 1 rows and columns");
}
at::Tensor gradient_product_cuda(const at::Tensor& g, const at::Tensor& w_or_x, bool wgrad) {
    const c10::cuda::CUDAGuard guard(g.device());
    const at::Tensor out = gradient_product_meta(g, w_or_x, wgrad);
    const at::Tensor aligned_g = aligned(g), aligned_w_or_x = aligned(w_or_x);
    const int64_t m = g.size(0), n = g.size(1), k = w_or_x.size(1);
    check_product(g, m, n, k);
    const int64_t rows = out.size(0), terms = w_or_x.size(0);
    const at::Tensor pieces_a = empty_pieces(rows, terms, 2, g), pieces_b = empty_pieces(terms, k, 2, g);
    const at::Tensor inverse_scale_a = at::empty({(terms + 127) / 128, rows}, g.options());
    const at::Tensor inverse_scales_thresholds_b = at::empty({2, terms}, g.options());
    check_launch(launch_gradient_product(wgrad, floats(aligned_g), floats(aligned_w_or_x), floats(out),
        pieces_a.data_ptr(), floats(inverse_scale_a), pieces_b.data_ptr(), floats(inverse_scales_thresholds_b), m, n, k,
        current_stream()));
    return out;
}
#endif

// h = x weight^T + bias: x (m, k), weight (n, k), bias (n), in float32.
at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    const c10::SymInt m = x.sym_size(0), n = weight.sym_size(0);
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.sym_size(1) == weight.sym_size(1), "x (m, k), weight (n, k)");
    TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == n, "bias (n)");
    for (const at::Tensor& t : {weight, bias}) {
        TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.device() == x.device(), "one dtype and device");
    }
    return at::empty_symint({m, n}, x.options());
}
// The network's output from h, the linear layer's. h, y and the result are (m, n), of one dtype and device.
at::Tensor finish_meta(const at::Tensor& h, const at::Tensor& y, double) {
    TORCH_CHECK(h.dim() == 2 && y.dim() == 2 && h.sym_sizes() == y.sym_sizes(), "h and y (m, n)");
    TORCH_CHECK(h.scalar_type() == y.scalar_type() && h.device() == y.device(), "one dtype and device");
    return at::empty_symint(h.sym_sizes(), h.options());
}
// The gradients of h and y. y's is a tensor without elements if it is not wanted.
std::tuple<at::Tensor, at::Tensor> finish_backward_meta(
    const at::Tensor& grad, const at::Tensor& h, const at::Tensor& y, double eps, double, bool needs_grad_y) {
    TORCH_CHECK(grad.scalar_type() == h.scalar_type() && grad.sym_sizes() == h.sym_sizes(), "grad (m, n)");
    return {finish_meta(h, y, eps),
        needs_grad_y ? at::empty_symint(h.sym_sizes(), h.options()) : at::empty({0}, h.options())};
}

// n values as float32: themselves, or converted to `buffer`.
const float* as_floats(const float* values, int64_t, float*) { return values; }
template <typename T> const float* as_floats(const T* values, int64_t n, float* buffer) {
    at::vec::convert(values, buffer, n);
    return buffer;
}
// The network's output from h on a CPU, all three dense and of type T. Statistics are added up in double.
template <typename T>
void finish_rows_cpu(const at::Tensor& h, const at::Tensor& y, const at::Tensor& out, double eps) {
    const int64_t n = h.size(1);
    // The grain is some 16384 values of h, so that a small h stays with one thread. That is half of ATen's usual 32768,
    // as a value takes more work.
    at::parallel_for(0, n > 0 ? h.size(0) : 0, std::max<int64_t>(1, 16384 / (n + 1)), [&](int64_t begin, int64_t end) {
        constexpr bool kConverts = !std::is_same_v<T, float>;
        std::vector<float> buffer(kConverts ? 2 * n : 0);  // a row of h, then of the output; a row of y
        for (int64_t row = begin; row < end; ++row) {
            const float* h_row = as_floats(h.const_data_ptr<T>() + row * n, n, buffer.data());
            const float* y_row = as_floats(y.const_data_ptr<T>() + row * n, n, buffer.data() + n);
            T* const out_row = out.mutable_data_ptr<T>() + row * n;
            double sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; ++i) sum += h_row[i];
            const double mean = sum / n;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n; ++i) squares += (h_row[i] - mean) * (h_row[i] - mean);
            const float mean_hi = float(mean), mean_lo = float(mean - mean_hi);
            const float rstd = float(1 / std::sqrt(squares / n + eps));
            float* result = buffer.data();
            if constexpr (!kConverts) result = out_row;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) result[i] = ((h_row[i] - mean_hi - mean_lo) * rstd + y_row[i]) * y_row[i];
            if (kConverts) at::vec::convert(result, out_row, n);
        }
    });
}
at::Tensor finish_cpu(const at::Tensor& h, const at::Tensor& y, double eps) {
    const at::Tensor out = finish_meta(h, y, eps), dense_h = h.contiguous(), dense_y = y.contiguous();
    if (h.scalar_type() == at::kFloat) finish_rows_cpu<float>(dense_h, dense_y, out, eps);
    else if (h.scalar_type() == at::kHalf) finish_rows_cpu<at::Half>(dense_h, dense_y, out, eps);
    else finish_rows_cpu<at::BFloat16>(dense_h, dense_y, out, eps);
    return out;
}

#ifdef WITH_CUDA
extern "C" int launch_product(const float* x, const float* weight, const float* linear_bias, float* h, void* pieces,
    float* inverse_scales_thresholds, int64_t m, int64_t n, int64_t k, cudaStream_t stream);
extern "C" int launch_rows(int dtype, const void* h, const void* y, const void* grad, void* out_or_g, void* grad_y,
    int64_t m, int64_t n, float eps, float truncation, cudaStream_t stream);

at::Tensor linear_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor h = linear_meta(x, weight, bias);
    const at::Tensor aligned_x = aligned(x), aligned_weight = aligned(weight), aligned_bias = aligned(bias);
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    check_product(x, m, n, k);
    const at::Tensor pieces = empty_pieces(m + n, k, 2, x);
    const at::Tensor inverse_scales_thresholds = at::empty({2, m + n}, x.options());
    check_launch(launch_product(floats(aligned_x), floats(aligned_weight), floats(aligned_bias), floats(h),
        pieces.data_ptr(), floats(inverse_scales_thresholds), m, n, k, current_stream()));
    return h;
}
at::Tensor finish_cuda(const at::Tensor& h, const at::Tensor& y, double eps) {
    const c10::cuda::CUDAGuard guard(h.device());
    const at::Tensor out = finish_meta(h, y, eps), aligned_h = aligned(h), aligned_y = aligned(y);
    const int64_t m = h.size(0), n = h.size(1);
    TORCH_CHECK(n % 8 == 0, "rows of a multiple of 8 features");
    if (h.numel() == 0) return out;
    check_launch(launch_rows(kernel_dtype(h), aligned_h.data_ptr(), aligned_y.data_ptr(), nullptr, out.data_ptr(),
        nullptr, m, n, float(eps), 0, current_stream()));
    return out;
}
std::tuple<at::Tensor, at::Tensor> finish_backward_cuda(const at::Tensor& grad, const at::Tensor& h,
    const at::Tensor& y, double eps, double truncation, bool needs_grad_y) {
    const c10::cuda::CUDAGuard guard(h.device());
    auto [g, grad_y] = finish_backward_meta(grad, h, y, eps, truncation, needs_grad_y);
    const at::Tensor aligned_grad = aligned(grad), aligned_h = aligned(h), aligned_y = aligned(y);
    const int64_t m = h.size(0), n = h.size(1);
    TORCH_CHECK(m > 0 && n > 0 && n % 8 == 0, "rows of a multiple of 8 features");
    check_launch(
        launch_rows(kernel_dtype(h), aligned_h.data_ptr(), aligned_y.data_ptr(), aligned_grad.data_ptr(), g.data_ptr(),
            needs_grad_y ? grad_y.data_ptr() : nullptr, m, n, float(eps), float(truncation), current_stream()));
    return {g, grad_y};
}
#endif

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor bias) -> Tensor");
    m.def("gradient_product(Tensor g, Tensor w_or_x, bool wgrad) -> Tensor");
    m.def("finish(Tensor h, Tensor y, float eps) -> Tensor");
    m.def("finish_backward(Tensor grad, Tensor h, Tensor y, float eps, float truncation, bool needs_grad_y)"
          " -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("finish", finish_cpu); }
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", linear_meta);
    m.impl("gradient_product", gradient_product_meta);
    m.impl("finish", finish_meta);
    m.impl("finish_backward", finish_backward_meta);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", linear_cuda);
    m.impl("gradient_product", gradient_product_cuda);
    m.impl("finish", finish_cuda);
    m.impl("finish_backward", finish_backward_cuda);
}
#endif
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"forward", "gradient_product", "finish", "finish_backward"}) {
        m.impl(name, torch::autograd::autogradNotImplementedFallback());
    }
}
"""


def _is_whole(library: pathlib.Path) -> bool:
    """Whether the library is what its build left: the build's last act is to write the library's digest beside it."""
    digest = library.with_suffix(".sha256")
    if not (os.access(library, os.R_OK) and os.access(digest, os.R_OK)):
        return False
    return digest.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()


def _load(name: str, arch: str = "") -> str:
    """Compile CPP_SOURCE and, where there is a GPU, CUDA_SOURCE; return the namespace of their operators in torch.ops.

    GPU code is compiled for `arch` ("90a", say), else for what TORCH_CUDA_ARCH_LIST names, else for the GPUs present.
    The name ends in a hash of sources, targets, flags and torch's version. So a whole library of that name is loaded
    without a build, and edited copies do not collide. If a tool is missing, the RuntimeError says what to do.
    """
    gpus = range(torch.cuda.device_count() if torch.version.cuda else 0)
    cpp_flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", *["-DWITH_CUDA"] * bool(gpus)]
    simd = torch.backends.cpu.get_cpu_capability()
    if march := {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}.get(simd):  # the two defines are for at::vec, where used
        cpp_flags += [f"-march={march}", f"-DCPU_CAPABILITY={simd}", f"-DCPU_CAPABILITY_{simd}"]
    cuda_flags = ["-O3", "--split-compile=0", *[f"-gencode=arch=compute_{arch},code=sm_{arch}"] * bool(arch)]
    present = sorted({torch.cuda.get_device_capability(gpu) for gpu in gpus})
    targets = os.environ.get("TORCH_CUDA_ARCH_LIST") or present
    if targets is present and not arch and min(present, default=(7, 5)) < (7, 5):
        raise RuntimeError(f"{name} needs GPUs of compute capability 7.5 or more: hide others by CUDA_VISIBLE_DEVICES")
    key = repr((CPP_SOURCE, CUDA_SOURCE, cpp_flags, cuda_flags, targets, torch.__version__))
    name = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if hasattr(getattr(torch.ops, name), "forward"):
        return name  # a reload, or a second copy of this file
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    folder = pathlib.Path(cache).expanduser() / name
    library = folder / f"{name}.so"
    if _is_whole(library):  # also where the cache is read-only, and where no compiler is installed
        torch.ops.load_library(library)
        return name
    if not os.environ.get("CXX", "c++").strip():  # set, but empty: PyTorch would run a command without a name
        del os.environ["CXX"]
    if not shutil.which("ninja"):  # pip puts it beside python, which is not on PATH if the environment is not activated
        os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + os.path.dirname(sys.executable)
    needs = {"ninja": "pip install ninja", os.environ.get("CXX", "c++").split()[0]: "install g++, or set CXX"}
    if gpus:
        needs[f"{cpp_extension.CUDA_HOME or 'CUDA_HOME'}/bin/nvcc"] = "install the CUDA toolkit, and set CUDA_HOME"
    for tool in filter(lambda tool: not shutil.which(tool), needs):
        raise RuntimeError(f"building {name} needs {tool}, which is not there: {needs[tool]}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise RuntimeError(f"{folder} cannot be written: set TORCH_EXTENSIONS_DIR to a folder that can be")
    with open(folder / "build.lock", "w") as lock:
        # One process builds at a time. This lock ends with its process; PyTorch's own file, `lock`, outlives a build
        # that was killed (pytorch#189245). Where flock raises OSError, only PyTorch's lock is used.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
        if _is_whole(library):  # another process built it while this one waited
            torch.ops.load_library(library)
            return name
        library.unlink(missing_ok=True)  # an interrupted build or a full disk left it incomplete
        # PyTorch builds a name once in a process: make it forget an attempt that failed.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
        cpp_extension.load_inline(
            name,
            CPP_SOURCE.replace("NAMESPACE", name),
            CUDA_SOURCE if gpus else None,
            extra_cflags=cpp_flags,
            extra_cuda_cflags=cuda_flags,
            build_directory=str(folder),
            is_python_module=False,
            no_implicit_headers=True,
        )
        library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    return name


_RUN = "forward _conv_forward _check_input_dim _get_no_batch_dim _handle_no_batch_input _apply_instance_norm".split()
_METHODS = {  # PyTorch's own methods that calling these layers runs. The same text in all kernel files
    kind: [(name, getattr(kind, name)) for name in _RUN if hasattr(kind, name)]
    for kind in (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.InstanceNorm2d)
}


def _is_unchanged(module: nn.Module, kind: type) -> bool:
    """Whether calling the module runs PyTorch's own methods of `kind` alone: no hooks, no tracing, no patches."""
    if type(module) is not kind:
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or nn.modules.module._has_any_global_hook() or torch.jit.is_tracing():
        return False
    for name, function in _METHODS[kind]:
        method = getattr(module, name)
        if not isinstance(method, types.MethodType) or method.__func__ is not function:
            return False
    return True


def _exports_layers() -> bool:
    """Whether torch.export runs for ONNX, or with grad mode on: such programs have PyTorch's operators alone."""
    return torch.compiler.is_exporting() and (torch.is_grad_enabled() or torch.onnx.is_in_onnx_export())


_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)  # FakeTensor: as in torch.export with strict=False
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _are_plain_tensors(x: torch.Tensor, *rest: torch.Tensor) -> bool:
    """Whether these are ordinary tensors of one device and dtype, with no autocast, transform or _exports_layers."""
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or _exports_layers():
        return False
    if type(x) not in _TYPES or x.dtype not in _DTYPES or not (x.is_cpu or x.is_cuda and torch.version.cuda):
        return False
    device, dtype = x.device, x.dtype
    for t in (x, *rest):  # a loop, as all() takes the host a microsecond more
        if type(t) not in _TYPES or t.layout is not torch.strided or t.dtype is not dtype or t.device != device:
            return False
    return True


def _is_exporting() -> bool:  # PyTorch 2.11 and older trace torch.compiler.is_exporting as True wherever they compile
    return torch.compiler.is_exporting()


def _is_recorded(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return allowed and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"  # which cuBLAS obeys


# What torch.compiler.assume_constant_result sets, without an import of torch._dynamo. If one of PyTorch's settings
# changes, it compiles anew.
_allows_tf32._dynamo_marked_constant = _is_exporting._dynamo_marked_constant = True
_exports_layers._dynamo_marked_constant = True

NAMESPACE = _load("linear_instance_norm_residual")
_operators = getattr(torch.ops, NAMESPACE)
# The types that a CPU computes in float32, as it has no instructions for them (bfloat16 only with AVX). From 32 rows on
# bfloat16 layers are 2 to 4 times as fast then, float16 layers 2 to 9 times, the conversions included.
_CPU_UPCASTS = set()
if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_fp16_supported():
    _CPU_UPCASTS.add(torch.float16)
if not torch.cpu._is_avx512_bf16_supported() and "AVX" in torch.backends.cpu.get_cpu_capability():
    _CPU_UPCASTS.add(torch.bfloat16)
# The GPUs on which three fp16 products on tensor cores, with float32 sums, are faster than SGEMM's float32 product:
# compute capability 8.0, 9.0, 10.0 and 10.3. There an fp16 product by mma.sync is 16 (8.0) or 7 times as fast as SGEMM.
# It is 2 to 4 times as fast on 8.6, 8.7, 8.9 and 12.x, which are left out, as is 7.5, for lack of cp.async.
_GPUS = range(torch.cuda.device_count() if torch.version.cuda else 0)
_SPLIT_GPUS = {gpu for gpu in _GPUS if torch.cuda.get_device_capability(gpu) in [(8, 0), (9, 0), (10, 0), (10, 3)]}


def _is_layer(linear: nn.Module, x: torch.Tensor) -> bool:
    """Whether linear(x) is x W^T + bias of ordinary matrices."""
    if not isinstance(x, torch.Tensor) or not _is_unchanged(linear, nn.Linear) or x.dim() != 2:
        return False
    weight, bias = linear.weight, linear.bias
    return _are_plain_tensors(x, weight, bias) and weight.shape == (*bias.shape, x.shape[1])


_MAX_SIZE = 65535 * 128  # a grid has at most 65535 blocks in y, and these have 128 rows or features each


def _is_large(m: int, n: int, k: int) -> bool:
    """Whether a product (m, k) by (k, n) is so large that the split saves time. m n = 2^20 sums are 128 tiles, about
    one for each SM. For 2^30 multiplications SGEMM takes some 40 us on an H100, several times what our launches take.
    If m, n or k is small, the split takes longer than the product saves. For larger sizes than _MAX_SIZE a launch of
    split_gradient would have more blocks than a grid may have."""
    is_true = bool
    if _is_exporting():  # m may stand for a range: to ask whether it is large enough would narrow that range
        from torch.fx.experimental.symbolic_shapes import statically_known_true as is_true
    in_range = all(is_true(size >= 128) and is_true(size <= _MAX_SIZE) for size in (m, n, k))
    return in_range and is_true(m * n >= 2**20) and is_true(m * n * k >= 2**30)


def _is_large_layer(linear: nn.Module, x: torch.Tensor) -> bool:
    """Whether the layer is a large float32 product on a GPU. The cheap tests come first, so that a small layer is
    launched soon."""
    if not isinstance(x, torch.Tensor) or not x.is_cuda or x.dtype is not torch.float32 or x.dim() != 2:
        return False
    weight = linear.weight if _is_unchanged(linear, nn.Linear) else None
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    return _is_large(x.shape[0], *weight.shape) and _is_layer(linear, x)


def _gradient_product(g: torch.Tensor, w_or_x: torch.Tensor, wgrad: bool, by_pieces: bool = True) -> torch.Tensor:
    """dX = G W or, if wgrad, dW = G^T x, where G is the gradient of h."""
    (m, n), k = g.shape, w_or_x.shape[1]
    large = _is_large(n, k, m) if wgrad else _is_large(m, k, n)
    if large and by_pieces and not torch.is_grad_enabled():  # else by what PyTorch can differentiate
        return _operators.gradient_product(g, w_or_x, wgrad)
    return g.t().mm(w_or_x) if wgrad else g.mm(w_or_x)


def _in_float32(linear: nn.Module, x: torch.Tensor) -> bool:
    """Whether 16-bit inputs are computed in float32, and only the output is rounded.

    On a CPU from 32 rows on, as with fewer that is no faster. An exported program does so for any number of rows, as a
    condition on that number would restrict it. On a GPU if the product is small and dX or the bias's gradient has fewer
    than 64 values. Each value is a long sum whose terms cancel (each row of G is orthogonal to that of h). Errors of
    rounding do not average out over so few values: for one row in float16, the error of dX was 70 times eager's. For
    2^22 multiplications the conversions take a few microseconds.
    """
    if not isinstance(x, torch.Tensor) or x.dtype is torch.float32 or x.dim() != 2 or type(linear) is not nn.Linear:
        return False
    (m, k), n = x.shape, linear.out_features
    if x.is_cpu:
        pays = x.dtype in _CPU_UPCASTS and (_is_exporting() or m >= 32)
    else:
        pays = (m * k < 64 or n < 64) and m * n * k <= 2**22
    return pays and _is_layer(linear, x)  # this test takes the most time, so it comes last


def _is_bare(norm: nn.Module) -> bool:
    """Whether the norm is as the Model makes it: without parameters, statistics, hooks or patches."""
    if not _is_unchanged(norm, nn.InstanceNorm2d):
        return False
    # Not norm.weight and so on: nn.Module's own look-up takes 0.5 us more for each.
    p, b = norm._parameters, norm._buffers
    bare = p.get("weight", 0) is p.get("bias", 0) is b.get("running_mean", 0) is b.get("running_var", 0) is None
    return bare and not norm.track_running_stats and norm.eps >= 2**-126  # float32's smallest normal number


def _finish_plainly(norm: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What follows the linear layer, in the Model's lines.

    A bare norm is called as a function: the module warns of its input's shape, which would break torch.compile's
    graph. On a CPU PyTorch 2.13's instance norm reads a transposed gradient as if it were contiguous: a hook copies it.
    """
    if isinstance(h, torch.Tensor) and _is_bare(norm) and h.dim() == 2 and h.shape[1] >= 2:
        h = nn.functional.instance_norm(h.unsqueeze(1).unsqueeze(1), eps=norm.eps).squeeze(1).squeeze(1)
        if h.is_cpu and h.requires_grad and not torch.compiler.is_compiling():
            h.register_hook(lambda grad: None if grad is None else grad.contiguous())  # None: there is no gradient
    else:
        h = norm(h.unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
    h = h + y  # rebinds h, so the old tensor is freed
    return h * y


def _is_supported(norm: nn.Module, h: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the operators may replace the Model's lines from h on."""
    if h.dim() != 2 or h.shape[1] % 8 != 0 or h.shape[1] >= 2**31:
        return False
    if h.is_cpu and h.shape[1] in (8, 16):  # PyTorch is faster there
        return False
    return _is_bare(norm) and _are_plain_tensors(h, y) and h.shape == y.shape


def _finish(
    norm: nn.Module, h: torch.Tensor, y: torch.Tensor, truncation: float = 0, upcast: bool = False
) -> torch.Tensor:
    """What follows the linear layer. `upcast`: h and y are float32, but have 16 bits in the Model.

    If so, PyTorch's norm gets each row minus its first value. The mean of equal float32 values may differ from them by
    a rounding error, which rstd makes large if the values are. Of equal 16-bit values PyTorch has the exact mean.
    """
    if isinstance(h, torch.Tensor) and _is_supported(norm, h, y):
        if not _is_recorded(h, y):
            return _operators.finish(h, y, norm.eps)
        if h.is_cuda and h.numel() > 0:
            return RowNormResidual.apply(h, y, norm.eps, truncation)
    return _finish_plainly(norm, h - h[:, :1].detach() if upcast else h, y)


def _truncation_of(k: int) -> float:
    """By what fraction |h|, and so 1 / rstd, is too small on average, because tensor cores truncate.

    It grows with the part of K after which the accumulators restart: 32, from K = 1024 on 64, and from 4096 on 128
    (launch_multiply). For these it was measured, at K from 128 to 20000, to be 0.33, 1.13 and 2.9 times 2^-23. In z the
    errors of h and of rstd cancel. But without a correction all of h's gradients would be too large.
    """
    return (0.33 if k < 1024 else 1.13 if k < 4096 else 2.9) * 2**-23


class LinearByPieces(torch.autograd.Function):
    """x W^T + bias as three fp16 products. For second derivatives the gradients are PyTorch's products."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _operators.forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), (needs_dx, needs_dw, needs_db) = ctx.saved_tensors, ctx.needs_input_grad
        # The bias's gradient is summed in float64: h is so accurate that the rounding of a float32 sum would be
        # visible. That takes memory for float64 values, so it comes first. W's gradient, the largest, comes last.
        db = grad.sum(0, dtype=torch.float64).to(grad.dtype) if needs_db else None
        dx = _gradient_product(grad, weight, False) if needs_dx else None
        dw = _gradient_product(grad, x, True) if needs_dw else None
        return dx, dw, db


class RowNormResidual(torch.autograd.Function):
    """What follows the linear layer, on a GPU. For second derivatives PyTorch differentiates the Model's lines."""

    @staticmethod
    def forward(ctx, h, y, eps, truncation):
        ctx.save_for_backward(h, y)
        ctx.eps, ctx.truncation = eps, truncation
        return _operators.finish(h, y, eps)

    @staticmethod
    def backward(ctx, grad):
        (h, y), needs, eps = ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.eps
        if torch.is_grad_enabled():  # the gradients will be differentiated
            # Views, so that each counts as independent even if one was computed from the other.
            h, y = h.view_as(h), y.view_as(y)
            out = _finish_plainly(nn.InstanceNorm2d(1, eps=eps), h, y)
            wanted = [t for t, need in zip((h, y), needs) if need]
            wanted_gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            gradients = [next(wanted_gradients) if need else None for need in needs]
        else:
            gradients = _operators.finish_backward(grad, h, y, eps, ctx.truncation, needs[1])
        return *(g if need else None for g, need in zip(gradients, needs)), None, None


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features), y (B, out_features) or broadcastable to it. The Model's own errors for other shapes.
    """

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.bmm = nn.Linear(in_features, out_features)
        self.instance_norm = nn.InstanceNorm2d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting():
            return self._run(x, y)
        h = self.bmm(x)  # torch.jit.script compiles these, the Model's lines, alone
        h = self.instance_norm(h.unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
        h = h + y
        return h * y

    def _run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        linear, norm = self.bmm, self.instance_norm
        if _is_large_layer(linear, x) and x.device.index in _SPLIT_GPUS and not _allows_tf32():
            tensors = x, linear.weight, linear.bias
            h = LinearByPieces.apply(*tensors) if _is_recorded(*tensors) else _operators.forward(*tensors)
            return _finish(norm, h, y, _truncation_of(x.shape[1]))
        if _in_float32(linear, x) and _is_bare(norm) and _are_plain_tensors(x, y):
            h = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float())
            return _finish(norm, h, y.float(), upcast=True).to(x.dtype)
        return _finish(norm, linear(x), y)
