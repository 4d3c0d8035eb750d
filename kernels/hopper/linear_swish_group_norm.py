# SPDX-License-Identifier: MIT
"""A linear layer, then Swish, one more bias and group normalisation, fused: a drop-in for the Model of the same name.

    h = x W^T + b;    v = sigmoid(h) * h + bias;    out = (v - mean) * rstd * gamma + beta

`mean` and `rstd` are over the features of one group of one row: rstd = 1 / sqrt(mean((v - mean)^2) + eps).

This file is for Hopper GPUs (sm_90). It builds nothing elsewhere: there ModelNew runs the Model's own layers. For other
GPUs and for CPUs there is a portable file of the same name, one folder up.

There are two paths, and ModelNew._run chooses one. The fast path is the operator below. Its tensors are plain ones, of
float32, float16 or bfloat16. x has two dimensions, `bias` has one. Groups have 64 features, and with gradients there
are at most 8192 features. The product has 2^30 multiplications or more, 1 MiB of output or more, sizes from 128 to 2^24
- 1, and rows of whole 16 bytes (`_is_large`, `_product_fits`). It runs on the 16-bit tensor cores: for float32 as three
fp16 products, with float32's accuracy, or as one where TF32 is allowed. Its epilogue does the rest of the forward. The
plain path, the Model's own layers, takes all else, with hooks, autocast and transforms. Read the table of roles first,
then Thresholds, then `sum_products`.

At the benchmark shape, m = 32768, k = 1024, n = 4096, the product is 275 GFLOP. For float32 it is done three times in
fp16: 1.1 ms at 750 TFLOP/s, about cuBLAS's rate in fp16. Before it, split_rows reads 0.15 GB of x and W and writes 0.15
GB of pieces. `python harness.py hopper/linear_swish_group_norm --backward`, H200: 1.23 ms, 6.7x eager; with backward
4.30 ms, 5.4x; where TF32 is allowed (`--precision high`) 0.597 and 2.08 ms, 5.8x and 4.5x; in bfloat16 (`--dtype
bfloat16`) 0.427 and 1.38 ms, 6.5x and 5.1x. (With `--profile FOLDER` the harness lists the kernels by time.)
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

CUDA_SOURCE = r"""
#line 1 "CUDA_SOURCE in linear_swish_group_norm.py"
#undef __CUDA_NO_HALF_CONVERSIONS__  // PyTorch defines both; without them float(v) and T(v) convert all three types
#undef __CUDA_NO_BFLOAT16_CONVERSIONS__
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <type_traits>

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(bar)) : "memory");
}
// Arrives, and lets the phase end only when asynchronous copies have written `bytes` bytes, too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :
        : "r"(shared_address(bar)), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}"
        :
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
}
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
template <int N> __device__ __forceinline__ void raise_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}
template <int N> __device__ __forceinline__ void lower_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}
// Call wgmma_fence before a warpgroup's first wgmma, and again after other code has written its accumulators. (One call
// more does no harm.) wgmma_commit ends a group of wgmmas. wgmma_wait waits until at most the newest IN_FLIGHT groups
// are unfinished.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int IN_FLIGHT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(IN_FLIGHT) : "memory");
}
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T value[V]; };

// ---- The product x W^T on the 16-bit tensor cores. The same text in both linear files of this folder. ----
//
// K is the dimension that a product sums over, or its length: here the k columns of x (m, k) and W (n, k). "32 of K"
// are 32 indices. There are two ways to multiply float32 and one for 16-bit types. The parameter `Scheme` names one:
//
// ThreeProducts: float32, with errors below those of cuBLAS's float32 product. split_rows multiplies each row of x and
// of W by its scale, the power of two that brings its largest value to [2^14, 2^15). (fp16 rounds values of 65520 and
// more to infinity.) Then it stores each scaled value v as two fp16 numbers, its pieces: hi is v rounded to fp16 and lo
// is v - hi rounded to fp16. For v in [1, 2), say, |lo| <= 2^-11, and fp16 numbers below that are at most 2^-22 apart.
// So |lo| <= 2^-11 |v|, and hi + lo differs from v by at most 2^-23 |v| (small v: Thresholds). Of the four products in
//
//     v v' = hi hi' + hi lo' + lo hi' + lo lo'    (but for the rounding of lo and lo')
//
// the tensor cores compute the first three. The sum is then multiplied by the inverse scales of both rows. The last
// term is at most 2^-22 of v v', and the rounding of lo and lo' costs 2^-23 each. Together the error of one product v
// v' is at most 2^-21 of it; for random values its root mean square is 2^-23.7. The signs are random, so in a sum of K
// products the errors partly cancel. Summing in float32 may lose more: up to 2^-24 of the sum so far at each addition.
//
// The tensor cores do not round their sums, they truncate them, and what an addition loses grows with the accumulator.
// So for each 64 of K a consumer starts its accumulators at zero, adds hi lo' and lo hi' first, while the accumulators
// are small, then hi hi'. Then it adds the accumulators to other registers by float32 additions, which round (Ootomo
// and Yokota, arXiv 2203.03341). One error remains: on average the magnitude of a sum is too small by 0.75 * 2^-23 of
// itself (measured for K from 128 to 20000). (linear_instance_norm_residual makes up for it, by kTruncated.)
//
// OneProduct<__half, float>: float32 where TF32 is allowed, hi hi' alone. fp16 has TF32's 11 bits at twice its rate,
// and the scales of the rows make up for its shorter exponent. The tensor cores add up all of K, as in cuBLAS's TF32.
// OneProduct<T, T>: 16-bit T, in linear_swish_group_norm alone. TMA reads the operands as they are; no scales.
//
// The pieces of a row are stored in slices of 64 numbers, 128 bytes: hi and lo (or hi alone) of kSliceK values.
//
//     ThreeProducts, 32 of K:   | hi of k 0 to 31 | lo of k 0 to 31 |        OneProduct, 64 of K:   | hi of k 0 to 63 |
//
// A tile is kTileRows x kTileColumns of the output. `multiply` runs at most one block on each multiprocessor. Block i
// computes tiles i, i + gridDim.x, i + 2 gridDim.x and so on. In its shared memory, stage s holds one slice of each row
// of x and of W that the tile needs. Slot t holds 64 x 64 sums over all of K, still scaled. The signals are mbarriers:
//
//     warpgroup   role        waits for       does                                                      signals
//     3           producer    stage_empty[s]  one thread copies a slice of each row to stage s by TMA   stage_full[s]
//     0 and 1     consumers   stage_full[s]   each multiplies its half of the tile's rows of x          stage_empty[s]
//                                             by all its rows of W
//                             slot_empty[t]   each stores its sums, 64 x 64 at a time, to slot t        slot_full[t]
//     2           finisher    slot_full[t]    loads the sums of slot t to registers                     slot_empty[t]
//                                             multiplies them by the inverse scales, stores the epilogue's output
//
//     time ->      tile i                             tile i + gridDim.x
//     producer     loads | loads | loads | ...        loads | loads | ...     up to kStages ahead of the consumers
//     consumers    multiply .............. | to slots | multiply ............
//     finisher     epilogue of the tile before        | epilogue of tile i, slot by slot
//
// So the epilogue of a tile runs while the next tile is multiplied. The stages are one ring, the slots another.
// Consumers 0 and 1 fill slots in turns, the finisher empties them in the same order. A tile fills the next four slots
// or, with OneProduct, eight. (OneProduct<__half, float> has five slots: the last three of a tile wait until the
// finisher empties some.)
//
//     slots of the tile, in order     0     1     2      3        4       5       6       7        (4 to 7: OneProduct)
//     filled by consumer              0     1     0      1        0       1       0       1
//     rows of that consumer's half    0-63  0-63  0-63   0-63     64-127  64-127  64-127  64-127
//     columns of the tile             0-63  0-63  64-127 64-127   0-63    0-63    64-127  64-127
//
// Thresholds. fp16 has 11 significant bits from 2^-14 on. Below, it has multiples of 2^-24: rounding errs by <= 2^-25.
//   - The pieces of a scaled value err by at most 2^-23 of it (hi alone: 2^-11 of it) or by 2^-25, whichever is more.
//     2^-25 is more if the value is below 2^-2 (hi alone: 2^-14). Such values, unless they are 0, are called coarse.
//   - A coarse value is multiplied by a value below 2^15, so its rounding changes the sum by less than 2^-25 * 2^15 =
//     2^-10. If two rows have c coarse values in total, their sum changes by less than c * 2^-10.
//   - A sum is allowed an error of 2^-24 of itself, as in float32 (hi alone: 2^-11, as in TF32). If |sum| is at least c
//     * 2^14 (hi alone: c * 2), this allowed error is at least c * 2^-10, so the coarse values do no harm.
//   - So split_rows counts each row's coarse values and stores 2^14 (or 2) times that number as the row's threshold. If
//     |sum| is below both rows' thresholds added up, the finisher recomputes it in float32, from x and W. With normally
//     distributed operands these are some three of 10^6 sums at K = 8192, and fewer at smaller K. (An estimate: there
//     the density of scaled sums is 0.4 / 2^31.5 at 0, and a row has 0.3 coarse values: 2 * 0.4 / 2^31.5 * 0.6 * 2^14.)
// With ThreeProducts an infinity becomes NaN, because its lo is inf - inf.

