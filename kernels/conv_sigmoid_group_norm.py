# SPDX-License-Identifier: MIT
"""A convolution, a bias, a scale, a sigmoid and group normalisation: a drop-in for the Model of the same name.

    h = conv2d(x, W) + b;    v = sigmoid((h + bias) * scale);    out = (v - mean) * rstd * gamma + beta

mean and rstd are those of a group of channels of one sample: rstd = 1 / sqrt(mean((v - mean)^2) + eps).

Two ways, chosen by `_fits`:
- our kernels, on Hopper, with and without gradients: 3x3 kernels from up to 8 channels to up to 32, of an even width
  and whole fours of outputs, where two rows of v fit into a block's shared memory (some 500 columns) and all rows
  into all blocks' (264); float32, float16, bfloat16, and under autocast. They compute in float32;
- the Model's lines in ATen for everything else. Without gradients one operator follows ATen's convolution: on a GPU two
  kernels, on a CPU (float32) one function.

The forward is one kernel: x is read once, out is written once, and v waits in shared memory for its mean and rstd. With
gradients it is the same, and x, the parameters, mean and rstd are saved. The backward makes h again, twice: for the
sums that the norm's gradient needs, and for h's gradient, which goes into x's and the weights' without leaving the
chip.

Work at the benchmark shapes (128 samples, 8 -> 32 channels, 256 x 256): 1.33 GB, 38.1 GFLOP in the convolution; the
floor is 0.31 ms, memory. Measured on an H200, `python harness.py conv_sigmoid_group_norm --backward`: forward 0.478 ms,
also with gradients recorded, 12.2x eager; forward and backward 2.67 ms, 6.9x. The forward is held up by the L2, which
brings x twice for the halos of bands of two rows, and by the rate at which instructions are issued.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import sys

import torch
from torch import nn
from torch.utils import cpp_extension

CUDA_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// PTX wrappers: the one text for all kernel files. A file takes those it needs, unchanged.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}"
                 ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 to 15) of `threads` threads of this block.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int N> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int IN_FLIGHT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(IN_FLIGHT) : "memory");
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float(float v) { return v; }
template <> __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }

// ---------------------------------------------------------------------------------------------------------------------
// The activation v of z = (h + bias) * scale. To change it, change this section, `activate` in the C++ string and
// `_activate` in Python. kActivationFactor is multiplied into the scale beforehand.

constexpr float kLowest = 0.0f, kHighest = 1.0f;   // v's range: the sums of groups are fixed-point numbers within it
constexpr float kActivationFactor = -1.44269504f;  // sigmoid(z) = 1 / (1 + 2^(-log2(e) z))
__device__ __forceinline__ float activation(float t) {  // v, given kActivationFactor * z
    float e, v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(1.0f + e));
    return v;
}
__device__ __forceinline__ float activation_gradient(float v) { return fmaf(-v, v, v); }  // dv/dz, given v

// ---------------------------------------------------------------------------------------------------------------------
// The forward: convolution, activation and norm in one kernel. A team of blocks has a sample, each block a band of its
// rows, and the teams take the samples in turn. A block reads its band of x once, makes v, and keeps it in shared
// memory until the sums of all bands are known; then it writes its band of the output. Three samples are under way in a
// block:
//
//   who, and what it does                                   waits for                          wakes
//   bring:     x -> fp16 hi, lo in shared memory            x_empty                            x_full
//   convolve:  wgmma, activation -> v, sums of channels     x_full, its turn, v_empty          x_empty, v_full
//   post:      sums -> the sample's totals in global memory v_full                             posted
//   gather:    totals -> mean, rstd -> norm of channels     posted, totals of all blocks       norm_full
//   write:     v -> output                                  norm_full                          v_empty
//
//   global x --bring--> x --convolve--> v (3 places) ----------------------------write--> global output
//              8 warps       12 warps   `--> sums --post--> totals --gather--> norm --^   6 warps
//                                            1 warp         (L2)   1 warp
//
// The product, M = 64 by N = 64 pixels by K = 16: A are the weights, in registers. Of a warp's 16 rows the first eight
// are eight channels' hi, the others the same channels' lo: a thread has both sums of a value in its own registers. B
// is x in shared memory, 16 bytes a pixel: eight input channels of fp16, a plane of hi and one of lo. A tap of the 3x3
// kernel is an address where reading begins, and two taps are K. hi * hi + hi * lo + lo * hi is as accurate as float32.
// x is multiplied by a power of two that the weights decide, such that fp16's finest step is 2^-25 of a pre-activation
// at most. What exceeds fp16 becomes NaN, and the warp makes its values again in plain float32.

constexpr int kTile = 64;                      // pixels of one row: a task of a warpgroup, N of its wgmma
constexpr int kConsumers = 3, kProducers = 2;  // warpgroups
constexpr int kWriters = 6;                    // warps; two more post and gather
constexpr int kThreads = 128 * (kConsumers + kProducers + 2);
constexpr int kConsumerRegisters = 88, kProducerRegisters = 72, kOtherRegisters = 48;
constexpr int kMostIn = 8, kMostOut = 32;      // channels
constexpr int kPlaces = 3;                     // of v: samples under way in a block
constexpr int kSteps = 5, kProducts = 9;       // of K: of x's hi or lo, and of both; the last tap's two are a pair
constexpr int kLine = 16;                      // words between totals: in one line of L2 additions wait for each other
static_assert(65536 / kThreads / 8 * 8 * 7 >= 3 * kConsumerRegisters + 2 * kProducerRegisters + 2 * kOtherRegisters,
    "the consumers take the registers that the others give");

template <typename T> struct ConvArguments {
    const T *x, *weight, *conv_bias, *bias, *scale, *gamma, *beta;
    T* out;
    float *mean, *rstd;  // (samples, groups); null: not wanted
    unsigned long long* totals;  // (samples, groups, 2, kLine): of v and of its squares; zeros before the launch
    int samples, in_channels, height, width, out_channels, rows, columns, groups, group_channels;
    float eps;
    int bands, band_rows, teams, places;  // the last band may have fewer rows
    int plane;            // floats of a channel's v in shared memory
    int x_plane;          // pixels of hi in shared memory; those of lo follow
    double to_fixed, from_fixed;  // of a sum in a total: powers of two
    uint32_t taps[kProducts];     // of each product: see tap_pair
};

// One of a channel's values, and the sums of what a warpgroup's differ from it. Later on, in the first warpgroup's
// place, the channel's norm: mean, factor, offset.
struct Deviations { float anchor, sum, square; };

struct ConvShared {  // in front of it: x, and the places of v
    Deviations made[kPlaces][kConsumers][kMostOut];
    int counts[kPlaces][kConsumers];  // values of a channel in `made`
    float weight_scale[kMostOut], reach[kMostOut], slope[kMostOut], offset[kMostOut], input_scale;
    uint64_t x_full, x_empty, v_full[kPlaces][kConsumers], posted[kPlaces], norm_full[kPlaces], v_empty[kPlaces];
};

struct Band { int first_row, rows, tasks; };  // tasks go down the columns of tiles

// What each role goes through: its sample, v's place, and the parities of the barriers.
struct Walk {
    int sample = blockIdx.y, place = 0;
    uint32_t x_parity = 0, parity = 0;
    template <typename T> __device__ __forceinline__ void next(const ConvArguments<T>& p) {
        sample += p.teams, x_parity ^= 1;
        if (++place == p.places) place = 0, parity ^= 1;
    }
};

// A total: the number of its terms in bits 56 to 63, of those that are not finite in bits 48 to 55, below them the sum.
// As integers are added, the order of terms is nothing to the sum. The number says when it is complete: no flag, no
// fence.
constexpr int kTermsBit = 56, kStrangeBit = 48;
__device__ __forceinline__ void add_to_total(unsigned long long* total, double sum, double to_fixed, bool finite) {
    const unsigned long long fixed = finite ? __double2ull_rn(fmax(sum, 0.0) * to_fixed) : 1ull << kStrangeBit;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(total), "l"(fixed + (1ull << kTermsBit)) : "memory");
}
__device__ __forceinline__ unsigned long long await_total(const unsigned long long* total, int terms) {
    unsigned long long word;
    while (true) {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(total) : "memory");
        if (int(word >> kTermsBit) == terms) return word;
        __nanosleep(20);
    }
}
__device__ __forceinline__ double sum_of_total(unsigned long long word) {
    return word >> kStrangeBit & 255 ? NAN : double(word & ((1ull << kStrangeBit) - 1));
}

// B's descriptor: eight pixels of 16 bytes are a matrix of 128 bytes, the next eight the next one. In units of 16
// bytes: where the first tap's pixels begin, and how much further on the second tap's are.
__host__ __device__ __forceinline__ uint32_t tap_pair(int first, int second) {
    return uint32_t(first) | uint32_t(second - first) << 16;
}
__device__ __forceinline__ uint64_t pixel_descriptor(uint32_t taps) { return uint64_t(128 >> 4) << 32 | taps; }

// d = a * b + (keep ? d : 0), m64n64k16, a from registers.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
__device__ __forceinline__ void wgmma(float (&d)[32], const uint4& a, uint64_t b, bool keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"
        " %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, keep, 1, 1, 0;\n}"
        : D16(0), D16(16) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(keep)));
}
#undef D16
#undef D4

using Yes = std::true_type;
using No = std::false_type;

__device__ __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }

// Brings [from, from + bytes) into L2, but for what does not fill 16 aligned bytes.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
    const uintptr_t begin = uintptr_t(from) & ~uintptr_t(15);
    const uint32_t whole = uint32_t(uintptr_t(from) + bytes - begin) & ~15u;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(whole) : "memory");
}

// Four values to neighbouring places, evicted first from L2. A predicate, not a branch around each.
__device__ __forceinline__ void store_four_if(bool condition, float* to, float a, float b, float c, float d) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};\n}"
        ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(int(condition)) : "memory");
}
template <typename T>
__device__ __forceinline__ void store_four_if(bool condition, T* to, float a, float b, float c, float d) {
    alignas(8) const T values[4] = {from_float<T>(a), from_float<T>(b), from_float<T>(c), from_float<T>(d)};
    const uint2 w = *reinterpret_cast<const uint2*>(values);
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.cs.v2.b32 [%0], {%1, %2};\n}"
        ::"l"(to), "r"(w.x), "r"(w.y), "r"(int(condition)) : "memory");
}

// A pixel's channels as fp16 hi and lo of x * scale. Beyond fp16's range hi is infinite and lo is NaN.
template <typename T>
__device__ __forceinline__ void split_pixel(const T (&x)[kMostIn], float scale, uint4& hi, uint4& lo) {
    uint32_t h[4], l[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float a = to_float(x[2 * k]), b = to_float(x[2 * k + 1]);
        const __half2 pair = __hmul2(__floats2half2_rn(a, b), __float2half2_rn(scale));
        const float2 f = __half22float2(pair);
        h[k] = bits_of(pair), l[k] = bits_of(__floats2half2_rn(fmaf(a, scale, -f.x), fmaf(b, scale, -f.y)));
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]), lo = make_uint4(l[0], l[1], l[2], l[3]);
}

// All warps: the channels' constants, and the power of two that x is multiplied by. That is NaN where the weights are
// not finite, or so large that no power would do: then all values are made in plain float32.
template <typename T> __device__ __forceinline__ void prepare_channels(const ConvArguments<T>& p, ConvShared& shared) {
    const int lane = threadIdx.x % 32, weights = p.in_channels * 9;
    for (int c = threadIdx.x / 32; c < kMostOut; c += kThreads / 32) {
        float largest = 0, sum = 0;
        for (int i = lane; i < weights && c < p.out_channels; i += 32) {
            const float w = fabsf(to_float(p.weight[c * weights + i]));
            largest = fmaxf(largest, w), sum += w;
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
            sum += __shfl_xor_sync(~0u, sum, offset);
        }
        int exponent = 0;
        frexpf(largest, &exponent);
        if (lane == 0) {  // reach: of a pre-activation's change, for |x| <= 1
            shared.weight_scale[c] = ldexpf(1.0f, min(60, 15 - exponent));
            shared.reach[c] = c < p.out_channels ? fabsf(to_float(p.scale[c])) * sum : 0.0f;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float reach = shared.reach[lane];
        const bool usual = __all_sync(~0u, reach <= 16384.0f);  // false for NaN too
        for (int offset = 16; offset > 0; offset /= 2) reach = fmaxf(reach, __shfl_xor_sync(~0u, reach, offset));
        int exponent = 0;
        frexpf(reach, &exponent);
        const float input_scale = usual ? ldexpf(1.0f, max(-14, min(14, exponent))) : NAN;
        if (lane == 0) shared.input_scale = input_scale;
        if (lane < p.out_channels) {
            const float factor = kActivationFactor * to_float(p.scale[lane]);
            shared.slope[lane] = factor / (input_scale * shared.weight_scale[lane]);
            shared.offset[lane] = factor * (to_float(p.conv_bias[lane]) + to_float(p.bias[lane]));
        }
    }
    __syncthreads();
}

// Eight warps, of x. A thread takes every 256th pixel of the band, all channels of it, and four pixels at a time: it
// asks for them before there is room. Waits for x_empty; wakes the consumers (x_full).
template <typename T>
__device__ __forceinline__ void bring(
    const ConvArguments<T>& p, ConvShared& shared, const Band& band, unsigned char* x) {
    fewer_registers<kProducerRegisters>();
    constexpr int kStride = 128 * kProducers, kPixels = 4;
    const int thread = threadIdx.x - 128 * kConsumers, pixels = (band.rows + 2) * p.width;
    const int64_t image = int64_t(p.height) * p.width;
    const auto band_of = [&](int sample, int channel) {
        return p.x + (int64_t(sample) * p.in_channels + channel) * image + int64_t(band.first_row) * p.width;
    };
    const float scale = shared.input_scale;
    for (Walk at; at.sample < p.samples; at.next(p)) {
        const int later = at.sample + p.teams;
        if (thread < p.in_channels && later < p.samples) prefetch_to_l2(band_of(later, thread), pixels * sizeof(T));
#pragma unroll 1
        for (int begin = thread; begin - thread < pixels; begin += kPixels * kStride) {
            T raw[kPixels][kMostIn];
            const auto load = [&](auto all) {  // all: none is behind the band's last pixel
                const T* from = band_of(at.sample, 0) + begin;
#pragma unroll
                for (int c = 0; c < kMostIn; ++c) {
#pragma unroll
                    for (int i = 0; i < kPixels; ++i) {
                        const bool exists = decltype(all)::value || begin + i * kStride < pixels;
                        raw[i][c] = exists ? __ldg(from + i * kStride) : from_float<T>(0.0f);
                    }
                    from += c < p.in_channels - 1 ? image : 0;  // a channel that does not exist has weights of 0
                }
            };
            if (begin + (kPixels - 1) * kStride < pixels) load(Yes{});
            else load(No{});
            uint4 hi[kPixels], lo[kPixels];
#pragma unroll
            for (int i = 0; i < kPixels; ++i) split_pixel(raw[i], scale, hi[i], lo[i]);
            if (begin == thread) mbarrier_wait(&shared.x_empty, at.x_parity ^ 1);
            uint4* const to = reinterpret_cast<uint4*>(x) + begin;
#pragma unroll
            for (int i = 0; i < kPixels; ++i) {
                if (begin + i * kStride < pixels) to[i * kStride] = hi[i], to[i * kStride + p.x_plane] = lo[i];
            }
        }
        fence_async_proxy();  // wgmma reads what this thread has written
        mbarrier_arrive(&shared.x_full);
    }
}

// One value's pre-activation in plain float32, times kActivationFactor.
template <typename T>
__device__ __forceinline__ float convolve_value(
    const ConvArguments<T>& p, int sample, int channel, int row, int column) {
    const T* const weight = p.weight + channel * p.in_channels * 9;
    const T* const x = p.x + (int64_t(sample) * p.in_channels * p.height + row) * p.width + column;
    float h = 0;
#pragma unroll 1
    for (int k = 0; k < p.in_channels * 9; ++k) {
        const int c = k / 9, tap = k % 9;
        h = fmaf(to_float(x[(int64_t(c) * p.height + tap / 3) * p.width + tap % 3]), to_float(weight[k]), h);
    }
    const float bias = to_float(p.conv_bias[channel]) + to_float(p.bias[channel]);
    return (h + bias) * (kActivationFactor * to_float(p.scale[channel]));
}

// A warpgroup's values of a sample in plain float32: a thread has the pixels and the channel that it has in `convolve`.
template <typename T>
__device__ __forceinline__ void convolve_again(
    const ConvArguments<T>& p, const Band& band, int sample, int first_task, int c, float* v, Deviations& all) {
    all.sum = all.square = 0;
#pragma unroll 1
    for (int task = first_task; task < band.tasks; task += kConsumers) {
        const int row = task % band.rows, column = task / band.rows * kTile;
#pragma unroll 1
        for (int i = 0; i < kTile / 4; ++i) {
            const int at = i / 2 * 8 + i % 2, here = column + threadIdx.x % 4 * 2 + at;
            const bool valid = c < p.out_channels && here < p.columns;
            const float value = valid ? activation(convolve_value(p, sample, c, band.first_row + row, here)) : 0.0f;
            if (task == first_task && i == 0) all.anchor = __shfl_sync(~0u, value, threadIdx.x & 28);
            if (!valid) continue;
            v[row * p.columns + column + at] = value;
            all.sum += value - all.anchor, all.square = fmaf(value - all.anchor, value - all.anchor, all.square);
        }
    }
}

// The channels of A's rows, in an order such that what a half-warp stores at once goes to different banks.
__device__ __forceinline__ int channel_of_row(int row) { return row % 4 * 2 + row / 4 % 2; }

// A thread's weights as A's fragments: of its four registers the odd ones are of the rows of lo, the last two of K's
// second half.
template <typename T>
__device__ __forceinline__ void load_weights(
    const ConvArguments<T>& p, const ConvShared& shared, int c, uint4 (&a)[kSteps]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t words[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tap = min(2 * step + half, 8);  // of the last step both halves: x's hi and lo
            float w[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int in = threadIdx.x % 4 * 2 + j, at = (c * p.in_channels + in) * 9 + tap;
                const bool exists = c < p.out_channels && in < p.in_channels;
                w[j] = exists ? to_float(p.weight[at]) * shared.weight_scale[c] : 0.0f;
            }
            const __half2 hi = __floats2half2_rn(w[0], w[1]);
            const float2 f = __half22float2(hi);
            words[2 * half] = bits_of(hi), words[2 * half + 1] = bits_of(__floats2half2_rn(w[0] - f.x, w[1] - f.y));
        }
        a[step] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Three warpgroups take the tasks in turn, through all samples, and turns at their products: one's wgmma beside the
// others' activations. Of a task a thread has one channel, two neighbouring pixels of every eight. Waits for x_full,
// for its turn, and with a sample's first values for v_empty; wakes the producers (x_empty), the next one, and `post`
// (v_full).
template <typename T>
__device__ __forceinline__ void convolve(
    const ConvArguments<T>& p, ConvShared& shared, const Band& band, const unsigned char* x, float* held, int warp) {
    more_registers<kConsumerRegisters>();
    const int warpgroup = warp / 4, t = threadIdx.x % 4, c = warp % 4 * 8 + channel_of_row(threadIdx.x % 32 / 4);
    constexpr int kFirst = sizeof(T) == 4 ? 0 : kSteps - 1;  // x of 16 bits has no lo: 0.90 of the time
    uint4 a[kSteps];
    load_weights(p, shared, c, a);
    const float slope = shared.slope[c], offset = shared.offset[c];
    const bool all_exist = __all_sync(~0u, c < p.out_channels);
    const int columns = c < p.out_channels ? p.columns - 2 * t : 0;  // from the thread's first one on
    const uint32_t x_begin = __shfl_sync(~0u, shared_address(x) / 16, 0);  // known to be the same in all lanes
    const int own_turn = 1 + warpgroup, next_turn = own_turn < kConsumers ? own_turn + 1 : 1;
    if (warpgroup == kConsumers - 1) barrier_arrive(next_turn, 256);
    int first_task = warpgroup;
    for (Walk at; at.sample < p.samples; at.next(p)) {
        float* const v = held + (at.place * p.out_channels + c) * p.plane + 2 * t;
        Deviations all = {};
        // Of the task's first pixel: its row and column, and where it is in x's and v's shared memory.
        int count = 0, task = first_task, row = first_task, column = 0, v_at = row * p.columns;
        uint32_t x_at = x_begin + row * p.width;
        mbarrier_wait(&shared.x_full, at.x_parity);
        for (; task < band.tasks; task += kConsumers, row += kConsumers) {
            for (; row >= band.rows; row -= band.rows) {
                column += kTile, x_at += kTile - band.rows * p.width, v_at += kTile - band.rows * p.columns;
            }
            float d[kTile / 2];
            barrier_sync(own_turn, 256);
            wgmma_fence();
#pragma unroll
            for (int k = kFirst; k < kProducts; ++k) {
                wgmma(d, a[k % kSteps], pixel_descriptor(p.taps[k] + x_at), k > kFirst);
            }
            wgmma_commit();
            barrier_arrive(next_turn, 256);
            wgmma_wait<0>();  // all warps at one place, whatever channels they have
#pragma unroll
            for (int i = 0; i < kTile / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");  // not read before the wait
            if (task + kConsumers >= band.tasks) mbarrier_arrive(&shared.x_empty);
            const bool first = task == first_task;
            float sum = 0, square = 0;
            const auto finish = [&](auto inside) {  // inside: all but the last eight pixels are outputs
                float* const to = v + v_at;
                const auto valid = [&](int j) {
                    return (decltype(inside)::value && j < kTile / 8 - 1) || 8 * j < columns - column;
                };
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
                    float* const pair = d + 4 * j;
                    pair[0] = activation(fmaf(pair[0] + pair[2], slope, offset));
                    pair[1] = activation(fmaf(pair[1] + pair[3], slope, offset));
                    if (first && j == 0) all.anchor = __shfl_sync(~0u, pair[0], threadIdx.x & 28);  // of four lanes
                    const float d0 = valid(j) ? pair[0] - all.anchor : 0.0f;
                    const float d1 = valid(j) ? pair[1] - all.anchor : 0.0f;
                    sum += d0 + d1;
                    square = fmaf(d0, d0, square), square = fmaf(d1, d1, square);
                }
                if (first) mbarrier_wait(&shared.v_empty[at.place], at.parity ^ 1);
#pragma unroll
                for (int j = 0; j < kTile / 8; ++j) {
                    if (valid(j)) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[4 * j], d[4 * j + 1]);
                }
            };
            if (all_exist && column + kTile - 8 <= p.columns) finish(Yes{});
            else finish(No{});
            all.sum += sum, all.square += square;
            count += min(kTile, p.columns - column);
            x_at += kConsumers * p.width, v_at += kConsumers * p.columns;
        }
        if (task == first_task) {  // a small band: the others had all of it
            mbarrier_arrive(&shared.x_empty);
            mbarrier_wait(&shared.v_empty[at.place], at.parity ^ 1);
        }
        // Not finite where x exceeds fp16's range, and where x or the weights are not finite.
        if (__any_sync(~0u, !(all.square < INFINITY))) convolve_again(p, band, at.sample, first_task, c, v, all);
        first_task = task - band.tasks;
        for (int mask = 1; mask < 4; mask *= 2) {
            all.sum += __shfl_xor_sync(~0u, all.sum, mask), all.square += __shfl_xor_sync(~0u, all.square, mask);
        }
        if (t == 0) shared.made[at.place][warpgroup][c] = all;
        if (threadIdx.x % 128 == 0) shared.counts[at.place][warpgroup] = count;
        mbarrier_arrive(&shared.v_full[at.place][warpgroup]);
    }
}

// One warp, a lane a channel: the band's sums of v - kLowest and of its squares, in units of the range, to the totals.
// Waits for v_full; wakes `gather` (posted), here and, through the totals, in the team's other blocks.
template <typename T> __device__ __forceinline__ void post(const ConvArguments<T>& p, ConvShared& shared) {
    const int c = threadIdx.x % 32;
    constexpr double kUnit = 1.0 / (double(kHighest) - kLowest);
    for (Walk at; at.sample < p.samples; at.next(p)) {
        double own_sum = 0, own_square = 0;
        for (int k = 0; k < kConsumers; ++k) {
            mbarrier_wait(&shared.v_full[at.place][k], at.parity);
            const Deviations some = shared.made[at.place][k][c];
            const int count = shared.counts[at.place][k];
            if (count == 0 || c >= p.out_channels) continue;
            const double origin = double(some.anchor) - kLowest, all = count * origin + some.sum;
            own_sum += all, own_square += origin * (all + some.sum) + some.square;
        }
        mbarrier_arrive(&shared.posted[at.place]);  // all is read
        double sum = own_sum, square = own_square;
        for (int i = 1; i < p.group_channels; ++i) {
            sum += __shfl_down_sync(~0u, own_sum, i), square += __shfl_down_sync(~0u, own_square, i);
        }
        if (c < p.out_channels && c % p.group_channels == 0) {
            const int64_t group = int64_t(at.sample) * p.groups + c / p.group_channels;
            const bool finite = square < INFINITY;
            add_to_total(p.totals + group * (2 * kLine), sum * kUnit, p.to_fixed, finite);
            add_to_total(p.totals + group * (2 * kLine) + kLine, square * (kUnit * kUnit), p.to_fixed, finite);
        }
    }
}

// One warp, a lane a channel: the channel's norm from its group's totals. Waits for posted and until the totals have
// all bands' sums; wakes the writers (norm_full).
template <typename T> __device__ __forceinline__ void gather(const ConvArguments<T>& p, ConvShared& shared) {
    const int c = threadIdx.x % 32, own_group = c / p.group_channels;
    const bool exists = c < p.out_channels;
    const float gamma = exists ? to_float(p.gamma[c]) : 0.0f, beta = exists ? to_float(p.beta[c]) : 0.0f;
    constexpr double kRange = double(kHighest) - kLowest;
    const double share = p.from_fixed / (double(p.group_channels) * p.rows * p.columns);
    for (Walk at; at.sample < p.samples; at.next(p)) {
        mbarrier_wait(&shared.posted[at.place], at.parity);
        if (exists) {
            // First all lanes ask for one total until it is complete: the others' lines are left to those that add.
            const int64_t first = int64_t(at.sample) * p.groups, group = first + own_group;
            await_total(p.totals + first * (2 * kLine), p.bands);
            const unsigned long long of_v = await_total(p.totals + group * (2 * kLine), p.bands);
            const unsigned long long of_square = await_total(p.totals + group * (2 * kLine) + kLine, p.bands);
            const double mean = sum_of_total(of_v) * share;
            const double variance = (sum_of_total(of_square) * share - mean * mean) * (kRange * kRange);
            const double exact_mean = kLowest + mean * kRange;
            const float rstd = 1.0f / sqrtf((variance < 0 ? 0.0f : float(variance)) + p.eps);  // NaN stays
            const float hi = float(exact_mean), lo = float(exact_mean - hi), factor = gamma * rstd;
            const float offset = isfinite(factor) ? fmaf(-lo, factor, beta) : NAN;  // NaN as in ATen
            shared.made[at.place][0][c] = {hi, factor, offset};
            if (p.mean != nullptr && blockIdx.x == 0) p.mean[group] = hi, p.rstd[group] = rstd;
        }
        mbarrier_arrive(&shared.norm_full[at.place]);
    }
}

// Six warps take the channels in turn, through all samples: none has more to do than the others. A lane stores four
// neighbouring values at once. Waits for norm_full; wakes the consumers (v_empty).
template <typename T>
__device__ __forceinline__ void write(
    const ConvArguments<T>& p, ConvShared& shared, const Band& band, const float* held, int writer) {
    constexpr int kBatch = 4;  // loads, then stores, of a lane at once; one after the other: 1.10 of the kernel's time
    const int lane = threadIdx.x % 32, fours = band.rows * p.columns / 4;
    int c = writer;
    for (Walk at; at.sample < p.samples; at.next(p), c -= p.out_channels) {
        mbarrier_wait(&shared.norm_full[at.place], at.parity);
        for (; c < p.out_channels; c += kWriters) {
            const Deviations of_channel = shared.made[at.place][0][c];
            const float mean = of_channel.anchor, factor = of_channel.sum, offset = of_channel.square;
            const float* const v = held + (at.place * p.out_channels + c) * p.plane;
            const int64_t channel = int64_t(at.sample) * p.out_channels + c;
            T* const to = p.out + (channel * p.rows + band.first_row) * p.columns;
#pragma unroll 1
            for (int begin = lane; begin - lane < fours; begin += kBatch * 32) {
                float4 four[kBatch];
#pragma unroll
                for (int k = 0; k < kBatch; ++k) {
                    const int i = begin + 32 * k;
                    if (i < fours) four[k] = reinterpret_cast<const float4*>(v)[i];
                }
#pragma unroll
                for (int k = 0; k < kBatch; ++k) {
                    const auto norm = [&](float value) { return fmaf(value - mean, factor, offset); };
                    const auto [a, b, c, d] = four[k];
                    const int i = begin + 32 * k;
                    store_four_if(i < fours, to + 4 * i, norm(a), norm(b), norm(c), norm(d));
                }
            }
        }
        mbarrier_arrive(&shared.v_empty[at.place]);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) convolve_and_normalize(const __grid_constant__ ConvArguments<T> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) unsigned char x[];
    __shared__ ConvShared shared;
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.x_full, 128 * kProducers), mbarrier_init(&shared.x_empty, 128 * kConsumers);
        for (int i = 0; i < kPlaces; ++i) {
            for (int k = 0; k < kConsumers; ++k) mbarrier_init(&shared.v_full[i][k], 128);
            mbarrier_init(&shared.posted[i], 32), mbarrier_init(&shared.norm_full[i], 32);
            mbarrier_init(&shared.v_empty[i], 32 * kWriters);
        }
        fence_mbarrier_init();
    }
    prepare_channels(p, shared);
    Band band;
    band.first_row = blockIdx.x * p.band_rows, band.rows = min(p.band_rows, p.rows - band.first_row);
    band.tasks = (p.columns + kTile - 1) / kTile * band.rows;
    float* const held = reinterpret_cast<float*>(x + 2 * 16 * p.x_plane);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so known to be the same in all lanes: 1.02 without
    const int other = warp - 4 * (kConsumers + kProducers);
    if (warp < 4 * kConsumers) {
        convolve(p, shared, band, x, held, warp);
    } else if (other < 0) {
        bring(p, shared, band, x);
    } else {
        fewer_registers<kOtherRegisters>();
        if (other == 0) post(p, shared);
        else if (other == 1) gather(p, shared);
        else write(p, shared, band, held, other - 2);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launching it. sizes: samples, in_channels, height, width, out_channels, groups.

// Bands of rows: of the even numbers for which there is room, the one with the shortest time, in pixels of work. False
// where none fits; `_fits` in Python asks the like.
template <typename T>
static bool plan_forward(ConvArguments<T>& p, int sms, int64_t shared_bytes, int64_t* dynamic_bytes) {
    int64_t best = INT64_MAX;
    for (int even = 2; even <= p.rows + 1; even += 2) {
        const int rows = even < p.rows ? even : p.rows, bands = (p.rows + rows - 1) / rows;
        const int plane = (rows * p.columns + 3) / 8 * 8 + 4;  // 4 modulo 8: see channel_of_row
        const int64_t x_bytes = int64_t(rows + 2) * p.width * 32, v_bytes = int64_t(plane) * p.out_channels * 4;
        if (x_bytes + v_bytes > shared_bytes || bands > sms || bands > 255) continue;
        const int64_t room = (shared_bytes - x_bytes) / v_bytes;
        const int places = int(room < kPlaces ? room : kPlaces), teams = sms / bands;
        // 300: what a sample costs a block however few rows it has. With fewer places there is more waiting.
        const int64_t cost = (p.samples + teams - 1) / teams * (300 + rows * p.width) * (7 - places);
        if (cost >= best) continue;
        best = cost;
        p.band_rows = rows, p.bands = bands, p.teams = teams < p.samples ? teams : p.samples;
        p.places = places, p.plane = plane, p.x_plane = (rows + 2) * p.width;
        // The last task's wgmma reads on behind x, by a tile's pixels at most: what it finds there is dropped.
        *dynamic_bytes = x_bytes + (places * v_bytes > 2 * kTile * 16 ? places * v_bytes : 2 * kTile * 16);
    }
    // lo's products come before hi's, so that small sums are not rounded to large ones' last bits.
    const auto offset = [&](int tap) { return tap / 3 * p.width + tap % 3; };
    for (int k = 0; k < 4; ++k) {
        p.taps[k] = tap_pair(p.x_plane + offset(2 * k), p.x_plane + offset(2 * k + 1));
        p.taps[5 + k] = tap_pair(offset(2 * k), offset(2 * k + 1));
    }
    p.taps[4] = tap_pair(offset(8), p.x_plane + offset(8));
    p.to_fixed = 1;  // a total has room for twice its largest sum
    while (p.to_fixed * p.group_channels * p.rows * p.columns < double(1ll << (kStrangeBit - 2))) p.to_fixed *= 2;
    p.from_fixed = 1 / p.to_fixed;
    return best < INT64_MAX;
}

extern "C" int64_t conv_totals_bytes(int64_t samples, int64_t groups) { return samples * groups * 2 * kLine * 8; }

// x, out: contiguous, 16-byte aligned. parameters: the convolution's weight and bias, bias, scale, gamma, beta, of x's
// type. mean, rstd: null or float32 (samples, groups). Returns a cudaError_t, or -1 where the sizes do not fit.
template <typename T>
static int launch_forward(const void* x, const void* const* parameters, void* out, float* mean, float* rstd,
    const int64_t* sizes, double eps, int sms, int shared_bytes, void* totals, cudaStream_t stream) {
    if (sizes[0] >= 1 << 30 || sizes[1] > kMostIn || sizes[4] > kMostOut || sizes[3] % 2 != 0) return -1;
    if ((sizes[2] - 2) * (sizes[3] - 2) % 4 != 0) return -1;  // a band's values are whole fours
    ConvArguments<T> p = {};
    p.x = static_cast<const T*>(x), p.out = static_cast<T*>(out), p.mean = mean, p.rstd = rstd;
    const T** const fields[] = {&p.weight, &p.conv_bias, &p.bias, &p.scale, &p.gamma, &p.beta};
    for (int i = 0; i < 6; ++i) *fields[i] = static_cast<const T*>(parameters[i]);
    p.totals = static_cast<unsigned long long*>(totals);
    p.samples = int(sizes[0]), p.in_channels = int(sizes[1]), p.height = int(sizes[2]), p.width = int(sizes[3]);
    p.out_channels = int(sizes[4]), p.groups = int(sizes[5]), p.group_channels = p.out_channels / p.groups;
    p.rows = p.height - 2, p.columns = p.width - 2, p.eps = float(eps);
    int64_t dynamic_bytes = 0;
    if (!plan_forward(p, sms, shared_bytes - int(sizeof(ConvShared)), &dynamic_bytes)) return -1;
    auto* const kernel = convolve_and_normalize<T>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(dynamic_bytes));
    if (error == cudaSuccess) error = cudaMemsetAsync(totals, 0, conv_totals_bytes(sizes[0], sizes[5]), stream);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;  // all blocks run at once: they wait for each other
    attribute.val.cooperative = 1;
    const dim3 grid(p.bands, p.teams);
    const cudaLaunchConfig_t config = {grid, dim3(kThreads), size_t(dynamic_bytes), stream, &attribute, 1};
    return cudaLaunchKernelEx(&config, kernel, p);
}
extern "C" int conv_forward(int type, const void* x, const void* const* parameters, void* out, float* mean, float* rstd,
    const int64_t* sizes, double eps, int sms, int shared_bytes, void* totals, cudaStream_t stream) {
    const auto launch =
        type == 0 ? launch_forward<float> : type == 1 ? launch_forward<__half> : launch_forward<__nv_bfloat16>;
    return launch(x, parameters, out, mean, rstd, sizes, eps, sms, shared_bytes, totals, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// What follows ATen's convolution for all other sizes: two kernels, each reads h once. A plane is one channel of one
// sample; `parts` blocks have a plane. The first one leaves each block's sums of v and v^2 in the workspace, the second
// one merges those of its group.

constexpr int kTailThreads = 256;

struct TailArguments {
    const float *bias, *scale, *gamma, *beta;
    double2* sums;  // of each plane's parts
    int64_t channels, group_channels, pixels;
    int64_t part;  // pixels of a block, a multiple of what a thread reads at once
    int parts;
    float eps;
};

// Of a block; complete in all threads.
__device__ __forceinline__ double2 sum_of_block(double2 own) {
    __shared__ double2 of_warps[kTailThreads / 32];
    for (int offset = 16; offset > 0; offset /= 2) {
        own.x += __shfl_xor_sync(~0u, own.x, offset), own.y += __shfl_xor_sync(~0u, own.y, offset);
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    double2 all = {};
    for (const double2& one : of_warps) all.x += one.x, all.y += one.y;
    return all;
}

// Each thread calls use(index, value) for its values of the block's part, in packs of 16 bytes where the plane begins
// at a whole one.
template <typename T, typename Use>
__device__ __forceinline__ void each_pack(const T* plane, const TailArguments& p, const Use& use) {
    constexpr int kPack = 16 / sizeof(T);
    const int64_t begin = blockIdx.x % p.parts * p.part, end = min(begin + p.part, p.pixels);
    if (p.pixels % kPack == 0) {
        for (int64_t i = begin + threadIdx.x * kPack; i < end; i += kTailThreads * kPack) {
            alignas(16) T values[kPack];
            *reinterpret_cast<uint4*>(values) = __ldg(reinterpret_cast<const uint4*>(plane + i));
            use(i, values);
        }
    } else {
        for (int64_t i = begin + threadIdx.x; i < end; i += kTailThreads) {
            T values[1] = {plane[i]};
            use(i, values);
        }
    }
}

template <typename T> __global__ void __launch_bounds__(kTailThreads) sum_activations(const T* h, TailArguments p) {
    const int64_t plane = blockIdx.x / p.parts, c = plane % p.channels;
    const float bias = p.bias[c], scale = kActivationFactor * p.scale[c];
    float anchor = 0, sum = 0, square = 0;  // of a thread, around its first value
    int count = 0;
    each_pack(h + plane * p.pixels, p, [&](int64_t, auto& values) {
        for (T& value : values) {
            const float v = activation((to_float(value) + bias) * scale);
            if (count++ == 0) anchor = v;
            sum += v - anchor, square = fmaf(v - anchor, v - anchor, square);
        }
    });
    const double all = double(count) * anchor;
    const double2 of_block = sum_of_block({all + sum, anchor * (all + 2 * double(sum)) + square});
    if (threadIdx.x == 0) p.sums[blockIdx.x] = of_block;
}

template <typename T>
__global__ void __launch_bounds__(kTailThreads) normalize_activations(const T* h, T* out, TailArguments p) {
    const int64_t plane = blockIdx.x / p.parts, c = plane % p.channels;
    const double2* const sums = p.sums + plane / p.group_channels * p.group_channels * p.parts;
    double2 own = {};
    for (int64_t i = threadIdx.x; i < p.group_channels * p.parts; i += kTailThreads) {
        own.x += sums[i].x, own.y += sums[i].y;
    }
    const double2 all = sum_of_block(own);
    const double n = double(p.group_channels) * p.pixels, exact_mean = all.x / n;
    const double variance = all.y / n - exact_mean * exact_mean;
    const float mean = float(exact_mean), factor = p.gamma[c] / sqrtf((variance < 0 ? 0.0f : float(variance)) + p.eps);
    const float bias = p.bias[c], scale = kActivationFactor * p.scale[c];
    const float offset = isfinite(factor) ? p.beta[c] - float(exact_mean - mean) * factor : NAN;  // NaN as in ATen
    each_pack(h + plane * p.pixels, p, [&](int64_t i, auto& values) {
        for (T& value : values) {
            value = from_float<T>(fmaf(activation((to_float(value) + bias) * scale) - mean, factor, offset));
        }
        T* const to = out + plane * p.pixels + i;
        if constexpr (sizeof(values) == 16) __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<uint4*>(values));
        else *to = values[0];
    });
}

// Parts of a plane: enough blocks for the GPU, and 4096 pixels a block at least.
static int tail_parts(int64_t planes, int64_t pixels, int sms) {
    const int64_t wanted = (16 * sms + planes - 1) / planes, most = (pixels + 4095) / 4096;
    return int(wanted < most ? wanted : most);
}
extern "C" int64_t tail_workspace_bytes(int64_t planes, int64_t pixels, int sms) {
    return planes * tail_parts(planes, pixels, sms) * int64_t(sizeof(double2));
}
template <typename T>
static int launch_tail(const void* h, void* out, const TailArguments& p, int64_t blocks, cudaStream_t stream) {
    sum_activations<T><<<unsigned(blocks), kTailThreads, 0, stream>>>(static_cast<const T*>(h), p);
    normalize_activations<T>
        <<<unsigned(blocks), kTailThreads, 0, stream>>>(static_cast<const T*>(h), static_cast<T*>(out), p);
    return cudaGetLastError();
}
extern "C" int tail_forward(int type, const void* h, const float* const* parameters, void* out, int64_t samples,
    int64_t channels, int64_t groups, int64_t pixels, double eps, int sms, void* workspace, cudaStream_t stream) {
    TailArguments p = {parameters[0], parameters[1], parameters[2], parameters[3], static_cast<double2*>(workspace),
        channels, channels / groups, pixels};
    p.parts = tail_parts(samples * channels, pixels, sms), p.eps = float(eps);
    p.part = ((pixels + p.parts - 1) / p.parts + 7) / 8 * 8;
    const auto launch = type == 0 ? launch_tail<float> : type == 1 ? launch_tail<__half> : launch_tail<__nv_bfloat16>;
    return launch(h, out, p, samples * channels * p.parts, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The backward. It reads grad and x twice and stores nothing in between:
//   1. measure_gradients recomputes h and v, and sums grad and grad * (v - mean) of each channel; join_sums makes of
//      them the two means of group norm's backward, and the gradients of gamma and beta.
//   2. differentiate_rows recomputes h, makes dh, the gradient of h, in shared memory, and of it x's and the weights'.
//   sum_rows adds the blocks' partial sums in a fixed order.
// Four convolutions of 38.4 GFLOP at the benchmark: 3.0 ms in float32 FMAs, so they run on the tensor cores.
//
// Each float v is split into two fp16 numbers, hi + lo = v * s, where s is a power of two that brings the largest |v|
// of
// an image row (all channels) to [2^14, 2^15): 22 bits of what is within 2^-18 of the largest value, and below that an
// absolute error of 2^-40 of it. A product is hi * hi + hi * lo + lo * hi, added up in float32 over one row, then
// scaled
// back and added to a float32 sum. Rows for which that does not do (they hold what is not finite, or their largest
// value
// could hide others that the activation sees) are computed from floats, slowly.
//
// A tile holds one row of an image: a cell of 16 bytes has 8 channels of one column. Column c is cell c / 4 of sub-row
// c % 4, so that columns c, c + 4, ..., c + 28 lie side by side, as an 8x8 matrix of ldmatrix. A warp has 32 columns;
// for the shifts 0, 1, 2 of a 3x3 kernel it needs six matrices, of which matrix m holds the columns 4 i + m.

constexpr int kIn = 8, kOut = 32, kTaps = 9;  // channels, padded with zeros
constexpr int kMostWarps = 8;  // side by side: 256 columns
constexpr int kSub = 8 * kMostWarps + 2;  // cells of a sub-row
constexpr int kPlane = 4 * kSub;  // cells of a row of 8 channels, of hi or lo
constexpr int kSlots = 4;  // rows of x in shared memory
// of |x| * |weights| * |scale|: 2^-40 of it is 2^-24 of a pre-activation
constexpr float kMostReach = 65536.0f;
constexpr uint32_t kInfinityBits = 0x7f800000;
static_assert(kSub % 8 == 2, "neighbouring columns are stored to different banks");

__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, v);
#else
    return v;  // there is no such instruction, and nobody calls this
#endif
}
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t* to, const uint4* from) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "r"(shared_address(from))
            : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "r"(shared_address(from))
            : "memory");
    }
}
__device__ __forceinline__ void store_transposed(uint4* to, const uint32_t* from) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
        "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
        : "memory");
}
// d += a * b of 16 rows by 16 (or 8) of K by 8 columns; from_zero: d = a * b.
__device__ __forceinline__ void mma16(float (&d)[4], const uint32_t* a, const uint32_t* b, bool from_zero = false) {
    const float c[4] = {
        from_zero ? 0.0f : d[0], from_zero ? 0.0f : d[1], from_zero ? 0.0f : d[2], from_zero ? 0.0f : d[3]};
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void mma8(float (&d)[4], const uint32_t* a, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
template <int BYTES> __device__ __forceinline__ void copy_async(void* to, const void* from, bool exists) {  // or zeros
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES),
        "r"(exists ? BYTES : 0)
        : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void split(float a, float b, uint32_t& hi, uint32_t& lo) {
    const __half2 h = __floats2half2_rn(a, b);
    const float2 f = __half22float2(h);
    const __half2 l = __floats2half2_rn(a - f.x, b - f.y);
    hi = *reinterpret_cast<const uint32_t*>(&h), lo = *reinterpret_cast<const uint32_t*>(&l);
}
// The bits of |v|, which order as values do. The exponent of the power of two that brings it to [2^14, 2^15), 2^100 at
// most; that power, and its inverse.
__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffff; }
__device__ __forceinline__ uint32_t finite(uint32_t magnitude) { return magnitude < kInfinityBits ? magnitude : 0; }
__device__ __forceinline__ uint32_t scale_exponent(uint32_t magnitude) { return min(268 - (magnitude >> 23), 227); }
__device__ __forceinline__ float power(uint32_t exponent) { return __uint_as_float(exponent << 23); }
__device__ __forceinline__ float inverse_power(uint32_t exponent) { return __uint_as_float((254 - exponent) << 23); }

// x is (samples, in, height, width), grad (samples, out, rows, columns). A block walks down a band of rows in a strip:
// it has x's columns [first, first + tile), h's up to first + tile - 2; the next strip begins `step` further on, and
// leaves its first two columns of h, which it needs for x's gradient, to this one to count.
struct Backward {
    int samples, in, out, groups, height, width, rows, columns;
    int tile, step, strips, bands, measure_bands;  // measure_bands: kernel 1's, of which two blocks fit an SM
    bool pairs, quads;  // grad's rows start at whole pairs; x's gradient's at whole fours
    bool wants_weight;
    const void *grad, *x;
    const float *weight, *conv_bias, *bias, *scale, *gamma, *mean, *rstd;
    void* grad_x;  // null: not wanted
    float* sums;  // of block, channel: the sums of grad, of grad * (v - mean)
    float* joint;  // of sample, group: the means of gamma * grad, of gamma * grad * vhat
    float* of_samples;  // partial sums of sample: gamma's gradient, beta's
    float* of_blocks;  // of block: weight's, bias's, scale's
};

struct alignas(16) ConvolutionTile {
    uint4 x[kSlots][2 * kPlane];  // of row: hi, lo
    uint4 fragments[2][3][4][32];  // of 16 output channels, ky, (hi of kx 0, 1; of 1, 2; lo of 0, 1; of 1, 2), lane
    uint32_t weight_exponent[kOut];  // of a power of two that a channel's weights are multiplied by
    float weight_inverse[kOut];  // its inverse
    float bias[kOut], reach;  // both biases; the largest of all channels' sums of |weight * scale|
    float x_inverse[kSlots];  // of the scales of the rows
    alignas(4) bool exceeds[kSlots];  // a row that is beyond kMostReach, or not finite
    struct {
        uint32_t x, dh, strange;
    } largest[2];  // of rows by parity: magnitudes; whether dh is not finite
};
struct Piece {  // a block's
    int64_t sample;
    int strip, first, columns, first_row, last_row;
};
__device__ __forceinline__ Piece piece_of_block(const Backward& p) {
    const int strip = blockIdx.x / p.bands % p.strips, band = blockIdx.x % p.bands, first = strip * p.step;
    return {blockIdx.x / (p.bands * p.strips), strip, first, min(p.columns - first, p.tile - 2),
        int(int64_t(p.height) * band / p.bands), int(int64_t(p.height) * (band + 1) / p.bands)};
}

// All threads: the weights as operands of the convolution, of which each channel has its own scale; zeros in x's tile.
__device__ __forceinline__ void prepare_convolution(const Backward& p, ConvolutionTile& tile) {
    const int lane = threadIdx.x % 32, k = p.in * kTaps;
    __shared__ float reach[kOut];
    for (int i = threadIdx.x; i < kSlots * 2 * kPlane; i += blockDim.x) (&tile.x[0][0])[i] = make_uint4(0, 0, 0, 0);
    for (int o = threadIdx.x / 32; o < kOut; o += blockDim.x / 32) {
        uint32_t most = 0;
        float sum = 0;
        for (int i = lane; i < k && o < p.out; i += 32) {
            most = max(most, finite(magnitude(p.weight[o * k + i]))), sum += fabsf(p.weight[o * k + i]);
        }
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        most = warp_max(most);
        if (lane > 0) continue;
        tile.weight_exponent[o] = scale_exponent(most), tile.weight_inverse[o] = inverse_power(tile.weight_exponent[o]);
        tile.bias[o] = o < p.out ? p.conv_bias[o] + p.bias[o] : 0.0f,
        reach[o] = o < p.out ? sum * fabsf(p.scale[o]) : 0.0f;
    }
    if (threadIdx.x < 2) tile.largest[threadIdx.x] = {0, 0, 0};
    if (threadIdx.x < kSlots) tile.exceeds[threadIdx.x] = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        tile.reach = 0;
        for (int o = 0; o < kOut; ++o)
            tile.reach = tile.reach >= reach[o] || tile.reach != tile.reach ? tile.reach : reach[o];
    }
    for (int i = threadIdx.x; i < 2 * 3 * 32; i += blockDim.x) {
        const int in = i % 4 * 2, half = i / 96, ky = i / 32 % 3;
        uint32_t hi[6], lo[6];
        for (int j = 0; j < 6; ++j) {  // kx, lower or upper eight channels
            const int o = half * 16 + i % 32 / 4 + j % 2 * 8;
            const auto scaled = [&](int in) {
                return o < p.out && in < p.in
                    ? p.weight[(o * p.in + in) * kTaps + ky * 3 + j / 2] * power(tile.weight_exponent[o])
                    : 0.0f;
            };
            split(scaled(in), scaled(in + 1), hi[j], lo[j]);
        }
        uint4(&to)[4][32] = tile.fragments[half][ky];
        to[0][lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]), to[1][lane] = make_uint4(hi[2], hi[3], hi[4], hi[5]);
        to[2][lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]), to[3][lane] = make_uint4(lo[2], lo[3], lo[4], lo[5]);
    }
}

// A row of x goes to the tile in three steps, a thread for each column: into registers; its largest value is announced;
// after a barrier, scaled, to its slot.
template <typename T>
__device__ __forceinline__ void load_x(const Backward& p, const Piece& piece, int row, float (&v)[kIn]) {
    const int column = piece.first + threadIdx.x;
    const int64_t plane = int64_t(p.height) * p.width;
    const T* from = static_cast<const T*>(p.x) + piece.sample * p.in * plane + int64_t(row) * p.width + column;
    const int channels = column < p.width && row < p.height ? p.in : 0;
    for (int i = 0; i < kIn; ++i, from += plane) v[i] = i < channels ? to_float(*from) : 0.0f;
}
__device__ __forceinline__ void announce_x(ConvolutionTile& tile, int row, const float (&v)[kIn]) {
    uint32_t largest = 0;
    for (int i = 0; i < kIn; ++i) largest = max(largest, magnitude(v[i]));
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) atomicMax(&tile.largest[row & 1].x, largest);
}
__device__ __forceinline__ void store_x(ConvolutionTile& tile, int row, const float (&v)[kIn]) {
    const int slot = row % kSlots;
    const uint32_t largest = tile.largest[row & 1].x, exponent = scale_exponent(largest);
    if (threadIdx.x == 0) {
        tile.x_inverse[slot] = inverse_power(exponent),
        tile.exceeds[slot] = !(__uint_as_float(largest) * tile.reach <= kMostReach);
        tile.largest[~row & 1] = {0, 0, 0};
    }
    uint32_t hi[4], lo[4];
    for (int i = 0; i < 4; ++i) split(v[2 * i] * power(exponent), v[2 * i + 1] * power(exponent), hi[i], lo[i]);
    uint4* const to = tile.x[slot] + threadIdx.x % 4 * kSub + threadIdx.x / 4;
    to[0] = make_uint4(hi[0], hi[1], hi[2], hi[3]), to[kPlane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
}
template <typename T>
__device__ __forceinline__ void fill_x(const Backward& p, const Piece& piece, ConvolutionTile& tile, int row) {
    for (int end = row + 3; row < end; ++row) {
        float x[kIn];
        load_x<T>(p, piece, row, x);
        announce_x(tile, row, x);
        __syncthreads();
        store_x(tile, row, x);
        __syncthreads();
    }
}
__device__ __forceinline__ bool any_exceeds(const ConvolutionTile& tile) {
    return *reinterpret_cast<const uint32_t*>(tile.exceeds) != 0;
}

// The lane's values of convolve() from floats; zeros beyond the image.
template <typename T>
__device__ __noinline__ void convolve_slowly(const Backward& p, int64_t sample, int row, int column, float* h) {
    for (int k = 0; k < 32; ++k) {
        const int o = k / 16 * 16 + k % 4 / 2 * 8 + threadIdx.x % 32 / 4, at = column + k % 2 * 4 + k % 16 / 4;
        float sum = 0;
        for (int i = 0; i < p.in * kTaps && o < p.out && at < p.columns; ++i) {
            const int64_t plane = sample * p.in + i / kTaps, y = row + i % kTaps / 3, x = at + i % 3;
            sum = fmaf(to_float(static_cast<const T*>(p.x)[(plane * p.height + y) * p.width + x]),
                p.weight[o * p.in * kTaps + i], sum);
        }
        h[k] = o < p.out && at < p.columns ? sum + p.conv_bias[o] + p.bias[o] : 0.0f;
    }
}

// By a warp: h with its biases in 32 columns of a row. h[half][j][2 c + i] is channel 16 half + 8 c + lane / 4, column
// 8 (lane % 4) + 4 i + j of the warp's.
template <typename T>
__device__ __forceinline__ void convolve(
    const Backward& p, const ConvolutionTile& tile, const Piece& piece, int row, float (&h)[2][4][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (any_exceeds(tile)) {
        float slow[32];
        convolve_slowly<T>(p, piece.sample, row, piece.first + warp * 32 + lane % 4 * 8, slow);
        for (int k = 0; k < 32; ++k) h[k / 16][k / 4 % 4][k % 4] = slow[k];
        return;
    }
#pragma unroll
    for (int ky = 0; ky < 3; ++ky) {
        const int slot = (row + ky) % kSlots;
        const uint4* const x = tile.x[slot] + lane / 8 * kSub + 8 * warp + lane % 8;
        uint32_t hi[8], lo[8];
        load_matrices<false>(hi, x), load_matrices<false>(hi + 4, x + 1);
        load_matrices<false>(lo, x + kPlane), load_matrices<false>(lo + 4, x + kPlane + 1);
        uint4 w[2][4];
        for (int k = 0; k < 8; ++k) w[k / 4][k % 4] = tile.fragments[k / 4][ky][k % 4][lane];
        float sums[2][4][4];
        for (int product = 0; product < 3; ++product) {  // the smallest first; eight independent chains of products
            const uint32_t* const b = product == 1 ? lo : hi;
            for (int k = 0; k < 16; ++k) {
                const int half = k % 2, j = k / 2 % 4;
                const uint32_t* const a01 = &w[half][product == 0 ? 2 : 0].x;  // kx 0 and 1
                const uint32_t* const a12 = &w[half][product == 0 ? 3 : 1].x;
                if (k < 8) mma16(sums[half][j], j % 2 == 0 ? a01 : a12, b + j + j % 2, product == 0);
                else mma8(sums[half][j], j % 2 == 0 ? a12 + 2 : a01, b[j % 2 == 0 ? j + 2 : j]);
            }
        }
        for (int k = 0; k < 32; ++k) {
            const int o = k / 16 * 16 + k % 4 / 2 * 8 + lane / 4;
            float& to = h[k / 16][k / 4 % 4][k % 4];
            to = fmaf(sums[k / 16][k / 4 % 4][k % 4], tile.x_inverse[slot] * tile.weight_inverse[o],
                ky == 0 ? tile.bias[o] : to);
        }
    }
}

// A warp's gradients of a row, of all channels and its 32 columns, on their way through shared memory, where only this
// warp uses them: two neighbours of a channel at a time, 16 lanes for a channel. Those of columns [skipped, left)
// exist.
template <typename T> struct alignas(2 * sizeof(T)) Pair {
    T a, b;
};
constexpr int kGradientPairs = 17;  // of a channel, one of them padding: lanes of four channels meet different banks
template <typename T> struct Gradients {
    Pair<T>* shared;
    const T* from;
    int skipped, left;
    __device__ __forceinline__ Gradients(const Backward& p, const Piece& piece, void* pairs, bool skip) {
        const int column = threadIdx.x / 32 * 32 + threadIdx.x % 16 * 2, channel = threadIdx.x / 16 % 2;
        shared = static_cast<Pair<T>*>(pairs) + threadIdx.x / 32 * (kOut * kGradientPairs);
        from = static_cast<const T*>(p.grad) + (piece.sample * p.out + channel) * p.rows * p.columns + piece.first +
            column;
        skipped = skip && piece.strip > 0 ? 2 - column : 0, left = piece.columns - column;
    }
    __device__ __forceinline__ void fetch(const Backward& p, int row) const {
        const int64_t step = int64_t(2) * p.rows * p.columns;
        const int channel = threadIdx.x / 16 % 2, channels = left > 0 && skipped <= 0 ? p.out - channel : 0;
        const T* at = from + int64_t(row) * p.columns;
        Pair<T>* const to = shared + channel * kGradientPairs + threadIdx.x % 16;
        if (p.pairs) {
            for (int i = 0; i < kOut; i += 2, at += step)
                copy_async<2 * sizeof(T)>(to + i * kGradientPairs, at, i < channels);
            return;
        }
        for (int i = 0; i < kOut; i += 2, at += step) {
            const bool a = i < channels, b = a && left > 1;
            to[i * kGradientPairs] = {a ? at[0] : from_float<T>(0.0f), b ? at[1] : from_float<T>(0.0f)};
        }
    }
    __device__ __forceinline__ void wait() const { wait_for_copies(), __syncwarp(); }
    // of columns 8 (lane % 4) on, channel 8 c + lane / 4
    __device__ __forceinline__ void take(int c, float (&grad)[8]) const {
        const Pair<T>* const of = shared + (8 * c + threadIdx.x % 32 / 4) * kGradientPairs + threadIdx.x % 4 * 4;
        for (int k = 0; k < 8; k += 2) grad[k] = to_float(of[k / 2].a), grad[k + 1] = to_float(of[k / 2].b);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Kernel 1: the sums of grad and grad * (v - mean) of each channel.
template <typename T>
__global__ void __launch_bounds__(32 * kMostWarps, 2) measure_gradients(const __grid_constant__ Backward p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 shared[];
    ConvolutionTile& tile = *reinterpret_cast<ConvolutionTile*>(shared);
    const int lane = threadIdx.x % 32;
    const Piece piece = piece_of_block(p);
    const Gradients<T> gradients(p, piece, &tile + 1, true);
    const int last_row = min(piece.last_row, p.rows);
    float scale[4], mean[4], x[kIn], sums[8] = {};
    for (int c = 0; c < 4; ++c) {
        const int o = min(lane / 4 + 8 * c, p.out - 1);
        scale[c] = p.scale[o] * kActivationFactor, mean[c] = p.mean[piece.sample * p.groups + o / (p.out / p.groups)];
    }
    prepare_convolution(p, tile);
    __syncthreads();
    if (piece.first_row < last_row) gradients.fetch(p, piece.first_row);
    fill_x<T>(p, piece, tile, piece.first_row);
    for (int row = piece.first_row; row < last_row; ++row) {
        float h[2][4][4];
        load_x<T>(p, piece, row + 3, x);
        convolve<T>(p, tile, piece, row, h);
        gradients.wait();
        for (int c = 0; c < 4; ++c) {
            float grad[8], sum = 0, product = 0;
            gradients.take(c, grad);
            for (int k = 0; k < 8; ++k) {
                const float v = activation(h[c / 2][k % 4][c % 2 * 2 + k / 4] * scale[c]);
                sum += grad[k], product = fmaf(grad[k], v - mean[c], product);
            }
            sums[c] += sum, sums[4 + c] += product;
        }
        __syncwarp();
        if (row + 1 < last_row) gradients.fetch(p, row + 1);
        announce_x(tile, row + 3, x);
        __syncthreads();
        store_x(tile, row + 3, x);
        __syncthreads();
    }
    float* const own = reinterpret_cast<float*>(shared);  // of warp, channel, sum
    for (int k = 0; k < 8; ++k) {
        sums[k] += __shfl_xor_sync(~0u, sums[k], 1), sums[k] += __shfl_xor_sync(~0u, sums[k], 2);
        own[(threadIdx.x / 32 * kOut + lane / 4 + k % 4 * 8) * 2 + k / 4] = sums[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * p.out; i += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < blockDim.x / 32; ++w) sum += own[w * kOut * 2 + i];
        p.sums[int64_t(blockIdx.x) * 2 * p.out + i] = sum;
    }
#endif
}

// A block for each sample, a thread for each channel: adds the sums of its pieces; then two threads for each group.
__global__ void __launch_bounds__(2 * kOut) join_sums(const __grid_constant__ Backward p) {
    __shared__ double shared[kOut][2];
    const int64_t sample = blockIdx.x;
    const int o = threadIdx.x, each = p.out / p.groups, pieces = p.strips * p.bands;
    if (o < p.out) {
        double sum = 0, product = 0;
        for (int i = 0; i < pieces; ++i) {
            const float* const from = p.sums + ((sample * pieces + i) * p.out + o) * 2;
            sum += from[0], product += from[1];
        }
        product *= p.rstd[sample * p.groups + o / each];
        shared[o][0] = sum * p.gamma[o], shared[o][1] = product * p.gamma[o];
        p.of_samples[sample * 2 * p.out + o] = float(product), p.of_samples[(sample * 2 + 1) * p.out + o] = float(sum);
    }
    __syncthreads();
    if (o >= 2 * p.groups) return;
    double sum = 0;
    for (int i = 0; i < each; ++i) sum += shared[o / 2 * each + i][o % 2];
    p.joint[sample * 2 * p.groups + o] = float(sum / (double(each) * p.rows * p.columns));
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernel 2. For each row r of h a block computes dh, the gradient of h, from which rows r to r + 2 of x's gradient and
// the weights' gradient take their shares.
//   between two barriers   each warp adds the shares of row r, then computes dh of row r + 1, in registers
//   between the next two   dh of row r + 1 and row r + 4 of x are scaled by their largest values and stored
struct alignas(16) ChannelConstants {
    float scale, gamma, mean, grad_mean;  // scale: times kActivationFactor
    // q = (gamma * grad - grad_mean - (v - mean) * pull) * v's derivative; dh = q * push
    float pull, push, rstd, unused;
};
struct alignas(16) GradientTile {
    ConvolutionTile convolution;
    uint4 dh[4][2 * kPlane];  // of 8 channels: hi, lo. Cell 0 of a sub-row is left of the strip: zeros
    uint4 fragments[2][kTaps][32];  // of 16 output channels, tap, lane: the weights as operands of x's gradient
    ChannelConstants channels[kOut];
    float dh_inverse, weight_inverse;  // of the scales of dh's row and of the weights
    bool strange;  // dh's row, or a weight, is not finite
};

__device__ __forceinline__ void prepare_gradients(const Backward& p, GradientTile& tile, int64_t sample) {
    uint32_t exponent = 227;
    for (int o = 0; o < kOut; ++o) exponent = min(exponent, tile.convolution.weight_exponent[o]);
    if (threadIdx.x == 0) tile.weight_inverse = inverse_power(exponent);
    for (int o = threadIdx.x; o < kOut; o += blockDim.x) {
        const int64_t of = sample * p.groups + o / (p.out / p.groups);
        tile.channels[o] = {};
        if (o < p.out) {
            tile.channels[o] = {p.scale[o] * kActivationFactor, p.gamma[o], p.mean[of], p.joint[2 * of],
                p.rstd[of] * p.joint[2 * of + 1], p.rstd[of] * p.scale[o], p.rstd[of]};
        }
    }
    for (int i = threadIdx.x; i < 2 * kTaps * 32; i += blockDim.x) {
        const int in = i % 32 / 4, o = i / (32 * kTaps) * 16 + i % 4 * 2, tap = i / 32 % kTaps;
        const auto scaled = [&](int o) {
            return o < p.out && in < p.in ? p.weight[(o * p.in + in) * kTaps + tap] * power(exponent) : 0.0f;
        };
        uint4& f = tile.fragments[i / (32 * kTaps)][tap][i % 32];
        split(scaled(o), scaled(o + 1), f.x, f.z), split(scaled(o + 8), scaled(o + 9), f.y, f.w);
    }
    for (int i = threadIdx.x; i < 8 * kPlane; i += blockDim.x) (&tile.dh[0][0])[i] = make_uint4(0, 0, 0, 0);
}

// By a warp: its h becomes dh, and is added to sums of q and of q * h, of columns from `skipped`, 0 or 2, on if
// `counts`.
template <typename T>
__device__ __forceinline__ void differentiate(const GradientTile& tile, const Gradients<T>& gradients, int left,
    int skipped, bool counts, float (&h)[2][4][4], float (&sums)[8]) {
    for (int c = 0; c < 4; ++c) {
        const ChannelConstants k = tile.channels[threadIdx.x % 32 / 4 + 8 * c];
        float grad[8], sum = 0, product = 0;
        gradients.take(c, grad);
        for (int i = 0; i < 8; ++i) {
            float& value = h[c / 2][i % 4][c % 2 * 2 + i / 4];
            const float v = activation(value * k.scale);
            const float q = fmaf(k.gamma, grad[i], -fmaf(v - k.mean, k.pull, k.grad_mean)) * activation_gradient(v);
            const float here = i < left ? q : 0.0f, counted = i < 2 && i < skipped ? 0.0f : here;
            sum += counted, product = fmaf(counted, value, product);
            value = here * k.push;
        }
        if (counts) sums[c] += sum, sums[4 + c] += product;
    }
}
// By a warp: the largest finite magnitude of its dh to the block's, and whether a value is not finite.
__device__ __forceinline__ void announce_dh(ConvolutionTile& tile, int parity, const float (&dh)[2][4][4]) {
    uint32_t largest = 0;
    for (int k = 0; k < 32; ++k) largest = max(largest, magnitude(dh[k / 16][k / 4 % 4][k % 4]));
    largest = warp_max(largest);
    if (largest >= kInfinityBits) {
        largest = 0, tile.largest[parity].strange = 1;
        for (int k = 0; k < 32; ++k) largest = max(largest, finite(magnitude(dh[k / 16][k / 4 % 4][k % 4])));
        largest = warp_max(largest);
    }
    if (threadIdx.x % 32 == 0) atomicMax(&tile.largest[parity].dh, largest);
}
// By a warp, after a barrier: its dh, scaled, to the tile.
__device__ __forceinline__ void store_dh(GradientTile& tile, int parity, const float (&dh)[2][4][4]) {
    const uint32_t exponent = scale_exponent(tile.convolution.largest[parity].dh);
    for (int c = 0; c < 4; ++c) {
        uint32_t hi[4], lo[4];
        for (int j = 0; j < 4; ++j) {
            const float* const v = &dh[c / 2][j][c % 2 * 2];
            split(v[0] * power(exponent), v[1] * power(exponent), hi[j], lo[j]);
        }
        uint4* const to = tile.dh[c] + threadIdx.x % 32 / 8 * kSub + threadIdx.x / 32 * 8 + threadIdx.x % 8 + 1;
        store_transposed(to, hi), store_transposed(to + kPlane, lo);
    }
    if (threadIdx.x > 0) return;
    tile.dh_inverse = inverse_power(exponent);
    tile.strange = tile.convolution.largest[parity].strange || !(tile.convolution.reach < INFINITY);
}

__device__ __forceinline__ float dh_at(const GradientTile& tile, int o, int column) {
    const __half* const hi =
        reinterpret_cast<const __half*>(tile.dh[o / 8] + column % 4 * kSub + column / 4 + 1) + o % 8;
    const float value = __half2float(hi[0]);
    return (isfinite(value) ? value + __half2float(hi[8 * kPlane]) : value) * tile.dh_inverse;
}
// The lane's shares in total of add_to_weights() and add_to_x(), from floats. Columns [begin, end) of the tile count.
template <typename T>
__device__ __noinline__ void add_to_weights_slowly(
    const Backward& p, const GradientTile& tile, const Piece& piece, int row, int begin, int end, float* sums) {
    for (int k = 0; k < 8 * kTaps; ++k) {
        const int o = k / (4 * kTaps) * 16 + k / 2 % 2 * 8 + threadIdx.x % 32 / 4, in = threadIdx.x % 4 * 2 + k % 2,
                  tap = k / 4 % kTaps;
        const int64_t at = ((piece.sample * p.in + in) * p.height + row + tap / 3) * p.width + piece.first + tap % 3;
        sums[k] = 0;
        for (int i = begin; i < end && in < p.in; ++i) {
            sums[k] = fmaf(dh_at(tile, o, i), to_float(static_cast<const T*>(p.x)[at + i]), sums[k]);
        }
    }
}
__device__ __noinline__ void add_to_x_slowly(const Backward& p, const GradientTile& tile, int columns, float* sums) {
    for (int k = 0; k < 24; ++k) {
        const int in = threadIdx.x % 4 * 2 + k % 2, column = threadIdx.x / 4 * 4 + k / 4 % 2 * 2 + k / 2 % 2;
        sums[k] = 0;
        for (int i = 0; i < 3 * p.out && in < p.in; ++i) {
            const int o = i / 3, from = column - i % 3;
            if (from < 0 || from >= columns) continue;
            sums[k] = fmaf(dh_at(tile, o, from), p.weight[(o * p.in + in) * kTaps + k / 8 * 3 + i % 3], sums[k]);
        }
    }
}

// By a warp: the share of its 32 columns in the weights' gradient. total[half][tap][2 c + i] is of output channel
// 16 half + 8 c + lane / 4, input channel 2 (lane % 4) + i.
template <typename T>
__device__ __forceinline__ void add_to_weights(
    const Backward& p, const GradientTile& tile, const Piece& piece, int row, float (&total)[2][kTaps][4]) {
    const int lane = threadIdx.x % 32, of = lane / 8, warp = threadIdx.x / 32, skipped = piece.strip > 0 ? 2 : 0;
    if (any_exceeds(tile.convolution) || tile.strange) {
        float slow[8 * kTaps];
        add_to_weights_slowly<T>(
            p, tile, piece, row, max(warp * 32, skipped), min(warp * 32 + 32, piece.columns), slow);
        for (int k = 0; k < 8 * kTaps; ++k) total[k / (4 * kTaps)][k / 4 % kTaps][k % 4] += slow[k];
        return;
    }
    uint32_t hi[4][4], lo[4][4];  // of half and 16 columns: dh's channels by columns
    for (int k = 0; k < 4; ++k) {
        const uint4* const from = tile.dh[k / 2 * 2 + of % 2] + (k % 2 * 2 + of / 2) * kSub + 8 * warp + lane % 8 + 1;
        load_matrices<true>(hi[k], from), load_matrices<true>(lo[k], from + kPlane);
        if (k % 2 > 0 || threadIdx.x % 4 > 0 || warp > 0 || skipped == 0) continue;
        for (int i = 0; i < 4; ++i) hi[k][i] &= 0xffff0000, lo[k][i] &= 0xffff0000;
    }
#pragma unroll
    for (int ky = 0; ky < 3; ++ky) {
        const int slot = (row + ky) % kSlots;
        const uint4 *const x = tile.convolution.x[slot] + 8 * warp + lane % 8, *const even = x + of * kSub;
        const uint4* const odd = x + (of + 1) % 4 * kSub + (of + 1) / 4;
        uint32_t b[2][3][4];  // hi, lo; matrices 0 to 3, 1 to 4, 4 to 7
        for (int k = 0; k < 2; ++k) {
            load_matrices<true>(b[k][0], even + k * kPlane), load_matrices<true>(b[k][1], odd + k * kPlane);
            load_matrices<true>(b[k][2], even + k * kPlane + 1);
        }
        const float factor = tile.dh_inverse * tile.convolution.x_inverse[slot];
        float sums[2][3][4];
        for (int k = 0; k < 36; ++k) {  // the smallest products first; six independent chains
            const int kx = k % 3, half = k / 3 % 2, step = k / 6 % 2, product = k / 12, a = 2 * half + step;
            const uint32_t (&x_of)[3][4] = b[product == 1];
            const uint32_t* const columns = kx == 1 ? &x_of[1][2 * step]
                : kx + 2 * step == 4                ? &x_of[2][0]
                                                    : &x_of[0][kx + 2 * step];
            mma16(sums[half][kx], product == 0 ? lo[a] : hi[a], columns, k < 6);
        }
        for (int k = 0; k < 24; ++k) {
            float& to = total[k / 12][3 * ky + k / 4 % 3][k % 4];
            to = fmaf(sums[k / 12][k / 4 % 3][k % 4], factor, to);
        }
    }
}

// By a warp: the share of a row of dh in three rows of x's gradient. total[ky][j / 2][j % 2 * 2 + i] is of column
// 4 (lane / 4) + j of the warp's, input channel 2 (lane % 4) + i.
__device__ __forceinline__ void add_to_x(
    const Backward& p, const GradientTile& tile, int columns, float (&total)[3][2][4]) {
    if (tile.strange) {
        float slow[24];
        add_to_x_slowly(p, tile, columns, slow);
        for (int k = 0; k < 24; ++k) total[k / 8][k / 4 % 2][k % 4] += slow[k];
        return;
    }
    const int lane = threadIdx.x % 32, of = lane / 8 % 2, cell = threadIdx.x / 32 * 8 + lane % 8;
    const float factor = tile.dh_inverse * tile.weight_inverse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4* const dh = tile.dh[2 * half + lane / 16];
        float sums[3][2][4];
#pragma unroll
        for (int kx = 0; kx < 3; ++kx) {
            uint32_t hi[2][4], lo[2][4];  // columns 4 i + m, then 4 i + m + 1, m = 2 t - kx, by 8 channels, then 8 more
            for (int t = 0; t < 2; ++t) {
                const int m = 2 * t - kx + of + 4;
                const uint4* const from = dh + m % 4 * kSub + cell + m / 4;
                load_matrices<false>(hi[t], from), load_matrices<false>(lo[t], from + kPlane);
            }
            for (int k = 0; k < 18; ++k) {
                const int t = k % 2, ky = k / 2 % 3, product = k / 6;
                const uint4 w = tile.fragments[half][3 * ky + kx][lane];
                mma16(sums[ky][t], product == 0 ? lo[t] : hi[t], product == 1 ? &w.z : &w.x, kx == 0 && product == 0);
            }
        }
        for (int k = 0; k < 24; ++k) {
            float& to = total[k / 8][k / 4 % 2][k % 4];
            to = fmaf(sums[k / 8][k / 4 % 2][k % 4], factor, to);
        }
    }
}

// By a warp: a row of x's gradient, of which this block has columns [begin, end). A lane has four of two channels.
template <typename T>
__device__ __forceinline__ void store_grad_x(const Backward& p, const Piece& piece, int row, const float (&v)[2][4]) {
    const int begin = piece.strip > 0 ? 2 : 0, end = piece.strip + 1 < p.strips ? p.tile - 2 : p.width - piece.first;
    const int column = threadIdx.x / 4 * 4;
    struct alignas(4 * sizeof(T)) Quad {
        T v[4];
    } quad;
    for (int i = 0; i < 2; ++i) {
        const int in = threadIdx.x % 4 * 2 + i;
        if (in >= p.in) continue;
        T* const to =
            static_cast<T*>(p.grad_x) + ((piece.sample * p.in + in) * p.height + row) * p.width + piece.first + column;
        for (int k = 0; k < 4; ++k) quad.v[k] = from_float<T>(v[k / 2][k % 2 * 2 + i]);
        if (p.quads && column >= begin && column + 4 <= end) *reinterpret_cast<Quad*>(to) = quad;
        else {
            for (int k = 0; k < 4; ++k) {
                if (column + k >= begin && column + k < end) to[k] = quad.v[k];
            }
        }
    }
}

// All threads: the block's row of partial sums: of the weights' gradient (out, in, 9), of bias's, of scale's.
__device__ __forceinline__ void leave_sums(
    const Backward& p, float* shared, const float (&weights)[2][kTaps][4], const float (&sums)[8]) {
    constexpr int kVectors = 8 * kTaps * 32, kWarp = kVectors + 2 * kOut;
    static_assert(
        kMostWarps * kWarp * sizeof(float) <= sizeof(GradientTile), "the sums of all warps fit where the tiles were");
    const int lane = threadIdx.x % 32, per_channel = p.in * kTaps, weight_sums = p.out * per_channel,
              width = weight_sums + 2 * p.out;
    float* const own = shared + threadIdx.x / 32 * kWarp;
    float v[8];
    for (int k = 0; k < 8; ++k) {
        const ChannelConstants& c = reinterpret_cast<const GradientTile*>(shared)->channels[lane / 4 + k % 4 * 8];
        v[k] = sums[k] * (k < 4 ? c.push : c.rstd);
        v[k] += __shfl_xor_sync(~0u, v[k], 1), v[k] += __shfl_xor_sync(~0u, v[k], 2);
    }
    __syncthreads();
    for (int k = 0; k < 8 * kTaps; ++k) own[k * 32 + lane] = weights[k / (4 * kTaps)][k / 4 % kTaps][k % 4];
    for (int k = 0; k < 8; ++k) own[kVectors + k * 8 + lane / 4] = v[k];
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const int o = i / per_channel, in = i % per_channel / kTaps, tap = i % per_channel % kTaps;
        int at = ((o / 16 * kTaps + tap) * 4 + o % 16 / 8 * 2 + in % 2) * 32 + o % 8 * 4 + in / 2;
        if (i >= weight_sums) at = kVectors + (i - weight_sums) / p.out * kOut + (i - weight_sums) % p.out;
        float sum = 0;
        for (int w = 0; w < blockDim.x / 32; ++w) sum += shared[w * kWarp + at];
        p.of_blocks[int64_t(blockIdx.x) * width + i] = sum;
    }
}

template <typename T>
__global__ void __launch_bounds__(32 * kMostWarps, 1) differentiate_rows(const __grid_constant__ Backward p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint4 shared[];
    GradientTile& tile = *reinterpret_cast<GradientTile*>(shared);
    ConvolutionTile& convolution = tile.convolution;
    const Piece piece = piece_of_block(p);
    const Gradients<T> gradients(p, piece, &tile + 1, false);
    const int left = piece.columns - threadIdx.x / 32 * 32 - threadIdx.x % 4 * 8;
    const int begin = max(piece.first_row - 2, 0),
              skipped = piece.strip > 0 && threadIdx.x / 32 * 32 + threadIdx.x % 4 == 0 ? 2 : 0;
    float x[kIn], dh[2][4][4], weights[2][kTaps][4] = {}, grad_x[3][2][4] = {}, sums[8] = {};
    prepare_convolution(p, convolution);
    prepare_gradients(p, tile, piece.sample);
    __syncthreads();
    gradients.fetch(p, begin);
    fill_x<T>(p, piece, convolution, begin);
    for (int row = begin - 1; row < piece.last_row; ++row) {
        const int next = row + 1, parity = next & 1;
        if (row >= begin && row < p.rows) {
            if (p.grad_x != nullptr) add_to_x(p, tile, piece.columns, grad_x);
            if (p.wants_weight && row >= piece.first_row) add_to_weights<T>(p, tile, piece, row, weights);
        }
        if (next < p.rows && next < piece.last_row) {
            load_x<T>(p, piece, next + 3, x);
            convolve<T>(p, convolution, piece, next, dh);
            gradients.wait();
            differentiate<T>(tile, gradients, left, skipped, next >= piece.first_row, dh, sums);
            __syncwarp();
            if (next + 1 < p.rows) gradients.fetch(p, next + 1);
            announce_dh(convolution, ~parity & 1, dh);
            announce_x(convolution, next + 3, x);
        }
        if (p.grad_x != nullptr && row >= piece.first_row) store_grad_x<T>(p, piece, row, grad_x[0]);
        for (int k = 0; k < 8; ++k) {
            float (&to)[3][2][4] = grad_x;
            to[0][k / 4][k % 4] = to[1][k / 4][k % 4], to[1][k / 4][k % 4] = to[2][k / 4][k % 4],
                             to[2][k / 4][k % 4] = 0;
        }
        __syncthreads();
        store_dh(tile, ~parity & 1, dh);
        store_x(convolution, next + 3, x);
        __syncthreads();
    }
    leave_sums(p, reinterpret_cast<float*>(shared), weights, sums);
#endif
}

// A block for 32 columns of a matrix of partial sums, whose warps add every eighth row, in double.
__global__ void __launch_bounds__(256)
    sum_rows(const float* __restrict__ from, int64_t rows, int width, float* __restrict__ to) {
    __shared__ double shared[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x % 32;
    double sum = 0;
    for (int64_t row = threadIdx.x / 32; row < rows && column < width; row += 8) sum += from[row * width + column];
    shared[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= width) return;
    for (int i = 1; i < 8; ++i) sum += shared[i][threadIdx.x];
    to[column] = float(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// As many bands as let `slots` blocks at a time end together: a band costs its rows, and six more to begin.
static int bands_for(const Backward& p, int64_t slots) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int bands = 1; bands <= 64 && bands <= p.height; ++bands) {
        const int64_t waves = (int64_t(p.samples) * p.strips * bands + slots - 1) / slots;
        const int64_t cost = waves * ((p.height + bands - 1) / bands + 6);
        if (cost < least) least = cost, best = bands;
    }
    return best;
}
// The shape's part of p, and how a workspace is divided; returns its size in floats.
static int64_t plan_backward(
    Backward& p, int64_t samples, int in, int out, int groups, int height, int width, int sms, float* workspace) {
    p.samples = int(samples), p.in = in, p.out = out, p.groups = groups, p.height = height, p.width = width;
    p.rows = height - 2, p.columns = width - 2;
    p.tile = min(32 * kMostWarps, (width + 31) / 32 * 32), p.step = p.tile - 4;
    p.strips = max(1, (width - 4 + p.step - 1) / p.step);
    p.bands = bands_for(p, sms), p.measure_bands = bands_for(p, 2 * sms);
    const int64_t strips = samples * p.strips, sums = strips * p.measure_bands * out * 2, joint = samples * groups * 2;
    const int64_t of_samples = samples * out * 2, of_blocks = strips * p.bands * (out * in * kTaps + 2 * out);
    p.sums = workspace, p.joint = workspace + sums, p.of_samples = p.joint + joint;
    p.of_blocks = p.of_samples + of_samples;
    return sums + joint + of_samples + of_blocks;
}

template <typename T> static cudaError_t launch_backward(Backward p, float* to, cudaStream_t stream) {
    p.pairs = p.columns % 2 == 0 && reinterpret_cast<uintptr_t>(p.grad) % (2 * sizeof(T)) == 0;
    p.quads = p.width % 4 == 0 && reinterpret_cast<uintptr_t>(p.grad_x) % (4 * sizeof(T)) == 0;
    const int pairs = p.tile * kGradientPairs * int(sizeof(Pair<T>));
    const int measure_bytes = int(sizeof(ConvolutionTile)) + pairs, bytes = int(sizeof(GradientTile)) + pairs;
    constexpr auto kBytes = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cudaError_t error = cudaFuncSetAttribute(measure_gradients<T>, kBytes, measure_bytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(differentiate_rows<T>, kBytes, bytes);
    if (error != cudaSuccess) return error;
    const int width = p.out * p.in * kTaps + 2 * p.out;
    const int64_t strips = int64_t(p.samples) * p.strips, blocks = strips * p.bands;
    Backward m = p;
    m.bands = p.measure_bands;
    measure_gradients<T><<<unsigned(strips * m.bands), p.tile, measure_bytes, stream>>>(m);
    join_sums<<<unsigned(p.samples), 2 * kOut, 0, stream>>>(m);
    differentiate_rows<T><<<unsigned(blocks), p.tile, bytes, stream>>>(p);
    sum_rows<<<(width + 31) / 32, 256, 0, stream>>>(p.of_blocks, blocks, width, to);
    sum_rows<<<(2 * p.out + 31) / 32, 256, 0, stream>>>(p.of_samples, p.samples, 2 * p.out, to + width);
    return cudaGetLastError();
}

// The backward's workspace, 16-byte aligned.
extern "C" int64_t conv_backward_workspace_bytes(
    int64_t samples, int in, int out, int groups, int height, int width, int sms) {
    Backward p = {};
    return plan_backward(p, samples, in, out, groups, height, width, sms, nullptr) * int64_t(sizeof(float));
}
// type: 0 float, 1 half, 2 bfloat16: of grad, x and grad_x (null: not wanted), contiguous. parameters: weight,
// conv_bias,
// bias, scale, gamma; mean, rstd (samples, groups): float. grad_parameters, float: the gradients of weight
// (out, in, 3, 3), bias (also conv_bias's), scale, gamma, beta, one behind the other. wants_weight: false leaves the
// weight's undefined. 1 <= in <= 8, 1 <= out <= 32, out % groups == 0, height and width >= 3, samples >= 1.
// sms: the device's multiprocessors, as for the workspace.
extern "C" int conv_backward(int type, const void* grad, const void* x, const float* const* parameters,
    const float* mean, const float* rstd, void* grad_x, float* grad_parameters, bool wants_weight, int64_t samples,
    int in, int out, int groups, int height, int width, int sms, void* workspace, cudaStream_t stream) {
    Backward p = {};
    plan_backward(p, samples, in, out, groups, height, width, sms, static_cast<float*>(workspace));
    p.grad = grad, p.x = x, p.grad_x = grad_x, p.wants_weight = wants_weight, p.mean = mean, p.rstd = rstd;
    p.weight = parameters[0], p.conv_bias = parameters[1], p.bias = parameters[2], p.scale = parameters[3];
    p.gamma = parameters[4];
    if (type == 0) return launch_backward<float>(p, grad_parameters, stream);
    if (type == 1) return launch_backward<__half>(p, grad_parameters, stream);
    return launch_backward<__nv_bfloat16>(p, grad_parameters, stream);
}
"""

