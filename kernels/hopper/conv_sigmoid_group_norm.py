# SPDX-License-Identifier: MIT
"""A convolution, a bias, a scale, a sigmoid and group normalisation: a drop-in for the Model of the same name.

    h = conv2d(x, W) + b + bias;    v = sigmoid(h * scale);    out = (v - mean) * rstd * gamma + beta

`mean` and `rstd` are over a group of channels of one sample: rstd = 1 / sqrt(mean((v - mean)^2) + eps).

This file is for Hopper GPUs (sm_90). It builds nothing elsewhere: there ModelNew runs the Model's own layers. For other
GPUs and for CPUs there is a portable file of the same name, one folder up.

There are two paths. Our kernels take 3x3 convolutions of at most 8 input and 32 output channels, in float32, float16 or
bfloat16, also under autocast (then in float32). x and the weight are contiguous, and bias and scale have the shape
(out_channels, 1, 1) (`can_take`, in C++). The convolution has stride, dilation and groups 1 and no padding; there is no
hook or tracing, and eps is at least 1e-6 (`_layers_fit`, in Python). Both layers have weight and bias, and no tensor is
of a subclass, in a transform, or in an export for training or to ONNX (`_tensors_fit`). There are under 2^25 samples
(2^17, if x has under 64 pixels). The width is even, 4 to 352, the height is 3 to 2 + twice the number of
multiprocessors (132: 266), and the output has a multiple of 4 pixels. With gradients the width is at most 256, and the
output has at least 8 * (9 * in_channels + 4) pixels (`fits`, in C++, with the reasons). The plain path takes everything
else. It is the Model's own layers or, where C++ decides, the same operators called from there.

The forward is one kernel. It reads x from DRAM once (neighbouring bands share two rows, through L2), keeps the
activations in shared memory, and writes `out` once. With gradients it is the same kernel. It then saves x, the
parameters, and 272 bytes a group: totals, mean and rstd (most are padding). The backward is two large kernels and three
small ones. The gradient of h is never written to global memory.

Work at the benchmark shapes (128 samples, 8 -> 32 channels, 256 x 256): 1.33 GB, and 38.1 GFLOP in the convolution. On
an H200 memory sets the floor, 0.31 ms at the 4.24 TB/s of a copy on the device. By `python harness.py
hopper/conv_sigmoid_group_norm --backward` the forward takes 0.434 ms there, 13.6 times as fast as eager, also with
gradients recorded. Forward and backward take 2.11 ms, 8.8 times as fast. In bfloat16 (`--dtype bfloat16`) they are
0.279 and 1.28 ms, 19.1 and 9.9 times as fast.
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
#line 1 "CUDA_SOURCE in conv_sigmoid_group_norm.py"
#undef __CUDA_NO_HALF_CONVERSIONS__  // PyTorch defines both; without them float(v) and T(v) convert all three types
#undef __CUDA_NO_BFLOAT16_CONVERSIONS__
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// PTX wrappers: the one text for all kernel files. A file takes those it needs, unchanged.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}"
        :
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
}
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Barrier `id` (1 to 15) of `threads` threads of this block.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

template <int N> __device__ __forceinline__ void raise_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}
template <int N> __device__ __forceinline__ void lower_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int IN_FLIGHT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(IN_FLIGHT) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// The activation v of z = h * scale. To use another, change this part, `plain` and the `#include` of its operator in
// C++, and `_activate` in Python; then look at registers and spills (ConvConfig). There are two formulas. The forward
// computes u (ForwardActivation), from which v follows. The backward gets v and dv/dz from `activation_and_slope`. Each
// has a float32 and a 16-bit form, and takes t = kTPerZ * z. (u may be v.) The kernels rely on:
//   - In the forward u is NaN where t is NaN. Where x overflows fp16, t is NaN. `convolve` finds the NaN in its sums of
//     u, and computes the values again. If u lost the NaN, outputs of large x would be finite and wrong. fminf, fmaxf
//     and __saturatef drop a NaN, so the forward's formula may not use them. Clamp a hard sigmoid or ReLU6 by
//     v < kVMin ? kVMin : v > kVMax ? kVMax : v, which keeps a NaN. (The backward's formula may use fminf.)
//   - v lies in [kVMin, kVMax]. So an unbounded activation, as ReLU or Swish, cannot be used. If v left a range that is
//     too narrow, the result would be wrong or the kernel would hang: see add_to_total. A range that is too wide only
//     costs digits of the sums. (The bound in `_layers_fit` is for a range of 1.)
//   - v and dv/dz are finite at t = 0: `make_dh` computes both there for channels that do not exist.
//   - dv/dz is not negative: write_and_reduce finds its maximum without fabsf, and prepare_channels chooses dh_scale by
//     a bound that contains it. dv/dz may be 0 in a whole channel. The larger it is, the larger is v's error, which is
//     dv/dz times z's error (see prepare_scales).

template <typename T> constexpr bool kIs16Bit = sizeof(T) == 2;  // float16 or bfloat16; else T is float
constexpr float kVMin = 0.0f, kVMax = 1.0f;
constexpr float kMinusLog2E = -1.44269504f;  // sigmoid(z) = 1 / (1 + 2^(-log2(e) z))
__device__ __forceinline__ float exp2_approx(float t) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
}
__device__ __forceinline__ float activation(float t) {  // v, given kMinusLog2E * z
    float v;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(1.0f + exp2_approx(t)));
    return v;
}
// The forward holds u in place of v. For float32 u is v itself. For 16-bit types u is tanh(z / 2), and v = 1/2 + u / 2.
// The tanh is one instruction of the special-function unit, where v takes two, and `compute_norms` puts the factor 1/2
// into the norm's (the summand cancels). With tanh.approx v is off by at most 2^-17.9, as measured for all floats on an
// H100 (PTX guarantees 2^-12). Eager rounds v to 16 bits, which costs up to half a step. That is 2^-17 or more, and so
// more than ours is off, in bfloat16 where v >= 2^-9 (z >= -6.2), and in float16 where v >= 2^-6 (z >= -4.1). A smaller
// v may be less exact than eager's. If it is below 2^-11, it is off by up to 2^-19.7.
template <typename T> struct ForwardActivation {
    static constexpr float kTPerZ = kIs16Bit<T> ? 0.5f : kMinusLog2E;  // u is given t = kTPerZ * z
    static constexpr float kVPerU = kIs16Bit<T> ? 0.5f : 1.0f, kVOffset = kIs16Bit<T> ? 0.5f : 0.0f;
    static constexpr float kUMin = (kVMin - kVOffset) / kVPerU;  // as v = kVPerU * u + kVOffset
    static constexpr float kUMax = (kVMax - kVOffset) / kVPerU;
    static constexpr double kURange = double(kUMax) - kUMin;
    static __device__ __forceinline__ float u(float t) {
        if (!kIs16Bit<T>) return activation(t);
        float u;
        asm("tanh.approx.f32 %0, %1;" : "=f"(u) : "f"(t));
        return u;
    }
};
// The backward's v and dv/dz, given the same t. dv/dz is v (1 - v). In float32 it is w - w^2, where w is the smaller of
// v and 1 - v, and 1 - v is computed as 2^t v, because the difference would lose digits.
struct ActivationAndSlope { float v, slope; };
template <typename T> __device__ __forceinline__ ActivationAndSlope activation_and_slope(float t) {
    using U = ForwardActivation<T>;
    const float v = fmaf(U::kVPerU, U::u(t), U::kVOffset);
    return {v, fmaf(-v, v, v)};
}
template <> __device__ __forceinline__ ActivationAndSlope activation_and_slope<float>(float t) {
    const float v = activation(t);
    const float w = fminf(v, exp2_approx(t) * v);  // fminf drops the NaN of infinity times 0 and returns v
    return {v, fmaf(-w, w, w)};
}

// ---------------------------------------------------------------------------------------------------------------------
// The forward. A team of blocks computes a sample, each block a band of the output's rows. The teams take the samples
// in turn. A block reads the x of its band once, computes u, and holds it in shared memory until the sums of all the
// sample's bands are known. Then it writes its band of the output. A stage of held values is shared memory for one
// sample's band. A block has three, or two if the image is wide: while it writes one sample, it computes the next. A
// warpgroup computes one task at a time: all channels of 64 columns, in one output row or, in 16 bits, in two rows.
// wgmma's operands have 16 bits here, so a float32 value is split: hi is the value rounded to fp16, and lo is
// value - hi, rounded to fp16 too. The residual is value - (hi + lo). A block's warps have these roles. Names that end
// in _empty or _full are mbarriers; "its turn" is a warpgroup's turn to issue wgmma.
//
//   who (warps), and what it does                                  waits for                     signals
//   produce_x (8):      x -> shared memory, float32 as hi and lo   x_empty                       x_full
//   convolve (16):      wgmma, activation -> u, sums of channels   x_full, its turn, held_empty  x_empty, held_full
//   publish_sums (1):   sums -> the sample's totals in L2          held_full                     norm_full
//   compute_norms (1):  totals -> mean, rstd -> NormFactors        totals of all bands           norm_full
//   write (6):          u -> output                                norm_full                     held_empty
//
//   global x --produce_x--> x --convolve--> u (2 or 3 stages) -------------------------------------write--> output
//                                           `-> sums -publish_sums-> totals -compute_norms-> norm -^
//
// The backward launches the same kernel with FORWARD false. Then the held values are h, not u. One role,
// write_and_reduce, replaces the last three. It writes the held values rounded to x's type, as eager's are.
//
// `convolve` uses wgmma m64n64k16: A has 64 rows, B 64 columns (one pixel each), and K = 16 is two taps of 8 input
// channels. A tap is one of the 3 x 3 weights: tap 3 ky + kx is that of row ky and column kx. A task takes several
// wgmmas. This is fragment s of A (see load_weights):
//
//     A, the weights, in registers        K  0 1 2 3 4 5 6 7        8 9 10 11 12 13 14 15
//                                            tap 2 s, 8 channels    tap 2 s + 1, 8 channels
//     rows 16 w + 0 to 7, of warp w          hi of output channels 8 w to 8 w + 7, in the order of channel_of_row
//     rows 16 w + 8 to 15                    lo of the same channels
//
// B is x, in shared memory: a plane of hi and a plane of lo, with 16 bytes a pixel, its 8 channels. For another tap B
// starts at another pixel. A thread gets an output's sum with the weights' hi and its sum with their lo, and adds the
// two. All four products of hi and lo are computed, so the sums are about as accurate as float32's. They lack only the
// residuals. As fp16 has 11 bits, a value in [2^e, 2^(e + 1)) differs from hi by at most 2^(e - 11), and from hi + lo
// by at most 2^(e - 23). This matters where a sum has few terms of very different sizes: without residuals, errors with
// one and two input channels were 2.4 and 2.2 times eager's. With n <= 4 input channels, 8 - n of the eight channels of
// A and B are unused. They take products with a residual, as many as fit (n = 3: 5 of the 6; n = 4: the first four):
//
//     channels       0 to n - 1     n to 2 n - 1           2 n to 3 n - 1         others, up to 7
//     product        w * x          w * residual_of(x)     residual_of(w) * x     0
//
// With 16-bit types wgmma's shape, K and B are the same, but x and the weights are operands as they are. There is one
// product, not four. The eight rows that hold lo above hold the same channels' weights for the next output row:
//
//     rows 16 w + 0 to 7                     weights of the task's upper row: its taps lie in rows 0 to 2 of x
//     rows 16 w + 8 to 15                    weights of its lower row: the same taps, in rows 1 to 3 of x
//
// So K runs over 4 x 3 taps: six wgmmas for two rows of 64 pixels, where each row alone would take five. x has no lo.
// The memory of its plane is a second stage of x, so `produce_x` stores the team's next sample while `convolve` reads
// this one. (With two rows a task and two stages the benchmark's forward in bfloat16 took 0.92 of the time. Such
// factors and percentages are from an H100 or H200.)
//
// `produce_x` scales float32's x by a power of two, so that fp16's steps are fine enough (see prepare_scales). Where x
// overflows fp16, sums become NaN, and the warp computes its values again in float32 (convolve_again).
//
// Where the user allows TF32, float32 is computed in the same way. With so few channels eager is as exact as without
// TF32, so one product of TF32 or fp16 would be less exact than eager.

constexpr int kTaskColumns = 64;  // of one output row: the n of a task's wgmma
constexpr int kAccumulators = kTaskColumns * 64 / 128;  // of a thread: wgmma's sums, 64 rows in 128 threads
constexpr int kProducers = 2;  // warpgroups of `produce_x`
constexpr int kMaxConsumers = 4;  // warpgroups of `convolve`
constexpr int kThreads = 1024;  // of a block: 8 warpgroups
constexpr int kMaxInChannels = 8, kMaxOutChannels = 32, kTaps = 9;
// The distance from one group's totals to the next, in 8-byte words: 256 bytes, so that no two share a cache line. L2
// executes atomics to one cache line one after the other.
constexpr int kTotalsStride = 32;
constexpr int kMaxHeldStages = 3;  // samples whose values a block can hold at once: three, or two of wider images
template <typename T> using Operand = std::conditional_t<kIs16Bit<T>, T, __half>;  // of wgmma
// What differs between 16-bit types (one product) and float32 (four), and between the forward and the backward's launch
// (FORWARD false).
template <typename T, bool FORWARD> struct ConvConfig {
    static constexpr int kTaskRows = kIs16Bit<T> ? 2 : 1;  // output rows of a task
    static constexpr int kXStages = kIs16Bit<T> ? 2 : 1;  // of x in shared memory
    static constexpr int kLoadPixels = kIs16Bit<T> ? 2 : 1;  // pixels of one load instruction of `produce_x`
    static constexpr int kFragments = kIs16Bit<T> ? 6 : 5;  // of A, each of two taps; the last of five has tap 8 twice
    // wgmmas of a task, of two taps each. 16-bit types: 4 x 3 = 12 taps. Float32: 9 taps with x's hi and 9 with its lo.
    static constexpr int kWgmmas = kIs16Bit<T> ? 6 : 9;
    static constexpr int kConsumers = FORWARD ? 4 : 2;  // warpgroups; 3 in the forward took 1.006 of the time
    static constexpr int kWriterWarps = FORWARD ? 6 : 16;  // the forward's other two: publish_sums, compute_norms
    static constexpr int kConsumerRegisters = kIs16Bit<T> ? 88 : 80;  // of a thread, as the next two; no spills
    static constexpr int kProducerRegisters = kIs16Bit<T> ? 40 : 56;
    static constexpr int kOtherRegisters = FORWARD ? 40 : kIs16Bit<T> ? 64 : 56;
    static constexpr int kOtherWarpgroups = kThreads / 128 - kConsumers - kProducers;  // warpgroups, of all other roles
    static_assert(
        kConsumers * kConsumerRegisters + kProducers * kProducerRegisters + kOtherWarpgroups * kOtherRegisters <=
            65536 / 128,
        "the consumers take the registers that the others give");
};

// A group's statistics, of v. The mean is stored as two floats, mean + mean_correction: some 48 bits together.
struct alignas(16) Statistics { float mean, mean_correction, rstd, unused; };
// What write_and_reduce finds for a band of a channel: the sums of grad and of grad * (v - mean), and two maxima.
struct alignas(16) BandReductions { float grad_sum, product_sum, max_grad, max_slope; };  // of |grad| and of dv/dz

// The sizes of x (height, width) and of the output (rows, columns), and what plan_convolution derives from them.
struct Plan {
    int in_channels, height, width, out_channels, groups, rows, columns, group_channels;
    int bands, band_rows, teams;  // band_rows: rows of every band but the last, which may have fewer
    int held_stages;  // stages of held values in shared memory, each for a sample
    int held_plane_floats, x_plane_pixels;  // in shared memory: a channel in a stage; x's hi or lo, or a stage of x
};
// The benchmark's sizes, in Plan's order, and their plan on a GPU of 127 to 253 multiprocessors. As compile-time
// constants they save 4% of the time.
__host__ __device__ constexpr Plan benchmark_plan() {
    return {8, 256, 256, 32, 8, 254, 254, 4, 127, 2, 1, 3, 508, 1024};
}

struct ConvArguments : Plan {
    int samples;
    const void* x;  // of T
    void* out;  // of T: the output or, when the backward launches, h
    const void *weight, *conv_bias, *bias, *scale, *gamma, *beta;  // of T
    unsigned long long* totals;  // (samples, groups, kTotalsStride); 0 and 1 are used: see publish_sums
    Statistics* statistics;  // (samples, groups), behind the totals
    // Only the backward uses the next four members. `max_x` and `recomputed` have one word a sample: the largest |x|,
    // as a float's bits, and whether convolve_again ran.
    uint32_t *max_x, *recomputed;
    const void* grad;  // of T: the gradient of the output
    BandReductions* band_reductions;  // (samples, out_channels, bands)
    float eps;
    double to_fixed, from_fixed;  // powers of two: factors of a sum when it is added to a total, and when it is read
};

// Output = (u - center) * factor + offset. In float32 center is 0.
struct NormFactors { float center, factor, offset; };
struct Deviations { float anchor, sum, squares; };  // of held values: the sums of value - anchor and of its square
struct Moments { float mean, squares; };  // of a warpgroup's held values of a channel: the sum of (value - mean)^2
struct Scales { float weight[kMaxOutChannels], x; };  // powers of two: factors of a channel's weights, and of x

struct alignas(128) ConvShared {  // in static shared memory. Dynamic shared memory: x, then held values
    Moments moments[kMaxHeldStages][kMaxConsumers][kMaxOutChannels];
    NormFactors norm[kMaxHeldStages][kMaxOutChannels];
    int counts[kMaxHeldStages][kMaxConsumers];  // how many values of a channel are in `moments`
    Scales scales;
    // mbarriers. Once a sample each thread of the signalling roles arrives; the last arrival completes a phase.
    // held_empty also frees moments, counts and norm.
    uint64_t x_full[2], x_empty[2], held_full[kMaxHeldStages], norm_full[kMaxHeldStages], held_empty[kMaxHeldStages];
};
static_assert(sizeof(ConvShared) <= 4608, "what the benchmark's x and held values leave of 227 KiB");

// The rows of the output that a block computes. A line is kTaskRows of them. Tasks go down the lines first: task i is
// line i % lines, 64 columns from i / lines * 64 on.
struct Band { int first_row, rows, lines, tasks; };

// Where a role is in its loop over the team's samples: the sample, the stages of its x and of its held values, and the
// parities of their mbarriers. A wait for an `empty` barrier uses the opposite parity, which is 1 the first time. On a
// new mbarrier a wait for parity 1 returns at once, so all stages start empty. A role without x needs no x_stage.
template <int X_STAGES = 1> struct SampleCursor {
    int sample = blockIdx.y, held_stage = 0, x_stage = 0;
    uint32_t x_parity = 0, held_parity = 0;
    __device__ __forceinline__ void next(const ConvArguments& p) {
        sample += p.teams;
        x_stage = (x_stage + 1) % X_STAGES;
        x_parity ^= x_stage == 0;
        held_stage = held_stage == p.held_stages - 1 ? 0 : held_stage + 1;
        held_parity ^= held_stage == 0;
    }
};

// A total is one word, to which each band of a sample adds its sum by an atomic:
//
//     bits 63      56 55           48 47                                                  0
//          | bands   | of them not   | the sum times to_fixed, as an integer. The largest  |
//          | added   | finite        | that v's range allows is 2^46 to 2^47               |
//
// Integers give the same sum in any order of the blocks. Whoever reads the full number of bands has their full sum in
// the same word, without a flag or a fence. Eight bits are enough for a count: a sample has no more bands than the GPU
// has multiprocessors, of which a Hopper has at most 144.
//
// If v leaves the range from kVMin to kVMax, a negative sum is added as 0, and the mean is wrong. A sum of 2^48, 2 to 4
// times the largest, carries into the count of non-finite bands, and the result is NaN. A sum of 2^56, 2^9 to 2^10
// times the largest, carries into the count of bands. The bands arrive one by one, so a poll may see the full number
// too early (the sums are wrong) or never (the kernel hangs).
constexpr int kBandCountBit = 56, kNonFiniteCountBit = 48;  // the two counts' lowest bits
__device__ __forceinline__ void add_to_total(unsigned long long* total, double sum, double to_fixed) {
    unsigned long long term = 1ull << kBandCountBit;
    if (isfinite(sum)) term += __double2ull_rn(fmax(sum, 0.0) * to_fixed);
    else term += 1ull << kNonFiniteCountBit;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" : : "l"(total), "l"(term) : "memory");
}
// Waits until both totals of a group are complete, and returns them. One load reads both: with two, one after the
// other, the kernel was 6% slower.
__device__ __forceinline__ ulonglong2 await_totals(const unsigned long long* from, int bands) {
    while (true) {
        ulonglong2 two;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(two.x), "=l"(two.y) : "l"(from) : "memory");
        if (int(two.x >> kBandCountBit) == bands && int(two.y >> kBandCountBit) == bands) return two;
        // Sleeps 20 ns between polls: a poll takes at least 600 ns, and delays the other blocks' atomics in L2. Without
        // the pause float32 takes 1.015 of the time, and bfloat16 0.99. A pause of 100 ns is as good.
        __nanosleep(20);
    }
}
__device__ __forceinline__ double sum_of_total(unsigned long long word) {
    const bool all_finite = (word >> kNonFiniteCountBit & 255) == 0;
    const unsigned long long sum = word & ((1ull << kNonFiniteCountBit) - 1);
    return all_finite ? double(sum) : NAN;
}

// The descriptor of B, K-major, for a task's wgmma number k. Its fields count units of 16 bytes, which are pixels:
//     bits  0 to 13   start address: pixel_address, where the task's first pixel lies, plus the first tap's offset
//     bits 16 to 29   leading byte offset: from the first of the two taps to the second
//     bits 32 to 45   stride byte offset: from 8 pixels to the next 8
//     bits 62, 63     0: no swizzle
// 14 bits hold any address: a multiprocessor's 228 KiB are 14592 units of 16 bytes, below 2^14. Of float32's nine
// wgmmas, numbers 0 to 3 take x's lo, because small terms are added first, and 5 to 8 its hi. Number 4 takes the last
// tap, of hi and of lo.
template <typename T> __device__ __forceinline__ uint64_t pixel_descriptor(
    const ConvArguments& p, int k, uint32_t pixel_address) {
    const auto tap_offset = [&](int tap) { return tap / 3 * p.width + tap % 3; };
    const int tap = kIs16Bit<T> || k < 5 ? 2 * k : 2 * (k - 5);
    const int plane_offset = !kIs16Bit<T> && k < 4 ? p.x_plane_pixels : 0;
    const uint32_t leading = !kIs16Bit<T> && k == 4 ? p.x_plane_pixels : tap_offset(tap + 1) - tap_offset(tap);
    const uint64_t stride = 128 / 16;
    return stride << 32 | (pixel_address + ((leading << 16) + plane_offset + tap_offset(tap)));
}

// d = a * b + (accumulate ? d : 0), by a warpgroup: 64 rows, 64 columns, 16 of K. a is in registers, b a descriptor.
// The last three constants of the instruction: a and b are not negated, and b is not transposed (K-major).
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define WGMMA(type)                                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type         \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20,"   \
                 " %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}" \
        : D16(0), D16(16)                                                                                             \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(accumulate)))
template <typename O> __device__ __forceinline__ void wgmma(
    float (&d)[32], const uint4& a, uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<O, __half>) WGMMA("f16.f16");
    else WGMMA("bf16.bf16");
}

// Returns the sum over `lanes` neighbouring lanes, a power of two, to each of them.
template <typename V> __device__ __forceinline__ V sum_of_lanes(V v, int lanes) {
    for (int mask = 1; mask < lanes; mask *= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}

// N neighbouring values, which one instruction loads or stores. What __stcs stores is the first that L2 evicts.
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T value[N]; };
template <typename V>
using Words = std::conditional_t<sizeof(V) == 16, uint4, std::conditional_t<sizeof(V) == 8, uint2, uint32_t>>;
template <typename V> __device__ __forceinline__ V load_pack(const V* from) {
    const Words<V> words = __ldg(reinterpret_cast<const Words<V>*>(from));
    return reinterpret_cast<const V&>(words);
}
template <typename V> __device__ __forceinline__ void store_pack(V* to, const V& value) {
    __stcs(reinterpret_cast<Words<V>*>(to), reinterpret_cast<const Words<V>&>(value));
}

// Starts to bring [from, from + bytes) into L2. The address and the length are rounded down to 16 bytes.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
    const uintptr_t begin = uintptr_t(from) & ~uintptr_t(15);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(begin), "r"(bytes & ~15u) : "memory");
}

// Rounds four values to T, two at a time: to round one alone is an instruction of the special-function unit.
template <typename T> __device__ __forceinline__ Pack<T, 4> round_four(const float4& four) {
    if constexpr (std::is_same_v<T, float>) {
        return {four.x, four.y, four.z, four.w};
    } else if constexpr (std::is_same_v<T, __half>) {
        const __half2 twos[2] = {__floats2half2_rn(four.x, four.y), __floats2half2_rn(four.z, four.w)};
        return {twos[0].x, twos[0].y, twos[1].x, twos[1].y};
    } else {
        const __nv_bfloat162 twos[2] = {__floats2bfloat162_rn(four.x, four.y), __floats2bfloat162_rn(four.z, four.w)};
        return {twos[0].x, twos[0].y, twos[1].x, twos[1].y};
    }
}

// Splits two values into fp16 hi and lo, two a word.
__device__ __forceinline__ void split_two(float a, float b, uint32_t& hi, uint32_t& lo) {
    const __half2 h = __floats2half2_rn(a, b);
    const float2 f = __half22float2(h);
    const __half2 l = __floats2half2_rn(a - f.x, b - f.y);
    hi = reinterpret_cast<const uint32_t&>(h);
    lo = reinterpret_cast<const uint32_t&>(l);
}
__device__ __forceinline__ float residual_of(float v) {  // v - (hi + lo)
    const float lo = v - __half2float(__float2half_rn(v));
    return lo - __half2float(__float2half_rn(lo));
}
// Whether unused channels take products with residuals (n <= 4, above). With more it would cost 2% and gain little.
__device__ __forceinline__ bool has_room_for_residuals(int in_channels) { return 2 * in_channels <= kMaxInChannels; }
// Splits a pixel's channels into fp16 hi and lo. Of a value that overflows fp16 these are infinities of opposite signs,
// so the sums with it are NaN.
__device__ __forceinline__ void split_pixel(const float (&x)[kMaxInChannels], uint4& hi, uint4& lo) {
    uint32_t h[4], l[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) split_two(x[2 * k], x[2 * k + 1], h[k], l[k]);
    hi = make_uint4(h[0], h[1], h[2], h[3]);
    lo = make_uint4(l[0], l[1], l[2], l[3]);
}

// Number i of a parameter, which has x's type T.
template <typename T> __device__ __forceinline__ float value_of(const void* parameter, int i) {
    return float(static_cast<const T*>(parameter)[i]);
}
// A weight, and 0 where a channel does not exist.
template <typename T> __device__ __forceinline__ float weight_at(const ConvArguments& p, int c, int in, int tap) {
    const bool exists = c < p.out_channels && in < p.in_channels;
    return exists ? value_of<T>(p.weight, (c * p.in_channels + in) * kTaps + tap) : 0.0f;
}
template <typename T> __device__ __forceinline__ float bias_at(const ConvArguments& p, int c) {
    return value_of<T>(p.conv_bias, c) + value_of<T>(p.bias, c);
}

// The largest exponents of scales, which are powers of two. A result is divided by its scale or by the product of two
// scales, so the reciprocal of either must be a normal float, 2^-126 or more.
constexpr int kMaxScaleExponent = 126;  // of any scale
constexpr int kMaxXExponent = 14;  // of scales.x; the least is -14. With 2^14, |x| from 4 on overflows fp16
constexpr int kMaxWeightExponent = 110;  // of scales.weight: times scales.x it is at most 2^124
constexpr int kScaledExponent = 15;  // scaled values stay below 2^15; fp16's largest is 65504

// The largest power of two, up to 2^max_exponent, whose product with `largest` is below 2^15. Infinity and NaN count as
// 2^127, and 0 as 1/2.
__device__ __forceinline__ float scale_below_overflow(float largest, int max_exponent = kMaxScaleExponent) {
    int exponent = 0;
    frexpf(fminf(largest, 0x1p127f), &exponent);  // of infinity frexpf gives no exponent
    return ldexpf(1.0f, min(max_exponent, kScaledExponent - exponent));
}

// Sets the scales: scales.weight[c] brings the finite weights of output channel c below 2^15, and scales.x is x's
// factor. All threads call it, and it ends with __syncthreads(). Lane c of the first warp computes channel c's.
//
// A channel's reach bounds how far x can move its z while |x| <= 1: it is the sum of |w| times the Model's |scale|.
// (For h it is the sum of |w|.) Let the largest reach be in [2^(e - 1), 2^e); then scales.x is 2^e. fp16's finest step
// is 2^-24. By that alone, not by its 11 bits, hi + lo may be off by 2^-25 from x * 2^e: 2^-(25 + e) in x. Times a
// reach of at most 2^e, that changes z by 2^-25 or less. A reach below 2^-15 has e = -14, and 0 has e = 0: still less.
//
// scales.x is NaN, so that all values are computed in float32, if a reach is above 2^14 or NaN, or a |scale| is
// above 2^100. (A weight is multiplied by at most 2^110. What fp16 then loses of it, 2^-25 * 2^-110, times a |scale| of
// 2^100 changes z by 2^-35 |x|.)
template <typename T, bool FORWARD>
__device__ __forceinline__ void prepare_scales(const ConvArguments& p, Scales& scales) {
    if (threadIdx.x < 32) {
        const int c = threadIdx.x;
        const int weight_count = p.in_channels * kTaps;
        float max_weight = 0, weight_sum = 0;  // of |w|
        for (int i = 0; i < weight_count && c < p.out_channels; ++i) {
            const float w = fabsf(value_of<T>(p.weight, c * weight_count + i));
            max_weight = fmaxf(max_weight, w < INFINITY ? w : 0.0f);
            weight_sum += w;
        }
        scales.weight[c] = scale_below_overflow(max_weight, kMaxWeightExponent);
        const float abs_scale = c < p.out_channels ? fabsf(value_of<T>(p.scale, c)) : 0.0f;
        float reach = weight_sum * (FORWARD ? abs_scale : fmaxf(abs_scale, 1.0f));  // the backward: of h or z
        const bool in_range = __all_sync(~0u, reach <= 0x1p14f && abs_scale <= 0x1p100f);  // false for NaN
        for (int offset = 16; offset > 0; offset /= 2) reach = fmaxf(reach, __shfl_xor_sync(~0u, reach, offset));
        int exponent = 0;
        frexpf(reach, &exponent);
        exponent = max(-kMaxXExponent, min(exponent, kMaxXExponent));
        if (c == 0) scales.x = in_range ? ldexpf(1.0f, exponent) : NAN;
    }
    __syncthreads();
}

// Stores to shared memory what a thread of `produce_x` has loaded. In float32 that is a pixel, times x_scale: fp16 hi
// and, x_plane_pixels further on, lo.
__device__ __forceinline__ void store_pixels(
    uint4* to, const Pack<float, 1> (&x)[kMaxInChannels], float x_scale, int x_plane_pixels, int in_channels) {
    float values[kMaxInChannels];
#pragma unroll
    for (int in = 0; in < kMaxInChannels; ++in) values[in] = x[in].value[0] * x_scale;
    if (has_room_for_residuals(in_channels)) {  // channels n to 2 n - 1, where n is in_channels
#pragma unroll
        for (int in = 1; in < kMaxInChannels; ++in) {
            if (unsigned(in - in_channels) < unsigned(in_channels)) values[in] = residual_of(values[in]);
        }
    }
    split_pixel(values, to[0], to[x_plane_pixels]);
}
// In 16 bits that is two pixels, as they are. A pack has one channel of both pixels, a word of shared memory two
// channels of one pixel: 0x5410 puts the low halves of a and b together, 0x7632 the high ones.
template <typename T>
__device__ __forceinline__ void store_pixels(uint4* to, const Pack<T, 2> (&x)[kMaxInChannels], float, int, int) {
    uint32_t first[4], second[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint32_t a = reinterpret_cast<const uint32_t&>(x[2 * k]);
        const uint32_t b = reinterpret_cast<const uint32_t&>(x[2 * k + 1]);
        first[k] = __byte_perm(a, b, 0x5410);
        second[k] = __byte_perm(a, b, 0x7632);
    }
    to[0] = make_uint4(first[0], first[1], first[2], first[3]);
    to[1] = make_uint4(second[0], second[1], second[2], second[3]);
}
// The larger of |x| and `bits`, the largest |x| so far. In 16 bits x is two values, of which `bits` has two maxima, and
// merged_max takes their larger, as a float's bits. Bits are compared, because those of NaN are the largest.
__device__ __forceinline__ uint32_t max_magnitude(uint32_t bits, const Pack<float, 1>& x) {
    return max(bits, __float_as_uint(fabsf(x.value[0])));
}
template <typename T> __device__ __forceinline__ uint32_t max_magnitude(uint32_t bits, const Pack<T, 2>& x) {
    return __vmaxu2(bits, reinterpret_cast<const uint32_t&>(x) & 0x7fff7fff);
}
template <typename T> __device__ __forceinline__ uint32_t merged_max(uint32_t largest) {
    if constexpr (!kIs16Bit<T>) return largest;
    const uint16_t bits = max(largest >> 16, largest & 0xffff);
    return __float_as_uint(float(reinterpret_cast<const T&>(bits)));
}

// Two warpgroups copy the band of x from global to shared memory: float32 as fp16 hi and lo, a 16-bit type as it is.
// A thread has every 256th pixel or, in 16 bits, pair of pixels. It loads all channels of four pixels at a time.
template <typename T, bool FORWARD>
__device__ __forceinline__ void produce_x(
    const ConvArguments& p, ConvShared& shared, const Band& band, unsigned char* shared_x) {
    using Config = ConvConfig<T, FORWARD>;
    lower_registers_to<Config::kProducerRegisters>();
    constexpr int kStride = 128 * kProducers * Config::kLoadPixels;  // pixels, from a thread's load to its next
    constexpr int kLoads = 4 / Config::kLoadPixels;
    using Load = Pack<T, Config::kLoadPixels>;
    const int thread = threadIdx.x - 128 * Config::kConsumers;
    const int first_pixel = thread * Config::kLoadPixels;
    const int pixels = (band.rows + 2) * p.width;
    const int padded_pixels = (band.lines * Config::kTaskRows + 2) * p.width;  // a line of one row reads zeros, too
    const int64_t x_pixels = int64_t(p.height) * p.width;
    const auto x_band_of = [&](int sample, int channel) {
        const T* const sample_x = static_cast<const T*>(p.x) + int64_t(band.first_row) * p.width;
        return sample_x + (int64_t(sample) * p.in_channels + channel) * x_pixels;
    };
    const float x_scale = shared.scales.x;
    // Unused channels hold copies of the others: bit i says that the loads continue at channel 0 after number i.
    uint32_t repeat_mask = 0;
    for (int in = p.in_channels; in < kMaxInChannels; in += p.in_channels) repeat_mask |= 1u << (in - 1);
    for (SampleCursor<Config::kXStages> cursor; cursor.sample < p.samples; cursor.next(p)) {
        const int next_sample = cursor.sample + p.teams;
        // Thread i prefetches channel i of the next sample to L2: saves 8% in float32; in 16 bits it would cost 6%.
        const bool prefetches = !kIs16Bit<T> && next_sample < p.samples && thread < p.in_channels;
        if (prefetches) prefetch_to_l2(x_band_of(next_sample, thread), pixels * sizeof(T));
        uint32_t max_x = 0;
#pragma unroll 1
        for (int begin = first_pixel; begin - first_pixel < padded_pixels; begin += kLoads * kStride) {
            Load loaded[kLoads][kMaxInChannels];
            const T* const first = x_band_of(cursor.sample, 0) + begin;
            const T* from = first;
#pragma unroll
            for (int in = 0; in < kMaxInChannels; ++in) {
#pragma unroll
                for (int i = 0; i < kLoads; ++i) {
                    loaded[i][in] = {};
                    if (begin + i * kStride >= pixels) continue;
                    loaded[i][in] = load_pack(reinterpret_cast<const Load*>(from + i * kStride));
                }
                from = repeat_mask >> in & 1 ? first : from + x_pixels;
            }
            if (begin == first_pixel) mbarrier_wait(&shared.x_empty[cursor.x_stage], cursor.x_parity ^ 1);
            uint4* const to = reinterpret_cast<uint4*>(shared_x) + cursor.x_stage * p.x_plane_pixels + begin;
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                for (const Load& load : loaded[i]) max_x = max_magnitude(max_x, load);
                if (begin + i * kStride >= padded_pixels) continue;
                store_pixels(to + i * kStride, loaded[i], x_scale, p.x_plane_pixels, p.in_channels);
            }
        }
        if constexpr (!FORWARD) {
            max_x = __reduce_max_sync(~0u, merged_max<T>(max_x));
            if (threadIdx.x % 32 == 0) atomicMax(p.max_x + cursor.sample, max_x);
        }
        fence_async_proxy();  // so that wgmma, which reads by the async proxy, sees this thread's stores
        mbarrier_arrive(&shared.x_full[cursor.x_stage]);
    }
}

// A thread subtracts an anchor from its values d before it adds them up, so that the sums lose few digits. The anchor
// is the mean of its first eight values of a sample, or of those that exist. (A single value may be far from the
// others.) valid(j, r) says whether the thread's pair in the j-th eight pixels of row r exists.
template <int ROWS, typename V> __device__ __forceinline__ float anchor_of(const float (&d)[kAccumulators], V valid) {
    float sum = 0;
    int count = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (!valid(k / ROWS, k % ROWS)) continue;
        const float* const pair = d + 4 * (k / ROWS) + 2 * (k % ROWS);
        sum += pair[0] + pair[1];
        count += 2;
    }
    return count == 8 ? 0.125f * sum : sum / max(count, 1);
}

// Computes a warp's values of a sample again, in plain float32. A thread has the same pixels and channel as before.
template <typename T, bool FORWARD>
__device__ __forceinline__ void convolve_again(const ConvArguments& p, const Band& band, int sample, int first_task,
    int c, float* own_held, Deviations& deviations) {
    using Config = ConvConfig<T, FORWARD>;
    using U = ForwardActivation<T>;
    const T* const x_sample = static_cast<const T*>(p.x) + int64_t(sample) * p.in_channels * (p.height * p.width);
    deviations.sum = deviations.squares = 0;
#pragma unroll 1
    for (int task = first_task; task < band.tasks; task += Config::kConsumers) {
        const int column = task / band.lines * kTaskColumns;
#pragma unroll 1
        for (int i = 0; i < Config::kTaskRows * kTaskColumns / 4; ++i) {
            const int row = task % band.lines * Config::kTaskRows + i / (kTaskColumns / 4);
            const int offset = i % (kTaskColumns / 4) / 2 * 8 + i % 2;
            const int x_column = column + threadIdx.x % 4 * 2 + offset;
            const bool valid = c < p.out_channels && x_column < p.columns && row < band.rows;
            float sum = 0;
#pragma unroll 1
            for (int k = 0; k < p.in_channels * kTaps && valid; ++k) {
                const T* const x = x_sample + (k / kTaps * p.height + band.first_row + row) * p.width + x_column;
                sum = fmaf(float(x[k % kTaps / 3 * p.width + k % 3]), weight_at<T>(p, c, k / kTaps, k % kTaps), sum);
            }
            float value = valid ? sum + bias_at<T>(p, c) : 0.0f;
            if (FORWARD) value = U::u(value * value_of<T>(p.scale, valid ? c : 0) * U::kTPerZ);
            if (task == first_task && i == 0) {  // the four lanes of a channel take the mean of their first values
                const float first = __shfl_sync(~0u, value, threadIdx.x & 28);
                deviations.anchor = 0.25f * sum_of_lanes(valid ? value : first, 4);
            }
            if (!valid) continue;
            own_held[row * p.columns + column + offset] = value;
            const float difference = value - deviations.anchor;
            deviations.sum += difference;
            deviations.squares = fmaf(difference, difference, deviations.squares);
        }
    }
}

// Which of a warp's eight channels a row of A has. In this order the float2 stores of half a warp to the held values
// have no bank conflicts: it stores 8 floats to each of four planes (channels), which are 16 k + 8 floats apart.
__device__ __forceinline__ int channel_of_row(int row) { return row % 4 * 2 + row / 4 % 2; }

// A thread's fragments of A. A register has the weights of output channel c and two input channels. A fragment's .x and
// .y are of its first tap, .z and .w of its second. In float32 .x and .z are hi, .y and .w lo. In 16 bits .x and .z are
// of the task's upper output row, with taps in rows 0 to 2 of x; .y and .w are of its lower, with rows 1 to 3.
template <typename T, int FRAGMENTS>
__device__ __forceinline__ void load_weights(const ConvArguments& p, float weight_scale, int c, uint4 (&a)[FRAGMENTS]) {
    const int in = threadIdx.x % 4 * 2;
#pragma unroll
    for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
        uint32_t words[4];
#pragma unroll
        for (int tap_index = 0; tap_index < 2; ++tap_index) {
            if constexpr (kIs16Bit<T>) {
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const int tap = 2 * fragment + tap_index - 3 * row;
                    const bool exists = tap >= 0 && tap < kTaps;
                    const auto weight = [&](int in) {
                        return Operand<T>(exists ? weight_at<T>(p, c, in, tap) * weight_scale : 0.0f);
                    };
                    const Pack<Operand<T>, 2> two = {weight(in), weight(in + 1)};
                    words[2 * tap_index + row] = reinterpret_cast<const uint32_t&>(two);
                }
            } else {
                const int tap = min(2 * fragment + tap_index, kTaps - 1);  // the last tap twice: for x's hi and lo
                const auto weight = [&](int in) {
                    const float w = weight_at<T>(p, c, in % p.in_channels, tap) * weight_scale;
                    const int product = in / p.in_channels;  // 0: w * x, 1: w * residual_of(x), 2: residual_of(w) * x
                    if (product == 2) return residual_of(w);
                    return product == 0 || (product == 1 && has_room_for_residuals(p.in_channels)) ? w : 0.0f;
                };
                split_two(weight(in), weight(in + 1), words[2 * tap_index], words[2 * tap_index + 1]);
            }
        }
        a[fragment] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// By the warpgroup whose turn it is: issues the wgmmas of a task, hands on the turn, and waits for its sums d.
// pixel_address is where the task's first pixel lies in shared memory, in units of 16 bytes, a pixel each.
template <typename T, typename Config>
__device__ __forceinline__ void multiply_task(const ConvArguments& p, const uint4 (&a)[Config::kFragments],
    uint32_t pixel_address, float (&d)[kAccumulators], int next_turn) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kWgmmas; ++k) {
        wgmma<Operand<T>>(d, a[k % Config::kFragments], pixel_descriptor<T>(p, k, pixel_address), k > 0);
    }
    wgmma_commit();
    barrier_arrive(next_turn, 256);
    wgmma_wait<0>();  // .aligned: the warpgroup's threads must not diverge; `convolve` branches only later
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");  // keeps the compiler from reading d before the wait
    }
}

// Four lanes (a quad) hold one channel's deviations, each from its own anchor. Re-expresses them relative to the first
// lane's anchor, and adds up the four. Stores the channel's mean, and its sum of squared deviations from that, to
// `moments`. The quad has quad_count values, of which this lane has lane_count.
__device__ __forceinline__ void store_moments(
    ConvShared& shared, int held_stage, int warpgroup, int c, int quad_count, int lane_count, Deviations deviations) {
    const float anchor = __shfl_sync(~0u, deviations.anchor, threadIdx.x & 28);  // of the first lane, for all four
    const float shift = deviations.anchor - anchor;
    deviations.squares = fmaf(shift, fmaf(lane_count, shift, 2 * deviations.sum), deviations.squares);
    deviations.sum = fmaf(lane_count, shift, deviations.sum);
    deviations.sum = sum_of_lanes(deviations.sum, 4);
    deviations.squares = sum_of_lanes(deviations.squares, 4);
    if (threadIdx.x % 4 == 0) {
        const float difference = deviations.sum / quad_count;
        shared.moments[held_stage][warpgroup][c] = {
            anchor + difference, deviations.squares - deviations.sum * difference};
    }
    if (threadIdx.x % 128 == 0) shared.counts[held_stage][warpgroup] = quad_count;
}

// Adds a thread's values d of a task to its deviations.
template <int ROWS, typename V>
__device__ __forceinline__ void add_deviations(const float (&d)[kAccumulators], Deviations& deviations, V valid) {
    float sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < kTaskColumns / 8 * ROWS; ++k) {
        const bool exists = valid(k / ROWS, k % ROWS);
        const float* const pair = d + 4 * (k / ROWS) + 2 * (k % ROWS);
        const float d0 = exists ? pair[0] - deviations.anchor : 0.0f;
        const float d1 = exists ? pair[1] - deviations.anchor : 0.0f;
        sum += d0 + d1;
        squares = fmaf(d0, d0, squares);
        squares = fmaf(d1, d1, squares);
    }
    deviations.sum += sum;
    deviations.squares += squares;
}

// The consumer warpgroups take the tasks round-robin, across all samples. Named barriers (1 to 4; in the backward 1 and
// 2) hand on the turn to issue wgmma, so that one's wgmma runs during the others' activations. Each barrier has 256
// threads: the warpgroup that waits for the turn, and the one that hands it on. A lane has one channel, and two
// neighbouring pixels of every eight of a task's rows: pixels 2 * quad_lane and 2 * quad_lane + 1.
template <typename T, bool FORWARD>
__device__ __forceinline__ void convolve(const ConvArguments& p, ConvShared& shared, const Band& band,
    const unsigned char* shared_x, float* held, int warp) {
    using Config = ConvConfig<T, FORWARD>;
    raise_registers_to<Config::kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int quad_lane = threadIdx.x % 4;
    const int c = warp % 4 * 8 + channel_of_row(threadIdx.x % 32 / 4);
    uint4 a[Config::kFragments];
    const float weight_scale = shared.scales.weight[c];
    load_weights<T>(p, weight_scale, c, a);
    const int existing_channel = min(c, p.out_channels - 1);
    const float t_per_h = FORWARD ? ForwardActivation<T>::kTPerZ * value_of<T>(p.scale, existing_channel) : 1.0f;
    const float offset = t_per_h * bias_at<T>(p, existing_channel);
    const auto activate = [](float t) { return FORWARD ? ForwardActivation<T>::u(t) : t; };
    const float t_per_sum = t_per_h / (shared.scales.x * weight_scale);  // t, or h, is sum * t_per_sum + offset
    const bool all_exist = __all_sync(~0u, c < p.out_channels);
    const int lane_columns = c < p.out_channels ? p.columns - 2 * quad_lane : 0;  // of a row, from the lane's first on
    const uint32_t x_begin = __shfl_sync(~0u, shared_address(shared_x) / 16, 0);  // warp-uniform: saves 1%
    const int own_turn = 1 + warpgroup;
    const int next_turn = own_turn < Config::kConsumers ? own_turn + 1 : 1;
    if (warpgroup == Config::kConsumers - 1) barrier_arrive(next_turn, 256);  // gives warpgroup 0 the first turn
    int first_task = warpgroup;
    for (SampleCursor<Config::kXStages> cursor; cursor.sample < p.samples; cursor.next(p)) {
        float* const own_held = held + (cursor.held_stage * p.out_channels + c) * p.held_plane_floats + 2 * quad_lane;
        Deviations deviations = {};
        int quad_count = 0, lane_count = 0;  // values so far: of the four lanes, and of this one
        int task = first_task;
        mbarrier_wait(&shared.x_full[cursor.x_stage], cursor.x_parity);
        for (; task < band.tasks; task += Config::kConsumers) {
            const int column = task / band.lines * kTaskColumns, row = task % band.lines * Config::kTaskRows;
            const uint32_t pixel_address = x_begin + cursor.x_stage * p.x_plane_pixels + row * p.width + column;
            float d[kAccumulators];
            const bool is_first = task == first_task;
            barrier_sync(own_turn, 256);
            multiply_task<T, Config>(p, a, pixel_address, d, next_turn);
            if (task + Config::kConsumers >= band.tasks) mbarrier_arrive(&shared.x_empty[cursor.x_stage]);
            // kInside: all channels and rows of the task exist; only its last eight columns may not (`valid` checks).
            const auto epilogue = [&](auto inside) {
                constexpr bool kInside = decltype(inside)::value;
                const int upper_columns = lane_columns - column;  // in the task's upper row
                const int lower_columns = kInside || row + 1 < band.rows ? upper_columns : 0;
                const auto valid = [&](int j, int r) {
                    if (kInside && j < kTaskColumns / 8 - 1) return true;
                    return 8 * j < (r == 0 ? upper_columns : lower_columns);
                };
#pragma unroll
                for (int j = 0; j < kTaskColumns / 8; ++j) {
#pragma unroll
                    for (int r = 0; r < Config::kTaskRows; ++r) {
                        float* const pair = d + 4 * j + 2 * r;
                        pair[0] = activate(fmaf(kIs16Bit<T> ? pair[0] : pair[0] + pair[2], t_per_sum, offset));
                        pair[1] = activate(fmaf(kIs16Bit<T> ? pair[1] : pair[1] + pair[3], t_per_sum, offset));
                    }
                }
                if (FORWARD && is_first) deviations.anchor = anchor_of<Config::kTaskRows>(d, valid);
                add_deviations<Config::kTaskRows>(d, deviations, valid);
                if (is_first) mbarrier_wait(&shared.held_empty[cursor.held_stage], cursor.held_parity ^ 1);
                float* const to = own_held + row * p.columns + column;
#pragma unroll
                for (int k = 0; k < kTaskColumns / 8 * Config::kTaskRows; ++k) {
                    const int j = k / Config::kTaskRows, r = k % Config::kTaskRows;
                    const float* const pair = d + 4 * j + 2 * r;
                    if (!valid(j, r)) continue;
                    *reinterpret_cast<float2*>(to + 8 * j + r * p.columns) = make_float2(pair[0], pair[1]);
                }
            };
            if (all_exist && column + kTaskColumns - 8 <= p.columns && row + Config::kTaskRows <= band.rows) {
                epilogue(std::true_type{});
            } else {
                epilogue(std::false_type{});
            }
            const int rows = min(Config::kTaskRows, band.rows - row);
            quad_count += min(kTaskColumns, p.columns - column) * rows;
            lane_count += 2 * max(0, min(kTaskColumns / 8, (lane_columns - column + 7) / 8)) * rows;
        }
        if (task == first_task) {  // no task: produce_x still needs its signal, and store_moments the stage
            mbarrier_arrive(&shared.x_empty[cursor.x_stage]);
            mbarrier_wait(&shared.held_empty[cursor.held_stage], cursor.held_parity ^ 1);
        }
        // The sum of squares is not finite where x * scales.x overflows fp16 or scales.x is NaN. It may also be so
        // where x or a parameter is not finite or, in the backward's launch, where |h| is about 2^64 or more, as the
        // anchor is 0 there. In each case convolve_again gives what plain float32 gives.
        if (__any_sync(~0u, !(deviations.squares < INFINITY))) {
            convolve_again<T, FORWARD>(p, band, cursor.sample, first_task, c, own_held, deviations);
            if constexpr (!FORWARD) p.recomputed[cursor.sample] = 1;
        }
        first_task = task - band.tasks;  // of the next sample
        if constexpr (FORWARD)
            store_moments(shared, cursor.held_stage, warpgroup, c, quad_count, lane_count, deviations);
        mbarrier_arrive(&shared.held_full[cursor.held_stage]);
    }
}

// One warp, lane c for channel c: adds the band's sums of s and of s^2 to the groups' totals. s = (u - kUMin) / kURange
// is in [0, 1]. The warp arrives at norm_full once it has read `moments`, because `write` waits for norm_full alone and
// then frees them. As this warp has waited for held_full before, `write` also sees the held values.
template <typename T> __device__ __forceinline__ void publish_sums(const ConvArguments& p, ConvShared& shared) {
    using U = ForwardActivation<T>;
    const int c = threadIdx.x % 32;
    for (SampleCursor<> cursor; cursor.sample < p.samples; cursor.next(p)) {
        double sum = 0, squares = 0;  // of the channel: of u - kUMin, and of its square
        mbarrier_wait(&shared.held_full[cursor.held_stage], cursor.held_parity);
        for (int k = 0; k < kMaxConsumers; ++k) {
            const Moments moments = shared.moments[cursor.held_stage][k][c];
            const int count = shared.counts[cursor.held_stage][k];
            if (count == 0 || c >= p.out_channels) continue;
            const double mean = double(moments.mean) - U::kUMin;
            sum += count * mean;
            squares += count * mean * mean + moments.squares;
        }
        mbarrier_arrive(&shared.norm_full[cursor.held_stage]);
        double group_sum = sum, group_squares = squares;
        for (int i = 1; i < p.group_channels; ++i) {
            group_sum += __shfl_down_sync(~0u, sum, i);
            group_squares += __shfl_down_sync(~0u, squares, i);
        }
        if (c < p.out_channels && c % p.group_channels == 0) {
            const int64_t group = int64_t(cursor.sample) * p.groups + c / p.group_channels;
            add_to_total(p.totals + group * kTotalsStride, group_sum / U::kURange, p.to_fixed);
            add_to_total(p.totals + group * kTotalsStride + 1, group_squares / (U::kURange * U::kURange), p.to_fixed);
        }
    }
}

// One warp, lane c for channel c: waits for the totals of the channel's group, and computes the channel's norm from
// them. In 16 bits output = (u - mean_u) * factor + beta. So a constant v gives beta, but for a rounding. In float32
// the subtraction is left out: it would cost 1% of the time, and eager is no more exact.
template <typename T> __device__ __forceinline__ void compute_norms(const ConvArguments& p, ConvShared& shared) {
    using U = ForwardActivation<T>;
    const int c = min(threadIdx.x % 32, p.out_channels - 1);  // lanes beyond compute the last channel's norm, too
    const float gamma = value_of<T>(p.gamma, c), beta = value_of<T>(p.beta, c);
    const double mean_per_total = p.from_fixed / (double(p.group_channels) * p.rows * p.columns);
    for (SampleCursor<> cursor; cursor.sample < p.samples; cursor.next(p)) {
        const int64_t group = int64_t(cursor.sample) * p.groups + c / p.group_channels;
        const auto [s_total, squares_total] = await_totals(p.totals + group * kTotalsStride, p.bands);
        const double mean_s = sum_of_total(s_total) * mean_per_total;  // of `publish_sums`'s s
        const double mean_u = U::kUMin + mean_s * U::kURange;
        const double mean = U::kVOffset + U::kVPerU * mean_u;  // of v
        const double v_range = U::kVPerU * U::kURange;
        const double variance = (sum_of_total(squares_total) * mean_per_total - mean_s * mean_s) * (v_range * v_range);
        const double variance_plus_eps = (variance < 0 ? 0 : variance) + p.eps;  // max() would drop a NaN
        const float rounded = float(mean);
        const float factor = U::kVPerU * (gamma / sqrtf(float(variance_plus_eps)));
        const float center = kIs16Bit<T> ? float(mean_u) : 0.0f;
        // With an infinite factor ATen's output, v * factor + (beta - mean * factor), is infinity - infinity: NaN.
        const float offset = isfinite(factor) ? float(beta - (mean_u - center) * factor) : NAN;
        shared.norm[cursor.held_stage][c] = {center, factor, offset};
        mbarrier_arrive(&shared.norm_full[cursor.held_stage]);
        // For the backward rstd is computed in double and rounded once, because all gradients of a group share its
        // error. This warp has already arrived, so `write` does not wait for it.
        if (blockIdx.x == 0) p.statistics[group] = {rounded, float(mean - rounded), float(rsqrt(variance_plus_eps))};
    }
}

constexpr int kBatch = 4;  // packs that a writer's lane loads, then stores; with one the kernel was 10% slower
// Six warps write the output. They take the channels round-robin, across all samples, so that their shares are equal. A
// lane stores a pack of four neighbouring values at once; beyond the band's end it stores the last pack once more.
template <typename T>
__device__ __forceinline__ void write(
    const ConvArguments& p, ConvShared& shared, const Band& band, const float* held, int writer) {
    constexpr int kWriterWarps = ConvConfig<T, true>::kWriterWarps;
    const int lane = threadIdx.x % 32;
    const int packs = band.rows * p.columns / 4;
    int c = writer;
    for (SampleCursor<> cursor; cursor.sample < p.samples; cursor.next(p), c -= p.out_channels) {
        mbarrier_wait(&shared.norm_full[cursor.held_stage], cursor.held_parity);
#pragma unroll 1
        for (; c < p.out_channels; c += kWriterWarps) {
            const NormFactors norm = shared.norm[cursor.held_stage][c];
            auto* const channel_held =
                reinterpret_cast<const float4*>(held + (cursor.held_stage * p.out_channels + c) * p.held_plane_floats);
            const int64_t channel = int64_t(cursor.sample) * p.out_channels + c;
            T* const out = static_cast<T*>(p.out) + (channel * p.rows + band.first_row) * p.columns;
            auto* const to = reinterpret_cast<Pack<T, 4>*>(out);
#pragma unroll 1
            for (int begin = lane; begin - lane < packs; begin += kBatch * 32) {
                float4 values[kBatch];
#pragma unroll
                for (int k = 0; k < kBatch; ++k) values[k] = channel_held[min(begin + 32 * k, packs - 1)];
#pragma unroll
                for (int k = 0; k < kBatch; ++k) {
                    const auto normalize = [&](float value) {
                        return fmaf(kIs16Bit<T> ? value - norm.center : value, norm.factor, norm.offset);
                    };
                    const float4 v = values[k];
                    const float4 normalized = {normalize(v.x), normalize(v.y), normalize(v.z), normalize(v.w)};
                    store_pack(to + min(begin + 32 * k, packs - 1), round_four<T>(normalized));
                }
            }
        }
        mbarrier_arrive(&shared.held_empty[cursor.held_stage]);
    }
}

// The backward's launch has 16 warps in place of `write`, `publish_sums` and `compute_norms`, as two consumer
// warpgroups are enough there. They write h, read the output's gradient, and store the BandReductions of each band of a
// channel. A separate kernel would have to read h and grad once more (bfloat16, H200: 0.76 ms in two kernels, 0.44 in
// one).
template <typename T>
__device__ __forceinline__ void write_and_reduce(
    const ConvArguments& p, ConvShared& shared, const Band& band, const float* held, int writer) {
    constexpr int kWriterWarps = ConvConfig<T, false>::kWriterWarps;
    // Whether a lane loads its next batch of grad before it computes with this one. So a training step takes 0.94 of
    // the time in float32, and would take 1.01 in 16 bits, where a batch has half the bytes.
    constexpr bool kLoadsAhead = !kIs16Bit<T>;
    const int lane = threadIdx.x % 32;
    const int values = band.rows * p.columns;
    const int packs = values / 4;
    const auto band_offset = [&](int sample, int channel) {
        return ((int64_t(sample) * p.out_channels + channel) * p.rows + band.first_row) * p.columns;
    };
    const T* const grad = static_cast<const T*>(p.grad);
    const auto prefetch = [&](int sample) {
        const int c = writer + kWriterWarps * lane;
        const bool exists = sample < p.samples && c < p.out_channels;
        if (exists) prefetch_to_l2(grad + band_offset(sample, c), values * sizeof(T));
    };
    prefetch(blockIdx.y);
    Pack<T, 4> loaded[kBatch];
    const auto load = [&](int sample, int channel, int begin) {
        auto* const from = reinterpret_cast<const Pack<T, 4>*>(grad + band_offset(sample, channel));
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            if (begin + 32 * k < packs) loaded[k] = load_pack(from + begin + 32 * k);
        }
    };
    if (kLoadsAhead && writer < p.out_channels) load(blockIdx.y, writer, lane);
    for (SampleCursor<> cursor; cursor.sample < p.samples; cursor.next(p)) {
        const int next_sample = cursor.sample + p.teams;
        prefetch(next_sample);
        mbarrier_wait(&shared.held_full[cursor.held_stage], cursor.held_parity);
#pragma unroll 1
        for (int c = writer; c < p.out_channels; c += kWriterWarps) {
            const float t_per_h = ForwardActivation<T>::kTPerZ * value_of<T>(p.scale, c);
            const float mean = p.statistics[int64_t(cursor.sample) * p.groups + c / p.group_channels].mean;
            const float4* const h =
                reinterpret_cast<const float4*>(held + (cursor.held_stage * p.out_channels + c) * p.held_plane_floats);
            auto* const to = reinterpret_cast<Pack<T, 4>*>(static_cast<T*>(p.out) + band_offset(cursor.sample, c));
            float grad_sum = 0, product_sum = 0, max_grad = 0, max_slope = 0;
#pragma unroll 1
            for (int begin = lane; begin - lane < packs; begin += kBatch * 32) {
                if (!kLoadsAhead) load(cursor.sample, c, begin);
                Pack<T, 4> grads[kBatch];
#pragma unroll
                for (int k = 0; k < kBatch; ++k) grads[k] = loaded[k];
                // The next batch is of this channel, of the warp's next, or of its first of the next sample.
                const int next_begin = begin + kBatch * 32;
                if (kLoadsAhead && next_begin - lane < packs) load(cursor.sample, c, next_begin);
                else if (kLoadsAhead && c + kWriterWarps < p.out_channels) load(cursor.sample, c + kWriterWarps, lane);
                else if (kLoadsAhead && next_sample < p.samples) load(next_sample, writer, lane);
#pragma unroll
                for (int k = 0; k < kBatch; ++k) {
                    if (begin + 32 * k >= packs) continue;
                    const Pack<T, 4> rounded_h = round_four<T>(h[begin + 32 * k]);
                    store_pack(to + begin + 32 * k, rounded_h);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const auto [v, slope] = activation_and_slope<T>(float(rounded_h.value[i]) * t_per_h);
                        const float g = float(grads[k].value[i]);
                        grad_sum += g;
                        product_sum = fmaf(g, v - mean, product_sum);
                        max_grad = fmaxf(max_grad, fabsf(g));
                        max_slope = fmaxf(max_slope, slope);
                    }
                }
            }
            const double band_grad_sum = sum_of_lanes(double(grad_sum), 32);  // in float five roundings lose too much
            const double band_product_sum = sum_of_lanes(double(product_sum), 32);
            const BandReductions reductions = {float(band_grad_sum), float(band_product_sum),
                __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(max_grad))),
                __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(max_slope)))};
            const int64_t channel = int64_t(cursor.sample) * p.out_channels + c;
            if (lane == 0) p.band_reductions[channel * p.bands + blockIdx.x] = reductions;
        }
        mbarrier_arrive(&shared.held_empty[cursor.held_stage]);
    }
}

// By all threads of the grid: sets the totals to zero or, in the backward's launch, `max_x` and `recomputed`.
template <bool FORWARD> __device__ __forceinline__ void set_zeros(const ConvArguments& p) {
    const int thread = (blockIdx.y * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
    const int threads = gridDim.y * gridDim.x * kThreads;
    const int64_t pairs = FORWARD ? int64_t(p.samples) * p.groups * kTotalsStride / 2 : 0;
    for (int64_t i = thread; i < pairs; i += threads) reinterpret_cast<ulonglong2*>(p.totals)[i] = {0, 0};
    for (int i = thread; i < p.samples && !FORWARD; i += threads) p.max_x[i] = p.recomputed[i] = 0;
}

template <typename T, bool BENCHMARK, bool FORWARD>
__global__ void __launch_bounds__(kThreads, 1) convolve_and_normalize(const __grid_constant__ ConvArguments given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Config = ConvConfig<T, FORWARD>;
    ConvArguments p = given;
    if constexpr (BENCHMARK) static_cast<Plan&>(p) = benchmark_plan();
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    __shared__ ConvShared shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(&shared.x_full[i], 128 * kProducers);
            mbarrier_init(&shared.x_empty[i], 128 * Config::kConsumers);
        }
        for (int i = 0; i < kMaxHeldStages; ++i) {
            mbarrier_init(&shared.held_full[i], 128 * Config::kConsumers);
            mbarrier_init(&shared.norm_full[i], 64);
            mbarrier_init(&shared.held_empty[i], 32 * Config::kWriterWarps);
        }
        fence_mbarrier_init();
    }
    const auto grid = cooperative_groups::this_grid();
    set_zeros<FORWARD>(p);
    auto arrived = grid.barrier_arrive();
    if constexpr (!kIs16Bit<T>) {
        prepare_scales<T, FORWARD>(p, shared.scales);
    } else {
        if (threadIdx.x < kMaxOutChannels) shared.scales.weight[threadIdx.x] = shared.scales.x = 1;
        __syncthreads();
    }
    grid.barrier_wait(std::move(arrived));  // all zeros are set; all threads see the block's mbarriers
    const int first_row = blockIdx.x * p.band_rows;
    // The first case is for the compiler, which sees a constant in the benchmark.
    const int rows = p.rows % p.band_rows == 0 ? p.band_rows : min(p.band_rows, p.rows - first_row);
    const int lines = (rows + Config::kTaskRows - 1) / Config::kTaskRows;
    const Band band = {first_row, rows, lines, (p.columns + kTaskColumns - 1) / kTaskColumns * lines};
    float* const held = reinterpret_cast<float*>(dynamic_shared + 2 * 16 * p.x_plane_pixels);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that it is warp-uniform: saves 2%
    const int other_warp = warp - 4 * (Config::kConsumers + kProducers);
    if (warp < 4 * Config::kConsumers) {
        convolve<T, FORWARD>(p, shared, band, dynamic_shared, held, warp);
    } else if (other_warp < 0) {
        produce_x<T, FORWARD>(p, shared, band, dynamic_shared);
    } else {
        lower_registers_to<Config::kOtherRegisters>();
        if constexpr (!FORWARD) write_and_reduce<T>(p, shared, band, held, other_warp);
        else if (other_warp < Config::kWriterWarps) write<T>(p, shared, band, held, other_warp);
        else if (other_warp == Config::kWriterWarps) publish_sums<T>(p, shared);
        else compute_norms<T>(p, shared);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launching it. CPP_SOURCE hands over `sizes` and `pointers`, whose elements these enums name. kSharedBytes is the
// shared memory that a block may have, and kType is x's type: 0 float, 1 half, 2 bfloat16. All pointers are to device
// memory. Those to x, out, grad and the group data are 16-byte aligned. The group data are the totals and, behind them,
// the statistics. Only the forward uses kOut. kGradX is null where x's gradient is not wanted.
enum Size { kSamples, kInChannels, kHeight, kWidth, kOutChannels, kGroups, kMultiprocessors, kSharedBytes, kType };
enum Pointer { kX, kOut, kConvWeight, kConvBias, kBias, kScale, kGamma, kBeta, kGroupData, kWorkspace };
enum BackwardPointer { kGrad = kWorkspace + 1, kGradX, kPartialSums, kGradParameters };

// Sets the fields of p that bands of `rows` rows determine. Returns the bytes of dynamic shared memory that they take.
static int64_t set_bands(ConvArguments& p, int rows) {
    p.band_rows = std::min(rows, p.rows);
    p.bands = (p.rows + p.band_rows - 1) / p.band_rows;
    p.held_plane_floats = (p.band_rows * p.columns + 3) / 8 * 8 + 4;  // rounded up to 4 modulo 8: see channel_of_row
    p.x_plane_pixels = (p.band_rows + p.band_rows % 2 + 2) * p.width;  // an even number of rows: see kTaskRows
    const int64_t held_bytes = 4LL * p.held_stages * p.held_plane_floats * p.out_channels;
    // The wgmmas of a task read 64 + 2 columns, of which at least 4 exist. So they read up to 62 pixels beyond x, where
    // the held values lie. No output uses them, but the block must own that memory: hence the max, of 128 pixels.
    return p.x_plane_pixels * 32LL + std::max<int64_t>(held_bytes, 2 * kTaskColumns * 16);
}
// Sets p.held_stages: three, or two where three bands of two rows do not fit in shared memory (32 channels: beyond a
// width of 256). Then chooses the rows of a band: it starts with two and adds two while the band fits and all samples
// together still have at least `sms` bands. `sms` is the number of multiprocessors; each runs one block. Returns the
// bytes of dynamic shared memory.
static int64_t plan_convolution(ConvArguments& p, int sms, int64_t shared_bytes) {
    p.held_stages = kMaxHeldStages;
    if (set_bands(p, 2) > shared_bytes) p.held_stages = 2;
    int rows = 2;
    while (rows < p.rows) {
        const bool fits = set_bands(p, rows + 2) <= shared_bytes;
        const bool enough_bands = int64_t(p.bands) * p.samples >= sms;
        if (!fits || !enough_bands) break;
        rows += 2;
    }
    const int64_t bytes = set_bands(p, rows);
    p.teams = std::min(sms / p.bands, p.samples);
    // The largest sum, where each value of a group counts as 1, is to be from 2^46 to 2^47: see add_to_total.
    const double largest_sum = double(p.group_channels) * p.rows * p.columns;
    p.to_fixed = std::ldexp(1.0, kNonFiniteCountBit - 2 - std::ilogb(largest_sum));
    p.from_fixed = 1 / p.to_fixed;
    return bytes;
}

static ConvArguments arguments_of(void* const* pointers, const int64_t* sizes, double eps) {
    const auto size = [&](int i) { return int(sizes[i]); };
    ConvArguments p = {};
    p.samples = size(kSamples);
    p.in_channels = size(kInChannels);
    p.height = size(kHeight);
    p.width = size(kWidth);
    p.out_channels = size(kOutChannels);
    p.groups = size(kGroups);
    p.rows = p.height - 2;
    p.columns = p.width - 2;
    p.group_channels = p.out_channels / p.groups;
    p.x = pointers[kX];
    p.out = pointers[kOut];
    p.weight = pointers[kConvWeight];
    p.conv_bias = pointers[kConvBias];
    p.bias = pointers[kBias];
    p.scale = pointers[kScale];
    p.gamma = pointers[kGamma];
    p.beta = pointers[kBeta];
    p.totals = static_cast<unsigned long long*>(pointers[kGroupData]);
    p.statistics = reinterpret_cast<Statistics*>(p.totals + sizes[kSamples] * sizes[kGroups] * kTotalsStride);
    p.eps = float(eps);
    return p;
}
// Calls launch(a value of x's type).
template <typename F> static int by_type(int64_t type, F launch) {
    if (type == 0) return launch(float());
    if (type == 1) return launch(__half());
    return launch(__nv_bfloat16());
}

static bool is_benchmark(const Plan& plan) {
    const Plan benchmark = benchmark_plan();
    return std::memcmp(&benchmark, &plan, sizeof benchmark) == 0;
}

// Launches the forward or, if not FORWARD, the backward's first kernel: cooperatively, as blocks wait for each other.
template <typename T, bool FORWARD>
static int launch_convolution(ConvArguments p, const int64_t* sizes, cudaStream_t stream) {
    const int max_bytes = int(sizes[kSharedBytes] - int64_t(sizeof(ConvShared)));
    const int bytes = int(plan_convolution(p, int(sizes[kMultiprocessors]), max_bytes));
    auto* const kernel =
        is_benchmark(p) ? convolve_and_normalize<T, true, FORWARD> : convolve_and_normalize<T, false, FORWARD>;
    // Not `bytes`: another host thread could lower the limit to its own, smaller size before our launch.
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_bytes);
    if (error != cudaSuccess) return error;
    void* arguments[] = {&p};
    return cudaLaunchCooperativeKernel(kernel, dim3(p.bands, p.teams), dim3(kThreads), arguments, bytes, stream);
}

extern "C" int conv_forward(void* const* pointers, const int64_t* sizes, double eps, cudaStream_t stream) {
    const ConvArguments p = arguments_of(pointers, sizes, eps);
    return by_type(sizes[kType], [&](auto type) { return launch_convolution<decltype(type), true>(p, sizes, stream); });
}

// ---------------------------------------------------------------------------------------------------------------------
// The backward, for x of a width up to 256. Its kernels, in order:
//   1. convolve_and_normalize, with FORWARD false, computes h again and writes it to the workspace. It also finds the
//      largest |x| of each sample, and sums and maxima over h and grad of each band (write_and_reduce).
//   2. prepare_channels adds up the bands. For each group it computes the means in the norm's gradient, and for each
//      channel the gradients of gamma and beta and the power of two that keeps dh, the gradient of h, within fp16.
//   3. differentiate_rows reads h and grad, computes dh in shared memory, and from it x's gradient and partial sums of
//      the parameters' gradients.
//   4. recompute_gradients computes x's and the weights' gradients again for samples that are marked `recomputed`.
//   5. add_partial_sums adds up the partial sums. (ATen's sum took 20 us for the benchmark's 10 MB.)
// A block of differentiate_rows walks down a band of a sample's rows (a RowBand, which is not one of the forward's).
//
//   who, and what it does                                             waits for             signals
//   make_dh, 8 warps:   h, grad -> dh, and x's row new for it         empty                 full
//   multiply, 8 warps:  dh, x -> x's gradient, sums of the weights'   full                  empty
//
// `multiply` uses mma.sync. Float32 operands are split as in the forward, and lo * lo, at most 2^-22 of a product, is
// dropped. Tensor cores truncate each sum, where a float addition rounds it. So in float32 they sum some products from
// zero, and a float addition adds that sum to the running one. In 16 bits only hi by hi is computed: hi is x or the
// weight itself (but for what is below fp16's steps), and dh's hi is at least as exact as eager's dh (but for values
// below 2^-31 of the channel's bound). There the tensor cores add up all terms, because what they truncate is small
// beside a rounding to 16 bits. x is multiplied by a power of two for each sample, and dh by one for each of its
// channels, so that fp16 does not overflow.
//
// A cell is 16 bytes of shared memory: eight channels of one column, in fp16. A row of 8 channels, of x or dh, is four
// sub-rows of cells, and column k is cell k / 4 of sub-row k % 4. This shows which column each cell holds:
//
//     cell          0      1      2      3      ...   8      ...
//     sub-row 0     0      4      8      12     ...   32     ...
//     sub-row 1     1      5      9      13     ...   33     ...
//     sub-row 2     2      6      10     14     ...   34     ...
//     sub-row 3     3      7      11     15     ...   35     ...
//
// ldmatrix reads eight neighbouring cells as a matrix: eight columns that are four apart, by eight channels. A warp has
// 32 columns, from column f on. Matrix m holds the columns f + m + 4 i, for i from 0 to 7. So matrices 0 to 3 are the
// warp's columns, 1 to 4 are these shifted by one column, and 2 to 5 by two: the three kx of a 3x3 kernel. dh is stored
// one cell later: cell 0 of each sub-row holds zeros, for the four columns left of the image.

constexpr int kRoleWarps = 8;  // of `make_dh`, and of `multiply`
constexpr int kMaxGradWidth = 32 * kRoleWarps;  // of x; the output has two fewer
constexpr int kGradThreads = 64 * kRoleWarps;  // of a block of differentiate_rows
constexpr int kMultiplierRegisters = 168, kMakerRegisters = 88;  // of a thread; together all 65536 of 2 * 256 threads
constexpr int kSubRowCells = 8 * kRoleWarps + 2;  // 64, one for shifted matrices, one against bank conflicts
constexpr int kRowCells = 4 * kSubRowCells;  // cells of a row of 8 channels, of hi or lo
constexpr int kXRowStages = 4;  // rows of x in shared memory: three that `multiply` reads, and the next
// Tensor cores truncate: without these two corrections the gradient of the weights was too small by 2^-24 of itself on
// average, and that of x by 2.4 * 2^-24. kDhFactor raises dh, and so both gradients. For x's, prepare_shared also adds
// kWeightExcess of itself to a weight. float32 rounds the sum; the mean increase is 1.4 * 2^-24.
constexpr double kDhFactor = 1 + 0x1p-24;
constexpr float kWeightExcess = 0x1.6p-24f;
static_assert(kSubRowCells % 8 == 2, "neighbouring columns are stored to different banks");

// What prepare_channels computes for a channel of a sample. With v and dv/dz of t = h * t_per_h and
//     q = (gamma * grad - grad_mean - (v - mean) * grad_per_v) * dv/dz
// dh is q * rstd * scale. grad_mean is the group's mean of gamma * grad, and grad_per_v is rstd^2 times the group's
// mean of gamma * grad * (v - mean). `mean` is rounded to float, and grad_mean corrects for that. Shared memory holds
// dh * dh_scale * kDhFactor = q * fp16_per_q, in fp16, for float32 as hi and lo. `scale` is the Model's, dh_scale a
// power of two. grad_gamma and grad_beta are the sample's shares of the gradients of gamma and beta.
struct alignas(16) Channel {
    float t_per_h, mean, gamma, grad_mean, grad_per_v, fp16_per_q, scale, rstd, dh_scale, grad_gamma, grad_beta, unused;
    template <typename T> __device__ __forceinline__ float q(float h, float grad) const {
        const auto [v, slope] = activation_and_slope<T>(h * t_per_h);
        return fmaf(gamma, grad, -fmaf(v - mean, grad_per_v, grad_mean)) * slope;
    }
};

template <typename T> struct BackwardArguments : ConvArguments {
    const T* h;  // the same memory as `out`, which the first kernel wrote
    T* grad_x;  // null: not wanted
    Channel* channels;  // (samples, out_channels)
    // (samples, row_bands, kRoleWarps, sums_per_row): gradients' partial sums, of weights (out, in, kTaps), then of
    // either bias (the two have the same gradient), scale, gamma, beta.
    float* partial_sums;
    int weight_count, sums_per_row;
    // The index of a value of x in its tensor. Within a sample int is enough: it has fewer than 2^31 values.
    __device__ __forceinline__ int64_t x_offset(int sample, int in, int row, int column) const {
        const int x_pixels = height * width;
        return int64_t(sample) * in_channels * x_pixels + (in * x_pixels + row * width + column);
    }
};

// A block of differentiate_rows computes the gradient of rows [first_row, end_row) of a sample's x. This needs dh of
// these rows and of the two above: from first_dh_row on.
struct RowBand { int sample, first_row, end_row, first_dh_row; };

// Two columns, in two members: with Pack<T, 2> float32's training step takes 1.009 of the time.
template <typename T> struct alignas(2 * sizeof(T)) Pair { T a, b; };
// h and grad of a warp of `make_dh`: four channels, by pairs of columns. A lane reads only what its own cp.async wrote.
template <typename T> struct alignas(16) Fetched { Pair<T> h[4][kMaxGradWidth / 2], grad[4][kMaxGradWidth / 2]; };

struct alignas(16) GradShared {  // in dynamic shared memory, and behind it a Fetched for each warp of make_dh
    uint4 x[kXRowStages][2 * kRowCells];  // [row % kXRowStages][cells of hi, then of lo]
    uint4 dh[2][4][2 * kRowCells];  // [row % 2][8 channels][cells of hi, then of lo]
    uint4 weights[2][kTaps][32];  // [16 output channels][tap][lane]: as add_to_grad_x reads them
    Channel channels[kMaxOutChannels];
    Scales scales;
    float x_scale, grad_x_scale;  // of the sample's x and of its gradient. scales.x is not used here
    uint64_t full[2], empty[2];  // rows of dh, and the rows of x that they are multiplied by
};

#define LDMATRIX(transposed)                                                                      \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" transposed ".shared.b16 {%0, %1, %2, %3}, [%4];" \
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                                      \
        : "r"(shared_address(from))                                                               \
        : "memory")
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t* to, const uint4* from) {
    if constexpr (TRANSPOSED) LDMATRIX(".trans");
    else LDMATRIX("");
}
// d += a * b, by a warp: 16 rows, 8 columns, 16 of K.
__device__ __forceinline__ void mma16(float (&d)[4], const uint32_t* a, const uint32_t* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A block for each group of a sample, and a warp for each of its channels: the warp adds up the channel's
// BandReductions. Then a thread for each channel of the group fills in its Channel.
template <typename T>
__global__ void __launch_bounds__(32 * kMaxOutChannels)
    prepare_channels(const __grid_constant__ ConvArguments p, Channel* channels) {
    struct alignas(16) Sums { double grad, product; };
    __shared__ Sums sums[kMaxOutChannels];  // of grad, and of grad * (v - mean) * rstd
    __shared__ float maxima[kMaxOutChannels][2];  // |grad| and dv/dz
    const Statistics group = p.statistics[blockIdx.x];
    const int64_t first_index = int64_t(blockIdx.x) * p.group_channels;  // its first channel, of all samples'
    const int first_channel = int(first_index % p.out_channels);  // the same, counted in its sample
    const int warp = threadIdx.x / 32;
    Sums lane_sums = {};
    float lane_grad = 0, lane_slope = 0;
    for (int band = threadIdx.x % 32; band < p.bands; band += 32) {
        const BandReductions reductions = p.band_reductions[(first_index + warp) * p.bands + band];
        lane_sums.grad += reductions.grad_sum;
        lane_sums.product += reductions.product_sum;
        lane_grad = fmaxf(lane_grad, reductions.max_grad);
        lane_slope = fmaxf(lane_slope, reductions.max_slope);
    }
    const double grad_sum = sum_of_lanes(lane_sums.grad, 32);
    const double product_sum = sum_of_lanes(lane_sums.product, 32);
    // The bands subtracted `mean`; mean + mean_correction is more exact. NaN where grad is not finite, as in ATen.
    const double exact_product_sum = isfinite(grad_sum) ? product_sum - group.mean_correction * grad_sum : NAN;
    sums[warp] = {grad_sum, exact_product_sum * group.rstd};
    maxima[warp][0] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(lane_grad)));
    maxima[warp][1] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(lane_slope)));
    __syncthreads();
    const int own = threadIdx.x;  // this thread's channel, in the group, and c in the sample
    const int c = first_channel + own;
    if (own >= p.group_channels) return;
    double grad_mean = 0, grad_per_v = 0;
    for (int i = 0; i < p.group_channels; ++i) {
        const float gamma = value_of<T>(p.gamma, first_channel + i);
        grad_mean += sums[i].grad * gamma;
        grad_per_v += sums[i].product * gamma;
    }
    const double group_values = double(p.group_channels) * p.rows * p.columns;
    grad_per_v *= group.rstd / group_values;
    grad_mean = isfinite(grad_per_v) ? grad_mean / group_values - group.mean_correction * grad_per_v : NAN;
    const float gamma = value_of<T>(p.gamma, c), scale = value_of<T>(p.scale, c);
    const float q_bound_per_slope =
        fabsf(gamma) * maxima[own][0] + fabsf(float(grad_mean)) + (kVMax - kVMin) * fabsf(float(grad_per_v));
    const double dh_per_q = double(group.rstd) * scale;
    // fp16_per_q is below 2^15 / q_bound. So it is below 2^126, and finite, if q_bound is at least 2^-111.
    const double q_bound = fmaxf(q_bound_per_slope * maxima[own][1], 0x1p-111f);
    const float dh_scale = scale_below_overflow(float(q_bound * fabs(dh_per_q)));
    channels[first_index + own] = {ForwardActivation<T>::kTPerZ * scale, group.mean, gamma, float(grad_mean),
        float(grad_per_v), float(dh_per_q * dh_scale * kDhFactor), scale, group.rstd, dh_scale,
        float(sums[own].product), float(sums[own].grad)};
}

// By all threads of differentiate_rows: fills shared memory with zeros, then stores the channels, the scales, and the
// weights. A weight is multiplied by grad_x_scale and divided by dh_scale of its output channel. So its product with
// dh * dh_scale has the factor grad_x_scale, the same for all channels, and can be added up over them.
template <typename T>
__device__ __forceinline__ void prepare_shared(const BackwardArguments<T>& p, GradShared& shared, const RowBand& band) {
    constexpr int kWords = (sizeof(GradShared) + kRoleWarps * sizeof(Fetched<T>)) / sizeof(uint4);
    uint4* const words = reinterpret_cast<uint4*>(&shared);
    for (int i = threadIdx.x; i < kWords; i += kGradThreads) words[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (threadIdx.x < 2) {
        mbarrier_init(&shared.full[threadIdx.x], 32 * kRoleWarps);
        mbarrier_init(&shared.empty[threadIdx.x], 32 * kRoleWarps);
    }
    prepare_scales<T, false>(p, shared.scales);
    for (int c = threadIdx.x; c < p.out_channels; c += kGradThreads) {
        shared.channels[c] = p.channels[int64_t(band.sample) * p.out_channels + c];
    }
    __syncthreads();
    // A power of two with which every finite weight, so multiplied and divided, is at most 2^15. It is kept within
    // [2^-126, 2^126], so that its reciprocal is a normal float; where that raises it, weights may overflow fp16.
    float grad_x_scale = 0x1p126f;
    for (int c = 0; c < p.out_channels; ++c) {
        grad_x_scale = fminf(grad_x_scale, shared.scales.weight[c] * shared.channels[c].dh_scale);
    }
    grad_x_scale = fmaxf(grad_x_scale, 0x1p-126f);
    if (threadIdx.x == 0) {
        shared.x_scale = scale_below_overflow(__uint_as_float(p.max_x[band.sample]));
        shared.grad_x_scale = grad_x_scale;
    }
    // B of mma.sync. A lane has input channel lane / 4 and output channels c, c + 1, c + 8 and c + 9 of 16.
    for (int i = threadIdx.x; i < 2 * kTaps * 32; i += kGradThreads) {
        const int lane = i % 32;
        const int tap = i / 32 % kTaps;
        const int c_block = i / (32 * kTaps);
        const int in = lane / 4;
        const int c = c_block * 16 + lane % 4 * 2;
        const auto scaled = [&](int c) {
            if (c >= p.out_channels) return 0.0f;
            const float weight = weight_at<T>(p, c, in, tap);
            return fmaf(kWeightExcess, weight, weight) * (grad_x_scale / shared.channels[c].dh_scale);
        };
        uint4& words = shared.weights[c_block][tap][lane];  // hi of c and c + 1, hi of c + 8 and c + 9, then their lo
        split_two(scaled(c), scaled(c + 1), words.x, words.z);
        split_two(scaled(c + 8), scaled(c + 9), words.y, words.w);
    }
    __syncthreads();
}

// By a warp of make_dh, of four channels from first_channel on: writes its share of the gradients of bias, scale, gamma
// and beta, in this order, to its row of partial sums: out_channels values each, 0 for other warps' channels. `sums`
// are the lane's, of q and of q * h, by channel. bias has the gradient sum(q) * rstd * scale, scale sum(q * h) * rstd.
template <typename T>
__device__ __forceinline__ void store_vector_gradients(const BackwardArguments<T>& p, const GradShared& shared,
    const RowBand& band, int first_channel, const float (&sums)[2][4]) {
    const int lane = threadIdx.x % 32;
    const int64_t own_row = int64_t(blockIdx.x) * kRoleWarps + first_channel / 4;
    float* const vectors = p.partial_sums + own_row * p.sums_per_row + p.weight_count;
    for (int i = lane; i < 4 * p.out_channels; i += 32) vectors[i] = 0;
    __syncwarp();
    const bool is_first_band = band.first_row == 0;  // only it adds gamma's and beta's, which are of the whole sample
    for (int k = 0; k < 4; ++k) {
        const Channel& channel = shared.channels[first_channel + k];
        const float grad_bias = sum_of_lanes(sums[0][k], 32) * channel.rstd * channel.scale;
        const float grad_scale = sum_of_lanes(sums[1][k], 32) * channel.rstd;
        float value = 0;
        if (lane == 0) value = grad_bias;
        if (lane == 1) value = grad_scale;
        if (lane == 2 && is_first_band) value = channel.grad_gamma;
        if (lane == 3 && is_first_band) value = channel.grad_beta;
        if (lane >= 4 || first_channel + k >= p.out_channels) continue;
        vectors[lane * p.out_channels + first_channel + k] = value;
    }
}

// Eight warps, of four output channels each: they store dh of a row, and a row of x, as fp16 in shared memory, and add
// up q and q * h. A lane has two neighbouring columns of every 64. As soon as it has used their h and grad, it starts
// to copy those of the next row from global memory (to `fetched`).
template <typename T>
__device__ __forceinline__ void make_dh(
    const BackwardArguments<T>& p, GradShared& shared, const RowBand& band, Fetched<T>& fetched) {
    lower_registers_to<kMakerRegisters>();
    const int first_channel = threadIdx.x / 32 % kRoleWarps * 4;  // of the warp
    const int lane = threadIdx.x % 32;
    const int output_pixels = p.rows * p.columns;
    const int channel_count = min(p.out_channels - first_channel, 4);
    const int end_dh_row = min(band.end_row, p.rows);
    const int64_t begin = (int64_t(band.sample) * p.out_channels + first_channel) * output_pixels;
    const T* const warp_h = p.h + begin;
    const T* const warp_grad = static_cast<const T*>(p.grad) + begin;
    const auto fetch = [&](int row, unsigned pair) {
        const T* h = warp_h + (row * p.columns + 2 * pair);
        const T* grad = warp_grad + (row * p.columns + 2 * pair);
        asm("" : "+l"(h), "+l"(grad));  // keeps the compiler from computing both anew for each copy: saves 1%
        for (int k = 0; k < 4 && row < end_dh_row; ++k) {
            if (k >= channel_count || int(2 * pair) >= p.columns) continue;
            __pipeline_memcpy_async(&fetched.h[k][pair], h + k * output_pixels, sizeof(Pair<T>));
            __pipeline_memcpy_async(&fetched.grad[k][pair], grad + k * output_pixels, sizeof(Pair<T>));
        }
        __pipeline_commit();
    };
    const int column = threadIdx.x % kMaxGradWidth;
    const int x_pixels = p.height * p.width;
    T x[kMaxInChannels];
    const auto load_x = [&](int row) {
        const int in = column < p.width && row < p.height ? p.in_channels : 0;
        const T* const from = static_cast<const T*>(p.x) + p.x_offset(band.sample, 0, row, column);
        for (int i = 0; i < kMaxInChannels; ++i) x[i] = i < in ? __ldg(from + i * x_pixels) : T(0.0f);
    };
    const auto store_x = [&](int row) {
        uint4* const to = shared.x[row % kXRowStages] + column % 4 * kSubRowCells + column / 4;
        float scaled[kMaxInChannels];
        for (int i = 0; i < kMaxInChannels; ++i) scaled[i] = float(x[i]) * shared.x_scale;
        split_pixel(scaled, to[0], to[kRowCells]);
    };
    // A copy in registers: in bfloat16 a training step takes 0.94 of the time that it takes without.
    Channel own_channels[4];
    for (int k = 0; k < 4; ++k) own_channels[k] = shared.channels[first_channel + k];
    float sums[2][4] = {};  // of q and of q * h, by channel
    for (int i = 0; i < 4; ++i) fetch(band.first_dh_row, lane + 32 * i);
    for (int row = band.first_dh_row; row < band.first_dh_row + 2; ++row) {
        load_x(row);
        store_x(row);
    }
    for (int row = band.first_dh_row; row < band.end_row; ++row) {
        load_x(row + 2);
        mbarrier_wait(&shared.empty[row & 1], ((row - band.first_dh_row) / 2 & 1) ^ 1);
        float row_sums[2][4] = {};
#pragma unroll 1
        for (unsigned pair = lane; pair < lane + 128 && row < p.rows; pair += 32) {
            __pipeline_wait_prior(3);  // for this pair's copies: those of the lane's other three may be on their way
            if (int(2 * pair) < p.columns) {
                float dh[2][4];
                for (int k = 0; k < 4; ++k) {
                    const Channel& channel = own_channels[k];
                    const Pair<T> two_h = fetched.h[k][pair];
                    const Pair<T> two_grads = fetched.grad[k][pair];
                    for (int i = 0; i < 2; ++i) {
                        const float h = float(i == 0 ? two_h.a : two_h.b);
                        const float grad = float(i == 0 ? two_grads.a : two_grads.b);
                        const float q = channel.template q<T>(h, grad);
                        row_sums[0][k] += q;
                        row_sums[1][k] = fmaf(q, h, row_sums[1][k]);
                        dh[i][k] = q * channel.fp16_per_q;
                    }
                }
                for (int i = 0; i < 2; ++i) {
                    uint4* const cell =
                        shared.dh[row & 1][first_channel / 8] + (2 * pair + i) % 4 * kSubRowCells + pair / 2 + 1;
                    uint2 hi, lo;  // four channels, half of a cell
                    split_two(dh[i][0], dh[i][1], hi.x, lo.x);
                    split_two(dh[i][2], dh[i][3], hi.y, lo.y);
                    reinterpret_cast<uint2*>(cell)[first_channel / 4 % 2] = hi;
                    if (!kIs16Bit<T>) reinterpret_cast<uint2*>(cell + kRowCells)[first_channel / 4 % 2] = lo;
                }
            }
            fetch(row + 1, pair);
        }
        if (row < p.rows) store_x(row + 2);
        for (int k = 0; k < 8 && row >= band.first_row; ++k) sums[k / 4][k % 4] += row_sums[k / 4][k % 4];
        mbarrier_arrive(&shared.full[row & 1]);
    }
    store_vector_gradients(p, shared, band, first_channel, sums);
}

// By a warp: adds what its 32 columns of a row contribute to the weights' gradient. grad_weights[b][tap][2 k + i] is of
// output channel 16 b + 8 k + lane / 4 and input channel 2 (lane % 4) + i.
template <typename T>
__device__ __forceinline__ void add_to_grad_weights(
    const GradShared& shared, int row, float (&grad_weights)[2][kTaps][4]) {
    const int own_matrix = threadIdx.x % 32 / 8;  // the matrix that this lane points ldmatrix at: 0 to 3
    const int cell = threadIdx.x / 32 * 8 + threadIdx.x % 8;
#pragma unroll(kIs16Bit<T> ? 1 : 2)  // measured: see add_to_grad_x, below
    for (int step = 0; step < 2; ++step) {  // 16 columns, of two sub-rows
        uint32_t hi[2][4], lo[2][4];  // [c_block]: 16 channels of dh by 16 columns
        for (int c_block = 0; c_block < 2; ++c_block) {
            const uint4* const dh_cells = shared.dh[row & 1][2 * c_block + own_matrix % 2];
            const uint4* const from = dh_cells + (2 * step + own_matrix / 2) * kSubRowCells + cell + 1;
            load_matrices<true>(hi[c_block], from);
            if (!kIs16Bit<T>) load_matrices<true>(lo[c_block], from + kRowCells);
        }
#pragma unroll
        for (int ky = 0; ky < 3; ++ky) {
            const uint4* const x = shared.x[(row + ky) % kXRowStages] + cell;
            const auto matrix = [&](int m) { return x + m % 4 * kSubRowCells + m / 4; };
            uint32_t x_even[2][4];  // [hi, lo]: matrices 2 step to 2 step + 3, two for kx 0 and two for kx 2
            uint32_t x_odd[4];  // for kx 1, matrices 2 step + 1 and 2 step + 2: two of hi, then two of lo
            load_matrices<true>(x_even[0], matrix(2 * step + own_matrix));
            if (!kIs16Bit<T>) load_matrices<true>(x_even[1], matrix(2 * step + own_matrix) + kRowCells);
            load_matrices<true>(x_odd, matrix(2 * step + 1 + own_matrix % 2) + own_matrix / 2 * kRowCells);
            float sums[2][3][4] = {};
            // dh's lo by x's hi, hi by lo, then hi by hi: the smallest products first. Each mma is independent of the
            // five before it, so that the tensor cores need not wait for a sum.
            for (int k = kIs16Bit<T> ? 12 : 0; k < 18; ++k) {
                const int product = k / 6, c_block = k / 3 % 2, kx = k % 3;
                const int x_piece = product == 1 ? 1 : 0;  // 0: hi, 1: lo
                const uint32_t* const dh_fragment = product == 0 ? lo[c_block] : hi[c_block];
                const uint32_t* const x_fragment = kx == 1 ? x_odd + 2 * x_piece : x_even[x_piece] + kx;
                float (&to)[4] = kIs16Bit<T> ? grad_weights[c_block][3 * ky + kx] : sums[c_block][kx];
                mma16(to, dh_fragment, x_fragment);
            }
            for (int k = 0; k < 24 && !kIs16Bit<T>; ++k) {
                const int c_block = k / 12, kx = k / 4 % 3, i = k % 4;
                grad_weights[c_block][3 * ky + kx][i] += sums[c_block][kx][i];
            }
        }
    }
}

// By a warp: adds what a row of dh contributes to three rows of x's gradient. grad_x_rows[ky][j / 2][j % 2 * 2 + i] is
// of the warp's column 4 (lane / 4) + j and input channel 2 (lane % 4) + i.
template <typename T>
__device__ __forceinline__ void add_to_grad_x(const GradShared& shared, int row, float (&grad_x_rows)[3][2][4]) {
    const int lane = threadIdx.x % 32;
    const int own_matrix = lane / 8 % 2;
    const int cell = threadIdx.x / 32 * 8 + lane % 8;
#pragma unroll
    for (int c_block = 0; c_block < 2; ++c_block) {
        const uint4* const dh = shared.dh[row & 1][2 * c_block + lane / 16];
        float sums[3][2][4] = {};
#pragma unroll(kIs16Bit<T> ? 1 : 3)  // unrolled float32 takes 0.99 of the time, bfloat16 1.02
        for (int kx = 0; kx < 3; ++kx) {
            // [column_pair]: an A operand of 16 x 16. Rows 0 to 7 are the columns 4 i + 2 column_pair - kx, i from 0 to
            // 7, and rows 8 to 15 the column after each. K 0 to 7 are eight channels, K 8 to 15 the next eight.
            uint32_t hi[2][4], lo[2][4];
            for (int column_pair = 0; column_pair < 2; ++column_pair) {
                const int m = 2 * column_pair - kx + own_matrix + 4;
                const uint4* const from = dh + m % 4 * kSubRowCells + cell + m / 4;
                load_matrices<false>(hi[column_pair], from);
                if (!kIs16Bit<T>) load_matrices<false>(lo[column_pair], from + kRowCells);
            }
            // dh's lo by the weights' hi, hi by lo, then hi by hi, as in add_to_grad_weights.
            for (int k = kIs16Bit<T> ? 12 : 0; k < 18; ++k) {
                const int product = k / 6, ky = k / 2 % 3, column_pair = k % 2;
                const uint4 w = shared.weights[c_block][3 * ky + kx][lane];
                const uint32_t* const dh_fragment = product == 0 ? lo[column_pair] : hi[column_pair];
                const uint32_t* const weight_fragment = product == 1 ? &w.z : &w.x;
                float (&to)[4] = kIs16Bit<T> ? grad_x_rows[ky][column_pair] : sums[ky][column_pair];
                mma16(to, dh_fragment, weight_fragment);
            }
        }
        for (int k = 0; k < 24 && !kIs16Bit<T>; ++k) {
            const int ky = k / 8, column_pair = k / 4 % 2, i = k % 4;
            grad_x_rows[ky][column_pair][i] += sums[ky][column_pair][i];
        }
    }
}

// By a warp: stores a row of x's gradient, a lane four columns of two channels. Then moves grad_x_rows up by one row.
template <typename T>
__device__ __forceinline__ void store_grad_x(
    const BackwardArguments<T>& p, const RowBand& band, int row, float factor, float (&grad_x_rows)[3][2][4]) {
    for (int k = 0; k < 4 && row >= band.first_row; ++k) {
        const int column_pair = k / 2, i = k % 2;
        const int in = threadIdx.x % 4 * 2 + i;
        const int column = threadIdx.x / 4 * 4 + column_pair * 2;
        if (in >= p.in_channels || column >= p.width) continue;
        const float a = grad_x_rows[0][column_pair][i] * factor;
        const float b = grad_x_rows[0][column_pair][2 + i] * factor;
        auto* const to = reinterpret_cast<Pair<T>*>(p.grad_x + p.x_offset(band.sample, in, row, column));
        *to = {T(a), T(b)};
    }
    for (int k = 0; k < 8; ++k) {
        grad_x_rows[0][k / 4][k % 4] = grad_x_rows[1][k / 4][k % 4];
        grad_x_rows[1][k / 4][k % 4] = grad_x_rows[2][k / 4][k % 4];
        grad_x_rows[2][k / 4][k % 4] = 0;
    }
}

// Eight warps, of 32 columns each: they store x's gradient row by row, and keep the weights' gradient in registers.
template <typename T>
__device__ __forceinline__ void multiply(const BackwardArguments<T>& p, GradShared& shared, const RowBand& band) {
    raise_registers_to<kMultiplierRegisters>();
    float grad_weights[2][kTaps][4] = {}, grad_x_rows[3][2][4] = {};
    const float grad_x_factor = 1 / shared.grad_x_scale;
    for (int row = band.first_dh_row; row < band.end_row; ++row) {
        mbarrier_wait(&shared.full[row & 1], (row - band.first_dh_row) / 2 & 1);
        if (row < p.rows && p.grad_x != nullptr) add_to_grad_x<T>(shared, row, grad_x_rows);
        if (row < p.rows && row >= band.first_row) add_to_grad_weights<T>(shared, row, grad_weights);
        mbarrier_arrive(&shared.empty[row & 1]);
        if (p.grad_x != nullptr) store_grad_x(p, band, row, grad_x_factor, grad_x_rows);
    }
    const int lane = threadIdx.x % 32;
    float* const to = p.partial_sums + (int64_t(blockIdx.x) * kRoleWarps + threadIdx.x / 32) * p.sums_per_row;
    const bool recomputed = p.recomputed[band.sample];  // then recompute_gradients computes this gradient
    for (int octet = 0; octet < 4; ++octet) {
        const int c = 8 * octet + lane / 4;
        const float inverse_scales = 1 / shared.channels[c].dh_scale * (1 / shared.x_scale);
        const float factor = fminf(inverse_scales, 0x1p126f);  // not infinite: 0 times infinity is NaN
        for (int k = 0; k < 2 * kTaps; ++k) {
            const int tap = k / 2, i = k % 2;
            const int in = lane % 4 * 2 + i;
            const float value = recomputed ? 0.0f : grad_weights[octet / 2][tap][octet % 2 * 2 + i] * factor;
            if (c < p.out_channels && in < p.in_channels) to[(c * p.in_channels + in) * kTaps + tap] = value;
        }
    }
}

template <typename T, bool BENCHMARK>
__global__ void __launch_bounds__(kGradThreads, 1)
    differentiate_rows(const __grid_constant__ BackwardArguments<T> given, int row_bands) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    BackwardArguments<T> p = given;
    if constexpr (BENCHMARK) static_cast<Plan&>(p) = benchmark_plan();
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    GradShared& shared = *reinterpret_cast<GradShared*>(dynamic_shared);
    const int band_index = blockIdx.x % row_bands;  // in its sample
    const int first_row = p.height * band_index / row_bands;
    const int end_row = p.height * (band_index + 1) / row_bands;
    const RowBand band = {int(blockIdx.x) / row_bands, first_row, end_row, max(first_row - 2, 0)};
    prepare_shared(p, shared, band);
    Fetched<T>* const fetched = reinterpret_cast<Fetched<T>*>(&shared + 1) + threadIdx.x / 32 % kRoleWarps;
    if (threadIdx.x >= 32 * kRoleWarps) make_dh(p, shared, band, *fetched);
    else multiply(p, shared, band);
#endif
}

// For samples that are marked `recomputed`: the gradients of x and of the weights, without tensor cores. A thread
// computes some values of each gradient, and for each value every dh that it needs. The weights' gradient goes to the
// sample's first row of partial sums, where `multiply` left zeros.
template <typename T>
__global__ void recompute_gradients(const __grid_constant__ BackwardArguments<T> p, int row_bands) {
    const int sample = blockIdx.x;
    const int output_pixels = p.rows * p.columns;
    const int x_pixels = p.height * p.width;
    if (!p.recomputed[sample]) return;
    const T* const x = static_cast<const T*>(p.x) + p.x_offset(sample, 0, 0, 0);
    const auto dh = [&](int c, int row, int column) {
        const int64_t index = int64_t(sample) * p.out_channels + c;
        const int64_t at = index * output_pixels + row * p.columns + column;
        const Channel& channel = p.channels[index];
        const float q = channel.template q<T>(float(p.h[at]), float(static_cast<const T*>(p.grad)[at]));
        return q * channel.rstd * channel.scale;
    };
    const int thread = blockIdx.y * blockDim.x + threadIdx.x;
    const int threads = gridDim.y * blockDim.x;
    for (int i = thread; i < p.in_channels * x_pixels && p.grad_x != nullptr; i += threads) {
        float sum = 0;
        for (int k = 0; k < p.out_channels * kTaps; ++k) {
            const int c = k / kTaps, tap = k % kTaps;
            const int row = i % x_pixels / p.width - tap / 3;
            const int column = i % p.width - tap % 3;
            if (row < 0 || row >= p.rows || column < 0 || column >= p.columns) continue;
            sum = fmaf(dh(c, row, column), weight_at<T>(p, c, i / x_pixels, tap), sum);
        }
        p.grad_x[p.x_offset(sample, 0, 0, 0) + i] = T(sum);
    }
    for (int i = thread; i < p.weight_count; i += threads) {
        const int in = i / kTaps % p.in_channels;
        const int tap = i % kTaps;
        double sum = 0;
        for (int k = 0; k < output_pixels; ++k) {
            const int row = k / p.columns, column = k % p.columns;
            const float value = float(x[in * x_pixels + (row + tap / 3) * p.width + column + tap % 3]);
            sum += double(dh(i / kTaps / p.in_channels, row, column)) * value;
        }
        p.partial_sums[int64_t(sample) * row_bands * kRoleWarps * p.sums_per_row + i] = float(sum);
    }
}

// Adds up the rows of partial sums, in double. A block has 32 columns and 32 warps, and warp w adds every 32nd row from
// row w on.
__global__ void __launch_bounds__(1024) add_partial_sums(const float* sums, int64_t rows, int width, float* to) {
    __shared__ double partial[32][33];  // a column more, so that a warp reads 32 rows of one column without conflicts
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = blockIdx.x * 32 + lane;
    double sum = 0;
    for (int64_t row = warp; row < rows && column < width; row += 32) sum += sums[row * width + column];
    partial[warp][lane] = sum;
    __syncthreads();
    const double total = sum_of_lanes(partial[lane][warp], 32);
    const int total_column = blockIdx.x * 32 + warp;
    if (lane == 0 && total_column < width) to[total_column] = float(total);
}

// Bands of a sample in differentiate_rows, a block each: as many as run at once, but at least one. Each but the first
// computes two rows of dh that another computes, too. So a sample is cut only into bands of eight rows or more.
static int row_bands_of(const int64_t* sizes) {
    return std::max(1, int(std::min(sizes[kMultiprocessors] / sizes[kSamples], sizes[kHeight] / 8)));
}
// The most bands that a sample has in convolve_and_normalize: each but the last has two rows of the output or more.
static int64_t max_bands(const int64_t* sizes) { return (sizes[kHeight] - 1) / 2; }
// Bytes of the workspace, and rows of partial sums.
extern "C" void conv_backward_sizes(const int64_t* sizes, int64_t* bytes, int64_t* partial_rows) {
    const int64_t output_pixels = (sizes[kHeight] - 2) * (sizes[kWidth] - 2);
    const int64_t all_channels = sizes[kSamples] * sizes[kOutChannels];
    const int64_t h_bytes = (sizes[kType] == 0 ? 4 : 2) * output_pixels;  // of a channel
    const int64_t channel_bytes = sizeof(Channel) + sizeof(BandReductions) * max_bands(sizes) + h_bytes;
    *bytes = all_channels * channel_bytes + 2 * sizeof(uint32_t) * sizes[kSamples];
    *partial_rows = sizes[kSamples] * row_bands_of(sizes) * kRoleWarps;
}

template <typename T> static int launch_backward(void* const* pointers, const int64_t* sizes, cudaStream_t stream) {
    const ConvArguments conv = arguments_of(pointers, sizes, 0);
    // The workspace: channels, band_reductions, h, max_x, recomputed.
    const int64_t all_channels = sizes[kSamples] * sizes[kOutChannels];
    auto* const channels = static_cast<Channel*>(pointers[kWorkspace]);
    auto* const band_reductions = reinterpret_cast<BandReductions*>(channels + all_channels);
    auto* const h = reinterpret_cast<T*>(band_reductions + all_channels * max_bands(sizes));
    const int weight_count = conv.out_channels * conv.in_channels * kTaps;
    BackwardArguments<T> p = {conv, h, static_cast<T*>(pointers[kGradX]), channels,
        static_cast<float*>(pointers[kPartialSums]), weight_count, weight_count + 4 * conv.out_channels};
    p.out = h;
    p.max_x = reinterpret_cast<uint32_t*>(h + all_channels * p.rows * p.columns);
    p.recomputed = p.max_x + p.samples;
    p.grad = pointers[kGrad];
    p.band_reductions = band_reductions;
    // For is_benchmark, and for the bands in prepare_channels. launch_convolution plans its own copy of p.
    plan_convolution(p, int(sizes[kMultiprocessors]), sizes[kSharedBytes] - int64_t(sizeof(ConvShared)));
    constexpr int bytes = sizeof(GradShared) + kRoleWarps * sizeof(Fetched<T>);
    const int row_bands = row_bands_of(sizes);
    int error = launch_convolution<T, false>(p, sizes, stream);
    const auto kernel = is_benchmark(p) ? differentiate_rows<T, true> : differentiate_rows<T, false>;
    if (error == 0) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != 0) return error;
    prepare_channels<T><<<unsigned(p.samples) * p.groups, 32 * p.group_channels, 0, stream>>>(p, channels);
    kernel<<<unsigned(p.samples) * row_bands, kGradThreads, bytes, stream>>>(p, row_bands);
    // Blocks of samples that are not `recomputed` end at once. A sample gets only eight blocks, because few samples are
    // marked (all, if prepare_scales gives NaN).
    recompute_gradients<T><<<dim3(p.samples, 8), 256, 0, stream>>>(p, row_bands);
    const int64_t partial_rows = sizes[kSamples] * row_bands * kRoleWarps;
    auto* const grad_parameters = static_cast<float*>(pointers[kGradParameters]);
    const int blocks = (p.sums_per_row + 31) / 32;
    add_partial_sums<<<blocks, 1024, 0, stream>>>(p.partial_sums, partial_rows, p.sums_per_row, grad_parameters);
    return cudaGetLastError();
}
extern "C" int conv_backward(void* const* pointers, const int64_t* sizes, cudaStream_t stream) {
    return by_type(sizes[kType], [&](auto type) { return launch_backward<decltype(type)>(pointers, sizes, stream); });
}
"""