constexpr int kTileColumns = 128;
constexpr int kSliceNumbers = 64;  // 128 bytes: the widest swizzle of TMA and wgmma
// A band is 2048 rows of the output. The blocks take its tiles column by column, then the next band's. So in the
// forward the band's rows of x stay in L2: with ThreeProducts and K = 1024 their pieces take 8 MB.
constexpr int kBandRows = 2048;
constexpr int kMultiplyThreads = 512;  // four warpgroups
struct ThreeProducts {
    using Number = __half;
    using SlotValue = float;
    static constexpr int kPieces = 2;  // numbers that stand for a value
    static constexpr int kSliceK = kSliceNumbers / kPieces;  // values in a slice
    static constexpr int kTileRows = 128;  // of operand a: in the forward x
    // A stage has 32 KiB: a slice of 128 rows of each operand. The loop over the stages is unrolled, which saves 1 to
    // 4% of the time. So a tile takes a multiple of four slices of each row. TMA fills slices beyond the end of K with
    // zeros.
    static constexpr int kStages = 4;
    static constexpr int kSlots = 4;  // of 16 KiB
    static constexpr float kCoarseBelow = 0x1p-2f;  // see Thresholds
    static constexpr float kThresholdPerCoarse = 0x1p14f;  // what a coarse value adds to its row's threshold
    static constexpr int kConsumerRegisters = 168, kFinisherRegisters = 152, kProducerRegisters = 24;  // of a thread
};
template <typename T, typename S> struct OneProduct {
    using Number = T;
    // The type of the sums in a slot. Sums that are stored in 16 bits start at the linear bias: so it is added before
    // they are rounded. (If it were added later and cancelled most of a sum, the error of the sum's rounding would
    // remain.) All later steps are in float32, where eager rounds after each.
    using SlotValue = S;
    static constexpr int kPieces = 1;
    static constexpr int kSliceK = kSliceNumbers;
    static constexpr int kTileRows = 256;  // with 128 the loads through L2 would take longer than the products
    static constexpr int kStages = 3;  // of 48 KiB
    static constexpr int kSlots = sizeof(S) == 4 ? 5 : 10;  // 80 KiB in all. A tile fills 8
    static constexpr float kCoarseBelow = 0x1p-14f;
    static constexpr float kThresholdPerCoarse = 0x1p1f;
    static constexpr int kConsumerRegisters = 160, kFinisherRegisters = 152, kProducerRegisters = 40;
};
// What depends on the tile's size: its 128 columns are the n of the instruction m64n128k16. (Another n needs another
// list of registers in WGMMA.) Its rows are 128 or 256, because each of the two consumers computes 64, the m of one
// such instruction, or 128, the m of two. A TMA box has 128 rows (see make_tensor_map and producer). The 64 columns of
// a slot are one group of linear_swish_group_norm, whose epilogue needs a whole group.
//
// Scaled sums are below 2^15 * 2^15 * K < 2^54, because check_product takes K below 2^24. The finisher first multiplies
// a sum by the row's inverse scale, at most 2^60: the result is below 2^114. Then it multiplies by the column's. That
// overflows only if h does. A row with a larger inverse scale has an infinite threshold: all its sums are recomputed.
constexpr float kLargestInverseScale = 0x1p60f;

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }
// The exponent of the scale that brings `largest` to [2^14, 2^15). (Bits 23 to 30 of a float32 are its exponent plus
// 127.) The result is 126 at most, so that the scale and its inverse are normal numbers. So a largest value below
// 2^-112 stays below 2^14: the smallest positive float32, 2^-149, becomes 2^-23.
__device__ __forceinline__ int scale_exponent(float largest) {
    return min(14 + 127 - int(__float_as_uint(largest) >> 23), 126);
}
// Threads find the smallest of their exponents by atomicMax on a word of memory that is zeroed beforehand. Each submits
// 1024 - exponent, which is positive, as all exponents are between -252 and 252 (see kLargestExponent). 0, the initial
// value, is below every submission.
__device__ __forceinline__ void atomic_min_exponent(int* word, int exponent) { atomicMax(word, 1024 - exponent); }
__device__ __forceinline__ int load_min_exponent(const int* word) { return 1024 - *word; }
__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The length of a row in values, rounded up to whole slices.
template <class Scheme> __host__ __device__ constexpr int64_t padded_length(int64_t length) {
    return divide_up(length, Scheme::kSliceK) * Scheme::kSliceK;
}
struct Add {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
// Reduces v by op over `threads` neighbouring threads (a power of two). Each of them gets the result. For up to 32
// threads, whole warps call it. For more, the whole block calls it, and warp_values is one float of shared memory for
// each warp. The call writes warp_values before its __syncthreads() and reads them after it. So the next use of the
// same warp_values must come after another __syncthreads(), such as that of a call with others.
template <class Op>
__device__ __forceinline__ float reduce_threads(float v, int threads, Op op, float* warp_values = nullptr) {
    for (int offset = min(threads, 32) / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(~0u, v, offset));
    if (threads <= 32) return v;
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = v;
    __syncthreads();
    const int warps = threads / 32;
    const int first_warp = threadIdx.x / threads * warps;
    v = warp_values[first_warp + threadIdx.x % warps];
    for (int offset = warps / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}
// Splits COUNT (4 or 8) neighbouring scaled values of a row, from index k on. `row` is the row's pieces. Stores hi to
// the slice and, if kPieces is 2, lo to the same slice, kSliceK numbers on.
template <class Scheme, int COUNT>
__device__ __forceinline__ void store_pieces(__half* row, int k, const float (&v)[COUNT]) {
    constexpr int kSliceK = Scheme::kSliceK;
    Pack<__half, COUNT> hi, lo;
    for (int i = 0; i < COUNT; ++i) {
        hi.value[i] = __float2half_rn(v[i]);
        lo.value[i] = __float2half_rn(v[i] - __half2float(hi.value[i]));
    }
    __half* const slice = row + k / kSliceK * kSliceNumbers;
    auto* const to = reinterpret_cast<Pack<__half, COUNT>*>(slice + k % kSliceK);
    to[0] = hi;
    if (Scheme::kPieces == 2) to[kSliceK / COUNT] = lo;
}
// The scale of one row of x or W. A scaled sum, times the inverse scales of its rows of x and W, is a value of x W^T,
// without the bias. It is recomputed if its magnitude is below both rows' thresholds added up (see Thresholds).
struct RowScale {
    float inverse_scale, threshold;
    // The exponent of the scale: inverse_scale is 2^-exponent.
    __device__ __forceinline__ int exponent() const { return 127 - int(__float_as_uint(inverse_scale) >> 23); }
};
// In the backward the exponent of a scale is a sum or a difference of other exponents, from -252 to 252 = 126 + 126.
// (Float32 has no 2^252 or 2^-252, so such a scale is applied as two factors, each of half the exponent.) A difference
// below -252 is raised to it: float32 numbers are below 2^128, and 2^128 * 2^-252 already becomes 0 in fp16.
constexpr int kLargestExponent = 126 + 126;
struct RowsToSplit {  // what split_rows reads and writes
    const float* values;
    __half* pieces;
    int64_t rows;
    int length;  // of a row
    RowScale* scales;  // Forward: row i's largest value gives its scale. split_rows writes scales[i].
    // Backward, where scales is null: the exponent of row i is load_min_exponent(min_exponent_word) - exponents[i] (see
    // "From G" below). It is lowered if the row's largest value would otherwise reach 2^15. That happens only to row i
    // of x where all finite values of G's row i are 0. The products are then 0 or not finite, whatever the scale.
    const int *min_exponent_word, *exponents;
    __device__ __forceinline__ int exponent(int64_t row, float largest) const {
        const int own_exponent = scale_exponent(largest);
        if (scales != nullptr) return own_exponent;
        return max(min(load_min_exponent(min_exponent_word) - exponents[row], own_exponent), -kLargestExponent);
    }
};
constexpr int kSplitThreads = 256;
constexpr int kSplitPacks = 8;  // float4s that a thread keeps in registers: 256 * 8 * 4 = 8192 values for a whole block
// The first `first_blocks` blocks split `first`, the others `second`. `threads_per_row` neighbouring threads, one to
// eight whole warps, own a row. They load it to their registers, find its largest value, and split it from there. A row
// of more than 8192 values is loaded twice.
// Three blocks a multiprocessor: a thread may have 65536 / 768 registers, rounded down to 80, and uses 79.
template <class Scheme>
__global__ void __launch_bounds__(kSplitThreads, 3) split_rows(const __grid_constant__ RowsToSplit first,
    const __grid_constant__ RowsToSplit second, int threads_per_row, unsigned first_blocks) {
    __shared__ float warp_values[2][kSplitThreads / 32];
    const bool is_first = blockIdx.x < first_blocks;
    const RowsToSplit& operand = is_first ? first : second;
    const int64_t block = is_first ? blockIdx.x : blockIdx.x - first_blocks;
    const int64_t row = block * (kSplitThreads / threads_per_row) + threadIdx.x / threads_per_row;
    const bool row_exists = row < operand.rows;
    const int thread_in_row = threadIdx.x % threads_per_row;
    const int packs_per_pass = threads_per_row * kSplitPacks;
    const int padded = int(padded_length<Scheme>(operand.length));
    const int packs = padded / 4;
    const float4* values = reinterpret_cast<const float4*>(operand.values + row * operand.length);
    float4 loaded[kSplitPacks];
    const auto load = [&](int first_pack) {
#pragma unroll
        for (int i = 0; i < kSplitPacks; ++i) {
            const int pack = first_pack + thread_in_row + i * threads_per_row;
            loaded[i] = row_exists && pack < operand.length / 4 ? values[pack] : make_float4(0, 0, 0, 0);
        }
    };
    float largest = 0;  // of the finite values
    float coarse_count = 0;
    for (int first_pack = 0; first_pack < packs; first_pack += packs_per_pass) {
        load(first_pack);
#pragma unroll
        for (int i = 0; i < kSplitPacks; ++i) {
            for (float v : {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w}) {
                largest = fmaxf(largest, isfinite(v) ? fabsf(v) : 0);
            }
        }
    }
    largest = reduce_threads(largest, threads_per_row, Max(), warp_values[0]);
    const int exponent = row_exists ? operand.exponent(row, largest) : 0;
    const float factor = power_of_two(exponent / 2);
    const float other_factor = power_of_two(exponent - exponent / 2);
    for (int first_pack = 0; first_pack < packs; first_pack += packs_per_pass) {
        if (packs > packs_per_pass) load(first_pack);  // else it is still in the registers
#pragma unroll
        for (int i = 0; i < kSplitPacks; ++i) {
            const int pack = first_pack + thread_in_row + i * threads_per_row;
            float v[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
            for (int j = 0; j < 4; ++j) {
                const float scaled = v[j] * factor * other_factor;
                coarse_count += fabsf(scaled) < Scheme::kCoarseBelow && v[j] != 0 ? 1.0f : 0.0f;
                v[j] = scaled;
            }
            if (row_exists && pack < packs) {
                store_pieces<Scheme>(operand.pieces + row * padded * Scheme::kPieces, pack * 4, v);
            }
        }
    }
    if (operand.scales == nullptr) return;
    coarse_count = reduce_threads(coarse_count, threads_per_row, Add(), warp_values[1]);
    if (thread_in_row != 0 || !row_exists) return;
    RowScale result = {power_of_two(-exponent), coarse_count * Scheme::kThresholdPerCoarse};
    if (result.inverse_scale > kLargestInverseScale) result.threshold = INFINITY;
    // No finite value but 0: the row's sums are 0 or not finite, and none is recomputed.
    if (largest == 0) result.threshold = -INFINITY;
    operand.scales[row] = result;
}

// Starts a copy by TMA: the box at (c0, c1, c2) of the map's tensor, to shared memory. `bar` counts its bytes.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, int c0, int c1, int c2, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
        :
        : "r"(shared_address(to)), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(bar))
        : "memory");
}
// d = a * b^T + (accumulate ? d : 0), by a warpgroup: 64 rows, 128 columns, 16 of K. a and b are descriptors of shared
// memory, K-major or MN-major (see "How an operand lies" below). Operands of the asm statement: %0 to %63 are d, %64 a,
// %65 b, %66 accumulate, %67 and %68 tell whether a and b are MN-major. The constants 1, 1 before them are the signs of
// a and b.
#define REGISTERS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REGISTERS_16(d, i) REGISTERS_4(d, i), REGISTERS_4(d, i + 4), REGISTERS_4(d, i + 8), REGISTERS_4(d, i + 12)
#define WGMMA(type)                                                                                                  \
    asm volatile("{\n"                                                                                               \
                 ".reg .pred accumulate;\n"                                                                          \
                 "setp.ne.b32 accumulate, %66, 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                        \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
                 "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"  \
                 "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, accumulate, 1, 1, %67, %68;\n" \
                 "}"                                                                                                 \
        : REGISTERS_16(d, 0), REGISTERS_16(d, 16), REGISTERS_16(d, 32), REGISTERS_16(d, 48)                          \
        : "l"(a), "l"(b), "r"(accumulate), "n"(int(MN_MAJOR_A)), "n"(int(MN_MAJOR_B)))
template <bool MN_MAJOR_A, bool MN_MAJOR_B, typename T = __half>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) WGMMA("bf16");
    else WGMMA("f16");
}
template <class Scheme> struct Stage {  // a and b begin at multiples of 1024 bytes, as the swizzles need it
    unsigned char a[Scheme::kTileRows * 128];
    unsigned char b[kTileColumns * 128];
};
template <class Scheme> struct MultiplyShared {
    Stage<Scheme> stages[Scheme::kStages];
    Pack<typename Scheme::SlotValue, 4> slots[Scheme::kSlots][64 * 64 / 4];
    uint64_t stage_full[Scheme::kStages], stage_empty[Scheme::kStages];
    uint64_t slot_full[Scheme::kSlots], slot_empty[Scheme::kSlots];
};
// An index in a ring of COUNT stages or slots, and the parity of the round: 0, 1, 0 and so on. In each round the
// mbarriers of an index complete one phase. mbarrier_wait(bar, p) waits while the phase of bar that now runs has parity
// p; a new mbarrier runs phase 0. Whoever reads a stage or slot waits for `parity`, whoever fills it for parity ^ 1: in
// the first round that returns at once.
template <int COUNT> struct Ring {
    int index = 0, parity = 0;
    __device__ __forceinline__ void advance(int by = 1) {
        index += by;
        if (index < COUNT) return;
        index -= COUNT;
        parity ^= 1;
    }
};
struct Position { int row, column; };
template <class Scheme> struct Tiles {  // of an output (m, n): `across` in a row of tiles, `down` in a column
    static constexpr int kTileRows = Scheme::kTileRows;
    static constexpr int kBandHeight = kBandRows / kTileRows;  // in tiles
    int across, down, count;
    __device__ __forceinline__ Tiles(int m, int n)
        : across((n + kTileColumns - 1) / kTileColumns), down((m + kTileRows - 1) / kTileRows), count(across * down) {}
    __device__ __forceinline__ Position start_of(int tile) const {  // the tile's first row and column, see kBandRows
        const int band_start = tile / (kBandHeight * across) * kBandHeight;  // the band's first row of tiles
        const int in_band = tile % (kBandHeight * across);
        const int height = min(kBandHeight, down - band_start);
        return {(band_start + in_band % height) * kTileRows, in_band / height * kTileColumns};
    }
};