CPP_SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;
// Everywhere `parameters` are the convolution's weight and bias, bias, scale, and the norm's weight and bias.
enum { kWeight, kConvBias, kBias, kScale, kGamma, kBeta, kParameters };

std::vector<Tensor> contiguous_floats(at::TensorList parameters) {
    std::vector<Tensor> ready;
    for (const Tensor& t : parameters) ready.push_back(t.to(at::kFloat).contiguous());
    return ready;
}

Vec activate(Vec z) { return Vec(1.0f) / (Vec(1.0f) + z.neg().exp()); }

// Float32 on the CPU: ATen's convolution, then each thread takes groups of samples: v into the output, its sums, and
// the norm in place. The sums of a block in the first cache are taken around its first value, in float, and put
// together in double.
Tensor forward_cpu(const Tensor& x, at::TensorList parameters, int64_t groups, double eps) {
    const Tensor h = at::conv2d(x, parameters[kWeight], parameters[kConvBias]).contiguous();
    Tensor out = at::empty_like(h);
    if (h.numel() == 0) return out;
    const int64_t channels = h.size(1) / groups, slices = h.size(0) * groups, pixels = h.size(2) * h.size(3);
    constexpr int64_t block = 4096;
    const std::vector<Tensor> ready = contiguous_floats(parameters);
    const auto parameter = [&](int which, int64_t channel) { return ready[which].const_data_ptr<float>()[channel]; };
    const auto plus = [](Vec a, Vec b) { return a + b; };
    const float* const from = h.const_data_ptr<float>();
    float* const to = out.data_ptr<float>();
    at::parallel_for(0, slices, std::max<int64_t>(1, 32768 / (channels * pixels)), [&](int64_t begin, int64_t end) {
        for (int64_t slice = begin; slice < end; ++slice) {
            const int64_t first = slice % groups * channels;
            double sum = 0, square = 0;
            for (int64_t i = 0; i < channels * pixels;) {
                const int64_t c = i / pixels, n = std::min(block, (c + 1) * pixels - i);
                const int64_t at = slice * channels * pixels + i;
                const Vec bias(parameter(kBias, first + c)), scale(parameter(kScale, first + c));
                at::vec::map<float>([=](Vec value) { return activate((value + bias) * scale); }, to + at, from + at, n);
                const Vec anchor(to[at]);
                const auto sum_of = [&](auto term) { return at::vec::map_reduce_all<float>(term, plus, to + at, n); };
                const double differences = sum_of([=](Vec v) { return v - anchor; });
                const double all = n * double(to[at]) + differences;
                square += sum_of([=](Vec v) { return (v - anchor) * (v - anchor); });
                sum += all, square += to[at] * (all + differences);
                i += n;
            }
            const double mean = sum / (channels * pixels), variance = square / (channels * pixels) - mean * mean;
            const double rstd = 1 / std::sqrt((variance < 0 ? 0 : variance) + eps);
            for (int64_t c = 0; c < channels; ++c) {
                const float hi = mean, factor = parameter(kGamma, first + c) * rstd;
                const double beta = parameter(kBeta, first + c);
                const Vec offset(std::isfinite(factor) ? beta - (mean - hi) * factor : NAN);  // NaN as in ATen
                float* const plane = to + (slice * channels + c) * pixels;
                at::vec::map<float>([=](Vec v) { return (v - Vec(hi)) * Vec(factor) + offset; }, plane, plane, pixels);
            }
        }
    });
    return out;
}

