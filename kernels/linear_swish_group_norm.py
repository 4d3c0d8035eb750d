"""A linear layer, then Swish, one more bias and group normalisation, fused: a drop-in for the Model of the same name.

    h = x W^T + b;    v = sigmoid(h) * h + bias;    out = (v - mean) * rstd * gamma + beta

`mean` and `rstd` are those of a slice, the features of one group of one row: rstd = 1 / sqrt(M2 / n + eps), M2 = sum((v - mean)^2).

Below float64 the whole network is one operator. On Hopper (sm_90, CUDA 12) float32 runs on the fp16 tensor cores with its own accuracy,
from 128 rows and features and 2^30 multiplications on: x and W are split into two fp16 pieces, three products of pieces make one of
float32, and where a group is 64 features its norm is in the product's epilogue, which writes the output and, for a backward, h, while the
tensor cores multiply the next tile. Where TF32 is allowed one product of the first pieces does, with TF32's error, as a rule less where x
is of one sign; float16 and bfloat16 are multiplied as they are, and rounded once. `freeze_weight()` splits W once instead of in each call.
The gradients of float32's product are two products of the same kind; none of their operands is transposed in memory, and h's gradient is
split once for both (where a group is 64 features as soon as it is made, and not written itself). On sm_80 and sm_100 a plainer loop makes
the three products. Few rows, for which reading W is all the work, have a kernel of their own on sm_80 and newer, which adds in float32 and
has the same epilogue. Everything else (other chips, small products, hooks on the linear layer, autocast) takes PyTorch's matrix product,
and one kernel for all that follows it.

In that one kernel every v is used twice, and where it waits depends on the slice:

    slice                     v waits in                                 traffic                            on
    up to 8192 values         registers of 1 to 256 threads              h read once, out written once      any GPU
    any                       nowhere                                    h read twice, out written once     any GPU

(4096 values in float64; 2048 where they do not come in whole packs of 16 bytes.) A thread that owns part of a short slice owns the same
part of one to three more rows: the bias, gamma and beta of its features are loaded once for all of them.

Arithmetic is in float32 (float64 for float64). Statistics never are E[v^2] - E[v]^2; the mean is carried as an unevaluated sum hi + lo, so
one far from zero costs no accuracy. Sums have a fixed order: the same input, the same bits.

The bias may have any shape that broadcasts: one value a feature is the fast way, anything else is read with one value for each of h's.
h may have more dimensions than two, as in GroupNorm. On the CPU each core takes whole slices, in blocks that stay in its first cache.
Gradients: one operator, which computes v anew. Up to 4096 values a slice (2048 in float64, 1024 loose ones) wait in registers, and h and
the output's gradient are read once; longer ones, and images, are read twice. Second derivatives, and a bias of h's shape, are ATen's.
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
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

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

// What a value of h becomes before the norm: Swish, then the bias.
constexpr int kOperands = 1;
template <typename A> __device__ __forceinline__ A activate(A h, const A (&operand)[kOperands]) { return sigmoid(h) * h + operand[0]; }

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

// --- shared: product (home: kernels/linear_swish_group_norm.py) ---
// ---------------------------------------------------------------------------------------------------------------------------------
// x W^T on fp16 tensor cores, with the accuracy of float32. `x` (m, k), `weight` (n, k), their product (m, n), all row-major.
//
// A row of either operand is scaled by a power of two so that its largest magnitude lies in [2^14, 2^15), and each value becomes hi + lo,
// two fp16 numbers. The product is hi hi + hi lo + lo hi, unscaled; where TF32 is allowed hi hi alone has its 11 bits. The tensor cores
// truncate when they accumulate, so every sum over kPromote lines starts at zero and is added to float32 registers, rounded to nearest; in
// it the small corrections come first, while there is nothing to truncate them against.
//
// Each half of a block's tile belongs to a warpgroup, and the halves promote in turns, so that the tensor cores always have work.
//
// The range of float32 is wider than that of a scaled row: what lies below 2^-16 of the row's maximum is kept to 2^-25 (2^-39 of the
// maximum) at best, however large its partner. With n such values in a row of x and in one of W, their output is off by less than
// 2^-25 * 2^15 * n, which is within float32's own 2^-24 of it where the accumulator is at least 2^14 * n. Every other output is uncertain,
// one in 10^6 of ordinary data: the epilogue leaves kUncertain in its place, the product itself in the rest of a strip of 16 rows and 64
// columns, and flags that; `recompute` puts float32's sums there. So it does for rows whose sums may be of few products only: there the
// dropped lo lo and the rounding of lo do not average out. (Both rows may hold many values and still meet in a few, where zeros lie against
// values: such a sum is within 8 units of 2^-24 of its terms' magnitudes, a float32's within 1.)

constexpr int kBlockSide = 64, kStripRows = 16;  // of a block of outputs, and of its strips, which are flagged as a whole
constexpr unsigned kUncertain = 0x7fc0beef;      // a NaN that no arithmetic makes

// Of a row of x or W: its values are unscaled by `unscale`; an output with an accumulator below the sum of its two rows' `doubt` is uncertain.
struct RowScale {
    float unscale, doubt;
};

// C = x W^T + bias, as the epilogues and `recompute` see it.
struct Product {
    const float *x, *weight, *bias;
    const RowScale *rows, *columns;
    int* flags;  // of each block of kBlockSide^2 outputs, row by row: a byte for each strip
    int m, n, k;
    const int* balanced = nullptr;  // of a frozen weight that has both roundings: which is wanted
    __device__ __forceinline__ int blocks_across() const { return (n + kBlockSide - 1) / kBlockSide; }
    __device__ __forceinline__ int blocks() const { return (m + kBlockSide - 1) / kBlockSide * blocks_across(); }
};

#ifndef PORTABLE_PRODUCT
#define PORTABLE_PRODUCT 0  // 1: Hopper, too, takes the loop that is for the other chips
#endif
#if CUDART_VERSION >= 12000
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !PORTABLE_PRODUCT
#define ON_HOPPER
#elif __CUDA_ARCH__ >= 800
#define ON_OTHERS
#endif

constexpr int kLine = 64;         // fp16 values, 128 bytes. Two pieces: 32 values of hi, then the same 32 of lo. One piece: 64 of hi.
constexpr int kSplitItems = 8;    // quads a thread holds
constexpr int kSplitBlock = 256;  // threads
constexpr int kLongestRow = 32768;
constexpr float kLargestScale = 0x1p60f;
constexpr float kFewProducts = 16;  // (sum |v|)^2 / sum v^2 of a row: how many values it is as if it had

// How one product's W is rounded. An output's error by that is the sum of (w' - w) x, or of (w' - w) (x - c), and c times the sum of w' - w.
// Balanced: some of the values that lie nearly half way between two fp16 numbers are rounded the other way, so that the w' - w of a warp's part
// of a row add up to next to nothing. With c the mean of x, where all of it is of one sign, that leaves x's variance over the mean of its squares
// of this error's square: a quarter where x is uniform, two thirds behind a ReLU. Where c is 0 it would only be another error: then to nearest.
// (c times the sum could be taken off each output, for less work. But where the large values of W meet the small ones of x, that is an error
// larger than all of x W^T.)
enum class Rounding { kNearest, kBalanced, kAsXAsks };
constexpr float kMostShare = 0x1p-14f;  // nearly: by an eighth of a unit in the last place at most
constexpr int kBalancingItems = 2;      // of a thread's quads, which may change

__host__ __device__ constexpr int padded_k(int k) { return (k + kLine - 1) / kLine * kLine; }  // an even number of lines of two pieces

__device__ __forceinline__ uint32_t float_bits(__half2 v) { return reinterpret_cast<const uint32_t&>(v); }
// A quad in fp16, and its store, in one instruction (which the compiler does not make of two __half2).
struct Halves {
    __half2 a, b;
    Halves() = default;
    __device__ __forceinline__ explicit Halves(float4 v) : a(__floats2half2_rn(v.x, v.y)), b(__floats2half2_rn(v.z, v.w)) {}
    __device__ __forceinline__ void store(__half* to) const {
        *reinterpret_cast<uint2*>(to) = make_uint2(float_bits(a), float_bits(b));
    }
    __device__ __forceinline__ float4 rest(float4 v) const {
        const float2 c = __half22float2(a), d = __half22float2(b);
        return make_float4(v.x - c.x, v.y - c.y, v.z - d.x, v.w - d.y);
    }
};

// A quad's pieces.
template <int kPieces> __device__ __forceinline__ void store_pieces(__half* row, int k, float4 v) {
    const Halves hi(v);
    if constexpr (kPieces == 1) {
        hi.store(row + k);
    } else {
        __half* line = row + k / 32 * kLine + k % 32;
        hi.store(line);
        Halves(hi.rest(v)).store(line + 32);
    }
}

__device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }  // NaN is the largest
// The exponent of the scale that brings the largest magnitude to [2^14, 2^15). At most 126: then 2^-149 becomes 2^-23, still above fp16's
// 2^-24, and both the scale and its reciprocal are normal numbers.
__device__ __forceinline__ int scale_exponent(uint32_t largest) { return min(14 + 127 - int(largest >> 23), 126); }
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }
template <int kPieces> constexpr float kIntact = kPieces == 2 ? 0x1p-2f : 0x1p-14f;  // from here on a value loses nothing to fp16's subnormals
template <int kPieces> constexpr float kDoubt = kPieces == 2 ? 0x1p14f : 2.0f;       // for each value that does

template <int kLanes = 32> __device__ __forceinline__ float sum_across_lanes(float v) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

// A kernel may begin while its predecessor in the stream is running, if that allows it; what the predecessor writes is there after the wait.
// (Before Hopper it does not begin.)
__device__ __forceinline__ void allow_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What one operand's split reads and writes.
struct Operand {
    const float* values;
    __half* pieces;
    RowScale* scales;
    int64_t rows;
};

// Whether x is of one sign, but for an eighth of what is not 0, by a sample: of each lane a value, of another column and another row. (One
// product has enough rows for that.)
__device__ __forceinline__ float sample_of(const Operand& x, int k) {
    const int lane = threadIdx.x % 32;
    return x.values[lane * x.rows / 32 * k + lane * k / 32];
}
__device__ __forceinline__ bool is_of_one_sign(float sample) {
    const int positive = __popc(__ballot_sync(~0u, sample > 0)), negative = __popc(__ballot_sync(~0u, sample < 0));
    return max(positive, negative) > 8 * min(positive, negative);
}

// `group` threads, a power of two and whole warps, own a row; the first blocks_x blocks have rows of x. What does not fit their registers is
// read again, each time from the end where the last one stopped, which is still there. A row with Inf or NaN becomes NaN, as its row or
// column of C is (both networks' norms make the same of an Inf there). asked: null, or what a frozen weight's `Product::balanced` is to be.
template <int kPieces>
__global__ void __launch_bounds__(kSplitBlock, 3) split_rows(const Operand x, const Operand weight, unsigned blocks_x, int k, int group,
    int* __restrict__ flags, int64_t flag_count, Rounding rounding, int* __restrict__ asked) {
#if defined(ON_HOPPER) || defined(ON_OTHERS)
    __shared__ uint32_t warp_values[5][kSplitBlock / 32];
    for (int64_t i = int64_t(blockIdx.x) * kSplitBlock + threadIdx.x; i < flag_count; i += int64_t(gridDim.x) * kSplitBlock) flags[i] = 0;

    const bool of_x = blockIdx.x < blocks_x;
    const int bits = __ffs(group) - 1, lane = threadIdx.x & (group - 1);
    const int row = int(of_x ? blockIdx.x : blockIdx.x - blocks_x) * (kSplitBlock >> bits) + (threadIdx.x >> bits);
    const int quads = row < (of_x ? x.rows : weight.rows) ? padded_k(k) / 4 : 0, step = group * kSplitItems;
    const float* values = (of_x ? x.values : weight.values) + int64_t(row) * k + lane * 4;
    __half* pieces = (of_x ? x.pieces : weight.pieces) + int64_t(row) * padded_k(k) * kPieces;
    // What a warp has found, and what each of the group's warps has, a lane each, over and over.
    const auto leave = [&](int place, uint32_t v) {
        if (threadIdx.x % 32 == 0) warp_values[place][threadIdx.x / 32] = v;
    };
    const auto take = [&](int place) { return warp_values[place][(threadIdx.x >> bits << (bits - 5)) + (threadIdx.x & ((group >> 5) - 1))]; };
    const auto sum_of = [&](int place) {
        float v = __uint_as_float(take(place));
        for (int offset = group >> 6; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
        return v;
    };

    const int last = max(quads - 1, 0) & -step, own_values = (quads > 0 ? k / 4 : 0) - lane, own_pieces = quads - lane;
    int first = 0;
    float4 held[kSplitItems];
    const auto load = [&] {
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) {
            const int at = first + i * group;
            held[i] = at < own_values ? reinterpret_cast<const float4*>(values)[unsigned(at)] : make_float4(0, 0, 0, 0);
        }
    };
    const auto over_row = [&](const auto& use) {  // use(how many quads on from the thread's first, the values there)
        const int end = first == 0 ? last : 0, stride = first == 0 ? step : -step;
        for (;; first += stride, load()) {
#pragma unroll
            for (int i = 0; i < kSplitItems; ++i) use(first + i * group, held[i]);
            if (first == end) break;
        }
    };
    const auto store = [&](const Halves& quad, int at) {  // of one piece; without a branch
        asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %3, %4;\n@p st.global.v2.b32 [%0], {%1, %2};\n}"
            ::"l"(pieces + lane * 4 + uint64_t(unsigned(at)) * 4), "r"(float_bits(quad.a)), "r"(float_bits(quad.b)), "r"(at), "r"(own_pieces) : "memory");
    };
    const bool tells = of_x && asked != nullptr && blockIdx.x == 0;
    const bool asks = kPieces == 1 && rounding == Rounding::kAsXAsks && (tells || !of_x);
    const float sample = asks ? sample_of(x, k) : 0.0f;
    load();
    uint32_t largest = 0, least = ~0u;  // least: of what is not 0, and less by 1
    over_row([&](int, const float4& v) {
        const uint32_t bits[4] = {magnitude_bits(v.x), magnitude_bits(v.y), magnitude_bits(v.z), magnitude_bits(v.w)};
        largest = max(largest, max(max(bits[0], bits[1]), max(bits[2], bits[3])));
        least = min(least, min(min(bits[0] - 1, bits[1] - 1), min(bits[2] - 1, bits[3] - 1)));
    });
    leave(0, __reduce_max_sync(~0u, largest)), leave(1, __reduce_min_sync(~0u, least));
    __syncthreads();
    largest = __reduce_max_sync(~0u, take(0)), least = __reduce_min_sync(~0u, take(1));
    const int exponent = scale_exponent(largest);
    float scale = largest < 0x7f800000u ? power_of_two(exponent) : NAN;
    asm volatile("" : "+f"(scale));  // or it is worked out again for each quad
    const auto scaled = [&](const float4& v) { return make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale); };

    float sum = 0, squares = 0;
    if constexpr (kPieces == 2) {
        const auto add_up = [&](float v) { sum += fabsf(v), squares += v * v; };
        over_row([&](int at, const float4& held) {
            if (at >= own_pieces) return;
            const float4 v = scaled(held);
            store_pieces<2>(pieces, (lane + at) * 4, v);
            add_up(v.x), add_up(v.y), add_up(v.z), add_up(v.w);
        });
        leave(2, __float_as_uint(sum_across_lanes(sum))), leave(3, __float_as_uint(sum_across_lanes(squares)));
        __syncthreads();
        sum = sum_of(2), squares = sum_of(3);
    } else {
        const bool one_sign = is_of_one_sign(sample);
        if (tells && threadIdx.x == 0) *asked = one_sign;
        const auto sum_of_quad = [](float4 v) { return (v.x + v.y) + (v.z + v.w); };
        if (of_x || (rounding != Rounding::kBalanced && !one_sign)) {
            over_row([&](int at, const float4& held) { store(Halves(scaled(held)), at); });
        } else {  // a warp by itself: some of what it still holds at the end takes back what rounding has added, each value in proportion
            float added = 0, magnitudes = 0, change = 0;
            over_row([&](int at, const float4& held) {
                const float4 v = scaled(held);
                const Halves nearest(v);
                store(nearest, at);
                added -= sum_of_quad(nearest.rest(v));
            });
#pragma unroll
            for (int i = 0; i < kBalancingItems; ++i) {
                const float4 v = scaled(held[i]);
                magnitudes += (fabsf(v.x) + fabsf(v.y)) + (fabsf(v.z) + fabsf(v.w));
            }
            added = sum_across_lanes(added), magnitudes = sum_across_lanes(magnitudes);
            const float share = fminf(fmaxf(__fdividef(added, magnitudes), -kMostShare), kMostShare);
            const auto less = [&](float v) { return fmaf(-share, fabsf(v), v); };
            Halves balanced[kBalancingItems];
#pragma unroll
            for (int i = 0; i < kBalancingItems; ++i) {
                const float4 v = scaled(held[i]);
                balanced[i] = Halves(make_float4(less(v.x), less(v.y), less(v.z), less(v.w)));
                change += sum_of_quad(Halves(v).rest(v)) - sum_of_quad(balanced[i].rest(v));
            }
            change = sum_across_lanes(change);
            // Not where many values lie just half way: all of them go the other way then.
            if (fabsf(added + change) < fabsf(added)) {
#pragma unroll
                for (int i = 0; i < kBalancingItems; ++i) store(balanced[i], first + i * group);
            }
        }
    }
    const uint32_t intact = __float_as_uint(kIntact<kPieces> * power_of_two(-exponent)) - 1;
    float lost = 0;
    if (least < intact) {  // seldom
        const auto count = [&](float v) { lost += magnitude_bits(v) - 1 < intact ? 1.0f : 0.0f; };
        over_row([&](int, const float4& v) { count(v.x), count(v.y), count(v.z), count(v.w); });
        leave(4, __float_as_uint(sum_across_lanes(lost)));
        asm volatile("barrier.cta.sync %0, %1;" ::"r"(1 + (threadIdx.x >> bits)), "r"(group) : "memory");
        lost = sum_of(4);
    }
    if (lane == 0 && quads > 0) {
        RowScale result;
        result.unscale = power_of_two(-exponent);
        result.doubt = kDoubt<kPieces> * lost;
        if (result.unscale > kLargestScale || (kPieces == 2 && sum * sum < kFewProducts * squares)) result.doubt = INFINITY;
        if (largest == 0) result.doubt = -INFINITY;  // its outputs are 0, whatever the other row is
        (of_x ? x.scales : weight.scales)[row] = result;
    }
#endif
}

// PTX, one instruction a wrapper. First what Hopper brought: it is compiled for no other chip.

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}"
        ::"r"(bar), "r"(parity) : "memory");
}
template <int kBarrier, int kThreads> __device__ __forceinline__ void named_barrier_sync() {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kBarrier, int kThreads> __device__ __forceinline__ void named_barrier_arrive() {
    asm volatile("barrier.cta.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void tensor_load(uint32_t shared, const CUtensorMap* map, int x, int y, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ __forceinline__ void tensor_load(uint32_t shared, const CUtensorMap* map, int x, int y, int z, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar) : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void shared_load(uint32_t from, float* v) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void shared_store(uint32_t to, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
template <int kRegisters> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kInFlight> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}
// Holds the compiler's own copies and additions of accumulators on their side of a wgmma.
template <int kCount> __device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
// Descriptor of a tile. K-major: its rows are 128-byte lines, swizzled, 8 rows (1024 bytes) an atom; along K it moves inside the line.
// Turned: strips of 32 rows, 4096 bytes apart; of a strip each k has 64 bytes, swizzled, 8 k (512 bytes) an atom.
template <bool kTurned> __device__ __forceinline__ uint64_t tile_descriptor(uint32_t shared) {
    const uint64_t address = (shared & 0x3ffff) >> 4;
    return kTurned ? address | uint64_t(4096 >> 4) << 16 | uint64_t(512 >> 4) << 32 | uint64_t(2) << 62
                   : address | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// d = a * b^T + (keep ? d : 0), m64n128k16, a and b from shared memory.
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define WGMMA(T, TYPE)                                                                                                              \
    template <bool kTurnedA, bool kTurnedB>                                                                                         \
    __device__ __forceinline__ void wgmma(T, float (&d)[64], uint64_t a, uint64_t b, int keep) {                                    \
        asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE      \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
                     "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"   \
                     "%58,%59,%60,%61,%62,%63}, %64, %65, keep, 1, 1, %67, %68;\n}"                                                   \
                     : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)                                                                \
                     : "l"(a), "l"(b), "r"(keep), "n"(int(kTurnedA)), "n"(int(kTurnedB)));                                          \
    }
WGMMA(__half, "f16")
WGMMA(__nv_bfloat16, "bf16")

// The main loop.

constexpr int kConsumers = 2;  // warpgroups that multiply; then those of the epilogue, and one of which a thread is the producer
constexpr int kProducerRegisters = 24;
constexpr int kTileM = kConsumers * 64;
constexpr int kBand = 2048 / kTileM;  // rows of tiles that go column by column, so that x's and W's lines meet in L2
constexpr int kBytesA = kTileM * 128, kSlabBytes = kBlockSide * kBlockSide * 4;

// Two pieces: three products for one, the sums of some lines at a time added to the main ones. A wider tile takes less of shared memory's
// bandwidth, a narrower one leaves fewer SMs without a last tile. kTurned: an operand is stored as (k, rows). kStages: of the ring of
// lines; kSlots: of that of slabs that are summed up. kFinishers: warpgroups of the epilogue, which take slabs in turns.
template <int kPieces_, int kTileN_, int kStages_, int kSlots_, class Value_ = __half, int kFinishers_ = 1, bool kTurnedA_ = false,
          bool kTurnedB_ = false>
struct Products {
    using Value = Value_;
    static constexpr int kPieces = kPieces_, kTileN = kTileN_, kStages = kStages_, kSlots = kSlots_, kFinishers = kFinishers_;
    static constexpr bool kTurnedA = kTurnedA_, kTurnedB = kTurnedB_;
    template <bool kTurnedA, bool kTurnedB>
    using Turned = Products<kPieces, kTileN, kStages, kSlots, Value, kFinishers, kTurnedA, kTurnedB>;
    static constexpr int kAccumulators = kTileN / 2, kSlabs = kTileN / kBlockSide;  // a warpgroup's
    static constexpr int kStageBytes = kBytesA + kTileN * 128;
    static constexpr int kThreads = (kConsumers + kFinishers + 1) * 128, kRegisters = 65536 / kThreads / 8 * 8;  // a thread's at first
    static constexpr int kConsumerRegisters = kFinishers == 1 ? 168 : 104, kFinisherRegisters = kFinishers == 1 ? 152 : 120;
    static_assert(kProducerRegisters + kFinishers * kFinisherRegisters + kConsumers * kConsumerRegisters <= kThreads / 128 * kRegisters,
                  "those of a block");
    static_assert(kConsumers * kSlabs % kFinishers == 0, "the finishers' turns go on from tile to tile");
    static_assert(kSlabs * kBlockSide == kTileN && kTileN <= 256, "whole slabs; a TMA box has at most 256 rows");
    // A warpgroup waits for a slot's last slab by parity; it must know that the one before has been taken, from its own last wait.
    static_assert(kSlots > kSlabs, "or, where K is short, it may be two rounds ahead");
};
using ThreeProducts = Products<2, 128, 5, 3>;
template <class Value> using OneProductOf = Products<1, 128, 5, 3, Value>;
using OneProduct = OneProductOf<__half>;

// What the epilogue knows of a tile: kVectors numbers of each column, the rows' scales, and the largest doubts of 32 of either at a time.
template <class Kind, class Epilogue> struct Margins {
    float columns[Epilogue::kVectors][Kind::kTileN];
    float2 rows[kTileM];
    float column_doubts[Kind::kTileN / 32], row_doubts[kTileM / 32];
};
template <class Kind, class Epilogue> constexpr int kProductBytes =
    1024 + Kind::kStages * (Kind::kStageBytes + 16) + Kind::kSlots * (kSlabBytes + 16) + int(sizeof(Margins<Kind, Epilogue>));

// A thread's part of 16 rows of 64 columns that a warp has: rows `row` + 4r, r = 0..3, and of each the columns `column` + i and
// `column` + 32 + i, i = 0..3. Eight lanes have a row, and write 128 bytes of it at a time.
struct Slab {
    int row, column;
};

// A warp's 16 rows and 64 columns as the tensor cores leave them: of a lane rows lane / 4 and that + 8, columns lane % 4 * 2 + 8j and the
// next, j = 0..7. They go to 4 KiB of shared memory in units of four values, and come back as a Slab's: for each instruction a lane's unit
// lies in other banks than those of the seven lanes beside it.
__device__ __forceinline__ int place_of(int j) { return (j & 1) | (j & 2) << 1; }
__device__ __forceinline__ void leave_sums(uint32_t to, const float* sum) {
#pragma unroll
    for (int j = 0; j < 8; ++j) shared_store(to + j * 512 + (threadIdx.x % 32 ^ place_of(j)) * 16, sum + 4 * j);
}
__device__ __forceinline__ void take_sums(uint32_t from, float (&v)[4][8]) {
    const int eighth = threadIdx.x % 8, row = threadIdx.x % 32 / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // bits: the next pair of columns, 32 columns on, 4 rows on
        const int unit = (row + (i & 4)) * 4 + eighth % 2 * 2 + (i & 1), r = i / 4, c = (i & 2) * 2 + (i & 1) * 2;
        float four[4];
        shared_load(from + ((i & 2) * 2 + eighth / 2) * 512 + (unit ^ place_of(eighth / 2)) * 16, four);
        v[r][c] = four[0], v[r][c + 1] = four[1], v[r + 2][c] = four[2], v[r + 2][c + 1] = four[3];
    }
}

template <int kTileN> struct Tiles {
    int across, down, count;
    __device__ __forceinline__ Tiles(int m, int n) {
        across = (n + kTileN - 1) / kTileN;
        down = (m + kTileM - 1) / kTileM;
        count = across * down;
    }
    __device__ __forceinline__ Slab find(int tile) const {
        const int band = tile / (kBand * across), inside = tile - band * kBand * across;
        const int height = min(kBand, down - band * kBand);
        if (height == kBand) return {(band * kBand + inside % kBand) * kTileM, inside / kBand * kTileN};  // without another division
        return {(band * kBand + inside % height) * kTileM, inside / height * kTileN};
    }
};

// The products of a line, in steps of 16 of K. Two pieces: hi, hi, lo, lo; one: four of hi. In the descriptors' units of 16 bytes a step is
// 32 bytes, or 16 lines of 64, and the low pieces are 64 bytes on, or half a strip.
template <class Kind> __device__ __forceinline__ void multiply_line(float (&d)[Kind::kAccumulators], uint64_t a, uint64_t b, int keep) {
    constexpr typename Kind::Value type{};
    constexpr bool kA = Kind::kTurnedA, kB = Kind::kTurnedB;
    constexpr int kStepA = kA ? 64 : 2, kStepB = kB ? 64 : 2, kLoA = kA ? 128 : 4, kLoB = kB ? 128 : 4;
    if constexpr (Kind::kPieces == 2) {
        wgmma<kA, kB>(type, d, a + kLoA, b, keep);
        wgmma<kA, kB>(type, d, a, b + kLoB, 1);
        wgmma<kA, kB>(type, d, a + kLoA + kStepA, b + kStepB, 1);
        wgmma<kA, kB>(type, d, a + kStepA, b + kLoB + kStepB, 1);
        wgmma<kA, kB>(type, d, a, b, 1);
        wgmma<kA, kB>(type, d, a + kStepA, b + kStepB, 1);
    } else {
        wgmma<kA, kB>(type, d, a, b, keep);
        wgmma<kA, kB>(type, d, a + kStepA, b + kStepB, 1);
        wgmma<kA, kB>(type, d, a + 2 * kStepA, b + 2 * kStepB, 1);
        wgmma<kA, kB>(type, d, a + 3 * kStepA, b + 3 * kStepB, 1);
    }
}

// The copy engine brings `row`'s tile of a line.
template <bool kTurned, int kPieces>
__device__ __forceinline__ void load_tile(uint32_t shared, const CUtensorMap* map, int line, int row, uint32_t bar) {
    if constexpr (kTurned) tensor_load(shared, map, 0, line * (kLine / kPieces), row / 32 * kPieces, bar);
    else tensor_load(shared, map, line * kLine, row, bar);
}

// Where a ring of kCount places is: its place, and the parity of its round.
template <int kCount> struct Ring {
    int place = 0, phase = 0;
    __device__ __forceinline__ void advance(int by = 1) {
        place += by;
        while (place >= kCount) place -= kCount, phase ^= 1;
    }
};

// A block takes every so-many-th tile of C. Warpgroups 0 and 1 own its upper and lower half, and leave their sums, slab by slab, to the
// finishers, who finish them while the next tile is multiplied. A thread of the last warpgroup keeps the ring of stages full. full[s]: the
// copy engine has brought stage s. empty[s]: every warp that reads it is done with it. ready[s], taken[s]: a slab's values are in slot s,
// and have been read from it.
template <class Kind, class Epilogue>
__global__ void __launch_bounds__(Kind::kThreads, 1) multiply(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, int lines, int promote, const Epilogue epilogue) {
#ifdef ON_HOPPER
    constexpr int kTileN = Kind::kTileN, kSlabs = Kind::kSlabs;
    constexpr int kStages = Kind::kStages, kStageBytes = Kind::kStageBytes, kSlots = Kind::kSlots;
    static_assert(kProductBytes<Kind, Epilogue> <= 227 * 1024, "one block's shared memory on sm_90");
    extern __shared__ __align__(1024) unsigned char shared[];
    // Swizzle atoms are 1024 bytes. What a shuffle gave is kept, and not found anew wherever it is wanted.
    const uint32_t stages = __shfl_sync(~0u, (shared_address(shared) + 1023) & ~1023u, 0);
    const uint32_t slots = stages + kStages * kStageBytes, margins_at = slots + kSlots * kSlabBytes;
    const uint32_t full = margins_at + sizeof(Margins<Kind, Epilogue>), empty = full + kStages * 8;
    const uint32_t ready = empty + kStages * 8, taken = ready + kSlots * 8;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const Tiles<kTileN> tiles(epilogue.product.m, epilogue.product.n);

    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, kConsumers * 4);
        }
        for (int s = 0; s < kSlots; ++s) {
            mbarrier_init(ready + 8 * s, 128);
            mbarrier_init(taken + 8 * s, 128);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    allow_successor();
    wait_for_predecessor();

    Ring<kStages> ring;
    Ring<kSlots> slot;
    if (warpgroup == kConsumers + Kind::kFinishers) {
        registers_down<kProducerRegisters>();
        if (thread == 0) {
            prefetch_map(&map_a);
            prefetch_map(&map_b);
            const int* const balanced = epilogue.product.balanced;
            const int first = balanced != nullptr ? *balanced * epilogue.product.n : 0;  // the balanced rows of W follow the others
            const int missing = Kind::kTurnedA ? 0 : max(kTileM - epilogue.product.m, 0) * 128;  // rows that the box of fewer leaves as they are
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
                const Slab corner = tiles.find(tile);
                for (int line = 0; line < lines; ++line, ring.advance()) {
                    const uint32_t a = stages + ring.place * kStageBytes, bar = full + 8 * ring.place;
                    mbarrier_wait(empty + 8 * ring.place, ring.phase ^ 1);
                    mbarrier_expect_bytes(bar, kStageBytes - missing);
                    load_tile<Kind::kTurnedA, Kind::kPieces>(a, &map_a, line, corner.row, bar);
                    load_tile<Kind::kTurnedB, Kind::kPieces>(a + kBytesA, &map_b, line, first + corner.column, bar);
                }
            }
        }
        __syncwarp();
    } else if (warpgroup >= kConsumers) {
        registers_up<Kind::kFinisherRegisters>();
        const int finisher = warpgroup - kConsumers, own_thread = threadIdx.x - kConsumers * 128;
        auto& margins = *reinterpret_cast<Margins<Kind, Epilogue>*>(shared + (margins_at - shared_address(shared)));
        constexpr int kVectors = Epilogue::kVectors, kFinisherThreads = Kind::kFinishers * 128;
        constexpr int kRounds = (kTileN + kFinisherThreads - 1) / kFinisherThreads;
        float column[kRounds][kVectors], doubt[kRounds];
        float2 row = {};
        Slab next;
        const auto look_ahead = [&](int tile) {  // a thread: a column or two, and a row
            next = tiles.find(min(tile, tiles.count - 1));
#pragma unroll
            for (int i = 0; i < kRounds; ++i) {
                const int own = min(next.column + own_thread + i * kFinisherThreads, epilogue.product.n - 1);
#pragma unroll
                for (int q = 0; q < kVectors; ++q) column[i][q] = epilogue.column(own, q);
                doubt[i] = epilogue.doubt(own);
            }
            row = epilogue.scale(min(next.row + own_thread, epilogue.product.m - 1));
        };
        const auto largest = [](float doubt) {  // of a warp's; as integers they are in order too: negative ones that meet are equal
            return __int_as_float(__reduce_max_sync(~0u, __float_as_int(doubt)));
        };
        look_ahead(blockIdx.x);
        slot.advance(finisher);
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
            named_barrier_sync<2, kFinisherThreads>();  // the last tile's margins have been read
#pragma unroll
            for (int i = 0; i < kRounds; ++i) {
                const float most = largest(doubt[i]);
                const int own = own_thread + i * kFinisherThreads;
                if (own >= kTileN) continue;
#pragma unroll
                for (int q = 0; q < kVectors; ++q) margins.columns[q][own] = column[i][q];
                if (lane == 0) margins.column_doubts[own / 32] = most;
            }
            const float most = largest(row.y);
            if (own_thread < kTileM) margins.rows[own_thread] = row;
            if (own_thread < kTileM && lane == 0) margins.row_doubts[own_thread / 32] = most;
            named_barrier_sync<2, kFinisherThreads>();
            const Slab corner = next;
            look_ahead(tile + gridDim.x);
#pragma unroll 1
            for (int s = finisher; s < kConsumers * kSlabs; s += Kind::kFinishers, slot.advance(Kind::kFinishers)) {
                const int top = s / kSlabs * 64 + warp * 16 + lane / 8, left = s % kSlabs * kBlockSide;
                const float most = fmaxf(margins.column_doubts[left / 32], margins.column_doubts[left / 32 + 1]);
                const bool certain = !__any_sync(~0u, margins.row_doubts[s / kSlabs * 2 + warp / 2] + most > 0);
                float2 rows[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) rows[r] = margins.rows[top + 4 * r];
                float sum[4][8];
                // Parity cannot tell this round of a slot from the last but one. The round between was the other finisher's: of the tile
                // before, whose end both have met at, or left by the warpgroup that left the slab before this one, and earlier.
                mbarrier_wait(ready + 8 * slot.place, slot.phase);
                take_sums(slots + slot.place * kSlabBytes + warp * 4096, sum);
                mbarrier_arrive(taken + 8 * slot.place);
                if (corner.column + left >= epilogue.product.n) continue;
                const auto four = [&](int q, int half) {
                    return *reinterpret_cast<const float4*>(&margins.columns[q][left + half * 32 + lane % 8 * 4]);
                };
                const auto scale = [&](int r) { return rows[r]; };
                epilogue.finish(sum, {corner.row + top, corner.column + left + lane % 8 * 4}, four, scale, certain, most);
            }
        }
    } else {
        registers_up<Kind::kConsumerRegisters>();
        const uint64_t tile_a = tile_descriptor<Kind::kTurnedA>(stages + warpgroup * 64 * 128);
        const uint64_t tile_b = tile_descriptor<Kind::kTurnedB>(stages + kBytesA);
        const auto leave = [&](int s) {  // each warp waits for its own quarter of a wgmma, so each tells
            if (lane == 0) mbarrier_arrive(empty + 8 * s);
        };
        slot.advance(warpgroup * kSlabs);
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x, slot.advance((kConsumers - 1) * kSlabs)) {
            // The halves begin a tile together, the upper one first, and so find its lines in the ring together.
            if (warpgroup > 0) named_barrier_sync<1, kConsumers * 128>();
            else named_barrier_arrive<1, kConsumers * 128>();
            constexpr int kParts = Kind::kPieces == 2 ? Kind::kAccumulators : 0;
            float sum[Kind::kAccumulators], part[kParts ? kParts : 1];
#pragma unroll
            for (int i = 0; i < Kind::kAccumulators; ++i) sum[i] = 0;
#pragma unroll
            for (int i = 0; i < kParts; ++i) part[i] = 0;
            // The previous line's products are still running when the next line's are issued.
            const auto accumulate = [&](auto& d, int from, int to) {
                int before = -1;
                for (int line = from; line < to; ++line, ring.advance()) {
                    mbarrier_wait(full + 8 * ring.place, ring.phase);
                    const int offset = ring.place * kStageBytes >> 4;
                    wgmma_fence();
                    multiply_line<Kind>(d, tile_a + offset, tile_b + offset, line > from);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (before >= 0) leave(before);
                    before = ring.place;
                }
                wgmma_wait<0>();
                leave(before);
                pin(d);
            };
            if constexpr (kParts == 0) {
                accumulate(sum, 0, lines);
            } else {  // the halves promote in turns: one adds while the other multiplies
                for (int line = 0, end = promote - warpgroup * (promote / 2); line < lines; line = end, end += promote) {
                    accumulate(part, line, min(end, lines));
                    const float restored = Epilogue::kRestores && promote == 1 && line % 2 != 0 ? 1 + 0x1p-23f : 1.0f;
#pragma unroll
                    for (int i = 0; i < kParts; ++i) sum[i] = fmaf(part[i], restored, sum[i]);
                }
            }
#pragma unroll
            for (int s = 0; s < kSlabs; ++s, slot.advance()) {
                mbarrier_wait(taken + 8 * slot.place, slot.phase ^ 1);
                leave_sums(slots + slot.place * kSlabBytes + warp * 4096, sum + 32 * s);
                mbarrier_arrive(ready + 8 * slot.place);
            }
        }
    }
#endif
}

// The same on other chips, by the tensor cores' instruction for a warp: m16n8k16, whose accumulator is laid out as a part of a slab is.

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {  // 16 bytes, or zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kInFlight> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], const uint32_t* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

constexpr int kPortableStages = 3;  // stages: what the 99 KiB of sm_86 and sm_89 hold
constexpr int kPortableThreads = 256;                    // 4 x 2 warps, each of 32 rows and a slab's 64 columns
constexpr int kPortableTileN = 128;
constexpr int kPortableStageBytes = kBytesA + kPortableTileN * 128, kPortableBytes = kPortableStages * kPortableStageBytes;

// A block owns a tile of C. Lines of both operands wait in shared memory, 128 bytes a row, in which the places of 16 bytes are exchanged so
// that eight rows' equal places lie in different banks.
template <class Epilogue>
__global__ void __launch_bounds__(kPortableThreads, 1) multiply_portably(
    const __half* __restrict__ x, const __half* __restrict__ w, int lines, int promote, const Epilogue epilogue) {
#ifdef ON_OTHERS
    extern __shared__ __align__(1024) unsigned char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 / 2 * 32, warp_column = thread / 32 % 2 * 64;
    const int m = epilogue.product.m, n = epilogue.product.n;
    const Slab corner = Tiles<kPortableTileN>(m, n).find(blockIdx.x);
    const uint32_t stages = shared_address(shared);
    wait_for_predecessor();

    const auto bring = [&](int line) {  // a thread: one place of every 32nd row of both tiles
        if (line < lines) {
#pragma unroll
            for (int i = 0; i < (kTileM + kPortableTileN) / 32; ++i) {
                const bool of_x = i < kTileM / 32;
                const int slot = thread / 8 + i * 32, place = thread % 8, row = (of_x ? corner.row : corner.column - kTileM) + slot;
                const bool exists = row < (of_x ? m : n);
                const __half* from = (of_x ? x : w) + (int64_t(exists ? row : 0) * lines + line) * kLine + place * 8;
                copy_async(stages + line % kPortableStages * kPortableStageBytes + slot * 128 + (place ^ slot % 8) * 16, from, exists);
            }
        }
        copies_commit();
    };
    const uint32_t own_a = (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    const uint32_t own_b = (kTileM + warp_column + lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
    float sum[2][32] = {}, part[2][32] = {};
    for (int line = 0; line < kPortableStages - 1; ++line) bring(line);
    for (int line = 0; line < lines; ++line) {
        copies_wait<kPortableStages - 2>();
        __syncthreads();
        bring(line + kPortableStages - 1);
        const uint32_t tile = stages + line % kPortableStages * kPortableStageBytes;
        uint32_t a[4][2][4];  // of 16 values of K (hi, hi, lo, lo) and 16 rows
#pragma unroll
        for (int i = 0; i < 8; ++i) load_matrices(a[i / 2][i % 2], (tile + own_a + i % 2 * 16 * 128) ^ i / 2 * 32);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t b[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) load_matrices(b[i], (tile + own_b + j * 8 * 128) ^ i * 32);
            const auto multiply = [&](const uint32_t (&a)[2][4], const uint32_t (&b)[4]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) mma(&part[i / 2][(j + i % 2) * 4], a[i / 2], b + i % 2 * 2);
            };
            multiply(a[2], b[0]), multiply(a[0], b[2]), multiply(a[3], b[1]), multiply(a[1], b[3]), multiply(a[0], b[0]), multiply(a[1], b[1]);
        }
        if ((line + 1) % promote == 0 || line + 1 == lines) {
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[i / 32][i % 32] += part[i / 32][i % 32], part[i / 32][i % 32] = 0;
        }
    }
    __syncthreads();
    const uint32_t own = stages + thread / 32 * 4096;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float v[4][8];
        leave_sums(own, sum[i]);
        __syncwarp();
        take_sums(own, v);
        __syncwarp();
        if (corner.column + warp_column >= n) continue;
        const Slab slab = {corner.row + warp_row + i * 16 + lane / 8, corner.column + warp_column + lane % 8 * 4};
        const auto column = [&](int i) { return min(slab.column + i, n - 1); };
        const auto four = [&](int q, int half) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = epilogue.column(column(half * 32 + i), q);
            return make_float4(v[0], v[1], v[2], v[3]);
        };
        float2 rows[4];
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = fmaxf(most, epilogue.doubt(column(i / 4 * 32 + i % 4)));
        bool perhaps = false;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            rows[r] = epilogue.scale(min(slab.row + 4 * r, m - 1));
            perhaps = perhaps || rows[r].y + most > 0;
        }
        const auto scale = [&](int r) { return rows[r]; };
        epilogue.finish(v, slab, four, scale, !__any_sync(~0u, perhaps), most);
    }
#endif
}

// Epilogues.

// A row's eight values, four at a time where n is a multiple of four (kWhole: of 64), else two.
template <bool kWhole, typename T>
__device__ __forceinline__ void store_row(T* out, int row, const Slab& slab, int n, const float (&v)[8]) {
    T* const first = out + (uint64_t(uint32_t(row)) * uint32_t(n) + uint32_t(slab.column));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = slab.column + half * 32;
        T* own = first + half * 32;
        Pack<T, 4> four;
        Pack<T, 2> pairs[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) from_acc(v[half * 4 + i], four.value[i]), pairs[i / 2].value[i % 2] = four.value[i];
        if (kWhole || (n % 4 == 0 && column < n)) {
            *reinterpret_cast<Pack<T, 4>*>(own) = four;
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (column + 2 * i < n) *reinterpret_cast<Pack<T, 2>*>(own + 2 * i) = pairs[i];
            }
        }
    }
}

// h = acc * 2^a * 2^b + bias. acc is under 2^46 and 2^a, of a row that is certain, at most kLargestScale: nothing overflows on the way to a
// value that fits. (What underflows on the way is below float32's own error for these rows.)
// four(q, half): the q-th numbers of the thread's four columns: unscale, then bias. scale(r): of its r-th row.
template <class Four, class Scale> __device__ __forceinline__ void unscale(float (&v)[4][8], const Four& four, const Scale& scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 scales = four(0, half), biases = four(1, half);
        const float by[4] = {scales.x, scales.y, scales.z, scales.w}, plus[4] = {biases.x, biases.y, biases.z, biases.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float& own = v[i / 4][half * 4 + i % 4];
            own = fmaf(own * scale(i / 4).x, by[i % 4], plus[i % 4]);
        }
    }
}

// Whether a warp's strip, of accumulators v, is left to `recompute`, since an output is uncertain: then h is stored, and the strip flagged.
// most: no column of the slab (or of the thread) doubts more.
template <bool kWhole, class Four, class Scale>
__device__ __forceinline__ bool leave_uncertain(
    const Product& product, const float (&v)[4][8], const Slab& slab, const Four& four, const Scale& scale, float most, float* out) {
    bool perhaps = false;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float least = fabsf(v[r][0]);
#pragma unroll
        for (int i = 1; i < 8; ++i) least = fminf(least, fabsf(v[r][i]));
        perhaps = perhaps || least < scale(r).y + most;
    }
    if (!__any_sync(~0u, perhaps)) return false;
    unsigned uncertain = 0;  // a bit for each value
    float h[4][8];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int row = slab.row + i / 8 * 4, column = slab.column + i % 8 / 4 * 32 + i % 4;
        h[i / 8][i % 8] = v[i / 8][i % 8];
        if (row >= product.m || column >= product.n) continue;  // what does not exist has no flag
        if (fabsf(v[i / 8][i % 8]) < scale(i / 8).y + product.columns[column].doubt) uncertain |= 1u << i;
    }
    if (!__any_sync(~0u, uncertain != 0)) return false;
    unscale(h, four, scale);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) h[r][i] = uncertain >> (r * 8 + i) & 1 ? __uint_as_float(kUncertain) : h[r][i];
        if (slab.row + 4 * r < product.m) store_row<kWhole>(out, slab.row + 4 * r, slab, product.n, h[r]);
    }
    auto* const flags = product.flags + slab.row / kBlockSide * product.blocks_across() + slab.column / kBlockSide;
    reinterpret_cast<unsigned char*>(flags)[slab.row % kBlockSide / kStripRows] = 1;
    return true;
}

// C = x W^T + bias.
struct StoreEpilogue {
    static constexpr bool kRestores = true;  // on average, what is truncated of h: the gradient of a norm over long rows sees nothing else of it
    static constexpr int kVectors = 2;
    Product product;
    float* out;

    __device__ __forceinline__ float column(int at, int q) const { return q == 0 ? product.columns[at].unscale : product.bias[at]; }
    __device__ __forceinline__ float doubt(int at) const { return product.columns[at].doubt; }
    __device__ __forceinline__ float2 scale(int row) const { return *reinterpret_cast<const float2*>(product.rows + row); }
    template <class Four, class Scale>
    __device__ __forceinline__ void finish(float (&v)[4][8], const Slab& slab, const Four& four, const Scale& scale, bool certain,
                                           float most) const {
        if (!certain && leave_uncertain<false>(product, v, slab, four, scale, most, out)) return;
        unscale(v, four, scale);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (slab.row + 4 * r < product.m) store_row<false>(out, slab.row + 4 * r, slab, product.n, v[r]);
        }
    }
    // A warp has a row's 64 values of h from `column` on, two a lane.
    __device__ __forceinline__ void finish_row(int row, int column, float2 h) const {
        *reinterpret_cast<float2*>(out + int64_t(row) * product.n + column + threadIdx.x % 32 * 2) = h;
    }
};
// The same of 16-bit values, which are multiplied as they are: nothing is scaled or in doubt, and C is rounded once.
template <typename T> struct HalvesEpilogue {
    static constexpr bool kRestores = false;
    static constexpr int kVectors = 1;
    Product product;
    T* out;
    const T* bias;

    __device__ __forceinline__ float column(int at, int) const { return to_acc(bias[at]); }
    __device__ __forceinline__ float doubt(int) const { return 0; }
    __device__ __forceinline__ float2 scale(int) const { return make_float2(1, 0); }
    template <class Four, class Scale>
    __device__ __forceinline__ void finish(float (&v)[4][8], const Slab& slab, const Four& four, const Scale&, bool, float) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 biases = four(0, half);
            const float plus[4] = {biases.x, biases.y, biases.z, biases.w};
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i / 4][half * 4 + i % 4] += plus[i % 4];
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (slab.row + 4 * r < product.m) store_row<false>(out, slab.row + 4 * r, slab, product.n, v[r]);
        }
    }
    __device__ __forceinline__ void finish_row(int row, int column, float2 h) const {
        Pack<T, 2> pair;
        from_acc(h.x, pair.value[0]), from_acc(h.y, pair.value[1]);
        *reinterpret_cast<Pack<T, 2>*>(out + int64_t(row) * product.n + column + threadIdx.x % 32 * 2) = pair;
    }
};

// The uncertain outputs, in float32. A block takes every so-many-th block of outputs: 64 x 64, of which a thread has 4 x 4. A few are
// dot products of all threads, one after the other; where they are many the whole block is computed.
constexpr int kRecomputeBlock = 256;
constexpr int kFew = 32;     // threads that have uncertain outputs
constexpr int kSlice = 16;   // of K in shared memory

__device__ __forceinline__ void load_quad(const float* from, float (&to)[4]) {
    const float4 quad = *reinterpret_cast<const float4*>(from);
    to[0] = quad.x, to[1] = quad.y, to[2] = quad.z, to[3] = quad.w;
}

// A thread's 4 x 4 sums of the whole block. bring(row, k, x, w): four values of a row of either operand from k on; beyond the ends, zeros.
template <class Bring> __device__ __forceinline__ void sum_block(float (&sum)[4][4], int last, const Bring& bring) {
    __shared__ __align__(16) float slice_x[kSlice][kBlockSide + 4], slice_w[kSlice][kBlockSide + 4];
    const int top = threadIdx.x / 16 * 4, left = threadIdx.x % 16 * 4, row = threadIdx.x / 4, q = threadIdx.x % 4 * 4;
    for (int k = 0; k < last; k += kSlice) {
        float x[4] = {}, w[4] = {};
        bring(row, k + q, x, w);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i) slice_x[q + i][row] = x[i], slice_w[q + i][row] = w[i];
        __syncthreads();
        float part[4][4] = {};  // a sum of many terms after a large one would round them all to its last place
#pragma unroll
        for (int j = 0; j < kSlice; ++j) {
            const float4 a = *reinterpret_cast<const float4*>(&slice_x[j][top]), b = *reinterpret_cast<const float4*>(&slice_w[j][left]);
            const float xs[4] = {a.x, a.y, a.z, a.w}, ws[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 16; ++i) part[i / 4][i % 4] = fmaf(xs[i / 4], ws[i % 4], part[i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] += part[i / 4][i % 4];
    }
}

template <class Epilogue> __global__ void __launch_bounds__(kRecomputeBlock, 2) recompute(const Epilogue epilogue) {
#if defined(ON_HOPPER) || defined(ON_OTHERS)
    __shared__ float h[kBlockSide][kBlockSide + 2];
    __shared__ int flagged[kRecomputeBlock], flagged_count, few[kFew * 16], few_count;
    __shared__ float warp_totals[kRecomputeBlock / 32];
    const Product& product = epilogue.product;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, top = tid / 16 * 4, left = tid % 16 * 4;

    allow_successor();
    wait_for_predecessor();

    const auto finish_block = [&](int row0, int column0, unsigned strips) {
        const int rows = min(kBlockSide, product.m - row0), columns = min(kBlockSide, product.n - column0);
        if (tid == 0) few_count = 0;
        float values[16];  // all on their way at once
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int r = min(top + i / 4, rows - 1), c = min(left + i % 4, columns - 1);
            values[i] = epilogue.out[int64_t(row0 + r) * product.n + column0 + c];
        }
        __syncthreads();
        unsigned mine = 0;  // a bit for each of this thread's 4 x 4
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int r = top + i / 4, c = left + i % 4;
            if (r >= rows || c >= columns) continue;
            h[r][c] = values[i];
            if (__float_as_uint(values[i]) == kUncertain) mine |= 1u << i;
        }
        if (__syncthreads_count(mine != 0) <= kFew) {
            for (unsigned bits = mine; bits != 0; bits &= bits - 1) few[atomicAdd(&few_count, 1)] = tid * 16 + __ffs(bits) - 1;
            __syncthreads();
            for (int f = 0; f < few_count; ++f) {
                const int thread = few[f] / 16, place = few[f] % 16, r = thread / 16 * 4 + place / 4, c = thread % 16 * 4 + place % 4;
                const float *x = product.x + int64_t(row0 + r) * product.k, *w = product.weight + int64_t(column0 + c) * product.k;
                float sum[4] = {};
                for (int first = tid; first < product.k; first += 16 * kRecomputeBlock) {
                    float xs[16], ws[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        const int k = first + i * kRecomputeBlock;
                        xs[i] = k < product.k ? x[k] : 0.0f;
                        ws[i] = k < product.k ? w[k] : 0.0f;
                    }
#pragma unroll
                    for (int i = 0; i < 16; ++i) sum[i % 4] = fmaf(xs[i], ws[i], sum[i % 4]);
                }
                float total = sum_across_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
                if (lane == 0) warp_totals[warp] = total;
                __syncthreads();
                if (tid == 0) {
                    for (int w = 1; w < kRecomputeBlock / 32; ++w) total += warp_totals[w];
                    h[r][c] = total + product.bias[column0 + c];
                }
                __syncthreads();
            }
        } else {
            float sum[4][4] = {};
            sum_block(sum, product.k, [&](int r, int k, float (&x)[4], float (&w)[4]) {
                const auto load = [&](const float* operand, int row, float (&to)[4]) {
                    if (k < product.k) load_quad(operand + int64_t(row) * product.k + k, to);
                };
                if (r < rows) load(product.x, row0 + r, x);
                if (r < columns) load(product.weight, column0 + r, w);
            });
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (mine >> i & 1) h[top + i / 4][left + i % 4] = sum[i / 4][i % 4] + product.bias[column0 + left + i % 4];
            }
        }
        __syncthreads();
        for (int r = warp; r < rows; r += kRecomputeBlock / 32) {
            if ((strips >> r / kStripRows * 8 & 1) == 0 || lane * 2 >= columns) continue;
            epilogue.finish_row(row0 + r, column0, make_float2(h[r][lane * 2], h[r][lane * 2 + 1]));
        }
        __syncthreads();
    };

    const int step = gridDim.x * kRecomputeBlock, across = product.blocks_across();
    for (int first = blockIdx.x; first < product.blocks(); first += step) {
        if (tid == 0) flagged_count = 0;
        __syncthreads();
        const int own = first + tid * gridDim.x;
        if (own < product.blocks() && product.flags[own] != 0) flagged[atomicAdd(&flagged_count, 1)] = own;
        __syncthreads();
        for (int i = 0; i < flagged_count; ++i) {
            finish_block(flagged[i] / across * kBlockSide, flagged[i] % across * kBlockSide, product.flags[flagged[i]]);
        }
        __syncthreads();
    }
#endif
}

// Few rows of x: their own sums in float32, as fast as W can be read. A block has kFewRows rows and kBlockSide columns of C, a warp
// kFewColumns of these; of K, which passes through shared memory in steps of 512 bytes a row, a lane has every 32nd pack. Long sums round much:
// of up to four rows in float32 the registers of the others have the sums of the steps before the last few.
constexpr int kFewRows = 16, kFewColumns = 8, kFewWarps = kBlockSide / kFewColumns, kFewStageBytes = (kBlockSide + kFewRows) * 512;
constexpr int kFewStages = 5, kFewestStages = 2;
static_assert(kFewestStages * kFewStageBytes <= 99 * 1024, "what a block has on sm_86, sm_89 and sm_120");

// Of what 32 lanes have, each is left with four whole sums: half of the rest goes to the lane that is kOffset off, and the other half comes.
template <int kOffset> __device__ __forceinline__ void share_sums(float (&sum)[kFewRows * kFewColumns], int lane) {
    static_assert(kFewRows * kFewColumns == 4 * 32, "four for each lane");
#pragma unroll
    for (int i = 0; i < 4 * kOffset; ++i) {
        const float low = sum[i], high = sum[i + 4 * kOffset];
        sum[i] = (lane & kOffset ? high : low) + __shfl_xor_sync(~0u, lane & kOffset ? low : high, kOffset);
    }
    if constexpr (kOffset > 1) share_sums<kOffset / 2>(sum, lane);
}

template <typename T, class Epilogue> __global__ void __launch_bounds__(32 * kFewWarps, 1) multiply_few(
    const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias, int stages, const Epilogue epilogue) {
#if defined(ON_HOPPER) || defined(ON_OTHERS)
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kStep = 32 * kPack<T>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = epilogue.product.k;
    const int row0 = blockIdx.x * kFewRows, column0 = blockIdx.y * kBlockSide, rows = min(kFewRows, epilogue.product.m - row0);
    wait_for_predecessor();

    const int64_t stride = int64_t(kFewWarps) * k;  // of what a warp brings
    const T *own_w = w + int64_t(column0 + warp) * k, *own_x = x + int64_t(row0 + warp) * k;
    const auto bring = [&](int step, int stage) {
        const int at = step * kStep + lane * kPack<T>, from = at < k ? at : 0;
        const uint32_t to = shared_address(shared) + stage * kFewStageBytes + warp * 512 + lane * 16;
#pragma unroll
        for (int i = 0; i < kBlockSide / kFewWarps; ++i) copy_async(to + i * kFewWarps * 512, own_w + i * stride + from, at < k);
#pragma unroll
        for (int i = 0; i < kFewRows / kFewWarps; ++i) {
            if (warp + i * kFewWarps < rows) copy_async(to + (kBlockSide + i * kFewWarps) * 512, own_x + i * stride + from, at < k);
        }
        copies_commit();
    };
    float sum[kFewRows * kFewColumns] = {};
    constexpr int kFour = 4 * kFewColumns;
    const bool in_parts = sizeof(T) == 4 && rows <= 4;
    for (int step = 0; step < stages - 1; ++step) bring(step, step);
    for (int step = 0, stage = 0; step * kStep < k; ++step) {
        if (stages == kFewStages) copies_wait<kFewStages - 2>();
        else copies_wait<kFewestStages - 2>();
        __syncthreads();
        bring(step + stages - 1, stage == 0 ? stages - 1 : stage - 1);
        const auto* line = reinterpret_cast<const Pack<T, 4>*>(shared + stage * kFewStageBytes + lane * 16);
        const auto quad_of = [&](int place, int quad, float (&to)[4]) {
            const Pack<T, 4> own = line[place * 32 * (kPack<T> / 4) + quad];
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = to_acc(own.value[i]);
        };
#pragma unroll
        for (int quad = 0; quad < kPack<T> / 4; ++quad) {
            float weights[kFewColumns][4], values[4][4];
#pragma unroll
            for (int c = 0; c < kFewColumns; ++c) quad_of(warp * kFewColumns + c, quad, weights[c]);
#pragma unroll
            for (int first = 0; first < kFewRows; first += 4) {
                if (first >= rows) continue;
#pragma unroll
                for (int r = 0; r < 4; ++r) quad_of(kBlockSide + first + r, quad, values[r]);
#pragma unroll
                for (int i = 0; i < 16 * kFewColumns; ++i) {
                    const int r = i / kFewColumns % 4, c = i % kFewColumns, j = i / (4 * kFewColumns);
                    float& to = sum[(first + r) * kFewColumns + c];
                    to = fmaf(values[r][j], weights[c][j], to);
                }
            }
        }
        if (in_parts && step % 4 == 3) {
#pragma unroll
            for (int i = 0; i < kFour; ++i) sum[kFour + i] += sum[i], sum[i] = 0;
        }
        stage = stage + 1 < stages ? stage + 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < kFour; ++i) sum[i] += in_parts ? sum[kFour + i] : 0;
    share_sums<16>(sum, lane);
    copies_wait<0>();
    __syncthreads();
    auto* const h = reinterpret_cast<float (*)[kBlockSide + 4]>(shared);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int own = lane * 4 + i, c = warp * kFewColumns + own % kFewColumns;
        h[own / kFewColumns][c] = sum[i] + to_acc(bias[column0 + c]);
    }
    __syncthreads();
    for (int r = warp; r < rows; r += kFewWarps) epilogue.finish_row(row0 + r, column0, make_float2(h[r][lane * 2], h[r][lane * 2 + 1]));
#endif
}
#endif  // CUDART_VERSION >= 12000
// --- end shared: product ---

#if CUDART_VERSION >= 12000
// ---------------------------------------------------------------------------------------------------------------------------------
// The whole network in the epilogue of the product, where a group is a slab: its 64 values wait in the registers of a quad of lanes.

// v * sigmoid(v), to a few ulps of the largest v around it.
__device__ __forceinline__ float swish(float v) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return v * s;
}

// A row's 64 values of h, kCount of them in each of kLanes lanes, become v * scale + shift: the normalised ones. kExact: to float32's
// accuracy also where they lie far from zero.
template <int kLanes, bool kExact, int kCount>
__device__ __forceinline__ void normalize_row(float (&v)[kCount], const float (&bias)[kCount], float eps, float& scale, float& shift) {
    constexpr float kShare = 1.0f / kBlockSide;  // multiplied in before the sum, so that large values do not overflow it
    static_assert(kLanes * kCount == kBlockSide, "a slab is a group");
    float mean = 0, rest = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        v[i] = swish(v[i]) + bias[i];
        mean = fmaf(v[i], kShare, mean);
    }
    mean = sum_across_lanes<kLanes>(mean);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        v[i] -= mean;
        if constexpr (kExact) rest += v[i];
        squares = fmaf(v[i], v[i], squares);
    }
    squares = sum_across_lanes<kLanes>(squares) * kShare;
    if constexpr (kExact) rest = sum_across_lanes<kLanes>(rest) * kShare;  // what the rounding of the mean left over
    if (isinf(squares)) rest = 0;  // scale is 0 then; inf * 0 must not make a NaN of it
    scale = reciprocal_sqrt(fmaf(-rest, rest, squares) + eps);
    shift = -rest * scale;
}

// The epilogue's arithmetic is as much work as one product: two warpgroups share it.
template <class Value> using FinishedProduct = Products<1, 128, 5, 3, Value, 2>;

// T: of the vectors and the output. Sums of float32 are of scaled rows; those of 16-bit values are the product itself. kExact: of three
// products.
template <typename T, bool kExact = false> struct SwishGroupNormEpilogue {
    static constexpr bool kRestores = false, kScaled = sizeof(T) == 4;
    static constexpr int kVectors = kScaled ? 5 : 4, kBias = kVectors - 3;
    Product product;
    T *out, *h;  // h: null if it is not wanted
    const T *linear_bias, *bias, *gamma, *beta;
    float eps;

    __device__ __forceinline__ float column(int at, int q) const {
        if (q == kVectors - 5) return product.columns[at].unscale;
        return to_acc((q == kBias - 1 ? linear_bias : q == kBias ? bias : q == kBias + 1 ? gamma : beta)[at]);
    }
    __device__ __forceinline__ float doubt(int at) const { return kScaled ? product.columns[at].doubt : 0; }
    __device__ __forceinline__ float2 scale(int row) const {
        if constexpr (kScaled) return *reinterpret_cast<const float2*>(product.rows + row);
        return make_float2(1, 0);
    }
    template <class Four, class Scale>
    __device__ __forceinline__ void finish(float (&v)[4][8], const Slab& slab, const Four& four, const Scale& scale, bool certain,
                                           float most) const {
        const auto exists = [&](int r) { return slab.row + 4 * r < product.m; };
        const auto eight = [&](int q, float (&to)[8]) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float4 own = four(q, half);
                to[half * 4] = own.x, to[half * 4 + 1] = own.y, to[half * 4 + 2] = own.z, to[half * 4 + 3] = own.w;
            }
        };
        float first[8], second[8];
        if constexpr (kScaled) {
            if (!certain && leave_uncertain<true>(product, v, slab, four, scale, most, out)) return;
            unscale(v, four, scale);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (h != nullptr && exists(r)) store_row<true>(h, slab.row + 4 * r, slab, product.n, v[r]);
            }
        } else {
            eight(kBias - 1, first);
#pragma unroll
            for (int i = 0; i < 32; ++i) v[i / 8][i % 8] += first[i % 8];
        }
        eight(kBias, first);
        float by[4], shift[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) normalize_row<8, kExact>(v[r], first, eps, by[r], shift[r]);
        eight(kBias + 1, first);
        eight(kBias + 2, second);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[r][i] = fmaf(fmaf(v[r][i], by[r], shift[r]), first[i], second[i]);
            if (exists(r)) store_row<true>(out, slab.row + 4 * r, slab, product.n, v[r]);
        }
    }
    // A warp has a row's 64 values of h from `column` on, two a lane.
    __device__ __forceinline__ void finish_row(int row, int column, float2 own_h) const {
        column += threadIdx.x % 32 * 2;
        if (kScaled && h != nullptr) *reinterpret_cast<float2*>(h + int64_t(row) * product.n + column) = own_h;
        float v[2] = {own_h.x, own_h.y}, scale, shift;
        const float own[2] = {to_acc(bias[column]), to_acc(bias[column + 1])};
        normalize_row<32, true>(v, own, eps, scale, shift);
        Pack<T, 2> pair;
#pragma unroll
        for (int i = 0; i < 2; ++i) from_acc(fmaf(fmaf(v[i], scale, shift), to_acc(gamma[column + i]), to_acc(beta[column + i])), pair.value[i]);
        *reinterpret_cast<Pack<T, 2>*>(out + int64_t(row) * product.n + column) = pair;
    }
};
#endif

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
    const cudaError_t error = current_device(&device);
    return error != cudaSuccess ? error : launch_two_reads(h, out, vectors, sizes, eps, workspace, device.sms, stream);
}

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

#if CUDART_VERSION >= 12000
// --- shared: product launchers (home: kernels/linear_swish_group_norm.py) ---
// What a product needs beside its operands and its result: their pieces and scales, and the flags. Sizes in bytes, each a multiple of 128.
// A frozen weight has pieces and scales of its own; for one product its pieces twice, to nearest and balanced, and so many bytes that it is
// not taken for one of three products.
struct ProductWorkspace {
    int64_t pieces_x, scales_x, flags, asked, pieces_w, scales_w, frozen_pieces;
    int64_t frozen_bytes() const { return frozen_pieces + scales_w; }
    int64_t bytes(bool frozen) const { return pieces_x + scales_x + flags + asked + (frozen ? 0 : pieces_w + scales_w); }
};

static int64_t whole_lines(int64_t bytes) { return divide_up(bytes, 128) * 128; }
static ProductWorkspace product_workspace(int64_t m, int64_t n, int64_t k, int pieces) {
    ProductWorkspace w;
    w.pieces_x = m * padded_k(int(k)) * pieces * 2;
    w.scales_x = whole_lines(m * sizeof(RowScale));
    w.flags = whole_lines(divide_up(m, kBlockSide) * divide_up(n, kBlockSide) * sizeof(int));
    w.asked = whole_lines(sizeof(int));
    w.pieces_w = n * padded_k(int(k)) * pieces * 2;
    w.scales_w = whole_lines(n * sizeof(RowScale));
    w.frozen_pieces = pieces == 1 ? 2 * w.pieces_w + 128 : w.pieces_w;
    return w;
}

template <int kPieces>
static cudaError_t launch_split(const Operand& x, const Operand& weight, int k, int* flags, int64_t flag_count, Rounding rounding, int* asked,
                                cudaStream_t stream) {
    int group = 32;
    while (group < kSplitBlock && group * kSplitItems * 4 < padded_k(k)) group *= 2;
    const int64_t blocks_x = divide_up(x.rows, kSplitBlock / group), blocks_w = divide_up(weight.rows, kSplitBlock / group);
    split_rows<kPieces><<<unsigned(blocks_x + blocks_w), kSplitBlock, 0, stream>>>(
        x, weight, unsigned(blocks_x), k, group, flags, flag_count, rounding, asked);
    return cudaGetLastError();
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's own function, without linking against it.
static EncodeTiled encode_tiled() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
}

// Of 16-bit values (rows, halves), halves a multiple of 8: boxes of one line of box_rows rows. What is beyond an end reads as zeros.
static bool make_map(CUtensorMap* map, const void* values, int64_t rows, int64_t halves, int box_rows) {
    static const EncodeTiled encode = encode_tiled();
    if (encode == nullptr) return false;
    const cuuint64_t sizes[2] = {cuuint64_t(halves), cuuint64_t(rows)}, strides[1] = {cuuint64_t(halves) * 2};
    const cuuint32_t box[2] = {kLine, cuuint32_t(box_rows)}, steps[2] = {1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(values), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Launches a kernel that begins with wait_for_predecessor(), in clusters of blocks.
template <int kCluster = 1, class... Parameters, class... Arguments>
static cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes, const Device& device,
                                cudaStream_t stream, const Arguments&... arguments) {
    constexpr int kAlwaysThere = 48 * 1024;
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = shared_bytes > kAlwaysThere ? cudaFuncSetAttribute(kernel, most, shared_bytes) : cudaSuccess;
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
    config.stream = stream, config.attrs = attributes, config.numAttrs = device.major < 9 ? 0 : kCluster == 1 ? 1 : 2;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Of products with few tiles or a short K cuBLAS makes less of an error: so do we. exact: every line is promoted, which leaves a seventh of what
// is truncated, about 2^-24 of a line's sum; an epilogue may want every second one larger by 2^-23.
static int lines_to_promote(const Product& product, int64_t tiles, bool exact, const Device& device) {
    return exact || product.k < 256 ? 1 : tiles < 2 * device.sms || product.k < 768 ? 2 : 4;
}

// The product of split or 16-bit operands, tile by tile, with what the epilogue makes of it.
template <class Kind, class Epilogue>
static cudaError_t launch_multiply(
    const Epilogue& epilogue, const CUtensorMap& map_x, const CUtensorMap& map_w, bool exact, const Device& device, cudaStream_t stream) {
    const Product& product = epilogue.product;
    const int64_t tiles = divide_up(product.m, kTileM) * divide_up(product.n, Kind::kTileN), blocks = tiles < device.sms ? tiles : device.sms;
    return launch_early(multiply<Kind, Epilogue>, blocks, Kind::kThreads, kProductBytes<Kind, Epilogue>, device, stream,
        map_x, map_w, padded_k(product.k) * Kind::kPieces / kLine, lines_to_promote(product, tiles, exact, device), epilogue);
}
template <class Epilogue> static cudaError_t launch_recompute(const Epilogue& epilogue, const Device& device, cudaStream_t stream) {
    const int64_t blocks = divide_up(epilogue.product.m, kBlockSide) * divide_up(epilogue.product.n, kBlockSide);
    return launch_early(recompute<Epilogue>, blocks < 2 * device.sms ? blocks : 2 * device.sms, kRecomputeBlock, 0, device, stream, epilogue);
}

// The same of plain rows x (m, values) and w (n, values) of 16-bit values, 16-byte aligned.
template <class Kind, class Epilogue>
static cudaError_t launch_multiply_rows(
    const Epilogue& epilogue, const void* x, const void* w, int64_t values, bool exact, const Device& device, cudaStream_t stream) {
    CUtensorMap map_x, map_w;
    if (!make_map(&map_x, x, epilogue.product.m, values, epilogue.product.m < kTileM ? epilogue.product.m : kTileM)) return cudaErrorInvalidValue;
    const int64_t rows_w = int64_t(epilogue.product.n) * (epilogue.product.balanced != nullptr ? 2 : 1);
    if (!make_map(&map_w, w, rows_w, values, Kind::kTileN)) return cudaErrorInvalidValue;
    return launch_multiply<Kind>(epilogue, map_x, map_w, exact, device, stream);
}

// Whether a chip has Hopper's loop.
static bool on_hopper(const Device& device) { return device.major == 9 && !PORTABLE_PRODUCT; }

// frozen: the weight's pieces and scales from an earlier split, or null.
template <class Kind, class Epilogue>
static cudaError_t launch_product(
    Epilogue epilogue, void* workspace, const void* frozen, bool exact, const Device& device, cudaStream_t stream) {
    Product& product = epilogue.product;
    const ProductWorkspace sizes = product_workspace(product.m, product.n, product.k, Kind::kPieces);
    char* const at = static_cast<char*>(workspace);
    char* const weight = frozen != nullptr ? static_cast<char*>(const_cast<void*>(frozen)) : at + sizes.bytes(true);
    const Operand x = {product.x, reinterpret_cast<__half*>(at), reinterpret_cast<RowScale*>(at + sizes.pieces_x), product.m};
    RowScale* const scales_w = reinterpret_cast<RowScale*>(weight + (frozen != nullptr ? sizes.frozen_pieces : sizes.pieces_w));
    const Operand w = {product.weight, reinterpret_cast<__half*>(weight), scales_w, frozen != nullptr ? 0 : product.n};
    product.rows = x.scales, product.columns = w.scales;
    product.flags = reinterpret_cast<int*>(at + sizes.pieces_x + sizes.scales_x);
    int* const asked = frozen != nullptr && Kind::kPieces == 1 ? product.flags + sizes.flags / int64_t(sizeof(int)) : nullptr;
    product.balanced = asked;
    cudaError_t error = launch_split<Kind::kPieces>(
        x, w, product.k, product.flags, sizes.flags / int64_t(sizeof(int)), Rounding::kAsXAsks, asked, stream);
    const int64_t halves = int64_t(padded_k(product.k)) * Kind::kPieces;
    if (error != cudaSuccess) return error;
    if (on_hopper(device)) {
        error = launch_multiply_rows<Kind>(epilogue, x.pieces, w.pieces, halves, exact, device, stream);
    } else if constexpr (Kind::kPieces == 2) {
        const int64_t tiles = divide_up(product.m, kTileM) * divide_up(product.n, kPortableTileN);
        error = launch_early(multiply_portably<Epilogue>, tiles, kPortableThreads, kPortableBytes, device, stream,
            x.pieces, w.pieces, int(halves / kLine), lines_to_promote(product, tiles, exact, device), epilogue);
    }
    return error != cudaSuccess ? error : launch_recompute(epilogue, device, stream);
}

template <typename T, class Epilogue>
static cudaError_t launch_few(const Epilogue& epilogue, const T* x, const T* w, const T* bias, const Device& device, cudaStream_t stream) {
    const int stages = device.shared_bytes >= kFewStages * kFewStageBytes ? kFewStages : kFewestStages;
    const dim3 blocks(unsigned(divide_up(epilogue.product.m, kFewRows)), unsigned(divide_up(epilogue.product.n, kBlockSide)));
    return launch_early(multiply_few<T, Epilogue>, blocks, 32 * kFewWarps, stages * kFewStageBytes, device, stream, x, w, bias, stages, epilogue);
}

// Whether multiply_few takes a product of up to `most` rows: cuBLAS reads a long K of few columns with more blocks.
static bool is_of_few_rows(int64_t m, int64_t n, int64_t k, int most) {
    Device device;
    if (current_device(&device) != cudaSuccess || device.major < 8 || m * n * k == 0) return false;
    return m <= most && n % kBlockSide == 0 && k % 8 == 0 && n <= 1 << 21 && k <= 1 << 24 && (n >= 2048 || k <= 2 * n);
}

// Whether a product is for the tensor cores by the chip and its shape alone. Those of sm_86, sm_89 and sm_120, which have little shared
// memory, do not do three products in the time of a float32's.
static bool fits_tensor_cores(int64_t m, int64_t n, int pieces) {
    constexpr int64_t kMost = int64_t(1) << 30;
    Device device;
    if (current_device(&device) != cudaSuccess) return false;
    const bool portably = pieces == 2 && device.major >= 8 && device.shared_bytes > 128 * 1024;
    return (on_hopper(device) || portably) && n % 2 == 0 && m >= 128 && n >= 128 && m <= kMost && n <= kMost;
}

// Whether 16-bit values are for the tensor cores: there is nothing to split, but few tiles of a long K are cuBLAS's, which divides the K, and
// up to four rows multiply_few's.
static bool halves_fit_tensor_cores(int64_t m, int64_t n, int64_t k) {
    Device device;
    const auto tiles_of = [](int64_t size) { return divide_up(size, kTileM); };  // in either direction
    static_assert(OneProduct::kTileN == kTileM, "a tile is a square");
    if (m == 0 || n % 2 != 0 || current_device(&device) != cudaSuccess || is_of_few_rows(m, n, k, kFewRows / 4)) return false;
    if (!fits_tensor_cores(tiles_of(m) * kTileM, tiles_of(n) * kTileM, 1) || k % 8 != 0 || k < kLine) return false;
    const int64_t tiles = tiles_of(m) * tiles_of(n);
    return tiles * 2 >= device.sms || k <= 2048 || k <= tiles * kTileM;
}
extern "C" bool product_of_halves_fits(int64_t m, int64_t n, int64_t k) {
    return halves_fit_tensor_cores(m, n, k) || is_of_few_rows(m, n, k, kFewRows);
}

// How much workspace a product takes: 0 where it is of few rows, -1 where it is not for us: another chip, or a shape that does not pay.
extern "C" int64_t product_bytes(int64_t m, int64_t n, int64_t k, bool tf32, bool frozen) {
    if (is_of_few_rows(m, n, k, tf32 ? kFewRows : 4 * kFewRows)) return 0;
    if (!fits_tensor_cores(m, n, tf32 ? 1 : 2) || k % 4 != 0 || k < (tf32 ? 512 : 128) || k > kLongestRow) return -1;
    // Against cuBLAS's float32 the product alone decides; what it gains on its TF32 must make up for the split.
    const double values = double(m) * n * k, split = double(frozen ? m : m + n) * k;
    if (tf32 ? values * 2.0e-15 < split * 1.6e-12 + 8e-6 : values < 0x1p30) return -1;
    return product_workspace(m, n, k, tf32 ? 1 : 2).bytes(frozen);
}

// A weight's pieces and scales: their bytes, or 0 where they are of no use, and the split itself.
extern "C" int64_t frozen_bytes(int64_t n, int64_t k, bool tf32) {
    const int pieces = tf32 ? 1 : 2;
    return fits_tensor_cores(128, n, pieces) && k % 4 == 0 && k <= kLongestRow ? product_workspace(0, n, k, pieces).frozen_bytes() : 0;
}
extern "C" int freeze_weight(const float* weight, int64_t n, int64_t k, bool tf32, void* frozen, cudaStream_t stream) {
    const ProductWorkspace sizes = product_workspace(0, n, k, tf32 ? 1 : 2);
    char* const to = static_cast<char*>(frozen);
    const auto split = [&](Rounding rounding, int64_t at) -> int {
        const Operand w = {weight, reinterpret_cast<__half*>(to + at), reinterpret_cast<RowScale*>(to + sizes.frozen_pieces), n};
        return tf32 ? launch_split<1>({}, w, int(k), nullptr, 0, rounding, nullptr, stream)
                    : launch_split<2>({}, w, int(k), nullptr, 0, rounding, nullptr, stream);
    };
    const int error = split(Rounding::kNearest, 0);
    return error != 0 || !tf32 ? error : split(Rounding::kBalanced, sizes.pieces_w);
}
// --- end shared: product launchers ---

// --- shared: product entry point (home: kernels/linear_swish_group_norm.py) ---
// h = x W^T + bias: x (m, k) and weight (n, k) 16-byte aligned. recorded: a norm's gradient will be taken at h. What the tensor cores
// truncate makes all of h smaller by a few units of 2^-24. A norm does not see it, but its gradient does, through rstd. workspace:
// product_bytes. frozen: of freeze_weight, or null.
extern "C" int product_forward(
    const float* x, const float* weight, const float* bias, float* h, int64_t m, int64_t n, int64_t k, bool tf32, bool recorded,
    void* workspace, const void* frozen, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const StoreEpilogue epilogue = {{x, weight, bias, nullptr, nullptr, nullptr, int(m), int(n), int(k)}, h};
    if (m < kTileM) return launch_few(epilogue, x, weight, bias, device, stream);
    return tf32 ? launch_product<OneProduct>(epilogue, workspace, frozen, recorded, device, stream)
                : launch_product<ThreeProducts>(epilogue, workspace, frozen, recorded, device, stream);
}
// The same of 16-bit values for which product_of_halves_fits. dtype: 2 float16, 3 bfloat16.
extern "C" int product_of_halves(
    int dtype, const void* x, const void* weight, const void* bias, void* h, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        const Product product = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, int(m), int(n), int(k)};
        const HalvesEpilogue<T> epilogue = {product, static_cast<T*>(h), static_cast<const T*>(bias)};
        if (halves_fit_tensor_cores(m, n, k)) return launch_multiply_rows<OneProductOf<T>>(epilogue, x, weight, k, false, device, stream);
        return launch_few(epilogue, static_cast<const T*>(x), static_cast<const T*>(weight), epilogue.bias, device, stream);
    };
    return dtype == 2 ? launch(__half()) : launch(__nv_bfloat16());
}
// --- end shared: product entry point ---

// How the gradient of h is read one by one: from memory, or made anew from what `split_gradient` left of each group: its hi, rstd, mean and
// slope. v = swish(h) + bias; grad_h = rstd * (gamma * grad - mean - (v - hi) * slope) * v'.
__device__ __forceinline__ float activate_and_differentiate(float h, float bias, float& slope) {
    float e, gate;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(h * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(gate) : "f"(1.0f + e));
    slope = fmaf(h * gate, 1.0f - gate, gate);
    return fmaf(h, gate, bias);
}
struct GroupGradientReader {
    const float *grad, *h = nullptr, *bias, *gamma;
    const float4* groups;
    explicit GroupGradientReader(const float* const* from) : grad(from[0]) {
        if (from[1] != nullptr) h = from[1], bias = from[2], gamma = from[3], groups = reinterpret_cast<const float4*>(from[4]);
    }
    __device__ __forceinline__ float value(int64_t row, int column, int columns) const {
        const float given = grad[row * columns + column];
        if (h == nullptr) return given;
        const float4 group = groups[row * (columns / kBlockSide) + column / kBlockSide];
        float slope;
        const float deviation = activate_and_differentiate(h[row * columns + column], bias[column], slope) - group.x;
        return group.y * fmaf(-deviation, group.w, fmaf(gamma[column], given, -group.z)) * slope;
    }
};

// --- shared: product gradients (home: kernels/linear_swish_group_norm.py) ---
// ---------------------------------------------------------------------------------------------------------------------------------
// The gradients of C = x W^T + bias from C's, `grad` (m, n): grad W (m, k), grad^T x (n, k), and grad's column sums.
//
// grad is split once, each row with a scale of its own, 2^a. As it is it is an operand of the first product; turned, one of the second,
// where x's rows take 2^-a over (as 2^(least a - a), at most 1). W and x are turned operands too, with a scale a column. Nothing is
// transposed in memory. Values that are not finite take no part in a scale: they spoil what they meet, and nothing else; what an infinity
// meets is recomputed in float32, since its low piece is NaN.

constexpr int kGradientBlock = 512;     // threads at most
constexpr int kColumnBlock = 256;       // threads, a quad of columns each
constexpr int kColumnRows = 8;          // rows of a thread in flight
constexpr int kFinishWarps = 16;
constexpr int kColumnSums = 4;          // of a column's scaled values: magnitudes, squares, what of them is lost, how many are large
constexpr int kGradientSums = 5;        // and of grad's values themselves
constexpr int kRecentRows = 16;         // after which a sum of values moves to a larger one, or float32's roundings would add up
constexpr int kRowsAhead = 3;           // of grad, on their way into shared memory

__device__ __forceinline__ bool is_finite(float v) { return magnitude_bits(v) < 0x7f800000u; }
__device__ __forceinline__ uint32_t finite_bits(float4 v) {  // of the largest finite magnitude
    const auto bits = [](float v) { return is_finite(v) ? magnitude_bits(v) : 0; };
    return max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w)));
}
// What the pieces of a value lose to fp16's subnormals, in units of 2^-25.
template <int kPieces> __device__ __forceinline__ float lost_of(float v) {
    return fabsf(v) < kIntact<kPieces> ? fminf(fabsf(v) * 0x1p25f, 1.0f) : 0.0f;
}
// Of a row or column, from sums over its scaled values. Zeros make zeros and NaN makes NaN, whatever they meet; infinities are recomputed.
constexpr float kCertain = -0x1p120f, kDoubtful = 0x1p100f;
template <int kPieces> __device__ __forceinline__ float doubt_of(float unscale, double magnitudes, bool few, double lost) {
    if (!(magnitudes > 0)) return kCertain;
    if (isinf(magnitudes)) return INFINITY;
    if (unscale > kLargestScale || (kPieces == 2 && few)) return kDoubtful;
    return kDoubt<kPieces> * float(lost);
}

// Where both sides of a sum of K products have many large values, c_i and c_j of at least kLarge, c_i + c_j - K of them meet in a term of at least
// kLarge^2; and what the pieces lose of n_i and n_j others is then below 2^-24 of the terms' magnitudes, however near zero their sum is, if
// kLost (n_i + n_j) <= c_i + c_j - K. Each side has its own share of that: a row's margin, c - kLost n, is to be at least the largest K - margin
// of the other operand's columns, their `deficit`. Then no output of the row is in doubt.
constexpr float kLarge = 0x1p6f, kLost = 4;
static_assert(kLost * kLarge * kLarge == 0x1p14f, "2^-25 2^15 n <= 2^-24 kLarge^2 n kLost");
__device__ __forceinline__ float* margins_of(const RowScale* scales, int64_t count) {  // they are behind the scales
    return reinterpret_cast<float*>(const_cast<RowScale*>(scales) + count);
}
__device__ __forceinline__ float margin_of(double large, double lost, float doubt) {
    return doubt >= kDoubtful ? -INFINITY : float(large - kLost * lost);
}

// What is known of the columns of an operand, beside their pieces.
struct Columns {
    unsigned* largest;  // bits of a magnitude: of each column; for grad one, of its rows' `unscale`
    float* partials;    // rows of sums
    RowScale* scales;
    unsigned* deficit;  // not grad's
};

// The copy engine brings `bytes`, a multiple of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// A thread has kQuads quads of a row, 32 columns apart: eight threads have 128 bytes of it at a time.
template <int kQuads> __device__ __forceinline__ int quad_column(int i) {
    return threadIdx.x / 8 * (32 * kQuads) + i * 32 + threadIdx.x % 8 * 4;
}
__device__ __forceinline__ float4 shared_quad(uint32_t row, int column) {
    float v[4];
    shared_load(row + column * 4, v);
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Where grad comes from: here, memory, whose rows the copy engine brings. Of a thread's columns it makes kSums sums beside grad's own, and
// may keep kSlots float4 for each quad in shared memory.
struct GivenGradient {
    struct Arguments {
        const float* grad;
        __device__ __forceinline__ const float* input(int) const { return grad; }
    };
    static constexpr int kQuads = 4, kInputs = 1, kSums = 0, kSlots = 0;
    __device__ __forceinline__ GivenGradient(const Arguments&, int, float4*) {}
    template <typename Sums>
    __device__ __forceinline__ void make(const Arguments&, uint32_t staged, int64_t, int columns, float4 (&grad)[kQuads], Sums&) const {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const int column = quad_column<kQuads>(i);
            grad[i] = column < columns ? shared_quad(staged, column) : make_float4(0, 0, 0, 0);
        }
    }
};

// A block owns every so-many-th row; kRowsAhead of them are on their way.
template <int kPieces, class Source>
__global__ void __launch_bounds__(kGradientBlock, 1) split_gradient(
    const typename Source::Arguments from, __half* __restrict__ pieces, RowScale* __restrict__ scales, const Columns of, int64_t rows,
    int columns) {
#ifdef ON_HOPPER
    constexpr int kQuads = Source::kQuads, kSums = kGradientSums + Source::kSums, kLostSum = 2, kLargeSum = 3, kWarps = kGradientBlock / 32;
    __shared__ uint32_t warp_largest[2][kWarps], row_largest[kRecentRows];
    __shared__ float row_sums[kRecentRows][3][kWarps];  // magnitudes, what is lost, how many are large
    __shared__ __align__(8) uint64_t arrived[kRowsAhead];
    extern __shared__ __align__(1024) unsigned char shared[];  // rows; totals[sum from `lost` on][quad][thread]; slots
    const int tid = threadIdx.x, threads = blockDim.x, warp = tid / 32, warps = threads / 32, padded = padded_k(columns);
    const int row_bytes = columns * 4, stage_bytes = row_bytes * Source::kInputs;
    const uint32_t stages = shared_address(shared), bars = shared_address(arrived);
    float4* const totals = reinterpret_cast<float4*>(shared + kRowsAhead * stage_bytes);
    const auto column = [&](int i) { return quad_column<kQuads>(i); };
    const auto bring = [&](int64_t row, int place) {
        if (tid > 0 || row >= rows) return;
        mbarrier_expect_bytes(bars + 8 * place, stage_bytes);
#pragma unroll
        for (int i = 0; i < Source::kInputs; ++i) {
            bulk_load(stages + place * stage_bytes + i * row_bytes, from.input(i) + row * columns, row_bytes, bars + 8 * place);
        }
    };
    if (tid == 0) {
        for (int i = 0; i < kRowsAhead; ++i) mbarrier_init(bars + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        wait_for_predecessor();
        for (int i = 0; i < kRowsAhead; ++i) bring(blockIdx.x + int64_t(i) * gridDim.x, i);
    }
    for (int t = 0; t < (kSums - kLostSum) * kQuads; ++t) totals[t * threads + tid] = make_float4(0, 0, 0, 0);
    __syncthreads();
    wait_for_predecessor();

    const Source source(from, columns, totals + (kSums - kLostSum) * kQuads * threads + tid);
    constexpr bool kCompensated = Source::kSums == 0;  // the sum of grad itself, where there are registers for it
    float sums[kQuads][kSums][4] = {};  // of what is lost, which is rare, there are only totals
    __nv_bfloat162 rounded_off[kQuads][2] = {};  // of the compensated sum; a few bits of it are enough
    __half2 counts[kQuads][2] = {};     // of the large ones
    const auto add_to_total = [&](int i, int k, const float (&sum)[4]) {
        float4& total = totals[((k - kLostSum) * kQuads + i) * threads + tid];
        total = make_float4(total.x + sum[0], total.y + sum[1], total.z + sum[2], total.w + sum[3]);
    };
    int recent = 0;  // rows since the sums were moved
    uint32_t widest = 0;
    const auto settle = [&](int64_t last) {  // moves the sums, and leaves the scales of the recent rows, up to `last`
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
#pragma unroll
            for (int k = kColumnSums; k < kSums; ++k) {
                add_to_total(i, k, sums[i][k]);
                sums[i][k][0] = sums[i][k][1] = sums[i][k][2] = sums[i][k][3] = 0;
            }
            const float2 a = __half22float2(counts[i][0]), b = __half22float2(counts[i][1]);
            add_to_total(i, kLargeSum, {a.x, a.y, b.x, b.y});
            counts[i][0] = counts[i][1] = __half2();
        }
        __syncthreads();
        for (int r = warp; r < recent; r += warps) {
            const int lane = tid % 32;
            const float magnitudes = sum_across_lanes(lane < warps ? row_sums[r][0][lane] : 0.0f);
            const float lost = sum_across_lanes(lane < warps ? row_sums[r][1][lane] : 0.0f);
            const float large = sum_across_lanes(lane < warps ? row_sums[r][2][lane] : 0.0f);
            const int exponent = scale_exponent(row_largest[r]);
            RowScale result;
            result.unscale = power_of_two(-exponent);
            const float most = __uint_as_float(row_largest[r]) * power_of_two(exponent);
            result.doubt = doubt_of<kPieces>(result.unscale, magnitudes, magnitudes < kFewProducts * most, lost);
            const int64_t row = last - (recent - 1 - r) * int64_t(gridDim.x);
            if (lane == 0) scales[row] = result, margins_of(scales, rows)[row] = margin_of(large, lost, result.doubt);
            widest = max(widest, __float_as_uint(result.unscale));
        }
        recent = 0;
    };

    Ring<kRowsAhead> ring;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, ring.advance()) {
        mbarrier_wait(bars + 8 * ring.place, ring.phase);
        float4 grad[kQuads];
        source.make(from, stages + ring.place * stage_bytes, row, columns, grad, sums);
        float most = 0, least = INFINITY;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const float4 v = grad[i];
            most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            if (column(i) < columns) least = fminf(least, fminf(fminf(fabsf(v.x), fabsf(v.y)), fminf(fabsf(v.z), fabsf(v.w))));
        }
        if (!is_finite(most)) {
            uint32_t finite = 0;
#pragma unroll
            for (int i = 0; i < kQuads; ++i) finite = max(finite, finite_bits(grad[i]));
            most = __uint_as_float(finite);
        }
        const uint32_t own = __reduce_max_sync(~0u, __float_as_uint(most));
        if (tid % 32 == 0) warp_largest[recent % 2][warp] = own;
        __syncthreads();
        bring(row + int64_t(kRowsAhead) * gridDim.x, ring.place);
        const uint32_t largest = __reduce_max_sync(~0u, tid % 32 < warps ? warp_largest[recent % 2][tid % 32] : 0);
        const float scale = power_of_two(scale_exponent(largest));
        float magnitudes = 0, all_lost = 0;
        __half2 large = {};
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const float values[4] = {grad[i].x, grad[i].y, grad[i].z, grad[i].w};
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[j] = values[j] * scale;
                sums[i][0][j] += fabsf(v[j]), magnitudes += fabsf(v[j]);
                sums[i][1][j] = fmaf(v[j], v[j], sums[i][1][j]);
            }
            const auto add = [&](int j) {  // returns what the sum's rounding left over
                float& sum = sums[i][kColumnSums][j];
                const float before = sum, added = (sum += values[j]) - before;
                return (before - (sum - added)) + (values[j] - added);
            };
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const __half2 one = __hge2(__habs2(__floats2half2_rn(v[2 * j], v[2 * j + 1])), __float2half2_rn(kLarge));
                counts[i][j] = __hadd2(counts[i][j], one), large = __hadd2(large, one);
                const __nv_bfloat162 rest = __floats2bfloat162_rn(add(2 * j), add(2 * j + 1));
                if constexpr (kCompensated) rounded_off[i][j] = __hadd2(rounded_off[i][j], rest);
            }
            if (column(i) < padded) {
                store_pieces<kPieces>(pieces + row * padded * kPieces, column(i), make_float4(v[0], v[1], v[2], v[3]));
            }
        }
        if (__any_sync(~0u, least * scale < kIntact<kPieces>)) {
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float lost[4] = {lost_of<kPieces>(grad[i].x * scale), lost_of<kPieces>(grad[i].y * scale),
                                       lost_of<kPieces>(grad[i].z * scale), lost_of<kPieces>(grad[i].w * scale)};
                all_lost += (lost[0] + lost[1]) + (lost[2] + lost[3]);
                add_to_total(i, kLostSum, lost);
            }
            all_lost = sum_across_lanes(all_lost);
        }
        magnitudes = sum_across_lanes(magnitudes);
        const int warp_large = __reduce_add_sync(~0u, int(__low2float(large) + __high2float(large)));
        if (tid % 32 == 0) {
            row_sums[recent][0][warp] = magnitudes, row_sums[recent][1][warp] = all_lost, row_sums[recent][2][warp] = float(warp_large);
        }
        if (tid == 0) row_largest[recent] = largest;
        if (++recent == kRecentRows || row + gridDim.x >= rows) settle(row);
    }
    if constexpr (kCompensated) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const auto finite = [](__nv_bfloat16 v) { return is_finite(__bfloat162float(v)) ? __bfloat162float(v) : 0.0f; };  // an infinity's is NaN
            const __nv_bfloat162 a = rounded_off[i][0], b = rounded_off[i][1];
            add_to_total(i, kColumnSums, {finite(a.x), finite(a.y), finite(b.x), finite(b.y)});
        }
    }
    if (tid % 32 == 0) atomicMax(of.largest, widest);
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
        float4* to = reinterpret_cast<float4*>(of.partials + (int64_t(blockIdx.x) * kSums + k) * columns);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            if (column(i) >= columns) continue;
            to[column(i) / 4] = k < kLostSum ? make_float4(sums[i][k][0], sums[i][k][1], sums[i][k][2], sums[i][k][3])
                                          : totals[((k - kLostSum) * kQuads + i) * threads + tid];
        }
    }
#endif
}

// Columns `first` to `end` of x or W, of `columns` each, as a turned operand. Its rows are multiplied by what grad's scales left over: `rows`
// and `widest` of grad; null: by one.
struct TurnedOperand {
    const float* values;
    const RowScale* rows;
    const unsigned* widest;
    int64_t count;
    int columns, first, end;
    __device__ __forceinline__ float narrow() const { return rows == nullptr ? 1.0f : 1.0f / __uint_as_float(*widest); }
    static __device__ __forceinline__ float kept(float v) { return is_finite(v) ? 0.0f : v; }  // times what underflowed
    // Of every gridDim.y-th row from `row` on; beyond the end, zeros. kBackwards: counted from the last one, so that who reads the rows again
    // finds the first of them in L2.
    template <bool kBackwards>
    __device__ __forceinline__ void load(int64_t row, int column, float narrow, float4 (&v)[kColumnRows]) const {
        float by[kColumnRows];
#pragma unroll
        for (int i = 0; i < kColumnRows; ++i) {
            const int64_t place = row + int64_t(i) * gridDim.y, at = kBackwards ? count - 1 - place : place;
            v[i] = make_float4(0, 0, 0, 0), by[i] = 1;
            if (place < count) v[i] = __ldg(reinterpret_cast<const float4*>(values + at * columns + column));
            if (place < count && rows != nullptr) by[i] = __ldg(&rows[at].unscale);
        }
#pragma unroll
        for (int i = 0; i < kColumnRows; ++i) {
            by[i] *= narrow;
            if (by[i] == 0) v[i] = make_float4(kept(v[i].x), kept(v[i].y), kept(v[i].z), kept(v[i].w)), by[i] = 1;
            v[i].x *= by[i], v[i].y *= by[i], v[i].z *= by[i], v[i].w *= by[i];
        }
    }
};

// Block (x, y): 4 * kColumnBlock columns, every gridDim.y-th row; a thread has a quad of columns.
__global__ void __launch_bounds__(kColumnBlock) column_maxima(const TurnedOperand operand, unsigned* __restrict__ largest) {
#ifdef ON_HOPPER
    const int column = operand.first + (blockIdx.x * kColumnBlock + threadIdx.x) * 4;
    allow_successor();
    wait_for_predecessor();
    if (column >= operand.end) return;
    uint32_t own[4] = {};
    const float narrow = operand.narrow();
    for (int64_t row = blockIdx.y; row < operand.count; row += int64_t(gridDim.y) * kColumnRows) {
        float4 v[kColumnRows];
        operand.load<true>(row, column, narrow, v);
#pragma unroll
        for (int i = 0; i < kColumnRows; ++i) {
            const float values[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) own[j] = max(own[j], is_finite(values[j]) ? magnitude_bits(values[j]) : 0);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (own[j] > *static_cast<volatile unsigned*>(largest + column + j)) atomicMax(largest + column + j, own[j]);
    }
#endif
}

template <int kPieces>
__global__ void __launch_bounds__(kColumnBlock) split_columns(const TurnedOperand operand, __half* __restrict__ pieces, const Columns of) {
#ifdef ON_HOPPER
    const int place = (blockIdx.x * kColumnBlock + threadIdx.x) * 4, column = operand.first + place;
    const int padded = padded_k(operand.end - operand.first);
    allow_successor();
    wait_for_predecessor();
    if (place >= padded) return;
    float scale[4], sums[kColumnSums][4] = {};
    const float narrow = operand.narrow();
#pragma unroll
    for (int j = 0; j < 4; ++j) scale[j] = column < operand.end ? power_of_two(scale_exponent(of.largest[column + j])) : 0.0f;
    for (int64_t row = blockIdx.y; row < operand.count; row += int64_t(gridDim.y) * kColumnRows) {
        float4 held[kColumnRows] = {};
        if (column < operand.end) operand.load<false>(row, column, narrow, held);
#pragma unroll
        for (int i = 0; i < kColumnRows; ++i) {
            const int64_t at = row + int64_t(i) * gridDim.y;
            if (at >= operand.count) break;
            const float v[4] = {held[i].x * scale[0], held[i].y * scale[1], held[i].z * scale[2], held[i].w * scale[3]};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[0][j] += fabsf(v[j]);
                sums[1][j] = fmaf(v[j], v[j], sums[1][j]);
                sums[2][j] += lost_of<kPieces>(v[j]);
                sums[3][j] += fabsf(v[j]) >= kLarge ? 1.0f : 0.0f;
            }
            store_pieces<kPieces>(pieces + at * padded * kPieces, place, make_float4(v[0], v[1], v[2], v[3]));
        }
    }
    if (column >= operand.end) return;
#pragma unroll
    for (int k = 0; k < kColumnSums; ++k) {
        float* to = of.partials + (int64_t(blockIdx.y) * kColumnSums + k) * operand.columns + column;
        *reinterpret_cast<float4*>(to) = make_float4(sums[k][0], sums[k][1], sums[k][2], sums[k][3]);
    }
#endif
}

constexpr int kMostResults = 4;
struct ColumnResults {
    float* to[kMostResults];  // the sums beside those that a scale is made of; null: not wanted
};

// From `count` rows of kSums partial sums to the scales and results of columns `first` to `end`. A block has 32 of them, a warp every
// so-many-th row.
template <int kPieces, int kSums>
__global__ void __launch_bounds__(32 * kFinishWarps) finish_columns(
    const Columns of, const __grid_constant__ ColumnResults results, int columns, int first, int end, int count, int64_t terms) {
#ifdef ON_HOPPER
    static_assert(kSums <= kColumnSums + kMostResults, "a place for every sum");
    __shared__ double warp_sums[kSums][kFinishWarps][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = first + blockIdx.x * 32 + lane;
    double total[kSums] = {};
    wait_for_predecessor();  // and the product waits for it to end: blocks that begin sooner lie on other SMs, far from their neighbours
    if (column < end) {
#pragma unroll 4
        for (int i = warp; i < count; i += kFinishWarps) {
#pragma unroll
            for (int k = 0; k < kSums; ++k) total[k] += double(of.partials[(int64_t(i) * kSums + k) * columns + column]);
        }
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k) warp_sums[k][warp][lane] = total[k];
    __syncthreads();
    if (warp > 0 || column >= end) return;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
        for (int w = 1; w < kFinishWarps; ++w) total[k] += warp_sums[k][w][lane];
    }
    constexpr bool kOfGradient = kSums > kColumnSums;
#pragma unroll
    for (int k = kColumnSums; k < kSums; ++k) {
        if (results.to[k - kColumnSums] != nullptr) results.to[k - kColumnSums][column] = float(total[k]);
    }
    RowScale result;
    result.unscale = kOfGradient ? __uint_as_float(*of.largest) : power_of_two(-scale_exponent(of.largest[column]));
    result.doubt = doubt_of<kPieces>(result.unscale, total[0], total[0] * total[0] < kFewProducts * total[1], total[2]);
    of.scales[column] = result;
    const float margin = margin_of(total[3], total[2], result.doubt);
    if constexpr (kOfGradient) margins_of(of.scales, columns)[column] = margin;
    else if (result.doubt > kCertain && result.doubt < INFINITY) atomicMax(of.deficit, unsigned(fminf(ceilf(float(terms) - margin), 0x1p31f)));
#endif
}

// Workspace of a gradient, in bytes: of grad its pieces, scales and largest scale; and so of x or W, whose partial sums wait in the memory of
// the result.
struct GradientWorkspace {
    int64_t pieces, scales, counters, other_pieces, other_scales, other_counters, flags;
    int64_t of_grad() const { return pieces + scales + counters; }
    int64_t of_other() const { return other_pieces + other_scales + other_counters + flags; }
};

template <class Source> static int gradient_threads(int64_t columns) {
    return int(divide_up(padded_k(int(columns)), 4 * Source::kQuads * 32) * 32);
}
template <class Source> static int gradient_shared_bytes(int64_t columns) {  // rows on their way, totals, slots
    return kRowsAhead * Source::kInputs * int(columns) * 4 + gradient_threads<Source>(columns) * Source::kQuads * (3 + Source::kSums + Source::kSlots) * 16;
}
template <class Source> static int64_t gradient_blocks(int64_t rows, int64_t columns, const Device& device) {
    constexpr int kFixedBytes = 6144;  // a block's own, and the system's
    const int by_threads = kGradientBlock / gradient_threads<Source>(columns);
    const int by_memory = device.shared_bytes / (gradient_shared_bytes<Source>(columns) + kFixedBytes);
    const int64_t most = int64_t(device.sms) * (by_memory < 1 ? 1 : by_memory < by_threads ? by_memory : by_threads);
    return rows < most ? rows : most;
}
template <class Source> static int64_t partials_bytes(int64_t rows, int64_t columns, const Device& device) {
    return gradient_blocks<Source>(rows, columns, device) * (kGradientSums + Source::kSums) * columns * int64_t(sizeof(float));
}
// Of x or W (rows, columns) for a product (outputs, columns).
static dim3 column_grid(int64_t rows, int64_t columns, int64_t outputs, const Device& device) {
    const int64_t across = divide_up(padded_k(int(columns)), 4 * kColumnBlock), most = divide_up(2 * device.sms, across);
    const int64_t down = divide_up(rows, kColumnRows) < most ? divide_up(rows, kColumnRows) : most;
    return dim3(unsigned(across), unsigned(down < outputs / kColumnSums ? down : outputs / kColumnSums));
}
static int64_t scales_bytes(int64_t count) { return whole_lines(count * int64_t(sizeof(RowScale) + sizeof(float))); }  // with their margins

// How many columns of x are split at a time: half of them, where there are tiles enough without the others. (A gradient is nearly all that
// its backward has in memory; a split of x beside it is what would be more than eager's.)
static int64_t columns_at_once(int64_t outputs, int64_t k, bool of_weight, int pieces, const Device& device) {
    const bool halved = of_weight && pieces == 2 && divide_up(outputs, kTileM) * divide_up(k, kTileM) >= 16 * device.sms;
    return halved ? divide_up(k, 2 * kTileM) * kTileM : k;
}
static GradientWorkspace gradient_workspace(
    int64_t m, int64_t n, int64_t k, int64_t other_rows, int64_t outputs, int64_t part, int pieces) {
    GradientWorkspace w;
    w.pieces = m * padded_k(int(n)) * pieces * 2;
    w.scales = scales_bytes(m) + scales_bytes(n);
    w.counters = whole_lines(sizeof(unsigned));
    w.other_pieces = other_rows * padded_k(int(part)) * pieces * 2;
    w.other_scales = whole_lines(k * sizeof(RowScale));
    w.other_counters = whole_lines((k + 1) * sizeof(unsigned));
    w.flags = whole_lines(divide_up(outputs, kBlockSide) * divide_up(k, kBlockSide) * sizeof(int));
    return w;
}

// Of pieces (rows, halves) along their columns: boxes of a line's rows of `strips` strips of 32 columns. Beyond the end all reads as zeros.
template <int kPieces> static bool make_turned_map(CUtensorMap* map, __half* pieces, int64_t rows, int64_t halves, int strips) {
    static const EncodeTiled encode = encode_tiled();
    if (encode == nullptr) return false;
    const cuuint64_t sizes[3] = {32, cuuint64_t(rows), cuuint64_t(halves / 32)}, strides[2] = {cuuint64_t(halves) * 2, 64};
    const cuuint32_t box[3] = {32, kLine / kPieces, cuuint32_t(strips * kPieces)}, steps[3] = {1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, pieces, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

struct SplitGradient {
    __half* pieces;
    RowScale *rows, *columns;
    Columns of;
    SplitGradient(void* workspace, const GradientWorkspace& w, int64_t m, float* partials = nullptr) {
        char* at = static_cast<char*>(workspace);
        pieces = reinterpret_cast<__half*>(at);
        rows = reinterpret_cast<RowScale*>(at += w.pieces);
        columns = reinterpret_cast<RowScale*>(at + scales_bytes(m));
        auto* counters = reinterpret_cast<unsigned*>(at += w.scales);
        of = {counters, partials, columns, nullptr};
    }
};

template <int kPieces, class Source>
static cudaError_t launch_split_gradient(const typename Source::Arguments& from, const ColumnResults& results, int64_t m, int64_t n,
    void* workspace, void* partials, const Device& device, cudaStream_t stream) {
    const GradientWorkspace w = gradient_workspace(m, n, 1, 1, 1, 1, kPieces);
    SplitGradient split(workspace, w, m, static_cast<float*>(partials));
    const int blocks = int(gradient_blocks<Source>(m, n, device)), threads = gradient_threads<Source>(n);
    cudaError_t error = cudaMemsetAsync(split.of.largest, 0, w.counters, stream);
    if (error != cudaSuccess) return error;
    const auto kernel = split_gradient<kPieces, Source>;
    const int shared_bytes = gradient_shared_bytes<Source>(n);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, threads, shared_bytes, stream>>>(from, split.pieces, split.rows, split.of, m, int(n));
    return launch_early(finish_columns<kPieces, kGradientSums + Source::kSums>, divide_up(n, 32), 32 * kFinishWarps, 0, device, stream,
        split.of, results, int(n), 0, int(n), blocks, m);
}

// Of a gradient: nothing is added to the product, and what an infinity has made NaN is recomputed.
struct GroupGradientEpilogue : StoreEpilogue {
    static constexpr bool kRestores = false;
    GroupGradientReader grad;
    int first, columns;  // of all the columns this launch multiplies product.n, from `first` on
    bool of_weight;      // grad is stored as (k, m)
    const unsigned* deficit;

    __device__ __forceinline__ float column(int at, int q) const { return q == 0 ? product.columns[first + at].unscale : 0.0f; }
    __device__ __forceinline__ float doubt(int at) const { return product.columns[first + at].doubt; }
    __device__ __forceinline__ float2 scale(int row) const {
        float2 own = StoreEpilogue::scale(row);
        if (margins_of(product.rows, product.m)[row] >= float(*deficit)) own.y = kCertain;
        return own;
    }
    __device__ __forceinline__ float left(int row, int k) const {
        return of_weight ? grad.value(k, row, product.m) : grad.value(row, k, product.k);
    }
    __device__ __forceinline__ float right(int column, int k) const { return product.weight[int64_t(k) * columns + column]; }
    template <class Four, class Scale>
    __device__ __forceinline__ void finish(float (&v)[4][8], const Slab& slab, const Four& four, const Scale& scale, bool certain,
                                           float most) const {
        bool infinite = false;
#pragma unroll
        for (int r = 0; r < 4; ++r) infinite = infinite || scale(r).y + most == INFINITY;
        if (!certain && __any_sync(~0u, infinite)) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (scale(i / 8).y + doubt(min(slab.column + i % 8 / 4 * 32 + i % 4, product.n - 1)) == INFINITY) v[i / 8][i % 8] = 0;
            }
        }
        StoreEpilogue whole = *this;
        whole.product.n = columns;
        whole.finish(v, {slab.row, first + slab.column}, four, scale, certain, most);
    }
};

// The uncertain outputs, in float32. A cluster takes every so-many-th block of outputs, as in `recompute`. Where few of them are uncertain, its
// blocks share the long sum of each: a block takes a part of K, one or more warps of it an output, and the parts are added in order. Where
// many are, one block computes them, when the others have seen that it will.
constexpr int kTogether = 8;  // blocks of a cluster
constexpr int kFewOutputs = kRecomputeBlock;  // of a block of outputs
constexpr int kInFlight = 8;  // of a lane's values

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ float load_from_rank(const float* shared, int rank) {
    float v;
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.f32 %0, [at];\n}"
                 : "=f"(v) : "r"(shared_address(shared)), "r"(rank) : "memory");
    return v;
}

__global__ void __launch_bounds__(kRecomputeBlock, 2) recompute_gradient(const GroupGradientEpilogue epilogue) {
#ifdef ON_HOPPER
    constexpr int kWarps = kRecomputeBlock / 32;
    __shared__ float sums[kWarps][kFewOutputs];
    __shared__ int flags[kRecomputeBlock], outputs[kFewOutputs], warp_counts[kWarps];
    const Product& product = epilogue.product;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, top = tid / 16 * 4, left = tid % 16 * 4;
    const int rank = blockIdx.x % kTogether, cluster = blockIdx.x / kTogether, clusters = gridDim.x / kTogether;
    wait_for_predecessor();

    int row0, column0;  // of a block of outputs
    const auto go_to = [&](int block) {
        row0 = block / product.blocks_across() * kBlockSide, column0 = block % product.blocks_across() * kBlockSide;
    };
    const auto exists = [&](int r, int c) { return row0 + r < product.m && column0 + c < product.n; };
    const auto out = [&](int r, int c) -> float& { return epilogue.out[int64_t(row0 + r) * product.n + column0 + c]; };
    const auto uncertain = [&] {  // a bit for each of this thread's 4 x 4
        unsigned mine = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int r = top + i / 4, c = left + i % 4;
            if (exists(r, c) && __float_as_uint(out(r, c)) == kUncertain) mine |= 1u << i;
        }
        return mine;
    };
    const auto finish_few = [&] {  // false: there are too many
        const unsigned mine = uncertain();
        int before = __popc(mine);
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(~0u, before, offset);
            if (lane >= offset) before += other;
        }
        __syncthreads();
        if (lane == 31) warp_counts[warp] = before;
        __syncthreads();
        before -= __popc(mine);
        int count = 0;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) before += warp_counts[w];
            count += warp_counts[w];
        }
        if (count > kFewOutputs) return false;
        for (unsigned bits = mine; bits != 0; bits &= bits - 1) outputs[before++] = tid * 16 + __ffs(bits) - 1;
        __syncthreads();
        const auto row_of = [](int output) { return output / 256 * 4 + output % 16 / 4; };
        const auto column_of = [](int output) { return output / 16 % 16 * 4 + output % 4; };
        int shares = 1;  // warps of an output
        while (shares < kWarps && product.k > kTogether * shares * 64 * kInFlight) shares *= 2;
        const int part = (product.k + kTogether * shares - 1) / (kTogether * shares), own = rank * shares + warp % shares;
        const int end = min((own + 1) * part, product.k);
        for (int f = warp / shares; f < count; f += kWarps / shares) {
            const int r = row0 + row_of(outputs[f]), c = column0 + column_of(outputs[f]);
            float sum[kInFlight] = {};
            for (int first = own * part + lane; first < end; first += 32 * kInFlight) {
                float a[kInFlight] = {}, b[kInFlight] = {};
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    if (first + 32 * i < end) a[i] = epilogue.left(r, first + 32 * i), b[i] = epilogue.right(c, first + 32 * i);
                }
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) sum[i] = fmaf(a[i], b[i], sum[i]);
            }
            float total = 0;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) total += sum[i];
            total = sum_across_lanes(total);
            if (lane == 0) sums[warp % shares][f] = total;
        }
        cluster_barrier();  // and all have looked at the block
        if (rank == 0 && tid < count) {
            float total = 0;
            for (int q = 0; q < kTogether * shares; ++q) total += load_from_rank(sums[q % shares] + tid, q / shares);
            out(row_of(outputs[tid]), column_of(outputs[tid])) = total;
        }
        cluster_barrier();
        return true;
    };
    const auto finish_many = [&] {
        const unsigned mine = uncertain();
        float sum[4][4] = {};
        sum_block(sum, product.k, [&](int r, int k, float (&x)[4], float (&w)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (row0 + r < product.m && k + i < product.k) x[i] = epilogue.left(row0 + r, k + i);
                if (column0 + r < product.n && k + i < product.k) w[i] = epilogue.right(column0 + r, k + i);
            }
        });
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (mine >> i & 1) out(top + i / 4, left + i % 4) = sum[i / 4][i % 4];
        }
    };

    for (int first = cluster; first < product.blocks(); first += clusters * kRecomputeBlock) {
        const int own = first + tid * clusters;
        flags[tid] = own < product.blocks() ? product.flags[own] : 0;
        if (!__syncthreads_or(flags[tid])) continue;
        int many = 0;
        for (int i = 0; i < kRecomputeBlock; ++i) {
            if (!flags[i]) continue;
            go_to(first + i * clusters);
            const bool finished = finish_few();
            __syncthreads();
            if (finished && tid == 0) flags[i] = 0;
            many += !finished;
        }
        if (many > 0) cluster_barrier();
        for (int i = 0; many > 0 && i < kRecomputeBlock; ++i) {
            if (!flags[i] || --many % kTogether != rank) continue;
            go_to(first + i * clusters);
            finish_many();
        }
        __syncthreads();
    }
#endif
}

// grad W, or grad^T x: `other` (m or n, k).
template <class Kind, bool kOfWeight>
static cudaError_t launch_gradient(const GroupGradientReader& grad, const float* other, float* out, int64_t m, int64_t n, int64_t k,
    void* split_workspace, void* workspace, const Device& device, cudaStream_t stream) {
    constexpr int kPieces = Kind::kPieces;
    using Turned = typename Kind::template Turned<kOfWeight, true>;
    const int64_t rows = kOfWeight ? m : n, outputs = kOfWeight ? n : m, part = columns_at_once(outputs, k, kOfWeight, kPieces, device);
    const GradientWorkspace w = gradient_workspace(m, n, k, rows, outputs, part, kPieces);
    const SplitGradient split(split_workspace, w, m);
    char* at = static_cast<char*>(workspace);
    auto* const pieces = reinterpret_cast<__half*>(at);
    auto* const scales = reinterpret_cast<RowScale*>(at += w.other_pieces);
    auto* const counters = reinterpret_cast<unsigned*>(at += w.other_scales);
    const Columns of = {counters, out, scales, counters + k};
    auto* const flags = reinterpret_cast<int*>(at += w.other_counters);
    cudaError_t error = cudaMemsetAsync(counters, 0, w.other_counters + w.flags, stream);
    if (error != cudaSuccess) return error;
    CUtensorMap map_a, map_b;
    const int64_t halves = int64_t(padded_k(int(n))) * kPieces;
    const bool made = kOfWeight ? make_turned_map<kPieces>(&map_a, split.pieces, m, halves, kTileM / 32)
                                : make_map(&map_a, split.pieces, m, halves, kTileM);
    if (!made) return cudaErrorInvalidValue;
    const Product product = {nullptr, other, nullptr, kOfWeight ? split.columns : split.rows, scales, flags, int(outputs), int(k), int(rows)};
    GroupGradientEpilogue epilogue = {{product, out}, grad, 0, int(k), kOfWeight, of.deficit};
    for (int64_t first = 0; first < k; first += part) {
        const int64_t end = first + part < k ? first + part : k;
        const TurnedOperand operand = {other, kOfWeight ? split.rows : nullptr, split.of.largest, rows, int(k), int(first), int(end)};
        const dim3 grid = column_grid(rows, end - first, outputs, device);
        error = launch_early(column_maxima, grid, kColumnBlock, 0, device, stream, operand, of.largest);
        if (error == cudaSuccess) error = launch_early(split_columns<kPieces>, grid, kColumnBlock, 0, device, stream, operand, pieces, of);
        if (error == cudaSuccess) {
            error = launch_early(finish_columns<kPieces, kColumnSums>, divide_up(end - first, 32), 32 * kFinishWarps, 0, device, stream,
                of, ColumnResults{}, int(k), int(first), int(end), int(grid.y), rows);
        }
        if (error != cudaSuccess) return error;
        const int64_t part_halves = int64_t(padded_k(int(end - first))) * kPieces;
        if (!make_turned_map<kPieces>(&map_b, pieces, rows, part_halves, Kind::kTileN / 32)) return cudaErrorInvalidValue;
        epilogue.first = int(first), epilogue.product.n = int(end - first);
        error = launch_multiply<Turned>(epilogue, map_a, map_b, false, device, stream);
        if (error != cudaSuccess) return error;
    }
    epilogue.first = 0, epilogue.product.n = int(k);
    return launch_early<kTogether>(recompute_gradient, 4 * device.sms / kTogether * kTogether, kRecomputeBlock, 0, device, stream, epilogue);
}

// How much workspace the gradients of a product take: the split of grad, its partial sums, and the gradients of x and of W. False where they
// are not for the tensor cores.
extern "C" bool product_gradient_bytes(int64_t m, int64_t n, int64_t k, bool tf32, int64_t* bytes) {
    Device device;
    constexpr int64_t kMost = int64_t(1) << 24;
    if (current_device(&device) != cudaSuccess || !on_hopper(device)) return false;
    if (n % 4 != 0 || k % 4 != 0 || n > kGradientBlock * GivenGradient::kQuads * 4 || m > kMost || k > kMost) return false;
    if (m < 128 || n < 128 || k < 128) return false;
    if (double(m) * n * k < 0x1p30) return false;
    const int pieces = tf32 ? 1 : 2;
    const GradientWorkspace w = gradient_workspace(m, n, k, n, m, k, pieces);
    bytes[0] = w.of_grad(), bytes[1] = partials_bytes<GivenGradient>(m, n, device), bytes[2] = w.of_other();
    bytes[3] = gradient_workspace(m, n, k, m, n, columns_at_once(n, k, true, pieces, device), pieces).of_other();
    return true;
}
extern "C" int product_split_gradient(
    const float* grad, float* grad_bias, int64_t m, int64_t n, bool tf32, void* workspace, void* partials, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const auto launch = tf32 ? launch_split_gradient<1, GivenGradient> : launch_split_gradient<2, GivenGradient>;
    return launch({grad}, {{grad_bias}}, m, n, workspace, partials, device, stream);
}
// grad: what a GroupGradientReader reads. other: W (n, k) for the gradient of x (m, k), or x for W's. split_workspace: the gradient's, split.
extern "C" int product_gradient(bool of_weight, const float* const* grad, const float* other, float* out, int64_t m, int64_t n, int64_t k,
    bool tf32, void* split_workspace, void* workspace, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const auto launch = [&](auto launcher) {
        return launcher(GroupGradientReader(grad), other, out, m, n, k, split_workspace, workspace, device, stream);
    };
    if (tf32) return of_weight ? launch(launch_gradient<OneProduct, true>) : launch(launch_gradient<OneProduct, false>);
    return of_weight ? launch(launch_gradient<ThreeProducts, true>) : launch(launch_gradient<ThreeProducts, false>);
}
// --- end shared: product gradients ---

template <typename T, bool kExact = false>
static SwishGroupNormEpilogue<T, kExact> network_from(const void* const* from, void* out, T* h, int64_t m, int64_t n, int64_t k, double eps) {
    const auto at = [&](int i) { return static_cast<const T*>(from[i]); };
    Product product = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, int(m), int(n), int(k)};
    if constexpr (sizeof(T) == 4) product.x = at(0), product.weight = at(1), product.bias = at(2);
    return {product, static_cast<T*>(out), h, at(2), at(3), at(4), at(5), float(eps)};
}

// The whole network, `groups` of kBlockSide features. from: x (m, k), weight (n, k), the linear layer's bias, bias, gamma, beta, of one
// dtype, all 16-byte aligned. dtype: 0 float32, 2 float16, 3 bfloat16. For float32 workspace: product_bytes; frozen: of freeze_weight, or null.
extern "C" int linear_swish_group_norm_forward(int dtype, const void* const* from, void* out, float* h, int64_t m, int64_t n, int64_t k,
    double eps, bool tf32, void* workspace, const void* frozen, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const auto few = [&](const auto& epilogue, auto zero) {
        const auto at = [&](int i) { return static_cast<const decltype(zero)*>(from[i]); };
        return launch_few(epilogue, at(0), at(1), at(2), device, stream);
    };
    const auto halves = [&](auto zero) {
        const auto epilogue = network_from<decltype(zero)>(from, out, nullptr, m, n, k, eps);
        if (!halves_fit_tensor_cores(m, n, k)) return few(epilogue, zero);
        return launch_multiply_rows<FinishedProduct<decltype(zero)>>(epilogue, from[0], from[1], k, false, device, stream);
    };
    if (dtype == 2) return halves(__half());
    if (dtype == 3) return halves(__nv_bfloat16());
    if (m < kTileM) return few(network_from<float, true>(from, out, h, m, n, k, eps), 0.0f);
    const bool recorded = h != nullptr;
    const auto launch = [&](auto kind, const auto& epilogue) {
        return launch_product<decltype(kind)>(epilogue, workspace, frozen, recorded, device, stream);
    };
    return tf32 ? launch(FinishedProduct<__half>{}, network_from<float>(from, out, h, m, n, k, eps))
                : launch(ThreeProducts{}, network_from<float, true>(from, out, h, m, n, k, eps));
}

// The gradient of h where a group is 64 features, split as soon as it is made: eight lanes have a group, two quads of it each, and leave what a
// GroupGradientReader wants.
struct SwishGradient {
    struct Arguments {
        const float *grad, *h, *bias, *gamma;
        float4* groups;  // hi, rstd, mean, slope
        float eps;
        __device__ __forceinline__ const float* input(int i) const { return i == 0 ? grad : h; }
    };
    static constexpr int kQuads = 2, kInputs = 2, kSums = 3, kSlots = 1, kLanes = 8;
    float gamma[kQuads][4] = {};  // bias waits in shared memory: more registers there are not
    float4* biases;
    __device__ __forceinline__ SwishGradient(const Arguments& from, int columns, float4* slots) : biases(slots) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const int column = quad_column<kQuads>(i);
            float bias[4] = {};
            if (column < columns) load_aligned<4>(from.bias + column, bias), load_aligned<4>(from.gamma + column, gamma[i]);
            biases[i * blockDim.x] = make_float4(bias[0], bias[1], bias[2], bias[3]);
        }
    }
    template <typename Sums>
    __device__ __forceinline__ void make(
        const Arguments& from, uint32_t staged, int64_t row, int columns, float4 (&grad)[kQuads], Sums& sums) const {
        constexpr float kShare = 1.0f / kBlockSide;
        const bool exists = quad_column<kQuads>(0) < columns;
        float given[kQuads][4] = {}, v[kQuads][4] = {}, slopes[kQuads][4];
        float mean = 0, grad_mean = 0, rest = 0, squares = 0, co = 0;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const int column = quad_column<kQuads>(i);
            const float4 own = biases[i * blockDim.x];
            const float bias[4] = {own.x, own.y, own.z, own.w};
            if (exists) {
                shared_load(staged + column * 4, given[i]);
                shared_load(staged + (columns + column) * 4, v[i]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[i][j] = activate_and_differentiate(v[i][j], bias[j], slopes[i][j]);
                mean = fmaf(v[i][j], kShare, mean);
                grad_mean = fmaf(gamma[i][j] * given[i][j], kShare, grad_mean);
            }
        }
        mean = sum_across_lanes<kLanes>(mean), grad_mean = sum_across_lanes<kLanes>(grad_mean);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[i][j] -= mean;
                rest += v[i][j];
                squares = fmaf(v[i][j], v[i][j], squares);
                co = fmaf(v[i][j], fmaf(gamma[i][j], given[i][j], -grad_mean), co);
            }
        }
        rest = sum_across_lanes<kLanes>(rest) * kShare, squares = sum_across_lanes<kLanes>(squares) * kShare;
        const float rstd = reciprocal_sqrt(squares + from.eps);
        const float slope = rstd * (rstd * (sum_across_lanes<kLanes>(co) * kShare)), shift = -rest * rstd;
        grad_mean = fmaf(-rest, slope, grad_mean);
        if (exists && threadIdx.x % kLanes == 0) {
            __stcs(from.groups + row * (columns / kBlockSide) + threadIdx.x / kLanes, make_float4(mean, rstd, grad_mean, slope));
        }
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            float out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float grad_v = rstd * fmaf(-v[i][j], slope, fmaf(gamma[i][j], given[i][j], -grad_mean));
                out[j] = exists ? grad_v * slopes[i][j] : 0.0f;
                sums[i][kGradientSums][j] += grad_v;
                sums[i][kGradientSums + 1][j] = fmaf(given[i][j], fmaf(v[i][j], rstd, shift), sums[i][kGradientSums + 1][j]);
                sums[i][kGradientSums + 2][j] += given[i][j];
            }
            grad[i] = make_float4(out[0], out[1], out[2], out[3]);
        }
    }
};

// grad, h (m, n) of n / 64 groups, 16-byte aligned as the vectors are; groups: four floats for each group of each row, for a GroupGradientReader.
// workspace: as of product_split_gradient; partials: as many bytes, 0 if n is too large. to: the gradients of the linear layer's bias, of bias,
// gamma and beta, each null if it is not wanted.
extern "C" int64_t linear_swish_group_norm_partials(int64_t m, int64_t n) {
    Device device;
    if (current_device(&device) != cudaSuccess || n > kGradientBlock * SwishGradient::kQuads * 4) return 0;
    return partials_bytes<SwishGradient>(m, n, device);
}
extern "C" int linear_swish_group_norm_split(const float* grad, const float* h, const float* bias, const float* gamma, float* groups,
    float* const* to, int64_t m, int64_t n, double eps, bool tf32, void* workspace, void* partials, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const auto launch = tf32 ? launch_split_gradient<1, SwishGradient> : launch_split_gradient<2, SwishGradient>;
    return launch({grad, h, bias, gamma, reinterpret_cast<float4*>(groups), float(eps)}, {{to[0], to[1], to[2], to[3]}}, m, n, workspace,
        partials, device, stream);
}
#else
// --- shared: without tensor cores (home: kernels/linear_swish_group_norm.py) ---
// CUDA 11 knows neither wgmma nor TMA: all products are ATen's. These say so; of those that nobody calls then there are the names.
extern "C" int64_t product_bytes() { return -1; }
extern "C" int64_t frozen_bytes() { return 0; }
extern "C" bool product_gradient_bytes() { return false; }
extern "C" bool product_of_halves_fits() { return false; }
extern "C" int product_forward() { return cudaErrorNotSupported; }
extern "C" int product_of_halves() { return cudaErrorNotSupported; }
extern "C" int freeze_weight() { return cudaErrorNotSupported; }
extern "C" int product_split_gradient() { return cudaErrorNotSupported; }
extern "C" int product_gradient() { return cudaErrorNotSupported; }
// --- end shared: without tensor cores ---
extern "C" int64_t linear_swish_group_norm_partials() { return 0; }
extern "C" int linear_swish_group_norm_forward() { return cudaErrorNotSupported; }
extern "C" int linear_swish_group_norm_split() { return cudaErrorNotSupported; }
#endif

// ---------------------------------------------------------------------------------------------------------------------------------
// The backward. With v = activate(h, operands), normal = (v - mean) * rstd and w = gamma * grad, sums and means over a slice:
//     grad_v = rstd * ((w - mean(w)) - normal * slope),   slope = mean((w - mean(w)) * normal)

// The gradient of h from v's, and the operands' from it.
template <typename A>
__device__ __forceinline__ A differentiate(A h, const A (&)[kOperands], A, A grad_v, A (&grad_operand)[kOperands]) {
    const A gate = sigmoid(h);
    grad_operand[0] = grad_v;
    return grad_v * (gate * (A(1) + h * (A(1) - gate)));
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

constexpr int kGradientBlocks = 2;  // an SM, of kMaxGroup threads
constexpr int kGradientRounds = 4;  // of blocks: a thread's sum of many samples in float32 would lose what sum_rows keeps
// Channels of one pixel, slices that fit: they wait in registers, and h and grad are read once. `group` threads (a power of two) own a
// slice, each ITEMS packs of it, and the same packs of the slices `stride`, 2 * `stride`, ... further on, ROWS at a time: `stride` is a
// multiple of the groups, so the channels are the same, and the thread adds up their gradients.
template <typename T, int V> constexpr int kGradientPacks = V == 1 ? 4 : 32 / (V * sizeof(Acc<T>));
template <typename T, int V> constexpr int kGradientRows = V == 1 || sizeof(T) == 8 ? 1 : 2 / kOperands;

template <typename T, int V, int ITEMS, int ROWS>
__global__ void __launch_bounds__(kMaxGroup, ITEMS > kGradientPacks<T, V> || sizeof(T) == 8 ? 1 : kGradientBlocks) gradients_in_registers(
    const T* __restrict__ grad, const T* __restrict__ h, T* __restrict__ grad_h, Vectors<Acc<T>> vectors, Partials<Acc<T>> partials,
    Sizes sizes, int64_t stride, Acc<T> eps, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[3 * ROWS][kMaxGroup / 32];
    const int n = int(sizes.n), lane = threadIdx.x % group;
    const int64_t first = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
    const int packs = first < stride ? n / V : 0, channel = first_channel(first, sizes);
    const A share = reciprocal(A(n));  // multiplied in before the sum, so that large values do not overflow it
    const auto mine = [&](int i) { return lane + i * group < packs; };

    A operand[kOperands][ITEMS][V], gamma[ITEMS][V], sums[kSums][ITEMS][V] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (mine(i)) {
#pragma unroll
            for (int k = 0; k < kOperands; ++k) load_aligned<V>(vectors.operand[k] + channel + (lane + i * group) * V, operand[k][i]);
            load_aligned<V>(vectors.gamma + channel + (lane + i * group) * V, gamma[i]);
        }
    }
    for (int64_t skipped = 0; skipped < sizes.slices; skipped += ROWS * stride) {
        const auto slice = [&](int r) { return first + skipped + r * stride; };
        Pack<T, V> raw[ROWS][ITEMS], raw_grad[ROWS][ITEMS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                raw[r][i] = raw_grad[r][i] = Pack<T, V>();
                const int64_t at = slice(r) * n + (lane + i * group) * V;
                if (mine(i) && slice(r) < sizes.slices) {
                    raw[r][i] = load_streaming<T, V>(h + at);
                    raw_grad[r][i] = load_streaming<T, V>(grad + at);
                }
            }
        }
        A v[ROWS][ITEMS][V], means[2 * ROWS] = {};  // of v, of the weighted gradient
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (mine(i)) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        A own[kOperands];
#pragma unroll
                        for (int k = 0; k < kOperands; ++k) own[k] = operand[k][i][j];
                        v[r][i][j] = activate(to_acc(raw[r][i].value[j]), own);
                        means[r] += v[r][i][j] * share;
                        means[ROWS + r] += gamma[i][j] * to_acc(raw_grad[r][i].value[j]) * share;
                    }
                }
            }
        }
        sum_across_group(means, group, warp_sums);
        A rest[3 * ROWS] = {};  // deviations from the rounded mean, their squares, and their products with the weighted gradient
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (mine(i)) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        const A deviation = v[r][i][j] - means[r];
                        rest[r] += deviation;
                        rest[ROWS + r] += deviation * deviation;
                        rest[2 * ROWS + r] += deviation * (gamma[i][j] * to_acc(raw_grad[r][i].value[j]) - means[ROWS + r]);
                    }
                }
            }
        }
        sum_across_group(rest, group, warp_sums);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Moments<A> m;
            m.hi = means[r];
            m.lo = rest[r] * share;
            m.m2 = rest[ROWS + r];
            const Scale<A> scale(m, A(n), eps);
            const A slope = scale.rstd * (rest[2 * ROWS + r] * share);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                if (mine(i) && slice(r) < sizes.slices) {
                    Pack<T, V> out;
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        A own[kOperands], grad_operand[kOperands];
#pragma unroll
                        for (int k = 0; k < kOperands; ++k) own[k] = operand[k][i][j];
                        const A given = to_acc(raw_grad[r][i].value[j]), normal = ((v[r][i][j] - scale.hi) - scale.lo) * scale.rstd;
                        const A grad_v = scale.rstd * ((gamma[i][j] * given - means[ROWS + r]) - normal * slope);
                        from_acc(differentiate(to_acc(raw[r][i].value[j]), own, v[r][i][j], grad_v, grad_operand), out.value[j]);
#pragma unroll
                        for (int k = 0; k < kOperands; ++k) sums[k][i][j] += grad_operand[k];
                        sums[kOperands][i][j] += given * normal;
                        sums[kOperands + 1][i][j] += given;
                    }
                    if (grad_h != nullptr) store_streaming(grad_h + slice(r) * n + (lane + i * group) * V, out);
                }
            }
        }
    }
    const int64_t row = quotient(first, int64_t(sizes.groups)) * sizes.groups * sizes.channels;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (mine(i) && partials.to[k] != nullptr) {
                A* to = partials.from[k] + row + channel + (lane + i * group) * V;
#pragma unroll
                for (int j = 0; j < V; ++j) to[j] = sums[k][i][j];
            }
        }
    }
}

template <typename T> struct GradientsInRegisters {
    bool whole_packs, is_short, fit;
    int group = 1;
    int64_t partial_rows, stride;
    GradientsInRegisters(const Sizes& sizes, int sms) {
        constexpr int V = kPack<T>;
        whole_packs = sizes.n % V == 0;
        const int64_t packs = whole_packs ? sizes.n / V : sizes.n, samples = sizes.slices / sizes.groups;
        const int items = whole_packs ? kGradientPacks<T, V> : kGradientPacks<T, 1>, bytes = int(sizeof(T)) * (whole_packs ? V : 1);
        is_short = packs <= kMaxGroup * items;
        fit = sizes.spatial == 1 && packs <= kMaxGroup * items * (whole_packs ? 2 : 1);
        while (group < 32 && group < packs && group * bytes < 128) group *= 2;
        while (group < kMaxGroup && group * items * (is_short ? 1 : 2) < packs) group *= 2;
        const int64_t wanted = int64_t(kGradientBlocks * kGradientRounds) * sms * (kMaxGroup / group) / sizes.groups;
        partial_rows = wanted < 1 ? 1 : wanted < samples ? wanted : samples;
        stride = partial_rows * sizes.groups;
    }
    template <int V> void launch_packs(const T* grad, const T* h, T* grad_h, const Vectors<Acc<T>>& vectors,
        const Partials<Acc<T>>& partials, const Sizes& sizes, double eps, cudaStream_t stream) const {
        constexpr int kItems = kGradientPacks<T, V>;
        auto kernel = gradients_in_registers<T, V, kItems, kGradientRows<T, V>>;
        if constexpr (V > 1) {
            if (!is_short) kernel = gradients_in_registers<T, V, 2 * kItems, 1>;
        }
        const unsigned blocks = unsigned(divide_up(stride, kMaxGroup / group));
        kernel<<<blocks, kMaxGroup, 0, stream>>>(grad, h, grad_h, vectors, partials, sizes, stride, Acc<T>(eps), group);
    }
    template <typename... Arguments> void launch(const Arguments&... arguments) const {
        whole_packs ? launch_packs<kPack<T>>(arguments...) : launch_packs<1>(arguments...);
    }
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
"""

