# SPDX-License-Identifier: MIT
"""Instance normalisation that mostly reads its input from DRAM once: a drop-in for `nn.InstanceNorm2d(C)`, not affine.

    y = (x - mean) * rstd,    rstd = 1 / sqrt(var + eps)
    dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * mean((x - mean) * g))    with g, the gradient of y

mean and var are those of a slice: the H x W values of one image and channel. var is the biased variance. On a GPU of
compute capability 7.5 or more (`_load` checks that) the kernels take float32, float16 and bfloat16. On a CPU they take
only float32 without gradients. ModelNew calls PyTorch's instance_norm for everything else (see `fits`).

Every value is used for the mean and the variance and, once all of its slice has been read, again for the output. The
GPU kernels read it from DRAM once, unless its slice is very large. Until they write the output, they keep the slice (in
the backward also that of g) on the chip. The slice's size decides where (on an H200; in brackets: in the backward):

    up to 1023 bytes, if 16 does not divide them    in shared memory of one block, together with other slices
    others up to 64 KiB (32 KiB)                    in the registers of a group of 1 to 512 threads
    up to 9.2 MiB (4.6 MiB)                         in shared memory of blocks, which wait for each other's sums
    larger, or if blocks cannot all run at once     nowhere: the input is read twice

If 16 does not divide a slice's bytes, the limits from 32 KiB on are a little lower. `ModelNew.forward` calls
InstanceNorm.apply or, without gradients, the operator `forward`. On a GPU that is run_on_gpu in CPP_SOURCE. It calls
`instance_norm`, the last function of CUDA_SOURCE. `launch`, above it, chooses a kernel. In CUDA_SOURCE read "Memory",
"Sums" and "Slices in registers", then "Small slices" or "Larger slices".

At the benchmark shape, x of (112, 64, 512, 512), `norm_in_many_blocks` runs. In float32 its forward cuts each slice of
1 MiB into 19 tiles of up to 54 KiB, so 132 blocks, of 4 tiles each, hold 27 slices at a time. It moves 15.03 GB, as
fast as a copy of x does; the backward alone moves 22.5 GB. On an H200 `python harness.py instance_norm --backward
--dtype float32,bfloat16` found ("2.31x eager" is 2.31 times as fast as eager; the last line is with
TORCH_CUDA_ARCH_LIST=8.0+PTX, so the driver compiles the PTX):

    float32                     forward 3.508 ms: 2.31x eager, 1.57x compile    with backward 9.025 ms: 2.04x, 1.60x
    bfloat16                    forward 1.801 ms: 3.73x eager, 1.66x compile    with backward 4.536 ms: 3.27x, 1.64x
    float32, compiled for 8.0   forward 3.512 ms                                with backward 9.022 ms
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
#line 1 "CUDA_SOURCE in instance_norm.py"
#undef __CUDA_NO_HALF_CONVERSIONS__  // PyTorch defines both; without them float(v) and T(v) convert all three types
#undef __CUDA_NO_BFLOAT16_CONVERSIONS__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <algorithm>

// ---------------------------------------------------------------------------------------------------------------------
// Memory. A thread loads and stores packs. A pack is V consecutive values, mostly 16 bytes. Its address is a multiple
// of its size. A span is the packs of 16 bytes that a slice touches, numbered from 0. If V does not divide n, the
// number of a slice's values, spans are RAGGED: a slice may begin and end inside a pack, whose other values are its
// neighbours'. A thread loads such a pack whole (but nothing past the tensor's end), adds up only the slice's own
// values, and stores only their outputs, one by one. Here V is 4 and n is 10. A # marks a value of slice 1, a dot a
// neighbour's:
//
//      pack             0              1              2
//               [ .  .  #  # ] [ #  #  #  # ] [ #  #  #  # ] [ .  .  .  . ]
//              slice 0 | slice 1                             | slice 2
//                      head = 2, packs = 3, last_end = 4, mask(0) = 0b1100

template <typename T> constexpr int kValuesPer16Bytes = 16 / sizeof(T);
template <int V> constexpr unsigned kWholePack = (1u << V) - 1;  // the mask of a pack without values of neighbours
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T value[V]; };
template <typename T, int V> __device__ __forceinline__ float value_of(const Pack<T, V>& pack, int i) {
    return float(pack.value[i]);
}
// A bfloat16 is the upper half of a float, so here one instruction converts a value. float(v) takes 1.5 on average.
template <int V> __device__ __forceinline__ float value_of(const Pack<__nv_bfloat16, V>& pack, int i) {
    if constexpr (V == 1) return float(pack.value[0]);
    const uint32_t two = reinterpret_cast<const uint32_t*>(pack.value)[i / 2];
    return __uint_as_float(i % 2 == 0 ? two << 16 : two & 0xffff0000);
}
// A pack of x and, in the backward, that of g at the same place. INPUTS is 1 in the forward, 2 in the backward.
template <typename T, int V, int INPUTS> struct InputPacks { Pack<T, V> pack[INPUTS]; };
// Reads a pack of each input from shared memory: that of x, and that of g `stride` packs after it.
template <int INPUTS, typename T, int V> __device__ __forceinline__ InputPacks<T, V, INPUTS> read_inputs(
    const Pack<T, V>* x, int stride) {
    InputPacks<T, V, INPUTS> inputs;
#pragma unroll
    for (int j = 0; j < INPUTS; ++j) inputs.pack[j] = x[j * stride];
    return inputs;
}

// What a launch computes, and what the host needs for it.
template <typename T> struct Params {
    const T* input[2];  // x, and in the backward g: `slices` contiguous slices of n values
    T* output;  // y, in the backward dx
    int64_t slices, n;
    double inverse_n;  // 1 / n
    float eps;
    void* (*allocate)(void* owner, int64_t bytes);  // makes `owner` hold that many bytes, and returns their address
    void* owner;  // an at::Tensor of CPP_SOURCE, which owns the workspace
    double* workspace;  // global memory, where each block stores its sums for the other blocks to read
    cudaStream_t stream;
};

// The calling thread copies 16 bytes from global memory to shared memory. From compute capability 8.0 on the copy runs
// while the thread continues; before 8.0 it is an ordinary load and store. The copy tells L2 to evict its lines last. A
// launch reads most lines only once, and yet the kernels take 0.97 of the time with this hint (on an H200).
__device__ __forceinline__ void copy_async(void* shared, const void* from) {
#if __CUDA_ARCH__ >= 800
    const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
        :
        : "r"(to), "l"(from), "l"(policy)
        : "memory");
#else
    *static_cast<uint4*>(shared) = *static_cast<const uint4*>(from);
#endif
}
// The thread commits the copies that it began since its last call as one cp.async group, which counts even if it is
// empty. Then it waits until all but its last N groups are complete. Before 8.0 this does nothing.
template <int N> __device__ __forceinline__ void commit_and_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\ncp.async.wait_group %0;" : : "n"(N) : "memory");
#endif
}

template <typename T, bool RAGGED> struct Span {
    static constexpr int V = kValuesPer16Bytes<T>;
    // base: the index of pack 0's first value in the tensor. head: how many of pack 0's values lie before the slice.
    // last_end: how many of the last pack's values lie before the slice's end.
    int64_t base = 0;
    int head = 0, packs = 0, last_end = V;

    Span() = default;
    // Past the tensor's end a slice has no packs. An unsigned remainder by V, a power of two, is one instruction.
    __device__ Span(const Params<T>& params, int64_t slice) {
        if (slice >= params.slices) return;
        const int64_t begin = slice * params.n;
        if (RAGGED) head = int(uint64_t(begin) % V);
        base = begin - head;
        packs = int((head + params.n + V - 1) / V);
        if (RAGGED) last_end = int(uint64_t(head + params.n - 1) % V) + 1;
    }
    // Bit i of the mask says whether value i of pack p belongs to the slice.
    __device__ unsigned mask(int p) const {
        if (!RAGGED) return kWholePack<V>;
        const unsigned from_head = p == 0 ? kWholePack<V> << head : kWholePack<V>;
        const unsigned to_end = p == packs - 1 ? kWholePack<V> >> (V - last_end) : kWholePack<V>;
        return from_head & to_end & kWholePack<V>;
    }
    // Loads pack p of input j (0: x, 1: g). If ASYNC, it only begins to copy the pack to shared memory.
    template <bool ASYNC> __device__ void load(const Params<T>& params, Pack<T, V>& to, int j, int p) const {
        const int64_t at = base + int64_t(p) * V;
        const T* const from = params.input[j] + at;
        if (RAGGED && at + V > params.slices * params.n) {
            // The tensor ends inside this pack. Load the values that exist, at once even if ASYNC.
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (at + i < params.slices * params.n) to.value[i] = from[i];
            }
        } else if constexpr (ASYNC) {
            copy_async(&to, from);
        } else {
            to = *reinterpret_cast<const Pack<T, V>*>(from);
        }
    }
    // Stores pack p of the output: only the slice's values.
    __device__ void store(const Params<T>& params, const Pack<T, V>& pack, int p) const {
        T* const to = params.output + base + int64_t(p) * V;
        const unsigned mask = this->mask(p);
        if (mask == kWholePack<V>) {
            *reinterpret_cast<Pack<T, V>*>(to) = pack;
            return;
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if (mask >> i & 1) to[i] = pack.value[i];
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums, and the output. The output needs a slice's sums of d and d * d and, in the backward, of e and d * e. Here d is
// x - shift[0], and e is g - shift[1]. Then mean(x) = shift[0] + mean(d), and var = mean(d * d) - mean(d)^2. If the
// shift is near the mean, mean(d) is small, and subtracting mean(d)^2 loses little precision, even if x is noise around
// 10000. Two kinds of sums have the slice's first value as shift: those that find a shift near the mean, and the double
// sums of larger slices.

// Adds the values of `inputs`, if RAGGED only those in `mask`, to `sum`: the thread's sums of d, d * d, e and d * e.
// It adds up a pack first, and then adds that to `sum`: so a value goes through fewer roundings.
template <bool RAGGED, typename T, int V, int INPUTS> __device__ __forceinline__ void add_to_sums(
    float* sum, const InputPacks<T, V, INPUTS>& inputs, unsigned mask, const float (&shift)[INPUTS]) {
    float pack_sums[2 * INPUTS] = {};
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (RAGGED && !(mask >> i & 1)) continue;
        const float d = value_of(inputs.pack[0], i) - shift[0];
        pack_sums[0] += d;
        pack_sums[1] = fmaf(d, d, pack_sums[1]);
        if constexpr (INPUTS == 2) {
            const float e = value_of(inputs.pack[1], i) - shift[1];
            pack_sums[2] += e;
            pack_sums[3] = fmaf(d, e, pack_sums[3]);
        }
    }
#pragma unroll
    for (int k = 0; k < 2 * INPUTS; ++k) sum[k] += pack_sums[k];
}

// A Normalizer turns a slice's values into its outputs. A float is not exact enough for a mean: the mean of x is
// mean[0] + residual[0], that of g is mean[1] + residual[1]. For an x near the mean, the difference x - mean[0] is
// nearly exact, so `offset` can correct for the residuals afterwards:
//     y  = (x - mean[0]) * rstd + offset                                offset = -residual[0] * rstd
//     dx = ((g - mean[1]) - (x - mean[0]) * slope + offset) * rstd      offset = residual[0] * slope - residual[1]
// Here slope is rstd^2 * the covariance of x and g, mean(d * e) - mean(d) * mean(e). The forward does not set it.
template <int INPUTS> struct Normalizer {
    float mean[INPUTS], rstd, slope, offset;

    // sums: of d, of d * d / n and, in the backward, of e, of d * e / n. Real is float or double.
    template <typename Real> __device__ void set(
        const Real (&sums)[2 * INPUTS], const float (&shift)[INPUTS], Real inverse_n, float eps) {
        Real mean_minus_shift[INPUTS];  // mean(d), mean(e)
        float residual[INPUTS];
#pragma unroll
        for (int j = 0; j < INPUTS; ++j) {
            mean_minus_shift[j] = sums[2 * j] * inverse_n;
            mean[j] = float(shift[j] + mean_minus_shift[j]);
            residual[j] = float(mean_minus_shift[j] - (Real(mean[j]) - shift[j]));
        }
        const float variance = float(sums[1] - mean_minus_shift[0] * mean_minus_shift[0]);
        rstd = rsqrtf((variance < 0 ? 0 : variance) + eps);  // not fmaxf, which would drop a NaN
        if constexpr (INPUTS == 1) {
            offset = -residual[0] * rstd;
        } else {
            slope = rstd * rstd * float(sums[3] - mean_minus_shift[0] * mean_minus_shift[1]);
            offset = residual[0] * slope - residual[1];
        }
    }
    // Here d and e are around the means, not the shifts.
    template <typename T, int V> __device__ Pack<T, V> operator()(const InputPacks<T, V, INPUTS>& inputs) const {
        Pack<T, V> out;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const float d = value_of(inputs.pack[0], i) - mean[0];
            if constexpr (INPUTS == 1) {
                out.value[i] = T(fmaf(d, rstd, offset));
            } else {
                const float e = value_of(inputs.pack[1], i) - mean[1];
                out.value[i] = T(fmaf(d, -slope, e + offset) * rstd);
            }
        }
        return out;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Slices in registers. A group of threads has a slice, and each of its threads holds up to PACKS packs of it. The
// number of a group's threads is a power of two from 1 to 512. All arithmetic is in float. First the group takes a
// sample of the values, and uses the sample's means of x and g as the shifts. Then it computes the sums around the
// shifts, and from these a Normalizer.
//
// In float32 the sample is the whole slice, so the shift is the mean up to rounding, and the sum of d corrects that. In
// 16 bits the sample is the first pack of each thread. This is enough: if k of n values are in it, the shift differs
// from the mean by at most sqrt(v / k), where v is the sum of (x - mean)^2 over the slice. So the sum of d * d is at
// most (1 + n / k) * v. A thread has at most 8 packs, one of them in the sample, so n / k is at most 8 and the factor
// at most 9. In RAGGED spans up to 7 of the k values, in pack 0, are neighbours'. For each of them the slice's first
// value, whose d is 0, counts instead, so up to 8 times: the squares of these weights add up to at most k + 7 * 8. k is
// at least 128, as these slices have more than 1023 bytes; the factor is at most 1 + 8 * (1 + 7 * 8 / 128) = 12.5. So
// subtracting mean(d)^2 loses less than 4 of a float's 24 bits. If all of x is equal, the shift is exact, and y is 0.

// Threads of a block. In norm_in_registers one with a larger group has more; in norm_small_slices it may have fewer.
constexpr int kBlockThreads = 128;
constexpr int kMaxGroupThreads = 512;
constexpr int kHeldBytes = 128;  // the most bytes that a thread holds; in the backward half are g's

// Adds up each of COUNT values over aligned runs of `lanes` lanes, a power of two. All lanes of the warp call it. The
// neighbours get the same bits, since in every step two lanes exchange their values, and a + b = b + a.
template <int COUNT> __device__ void add_over_lanes(float (&value)[COUNT], int lanes) {
    for (int lane_mask = 1; lane_mask < lanes; lane_mask *= 2) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) value[k] += __shfl_xor_sync(~0u, value[k], lane_mask);
    }
}
// The same over a group of `group_threads` threads. All threads of the block call it. If a group has several warps,
// lane 0 of each stores the warp's sums, and after the barrier each warp adds up those of the group. Calls with the
// same COUNT share one warp_values. For groups of several warps, a kernel may therefore make only one call per COUNT: a
// second could overwrite sums that a slow warp still reads.
template <int COUNT> __device__ void add_over_group(float (&value)[COUNT], int group_threads) {
    __shared__ float warp_values[kMaxGroupThreads / 32][COUNT];
    if (group_threads <= 32) return add_over_lanes(value, group_threads);
    const int warps = group_threads / 32, first_warp = (threadIdx.x & -group_threads) / 32;
    add_over_lanes(value, 32);
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) warp_values[threadIdx.x / 32][k] = value[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; ++k) value[k] = warp_values[first_warp + threadIdx.x % warps][k];
    add_over_lanes(value, warps);
}

// Computes the Normalizer of a slice. All threads of the block call it. shift: the slice's first values; they become
// the sample's means. add(sum, shift, only_sample) adds a thread's values to `sum` as add_to_sums does; if only_sample,
// those in the sample. add_over_slice(sums) adds up sums over all threads of a slice. inverse_k: 1 / k.
template <typename T, int INPUTS, typename Add, typename AddOverSlice>
__device__ __forceinline__ Normalizer<INPUTS> compute_normalizer(const Params<T>& params, float inverse_k,
    float (&shift)[INPUTS], const Add& add, const AddOverSlice& add_over_slice) {
    // Move the shifts to the sample's means, up to a small error. Each thread divides its own sums before these are
    // added up, because the total might overflow.
    float sample_sums[2 * INPUTS] = {};  // only the sums of d and e are used: the compiler drops the others
    add(sample_sums, shift, true);
    float mean_minus_shift[INPUTS];
#pragma unroll
    for (int j = 0; j < INPUTS; ++j) mean_minus_shift[j] = sample_sums[2 * j] * inverse_k;
    add_over_slice(mean_minus_shift);
#pragma unroll
    for (int j = 0; j < INPUTS; ++j) shift[j] += mean_minus_shift[j];

    const float inverse_n = float(params.inverse_n);
    float sum[2 * INPUTS] = {};
    add(sum, shift, false);
#pragma unroll
    for (int k = 1; k < 2 * INPUTS; k += 2) sum[k] *= inverse_n;  // d * d and d * e: their totals could overflow
    // The sums of d and e are divided later, in Normalizer. Their totals are small, because the shifts are near the
    // means now. If divided here, the smallest of a thread's sums would underflow to 0.
    add_over_slice(sum);
    Normalizer<INPUTS> normalizer;
    normalizer.set(sum, shift, inverse_n, params.eps);
    return normalizer;
}

// The asm statement has no instructions, but tells the compiler that it changes the packs. Otherwise the compiler would
// convert the values to float only once, for the sums and the output, and keep the floats in registers in between. With
// at most 16 values a thread that is good. With more there are too few registers, and it would spill them.
template <typename T, int V, int INPUTS, int PACKS> __device__ __forceinline__ void make_opaque(
    InputPacks<T, V, INPUTS> (&held)[PACKS]) {
    if constexpr (PACKS * INPUTS * V > 16) {
        uint32_t* const words = reinterpret_cast<uint32_t*>(held);
#pragma unroll
        for (int i = 0; i < int(sizeof(held) / 4); ++i) asm volatile("" : "+r"(words[i]));
    }
}

template <typename T, int INPUTS, int PACKS, bool RAGGED>
__global__ void __launch_bounds__(kMaxGroupThreads, 1024 / kMaxGroupThreads)
    norm_in_registers(const Params<T> params, int log_group_threads) {
    constexpr int V = kValuesPer16Bytes<T>;
    constexpr int kSamplePacks = sizeof(T) == 4 ? PACKS : 1;  // the packs of a thread that are in the sample
    // A block has `groups` groups of `group_threads` threads. The thread is number `rank` of group `group`.
    const int group_threads = 1 << log_group_threads, rank = threadIdx.x & (group_threads - 1);
    const int groups = blockDim.x >> log_group_threads, group = threadIdx.x >> log_group_threads;
    const Span<T, RAGGED> span(params, int64_t(blockIdx.x) * groups + group);
    // Calls use(i, p) for each pack that the thread has: its i-th, which is the span's p-th.
    const auto for_each_pack = [&](const auto& use) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int p = rank + i * group_threads;
            if (p < span.packs) use(i, p);
        }
    };
    InputPacks<T, V, INPUTS> held[PACKS];
    for_each_pack([&](int i, int p) {
#pragma unroll
        for (int j = 0; j < INPUTS; ++j) span.template load<false>(params, held[i].pack[j], j, p);
    });
    float shift[INPUTS];
#pragma unroll
    for (int j = 0; j < INPUTS; ++j) shift[j] = span.packs > 0 ? float(params.input[j][span.base + span.head]) : 0;
    const auto add = [&](float* sum, const float (&shift)[INPUTS], bool only_sample) {
        for_each_pack([&](int i, int p) {
            if (!only_sample || i < kSamplePacks) add_to_sums<RAGGED>(sum, held[i], span.mask(p), shift);
        });
        make_opaque(held);
    };
    const int sample_values = min(group_threads * kSamplePacks * V, int(params.n));
    const float inverse_k = kSamplePacks == PACKS ? float(params.inverse_n) : __fdividef(1, float(sample_values));
    const auto normalizer =
        compute_normalizer(params, inverse_k, shift, add, [&](auto& sums) { add_over_group(sums, group_threads); });
    for_each_pack([&](int i, int p) { span.store(params, normalizer(held[i]), p); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Small slices have at most 1023 bytes, and 16 does not divide these. The packs of 16 bytes that such a slice shares
// with its neighbours are a large part of it. So a block copies a run of memory, its slices, to shared memory, 16 bytes
// at a time. There its threads replace x by the outputs, and then it copies the run to the output.
//
// The threads read the run word by word. A word is a pack of 4 bytes: one value, or two of 16 bits. A slice of an odd
// number of such values begins or ends inside a word. There it has a single value, which is in none of its words:
//
//      words of 16-bit values    [ #  # ][ #  # ][ #  . ][ .  . ][ .  . ][ #  # ][ #  # ][ #  . ][ .  . ] ...
//      slices (n = 5)              0 (#)               1 (.)               2 (#)               3 (.)
//
// A slice's words are cut into 1 to 8 parts, one a thread. All but the last have the same number of words. Neighbouring
// threads have the same part of neighbouring slices. That number is odd, so that the parts in one warp begin in
// different banks: at most 2 threads share one (in 16 bits 4). A thread holds no values, but reads them three times:
// for the sample, the sums and the output. In float32 the sample is the whole slice, in 16 bits the first 4 words of
// each part and the single value. A slice has less than 32 words for each of its parts, so n / k is less than 8.

constexpr int kMaxSmallBytes = 1023, kMaxPartWords = 33;  // 255 words in 8 parts: 32 a part, made odd

// The block copies a run of values to shared memory, or back: first packs of 16 bytes and then, one by one, the values
// left over. Only the tensor's last run has such values. A block has a multiple of 16 slices, so every run begins at a
// multiple of 16 bytes.
template <bool ASYNC, typename T> __device__ void copy_run(T* to, const T* from, int values) {
    constexpr int V = kValuesPer16Bytes<T>;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    for (int i = thread * V; i + V <= values; i += threads * V) {
        if constexpr (ASYNC) copy_async(to + i, from + i);
        else *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
    for (int i = values / V * V + thread; i < values; i += threads) to[i] = from[i];
}
// Adds up each of COUNT values over the parts of a slice. All threads of the block call it, once for each COUNT.
template <int COUNT> __device__ void add_over_parts(float (&value)[COUNT]) {
    __shared__ float thread_values[COUNT][kBlockThreads];
    if (blockDim.y == 1) return;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) thread_values[k][threadIdx.y * blockDim.x + threadIdx.x] = value[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; ++k) value[k] = 0;
#pragma unroll 1
    for (int part = 0; part < blockDim.y; ++part) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) value[k] += thread_values[k][part * blockDim.x + threadIdx.x];
    }
}

// The thread has part threadIdx.y of the block's slice threadIdx.x.
template <typename T, int INPUTS>
__global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads)
    norm_small_slices(const Params<T> params, int part_words) {
    constexpr int W = 4 / sizeof(T);  // the values of a word
    constexpr int kSampleWords = sizeof(T) == 4 ? kMaxPartWords : 4;  // the words of a part that are in the sample
    const int n = int(params.n), words = n / W;
    const int64_t first_slice = int64_t(blockIdx.x) * blockDim.x;
    // The run of x and, in the backward, `stride` values after it, that of g. The last block may have fewer slices than
    // blockDim.x. Its other threads compute with whatever is there, and nobody copies their outputs.
    extern __shared__ __align__(128) uint4 shared[];
    T* const run = reinterpret_cast<T*>(shared);
    const int stride = blockDim.x * n, run_values = int(min(int64_t(blockDim.x), params.slices - first_slice)) * n;
#pragma unroll
    for (int j = 0; j < INPUTS; ++j) copy_run<true>(run + j * stride, params.input[j] + first_slice * n, run_values);
    commit_and_wait<0>();
    __syncthreads();

    T* const slice = run + threadIdx.x * n;
    const int head = threadIdx.x * n % W;  // 1 if the slice begins inside a word
    Pack<T, W>* const first_word = reinterpret_cast<Pack<T, W>*>(slice + head);
    Pack<T, 1>* const single = reinterpret_cast<Pack<T, 1>*>(head == 0 ? slice + n - 1 : slice);
    const int begin = min(threadIdx.y * part_words, words), end = min(begin + part_words, words);
    // Calls use(x, inputs) for each of the thread's words before `limit` and, in part 0, for the single value if there
    // is one. x points to that word or value in the run of x.
    const auto for_each_word = [&](int limit, const auto& use) {
#pragma unroll 4
        for (int w = begin; w < limit; ++w) use(first_word + w, read_inputs<INPUTS>(first_word + w, stride / W));
        if (n % W != 0 && threadIdx.y == 0) use(single, read_inputs<INPUTS>(single, stride));
    };
    float shift[INPUTS];
#pragma unroll
    for (int j = 0; j < INPUTS; ++j) shift[j] = float(slice[j * stride]);
    const auto add = [&](float* sum, const float (&shift)[INPUTS], bool only_sample) {
        for_each_word(only_sample ? min(begin + kSampleWords, end) : end,
            [&](auto*, const auto& inputs) { add_to_sums<false>(sum, inputs, 0, shift); });
    };
    const int sample_values = min(int(blockDim.y) * kSampleWords, words) * W + n % W;
    const auto normalizer = compute_normalizer(
        params, __fdividef(1, float(sample_values)), shift, add, [](auto& sums) { add_over_parts(sums); });
    for_each_word(end, [&](auto* x, const auto& inputs) { *x = normalizer(inputs); });
    __syncthreads();
    copy_run<false>(params.output + first_slice * n, run, run_values);
}

// ---------------------------------------------------------------------------------------------------------------------
// Larger slices are cut into tiles. A block copies a tile to its shared memory, and keeps it there until it has written
// the tile's output. The tiles of all slices are numbered, slice after slice:
//
//      tile    0   1   2   3   4   5   6   7   8  ...      tile = 3 * slice + index; here a slice has 3 tiles
//      slice   0   0   0   1   1   1   2   2   2
//
// In each round a block begins a tile. Block b takes tiles b, b + gridDim.x, b + 2 * gridDim.x and so on:
//
//      3 stages       round 0     1         2         3         4         5
//      1st tile       arrives   summed     waits    written
//      2nd tile                 arrives   summed     waits    written
//      3rd tile                           arrives   summed     waits    written
//
// A stage is room in shared memory for one tile of x and, in the backward, for the same tile of g. It lies in pieces,
// one for each warp. The tile that arrives in a round goes to the stage that the tile written in that round leaves. A
// block's last warp is its reducer, and the others are workers. A worker warp has up to kThreadPacks * 32 packs of
// every tile, and each lane every 32nd of them. In a round a worker thread goes over its packs once. At each of them it
//   1. reads its pack of the summed tile from shared memory, and adds the values to the thread's sums;
//   2. reads its pack of the written tile from shared memory, and stores the output in global memory;
//   3. begins to copy its pack of the arriving tile from global memory to where step 2 has read;
//   4. waits until its next pack of the summed tile is in shared memory; the copy began almost a round ago. After the
//      last pack, the next is the first of the tile that arrived in this round.
// Meanwhile the reducer prepares the tile that the next round writes. It reads the workspace, where blocks publish
// sums, until it has those of all tiles of the same slice. From them it computes a Normalizer, and stores it in shared
// memory. With it the workers write the tile in the next round. A barrier ends the round. Then the reducer adds up the
// warps' sums of the tile that was summed, and publishes the totals: it stores them in the slice's section of the
// workspace.
//
// No flags or fences are needed. Blocks outside a cluster share no memory but global memory, so sums go there. Before
// the cooperative launch the host sets all doubles of the workspace to kEmpty. A block stores a sum by one volatile
// store of 64 bits, which goes to L2; there other blocks' reducers load it. So a double that is not kEmpty is a whole
// sum.
//
// When a block has published a tile's sums, it has a round of other work (two with 4 stages) before it needs the
// Normalizer. So it loses no time if other blocks are a little late. Copies and stores are spread evenly over the
// round.
//
// No block waits forever. All blocks are resident, that is on the SMs at the same time: the launch is cooperative. A
// slice has no more tiles than there are blocks, so a block has at most one tile of it. A block takes its tiles in
// ascending order, and before it publishes a tile's sums it waits only for the sums of earlier slices, those of tiles
// it took before. Proof: take the first slice with an unpublished sum, and the block that has to publish it. Until then
// that block waits only for sums of earlier slices. Those are all published, so it goes on and publishes its own.
//
// Blocks cannot wait if a slice has more tiles than there are resident blocks, or if the cooperative launch is refused
// (see launch_in_many_blocks). Then the kernel is launched twice, not cooperatively. The first launch publishes all
// sums and writes no output. The second finds all sums there, so no block waits, even if it has several tiles of a
// slice. It publishes the sums again, with the same bits.

// A worker thread has room for 24 packs, 384 bytes, shared by its stages and inputs. 24 is divisible by inputs times
// stages: 3, 4, 6 or 8.
template <int INPUTS, int STAGES> constexpr int kThreadPacks = 24 / INPUTS / STAGES;
// The most threads of a block of norm_in_many_blocks: the reducer and 18 worker warps. A worker warp has 32 * 384 bytes
// of shared memory, 18 have 216 KiB. A block can have 227 KiB on 9.0 and 10.0. An H200 runs 132 blocks, one on each SM:
// all their stages have 27.8 MiB. The largest slices have one of three stages of each block: a third of that, 9.2 MiB,
// of which in the backward half is for g.
constexpr int kMaxTileThreads = 19 * 32;
constexpr int64_t kEmpty = -1;  // all bits are set; as a double this is a NaN, which is never published
struct Tiling {
    int tiles_per_slice;
    int packs_per_tile;  // a slice's last tile may have fewer
    int section_doubles;  // of a slice's section of the workspace; each section begins on a 128-byte line
};

// A warp adds up in float, around a shift of its own: the median of three values of a whole pack, which no single
// outlier can be. Without a whole pack it is one value. At least two of the warp's values, of which there are up to
// 2048, are as far from their mean as that median. So the sum of d * d is at most 1 + 2048 / 2 times that around the
// mean: of a float's 24 bits at most 11 are lost, and far fewer if not nearly all values are equal.
//
// Warps' shifts differ, so each warp then converts its sums, in double, to sums around the slice's first value. These
// are added over all warps and tiles, always in the same order. The sum of d * d around one of n values is at most n +
// 1 times that around the mean. So subtracting mean(d)^2 loses at most about log2(n) of a double's 53 bits.

__device__ __forceinline__ float median(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

template <typename T, int INPUTS, bool RAGGED> struct WarpSums {
    static constexpr int V = kValuesPer16Bytes<T>, kSums = 2 * INPUTS;
    float shift[INPUTS];
    float sum[kSums + 1] = {};  // d, d * d, e, d * e, and at kSums the number of values

    // inputs: the lane's first pack of the tile. mask: which of its values belong to the slice; 0 if it has no pack.
    __device__ void choose_shift(const InputPacks<T, V, INPUTS>& inputs, unsigned mask) {
        // Lane 1 chooses, or lane 0 if only lane 0 has a pack. Lane 0 may have the slice's first pack, where value 0
        // may be a neighbour's, and the only own value an outlier. Lane 1 has a pack then: a slice's first tile has at
        // least 32. In all other packs value 0 belongs to the slice.
        const int chooser = __ballot_sync(~0u, mask != 0) & 2 ? 1 : 0;
#pragma unroll
        for (int j = 0; j < INPUTS; ++j) {
            const auto value = [&](int i) { return value_of(inputs.pack[j], i); };
            float own = mask == 0 ? 0 : value(0);
            if (mask == kWholePack<V>) own = median(value(0), value(V / 2), value(V - 1));
            shift[j] = __shfl_sync(~0u, own, chooser);
        }
    }
    __device__ void add(const InputPacks<T, V, INPUTS>& inputs, unsigned mask) {
        add_to_sums<RAGGED>(sum, inputs, mask, shift);
        sum[kSums] += __popc(mask);
    }
    // Adds up the lanes' sums. Lane 0 converts the totals to sums around the slice's first values, and stores them.
    // x_delta and g_delta are the shifts minus these first values:
    //     sum (d + x_delta)^2 = sum d^2 + 2 * x_delta * sum d + values * x_delta^2
    //     sum (d + x_delta) * (e + g_delta) = sum d * e + x_delta * sum e + g_delta * sum (d + x_delta)
    __device__ void store(double* to, const T (&first_value)[INPUTS]) {
        add_over_lanes(sum, 32);
        if (threadIdx.x % 32 != 0) return;
        const double x_delta = double(shift[0]) - float(first_value[0]);
        const double values = sum[kSums];
        to[0] = sum[0] + values * x_delta;
        to[1] = sum[1] + x_delta * (2.0 * sum[0] + values * x_delta);
        if constexpr (INPUTS == 2) {
            const double g_delta = double(shift[1]) - float(first_value[1]);
            to[2] = sum[2] + values * g_delta;
            to[3] = sum[3] + x_delta * sum[2] + g_delta * to[0];
        }
    }
};

// Adds up a value over the lanes of a warp whose number % kSums is the same. They all get the same bits.
template <int kSums> __device__ double add_over_strided_lanes(double value) {
#pragma unroll
    for (int lane_mask = 16; lane_mask >= kSums; lane_mask /= 2) value += __shfl_xor_sync(~0u, value, lane_mask);
    return value;
}
// A warp adds up the published sums of a slice's tiles: kSums doubles a tile. Lane l returns the total of the
// sums numbered l % kSums. Each lane reads its doubles again and again until none is kEmpty.
template <int kSums> __device__ double add_published(const double* from, int tiles_per_slice) {
    constexpr int kAtOnce = 8;  // how many sums a lane loads before it uses the first of them
    double total = 0;
    for (int first = threadIdx.x % 32; first < tiles_per_slice * kSums; first += kAtOnce * 32) {
        double sum[kAtOnce];
        bool all_published = false;
        while (!all_published) {
            all_published = true;
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int at = first + k * 32;
                sum[k] = at < tiles_per_slice * kSums ? static_cast<const volatile double*>(from)[at] : 0;
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) all_published &= __double_as_longlong(sum[k]) != kEmpty;
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) total += sum[k];
    }
    __syncwarp();
    return add_over_strided_lanes<kSums>(total);
}

// Tile `index` of a slice, or no tile if `slice` is -1. A worker thread has up to PACKS of the slice's packs:
// first_pack, first_pack + 32, ..., all below end_pack.
template <typename T, int INPUTS, bool RAGGED, int PACKS> struct Tile {
    int slice = -1, index = 0, first_pack = 0, end_pack = 0;
    Span<T, RAGGED> span;
    // The slice's first value of each input. A thread that converted it to float here would wait for the load in
    // every round, and the bfloat16 backward would take 1.03 times as long (with slices of 40 KiB 1.2 times).
    T first_value[INPUTS] = {};

    Tile() = default;
    __device__ Tile(const Params<T>& params, const Tiling& tiling, int tile) {
        if (tile >= int(params.slices) * tiling.tiles_per_slice) return;
        slice = tile / tiling.tiles_per_slice;
        index = tile % tiling.tiles_per_slice;
        span = Span<T, RAGGED>(params, slice);
        first_pack = index * tiling.packs_per_tile + int(threadIdx.x) / 32 * 32 * PACKS + int(threadIdx.x) % 32;
        end_pack = min((index + 1) * tiling.packs_per_tile, span.packs);
#pragma unroll
        for (int j = 0; j < INPUTS; ++j) first_value[j] = params.input[j][slice * params.n];
    }
};

// writes_output: false only in the first of two launches.
template <typename T, int INPUTS, bool RAGGED, int STAGES>
__global__ void __launch_bounds__(kMaxTileThreads, 1)
    norm_in_many_blocks(const Params<T> params, const Tiling tiling, const bool writes_output) {
    constexpr int V = kValuesPer16Bytes<T>, kSums = 2 * INPUTS, PACKS = kThreadPacks<INPUTS, STAGES>;
    // [warp][stage][pack][input][lane]. Each thread reads only what it copied itself, so it need not wait for other
    // threads. Aligned to only 16 bytes, `stages` would make the forward take 1.15 times as long (H200, 1 MiB in
    // float32), the backward 1.04 times, in bfloat16 1.07.
    extern __shared__ __align__(128) uint4 stages[];
    // One of each for even rounds and one for odd rounds: workers store one warp_sums while the reducer may still read
    // the other, and read one Normalizer while the reducer stores the other.
    __shared__ double warp_sums[2][kMaxTileThreads / 32][kSums];
    __shared__ Normalizer<INPUTS> normalizers[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, worker_warps = blockDim.x / 32 - 1;
    const auto stage_of = [&](int round) {  // the thread's first pack in the round's stage
        return reinterpret_cast<Pack<T, V>*>(stages) + (warp * STAGES + round % STAGES) * PACKS * INPUTS * 32 + lane;
    };
    const auto section_of = [&](int slice) { return params.workspace + int64_t(slice) * tiling.section_doubles; };

    Tile<T, INPUTS, RAGGED, PACKS> tiles[STAGES + 1];  // the tile that arrives, ..., the tile that is written
    const auto &arriving = tiles[0], &summed = tiles[1], &waiting = tiles[STAGES - 1], &written = tiles[STAGES];
    Normalizer<INPUTS> known_normalizer;  // the reducer's, of slice `known_slice`
    int known_slice = -1;
    // A round for each of the block's tiles, and STAGES more, until the last tile is written.
    const int rounds =
        (int(params.slices) * tiling.tiles_per_slice - 1 - int(blockIdx.x)) / int(gridDim.x) + 1 + STAGES;
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int k = STAGES; k > 0; --k) tiles[k] = tiles[k - 1];
        tiles[0] = Tile<T, INPUTS, RAGGED, PACKS>(params, tiling, int(blockIdx.x) + round * int(gridDim.x));
        if (warp < worker_warps) {
            const Normalizer<INPUTS> normalizer = normalizers[(round + 1) % 2];  // stored in the last round
            // summed_stage holds the tile that arrived last round. In written_stage the arriving tile replaces the
            // written tile, pack by pack.
            const Pack<T, V>* const summed_stage = stage_of(round + STAGES - 1);
            Pack<T, V>* const written_stage = stage_of(round);
            WarpSums<T, INPUTS, RAGGED> sums;
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int at = i * INPUTS * 32;  // where the warp's i-th packs are in its part of a stage
                const int summed_pack = summed.first_pack + i * 32;
                const unsigned mask = summed_pack < summed.end_pack ? summed.span.mask(summed_pack) : 0;
                const InputPacks<T, V, INPUTS> inputs = read_inputs<INPUTS>(summed_stage + at, 32);
                if (i == 0) sums.choose_shift(inputs, mask);
                if (mask != 0) sums.add(inputs, mask);
                const int written_pack = written.first_pack + i * 32;
                if (writes_output && written_pack < written.end_pack) {
                    written.span.store(params, normalizer(read_inputs<INPUTS>(written_stage + at, 32)), written_pack);
                }
                const int p = arriving.first_pack + i * 32;
#pragma unroll
                for (int j = 0; j < INPUTS; ++j) {
                    if (p >= arriving.end_pack) continue;
                    arriving.span.template load<true>(params, written_stage[at + j * 32], j, p);
                }
                commit_and_wait<PACKS - 1>();
            }
            sums.store(warp_sums[round % 2][warp], summed.first_value);
        } else if (writes_output && waiting.slice >= 0) {
            // In the second of two launches a block may have several tiles of a slice, which need the same Normalizer.
            if (waiting.slice != known_slice) {
                double total = add_published<kSums>(section_of(waiting.slice), tiling.tiles_per_slice);
                if (lane % 2 == 1) total *= params.inverse_n;  // of d * d and d * e
                double sum[kSums];
                float shift[INPUTS];
#pragma unroll
                for (int j = 0; j < INPUTS; ++j) shift[j] = float(waiting.first_value[j]);
#pragma unroll
                for (int k = 0; k < kSums; ++k) sum[k] = __shfl_sync(~0u, total, k);
                known_normalizer.set(sum, shift, params.inverse_n, params.eps);
                known_slice = waiting.slice;
            }
            if (lane == 0) normalizers[round % 2] = known_normalizer;
        }
        __syncthreads();
        if (warp == worker_warps && summed.slice >= 0) {
            double total = 0;
            const int first_warp = lane / kSums, k = lane % kSums;
            for (int w = first_warp; w < worker_warps; w += 32 / kSums) total += warp_sums[round % 2][w][k];
            total = add_over_strided_lanes<kSums>(total);
            // A sum that has the bits of kEmpty becomes another NaN, 0xFFFF000000000000.
            const bool is_empty_pattern = __double_as_longlong(total) == kEmpty;
            volatile double* const to = section_of(summed.slice) + summed.index * kSums;
            if (lane < kSums) to[lane] = is_empty_pattern ? __longlong_as_double(kEmpty << 48) : total;
        }
    }
}

#define RETURN_ERROR_OF(call) \
    if (const cudaError_t error = (call)) return error

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A group has as few threads as can hold a slice.
template <typename T, int INPUTS, int PACKS, bool RAGGED>
static cudaError_t launch_in_registers(const Params<T>& params, int64_t packs) {
    int log_group_threads = 0;
    while ((PACKS << log_group_threads) < packs) ++log_group_threads;
    const int block_threads = std::max(kBlockThreads, 1 << log_group_threads);
    const unsigned grid = unsigned(divide_up(params.slices, block_threads >> log_group_threads));
    norm_in_registers<T, INPUTS, PACKS, RAGGED><<<grid, block_threads, 0, params.stream>>>(params, log_group_threads);
    return cudaGetLastError();
}
template <typename T, int INPUTS> static cudaError_t launch_small_slices(const Params<T>& params) {
    const int bytes = int(params.n * sizeof(T)), words = bytes / 4;  // of a slice
    const int parts = words / 32 + 1, slices = kBlockThreads / parts / 16 * 16;
    const int part_words = int(divide_up(words, parts)) | 1, shared_bytes = slices * bytes * INPUTS;
    const unsigned grid = unsigned(divide_up(params.slices, slices));
    norm_small_slices<T, INPUTS><<<grid, dim3(slices, parts), shared_bytes, params.stream>>>(params, part_words);
    return cudaGetLastError();
}
template <typename T, int INPUTS, bool RAGGED, int STAGES>
static cudaError_t launch_in_many_blocks(Params<T> params, int64_t packs) {
    void* const kernel = reinterpret_cast<void*>(norm_in_many_blocks<T, INPUTS, RAGGED, STAGES>);
    int device = 0, sms = 0, sm_shared_bytes = 0, blocks_per_sm = 0;
    RETURN_ERROR_OF(cudaGetDevice(&device));
    RETURN_ERROR_OF(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    RETURN_ERROR_OF(cudaDeviceGetAttribute(&sm_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    // A block has as many worker warps as an SM's shared memory has room for: 18 on 9.0, 13 on 8.0, 8 on 8.6, 5 on 7.5.
    // So an SM runs one block. 2560 bytes are for its static shared memory (up to 1280), for CUDA itself (1024), and to
    // spare.
    constexpr int kWarpBytes = 32 * 384, kWarpPacks = 32 * kThreadPacks<INPUTS, STAGES>;
    const int worker_warps = std::min((sm_shared_bytes - 2560) / kWarpBytes, kMaxTileThreads / 32 - 1);
    const int block_threads = (worker_warps + 1) * 32, shared_bytes = worker_warps * kWarpBytes;  // of a block
    RETURN_ERROR_OF(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    RETURN_ERROR_OF(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, block_threads, shared_bytes));
    const int64_t resident_blocks = int64_t(blocks_per_sm) * sms;
    // A slice gets the fewest tiles that hold it. If that leaves resident blocks idle, it gets more, but each tile
    // before the last still fills at least one warp, as there are over 2048 packs. packs_per_tile is a multiple of 32.
    const int64_t min_tiles = divide_up(packs, worker_warps * kWarpPacks), max_tiles = divide_up(packs, kWarpPacks);
    const int64_t wanted_tiles = std::max(min_tiles, std::min(max_tiles, resident_blocks / params.slices));
    const int64_t packs_per_tile = divide_up(divide_up(packs, wanted_tiles), 32) * 32;
    const int64_t tiles_per_slice = divide_up(packs, packs_per_tile);
    if constexpr (STAGES == 4) {  // larger slices fit with three: each stage is larger
        if (tiles_per_slice > resident_blocks) return launch_in_many_blocks<T, INPUTS, RAGGED, 3>(params, packs);
    }
    const int64_t section_doubles = divide_up(tiles_per_slice * 2 * INPUTS, 16) * 16;
    Tiling tiling = {int(tiles_per_slice), int(packs_per_tile), int(section_doubles)};
    const size_t workspace_bytes = params.slices * section_doubles * sizeof(double);
    params.workspace = static_cast<double*>(params.allocate(params.owner, workspace_bytes));
    const unsigned grid = unsigned(std::min(params.slices * tiles_per_slice, resident_blocks));
    bool writes_output = true;
    void* args[] = {&params, &tiling, &writes_output};
    if (tiles_per_slice <= resident_blocks) {
        // When the kernel begins, each double is kEmpty.
        RETURN_ERROR_OF(cudaMemsetAsync(params.workspace, 0xff, workspace_bytes, params.stream));
        if (cudaLaunchCooperativeKernel(kernel, grid, block_threads, args, shared_bytes, params.stream) == cudaSuccess)
            return cudaSuccess;
        // On a part of a GPU (MIG, MPS) fewer blocks may be resident than computed above. Then this launch is refused.
        // Clear its error, whatever it is, and launch twice instead, so that no block waits.
        cudaGetLastError();
    }
    writes_output = false;
    RETURN_ERROR_OF(cudaLaunchKernel(kernel, grid, block_threads, args, shared_bytes, params.stream));
    writes_output = true;
    return cudaLaunchKernel(kernel, grid, block_threads, args, shared_bytes, params.stream);
}

template <typename T, int INPUTS, bool RAGGED> static cudaError_t launch(const Params<T>& params) {
    constexpr int V = kValuesPer16Bytes<T>, kHeldPacks = kHeldBytes / 16 / INPUTS;  // kHeldPacks: per thread and input
    const int64_t packs = (params.n + (RAGGED ? 2 * V - 2 : 0)) / V;  // no slice touches more
    if (packs > kMaxGroupThreads * kHeldPacks) {
        // In float32 four stages are faster than three (H200, slices of 1 MiB: 0.98 of the time, backward 0.93). In 16
        // bits three are faster than four (0.95, backward 0.88).
        return launch_in_many_blocks<T, INPUTS, RAGGED, sizeof(T) == 4 ? 4 : 3>(params, packs);
    }
    // launch_in_registers<T, INPUTS, PACKS, RAGGED>: a thread has up to PACKS packs. On the right: an image of bfloat16
    // whose forward takes this line.
    if constexpr (RAGGED) {
        if (params.n * sizeof(T) <= kMaxSmallBytes) return launch_small_slices<T, INPUTS>(params);  // 7 x 7, 14 x 14
    } else {
        if (packs <= 2) return launch_in_registers<T, INPUTS, 1, false>(params, packs);  // 4 x 4
        if (packs <= 16) return launch_in_registers<T, INPUTS, 2, false>(params, packs);  // 8 x 8
        if (packs <= 512) return launch_in_registers<T, INPUTS, 4, false>(params, packs);  // 16 x 16
    }
    return launch_in_registers<T, INPUTS, kHeldPacks, RAGGED>(params, packs);  // 31 x 31, 128 x 128
}

// dtype: 0 float32, 1 float16, 2 bfloat16. It writes the output to `out` or, if grad is not null, the gradient of x. If
// blocks are to publish sums, it calls allocate(owner, bytes) for the workspace. It returns a cudaError_t.
extern "C" int instance_norm(int dtype, const void* grad, const void* x, void* out, int64_t slices, int64_t n,
    double eps, void* (*allocate)(void* owner, int64_t bytes), void* owner, cudaStream_t stream) {
    const auto launch_as = [=](auto zero) {
        using T = decltype(zero);
        const Params<T> params = {{static_cast<const T*>(x), static_cast<const T*>(grad)}, static_cast<T*>(out), slices,
            n, 1.0 / n, float(eps), allocate, owner, nullptr, stream};
        const bool ragged = n % kValuesPer16Bytes<T> != 0;
        if (grad == nullptr) return ragged ? launch<T, 1, true>(params) : launch<T, 1, false>(params);
        return ragged ? launch<T, 2, true>(params) : launch<T, 2, false>(params);
    };
    return dtype == 0 ? launch_as(float()) : dtype == 1 ? launch_as(__half()) : launch_as(__nv_bfloat16());
}
"""