// `slices`: how many slices of each row a tile takes, including those beyond the end of K (see launch_multiply).
template <bool MN_MAJOR_A, bool MN_MAJOR_B, class Scheme> __device__ __forceinline__ void producer(
    MultiplyShared<Scheme>& shared, const CUtensorMap* map_a, const CUtensorMap* map_b, const Tiles<Scheme>& tiles,
    int slices) {
    Ring<Scheme::kStages> stage_ring;
    // A box is a slice of 128 rows of the tile (for b: of its columns), from first_row of the matrix on. See
    // make_tensor_map for the order of the coordinates.
    const auto load = [&](bool mn_major, void* to, const CUtensorMap* map, int slice, int first_row) {
        uint64_t* bar = &shared.stage_full[stage_ring.index];
        if (mn_major) tma_load(to, map, 0, slice * Scheme::kSliceK, first_row / 32 * Scheme::kPieces, bar);
        else tma_load(to, map, slice * kSliceNumbers, first_row, 0, bar);
    };
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const Position tile_start = tiles.start_of(tile);
        for (int slice = 0; slice < slices; ++slice, stage_ring.advance()) {
            Stage<Scheme>& stage = shared.stages[stage_ring.index];
            mbarrier_wait(&shared.stage_empty[stage_ring.index], stage_ring.parity ^ 1);
            mbarrier_arrive_expect_tx(&shared.stage_full[stage_ring.index], sizeof(stage));
            for (int row = 0; row < Scheme::kTileRows; row += 128) {
                load(MN_MAJOR_A, stage.a + row * 128, map_a, slice, tile_start.row + row);
            }
            load(MN_MAJOR_B, stage.b, map_b, slice, tile_start.column);
        }
    }
}
// How an operand lies in a stage. Operand a gives the tile's rows, b its columns: in the forward x and W. "Row" is a
// row of the tile for a, a column of it for b.
//
// K-major: the values of a row along K are neighbours in device memory, as in x and W of the forward. TMA writes the
// slice of a row as 128 bytes, and row after row, with the 128-byte swizzle: 16-byte chunk c goes to place c ^ row % 8.
//
//     row 0    | hi of k 0-31, 64 bytes | lo of k 0-31 |     from hi to lo: 64 bytes; from k 0 to k 16: 32 bytes
//     row 1    | hi of k 0-31           | lo of k 0-31 |     eight rows, 1024 bytes, are an atom of the swizzle
//     ...
//
// MN-major: the values of one k, for all rows, are neighbours in device memory. In dX = G W, for example, the sum goes
// over W's rows: a k is a row of W, and a "row" is a column of W. A strip is hi or lo of 32 neighbouring "rows", at
// every k: 64 bytes a k. TMA writes strip after strip to the stage, with the 64-byte swizzle. (With the 128-byte
// swizzle, hi and lo of a k would share an atom, and no descriptor could name one of them alone.)
//
//     in device memory, for each k:    | hi of rows 0-31 | lo of rows 0-31 | hi of rows 32-63 | lo of rows 32-63 | ...
//     in a stage:   byte     0    hi of rows 0-31     k 0 | k 1 | ... | k 31      64 bytes each; 16 of K: 1024 bytes
//                   byte  2048    lo of rows 0-31     k 0 | k 1 | ... | k 31      eight k, 512 bytes, are an atom
//                   byte  4096    hi of rows 32-63    ...
//
// With one piece there is no lo: in K-major a row holds 64 of K, and in MN-major the strip of rows 0-31 has 64 k, 4096
// bytes. So in each layout 64 rows take 8192 bytes.
//
// wgmma's descriptor (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout") counts in units of 16 bytes:
//     bits 0-13: the address    16-29: the leading byte offset    32-45: the stride byte offset    62-63: the swizzle
// K-major: the stride offset leads from an atom (eight rows) to the next. The leading offset is ignored, and set to 1.
// As the swizzle XORs bits 4-6 of an address with its bits 7-9, a descriptor may begin 32, 64 or 96 bytes inside an
// atom. MN-major: the stride offset leads from one atom (eight k) to the next in the same strip. The leading offset
// leads from one strip (32 rows) to the next strip of the same piece. (Bits 49-51 are 0, as all atoms begin at
// multiples of their size.)
template <bool MN_MAJOR> __device__ __forceinline__ uint64_t wgmma_descriptor(const void* operand) {
    constexpr uint64_t kLeading = MN_MAJOR ? 4096 / 16 : 1;
    constexpr uint64_t kStride = MN_MAJOR ? 512 / 16 : 1024 / 16;
    constexpr uint64_t kSwizzle = MN_MAJOR ? 2 : 1;  // 2: of 64 bytes, 1: of 128 bytes
    const uint64_t address = (shared_address(operand) & 0x3ffff) / 16;
    return address | kLeading << 16 | kStride << 32 | kSwizzle << 62;
}
// Added to a descriptor, in its units of 16 bytes: the first leads to the next 16 of K, the second from hi to lo.
template <bool MN_MAJOR> constexpr int kStepAlongK = (MN_MAJOR ? 1024 : 32) / 16;
template <bool MN_MAJOR> constexpr int kStepToLo = (MN_MAJOR ? 2048 : 64) / 16;
// The products of a slice, 32 of K: multiply_hi_lo computes hi lo' and lo hi', multiply_hi_hi computes hi hi'.
template <bool MN_MAJOR_A, bool MN_MAJOR_B>
__device__ __forceinline__ void multiply_hi_lo(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    constexpr int kStepA = kStepAlongK<MN_MAJOR_A>, kStepB = kStepAlongK<MN_MAJOR_B>;
    const uint64_t a_lo = a + kStepToLo<MN_MAJOR_A>, b_lo = b + kStepToLo<MN_MAJOR_B>;
    wgmma<MN_MAJOR_A, MN_MAJOR_B>(d, a_lo, b, accumulate);
    wgmma<MN_MAJOR_A, MN_MAJOR_B>(d, a, b_lo, 1);
    wgmma<MN_MAJOR_A, MN_MAJOR_B>(d, a_lo + kStepA, b + kStepB, 1);
    wgmma<MN_MAJOR_A, MN_MAJOR_B>(d, a + kStepA, b_lo + kStepB, 1);
}
template <bool MN_MAJOR_A, bool MN_MAJOR_B> __device__ __forceinline__ void multiply_hi_hi(
    float (&d)[64], uint64_t a, uint64_t b) {
    wgmma<MN_MAJOR_A, MN_MAJOR_B>(d, a, b, 1);
    wgmma<MN_MAJOR_A, MN_MAJOR_B>(d, a + kStepAlongK<MN_MAJOR_A>, b + kStepAlongK<MN_MAJOR_B>, 1);
}
// A warp has 16 x 64 sums of a slot, a quarter of it. They are eight octets of columns, and octet j begins with column
// 8 j. Of each octet, wgmma leaves columns 2 t and 2 t + 1 of rows q and q + 8 in lane 4 q + t. The lane stores these
// four sums as one pack, number 4 q + t of the octet, which has 32:
//
//     columns 8 j +      0, 1     2, 3     4, 5     6, 7
//     rows 0 and 8       pack 0   pack 1   pack 2   pack 3
//     rows 1 and 9       pack 4   pack 5   pack 6   pack 7     ...
//
// A lane of the finisher loads four neighbouring columns of a row at a time, 4 e to 4 e + 3. They are half of octet e /
// 2: two packs, t = 0 and 1 for even e, t = 2 and 3 for odd e. The hardware serves a warp's 16-byte loads eight lanes
// at a time. Here these eight lanes share a row and have e = 0 to 7. For row 0, the first load reads packs 0 and 2 of
// octets 0 to 3: eight packs, which must lie in different banks. Shared memory has 32 banks of four bytes, so packs of
// 16 bytes at the same place modulo 8 are in the same banks. Therefore pack number p of octet j lies at place p ^
// slot_swizzle(j):
//
//     place       0    1    2    3    4    5    6    7
//     octet 0    [0]   1   [2]   3    4    5    6    7      slot_swizzle 0
//     octet 1     1   [0]   3   [2]   5    4    7    6      slot_swizzle 1
//     octet 2     4    5    6    7   [0]   1   [2]   3      slot_swizzle 4
//     octet 3     5    4    7    6    1   [0]   3   [2]     slot_swizzle 5     [ ] are loaded at once: places differ
//
// A pack of 16-bit sums has 8 bytes, and there a lane wants eight neighbouring columns, octet e. It loads 16 bytes, two
// packs p and p + 1, at once, and the lanes of a row load the same p of octets 0 to 7. slot_swizzle(j) is 2 j: it keeps
// such a pair together, and the pairs of the eight octets lie in different banks.
template <typename S> __device__ __forceinline__ int slot_swizzle(int octet) {
    return sizeof(S) == 4 ? (octet & 1) | (octet & 2) << 1 : octet << 1;
}
// Stores a warp's 16 x 64 sums to a slot, as drawn above.
template <typename S> __device__ __forceinline__ void store_sums(Pack<S, 4>* to, const float* sums) {
#pragma unroll
    for (int octet = 0; octet < 8; ++octet) {
        Pack<S, 4> pack;
        for (int i = 0; i < 4; ++i) pack.value[i] = S(sums[4 * octet + i]);
        to[octet * 32 + (threadIdx.x % 32 ^ slot_swizzle<S>(octet))] = pack;
    }
}
// A lane of the finisher has, of a warp's 16 x 64 sums, four rows of eight columns each, v[r][i]:
//
//     columns      0-3       4-7      ...  28-31     32-35    36-39    ...  60-63
//     row 0        lane 0    lane 1   ...  lane 7    lane 0   lane 1   ...  lane 7        v[0][0-3] and v[0][4-7]
//     row 1        lane 8    lane 9   ...  lane 15   lane 8   lane 9   ...  lane 15       v[0][0-3] and v[0][4-7]
//     ...
//     row 4        lane 0    lane 1   ...                                                 v[1][0-3] and v[1][4-7]
//
// So its rows are lane / 8 + 4 r, and its columns are 4 e to 4 e + 3 and the same 32 further on, with e = lane % 8. Of
// 16-bit sums its columns are 8 e to 8 e + 7. Either way a lane stores 16 bytes at once, and a row's eight lanes 128.
// A pack has two columns of rows q and q + 8, which are v[r] and v[r + 2].
template <typename T> constexpr int kValuesPer16Bytes = 16 / sizeof(T);  // as many columns as a lane has side by side
template <typename T> using Pack16 = Pack<T, kValuesPer16Bytes<T>>;
template <typename S> __device__ __forceinline__ void load_sums(const Pack<S, 4>* from, float (&v)[4][8]) {
    const int e = threadIdx.x % 8;
    const int row = threadIdx.x % 32 / 8;
    constexpr int kPacksAtOnce = 4 / sizeof(S);  // 16 bytes
#pragma unroll
    for (int first_pack = 0; first_pack < 8; first_pack += kPacksAtOnce) {  // of the lane's eight packs
        const int r = first_pack / 4;
        const int pair = first_pack % 4;  // of the lane's columns
        const int octet = sizeof(S) == 4 ? pair / 2 * 4 + e / 2 : e;
        const int t = sizeof(S) == 4 ? e % 2 * 2 + pair % 2 : pair;
        const int p = (row + r * 4) * 4 + t;
        const auto packs =
            reinterpret_cast<const Pack<Pack<S, 4>, kPacksAtOnce>&>(from[octet * 32 + (p ^ slot_swizzle<S>(octet))]);
        for (int i = 0; i < kPacksAtOnce; ++i) {
            const int c = 2 * (pair + i);
            v[r][c] = float(packs.value[i].value[0]);
            v[r][c + 1] = float(packs.value[i].value[1]);
            v[r + 2][c] = float(packs.value[i].value[2]);
            v[r + 2][c + 1] = float(packs.value[i].value[3]);
        }
    }
}

// After wgmma_wait a warp knows only that the products of its own 16 rows of the 64 are done. So the producer fills a
// stage again only when each of the consumers' eight warps has arrived at stage_empty.
template <class Scheme> __device__ __forceinline__ void free_stage(MultiplyShared<Scheme>& shared, int s) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.stage_empty[s]);
}
// Keeps the compiler from reading v before the wait for the wgmma that writes it.
__device__ __forceinline__ void keep_below_wait(float (&v)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(v[i])::"memory");
}
// Three products: a warpgroup computes the sums of 64 rows of a tile. Its accumulators add up two slices, 64 of K.
template <bool MN_MAJOR_A, bool MN_MAJOR_B> __device__ __forceinline__ void sum_products(
    MultiplyShared<ThreeProducts>& shared, Ring<ThreeProducts::kStages>& stage_ring, int slices, uint64_t a, uint64_t b,
    float (&sums)[64], float (&accumulators)[64]) {
    constexpr int kStages = ThreeProducts::kStages;
    constexpr int kStageStep = sizeof(shared.stages[0]) / 16;  // added to a descriptor, leads to the next stage
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = 0;
#pragma unroll 1
    for (int slice = 0; slice < slices; slice += kStages, stage_ring.parity ^= 1) {  // one round of the ring
#pragma unroll
        for (int s = 0; s < kStages; s += 2) {
            const int next = s + 1;
            mbarrier_wait(&shared.stage_full[s], stage_ring.parity);
            wgmma_fence();
            multiply_hi_lo<MN_MAJOR_A, MN_MAJOR_B>(accumulators, a + s * kStageStep, b + s * kStageStep, 0);
            mbarrier_wait(&shared.stage_full[next], stage_ring.parity);
            wgmma_fence();
            multiply_hi_lo<MN_MAJOR_A, MN_MAJOR_B>(accumulators, a + next * kStageStep, b + next * kStageStep, 1);
            multiply_hi_hi<MN_MAJOR_A, MN_MAJOR_B>(accumulators, a + s * kStageStep, b + s * kStageStep);
            wgmma_commit();
            multiply_hi_hi<MN_MAJOR_A, MN_MAJOR_B>(accumulators, a + next * kStageStep, b + next * kStageStep);
            wgmma_commit();
            wgmma_wait<1>();  // for the older group: it has all wgmmas that read stage s
            free_stage(shared, s);
            wgmma_wait<0>();
            free_stage(shared, next);
            keep_below_wait(accumulators);
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[i] += accumulators[i];
        }
    }
}
// One product: a warpgroup computes the sums of 128 rows of a tile, of 64 upper and 64 lower ones. The tensor cores
// alone add them up, as in cuBLAS. They truncate, but the operands or the sums are rounded to 11 bits or fewer anyway.
template <bool MN_MAJOR_A, bool MN_MAJOR_B, typename T, typename S> __device__ __forceinline__ void sum_products(
    MultiplyShared<OneProduct<T, S>>& shared, Ring<OneProduct<T, S>::kStages>& stage_ring, int slices, uint64_t a,
    uint64_t b, float (&upper)[64], float (&lower)[64]) {
    constexpr int kStageStep = sizeof(shared.stages[0]) / 16;
    constexpr int kStepToLowerRows = 64 * 128 / 16;  // added to a descriptor, leads 64 rows on, in either layout
    constexpr int kStepA = kStepAlongK<MN_MAJOR_A>, kStepB = kStepAlongK<MN_MAJOR_B>;
    int previous_stage = 0;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        const uint64_t stage_a = a + stage_ring.index * kStageStep;
        const uint64_t stage_b = b + stage_ring.index * kStageStep;
        mbarrier_wait(&shared.stage_full[stage_ring.index], stage_ring.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // 16 of K
            // `slice` is 0 at the tile's first products: so the sums start at 0. Those of 16 bits start at the bias:
            // see `consumer`.
            const int accumulate = sizeof(S) == 2 || step > 0 ? 1 : slice;
            wgmma<MN_MAJOR_A, MN_MAJOR_B, T>(upper, stage_a + step * kStepA, stage_b + step * kStepB, accumulate);
            wgmma<MN_MAJOR_A, MN_MAJOR_B, T>(
                lower, stage_a + step * kStepA + kStepToLowerRows, stage_b + step * kStepB, accumulate);
        }
        wgmma_commit();
        wgmma_wait<1>();  // until the slice before this one is multiplied
        if (slice > 0) free_stage(shared, previous_stage);
        previous_stage = stage_ring.index;
        stage_ring.advance();
    }
    wgmma_wait<0>();
    free_stage(shared, previous_stage);
    keep_below_wait(upper);
    keep_below_wait(lower);
}
// Sets a thread's sums of 64 rows to the bias of a tile's 128 columns. `column` is the first of these. n is even.
template <typename T> __device__ __forceinline__ void load_linear_bias(
    const T* bias, int column, int n, float (&sums)[64]) {
#pragma unroll
    for (int octet = 0; octet < 16; ++octet) {  // of columns: see slot_swizzle
        const int own_column = min(column + 8 * octet + int(threadIdx.x) % 4 * 2, n - 2);
        const auto two = *reinterpret_cast<const Pack<T, 2>*>(bias + own_column);
        for (int i = 0; i < 4; ++i) sums[4 * octet + i] = float(two.value[i % 2]);
    }
}
template <bool MN_MAJOR_A, bool MN_MAJOR_B, class Scheme, class Epilogue> __device__ __forceinline__ void consumer(
    MultiplyShared<Scheme>& shared, const Tiles<Scheme>& tiles, const Epilogue& epilogue, int slices, int warpgroup) {
    const int warp = threadIdx.x / 32 % 4;
    const uint64_t a = wgmma_descriptor<MN_MAJOR_A>(shared.stages[0].a + warpgroup * (Scheme::kTileRows / 2) * 128);
    const uint64_t b = wgmma_descriptor<MN_MAJOR_B>(shared.stages[0].b);
    float sums[64];  // of the first 64 rows
    float lower_or_accumulators[64] = {};  // one product: the sums of the other 64 rows. Three: accumulators
    Ring<Scheme::kStages> stage_ring;
    Ring<Scheme::kSlots> slot_ring;
    slot_ring.advance(warpgroup);
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        if constexpr (sizeof(typename Scheme::SlotValue) == 2) {
            load_linear_bias(epilogue.linear_bias, tiles.start_of(tile).column, epilogue.n, sums);
            for (int i = 0; i < 64; ++i) lower_or_accumulators[i] = sums[i];
        }
        sum_products<MN_MAJOR_A, MN_MAJOR_B>(shared, stage_ring, slices, a, b, sums, lower_or_accumulators);
        for (int slot = 0; slot < Scheme::kTileRows / 64; ++slot, slot_ring.advance(2)) {  // that it fills
            const float* const from = slot < 2 ? sums : lower_or_accumulators;
            mbarrier_wait(&shared.slot_empty[slot_ring.index], slot_ring.parity ^ 1);
            store_sums(shared.slots[slot_ring.index] + warp * 256, from + 32 * (slot % 2));
            mbarrier_arrive(&shared.slot_full[slot_ring.index]);
        }
    }
}
// An Epilogue has m, n and, for 16-bit sums, linear_bias. Before a lane waits for its sums, load(lane_start) loads what
// else it needs. finish(sums, lane_start, loaded) stores the outputs. lane_start is the position of sums[0][0].
template <class Scheme, class Epilogue> __device__ __forceinline__ void finisher(
    MultiplyShared<Scheme>& shared, const Tiles<Scheme>& tiles, const Epilogue& epilogue) {
    constexpr int kLaneColumns = kValuesPer16Bytes<typename Scheme::SlotValue>;  // side by side
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Ring<Scheme::kSlots> slot_ring;
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const Position tile_start = tiles.start_of(tile);
#pragma unroll 1
        for (int slot = 0; slot < Scheme::kTileRows / 32; ++slot, slot_ring.advance()) {  // as in the table of slots
            const int from_consumer = slot % 2, column_half = slot / 2 % 2, row_half = slot / 4;
            const int row = tile_start.row + from_consumer * (Scheme::kTileRows / 2) + row_half * 64 + warp * 16;
            const int column = tile_start.column + column_half * 64;  // row, column: the first of this warp
            const Position lane_start = {row + lane / 8, column + lane % 8 * kLaneColumns};
            const auto loaded = epilogue.load(lane_start);  // scales, bias and more: they arrive during the wait
            float sums[4][8];
            mbarrier_wait(&shared.slot_full[slot_ring.index], slot_ring.parity);
            load_sums(shared.slots[slot_ring.index] + warp * 256, sums);
            mbarrier_arrive(&shared.slot_empty[slot_ring.index]);
            if (row < epilogue.m && column < epilogue.n) epilogue.finish(sums, lane_start, loaded);
        }
    }
}