Tensor forward_meta(const Tensor& x, at::TensorList parameters, int64_t, double) {
    const Tensor& weight = parameters[kWeight];
    return at::empty_symint({x.sym_size(0), weight.sym_size(0), x.sym_size(2) - weight.sym_size(2) + 1,
                                x.sym_size(3) - weight.sym_size(3) + 1},
        x.options());
}
// The output, and each group's mean and rstd.
std::tuple<Tensor, Tensor, Tensor> record_meta(const Tensor& x, at::TensorList parameters, int64_t groups, double eps) {
    const auto of_groups = [&] { return at::empty_symint({x.sym_size(0), groups}, x.options().dtype(at::kFloat)); };
    return {forward_meta(x, parameters, groups, eps), of_groups(), of_groups()};
}
// The gradients of x and, in one float32 tensor, of the convolution's weight, of both biases, of scale, gamma and beta.
std::tuple<Tensor, Tensor> backward_meta(const Tensor& grad, const Tensor& x, at::TensorList parameters,
    const Tensor& mean, const Tensor& rstd, bool of_x, bool of_parameters) {
    const auto values = parameters[kWeight].sym_numel() + 4 * parameters[kBias].sym_numel();
    return {of_x ? at::empty_like(x) : at::empty({0}, x.options()),
        at::empty_symint({values}, x.options().dtype(at::kFloat))};
}