CPP_SOURCE = r"""
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#include <torch/version.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
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

// What values of h become before the norm: Swish, then the bias. `to` may be `h`.
constexpr int kOperands = 1;
template <typename A> [[gnu::noinline]] void activate(const A* h, const std::array<const A*, kOperands>& operand, A* to, int64_t n) {
    const A* bias = operand[0];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = sigmoid(h[i]) * h[i] + bias[i];
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

template <auto forward> at::Tensor swish_group_norm(
    const at::Tensor& h, const at::Tensor& bias, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    return forward(h, {bias}, weight, group_bias, groups, eps);
}

// --- shared: product in C++ (home: kernels/linear_swish_group_norm.py) ---
using LinearNeeds = std::array<bool, 3>;  // the gradients of x, weight and bias

#ifdef WITH_CUDA
extern "C" int64_t product_bytes(int64_t m, int64_t n, int64_t k, bool tf32, bool frozen);
extern "C" int product_forward(
    const float* x, const float* weight, const float* bias, float* h, int64_t m, int64_t n, int64_t k, bool tf32, bool recorded,
    void* workspace, const void* frozen, cudaStream_t stream);
extern "C" bool product_of_halves_fits(int64_t m, int64_t n, int64_t k);
extern "C" int product_of_halves(
    int dtype, const void* x, const void* weight, const void* bias, void* h, int64_t m, int64_t n, int64_t k, cudaStream_t stream);
extern "C" int64_t frozen_bytes(int64_t n, int64_t k, bool tf32);
extern "C" int freeze_weight(const float* weight, int64_t n, int64_t k, bool tf32, void* frozen, cudaStream_t stream);
extern "C" bool product_gradient_bytes(int64_t m, int64_t n, int64_t k, bool tf32, int64_t* bytes);
extern "C" int product_split_gradient(
    const float* grad, float* grad_bias, int64_t m, int64_t n, bool tf32, void* workspace, void* partials, cudaStream_t stream);
extern "C" int product_gradient(bool of_weight, const float* const* grad, const float* other, float* out, int64_t m, int64_t n, int64_t k,
    bool tf32, void* split_workspace, void* workspace, cudaStream_t stream);

// Whether the user allows TF32 in matrix products: cuBLAS's own question.
bool tf32_is_allowed() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
#elif TORCH_VERSION_MINOR == 9
    return at::globalContext().float32Precision("cuda", "matmul") == "tf32";
#else
    return at::globalContext().allowTF32CuBLAS();
#endif
}

// A weight split once (`freeze`), and what it was when it was split: its version and its address.
struct Frozen {
    c10::optional<at::Tensor> split;
    at::IntArrayRef stamp;

    // The split, where it is of this weight as it is now, and of the precision; else null.
    const void* of(const at::Tensor& weight, bool tf32) const {
        const bool same = split && stamp.size() == 2 && !weight.is_inference() && stamp[0] == int64_t(weight._version()) &&
            stamp[1] == int64_t(reinterpret_cast<uintptr_t>(weight.data_ptr())) && split->device() == weight.device() &&
            split->numel() == frozen_bytes(weight.size(0), weight.size(1), tf32) && weight.is_contiguous();
        return same ? split->data_ptr() : nullptr;
    }
};

// x W^T + bias, on the tensor cores where they pay.
at::Tensor linear_on_cuda(
    const at::Tensor& x, const at::Tensor& weight, const c10::optional<at::Tensor>& bias, bool recorded, const Frozen& frozen = {}) {
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    const bool tf32 = tf32_is_allowed(), single = x.scalar_type() == at::kFloat;
    const void* const split = single ? frozen.of(weight, tf32) : nullptr;
    const bool halves_fit = x.element_size() == 2 && product_of_halves_fits(m, n, k);
    const int64_t bytes = single ? product_bytes(m, n, k, tf32, split != nullptr) : halves_fit ? 0 : -1;
    if (bytes < 0 || (bytes == 0 && !weight.is_contiguous())) return at::linear(x, weight, bias);  // not worth a copy of W
    const at::Tensor rows = aligned(x), columns = aligned(weight), offset = bias ? aligned(*bias) : at::zeros({n}, x.options());
    const at::Tensor workspace = workspace_of(bytes, x);
    at::Tensor h = at::empty({m, n}, x.options());
    const int error = single
        ? product_forward(rows.data_ptr<float>(), columns.data_ptr<float>(), offset.data_ptr<float>(), h.data_ptr<float>(), m, n, k, tf32,
              recorded, workspace.data_ptr(), split, current_stream())
        : product_of_halves(dtype_number(x, "linear"), rows.data_ptr(), columns.data_ptr(), offset.data_ptr(), h.data_ptr(), m, n, k,
              current_stream());
    check_launch(error, "linear");
    return h;
}

// The gradients of x and weight, where they are needed, from the output's, split. grad: as product_gradient's. sizes: product_gradient_bytes.
int products_of_split(const float* const* grad, const at::Tensor& split, const at::Tensor& x, const at::Tensor& weight, bool tf32,
    const int64_t* sizes, const LinearNeeds& needs, at::Tensor* results) {
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    int error = 0;
    for (const bool of_weight : {m > n, m <= n}) {  // the second has the first's result beside it: the larger operand is split first
        if (error != 0 || !needs[of_weight]) continue;
        const at::Tensor other = aligned(of_weight ? x : weight), workspace = workspace_of(sizes[2 + of_weight], x);
        results[of_weight] = at::empty({of_weight ? n : m, k}, x.options());  // not sooner: the other one's workspace may be used again
        error = product_gradient(of_weight, grad, other.data_ptr<float>(), results[of_weight].data_ptr<float>(), m, n, k, tf32,
            split.data_ptr(), workspace.data_ptr(), current_stream());
    }
    return error;
}
#endif

// Of x (m, k), weight (n, k) and, where there is one, bias (n), all float32, float16 or bfloat16.
void check_linear(const at::Tensor& x, const at::Tensor& weight, const c10::optional<at::Tensor>& bias) {
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.sym_size(1) == weight.sym_size(1), "linear: x (m, k) and weight (n, k) are wanted");
    TORCH_CHECK(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), "linear: for weight (n, k) bias (n) is wanted");
    const at::ScalarType type = x.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, "linear: float32, float16 and bfloat16, not ", type);
    for (const at::Tensor& t : {weight, bias.value_or(x)}) {
        TORCH_CHECK(t.scalar_type() == type, "linear: x is ", type, ", but weight or bias ", t.scalar_type());
        TORCH_CHECK(t.device() == x.device(), "linear: x on ", x.device(), ", but weight or bias on ", t.device());
    }
}
at::Tensor linear_cpu(const at::Tensor& x, const at::Tensor& weight, const c10::optional<at::Tensor>& bias, bool,
    const c10::optional<at::Tensor>&, at::IntArrayRef) {
    check_linear(x, weight, bias);
    const c10::impl::ExcludeDispatchKeyGuard in_float32(c10::autocast_dispatch_keyset);
    return at::linear(x, weight, bias);
}
at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight, const c10::optional<at::Tensor>& bias, bool,
    const c10::optional<at::Tensor>&, at::IntArrayRef) {
    check_linear(x, weight, bias);
    return at::empty_symint({x.sym_size(0), weight.sym_size(0)}, x.options());
}

// The gradients from the output's, grad (m, n). One that is not needed comes back without elements.
std::vector<at::Tensor> linear_gradients_meta(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, LinearNeeds needs) {
    check_linear(x, weight, c10::nullopt);
    TORCH_CHECK(grad.dim() == 2 && grad.sym_size(0) == x.sym_size(0) && grad.sym_size(1) == weight.sym_size(0),
        "linear: the gradient must have the shape of the output");
    TORCH_CHECK(grad.scalar_type() == x.scalar_type() && grad.device() == x.device(),
        "linear: the gradient must be ", x.scalar_type(), ", on ", x.device());
    const auto result = [&](bool need, c10::SymIntArrayRef size) {
        return need ? at::empty_symint(size, x.options()) : at::empty({0}, x.options());
    };
    return {result(needs[0], x.sym_sizes()), result(needs[1], weight.sym_sizes()), result(needs[2], weight.sym_sizes().slice(0, 1))};
}
std::vector<at::Tensor> linear_gradients_cpu(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, LinearNeeds needs) {
    std::vector<at::Tensor> results = linear_gradients_meta(grad, x, weight, {false, false, false});
    const c10::impl::ExcludeDispatchKeyGuard in_float32(c10::autocast_dispatch_keyset);
    if (needs[0]) results[0] = at::mm(grad, weight);
    if (needs[1]) results[1] = at::mm(grad.t(), x);
    if (needs[2]) results[2] = at::sum(grad, {0});
    return results;
}
#ifdef WITH_CUDA
at::Tensor linear_cuda(const at::Tensor& x, const at::Tensor& weight, const c10::optional<at::Tensor>& bias, bool recorded,
    const c10::optional<at::Tensor>& frozen, at::IntArrayRef stamp) {
    check_linear(x, weight, bias);
    const c10::cuda::CUDAGuard guard(x.device());
    const c10::impl::ExcludeDispatchKeyGuard in_float32(c10::autocast_dispatch_keyset);
    return linear_on_cuda(x, weight, bias, recorded, {frozen, stamp});
}
std::vector<at::Tensor> linear_gradients_cuda(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, LinearNeeds needs) {
    const c10::cuda::CUDAGuard guard(x.device());
    const c10::impl::ExcludeDispatchKeyGuard in_float32(c10::autocast_dispatch_keyset);
    std::vector<at::Tensor> results = linear_gradients_meta(grad, x, weight, {false, false, needs[2]});
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    const bool tf32 = tf32_is_allowed();
    int64_t sizes[4];
    if (x.scalar_type() != at::kFloat || !product_gradient_bytes(m, n, k, tf32, sizes)) {
        if (needs[0]) results[0] = linear_on_cuda(grad, weight.t(), c10::nullopt, false);
        if (needs[1]) results[1] = linear_on_cuda(grad.t(), x.t(), c10::nullopt, false);
        if (needs[2]) results[2] = at::sum(grad, {0});
        return results;
    }
    const at::Tensor given = aligned(grad), split = workspace_of(sizes[0], x);
    int error = product_split_gradient(given.data_ptr<float>(), needs[2] ? results[2].data_ptr<float>() : nullptr, m, n, tf32,
        split.data_ptr(), workspace_of(sizes[1], x).data_ptr(), current_stream());
    const float* const from[2] = {given.data_ptr<float>(), nullptr};
    if (error == 0) error = products_of_split(from, split, x, weight, tf32, sizes, needs, results.data());
    check_launch(error, "linear");
    return results;
}
// The split of weight (n, k), for the precision that is set now, as bytes; none where it would not be used.
at::Tensor freeze_cuda(const at::Tensor& weight) {
    check_linear(weight, weight, c10::nullopt);
    const c10::cuda::CUDAGuard guard(weight.device());
    const bool tf32 = tf32_is_allowed();
    const bool splits = weight.is_contiguous() && weight.scalar_type() == at::kFloat;
    const int64_t n = weight.size(0), k = weight.size(1), bytes = splits ? frozen_bytes(n, k, tf32) : 0;
    at::Tensor split = workspace_of(bytes, weight);
    if (bytes == 0) return split;
    const at::Tensor ready = aligned(weight);
    const int error = freeze_weight(ready.data_ptr<float>(), n, k, tf32, split.data_ptr(), current_stream());
    check_launch(error, "freeze");
    return split;
}
#endif
// --- end shared: product in C++ ---

// The network from x (m, k) on. In one kernel where a group is 64 features and the product is for the tensor cores, else in two. With `keep`
// the product's h comes back too, for a backward; else a tensor without elements.
void check_fused(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias, const at::Tensor& bias, const at::Tensor& gamma,
    const at::Tensor& beta, int64_t groups) {
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.sym_size(1) == weight.sym_size(1),
        "linear_swish_group_norm: x (m, k) and weight (n, k) are wanted");
    for (const at::Tensor& t : {linear_bias, bias, gamma, beta}) {
        TORCH_CHECK(t.dim() == 1 && t.sym_size(0) == weight.sym_size(0), "linear_swish_group_norm: of each vector one value a feature is wanted");
    }
    for (const at::Tensor& t : {weight, linear_bias, bias, gamma, beta}) {
        TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.device() == x.device(),
            "linear_swish_group_norm: x is ", x.scalar_type(), " on ", x.device(), ", but there is ", t.scalar_type(), " on ", t.device());
    }
    TORCH_CHECK(groups > 0, "group_norm: num_groups must be greater than 0");
    TORCH_CHECK(weight.sym_size(0) % groups == 0, "group_norm: the number of channels must be divisible by num_groups");
}
std::tuple<at::Tensor, at::Tensor> linear_swish_group_norm_cpu(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias, const at::Tensor& bias, const at::Tensor& gamma,
    const at::Tensor& beta, int64_t groups, double eps, bool keep, const c10::optional<at::Tensor>&,
    at::IntArrayRef) {
    check_fused(x, weight, linear_bias, bias, gamma, beta, groups);
    const c10::impl::ExcludeDispatchKeyGuard as_it_is(c10::autocast_dispatch_keyset);
    const at::Tensor h = at::linear(x, weight, linear_bias), out = forward_on_cpu(h, {bias}, gamma, beta, groups, eps);
    return {out, keep ? h : at::empty({0}, x.options())};
}
std::tuple<at::Tensor, at::Tensor> linear_swish_group_norm_meta(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias, const at::Tensor& bias, const at::Tensor& gamma,
    const at::Tensor& beta, int64_t groups, double, bool keep, const c10::optional<at::Tensor>&, at::IntArrayRef) {
    check_fused(x, weight, linear_bias, bias, gamma, beta, groups);
    const at::Tensor out = at::empty_symint({x.sym_size(0), weight.sym_size(0)}, x.options());
    return {out, keep ? at::empty_like(out) : at::empty({0}, x.options())};
}
#ifdef WITH_CUDA
extern "C" int linear_swish_group_norm_forward(int dtype, const void* const* from, void* out, float* h, int64_t m, int64_t n, int64_t k,
    double eps, bool tf32, void* workspace, const void* frozen, cudaStream_t stream);

std::tuple<at::Tensor, at::Tensor> linear_swish_group_norm_cuda(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& linear_bias, const at::Tensor& bias, const at::Tensor& gamma,
    const at::Tensor& beta, int64_t groups, double eps, bool keep, const c10::optional<at::Tensor>& frozen, at::IntArrayRef stamp) {
    check_fused(x, weight, linear_bias, bias, gamma, beta, groups);
    const c10::cuda::CUDAGuard guard(x.device());
    const c10::impl::ExcludeDispatchKeyGuard as_it_is(c10::autocast_dispatch_keyset);
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    const bool tf32 = tf32_is_allowed(), single = x.scalar_type() == at::kFloat, slabs = n == groups * 64;
    const int dtype = dtype_number(x, "linear_swish_group_norm");
    const Frozen known = {frozen, stamp};
    const void* const split = single && slabs ? known.of(weight, tf32) : nullptr;
    const int64_t bytes = single && slabs ? product_bytes(m, n, k, tf32, split != nullptr) : -1;
    if (bytes < 0 && !(slabs && !keep && dtype >= 2 && product_of_halves_fits(m, n, k))) {
        const at::Tensor h = linear_on_cuda(x, weight, linear_bias, keep, known);
        return {forward_on_cuda(h, {bias}, gamma, beta, groups, eps), keep ? h : at::empty({0}, x.options())};
    }
    const std::array<at::Tensor, 6> ready = {aligned(x), aligned(weight), aligned(linear_bias), aligned(bias), aligned(gamma), aligned(beta)};
    const void* from[6];
    for (int i = 0; i < 6; ++i) from[i] = ready[i].data_ptr();
    const at::Tensor workspace = workspace_of(std::max<int64_t>(bytes, 0), x);
    at::Tensor out = at::empty({m, n}, x.options()), h = at::empty({keep ? m : 0, n}, x.options());
    const int error = linear_swish_group_norm_forward(dtype, from, out.data_ptr(), keep ? h.data_ptr<float>() : nullptr, m, n, k, eps, tf32,
        workspace.data_ptr(), split, current_stream());
    check_launch(error, "linear_swish_group_norm");
    return {out, h};
}
#endif

// ---- The backward.

// The gradients of h and of the operands from v's, at n values.
template <typename A>
[[gnu::noinline]] void differentiate(const A* h, const std::array<const A*, kOperands>&, const A*, const A* grad_v, A* grad_h,
    const std::array<A*, kOperands>& grad_operand, int64_t n) {
    A* grad_bias = grad_operand[0];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const A gate = sigmoid(h[i]);
        grad_bias[i] = grad_v[i];
        grad_h[i] = grad_v[i] * (gate * (1 + h[i] * (1 - gate)));
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

// Channels of one pixel.
template <typename A> struct VectorDifferentiator : Differentiator<A> {
    using Base = Differentiator<A>;
    using Base::Base, Base::h, Base::grad, Base::vectors, Base::sizes, Base::eps, Base::raw, Base::given, Base::v, Base::normal,
        Base::grad_v, Base::of_operand, Base::activated, Base::finish;

    // Samples [first, last), whose sums are added to `sums`, kSums vectors of one value a channel.
    void samples(int64_t first, int64_t last, double* sums, const std::array<bool, kSums>& wanted) {
        const int64_t channels = sizes.groups * sizes.channels, n = sizes.n;
        std::vector<A> recent(kSums * channels, A(0));  // a few samples' sums, or float's roundings would add up
        for (int64_t sample = first; sample < last; ++sample) {
            for (int64_t group = 0; group < sizes.groups; ++group) one_slice(sample * channels, group * n, recent.data(), channels, wanted);
            if ((sample - first) % 64 != 63 && sample + 1 < last) continue;
            for (int64_t i = 0; i < kSums * channels; ++i) sums[i] += recent[i], recent[i] = 0;
        }
    }
    [[gnu::noinline]] void one_slice(int64_t at, int64_t channel, A* sums, int64_t channels, const std::array<bool, kSums>& wanted) {
        const int64_t n = sizes.n;
        std::array<const A*, kOperands> operand;
        Joint joint;
        for (int64_t c = channel; c < channel + n; c += kBlock) {
            const int64_t count = std::min(kBlock, channel + n - c);
            activated(h.read(at + c, count, raw), c, count, operand);
            const A *grads = grad.read(at + c, count, given), *gamma = vectors.gamma + c;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) grad_v[i] = gamma[i] * grads[i];
            joint.merge(block_joint(v, grad_v, count));
        }
        SliceGradient<A> slice(joint.v, eps);
        slice.mean = static_cast<A>(joint.sum / n);
        slice.slope = static_cast<A>(slice.rstd * joint.co / n);
        for (int64_t c = channel; c < channel + n; c += kBlock) {
            const int64_t count = std::min(kBlock, channel + n - c);
            const A *values = h.read(at + c, count, raw), *grads = grad.read(at + c, count, given), *gamma = vectors.gamma + c;
            if (n > kBlock) activated(values, c, count, operand);  // or else v has them still
            finish(slice, values, grads, [&](int64_t i) { return gamma[i]; }, operand, at + c, count);
            for (int k = 0; k < kOperands; ++k) {
                A* sum = sums + k * channels + c;
                if (wanted[k]) {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) sum[i] += of_operand[k][i];
                }
            }
            A *gamma_sum = sums + kOperands * channels + c, *beta_sum = gamma_sum + channels;
            if (wanted[kOperands] || wanted[kOperands + 1]) {
#pragma omp simd
                for (int64_t i = 0; i < count; ++i) gamma_sum[i] += grads[i] * normal[i], beta_sum[i] += grads[i];
            }
        }
    }
};

template <typename A> void backward_of_vectors(const Values<A>& grad, const Values<A>& h, const Values<A>& grad_h,
    const Vectors<A>& vectors, const Sizes& sizes, double eps, const std::array<bool, kSums>& wanted, double* sums) {
    const int64_t samples = sizes.slices / sizes.groups, channels = sizes.groups * sizes.channels;
    const int64_t chunks = std::min<int64_t>(samples, 64), chunk = (samples + chunks - 1) / chunks;
    std::vector<double> partial(chunks * kSums * channels);
    in_parallel(chunks, std::max<int64_t>(1, 16384 / (chunk * channels)), [&](int64_t begin, int64_t end) {
        VectorDifferentiator<A> own(grad, h, grad_h, vectors, sizes, eps);
        for (int64_t c = begin; c < end; ++c) {
            own.samples(c * chunk, std::min(samples, (c + 1) * chunk), partial.data() + c * kSums * channels, wanted);
        }
    });
    for (int64_t c = 0; c < chunks; ++c) {
        for (int64_t i = 0; i < kSums * channels; ++i) sums[i] += partial[c * kSums * channels + i];
    }
}
template <typename A> auto backward_for(const Sizes& sizes) { return sizes.spatial == 1 ? backward_of_vectors<A> : backward_of_images<A>; }

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

template <auto backward> std::vector<at::Tensor> swish_group_norm_backward(const at::Tensor& grad, const at::Tensor& h,
    const at::Tensor& bias, const at::Tensor& weight, int64_t groups, double eps, Needs needs) {
    return backward(grad, h, {bias}, weight, groups, eps, needs);
}

// The gradients of x, weight, linear_bias, bias, gamma and beta, from the network's output's and the h that `fused` kept.
using AllNeeds = std::array<bool, 6>;
template <auto norm_backward, auto linear_gradients> std::vector<at::Tensor> linear_swish_group_norm_backward(const at::Tensor& grad,
    const at::Tensor& h, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& gamma, int64_t groups,
    double eps, AllNeeds needs) {
    const bool any = needs[0] || needs[1] || needs[2];
    std::vector<at::Tensor> norm = norm_backward(grad, h, {bias}, gamma, groups, eps, {any, needs[3], needs[4], needs[5]});
    std::vector<at::Tensor> results(3, at::empty({0}, x.options()));
    if (any) results = linear_gradients(norm[0], x, weight, {needs[0], needs[1], needs[2]});
    results.insert(results.end(), norm.begin() + 1, norm.end());
    return results;
}
#ifdef WITH_CUDA
extern "C" int64_t linear_swish_group_norm_partials(int64_t m, int64_t n);
extern "C" int linear_swish_group_norm_split(const float* grad, const float* h, const float* bias, const float* gamma, float* groups,
    float* const* to, int64_t m, int64_t n, double eps, bool tf32, void* workspace, void* partials, cudaStream_t stream);

std::vector<at::Tensor> linear_swish_group_norm_backward_cuda(const at::Tensor& grad, const at::Tensor& h, const at::Tensor& x,
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& gamma, int64_t groups, double eps, AllNeeds needs) {
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t m = h.size(0), n = h.size(1), k = x.size(1);
    const bool tf32 = tf32_is_allowed();
    int64_t sizes[4], partials = 0;
    if (n == groups * 64 && (needs[0] || needs[1]) && product_gradient_bytes(m, n, k, tf32, sizes)) {
        partials = linear_swish_group_norm_partials(m, n);
    }
    if (partials == 0) {
        return linear_swish_group_norm_backward<backward_on_cuda, linear_gradients_cuda>(
            grad, h, x, weight, bias, gamma, groups, eps, needs);
    }
    linear_gradients_meta(grad, x, weight, {false, false, false});  // for its checks
    const at::Tensor given = aligned(grad), kept = aligned(h), offset = aligned(bias), scale = aligned(gamma);
    const at::Tensor split = workspace_of(sizes[0], x), of_groups = at::empty({m, groups, 4}, x.options());
    std::vector<at::Tensor> results(6);
    float* to[4];
    for (int i = 0; i < 6; ++i) {
        results[i] = at::empty({i >= 2 && needs[i] ? n : 0}, x.options());
        if (i >= 2) to[i - 2] = needs[i] ? results[i].data_ptr<float>() : nullptr;
    }
    const float* const from[5] = {given.data_ptr<float>(), kept.data_ptr<float>(), offset.data_ptr<float>(), scale.data_ptr<float>(),
                                  of_groups.data_ptr<float>()};
    int error = linear_swish_group_norm_split(from[0], from[1], from[2], from[3], of_groups.data_ptr<float>(), to, m, n, eps, tf32,
        split.data_ptr(), workspace_of(partials, x).data_ptr(), current_stream());
    if (error == 0) error = products_of_split(from, split, x, weight, tf32, sizes, {needs[0], needs[1], false}, results.data());
    check_launch(error, "linear_swish_group_norm");
    return results;
}
#endif

}  // namespace

// --- shared: product operators (home: kernels/linear_swish_group_norm.py) ---
TORCH_LIBRARY_FRAGMENT(NAMESPACE, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias, bool recorded=False, Tensor? frozen=None, int[] stamp=[]) -> Tensor");
    m.def("freeze(Tensor weight) -> Tensor");
    m.def("linear_gradients(Tensor grad, Tensor x, Tensor weight, bool[3] needs) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("linear", linear_cpu);
    m.impl("linear_gradients", linear_gradients_cpu);
}
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("linear", linear_meta);
    m.impl("linear_gradients", linear_gradients_meta);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("linear", linear_cuda);
    m.impl("freeze", freeze_cuda);
    m.impl("linear_gradients", linear_gradients_cuda);
}
#endif
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"linear", "linear_gradients"}) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}
// --- end shared: product operators ---

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor h, Tensor bias, Tensor weight, Tensor group_bias, int groups, float eps) -> Tensor");
    m.def("backward(Tensor grad, Tensor h, Tensor bias, Tensor weight, int groups, float eps, bool[4] needs) -> Tensor[]");
    m.def("fused(Tensor x, Tensor weight, Tensor linear_bias, Tensor bias, Tensor gamma, Tensor beta, int groups, float eps, bool keep=False, "
          "Tensor? frozen=None, int[] stamp=[]) -> (Tensor, Tensor)");
    m.def("fused_backward(Tensor grad, Tensor h, Tensor x, Tensor weight, Tensor bias, Tensor gamma, int groups, float eps, bool[6] needs) "
          "-> Tensor[]");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("forward", swish_group_norm<forward_on_cpu>);
    m.impl("backward", swish_group_norm_backward<backward_on_cpu>);
    m.impl("fused", linear_swish_group_norm_cpu);
    m.impl("fused_backward", linear_swish_group_norm_backward<backward_on_cpu, linear_gradients_cpu>);
}
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", swish_group_norm<forward_meta>);
    m.impl("backward", swish_group_norm_backward<backward_meta>);
    m.impl("fused", linear_swish_group_norm_meta);
    m.impl("fused_backward", linear_swish_group_norm_backward<backward_meta, linear_gradients_meta>);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", swish_group_norm<forward_on_cuda>);
    m.impl("backward", swish_group_norm_backward<backward_on_cuda>);
    m.impl("fused", linear_swish_group_norm_cuda);
    m.impl("fused_backward", linear_swish_group_norm_backward_cuda);
}
#endif
// Gradients are the business of the autograd.Functions below; whoever differentiates a bare operator, or in forward mode, is told.
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"forward", "backward", "fused", "fused_backward"}) {
        m.impl(name, torch::autograd::autogradNotImplementedFallback());
    }
}
"""