CPP_SOURCE = r"""
#line 1 "CPP_SOURCE in conv_sigmoid_group_norm.py"
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/sigmoid.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {
using at::Tensor;
using TensorPair = std::tuple<Tensor, Tensor>;
// The order of `tensors` everywhere: x, the convolution's weight and bias, bias, scale, the norm's weight and bias. The
// operators `forward` and `backward` get them in one dtype. Under autocast `network` may get several.
enum { kX, kWeight, kConvBias, kBias, kScale, kGamma, kBeta, kTensors };

// The Model's lines, for what `can_take` or `fits` refuses, and for backward_by_pytorch.
Tensor plain(at::TensorList t, int64_t groups, double eps) {
    Tensor h = at::conv2d(t[kX], t[kWeight], t[kConvBias]);
    h = h + t[kBias];  // line by line, so that each old h is freed when the next is there
    h = h * t[kScale];
    h = at::sigmoid(h);
    TORCH_CHECK_VALUE(h.sym_numel() != groups,  // as torch.nn.functional.group_norm refuses one such sample
        "Expected more than 1 value per channel when training, got input size [1, ", groups, ", 1, 1]");
    return at::group_norm(h, groups, t[kGamma], t[kBeta], eps);
}
// Whether the four dimensions are in order in memory. is_contiguous() ignores strides of dimensions of size 1. PyTorch
// may take those strides for channels_last (one channel). Eager's output then is channels_last, and ours is not.
bool in_order(const Tensor& t) {
    const bool is_contiguous = t.dim() == 4 && t.is_contiguous();
    return is_contiguous && t.sym_stride(1) == t.sym_size(2) * t.sym_size(3) && t.sym_stride(3) == 1;
}
// Whether our kernels take these tensors, if `fits` takes the image: all on one Hopper, of one dtype or under autocast,
// with few channels and 3x3 weights, x and the weight contiguous. The vectors need not be contiguous.
bool can_take(at::TensorList t, int64_t groups) {
    const Tensor &x = t[kX], &weight = t[kWeight];
    const bool any_dtype = at::autocast::is_autocast_enabled(at::kCUDA);
    for (const Tensor& tensor : t) {
        const at::ScalarType type = tensor.scalar_type();
        if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return false;
        if (tensor.device() != x.device() || (type != x.scalar_type() && !any_dtype)) return false;
    }
    if (at::cuda::getDeviceProperties(x.device().index())->major != 9) return false;
    if (!in_order(x) || !in_order(weight) || weight.sym_size(2) != 3 || weight.sym_size(3) != 3) return false;
    const c10::SymInt out_channels = weight.sym_size(0), in_channels = weight.sym_size(1);
    if (in_channels != x.sym_size(1) || in_channels < 1 || in_channels > 8) return false;
    if (out_channels < 1 || out_channels > 32) return false;
    const std::array<c10::SymInt, 3> shape = {out_channels, 1, 1};
    for (int i = kConvBias; i < kTensors; ++i) {
        const size_t dimensions = i == kBias || i == kScale ? 3 : 1;
        if (!t[i].sym_sizes().equals({shape.data(), dimensions})) return false;
    }
    return groups > 0 && out_channels % groups == 0;
}
// Whether our kernels take images of this size, and so many samples.
bool fits(const Tensor& x, bool needs_grad) {
    const c10::SymInt rows = x.sym_size(2) - 2, columns = x.sym_size(3) - 2;
    if (rows < 1 || columns < 2 || columns % 2 != 0 || rows * columns % 4 != 0) return false;
    // All blocks together must hold a sample, with two rows each. With 350 columns and 32 channels a block needs 223.5
    // of 227 KiB, for x, two stages of two rows and ConvShared. differentiate_rows takes 256 columns of x
    // (kMaxGradWidth).
    const int sms = at::cuda::getDeviceProperties(x.device().index())->multiProcessorCount;
    if (rows > 2 * sms || columns > (needs_grad ? 254 : 350)) return false;
    // With fewer than 2^25 samples, samples times groups stay below 2^30: an int, and a grid of prepare_channels. A
    // program that is exported for any number of samples decides when it runs, in forward_cuda.
    const bool any_batch = !needs_grad && x.sym_size(0).is_symbolic();
    if (!any_batch && x.sym_size(0) >= 1 << 25) return false;
    // With gradients, where a sample is one band of differentiate_rows, its partial sums must not outnumber its h.
    // (With more bands there are few samples, and the sums take at most about 11 MB.)
    return !needs_grad || rows * columns >= 8 * (9 * x.sym_size(1) + 4);
}

// The output, and 34 8-byte words for each group: first the totals of all groups, kTotalsStride (32) words each, and
// behind them their statistics, two words each.
TensorPair forward_meta(at::TensorList tensors, int64_t groups, double) {
    const Tensor &x = tensors[kX], &weight = tensors[kWeight];
    const c10::SymInt samples = x.sym_size(0), rows = x.sym_size(2) - 2, columns = x.sym_size(3) - 2;
    return {at::empty_symint({samples, weight.sym_size(0), rows, columns}, x.options()),
        at::empty_symint({samples, groups, 34}, x.options().dtype(at::kLong))};
}
// The gradients of x and, in one float32 tensor, of the convolution's weight, of either bias (the two have the same),
// of scale, gamma and beta.
TensorPair backward_meta(const Tensor&, at::TensorList tensors, const Tensor&, bool wants_grad_x) {
    const Tensor& x = tensors[kX];
    const auto values = tensors[kWeight].sym_numel() + 4 * tensors[kBias].sym_numel();
    return {wants_grad_x ? at::empty_like(x, at::MemoryFormat::Contiguous) : at::empty({0}, x.options()),
        at::empty_symint({values}, x.options().dtype(at::kFloat))};
}

extern "C" int conv_forward(void* const* pointers, const int64_t* sizes, double eps, cudaStream_t stream);
extern "C" void conv_backward_sizes(const int64_t* sizes, int64_t* bytes, int64_t* partial_rows);
extern "C" int conv_backward(void* const* pointers, const int64_t* sizes, cudaStream_t stream);

// Raises an error if a launch failed, and clears it: else the runtime would report it after the next launch, too.
void check_launch(int error) {
    if (error == 0) return;
    cudaGetLastError();
    TORCH_CHECK(false, "launch failed: ", cudaGetErrorString(cudaError_t(error)));
}
Tensor aligned(const Tensor& t) {  // contiguous, and at 16 bytes, which a slice of another tensor need not be
    const Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.const_data_ptr()) % 16 == 0 ? ready : ready.clone();
}

// What the launchers take, in the order of the kernels' enums Size, Pointer and BackwardPointer.
struct Arguments {
    c10::SmallVector<Tensor, 16> kept_alive;
    c10::SmallVector<void*, 16> pointers;
    std::array<int64_t, 9> sizes;
    Arguments(at::TensorList tensors, const Tensor& out, const Tensor& group_data) {
        const Tensor& x = tensors[kX];
        int type = 0;
        if (x.scalar_type() == at::kHalf) type = 1;
        if (x.scalar_type() == at::kBFloat16) type = 2;
        const cudaDeviceProp* const gpu = at::cuda::getCurrentDeviceProperties();
        sizes = {x.size(0), x.size(1), x.size(2), x.size(3), tensors[kWeight].size(0), group_data.size(1),
            gpu->multiProcessorCount, int64_t(gpu->sharedMemPerBlockOptin), type};
        add(aligned(x));
        add(out);
        for (const Tensor& parameter : tensors.slice(1)) add(parameter.contiguous());
        add(group_data);
    }
    void add(Tensor t) {
        pointers.push_back(t.data_ptr());
        kept_alive.push_back(std::move(t));
    }
};

TensorPair forward_cuda(at::TensorList tensors, int64_t groups, double eps) {
    const c10::cuda::CUDAGuard guard(tensors[kX].device());
    const Tensor& x = tensors[kX];
    if (!fits(x, false))
        return {plain(tensors, groups, eps), at::empty({x.size(0), groups, 34}, x.options().dtype(at::kLong))};
    TensorPair results = forward_meta(tensors, groups, eps);
    if (x.size(0) == 0) return results;
    const auto& [out, group_data] = results;
    const Arguments arguments(tensors, out, group_data);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    check_launch(conv_forward(arguments.pointers.data(), arguments.sizes.data(), eps, stream));
    return results;
}

TensorPair backward_cuda(const Tensor& grad, at::TensorList tensors, const Tensor& group_data, bool wants_grad_x) {
    const c10::cuda::CUDAGuard guard(grad.device());
    auto [grad_x, grad_parameters] = backward_meta(grad, tensors, group_data, wants_grad_x);
    if (grad.numel() == 0) return {grad_x, grad_parameters.zero_()};
    Arguments arguments(tensors, grad_x, group_data);  // kOut is not read: h is written to the workspace
    int64_t bytes, partial_rows;
    conv_backward_sizes(arguments.sizes.data(), &bytes, &partial_rows);
    const Tensor partial_sums = at::empty({partial_rows, grad_parameters.numel()}, grad_parameters.options());
    const Tensor workspace = at::empty({bytes}, partial_sums.options().dtype(at::kByte));
    for (const Tensor& t : {workspace, aligned(grad), grad_x, partial_sums, grad_parameters}) arguments.add(t);
    check_launch(conv_backward(arguments.pointers.data(), arguments.sizes.data(), c10::cuda::getCurrentCUDAStream()));
    return {grad_x, grad_parameters};
}

// The operator of that name, to call by way of PyTorch's dispatcher. The operator has one implementation for GPUs
// (_cuda) and one for tracing (_meta), which only makes tensors of the right sizes.
template <typename F> c10::TypedOperatorHandle<F> operator_of(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}
TensorPair call_forward(at::TensorList tensors, int64_t groups, double eps) {
    static const auto forward = operator_of<decltype(forward_meta)>("NAMESPACE::forward");
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    return forward.call(tensors, groups, eps);
}

// The whole network, for autograd. Saves its inputs and the groups' data; the backward computes h again.
struct ConvSigmoidGroupNorm : torch::autograd::Function<ConvSigmoidGroupNorm> {
    using Context = torch::autograd::AutogradContext;
    using Tensors = torch::autograd::variable_list;

    static Tensor forward(Context* context, const Tensor& x, const Tensor& weight, const Tensor& conv_bias,
        const Tensor& bias, const Tensor& scale, const Tensor& gamma, const Tensor& beta, int64_t groups, double eps) {
        auto [out, group_data] = call_forward({x, weight, conv_bias, bias, scale, gamma, beta}, groups, eps);
        context->save_for_backward({x, weight, conv_bias, bias, scale, gamma, beta, group_data});
        context->saved_data["groups"] = groups;
        context->saved_data["eps"] = eps;
        return out;
    }
    static Tensors backward(Context* context, const Tensors& grads) {
        Tensors tensors = context->get_saved_variables(), gradients(kTensors + 2);  // two: none for groups and eps
        const Tensor group_data = tensors.back();
        tensors.pop_back();
        // With is_grads_batched=True a tensor stands for several gradients: our operators have no rule for that.
        const c10::DispatchKeySet batched({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched});
        if (at::GradMode::is_enabled() || grads[0].key_set().has_any(batched)) {
            backward_by_pytorch(context, grads[0], tensors, gradients);
            return gradients;
        }
        static const auto backward = operator_of<decltype(backward_meta)>("NAMESPACE::backward");
        const at::AutoDispatchBelowADInplaceOrView no_autograd;
        const bool wants_grad_x = context->needs_input_grad(kX);
        auto [grad_x, grad_parameters] = backward.call(grads[0], tensors, group_data, wants_grad_x);
        if (wants_grad_x) gradients[kX] = grad_x;
        grad_parameters = grad_parameters.to(grads[0].scalar_type());
        c10::SymInt first = 0;
        for (int i = kWeight; i < kTensors; ++i) {
            const c10::SymInt values = tensors[i].sym_numel();
            const Tensor gradient = grad_parameters.narrow_symint(0, first, values).view_symint(tensors[i].sym_sizes());
            if (context->needs_input_grad(i)) gradients[i] = i == kBias ? gradient.clone() : gradient;
            if (i != kConvBias) first += values;  // both biases have the same gradient
        }
        return gradients;
    }
    // By the derivatives of the Model's lines, which PyTorch can differentiate again if gradients are enabled. They are
    // taken with respect to views of the tensors. If one tensor B was computed from another, A, then A's gradient must
    // omit the path through B: autograd adds that later.
    static void backward_by_pytorch(Context* context, const Tensor& grad, Tensors& tensors, Tensors& gradients) {
        const bool create_graph = at::GradMode::is_enabled();
        const at::AutoGradMode enable_grad(true);
        Tensors wanted;
        for (int i = 0; i < kTensors; ++i) {
            tensors[i] = tensors[i].view_symint(tensors[i].sym_sizes());
            if (context->needs_input_grad(i)) wanted.push_back(tensors[i]);
        }
        const Tensor out = plain(tensors, context->saved_data["groups"].toInt(), context->saved_data["eps"].toDouble());
        const Tensors computed = torch::autograd::grad({out}, wanted, {grad}, std::nullopt, create_graph);
        int next = 0;
        for (int i = 0; i < kTensors; ++i) {
            if (context->needs_input_grad(i)) gradients[i] = computed[next++];
        }
    }
};

// The operator that ModelNew calls: by our kernels, with or without gradients, or by the plain path.
Tensor network(const Tensor& x, const Tensor& weight, const Tensor& conv_bias, const Tensor& bias, const Tensor& scale,
    const Tensor& gamma, const Tensor& beta, int64_t groups, double eps) {
    std::array<Tensor, kTensors> t = {x, weight, conv_bias, bias, scale, gamma, beta};
    bool needs_grad = false;
    for (const Tensor& tensor : t) needs_grad |= tensor.requires_grad();
    needs_grad &= at::GradMode::is_enabled();
    // A program that is exported for images of any size decides when it runs, in forward_cuda.
    const bool any_size = x.sym_size(2).is_symbolic() || x.sym_size(3).is_symbolic();
    if (!can_take(t, groups)) return plain(t, groups, eps);
    if ((needs_grad || !any_size) && !fits(x, needs_grad)) return plain(t, groups, eps);
    if (at::autocast::is_autocast_enabled(at::kCUDA)) {  // the Model then returns float32, so the kernels do
        for (Tensor& tensor : t) tensor = tensor.to(at::kFloat);
    }
    if (!needs_grad) return std::get<0>(call_forward(t, groups, eps));
    return ConvSigmoidGroupNorm::apply(t[0], t[1], t[2], t[3], t[4], t[5], t[6], groups, eps);
}

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("network(Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, Tensor scale, Tensor gamma, Tensor beta, "
          "int groups, float eps) -> Tensor",
        network);
    m.def("forward(Tensor[] tensors, int groups, float eps) -> (Tensor, Tensor)");
    m.def("backward(Tensor grad, Tensor[] tensors, Tensor group_data, bool wants_grad_x) -> (Tensor, Tensor)");
    m.impl("forward", torch::dispatch(c10::DispatchKey::Meta, forward_meta));
    m.impl("backward", torch::dispatch(c10::DispatchKey::Meta, backward_meta));
    m.impl("forward", torch::dispatch(c10::DispatchKey::CUDA, forward_cuda));
    m.impl("backward", torch::dispatch(c10::DispatchKey::CUDA, backward_cuda));
    // Only `network` has gradients: backward through one of these, called directly, raises an error.
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


NEEDS = "sm_90"  # the fast path's GPU; without one, nothing is built
_GPUS = range(torch.cuda.device_count() if torch.version.cuda else 0)
_HOPPERS = [gpu for gpu in _GPUS if torch.cuda.get_device_capability(gpu)[0] == 9]  # only these have wgmma
if _HOPPERS:  # the import takes 0.1 s, so only where something is built
    from torch.utils import cpp_extension
NAMESPACE = _load("conv_sigmoid_group_norm_hopper", "90a") if _HOPPERS else ""
_OPERATORS = getattr(torch.ops, NAMESPACE) if NAMESPACE else None


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


def _activate(h: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    h = h + bias  # line by line, as the Model: so each old h is freed when the next is there
    h = h * scale
    return torch.sigmoid(h)


def _read(module: nn.Module, name: str) -> torch.Tensor:
    """The attribute of that name. nn.Module's own look-up takes the host about a microsecond more."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