#ifdef WITH_CUDA
extern "C" int conv_forward(int type, const void* x, const void* const* parameters, void* out, float* mean, float* rstd,
    const int64_t* sizes, double eps, int sms, int shared_bytes, void* totals, cudaStream_t stream);
extern "C" int64_t conv_totals_bytes(int64_t samples, int64_t groups);
extern "C" int64_t tail_workspace_bytes(int64_t planes, int64_t pixels, int sms);
extern "C" int tail_forward(int type, const void* h, const float* const* parameters, void* out, int64_t samples,
    int64_t channels, int64_t groups, int64_t pixels, double eps, int sms, void* workspace, cudaStream_t stream);
extern "C" int64_t conv_backward_workspace_bytes(
    int64_t samples, int in, int out, int groups, int height, int width, int sms);
extern "C" int conv_backward(int type, const void* grad, const void* x, const float* const* parameters,
    const float* mean, const float* rstd, void* grad_x, float* grad_parameters, bool wants_weight, int64_t samples,
    int in, int out, int groups, int height, int width, int sms, void* workspace, cudaStream_t stream);

int type_number(const Tensor& t) { return t.scalar_type() == at::kFloat ? 0 : t.scalar_type() == at::kHalf ? 1 : 2; }
Tensor workspace_of(int64_t bytes, const Tensor& like) { return at::empty({bytes}, like.options().dtype(at::kByte)); }
void check_launch(int error) { TORCH_CHECK(error == 0, "launch failed: ", cudaGetErrorString(cudaError_t(error))); }
Tensor aligned(const Tensor& t) {  // contiguous, and at 16 bytes, which a slice of another tensor need not be
    const Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.const_data_ptr()) % 16 == 0 ? ready : ready.clone();
}