template <bool MN_MAJOR_A, bool MN_MAJOR_B, class Scheme, class Epilogue>
__global__ void __launch_bounds__(kMultiplyThreads, 1) multiply(const __grid_constant__ CUtensorMap map_a,
    const __grid_constant__ CUtensorMap map_b, int slices, const Epilogue epilogue) {
    // The kernel starts with 65536 / 512 = 128 registers a thread. Then each warpgroup changes its own number to its
    // role's by setmaxnreg (PTX ISA: 24 to 256, multiples of 8).
    static_assert(
        2 * Scheme::kConsumerRegisters + Scheme::kFinisherRegisters + Scheme::kProducerRegisters <= 65536 / 128,
        "a multiprocessor has 65536 registers, for 128 threads of each warpgroup");
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<MultiplyShared<Scheme>*>(dynamic_shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler sees that a warp's lanes agree
    const Tiles<Scheme> tiles(epilogue.m, epilogue.n);
    if (threadIdx.x == 0) {
        for (int s = 0; s < Scheme::kStages; ++s) {
            mbarrier_init(&shared.stage_full[s], 1);  // the producer
            mbarrier_init(&shared.stage_empty[s], 8);  // the consumers' warps
        }
        for (int t = 0; t < Scheme::kSlots; ++t) {
            mbarrier_init(&shared.slot_full[t], 128);  // the threads of a consumer
            mbarrier_init(&shared.slot_empty[t], 128);  // the threads of the finisher
        }
        fence_mbarrier_init();  // so that TMA finds the mbarriers initialised
    }
    __syncthreads();
    if (warpgroup == 3) {
        lower_registers_to<Scheme::kProducerRegisters>();
        if (threadIdx.x % 128 == 0) producer<MN_MAJOR_A, MN_MAJOR_B>(shared, &map_a, &map_b, tiles, slices);
    } else if (warpgroup == 2) {
        raise_registers_to<Scheme::kFinisherRegisters>();
        finisher(shared, tiles, epilogue);
    } else {
        raise_registers_to<Scheme::kConsumerRegisters>();
        consumer<MN_MAJOR_A, MN_MAJOR_B>(shared, tiles, epilogue, slices, warpgroup);
    }
}
// Stores a thread's 4 x 8 values of a slot (see load_sums). n * sizeof(T) must be a multiple of 16.
template <typename T>
__device__ __forceinline__ void store_values(T* out, const float (&v)[4][8], const Position& lane_start, int m, int n) {
#pragma unroll
    for (int i = 0; i < 32; i += kValuesPer16Bytes<T>) {
        const int r = i / 8;
        const int row = lane_start.row + r * 4;
        const int column = lane_start.column + i % 8 * 8;  // float32: the second four columns are 32 further on
        if (row >= m || column >= n) continue;
        Pack16<T> pack;
        for (int j = 0; j < kValuesPer16Bytes<T>; ++j) pack.value[j] = T(v[r][i % 8 + j]);
        *reinterpret_cast<Pack16<T>*>(out + int64_t(row) * n + column) = pack;
    }
}
// Loads a vector's values for a thread's eight columns (see load_sums), of which `column` is the first.
template <typename T> __device__ __forceinline__ void load_vector(const T* vector, int column, int n, float (&to)[8]) {
    for (int i = 0; i < 8; i += kValuesPer16Bytes<T>) {  // columns as in store_values
        const auto pack = *reinterpret_cast<const Pack16<T>*>(vector + min(column + i * 8, n - kValuesPer16Bytes<T>));
        for (int j = 0; j < kValuesPer16Bytes<T>; ++j) to[i + j] = float(pack.value[j]);
    }
}
// What the epilogues of h = x W^T + linear_bias have in common: they make h of the sums. x, W and h are of type T.
template <typename T> struct LinearEpilogue {
    static constexpr bool kScaled = sizeof(T) == 4;  // 16-bit operands are multiplied as they are
    const T *x, *weight, *linear_bias;
    T* out;
    int m, n, k;
    RowScale* scales;  // of W's n rows, then of x's m
    struct Loaded {  // what a thread needs for its four rows and eight columns: scales, and linear_bias
        alignas(16) RowScale row_scales[4], column_scales[8];
        alignas(16) float linear_bias[8];
    };
    __device__ __forceinline__ Loaded load(const Position& lane_start) const {
        Loaded loaded = {};
        const RowScale* const row_scales = scales + n;
        if constexpr (kScaled) {
            load_vector(linear_bias, lane_start.column, n, loaded.linear_bias);
            for (int r = 0; r < 4; ++r) loaded.row_scales[r] = row_scales[min(lane_start.row + 4 * r, m - 1)];
            for (int i = 0; i < 8; i += 4) {  // columns as in store_values
                const int column = min(lane_start.column + i * 8, n - 4);
                const auto* from = reinterpret_cast<const float4*>(scales + column);
                *reinterpret_cast<float4*>(&loaded.column_scales[i]) = from[0];
                *reinterpret_cast<float4*>(&loaded.column_scales[i + 2]) = from[1];
            }
        }
        return loaded;
    }
    // Makes h of a thread's sums: takes the scales out and adds linear_bias. 16-bit sums are h: see `consumer`.
    __device__ __forceinline__ void sums_to_h(
        float (&v)[4][8], const Position& lane_start, const Loaded& loaded) const {
        if (!kScaled) return;
        unsigned to_recompute = 0;  // bit i is set if the sum v[i / 8][i % 8] is to be recomputed
        float smallest = INFINITY, row_threshold = -INFINITY, column_threshold = -INFINITY;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            smallest = fminf(smallest, fabsf(v[i / 8][i % 8]));
            row_threshold = fmaxf(row_threshold, loaded.row_scales[i / 8].threshold);
            column_threshold = fmaxf(column_threshold, loaded.column_scales[i % 8].threshold);
        }
        if (smallest < row_threshold + column_threshold) {  // seldom: one test is cheaper than one for each sum
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const float threshold = loaded.row_scales[i / 8].threshold + loaded.column_scales[i % 8].threshold;
                if (fabsf(v[i / 8][i % 8]) < threshold) to_recompute |= 1u << i;
            }
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float without_row_scale = v[i / 8][i % 8] * loaded.row_scales[i / 8].inverse_scale;
            v[i / 8][i % 8] =
                fmaf(without_row_scale, loaded.column_scales[i % 8].inverse_scale, loaded.linear_bias[i % 8]);
        }
        // The warp recomputes these sums of its lanes, one at a time: all 32 lanes compute one, its owner keeps it.
        while (const unsigned owners = __ballot_sync(~0u, to_recompute != 0)) {
            const int owner = __ffs(owners) - 1;
            const int bit = __shfl_sync(~0u, __ffs(to_recompute) - 1, owner);
            const int row = __shfl_sync(~0u, lane_start.row, owner) + bit / 8 * 4;
            const int column = __shfl_sync(~0u, lane_start.column, owner) + bit % 8 / 4 * 32 + bit % 4;
            const float sum = row < m && column < n ? recompute_sum(row, column) : 0;
#pragma unroll
            for (int i = 0; i < 32; ++i) {  // all 32, because registers cannot be indexed at run time
                if (threadIdx.x % 32 == owner && i == bit) v[i / 8][i % 8] = sum + loaded.linear_bias[i % 8];
            }
            if (threadIdx.x % 32 == owner) to_recompute &= to_recompute - 1;  // clears the lowest bit
        }
    }
    // By a warp: the sum over K for a row of x and a row of W, in float32.
    __device__ __forceinline__ float recompute_sum(int64_t row, int64_t column) const {
        const auto* a = reinterpret_cast<const float4*>(x + row * k);
        const auto* b = reinterpret_cast<const float4*>(weight + column * k);
        float sum[4] = {};
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < k / 4; i += 32) {
            sum[0] = fmaf(a[i].x, b[i].x, sum[0]);
            sum[1] = fmaf(a[i].y, b[i].y, sum[1]);
            sum[2] = fmaf(a[i].z, b[i].z, sum[2]);
            sum[3] = fmaf(a[i].w, b[i].w, sum[3]);
        }
        return reduce_threads((sum[0] + sum[1]) + (sum[2] + sum[3]), 32, Add());
    }
};
// ---- Launching the product. Functions that launch kernels return a cudaError_t; those for the C++ return an int. ----
static int sm_count() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}
// Splits the rows of two operands of the same row length: in the forward x and W. `second` may have no rows.
template <class Scheme>
static cudaError_t launch_split(const RowsToSplit& first, const RowsToSplit& second, cudaStream_t stream) {
    const int64_t packs = padded_length<Scheme>(first.length) / 4;  // float4s of a row
    int threads_per_row = 32;
    while (threads_per_row < kSplitThreads && threads_per_row * kSplitPacks < packs) threads_per_row *= 2;
    const int rows_per_block = kSplitThreads / threads_per_row;
    const unsigned first_blocks = unsigned(divide_up(first.rows, rows_per_block));
    const unsigned blocks = first_blocks + unsigned(divide_up(second.rows, rows_per_block));
    split_rows<Scheme><<<blocks, kSplitThreads, 0, stream>>>(first, second, threads_per_row, first_blocks);
    return cudaGetLastError();
}
// A matrix of 16-bit numbers, pieces or values. Its rows begin `pitch` numbers apart. TMA reads whole pitches, so
// split_rows and the kernel that splits G store zeros beyond a row's last column.
struct Matrix {
    const void* numbers;
    int64_t rows, pitch;
};
template <class Scheme> static Matrix matrix_of_pieces(const void* numbers, int64_t rows, int64_t columns) {
    return {numbers, rows, padded_length<Scheme>(columns) * Scheme::kPieces};
}
// TMA's map of a matrix, which cuts it into boxes. TMA fills what is out of bounds with zeros.
//     K-major    coordinates: number in the row, row, 0           a box: a slice of 128 rows
//     MN-major   coordinates: number in the strip, row, strip     a box: kSliceK rows, by four strips of each piece
// A strip is 32 columns of the matrix, 64 bytes of each row. (In K-major it is the whole row.) In MN-major the matrix
// has a row for each index of K, and four strips of a piece are 128 rows of the tile (see wgmma_descriptor).
template <bool MN_MAJOR, class Scheme> static cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix) {
    static const auto encode = [] {  // the driver's own function, without linking against the driver
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult status;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &status);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    if (encode == nullptr) return cudaErrorNotSupported;
    const cuuint64_t pitch = matrix.pitch, rows = matrix.rows;
    const cuuint64_t strip = MN_MAJOR ? 32 : pitch;
    const cuuint64_t sizes[3] = {strip, rows, pitch / strip};
    const cuuint64_t strides[2] = {pitch * 2, 64};  // bytes, from row to row and from strip to strip
    const cuuint32_t k_major_box[3] = {kSliceNumbers, 128, 1};
    const cuuint32_t mn_major_box[3] = {32, Scheme::kSliceK, 4 * Scheme::kPieces};
    const cuuint32_t steps[3] = {1, 1, 1};
    const auto swizzle = MN_MAJOR ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    const auto l2_promotion = MN_MAJOR ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    const bool is_bfloat16 = std::is_same_v<typename Scheme::Number, __nv_bfloat16>;
    const auto type = is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    void* const numbers = const_cast<void*>(matrix.numbers);
    const CUresult result = encode(map, type, 3, numbers, sizes, strides, MN_MAJOR ? mn_major_box : k_major_box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, l2_promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
// `terms` is K, how many products each output sums up. (In the backward that is m or n, not k.)
template <bool MN_MAJOR_A, bool MN_MAJOR_B, class Scheme, class Epilogue> static cudaError_t launch_multiply(
    const Matrix& a, const Matrix& b, int64_t terms, const Epilogue& epilogue, cudaStream_t stream) {
    CUtensorMap map_a, map_b;
    const auto kernel = multiply<MN_MAJOR_A, MN_MAJOR_B, Scheme, Epilogue>;
    constexpr int kShared = sizeof(MultiplyShared<Scheme>);
    static_assert(kShared <= 227 * 1024, "a block's shared memory");
    cudaError_t error = make_tensor_map<MN_MAJOR_A, Scheme>(&map_a, a);
    if (error == cudaSuccess) error = make_tensor_map<MN_MAJOR_B, Scheme>(&map_b, b);
    if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    }
    if (error != cudaSuccess) return error;
    const int64_t tiles = divide_up(epilogue.m, Scheme::kTileRows) * divide_up(epilogue.n, kTileColumns);
    const int64_t sms = sm_count();
    const unsigned blocks = unsigned(tiles < sms ? tiles : sms);
    const int slices_at_once = Scheme::kPieces == 2 ? Scheme::kStages : 1;  // see sum_products
    const int slices = int(divide_up(terms, Scheme::kSliceK * slices_at_once) * slices_at_once);
    kernel<<<blocks, kMultiplyThreads, kShared, stream>>>(map_a, map_b, slices, epilogue);
    return cudaGetLastError();
}
// All launches of h = x W^T + b: for float32 the split of x and W, then the product with its epilogue.
template <class Scheme, class Epilogue>
static cudaError_t launch_linear(const Epilogue& epilogue, __half* pieces, cudaStream_t stream) {
    const int64_t m = epilogue.m, n = epilogue.n;
    const int k = epilogue.k;
    Matrix a = {epilogue.x, m, k};
    Matrix b = {epilogue.weight, n, k};
    if constexpr (Epilogue::kScaled) {
        __half* const pieces_w = pieces + m * padded_length<Scheme>(k) * Scheme::kPieces;
        const RowsToSplit x = {epilogue.x, pieces, m, k, epilogue.scales + n};
        const RowsToSplit w = {epilogue.weight, pieces_w, n, k, epilogue.scales};
        const cudaError_t error = launch_split<Scheme>(x, w, stream);
        if (error != cudaSuccess) return error;
        a = matrix_of_pieces<Scheme>(pieces, m, k);
        b = matrix_of_pieces<Scheme>(pieces_w, n, k);
    }
    return launch_multiply<false, false, Scheme>(a, b, k, epilogue, stream);
}

// ---- From G, h's gradient: dX = G W and dW = G^T x. The same text in both linear files of this folder. ----
//
// For float32 only: for 16-bit types these are ATen's products. G (m, n), the gradient of h = x W^T + b, is split once,
// and both products read its pieces: K-major for dX, MN-major for dW. W and x are split a second time, with other
// scales, and read MN-major. So nothing is transposed in memory.
//
//     product       tile's rows    tile's columns   the sum goes over             a             b
//     dX = G W      G's rows       W's columns      G's columns and W's rows      G, K-major    W, MN-major
//     dW = G^T x    G's columns    x's columns      G's rows and x's rows         G, MN-major   x, MN-major
//
// The forward divides each sum by the scales of its two rows. Here a sum goes over W's rows, or over G's and x's rows.
// A scale that differs from term to term cannot be taken out of a sum. So for each summed index one operand is
// multiplied by a power of two and the other by its inverse; in the product the two cancel. One scale for all of W or
// of x is left, and one for each row of G or of G^T. The epilogue divides by both:
//
//     G's row i       is multiplied by 2^r_i, which brings its largest value to [2^14, 2^15)
//     x's row i       is multiplied by 2^-r_i and one scale for all of x
//     W's row j       is multiplied by one scale for all of W and by 2^-c_j, where c_j is from -12 to 0: below 0 only
//                     if the row's largest value is more than 12 powers of two below W's largest
//     G's column j    is multiplied by 2^c_j
//
//     dX_ik = 2^-(r_i + s_W)  sum over j of  (2^(r_i + c_j) G_ij)  (2^(s_W - c_j) W_jk)          c_j cancels
//     dW_jk = 2^-(c_j + s_x)  sum over i of  (2^(r_i + c_j) G_ij)  (2^(s_x - r_i) x_ik)          r_i cancels
//
// 2^s_W is the one scale for all of W: s_W (in min_exponent_w) is the least exponent of W's rows. 2^s_x is that for all
// of x: s_x (in min_exponent_x) is the least r_i + exponent of x's row i. G's pieces are the same in both.
//
// Why 12: a scaled value has full precision, an error of at most 2^-23 of it, down to 2^-2 (see Thresholds). W's
// largest is scaled to 2^14 or more, so full precision spans 16 powers of two below it. If row j's largest value is
// 2^-e of W's, one scale for all of W leaves the row 16 - e of them. Beyond e = 12 the row is scaled by up to 2^12
// more: it keeps at least 4 powers of two up to e = 24. G's column j is divided by the same factor: there full
// precision spans at least 16 - 12 = 4 powers of two below the largest value of G's row. So for e up to 24, W's values
// down to 2^-4 of their row's largest are as exact as W's largest. (TF32: hi has 28 powers of two, not 16.) With a
// feature whose weights are 10^6 times as large as the others', dX had 2.1 times eager's error without the c_j, and 0.4
// times with them. Errors of dX are small beside the norm of their row, errors of dW beside the norm of all of dW. (A
// row of dW that is small beside the others may be inexact.) That is enough: the backward has no thresholds, and
// recomputes nothing.
//
//     largest of W's row j / largest of W:           1         2^-12     2^-24     2^-28 (a value in the row of 2^-24)
//     scaled by 2^(s_W - c_j):                       2^14      2^2       2^2       2^-2: here full precision ends
//     G's column j, scaled by 2^c_j, from 2^14:      2^14      2^14      2^2       (full precision down to 2^-2)
constexpr int kSpareBits = 12;  // see "Why 12"
struct SplitGradient {  // device memory that the kernels of a backward share
    __half* pieces;  // of G
    const RowScale* scales;  // the forward's: of W's n rows, then of x's m rows
    int *column_exponents, *row_exponents;  // c_j and r_i
    // Two words of atomic_min_exponent. min_exponent_w: for the exponents of W's rows. min_exponent_x: for r_i + the
    // exponent of x's row i, where G's row has a finite value other than 0.
    int *min_exponent_w, *min_exponent_x;
};
// Runs after G is split. A thread computes c_j and, if it is not 0, scales column j of every gridDim.y-th row of G.
// (gridDim.y is 64. So with 256 threads a block, 8192 columns make 2048 blocks, enough for all multiprocessors.)
template <class Scheme> __global__ void scale_columns(const SplitGradient split_g, int64_t m, int64_t n) {
    const int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j >= n) return;
    // How many powers of two the largest value of W's row j is below the largest of all W, beyond kSpareBits.
    const int below = split_g.scales[j].exponent() - load_min_exponent(split_g.min_exponent_w) - kSpareBits;
    const int c_j = -min(max(below, 0), kSpareBits);
    if (blockIdx.y == 0) split_g.column_exponents[j] = c_j;
    const __half factor = __float2half(power_of_two(c_j));
    for (int64_t i = blockIdx.y; i < m && c_j != 0; i += gridDim.y) {
        constexpr int kSliceK = Scheme::kSliceK;
        __half* const row = split_g.pieces + i * padded_length<Scheme>(n) * Scheme::kPieces;
        __half* const hi = row + j / kSliceK * kSliceNumbers + j % kSliceK;  // lo, if there is one, is kSliceK further
        for (int offset = 0; offset < kSliceNumbers; offset += kSliceK) hi[offset] = __hmul(hi[offset], factor);
    }
}
// The kernel that computes G holds a row in the registers of a block: a thread has kThreadColumns neighbouring columns.
// So the largest block, of 512 threads, has 8192. A block has the fewest warps, a power of two, that cover the row.
// Then a multiprocessor runs many blocks if rows are short.
constexpr int kThreadColumns = 16;
constexpr int kMaxGradientThreads = 512;
static int gradient_threads(int64_t n) {
    int threads = 32;
    while (threads * kThreadColumns < n) threads *= 2;
    return threads;
}
// How many blocks that kernel has. Block i owns rows i, i + gridDim.x and so on, and writes its part of each sum over
// rows. A multiprocessor runs 512 threads, as each takes up to 128 of the 65536 registers.
extern "C" int64_t gradient_blocks(int64_t m, int64_t n) {
    const int64_t max_blocks = sm_count() * kMaxGradientThreads / gradient_threads(n);
    return m < max_blocks ? m : max_blocks;
}
// Stores those of a thread's columns of a row that are below n, a multiple of 8.
template <typename T> __device__ __forceinline__ void store_columns(T* to, const float (&v)[kThreadColumns], int n) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += kValuesPer16Bytes<T>) {
        const int column = threadIdx.x * kThreadColumns + i;
        Pack16<T> pack;
        for (int j = 0; j < kValuesPer16Bytes<T>; ++j) pack.value[j] = T(v[i + j]);
        if (column < n) *reinterpret_cast<Pack16<T>*>(to + column) = pack;
    }
}
// Scales, splits and stores a row of G. A thread has its columns in v, 0 beyond n. For warp_values see reduce_threads.
template <class Scheme> __device__ __forceinline__ void store_split_row(
    const float (&v)[kThreadColumns], int row, int n, const SplitGradient& split_g, float* warp_values) {
    const int first_column = threadIdx.x * kThreadColumns;
    const int padded = int(padded_length<Scheme>(n));
    float largest = 0;
    for (int i = 0; i < kThreadColumns; ++i) largest = fmaxf(largest, isfinite(v[i]) ? fabsf(v[i]) : 0.0f);
    largest = reduce_threads(largest, 32, Max());
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < int(blockDim.x) / 32; ++i) largest = fmaxf(largest, warp_values[i]);
    const int exponent = scale_exponent(largest);
    for (int i = 0; i < kThreadColumns; i += 8) {
        float scaled[8];
        for (int j = 0; j < 8; ++j) scaled[j] = v[i + j] * power_of_two(exponent);
        if (first_column + i >= padded) continue;
        store_pieces<Scheme>(split_g.pieces + int64_t(row) * padded * Scheme::kPieces, first_column + i, scaled);
    }
    // The block also submits the exponents of blockDim.x rows of W, from row `row` * blockDim.x on. W has at most 16 *
    // blockDim.x rows, so the calls for G's first 16 rows cover it, and G has 128 rows or more.
    const int64_t j = int64_t(row) * blockDim.x + threadIdx.x;
    if (j < n) atomic_min_exponent(split_g.min_exponent_w, split_g.scales[j].exponent());
    if (threadIdx.x > 0) return;
    split_g.row_exponents[row] = exponent;
    // Submits the exponents of G's row and of x's row, added up. Where G's row has no finite value but 0 it submits the
    // largest possible, which does not lower the smallest.
    atomic_min_exponent(
        split_g.min_exponent_x, largest > 0 ? exponent + split_g.scales[n + row].exponent() : kLargestExponent);
}
// The epilogue of dX and of dW: multiplies row i by 2^-(load_min_exponent(min_exponent_word) + exponents[i]).
struct StoreGradient {
    const int *min_exponent_word, *exponents;
    float* out;
    int m, n;
    struct Loaded {
        float factor[4], other_factor[4];  // the power of two may not be a float32 number: see kLargestExponent
    };
    __device__ __forceinline__ Loaded load(const Position& lane_start) const {
        Loaded loaded;
        for (int r = 0; r < 4; ++r) {
            const int exponent = -load_min_exponent(min_exponent_word) - exponents[min(lane_start.row + 4 * r, m - 1)];
            loaded.factor[r] = power_of_two(exponent / 2);
            loaded.other_factor[r] = power_of_two(exponent - exponent / 2);
        }
        return loaded;
    }
    __device__ __forceinline__ void finish(float (&v)[4][8], const Position& lane_start, const Loaded& loaded) const {
        for (int i = 0; i < 32; ++i) {
            float& value = v[i / 8][i % 8];
            value = value * loaded.factor[i / 8] * loaded.other_factor[i / 8];
        }
        store_values(out, v, lane_start, m, n);
    }
};