CPP_SOURCE = r"""
#line 1 "CPP_SOURCE in instance_norm.py"
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif
#include <algorithm>
#include <cmath>

namespace {

// For a CPU. Writes n outputs of a slice: y = (x - mean) * rstd + offset. If `bypass`, the stores bypass the caches.
// For that y must be aligned to 32 bytes, and n must be a multiple of 8.
void write(float* y, const float* x, int64_t n, float mean, float rstd, float offset, bool bypass) {
#ifdef __AVX__
    if (bypass) {
        const __m256 means = _mm256_set1_ps(mean), rstds = _mm256_set1_ps(rstd), offsets = _mm256_set1_ps(offset);
        for (int64_t i = 0; i < n; i += 8) {
            _mm256_stream_ps(y + i, (_mm256_loadu_ps(x + i) - means) * rstds + offsets);
        }
        return;
    }
#endif
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * rstd + offset;
}

// Normalises `slices` slices of n values. While a slice's output is written, the slice after it, at `next`, is summed.
// The loop takes kChunk values (2 KiB) of each slice in turn, so that memory is read and written at the same time. The
// sums, in double, are of d and of d * d, where d is x minus the slice's first value.
constexpr int64_t kChunk = 512;
void normalize(const float* x, float* y, int64_t slices, int64_t n, double eps, bool bypass) {
    float mean = 0, rstd = 0, offset = 0;  // of the slice that is written; offset corrects for the rounding of mean
    for (int64_t slice = 0; slice <= slices; ++slice) {
        const float* const next = x + slice * n;
        const double first_value = slice < slices ? next[0] : 0;
        double sum = 0;
        double sum_squares = 0;
        for (int64_t at = 0; at < n; at += kChunk) {
            const int64_t end = std::min(at + kChunk, n);
            if (slice < slices) {
#pragma omp simd reduction(+ : sum, sum_squares)
                for (int64_t i = at; i < end; ++i) {
                    const double d = next[i] - first_value;
                    sum += d;
                    sum_squares += d * d;
                }
            }
            if (slice > 0) write(y + (slice - 1) * n + at, next - n + at, end - at, mean, rstd, offset, bypass);
        }
        const double mean_minus_shift = sum / n, exact_mean = first_value + mean_minus_shift;
        const double variance = (sum_squares - sum * mean_minus_shift) / n;
        const double exact_rstd = 1 / std::sqrt((variance < 0 ? 0 : variance) + eps);  // std::max would drop a NaN
        mean = float(exact_mean);
        rstd = float(exact_rstd);
        offset = float((mean - exact_mean) * exact_rstd);
    }
#ifdef __AVX__
    _mm_sfence();  // other threads see the streamed stores before they see that this thread is done
#endif
}

// x is (..., H, W), of float32; y is contiguous, as InstanceNorm2d's output is. Each thread takes some of the slices.
// The grain is about 32768 values, as ATen's GRAIN_SIZE.
at::Tensor instance_norm_cpu(const at::Tensor& x, double eps) {
    const at::Tensor input = x.contiguous();
    at::Tensor y = at::empty_like(input, at::MemoryFormat::Contiguous);
    if (x.numel() == 0) return y;
    const int64_t n = x.size(-1) * x.size(-2);
    const float* const from = input.const_data_ptr<float>();
    float* const to = y.mutable_data_ptr<float>();
    // For outputs of 8 to 32 MiB `bypass` takes 0.7 to 0.95 of the time of ordinary stores. For larger ones malloc gets
    // new pages. The operating system has just zeroed these, in the cache, and `bypass` takes 1.25 of the time.
    const bool aligned = n % 8 == 0 && reinterpret_cast<uintptr_t>(to) % 32 == 0;
    const bool bypass = aligned && y.nbytes() >= size_t(8) << 20 && y.nbytes() < size_t(32) << 20;
    at::parallel_for(0, x.numel() / n, 32768 / n + 1,
        [&](int64_t begin, int64_t end) { normalize(from + begin * n, to + begin * n, end - begin, n, eps, bypass); });
    return y;
}

#ifdef WITH_CUDA
extern "C" int instance_norm(int dtype, const void* grad, const void* x, void* out, int64_t slices, int64_t n,
    double eps, void* (*allocate)(void* owner, int64_t bytes), void* owner, cudaStream_t stream);

// Raises an error if a launch failed, and clears it: else the runtime would report it after the next launch, too.
void check_launch(int error) {
    if (error == 0) return;
    cudaGetLastError();
    TORCH_CHECK(false, "launch failed: ", cudaGetErrorString(cudaError_t(error)));
}
// Returns t, or a copy if t is not contiguous or, as a view may be, not aligned to 16 bytes.
at::Tensor contiguous_on_16_bytes(const at::Tensor& t) {
    const at::Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
// Returns the output or, if `grad` is defined, the gradient of x.
at::Tensor run_on_gpu(const at::Tensor& grad, const at::Tensor& x, double eps) {
    const auto type = x.scalar_type();
    TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, "no kernel: ", type);
    TORCH_CHECK(
        !grad.defined() || (grad.sizes() == x.sizes() && grad.scalar_type() == type && grad.device() == x.device()),
        "instance_norm: the gradient must have the input's shape, dtype and device");
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor input = contiguous_on_16_bytes(x), gradient = grad.defined() ? contiguous_on_16_bytes(grad) : grad;
    at::Tensor out = at::empty_like(input, at::MemoryFormat::Contiguous);
    if (x.numel() == 0) return out;
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n;
    TORCH_CHECK(n < (int64_t(1) << 33) - (1 << 15), "instance_norm: a slice of ", n, " values is too large");
    const int dtype = type == at::kFloat ? 0 : type == at::kHalf ? 1 : 2;
    const void* const grad_data = grad.defined() ? gradient.data_ptr() : nullptr;
    at::Tensor workspace = at::empty({0}, x.options().dtype(at::kByte));
    const auto allocate = [](void* owner, int64_t bytes) {
        at::Tensor& workspace = *static_cast<at::Tensor*>(owner);
        workspace = at::empty({bytes}, workspace.options());
        return workspace.data_ptr();
    };
    check_launch(instance_norm(dtype, grad_data, input.data_ptr(), out.data_ptr(), slices, n, eps, allocate, &workspace,
        c10::cuda::getCurrentCUDAStream().stream()));
    return out;
}
#endif

// For the Meta key: a tensor of the output's shape, dtype and strides, without values.
at::Tensor empty_output(const at::Tensor& x) { return at::empty_like(x, x.options(), at::MemoryFormat::Contiguous); }

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor x, float eps) -> Tensor");
    m.def("backward(Tensor grad, Tensor x, float eps) -> Tensor");
    m.impl("forward", c10::DispatchKey::CPU, instance_norm_cpu);
    m.impl("forward", c10::DispatchKey::Meta, [](const at::Tensor& x, double) { return empty_output(x); });
    m.impl("backward", c10::DispatchKey::Meta,
        [](const at::Tensor&, const at::Tensor& x, double) { return empty_output(x); });
#ifdef WITH_CUDA
    m.impl("forward", c10::DispatchKey::CUDA, [](const at::Tensor& x, double eps) { return run_on_gpu({}, x, eps); });
    m.impl("backward", c10::DispatchKey::CUDA, run_on_gpu);
#endif
    // Autograd goes through the class InstanceNorm, in Python. Gradients of these operators themselves, and
    // forward-mode AD, are errors.
    m.impl("forward", c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback());
    m.impl("backward", c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback());
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


NAMESPACE = _load("instance_norm")
_forward, _backward = getattr(torch.ops, NAMESPACE).forward, getattr(torch.ops, NAMESPACE).backward


class InstanceNorm(torch.autograd.Function):
    """y = (x - mean) * rstd over the last two dimensions. It saves only x for the backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x)
        return _forward(x, eps)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _backward(grad, x, ctx.eps), None
        y = nn.functional.instance_norm(x, eps=ctx.eps)  # for create_graph=True: this can be differentiated again
        return *torch.autograd.grad(y, x, grad, create_graph=True), None


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