// The one kernel. False where it does not take the sizes.
bool run_kernel(const Tensor& x, at::TensorList parameters, int64_t groups, double eps, const Tensor& out, float* mean,
    float* rstd) {
    const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
    const at::IntArrayRef weight = parameters[kWeight].sizes();
    if (device.major != 9 || weight[2] != 3 || weight[3] != 3) return false;
    std::vector<Tensor> ready;
    const void* pointers[kParameters];
    for (int i = 0; i < kParameters; ++i) pointers[i] = ready.emplace_back(parameters[i].contiguous()).const_data_ptr();
    const int64_t sizes[] = {x.size(0), x.size(1), x.size(2), x.size(3), weight[0], groups};
    const Tensor input = aligned(x), totals = workspace_of(conv_totals_bytes(x.size(0), groups), x);
    const int error = conv_forward(type_number(x), input.const_data_ptr(), pointers, out.data_ptr(), mean, rstd, sizes,
        eps, device.multiProcessorCount, int(device.sharedMemPerBlockOptin), totals.data_ptr(),
        c10::cuda::getCurrentCUDAStream());
    if (error >= 0) check_launch(error);
    return error == 0;
}

Tensor forward_cuda(const Tensor& x, at::TensorList parameters, int64_t groups, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    Tensor out = forward_meta(x, parameters, groups, eps);
    if (out.numel() == 0 || run_kernel(x, parameters, groups, eps, out, nullptr, nullptr)) return out;
    const Tensor h = aligned(at::conv2d(x, parameters[kWeight], parameters[kConvBias]));
    const std::vector<Tensor> ready = contiguous_floats(parameters.slice(kBias));
    const float* pointers[4];
    for (int i = 0; i < 4; ++i) pointers[i] = ready[i].const_data_ptr<float>();
    const int64_t samples = h.size(0), channels = h.size(1), pixels = h.size(2) * h.size(3);
    const int sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const Tensor workspace = workspace_of(tail_workspace_bytes(samples * channels, pixels, sms), h);
    check_launch(tail_forward(type_number(h), h.const_data_ptr(), pointers, out.data_ptr(), samples, channels, groups,
        pixels, eps, sms, workspace.data_ptr(), c10::cuda::getCurrentCUDAStream()));
    return out;
}