// Computes dX or, if is_dw, dW. G is split already. Splits the other operand, W or x, to `pieces`, then multiplies.
template <class Scheme> static cudaError_t launch_dx_or_dw(bool is_dw, const float* other, __half* pieces, float* out,
    int64_t m, int64_t n, int64_t k, const SplitGradient& split_g, cudaStream_t stream) {
    const int64_t terms = is_dw ? m : n;
    RowsToSplit b_operand = {other, pieces, terms, int(k)};
    b_operand.min_exponent_word = is_dw ? split_g.min_exponent_x : split_g.min_exponent_w;
    b_operand.exponents = is_dw ? split_g.row_exponents : split_g.column_exponents;
    const cudaError_t error = launch_split<Scheme>(b_operand, {}, stream);
    if (error != cudaSuccess) return error;
    const int* const exponents = is_dw ? split_g.column_exponents : split_g.row_exponents;  // dW = G^T x
    const StoreGradient epilogue = {b_operand.min_exponent_word, exponents, out, int(is_dw ? n : m), int(k)};
    const Matrix a = matrix_of_pieces<Scheme>(split_g.pieces, m, n);
    const Matrix b = matrix_of_pieces<Scheme>(pieces, terms, k);
    return is_dw ? launch_multiply<true, true, Scheme>(a, b, terms, epilogue, stream)
                 : launch_multiply<false, true, Scheme>(a, b, terms, epilogue, stream);
}
extern "C" int linear_dx_or_dw(bool tf32, bool is_dw, const float* other, __half* pieces, float* out, int64_t m,
    int64_t n, int64_t k, const SplitGradient* split_g, cudaStream_t stream) {
    const auto launch = tf32 ? launch_dx_or_dw<OneProduct<__half, float>> : launch_dx_or_dw<ThreeProducts>;
    return launch(is_dw, other, pieces, out, m, n, k, *split_g, stream);
}
// ---- The groups of linear_swish_group_norm ----