_TYPES = (nn.Parameter, torch.Tensor, FakeTensor)  # FakeTensor: torch.export, not strict, runs a module with it


def _tensors_fit(tensors: tuple) -> bool:
    """Whether x is of a GPU, 4D, not many tiny images; no tensor of a subclass, in a transform or such an export."""
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return False
    for t in tensors:  # a loop, as all() takes the host a microsecond more
        if type(t) not in _TYPES:
            return False
    x = tensors[0]
    if not x.is_cuda or x.dim() != 4 or _exports_layers():
        return False
    # A group of a sample has 272 bytes of group data: for images of few pixels that may be more than its output.
    few_pixels = not torch.compiler.is_compiling() and x.shape[2] * x.shape[3] < 64 and x.shape[0] >= 2**17
    return not few_pixels


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (N, in_channels, H, W), any floating dtype and layout; the output's layout and errors are the Model's.
    """

    def __init__(self, in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting():
            return self._run(x)
        return self.group_norm(_activate(self.conv(x), self.bias, self.scale))  # for torch.jit.script

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        modules = self._modules
        conv, norm = modules.get("conv"), modules.get("group_norm")  # as `_read` does
        if NAMESPACE and self._layers_fit(conv, norm):
            conv_parameters = (_read(conv, "weight"), _read(conv, "bias"))
            norm_parameters = (_read(norm, "weight"), _read(norm, "bias"))
            tensors = (x, *conv_parameters, _read(self, "bias"), _read(self, "scale"), *norm_parameters)
            if _tensors_fit(tensors):
                return _OPERATORS.network.default(*tensors, norm.num_groups, norm.eps)
        return self.group_norm(_activate(self.conv(x), self.bias, self.scale))

    def _layers_fit(self, conv: nn.Module, norm: nn.Module) -> bool:
        """Whether the layers are as constructed, without hooks, and eps is large enough.

        Each of up to 144 bands rounds its sums by up to 2^-47 of the largest possible total (`add_to_total`). So the
        means of s and s^2 may be off by 144 * 2^-47 = 1.02e-12, and the variance, with the mean squared, by 3.1e-12. If
        eps is 1e-6 and a group's values are equal, rstd is then off by 1.5e-6 of itself.
        """
        if not _is_unchanged(conv, nn.Conv2d) or not _is_unchanged(norm, nn.GroupNorm) or norm.eps < 1e-6:
            return False
        return (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), (0, 0), (1, 1), 1)