if os.environ.get("PORTABLE_PRODUCT") == "1":  # for tests: Hopper takes the other chips' loop
    CUDA_FLAGS.append("-DPORTABLE_PRODUCT=1")


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


NAMESPACE = _load("linear_swish_group_norm")
_linear, _linear_gradients, _freeze, _forward, _backward, _fused, _fused_backward = (
    getattr(getattr(torch.ops, NAMESPACE), name)
    for name in ("linear", "linear_gradients", "freeze", "forward", "backward", "fused", "fused_backward")
)


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


# --- shared: linear layer (home: kernels/linear_swish_group_norm.py) ---
def _is_fusible(linear: nn.Module, x: torch.Tensor, *vectors: torch.Tensor) -> bool:
    """Whether an operator of ours may stand for calling the module, and for what follows it with these vectors: all has x's dtype and the
    plain shapes, nothing is hung on the module or put in its place, and there is no autocast."""
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4: the question is asked of a device
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    else:
        autocast = torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()
    if type(linear) is not nn.Linear or "forward" in linear.__dict__ or autocast:
        return False
    own, everywhere = linear.__dict__, nn.modules.module.__dict__
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    if any(own[f"_{kind}"] or everywhere[f"_global_{kind}"] for kind in kinds):
        return False
    weight, dtype, device = linear.weight, x.dtype, x.device
    vectors = (linear.bias, *vectors)
    for t in (x, weight, *vectors):
        if type(t) not in (torch.Tensor, nn.Parameter) or t.dtype is not dtype or t.device != device:
            return False
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return False
    features = weight.shape[:1]
    return all(v.shape == features for v in vectors)