constexpr int kGroupSize = 64;  // features of a group, and columns of a slot
// Loads a thread's columns of a row; `from` points to the first.
template <typename T> __device__ __forceinline__ void load_columns(const T* from, float (&v)[kThreadColumns]) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += kValuesPer16Bytes<T>) {
        const auto pack = *reinterpret_cast<const Pack16<T>*>(from + i);
        for (int j = 0; j < kValuesPer16Bytes<T>; ++j) v[i + j] = float(pack.value[j]);
    }
}
// The activation stands in five places. To use another, change them all:
//     activation            the forward of float32, and the backward of all types
//     forward_activation    the forward of 16-bit types; it may simply return activation(h)
//     activation_slope      the derivative of activation, for the backward
//     differentiate_plainly in C++, for derivatives of derivatives
//     _swish_and_bias       in Python, the plain path
// Three requirements. Of NaN it must make NaN; fminf and fmaxf do not. In float32 the activation's error must be small
// beside its value, because the norm divides by the spread of the group's values, which may be no larger than they are.
// And activation_slope must be finite for every finite h, because the gradient may be 0 there and 0 * infinity is NaN.
// group_gradients uses all of its 128 registers: after a change compile with -Xptxas -v, as another spelling of the
// slope may spill.
//
// As measured, the activation's error is up to 2^-22.4 of its value for |h| < 1, and 2^-17.97 of it at h = -87. Below
// -87.34 sigmoid is flushed to 0.
__device__ __forceinline__ float sigmoid(float h) {  // 1 / (1 + 2^(-h log2(e)))
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(h * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}
__device__ __forceinline__ float activation(float h) { return h * sigmoid(h); }
// For 16-bit types the forward takes one instruction of the special-function unit, not two, which saves 4% of its time:
// s = sigmoid(h) is 1/2 + tanh(h / 2) / 2. With tanh.approx s is off by at most 2^-17.9, and by less where s is small,
// as measured for all floats on an H100 and an H200 (PTX guarantees 2^-12). Eager's rounding of s to 16 bits errs by up
// to 2^-17 or more in float16 for h above -4.1 (s above 2^-6), and 2^-19 in bfloat16 for h above -7.6 (s above 2^-11).
// For these h ours is off by less. For lower h eager's s may be more exact: below -7.6 ours is off by up to 2^-19.7,
// and v by |h| times that.
template <typename T> __device__ __forceinline__ float forward_activation(float h) {
    if (sizeof(T) == 4) return activation(h);
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * h));
    return fmaf(0.5f * h, t, 0.5f * h);
}
__device__ __forceinline__ float activation_slope(float h) { return fmaf(activation(h), 1 - sigmoid(h), sigmoid(h)); }
__device__ __forceinline__ float reciprocal_sqrt(float v) {
    const float r = rsqrtf(v);  // is off by up to two units in the last place
    // A Newton step halves that. Not for 0 and infinity, where it would compute 0 * infinity.
    return v > 0.0f && v < INFINITY ? fmaf(0.5f * r, fmaf(-v * r, r, 1.0f), r) : r;
}
// `lanes` neighbouring lanes share a group of a row, and each has COUNT of its values in v. Subtracts the group's mean
// from v and finds rstd and shift. The normalised values are then v * rstd + shift: shift makes up for the rounding of
// the mean. (For 16-bit types it is 0, which saves 2% of the forward: eager rounds v to 8 or 11 bits, beside which a
// float32 mean is exact.)
template <typename T, int COUNT> __device__ __forceinline__ void center_group(
    float (&v)[COUNT], int lanes, float eps, float& rstd, float& shift) {
    const float inverse_count = 1.0f / (lanes * COUNT);  // a factor of each term: a sum of large values may overflow
    float mean = 0;
    float mean_correction = 0;  // mean + mean_correction is more exact
    float squares = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) mean = fmaf(v[i], inverse_count, mean);
    mean = reduce_threads(mean, lanes, Add());
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        v[i] -= mean;
        if (sizeof(T) == 4) mean_correction += v[i];
        squares = fmaf(v[i], v[i], squares);
    }
    squares = reduce_threads(squares, lanes, Add()) * inverse_count;
    if (sizeof(T) == 4) mean_correction = reduce_threads(mean_correction, lanes, Add()) * inverse_count;
    if (isinf(squares)) mean_correction = 0;  // rstd is to be 0 then. An infinite mean_correction would make it NaN
    rstd = reciprocal_sqrt(fmaf(-mean_correction, mean_correction, squares) + eps);
    shift = -mean_correction * rstd;
}
// The epilogue: Swish, bias and group normalisation. A slot holds 64 rows of one group. Eight lanes share a row, and a
// lane has eight columns of four rows (see load_sums).
template <typename T> struct StoreSwishGroupNorm : LinearEpilogue<T> {
    T* h;  // null if it is not to be stored
    const T *bias, *gamma, *beta;
    float eps;
    struct Loaded : LinearEpilogue<T>::Loaded { alignas(16) float bias[8], gamma[8], beta[8]; };
    __device__ __forceinline__ Loaded load(const Position& lane_start) const {
        Loaded loaded = {LinearEpilogue<T>::load(lane_start)};
        load_vector(bias, lane_start.column, this->n, loaded.bias);
        load_vector(gamma, lane_start.column, this->n, loaded.gamma);
        load_vector(beta, lane_start.column, this->n, loaded.beta);
        return loaded;
    }
    __device__ __forceinline__ void finish(float (&v)[4][8], const Position& lane_start, const Loaded& loaded) const {
        const int m = this->m, n = this->n;
        this->sums_to_h(v, lane_start, loaded);
        if (h != nullptr) store_values(h, v, lane_start, m, n);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float& value = v[i / 8][i % 8];
            value = forward_activation<T>(value) + loaded.bias[i % 8];
        }
        float rstd[4], shift[4];  // of the four rows' groups: see center_group
#pragma unroll
        for (int r = 0; r < 4; ++r) center_group<T>(v[r], kGroupSize / 8, eps, rstd[r], shift[r]);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float& value = v[i / 8][i % 8];
            const float z = fmaf(value, rstd[i / 8], shift[i / 8]);
            value = fmaf(z, loaded.gamma[i % 8], loaded.beta[i % 8]);
        }
        store_values(this->out, v, lane_start, m, n);
    }
};
// Starts a copy from device memory to shared memory by the TMA unit, of a multiple of 16 bytes. `bar` counts the bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar))
        : "memory");
}
// A thread adds up its columns over kRowsPerSum rows in registers. Then this function adds these sums to `partials`, a
// row of n values in device memory, and sets them to 0: short sums, added up, lose less to rounding than a long one.
// (A block's first call only stores them. For 16-bit types a thread adds up all its rows: the gradients are rounded to
// 8 or 11 bits in the end.)
constexpr int kRowsPerSum = 16;
__device__ __forceinline__ void add_to_partials(
    float* partials, float (&sums)[kThreadColumns], int n, bool stored_before) {
    float totals[kThreadColumns] = {};
    const int column = threadIdx.x * kThreadColumns;
    if (stored_before && column < n) load_columns(partials + column, totals);
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
        totals[i] += sums[i];
        sums[i] = 0;
    }
    store_columns(partials, totals, n);
}
// In a group, with z = (v - mean) * rstd, d = grad * gamma and s = sigmoid(h), the gradients of v and of h are
//
//     G_v = rstd * (d - mean(d) - z mean(d z));    G = G_v * (s + h s (1 - s))
//
// The gradients of the linear bias, bias, gamma and beta are sums over rows: of G, G_v, grad * z and grad.
// The backward's launches, in their order:
//
//     float32        ATen's zeros       for the exponents that SplitGradient points to
//                    group_gradients    stores G as pieces, and each block's part of the four sums to partials
//                    scale_columns      finds c_j and scales G's columns by 2^c_j
//                    ATen's sum over the blocks of partials[block][4][n], and its copy of the sums to the gradients
//                    split_rows, then multiply    for dX, with W
//                    split_rows, then multiply    for dW, with x
//     16-bit types   group_gradients    (Scheme is void) stores G as it is to `g_out`, and the four sums
//                    ATen's sum and copy, as above, then its two products
//
// A warp owns 512 columns (whole groups) and a ring of kWarpStages stages in shared memory. Its lane 0 starts the
// copies of h and grad to the stages. (A stage of float32 has 4 KiB: three for each of 16 warps are 192 of a block's
// 227 KiB.) Warps wait for each other only in store_split_row, which scales G's row as a whole.
constexpr int kWarpStages = 3;
constexpr int kWarpColumns = 32 * kThreadColumns;
template <typename T> struct WarpStage { T h[kWarpColumns], grad[kWarpColumns]; };
template <typename T, class Scheme>
__global__ void __launch_bounds__(kMaxGradientThreads) group_gradients(const T* __restrict__ grad,
    const T* __restrict__ h, const T* __restrict__ bias, const T* __restrict__ gamma, float* __restrict__ partials,
    int rows, int n, float eps, const SplitGradient split_g, T* __restrict__ g_out) {
    extern __shared__ __align__(128) unsigned char dynamic_stages[];
    __shared__ float warp_values[2][kMaxGradientThreads / 32];
    __shared__ uint64_t stage_full[kMaxGradientThreads / 32][kWarpStages];
    constexpr int kLanes = kGroupSize / kThreadColumns;  // of a group
    constexpr bool kStoresPieces = !std::is_void_v<Scheme>;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler sees that a warp's lanes agree
    WarpStage<T>* const stages = reinterpret_cast<WarpStage<T>*>(dynamic_stages) + warp * kWarpStages;
    // The thread's first column. A thread beyond n computes with whatever it loads: the last columns of bias and gamma,
    // and what its stage holds. Its sums are not stored. Nor is its G, which is set to 0 for store_split_row.
    const int column = min(int(threadIdx.x) * kThreadColumns, n - kThreadColumns);
    const int warp_start = warp * kWarpColumns;
    const int warp_columns = min(kWarpColumns, n - warp_start);  // 0 or less: the warp has none
    const auto fetch = [&](int row, int stage) {
        if (lane > 0 || row >= rows || warp_columns <= 0) return;
        const int64_t first = int64_t(row) * n + warp_start;
        mbarrier_arrive_expect_tx(&stage_full[warp][stage], 2 * warp_columns * sizeof(T));
        bulk_load(stages[stage].h, h + first, warp_columns * sizeof(T), &stage_full[warp][stage]);
        bulk_load(stages[stage].grad, grad + first, warp_columns * sizeof(T), &stage_full[warp][stage]);
    };
    if (lane == 0) {
        for (int s = 0; s < kWarpStages; ++s) mbarrier_init(&stage_full[warp][s], 1);
        fence_mbarrier_init();
        for (int s = 0; s < kWarpStages; ++s) fetch(blockIdx.x + s * gridDim.x, s);
    }
    __syncwarp();
    float sums[4][kThreadColumns] = {};  // of G, G_v, grad * z, grad
    int iteration = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, ++iteration) {
        const int stage = iteration % kWarpStages;
        float z[kThreadColumns];  // first h, then v, then v - mean, then z
        float g[kThreadColumns];  // first grad, then d, then G
        float slope[kThreadColumns];
        float vector[kThreadColumns];  // first bias, then gamma
        if (warp_columns > 0) mbarrier_wait(&stage_full[warp][stage], iteration / kWarpStages & 1);
        load_columns(stages[stage].h + lane * kThreadColumns, z);
        load_columns(bias + column, vector);
#pragma unroll
        for (int i = 0; i < kThreadColumns; ++i) {
            slope[i] = activation_slope(z[i]);
            z[i] = activation(z[i]) + vector[i];
        }
        float rstd, shift;
        center_group<T>(z, kLanes, eps, rstd, shift);
        load_columns(stages[stage].grad + lane * kThreadColumns, g);
        load_columns(gamma + column, vector);
        float mean_d = 0, mean_dz = 0;  // first sums, then means
#pragma unroll
        for (int i = 0; i < kThreadColumns; ++i) {
            z[i] = fmaf(z[i], rstd, shift);
            sums[2][i] = fmaf(g[i], z[i], sums[2][i]);
            sums[3][i] += g[i];
            g[i] *= vector[i];
            mean_d += g[i];
            mean_dz = fmaf(g[i], z[i], mean_dz);
        }
        mean_d = reduce_threads(mean_d, kLanes, Add()) / kGroupSize;
        mean_dz = reduce_threads(mean_dz, kLanes, Add()) / kGroupSize;
#pragma unroll
        for (int i = 0; i < kThreadColumns; ++i) {
            const float g_v = rstd * (g[i] - mean_d - z[i] * mean_dz);
            g[i] = g_v * slope[i];
            sums[0][i] += g[i];
            sums[1][i] += g_v;
        }
        if constexpr (kStoresPieces) {
            const bool columns_exist = int(threadIdx.x) * kThreadColumns < n;
#pragma unroll
            for (int i = 0; i < kThreadColumns; ++i) g[i] = columns_exist ? g[i] : 0;
            store_split_row<Scheme>(g, row, n, split_g, warp_values[iteration % 2]);
        } else {
            store_columns(g_out + int64_t(row) * n, g, n);
        }
        __syncwarp();  // all lanes have read the stage, so it may be filled again
        fetch(row + kWarpStages * int(gridDim.x), stage);
        const bool is_last_row = row + gridDim.x >= rows;  // of the block
        if ((iteration % kRowsPerSum < kRowsPerSum - 1 || !kStoresPieces) && !is_last_row) continue;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float* const own_partials = partials + (int64_t(blockIdx.x) * 4 + q) * n;
            add_to_partials(own_partials, sums[q], n, kStoresPieces && iteration >= kRowsPerSum);
        }
    }
}
// ---- What else the C++ calls. Pointers are to device memory, 16-byte aligned; those to structs to host memory. ----

