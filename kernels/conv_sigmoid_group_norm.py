"""A convolution, a bias, a scale, a sigmoid and group normalisation in one kernel: a drop-in for the Model of the same name.

    h = conv2d(x, W) + b;    v = sigmoid((h + bias) * scale);    out = (v - mean) * rstd * gamma + beta

`mean` and `rstd` are those of a slice, the pixels of the channels of one group of one sample: rstd = 1 / sqrt(M2 / n + eps),
M2 = sum((v - mean)^2). Every v is used twice. Where no gradient is needed, on sm_80 and later, one kernel does it all for many plain 3x3
and 1x1 convolutions to up to 128 channels: an implicit GEMM on the tensor cores with float32's accuracy, whose v waits in shared memory
until the statistics are there. Hopper has its own, of wgmma, with 32 output channels a block: 3x3 kernels from up to 24 channels (32 in
16-bit types, both of which are fp16 there), 1x1 ones from up to 48 where height or width is even; 3x3 ones whose v does not fit take two
launches, which make it twice. From more channels, up to 64, the products are the work there: one kernel makes v, from x in the form that
wgmma wants, and leaves it in the output, where another one normalises it. Below and above, and where a row is too wide, mma.sync with
eight output channels a block takes units
of some 25 MB: 3x3 kernels from up to 8 channels (of 16-bit types where width is a multiple of 4; float32 then up to 24), and 1x1 ones of
float32 (up to 64, the same widths).
Everywhere else self.conv is ATen's, all that follows it is one operator, and where v waits depends on the slice:

    slice                     v waits in                          traffic
    up to 8192 values         registers of 1 to 256 threads       h read once, out written once
    any                       nowhere                             h read twice, out written once

(4096 values in float64; 2048 where they do not come in whole packs of 16 bytes.)

Arithmetic is in float32 (float64 for float64). Statistics never are E[v^2] - E[v]^2, unless in float64, as between Hopper's blocks; the
mean is carried as an unevaluated sum hi + lo. Sums have a fixed order: the same input, the same bits. Bias and scale may have any shape
that broadcasts: one value a channel is the fast way, anything else is read with one value for each of h's. On the CPU each core takes
whole slices, in blocks that stay in its first cache.

Gradients: of plain 3x3 convolutions of float32 from up to 8 channels, what is recorded is h, which is stored once while the moments of v
are taken, and read once for the norm. The gradients, for up to 32 channels, read h and the output's gradient twice: for their joint
moments, and to make h's gradient, which waits in shared memory alone until it has gone into x's and the weights'. Elsewhere there are two
steps: for all that follows the convolution one, which computes v anew, and reads h and the output's gradient twice, or once where
channels have one pixel; and for the convolution one, plain 3x3 and 1x1 ones of float32 up to 64 channels to 128, implicit GEMMs as well,
or ATen's. All these products are made on the tensor cores of TF32 halves, with float32's accuracy and range. Second derivatives, and a
bias or scale of h's shape, in ATen operators.
"""

import contextlib
import fcntl
import hashlib
import math
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
#include <math.h>
#include <stdint.h>
#include <type_traits>

// --- shared: values (home: kernels/instance_norm.py) ---
// 16 bytes a thread and access; arithmetic in Acc<T>.

template <typename T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <typename T> using Acc = typename AccOf<T>::type;

template <typename T> constexpr int kPack = 16 / sizeof(T);
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T value[V]; };

__device__ __forceinline__ float to_acc(float v) { return v; }
__device__ __forceinline__ double to_acc(double v) { return v; }
__device__ __forceinline__ float to_acc(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void from_acc(float a, float& v) { v = a; }
__device__ __forceinline__ void from_acc(double a, double& v) { v = a; }
__device__ __forceinline__ void from_acc(float a, __half& v) { v = __float2half_rn(a); }
__device__ __forceinline__ void from_acc(float a, __nv_bfloat16& v) { v = __float2bfloat16_rn(a); }

// Makes the compiler forget that it has converted this pack before, so that packs wait in registers as they came, not widened.
template <typename T, int V> __device__ __forceinline__ void keep_packed(Pack<T, V>& pack) {
    if constexpr (V * sizeof(T) == 16 && sizeof(T) < 4) {
        int4& words = *reinterpret_cast<int4*>(&pack);
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
}
// --- end shared: values ---

// --- shared: streaming accesses (home: kernels/linear_instance_norm_residual.py) ---
// Streaming accesses: evicted first, since nothing here is used again from L2 on purpose.
template <typename T, int V> __device__ __forceinline__ Pack<T, V> load_streaming(const T* p) {
    Pack<T, V> pack;
    if constexpr (V * sizeof(T) == 16) {
        *reinterpret_cast<int4*>(&pack) = __ldcs(reinterpret_cast<const int4*>(p));
    } else {
        pack = *reinterpret_cast<const Pack<T, V>*>(p);
    }
    return pack;
}
template <typename T, int V> __device__ __forceinline__ void store_streaming(T* p, const Pack<T, V>& pack) {
    if constexpr (V * sizeof(T) == 16) {
        __stcs(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(&pack));
    } else {
        *reinterpret_cast<Pack<T, V>*>(p) = pack;
    }
}
// --- end shared: streaming accesses ---

// --- shared: moments (home: kernels/instance_norm.py) ---
// 1 / v of a count, to an ulp, without the call (and its spills) that IEEE division makes.
__device__ __forceinline__ float reciprocal(float v) {
    const float r = __fdividef(1.0f, v);
    return fmaf(r, fmaf(-v, r, 1.0f), r);
}
__device__ __forceinline__ double reciprocal(double v) {
    double r;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(v));  // 20 bits, doubled by each Newton step
    r = fma(r, fma(-v, r, 1.0), r);
    return fma(r, fma(-v, r, 1.0), r);
}
__device__ __forceinline__ float reciprocal_sqrt(float v) {
    const float r = rsqrtf(v);  // to two ulps; the Newton step halves them, and is left out where it would make 0 * inf
    return v > 0.0f && v < INFINITY ? fmaf(0.5f * r, fmaf(-v * r, r, 1.0f), r) : r;
}
__device__ __forceinline__ double reciprocal_sqrt(double v) { return 1.0 / sqrt(v); }

// Moments of a set of values: how many, their mean as hi + lo, and M2, the sum of squared deviations from it.

template <typename A> struct alignas(4 * sizeof(A)) Moments {
    A count = 0, hi = 0, lo = 0, m2 = 0;
};

template <typename A> __device__ __forceinline__ Moments<A> merge(const Moments<A>& a, const Moments<A>& b) {
    if (b.count == A(0)) return a;
    if (a.count == A(0)) return b;
    Moments<A> r;
    const A delta = (b.hi - a.hi) + (b.lo - a.lo);
    const A weight = b.count * reciprocal(a.count + b.count);
    const A shift = a.lo + delta * weight;
    r.count = a.count + b.count;
    r.hi = a.hi + shift;
    r.lo = shift - (r.hi - a.hi);
    r.m2 = a.m2 + b.m2 + delta * delta * (a.count * weight);
    return r;
}

// Of a single value.
template <typename A> __device__ __forceinline__ Moments<A> moments_of(A value) {
    Moments<A> r;
    r.count = 1;
    r.hi = value;
    return r;
}
// --- end shared: moments ---

// --- shared: running moments (home: kernels/linear_instance_norm_residual.py) ---
template <typename A> __device__ __forceinline__ Moments<A> merge_across_warp(Moments<A> m) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        Moments<A> other;
        other.count = __shfl_down_sync(~0u, m.count, offset);
        other.hi = __shfl_down_sync(~0u, m.hi, offset);
        other.lo = __shfl_down_sync(~0u, m.lo, offset);
        other.m2 = __shfl_down_sync(~0u, m.m2, offset);
        m = merge(m, other);
    }
    return m;  // complete in lane 0
}

template <typename A> __device__ __forceinline__ Moments<A> in_all_lanes(Moments<A> m) {  // what lane 0 has
    m.count = __shfl_sync(~0u, m.count, 0);
    m.hi = __shfl_sync(~0u, m.hi, 0);
    m.lo = __shfl_sync(~0u, m.lo, 0);
    m.m2 = __shfl_sync(~0u, m.m2, 0);
    return m;
}

// One thread's running moments around its own first value: an anchor close to the mean keeps the deviations small, and one that is an
// outlier spoils this thread's share alone.
template <typename A> struct Accumulator {
    A anchor = 0, packs = 0, mean = 0, m2 = 0;  // mean and m2 are of value - anchor

    template <typename T, int V> __device__ __forceinline__ void add(const Pack<T, V>& pack) {
        if (packs == A(0)) anchor = to_acc(pack.value[0]);
        A pack_mean = 0, square = 0;
#pragma unroll
        for (int i = 0; i < V; ++i) pack_mean += (to_acc(pack.value[i]) - anchor) * (A(1) / V);  // not their sum: it might overflow
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const A deviation = (to_acc(pack.value[i]) - anchor) - pack_mean;
            square += deviation * deviation;
        }
        const A delta = pack_mean - mean, weight = reciprocal(packs + A(1));
        mean += delta * weight;
        m2 += square + delta * (delta * (packs * weight * V));  // at first delta * 0: its square may be infinite
        packs += A(1);
    }
    template <int V> __device__ __forceinline__ Moments<A> moments() const {
        Moments<A> r;
        r.count = packs * V;
        r.hi = anchor + mean;
        r.lo = mean - (r.hi - anchor);
        r.m2 = m2;
        return r;
    }
};

// Of `parts` neighbours in memory; every warp takes them all.
template <typename M> __device__ __forceinline__ M merge_parts(const M* __restrict__ first, int parts) {
    M m;
    for (int p = threadIdx.x % 32; p < parts; p += 32) m = merge(m, first[p]);
    return in_all_lanes(merge_across_warp(m));
}
// --- end shared: running moments ---

// --- shared: sigmoid (home: kernels/linear_swish_group_norm.py) ---
// 1 / (1 + exp(-v)) to two or three ulps; 0 and 1 at the infinities.
__device__ __forceinline__ float sigmoid(float v) {
    const float t = v * -1.44269502f;  // exp(-v) = 2^t, and what the rounding of t left over is put back to first order
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    const float rest = fmaf(v, -1.92596299e-8f, fmaf(v, -1.44269502f, -t));
    if (fabsf(t) < 126.0f) e = fmaf(e * 0.693147182f, rest, e);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}
__device__ __forceinline__ double sigmoid(double v) {
    const double e = exp(-fabs(v)), s = reciprocal(1.0 + e);  // both finite
    return v < 0.0 ? e * s : s;
}
// --- end shared: sigmoid ---

// What a value of h becomes before the norm.
constexpr int kOperands = 2;  // the bias, the scale
template <typename A> __device__ __forceinline__ A activate(A h, const A (&operand)[kOperands]) {
    return sigmoid((h + operand[0]) * operand[1]);
}

// --- shared: channels (home: kernels/linear_swish_group_norm.py) ---
// A slice is one group of one sample: the `spatial` pixels of each of its channels, contiguous.
struct Sizes {
    int64_t slices, n, spatial;  // n values a slice
    int groups, channels;        // slices a sample, channels a slice
};

// What the values are combined with, in Acc<T>, contiguous and 16-byte aligned: one value a channel, or with full[i] one for each of h's.
template <typename A> struct Vectors {
    const A *operand[kOperands], *gamma, *beta;
    bool full[kOperands];
};

// a / b, without the call (and its spills) that 64-bit division makes; exact below 2^50.
__device__ __forceinline__ int quotient(int a, int b) { return int(uint32_t(a) / uint32_t(b)); }
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    const int64_t q = int64_t(double(a) * reciprocal(double(b))), rest = a - q * b;
    return rest < 0 ? q - 1 : rest >= b ? q + 1 : q;
}

__device__ __forceinline__ int first_channel(int64_t slice, const Sizes& sizes) {
    return int(slice - quotient(slice, int64_t(sizes.groups)) * sizes.groups) * sizes.channels;
}

// Where a value is: its channel, and its pixel there. As a difference of two places, a step.
template <typename I> struct Place {
    int channel;
    I pixel;
    __device__ __forceinline__ Place(int first, I value, I spatial) {
        const I channels = spatial == 1 ? value : quotient(value, spatial);
        channel = first + int(channels);
        pixel = value - channels * spatial;
    }
    __device__ __forceinline__ void advance(const Place& step, I spatial) {
        channel += step.channel;
        pixel += step.pixel;
        if (pixel >= spatial) pixel -= spatial, ++channel;
    }
};

template <int V, typename A> __device__ __forceinline__ void load_aligned(const A* from, A (&to)[V]) {
    constexpr int kPiece = V < kPack<A> ? V : kPack<A>;
#pragma unroll
    for (int i = 0; i < V; i += kPiece) {
        if constexpr (kPiece == 1) {
            to[i] = __ldg(from + i);
        } else {
            const int4 piece = __ldg(reinterpret_cast<const int4*>(from + i));
#pragma unroll
            for (int j = 0; j < kPiece; ++j) to[i + j] = reinterpret_cast<const A*>(&piece)[j];
        }
    }
}

// The channel vector's values for V values of h from `place` on.
template <int V, typename A, typename I> __device__ __forceinline__ void gather(const A* vector, Place<I> place, I spatial, A (&to)[V]) {
    if (V == 1 || place.pixel + V <= spatial) {
        const A value = __ldg(vector + place.channel);
#pragma unroll
        for (int j = 0; j < V; ++j) to[j] = value;
    } else if (spatial == 1 && place.channel % V == 0) {
        load_aligned<V>(vector + place.channel, to);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            to[j] = __ldg(vector + place.channel);
            if (++place.pixel == spatial) place.pixel = 0, ++place.channel;
        }
    }
}

// The values before the norm, of the pack of h at `at`. FULL: an operand may be.
template <bool FULL, typename T, int V, typename I>
__device__ __forceinline__ Pack<Acc<T>, V> activated(
    const Pack<T, V>& pack, const Vectors<Acc<T>>& vectors, int64_t at, const Place<I>& place, I spatial) {
    using A = Acc<T>;
    A operand[kOperands][V];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
        if (FULL && vectors.full[k]) load_aligned<V>(vectors.operand[k] + at, operand[k]);
        else gather<V>(vectors.operand[k], place, spatial, operand[k]);
    }
    Pack<A, V> v;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        A own[kOperands];
#pragma unroll
        for (int k = 0; k < kOperands; ++k) own[k] = operand[k][j];
        v.value[j] = activate(to_acc(pack.value[j]), own);
    }
    return v;
}

// (v - mean) * rstd * gamma + beta
template <typename A> struct Scale {
    A hi = 0, lo = 0, rstd = 0;
    __device__ __forceinline__ Scale() {}
    __device__ __forceinline__ Scale(const Moments<A>& m, A n, A eps) : hi(m.hi), lo(m.lo) {
        const A variance = m.m2 * reciprocal(n);
        if constexpr (sizeof(A) == 8) rstd = rsqrt(variance + eps);
        else rstd = reciprocal_sqrt(variance + eps);
    }
    // An infinite gamma decides between infinity and NaN, and PyTorch has two ways: one for channels of one pixel, one for images.
    __device__ __forceinline__ A operator()(A v, A gamma, A beta, bool image) const {
        const A a = gamma * rstd;
        if (image && !isfinite(a)) return a * v + (beta - a * hi);
        // Too small for a to have all its bits, or too large: one factor after the other.
        if (!(fabs(a) >= A(1.2e-38) && isfinite(a))) return ((v - hi) - lo) * rstd * gamma + beta;
        return ((v - hi) - lo) * a + beta;
    }
    template <typename T, int V, typename I>
    __device__ __forceinline__ Pack<T, V> operator()(
        const Pack<A, V>& v, const Vectors<A>& vectors, const Place<I>& place, I spatial) const {
        A gamma[V], beta[V];
        gather<V>(vectors.gamma, place, spatial, gamma);
        gather<V>(vectors.beta, place, spatial, beta);
        Pack<T, V> out;
#pragma unroll
        for (int j = 0; j < V; ++j) from_acc((*this)(v.value[j], gamma[j], beta[j], spatial > 1), out.value[j]);
        return out;
    }
};
// --- end shared: channels ---

// --- shared: group norm in registers (home: kernels/linear_swish_group_norm.py) ---
// ---------------------------------------------------------------------------------------------------------------------------------
// Up to kMostInRegisters values: the slice waits in registers.
// `group` threads (a power of two) own a slice, each ITEMS packs of it, and the same packs of the slices `stride`, 2 * `stride`, ...
// further on, ROWS in all: `stride` is a multiple of the groups, so the channels are the same. A group is part of a warp, or whole warps
// of a block.

constexpr int kMaxGroup = 256;  // threads of a block, whole groups of it
template <typename T, int V> constexpr int kThreadPacks = V == 1 ? 8 : 128 / (V * sizeof(Acc<T>));  // of a long slice
template <typename T, int V> constexpr int kShortPacks = kThreadPacks<T, V> / 4;                     // of a short one
template <typename T> constexpr int kRows = sizeof(T) == 2 ? 4 : 2;  // short slices of a thread: 64 bytes in flight
template <typename T, int V> constexpr int kMostInRegisters = kMaxGroup * kThreadPacks<T, V> * V;  // values of a slice

// The sums over `group` threads, of K values at a time.
template <int K, typename A> __device__ __forceinline__ void sum_across_group(A (&v)[K], int group, A (*warp_sums)[kMaxGroup / 32]) {
    for (int offset = min(group, 32) / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (int k = 0; k < K; ++k) v[k] += __shfl_xor_sync(~0u, v[k], offset);
    }
    if (group <= 32) return;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) warp_sums[k][threadIdx.x / 32] = v[k];
    }
    __syncthreads();
    const int first = threadIdx.x / group * (group / 32);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        v[k] = 0;
        for (int w = 0; w < group / 32; ++w) v[k] += warp_sums[k][first + w];
    }
}

template <typename T, int V, int ITEMS, int ROWS>
__global__ void __launch_bounds__(kMaxGroup, 1) normalize_in_registers(
    const T* __restrict__ h, T* __restrict__ out, Vectors<Acc<T>> vectors, Sizes sizes, int64_t stride, Acc<T> eps, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[2 * ROWS][kMaxGroup / 32];
    const int n = int(sizes.n), spatial = int(sizes.spatial);
    const int64_t first = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group, packs = first < stride ? n / V : 0;
    const auto mine = [&](int i) { return lane + i * group < packs; };
    const auto at = [&](int r, int i) { return (first + r * stride) * n + (lane + i * group) * V; };
    const auto row_exists = [&](int r) { return first + r * stride < sizes.slices; };

    Pack<T, V> raw[ROWS][ITEMS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            raw[r][i] = Pack<T, V>();
            if (mine(i) && row_exists(r)) raw[r][i] = load_streaming<T, V>(h + at(r, i));
        }
    }

    const Place<int> begin(first_channel(first, sizes), lane * V, spatial), step(0, group * V, spatial);
    const A share = reciprocal(A(n));  // multiplied in before the sum, so that large values do not overflow it
    Pack<A, V> v[ROWS][ITEMS];
    A hi[ROWS] = {}, rest[2 * ROWS] = {};
    Place<int> place = begin;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (mine(i)) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                v[r][i] = activated<ROWS == 1>(raw[r][i], vectors, at(r, i), place, spatial);
#pragma unroll
                for (int j = 0; j < V; ++j) hi[r] += v[r][i].value[j] * share;
            }
        }
        place.advance(step, spatial);
    }
    // Deviations from the rounded mean give M2 and what the rounding left over.
    sum_across_group(hi, group, warp_sums);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (mine(i)) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    const A deviation = v[r][i].value[j] - hi[r];
                    rest[r] += deviation;
                    rest[ROWS + r] += deviation * deviation;
                }
            }
        }
    }
    sum_across_group(rest, group, warp_sums);
    Scale<A> scale[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        Moments<A> m;
        m.hi = hi[r];
        m.m2 = rest[ROWS + r];
        const A lo = rest[r] * share;  // and what share's rounding took: of equal values nothing is to remain
        m.lo = isinf(m.m2) ? A(0) : fma(fma(-lo, A(n), rest[r]), share, lo);  // rstd is 0 then; inf * 0 must not make a NaN of it
        scale[r] = Scale<A>(m, A(n), eps);
    }
    place = begin;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (mine(i)) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (row_exists(r)) store_streaming(out + at(r, i), scale[r].template operator()<T>(v[r][i], vectors, place, spatial));
            }
        }
        place.advance(step, spatial);
    }
}
// --- end shared: group norm in registers ---

// --- shared: group norm in two reads (home: kernels/linear_swish_group_norm.py) ---
// ---------------------------------------------------------------------------------------------------------------------------------
// Any slice: it waits nowhere. Two kernels: block (part, slice) leaves the moments of its part in global memory, then merges those of its
// slice and normalises its part. With one part a slice the second kernel takes the moments itself.

constexpr int kStreamBlock = 512;
constexpr int kStreamBatch = 2;  // packs of a thread in flight

// A slice of n values that begins at value `begin` of a 16-byte aligned tensor: up to V - 1 loose values, whole packs, and up to V - 1
// loose values again.
template <int V> struct Span {
    int head, tail;
    int64_t packs;
    __device__ __forceinline__ Span(int64_t begin, int64_t n) {
        head = int(min(-begin & (V - 1), n));
        packs = (n - head) / V;
        tail = int(n - head - packs * V);
    }
    // The place in the slice of thread `tid`'s loose value, or -1: one each for the first threads.
    __device__ __forceinline__ int64_t loose(int tid) const {
        return tid < head ? tid : tid < head + tail ? packs * V + tid : -1;
    }
};

template <typename T> struct StreamPart {
    int64_t slice, begin, value, packs, loose;  // begin: of the slice, in the tensor; value: of the first pack, in the slice
    int channel;                                // of the slice's first value
    __device__ __forceinline__ StreamPart(const Sizes& sizes, int64_t part_packs, int parts) {
        slice = blockIdx.x / parts;
        begin = slice * sizes.n;
        const int64_t skipped = int64_t(blockIdx.x % parts) * part_packs;
        const Span<kPack<T>> span(begin, sizes.n);
        value = span.head + skipped * kPack<T>;
        packs = min(part_packs, span.packs - skipped);
        loose = skipped == 0 ? span.loose(threadIdx.x) : -1;
        channel = first_channel(slice, sizes);
    }
};

// use(v, value, place) for each of the thread's packs of activated values; `value` is the first one's place in the tensor.
template <typename T, typename F>
__device__ __forceinline__ void for_each_pack(
    const T* __restrict__ h, const Vectors<Acc<T>>& vectors, const Sizes& sizes, const StreamPart<T>& part, F&& use) {
    constexpr int V = kPack<T>;
    Place<int64_t> place(part.channel, part.value + int64_t(threadIdx.x) * V, sizes.spatial);
    const Place<int64_t> step(0, kStreamBlock * V, sizes.spatial);
    for (int64_t j = threadIdx.x; j < part.packs; j += kStreamBatch * kStreamBlock) {
        Pack<T, V> raw[kStreamBatch];
        const int64_t first = part.begin + part.value + j * V;
#pragma unroll
        for (int b = 0; b < kStreamBatch; ++b) {
            if (j + b * kStreamBlock < part.packs) raw[b] = *reinterpret_cast<const Pack<T, V>*>(h + first + b * kStreamBlock * V);
        }
#pragma unroll
        for (int b = 0; b < kStreamBatch; ++b) {
            if (j + b * kStreamBlock < part.packs) {
                const int64_t at = first + b * kStreamBlock * V;
                use(activated<true>(raw[b], vectors, at, place, sizes.spatial), at, place);
            }
            place.advance(step, sizes.spatial);
        }
    }
}

// The same for the thread's loose value, if it has one.
template <typename T, typename F>
__device__ __forceinline__ void for_loose_value(
    const T* __restrict__ h, const Vectors<Acc<T>>& vectors, const Sizes& sizes, const StreamPart<T>& part, F&& use) {
    if (part.loose < 0) return;
    const int64_t at = part.begin + part.loose;
    const Place<int64_t> place(part.channel, part.loose, sizes.spatial);
    Pack<T, 1> raw;
    raw.value[0] = h[at];
    use(activated<true>(raw, vectors, at, place, sizes.spatial), at, place);
}

template <typename T>
__device__ __forceinline__ Moments<Acc<T>> moments_of_block(
    const T* __restrict__ h, const Vectors<Acc<T>>& vectors, const Sizes& sizes, const StreamPart<T>& part) {
    using A = Acc<T>;
    __shared__ Moments<A> warp_moments[kStreamBlock / 32];
    Accumulator<A> accumulator;
    for_each_pack(h, vectors, sizes, part, [&](const Pack<A, kPack<T>>& v, int64_t, const auto&) { accumulator.add(v); });
    Moments<A> m = accumulator.template moments<kPack<T>>();
    for_loose_value(h, vectors, sizes, part, [&](const Pack<A, 1>& v, int64_t, const auto&) { m = merge(m, moments_of(v.value[0])); });
    m = merge_across_warp(m);
    if (threadIdx.x % 32 == 0) warp_moments[threadIdx.x / 32] = m;
    __syncthreads();
    m = warp_moments[0];
    for (int w = 1; w < kStreamBlock / 32; ++w) m = merge(m, warp_moments[w]);
    return m;
}

template <typename T>
__global__ void __launch_bounds__(kStreamBlock, 1) moments_of_parts(
    const T* __restrict__ h, Moments<Acc<T>>* __restrict__ moments, Vectors<Acc<T>> vectors, Sizes sizes, int64_t part_packs, int parts) {
    const Moments<Acc<T>> m = moments_of_block(h, vectors, sizes, StreamPart<T>(sizes, part_packs, parts));
    if (threadIdx.x == 0) moments[blockIdx.x] = m;
}

template <typename T>
__global__ void __launch_bounds__(kStreamBlock, 1) normalize_parts(
    const T* __restrict__ h, T* __restrict__ out, const Moments<Acc<T>>* __restrict__ moments, Vectors<Acc<T>> vectors, Sizes sizes,
    int64_t part_packs, int parts, Acc<T> eps) {
    using A = Acc<T>;
    const StreamPart<T> part(sizes, part_packs, parts);
    Moments<A> m;
    if (parts == 1) {
        m = moments_of_block(h, vectors, sizes, part);
    } else {
        m = merge_parts(moments + part.slice * parts, parts);
    }
    const Scale<A> scale(m, A(sizes.n), eps);
    for_each_pack(h, vectors, sizes, part, [&](const Pack<A, kPack<T>>& v, int64_t at, const auto& place) {
        store_streaming(out + at, scale.template operator()<T>(v, vectors, place, sizes.spatial));
    });
    for_loose_value(h, vectors, sizes, part, [&](const Pack<A, 1>& v, int64_t at, const auto& place) {
        store_streaming(out + at, scale.template operator()<T>(v, vectors, place, sizes.spatial));
    });
}
// --- end shared: group norm in two reads ---

// ---------------------------------------------------------------------------------------------------------------------------------
// The convolution and all that follows it, for images: an implicit GEMM on the tensor cores, v in shared memory until its statistics are known.
// A unit is whole groups of one sample, about eight channels. A team of blocks holds it, each block a band of rows, and the teams take the
// units in turn. For each unit a block computes its band's v, posts the band's moments to the team's mailbox, waits for those of the others
// there, and writes its band of the output: x is read from memory once (the teams of one sample run side by side and share it in L2), the
// output is written once.
//
// Float32 goes as two halves, v = hi + lo, in three products: hi * hi, hi * lo and lo * hi. x is scaled by a power of two that the weights
// alone decide, so that fp16's finest step is below what float32 shows of a sigmoid; an input that is too large for fp16 makes a NaN, and the
// block then computes its band again in plain float32.

constexpr int kConvWarps = 8, kConvBlock = 32 * kConvWarps;
constexpr int kSlots = 8;        // channels of a block: the N of an mma
constexpr int kTilePixels = 32;  // of a row, a warp: two mma tiles of 16
static_assert(kSlots * kConvWarps <= kConvBlock, "a thread for each warp's share of each channel");

struct ConvShape {
    int units, units_per_sample, unit_channels;  // the last unit of a sample may have fewer
    int slices, slice_channels;           // of a unit, where a group has more channels than a block has slots; channels of a block
    int bands, parts, teams, plane;       // bands of rows, and row parts of a band; floats of a held channel
    int in_channels, slabs, height, width;  // slabs: of eight input channels, half of an mma's K
    int out_channels, rows, columns, group_channels;
    float eps;
};

// Prepared for each slice of channels.
template <int SLOTS> struct SliceConstants {
    float slope[SLOTS], offset[SLOTS];  // -log2(e) * (h + bias) * scale = accumulator * slope + offset, less held_exponent below
    float input_scale;
};

template <typename T> constexpr bool kSplit = sizeof(T) == 4;
template <typename T, int KS> constexpr int kFragment = (KS == 3 ? 4 : 2) * (kSplit<T> ? 2 : 1);  // registers of weights, a kernel row

struct ConvOperands {
    const void* x;
    void* out;
    const void *weight, *conv_bias, *bias, *scale, *gamma, *beta;
    int type, parameter_type;  // dtypes' numbers, of x and out and of these six
    uint32_t* fragments;  // of each slice of a sample, slab, kernel row, lane
    void* constants;      // SliceConstants of each slice of a sample
    uint64_t* mailbox;    // of each parity of rounds, team, slot, number (hi, lo, M2), member
};

__device__ __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ float2 floats_of(uint32_t v) { return __half22float2(*reinterpret_cast<__half2*>(&v)); }
__device__ __forceinline__ uint32_t pair_of(__half a, __half b) { return bits_of(__halves2half2(a, b)); }
__device__ __forceinline__ uint32_t pair_of(__nv_bfloat16 a, __nv_bfloat16 b) {
    __nv_bfloat162 v = __halves2bfloat162(a, b);
    return *reinterpret_cast<uint32_t*>(&v);
}

__device__ __forceinline__ float value_at(const void* p, int64_t i, int type) {
    if (type == 0) return __ldg(static_cast<const float*>(p) + i);
    const unsigned short bits = __ldg(static_cast<const unsigned short*>(p) + i);
    return type == 2 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
}

// 16 pixels by 16 of K by 8 channels. A lane's a0 and a1 are of K's first half, for its two pixels, a2 and a3 of the second.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
#define MMA(type) \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<T, __nv_bfloat16>) MMA("bf16");
    else MMA("f16");
#undef MMA
#endif
}

// The first channel of slice q of a sample, and how many.
__device__ __forceinline__ int slice_first(const ConvShape& s, int q) {
    return q / s.slices * s.unit_channels + q % s.slices * s.slice_channels;
}
__device__ __forceinline__ int slice_count(const ConvShape& s, int q) {
    const int unit_end = min((q / s.slices + 1) * s.unit_channels, s.out_channels);
    return max(0, min(s.slice_channels, unit_end - slice_first(s, q)));
}

__device__ __forceinline__ void empty_mailbox(const ConvOperands& p, int64_t words) {
    for (int64_t i = int64_t(blockIdx.x) * kConvBlock + threadIdx.x; i < words; i += int64_t(gridDim.x) * kConvBlock) p.mailbox[i] = 0;
}

// By a block, for slice q, of SLOTS channels at most; `taps` of a kernel. to_fp16: x and the weights are converted, which takes scales.
// row_scale, shared, is what a channel's weights are multiplied by.
template <int SLOTS>
__device__ __forceinline__ void prepare_constants(
    const ConvOperands& p, const ConvShape& s, int taps, int q, bool to_fp16, int held_exponent, float (&row_scale)[SLOTS]) {
    const auto parameter = [&](const void* vector, int64_t i) { return value_at(vector, i, p.parameter_type); };
    static_assert(SLOTS <= 32, "a lane for each");
    __shared__ float largest[SLOTS], sums[SLOTS];
    const int first = slice_first(s, q), count = slice_count(s, q), k = s.in_channels * taps, lane = threadIdx.x % 32;
    float scale = 0, bias = 0;  // on their way beside the weights
    if (threadIdx.x < count) {
        scale = parameter(p.scale, first + lane), bias = parameter(p.conv_bias, first + lane) + parameter(p.bias, first + lane);
    }
    constexpr int kEach = (SLOTS + kConvWarps - 1) / kConvWarps, kAtOnce = 3;  // channels of a warp; weights of one that a lane asks for
    float most[kEach] = {}, sum[kEach] = {};
    const auto sweep = [&](auto weight) {
        for (int begin = lane; begin < k; begin += 32 * kAtOnce) {
            float w[kEach][kAtOnce];
#pragma unroll
            for (int i = 0; i < kEach * kAtOnce; ++i) {
                const int c = threadIdx.x / 32 + i / kAtOnce * kConvWarps, at = begin + i % kAtOnce * 32;
                w[i / kAtOnce][i % kAtOnce] = c < count && at < k ? fabsf(weight(int64_t(first + c) * k + at)) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kEach * kAtOnce; ++i) {
                const float one = w[i / kAtOnce][i % kAtOnce];
                most[i / kAtOnce] = fmaxf(most[i / kAtOnce], one), sum[i / kAtOnce] += one;
            }
        }
    };
    if (p.parameter_type == 0) sweep([&](int64_t i) { return value_at(p.weight, i, 0); });
    else sweep([&](int64_t i) { return parameter(p.weight, i); });
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], offset));
            sum[e] += __shfl_xor_sync(~0u, sum[e], offset);
        }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int c = threadIdx.x / 32 + e * kConvWarps;
        if (lane == 0 && c < count) largest[c] = most[e], sums[c] = sum[e];
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        // Of a pre-activation, for inputs in [-1, 1].
        float reach = lane < count ? fabsf(scale) * sums[lane] : 0.0f;
        const bool plain = __all_sync(~0u, reach <= 16384.0f);  // false for NaN too
        for (int offset = 16; offset > 0; offset /= 2) reach = fmaxf(reach, __shfl_xor_sync(~0u, reach, offset));
        int exponent = 0;
        frexpf(reach, &exponent);
        // fp16's finest step, 2^-25 when rounded, then is 2^-25 of a pre-activation at most. NaN: all blocks compute in float32.
        const float input_scale = !to_fp16 ? 1.0f : plain ? ldexpf(1.0f, max(-14, min(14, exponent))) : NAN;
        if (lane < SLOTS) {
            exponent = 0;
            if (lane < count) frexpf(largest[lane], &exponent);
            const float r = to_fp16 ? ldexpf(1.0f, min(60, 15 - exponent)) : 1.0f, factor = -1.44269504f * scale;
            row_scale[lane] = r;
            SliceConstants<SLOTS>& constants = static_cast<SliceConstants<SLOTS>*>(p.constants)[q];
            constants.slope[lane] = lane < count ? factor / (input_scale * r) : 0.0f;
            constants.offset[lane] = lane < count ? factor * bias - held_exponent : 0.0f;
            if (lane == 0) constants.input_scale = input_scale;
        }
    }
    __syncthreads();
}

// Block q prepares slice q's weights and constants; all blocks together empty the mailbox.
template <typename T, int KS>
__global__ void __launch_bounds__(kConvBlock) prepare_weights(ConvOperands p, ConvShape s, int64_t mail_words) {
    constexpr bool SPLIT = kSplit<T>;
    constexpr int F = kFragment<T, KS>;
    __shared__ float row_scale[kSlots];
    const int q = blockIdx.x, first = slice_first(s, q), count = slice_count(s, q);
    empty_mailbox(p, mail_words);
    prepare_constants<kSlots>(p, s, KS * KS, q, SPLIT, 0, row_scale);
    for (int i = threadIdx.x; i < s.slabs * KS * 32 * F; i += kConvBlock) {
        const int r = i % F, l = i / F % 32, ky = i / (F * 32) % KS, slab = i / (F * 32 * KS);
        // What register r holds of which tap. Two registers are the halves of an mma's K: of three taps the outer two as hi, then as lo; the
        // middle one, or the only one, as hi in both halves, for x's hi and lo, then as lo in both. Of 16-bit types there is no lo.
        enum { kHi, kLo, kNothing } piece;
        int kx;
        if (KS == 3) {
            if (SPLIT) kx = r < 4 ? r % 2 * 2 : 1, piece = r / 2 % 2 == 0 ? kHi : kLo;
            else kx = r < 2 ? r * 2 : 1, piece = r == 3 ? kNothing : kHi;
        } else {
            kx = 0, piece = SPLIT ? (r / 2 == 0 ? kHi : kLo) : (r == 0 ? kHi : kNothing);
        }
        const int c = l / 4;
        float pieces[2];
        for (int j = 0; j < 2; ++j) {
            const int in = slab * 8 + l % 4 * 2 + j;
            float w = 0;
            if (c < count && in < s.in_channels) {
                w = value_at(p.weight, ((int64_t(first + c) * s.in_channels + in) * KS + ky) * KS + kx, p.parameter_type) * row_scale[c];
            }
            if (piece == kLo) w -= __half2float(__float2half_rn(w));
            pieces[j] = piece == kNothing ? 0.0f : w;
        }
        uint32_t value;
        if constexpr (sizeof(T) == 2) {
            T a, b;
            from_acc(pieces[0], a), from_acc(pieces[1], b);
            value = pair_of(a, b);
        } else {
            value = bits_of(__floats2half2_rn(pieces[0], pieces[1]));
        }
        p.fragments[(int64_t(q) * s.slabs * KS * 32 * F) + i] = value;
    }
}

template <typename T, int V> __device__ __forceinline__ Pack<T, V> load_cached(const T* p) {
    Pack<T, V> pack;
    if constexpr (sizeof(pack) == 16) *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(p));
    else if constexpr (sizeof(pack) == 8) *reinterpret_cast<uint2*>(&pack) = __ldg(reinterpret_cast<const uint2*>(p));
    else *reinterpret_cast<uint32_t*>(&pack) = __ldg(reinterpret_cast<const uint32_t*>(p));
    return pack;
}

// A lane's pixels of a row, of two channels. What lies past the row's end is another pixel of the row: finite where the row is, and of
// no use to any output that exists.
template <typename T, int P, bool VEC> struct Pixels {
    T value[2][P];
    int second;  // where the pixels from the fifth on are
    int left;
    __device__ __forceinline__ void load(const T* p, int64_t other) {
#pragma unroll
        for (int c = 0; c < 2; ++c, p += other) {
            if constexpr (VEC) {
                const Pack<T, 4> four = load_cached<T, 4>(p);
#pragma unroll
                for (int i = 0; i < 4; ++i) value[c][i] = four.value[i];
                if constexpr (P > 4) {
                    const Pack<T, 2> two = load_cached<T, 2>(p + second);
#pragma unroll
                    for (int i = 4; i < P; ++i) value[c][i] = two.value[i - 4];
                }
            } else {
#pragma unroll
                for (int i = 0; i < P; ++i) value[c][i] = __ldg(p + min(i, left));
            }
        }
    }
};

template <int S = 0> __device__ __forceinline__ float sigmoid_from_exponent(float t) {  // 2^S / (1 + 2^(t + S))
    float e, v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(1.0f / (1 << S) + e));
    return v;
}

// Messages carry the number of their round, and so need neither a flag nor a fence; the mailbox begins with zeros.
__device__ __forceinline__ void post(uint64_t* to, float value, uint32_t round) {
    const uint64_t word = uint64_t(round) << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
// The three numbers of a peer, `stride` words apart; all are asked for at once, again and again until they are this round's.
__device__ __forceinline__ void await(const uint64_t* from, int stride, uint32_t round, float (&values)[3]) {
    uint64_t words[3];
    bool here;
    do {
        here = true;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(from + i * stride) : "memory");
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) here = here && uint32_t(words[i] >> 32) == round;
    } while (!here);
#pragma unroll
    for (int i = 0; i < 3; ++i) values[i] = __uint_as_float(uint32_t(words[i]));
}

__device__ __forceinline__ Moments<float> merge_with_lane(const Moments<float>& m, int mask) {
    Moments<float> other;
    other.count = __shfl_xor_sync(~0u, m.count, mask);
    other.hi = __shfl_xor_sync(~0u, m.hi, mask);
    other.lo = __shfl_xor_sync(~0u, m.lo, mask);
    other.m2 = __shfl_xor_sync(~0u, m.m2, mask);
    return (threadIdx.x & mask) == 0 ? merge(m, other) : merge(other, m);  // the same for both, to the bit
}

// Of `count` neighbouring lanes, a power of two; the same in all of them.
__device__ __forceinline__ Moments<float> merge_across_lanes(const Moments<float>& m, int count) {
    const auto sum = [&](float v) {
        for (int mask = 1; mask < count; mask *= 2) v += __shfl_xor_sync(~0u, v, mask);
        return v;
    };
    Moments<float> r;
    const float anchor = __shfl_sync(~0u, m.hi, threadIdx.x % 32 / count * count), delta = (m.hi - anchor) + m.lo;
    const bool any = m.count > 0.0f;
    r.count = sum(m.count);
    const float all = sum(any ? m.count * delta : 0.0f), mean = r.count > 0.0f ? all * reciprocal(r.count) : 0.0f;
    r.m2 = sum(any ? fmaf(m.count * (delta - mean), delta - mean, m.m2) : 0.0f);
    r.hi = anchor + mean;
    r.lo = mean - (r.hi - anchor);
    return r;
}

// One channel's band in plain float32, by one warp.
template <typename T, int KS>
__device__ __noinline__ Moments<float> convolve_plainly(
    const ConvOperands& p, const ConvShape& s, int64_t sample, int channel, int first_row, int rows, float* to) {
    const int lane = threadIdx.x % 32, n = rows * s.columns;
    const auto parameter = [&](const void* vector, int64_t i) { return value_at(vector, i, p.parameter_type); };
    const int64_t weight = int64_t(channel) * s.in_channels * (KS * KS);
    const T* x = static_cast<const T*>(p.x) + sample * s.in_channels * s.height * s.width;
    float sum = 0;
    for (int i = lane; i < n; i += 32) {
        const int row = first_row + i / s.columns, column = i % s.columns;
        float h = 0;
        for (int c = 0; c < s.in_channels; ++c) {
            for (int k = 0; k < KS * KS; ++k) {
                const float tap = parameter(p.weight, weight + c * (KS * KS) + k);
                h = fmaf(to_acc(x[(int64_t(c) * s.height + row + k / KS) * s.width + column + k % KS]), tap, h);
            }
        }
        to[i] = sigmoid(((h + parameter(p.conv_bias, channel)) + parameter(p.bias, channel)) * parameter(p.scale, channel));
        sum += to[i];
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    Moments<float> m;
    m.count = n;
    m.hi = sum / n;
    float rest = 0, square = 0;
    for (int i = lane; i < n; i += 32) {
        const float deviation = to[i] - m.hi;
        rest += deviation, square += deviation * deviation;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        rest += __shfl_xor_sync(~0u, rest, offset);
        square += __shfl_xor_sync(~0u, square, offset);
    }
    m.lo = rest / n;
    m.m2 = square;
    return m;
}

// Team of blocks (unit), block (slice of its channels, band of its rows), warp (32 columns of a part of the band, from the top down), lane
// (four neighbouring pixels, two of the eight channels). A row of x is read and split once, and goes into all KS output rows under way.
template <typename T, int KS, bool VEC, bool MULTI>
__global__ void __launch_bounds__(kConvBlock, 2)
convolve_and_normalize(const __grid_constant__ ConvOperands p, const __grid_constant__ ConvShape s) {
    constexpr bool SPLIT = kSplit<T>;
    constexpr int P = 4 + KS - 1, F = kFragment<T, KS>, V = kPack<T>;
    extern __shared__ __align__(16) float held[];
    __shared__ Moments<float> warp_moments[kConvWarps][kSlots], slot_moments[kSlots];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int members = s.slices * s.bands, team = blockIdx.x / members, member = blockIdx.x % members;
    const int slice = member / s.bands, band = member % s.bands;
    const auto band_begin = [&](int b) { return s.rows * b / s.bands; };
    const int first_row = band_begin(band), rows = band_begin(band + 1) - first_row;
    const int64_t image = int64_t(s.height) * s.width, out_image = int64_t(s.rows) * s.columns;
    const int tiles = (s.columns + kTilePixels - 1) / kTilePixels;
    T* const gout = static_cast<T*>(p.out);

    uint32_t round = 1;
    for (int unit = team; unit < s.units; unit += s.teams, ++round) {
        const int sample = quotient(unit, s.units_per_sample), q = (unit - sample * s.units_per_sample) * s.slices + slice;
        const int first = slice_first(s, q), channels = slice_count(s, q);
        const T* const gx = static_cast<const T*>(p.x) + int64_t(sample) * s.in_channels * image;
        const auto out_at = [&](int c) {
            int own_sample = sample;
            asm volatile("" : "+r"(own_sample));  // computed anew where it is used: registers
            return (int64_t(own_sample) * s.out_channels + first + c) * out_image + int64_t(first_row) * s.columns;
        };
        // A slot's band lies in shared memory as in the output, its packs aligned where the output's are.
        const auto held_begin = [&](int c) { return c * s.plane + int(out_at(c) & (V - 1)); };

        const SliceConstants<kSlots>& constants = static_cast<const SliceConstants<kSlots>*>(p.constants)[q];
        const float input_scale = SPLIT ? constants.input_scale : 1.0f;
        uint32_t b[KS][F];
        const auto load_fragments = [&](int slab) {
            const uint32_t* from = p.fragments + ((int64_t(q) * s.slabs + slab) * KS * 32 + lane) * F;
#pragma unroll
            for (int ky = 0; ky < KS; ++ky) load_aligned<F>(from + ky * 32 * F, b[ky]);
        };
        if (!MULTI) load_fragments(0);

        if (lane < kSlots) warp_moments[warp][lane] = Moments<float>();
        __syncwarp();
        for (int task = warp; task < tiles * s.parts; task += kConvWarps) {
            const int part = task / tiles, begin = rows * part / s.parts, n = rows * (part + 1) / s.parts - begin;
            const int x0 = (task % tiles) * kTilePixels + 4 * g, left = s.columns - x0;  // of this lane's first pixel
            const int lane_x = min(x0, VEC ? s.width - 4 : s.width - 1);
            const T* from = gx + int64_t(first_row + begin) * s.width + lane_x + (MULTI ? 0 : min(2 * t, s.in_channels - 1) * image);
            const int other = 2 * t + 1 < s.in_channels ? int(image) : 0;
            Pixels<T, P, VEC> pixels;
            pixels.left = s.width - 1 - lane_x;
            pixels.second = min(x0 + 4, s.width - 2) - lane_x;
            const auto load = [&](int i, int slab) {
                const int c = min(slab * 8 + 2 * t, s.in_channels - 1);  // a channel that does not exist has weights of 0
                if (MULTI) pixels.load(from + i * s.width + c * image, c + 1 < s.in_channels ? image : 0);
                else pixels.load(from + i * s.width, other);
            };
            load(0, 0);
            float acc[KS][2][4];
            float anchor[2] = {}, sum[2] = {}, square[2] = {};
            const int to[2] = {held_begin(2 * t) + begin * s.columns + x0, held_begin(2 * t + 1) + begin * s.columns + x0};
            const bool full = (task % tiles + 1) * kTilePixels <= s.columns;

            const auto emit = [&](int row, float (&tile)[2][4]) {
                int own = 2 * t;
                asm volatile("" : "+r"(own));  // read anew, from L1: registers
                const float slope[2] = {__ldg(constants.slope + own), __ldg(constants.slope + own + 1)};
                const float offset[2] = {__ldg(constants.offset + own), __ldg(constants.offset + own + 1)};
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float v[4] = {tile[0][c], tile[0][2 + c], tile[1][c], tile[1][2 + c]};
#pragma unroll
                    for (int i = 0; i < 4; ++i) v[i] = sigmoid_from_exponent(fmaf(v[i], slope[c], offset[c]));
                    if (row == 0) anchor[c] = v[0];
                    if (!full) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) v[i] = i < left ? v[i] : anchor[c];
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float deviation = v[i] - anchor[c];
                        sum[c] += deviation;
                        square[c] = fmaf(deviation, deviation, square[c]);
                    }
                    float* const at = held + to[c] + row * s.columns;
                    if (2 * t + c < channels) {
                        if constexpr (VEC && KS == 1) {
                            if (left > 0) *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
                        } else if constexpr (VEC) {
                            if (left > 0) *reinterpret_cast<float2*>(at) = make_float2(v[0], v[1]);
                            if (left > 2) *reinterpret_cast<float2*>(at + 2) = make_float2(v[2], v[3]);
                        } else {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                if (i < left) at[i] = v[i];
                            }
                        }
                    }
                }
            };

            // Input row i is row ky of output row i - ky's kernel; each output row has an accumulator while it is under way.
            for (int base = 0; base < n + KS - 1; base += KS) {
#pragma unroll
                for (int u = 0; u < KS; ++u) {
                    const int i = base + u;
                    if (i < n + KS - 1) {
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
#pragma unroll
                            for (int e = 0; e < 4; ++e) acc[u][m][e] = 0;
                        }
                        for (int slab = 0; slab < (MULTI ? s.slabs : 1); ++slab) {
                            uint32_t hi[P], lo[P];
#pragma unroll
                            for (int k = 0; k < P; ++k) {
                                if constexpr (sizeof(T) == 2) {
                                    lo[k] = hi[k] = pair_of(pixels.value[0][k], pixels.value[1][k]);
                                } else {
                                    const float v0 = pixels.value[0][k] * input_scale, v1 = pixels.value[1][k] * input_scale;
                                    lo[k] = hi[k] = bits_of(__floats2half2_rn(v0, v1));
                                    if (SPLIT) {
                                        const float2 f = floats_of(hi[k]);
                                        lo[k] = bits_of(__floats2half2_rn(v0 - f.x, v1 - f.y));
                                    }
                                }
                            }
                            if (MULTI) load_fragments(slab);
                            const bool last = !MULTI || slab == s.slabs - 1;
                            const auto load_next = [&] {
                                if (!last) load(i, slab + 1);
                                else load(min(i + 1, n + KS - 2), 0);
                            };
                            if (MULTI) load_next();
#pragma unroll
                            for (int ky = 0; ky < KS; ++ky) {
                                if (!MULTI && ky == KS / 2) load_next();
                                {
#pragma unroll
                                    for (int m = 0; m < 2; ++m) {
                                        float (&d)[4] = acc[(u - ky + KS) % KS][m];
                                        if constexpr (KS == 3) {
                                            const uint32_t *h = hi + 2 * m, *l = lo + 2 * m;
                                            if (SPLIT) {
                                                mma<T>(d, l[0], l[1], l[2], l[3], b[ky][0], b[ky][1]);
                                                mma<T>(d, h[0], h[1], h[2], h[3], b[ky][2], b[ky][3]);
                                                mma<T>(d, h[1], h[2], l[1], l[2], b[ky][6], b[ky][7]);
                                                mma<T>(d, h[1], h[2], l[1], l[2], b[ky][4], b[ky][5]);
                                            } else {
                                                mma<T>(d, h[1], h[2], l[1], l[2], b[ky][2], b[ky][3]);
                                            }
                                            mma<T>(d, h[0], h[1], h[2], h[3], b[ky][0], b[ky][1]);
                                        } else {
                                            if (SPLIT) mma<T>(d, hi[2 * m], hi[2 * m + 1], lo[2 * m], lo[2 * m + 1], b[ky][2], b[ky][3]);
                                            mma<T>(d, hi[2 * m], hi[2 * m + 1], lo[2 * m], lo[2 * m + 1], b[ky][0], b[ky][1]);
                                        }
                                    }
                                }
                            }
                        }
                        if (i >= KS - 1) emit(i - (KS - 1), acc[(u + 1) % KS]);
                    }
                }
            }
            const float values = float(n * max(0, min(4, left))), share = values > 0.0f ? reciprocal(values) : 0.0f;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float mean = sum[c] * share;
                Moments<float> m;
                m.count = values;
                m.hi = anchor[c] + mean;
                m.lo = mean - (m.hi - anchor[c]);
                m.m2 = fmaf(-sum[c], mean, square[c]);
                for (int mask = 4; mask < 32; mask *= 2) m = merge_with_lane(m, mask);
                if (g == 0) warp_moments[warp][2 * t + c] = merge(warp_moments[warp][2 * t + c], m);
            }
        }
        __syncthreads();
        // Thread (slot, warp's share): the block's moments of each slot.
        Moments<float> mine;
        const int slot = threadIdx.x / kConvWarps;
        if (threadIdx.x < kSlots * kConvWarps) {
            mine = warp_moments[threadIdx.x % kConvWarps][slot];
            for (int mask = 1; mask < kConvWarps; mask *= 2) mine = merge_with_lane(mine, mask);
        }
        // An input beyond fp16's reach has made a NaN: inf - inf, or 0 * inf. So has one that is NaN or infinite.
        const bool doubtful = slot < channels && !(fabsf(mine.m2) < INFINITY && fabsf(mine.hi) < INFINITY);
        if (__syncthreads_or(threadIdx.x < kSlots * kConvWarps && doubtful)) {
            for (int c = warp; c < channels; c += kConvWarps) {
                const Moments<float> m = convolve_plainly<T, KS>(p, s, sample, first + c, first_row, rows, held + held_begin(c));
                if (lane == 0) slot_moments[c] = m;
            }
            __syncthreads();
            if (threadIdx.x < kSlots * kConvWarps) mine = slot_moments[slot];
            __syncthreads();
        }
        uint64_t* const mail = p.mailbox + (int64_t(round & 1) * s.teams + team) * (kSlots * 3) * members;
        if (threadIdx.x < kSlots * kConvWarps && threadIdx.x % kConvWarps == 0) {
            post(mail + (slot * 3 + 0) * members + member, mine.hi, round);
            post(mail + (slot * 3 + 1) * members + member, mine.lo, round);
            post(mail + (slot * 3 + 2) * members + member, mine.m2, round);
        }
        for (int c = warp; c < kSlots; c += kConvWarps) {
            Moments<float> m;
            for (int peer = lane; peer < members; peer += 32) {
                const int peer_band = peer % s.bands;
                if (c < slice_count(s, q - slice + peer / s.bands)) {
                    Moments<float> other;
                    other.count = float((band_begin(peer_band + 1) - band_begin(peer_band)) * s.columns);
                    float values[3];
                    await(mail + c * 3 * members + peer, members, round, values);
                    other.hi = values[0], other.lo = values[1], other.m2 = values[2];
                    m = merge(m, other);
                }
            }
            __syncwarp();
            m = merge_across_warp(m);
            if (lane == 0) slot_moments[c] = m;
        }
        __syncthreads();
        for (int c = warp; c < channels; c += kConvWarps) {
            const int begin = s.group_channels <= kSlots ? c / s.group_channels * s.group_channels : 0;
            const int end = s.group_channels <= kSlots ? begin + s.group_channels : kSlots;
            Moments<float> m = slot_moments[begin];
            for (int k = begin + 1; k < end; ++k) m = merge(m, slot_moments[k]);
            const float rstd = reciprocal_sqrt(m.m2 * reciprocal(m.count) + s.eps);
            const float a = value_at(p.gamma, first + c, p.parameter_type) * rstd;
            const float offset = isfinite(a) ? fmaf(-m.lo, a, value_at(p.beta, first + c, p.parameter_type)) : NAN;
            const int64_t at = out_at(c);
            const int n = rows * s.columns;
            const Span<V> span(at, n);
            const float* const v = held + held_begin(c);
            const int loose = span.loose(lane);
            if (loose >= 0) {
                T value;
                from_acc(fmaf(v[loose] - m.hi, a, offset), value);
                gout[at + loose] = value;
            }
#pragma unroll 4
            for (int i = lane; i < int(span.packs); i += 32) {
                Pack<T, V> pack;
                const float* const four = v + span.head + i * V;
#pragma unroll
                for (int j = 0; j < V; j += 4) {
                    const float4 w = *reinterpret_cast<const float4*>(four + j);
                    from_acc(fmaf(w.x - m.hi, a, offset), pack.value[j]);
                    from_acc(fmaf(w.y - m.hi, a, offset), pack.value[j + 1]);
                    from_acc(fmaf(w.z - m.hi, a, offset), pack.value[j + 2]);
                    from_acc(fmaf(w.w - m.hi, a, offset), pack.value[j + 3]);
                }
                store_streaming(gout + at + span.head + i * V, pack);
            }
        }
        __syncthreads();
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The same on Hopper, for up to 32 channels a block. wgmma's A are the weights, in registers: of M's 64 rows a warp's first eight are eight
// channels' hi, its last eight the same channels' lo, so that a thread finds both sums of a value in its own registers. B is x in shared
// memory, as fp16, a pixel's eight input channels side by side, a plane of hi and one of lo. A tap is a place where reading begins, and two
// taps are K: nothing is gathered. A band's pixels are one string, row behind row; the sums that a row's last pixels begin are dropped.
//
// T is float, or __half for both 16-bit types: there is no lo then, bfloat16 is converted as float is, and v is held as fp16, times a power
// of two, since fp16 has bfloat16's precision but not its range.
//
// Warps share the work by kind, and up to kUnderWay units are in a block at a time. The producers bring x, a unit ahead. The consumers
// take tiles in turn, and turns at their products, so that one warpgroup's go beside the others' sigmoids. One warp adds the band's sums
// of each group to the unit's in the mailbox; one waits until those of all bands are in them, and makes the norm's constants; the writers
// write. v waits on shelves of eight channels, a consumer warp's share of a unit, which come free one by one. The mailbox adds integers:
// their order is nothing to the sum, and it counts its terms, so that who reads it needs neither a flag nor a fence.
//
// Where a unit does not fit into all blocks' shared memory, it takes two launches, which make v twice: phase 1 posts its sums; in phase 2
// they are there from the beginning, and the consumers write the output themselves. Nothing is held, no block waits for another.

#if CUDART_VERSION >= 12040
constexpr int kWideSlots = 32;   // channels of a block
// What a block is made of. Float has twice the products of 16 bits: three warpgroups take narrow tiles there, two take wide ones here.
template <typename T> struct Wide {
    static constexpr bool kFloat = sizeof(T) == 4;
    static constexpr int kTileN = kFloat ? 64 : 128;  // pixels, of a wgmma and of a task
    static constexpr int kConsumers = kFloat ? 3 : 2, kProducers = kFloat ? 2 : 1, kOthers = 2;  // warpgroups
    static constexpr int kWriters = 4 * kOthers - 2;  // warps; the other two post and gather
    static constexpr int kBlock = 128 * (kConsumers + kProducers + kOthers), kLaunched = 65536 / kBlock / 8 * 8;  // registers
    static constexpr int kConsumerRegisters = kFloat ? 88 : 136, kProducerRegisters = kFloat ? 72 : 96, kOtherRegisters = kFloat ? 48 : 56;
    static_assert(kProducerRegisters <= kLaunched && kConsumerRegisters * kConsumers + kProducerRegisters * kProducers +
        kOtherRegisters * kOthers <= kLaunched * (kBlock / 128), "the consumers take what the others give");
};
constexpr int kRun = 64;  // pixels of a tile that are finished in one go, where no row ends among them
constexpr int kUnderWay = 3, kMostStages = 2, kShelf = 8, kMostShelves = kUnderWay * kWideSlots / kShelf;

struct WideShape : ConvShape {
    int phase;               // 1 or 2, of two
    int stages, shelves, unit_shelves;  // of x; of v, in shared memory and of a unit
    int shelf_channels;
    int chunks;              // of K: of a slab each, of two for 1x1 kernels of 16 bits
    int band_rows;           // the last band may have fewer
    int pixels;              // most of a stage
    bool whole;              // bands and images are whole packs of 16 bytes
    int team_samples, team_parts;  // how far it is from a team's unit to its next one
    int groups, channel_share, line;  // of a unit, in a block; lanes of a group's channels; words between two of a Total
    uint32_t inverse_width;  // of 2^32
    // A task's first pixel is task * task_step + task / (a band's rows) * column_step: row by row, or, where x is handed over in halves
    // of its columns, a producer warpgroup's each, column by column. half_tasks: of the first half; next_half: the first that reads of
    // the second.
    int task_step, column_step, halved, half_tasks, next_half;
    uint32_t inverse_rows;   // of 2^32; 0 where tasks go row by row
    double step, inverse_step;  // of a sum in the mailbox; the first one also over the values of a group
    uint32_t taps[9];        // of each product, in a descriptor's form
};

// Of a channel's values that a warpgroup has made: one of them, the sum of what the others differ from it, and of its squares. Later on the
// norm takes its place: mean, factor, offset.
struct Deviations {
    float anchor, sum, square;
};

// A sum in the mailbox, in steps and in 2^-40 of them. Each word has the number of its terms on top, modulo 256; below that the first one
// has how many are NaN. A word has a line of L2 to itself where blocks share it: else their additions and questions would wait for each
// other.
struct Total {
    static constexpr int kCounted = 56, kDoubtful = 48, kPart = 40;
    static constexpr int kMostTerms = 1 << (kCounted - kPart);
    unsigned long long* words;
    int line;  // from one word to the next
    __device__ __forceinline__ void post(double sum, double inverse_step, bool doubtful) const {
        // Added to 2^52, a double's last bits are an integer's: faster than a conversion.
        constexpr double kInteger = 1ll << 52;
        const double all = (sum > 0 ? sum : 0) * inverse_step, whole = __dadd_rd(all, kInteger);
        const double part = (all - (whole - kInteger)) * double(1ll << kPart) + kInteger;
        const long long mask = (1ll << 52) - 1;
        add(words, doubtful ? 1ll << kDoubtful : __double_as_longlong(whole) & mask);
        add(words + line, doubtful ? 0 : __double_as_longlong(part) & mask);
    }
    // False while not all terms are there, and where more than 255 are NaN.
    __device__ __forceinline__ bool read(int terms, double& sum) const {
        const unsigned long long a = get(words), b = get(words + line);
        const double parts = double(b & (1ull << kCounted) - 1) / double(1ll << kPart);
        sum = a >> kDoubtful & 255 ? NAN : double(a & (1ull << kDoubtful) - 1) + parts;
        return complete(a, terms) && complete(b, terms);
    }
    static __device__ __forceinline__ bool complete(unsigned long long word, int terms) {
        return ((int(word >> kCounted) ^ terms) & 255) == 0;
    }
    static __device__ __forceinline__ void add(unsigned long long* to, long long value) {
        asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(value + (1ll << kCounted)) : "memory");
    }
    static __device__ __forceinline__ unsigned long long get(const unsigned long long* from) {
        unsigned long long word;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
        return word;
    }
};

// The channel of a slice whose weights are row r of A's hi. A plane of a slot is an odd number of fours, so that those of the rows that
// store at once are in different banks.
__device__ __forceinline__ int channel_of_row(int r) { return r / 8 * 8 + r % 4 * 2 + r / 4 % 2; }

template <int KS> constexpr int kSteps = KS == 3 ? 5 : 1;  // of K, two taps each, for one piece of x
template <typename T, int KS> constexpr int kProducts = kSplit<T> && KS == 3 ? 9 : kSteps<KS>;
template <typename T, int KS> constexpr int kChunkSlabs = kSplit<T> || KS == 3 ? 1 : 2;
template <typename T> constexpr int kHeldExponent = kSplit<T> ? 0 : 15;  // of the power of two times which v is held
template <typename T> using Fragment = std::conditional_t<kSplit<T>, uint4, uint2>;  // of A; without lo's rows, which then are zeros

// Each slice's weights, as A's fragments: of each chunk, step, thread; and constants. The blocks of a slice share the fragments. All blocks
// empty the mailbox.
template <typename T, int KS>
__global__ void __launch_bounds__(kConvBlock) prepare_wide_weights(ConvOperands p, ConvShape s, int64_t mail_words) {
    constexpr int kSlabs = kChunkSlabs<T, KS>;
    __shared__ float row_scale[kWideSlots];
    const int slices = s.units_per_sample * s.slices, share = blockIdx.x / slices, shares = gridDim.x / slices;
    const int q = blockIdx.x % slices, first = slice_first(s, q), count = slice_count(s, q);
    constexpr int kWords = sizeof(Fragment<T>) / 4;
    const int words = (s.slabs + kSlabs - 1) / kSlabs * kSteps<KS> * 128 * kWords;
    empty_mailbox(p, mail_words);
    if (share >= shares || share * kConvBlock >= words) return;
    prepare_constants<kWideSlots>(p, s, KS * KS, q, p.type != 2, kHeldExponent<T>, row_scale);
#pragma unroll 1
    for (int i = share * kConvBlock + threadIdx.x; i < words; i += shares * kConvBlock) {
        // Of a thread's four registers the odd ones are of the rows of lo; the last two are of K's second half.
        const int r = i % kWords * (4 / kWords), at_step = i / kWords, thread = at_step % 128;
        const int step = at_step / 128 % kSteps<KS>, chunk = at_step / (128 * kSteps<KS>);
        const int c = channel_of_row(thread / 4), slab = chunk * kSlabs + (kSlabs == 2 ? r / 2 : 0);
        // Of the last tap alone: the halves of K are x's hi and lo, or two slabs, or the second half is x.
        const bool odd_one = step == kSteps<KS> - 1;
        const int tap = odd_one ? KS * KS - 1 : 2 * step + r / 2;
        float pieces[2] = {};
        for (int j = 0; j < 2; ++j) {
            const int in = slab * 8 + thread % 4 * 2 + j;
            if (c >= count || in >= s.in_channels) continue;
            const int64_t at = (int64_t(first + c) * s.in_channels + in) * (KS * KS) + tap;
            const float w = value_at(p.weight, at, p.parameter_type) * row_scale[c];
            if (kSplit<T>) pieces[j] = r % 2 ? w - __half2float(__float2half_rn(w)) : w;
            else pieces[j] = KS == 3 && odd_one && r < 2 ? 0.0f : w;
        }
        p.fragments[int64_t(q) * words + i] = bits_of(__floats2half2_rn(pieces[0], pieces[1]));
    }
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int warps) {  // all threads of them arrive
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(32 * warps));
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n@done bra DONE;\nbra WAIT;\nDONE:\n}"
        ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Two warpgroups at a barrier: one goes on when the other one has been there.
__device__ __forceinline__ void bar_sync(int bar) { asm volatile("bar.sync %0, 256;" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void bar_arrive(int bar) { asm volatile("bar.arrive %0, 256;" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void prefetch(uintptr_t begin, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(bytes) : "memory");
}
// Of 16 bytes, without a branch around them, and in the order in which they are written.
template <typename P> __device__ __forceinline__ void store_if(bool condition, void* to, const P& pack) {
    static_assert(sizeof(P) == 16, "a whole pack");
    const uint4& w = *reinterpret_cast<const uint4*>(&pack);
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}"
        ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(int(condition)) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float a, float b, float c) {
    asm volatile("st.shared.f32 [%0], %1;\nst.shared.f32 [%0+4], %2;\nst.shared.f32 [%0+8], %3;"
        ::"r"(to), "f"(a), "f"(b), "f"(c) : "memory");
}
template <typename T> __device__ __forceinline__ void load_shared(uint32_t from, T& v) {
    if constexpr (sizeof(T) == 16) {
        uint4& w = *reinterpret_cast<uint4*>(&v);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(from) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(*reinterpret_cast<uint32_t*>(&v)) : "r"(from) : "memory");
    } else {
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(*reinterpret_cast<uint16_t*>(&v)) : "r"(from) : "memory");
    }
}
// Of one or two values.
template <typename P> __device__ __forceinline__ void store_shared_if(bool condition, uint32_t to, const P& pack) {
    const auto* const w = reinterpret_cast<const std::conditional_t<sizeof(P) == 2, uint16_t, uint32_t>*>(&pack);
#define STORE(type, values, ...) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p st.shared." type " [%0], " values ";\n}" \
        ::"r"(to), "r"(int(condition)), __VA_ARGS__ : "memory")
    if constexpr (sizeof(P) == 8) STORE("v2.b32", "{%2, %3}", "r"(w[0]), "r"(w[1]));
    else if constexpr (sizeof(P) == 4) STORE("b32", "%2", "r"(w[0]));
    else STORE("b16", "%2", "h"(w[0]));
#undef STORE
}
// Two values as they are held, or as a 16-bit type is written.
__device__ __forceinline__ void round_pair(float a, float b, float* to, bool) { to[0] = a, to[1] = b; }
__device__ __forceinline__ void round_pair(float a, float b, __half* to, bool bf16) {
    if (bf16) *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
    else *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
// Of B: eight pixels of 16 bytes are a block of 128, the next eight the next block. The low word, in units of 16 bytes: where the first
// tap's pixels begin, and how much further on K's second half is, the other tap's.
__host__ __device__ __forceinline__ uint32_t tap_pair(int first, int second) { return uint32_t(first) | uint32_t(second - first) << 16; }
__device__ __forceinline__ uint64_t pixel_descriptor(uint32_t low) { return uint64_t(128 >> 4) << 32 | low; }

// d = a * b + (keep ? d : 0), m64n64k16 or m64n128k16, a from registers.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
__device__ __forceinline__ void wgmma(float (&d)[32], const uint4& a, uint64_t b, bool keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        " {%32,%33,%34,%35}, %36, keep, 1, 1, 0;\n}"
        : D16(0), D16(16) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(keep)));
}
__device__ __forceinline__ void wgmma(float (&d)[64], const uint4& a, uint64_t b, bool keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
        " {%64,%65,%66,%67}, %68, keep, 1, 1, 0;\n}"
        : D16(0), D16(16), D16(32), D16(48) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(keep)));
}
// Both from shared memory.
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
        " %64, %65, keep, 1, 1, 0, 0;\n}"
        : D16(0), D16(16), D16(32), D16(48) : "l"(a), "l"(b), "r"(int(keep)));
}
#undef D16
#undef D4
template <int N> __device__ __forceinline__ void wgmma(float (&d)[N], const uint2& a, uint64_t b, bool keep) {
    wgmma(d, make_uint4(a.x, 0, a.y, 0), b, keep);
}

// All products are done; d's registers are the compiler's again.
template <int N> __device__ __forceinline__ void wgmma_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

// A pixel's channels in two halves, done here and not where they are stored. What is beyond fp16's reach becomes NaN, in both types.
__device__ __forceinline__ void split(const float (&x)[8], float scale, bool, uint4& hi, uint4& lo) {
    uint32_t h[4], l[4];
    const __half2 scales = __float2half2_rn(scale);  // a power of two, or NaN
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        h[k] = bits_of(__hmul2(__floats2half2_rn(x[2 * k], x[2 * k + 1]), scales));
        const float2 f = floats_of(h[k]);
        l[k] = bits_of(__floats2half2_rn(fmaf(x[2 * k], scale, -f.x), fmaf(x[2 * k + 1], scale, -f.y)));
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]), lo = make_uint4(l[0], l[1], l[2], l[3]);
}
__device__ __forceinline__ uint32_t to_fp16(uint32_t pair, float scale, bool bf16) {
    if (!bf16) return pair;
    const __half2 v = __floats2half2_rn(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
    return bits_of(__hfma2(v, __half2half2(__ushort_as_half(0)), v));  // infinities become NaN
}
__device__ __forceinline__ void split(const __half (&x)[8], float scale, bool bf16, uint4& hi, uint4&) {
    uint32_t h[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        h[k] = to_fp16(pair_of(x[2 * k], x[2 * k + 1]), scale, bf16);
        asm volatile("" : "+r"(h[k]));
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]);
}

// One value in plain float32.
template <int KS>
__device__ __forceinline__ float convolve_value(
    const ConvOperands& p, const ConvShape& s, int64_t sample, int channel, int row, int column) {
    const auto parameter = [&](const void* vector, int64_t i) { return value_at(vector, i, p.parameter_type); };
    const int64_t weight = int64_t(channel) * s.in_channels * (KS * KS), x = (sample * s.in_channels * s.height + row) * s.width + column;
    float h = 0;
#pragma unroll 1
    for (int k = 0; k < s.in_channels * (KS * KS); ++k) {
        const int c = k / (KS * KS), tap = k - c * (KS * KS);
        h = fmaf(value_at(p.x, x + (int64_t(c) * s.height + tap / KS) * s.width + tap % KS, p.type), parameter(p.weight, weight + k), h);
    }
    return sigmoid(((h + parameter(p.conv_bias, channel)) + parameter(p.bias, channel)) * parameter(p.scale, channel));
}

// What each role goes through, unit by unit.
struct Walk {
    int unit, sample, part;  // part: which of the sample's units
    int stage = 0, stage_phase = 0, place = 0, place_phase = 0, shelf = 0, shelf_phase = 0;
    __device__ __forceinline__ explicit Walk(const WideShape& s) : unit(blockIdx.z), sample(quotient(unit, s.units_per_sample)) {
        part = unit - sample * s.units_per_sample;
    }
    __device__ __forceinline__ void next(const WideShape& s) {
        unit += s.teams, sample += s.team_samples, part += s.team_parts;
        if (part >= s.units_per_sample) part -= s.units_per_sample, ++sample;
        if (++stage == s.stages) stage = 0, stage_phase ^= 1;
        if (++place == kUnderWay) place = 0, place_phase ^= 1;
        shelf += s.unit_shelves;
        if (shelf >= s.shelves) shelf -= s.shelves, shelf_phase ^= 1;
    }
    // The unit's k-th shelf, and its phase.
    __device__ __forceinline__ int shelf_of(int k, const WideShape& s) const {
        return shelf + k - (shelf + k >= s.shelves ? s.shelves : 0);
    }
    __device__ __forceinline__ int phase_of(int k, const WideShape& s) const { return shelf_phase ^ int(shelf + k >= s.shelves); }
};

// PAIRS: rows of even length, of x and of the output, so that two neighbouring values go together. PHASES: the two launches.
template <typename T, int KS, bool PAIRS, bool PHASES>
__global__ void __launch_bounds__(Wide<T>::kBlock, 1)
convolve_and_normalize_wide(const __grid_constant__ ConvOperands p, const __grid_constant__ WideShape s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr bool SPLIT = kSplit<T>;
    using W = Wide<T>;
    constexpr int V = kPack<T>, kTileN = W::kTileN, kConsumers = W::kConsumers, kProducers = W::kProducers, kWriters = W::kWriters;
    static_assert(kWriters <= kShelf, "each writer has channels of each shelf: it has read the norm before one comes free");
    constexpr double kUnit = 1.0 / (1 << kHeldExponent<T>);
    constexpr bool kHalves = SPLIT && KS == 3 && !PHASES;  // x may be handed over in halves
    const bool writes = PHASES && s.phase == 2;  // the consumers
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ Deviations made[kUnderWay][kConsumers][kWideSlots];
    __shared__ uint64_t bars[2 * kMostStages + (2 + kConsumers) * kUnderWay + kMostShelves];
    const uint32_t x_full = __shfl_sync(~0u, shared_address(bars), 0), x_empty = x_full + 8 * kMostStages,
                   v_full = x_empty + 8 * kMostStages, posted = v_full + 8 * kUnderWay * kConsumers,
                   norm_full = posted + 8 * kUnderWay, v_empty = norm_full + 8 * kUnderWay;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kMostStages; ++i) {
            mbarrier_init(x_full + 8 * i, kHalves && s.halved ? 4 : 4 * kProducers), mbarrier_init(x_empty + 8 * i, 4 * kConsumers);
        }
        for (int i = 0; i < kUnderWay; ++i) {
            for (int k = 0; k < kConsumers; ++k) mbarrier_init(v_full + 8 * (i * kConsumers + k), 4);
            mbarrier_init(posted + 8 * i, 1), mbarrier_init(norm_full + 8 * i, 1);
        }
        for (int i = 0; i < kMostShelves; ++i) mbarrier_init(v_empty + 8 * i, kShelf);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
    const int band = blockIdx.x, slice = blockIdx.y, members = s.slices * s.bands;
    const int first_row = band * s.band_rows, rows = min(s.band_rows, s.rows - first_row);
    const int tasks = (rows * s.width + kTileN - 1) / kTileN;
    const int64_t image = int64_t(s.height) * s.width, out_image = int64_t(s.rows) * s.columns;
    const int slab_bytes = s.pixels * 16, plane_bytes = s.slabs * slab_bytes, stage_bytes = (SPLIT ? 2 : 1) * plane_bytes;
    const uint32_t held = __shfl_sync(~0u, shared_address(stages) + s.stages * stage_bytes, 0);
    const bool bf16 = p.type == 3;

    const auto first_pixel = [&](int task) {
        return kHalves ? task * s.task_step + int(__umulhi(task, s.inverse_rows)) * s.column_step : task * kTileN;
    };
    const auto first_channel = [&](int part) { return part * s.unit_channels + slice * s.slice_channels; };
    const auto channel_count = [&](int part) {
        return max(0, min(s.slice_channels, min((part + 1) * s.unit_channels, s.out_channels) - first_channel(part)));
    };
    const auto out_begin = [&](int sample, int channel) {
        return (int64_t(sample) * s.out_channels + channel) * out_image + int64_t(first_row) * s.columns;
    };
    // Of v; the one of its square is two lines behind it. Worked out before what a warp waits for, not when time counts.
    const auto total_of = [&](int unit, int group) {
        auto* words = reinterpret_cast<unsigned long long*>(p.mailbox) + (int64_t(unit) * s.groups + group) * (4 * s.line);
        asm volatile("" : "+l"(words));
        return words;
    };

    if (warpgroup < kConsumers) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(W::kConsumerRegisters));
        const int g = lane / 4, t = lane % 4, c = channel_of_row(warp * 8 + g);
        constexpr bool kAhead = !SPLIT && KS == 3 && !PHASES;
        Fragment<T> a[kSteps<KS>];
        float slope = 0, offset = 0;
        int own_rows = 0;  // none of a channel that does not exist
        bool all_exist = false;  // the warp's channels
        const int shelf_bytes = int(sizeof(T)) * s.shelf_channels * s.plane;
        uint32_t own_v = int(sizeof(T)) * (2 * t + (PHASES ? 0 : c % kShelf * s.plane)) + (PHASES ? 0 : held);
        asm volatile("" : "+r"(own_v));
        uint32_t own_made = shared_address(made[0][warpgroup] + c);
        if (!PHASES) own_made = __shfl_sync(~0u, own_made, lane);  // or ptxas works it out anew for each unit
        const int next_turn = __shfl_sync(~0u, 1 + (int(threadIdx.x) / 128 + 1) % kConsumers, lane);
        if (warpgroup == kConsumers - 1) bar_arrive(1);  // the first one's turn
        int known = -1, turn = warpgroup;  // the warpgroups take the tasks in turn, through all units
        for (Walk at_unit(s); at_unit.unit < s.units; at_unit.next(s)) {
            const int stage = at_unit.stage, place = at_unit.place, sample = at_unit.sample, part = at_unit.part;
            const auto load_fragments = [&](int chunk, Fragment<T> (&to)[kSteps<KS>]) {
                const Fragment<T>* const fragments = reinterpret_cast<const Fragment<T>*>(p.fragments) +
                    (int64_t(part * s.slices + slice) * s.chunks + chunk) * (kSteps<KS> * 128) + threadIdx.x % 128;
#pragma unroll
                for (int i = 0; i < kSteps<KS>; ++i) to[i] = __ldg(fragments + i * 128);
            };
            if (known != part) {
                const int q = part * s.slices + slice;
                known = part;
                own_rows = c < channel_count(part) ? rows : 0;
                all_exist = __all_sync(~0u, own_rows > 0);
                const SliceConstants<kWideSlots>& constants = static_cast<const SliceConstants<kWideSlots>*>(p.constants)[q];
                slope = constants.slope[c], offset = constants.offset[c];
                load_fragments(0, a);
            }
            const int channel = first_channel(part) + c;
            // Where the thread's v goes: into shared memory, or into the output, then counted from the channel's begin there.
            uint32_t v = own_v;
            if (!PHASES) v += at_unit.shelf_of(warp, s) * shelf_bytes;
            if (!PHASES && !s.whole) v += int(sizeof(T)) * (int(out_begin(sample, channel)) & (V - 1));  // packs as the output's
            const uint32_t x_begin = __shfl_sync(~0u, (shared_address(stages) + stage * stage_bytes) / 16, 0);
            const uint32_t own_empty = v_empty + 8 * at_unit.shelf_of(warp, s);
            const auto await_place = [&](int zero) {
                if (PHASES) mbarrier_wait((writes ? norm_full : posted) + 8 * place, at_unit.place_phase ^ int(!writes));
                else if (warp < s.unit_shelves) mbarrier_wait(own_empty + zero, at_unit.phase_of(warp, s) ^ 1);
            };
            Deviations all = {}, norm = {};
            const auto enter = [&](bool any) {  // any: of what is to be done before the wait
                await_place(int(any) & s.stages >> 8);
                if (writes) norm = made[place][0][c];
            };
            char* const out = static_cast<char*>(p.out) + (PHASES ? int(sizeof(T)) * out_begin(sample, channel) : 0);
            int task = turn, from_next = turn - s.next_half;  // how many tasks on from the first that reads of x's second half
            // The thread's next two values: where they are; bound: where the row's outputs end.
            int row, column, bound;
            uint32_t at;
            float sum = 0, square = 0;  // of a task
            const auto begin = [&](int first_row, int first_column) {
                column = first_column + 2 * t, row = first_row;
                if (column >= s.width) column -= s.width, ++row;
                bound = row < own_rows ? s.columns : 0;
                at = v + int(sizeof(T)) * (row * s.columns + column - 2 * t);
            };
            // Two values as they are held, and what becomes of them there: the norm of equal values is to be 0.
            const auto pack = [](float v0, float v1) {
                Pack<T, 2> pair;
                round_pair(v0, v1, pair.value, false);
                return pair;
            };
            // A quad of lanes has one anchor: of its first pixels at least one is an output, if any of the task's is.
            const auto set_anchor = [&](float first, int lane_of_it) {
                all.anchor = __shfl_sync(~0u, to_acc(pack(first, first).value[0]), lane_of_it);
            };
            const auto first_output = [&] {
                const uint32_t outputs = __ballot_sync(~0u, column < bound) >> (lane & 28) & 15;
                return outputs ? (lane & 28) + __ffs(outputs) - 1 : lane;
            };
            // Two neighbouring values: into the thread's sums.
            const auto add = [&](bool valid, bool next_valid, const Pack<T, 2>& pair) {
                const float d0 = valid ? to_acc(pair.value[0]) - all.anchor : 0.0f;
                const float d1 = next_valid ? to_acc(pair.value[1]) - all.anchor : 0.0f;
                sum += d0 + d1;
                square = fmaf(d0, d0, square), square = fmaf(d1, d1, square);
            };
            // To where they go, which is `further` bytes on from `to`; next: how much further on the second one goes.
            const auto keep = [&](uint32_t to, int further, int next, bool valid, bool next_valid, Pack<T, 2> pair) {
                if (!PHASES) {
                    to += further;
                    if (PAIRS) store_shared_if(valid, to, pair);
                    else store_shared_if(valid, to, pair.value[0]), store_shared_if(next_valid, to + sizeof(T) * next, pair.value[1]);
                } else if (writes) {
                    const auto normalized = [&](T w) { return fmaf(to_acc(w) - norm.anchor, norm.sum, norm.square); };
                    round_pair(normalized(pair.value[0]), normalized(pair.value[1]), pair.value, bf16);
                    T* const at = reinterpret_cast<T*>(out + to + further);
                    if (PAIRS) {
                        if (valid) *reinterpret_cast<Pack<T, 2>*>(at) = pair;
                    } else {
                        if (valid) at[0] = pair.value[0];
                        if (next_valid) at[next] = pair.value[1];
                    }
                }
            };
            const auto take = [&](float v0, float v1) {
                bool wraps = !PAIRS && column + 1 == s.width;
                const bool valid = column < bound, next_valid = PAIRS ? valid : wraps ? row + 1 < own_rows : column + 1 < bound;
                const Pack<T, 2> pair = pack(v0, v1);
                keep(at, 0, wraps ? s.columns - column : 1, valid, next_valid, pair);
                add(valid, next_valid, pair);
                column += 8, at += 8 * sizeof(T), wraps = column >= s.width;
                column -= wraps ? s.width : 0, at -= wraps ? int(sizeof(T)) * (KS - 1) : 0, row += wraps;
                bound = row < own_rows ? s.columns : 0;
            };
            mbarrier_wait(x_full + 8 * stage, at_unit.stage_phase);
            for (; task < tasks; task += kConsumers) {
                float d[kTileN / 2];
                const int first = first_pixel(task);
                const auto multiply = [&](int chunk) {
                    const uint32_t x = x_begin + chunk * (kChunkSlabs<T, KS> * s.pixels) + first;
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int k = 0; k < kProducts<T, KS>; ++k) {
                        const int tap = kChunkSlabs<T, KS> == 2 && chunk == s.chunks - 1 ? 1 : k;
                        wgmma(d, a[k % kSteps<KS>], pixel_descriptor(s.taps[tap] + x), chunk > 0 || k > 0);
                    }
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                };
                if (kHalves && uint32_t(from_next) < kConsumers) mbarrier_wait(x_full + 8, at_unit.stage_phase);
                if (s.chunks == 1) bar_sync(1 + warpgroup);  // one warpgroup's products go beside the others' sigmoids
                multiply(0);
                if (s.chunks == 1) bar_arrive(next_turn);
                if (kHalves) {
                    from_next += kConsumers;
                    asm volatile("" : "+r"(from_next));  // not worked out from the task where it is asked for: that would take longer
                }
#pragma unroll 1
                for (int chunk = 1; chunk < s.chunks; ++chunk) {
                    Fragment<T> ahead[kSteps<KS>];
                    if (kAhead) load_fragments(chunk, ahead);  // beside the products
                    wgmma_wait(d);
                    if (!kAhead) load_fragments(chunk, ahead);
#pragma unroll
                    for (int i = 0; i < kSteps<KS>; ++i) {
                        a[i] = ahead[i];
                        if (kAhead) a[i].x ^= s.phase, a[i].y ^= s.phase;  // 0, or ptxas loads into a itself, and lines all products up
                    }
                    multiply(chunk);
                }
                if (s.chunks > 1) {
                    wgmma_wait(d);
                    load_fragments(0, a);
                }
                // Of each run, worked out beside the products: where it goes, and how many of a row's outputs are left for its last eight
                // pixels. Less than 0 where a row ends before them, or an output is missing.
                uint32_t to[kTileN / kRun];
                int rest[kTileN / kRun];
#pragma unroll
                for (int run = 0; run < kTileN / kRun; ++run) {
                    const int pixel = first + run * kRun, run_row = __umulhi(pixel, s.inverse_width);
                    const int run_column = pixel - run_row * s.width;
                    const bool simple = all_exist && (run == 0 || run_row < rows) && run_column + kRun <= s.width;
                    to[run] = v + int(sizeof(T)) * (run_row * s.columns + run_column);
                    rest[run] = simple ? s.columns - run_column - (kRun - 8) : -1;
                    asm volatile("" : "+r"(to[run]), "+r"(rest[run]));
                }
                wgmma_wait(d);  // all warps at one place, whatever channels they have
                if (task + kConsumers >= tasks) mbarrier_arrive(x_empty + 8 * (stage + (kHalves ? s.halved : 0)));
                if (kHalves && uint32_t(s.half_tasks - 1 - task) < kConsumers) mbarrier_arrive(x_empty);
                sum = square = 0;
#pragma unroll
                for (int run = 0; run < kTileN / kRun; ++run) {
                    const auto value = [&](int j, int i) {  // of the run's j-th eight pixels
                        const int k = run * (kRun / 2) + 4 * j + i;
                        return sigmoid_from_exponent<kHeldExponent<T>>(fmaf(SPLIT ? d[k] + d[k + 2] : d[k], slope, offset));
                    };
                    const auto finish = [&](auto first) {  // nothing to ask, but for the last eight
                        if (decltype(first)::value) set_anchor(value(0, 0), lane & 28);
                        const bool valid = 2 * t < rest[run], next_valid = PAIRS ? valid : 2 * t + 1 < rest[run];
                        Pack<T, 2> pairs[kRun / 8];
#pragma unroll
                        for (int j = 0; j < kRun / 8; ++j) {
                            const bool inner = j < kRun / 8 - 1;
                            pairs[j] = pack(value(j, 0), value(j, 1));
                            add(inner || valid, inner || next_valid, pairs[j]);
                        }
                        // Not sooner: the first task's values are there when a place comes free. The wait's address is made of the sums, or
                        // ptxas leaves them for after it.
                        if (decltype(first)::value) enter(__any_sync(~0u, square == 0));
#pragma unroll
                        for (int j = 0; j < kRun / 8; ++j) {
                            const bool inner = j < kRun / 8 - 1;
                            keep(to[run], 8 * int(sizeof(T)) * j, 1, inner || valid, inner || next_valid, pairs[j]);
                        }
                    };
                    if (rest[run] < 0) {
                        const int pixel = first + run * kRun, run_row = __umulhi(pixel, s.inverse_width);
                        begin(run_row, pixel - run_row * s.width);
                        if (run == 0 && task == turn) enter(false), set_anchor(value(0, 0), first_output());
#pragma unroll
                        for (int j = 0; j < kRun / 8; ++j) take(value(j, 0), value(j, 1));
                    } else if (run == 0 && task == turn) {
                        finish(std::true_type{});
                    } else {
                        finish(std::false_type{});
                    }
                }
                all.sum += sum, all.square += square;
            }
            // An input beyond fp16's reach has made a NaN: inf - inf, or 0 * inf. So has one that is NaN or infinite. All tasks again.
            if (__any_sync(~0u, !(all.square < INFINITY))) {
                all.sum = all.square = 0;
                int own_sample = sample, own_channel = channel;
                asm volatile("" : "+r"(own_sample), "+r"(own_channel));  // all that follows from them is made here, not for each unit
#pragma unroll 1
                for (task = turn; task < tasks; task += kConsumers) {
                    const int first = first_pixel(task), tile_row = __umulhi(first, s.inverse_width);
                    begin(tile_row, first - tile_row * s.width);
                    sum = square = 0;
#pragma unroll 1
                    for (int j = 0; j < kTileN / 8; ++j) {
                        float v0 = 0, v1 = 0;
#pragma unroll 1
                        for (int k = 0; k < 2; ++k) {
                            const bool wraps = column + k >= s.width;
                            const int r = row + wraps, there = wraps ? 0 : column + k;
                            v0 = v1, v1 = 0;
                            if (r >= own_rows || there >= s.columns) continue;
                            v1 = convolve_value<KS>(p, s, own_sample, own_channel, first_row + r, there) * (1 << kHeldExponent<T>);
                        }
                        if (j == 0 && task == turn) set_anchor(v0, first_output());
                        take(v0, v1);
                    }
                    all.sum += sum, all.square += square;
                }
            }
            if (task == turn) {  // all of a small band were the others'
                mbarrier_arrive(x_empty + 8 * stage);
                await_place(0);
            }
            turn = task - tasks;
            if (!writes) {  // then the norm is there
                for (int mask = 1; mask < 4; mask *= 2) {
                    all.sum += __shfl_xor_sync(~0u, all.sum, mask);
                    all.square += __shfl_xor_sync(~0u, all.square, mask);
                }
                if (t == 0) {
                    store_shared(own_made + place * int(sizeof(made[0])), all.anchor, all.sum, all.square);
                }
            }
            mbarrier_arrive(v_full + 8 * (place * kConsumers + warpgroup));
        }
    } else if (warpgroup < kConsumers + kProducers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(W::kProducerRegisters));
        constexpr int kThreads = 128 * kProducers, kAtOnce = 4;  // pixels that a thread asks for at a time
        constexpr int kItems = 8 / kProducers;  // what it has in registers before there is room for them
        const int tid = threadIdx.x - 128 * kConsumers, pixels = (rows + KS - 1) * s.width;
        const auto band_of_x = [&](int of_sample, int channel) {
            return static_cast<const T*>(p.x) + (int64_t(of_sample) * s.in_channels + channel) * image + int64_t(first_row) * s.width;
        };
        const uint32_t nothing = uint32_t(s.stages) >> 8;  // 0, which ptxas does not know
        const int own_half = kHalves ? s.halved * (warpgroup - kConsumers) : 0;  // of x
        for (Walk at_unit(s); at_unit.unit < s.units; at_unit.next(s)) {
            const int sample = at_unit.sample, q = at_unit.part * s.slices + slice;
            if (warpgroup == kConsumers && warp < 2) {  // lanes for all channels bring the next unit into L2
                Walk later = at_unit;
                later.next(s);
                if (tid < s.in_channels && later.unit < s.units) {
                    const uintptr_t from = uintptr_t(band_of_x(later.sample, tid)), begin = from & ~uintptr_t(15);
                    prefetch(begin, uint32_t(from + pixels * sizeof(T) - begin) & ~15u);
                }
            }
            const float input_scale = static_cast<const SliceConstants<kWideSlots>*>(p.constants)[q].input_scale;
            if (!SPLIT && PAIRS && (PHASES || s.slabs > 1)) {  // two pixels at a time: faster, but where there is little to bring
                constexpr int kPairs = 4;
                for (int slab = 0, begin = 2 * tid; slab < s.slabs;) {
                    const int last = s.in_channels - slab * 8 - 1;
                    uint32_t raw[kPairs][8];
                    const T* from = band_of_x(sample, slab * 8) + begin;
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
#pragma unroll
                        for (int i = 0; i < kPairs; ++i) {
                            raw[i][c] = 0;
                            const auto* const at = reinterpret_cast<const uint32_t*>(from + 2 * i * kThreads);
                            if (begin + 2 * i * kThreads < pixels) raw[i][c] = __ldg(at);
                        }
                        from += c < last ? image : 0;  // a channel that does not exist has weights of 0
                    }
                    if (slab == 0 && begin == 2 * tid) mbarrier_wait(x_empty + 8 * (at_unit.stage + own_half), at_unit.stage_phase ^ 1);
                    unsigned char* const to = stages + at_unit.stage * stage_bytes + slab * slab_bytes + begin * 16;
#pragma unroll
                    for (int i = 0; i < kPairs; ++i) {
                        uint32_t h[2][4];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            h[0][k] = to_fp16(__byte_perm(raw[i][2 * k], raw[i][2 * k + 1], 0x5410), input_scale, bf16);
                            h[1][k] = to_fp16(__byte_perm(raw[i][2 * k], raw[i][2 * k + 1], 0x7632), input_scale, bf16);
                        }
                        if (begin + 2 * i * kThreads < pixels) {
                            uint4* const at = reinterpret_cast<uint4*>(to + 2 * i * kThreads * 16);
                            at[0] = make_uint4(h[0][0], h[0][1], h[0][2], h[0][3]), at[1] = make_uint4(h[1][0], h[1][1], h[1][2], h[1][3]);
                        }
                    }
                    begin += 2 * kPairs * kThreads;
                    if (begin - 2 * tid >= pixels) begin = 2 * tid, ++slab;
                }
            } else {
                for (int slab = 0, begin = tid; slab < s.slabs;) {  // pixels begin, and every kThreads-th after it
                    const int last = s.in_channels - slab * 8 - 1;
                    uint4 hi[kItems], lo[kItems];
#pragma unroll
                    for (int half = 0; half < kItems; half += kAtOnce) {
                        T raw[kAtOnce][8];
                        const auto ask = [&](auto all) {  // all: none lies behind the last pixel
                            const T* from = band_of_x(sample, slab * 8) + begin + half * kThreads;
#pragma unroll
                            for (int c = 0; c < 8; ++c) {
#pragma unroll
                                for (int i = 0; i < kAtOnce; ++i) {
                                    if (!decltype(all)::value) from_acc(0.0f, raw[i][c]);
                                    const bool exists = decltype(all)::value || begin + (half + i) * kThreads < pixels;
                                    if (exists) raw[i][c] = __ldg(from + i * kThreads);
                                }
                                from += c < last ? uint32_t(image) : 0u;  // a channel that does not exist has weights of 0
                            }
                        };
                        if (begin + (half + kAtOnce - 1) * kThreads < pixels) ask(std::true_type{});
                        else ask(std::false_type{});
#pragma unroll
                        for (int i = 0; i < kAtOnce; ++i) split(raw[i], input_scale, bf16, hi[half + i], lo[half + i]);
                        asm volatile("" : "+r"(begin));  // the second half is not asked for before the first is there: registers
                    }
                    if (slab == 0 && begin == tid) {
                        // The wait takes its address from all that is to be stored, or ptxas leaves the splitting for after it.
                        uint32_t all = 0;
#pragma unroll
                        for (int i = 0; i < kItems; ++i) {
                            const uint4& last_made = SPLIT ? lo[i] : hi[i];
                            all |= last_made.x | last_made.y | last_made.z | last_made.w;
                        }
                        mbarrier_wait(x_empty + 8 * (at_unit.stage + own_half) + (all & nothing), at_unit.stage_phase ^ 1);
                    }
                    unsigned char* const to = stages + at_unit.stage * stage_bytes + slab * slab_bytes + begin * 16;
#pragma unroll
                    for (int i = 0; i < kItems; ++i) {
                        if (begin + i * kThreads < pixels) {
                            uint4* const at = reinterpret_cast<uint4*>(to + i * kThreads * 16);
                            *at = hi[i];
                            if (SPLIT) at[plane_bytes / 16] = lo[i];
                        }
                    }
                    begin += kItems * kThreads;
                    if (begin - tid >= pixels) begin = tid, ++slab;
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what these threads have written
            mbarrier_arrive(x_full + 8 * (at_unit.stage + own_half));
        }
    }
    if (warpgroup < kConsumers + kProducers) return;
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(W::kOtherRegisters));
    const int role = __shfl_sync(~0u, threadIdx.x / 32 - 4 * (kConsumers + kProducers), 0);
    // Through a shuffle: or ptxas works the address out anew wherever it is wanted.
    const uint32_t made_at = __shfl_sync(~0u, shared_address(made), 0);
    const auto deviations_of = [&](int place, int k, int c) {
        const uint32_t at = made_at + ((place * kConsumers + k) * kWideSlots + c) * int(sizeof(Deviations));
        Deviations d;
        load_shared(at, d.anchor), load_shared(at + 4, d.sum), load_shared(at + 8, d.square);
        return d;
    };
    if (role == 0) {  // posts the band's sums
        if (writes) return;
        int last = kConsumers - 1;
        const int sub = lane & (s.channel_share - 1), share_bits = 31 - __clz(s.channel_share), at_once = 32 >> share_bits;  // groups
        const auto outputs_before = [&](int pixel) {
            const int row = __umulhi(pixel, s.inverse_width);
            return row < rows ? row * s.columns + min(pixel - row * s.width, s.columns) : rows * s.columns;
        };
        int outputs_of_lane = 0;  // of the tasks of a warpgroup that begins with this one
        for (int task = lane; lane < kConsumers && task < tasks; task += kConsumers) {
            outputs_of_lane += outputs_before(first_pixel(task) + kTileN) - outputs_before(first_pixel(task));
        }
        int outputs[kConsumers];  // of a channel, of each warpgroup; the one that has the last task comes last
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) outputs[i] = __shfl_sync(~0u, outputs_of_lane, (tasks + i) % kConsumers);
        for (Walk at_unit(s); at_unit.unit < s.units; at_unit.next(s)) {
            const int place = at_unit.place, channels = channel_count(at_unit.part), d = s.slices == 1 ? s.group_channels : channels;
            unsigned long long* total = total_of(at_unit.unit, lane >> share_bits);
            int c = (lane >> share_bits) * d + sub;
            last = (last + tasks) % kConsumers;
            for (int first = 0; first * d < channels; first += at_once, c += at_once * d, total += at_once * 4 * s.line) {
                double sum = 0, square = 0;
                const bool own = sub < d && c < channels;
                // The warpgroup that had the last task comes last.
#pragma unroll
                for (int i = 0; i < kConsumers; ++i) {
                    const int k = last + 1 + i - (last + 1 + i >= kConsumers ? kConsumers : 0);
                    mbarrier_wait(v_full + 8 * (place * kConsumers + k), at_unit.place_phase);
                    if (!own) continue;
                    const Deviations some = deviations_of(place, k, c);
                    const double origin = outputs[i] > 0 ? some.anchor : 0.0f;  // of none the anchor is chance
                    const double far = outputs[i] * origin;
                    sum += far + some.sum, square += fma(origin, far + 2 * double(some.sum), double(some.square));
                }
                for (int mask = 1; mask < s.channel_share; mask *= 2) {
                    sum += __shfl_xor_sync(~0u, sum, mask), square += __shfl_xor_sync(~0u, square, mask);
                }
                if ((first + at_once) * d >= channels) mbarrier_arrive(posted + 8 * place);  // all is read
                if (sub == 0 && c < channels) {
                    const bool doubtful = !(square < INFINITY);
                    Total{total, s.line}.post(sum * kUnit, s.inverse_step, doubtful);
                    Total{total + 2 * s.line, s.line}.post(square * (kUnit * kUnit), s.inverse_step, doubtful);
                }
            }
        }
    } else if (role == 1) {  // makes the norm of all bands' sums, a lane of each channel
        if (PHASES && !writes) return;
        const int group = s.slices == 1 ? quotient(lane, s.group_channels) : 0;
        for (Walk at_unit(s); at_unit.unit < s.units; at_unit.next(s)) {
            const int place = at_unit.place, first = first_channel(at_unit.part);
            const bool own = lane < channel_count(at_unit.part);
            const float gamma = own ? value_at(p.gamma, first + lane, p.parameter_type) : 0.0f;
            const float beta = own ? value_at(p.beta, first + lane, p.parameter_type) : 0.0f;
            unsigned long long* const total = total_of(at_unit.unit, group);
            if (!writes) mbarrier_wait(posted + 8 * place, at_unit.place_phase);
            for (int k = 0; writes && k < kConsumers; ++k) mbarrier_wait(v_full + 8 * (place * kConsumers + k), at_unit.place_phase ^ 1);
            if (own) {
                const Total of_v = {total, s.line}, of_square = {total + 2 * s.line, s.line};
                // One word is asked for until all bands' sums are in it: the others' lines are left to those that add to them.
                unsigned long long* const one = total_of(at_unit.unit, 0) + 3 * s.line;
                while (!PHASES && !Total::complete(Total::get(one), members)) __nanosleep(20);
                double mean, square;
                bool there;
                do {
                    there = of_v.read(members, mean);
                    there = of_square.read(members, square) && there;
                } while (!PHASES && !there);
                mean *= s.step, square *= s.step;
                const double variance = there ? fma(-mean, mean, square) : NAN, held_mean = mean / kUnit;
                const float hi = float(held_mean), lo = float(held_mean - hi);
                const float rounded = variance < 0 ? 0.0f : float(variance);  // NaN stays
                const float a = gamma * reciprocal_sqrt(rounded + s.eps) * float(kUnit);
                // Where the mean is no more than a few standard deviations, one fma gives as good a value.
                const double far = held_mean * a;
                const uint32_t at = made_at + (place * kConsumers * kWideSlots + lane) * int(sizeof(Deviations));
                if (fabs(far) <= 8 && mean * mean <= 64 * variance) store_shared(at, 0, a, float(beta - far));
                else store_shared(at, hi, a, isfinite(a) ? fmaf(-lo, a, beta) : NAN);
            }
            mbarrier_arrive(norm_full + 8 * place);
        }
    } else if (!PHASES) {
        const int values = rows * s.columns;
        int c = role - 2;  // through all units: no writer has more to do than the others
        const bool at_once = s.whole && values <= 32 * 4 * V;
        const uint32_t places = s.shelves * kShelf;  // of channels, on all shelves
        for (Walk at_unit(s); at_unit.unit < s.units; at_unit.next(s), c -= s.unit_shelves * kShelf) {
            const int channels = channel_count(at_unit.part);
            T* own = static_cast<T*>(p.out) + out_begin(at_unit.sample, first_channel(at_unit.part) + c) + lane * V;
            mbarrier_wait(norm_full + 8 * at_unit.place, at_unit.place_phase);
            // A lane of each channel keeps what the warp needs of it.
            const uint32_t here = at_unit.shelf * kShelf + lane, place = here - (here >= places ? places : 0);
            const Deviations of_lane = deviations_of(at_unit.place, 0, min(lane, s.unit_shelves * kShelf - 1));  // mean, factor, offset
            const uint32_t held_of_lane = held + (place / kShelf * s.shelf_channels + place % kShelf) * uint32_t(sizeof(T)) * s.plane;
            const uint32_t empty_of_lane = v_empty + 8 * (place / kShelf);
            for (; c < s.unit_shelves * kShelf; c += kWriters, own += kWriters * out_image) {
                const uint32_t v = __shfl_sync(~0u, held_of_lane, c) + 16 * lane, empty = __shfl_sync(~0u, empty_of_lane, c);
                const float mean = __shfl_sync(~0u, of_lane.anchor, c), factor = __shfl_sync(~0u, of_lane.sum, c);
                const float offset = __shfl_sync(~0u, of_lane.square, c);
                constexpr int kBatch = SPLIT ? 2 : 4;  // packs of a lane in flight: four of float would stand in the way of the others
                // left: until the channel's last pack; around: the mean is taken off first.
                const auto normalized = [&](T w, auto around) {
                    return fmaf(decltype(around)::value ? to_acc(w) - mean : to_acc(w), factor, offset);
                };
                const auto write = [&](T* to, uint32_t from, int left, auto around) {
                    Pack<T, V> batch[kBatch];
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) {
                        if (left > 32 * b) load_shared(from + 32 * 16 * b, batch[b]);
                    }
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
                        for (int j = 0; j < V; j += 2) {
                            T* const two = batch[b].value + j;
                            round_pair(normalized(two[0], around), normalized(two[1], around), two, bf16);
                        }
                    }
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) store_if(left >= 32 * b + 1, to + 32 * b * V, batch[b]);
                };
                if (c >= channels) {  // none in this unit
                } else if (at_once && mean == 0) {
#pragma unroll
                    for (int i = 0; i < 128; i += 32 * kBatch) write(own + i * V, v + 16 * i, values / V - lane - i, std::false_type{});
                } else {
                    const int skew = s.whole ? 0 : int(uint32_t(uintptr_t(own)) / sizeof(T)) & (V - 1), head = min(-skew & (V - 1), values);
                    const int packs = int(uint32_t(values - head) / V);
                    T* here = own;
                    asm volatile("" : "+l"(here));  // or what follows from it is kept for each channel
                    T* to = here + head;
                    uint32_t from = v + int(sizeof(T)) * (skew + head);
#pragma unroll 1
                    for (int left = packs - lane; left + lane > 0; left -= 32 * kBatch, to += 32 * kBatch * V, from += 32 * kBatch * 16) {
                        write(to, from, left, std::true_type{});
                    }
                    if (lane < values - packs * V) {  // a lane for each value outside whole packs
                        const int loose = lane < head ? lane : packs * V + lane;
                        Pack<T, 2> pair;
                        load_shared(v + int(sizeof(T)) * (skew + loose) - 16 * lane, pair.value[0]);
                        round_pair(normalized(pair.value[0], std::true_type{}), 0, pair.value, bf16);
                        here[loose - lane * V] = pair.value[0];
                    }
                }
                mbarrier_arrive(empty);
            }
        }
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Many channels on Hopper, where the products are the work: one kernel makes v and leaves it where the output will be, another one
// normalises it there, mostly from L2.
//
// Before that x is brought into the form that wgmma wants: fp16, hi and lo of float32, a pixel's eight channels side by side, rows padded
// to whole eights of pixels (to 1x1 kernels an image is one row). A is the weights of 64 output channels, which stay in shared memory; B is
// x. A stage has sixteen input channels (64 of 1x1 kernels) of a tile's pixels, and of those that the kernel's rows and columns add: a tap is
// a place where reading begins. Two warpgroups, each with tiles of its own, take the stages in turn, one half a tile ahead: its sigmoids go
// beside the other's products. Where there are no halves, a tile is two of 64 channels by 128 pixels.
//
// Float32's sums begin at zero with each stage and are then added to the tile's in float32: tensor cores round towards zero.

constexpr int kTileBlock = 384, kTileM = 64, kTileN = 128;  // threads; channels and pixels of a wgmma
constexpr int kMostTileStages = 8;
// A warp's v on its way out: sixteen channels, so many pixels at a time, with room to be aligned as the output is.
template <typename T> constexpr int kOutPixels = 128 / sizeof(T);
template <typename T> constexpr int kOutRow = sizeof(T) == 4 ? 160 : 144;  // bytes: rows that are stored at once meet different banks
template <typename T> constexpr int kOutBytes = 8 * 16 * kOutRow<T>;

struct TileShape : ConvShape {            // plane: pixels of an image, as x is prepared
    int pitch, run, chunks;               // pixels of a row there, and of a stage's row; stages of a tile
    int channel_blocks, tile;             // blocks that share the output channels; pixels of a tile
    int second_channels, second_pixels;   // from the first of a tile's two to the second
    int stages, stage_bytes, weight_bytes;
    int sample_tiles, tiles;
    int step_samples, step_tiles;         // from a warpgroup's tile to its next one
    uint32_t inverse_pitch;               // of 2^32
    int groups;
    double step, inverse_step;            // of a sum in the mailbox; the first one also over the values of a group
    __device__ __forceinline__ int row_of(int pixel) const {
        const int row = __umulhi(pixel, inverse_pitch);
        return row * pitch > pixel ? row - 1 : row;
    }
};
struct TileOperands : ConvOperands {
    uint4* prepared;  // x: of each sample, slab, piece, pixel
};
// A stage's slabs of eight input channels, and its steps of K: a tap of sixteen channels each.
template <int KS> constexpr int kStageSlabs = KS == 3 ? 2 : 8;
template <int KS> constexpr int kStageSteps = KS == 3 ? 9 : 4;

// Launched before the kernel before it has ended: what that one writes is there from here on.
__device__ __forceinline__ void await_launcher() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_next() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Block q prepares the weights and constants of channel q, or zeros.
template <typename T, int KS>
__global__ void __launch_bounds__(kConvBlock) prepare_tile_weights(TileOperands p, TileShape s, int64_t mail_words) {
    __shared__ float row_scale[1];
    constexpr int kSlabs = kStageSlabs<KS>, kSteps = kStageSteps<KS>;
    const int q = blockIdx.x, rows = s.chunks * kSteps * 2;  // of 64 channels by eight
    __shared__ float own[64 * KS * KS];
    launch_next();
    const auto fetch = [&](const void* vector) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(vector) + q * (p.parameter_type == 0 ? 4 : 2)));
    };
    if (threadIdx.x == 0 && q < s.out_channels) fetch(p.scale), fetch(p.conv_bias), fetch(p.bias);
    // All at once, and into L1 for what follows.
    const int taps = s.in_channels * KS * KS;
#pragma unroll
    for (int i = threadIdx.x; i < 64 * KS * KS; i += kConvBlock) {
        own[i] = q < s.out_channels && i < taps ? value_at(p.weight, int64_t(q) * taps + i, p.parameter_type) : 0.0f;
    }
    empty_mailbox(p, mail_words);
    prepare_constants<1>(p, s, KS * KS, q, p.type != 2, kHeldExponent<T>, row_scale);
    for (int i = threadIdx.x; i < rows; i += kConvBlock) {
        const int chunk = i / (2 * kSteps), step = i / 2 % kSteps, tap = KS == 3 ? step : 0;
        const int first = (chunk * kSlabs + (KS == 3 ? 0 : step * 2) + i % 2) * 8;
        float w[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            w[k] = own[(first + k) * (KS * KS) + tap] * row_scale[0];
        }
        uint4 hi, lo;
        split(w, 1.0f, false, hi, lo);
        uint4* const to = reinterpret_cast<uint4*>(p.fragments) + (q / kTileM * (kSplit<T> ? 2 : 1) * rows + i) * kTileM + q % kTileM;
        *to = hi;
        if (kSplit<T>) to[rows * kTileM] = lo;
    }
}

// The largest one that a channel asks for. All lanes call it.
__device__ __forceinline__ float tile_input_scale(const ConvOperands& p, int channels) {
    float most = 0;
    bool known = true;
    for (int c = threadIdx.x % 32; c < channels; c += 32) {
        const float own = static_cast<const SliceConstants<1>*>(p.constants)[c].input_scale;
        known = known && own == own, most = fmaxf(most, own);
    }
    for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    return __all_sync(~0u, known) ? most : NAN;
}

// A block has kPreparePixels of a slab.
constexpr int kPrepareItems = 4, kPreparePixels = kPrepareItems * kConvBlock;
template <typename T> __global__ void __launch_bounds__(kConvBlock) prepare_tile_x(TileOperands p, TileShape s, int plane_blocks) {
    constexpr int kPieces = kSplit<T> ? 2 : 1;
    const int plane = quotient(int(blockIdx.x), plane_blocks), sample = quotient(plane, s.slabs), slab = plane - sample * s.slabs;
    const int first = (blockIdx.x - plane * plane_blocks) * kPreparePixels + threadIdx.x;
    const int64_t image = int64_t(s.height) * s.width;
    const T* const x = static_cast<const T*>(p.x) + (int64_t(sample) * s.in_channels + slab * 8) * image;
    T raw[kPrepareItems][8];
    launch_next();
#pragma unroll
    for (int i = 0; i < kPrepareItems; ++i) {
        const int pixel = first + i * kConvBlock, row = s.row_of(pixel), column = pixel - row * s.pitch;
        const bool exists = row < s.height && column < s.width;
        const uint32_t at = row * s.width + column;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            from_acc(0.0f, raw[i][c]);
            if (exists && slab * 8 + c < s.in_channels) raw[i][c] = __ldg(x + c * image + at);
        }
    }
    await_launcher();
    const float input_scale = tile_input_scale(p, s.out_channels);
#pragma unroll
    for (int i = 0; i < kPrepareItems; ++i) {
        const int pixel = first + i * kConvBlock;
        uint4 hi, lo;
        split(raw[i], input_scale, p.type == 3, hi, lo);
        uint4* const to = p.prepared + int64_t(plane) * kPieces * s.plane + pixel;
        if (pixel < s.plane) {
            *to = hi;
            if (kPieces == 2) to[s.plane] = lo;
        }
    }
}

__device__ __forceinline__ void arrive_expecting(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// A warpgroup's tiles.
struct TileWalk {
    int tile, sample, at;  // at: in the sample
    __device__ __forceinline__ TileWalk(const TileShape& s, int first) : tile(first), sample(quotient(first, s.sample_tiles)) {
        at = tile - sample * s.sample_tiles;
    }
    __device__ __forceinline__ void next(const TileShape& s) {
        tile += 2 * s.teams, sample += s.step_samples, at += s.step_tiles;
        if (at >= s.sample_tiles) at -= s.sample_tiles, ++sample;
    }
};

// Two warpgroups multiply and finish; the first warp of the third one brings the weights, and x. PAIRS: rows of even length in the output.
template <typename T, int KS, bool PAIRS>
__global__ void __launch_bounds__(kTileBlock, 1)
convolve_tiles(const __grid_constant__ TileOperands p, const __grid_constant__ TileShape s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr bool SPLIT = kSplit<T>;
    constexpr int kPieces = SPLIT ? 2 : 1, kSlabs = kStageSlabs<KS>, kSteps = kStageSteps<KS>;
    constexpr double kUnit = 1.0 / (1 << kHeldExponent<T>);
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ uint64_t bars[3 * kMostTileStages + 1];
    const uint32_t weights = __shfl_sync(~0u, shared_address(stages), 0), x = weights + s.weight_bytes;
    // Of each stage, full for the one warpgroup and for the other.
    const uint32_t full = __shfl_sync(~0u, shared_address(bars), 0);
    const uint32_t empty = full + 16 * kMostTileStages, ready = empty + 8 * kMostTileStages;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * kMostTileStages; ++i) mbarrier_init(full + 8 * i, 1);
        for (int i = 0; i < kMostTileStages; ++i) mbarrier_init(empty + 8 * i, 4);
        mbarrier_init(ready, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next();
    await_launcher();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
    const int team = quotient(int(blockIdx.x), s.channel_blocks), block = blockIdx.x - team * s.channel_blocks;
    // The second warpgroup begins `lag` steps later. Where it has none left, there are empty stages for it.
    const int lag = s.chunks / 2, steps = quotient(max(0, s.tiles - 2 * team) + 2 * s.teams - 1, 2 * s.teams) * s.chunks + lag;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp != 0) return;
        const int share = s.weight_bytes / 32;
        arrive_expecting(ready, share);
        const auto* const fragments = reinterpret_cast<const unsigned char*>(p.fragments) + int64_t(block) * s.weight_bytes;
        copy_bulk(weights + lane * share, fragments + lane * share, share, ready);
        const int row = lane % KS, slab = lane / KS % kSlabs, piece = lane / (KS * kSlabs), bytes = s.run * 16;
        const int64_t from_lane = (int64_t(slab) * kPieces + piece) * s.plane + row * s.pitch;
        const uint32_t to_lane = x + ((piece * kSlabs + slab) * KS + row) * bytes;
        TileWalk walks[2] = {TileWalk(s, 2 * team), TileWalk(s, 2 * team + 1)};
        int chunks[2] = {}, stage = 0, phase = 0;
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                const bool begun = own == 0 || step >= lag;
                const uint32_t bar = full + 8 * (stage + own * kMostTileStages);
                mbarrier_wait(empty + 8 * stage, phase ^ 1);
                if (begun && walks[own].tile < s.tiles && piece < kPieces) {
                    const int64_t slabs = int64_t(walks[own].sample) * s.slabs + chunks[own] * kSlabs;
                    arrive_expecting(bar, bytes);
                    const int64_t from = slabs * kPieces * s.plane + from_lane + walks[own].at * s.tile;
                    copy_bulk(to_lane + stage * s.stage_bytes, p.prepared + from, bytes, bar);
                } else {
                    mbarrier_arrive(bar);
                }
                if (begun && ++chunks[own] == s.chunks) chunks[own] = 0, walks[own].next(s);
                if (++stage == s.stages) stage = 0, phase ^= 1;
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int g = lane / 4, t = lane % 4;
    const int piece_rows = s.chunks * kSteps * 2 * kTileM;  // of 16 bytes
    const uint64_t a_begin = uint64_t(128 >> 4) << 32 | uint32_t(kTileM) << 16 | weights >> 4;
    const uint64_t b_begin = uint64_t(128 >> 4) << 32 | uint32_t(KS * s.run) << 16;
    const int64_t out_image = int64_t(s.rows) * s.columns;
    constexpr int kParts = SPLIT ? 1 : 2;
    const uint32_t staged = x + s.stages * s.stage_bytes + (warpgroup * 4 + warp) * (16 * kOutRow<T>);
    float acc[2][64];
    // Of the thread's two channels of each part: the constants, and the first pixel of eight that is the thread's, none of a channel that does
    // not exist. Of the lane's one: its group, or -1 where another channel of the warp begins it; which of those 1, 2, 4, 8 further are of it.
    float slope[kParts][2], offset[kParts][2];
    int own[kParts][2], group[kParts], same[kParts];
    const float unscale = 1.0f / tile_input_scale(p, s.out_channels);
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
        const int first = block * kTileM + m * s.second_channels + warp * 16;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int channel = first + g + 8 * r;
            const SliceConstants<1>& constants = static_cast<const SliceConstants<1>*>(p.constants)[channel];
            slope[m][r] = constants.slope[0] * (constants.input_scale * unscale), offset[m][r] = constants.offset[0];
            own[m][r] = channel < s.out_channels ? 2 * t : 8;
        }
        const int channel = first + lane;
        group[m] = quotient(channel, s.group_channels), same[m] = 0;
        for (int k = 0; k < 4; ++k) {
            same[m] |= int(lane + (1 << k) < 16 && group[m] == quotient(channel + (1 << k), s.group_channels)) << k;
        }
        if (lane >= 16 || channel >= s.out_channels || (lane > 0 && channel != group[m] * s.group_channels)) group[m] = -1;
    }

    const auto finish = [&](const TileWalk& walk) {
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
            const int sample = walk.sample, first = block * kTileM + m * s.second_channels + warp * 16;
            const int begin = walk.at * s.tile + m * s.second_pixels;
            const int64_t plane = int64_t(sample) * s.out_channels + first;  // the warp's first one
            const auto value = [&](int j, int i) {  // of the j-th eight pixels
                return sigmoid_from_exponent<kHeldExponent<T>>(fmaf(acc[m][4 * j + i], slope[m][i / 2], offset[m][i / 2]));
            };
            using Words = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
            const auto held = [&](float v0, float v1) {  // made here, and not where it is stored, behind a branch
                Pack<T, 2> pair;
                round_pair(v0, v1, pair.value, false);
                Words words = *reinterpret_cast<Words*>(&pair);
                if constexpr (sizeof(T) == 4) asm volatile("" : "+f"(words.x), "+f"(words.y));
                else asm volatile("" : "+r"(words));
                return words;
            };
            const auto first_of = [](const Words& words) { return to_acc(reinterpret_cast<const T*>(&words)[0]); };
            const auto second_of = [](const Words& words) { return to_acc(reinterpret_cast<const T*>(&words)[1]); };
            int row, column;  // of the next eight pixels, which are of one row
            Deviations all[2];
            const auto restart = [&] {
                row = KS == 1 ? 0 : s.row_of(begin), column = begin - row * s.pitch;
                all[0] = all[1] = {};
            };
            const auto outputs = [&] { return row < s.rows ? min(8, s.columns - column) : 0; };  // of the eight
            // Into the sums, and to where put says.
            const auto take = [&](const Words (&words)[2], auto put) {
                const int bound = outputs();
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const bool valid = own[m][r] < bound, next_valid = PAIRS ? valid : own[m][r] + 1 < bound;
                    const float d0 = valid ? first_of(words[r]) - all[r].anchor : 0.0f;
                    const float d1 = next_valid ? second_of(words[r]) - all[r].anchor : 0.0f;
                    all[r].sum += d0 + d1;
                    all[r].square = fmaf(d0, d0, all[r].square), all[r].square = fmaf(d1, d1, all[r].square);
                    put(r, row * s.columns + column, words[r], valid, next_valid);
                }
                column += 8;
                if (column == s.pitch) column = 0, ++row;
            };
            // A quad of lanes has one anchor: if the first eight pixels are no outputs, the next ones are, or none at all.
            restart();
            const auto outputs_before = [&] { return row < s.rows ? row * s.columns + min(column, s.columns) : s.rows * s.columns; };
            const int before = outputs_before();
            const bool second = outputs() <= 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float v = second ? value(1, 2 * r) : value(0, 2 * r);
                all[r].anchor = __shfl_sync(~0u, first_of(held(v, v)), lane & 28);
            }
            constexpr int kBatch = 4, kOut = kOutPixels<T>, V = kPack<T>;
            static_assert(kOut % (8 * kBatch) == 0 && kOut / V == 8, "eight lanes write a channel's packs");
#pragma unroll
            for (int begin_out = 0; begin_out < kTileN; begin_out += kOut) {
                // Where the pixels' outputs begin in a channel: they lie side by side there. Its first one's place in a pack of 16 bytes.
                const int from = outputs_before();
                const auto skew_of = [&](int channel) { return int(uint32_t(plane + channel) * uint32_t(out_image) + from) & (V - 1); };
                uint32_t to[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) to[r] = staged + (g + 8 * r) * kOutRow<T> + (skew_of(g + 8 * r) + 2 * t - from) * int(sizeof(T));
#pragma unroll
                for (int j = begin_out / 8; j < (begin_out + kOut) / 8; j += kBatch) {
                    Words words[kBatch][2];
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) {
                        words[b][0] = held(value(j + b, 0), value(j + b, 1)), words[b][1] = held(value(j + b, 2), value(j + b, 3));
                    }
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) {
                        take(words[b], [&](int r, int output, const Words& w, bool valid, bool next_valid) {
                            const uint32_t at = to[r] + output * int(sizeof(T));
                            const T* const two = reinterpret_cast<const T*>(&w);
                            if (PAIRS) store_shared_if(valid, at, *reinterpret_cast<const Pack<T, 2>*>(&w));
                            else store_shared_if(valid, at, two[0]), store_shared_if(next_valid, at + int(sizeof(T)), two[1]);
                        });
                    }
                }
                const int count = outputs_before() - from;
                __syncwarp();
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                    const int channel = i + lane / 8, skew = skew_of(channel), at = ((skew > 0) + lane % 8) * V;
                    if (first + channel < s.out_channels && at + V <= skew + count) {
                        uint4 pack;
                        load_shared(staged + channel * kOutRow<T> + at * int(sizeof(T)), pack);
                        *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + (plane + channel) * out_image + from - skew + at) = pack;
                    }
                }
                {  // What is before the first whole pack, and behind the last one.
                    const int channel = lane % 16, skew = skew_of(channel), end = skew + count, whole = skew > 0 ? V : 0;
                    const bool head = lane < 16;
                    T* const out = static_cast<T*>(p.out) + (plane + channel) * out_image + from - skew;
                    for (int at = head ? skew : max(end & -V, whole); at < (head ? min(whole, end) : end); at += PAIRS ? 2 : 1) {
                        if (first + channel >= s.out_channels) break;
                        const uint32_t source = staged + channel * kOutRow<T> + at * int(sizeof(T));
                        if (PAIRS) {
                            Words w;
                            if constexpr (sizeof(T) == 4) load_shared(source, w.x), load_shared(source + 4, w.y);
                            else load_shared(source, w);
                            *reinterpret_cast<Words*>(out + at) = w;
                        } else {
                            load_shared(source, out[at]);
                        }
                    }
                }
                __syncwarp();
            }
            // An input beyond fp16's reach has made a NaN: inf - inf, or 0 * inf. So has one that is NaN or infinite.
            if (__any_sync(~0u, !(all[0].square < INFINITY && all[1].square < INFINITY))) {
                restart();
                bool any = false;
#pragma unroll 1
                for (int j = 0; j < kTileN / 8; ++j) {
                    Words words[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float v0 = 0, v1 = 0;
#pragma unroll 1
                        for (int k = 0; k < 2; ++k) {
                            v0 = v1, v1 = 0;
                            if (own[m][r] + k >= outputs()) continue;
                            v1 = convolve_value<KS>(p, s, sample, first + g + 8 * r, row, column + own[m][r] + k) * (1 << kHeldExponent<T>);
                        }
                        words[r] = held(v0, v1);
                        if (!any && outputs() > 0) all[r].anchor = __shfl_sync(~0u, first_of(words[r]), lane & 28);
                    }
                    any = outputs() > 0 || any;
                    take(words, [&](int r, int output, const Words& w, bool valid, bool next_valid) {
                        T* const at = static_cast<T*>(p.out) + (plane + g + 8 * r) * out_image + output + 2 * t;
                        if (valid) at[0] = reinterpret_cast<const T*>(&w)[0];
                        if (next_valid) at[1] = reinterpret_cast<const T*>(&w)[1];
                    });
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                for (int mask = 1; mask < 4; mask *= 2) {
                    all[r].sum += __shfl_xor_sync(~0u, all[r].sum, mask), all[r].square += __shfl_xor_sync(~0u, all[r].square, mask);
                }
            }
            const int values = outputs_before() - before;  // of each channel
            // A lane of each channel; the first one of each group adds its neighbours' sums.
            const auto of_channel = [&](float a, float b) {
                a = __shfl_sync(~0u, a, lane % 8 * 4), b = __shfl_sync(~0u, b, lane % 8 * 4);
                return lane < 8 ? a : b;
            };
            const float anchor = of_channel(all[0].anchor, all[1].anchor), sum = of_channel(all[0].sum, all[1].sum);
            const float square = of_channel(all[0].square, all[1].square);
            const double far = values > 0 ? double(values) * anchor : 0;
            double of_v = far + sum, of_square = fma(double(anchor), far + 2 * double(sum), double(square));
#pragma unroll 1
            for (int further = 1; further < min(16, s.group_channels); further *= 2) {
                const double v = __shfl_down_sync(~0u, of_v, further), squares = __shfl_down_sync(~0u, of_square, further);
                if (same[m] & further) of_v += v, of_square += squares;
            }
            if (group[m] >= 0) {
                auto* const total = reinterpret_cast<unsigned long long*>(p.mailbox) +
                    (int64_t(sample) * s.groups + group[m]) * 4;
                const bool doubtful = !(of_square < INFINITY);
                Total{total, 1}.post(of_v * kUnit, s.inverse_step, doubtful);
                Total{total + 2, 1}.post(of_square * (kUnit * kUnit), s.inverse_step, doubtful);
            }
        }
    };

    mbarrier_wait(ready, 0);
    int stage = warpgroup, left = steps;
    uint32_t phases = 0;  // of each stage
    const auto await_stage = [&] {
        mbarrier_wait(full + 8 * (stage + warpgroup * kMostTileStages), phases >> stage & 1);
        phases ^= 1u << stage, --left;
    };
    const auto next_stage = [&] {
        stage += 2;
        if (stage >= s.stages) stage -= s.stages;
    };
    const auto skip = [&] {
        await_stage();
        mbarrier_arrive(empty + 8 * stage);
        next_stage();
    };
    for (int i = 0; i < lag * warpgroup; ++i) skip();
    for (TileWalk walk(s, 2 * team + warpgroup); walk.tile < s.tiles; walk.next(s)) {
#pragma unroll 1
        for (int chunk = 0; chunk < s.chunks; ++chunk) {
            await_stage();
            const uint64_t a = a_begin + chunk * (kSteps * 2 * kTileM), b = b_begin + ((x + stage * s.stage_bytes) >> 4);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const auto multiply = [&](float (&d)[64], uint64_t a, uint64_t b, bool keep) {
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    wgmma(d, a + k * (2 * kTileM), b + (KS == 3 ? k / 3 * s.run + k % 3 : 2 * k * s.run), keep || k > 0);
                }
            };
            if constexpr (SPLIT) {
                multiply(acc[1], a + piece_rows, b, false);
                multiply(acc[1], a, b + kSlabs * KS * s.run, true);
                multiply(acc[1], a, b, true);
            } else {
                multiply(acc[0], a, b, chunk > 0);
                multiply(acc[1], a + (s.second_channels > 0 ? piece_rows : 0), b + s.second_pixels, chunk > 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (!SPLIT) wgmma_wait(acc[0]), wgmma_wait(acc[1]), mbarrier_arrive(empty + 8 * stage);
            if (SPLIT) {
                wgmma_wait(acc[1]);
                mbarrier_arrive(empty + 8 * stage);
#pragma unroll
                for (int i = 0; i < 64; ++i) acc[0][i] = chunk > 0 ? acc[0][i] + acc[1][i] : acc[1][i];
            }
            next_stage();
        }
        finish(walk);
    }
    while (left > 0) skip();
#endif
}

// A block has part of a channel, the last ones that were made first: they are in L2.
constexpr int kTilePacks = 4, kNormalTile = 128;  // of 16 bytes, of a thread; threads
template <typename T, bool BF16> __global__ void __launch_bounds__(kNormalTile) normalize_tiles(TileOperands p, TileShape s, int parts) {
    constexpr int V = kPack<T>;
    constexpr double kUnit = 1.0 / (1 << kHeldExponent<T>);
    __shared__ float norm[3];
    const int at_block = gridDim.x - 1 - blockIdx.x, plane = quotient(at_block, parts), part = at_block - plane * parts;
    const int sample = quotient(plane, s.out_channels), channel = plane - sample * s.out_channels;
    const int group = quotient(channel, s.group_channels);
    const int64_t out_image = int64_t(s.rows) * s.columns, begin = plane * out_image;
    T* const out = static_cast<T*>(p.out) + begin;
    const Span<V> span(begin, out_image);
    const int64_t first = int64_t(part) * (kTilePacks * kNormalTile) + threadIdx.x;
    Pack<T, V>* const packs = reinterpret_cast<Pack<T, V>*>(out + span.head);
    Pack<T, V> batch[kTilePacks];
    await_launcher();
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) {
        if (first + i * kNormalTile < span.packs) batch[i] = packs[first + i * kNormalTile];
    }
    if (threadIdx.x == 0) {
        auto* const total = reinterpret_cast<unsigned long long*>(p.mailbox) +
            (int64_t(sample) * s.groups + group) * 4;
        const int of_group = (group + 1) * s.group_channels - 1, warps = of_group / 16 - group * s.group_channels / 16 + 1;
        const int terms = s.sample_tiles * warps * (s.second_pixels > 0 ? 2 : 1);
        double mean, square;
        bool there = Total{total, 1}.read(terms, mean);
        there = Total{total + 2, 1}.read(terms, square) && there;
        mean *= s.step, square *= s.step;
        const double variance = there ? fma(-mean, mean, square) : NAN, held_mean = mean / kUnit;
        const float hi = float(held_mean), lo = float(held_mean - hi), rounded = variance < 0 ? 0.0f : float(variance);  // NaN stays
        const float a = value_at(p.gamma, channel, p.parameter_type) * reciprocal_sqrt(rounded + s.eps) * float(kUnit);
        norm[0] = hi, norm[1] = a, norm[2] = isfinite(a) ? fmaf(-lo, a, value_at(p.beta, channel, p.parameter_type)) : NAN;
    }
    __syncthreads();
    const float mean = norm[0], factor = norm[1], offset = norm[2];
    const auto normalized = [&](T v) { return fmaf(to_acc(v) - mean, factor, offset); };
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) {
        if (first + i * kNormalTile < span.packs) {
#pragma unroll
            for (int j = 0; j < V; j += 2) {
                T* const two = batch[i].value + j;
                round_pair(normalized(two[0]), normalized(two[1]), two, BF16);
            }
            packs[first + i * kNormalTile] = batch[i];
        }
    }
    const int64_t loose = part == 0 ? span.loose(threadIdx.x) : -1;
    if (loose >= 0) {
        Pack<T, 2> pair;
        round_pair(normalized(out[loose]), 0, pair.value, BF16);
        out[loose] = pair.value[0];
    }
}
#endif  // CUDART_VERSION >= 12040

// ---------------------------------------------------------------------------------------------------------------------------------
// Launchers. Every function returns a cudaError_t; pointers are device memory of h's device, which is current.

// --- shared: launching (home: kernels/instance_norm.py) ---
struct Device {
    int sms, major, shared_bytes;
};
static cudaError_t current_device(Device* d) {
    int id;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d->sms, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d->major, cudaDevAttrComputeCapabilityMajor, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&d->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    return error;
}

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static bool aligned_16(const void* x, const void* y) { return ((uintptr_t(x) | uintptr_t(y)) & 15) == 0; }

// --- end shared: launching ---

// --- shared: group norm launchers (home: kernels/linear_swish_group_norm.py) ---
template <typename T, int V>
static cudaError_t launch_in_registers(
    const T* h, T* out, const Vectors<Acc<T>>& vectors, const Sizes& sizes, double eps, cudaStream_t stream) {
    constexpr int kLong = kThreadPacks<T, V>, kShort = kShortPacks<T, V>;
    const int packs = int(sizes.n / V);
    bool full = false;
    for (int k = 0; k < kOperands; ++k) full = full || vectors.full[k];
    const bool is_short = !full && packs <= 32 * kShort;
    // Side by side a group's threads fill a 128-byte line where the slice does; beyond that as few as hold it: fewer shuffles.
    int group = 1;
    while (group < 32 && group < packs && group * V * sizeof(T) < 128) group *= 2;
    while (group * (is_short ? kShort : kLong) < packs) group *= 2;
    const int64_t rows = is_short ? kRows<T> : 1;
    const int64_t stride = divide_up(divide_up(sizes.slices, rows), sizes.groups) * sizes.groups;
    auto kernel = is_short ? normalize_in_registers<T, V, kShort, kRows<T>> : normalize_in_registers<T, V, kLong, 1>;
    kernel<<<unsigned(divide_up(stride, kMaxGroup / group)), kMaxGroup, 0, stream>>>(h, out, vectors, sizes, stride, Acc<T>(eps), group);
    return cudaGetLastError();
}

// Parts of a slice in the two-read kernels: enough blocks for several waves, none under 64 KiB.
static int stream_parts(int64_t slices, int64_t slice_bytes, int sms) {
    const int64_t wanted = divide_up(32 * sms, slices), most = slice_bytes / (64 * 1024);
    return int(wanted < most ? wanted : (most > 1 ? most : 1));
}

template <typename T>
static cudaError_t launch_two_reads(
    const T* h, T* out, const Vectors<Acc<T>>& vectors, const Sizes& sizes, double eps, void* workspace, int sms, cudaStream_t stream) {
    int parts = stream_parts(sizes.slices, sizes.n * sizeof(T), sms);
    const int64_t packs = sizes.n / kPack<T>, part_packs = divide_up(divide_up(packs, parts), 8) * 8;
    parts = int(divide_up(packs, part_packs));
    auto* moments = static_cast<Moments<Acc<T>>*>(workspace);
    const dim3 grid(unsigned(sizes.slices * parts));
    if (parts > 1) moments_of_parts<T><<<grid, kStreamBlock, 0, stream>>>(h, moments, vectors, sizes, part_packs, parts);
    normalize_parts<T><<<grid, kStreamBlock, 0, stream>>>(h, out, moments, vectors, sizes, part_packs, parts, Acc<T>(eps));
    return cudaGetLastError();
}

template <typename A> static Vectors<A> vectors_from(const void* const* pointers, const bool* full) {
    Vectors<A> vectors;
    for (int k = 0; k < kOperands; ++k) {
        vectors.operand[k] = static_cast<const A*>(pointers[k]);
        vectors.full[k] = full[k];
    }
    vectors.gamma = static_cast<const A*>(pointers[kOperands]);
    vectors.beta = static_cast<const A*>(pointers[kOperands + 1]);
    return vectors;
}
// --- end shared: group norm launchers ---

template <typename T>
static cudaError_t launch(
    const void* hv, void* outv, const Vectors<Acc<T>>& vectors, const Sizes& sizes, double eps, void* workspace, cudaStream_t stream) {
    const T* h = static_cast<const T*>(hv);
    T* out = static_cast<T*>(outv);
    constexpr int V = kPack<T>;
    if (!aligned_16(h, out)) return cudaErrorMisalignedAddress;
    if (sizes.n % V == 0 && sizes.n <= kMostInRegisters<T, V>) return launch_in_registers<T, V>(h, out, vectors, sizes, eps, stream);
    if (sizes.n % V != 0 && sizes.n <= kMostInRegisters<T, 1>) return launch_in_registers<T, 1>(h, out, vectors, sizes, eps, stream);
    Device device;
    cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    return launch_two_reads(h, out, vectors, sizes, eps, workspace, device.sms, stream);
}

// The convolution's plan: units, teams and bands, and what it needs.
struct ConvPlan {
    ConvShape shape;
    int slices, blocks, shared_bytes;  // slices: of a sample
    int64_t fragment_words, mail_words;
    int64_t workspace() const { return fragment_words * 4 + int64_t(slices) * sizeof(SliceConstants<kSlots>) + mail_words * 8; }
};

// Floats of a held channel; 4 more than a multiple of 16, so that lanes of different channels meet different banks.
static int64_t held_plane(int64_t values) { return divide_up(values + 4, 16) * 16 + 4; }

// The convolution's sizes, and its units for blocks of `slots` channels. False where it is not for us. sizes: samples, in_channels, height,
// width, out_channels, kernel size, groups.
static bool describe_convolution(ConvShape& s, const int64_t* sizes, int slots) {
    const int64_t samples = sizes[0], in_channels = sizes[1], height = sizes[2], width = sizes[3], out_channels = sizes[4], ks = sizes[5];
    const int64_t rows = height - ks + 1, columns = width - ks + 1, d = out_channels / sizes[6];
    if (in_channels < 1 || out_channels > 128 || rows * columns < 256 || height > 32768 || width > 32768) return false;
    s.in_channels = int(in_channels), s.slabs = int(divide_up(in_channels, 8)), s.height = int(height), s.width = int(width);
    s.out_channels = int(out_channels), s.rows = int(rows), s.columns = int(columns), s.group_channels = int(d);
    if (d <= slots) {  // as many groups as fill a block's slots
        const int groups = int(sizes[6]), most = slots / int(d);
        s.unit_channels = int(divide_up(groups, divide_up(groups, most)) * d);
        s.units_per_sample = int(divide_up(out_channels, s.unit_channels));
        s.slices = 1, s.slice_channels = s.unit_channels;
    } else {
        s.units_per_sample = int(sizes[6]), s.unit_channels = int(d);
        s.slices = int(divide_up(d, slots));
        s.slice_channels = int(divide_up(d, s.slices));
    }
    if (samples * s.units_per_sample >= 1 << 30) return false;
    s.units = int(samples * s.units_per_sample);
    return true;
}

// False where it does not fit, or the image is so small that others do it as well.
static bool plan_convolution(ConvPlan* plan, const int64_t* sizes, int fragment, int resident, int shared_most) {
    ConvShape& s = plan->shape;
    if (!describe_convolution(s, sizes, kSlots)) return false;
    const int64_t rows = s.rows, columns = s.columns, ks = sizes[5];
    const int tiles = int(divide_up(columns, kTilePixels));
    int64_t best = 0;
    for (int own = 1; own <= rows; ++own) {  // rows of a block
        const int64_t bands = divide_up(rows, own), plane = held_plane(int64_t(own) * columns);
        if (plane * s.slice_channels * 4 > shared_most) break;
        if (bands * s.slices > resident) continue;
        const int64_t most_teams = resident / (bands * s.slices), teams = most_teams < s.units ? most_teams : s.units;
        const int parts = tiles >= kConvWarps ? 1 : int(divide_up(kConvWarps, tiles) < own ? divide_up(kConvWarps, tiles) : own);
        // Row steps of a warp, and some for the exchange, for each of a team's units.
        const int64_t cost = divide_up(s.units, teams) * (divide_up(tiles * parts, kConvWarps) * (divide_up(own, parts) + ks - 1) + 4);
        if (best == 0 || cost < best) {
            best = cost;
            s.bands = int(bands), s.parts = parts, s.teams = int(teams), s.plane = int(plane);
        }
    }
    plan->slices = s.units_per_sample * s.slices;
    plan->blocks = s.teams * s.bands * s.slices;
    plan->shared_bytes = s.plane * s.slice_channels * 4;
    plan->fragment_words = int64_t(plan->slices) * s.slabs * ks * 32 * fragment;
    plan->mail_words = int64_t(2) * plan->blocks * kSlots * 3;
    return best > 0;
}

// Cooperative: all blocks of the teams run at once, or none.
template <typename Operands, typename Shape>
static cudaError_t launch_together(
    void (*kernel)(Operands, Shape), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, const Operands& operands,
    const Shape& shape) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    const cudaLaunchConfig_t config = {grid, dim3(threads), size_t(shared_bytes), stream, &attribute, 1};
    return cudaLaunchKernelEx(&config, kernel, operands, shape);
}

// With x null, only the plan: *workspace_bytes, or -1 where ATen's convolution is to be taken.
template <typename T, int KS, bool VEC, bool MULTI>
static cudaError_t launch_convolution(
    const int64_t* sizes, double eps, ConvOperands operands, void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
    auto kernel = convolve_and_normalize<T, KS, VEC, MULTI>;
    Device device;
    cudaFuncAttributes attributes;
    int resident = 0, shared_of_sm = 0, id = 0;
    cudaError_t error = current_device(&device);
    *workspace_bytes = -1;
    if (error == cudaSuccess && device.major < 8) return error;
    if (error == cudaSuccess) error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    const int own = int(attributes.sharedSizeBytes), half = shared_of_sm / 2 - 1024 - own, most = device.shared_bytes - own;
    const int shared_most = half < most ? half : most;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_most);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kConvBlock, shared_most);
    if (error != cudaSuccess) return error;
    ConvPlan plan = {};
    if (!plan_convolution(&plan, sizes, kFragment<T, KS>, resident * device.sms, shared_most)) return cudaSuccess;
    *workspace_bytes = plan.workspace();
    if (operands.x == nullptr) return cudaSuccess;
    plan.shape.eps = float(eps);
    operands.mailbox = static_cast<uint64_t*>(workspace);
    operands.fragments = reinterpret_cast<uint32_t*>(operands.mailbox + plan.mail_words);
    operands.constants = operands.fragments + plan.fragment_words;
    prepare_weights<T, KS><<<plan.slices, 256, 0, stream>>>(operands, plan.shape, plan.mail_words);
    return launch_together(kernel, dim3(plan.blocks), kConvBlock, plan.shared_bytes, stream, operands, plan.shape);
}

#if CUDART_VERSION >= 12040
struct WidePlan {
    WideShape shape;
    int slices, shared_bytes;  // slices: of a sample
    int64_t fragment_words, mail_words;  // of 4 bytes, of 8; whole 16 bytes
    int64_t workspace() const { return fragment_words * 4 + mail_words * 8 + int64_t(slices) * sizeof(SliceConstants<kWideSlots>); }
};

// False where another way is better.
template <typename T> static bool plan_wide_convolution(WidePlan* plan, const int64_t* sizes, bool phases, int sms, int shared_most) {
    WideShape& s = plan->shape;
    constexpr int kTileN = Wide<T>::kTileN, kConsumers = Wide<T>::kConsumers, value_bytes = sizeof(T);
    if (!describe_convolution(s, sizes, kWideSlots) || s.width < 8 || s.width > 8192) return false;
    const int ks = int(sizes[5]), pack = 16 / value_bytes, pieces = value_bytes == 4 ? 2 : 1, chunk_slabs = ks == 3 || pieces == 2 ? 1 : 2;
    // The last task's wgmma read on behind x, at most as much again as its first tap's pixels: what is found in shared memory is dropped.
    const int behind_bytes = 2 * (kTileN + 2) * 16;
    double best = 0;
    s.shelf_channels = s.slice_channels < kShelf ? s.slice_channels : kShelf, s.unit_shelves = int(divide_up(s.slice_channels, kShelf));
    for (int own = 1; own <= s.rows; ++own) {  // rows of a block
        const int most = int(divide_up(s.rows, divide_up(s.rows, own))), bands = int(divide_up(s.rows, most));
        const int members = bands * s.slices;
        const int64_t values = int64_t(most) * s.columns, pixels = int64_t(most + ks - 1) * s.width;
        const int64_t stage_bytes = pixels * s.slabs * pieces * 16;
        const bool whole = values % pack == 0 && int64_t(s.rows) * s.columns % pack == 0;
        const int64_t plane = divide_up(values + (whole ? 0 : pack - 1) - pack, 2 * pack) * 2 * pack + pack;
        const int64_t shelf_bytes = plane * s.shelf_channels * value_bytes, held_most = phases ? 0 : s.unit_shelves * shelf_bytes;
        if (held_most + stage_bytes > shared_most) break;
        if (phases ? members >= Total::kMostTerms : members > sms || members > 255) continue;
        const int most_teams = members < sms ? sms / members : 1, teams = most_teams < s.units ? most_teams : s.units;
        const int rounds = int(divide_up(s.units, teams) * divide_up(members, sms));
        const int tasks = int(divide_up(int64_t(most) * s.width, kTileN));
        for (int stages = 1; stages <= kMostStages; ++stages) {
            const int64_t room = (shared_most - stages * stage_bytes) / shelf_bytes, most_shelves = kUnderWay * s.unit_shelves;
            const int shelves = int(phases ? 0 : room < most_shelves ? room : most_shelves);
            if (stages * stage_bytes + behind_bytes > shared_most || (!phases && shelves < s.unit_shelves)) continue;
            // Cycles of a unit: to bring x, to make v, to write it, and from the first of v to the end of its shelves' use.
            const double bring = 300 + 0.7 * pixels * s.slabs;
            const double make = 1000 + tasks * (400 + kTileN * (6.25 + 1.5625 * pieces * ks * s.slabs)) / kConsumers;
            const double write = phases ? 0 : 500 + divide_up(s.slice_channels, Wide<T>::kWriters) * (200 + values * 1.5 / pack);
            const double life = phases ? make : make + (members == 1 ? 2000 : 10000) + write;
            const double wait = phases ? 0 : life * s.unit_shelves / shelves;
            const double period = fmax(fmax(make + (stages == 1 ? bring : 0), wait), fmax(write, 2000.0));
            const double cost = rounds * period + life;
            if (best == 0 || cost < best) {
                best = cost;
                s.bands = bands, s.band_rows = most, s.teams = teams, s.shelves = shelves, s.stages = stages;
                s.plane = int(plane), s.pixels = int(pixels), s.whole = whole;
                plan->shared_bytes = int(shelves * shelf_bytes + stages * stage_bytes);
            }
        }
    }
    if (best == 0) return false;
    s.halved = pieces == 2 && ks == 3 && !phases && s.width == 256 && s.stages == 1 && s.band_rows > 1 && s.rows % s.band_rows == 0;
    s.task_step = s.halved ? s.width : kTileN, s.column_step = s.halved ? kTileN - s.band_rows * s.width : 0;
    s.half_tasks = s.halved ? s.band_rows * (s.width / 2 / kTileN) : 1 << 30, s.next_half = s.halved ? s.half_tasks - s.band_rows : 1 << 30;
    s.inverse_rows = s.halved ? uint32_t((1ll << 32) / s.band_rows + 1) : 0;
    const int end = s.stages * s.pixels * s.slabs * pieces * 16 + behind_bytes;
    if (plan->shared_bytes < end) plan->shared_bytes = end;
    // Lo's products come before hi's, so that small sums are not rounded to large ones' ulps. The last tap is alone: hi and lo of it are a pair.
    const int plane = s.slabs * s.pixels, last = 2 * s.width + 2;
    const auto pair = [&](int k, int piece) {
        const int one = 2 * k, two = one + 1, begin = piece * plane;
        return tap_pair(begin + one / 3 * s.width + one % 3, begin + two / 3 * s.width + two % 3);
    };
    for (int k = 0; k < 4; ++k) s.taps[k] = pair(k, pieces - 1), s.taps[5 + k] = pair(k, 0);
    s.taps[4] = pieces == 2 ? tap_pair(last, plane + last) : tap_pair(last - 1, last);
    s.chunks = int(divide_up(s.slabs, chunk_slabs));
    if (ks == 1) s.taps[0] = tap_pair(0, chunk_slabs == 2 ? s.pixels : plane), s.taps[1] = s.slabs % 2 ? 0 : s.taps[0];
    plan->slices = s.units_per_sample * s.slices;
    plan->fragment_words = int64_t(plan->slices) * s.chunks * (ks == 3 ? kSteps<3> : kSteps<1>) * 128 * 2 * pieces;
    s.groups = s.slices == 1 ? s.unit_channels / s.group_channels : 1;
    for (s.channel_share = 1; s.channel_share < (s.slices == 1 ? s.group_channels : s.slice_channels);) s.channel_share *= 2;
    s.team_samples = s.teams / s.units_per_sample, s.team_parts = s.teams % s.units_per_sample;
    const double count = double(s.rows) * s.columns * s.group_channels;
    s.inverse_width = uint32_t((1ll << 32) / s.width + 1), s.inverse_step = 1.0;  // exact for what a block has of pixels
    while (s.inverse_step * count < double(1ll << 46)) s.inverse_step *= 2;  // a Total has room for the sum
    s.step = 1 / (s.inverse_step * count);
    s.line = s.bands * s.slices > 1 ? 16 : 1;
    plan->mail_words = int64_t(s.units) * s.groups * 4 * s.line;
    return true;
}

template <typename T, int KS, bool PAIRS, bool PHASES = false>
static cudaError_t launch_wide_convolution(
    const int64_t* sizes, double eps, const ConvOperands& given, void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
    auto kernel = convolve_and_normalize_wide<T, KS, PAIRS, PHASES>;
    Device device;
    cudaFuncAttributes attributes;
    cudaError_t error = current_device(&device);
    *workspace_bytes = -1;
    if (error != cudaSuccess || device.major != 9) return error;
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    const int shared_most = device.shared_bytes - int(attributes.sharedSizeBytes);
    int resident = 0;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_most);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, Wide<T>::kBlock, shared_most);
    if (error != cudaSuccess) return error;
    WidePlan plan = {};
    if (resident < 1 || !plan_wide_convolution<T>(&plan, sizes, PHASES, device.sms, shared_most)) return cudaSuccess;
    *workspace_bytes = plan.workspace();
    if (given.x == nullptr) return cudaSuccess;
    plan.shape.eps = float(eps);
    ConvOperands operands = given;
    operands.mailbox = static_cast<uint64_t*>(workspace);
    operands.fragments = reinterpret_cast<uint32_t*>(operands.mailbox + plan.mail_words);
    operands.constants = operands.fragments + plan.fragment_words;
    const int blocks = plan.slices > device.sms ? plan.slices : device.sms;
    prepare_wide_weights<T, KS><<<blocks, kConvBlock, 0, stream>>>(operands, plan.shape, plan.mail_words);
    const dim3 grid(plan.shape.bands, plan.shape.slices, plan.shape.teams);
    if constexpr (PHASES) {
        for (plan.shape.phase = 1; plan.shape.phase <= 2; ++plan.shape.phase) {
            kernel<<<grid, Wide<T>::kBlock, plan.shared_bytes, stream>>>(operands, plan.shape);
        }
        return cudaGetLastError();
    } else {
        return launch_together(kernel, grid, Wide<T>::kBlock, plan.shared_bytes, stream, operands, plan.shape);
    }
}

template <typename T, int KS, bool PAIRS>
static cudaError_t launch_tiles(
    const int64_t* sizes, double eps, const ConvOperands& given, void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
    constexpr int kPieces = kSplit<T> ? 2 : 1;
    auto kernel = convolve_tiles<T, KS, PAIRS>;
    Device device;
    cudaError_t error = current_device(&device);
    *workspace_bytes = -1;
    TileShape s = {};
    if (error != cudaSuccess || device.major != 9 || !describe_convolution(s, sizes, 1)) return error;
    if (KS == 1) s.width *= s.height, s.columns = s.width, s.height = s.rows = 1;
    s.chunks = int(divide_up(s.in_channels, 8 * kStageSlabs<KS>)), s.slabs = kStageSlabs<KS> * s.chunks;
    s.pitch = int(divide_up(s.width, 8) * 8);
    const bool both = !kSplit<T> && s.out_channels > kTileM;  // a block has 128 channels
    s.channel_blocks = both ? 1 : int(divide_up(s.out_channels, kTileM));
    s.second_channels = both ? kTileM : 0, s.second_pixels = both || kSplit<T> ? 0 : kTileN;
    s.tile = kTileN + s.second_pixels, s.run = s.tile + KS - 1;
    s.weight_bytes = (both ? 2 : 1) * kPieces * s.chunks * kStageSteps<KS> * 2 * kTileM * 16;
    s.stage_bytes = kPieces * kStageSlabs<KS> * KS * s.run * 16;
    const int shared_most = device.shared_bytes - 1024;
    s.stages = (shared_most - s.weight_bytes - kOutBytes<T>) / s.stage_bytes;
    if (s.stages > kMostTileStages) s.stages = kMostTileStages;
    const int64_t sample_tiles = divide_up(int64_t(s.rows - 1) * s.pitch + s.columns, s.tile);
    const int64_t read = (sample_tiles - 1) * s.tile + (KS - 1) * s.pitch + s.run, held = int64_t(s.height) * s.pitch;
    const int64_t plane = divide_up(read > held ? read : held, 8) * 8, plane_blocks = divide_up(plane, kPreparePixels);
    const int64_t out_image = int64_t(s.rows) * s.columns, normal_parts = divide_up(out_image, kTilePacks * kNormalTile * kPack<T>);
    // So many samples at a time that x takes no more than a gigabyte as it is prepared.
    const int64_t sample_bytes = s.slabs * kPieces * plane * 16, most = divide_up(1ll << 30, sample_bytes);
    const int64_t samples = sizes[0] < most ? sizes[0] : most;
    if (s.stages < 2 || sample_tiles * 2 * 9 >= Total::kMostTerms) return error;
    s.plane = int(plane), s.sample_tiles = int(sample_tiles), s.eps = float(eps);
    s.groups = int(sizes[6]), s.inverse_pitch = uint32_t((1ll << 32) / s.pitch + 1);
    const double count = double(out_image) * s.group_channels;
    for (s.inverse_step = 1.0; s.inverse_step * count < double(1ll << 46);) s.inverse_step *= 2;
    s.step = 1 / (s.inverse_step * count);
    const int64_t rows = int64_t(s.channel_blocks) * (both ? 2 : 1) * kTileM, mail_words = sizes[0] * s.groups * 4;
    const int64_t constant_bytes = rows * int64_t(sizeof(SliceConstants<1>)), weight_bytes = int64_t(s.channel_blocks) * s.weight_bytes;
    *workspace_bytes = weight_bytes + samples * sample_bytes + constant_bytes + mail_words * 8;
    if (given.x == nullptr) return error;
    TileOperands operands;
    static_cast<ConvOperands&>(operands) = given;
    operands.fragments = static_cast<uint32_t*>(workspace);
    operands.prepared = static_cast<uint4*>(workspace) + weight_bytes / 16;
    operands.mailbox = reinterpret_cast<uint64_t*>(operands.prepared + samples * sample_bytes / 16);
    operands.constants = operands.mailbox + mail_words;
    const int shared_bytes = s.weight_bytes + s.stages * s.stage_bytes + kOutBytes<T>;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    prepare_tile_weights<T, KS><<<unsigned(rows), kConvBlock, 0, stream>>>(operands, s, mail_words);
    // The others are launched before the one before them has ended.
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const auto launch = [&](int64_t blocks, int threads, int shared, auto kernel, auto... arguments) {
        const cudaLaunchConfig_t config = {dim3(unsigned(blocks)), dim3(threads), size_t(shared), stream, &early, 1};
        if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, arguments...);
    };
    const int64_t in_bytes = sizeof(T) * s.in_channels * s.height * s.width, out_bytes = sizeof(T) * s.out_channels * out_image;
    for (int64_t left = sizes[0]; left > 0; left -= samples) {
        const int64_t now = left < samples ? left : samples, tiles = now * sample_tiles, most_teams = device.sms / s.channel_blocks;
        const int64_t wanted = divide_up(tiles, 2), teams = wanted < most_teams ? wanted : most_teams;
        s.tiles = int(tiles), s.teams = int(teams);
        s.step_samples = int(2 * teams / sample_tiles), s.step_tiles = int(2 * teams % sample_tiles);
        launch(now * s.slabs * plane_blocks, kConvBlock, 0, prepare_tile_x<T>, operands, s,
            int(plane_blocks));
        launch(teams * s.channel_blocks, kTileBlock, shared_bytes, kernel, operands, s);
        launch(now * s.out_channels * normal_parts, kNormalTile, 0,
            given.type == 3 ? normalize_tiles<T, !kSplit<T>> : normalize_tiles<T, false>, operands, s, int(normal_parts));
        operands.x = static_cast<const char*>(operands.x) + now * in_bytes;
        operands.out = static_cast<char*>(operands.out) + now * out_bytes;
        operands.mailbox += now * s.groups * 4;
    }
    return error;
}
#endif  // CUDART_VERSION >= 12040

// --- shared: group norm entry points (home: kernels/linear_swish_group_norm.py) ---
// h, out: `slices` contiguous slices, 16-byte aligned. dtype: 0 float32, 1 float64, 2 float16, 3 bfloat16. vectors: the operands, gamma and
// beta, in float32 (float64 for float64), contiguous and 16-byte aligned; full: which operands have h's shape. workspace:
// group_norm_workspace bytes.
extern "C" int64_t group_norm_workspace(int64_t slices, int64_t slice_bytes) {
    Device device;
    if (current_device(&device) != cudaSuccess) return 0;
    return slices * stream_parts(slices, slice_bytes, device.sms) * int64_t(sizeof(Moments<double>));
}
extern "C" int group_norm_forward(
    int dtype, const void* h, void* out, const void* const* vectors, const bool* full, int64_t slices, int64_t n, int64_t spatial,
    int groups, double eps, void* workspace, cudaStream_t stream) {
    const Sizes sizes = {slices, n, spatial, groups, int(n / spatial)};
    switch (dtype) {
        case 0: return launch<float>(h, out, vectors_from<float>(vectors, full), sizes, eps, workspace, stream);
        case 1: return launch<double>(h, out, vectors_from<double>(vectors, full), sizes, eps, workspace, stream);
        case 2: return launch<__half>(h, out, vectors_from<float>(vectors, full), sizes, eps, workspace, stream);
        default: return launch<__nv_bfloat16>(h, out, vectors_from<float>(vectors, full), sizes, eps, workspace, stream);
    }
}
// --- end shared: group norm entry points ---

// The convolution and all that follows it. sizes: samples, in_channels, height, width, out_channels, kernel size, groups, and the dtype of
// vectors: the convolution's weight and bias, then bias, scale, gamma and beta, all float32 or all x's. x, out: contiguous, 16-byte aligned.
// x null: see above.
extern "C" int convolution_forward(
    int dtype, const void* x, void* out, const void* const* vectors, const int64_t* given_sizes, double eps, void* workspace,
    int64_t* workspace_bytes, cudaStream_t stream) {
    ConvOperands operands = {};
    operands.x = x, operands.out = out;
    operands.type = dtype, operands.parameter_type = int(given_sizes[7]);
    if (x != nullptr) {
        const void** fields[] = {&operands.weight, &operands.conv_bias, &operands.bias, &operands.scale, &operands.gamma, &operands.beta};
        for (int i = 0; i < 6; ++i) *fields[i] = vectors[i];
    }
    const bool turned = given_sizes[5] == 1 && given_sizes[3] % 2 != 0;  // to 1x1 kernels height and width are the same
    const int64_t sizes[] = {given_sizes[0], given_sizes[1], given_sizes[turned ? 3 : 2], given_sizes[turned ? 2 : 3], given_sizes[4],
        given_sizes[5], given_sizes[6]};
    const auto run = [&](auto launcher) { return launcher(sizes, eps, operands, workspace, workspace_bytes, stream); };
    // Tensor cores round their sums towards zero: those of 24 channels are still as accurate as float32.
    const bool three = sizes[5] == 3, pairs = sizes[3] % 2 == 0, few = sizes[1] <= 24;
    *workspace_bytes = -1;
    if (sizes[1] > 64) return cudaSuccess;
#if CUDART_VERSION >= 12040
    cudaError_t error = cudaSuccess;
    if (sizes[1] > (!three ? 48 : dtype == 0 ? 24 : 32)) {  // the products are the work
        if (dtype == 0 && three && pairs) error = run(launch_tiles<float, 3, true>);
        else if (dtype == 0 && three) error = run(launch_tiles<float, 3, false>);
        else if (dtype == 0 && pairs) error = run(launch_tiles<float, 1, true>);
        else if (dtype == 0) error = run(launch_tiles<float, 1, false>);
        else if (dtype > 1 && three && pairs) error = run(launch_tiles<__half, 3, true>);
        else if (dtype > 1 && three) error = run(launch_tiles<__half, 3, false>);
        else if (dtype > 1 && pairs) error = run(launch_tiles<__half, 1, true>);
        else if (dtype > 1) error = run(launch_tiles<__half, 1, false>);
        if (error != cudaSuccess || *workspace_bytes >= 0) return error;
    }
    if (dtype == 0 && three && few && pairs) error = run(launch_wide_convolution<float, 3, true>);
    else if (dtype == 0 && three && few) error = run(launch_wide_convolution<float, 3, false>);
    else if (dtype == 0 && !three && pairs) error = run(launch_wide_convolution<float, 1, true>);
    else if (dtype > 1 && three && pairs) error = run(launch_wide_convolution<__half, 3, true>);
    else if (dtype > 1 && three) error = run(launch_wide_convolution<__half, 3, false>);
    else if (dtype > 1 && pairs) error = run(launch_wide_convolution<__half, 1, true>);
    if (error == cudaSuccess && *workspace_bytes < 0 && three) {
        if (dtype == 0 && few && pairs) error = run(launch_wide_convolution<float, 3, true, true>);
        else if (dtype == 0 && few) error = run(launch_wide_convolution<float, 3, false, true>);
        else if (dtype > 1 && pairs) error = run(launch_wide_convolution<__half, 3, true, true>);
        else if (dtype > 1) error = run(launch_wide_convolution<__half, 3, false, true>);
    }
    if (error != cudaSuccess || *workspace_bytes >= 0) return error;
#endif
    const bool one_slab = sizes[1] <= 8, quads = sizes[3] % 4 == 0;  // quads: rows of whole 16 (or 8) bytes
    if (dtype == 0 && three && one_slab && quads) return run(launch_convolution<float, 3, true, false>);
    if (dtype == 0 && three && one_slab) return run(launch_convolution<float, 3, false, false>);
    if (dtype == 0 && three && quads && few) return run(launch_convolution<float, 3, true, true>);
    if (dtype == 0 && !three && quads) return run(launch_convolution<float, 1, true, true>);
    if (dtype == 2 && three && quads && one_slab) return run(launch_convolution<__half, 3, true, false>);
    if (dtype == 3 && three && quads && one_slab) return run(launch_convolution<__nv_bfloat16, 3, true, false>);
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The backward. With v = activate(h, operands), normal = (v - mean) * rstd and w = gamma * grad, sums and means over a slice:
//     grad_v = rstd * ((w - mean(w)) - normal * slope),   slope = mean((w - mean(w)) * normal)

// The gradient of h from v's, and the operands' from it.
template <typename A>
__device__ __forceinline__ A differentiate(A h, const A (&operand)[kOperands], A v, A grad_v, A (&grad_operand)[kOperands]) {
    const A inner = grad_v * (v * (A(1) - v));
    grad_operand[1] = inner * (h + operand[0]);
    grad_operand[0] = inner * operand[1];
    return grad_operand[0];
}

// --- shared: joint moments (home: kernels/linear_swish_group_norm.py) ---
// Moments of values, the sum of the gradients that came for them, and the co-moment of the two, sum((v - mean) * (gradient - mean)).
template <typename A> struct Joint {
    Moments<A> v;
    A sum = 0, co = 0;
};

template <typename A> __device__ __forceinline__ Joint<A> merge(const Joint<A>& a, const Joint<A>& b) {
    if (b.v.count == A(0)) return a;
    if (a.v.count == A(0)) return b;
    Joint<A> r;
    r.v = merge(a.v, b.v);
    r.sum = a.sum + b.sum;
    const A delta = (b.v.hi - a.v.hi) + (b.v.lo - a.v.lo), grad_delta = b.sum * reciprocal(b.v.count) - a.sum * reciprocal(a.v.count);
    r.co = a.co + b.co + delta * grad_delta * (a.v.count * (b.v.count * reciprocal(r.v.count)));
    return r;
}

// One thread's, as in Accumulator.
template <typename A, int V> struct JointAccumulator {
    A anchor = 0, packs = 0, mean = 0, m2 = 0, sum = 0, grad_mean = 0, co = 0;
    __device__ __forceinline__ void add(const Pack<A, V>& v, const Pack<A, V>& grad) {
        if (packs == A(0)) anchor = v.value[0];
        A pack_mean = 0, pack_sum = 0, pack_m2 = 0, pack_co = 0;
#pragma unroll
        for (int i = 0; i < V; ++i) pack_mean += (v.value[i] - anchor) * (A(1) / V), pack_sum += grad.value[i];
        const A pack_grad_mean = pack_sum * (A(1) / V);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const A deviation = (v.value[i] - anchor) - pack_mean;
            pack_m2 += deviation * deviation;
            pack_co += deviation * (grad.value[i] - pack_grad_mean);
        }
        const A delta = pack_mean - mean, grad_delta = pack_grad_mean - grad_mean;
        const A weight = reciprocal(packs + A(1)), spread = delta * (packs * weight * V);
        mean += delta * weight;
        grad_mean += grad_delta * weight;
        m2 += pack_m2 + delta * spread;
        co += pack_co + grad_delta * spread;
        sum += pack_sum;
        packs += A(1);
    }
    __device__ __forceinline__ Joint<A> joint() const {
        Joint<A> r;
        r.v.count = packs * V;
        r.v.hi = anchor + mean;
        r.v.lo = mean - (r.v.hi - anchor);
        r.v.m2 = m2;
        r.sum = sum;
        r.co = co;
        return r;
    }
};

// Over `group` threads, a power of two, that are part of a warp or else the whole block; complete in the first of them.
template <typename A> __device__ __forceinline__ Joint<A> merge_across_group(Joint<A> joint, int group, Joint<A>* warp_joints) {
    for (int offset = min(group, 32) / 2; offset > 0; offset /= 2) {
        Joint<A> other;
        other.v.count = __shfl_down_sync(~0u, joint.v.count, offset);
        other.v.hi = __shfl_down_sync(~0u, joint.v.hi, offset);
        other.v.lo = __shfl_down_sync(~0u, joint.v.lo, offset);
        other.v.m2 = __shfl_down_sync(~0u, joint.v.m2, offset);
        other.sum = __shfl_down_sync(~0u, joint.sum, offset);
        other.co = __shfl_down_sync(~0u, joint.co, offset);
        joint = merge(joint, other);
    }
    if (group <= 32) return joint;
    if (threadIdx.x % 32 == 0) warp_joints[threadIdx.x / 32] = joint;
    __syncthreads();
    for (int w = 1; w < group / 32; ++w) joint = merge(joint, warp_joints[w]);
    return joint;
}
// --- end shared: joint moments ---

// --- shared: sums of gradients (home: kernels/linear_swish_group_norm.py) ---
// Sums over samples come in two steps, without atomics: blocks leave rows of partial sums, one value a channel, and sum_rows adds them up
// in double.
constexpr int kSums = kOperands + 2;  // the gradients of the operands, of gamma and of beta
constexpr int kSumBlock = 512;

template <typename A> struct Partials {
    A* from[kSums];  // rows[k] rows of one value a channel
    int64_t rows[kSums];
    A* to[kSums];  // null: not wanted
};

// Block (x, k) owns `width` channels (a power of two) of sum k; a thread one of them in every (kSumBlock / width)th row.
template <typename A>
__global__ void __launch_bounds__(kSumBlock, 1) sum_rows(const __grid_constant__ Partials<A> partials, int64_t channels, int width) {
    __shared__ double sums[kSumBlock];
    const A* __restrict__ from = partials.from[blockIdx.y];
    A* to = partials.to[blockIdx.y];
    const int64_t rows = partials.rows[blockIdx.y];
    if (to == nullptr) return;
    const int64_t channel = int64_t(blockIdx.x) * width + threadIdx.x % width;
    double sum = 0;
    if (channel < channels) {
#pragma unroll 4
        for (int64_t row = threadIdx.x / width; row < rows; row += kSumBlock / width) sum += double(from[row * channels + channel]);
    }
    sums[threadIdx.x] = sum;
    for (int half = kSumBlock / 2; half >= width; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x < width && channel < channels) to[channel] = A(sums[threadIdx.x]);
}
// --- end shared: sums of gradients ---

// Channels of one pixel are rows as others are.
template <typename T> struct GradientsInRegisters {
    static constexpr bool fit = false;
    static constexpr int64_t partial_rows = 0;
    GradientsInRegisters(const Sizes&, int) {}
    template <typename... Arguments> void launch(const Arguments&...) const {}
};

// --- shared: group norm gradients (home: kernels/linear_swish_group_norm.py) ---
// Everything else: h and grad are read twice. A row is the pixels of one channel of one sample, or one of the `parts` of them; `group`
// threads (a power of two) own it, part of a warp or the block. Three kernels: joint moments of the rows; of the slices, with what their
// channels give gamma and beta; the gradient of h, and what the rows give the operands.
template <int V> struct Row {
    int64_t index, sample, begin;  // begin: of the part, in the tensor
    int channel, lane, group;
    Span<V> span;
    bool exists;
    __device__ __forceinline__ Row(const Sizes& sizes, int64_t part_values, int parts, int group)
        : lane(threadIdx.x % group), group(group), span(0, 0) {
        index = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
        const int64_t whole = parts == 1 ? index : quotient(index, int64_t(parts)), skipped = (index - whole * parts) * part_values;
        const int64_t channels = int64_t(sizes.groups) * sizes.channels;
        sample = quotient(whole, channels);
        channel = int(whole - sample * channels);
        begin = whole * sizes.spatial + skipped;
        exists = whole < sizes.slices * sizes.channels;
        if (exists) span = Span<V>(begin, min(part_values, sizes.spatial - skipped));
    }
};

// use(pack of h, of grad, place in the tensor) for each pack of the thread, and then for each loose value, as packs of one. AGAIN: they are
// read once more, and may stay in L2 until then.
template <bool AGAIN, typename T, typename F>
__device__ __forceinline__ void for_each_pair(
    const T* __restrict__ h, const T* __restrict__ grad, const Row<kPack<T>>& row, F&& use) {
    constexpr int V = kPack<T>;
    for (int64_t j = row.lane; j < row.span.packs; j += kStreamBatch * row.group) {
        Pack<T, V> raw[kStreamBatch], raw_grad[kStreamBatch];
        const int64_t first = row.begin + row.span.head + j * V;
#pragma unroll
        for (int b = 0; b < kStreamBatch; ++b) {
            if (j + b * row.group < row.span.packs) {
                const int64_t at = first + b * row.group * V;
                raw[b] = AGAIN ? *reinterpret_cast<const Pack<T, V>*>(h + at) : load_streaming<T, V>(h + at);
                raw_grad[b] = AGAIN ? *reinterpret_cast<const Pack<T, V>*>(grad + at) : load_streaming<T, V>(grad + at);
            }
        }
#pragma unroll
        for (int b = 0; b < kStreamBatch; ++b) {
            if (j + b * row.group < row.span.packs) use(raw[b], raw_grad[b], first + b * row.group * V);
        }
    }
    for (int j = row.lane; j < row.span.head + row.span.tail; j += row.group) {
        const int64_t at = row.begin + row.span.loose(j);
        Pack<T, 1> raw, raw_grad;
        raw.value[0] = h[at];
        raw_grad.value[0] = grad[at];
        use(raw, raw_grad, at);
    }
}

template <typename T>
__global__ void __launch_bounds__(kMaxGroup, 1) joint_moments_of_rows(
    const T* __restrict__ grad, const T* __restrict__ h, Joint<Acc<T>>* __restrict__ joints, Vectors<Acc<T>> vectors, Sizes sizes,
    int64_t part_values, int parts, int group) {
    using A = Acc<T>;
    __shared__ Joint<A> warp_joints[kMaxGroup / 32];
    const Row<kPack<T>> row(sizes, part_values, parts, group);
    A operand[kOperands];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) operand[k] = __ldg(vectors.operand[k] + row.channel);
    JointAccumulator<A, kPack<T>> accumulator;
    Joint<A> loose;
    for_each_pair<true>(h, grad, row, [&](const auto& raw, const auto& raw_grad, int64_t) {
        constexpr int W = sizeof(raw.value) / sizeof(T);
        Pack<A, W> v, given;
#pragma unroll
        for (int i = 0; i < W; ++i) {
            v.value[i] = activate(to_acc(raw.value[i]), operand);
            given.value[i] = to_acc(raw_grad.value[i]);
        }
        if constexpr (W > 1) {
            accumulator.add(v, given);
        } else {
            Joint<A> one;
            one.v = moments_of(v.value[0]);
            one.sum = given.value[0];
            loose = merge(loose, one);
        }
    });
    const Joint<A> joint = merge_across_group(merge(accumulator.joint(), loose), group, warp_joints);
    if (row.exists && row.lane == 0) joints[row.index] = joint;
}

template <typename A> struct SliceGradient {
    A hi, lo, rstd, mean, mean_lo, slope;  // v's mean as hi + lo, and so that of w: its rounding would add up in a channel's sum
};

__device__ __forceinline__ double sum_across_warp(double v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

// A warp owns a slice, and a lane every 32nd of its channels.
template <typename A>
__global__ void __launch_bounds__(kMaxGroup, 1) merge_rows(
    const Joint<A>* __restrict__ joints, SliceGradient<A>* __restrict__ slice_gradients, const A* __restrict__ gamma,
    Partials<A> partials, Sizes sizes, int parts, A eps) {
    const int lane = threadIdx.x % 32;
    const int64_t slice = int64_t(blockIdx.x) * (kMaxGroup / 32) + threadIdx.x / 32, first_row = slice * sizes.channels;
    if (slice >= sizes.slices) return;
    const int first = first_channel(slice, sizes);
    const auto joint_of = [&](int c) {
        Joint<A> joint = joints[(first_row + c) * parts];
        for (int p = 1; p < parts; ++p) joint = merge(joint, joints[(first_row + c) * parts + p]);
        return joint;
    };
    Moments<A> m;
    double weighted = 0, co = 0;
    for (int c = lane; c < sizes.channels; c += 32) {
        const Joint<A> joint = joint_of(c);
        m = merge(m, joint.v);
        weighted += double(gamma[first + c]) * double(joint.sum);
    }
    const Scale<A> scale(merge_across_warp(m), A(sizes.n), eps);
    const A hi = __shfl_sync(~0u, scale.hi, 0), lo = __shfl_sync(~0u, scale.lo, 0), rstd = __shfl_sync(~0u, scale.rstd, 0);
    const double mean = sum_across_warp(weighted) / double(sizes.n);
    for (int c = lane; c < sizes.channels; c += 32) {
        const Joint<A> joint = joint_of(c);
        const A offset = (joint.v.hi - hi) + (joint.v.lo - lo);
        const double own_gamma = gamma[first + c];
        co += own_gamma * double(joint.co) + (own_gamma * double(joint.sum) - mean * double(sizes.spatial)) * double(offset);
        if (partials.to[kOperands] != nullptr) partials.from[kOperands][first_row + c] = rstd * (joint.co + joint.sum * offset);
        if (partials.to[kOperands + 1] != nullptr) partials.from[kOperands + 1][first_row + c] = joint.sum;
    }
    co = sum_across_warp(co);
    const A rounded = A(mean);
    if (lane == 0) slice_gradients[slice] = {hi, lo, rstd, rounded, A(mean - rounded), A(double(rstd) * co / double(sizes.n))};
}

template <typename T>
__global__ void __launch_bounds__(kMaxGroup, 1) gradients_of_rows(
    const T* __restrict__ grad, const T* __restrict__ h, T* __restrict__ grad_h, const SliceGradient<Acc<T>>* __restrict__ slice_gradients,
    Vectors<Acc<T>> vectors, Partials<Acc<T>> partials, Sizes sizes, int64_t part_values, int parts, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[kOperands][kMaxGroup / 32];
    const Row<kPack<T>> row(sizes, part_values, parts, group);
    A operand[kOperands], sums[kOperands] = {};
#pragma unroll
    for (int k = 0; k < kOperands; ++k) operand[k] = __ldg(vectors.operand[k] + row.channel);
    SliceGradient<A> slice = {};
    if (row.exists) slice = slice_gradients[row.sample * sizes.groups + quotient(row.channel, sizes.channels)];
    const A gamma = __ldg(vectors.gamma + row.channel);
    for_each_pair<false>(h, grad, row, [&](const auto& raw, const auto& raw_grad, int64_t at) {
        constexpr int W = sizeof(raw.value) / sizeof(T);
        Pack<T, W> out;
        A pack_sums[kOperands] = {};
#pragma unroll
        for (int i = 0; i < W; ++i) {
            const A own = to_acc(raw.value[i]), v = activate(own, operand), normal = ((v - slice.hi) - slice.lo) * slice.rstd;
            // The mean goes with what varies: of g - mean alone the roundings would be equal, and add up in a channel's sum.
            const A expected = slice.mean + normal * slice.slope;
            const A grad_v = slice.rstd * ((gamma * to_acc(raw_grad.value[i]) - expected) - slice.mean_lo);
            A grad_operand[kOperands];
            from_acc(differentiate(own, operand, v, grad_v, grad_operand), out.value[i]);
#pragma unroll
            for (int k = 0; k < kOperands; ++k) pack_sums[k] += grad_operand[k];
        }
#pragma unroll
        for (int k = 0; k < kOperands; ++k) sums[k] += pack_sums[k];
        if (grad_h != nullptr) store_streaming(grad_h + at, out);
    });
    sum_across_group(sums, group, warp_sums);
    if (!row.exists || row.lane != 0) return;
    const int64_t part = row.index - (row.sample * sizes.groups * sizes.channels + row.channel) * parts;
    const int64_t at = (row.sample * parts + part) * sizes.groups * sizes.channels + row.channel;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
        if (partials.to[k] != nullptr) partials.from[k][at] = sums[k];
    }
}

// How a backward goes, and the rows of partial sums it leaves.
template <typename T> struct GradientPlan {
    const GradientsInRegisters<T> registers;
    int group = 1, parts = 1;
    int64_t part_values = 0, operand_rows, norm_rows;
    GradientPlan(const Sizes& sizes, int sms) : registers(sizes, sms) {
        operand_rows = norm_rows = registers.partial_rows;
        if (registers.fit) return;
        const int64_t row_packs = sizes.spatial / kPack<T>;
        if (row_packs >= 4 * kMaxGroup) {
            group = kMaxGroup;
            parts = stream_parts(sizes.slices * sizes.channels, sizes.spatial * int64_t(sizeof(T)), sms);
        } else {
            while (group < 32 && group < row_packs) group *= 2;
        }
        part_values = divide_up(divide_up(sizes.spatial, parts), 8 * kPack<T>) * 8 * kPack<T>;
        parts = int(divide_up(sizes.spatial, part_values));
        norm_rows = sizes.slices / sizes.groups;
        operand_rows = norm_rows * parts;
    }
};

// The workspace: joint moments of the rows, what there is to know of the slices, partial sums.
template <typename T> struct GradientSpace {
    using A = Acc<T>;
    int64_t joints = 0, slices = 0, partials, bytes;
    GradientSpace(const GradientPlan<T>& plan, const Sizes& sizes) {
        const int64_t channels = int64_t(sizes.groups) * sizes.channels;
        if (!plan.registers.fit) {
            joints = sizes.slices * sizes.channels * plan.parts * int64_t(sizeof(Joint<A>));
            slices = divide_up(sizes.slices * int64_t(sizeof(SliceGradient<A>)), 64) * 64;
        }
        partials = (kOperands * plan.operand_rows + 2 * plan.norm_rows) * channels * int64_t(sizeof(A));
        bytes = joints + slices + partials;
    }
};

template <typename T>
static cudaError_t launch_backward(const void* gradv, const void* hv, void* grad_hv, const Vectors<Acc<T>>& vectors, void* const* to,
    const Sizes& sizes, double eps, void* workspace, cudaStream_t stream) {
    using A = Acc<T>;
    const T *grad = static_cast<const T*>(gradv), *h = static_cast<const T*>(hv);
    T* grad_h = static_cast<T*>(grad_hv);
    if (!aligned_16(h, grad) || !aligned_16(h, grad_h)) return cudaErrorMisalignedAddress;
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const GradientPlan<T> plan(sizes, device.sms);
    const GradientSpace<T> space(plan, sizes);
    const int64_t channels = int64_t(sizes.groups) * sizes.channels;
    char* const base = static_cast<char*>(workspace);
    Partials<A> partials;
    A* next = reinterpret_cast<A*>(base + space.joints + space.slices);
    bool any_operand = grad_h != nullptr, any_sum = false;
    for (int k = 0; k < kSums; ++k) {
        partials.rows[k] = k < kOperands ? plan.operand_rows : plan.norm_rows;
        partials.from[k] = next;
        partials.to[k] = static_cast<A*>(to[k]);
        next += partials.rows[k] * channels;
        any_operand = any_operand || (k < kOperands && to[k] != nullptr);
        any_sum = any_sum || to[k] != nullptr;
    }
    if (plan.registers.fit) {
        plan.registers.launch(grad, h, grad_h, vectors, partials, sizes, eps, stream);
    } else {
        auto* joints = reinterpret_cast<Joint<A>*>(base);
        auto* slices = reinterpret_cast<SliceGradient<A>*>(base + space.joints);
        const unsigned blocks = unsigned(divide_up(sizes.slices * sizes.channels * plan.parts, kMaxGroup / plan.group));
        joint_moments_of_rows<T><<<blocks, kMaxGroup, 0, stream>>>(
            grad, h, joints, vectors, sizes, plan.part_values, plan.parts, plan.group);
        merge_rows<A><<<unsigned(divide_up(sizes.slices, kMaxGroup / 32)), kMaxGroup, 0, stream>>>(
            joints, slices, vectors.gamma, partials, sizes, plan.parts, A(eps));
        if (any_operand) {
            gradients_of_rows<T><<<blocks, kMaxGroup, 0, stream>>>(
                grad, h, grad_h, slices, vectors, partials, sizes, plan.part_values, plan.parts, plan.group);
        }
    }
    int width = 1;
    while (width < 32 && width < channels) width *= 2;
    const dim3 grid(unsigned(divide_up(channels, width)), kSums);
    if (any_sum) sum_rows<A><<<grid, kSumBlock, 0, stream>>>(partials, channels, width);
    return cudaGetLastError();
}

// As the forward's; all operands have one value a channel. grad_h: null if it is not wanted. to: the gradients of the operands, gamma and
// beta, in the vectors' type, each null if it is not wanted. workspace: group_norm_backward_workspace bytes.
extern "C" int64_t group_norm_backward_workspace(int dtype, int64_t slices, int64_t n, int64_t spatial, int groups) {
    const Sizes sizes = {slices, n, spatial, groups, int(n / spatial)};
    Device device;
    if (current_device(&device) != cudaSuccess) return 0;
    switch (dtype) {
        case 0: return GradientSpace<float>({sizes, device.sms}, sizes).bytes;
        case 1: return GradientSpace<double>({sizes, device.sms}, sizes).bytes;
        default: return GradientSpace<__half>({sizes, device.sms}, sizes).bytes;
    }
}
extern "C" int group_norm_backward(
    int dtype, const void* grad, const void* h, void* grad_h, const void* const* vectors, void* const* to, int64_t slices, int64_t n,
    int64_t spatial, int groups, double eps, void* workspace, cudaStream_t stream) {
    const Sizes sizes = {slices, n, spatial, groups, int(n / spatial)};
    const bool full[kOperands] = {};
    const auto singles = [&] { return vectors_from<float>(vectors, full); };
    switch (dtype) {
        case 0: return launch_backward<float>(grad, h, grad_h, singles(), to, sizes, eps, workspace, stream);
        case 1: return launch_backward<double>(grad, h, grad_h, vectors_from<double>(vectors, full), to, sizes, eps, workspace, stream);
        case 2: return launch_backward<__half>(grad, h, grad_h, singles(), to, sizes, eps, workspace, stream);
        default: return launch_backward<__nv_bfloat16>(grad, h, grad_h, singles(), to, sizes, eps, workspace, stream);
    }
}
// --- end shared: group norm gradients ---

// ---------------------------------------------------------------------------------------------------------------------------------
// The convolution alone, for training, and its gradients: implicit GEMMs on the tensor cores in TF32, each value as hi + lo in three
// products, hi * hi, hi * lo and lo * hi: float32's range, and its accuracy as long as sums are short, since tensor cores round towards
// zero; longer ones are made of short ones. Infinities make a NaN of such a product: what is not finite is computed again in float32.
// All work on strips of 128 columns, which warps share out, and copy the next rows into shared memory while they use these.

constexpr int kStripWidth = 128, kStripWarps = 4, kStripBlock = 32 * kStripWarps;

// d += a * b: 16 rows by 8 of K by 8 columns. FIRST: d = a * b.
template <bool FIRST = false> __device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    const float c[4] = {FIRST ? 0.0f : d[0], FIRST ? 0.0f : d[1], FIRST ? 0.0f : d[2], FIRST ? 0.0f : d[3]};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}
// v = hi + lo, rounded to nearest; of lo the tensor cores read the upper 19 bits, which are rounded too, or cut off: in a long sum, where
// lo has either sign, that is as good.
template <bool ROUND = true> __device__ __forceinline__ void split_tf32(float v, float& hi, float& lo) {
    uint32_t bits = 0;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#elif __CUDA_ARCH__ >= 800
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#endif
    hi = __uint_as_float(bits);
    lo = ROUND ? __uint_as_float(__float_as_uint(v - hi) + 0x1000) : v - hi;
}

// Weights a little larger, by what truncation takes from sums on average: of w * factor.
__device__ __forceinline__ void split_weight(float w, float factor, float growth, float& hi, float& lo) {
    float unused;
    const float v = w * factor;
    split_tf32(v, hi, unused);
    split_tf32(fmaf(v, growth, fmaf(w, factor, -hi)), lo, unused);
}

// Volatile, so that a value with two places in operands is read into both: else the compiler moves it to and fro.
__device__ __forceinline__ float2 load_pair(const float* from) {
    float2 v;
    const uint32_t at = uint32_t(__cvta_generic_to_shared(from));
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

// BYTES of them; zeros beyond the first `exist`, which are all or none.
template <int BYTES> __device__ __forceinline__ void copy_or_zero(float* to, const float* from, int exist) {
#if __CUDA_ARCH__ >= 800
    const uint32_t at = uint32_t(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(exist) : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LEFT> __device__ __forceinline__ void await_copies() {  // all but the latest LEFT groups
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
// A warp copies ROWS rows of a strip, from column `first` on, `stride` floats apart, to rows kTo apart in shared memory: zeros where
// exists(row) is false, and beyond the image. pairs: the image's rows start at whole 8 bytes.
template <int ROWS, int kTo, typename F>
__device__ __forceinline__ void copy_rows(float* to, const float* from, int64_t stride, int first, int width, bool pairs, const F& exists) {
    const int lane = threadIdx.x % 32;
    if (pairs) {
        const auto bytes = [&](int column) { return column >= 0 && column < width ? 8 : 0; };
        const int left = bytes(first + 2 * lane), right = bytes(first + 64 + 2 * lane);
        to += 2 * lane, from += 2 * lane;
#pragma unroll
        for (int i = 0; i < ROWS; ++i, from += stride) {
            const bool there = exists(i);
            copy_or_zero<8>(to + i * kTo, from, there ? left : 0);
            copy_or_zero<8>(to + i * kTo + 64, from + 64, there ? right : 0);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < ROWS; ++i, from += stride) {
            for (int j = lane; j < kStripWidth; j += 32) {
                const int column = first + j;
                copy_or_zero<4>(to + i * kTo + j, from + j, exists(i) && column >= 0 && column < width ? 4 : 0);
            }
        }
    }
}
// A pair of neighbours, at whole 8 bytes or one by one, of which `there` exist.
__device__ __forceinline__ void copy_pair(float* to, const float* from, bool pairs, int there) {
    if (pairs) {
        copy_or_zero<8>(to, from, there > 0 ? 8 : 0);
    } else {
        copy_or_zero<4>(to, from, there > 0 ? 4 : 0);
        copy_or_zero<4>(to + 1, from + 1, there > 1 ? 4 : 0);
    }
}
// One thread copies the two columns beyond a strip.
__device__ __forceinline__ void copy_halo(float* to, const float* from, int first, int width, bool exists, bool pairs) {
    const int column = first + kStripWidth;
    copy_pair(to + kStripWidth, from + kStripWidth, pairs, exists && column >= 0 ? width - column : 0);
}

// A lane's four neighbouring pixels, and with 3x3 kernels the two after them, as operands: of an mma's two pixels the second is two columns
// after the first, so that four sets of registers, of columns k and k + 2, serve all shifts.
template <int KS, bool ROUND = true, int W>
__device__ __forceinline__ void split_pixels(const float* from, float (&hi)[KS + 1][W], float (&lo)[KS + 1][W], int first = 0) {
    const auto split = [&](int k, int j, float v) { split_tf32<ROUND>(v, hi[k][first + j], lo[k][first + j]); };
    const float4 left = *reinterpret_cast<const float4*>(from);
    split(0, 0, left.x), split(1, 0, left.y), split(0, 1, left.z), split(1, 1, left.w);
    if constexpr (KS > 1) {
        const float2 middle = load_pair(from + 2), right = load_pair(from + 4);
        split(2, 0, middle.x), split(3, 0, middle.y), split(2, 1, right.x), split(3, 1, right.y);
    }
}

// to[o] = bias[o] + the sum over i of from[i], `pad` zeros around it, correlated with the weights of i and o. That is the convolution, and,
// with the weights flipped and transposed, the gradient of its input.
struct Correlation {
    const float *from, *weight, *bias;  // bias: null, or one value for each of to's channels
    float* to;
    float4* fragments;
    int64_t tiles;
    int from_channels, to_channels, slabs, to_blocks;  // slabs of eight channels; blocks of 8 * NT
    int height, width, pad, rows, columns, column_tiles;
    bool flipped, pairs;
};

template <int KS> __device__ __forceinline__ float weight_between(const Correlation& c, int from, int to, int ky, int kx) {
    if (from >= c.from_channels || to >= c.to_channels) return 0.0f;
    if (c.flipped) return __ldg(c.weight + ((from * c.to_channels + to) * KS + KS - 1 - ky) * KS + KS - 1 - kx);
    return __ldg(c.weight + ((to * c.from_channels + from) * KS + ky) * KS + kx);
}

// A thread prepares a lane's share of the weights between a slab and eight of to's channels: both of its hi, both of its lo.
template <int KS, int NT> __global__ void __launch_bounds__(kStripBlock) prepare_fragments(const __grid_constant__ Correlation c) {
    const int i = int(blockIdx.x) * kStripBlock + threadIdx.x, lane = i % 32, nt = i / 32 % NT, kx = i / (32 * NT) % KS;
    const int ky = i / (32 * NT * KS) % KS, of_slabs = i / (32 * NT * KS * KS), slab = of_slabs % c.slabs, block = of_slabs / c.slabs;
    if (block >= c.to_blocks) return;
    const int from = slab * 8 + lane % 4, to = (block * NT + nt) * 8 + lane / 4;
    float4 fragment;
    split_tf32(weight_between<KS>(c, from, to, ky, kx), fragment.x, fragment.z);
    split_tf32(weight_between<KS>(c, from + 4, to, ky, kx), fragment.y, fragment.w);
    c.fragments[i] = fragment;
}

template <int KS> __device__ __noinline__ float correlate_one(const Correlation& c, int64_t sample, int channel, int row, int column) {
    double sum = 0;
    for (int from = 0; from < c.from_channels; ++from) {
        const float* const plane = c.from + (sample * c.from_channels + from) * c.height * c.width;
        for (int tap = 0; tap < KS * KS; ++tap) {
            const int y = row + tap / KS - c.pad, x = column + tap % KS - c.pad;
            const bool exists = y >= 0 && y < c.height && x >= 0 && x < c.width;
            if (!exists) continue;
            sum += double(__ldg(plane + int64_t(y) * c.width + x)) * double(weight_between<KS>(c, from, channel, tap / KS, tap % KS));
        }
    }
    return float(c.bias == nullptr ? sum : sum + double(__ldg(c.bias + channel)));
}

// A block takes a run of tiles, a row of a strip of NT * 8 of to's channels, a warp 32 columns of them, and from's channels in slabs of
// eight. A lane's values are of four neighbouring columns: of from's channels lane % 4 and 4 further on, of to's two from 2 * (lane % 4).
constexpr int kCorrelateBlocks = 3;  // an SM
constexpr int kImageRow = kStripWidth + 8;  // floats of a strip's row in shared memory
static_assert(kImageRow % 32 == 8, "lanes of four channels and two fours of pixels meet different banks");
constexpr int kLineRow = 32 + 4;  // of a row of a warp's results there

template <int KS, int NT>
__global__ void __launch_bounds__(kStripBlock, kCorrelateBlocks) correlate(const __grid_constant__ Correlation c) {
    constexpr int MT = 2, kStage = KS * 8 * kImageRow, kLines = NT * 8;
    extern __shared__ float4 shared_quads[];
    float* const shared = reinterpret_cast<float*>(shared_quads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eighth = lane / 4, quarter = lane % 4;
    struct Tile {
        int64_t sample;
        int block, row, column;
    };
    const auto after = [&](Tile tile) {
        if (++tile.block < c.to_blocks) return tile;
        tile.block = 0;
        if (++tile.row >= c.rows) tile.row = 0, tile.column += kStripWidth;
        if (tile.column >= c.columns) tile.column = 0, ++tile.sample;
        return tile;
    };
    const auto copy = [&](const Tile& tile, int slab, int stage) {
        const int first_row = tile.row - c.pad, first = tile.column - c.pad;
        const int64_t plane = int64_t(c.height) * c.width;
        float* const to = shared + stage * kStage;
        const float* const from = c.from + (tile.sample * c.from_channels + slab * 8) * plane + int64_t(first_row) * c.width + first;
        const auto exists = [&](int channel, int row) {
            return slab * 8 + channel < c.from_channels && first_row + row >= 0 && first_row + row < c.height;
        };
#pragma unroll
        for (int channel = warp; channel < 8; channel += kStripWarps) {
            copy_rows<KS, 8 * kImageRow>(to + channel * kImageRow, from + channel * plane, c.width, first, c.width, c.pairs,
                [&](int row) { return exists(channel, row); });
        }
        if (KS > 1 && threadIdx.x < KS * 8) {
            const int row = threadIdx.x / 8, channel = threadIdx.x % 8;
            copy_halo(to + threadIdx.x * kImageRow, from + channel * plane + row * c.width, first, c.width, exists(channel, row), c.pairs);
        }
        commit_copies();
    };
    const int64_t begin = c.tiles * blockIdx.x / gridDim.x, end = c.tiles * (blockIdx.x + 1) / gridDim.x;
    const int64_t rows = quotient(begin, int64_t(c.to_blocks)), strips = quotient(rows, int64_t(c.rows));
    const int64_t sample = quotient(strips, int64_t(c.column_tiles));
    Tile tile = {sample, int(begin - rows * c.to_blocks), int(rows - strips * c.rows),
        int(strips - sample * c.column_tiles) * kStripWidth};
    int stage = 0;
    copy(tile, 0, 0);
    for (int64_t i = begin; i < end; ++i) {
        const Tile next = i + 1 < end ? after(tile) : tile;
        const int channel_first = tile.block * NT * 8 + 2 * quarter;
        float total[NT][MT][4] = {};
        for (int slab = 0; slab < c.slabs; ++slab, stage ^= 1) {
            const bool last = slab + 1 == c.slabs;
            copy(last ? next : tile, last ? 0 : slab + 1, stage ^ 1);
            await_copies<1>();
            __syncthreads();
            const float* pixels = shared + stage * kStage + quarter * kImageRow + warp * 32 + eighth * 4;
            const float4* fragments = c.fragments + int64_t(tile.block * c.slabs + slab) * (KS * KS * NT * 32) + lane;
#pragma unroll 1
            for (int ky = 0; ky < KS; ++ky, pixels += 8 * kImageRow) {
                float w[KS][NT][2][2];  // hi, lo
#pragma unroll
                for (int k = 0; k < KS * NT; ++k, fragments += 32) {
                    const float4 f = __ldg(fragments);
                    float(&to)[2][2] = w[k / NT][k % NT];
                    to[0][0] = f.x, to[0][1] = f.y, to[1][0] = f.z, to[1][1] = f.w;
                }
                float hi[KS + 1][4], lo[KS + 1][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) split_pixels<KS>(pixels + half * 4 * kImageRow, hi, lo, 2 * half);
                float sums[NT][MT][4];  // smallest products first
#pragma unroll
                for (int product = 0; product < 3 * KS; ++product) {
                    const int kx = product % KS;
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
                        for (int mt = 0; mt < MT; ++mt) {
                            float(&d)[4] = sums[nt][mt];
                            const float(&f)[2][2] = w[kx][nt];
                            if (product == 0) mma_tf32<true>(d, lo[mt], f[0]);
                            else if (product / KS == 0) mma_tf32(d, lo[kx + mt], f[0]);
                            else mma_tf32(d, hi[kx + mt], f[product / KS == 1]);
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < NT * MT * 4; ++k) total[k / (MT * 4)][k / 4 % MT][k % 4] += sums[k / (MT * 4)][k / 4 % MT][k % 4];
            }
            __syncthreads();
        }
        if (c.bias != nullptr) {
#pragma unroll
            for (int k = 0; k < NT * 2; ++k) {
                const int nt = k / 2, j = k % 2, channel = channel_first + nt * 8 + j;
                const float bias = channel < c.to_channels ? __ldg(c.bias + channel) : 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) total[nt][i % 2][i / 2 * 2 + j] += bias;
            }
        }
        const int column = tile.column + warp * 32 + eighth * 4, columns_left = c.columns - column;
        const int channels_left = columns_left > 0 ? c.to_channels - channel_first : 0;
        const int64_t plane = int64_t(c.rows) * c.columns;
        float* const to = c.to + (tile.sample * c.to_channels + channel_first) * plane + int64_t(tile.row) * c.columns + column;
        // Rows that do not start at whole 16 bytes go through shared memory, so that a warp writes 128 neighbouring bytes at a time.
        float* const lines = shared + 2 * kStage + warp * kLines * kLineRow;
#pragma unroll
        for (int k = 0; k < NT * 2; ++k) {
            const int nt = k / 2, j = k % 2, channel = nt * 8 + j;
            const float4 v = make_float4(total[nt][0][j], total[nt][1][j], total[nt][0][2 + j], total[nt][1][2 + j]);
            if (c.columns % 4 != 0) {
                *reinterpret_cast<float4*>(lines + (channel + 2 * quarter) * kLineRow + eighth * 4) = v;
            } else if (channel < channels_left) {
                *reinterpret_cast<float4*>(to + channel * plane) = v;
            }
        }
        __syncwarp();
        if (c.columns % 4 != 0) {
            const int own_column = tile.column + warp * 32 + lane, first = tile.block * NT * 8, channels = min(NT * 8, c.to_channels - first);
            float* at = c.to + (tile.sample * c.to_channels + first) * plane + int64_t(tile.row) * c.columns + own_column;
            if (own_column < c.columns && channels == NT * 8) {
#pragma unroll
                for (int channel = 0; channel < NT * 8; ++channel, at += plane) *at = lines[channel * kLineRow + lane];
            } else if (own_column < c.columns) {
                for (int channel = 0; channel < channels; ++channel, at += plane) *at = lines[channel * kLineRow + lane];
            }
            __syncwarp();
        }
        float zero = 0;
#pragma unroll
        for (int k = 0; k < NT * MT * 4; ++k) zero = fmaf(total[k / (MT * 4)][k / 4 % MT][k % 4], 0.0f, zero);
        if (zero != 0.0f) {  // NaN: a value is not finite
            for (int k = 0; k < NT * 2 * 4; ++k) {
                const int channel = k / 8 * 8 + k / 4 % 2, p = k % 4;
                if (channel >= channels_left || p >= columns_left) continue;
                to[channel * plane + p] = correlate_one<KS>(c, tile.sample, channel_first + channel, tile.row, column + p);
            }
        }
        tile = next;
    }
    await_copies<0>();
}

// The gradient of the weights, grad[o] times x[i] at each shift, summed over all pixels.
struct WeightGradient {
    const float *grad, *x;  // (samples, out_channels, rows, columns), (samples, in_channels, height, width)
    float *partials, *to;
    int64_t samples, units;  // a unit: a row of a strip
    int out_channels, in_channels, in_slabs, height, width, rows, columns, column_tiles, blocks;
    bool pairs;
};
constexpr int kGradChannels = 32;  // of grad, a block; it has eight of x
template <int KS> constexpr int kWeightPart = kGradChannels * 8 * KS * KS;  // a block's sums

// Of 16 * MT channels of grad and eight of x: a lane's pixels of grad times x's at each shift. x(ky): where its pixels of that row begin.
template <int KS, int MT, typename F>
__device__ __forceinline__ void add_products(const float (&grad)[MT][2][4], const F& x, float (&total)[MT][KS * KS][4]) {
    float grad_hi[2][MT][4], grad_lo[2][MT][4];  // of pixels k and k + 2
#pragma unroll
    for (int i = 0; i < MT * 8; ++i) {
        const int mt = i / 8, half = i / 4 % 2, k = i % 4;
        split_tf32<false>(grad[mt][half][k], grad_hi[k % 2][mt][k / 2 * 2 + half], grad_lo[k % 2][mt][k / 2 * 2 + half]);
    }
#pragma unroll
    for (int ky = 0; ky < KS; ++ky) {
        float x_hi[KS + 1][2], x_lo[KS + 1][2];
        split_pixels<KS, false>(x(ky), x_hi, x_lo);
        float sums[MT][KS][4];  // smallest products first
#pragma unroll
        for (int product = 0; product < 6; ++product) {
            const int k = product % 2;
#pragma unroll
            for (int kx = 0; kx < KS; ++kx) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    float(&d)[4] = sums[mt][kx];
                    if (product == 0) mma_tf32<true>(d, grad_lo[k][mt], x_hi[kx]);
                    else if (product == 1) mma_tf32(d, grad_lo[k][mt], x_hi[k + kx]);
                    else if (product < 4) mma_tf32(d, grad_hi[k][mt], x_lo[k + kx]);
                    else mma_tf32(d, grad_hi[k][mt], x_hi[k + kx]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MT * KS * 4; ++i) total[i / (KS * 4)][ky * KS + i / 4 % KS][i % 4] += sums[i / (KS * 4)][i / 4 % KS][i % 4];
    }
}

// Block (b, channels) sums a run of units; a warp takes every fourth step of 16 pixels, twice the K of an mma, and a lane four neighbouring
// ones. The sums of a step are made apart.
constexpr int kSumBlocks = 2;  // an SM
constexpr int kSumRow = kStripWidth + 16;
static_assert(kSumRow % 32 == 16, "lanes of two channels and four fours of pixels meet different banks");

template <int KS>
__global__ void __launch_bounds__(kStripBlock, kSumBlocks) sum_weight_gradient(const __grid_constant__ WeightGradient p) {
    constexpr int MT = kGradChannels / 16, TAPS = KS * KS, kSlots = 2 * KS;  // rows of x: those in use, and as many to come
    constexpr int kGradStage = kGradChannels * kSumRow, kXRow = 8 * kSumRow, kPart = kWeightPart<KS>;
    extern __shared__ float4 shared_quads[];
    float *const shared_grad = reinterpret_cast<float*>(shared_quads), *const shared_x = shared_grad + 2 * kGradStage;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eighth = lane / 4, quarter = lane % 4;
    const int out_first = int(blockIdx.y) / p.in_slabs * kGradChannels, in_first = int(blockIdx.y) % p.in_slabs * 8;
    const int64_t grad_plane = int64_t(p.rows) * p.columns, plane = int64_t(p.height) * p.width;
    const int64_t begin = p.units * blockIdx.x / gridDim.x, end = p.units * (blockIdx.x + 1) / gridDim.x;
    struct Unit {
        int64_t sample;
        int strip, row, slot;
        bool first;  // no row of x is there from the unit before
    };
    const auto after = [&](Unit u) {
        u.first = ++u.row == p.rows;
        u.slot = (u.slot + (u.first ? KS : 1)) % kSlots;
        if (u.first) {
            u.row = 0;
            if (++u.strip == p.column_tiles) u.strip = 0, ++u.sample;
        }
        return u;
    };
    const auto copy = [&](const Unit& u, int stage) {
        const int column = u.strip * kStripWidth, out_left = p.out_channels - out_first - warp, in_left = p.in_channels - in_first;
        const float* const grad = p.grad + (u.sample * p.out_channels + out_first + warp) * grad_plane + u.row * p.columns + column;
        copy_rows<kGradChannels / kStripWarps, kStripWarps * kSumRow>(shared_grad + stage * kGradStage + warp * kSumRow, grad,
            kStripWarps * grad_plane, column, p.columns, p.pairs, [&](int i) { return i * kStripWarps < out_left; });
        const float* const x = p.x + (u.sample * p.in_channels + in_first) * plane + u.row * p.width + column;
        for (int ky = u.first ? 0 : KS - 1; ky < KS; ++ky) {
            float* const to = shared_x + (u.slot + ky) % kSlots * kXRow;
            const float* const from = x + ky * p.width;
            copy_rows<8 / kStripWarps, kStripWarps * kSumRow>(to + warp * kSumRow, from + warp * plane, kStripWarps * plane, column,
                p.width, p.pairs, [&](int i) { return warp + i * kStripWarps < in_left; });
            if (KS > 1 && threadIdx.x < 8) {
                const int channel = threadIdx.x;
                copy_halo(to + channel * kSumRow, from + channel * plane, column, p.width, channel < in_left, p.pairs);
            }
        }
    };
    const int64_t rows_before = quotient(begin, int64_t(p.rows)), sample = quotient(rows_before, int64_t(p.column_tiles));
    Unit unit = {sample, int(rows_before - sample * p.column_tiles), int(begin - rows_before * p.rows), 0, true};
    float total[MT][TAPS][4] = {};
    int stage = 0;
    copy(unit, 0);
    commit_copies();
    for (int64_t u = begin; u < end; ++u, stage ^= 1) {
        const Unit next = after(unit);
        if (u + 1 < end) copy(next, stage ^ 1);
        commit_copies();
        await_copies<1>();
        __syncthreads();
        const int left = p.columns - unit.strip * kStripWidth, steps = min(kStripWidth / 16, (left + 15) / 16);
        for (int step = warp; step < steps; step += kStripWarps) {
            const int pixel = step * 16 + 4 * quarter;
            float v[MT][2][4];
#pragma unroll
            for (int k = 0; k < MT * 2; ++k) {
                const float* const at = shared_grad + stage * kGradStage + (k * 8 + eighth) * kSumRow + pixel;
                *reinterpret_cast<float4*>(v[k / 2][k % 2]) = *reinterpret_cast<const float4*>(at);
            }
            const float* const from = shared_x + eighth * kSumRow + pixel;
            add_products<KS>(v, [&](int ky) { return from + (unit.slot + ky) % kSlots * kXRow; }, total);
        }
        __syncthreads();
        unit = next;
    }
    // The warps leave their sums side by side, and the block adds them up.
    float* const own = shared_grad + warp * kPart;
#pragma unroll
    for (int k = 0; k < MT * TAPS * 4; ++k) {
        const int mt = k / (TAPS * 4), tap = k / 4 % TAPS, channel = mt * 16 + k % 4 / 2 * 8 + eighth;
        own[(channel * 8 + 2 * quarter + k % 2) * TAPS + tap] = total[mt][tap][k % 4];
    }
    __syncthreads();
    float* const to = p.partials + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * kPart;
    for (int i = threadIdx.x; i < kPart; i += kStripBlock) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kStripWarps; ++w) sum += shared_grad[w * kPart + i];
        to[i] = sum;
    }
}

constexpr int kAddBlock = 256;
template <int N> __device__ __forceinline__ void add_over_block(double (&sums)[N]) {
    __shared__ double shared[kAddBlock];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        shared[threadIdx.x] = sums[k];
        for (int half = kAddBlock / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        }
        __syncthreads();
        sums[k] = shared[0];
        __syncthreads();
    }
}

struct GivenGradient {
    const float* grad;
    int channels, pixels;
    __device__ __forceinline__ float operator()(int64_t sample, int channel, int pixel) const {
        return __ldg(grad + (sample * channels + channel) * pixels + pixel);
    }
};
// Block (i, o) adds what the blocks left for the weights between channels i and o. given(sample, channel, pixel): a value of grad.
template <int KS, typename G>
__global__ void __launch_bounds__(kAddBlock) add_weight_gradient(const __grid_constant__ WeightGradient p, G given) {
    constexpr int TAPS = KS * KS, kPart = kWeightPart<KS>;
    const int in = blockIdx.x, out = blockIdx.y;
    const float* const part = p.partials + int64_t(out / kGradChannels * p.in_slabs + in / 8) * p.blocks * kPart;
    double sums[TAPS] = {};
    for (int64_t b = threadIdx.x; b < p.blocks; b += kAddBlock) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) sums[tap] += part[b * kPart + (out % kGradChannels * 8 + in % 8) * TAPS + tap];
    }
    add_over_block(sums);
    bool finite = true;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) finite = finite && isfinite(sums[tap]);
    if (!finite) {  // the halves of an infinity may make a NaN: once more, whole
        float plain[TAPS] = {};
        const int pixels = p.rows * p.columns;
        for (int64_t s = 0; s < p.samples; ++s) {
            const float* const x = p.x + (s * p.in_channels + in) * p.height * p.width;
            for (int i = threadIdx.x; i < pixels; i += kAddBlock) {
                const int row = quotient(i, p.columns);
                const float* const at = x + row * p.width + i - row * p.columns;
                const float grad = given(s, out, i);
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) plain[tap] = fmaf(grad, __ldg(at + tap / KS * p.width + tap % KS), plain[tap]);
            }
        }
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) sums[tap] = plain[tap];
        add_over_block(sums);
    }
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) p.to[(int64_t(out) * p.in_channels + in) * TAPS + tap] = float(sums[tap]);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The gradients of all that is trained, of 3x3 kernels from at most 8 channels to at most 32, in one sweep after the joint
// moments: the gradient of h is made row by row in shared memory, and used from there for x's and the weights'.
//
// A block owns a piece: rows [first, last) of x's gradient in a strip of 128 columns of one sample. Its warps have three trades. Eight make
// rows of q, which is h's gradient but for a factor of each channel, in a ring in shared memory; behind them four add a row's share to the
// weights' gradients, each for 16 of h's channels and every second step of 16 pixels, and four its share to three rows of x's gradient, each
// for 32 columns.

constexpr int kTailWarps = 8, kSumWarps = 4, kTrainWarps = kTailWarps + kSumWarps + kStripWarps, kTrainBlock = 32 * kTrainWarps;
constexpr int kRing = 2, kStages = 2, kXRing = 8;  // rows of q; of h and grad to come; of x, in use and to come
constexpr int kTailChannels = kGradChannels / kTailWarps;  // of a warp
static_assert(kTailWarps == 8, "a warp copies one of x's channels");

// What makes a channel's dh of its h and grad: q = (gamma * grad - (mean + (v - hi) * pull)) * v * (1 - v), dh = q * push. The mean goes with
// what varies: the roundings of gamma * grad - mean may all be the same, and would add up in a sum.
struct alignas(16) ChannelGradient {
    float bias, slope, gamma, mean, hi, pull, push, rstd;  // v = 1 / (1 + 2^((h + bias) * slope))
};
__device__ __forceinline__ float gradient_before_push(float biased, float grad, const ChannelGradient& c) {
    const float v = sigmoid_from_exponent(biased * c.slope);
    return fmaf(c.gamma, grad, -fmaf(v - c.hi, c.pull, c.mean)) * fmaf(-v, v, v);
}

struct Training {
    const float *grad, *h, *x, *weight, *bias, *scale, *gamma;
    const SliceGradient<float>* slices;
    float *grad_x, *partials, *bias_sums, *scale_sums;  // grad_x: null if it is not wanted; the others have a row for each piece
    int in_channels, out_channels, group_channels, height, width, rows, columns, column_tiles, bands;
    bool pairs;
};

__device__ __forceinline__ ChannelGradient channel_gradient(const Training& p, int64_t sample, int channel) {
    ChannelGradient c = {};
    if (channel >= p.out_channels) return c;
    const SliceGradient<float> s = p.slices[sample * (p.out_channels / p.group_channels) + channel / p.group_channels];
    c.bias = p.bias[channel], c.slope = -1.44269504f * p.scale[channel], c.gamma = p.gamma[channel];
    c.pull = s.rstd * s.slope, c.push = s.rstd * p.scale[channel], c.rstd = s.rstd;
    c.hi = s.hi, c.mean = fmaf(-s.lo, c.pull, s.mean);
    return c;
}

__device__ __forceinline__ float only_if(bool exists, float v) {  // no branch, which would keep values from overlapping
    float r;
    asm("{.reg .pred p; setp.ne.s32 p, %2, 0; selp.f32 %0, %1, 0f00000000, p;}" : "=f"(r) : "f"(v), "r"(int(exists)));
    return r;
}

// Where a value is not finite, the halves of an infinity may have made a NaN: one by one then.
__device__ __forceinline__ float gradient_of_h(const Training& p, const ChannelGradient& c, int64_t sample, int channel, int64_t pixel) {
    const int64_t at = (sample * p.out_channels + channel) * p.rows * p.columns + pixel;
    return gradient_before_push(__ldg(p.h + at) + c.bias, __ldg(p.grad + at), c) * c.push;
}
__device__ __noinline__ float gradient_of_x(
    const Training& p, const ChannelGradient* constants, int64_t sample, int channel, int row, int column) {
    double sum = 0;
    for (int from = 0; from < p.out_channels && sum == sum; ++from) {
        for (int tap = 0; tap < 9; ++tap) {
            const int y = row - tap / 3, x = column - tap % 3;
            if (y < 0 || y >= p.rows || x < 0 || x >= p.columns) continue;
            const float weight = __ldg(p.weight + (from * p.in_channels + channel) * 9 + tap);
            sum += double(gradient_of_h(p, constants[from], sample, from, int64_t(y) * p.columns + x)) * double(weight);
        }
    }
    return float(sum);
}
struct GradientOfH {  // for add_weight_gradient
    Training p;
    __device__ __forceinline__ float operator()(int64_t sample, int channel, int pixel) const {
        return gradient_of_h(p, channel_gradient(p, sample, channel), sample, channel, pixel);
    }
};

// The trades hand rows on by mbarriers, at which each thread arrives.
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int threads) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(uint32_t(__cvta_generic_to_shared(bar))), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, int parity) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(bar));
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra WAIT;}" ::"r"(at), "r"(parity) : "memory");
#elif __CUDA_ARCH__ >= 800
    asm volatile("{.reg .pred p;\nWAIT: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@!p bra WAIT;}" ::"r"(at), "r"(parity) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
#if __CUDA_ARCH__ >= 800
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(uint32_t(__cvta_generic_to_shared(bar))) : "memory");
#endif
}

constexpr int kTrainShared = ((kRing + 2 * kStages) * kGradChannels * kImageRow + kXRing * 8 * kSumRow + 4 * 9 * 32 * 4) * int(sizeof(float)) +
    kGradChannels * int(sizeof(ChannelGradient));

__global__ void __launch_bounds__(kTrainBlock, 1) differentiate_rows(const __grid_constant__ Training p) {
    constexpr int KS = 3, TAPS = 9, kStage = kGradChannels * kImageRow, kXRow = 8 * kSumRow;
    extern __shared__ float4 shared_quads[];
    __shared__ uint64_t full[kRing], empty[kRing];                   // of a row of q: made, and used
    float* const shared_q = reinterpret_cast<float*>(shared_quads);  // of row, channel, column from 2 before the strip's on
    float* const shared_raw = shared_q + kRing * kStage;             // of row, h or grad, channel, column as above
    float* const shared_x = shared_raw + 2 * kStages * kStage;       // of row, channel, column
    float2* const fragments = reinterpret_cast<float2*>(shared_x + kXRing * kXRow);  // of slab, tap, hi or lo, lane: the flipped weights
    ChannelGradient* const constants = reinterpret_cast<ChannelGradient*>(fragments + 4 * TAPS * 64);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eighth = lane / 4, quarter = lane % 4;
    const int strip_of = int(blockIdx.x) / p.bands, band = int(blockIdx.x) % p.bands;
    const int64_t sample = strip_of / p.column_tiles;
    const int column = strip_of % p.column_tiles * kStripWidth;
    const int first = quotient(p.height * band, p.bands), last = quotient(p.height * (band + 1), p.bands);
    const int begin = max(first - (KS - 1), 0);
    const int64_t plane = int64_t(p.height) * p.width, grad_plane = int64_t(p.rows) * p.columns;
    const bool wants_x = p.grad_x != nullptr, wants_weight = p.partials != nullptr;

    if (threadIdx.x < kRing) {
        mbarrier_init(full + threadIdx.x, 32 * kTailWarps);
        mbarrier_init(empty + threadIdx.x, 32 * (wants_x && wants_weight ? kSumWarps + kStripWarps : wants_x ? kStripWarps : kSumWarps));
    }
    for (int i = threadIdx.x; i < kGradChannels; i += kTrainBlock) constants[i] = channel_gradient(p, sample, i);
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * TAPS * 32; i += kTrainBlock) {
        const int slab = i / (32 * TAPS), tap = i / 32 % TAPS, from = slab * 8 + i % 4, to = i % 32 / 4;
        const auto split = [&](int from, float& hi, float& lo) {
            const bool exists = from < p.out_channels && to < p.in_channels;
            const float weight = exists ? p.weight[(from * p.in_channels + to) * TAPS + TAPS - 1 - tap] : 0.0f;
            split_weight(weight, constants[from].push, 1.0e-7f, hi, lo);
        };
        float2 hi, lo;
        split(from, hi.x, lo.x), split(from + 4, hi.y, lo.y);
        fragments[i / 32 * 64 + i % 32] = hi, fragments[i / 32 * 64 + 32 + i % 32] = lo;
    }
    __syncthreads();

    const auto ring_row = [&](int row) { return shared_q + row % kRing * kStage; };
    const auto turn = [&](int row) { return (row - begin) / kRing % 2; };  // parity of the row's use of its place
    if (warp < kTailWarps) {  // q
        const int own = warp * kTailChannels, channels = min(kTailChannels, p.out_channels - own);
        const int64_t at = (sample * p.out_channels + own) * grad_plane + column;
        float sums[kTailChannels], products[kTailChannels];
        bool exists[2][2];
#pragma unroll
        for (int k = 0; k < 4; ++k) exists[k / 2][k % 2] = column + 2 * lane + 64 * (k / 2) + k % 2 < p.columns;
        const auto raw_at = [&](int row) { return shared_raw + row % kStages * (2 * kStage) + own * kImageRow; };
        const auto copy_x = [&](int row) {
            if (row >= min(last, p.rows) + KS - 1 || !wants_weight) return;
            float* const to = shared_x + (row % kXRing * 8 + warp) * kSumRow;
            const float* const from = p.x + (sample * p.in_channels + warp) * plane + int64_t(row) * p.width + column;
            const bool is_one = warp < p.in_channels;
            copy_rows<1, 0>(to, from, 0, column, p.width, p.pairs, [&](int) { return is_one; });
            if (lane == 0) copy_halo(to, from, column, p.width, is_one, p.pairs);
        };
        // A thread copies what it will read itself, and a row of x that the weights' warps need two rows on.
        const auto copy = [&](int row) {
            copy_x(row + KS - 1);
            if (row < min(last, p.rows)) {
                float* to = raw_at(row);
                const float *h_from = p.h + at + row * p.columns, *grad_from = p.grad + at + row * p.columns;
                if (column > 0 && lane < channels) {
                    const int there = p.columns - (column - 2);
                    copy_pair(to + lane * kImageRow, h_from + lane * grad_plane - 2, p.pairs, there);
                    copy_pair(to + kStage + lane * kImageRow, grad_from + lane * grad_plane - 2, p.pairs, there);
                }
                to += 2 + 2 * lane, h_from += 2 * lane, grad_from += 2 * lane;
#pragma unroll 1
                for (int c = 0; c < channels; ++c, to += kImageRow, h_from += grad_plane, grad_from += grad_plane) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int there = exists[j][0] + exists[j][1];
                        copy_pair(to + 64 * j, h_from + 64 * j, p.pairs, there);
                        copy_pair(to + kStage + 64 * j, grad_from + 64 * j, p.pairs, there);
                    }
                }
            }
            commit_copies();
        };
        const auto make = [&](int row) {
            float* const to = ring_row(row) + own * kImageRow;
            const float* const raw = raw_at(row);
            if (row <= first) {  // the rows before are another piece's to count
#pragma unroll
                for (int c = 0; c < kTailChannels; ++c) sums[c] = products[c] = 0.0f;
            }
            if (row >= p.rows) {
                for (int i = lane; i < kTailChannels * kImageRow; i += 32) to[i] = 0.0f;
                return;
            }
#pragma unroll
            for (int c = 0; c < kTailChannels; ++c) {
                const ChannelGradient channel = constants[own + c];
                float row_sums[2], row_products[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int place = c * kImageRow + 2 + 2 * lane + 64 * j;
                    const float2 h = *reinterpret_cast<const float2*>(raw + place), grad = *reinterpret_cast<const float2*>(raw + kStage + place);
                    const float biased[2] = {h.x + channel.bias, h.y + channel.bias};
                    const float q[2] = {only_if(exists[j][0] && c < channels, gradient_before_push(biased[0], grad.x, channel)),
                        only_if(exists[j][1] && c < channels, gradient_before_push(biased[1], grad.y, channel))};
                    row_sums[j] = q[0] + q[1];
                    row_products[j] = fmaf(q[0], biased[0], q[1] * biased[1]);
                    *reinterpret_cast<float2*>(to + place) = make_float2(q[0], q[1]);
                }
                sums[c] += row_sums[0] + row_sums[1];
                products[c] += row_products[0] + row_products[1];
            }
            if (column > 0 && lane < kTailChannels) {
                const ChannelGradient channel = constants[own + lane];
                const auto one = [&](int left, int place) {
                    const float q = gradient_before_push(raw[place] + channel.bias, raw[kStage + place], channel);
                    return only_if(left < p.columns && lane < channels, q);
                };
                const int place = lane * kImageRow;
                *reinterpret_cast<float2*>(to + place) = make_float2(one(column - 2, place), one(column - 1, place + 1));
            }
        };
        if (column == 0) {  // nothing is to the left
            for (int i = threadIdx.x; i < kRing * kGradChannels; i += 32 * kTailWarps) {
                *reinterpret_cast<float2*>(shared_q + i * kImageRow) = make_float2(0.0f, 0.0f);
            }
        }
        for (int row = first; row < begin + KS - 1; ++row) copy_x(row);
        for (int row = begin; row < begin + kStages; ++row) copy(row);
        for (int row = begin; row < last; ++row) {
            await_copies<kStages - 1>();
            if (wants_x || wants_weight) mbarrier_wait(empty + row % kRing, turn(row) ^ 1);
            make(row);
            mbarrier_arrive(full + row % kRing);
            copy(row + kStages);
        }
        await_copies<0>();
#pragma unroll
        for (int c = 0; c < kTailChannels; ++c) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                sums[c] += __shfl_xor_sync(~0u, sums[c], offset);
                products[c] += __shfl_xor_sync(~0u, products[c], offset);
            }
            if (lane == 0 && own + c < p.out_channels) {
                const int64_t to = int64_t(blockIdx.x) * p.out_channels + own + c;
                p.bias_sums[to] = sums[c] * constants[own + c].push;
                p.scale_sums[to] = products[c] * constants[own + c].rstd;
            }
        }
    } else if (warp < kTailWarps + kSumWarps) {  // the weights'
        if (!wants_weight) return;
        const int of = warp - kTailWarps, mt = of % 2;
        const int steps = min(kStripWidth / 16, (max(p.columns - column, 0) + 15) / 16);
        float total[1][TAPS][4] = {};
        for (int row = begin; row < last; ++row) {
            mbarrier_wait(full + row % kRing, turn(row));
            for (int step = row >= first && row < p.rows ? of / 2 : steps; step < steps; step += kSumWarps / 2) {
                const int pixel = step * 16 + 4 * quarter;
                float v[1][2][4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float* const at = ring_row(row) + (mt * 16 + k / 2 * 8 + eighth) * kImageRow + 2 + pixel + k % 2 * 2;
                    const float2 two = *reinterpret_cast<const float2*>(at);
                    v[0][k / 2][k % 2 * 2] = two.x, v[0][k / 2][k % 2 * 2 + 1] = two.y;
                }
                const float* const from = shared_x + eighth * kSumRow + pixel;
                add_products<KS>(v, [&](int ky) { return from + (row + ky) % kXRing * kXRow; }, total);
            }
            mbarrier_arrive(empty + row % kRing);
        }
        // The warps leave their sums side by side where x was, and add them up.
        constexpr int kHalf = kGradChannels / 2 * 8 * TAPS;
        const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(32 * kSumWarps) : "memory"); };
        meet();
#pragma unroll
        for (int k = 0; k < TAPS * 4; ++k) {
            shared_x[of * kHalf + ((k % 4 / 2 * 8 + eighth) * 8 + 2 * quarter + k % 2) * TAPS + k / 4] = total[0][k / 4][k % 4];
        }
        meet();
        for (int i = threadIdx.x - 32 * kTailWarps; i < 2 * kHalf; i += 32 * kSumWarps) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < kSumWarps; w += 2) sum += shared_x[w * kHalf + i];
            p.partials[int64_t(blockIdx.x) * kWeightPart<KS> + i] = sum * constants[i / (8 * TAPS)].push;
        }
    } else {  // x's
        if (!wants_x) return;
        constexpr int MT = 2;
        const int of = warp - kTailWarps - kSumWarps, first_channel = 2 * quarter, own_column = column + of * 32 + eighth * 4;
        float* const to = p.grad_x + (sample * p.in_channels + first_channel) * plane + own_column;
        const int columns_left = p.width - own_column, channels_left = columns_left > 0 ? p.in_channels - first_channel : 0;
        float total[KS][MT][4] = {};  // of rows row, row + 1, row + 2
        for (int row = begin; row < last; ++row) {
            const float* pixels = ring_row(row) + quarter * kImageRow + of * 32 + eighth * 4;
            const float2* own_fragments = fragments + lane;
            float part[MT][4] = {};  // of the row that is complete then: by itself, for it is added to what is largest
            mbarrier_wait(full + row % kRing, turn(row));
#pragma unroll 1
            for (int slab = 0; slab < 4; ++slab, pixels += 8 * kImageRow, own_fragments += TAPS * 64) {
                float hi[KS + 1][4], lo[KS + 1][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) split_pixels<KS>(pixels + half * 4 * kImageRow, hi, lo, 2 * half);
                float sums[KS][MT][4];  // smallest products first
#pragma unroll
                for (int product = 0; product < 3 * KS; ++product) {
                    const int kx = product % KS;
#pragma unroll
                    for (int ky = 0; ky < KS; ++ky) {
                        const float2 w = *reinterpret_cast<const float2*>(own_fragments + (ky * KS + kx) * 64 + (product / KS == 1 ? 32 : 0));
                        const float f[2] = {w.x, w.y};
#pragma unroll
                        for (int mt = 0; mt < MT; ++mt) {
                            if (product == 0) mma_tf32<true>(sums[ky][mt], lo[mt], f);
                            else if (product / KS == 0) mma_tf32(sums[ky][mt], lo[kx + mt], f);
                            else mma_tf32(sums[ky][mt], hi[kx + mt], f);
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < KS * MT * 4; ++k) {
                    float& to = k < (KS - 1) * MT * 4 ? total[KS - 1 - k / (MT * 4)][k / 4 % MT][k % 4] : part[k / 4 % MT][k % 4];
                    to += sums[k / (MT * 4)][k / 4 % MT][k % 4];
                }
            }
#pragma unroll
            for (int k = 0; k < MT * 4; ++k) total[0][k / 4][k % 4] += part[k / 4][k % 4];
            mbarrier_arrive(empty + row % kRing);
            if (row >= first) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float* const at = to + j * plane + int64_t(row) * p.width;
                    const float4 v = make_float4(total[0][0][j], total[0][1][j], total[0][0][2 + j], total[0][1][2 + j]);
                    if (j >= channels_left) continue;
                    if (p.width % 4 == 0) {
                        __stcs(reinterpret_cast<float4*>(at), v);
                    } else {
                        at[0] = v.x;
                        if (columns_left > 1) at[1] = v.y;
                        if (columns_left > 2) at[2] = v.z;
                        if (columns_left > 3) at[3] = v.w;
                    }
                }
                float zero = 0;
#pragma unroll
                for (int k = 0; k < MT * 4; ++k) zero = fmaf(total[0][k / 4][k % 4], 0.0f, zero);
                if (zero != 0.0f) {
#pragma unroll 1
                    for (int k = 0; k < 8; ++k) {
                        if (k / 4 >= channels_left || k % 4 >= columns_left) continue;
                        to[k / 4 * plane + int64_t(row) * p.width + k % 4] =
                            gradient_of_x(p, constants, sample, first_channel + k / 4, row, own_column + k % 4);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < MT * 4; ++k) {
                total[0][k / 4][k % 4] = total[1][k / 4][k % 4];
                total[1][k / 4][k % 4] = total[2][k / 4][k % 4];
                total[2][k / 4][k % 4] = 0.0f;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The forward while recording, of 3x3 kernels from at most 8 channels: h, and the moments of what it becomes, in one sweep; then the norm.
//
// A block owns a piece, as above but 64 columns wide; of its four warps each has 16 of h's channels, whose weights stay in registers, and
// 32 columns. A row of x gives its share to three rows of h. A lane's pixels are eight neighbours of two channels.
constexpr int kRecordWidth = 64, kRecordRow = kRecordWidth + 8, kRecordRing = 4;
constexpr int kRecordBlocks = 2;

struct Recording {
    const float *x, *weight, *conv_bias, *bias, *scale;
    float* h;
    Moments<float>* moments;  // of each channel of a sample, of each piece of it
    int in_channels, out_channels, height, width, rows, columns, column_tiles, bands, channel_blocks;
    bool pairs;
};

__global__ void __launch_bounds__(kStripBlock, kRecordBlocks) convolve_and_measure(const __grid_constant__ Recording p) {
    constexpr int KS = 3, TAPS = 9, NT = 4, kXRow = 8 * kRecordRow;
    __shared__ float shared_x[kRecordRing * kXRow];
    __shared__ float shared_lines[kStripWarps][16 * kLineRow];
    __shared__ float4 shared_vectors[32];  // v = 1 / (1 + 2^((h + y) * z)), h = sum + x
    __shared__ Moments<float> shared_moments[kStripWarps][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eighth = lane / 4, quarter = lane % 4;
    const int block = int(blockIdx.x) % p.channel_blocks, piece = int(blockIdx.x) / p.channel_blocks;
    const int strip = piece / p.bands, band = piece % p.bands;
    const int64_t sample = strip / p.column_tiles;
    const int column = strip % p.column_tiles * kRecordWidth;
    const int first = quotient(p.rows * band, p.bands), last = quotient(p.rows * (band + 1), p.bands);
    const int half = warp % 2, own_first = block * 32 + half * 16, group_column = warp / 2 * 32;
    const int64_t plane = int64_t(p.height) * p.width, h_plane = int64_t(p.rows) * p.columns;

    const auto copy = [&](int row) {
        if (row < last + KS - 1) {
            float* const to = shared_x + row % kRecordRing * kXRow;
            const float* const from = p.x + sample * p.in_channels * plane + int64_t(row) * p.width + column;
            const auto copy_two = [&](int channel, int at) {
                const int there = channel < p.in_channels ? p.width - column - at : 0;
                copy_pair(to + channel * kRecordRow + at, from + channel * plane + at, p.pairs, there);
            };
            copy_two(warp, 2 * lane), copy_two(warp + kStripWarps, 2 * lane);
            if (threadIdx.x < 8) copy_two(threadIdx.x, kRecordWidth);
        }
        commit_copies();
    };
    float w[TAPS][2][4];  // hi, lo
#pragma unroll
    for (int k = 0; k < TAPS * 4; ++k) {
        const int to = own_first + k % 2 * 8 + eighth, from = k / 2 % 2 * 4 + quarter, tap = k / 4;
        const bool exists = to < p.out_channels && from < p.in_channels;
        split_weight(exists ? __ldg(p.weight + (to * p.in_channels + from) * TAPS + tap) : 0.0f, 1.0f, 7e-8f, w[tap][0][k % 4], w[tap][1][k % 4]);
    }
    if (threadIdx.x < 32) {
        const int channel = min(block * 32 + int(threadIdx.x), p.out_channels - 1);
        const float slope = -1.44269504f * __ldg(p.scale + channel), finite = isinf(slope) ? copysignf(3.4e38f, slope) : slope;
        shared_vectors[threadIdx.x] = make_float4(__ldg(p.conv_bias + channel), __ldg(p.bias + channel), finite, 0.0f);  // it may meet a zero
    }
    float anchor[2], sum[2] = {}, square[2] = {};  // of v - anchor
    const int columns_left = p.columns - column - group_column, left = columns_left - 8 * quarter;
    float* const lines = shared_lines[warp];
    const auto emit = [&](int row, const float (&tile)[NT][4]) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float4 vector = shared_vectors[half * 16 + k * 8 + eighth];
            float h[8], v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                h[i] = tile[i % 4][k * 2 + i / 4] + vector.x;
                v[i] = sigmoid_from_exponent((h[i] + vector.y) * vector.z);
            }
            float4* const to = reinterpret_cast<float4*>(lines + (k * 8 + eighth) * kLineRow + 8 * quarter);
            to[0] = make_float4(h[0], h[1], h[2], h[3]), to[1] = make_float4(h[4], h[5], h[6], h[7]);
            if (row == first) anchor[k] = v[0];
            if (columns_left < 32) {
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = i < left ? v[i] : anchor[k];
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float deviation = v[i] - anchor[k];
                sum[k] += deviation;
                square[k] = fmaf(deviation, deviation, square[k]);
            }
        }
        __syncwarp();
        float* const to = p.h + (sample * p.out_channels + own_first) * h_plane + int64_t(row) * p.columns + column + group_column;
        if (p.pairs) {  // half a warp writes 32 columns of a channel
            float* at = to + lane / 16 * h_plane + lane % 16 * 2;
            const float* from = lines + lane / 16 * kLineRow + lane % 16 * 2;
            const int channels = lane % 16 * 2 < columns_left ? p.out_channels - own_first - lane / 16 : 0;
#pragma unroll
            for (int c = 0; c < 16; c += 2, at += 2 * h_plane) {
                if (c < channels) *reinterpret_cast<float2*>(at) = *reinterpret_cast<const float2*>(from + c * kLineRow);
            }
        } else if (lane < columns_left) {
            float* at = to + lane;
#pragma unroll 1
            for (int c = 0; c < min(16, p.out_channels - own_first); ++c, at += h_plane) *at = lines[c * kLineRow + lane];
        }
        __syncwarp();
    };

    float total[KS][NT][4];  // of three rows of h under way
    copy(first), copy(first + 1), copy(first + 2);
    for (int base = first; base < last + KS - 1; base += KS) {
#pragma unroll
        for (int u = 0; u < KS; ++u) {
            const int row = base + u;
            if (row >= last + KS - 1) break;
            await_copies<2>();
            __syncthreads();
            copy(row + 3);
            const float* const from = shared_x + row % kRecordRing * kXRow + quarter * kRecordRow + group_column + eighth * 4;
            float hi[NT + KS - 1][2], lo[NT + KS - 1][2];  // of a pixel, channels quarter and 4 further on
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float4 near = *reinterpret_cast<const float4*>(from + k * 4 * kRecordRow);
                const float2 far = *reinterpret_cast<const float2*>(from + k * 4 * kRecordRow + 4);
                const float values[NT + KS - 1] = {near.x, near.y, near.z, near.w, far.x, far.y};
#pragma unroll
                for (int i = 0; i < NT + KS - 1; ++i) split_tf32(values[i], hi[i][k], lo[i][k]);
            }
            float sums[KS][NT][4];  // smallest products first
#pragma unroll
            for (int product = 0; product < 3 * KS; ++product) {
                const int kx = product % KS;
#pragma unroll
                for (int ky = 0; ky < KS; ++ky) {
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt) {
                        if (product == 0) mma_tf32<true>(sums[ky][nt], w[ky * KS][0], lo[nt]);
                        else if (product / KS == 0) mma_tf32(sums[ky][nt], w[ky * KS + kx][0], lo[nt + kx]);
                        else mma_tf32(sums[ky][nt], w[ky * KS + kx][product / KS == 1], hi[nt + kx]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < KS * NT * 4; ++k) {
                const int ky = k / (NT * 4), nt = k / 4 % NT;
                float& to = total[(u - ky + KS) % KS][nt][k % 4];
                to = ky == 0 ? sums[ky][nt][k % 4] : to + sums[ky][nt][k % 4];
            }
            if (row >= first + KS - 1) emit(row - (KS - 1), total[(u + 1) % KS]);
        }
    }
    await_copies<0>();
    shared_moments[warp][lane] = Moments<float>();
    if (__syncthreads_or(!(square[0] + square[1] < INFINITY))) {  // the halves of an infinity have made a NaN: once more, whole
        Correlation c = {};
        c.from = p.x, c.weight = p.weight, c.bias = p.conv_bias, c.from_channels = p.in_channels, c.to_channels = p.out_channels;
        c.height = p.height, c.width = p.width;
        const int channel = block * 32 + lane, columns = min(kRecordWidth, p.columns - column);
        Moments<float> m;
        for (int i = warp; i < (last - first) * columns && channel < p.out_channels; i += kStripWarps) {
            const int row = first + i / columns, at = column + i % columns;
            const float h = correlate_one<KS>(c, sample, channel, row, at), operand[] = {__ldg(p.bias + channel), __ldg(p.scale + channel)};
            p.h[(sample * p.out_channels + channel) * h_plane + int64_t(row) * p.columns + at] = h;
            m = merge(m, moments_of(activate(h, operand)));
        }
        shared_moments[warp][lane] = m;
    } else {
        const float values = float((last - first) * max(0, min(8, left))), share = values > 0.0f ? reciprocal(values) : 0.0f;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float mean = sum[k] * share;
            Moments<float> m;
            m.count = values;
            m.hi = anchor[k] + mean;
            m.lo = mean - (m.hi - anchor[k]);
            m.m2 = fmaf(-sum[k], mean, square[k]);
            for (int mask = 1; mask < 4; mask *= 2) m = merge_with_lane(m, mask);
            if (quarter == 0) shared_moments[warp / 2][half * 16 + k * 8 + eighth] = m;
        }
    }
    __syncthreads();
    const int channel = block * 32 + lane, pieces = p.column_tiles * p.bands;
    if (warp == 0 && channel < p.out_channels) {
        Moments<float> m = shared_moments[0][lane];
        for (int w = 1; w < kStripWarps; ++w) m = merge(m, shared_moments[w][lane]);
        p.moments[(sample * p.out_channels + channel) * pieces + piece % pieces] = m;
    }
}

// A block owns part of a row, the pixels of a channel of a sample, and merges the moments of its slice, of which there are `count`.
constexpr int kNormalPacks = 8;  // of a thread in flight
constexpr int kNormalPart = kNormalPacks * kMaxGroup * 4;  // values of a part: short blocks end together

__global__ void __launch_bounds__(kMaxGroup, 1) normalize_rows(const float* __restrict__ h, float* __restrict__ out,
    const Moments<float>* __restrict__ moments, Vectors<float> vectors, Sizes sizes, int64_t part_values, int parts, int count, float eps) {
    constexpr int V = 4, B = kNormalPacks;
    const Row<V> row(sizes, part_values, parts, kMaxGroup);
    const int64_t slice = row.sample * sizes.groups + quotient(row.channel, sizes.channels);
    const Moments<float> m = merge_parts(moments + slice * count, count);
    const Scale<float> scale(m, float(sizes.n), eps);
    const float operand[kOperands] = {vectors.operand[0][row.channel], vectors.operand[1][row.channel]};
    const float gamma = vectors.gamma[row.channel] * scale.rstd, beta = vectors.beta[row.channel];
    const auto normal = [&](float own) { return fmaf((activate(own, operand) - scale.hi) - scale.lo, gamma, beta); };
    for (int64_t j = row.lane; j < row.span.packs; j += B * kMaxGroup) {
        Pack<float, V> raw[B];
        const int64_t at = row.begin + row.span.head + j * V;
#pragma unroll
        for (int b = 0; b < B; ++b) if (j + b * kMaxGroup < row.span.packs) raw[b] = load_streaming<float, V>(h + at + b * kMaxGroup * V);
#pragma unroll
        for (int b = 0; b < B; ++b) {
            if (j + b * kMaxGroup >= row.span.packs) continue;
#pragma unroll
            for (int i = 0; i < V; ++i) raw[b].value[i] = normal(raw[b].value[i]);
            store_streaming(out + at + b * kMaxGroup * V, raw[b]);
        }
    }
    for (int j = row.lane; j < row.span.head + row.span.tail; j += kMaxGroup) {
        const int64_t at = row.begin + row.span.loose(j);
        out[at] = normal(h[at]);
    }
}

// sizes: samples, in_channels, height, width, out_channels, kernel size. Smaller images are ATen's: their sums are too short to hide TF32.
static bool covers_convolution(const int64_t* sizes, const Device& device) {
    const int64_t ks = sizes[5], rows = sizes[2] - ks + 1, columns = sizes[3] - ks + 1;
    return device.major >= 8 && (ks == 1 || ks == 3) && sizes[0] > 0 && sizes[1] <= 64 && sizes[4] <= 128 && rows * columns >= 256 &&
        sizes[2] <= 32768 && sizes[3] <= 32768 && sizes[0] < 1 << 20;
}

template <typename K> static cudaError_t resident_blocks(K kernel, int shared_bytes, const Device& device, int64_t* blocks) {
    int an_sm = 0;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&an_sm, kernel, kStripBlock, shared_bytes);
    *blocks = int64_t(an_sm) * device.sms;
    return error;
}

template <int KS, int NT>
static cudaError_t launch_correlation(Correlation c, int64_t samples, const Device& device, cudaStream_t stream) {
    c.slabs = int(divide_up(c.from_channels, 8)), c.to_blocks = int(divide_up(c.to_channels, 8 * NT));
    c.rows = c.height + 2 * c.pad - KS + 1, c.columns = c.width + 2 * c.pad - KS + 1;
    c.column_tiles = int(divide_up(c.columns, kStripWidth));
    c.tiles = samples * c.to_blocks * c.rows * c.column_tiles;
    c.pairs = c.width % 2 == 0;
    const int lines = c.columns % 4 == 0 ? 0 : kStripWarps * NT * 8;
    const int shared_bytes = (2 * KS * 8 * kImageRow + lines * kLineRow) * int(sizeof(float));
    auto kernel = correlate<KS, NT>;
    int64_t blocks;
    const cudaError_t error = resident_blocks(kernel, shared_bytes, device, &blocks);
    if (error != cudaSuccess) return error;
    const int64_t lanes = int64_t(c.to_blocks) * c.slabs * KS * KS * NT * 32;
    prepare_fragments<KS, NT><<<unsigned(divide_up(lanes, kStripBlock)), kStripBlock, 0, stream>>>(c);
    kernel<<<unsigned(c.tiles < blocks ? c.tiles : blocks), kStripBlock, shared_bytes, stream>>>(c);
    return cudaGetLastError();
}
template <int KS> static cudaError_t launch_correlation(const Correlation& c, int64_t samples, const Device& device, cudaStream_t stream) {
    if (c.to_channels <= 8) return launch_correlation<KS, 1>(c, samples, device, stream);
    return launch_correlation<KS, 4>(c, samples, device, stream);
}
static int64_t fragment_bytes(const int64_t* sizes) {  // both ways round
    const auto up = [](int64_t channels) { return divide_up(channels, 32) * 32; };
    return up(sizes[1]) * up(sizes[4]) * sizes[5] * sizes[5] * int64_t(2 * sizeof(float));
}

template <int KS>
static cudaError_t launch_weight_gradient(WeightGradient p, void* workspace, int64_t* bytes, const Device& device, cudaStream_t stream) {
    constexpr int kUsed = (2 * kGradChannels + 2 * KS * 8) * kSumRow, kLeft = kStripWarps * kWeightPart<KS>;
    constexpr int kShared = (kUsed > kLeft ? kUsed : kLeft) * int(sizeof(float));
    p.rows = p.height - KS + 1, p.columns = p.width - KS + 1, p.column_tiles = int(divide_up(p.columns, kStripWidth));
    p.in_slabs = int(divide_up(p.in_channels, 8));
    p.units = p.samples * p.column_tiles * p.rows;
    p.pairs = p.width % 2 == 0 && p.columns % 2 == 0;
    auto kernel = sum_weight_gradient<KS>;
    int64_t blocks;
    const cudaError_t error = resident_blocks(kernel, kShared, device, &blocks);
    if (error != cudaSuccess) return error;
    const int64_t pairs = p.in_slabs * divide_up(p.out_channels, kGradChannels);
    blocks = blocks / pairs > 1 ? blocks / pairs : 1;
    p.blocks = int(blocks < p.units ? blocks : p.units);
    *bytes = pairs * p.blocks * kWeightPart<KS> * int64_t(sizeof(float));
    if (workspace == nullptr) return cudaSuccess;
    p.partials = static_cast<float*>(workspace);
    kernel<<<dim3(unsigned(p.blocks), unsigned(pairs)), kStripBlock, kShared, stream>>>(p);
    add_weight_gradient<KS><<<dim3(unsigned(p.in_channels), unsigned(p.out_channels)), kAddBlock, 0, stream>>>(
        p, GivenGradient{p.grad, p.out_channels, p.rows * p.columns});
    return cudaGetLastError();
}

// All in float32, contiguous, 16-byte aligned; sizes as above. workspace null: only *workspace_bytes, -1 where ATen's is to be taken.
extern "C" int convolution_alone(const void* x, const void* weight, const void* bias, void* h, const int64_t* sizes, void* workspace,
    int64_t* workspace_bytes, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    *workspace_bytes = covers_convolution(sizes, device) ? fragment_bytes(sizes) : -1;
    if (workspace == nullptr) return cudaSuccess;
    Correlation c = {};
    c.from = static_cast<const float*>(x), c.weight = static_cast<const float*>(weight), c.bias = static_cast<const float*>(bias);
    c.to = static_cast<float*>(h), c.fragments = static_cast<float4*>(workspace);
    c.from_channels = int(sizes[1]), c.to_channels = int(sizes[4]), c.height = int(sizes[2]), c.width = int(sizes[3]);
    const auto launch = sizes[5] == 3 ? launch_correlation<3> : launch_correlation<1>;
    return launch(c, sizes[0], device, stream);
}

// grad_x, grad_weight: null if it is not wanted.
extern "C" int convolution_gradients(const void* grad, const void* x, const void* weight, void* grad_x, void* grad_weight,
    const int64_t* sizes, void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    *workspace_bytes = -1;
    if (error != cudaSuccess || !covers_convolution(sizes, device)) return error;
    WeightGradient p = {};
    p.grad = static_cast<const float*>(grad), p.x = static_cast<const float*>(x);
    p.to = static_cast<float*>(grad_weight);
    p.samples = sizes[0], p.in_channels = int(sizes[1]), p.height = int(sizes[2]), p.width = int(sizes[3]), p.out_channels = int(sizes[4]);
    int64_t partial_bytes = 0;
    const auto weight_gradient = sizes[5] == 3 ? launch_weight_gradient<3> : launch_weight_gradient<1>;
    error = weight_gradient(p, grad_weight == nullptr ? nullptr : workspace, &partial_bytes, device, stream);
    *workspace_bytes = partial_bytes > fragment_bytes(sizes) ? partial_bytes : fragment_bytes(sizes);
    if (error != cudaSuccess || workspace == nullptr || grad_x == nullptr) return error;
    Correlation c = {};
    c.from = static_cast<const float*>(grad), c.weight = static_cast<const float*>(weight);
    c.to = static_cast<float*>(grad_x), c.fragments = static_cast<float4*>(workspace);
    c.from_channels = int(sizes[4]), c.to_channels = int(sizes[1]), c.pad = int(sizes[5]) - 1, c.flipped = true;
    c.height = int(sizes[2]) - c.pad, c.width = int(sizes[3]) - c.pad;
    const auto input_gradient = sizes[5] == 3 ? launch_correlation<3> : launch_correlation<1>;
    return input_gradient(c, sizes[0], device, stream);
}

// Of `rows` rows of each strip: as many bands as let `slots` blocks at a time end together.
static int bands_of(int64_t strips, int rows, int64_t slots) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int bands = 1; bands <= 64 && bands <= rows; ++bands) {
        const int64_t cost = divide_up(strips * bands, slots) * (divide_up(rows, bands) + 4);  // two rows more, and the first loads
        if (cost < least) least = cost, best = bands;
    }
    return best;
}
static Sizes slices_of(const int64_t* sizes, int groups) {  // of h
    const int64_t spatial = (sizes[2] - sizes[5] + 1) * (sizes[3] - sizes[5] + 1), channels = sizes[4] / groups;
    return {sizes[0] * groups, channels * spatial, spatial, groups, int(channels)};
}

// The forward while recording. vectors: the convolution's weight and bias, bias, scale, gamma, beta; the rest as convolution_alone's.
extern "C" int convolution_recorded(const void* x, void* h, void* out, const void* const* vectors, const int64_t* sizes, int groups, double eps,
    void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    *workspace_bytes = -1;
    if (error != cudaSuccess || !covers_convolution(sizes, device) || sizes[5] != 3 || sizes[1] > 8) return error;
    const auto float_at = [&](int i) { return static_cast<const float*>(vectors[i]); };
    Recording p = {static_cast<const float*>(x), float_at(0), float_at(1), float_at(2), float_at(3), static_cast<float*>(h)};
    p.in_channels = int(sizes[1]), p.height = int(sizes[2]), p.width = int(sizes[3]), p.out_channels = int(sizes[4]);
    p.rows = p.height - 2, p.columns = p.width - 2, p.pairs = p.width % 2 == 0;
    p.column_tiles = int(divide_up(p.columns, kRecordWidth)), p.channel_blocks = int(divide_up(p.out_channels, 32));
    int64_t slots;
    error = resident_blocks(convolve_and_measure, 0, device, &slots);
    if (error != cudaSuccess) return error;
    p.bands = bands_of(sizes[0] * p.column_tiles * p.channel_blocks, p.rows, slots);
    const int pieces = p.column_tiles * p.bands;
    *workspace_bytes = sizes[0] * p.out_channels * pieces * int64_t(sizeof(Moments<float>));
    if (workspace == nullptr) return cudaSuccess;
    p.moments = static_cast<Moments<float>*>(workspace);
    convolve_and_measure<<<unsigned(sizes[0] * pieces * p.channel_blocks), kStripBlock, 0, stream>>>(p);
    const bool full[kOperands] = {};
    const Vectors<float> tail = vectors_from<float>(vectors + 2, full);
    const Sizes slices = slices_of(sizes, groups);
    if (slices.n <= kMostInRegisters<float, 1>) return launch<float>(h, out, tail, slices, eps, nullptr, stream);
    const int64_t part_values = divide_up(divide_up(slices.spatial, divide_up(slices.spatial, kNormalPart)), 32) * 32;
    const int64_t parts = divide_up(slices.spatial, part_values);
    normalize_rows<<<unsigned(slices.slices * slices.channels * parts), kMaxGroup, 0, stream>>>(p.h, static_cast<float*>(out), p.moments,
        tail, slices, part_values, int(parts), pieces * slices.channels, float(eps));
    return cudaGetLastError();
}

// Its gradients. vectors: the convolution's weight, bias, scale, gamma; to: the gradients of x, of the convolution's weight, and of bias,
// which is the convolution's bias's too, scale, gamma and beta; null where not wanted.
extern "C" int convolution_recorded_gradients(const void* grad, const void* h, const void* x, const void* const* vectors, void* const* to,
    const int64_t* sizes, int groups, double eps, void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    *workspace_bytes = -1;
    const bool covered = covers_convolution(sizes, device) && sizes[5] == 3 && sizes[1] <= 8 && sizes[4] <= kGradChannels;
    if (error != cudaSuccess || !covered || device.shared_bytes < kTrainShared) return error;
    const auto float_at = [&](int i) { return static_cast<const float*>(vectors[i]); };
    Training p = {static_cast<const float*>(grad), static_cast<const float*>(h), static_cast<const float*>(x), float_at(0), float_at(1),
        float_at(2), float_at(3)};
    p.in_channels = int(sizes[1]), p.height = int(sizes[2]), p.width = int(sizes[3]), p.out_channels = int(sizes[4]);
    p.group_channels = p.out_channels / groups, p.rows = p.height - 2, p.columns = p.width - 2, p.pairs = p.width % 2 == 0;
    p.column_tiles = int(divide_up(p.width, kStripWidth));
    p.bands = bands_of(sizes[0] * p.column_tiles, p.height, device.sms);
    const int64_t pieces = sizes[0] * p.column_tiles * p.bands, channels = p.out_channels;
    const Sizes slices = slices_of(sizes, groups);
    const GradientPlan<float> plan(slices, device.sms);
    const GradientSpace<float> space(plan, slices);
    const int64_t sums = (2 * pieces + 2 * sizes[0]) * channels;
    *workspace_bytes = space.joints + space.slices + (sums + pieces * kWeightPart<3>) * int64_t(sizeof(float));
    if (workspace == nullptr) return cudaSuccess;

    char* const base = static_cast<char*>(workspace);
    auto* const joints = reinterpret_cast<Joint<float>*>(base);
    auto* const slice_gradients = reinterpret_cast<SliceGradient<float>*>(base + space.joints);
    Partials<float> partials;
    float* next = reinterpret_cast<float*>(base + space.joints + space.slices);
    for (int k = 0; k < kSums; ++k) {
        partials.rows[k] = k < kOperands ? pieces : sizes[0];
        partials.from[k] = next, partials.to[k] = static_cast<float*>(to[2 + k]);
        next += partials.rows[k] * channels;
    }
    p.slices = slice_gradients, p.grad_x = static_cast<float*>(to[0]);
    p.partials = to[1] == nullptr ? nullptr : next, p.bias_sums = partials.from[0], p.scale_sums = partials.from[1];
    const bool full[kOperands] = {};
    const void* const tail_vectors[] = {vectors[1], vectors[2], vectors[3], nullptr};
    const Vectors<float> tail = vectors_from<float>(tail_vectors, full);
    const unsigned blocks = unsigned(divide_up(slices.slices * slices.channels * plan.parts, kMaxGroup / plan.group));
    joint_moments_of_rows<float><<<blocks, kMaxGroup, 0, stream>>>(p.grad, p.h, joints, tail, slices, plan.part_values, plan.parts, plan.group);
    merge_rows<float><<<unsigned(divide_up(slices.slices, kMaxGroup / 32)), kMaxGroup, 0, stream>>>(
        joints, slice_gradients, p.gamma, partials, slices, plan.parts, float(eps));
    error = cudaFuncSetAttribute(differentiate_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, kTrainShared);
    if (error != cudaSuccess) return error;
    if (to[0] != nullptr || to[1] != nullptr || to[2] != nullptr || to[3] != nullptr) {
        differentiate_rows<<<unsigned(pieces), kTrainBlock, kTrainShared, stream>>>(p);
    }
    if (to[1] != nullptr) {
        WeightGradient w = {};
        w.x = p.x, w.partials = next, w.to = static_cast<float*>(to[1]), w.samples = sizes[0], w.blocks = int(pieces), w.in_slabs = 1;
        w.in_channels = p.in_channels, w.out_channels = p.out_channels, w.height = p.height, w.width = p.width, w.rows = p.rows;
        w.columns = p.columns;
        add_weight_gradient<3><<<dim3(unsigned(p.in_channels), unsigned(p.out_channels)), kAddBlock, 0, stream>>>(w, GradientOfH{p});
    }
    sum_rows<float><<<dim3(1, kSums), kSumBlock, 0, stream>>>(partials, channels, 32);
    return cudaGetLastError();
}
"""

CPP_SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

// --- shared: cpu values (home: kernels/instance_norm.py) ---
// The CPU kernels compute in float (double for double). They take 16-bit values a block at a time through buffers in the first cache, so
// that there is one kernel for the three shorter dtypes, and every loop over values is one the compiler vectorises. What would only cost
// the compiler time is compiled once: functions of whole blocks are not inlined, and threads are shared out in one place.
constexpr int64_t kBlock = 1024;

void in_parallel(int64_t n, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work) { at::parallel_for(0, n, grain, work); }

inline void widen(const at::Half* from, float* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; ++i) to[i] = from[i];
}
inline void widen(const at::BFloat16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = from[i];  // a shift, which the compiler vectorises
}
inline void narrow(const float* from, at::Half* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; ++i) to[i] = from[i];
}
inline void narrow(const float* from, at::BFloat16* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {  // round to nearest even without a branch; NaN becomes the quiet one, as in PyTorch
        uint32_t bits;
        std::memcpy(&bits, from + i, sizeof(bits));
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i].x = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

// The values of a contiguous tensor for kernels that compute in A; of one without elements, a gradient that is not wanted, none.
template <typename A> struct Values {
    void* data;
    at::ScalarType type;
    bool wide;  // of type A in memory, too

    explicit Values(const at::Tensor& t)
        : data(t.numel() > 0 ? t.data_ptr() : nullptr), type(t.scalar_type()), wide(t.element_size() == sizeof(A)) {}
    // Values from `at` on: those in memory, or else the buffer with copies of n of them.
    const A* read(int64_t at, int64_t n, A* buffer) const {
        if (wide) return static_cast<const A*>(data) + at;
        if constexpr (std::is_same_v<A, float>) {
            if (type == at::kHalf) widen(static_cast<const at::Half*>(data) + at, buffer, n);
            else widen(static_cast<const at::BFloat16*>(data) + at, buffer, n);
        }
        return buffer;
    }
    // Where values from `at` on are to be written before `leave`: to memory, or else to the buffer.
    A* target(int64_t at, A* buffer) const { return wide && data != nullptr ? static_cast<A*>(data) + at : buffer; }
    void leave(int64_t at, int64_t n, const A* buffer) const {
        if (wide || data == nullptr) return;
        if constexpr (std::is_same_v<A, float>) {
            if (type == at::kHalf) narrow(buffer, static_cast<at::Half*>(data) + at, n);
            else narrow(buffer, static_cast<at::BFloat16*>(data) + at, n);
        }
    }
};

// Count, mean and sum of squared deviations; blocks are merged after Chan, Golub and LeVeque (1979).
struct Moments {
    double count = 0, mean = 0, m2 = 0;
    void merge(const Moments& other) {
        if (other.count == 0) return;
        const double total = count + other.count, delta = other.mean - mean;
        mean += delta * (other.count / total);
        m2 += other.m2 + delta * delta * (count * other.count / total);
        count = total;
    }
};
// Moments of values v, the sum of the gradients that came for them, and the co-moment of the two, sum((v - mean) * (gradient - mean)).
struct Joint {
    Moments v;
    double sum = 0, co = 0;
    void merge(const Joint& other) {
        if (other.v.count == 0) return;
        if (v.count > 0) {
            const double delta = other.v.mean - v.mean, grad_delta = other.sum / other.v.count - sum / v.count;
            co += delta * grad_delta * (v.count * other.v.count / (v.count + other.v.count));
        }
        co += other.co;
        sum += other.sum;
        v.merge(other.v);
    }
};
// Two sweeps over a block in the first cache; what the rounded mean leaves over is put back by `rest`.
template <typename A> [[gnu::noinline]] Moments block_moments(const A* values, int64_t n) {
    const A share = A(1) / n;  // multiplied in before the sum, so that large values do not overflow it
    A mean = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < n; ++i) mean += values[i] * share;
    double rest = 0, m2 = 0;  // in double: one outlier must not drown the others
#pragma omp simd reduction(+ : rest, m2)
    for (int64_t i = 0; i < n; ++i) {
        const double deviation = values[i] - mean;
        rest += deviation;
        m2 += deviation * deviation;
    }
    return {double(n), mean + rest / n, m2 - rest * (rest / n)};
}
// --- end shared: cpu values ---

// --- shared: tensors (home: kernels/instance_norm.py) ---
// As the CUDA strings number them.
int dtype_number(const at::Tensor& t, const char* name) {
    switch (t.scalar_type()) {
        case at::kFloat: return 0;
        case at::kDouble: return 1;
        case at::kHalf: return 2;
        case at::kBFloat16: return 3;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": not implemented for ", t.scalar_type());
    }
}
// compute(A()), with the type A to compute in.
template <typename F> void in_type_for(const at::Tensor& t, const char* name, const F& compute) {
    if (dtype_number(t, name) == 1) compute(double());
    else compute(float());
}
// Contiguous, and 16-byte aligned as the CUDA kernels want it, which a slice of another tensor need not be.
[[maybe_unused]] at::Tensor aligned(const at::Tensor& t) {
    const at::Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
#ifdef WITH_CUDA
at::Tensor workspace_of(int64_t bytes, const at::Tensor& like) { return at::empty({bytes}, like.options().dtype(at::kByte)); }
cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
void check_launch(int error, const char* name) { TORCH_CHECK(error == 0, name, ": ", cudaGetErrorString(cudaError_t(error))); }
#endif
// --- end shared: tensors ---

// --- shared: cpu sigmoid (home: kernels/linear_swish_group_norm.py) ---
// 1 / (1 + exp(-v)) without a branch, so that loops over it vectorise. exp(-|v|) = 2^n * exp(r) with |r| <= ln(2) / 2, and a polynomial
// in r (Cephes' for float, Taylor's for double); below the smallest normal number it is 0.
inline float sigmoid(float v) {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: added to it, a number rounds to an integer, found in the sum's low bits
    const float a = -std::fabs(v);
    const float shifted = a * 1.44269504f + kRounder, n = shifted - kRounder;
    const float r = (a - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r) + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 23) + 0x3f800000;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    const float e = a < -87.3f ? 0.0f : p * power;
    return (v < 0.0f ? e : 1.0f) / (1.0f + e);
}
inline double sigmoid(double v) {
    constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
    const double a = -std::fabs(v);
    const double shifted = a * 1.4426950408889634 + kRounder, n = shifted - kRounder;
    const double r = (a - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = (p * r * r + r) + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 52) + 0x3ff0000000000000;
    double power;
    std::memcpy(&power, &bits, sizeof(power));
    const double e = a < -708.0 ? 0.0 : p * power;
    return (v < 0.0 ? e : 1.0) / (1.0 + e);
}
// --- end shared: cpu sigmoid ---

// What values of h become before the norm. `to` may be `h`.
constexpr int kOperands = 2;  // the bias, the scale
template <typename A> [[gnu::noinline]] void activate(const A* h, const std::array<const A*, kOperands>& operand, A* to, int64_t n) {
    const A *bias = operand[0], *scale = operand[1];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = sigmoid((h[i] + bias[i]) * scale[i]);
}

// --- shared: cpu group norm (home: kernels/linear_swish_group_norm.py) ---
// A slice is one group of one sample: the `spatial` pixels of each of its channels, contiguous.
struct Sizes {
    int64_t slices, n, spatial, groups, channels;  // n values a slice, groups a sample, channels a group
};

// What the values are combined with: one value a channel, or with full[i] one for each of h's.
template <typename A> struct Vectors {
    std::array<const A*, kOperands> operand;
    std::array<bool, kOperands> full;
    const A *gamma, *beta;
    A largest_gamma;
};

// A channel vector's values for each value of a block: the vector itself where channels have one pixel, otherwise written out here.
template <typename A> struct Spread {
    A values[kBlock];
    int64_t filled = 0, filled_channel = -1;
    const A* operator()(const A* vector, int64_t channel, int64_t pixel, int64_t count, int64_t spatial) {
        if (spatial == 1) return vector + channel;
        if (pixel + count <= spatial) {
            if (channel != filled_channel || count > filled) std::fill_n(values, count, vector[channel]);
            else return values;
            filled = count, filled_channel = channel;
            return values;
        }
        filled = 0;
        for (int64_t i = 0; i < count; ++channel, pixel = 0) {
            const int64_t run = std::min(count - i, spatial - pixel);
            std::fill_n(values + i, run, vector[channel]);
            i += run;
        }
        return values;
    }
};

// The values of a slice wait for its statistics in the output, or, where that has 16-bit ones, in a buffer; those of longer slices than
// this are computed a second time instead.
constexpr int64_t kMostWaiting = 1 << 22;

// One thread's work: activate, take the moments, normalise. [begin, end) are values of a slice.
template <typename A> struct Normalizer {
    const Values<A> h, out;
    const Vectors<A>& vectors;
    const Sizes sizes;
    const double eps;
    Spread<A> operands[kOperands], gammas, betas;
    A block[kBlock];
    A* const buffer;  // of buffer_size values

    Normalizer(const Values<A>& h, const Values<A>& out, const Vectors<A>& vectors, const Sizes& sizes, double eps, A* buffer)
        : h(h), out(out), vectors(vectors), sizes(sizes), eps(eps), buffer(buffer) {}
    static int64_t buffer_size(const Values<A>& out, int64_t n) { return out.wide || n > kMostWaiting ? 0 : std::max(n, kBlock); }

    // Where value `begin` of the slice, and those after it, wait.
    A* waiting(int64_t slice, int64_t begin) {
        return out.wide ? out.target(slice * sizes.n + begin, block) : sizes.n <= kMostWaiting ? buffer + begin : block;
    }

    // Of a value of a slice: its channel, and its pixel there.
    struct Place {
        int64_t channel, pixel;
        Place(const Sizes& sizes, int64_t slice, int64_t value) {
            const int64_t whole = sizes.spatial == 1 ? value : value / sizes.spatial;
            channel = slice % sizes.groups * sizes.channels + whole;
            pixel = value - whole * sizes.spatial;
        }
    };

    [[gnu::noinline]] void activate_block(int64_t slice, int64_t begin, int64_t count, A* to) {
        const int64_t at = slice * sizes.n + begin;
        const Place place(sizes, slice, begin);
        const A* from = h.read(at, count, to);
        std::array<const A*, kOperands> operand;
        for (int k = 0; k < kOperands; ++k) {
            operand[k] = vectors.full[k] ? vectors.operand[k] + at
                                         : operands[k](vectors.operand[k], place.channel, place.pixel, count, sizes.spatial);
        }
        activate(from, operand, to, count);
    }

    [[gnu::noinline]] Moments moments(int64_t slice, int64_t begin, int64_t end) {
        Moments m;
        for (int64_t i = begin; i < end; i += kBlock) {
            const int64_t count = std::min(kBlock, end - i);
            A* values = waiting(slice, i);
            activate_block(slice, i, count, values);
            if (i == begin) m = block_moments(values, count);
            else m.merge(block_moments(values, count));
        }
        return m;
    }

    // (from - mean) * rstd * gamma + beta
    [[gnu::noinline]] void scale(const A* from, A* to, int64_t n, const A* gamma, const A* beta, const Moments& m) const {
        const A hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / m.count + eps));
        if (std::isfinite(vectors.largest_gamma * rstd)) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) to[i] = ((from[i] - hi) - lo) * (gamma[i] * rstd) + beta[i];
        } else {  // as PyTorch does it: an infinite gamma decides between infinity and NaN
            for (int64_t i = 0; i < n; ++i) {
                const A a = gamma[i] * rstd;
                to[i] = std::isfinite(a) ? ((from[i] - hi) - lo) * a + beta[i] : from[i] * a + (beta[i] - hi * a);
            }
        }
    }
    [[gnu::noinline]] void normalize(int64_t slice, int64_t begin, int64_t end, const Moments& m) {
        for (int64_t i = begin; i < end; i += kBlock) {
            const int64_t count = std::min(kBlock, end - i), at = slice * sizes.n + i;
            const Place place(sizes, slice, i);
            A* values = waiting(slice, i);
            if (values == block) activate_block(slice, i, count, values);
            const A* gamma = gammas(vectors.gamma, place.channel, place.pixel, count, sizes.spatial);
            const A* beta = betas(vectors.beta, place.channel, place.pixel, count, sizes.spatial);
            scale(values, out.target(at, block), count, gamma, beta, m);
            out.leave(at, count, block);
        }
    }

    // Whole slices from first to last. Short ones together, as far as they are of one sample and fit a block.
    [[gnu::noinline]] void slices(int64_t first, int64_t last) {
        const int64_t n = sizes.n, together = kBlock / n;
        for (int64_t s = first, run; s < last; s += run) {
            run = std::max<int64_t>(1, std::min({together, last - s, sizes.groups - s % sizes.groups}));
            if (run == 1) {
                normalize(s, 0, n, moments(s, 0, n));
                continue;
            }
            const int64_t channel = Place(sizes, s, 0).channel;
            const A* gamma = gammas(vectors.gamma, channel, 0, run * n, sizes.spatial);
            const A* beta = betas(vectors.beta, channel, 0, run * n, sizes.spatial);
            A *values = waiting(s, 0), *to = out.target(s * n, block);
            activate_block(s, 0, run * n, values);
            for (int64_t i = 0; i < run * n; i += n) scale(values + i, to + i, n, gamma + i, beta + i, block_moments(values + i, n));
            out.leave(s * n, run * n, block);
        }
    }
};

// Whole slices to each thread where there are enough of them, or else parts of one slice after the other.
template <typename A>
void forward_cpu(const Values<A>& h, const Values<A>& out, const Vectors<A>& vectors, const Sizes& sizes, double eps) {
    const int64_t n = sizes.n, buffered = Normalizer<A>::buffer_size(out, n);
    if (sizes.slices >= at::get_num_threads() || n <= 8 * kBlock) {
        in_parallel(sizes.slices, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
            std::vector<A> buffer(buffered);
            Normalizer<A>(h, out, vectors, sizes, eps, buffer.data()).slices(begin, end);
        });
        return;
    }
    const int64_t part = 8 * kBlock, parts = (n + part - 1) / part;  // of fixed size: the sum's order is the same on any machine
    std::vector<A> buffer(buffered);
    std::vector<Moments> moments(parts);
    for (int64_t s = 0; s < sizes.slices; ++s) {
        in_parallel(parts, 1, [&](int64_t begin, int64_t end) {
            Normalizer<A> own(h, out, vectors, sizes, eps, buffer.data());
            for (int64_t p = begin; p < end; ++p) moments[p] = own.moments(s, p * part, std::min(n, (p + 1) * part));
        });
        Moments m;
        for (const Moments& other : moments) m.merge(other);
        in_parallel(parts, 1, [&](int64_t begin, int64_t end) {
            Normalizer<A> own(h, out, vectors, sizes, eps, buffer.data());
            own.normalize(s, begin * part, std::min(n, end * part), m);
        });
    }
}
// --- end shared: cpu group norm ---

// --- shared: group norm arguments (home: kernels/linear_swish_group_norm.py) ---
// The operators' common part. h (N, C, ...); each operand (C) or of h's shape; weight and bias (C); the output contiguous.
using Operands = std::array<at::Tensor, kOperands>;

void check(const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups) {
    TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(h.scalar_type()), "group_norm: not implemented for ", h.scalar_type());
    TORCH_CHECK(h.dim() >= 2, "group_norm: the input must have at least 2 dimensions");
    TORCH_CHECK(groups > 0, "group_norm: num_groups must be greater than 0");
    const auto channels = h.sym_size(1);
    // Messages without numbers: where PyTorch brings a standard library of its own, writing one out may crash.
    TORCH_CHECK(channels % groups == 0, "group_norm: the number of channels must be divisible by num_groups");
    TORCH_CHECK(channels <= std::numeric_limits<int32_t>::max(), "group_norm: more channels than 2^31 - 1");
    const at::ScalarType type = h.scalar_type(), norm_type = weight.scalar_type();
    const bool mixed = !h.is_cuda() && (type == at::kHalf || type == at::kBFloat16) && norm_type == at::kFloat;
    for (const at::Tensor& vector : {weight, bias}) {
        TORCH_CHECK(vector.dim() == 1 && vector.sym_size(0) == channels, "group_norm: weight and bias must have one value a channel");
        TORCH_CHECK(vector.device() == h.device(), "group_norm: input on ", h.device(), ", but weight or bias on ", vector.device());
        TORCH_CHECK((type == norm_type || mixed) && vector.scalar_type() == norm_type,
            "mixed dtype: input of type ", type, " with weight of type ", norm_type, " and bias of type ", bias.scalar_type());
    }
    for (const at::Tensor& operand : operands) {
        const bool vector = operand.dim() == 1 && operand.sym_size(0) == channels;
        TORCH_CHECK(vector || operand.sym_sizes() == h.sym_sizes(), "group_norm: an operand must have one value a channel or the input's shape");
        TORCH_CHECK(operand.device() == h.device(), "group_norm: input on ", h.device(), ", but an operand on ", operand.device());
    }
}

at::Tensor forward_meta(const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups,
    double) {
    check(h, operands, weight, bias, groups);
    return at::empty_like(h, h.options(), at::MemoryFormat::Contiguous);
}

Sizes sizes_of(const at::Tensor& h, int64_t groups) {
    const int64_t slices = h.size(0) * groups, n = h.numel() / slices, channels = h.size(1) / groups;
    return {slices, n, n / channels, groups, channels};
}

// The operands, weight and bias as the kernels read them: contiguous, in float32 (float64 for float64).
using Prepared = std::array<at::Tensor, kOperands + 2>;

at::Tensor prepared(const at::Tensor& vector, const at::Tensor& h) {
    return aligned(vector.to(h.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}
Prepared prepared(const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& h) {
    Prepared ready;
    for (int k = 0; k < kOperands + 2; ++k) ready[k] = prepared(k < kOperands ? operands[k] : k == kOperands ? weight : bias, h);
    return ready;
}

template <typename A> Vectors<A> vectors_of(const Prepared& ready) {
    Vectors<A> vectors;
    for (int k = 0; k < kOperands; ++k) {
        vectors.operand[k] = ready[k].data_ptr<A>();
        vectors.full[k] = ready[k].dim() > 1;
    }
    vectors.gamma = ready[kOperands].data_ptr<A>();
    vectors.beta = ready[kOperands + 1].data_ptr<A>();
    vectors.largest_gamma = 0;
    for (int64_t c = 0; c < ready[kOperands].numel(); ++c) vectors.largest_gamma = std::max(vectors.largest_gamma, std::fabs(vectors.gamma[c]));
    return vectors;
}

at::Tensor forward_on_cpu(
    const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups, double eps) {
    at::Tensor out = forward_meta(h, operands, weight, bias, groups, eps);
    if (h.numel() == 0) return out;
    const at::Tensor input = h.contiguous();
    const Prepared ready = prepared(operands, weight, bias, h);
    in_type_for(h, "group_norm", [&](auto zero) {
        using A = decltype(zero);
        forward_cpu(Values<A>(input), Values<A>(out), vectors_of<A>(ready), sizes_of(h, groups), eps);
    });
    return out;
}

#ifdef WITH_CUDA
extern "C" int64_t group_norm_workspace(int64_t slices, int64_t slice_bytes);
extern "C" int group_norm_forward(
    int dtype, const void* h, void* out, const void* const* vectors, const bool* full, int64_t slices, int64_t n, int64_t spatial,
    int groups, double eps, void* workspace, cudaStream_t stream);

at::Tensor forward_on_cuda(
    const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups, double eps) {
    at::Tensor out = forward_meta(h, operands, weight, bias, groups, eps);
    if (h.numel() == 0) return out;
    const c10::cuda::CUDAGuard guard(h.device());
    const at::Tensor input = aligned(h);
    const Prepared ready = prepared(operands, weight, bias, h);
    const void* vectors[kOperands + 2];
    bool full[kOperands + 2];
    for (int k = 0; k < kOperands + 2; ++k) vectors[k] = ready[k].data_ptr(), full[k] = ready[k].dim() > 1;
    const Sizes sizes = sizes_of(h, groups);
    const at::Tensor workspace = workspace_of(group_norm_workspace(sizes.slices, sizes.n * h.element_size()), h);
    check_launch(group_norm_forward(dtype_number(h, "group_norm"), input.data_ptr(), out.data_ptr(), vectors, full, sizes.slices, sizes.n,
        sizes.spatial, int(groups), eps, workspace.data_ptr(), current_stream()), "group_norm");
    return out;
}
#endif
// --- end shared: group norm arguments ---

template <auto forward> at::Tensor sigmoid_group_norm(const at::Tensor& h, const at::Tensor& bias, const at::Tensor& scale,
    const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    return forward(h, {bias, scale}, weight, group_bias, groups, eps);
}

// ---- the convolution too

at::Tensor convolution_meta(const at::Tensor& x, const at::Tensor& conv_weight, const at::Tensor& conv_bias, const at::Tensor& bias,
    const at::Tensor& scale, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    TORCH_CHECK(x.dim() == 4 && conv_weight.dim() == 4 && x.sym_size(1) == conv_weight.sym_size(1) && conv_bias.dim() == 1,
        "convolve: x (n, c, h, w) and weight (o, c, k, k) are wanted");
    const at::Tensor h = at::empty_symint({x.sym_size(0), conv_weight.sym_size(0), x.sym_size(2) - conv_weight.sym_size(2) + 1,
        x.sym_size(3) - conv_weight.sym_size(3) + 1}, x.options());
    check(h, {bias, scale}, weight, group_bias, groups);
    return h;
}
at::Tensor convolution_cpu(const at::Tensor& x, const at::Tensor& conv_weight, const at::Tensor& conv_bias, const at::Tensor& bias,
    const at::Tensor& scale, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    return forward_on_cpu(at::conv2d(x, conv_weight, conv_bias), {bias, scale}, weight, group_bias, groups, eps);
}
#ifdef WITH_CUDA
extern "C" int convolution_forward(
    int dtype, const void* x, void* out, const void* const* vectors, const int64_t* sizes, double eps, void* workspace,
    int64_t* workspace_bytes, cudaStream_t stream);

at::Tensor convolution_cuda(const at::Tensor& x, const at::Tensor& conv_weight, const at::Tensor& conv_bias, const at::Tensor& bias,
    const at::Tensor& scale, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    const auto type = x.scalar_type();
    const int64_t size = conv_weight.size(2);
    const bool covered = (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) && size == conv_weight.size(3) &&
        (size == 1 || size == 3) && bias.dim() == 1 && scale.dim() == 1 && x.size(0) > 0;
    at::Tensor ready[] = {conv_weight, conv_bias, bias, scale, weight, group_bias};
    const bool same = std::all_of(std::begin(ready), std::end(ready), [&](const at::Tensor& t) { return t.scalar_type() == type; });
    const auto run = [&](const void* input, void* out, const void* const* vectors, void* workspace, int64_t* workspace_bytes) {
        const int64_t sizes[] = {x.size(0), x.size(1), x.size(2), x.size(3), conv_weight.size(0), size, groups,
            same ? dtype_number(x, "convolve") : 0};
        check_launch(convolution_forward(dtype_number(x, "convolve"), input, out, vectors, sizes, eps, workspace, workspace_bytes,
            current_stream()), "convolve");
    };
    int64_t workspace_bytes = -1;
    if (covered) run(nullptr, nullptr, nullptr, nullptr, &workspace_bytes);
    if (workspace_bytes < 0) return forward_on_cuda(at::conv2d(x, conv_weight, conv_bias), {bias, scale}, weight, group_bias, groups, eps);
    at::Tensor out = convolution_meta(x, conv_weight, conv_bias, bias, scale, weight, group_bias, groups, eps);
    const at::Tensor input = aligned(x), workspace = workspace_of(workspace_bytes, x);
    const void* vectors[6];
    for (int i = 0; i < 6; ++i) vectors[i] = (ready[i] = aligned(same ? ready[i] : prepared(ready[i], x))).data_ptr();
    run(input.data_ptr(), out.data_ptr(), vectors, workspace.data_ptr(), &workspace_bytes);
    return out;
}
#endif

// ---- The backward.

// The gradients of h and of the operands from v's, at n values.
template <typename A>
[[gnu::noinline]] void differentiate(const A* h, const std::array<const A*, kOperands>& operand, const A* v, const A* grad_v, A* grad_h,
    const std::array<A*, kOperands>& grad_operand, int64_t n) {
    const A *bias = operand[0], *scale = operand[1];
    A *grad_bias = grad_operand[0], *grad_scale = grad_operand[1];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const A inner = grad_v[i] * (v[i] * (1 - v[i]));
        grad_scale[i] = inner * (h[i] + bias[i]);
        grad_bias[i] = grad_h[i] = inner * scale[i];
    }
}

// --- shared: cpu joint moments (home: kernels/linear_swish_group_norm.py) ---
template <typename A> [[gnu::noinline]] Joint block_joint(const A* values, const A* grads, int64_t n) {
    const Moments v = block_moments(values, n);
    double sum = 0, co = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += grads[i];
    const A mean = static_cast<A>(v.mean), grad_mean = static_cast<A>(sum / n);
#pragma omp simd reduction(+ : co)
    for (int64_t i = 0; i < n; ++i) co += (values[i] - mean) * (grads[i] - grad_mean);
    return {v, sum, co};
}
// --- end shared: cpu joint moments ---

// --- shared: cpu group norm gradients (home: kernels/linear_swish_group_norm.py) ---
constexpr int kSums = kOperands + 2;  // the gradients of the operands, of gamma and of beta

// With normal = (v - mean) * rstd and w = gamma * grad: grad_v = rstd * ((w - mean(w)) - normal * slope), where slope is
// mean((w - mean(w)) * normal); means over a slice.
template <typename A> struct SliceGradient {
    A hi, lo, rstd, mean = 0, mean_lo = 0, slope = 0;  // v's mean as hi + lo, and so that of w: its rounding would add up in sums
    SliceGradient() {}
    SliceGradient(const Moments& m, double eps) {
        hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / m.count + eps));
    }
};

// One thread's work.
template <typename A> struct Differentiator {
    const Values<A> grad, h, grad_h;
    const Vectors<A>& vectors;
    const Sizes sizes;
    const double eps;
    A raw[kBlock], given[kBlock], v[kBlock], normal[kBlock], grad_v[kBlock], out[kBlock], of_operand[kOperands][kBlock];
    Spread<A> operands[kOperands];

    Differentiator(
        const Values<A>& grad, const Values<A>& h, const Values<A>& grad_h, const Vectors<A>& vectors, const Sizes& sizes, double eps)
        : grad(grad), h(h), grad_h(grad_h), vectors(vectors), sizes(sizes), eps(eps) {}

    // `values` are those of h from `at` on, their channels' pixels from `channel` on.
    [[gnu::noinline]] const A* activated(const A* values, int64_t channel, int64_t count, std::array<const A*, kOperands>& operand) {
        for (int k = 0; k < kOperands; ++k) operand[k] = operands[k](vectors.operand[k], channel, 0, count, sizes.spatial);
        activate(values, operand, v, count);
        return v;
    }
    // From v, gamma (one, or one for each value) and the given gradient: `normal`, and the gradients of h, left at `at`, and the operands.
    template <typename Gamma> void finish(const SliceGradient<A>& slice, const A* values, const A* grads, Gamma&& gamma,
        const std::array<const A*, kOperands>& operand, int64_t at, int64_t count) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            normal[i] = ((v[i] - slice.hi) - slice.lo) * slice.rstd;
            // The mean goes with what varies: of g - mean alone the roundings would be equal, and add up in a channel's sum.
            grad_v[i] = slice.rstd * ((gamma(i) * grads[i] - (slice.mean + normal[i] * slice.slope)) - slice.mean_lo);
        }
        std::array<A*, kOperands> of;
        for (int k = 0; k < kOperands; ++k) of[k] = of_operand[k];
        differentiate(values, operand, v, grad_v, grad_h.target(at, out), of, count);
        grad_h.leave(at, count, out);
    }

    // Images: `count` pixels, from `pixel` on, of row `row`, one channel of one sample.
    [[gnu::noinline]] Joint joint_of(int64_t row, int64_t pixel, int64_t count) {
        Joint joint;
        std::array<const A*, kOperands> operand;
        for (int64_t p = pixel; p < pixel + count; p += kBlock) {
            const int64_t at = row * sizes.spatial + p, size = std::min(kBlock, pixel + count - p);
            activated(h.read(at, size, raw), row % (sizes.groups * sizes.channels), size, operand);
            joint.merge(block_joint(v, grad.read(at, size, given), size));
        }
        return joint;
    }
    [[gnu::noinline]] void gradients_of(int64_t row, int64_t pixel, int64_t count, const SliceGradient<A>& slice, double* sums) {
        std::array<const A*, kOperands> operand;
        const int64_t channel = row % (sizes.groups * sizes.channels);
        for (int64_t p = pixel; p < pixel + count; p += kBlock) {
            const int64_t at = row * sizes.spatial + p, size = std::min(kBlock, pixel + count - p);
            const A *values = h.read(at, size, raw), *grads = grad.read(at, size, given), gamma = vectors.gamma[channel];
            activated(values, channel, size, operand);
            finish(slice, values, grads, [&](int64_t) { return gamma; }, operand, at, size);
            for (int k = 0; k < kOperands; ++k) {
                double sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < size; ++i) sum += of_operand[k][i];
                sums[k] += sum;
            }
        }
    }
};

// sums: kSums vectors of one value a channel, zeros. The order of no sum depends on the number of threads.
// Rows in parts of a fixed size. Where there are slices for all threads, a thread takes whole ones, and finds its second read in a cache.
template <typename A> void backward_of_images(const Values<A>& grad, const Values<A>& h, const Values<A>& grad_h,
    const Vectors<A>& vectors, const Sizes& sizes, double eps, const std::array<bool, kSums>& wanted, double* sums) {
    const int64_t spatial = sizes.spatial, part = 8 * kBlock, parts = (spatial + part - 1) / part;
    const int64_t channels = sizes.groups * sizes.channels, rows = sizes.slices * sizes.channels;
    bool second = grad_h.data != nullptr;
    for (int k = 0; k < kOperands; ++k) second = second || wanted[k];
    std::vector<Joint> joints(rows * parts);
    std::vector<SliceGradient<A>> slices(sizes.slices);
    std::vector<double> row_sums(rows * parts * kOperands), norm_sums(rows * 2);
    const auto first_read = [&](Differentiator<A>& own, int64_t unit) {
        const int64_t row = unit / parts, pixel = unit % parts * part;
        joints[unit] = own.joint_of(row, pixel, std::min(part, spatial - pixel));
    };
    const auto merge_slice = [&](int64_t s) {
        std::vector<Joint> own(sizes.channels);
        Moments m;
        double mean = 0, co = 0;
        for (int64_t c = 0; c < sizes.channels; ++c) {
            const int64_t row = s * sizes.channels + c;
            for (int64_t p = 0; p < parts; ++p) own[c].merge(joints[row * parts + p]);
            m.merge(own[c].v);
            mean += vectors.gamma[row % channels] * own[c].sum / sizes.n;
        }
        SliceGradient<A> slice(m, eps);
        const double rstd = 1 / std::sqrt(m.m2 / m.count + eps);
        for (int64_t c = 0; c < sizes.channels; ++c) {
            const int64_t row = s * sizes.channels + c;
            const double gamma = vectors.gamma[row % channels], offset = own[c].v.mean - m.mean;
            co += gamma * own[c].co + (gamma * own[c].sum - mean * spatial) * offset;
            norm_sums[2 * row] = rstd * (own[c].co + own[c].sum * offset);
            norm_sums[2 * row + 1] = own[c].sum;
        }
        slice.mean = static_cast<A>(mean), slice.mean_lo = static_cast<A>(mean - slice.mean);
        slice.slope = static_cast<A>(rstd * co / sizes.n);
        slices[s] = slice;
    };
    const auto second_read = [&](Differentiator<A>& own, int64_t unit) {
        const int64_t row = unit / parts, pixel = unit % parts * part;
        own.gradients_of(row, pixel, std::min(part, spatial - pixel), slices[row / sizes.channels], &row_sums[unit * kOperands]);
    };
    const int64_t slice_units = sizes.channels * parts;
    if (sizes.slices >= at::get_num_threads()) {
        in_parallel(sizes.slices, std::max<int64_t>(1, 8192 / sizes.n), [&](int64_t begin, int64_t end) {
            Differentiator<A> own(grad, h, grad_h, vectors, sizes, eps);
            for (int64_t s = begin; s < end; ++s) {
                for (int64_t u = s * slice_units; u < (s + 1) * slice_units; ++u) first_read(own, u);
                merge_slice(s);
                for (int64_t u = s * slice_units; second && u < (s + 1) * slice_units; ++u) second_read(own, u);
            }
        });
    } else {
        const auto all_units = [&](const auto& visit) {
            in_parallel(rows * parts, std::max<int64_t>(1, 8192 / spatial), [&](int64_t begin, int64_t end) {
                Differentiator<A> own(grad, h, grad_h, vectors, sizes, eps);
                for (int64_t u = begin; u < end; ++u) visit(own, u);
            });
        };
        all_units(first_read);
        for (int64_t s = 0; s < sizes.slices; ++s) merge_slice(s);
        if (second) all_units(second_read);
    }
    for (int64_t row = 0; row < rows; ++row) {
        double* of_channel = sums + row % channels;
        for (int k = 0; k < kOperands; ++k) {
            for (int64_t p = 0; p < parts; ++p) of_channel[k * channels] += row_sums[(row * parts + p) * kOperands + k];
        }
        of_channel[kOperands * channels] += norm_sums[2 * row];
        of_channel[(kOperands + 1) * channels] += norm_sums[2 * row + 1];
    }
}
// --- end shared: cpu group norm gradients ---

template <typename A> auto backward_for(const Sizes&) { return backward_of_images<A>; }

// --- shared: group norm gradient arguments (home: kernels/linear_swish_group_norm.py) ---
// The operators' common part: grad and h (N, C, ...), operands and weight (C); `needs` the gradients of h, the operands, weight and bias.
// What is not needed comes back without elements.
using Needs = std::array<bool, kSums + 1>;

std::vector<at::Tensor> backward_meta(
    const at::Tensor& grad, const at::Tensor& h, const Operands& operands, const at::Tensor& weight, int64_t groups, double,
    const Needs& needs) {
    check(h, operands, weight, weight, groups);
    TORCH_CHECK(grad.sym_sizes() == h.sym_sizes() && grad.scalar_type() == h.scalar_type() && grad.device() == h.device(),
        "group_norm: the gradient must have the shape, dtype and device of the input");
    for (const at::Tensor& operand : operands) TORCH_CHECK(operand.dim() == 1, "group_norm: backward takes one value a channel");
    std::vector<at::Tensor> of(kSums + 1, weight);
    of[0] = h;
    std::copy(operands.begin(), operands.end(), of.begin() + 1);
    for (int i = 0; i <= kSums; ++i) {
        of[i] = needs[i] ? at::empty_like(of[i], of[i].options(), at::MemoryFormat::Contiguous) : at::empty({0}, of[i].options());
    }
    return of;
}

std::vector<at::Tensor> backward_on_cpu(const at::Tensor& grad, const at::Tensor& h, const Operands& operands, const at::Tensor& weight,
    int64_t groups, double eps, const Needs& needs) {
    std::vector<at::Tensor> results = backward_meta(grad, h, operands, weight, groups, eps, needs);
    at::Tensor sums = at::empty({kSums, h.size(1)}, h.options().dtype(at::kDouble)).zero_();
    if (h.numel() > 0) {
        const at::Tensor input = h.contiguous(), given = grad.contiguous();
        const Prepared ready = prepared(operands, weight, weight, h);
        std::array<bool, kSums> wanted;
        std::copy_n(needs.begin() + 1, kSums, wanted.begin());
        in_type_for(h, "group_norm", [&](auto zero) {
            using A = decltype(zero);
            const Sizes sizes = sizes_of(h, groups);
            backward_for<A>(sizes)(
                Values<A>(given), Values<A>(input), Values<A>(results[0]), vectors_of<A>(ready), sizes, eps, wanted, sums.data_ptr<double>());
        });
    }
    for (int k = 0; k < kSums; ++k) {
        if (needs[k + 1]) results[k + 1].copy_(sums.select(0, k));
    }
    return results;
}

#ifdef WITH_CUDA
extern "C" int64_t group_norm_backward_workspace(int dtype, int64_t slices, int64_t n, int64_t spatial, int groups);
extern "C" int group_norm_backward(
    int dtype, const void* grad, const void* h, void* grad_h, const void* const* vectors, void* const* to, int64_t slices, int64_t n,
    int64_t spatial, int groups, double eps, void* workspace, cudaStream_t stream);

std::vector<at::Tensor> backward_on_cuda(const at::Tensor& grad, const at::Tensor& h, const Operands& operands, const at::Tensor& weight,
    int64_t groups, double eps, const Needs& needs) {
    const c10::cuda::CUDAGuard guard(h.device());
    std::vector<at::Tensor> results = backward_meta(grad, h, operands, weight, groups, eps, needs);
    if (h.numel() == 0) {
        for (at::Tensor& result : results) result.zero_();
        return results;
    }
    const at::Tensor input = aligned(h), given = aligned(grad);
    const Prepared ready = prepared(operands, weight, weight, h);
    const void* vectors[kOperands + 2];
    for (int k = 0; k < kOperands + 2; ++k) vectors[k] = ready[k].data_ptr();
    std::array<at::Tensor, kSums> sums;
    void* to[kSums];
    for (int k = 0; k < kSums; ++k) {
        sums[k] = at::empty_like(results[k + 1], ready[kOperands].scalar_type());
        to[k] = needs[k + 1] ? sums[k].data_ptr() : nullptr;
    }
    const Sizes sizes = sizes_of(h, groups);
    const int dtype = dtype_number(h, "group_norm");
    const at::Tensor workspace =
        workspace_of(group_norm_backward_workspace(dtype, sizes.slices, sizes.n, sizes.spatial, int(groups)), h);
    check_launch(group_norm_backward(dtype, given.data_ptr(), input.data_ptr(), needs[0] ? results[0].data_ptr() : nullptr, vectors, to,
        sizes.slices, sizes.n, sizes.spatial, int(groups), eps, workspace.data_ptr(), current_stream()), "group_norm");
    for (int k = 0; k < kSums; ++k) results[k + 1] = sums[k].to(results[k + 1].scalar_type());
    return results;
}
#endif
// --- end shared: group norm gradient arguments ---

template <auto backward> std::vector<at::Tensor> sigmoid_group_norm_backward(const at::Tensor& grad, const at::Tensor& h,
    const at::Tensor& bias, const at::Tensor& scale, const at::Tensor& weight, int64_t groups, double eps, Needs needs) {
    return backward(grad, h, {bias, scale}, weight, groups, eps, needs);
}

// ---- The convolution alone and its gradients.

at::Tensor convolution_alone_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    TORCH_CHECK(x.dim() == 4 && weight.dim() == 4 && x.sym_size(1) == weight.sym_size(1) && bias.dim() == 1,
        "convolution: x (n, c, h, w), weight (o, c, k, k) and bias (o) are wanted");
    return at::empty_symint({x.sym_size(0), weight.sym_size(0), x.sym_size(2) - weight.sym_size(2) + 1,
        x.sym_size(3) - weight.sym_size(3) + 1}, x.options());
}
at::Tensor convolution_alone_aten(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return at::conv2d(x, weight, bias).contiguous();
}

// Of x and of the weight. What is not needed comes back without elements.
at::Tensor empty_if(bool needed, const at::Tensor& like) {
    return needed ? at::empty_like(like, like.options(), at::MemoryFormat::Contiguous) : at::empty({0}, like.options());
}
std::vector<at::Tensor> convolution_gradients_aten(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, bool of_x, bool of_weight) {
    const int64_t ones[] = {1, 1}, zeros[] = {0, 0};
    auto [grad_x, grad_weight, _] =
        at::convolution_backward(grad, x, weight, c10::nullopt, ones, zeros, ones, false, zeros, 1, {of_x, of_weight, false});
    return {of_x ? grad_x.contiguous() : empty_if(false, x), of_weight ? grad_weight.contiguous() : empty_if(false, weight)};
}

#ifdef WITH_CUDA
extern "C" int convolution_alone(const void* x, const void* weight, const void* bias, void* h, const int64_t* sizes, void* workspace,
    int64_t* workspace_bytes, cudaStream_t stream);
extern "C" int convolution_gradients(const void* grad, const void* x, const void* weight, void* grad_x, void* grad_weight,
    const int64_t* sizes, void* workspace, int64_t* workspace_bytes, cudaStream_t stream);

// launch(workspace, &bytes) is called with null first. False: it is ATen's to do.
template <typename F> bool run_with_workspace(const at::Tensor& x, const at::Tensor& weight, const F& launch) {
    if (x.scalar_type() != at::kFloat || weight.scalar_type() != at::kFloat || weight.size(2) != weight.size(3)) return false;
    const int64_t sizes[] = {x.size(0), x.size(1), x.size(2), x.size(3), weight.size(0), weight.size(2)};
    const auto run = [&](void* workspace, int64_t* bytes) {
        check_launch(launch(sizes, workspace, bytes, current_stream()), "convolution");
    };
    int64_t bytes = -1;
    run(nullptr, &bytes);
    if (bytes < 0) return false;
    const at::Tensor workspace = workspace_of(bytes, x);
    run(workspace.data_ptr(), &bytes);
    return true;
}

at::Tensor convolution_alone_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor input = aligned(x), taps = aligned(weight), offset = aligned(bias);
    at::Tensor h = convolution_alone_meta(x, weight, bias);
    const auto launch = [&](const int64_t* sizes, void* workspace, int64_t* bytes, cudaStream_t stream) {
        return convolution_alone(
            input.data_ptr(), taps.data_ptr(), offset.data_ptr(), h.data_ptr(), sizes, workspace, bytes, stream);
    };
    return run_with_workspace(x, weight, launch) ? h : convolution_alone_aten(x, weight, bias);
}

std::vector<at::Tensor> convolution_gradients_cuda(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, bool of_x, bool of_weight) {
    const at::Tensor given = aligned(grad), input = aligned(x), taps = aligned(weight);
    std::vector<at::Tensor> results = {empty_if(of_x, x), empty_if(of_weight, weight)};
    const auto launch = [&](const int64_t* sizes, void* workspace, int64_t* bytes, cudaStream_t stream) {
        return convolution_gradients(given.data_ptr(), input.data_ptr(), taps.data_ptr(), of_x ? results[0].data_ptr() : nullptr,
            of_weight ? results[1].data_ptr() : nullptr, sizes, workspace, bytes, stream);
    };
    return run_with_workspace(x, weight, launch) ? results : convolution_gradients_aten(grad, x, weight, of_x, of_weight);
}
#endif

// ---- The network while recording, which gives h too, and its gradients: of x, of the convolution's weight and bias, of bias, scale, weight
// and group_bias. All are of x's dtype, bias and scale one value a channel.

using AllNeeds = std::array<bool, 7>;
using Pair = std::tuple<at::Tensor, at::Tensor>;

Pair record_cpu(const at::Tensor& x, const at::Tensor& conv_weight, const at::Tensor& conv_bias, const at::Tensor& bias, const at::Tensor& scale,
    const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    const at::Tensor h = convolution_alone_aten(x, conv_weight, conv_bias);
    return {forward_on_cpu(h, {bias, scale}, weight, group_bias, groups, eps), h};
}
Pair record_meta(const at::Tensor& x, const at::Tensor& conv_weight, const at::Tensor& conv_bias, const at::Tensor& bias, const at::Tensor& scale,
    const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    for (const at::Tensor& t : {conv_weight, conv_bias, bias, scale, weight, group_bias}) {
        TORCH_CHECK(t.scalar_type() == x.scalar_type(), "record: all must be of one dtype");
    }
    TORCH_CHECK(bias.dim() == 1 && scale.dim() == 1, "record: bias and scale must have one value a channel");
    const at::Tensor h = convolution_alone_meta(x, conv_weight, conv_bias);
    return {forward_meta(h, {bias, scale}, weight, group_bias, groups, eps), h};
}

// By two operators: the gradient of h, and the convolution's from it.
template <typename B, typename C>
std::vector<at::Tensor> recorded_in_two(const B& backward, const C& convolution_gradients, const at::Tensor& grad, const at::Tensor& h,
    const at::Tensor& x, const at::Tensor& conv_weight, const Operands& operands, const at::Tensor& weight, int64_t groups, double eps,
    const AllNeeds& needs) {
    const bool of_h = needs[0] || needs[1], of_bias = needs[2] || needs[3];  // the convolution's bias and bias have the same gradient
    std::vector<at::Tensor> tail = backward(grad, h, operands, weight, groups, eps, Needs{of_h, of_bias, needs[4], needs[5], needs[6]});
    std::vector<at::Tensor> results = {empty_if(false, x), empty_if(false, conv_weight)};
    if (of_h) results = convolution_gradients(tail[0], x, conv_weight, needs[0], needs[1]);
    results.push_back(!needs[2] ? empty_if(false, x) : needs[3] ? tail[1].clone() : tail[1]);
    results.push_back(needs[3] ? tail[1] : empty_if(false, x));
    results.insert(results.end(), tail.begin() + 2, tail.end());
    return results;
}
std::vector<at::Tensor> record_backward_cpu(const at::Tensor& grad, const at::Tensor& h, const at::Tensor& x, const at::Tensor& conv_weight,
    const at::Tensor& bias, const at::Tensor& scale, const at::Tensor& weight, int64_t groups, double eps, AllNeeds needs) {
    return recorded_in_two(
        backward_on_cpu, convolution_gradients_aten, grad, h, x, conv_weight, {bias, scale}, weight, groups, eps, needs);
}
std::vector<at::Tensor> record_backward_meta(const at::Tensor& grad, const at::Tensor& h, const at::Tensor& x, const at::Tensor& conv_weight,
    const at::Tensor& bias, const at::Tensor& scale, const at::Tensor& weight, int64_t groups, double eps, AllNeeds needs) {
    std::vector<at::Tensor> results = {empty_if(needs[0], x), empty_if(needs[1], conv_weight), empty_if(needs[2], bias)};
    const std::vector<at::Tensor> tail =
        backward_meta(grad, h, {bias, scale}, weight, groups, eps, Needs{false, needs[3], needs[4], needs[5], needs[6]});
    results.insert(results.end(), tail.begin() + 1, tail.end());
    return results;
}

#ifdef WITH_CUDA
extern "C" int convolution_recorded(const void* x, void* h, void* out, const void* const* vectors, const int64_t* sizes, int groups, double eps,
    void* workspace, int64_t* workspace_bytes, cudaStream_t stream);
extern "C" int convolution_recorded_gradients(const void* grad, const void* h, const void* x, const void* const* vectors, void* const* to,
    const int64_t* sizes, int groups, double eps, void* workspace, int64_t* workspace_bytes, cudaStream_t stream);

Pair record_cuda(const at::Tensor& x, const at::Tensor& conv_weight, const at::Tensor& conv_bias, const at::Tensor& bias, const at::Tensor& scale,
    const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto [out, h] = record_meta(x, conv_weight, conv_bias, bias, scale, weight, group_bias, groups, eps);
    const at::Tensor input = aligned(x);
    const at::Tensor ready[] = {aligned(conv_weight), aligned(conv_bias), aligned(bias), aligned(scale), aligned(weight), aligned(group_bias)};
    const void* vectors[6];
    for (int i = 0; i < 6; ++i) vectors[i] = ready[i].data_ptr();
    const auto launch = [&, &h = h, &out = out](const int64_t* sizes, void* workspace, int64_t* bytes, cudaStream_t stream) {
        return convolution_recorded(
            input.data_ptr(), h.data_ptr(), out.data_ptr(), vectors, sizes, int(groups), eps, workspace, bytes, stream);
    };
    if (run_with_workspace(x, conv_weight, launch)) return {out, h};
    h = convolution_alone_cuda(x, conv_weight, conv_bias);
    return {forward_on_cuda(h, {bias, scale}, weight, group_bias, groups, eps), h};
}

std::vector<at::Tensor> record_backward_cuda(const at::Tensor& grad, const at::Tensor& h, const at::Tensor& x, const at::Tensor& conv_weight,
    const at::Tensor& bias, const at::Tensor& scale, const at::Tensor& weight, int64_t groups, double eps, AllNeeds needs) {
    const c10::cuda::CUDAGuard guard(x.device());
    std::vector<at::Tensor> results = record_backward_meta(grad, h, x, conv_weight, bias, scale, weight, groups, eps, needs);
    const at::Tensor given = aligned(grad), input = aligned(x), values = aligned(h);
    const at::Tensor ready[] = {aligned(conv_weight), aligned(bias), aligned(scale), aligned(weight)};
    const void* vectors[4];
    for (int i = 0; i < 4; ++i) vectors[i] = ready[i].data_ptr();
    const bool bias_alone = needs[2] && !needs[3];  // the convolution's: both are the same sum
    at::Tensor& bias_sum = results[bias_alone ? 2 : 3];
    void* to[6] = {nullptr, nullptr, needs[2] || needs[3] ? bias_sum.data_ptr() : nullptr};
    for (int i = 0; i < 2; ++i) to[i] = needs[i] ? results[i].data_ptr() : nullptr;
    for (int i = 3; i < 6; ++i) to[i] = needs[i + 1] ? results[i + 1].data_ptr() : nullptr;
    const auto launch = [&](const int64_t* sizes, void* workspace, int64_t* bytes, cudaStream_t stream) {
        return convolution_recorded_gradients(given.data_ptr(), values.data_ptr(), input.data_ptr(), vectors, to, sizes, int(groups), eps,
            workspace, bytes, stream);
    };
    if (run_with_workspace(x, conv_weight, launch)) {
        if (needs[2] && needs[3]) results[2].copy_(results[3]);
        return results;
    }
    return recorded_in_two(
        backward_on_cuda, convolution_gradients_cuda, grad, h, x, conv_weight, {bias, scale}, weight, groups, eps, needs);
}
#endif

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor h, Tensor bias, Tensor scale, Tensor weight, Tensor group_bias, int groups, float eps) -> Tensor");
    m.def("backward(Tensor grad, Tensor h, Tensor bias, Tensor scale, Tensor weight, int groups, float eps, bool[5] needs) -> Tensor[]");
    m.def("convolve(Tensor x, Tensor conv_weight, Tensor conv_bias, Tensor bias, Tensor scale, Tensor weight, Tensor group_bias, int groups, "
          "float eps) -> Tensor");
    m.def(
        "record(Tensor x, Tensor conv_weight, Tensor conv_bias, Tensor bias, Tensor scale, Tensor weight, Tensor group_bias, int groups, "
        "float eps) -> (Tensor, Tensor)");
    m.def(
        "record_backward(Tensor grad, Tensor h, Tensor x, Tensor conv_weight, Tensor bias, Tensor scale, Tensor weight, int groups, "
        "float eps, bool[7] needs) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("forward", sigmoid_group_norm<forward_on_cpu>);
    m.impl("backward", sigmoid_group_norm_backward<backward_on_cpu>);
    m.impl("convolve", convolution_cpu);
    m.impl("record", record_cpu);
    m.impl("record_backward", record_backward_cpu);
}
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", sigmoid_group_norm<forward_meta>);
    m.impl("backward", sigmoid_group_norm_backward<backward_meta>);
    m.impl("convolve", convolution_meta);
    m.impl("record", record_meta);
    m.impl("record_backward", record_backward_meta);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", sigmoid_group_norm<forward_on_cuda>);
    m.impl("backward", sigmoid_group_norm_backward<backward_on_cuda>);
    m.impl("convolve", convolution_cuda);
    m.impl("record", record_cuda);
    m.impl("record_backward", record_backward_cuda);
}
#endif
// The backwards are called where no gradient is taken of them; whoever does so is told.
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"backward", "record_backward"}) m.impl(name, torch::autograd::autogradNotImplementedFallback());
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
_forward = getattr(torch.ops, NAMESPACE).forward
_convolve, _backward = (getattr(getattr(torch.ops, NAMESPACE), name) for name in ("convolve", "backward"))
_record, _record_backward = (getattr(getattr(torch.ops, NAMESPACE), name) for name in ("record", "record_backward"))


# --- shared: group norm in Python (home: kernels/linear_swish_group_norm.py) ---
def _is_per_channel(operand: torch.Tensor, h: torch.Tensor) -> bool:
    """Whether the operand, broadcast against h (N, C, ...), has h's shape and varies along the channels at most."""
    first = h.dim() - operand.dim()
    allowed = [(1,) if d != 1 else (1, h.shape[1]) for d in range(first, h.dim())]
    return first >= 0 and all(size in sizes for size, sizes in zip(operand.shape, allowed))


def _as_operands(h: torch.Tensor, operands: tuple) -> tuple:
    """h and the operands as the operator takes them: h of the dtype and shape of their sum, an operand (C) or of h's shape."""
    dtype = h.dtype
    for operand in operands:
        if operand.dim() > 0:  # one without dimensions takes no part in promotion
            dtype = torch.promote_types(dtype, operand.dtype)
    if h.is_cuda and torch.is_autocast_enabled():
        dtype = torch.promote_types(dtype, torch.float32)  # there autocast runs group_norm in float32
    h = h.to(dtype)
    if h.dim() < 2 or not all(_is_per_channel(operand, h) for operand in operands):
        h, *operands = torch.broadcast_tensors(h, *operands)
    if h.dim() < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {h.dim()}")
    return h, [o.reshape(-1).expand(h.shape[1]) if _is_per_channel(o, h) else o.expand(h.shape) for o in operands]


def _group_norm_arguments(group_norm: nn.GroupNorm, h: torch.Tensor, vectors: tuple = ()) -> tuple:
    """weight, bias, groups and eps of the norm, after the checks that PyTorch makes in Python. vectors: the first two, if they are known."""
    size = [h.shape[0] * h.shape[1] // group_norm.num_groups, group_norm.num_groups, *h.shape[2:]]
    if math.prod(size) == size[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    weight, bias = vectors or (group_norm.weight, group_norm.bias)
    if h.shape[1] % group_norm.num_groups != 0:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape {list(h.shape)} and "
            f"num_groups={group_norm.num_groups}"
        )
    if weight.shape != h.shape[1:2]:
        raise RuntimeError(
            f"Expected weight to have one value for each of the input's channels, but got weight of shape {list(weight.shape)} and input "
            f"of shape {list(h.shape)}"
        )
    if h.is_cuda and torch.is_autocast_enabled():
        weight, bias = weight.to(h.dtype), bias.to(h.dtype)
    return weight, bias, group_norm.num_groups, group_norm.eps


def _laid_out_as(out: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """PyTorch's group_norm keeps h's channels_last on the CPU, and there alone."""
    if h.device.type != "cpu" or h.dim() != 4 or h.is_contiguous() or not h.is_contiguous(memory_format=torch.channels_last):
        return out
    return out.contiguous(memory_format=torch.channels_last)


def _spread(vector: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """An operand as it broadcasts against h."""
    return vector.view(-1, *[1] * (h.dim() - 2)) if vector.dim() == 1 else vector
# --- end shared: group norm in Python ---


# --- shared: derivatives (home: kernels/linear_swish_group_norm.py) ---
def _differentiated(function, tensors: tuple, grad: torch.Tensor, needs: tuple) -> tuple:
    """The gradients of function(*tensors), in ATen operators, by those of them that are needed: what may be differentiated in turn."""
    def of_needed(*needed):
        needed = iter(needed)
        return function(*(next(needed) if need else t for t, need in zip(tensors, needs)))

    found = iter(torch.func.vjp(of_needed, *(t for t, need in zip(tensors, needs) if need))[1](grad))
    return tuple(next(found) if need else None for need in needs)
# --- end shared: derivatives ---


def _sigmoid_group_norm(h, bias, scale, weight, group_bias, groups: int, eps: float) -> torch.Tensor:
    """In ATen operators."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    wide, bias, scale, weight, group_bias = (t.to(dtype) for t in (h, bias, scale, weight, group_bias))
    v = ((wide + _spread(bias, h)) * _spread(scale, h)).sigmoid()
    return nn.functional.group_norm(v, groups, weight, group_bias, eps).to(h.dtype)


class SigmoidGroupNorm(torch.autograd.Function):
    """out = GroupNorm(sigmoid((h + bias) * scale)). Saves h and the vectors; one operator backward, ATen's for second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, bias, scale, weight, group_bias, groups, eps):
        return _forward(h, bias, scale, weight, group_bias, groups, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        (h, bias, scale, weight, _), needs, norm = ctx.saved_tensors, ctx.needs_input_grad[:5], (ctx.groups, ctx.eps)
        if torch.is_grad_enabled() or bias.dim() > 1 or scale.dim() > 1:
            return *_differentiated(lambda *tensors: _sigmoid_group_norm(*tensors, *norm), ctx.saved_tensors, grad, needs), None, None
        return *(own if need else None for own, need in zip(_backward(grad, h, bias, scale, weight, *norm, needs), needs)), None, None


class ConvSigmoidGroupNorm(torch.autograd.Function):
    """The whole network and h, which it saves with x and the parameters. h is no one's to use: its own gradient is not asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, conv_weight, conv_bias, bias, scale, weight, group_bias, groups, eps):
        return _record(x, conv_weight, conv_bias, bias, scale, weight, group_bias, groups, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or h gets a gradient of zeros

    @staticmethod
    def backward(ctx, grad, _):
        *tensors, h = ctx.saved_tensors
        (x, conv_weight, _, bias, scale, weight, _), needs, norm = tensors, ctx.needs_input_grad[:7], (ctx.groups, ctx.eps)
        if grad is None:
            return (None,) * 9
        if torch.is_grad_enabled():
            def network(x, conv_weight, conv_bias, *vectors):
                return _sigmoid_group_norm(nn.functional.conv2d(x, conv_weight, conv_bias), *vectors, *norm)

            return *_differentiated(network, tensors, grad, needs), None, None
        found = _record_backward(grad, h, x, conv_weight, bias, scale, weight, *norm, needs)
        return *(own if need else None for own, need in zip(found, needs)), None, None


def _has_default_strides(t: torch.Tensor) -> bool:
    """Not only is_contiguous(): PyTorch's convolution also reads channels_last off the strides of dimensions of one value."""
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride())):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (N, in_channels, H, W) of float64, float32, float16 or bfloat16, on the CPU or a CUDA device, in any memory layout; returns
    (N, out_channels, H - k + 1, W - k + 1), laid out as the Model's. The errors of nn.Conv2d and nn.GroupNorm for other shapes.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, num_groups: int, bias_shape: tuple, scale_shape: tuple
    ):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_plain_convolution(x):
            weight = self.conv.weight
            size = [x.shape[0], weight.shape[0], x.shape[2] - weight.shape[2] + 1, x.shape[3] - weight.shape[3] + 1]
            h, operands = _as_operands(x.new_empty(()).expand(size), (self.bias, self.scale))  # h's form, without its values
            tensors = (x, weight, self.conv.bias, *operands, self.group_norm.weight, self.group_norm.bias)
            needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if all(o.dim() == 1 and o.dtype == x.dtype for o in operands):
                arguments = (*tensors[:3], *operands, *_group_norm_arguments(self.group_norm, h))
                return ConvSigmoidGroupNorm.apply(*arguments)[0] if needs_grad else _convolve(*arguments)
        h, (bias, scale) = _as_operands(self.conv(x), (self.bias, self.scale))
        arguments = (h, bias, scale, *_group_norm_arguments(self.group_norm, h))
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in arguments[:5])
        return _laid_out_as(SigmoidGroupNorm.apply(*arguments) if needs_grad else _forward(*arguments), h)

    def _is_plain_convolution(self, x: torch.Tensor) -> bool:
        """Whether self.conv(x) is the convolution of `_convolve` and nothing more: no hook, no padding, no autocast, no error."""
        conv = self.conv
        if type(conv) is not nn.Conv2d or "forward" in conv.__dict__ or conv.bias is None:
            return False
        everyones = (getattr(nn.modules.module, f"_global_{when}_hooks") for when in ("forward", "forward_pre", "backward", "backward_pre"))
        if any((conv._forward_hooks, conv._forward_pre_hooks, conv._backward_hooks, conv._backward_pre_hooks, *everyones)):
            return False
        if (conv.stride, conv.padding, conv.dilation, conv.groups) != ((1, 1), (0, 0), (1, 1), 1):
            return False
        if hasattr(torch, "get_autocast_dtype"):  # torch 2.4: the question is asked of a device
            autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        else:
            autocast = torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()
        if autocast:
            return False
        same = all((t.device, t.dtype) == (x.device, x.dtype) for t in (conv.weight, conv.bias))
        if not same or x.dim() != 4 or conv.weight.dim() != 4 or not all(map(_has_default_strides, (x, conv.weight))):
            return False
        return x.shape[1] == conv.weight.shape[1] and x.shape[2] >= conv.weight.shape[2] and x.shape[3] >= conv.weight.shape[3]