class Linear(torch.autograd.Function):
    """x W^T + b. Saves x and W."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias):
        return _linear(x, weight, bias, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # they are to be differentiated in turn
            return grad @ weight if needs[0] else None, grad.t() @ x if needs[1] else None, grad.sum(0) if needs[2] else None
        return tuple(own if need else None for own, need in zip(_linear_gradients(grad, x, weight, needs), needs))


def _apply(linear: nn.Module, x: torch.Tensor, frozen: tuple = ()) -> torch.Tensor:
    """linear(x), by our operator where it may stand for it. frozen: the operator's last two arguments."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not _is_fusible(linear, x):
        return linear(x)
    arguments = (x, linear.weight, linear.bias)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in arguments)
    return Linear.apply(*arguments) if needs_grad else _linear(*arguments, False, *frozen)


class Freezable(nn.Module):
    """Lets the weight of a module's linear layer be split once, for inference, instead of in every call."""

    _frozen: tuple = ()  # the split, and the weight's version and address
    _frozen_weight: torch.Tensor | None = None  # keeps that address from being used again

    def freeze_weight(self) -> None:
        """Split the linear layer's weight now; calls without gradients use that for as long as the weight stays as it is.

        It takes as much memory as the weight, and serves the precision that is set now. Whatever PyTorch counts as a change of the weight
        (an optimizer's step, `load_state_dict`, `copy_`), another tensor in its place or another precision, and each call splits the weight
        again; `freeze_weight` may then be called again. Writes through `.data` are not counted: call it after them. `train()`, `.to()` and
        its like drop the split, and copies and pickles have none. Nothing happens where a weight would not be split: on the CPU, on other
        chips than Hopper, in other dtypes than float32.

        RuntimeError: in training mode, and for a weight made under `torch.inference_mode`, whose changes nobody counts.
        """
        if self.training:
            raise RuntimeError("freeze_weight: the module is in training mode; call eval() first")
        self._thaw()
        weight = next(m for m in self.children() if isinstance(m, nn.Linear)).weight
        if type(weight) is not nn.Parameter or not weight.is_cuda or weight.dtype is not torch.float32:
            return
        stamp, split = [weight._version, weight.data_ptr()], _freeze(weight.detach())
        if split.numel() > 0:
            self._frozen, self._frozen_weight = (split, stamp), weight.detach()

    def _thaw(self) -> None:
        self.__dict__.pop("_frozen", None)
        self.__dict__.pop("_frozen_weight", None)

    def train(self, mode: bool = True):
        if mode:
            self._thaw()
        return super().train(mode)

    def _apply(self, *arguments, **options):
        self._thaw()
        return super()._apply(*arguments, **options)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("_frozen", "_frozen_weight")}