struct SwishPointers {
    const void *x, *weight, *linear_bias, *bias, *gamma, *beta;
    void *out, *h;
    RowScale* scales;
    __half* pieces;
};
template <class Scheme, typename T> static cudaError_t launch_swish(
    const SwishPointers& p, int64_t m, int64_t n, int64_t k, float eps, cudaStream_t stream) {
    const auto as = [](const void* pointer) { return static_cast<const T*>(pointer); };
    T* const out = static_cast<T*>(p.out);
    T* const h = static_cast<T*>(p.h);
    const LinearEpilogue<T> linear = {as(p.x), as(p.weight), as(p.linear_bias), out, int(m), int(n), int(k), p.scales};
    const StoreSwishGroupNorm<T> epilogue = {linear, h, as(p.bias), as(p.gamma), as(p.beta), eps};
    return launch_linear<Scheme>(epilogue, p.pieces, stream);
}
// mode: 0 float32, 1 float16, 2 bfloat16, 3 float32 where TF32 is allowed.
extern "C" int linear_swish_group_norm(
    int mode, const SwishPointers* p, int64_t m, int64_t n, int64_t k, float eps, cudaStream_t stream) {
    const auto launch = mode == 0 ? launch_swish<ThreeProducts, float>
        : mode == 1               ? launch_swish<OneProduct<__half, __half>, __half>
        : mode == 2               ? launch_swish<OneProduct<__nv_bfloat16, __nv_bfloat16>, __nv_bfloat16>
                                  : launch_swish<OneProduct<__half, float>, float>;
    return launch(*p, m, n, k, eps, stream);
}
template <typename T, class Scheme> static cudaError_t launch_group_gradients(const void* grad, const void* h,
    const void* bias, const void* gamma, float* partials, int64_t m, int64_t n, float eps, const SplitGradient* split_g,
    void* g_out, cudaStream_t stream) {
    const auto as = [](const void* p) { return static_cast<const T*>(p); };
    const auto kernel = group_gradients<T, Scheme>;
    constexpr int kWarpShared = kWarpStages * sizeof(WarpStage<T>);
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxGradientThreads / 32 * kWarpShared);
    if (error != cudaSuccess) return error;
    const int threads = gradient_threads(n);
    const int shared = threads / 32 * kWarpShared;
    kernel<<<unsigned(gradient_blocks(m, n)), threads, shared, stream>>>(as(grad), as(h), as(bias), as(gamma), partials,
        int(m), int(n), eps, split_g != nullptr ? *split_g : SplitGradient(), static_cast<T*>(g_out));
    if constexpr (!std::is_void_v<Scheme>) {
        scale_columns<Scheme><<<dim3(unsigned(divide_up(n, 256)), 64), 256, 0, stream>>>(*split_g, m, n);
    }
    return cudaGetLastError();
}
// Launches group_gradients and, for float32, scale_columns. m is at least 1, for float32 at least 16, and n at most
// 8192. mode is as that of linear_swish_group_norm.
extern "C" int swish_group_gradients(int mode, const void* grad, const void* h, const void* bias, const void* gamma,
    float* partials, int64_t m, int64_t n, float eps, const SplitGradient* split_g, void* g_out, cudaStream_t stream) {
    const auto launch = mode == 0 ? launch_group_gradients<float, ThreeProducts>
        : mode == 1               ? launch_group_gradients<__half, void>
        : mode == 2               ? launch_group_gradients<__nv_bfloat16, void>
                                  : launch_group_gradients<float, OneProduct<__half, float>>;
    return launch(grad, h, bias, gamma, partials, m, n, eps, split_g, g_out, stream);
}
"""

CPP_SOURCE = r"""
#line 1 "CPP_SOURCE in linear_swish_group_norm.py"
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

constexpr int64_t kGroupSize = 64;  // features of a group, as in the kernels
using Tensors = std::vector<at::Tensor>;
// x (m, k), weight (n, k), the vectors (n), of one dtype and device. Returns out and, if `for_backward`,
// h = x weight^T + linear_bias and scales (as in LinearEpilogue; without elements for 16-bit types).
Tensors forward_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias,
    const at::Tensor& bias, const at::Tensor& gamma, const at::Tensor& beta, int64_t groups, double, bool,
    bool for_backward) {
    const c10::SymInt m = x.sym_size(0), n = weight.sym_size(0);
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.sym_size(1) == weight.sym_size(1), "x (m, k), weight (n, k)");
    TORCH_CHECK(n == kGroupSize * groups, "weight's rows are not ", groups, " groups of ", kGroupSize);
    for (const at::Tensor& t : {linear_bias, bias, gamma, beta}) TORCH_CHECK(t.dim() == 1 && t.sym_size(0) == n, "(n)");
    for (const at::Tensor& t : {weight, linear_bias, bias, gamma, beta}) {
        TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.device() == x.device(), "one dtype and device");
    }
    const at::Tensor out = at::empty_symint({m, n}, x.options());
    if (!for_backward) return {out};
    const c10::SymInt scale_rows = x.scalar_type() == at::kFloat ? n + m : 0;
    return {out, at::empty_like(out), at::empty_symint({scale_rows, 2}, x.options())};
}
// The gradients of x, weight, linear_bias, bias, gamma and beta. One that is not needed comes back without elements.
Tensors backward_meta(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& h,
    const at::Tensor&, const at::Tensor& bias, const at::Tensor& gamma, double, bool, std::array<bool, 6> needs) {
    for (const at::Tensor& t : {grad, weight, h, bias, gamma}) TORCH_CHECK(t.scalar_type() == x.scalar_type(), "dtype");
    const c10::SymInt m = x.sym_size(0), n = weight.sym_size(0);
    TORCH_CHECK(grad.dim() == 2 && grad.sym_size(0) == m && grad.sym_size(1) == n && h.sym_sizes() == grad.sym_sizes(),
        "grad and h (m, n)");
    TORCH_CHECK(x.sym_size(1) == weight.sym_size(1) && bias.sym_numel() == n && gamma.sym_numel() == n, "(m, k), (n)");
    Tensors results;
    for (int i = 0; i < 6; ++i) {
        c10::SymIntArrayRef size = bias.sym_sizes();
        if (i == 0) size = x.sym_sizes();
        if (i == 1) size = weight.sym_sizes();
        results.push_back(needs[i] ? at::empty_symint(size, x.options()) : at::empty({0}, x.options()));
    }
    return results;
}

// ---- The product in C++: the same text in both linear files of this folder. ----
struct SplitGradient {  // as in CUDA_SOURCE
    void* pieces;
    const void* scales;
    int *column_exponents, *row_exponents, *min_exponent_w, *min_exponent_x;
};
extern "C" int linear_dx_or_dw(bool tf32, bool is_dw, const float* other, void* pieces, float* out, int64_t m,
    int64_t n, int64_t k, const SplitGradient* split_g, cudaStream_t stream);
// Memory for the pieces of a matrix: two fp16 numbers a value or, with TF32, one. A row is whole slices of 64 numbers.
at::Tensor empty_pieces(int64_t rows, int64_t k, bool tf32, const at::Tensor& like) {
    const int64_t slice_k = tf32 ? 64 : 32;  // values in a slice
    const int64_t slices = (k + slice_k - 1) / slice_k;
    return at::empty({rows, slices * 64}, like.options().dtype(at::kHalf));
}
at::Tensor aligned(const at::Tensor& t) {  // contiguous, and 16-byte aligned
    const at::Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
float* floats(const at::Tensor& t) { return t.data_ptr<float>(); }
cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream(); }
// The product takes rows of multiples of 16 bytes. Sizes are below 2^24: float32 counts the coarse values of a row
// exactly up to there, and kLargestInverseScale relies on it.
void check_product(const at::Tensor& x, const at::Tensor& weight) {
    const int64_t per_16_bytes = 16 / x.element_size();
    TORCH_CHECK(weight.size(0) % per_16_bytes == 0 && x.size(1) % per_16_bytes == 0, "rows are not whole 16 bytes");
    for (const int64_t size : {x.size(0), weight.size(0), x.size(1)}) {
        TORCH_CHECK(size >= 128 && size < 1 << 24, "a size of ", size, " is not from 128 to 2^24 - 1");
    }
}
// Raises an error if a launch failed, and clears it: else the runtime would report it after the next launch, too.
void check_launch(int error) {
    if (error == 0) return;
    cudaGetLastError();
    TORCH_CHECK(false, "launch failed: ", cudaGetErrorString(cudaError_t(error)));
}
// For float32: computes dX, results[0], and dW, results[1], if needed. compute_g(split_g) computes G and stores its
// pieces. The two products run one after the other, so that the pieces of W and of x do not take memory at the same
// time.
void compute_dx_and_dw(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales, bool tf32,
    bool needs_dx, bool needs_dw, Tensors& results, c10::function_ref<int(const SplitGradient*)> compute_g) {
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    check_product(x, weight);
    TORCH_CHECK(n <= 8192 && scales.size(0) == n + m, "needs n <= 8192 and scales (n + m, 2)");
    const at::Tensor pieces_g = empty_pieces(m, n, tf32, x);
    const at::Tensor exponents = at::zeros({n + m + 2}, x.options().dtype(at::kInt));
    int* const column_exponents = exponents.data_ptr<int>();
    int* const row_exponents = column_exponents + n;
    const SplitGradient split_g = {pieces_g.data_ptr(), scales.data_ptr(), column_exponents, row_exponents,
        row_exponents + m, row_exponents + m + 1};
    check_launch(compute_g(&split_g));
    const auto compute_product = [&](bool is_dw, const at::Tensor& other) {
        const at::Tensor pieces = empty_pieces(other.size(0), k, tf32, x);
        const at::Tensor aligned_other = aligned(other);
        const at::Tensor out = at::empty({is_dw ? n : m, k}, x.options());
        check_launch(linear_dx_or_dw(
            tf32, is_dw, floats(aligned_other), pieces.data_ptr(), floats(out), m, n, k, &split_g, current_stream()));
        results[is_dw ? 1 : 0] = out;
    };
    if (needs_dx) compute_product(false, weight);
    if (needs_dw) compute_product(true, x);
}

struct SwishPointers {
    const void *x, *weight, *linear_bias, *bias, *gamma, *beta;
    void *out, *h, *scales, *pieces;
};
extern "C" int linear_swish_group_norm(
    int mode, const SwishPointers* p, int64_t m, int64_t n, int64_t k, float eps, cudaStream_t stream);
extern "C" int64_t gradient_blocks(int64_t m, int64_t n);
extern "C" int swish_group_gradients(int mode, const void* grad, const void* h, const void* bias, const void* gamma,
    float* partials, int64_t m, int64_t n, float eps, const SplitGradient* split_g, void* g_out, cudaStream_t stream);
int mode_of(const at::Tensor& t, bool tf32) {  // of the kernels' launchers
    if (t.scalar_type() == at::kHalf) return 1;
    if (t.scalar_type() == at::kBFloat16) return 2;
    return tf32 ? 3 : 0;
}