std::tuple<Tensor, Tensor, Tensor> record_cuda(const Tensor& x, at::TensorList parameters, int64_t groups, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto [out, mean, rstd] = record_meta(x, parameters, groups, eps);
    TORCH_CHECK(
        out.numel() == 0 || run_kernel(x, parameters, groups, eps, out, mean.data_ptr<float>(), rstd.data_ptr<float>()),
        "conv_sigmoid_group_norm: sizes that the kernel does not take");
    return {out, mean, rstd};
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad, const Tensor& x, at::TensorList parameters,
    const Tensor& mean, const Tensor& rstd, bool of_x, bool of_parameters) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto [grad_x, grad_parameters] = backward_meta(grad, x, parameters, mean, rstd, of_x, of_parameters);
    if (grad.numel() == 0) return {grad_x, grad_parameters.zero_()};
    const Tensor given = grad.contiguous(), input = x.contiguous();
    const std::vector<Tensor> ready = contiguous_floats(parameters);
    const float* pointers[kParameters];
    for (int i = 0; i < kParameters; ++i) pointers[i] = ready[i].const_data_ptr<float>();
    const int sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const int out = int(grad.size(1)), groups = int(mean.size(1));
    const int in = int(x.size(1)), height = int(x.size(2)), width = int(x.size(3));
    const Tensor workspace =
        workspace_of(conv_backward_workspace_bytes(x.size(0), in, out, groups, height, width, sms), x);
    check_launch(conv_backward(type_number(x), given.const_data_ptr(), input.const_data_ptr(), pointers,
        mean.const_data_ptr<float>(), rstd.const_data_ptr<float>(), of_x ? grad_x.data_ptr() : nullptr,
        grad_parameters.data_ptr<float>(), of_parameters, x.size(0), in, out, groups, height, width, sms,
        workspace.data_ptr(), c10::cuda::getCurrentCUDAStream()));
    return {grad_x, grad_parameters};
}
#endif

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor x, Tensor[] parameters, int groups, float eps) -> Tensor");
    m.def("record(Tensor x, Tensor[] parameters, int groups, float eps) -> (Tensor, Tensor, Tensor)");
    m.def("backward(Tensor grad, Tensor x, Tensor[] parameters, Tensor mean, Tensor rstd, bool of_x, "
        "bool of_parameters) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("forward", forward_cpu); }
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", forward_meta);
    m.impl("record", record_meta);
    m.impl("backward", backward_meta);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", forward_cuda);
    m.impl("record", record_cuda);
    m.impl("backward", backward_cuda);
}
#endif
// Gradients are the business of the autograd.Function below; whoever differentiates a bare operator is told.
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    const auto refuse = [] { return torch::autograd::autogradNotImplementedFallback(); };
    for (const char* name : {"forward", "record", "backward"}) m.impl(name, refuse());
}
"""


def _load(name: str) -> str:
    """Compile CPP_SOURCE and, where there is a GPU, CUDA_SOURCE; returns the namespace of their operators in torch.ops.

    load_inline runs on every import and finds its work done. The name carries a hash of all that shapes the binary:
    edited copies and other versions of torch live side by side. RuntimeError, with what to do, where a tool is missing.
    """
    gpus = range(torch.cuda.device_count() if torch.version.cuda else 0)
    cpp_flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", *["-DWITH_CUDA"] * bool(gpus)]
    simd = torch.backends.cpu.get_cpu_capability()
    if march := {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}.get(simd):  # the two defines are what at::vec asks for
        cpp_flags += [f"-march={march}", f"-DCPU_CAPABILITY={simd}", f"-DCPU_CAPABILITY_{simd}"]
    cuda_flags = ["-O3", "--split-compile=0"]
    for major, minor in sorted({torch.cuda.get_device_capability(gpu) for gpu in gpus}):
        arch = f"{major}{minor}{'a' if major == 9 else ''}"  # plain sm_90 has no wgmma and no setmaxnreg
        cuda_flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    key = repr((CPP_SOURCE, CUDA_SOURCE, cpp_flags, cuda_flags, torch.__version__))
    name = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if hasattr(getattr(torch.ops, name), "forward"):
        return name  # a reload, or a second copy of this file
    if not shutil.which("ninja"):  # pip puts it beside python, which is not on PATH if the environment is not activated
        os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + os.path.dirname(sys.executable)
    needs = {"ninja": "pip install ninja", os.environ.get("CXX", "c++").split()[0]: "install g++, or set CXX"}
    if gpus:
        needs[f"{cpp_extension.CUDA_HOME}/bin/nvcc"] = "install the CUDA toolkit, and set CUDA_HOME to its folder"
    for tool in filter(lambda tool: not shutil.which(tool), needs):
        raise RuntimeError(f"building {name} needs {tool}, which is not there: {needs[tool]}")
    folder = os.path.join(os.environ.get("TORCH_EXTENSIONS_DIR", os.path.expanduser("~/.cache/torch_extensions")), name)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise RuntimeError(f"{folder} cannot be written: set TORCH_EXTENSIONS_DIR to a folder that can be")
    with open(f"{folder}/build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds at a time; this lock ends with its process,
        pathlib.Path(folder, "lock").unlink(missing_ok=True)  # PyTorch's own outlives a killed build (pytorch#189245)
        cpp_extension.load_inline(
            name,
            CPP_SOURCE.replace("NAMESPACE", name),
            CUDA_SOURCE if gpus else None,
            extra_cflags=cpp_flags,
            extra_cuda_cflags=cuda_flags,
            build_directory=folder,
            is_python_module=False,
            no_implicit_headers=True,
        )
    return name


NAMESPACE = _load("conv_sigmoid_group_norm")
_operators = getattr(torch.ops, NAMESPACE)
_forward, _record, _backward = _operators.forward, _operators.record, _operators.backward
# Multiprocessors of each GPU that has wgmma, the kernel's instruction; 0 of others.
_SMS = tuple(
    torch.cuda.get_device_properties(gpu).multi_processor_count if torch.cuda.get_device_capability(gpu)[0] == 9 else 0
    for gpu in range(torch.cuda.device_count() if torch.version.cuda else 0)
)


def _activate(h: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid((h + bias) * scale)


def _plain(x, conv_weight, conv_bias, bias, scale, weight, group_bias, groups: int, eps: float) -> torch.Tensor:
    """The Model's lines, of its tensors."""
    h = _activate(nn.functional.conv2d(x, conv_weight, conv_bias), bias, scale)
    return nn.functional.group_norm(h, groups, weight, group_bias, eps)