# As torch.compiler.assume_constant_result does: PyTorch 2.11 and older trace torch.compiler.is_exporting as True.
_exports_layers._dynamo_marked_constant = True


def _is_bare(norm: nn.Module) -> bool:
    """Whether the norm is as the Model makes it: without parameters, statistics, hooks or patches."""
    if not _is_unchanged(norm, nn.InstanceNorm2d):
        return False
    # Not norm.weight and so on: nn.Module's own look-up takes 0.5 us more for each.
    p, b = norm._parameters, norm._buffers
    bare = p.get("weight", 0) is p.get("bias", 0) is b.get("running_mean", 0) is b.get("running_var", 0) is None
    return bare and not norm.track_running_stats and norm.eps >= 2**-126  # float32's smallest normal number


def fits(x: torch.Tensor, norm: nn.InstanceNorm2d) -> bool:
    """Whether our kernels compute norm(x): not if norm has hooks, and not in torch.func or forward-mode AD. They take a
    FakeTensor, too, because torch.export calls modules with one when it is not strict."""
    if type(x) not in (torch.Tensor, nn.Parameter, FakeTensor) or not _is_bare(norm):
        return False
    on_gpu = x.is_cuda and bool(torch.version.cuda) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    on_cpu = x.is_cpu and x.dtype is torch.float32 and not (torch.is_grad_enabled() and x.requires_grad)
    images = x.layout is torch.strided and x.dim() in (3, 4) and x.shape[-2] * x.shape[-1] != 1  # 1: PyTorch raises
    if not (on_gpu or on_cpu) or not images or _exports_layers():
        return False
    # For other channels PyTorch's layer runs, and warns. Our kernels count packs in 32 bits; where compiled code is for
    # any size, the operator raises an error for a larger slice.
    if not torch.compiler.is_compiling():
        if x.shape[-3] != norm.num_features or x.is_cuda and x.shape[-2] * x.shape[-1] >= 2**33 - 2**15:
            return False
    return not torch._C._are_functorch_transforms_active() and torch.autograd.forward_ad._current_level < 0


class ModelNew(nn.Module):
    """A drop-in for `Model`. x (N, C, H, W) or (C, H, W), in any memory layout; returns a contiguous tensor."""

    def __init__(self, num_features: int):
        super().__init__()
        self.inorm = nn.InstanceNorm2d(num_features=num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting():  # torch.jit.script compiles only the last line
            norm = self.inorm
            if fits(x, norm):
                if torch.is_grad_enabled() and x.requires_grad:
                    return InstanceNorm.apply(x, norm.eps)
                return _forward(x, norm.eps)
        return self.inorm(x)