Tensors forward_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias,
    const at::Tensor& bias, const at::Tensor& gamma, const at::Tensor& beta, int64_t groups, double eps, bool tf32,
    bool for_backward) {
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    const c10::cuda::CUDAGuard guard(x.device());
    check_product(x, weight);
    const Tensors outputs = forward_meta(x, weight, linear_bias, bias, gamma, beta, groups, eps, tf32, for_backward);
    const at::Tensor inputs[] = {
        aligned(x), aligned(weight), aligned(linear_bias), aligned(bias), aligned(gamma), aligned(beta)};
    SwishPointers p = {inputs[0].data_ptr(), inputs[1].data_ptr(), inputs[2].data_ptr(), inputs[3].data_ptr(),
        inputs[4].data_ptr(), inputs[5].data_ptr(), outputs[0].data_ptr(),
        for_backward ? outputs[1].data_ptr() : nullptr};
    at::Tensor scales, pieces;
    if (x.scalar_type() == at::kFloat) {
        scales = for_backward ? outputs[2] : at::empty({n + m, 2}, x.options());
        pieces = empty_pieces(m + n, k, tf32, x);
        p.scales = scales.data_ptr();
        p.pieces = pieces.data_ptr();
    }
    check_launch(linear_swish_group_norm(mode_of(x, tf32), &p, m, n, k, float(eps), current_stream()));
    return outputs;
}

Tensors backward_cuda(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& h,
    const at::Tensor& scales, const at::Tensor& bias, const at::Tensor& gamma, double eps, bool tf32,
    std::array<bool, 6> needs) {
    Tensors results = backward_meta(grad, x, weight, h, scales, bias, gamma, eps, tf32, {});
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t m = h.size(0), n = h.size(1);
    TORCH_CHECK(m > 0 && n % kGroupSize == 0 && n <= 8192, "rows of groups of 64 features, 8192 at most");
    const bool is_float = x.scalar_type() == at::kFloat;  // then G is split. For 16-bit types it is stored in g
    const at::Tensor g = is_float ? at::Tensor() : at::empty_like(h, at::MemoryFormat::Contiguous);
    // Stores G to `split_g`, or to g, and the gradients of the four vectors to results.
    const auto compute_g = [&](const SplitGradient* split_g) {
        const at::Tensor aligned_grad = aligned(grad), aligned_h = aligned(h);
        const at::Tensor aligned_bias = aligned(bias), aligned_gamma = aligned(gamma);
        const at::Tensor partials = at::empty({gradient_blocks(m, n), 4, n}, x.options().dtype(at::kFloat));
        const int error = swish_group_gradients(mode_of(x, tf32), aligned_grad.data_ptr(), aligned_h.data_ptr(),
            aligned_bias.data_ptr(), aligned_gamma.data_ptr(), floats(partials), m, n, float(eps), split_g,
            is_float ? nullptr : g.data_ptr(), current_stream());
        // float32: summed in float64, for accuracy. 16-bit types: in float32, because summing in float64 makes ATen
        // convert all partials first, and the result is rounded to 16 bits anyway.
        const at::Tensor sums =
            partials.sum(at::IntArrayRef{0}, /*keepdim=*/false, is_float ? at::kDouble : at::kFloat);
        Tensors from, to;
        for (int i = 0; i < 4; ++i) {
            if (!needs[i + 2]) continue;
            results[i + 2] = at::empty({n}, x.options());
            to.push_back(results[i + 2]);
            from.push_back(sums.select(0, i));
        }
        if (!to.empty()) at::_foreach_copy_(to, from);  // one launch for all
        return error;
    };
    if (is_float) {
        compute_dx_and_dw(x, weight, scales, tf32, needs[0], needs[1], results, compute_g);
        return results;
    }
    check_launch(compute_g(nullptr));
    if (needs[0]) results[0] = at::mm(g, weight);
    if (needs[1]) results[1] = at::mm(g.t(), x);
    return results;
}

// Finds the operator of that name in PyTorch's dispatcher, which has an implementation for GPUs (_cuda) and one for
// tracing (_meta), which only makes tensors of the right sizes.
template <typename F> c10::TypedOperatorHandle<F> operator_of(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}
// The whole network, for autograd. Saves its inputs, h and the scales. With create_graph or several gradients at once
// all derivatives are ATen's.
struct LinearSwishGroupNorm : torch::autograd::Function<LinearSwishGroupNorm> {
    using Context = torch::autograd::AutogradContext;

    static at::Tensor forward(Context* context, const at::Tensor& x, const at::Tensor& weight,
        const at::Tensor& linear_bias, const at::Tensor& bias, const at::Tensor& gamma, const at::Tensor& beta,
        int64_t groups, double eps, bool tf32) {
        static const auto forward = operator_of<decltype(forward_meta)>("NAMESPACE::forward");
        const at::AutoDispatchBelowADInplaceOrView no_autograd;
        const Tensors outputs = forward.call(x, weight, linear_bias, bias, gamma, beta, groups, eps, tf32, true);
        context->save_for_backward({x, weight, linear_bias, bias, gamma, beta, outputs[1], outputs[2]});
        context->saved_data["groups"] = groups;
        context->saved_data["eps"] = eps;
        context->saved_data["tf32"] = tf32;
        return outputs[0];
    }
    static Tensors backward(Context* context, const Tensors& grads) {
        const Tensors saved = context->get_saved_variables();  // in the order of save_for_backward
        const double eps = context->saved_data["eps"].toDouble();
        std::array<bool, 6> needs;
        for (int i = 0; i < 6; ++i) needs[i] = context->needs_input_grad(i);
        Tensors gradients;
        // With is_grads_batched=True a tensor stands for several gradients: our operators have no rule for that.
        const c10::DispatchKeySet batched({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched});
        if (at::GradMode::is_enabled() || grads[0].key_set().has_any(batched)) {
            const int64_t groups = context->saved_data["groups"].toInt();
            gradients = differentiate_plainly(grads[0], saved, groups, eps, needs);
        } else {
            static const auto backward = operator_of<decltype(backward_meta)>("NAMESPACE::backward");
            const at::AutoDispatchBelowADInplaceOrView no_autograd;
            const bool tf32 = context->saved_data["tf32"].toBool();
            gradients =
                backward.call(grads[0], saved[0], saved[1], saved[6], saved[7], saved[3], saved[4], eps, tf32, needs);
        }
        for (int i = 0; i < 6; ++i) {
            if (!needs[i]) gradients[i] = at::Tensor();
        }
        gradients.resize(9);  // none for groups, eps and tf32
        return gradients;
    }
    // Differentiates the Model's lines, by ATen, with respect to views of the inputs. Views, because one input may be
    // computed from another. Without views, grad would also follow that path to the other's gradient. Autograd follows
    // it after this call, and would count it twice.
    static Tensors differentiate_plainly(
        const at::Tensor& grad, Tensors inputs, int64_t groups, double eps, const std::array<bool, 6>& needs) {
        const bool create_graph = at::GradMode::is_enabled();
        const at::AutoGradMode enable_grad(true);
        Tensors needed, gradients(6);
        for (int i = 0; i < 6; ++i) {
            inputs[i] = inputs[i].view_symint(inputs[i].sym_sizes());
            if (needs[i]) needed.push_back(inputs[i]);
        }
        const at::Tensor h = at::linear(inputs[0], inputs[1], inputs[2]);
        const at::Tensor v = h.sigmoid().mul(h).add(inputs[3]);
        const at::Tensor out = at::group_norm(v, groups, inputs[4], inputs[5], eps);
        const Tensors needed_gradients = torch::autograd::grad({out}, needed, {grad}, std::nullopt, create_graph);
        for (int i = 0, next = 0; i < 6; ++i) {
            if (needs[i]) gradients[i] = needed_gradients[next++];
        }
        return gradients;
    }
};
at::Tensor differentiable(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias,
    const at::Tensor& bias, const at::Tensor& gamma, const at::Tensor& beta, int64_t groups, double eps, bool tf32) {
    return LinearSwishGroupNorm::apply(x, weight, linear_bias, bias, gamma, beta, groups, eps, tf32);
}

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("differentiable(Tensor x, Tensor weight, Tensor linear_bias, Tensor bias, Tensor gamma, Tensor beta, "
          "int groups, float eps, bool tf32) -> Tensor",
        differentiable);
    m.def("forward(Tensor x, Tensor weight, Tensor linear_bias, Tensor bias, Tensor gamma, Tensor beta, int groups, "
          "float eps, bool tf32, bool for_backward) -> Tensor[]");
    m.def("backward(Tensor grad, Tensor x, Tensor weight, Tensor h, Tensor scales, Tensor bias, Tensor gamma, "
          "float eps, bool tf32, bool[6] needs) -> Tensor[]");
    m.impl("forward", torch::dispatch(c10::DispatchKey::Meta, forward_meta));
    m.impl("backward", torch::dispatch(c10::DispatchKey::Meta, backward_meta));
    m.impl("forward", torch::dispatch(c10::DispatchKey::CUDA, forward_cuda));
    m.impl("backward", torch::dispatch(c10::DispatchKey::CUDA, backward_cuda));
    // Only `differentiable` has gradients: backward through one of these, called directly, raises an error.
    for (const char* name : {"forward", "backward"}) {
        m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
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


def _read(module: nn.Module, name: str) -> torch.Tensor:
    """The attribute of that name. nn.Module's own look-up takes the host about a microsecond more."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)  # FakeTensor: as in torch.export with strict=False
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _are_plain_tensors(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether these are plain tensors of one Hopper GPU and dtype, without autocast, transforms or _exports_layers."""
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or _exports_layers():
        return False
    if type(x) not in _TYPES or not x.is_cuda or x.device.index not in _HOPPERS or x.dtype not in _DTYPES:
        return False
    device, dtype = x.device, x.dtype
    for t in (x, *others):  # a loop, as all() takes the host a microsecond more
        if type(t) not in _TYPES or t.layout is not torch.strided or t.dtype is not dtype or t.device != device:
            return False
    return True


def _is_exporting() -> bool:  # PyTorch 2.11 and older trace torch.compiler.is_exporting as True wherever they compile
    return torch.compiler.is_exporting()


def _product_fits(m: int, n: int, k: int, value_bytes: int) -> bool:
    """Whether x (m, k) by weight (n, k) is for the operator: sizes as in check_product, 2^30 multiplications or more.

    Smaller products often have too few tiles to beat cuBLAS. So has an output below 1 MiB, however long the sums: 128 x
    128, k = 65536 takes twice cuBLAS's time.
    """
    per_16_bytes = 16 // value_bytes
    if n % per_16_bytes != 0 or k % per_16_bytes != 0 or min(n, k) < 128 or max(n, k) >= 2**24:
        return False
    known = bool
    if _is_exporting():  # m may stand for a range: to ask whether it is large enough would narrow that range
        from torch.fx.experimental.symbolic_shapes import statically_known_true as known
    is_large = known(m * n * k >= 2**30) and known(m * n * value_bytes >= 2**20)
    return is_large and known(m >= 128) and known(m < 2**24)


def _is_recorded(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return allowed and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"  # which cuBLAS obeys


# Dynamo calls these three as it traces, and keeps the results (as torch.compiler.assume_constant_result asks, without
# importing torch._dynamo). If one of PyTorch's settings changes, it compiles anew.
_allows_tf32._dynamo_marked_constant = _is_exporting._dynamo_marked_constant = True
_exports_layers._dynamo_marked_constant = True

NEEDS = "sm_90"  # the fast path's GPU; without one, nothing is built
_GPUS = range(torch.cuda.device_count() if torch.version.cuda else 0)
_HOPPERS = [gpu for gpu in _GPUS if torch.cuda.get_device_capability(gpu)[0] == 9]
_GROUP_SIZE = 64  # features of a group, as in the kernels
if _HOPPERS:  # where nothing is built, the 0.1 s of this import are saved
    from torch.utils import cpp_extension
NAMESPACE = _load("hopper_linear_swish_group_norm", "90a") if _HOPPERS else ""
_OPERATORS = getattr(torch.ops, NAMESPACE) if NAMESPACE else None


def _swish_and_bias(h: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(h) * h + bias


def _is_large(linear: nn.Module, x: torch.Tensor) -> bool:
    """Whether linear(x) is a large product, by the layer's attributes. This test takes the least time, so it is first:
    a small layer's call takes little longer than the Model's."""
    if type(linear) is not nn.Linear or not isinstance(x, torch.Tensor) or x.dim() != 2:
        return False
    return _product_fits(x.shape[0], linear.out_features, linear.in_features, x.element_size())


def _fits(linear: nn.Linear, tensors: tuple, groups: int) -> bool:
    """Whether the operator may stand for the Model's lines, if _is_large. `tensors`: x, weight, four vectors."""
    if not _are_plain_tensors(*tensors):
        return False
    x, weight, *vectors = tensors
    n, k = linear.out_features, linear.in_features
    if weight.shape != (n, k) or x.shape[1] != k or n != _GROUP_SIZE * groups:
        return False
    return [v.shape for v in vectors] == [(n,)] * 4 and (n <= 8192 or not _is_recorded(*tensors))


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features); returns (B, out_features). Other shapes do what they do in the Model.
    """

    def __init__(self, in_features: int, out_features: int, num_groups: int, bias_shape: tuple):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting():
            return self._run(x)
        return self.group_norm(_swish_and_bias(self.matmul(x), self.bias))  # all that torch.jit.script compiles

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        linear, norm, bias = self.matmul, self.group_norm, _read(self, "bias")
        if _is_large(linear, x) and _is_unchanged(linear, nn.Linear) and _is_unchanged(norm, nn.GroupNorm):
            linear_parameters = (_read(linear, "weight"), _read(linear, "bias"))
            tensors = (x, *linear_parameters, bias, _read(norm, "weight"), _read(norm, "bias"))
            if _fits(linear, tensors, norm.num_groups):
                settings = (norm.num_groups, norm.eps, _allows_tf32())
                if _is_recorded(*tensors):
                    return _OPERATORS.differentiable.default(*tensors, *settings)
                return _OPERATORS.forward.default(*tensors, *settings, False)[0]
        return norm(_swish_and_bias(linear(x), bias))