# --- end shared: linear layer ---


def _swish_group_norm(h, bias, weight, group_bias, groups: int, eps: float) -> torch.Tensor:
    """In ATen operators."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    wide, bias, weight, group_bias = (t.to(dtype) for t in (h, bias, weight, group_bias))
    return nn.functional.group_norm(wide.sigmoid() * wide + _spread(bias, h), groups, weight, group_bias, eps).to(h.dtype)


class SwishGroupNorm(torch.autograd.Function):
    """out = GroupNorm(sigmoid(h) * h + bias). Saves h and the vectors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, bias, weight, group_bias, groups, eps):
        return _forward(h, bias, weight, group_bias, groups, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        (h, bias, weight, _), needs, norm = ctx.saved_tensors, ctx.needs_input_grad[:4], (ctx.groups, ctx.eps)
        if torch.is_grad_enabled() or bias.dim() > 1:
            return *_differentiated(lambda *tensors: _swish_group_norm(*tensors, *norm), ctx.saved_tensors, grad, needs), None, None
        return *(own if need else None for own, need in zip(_backward(grad, h, bias, weight, *norm, needs), needs)), None, None


class LinearSwishGroupNorm(torch.autograd.Function):
    """The whole network and h, which it saves with x and the parameters. h is no one's to use: its own gradient is not asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, linear_weight, linear_bias, bias, weight, group_bias, groups, eps):
        return _fused(x, linear_weight, linear_bias, bias, weight, group_bias, groups, eps, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or h gets a gradient of zeros

    @staticmethod
    def backward(ctx, grad, _):
        *tensors, h = ctx.saved_tensors
        (x, linear_weight, _, bias, weight, _), needs, norm = tensors, ctx.needs_input_grad[:6], (ctx.groups, ctx.eps)
        if torch.is_grad_enabled():
            def network(x, linear_weight, linear_bias, *vectors):
                return _swish_group_norm(nn.functional.linear(x, linear_weight, linear_bias), *vectors, *norm)

            return *_differentiated(network, tensors, grad, needs), None, None
        found = _fused_backward(grad, h, x, linear_weight, bias, weight, *norm, needs)
        return *(own if need else None for own, need in zip(found, needs)), None, None


class ModelNew(Freezable):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features) of float64, float32, float16 or bfloat16, on the CPU or a CUDA device, in any memory layout; returns a
    contiguous (B, out_features). The errors of nn.Linear and nn.GroupNorm for other shapes. Beside the Model's methods: freeze_weight.
    """

    def __init__(self, in_features: int, out_features: int, num_groups: int, bias_shape: tuple):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, norm = self.matmul, self.group_norm
        vectors = (self.bias, norm.weight, norm.bias)  # once: a parametrised one is made when it is asked for
        fusible = x.dtype in (torch.float32, torch.float16, torch.bfloat16) and _is_fusible(linear, x, *vectors)
        if fusible and norm.num_groups < linear.weight.shape[0]:
            tensors = (x, linear.weight, linear.bias, *vectors)
            recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if not recorded:
                return _fused(*tensors, norm.num_groups, norm.eps, False, *self._frozen)[0]
            if x.dtype is torch.float32:
                return LinearSwishGroupNorm.apply(*tensors, norm.num_groups, norm.eps)[0]
        h, (bias,) = _as_operands(_apply(linear, x, self._frozen), vectors[:1])
        arguments = (h, bias, *_group_norm_arguments(norm, h, vectors[1:]))
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in arguments[:4])
        return _laid_out_as(SwishGroupNorm.apply(*arguments) if needs_grad else _forward(*arguments), h)