def _has_default_strides(t: torch.Tensor) -> bool:
    """Not only is_contiguous(): PyTorch's convolution reads channels_last off the strides of dimensions of 1."""
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _fits(tensors: tuple, groups: int, needs_grad: bool) -> bool:
    """Whether an operator takes the network's tensors.

    Where gradients are recorded, or autocast is on: those of our kernels' sizes. Else any convolution of float32 and,
    on a GPU, of the 16-bit types: the operator has ATen's, and what follows it in one.
    """
    x, weight, *vectors = tensors
    device = x.device
    if device.type not in ("cpu", "cuda") or torch._C._are_functorch_transforms_active():
        return False
    if x.dim() != 4 or weight.dim() != 4 or not _has_default_strides(x) or not _has_default_strides(weight):
        return False
    autocast = torch.is_autocast_enabled(device.type)
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if x.is_cuda else (torch.float32,)
    if any(t.device != device or t.dtype not in dtypes or not (autocast or t.dtype == x.dtype) for t in tensors):
        return False
    channels = weight.shape[0]
    shapes = [(channels,), (channels, 1, 1), (channels, 1, 1), (channels,), (channels,)]
    if x.shape[1] != weight.shape[1] or channels % groups != 0 or [t.shape for t in vectors] != shapes:
        return False
    rows, columns = x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1
    if rows < 1 or columns < 1 or rows * columns == 1:
        return False
    if not needs_grad and not autocast:
        return True
    # A block holds two rows of output or any even number, in 32 bits a value, and the rows of x that they are made of.
    if not x.is_cuda or x.shape[1] > 8 or channels > 32 or weight.shape[2:] != (3, 3):
        return False
    if columns % 2 != 0 or rows * columns % 4 != 0:
        return False
    band = (228000 - 64 * x.shape[3] - 32 * channels) // (32 * x.shape[3] + 4 * columns * channels) // 2 * 2
    return band >= 2 and rows <= band * _SMS[device.index]


class ConvSigmoidGroupNorm(torch.autograd.Function):
    """The whole network. Saves its inputs and the groups' mean and rstd; the backward makes h again."""

    @staticmethod
    def forward(x, conv_weight, conv_bias, bias, scale, weight, group_bias, groups, eps):
        return _record(x, [conv_weight, conv_bias, bias, scale, weight, group_bias], groups, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *_):
        *tensors, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:7]
        if grad is None:
            return (None,) * 9
        if torch.is_grad_enabled():  # create_graph: what PyTorch can differentiate again
            out = _plain(*tensors, ctx.groups, ctx.eps)
            wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return *(next(found) if need else None for need in needs), None, None
        x, conv_weight, *vectors = tensors
        of_x, of_parameters = _backward(grad, x, tensors[1:], mean, rstd, needs[0], any(needs[1:]))
        parts = of_parameters.to(grad.dtype).split([conv_weight.numel()] + [vectors[0].numel()] * 4)
        found = (of_x, parts[0], parts[1], parts[1].clone(), *parts[2:])  # one gradient for both biases
        return *(g.view_as(t) if need else None for g, t, need in zip(found, tensors, needs, strict=True)), None, None


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (N, in_channels, H, W) of any floating dtype, on the CPU or a CUDA device, in any memory layout; returns
    (N, out_channels, H - k + 1, W - k + 1), laid out as the Model's. The errors are the Model's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        num_groups: int,
        bias_shape: tuple,
        scale_shape: tuple,
    ):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_usual():
            return self.group_norm(_activate(self.conv(x), self.bias, self.scale))
        conv, norm = self.conv, self.group_norm
        tensors = (x, conv.weight, conv.bias, self.bias, self.scale, norm.weight, norm.bias)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not _fits(tensors, norm.num_groups, needs_grad):
            return _plain(*tensors, norm.num_groups, norm.eps)
        if torch.is_autocast_enabled(x.device.type):  # the Model returns float32 there, in which the kernels compute
            tensors = tuple(t.float() for t in tensors)
        if needs_grad:
            return ConvSigmoidGroupNorm.apply(*tensors, norm.num_groups, norm.eps)[0]
        return _forward(tensors[0], tensors[1:], norm.num_groups, norm.eps)

    def _is_usual(self) -> bool:
        """Whether the layers inside are those of the constructor, and no one is to see what goes between them."""
        conv, norm = self.conv, self.group_norm
        if type(conv) is not nn.Conv2d or type(norm) is not nn.GroupNorm or conv.bias is None or norm.weight is None:
            return False
        if (conv.stride, conv.padding, conv.dilation, conv.groups) != ((1, 1), (0, 0), (1, 1), 1):
            return False
        hooks = [f"_{when}_hooks" for when in ("forward", "forward_pre", "backward", "backward_pre")]
        if any(getattr(module, name) for module in (conv, norm) for name in hooks):
            return False
        if any(getattr(nn.modules.module, f"_global{name}") for name in hooks):
            return False
        return "forward" not in conv.__dict__ and "forward" not in norm.__dict__
