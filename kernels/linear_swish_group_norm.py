"""A linear layer, then Swish, one more bias and group normalisation in one kernel: a drop-in for the Model of the same name.

    h = x W^T + b;    v = sigmoid(h) * h + bias;    out = (v - mean) * rstd * gamma + beta

`mean` and `rstd` are those of a slice, the features of one group of one row: rstd = 1 / sqrt(M2 / n + eps), M2 = sum((v - mean)^2). The
matrix product is `self.matmul`; all that follows it is one kernel. Every v is used twice, and where it waits depends on the slice:

    slice                     v waits in                                 traffic                            on
    up to 8192 values         registers of 1 to 256 threads              h read once, out written once      any GPU
    any                       nowhere                                    h read twice, out written once     any GPU

(4096 values in float64; 2048 where they do not come in whole packs of 16 bytes.) A thread that owns part of a short slice owns the same
part of one to three more rows: the bias, gamma and beta of its features are loaded once for all of them.

Arithmetic is in float32 (float64 for float64). Statistics never are E[v^2] - E[v]^2; the mean is carried as an unevaluated sum hi + lo, so
one far from zero costs no accuracy. Sums have a fixed order: the same input, the same bits.

The bias may have any shape that broadcasts: one value a feature is the fast way, anything else is read with one value for each of h's.
h may have more dimensions than two, as in GroupNorm. On the CPU each core takes whole slices, in blocks that stay in its first cache.
Gradients: first and higher order, in ATen operators.
"""

import contextlib
import fcntl
import hashlib
import inspect
import math
import os
import platform
import shlex
import shutil
import sys
import tempfile
import warnings

import torch
from torch import nn

CUDA_SOURCE = r"""
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

// Makes the compiler forget that it has converted this pack before, so that packs wait in registers as they came, not widened.
template <typename T, int V> __device__ __forceinline__ void keep_packed(Pack<T, V>& pack) {
    if constexpr (V * sizeof(T) == 16 && sizeof(T) < 4) {
        int4& words = *reinterpret_cast<int4*>(&pack);
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
}
// --- end shared: values ---

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

// One thread's running moments around its own first value: an anchor close to the mean keeps the deviations small, and one that is an
// outlier spoils this thread's share alone.
template <typename A> struct Accumulator {
    A anchor = 0, packs = 0, mean = 0, m2 = 0;  // mean and m2 are of value - anchor

    // Several packs at once are one merge, and sums that do not wait for each other.
    template <int N, typename T, int V> __device__ __forceinline__ void add(const Pack<T, V> (&batch)[N]) {
        if (packs == A(0)) anchor = to_acc(batch[0].value[0]);
        A sums[N] = {}, squares[N] = {}, sum = 0, square = 0;
#pragma unroll
        for (int p = 0; p < N; ++p) {
#pragma unroll
            for (int i = 0; i < V; ++i) sums[p] += to_acc(batch[p].value[i]) - anchor;
        }
#pragma unroll
        for (int p = 0; p < N; ++p) sum += sums[p];
        const A batch_mean = sum * (A(1) / (N * V));
#pragma unroll
        for (int p = 0; p < N; ++p) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const A deviation = (to_acc(batch[p].value[i]) - anchor) - batch_mean;
                squares[p] += deviation * deviation;
            }
        }
#pragma unroll
        for (int p = 0; p < N; ++p) square += squares[p];
        const A delta = batch_mean - mean, weight = reciprocal(packs + A(N));
        mean += delta * (A(N) * weight);
        m2 += square + delta * delta * (packs * weight * (N * V));
        packs += A(N);
    }
    template <typename T, int V> __device__ __forceinline__ void add(const Pack<T, V>& pack) {
        const Pack<T, V> batch[1] = {pack};
        add(batch);
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

// Of a single value.
template <typename A> __device__ __forceinline__ Moments<A> moments_of(A value) {
    Moments<A> r;
    r.count = 1;
    r.hi = value;
    return r;
}

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

// --- end shared: moments ---

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
        m.lo = isinf(m.m2) ? A(0) : rest[r] * share;  // rstd is 0 then; inf * 0 must not make a NaN of it
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
        for (int p = 0; p < parts; ++p) m = merge(m, moments[part.slice * parts + p]);
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
extern "C" const char* group_norm_error(int error) { return cudaGetErrorString(cudaError_t(error)); }
// --- end shared: group norm entry points ---
"""

CPP_SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

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
// The CPU kernels compute in float (double for double): a block of values at a time is widened into, and narrowed from, first-cache
// buffers, so that every loop over values is one the compiler vectorises.
template <typename T> using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;
constexpr int64_t kBlock = 1024;

template <typename T> inline void load_values(const T* from, acc_t<T>* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    if constexpr (std::is_same_v<T, at::Half>) {
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
#endif
    for (; i < n; ++i) to[i] = static_cast<acc_t<T>>(from[i]);  // bfloat16: a shift, which the compiler vectorises
}
template <typename T> inline void store_values(const acc_t<T>* from, T* to, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    if constexpr (std::is_same_v<T, at::Half>) {
        for (; i + 8 <= n; i += 8) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
        }
    }
#endif
    if constexpr (std::is_same_v<T, at::BFloat16>) {
        for (; i < n; ++i) {  // round to nearest even without a branch; NaN becomes the quiet one, as in PyTorch
            uint32_t bits;
            std::memcpy(&bits, from + i, sizeof(bits));
            const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            to[i].x = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
        }
    }
    for (; i < n; ++i) to[i] = static_cast<T>(from[i]);
}

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
// Two sweeps over a block in the first cache; what the rounded mean leaves over is put back by `rest`.
template <typename A> inline Moments block_moments(const A* values, int64_t n) {
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
    Moments m;
    m.count = n;
    m.mean = mean + rest / n;
    m.m2 = m2 - rest * (rest / n);
    return m;
}
// --- end shared: cpu values ---

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
template <typename A> void activate(const A* h, const std::array<const A*, kOperands>& operand, A* to, int64_t n) {
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
template <typename T> struct Normalizer {
    using A = acc_t<T>;
    const T* h;
    T* out;
    const Vectors<A>& vectors;
    const Sizes sizes;
    const double eps;
    Spread<A> operands[kOperands], gammas, betas;
    A block[kBlock];
    A* const buffer;  // of max(n, kBlock) values where the slice waits there
    static constexpr bool kInPlace = std::is_same_v<T, A>;

    Normalizer(const T* h, T* out, const Vectors<A>& vectors, const Sizes& sizes, double eps, A* buffer)
        : h(h), out(out), vectors(vectors), sizes(sizes), eps(eps), buffer(buffer) {}
    static int64_t buffer_size(int64_t n) { return kInPlace ? 0 : n > kMostWaiting ? kBlock : std::max(n, kBlock); }
    bool waits() const { return kInPlace || sizes.n <= kMostWaiting; }

    // Where value `begin` of the slice, and those after it, wait.
    A* waiting(int64_t slice, int64_t begin) {
        if constexpr (kInPlace) return out + slice * sizes.n + begin;
        else return waits() ? buffer + begin : block;
    }
    // Where results go before `leave`.
    A* destination(int64_t at) {
        if constexpr (kInPlace) return out + at;
        else return block;
    }
    void leave(int64_t at, int64_t count) {
        if constexpr (!kInPlace) store_values(block, out + at, count);
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

    void activate_block(int64_t slice, int64_t begin, int64_t count, A* to) {
        const int64_t at = slice * sizes.n + begin;
        const Place place(sizes, slice, begin);
        const A* from = to;
        if constexpr (kInPlace) from = h + at;
        else load_values(h + at, to, count);
        std::array<const A*, kOperands> operand;
        for (int k = 0; k < kOperands; ++k) {
            operand[k] = vectors.full[k] ? vectors.operand[k] + at
                                         : operands[k](vectors.operand[k], place.channel, place.pixel, count, sizes.spatial);
        }
        activate(from, operand, to, count);
    }

    Moments moments(int64_t slice, int64_t begin, int64_t end) {
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
    void scale(const A* from, A* to, int64_t n, const A* gamma, const A* beta, const Moments& m) const {
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
    void normalize(int64_t slice, int64_t begin, int64_t end, const Moments& m) {
        for (int64_t i = begin; i < end; i += kBlock) {
            const int64_t count = std::min(kBlock, end - i), at = slice * sizes.n + i;
            const Place place(sizes, slice, i);
            A* values = waiting(slice, i);
            if (!waits()) activate_block(slice, i, count, values);
            const A* gamma = gammas(vectors.gamma, place.channel, place.pixel, count, sizes.spatial);
            const A* beta = betas(vectors.beta, place.channel, place.pixel, count, sizes.spatial);
            scale(values, destination(at), count, gamma, beta, m);
            leave(at, count);
        }
    }

    // Whole slices from first to last. Short ones together, as far as they are of one sample and fit a block.
    void slices(int64_t first, int64_t last) {
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
            A *values = waiting(s, 0), *to = destination(s * n);
            activate_block(s, 0, run * n, values);
            for (int64_t i = 0; i < run * n; i += n) scale(values + i, to + i, n, gamma + i, beta + i, block_moments(values + i, n));
            leave(s * n, run * n);
        }
    }
};

// Whole slices to each thread where there are enough of them, or else parts of one slice after the other.
template <typename T>
void forward_cpu(const T* h, T* out, const Vectors<acc_t<T>>& vectors, const Sizes& sizes, double eps) {
    using A = acc_t<T>;
    const int64_t n = sizes.n, buffered = Normalizer<T>::buffer_size(n);
    if (sizes.slices >= at::get_num_threads() || n <= 8 * kBlock) {
        at::parallel_for(0, sizes.slices, std::max<int64_t>(1, 8192 / n), [&](int64_t begin, int64_t end) {
            std::vector<A> buffer(buffered);
            Normalizer<T>(h, out, vectors, sizes, eps, buffer.data()).slices(begin, end);
        });
        return;
    }
    const int64_t part = 8 * kBlock, parts = (n + part - 1) / part;  // of fixed size: the sum's order is the same on any machine
    std::vector<A> buffer(buffered);
    std::vector<Moments> moments(parts);
    for (int64_t s = 0; s < sizes.slices; ++s) {
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
            Normalizer<T> own(h, out, vectors, sizes, eps, buffer.data());
            for (int64_t p = begin; p < end; ++p) moments[p] = own.moments(s, p * part, std::min(n, (p + 1) * part));
        });
        Moments m;
        for (const Moments& other : moments) m.merge(other);
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
            Normalizer<T> own(h, out, vectors, sizes, eps, buffer.data());
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
    TORCH_CHECK(h.dim() >= 2, "Expected at least 2 dimensions for input tensor but received ", h.dim());
    TORCH_CHECK(groups > 0, "Expected num groups to be greater than 0, got ", groups);
    const auto channels = h.sym_size(1);
    // Messages without symbolic sizes: writing those out ends some builds of PyTorch 2.11 in a segmentation fault.
    TORCH_CHECK(channels % groups == 0, "group_norm: the number of channels must be divisible by num_groups=", groups);
    TORCH_CHECK(channels <= std::numeric_limits<int32_t>::max(), "group_norm: more channels than 2^31 - 1");
    const auto check_vector = [&](const at::Tensor& vector) {
        TORCH_CHECK(vector.dim() == 1 && vector.sym_size(0) == channels, "group_norm: weight and bias must have one value a channel");
        TORCH_CHECK(vector.device() == h.device(), "group_norm: input on ", h.device(), ", but weight or bias on ", vector.device());
        const bool mixed = !h.is_cuda() && at::isReducedFloatingType(h.scalar_type()) && vector.scalar_type() == at::kFloat;
        TORCH_CHECK((vector.scalar_type() == h.scalar_type() || mixed) && vector.scalar_type() == weight.scalar_type(),
            "mixed dtype: input of type ", h.scalar_type(), " with weight of type ", weight.scalar_type(), " and bias of type ",
            bias.scalar_type());
    };
    check_vector(weight);
    check_vector(bias);
    for (const at::Tensor& operand : operands) {
        const bool vector = operand.dim() == 1 && operand.sym_size(0) == channels;
        TORCH_CHECK(vector || operand.sym_sizes() == h.sym_sizes(), "group_norm: an operand must have one value a channel or the input's shape");
        TORCH_CHECK(operand.device() == h.device(), "group_norm: input on ", h.device(), ", but an operand on ", operand.device());
    }
}

at::Tensor forward_meta(const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups) {
    check(h, operands, weight, bias, groups);
    return at::empty_like(h, h.options(), at::MemoryFormat::Contiguous);
}

Sizes sizes_of(const at::Tensor& h, int64_t groups) {
    Sizes sizes;
    sizes.slices = h.size(0) * groups;
    sizes.n = h.numel() / sizes.slices;
    sizes.groups = groups;
    sizes.channels = h.size(1) / groups;
    sizes.spatial = sizes.n / sizes.channels;
    return sizes;
}

// As the kernels read them: contiguous and 16-byte aligned, the vectors in float32 (float64 for float64).
at::Tensor prepared(const at::Tensor& tensor) {
    const at::Tensor ready = tensor.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
at::Tensor prepared(const at::Tensor& vector, const at::Tensor& h) {
    return prepared(vector.to(h.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

template <typename T>
void forward_cpu(const at::Tensor& h, at::Tensor& out, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias,
    int64_t groups, double eps) {
    using A = acc_t<T>;
    Vectors<A> vectors;
    for (int k = 0; k < kOperands; ++k) {
        vectors.operand[k] = operands[k].data_ptr<A>();
        vectors.full[k] = operands[k].dim() > 1;
    }
    vectors.gamma = weight.data_ptr<A>();
    vectors.beta = bias.data_ptr<A>();
    vectors.largest_gamma = 0;
    for (int64_t c = 0; c < weight.numel(); ++c) vectors.largest_gamma = std::max(vectors.largest_gamma, std::fabs(vectors.gamma[c]));
    forward_cpu(h.data_ptr<T>(), out.data_ptr<T>(), vectors, sizes_of(h, groups), eps);
}

at::Tensor forward_on_cpu(
    const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups, double eps) {
    check(h, operands, weight, bias, groups);
    const at::Tensor input = prepared(h), gamma = prepared(weight, h), beta = prepared(bias, h);
    at::Tensor out = at::empty_like(input);
    if (h.numel() == 0) return out;
    Operands ready;
    for (int k = 0; k < kOperands; ++k) ready[k] = prepared(operands[k], h);
    switch (h.scalar_type()) {
        case at::kFloat: forward_cpu<float>(input, out, ready, gamma, beta, groups, eps); break;
        case at::kDouble: forward_cpu<double>(input, out, ready, gamma, beta, groups, eps); break;
        case at::kHalf: forward_cpu<at::Half>(input, out, ready, gamma, beta, groups, eps); break;
        case at::kBFloat16: forward_cpu<at::BFloat16>(input, out, ready, gamma, beta, groups, eps); break;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "group_norm: not implemented for ", h.scalar_type());
    }
    return out;
}

}  // namespace

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

extern "C" int64_t group_norm_workspace(int64_t slices, int64_t slice_bytes);
extern "C" int group_norm_forward(
    int dtype, const void* h, void* out, const void* const* vectors, const bool* full, int64_t slices, int64_t n, int64_t spatial,
    int groups, double eps, void* workspace, cudaStream_t stream);
extern "C" const char* group_norm_error(int error);

static at::Tensor forward_on_cuda(
    const at::Tensor& h, const Operands& operands, const at::Tensor& weight, const at::Tensor& bias, int64_t groups, double eps) {
    check(h, operands, weight, bias, groups);
    const c10::cuda::CUDAGuard guard(h.device());
    const at::Tensor input = prepared(h), gamma = prepared(weight, h), beta = prepared(bias, h);
    at::Tensor out = at::empty_like(input);
    if (h.numel() == 0) return out;
    int dtype = 0;
    switch (h.scalar_type()) {
        case at::kFloat: dtype = 0; break;
        case at::kDouble: dtype = 1; break;
        case at::kHalf: dtype = 2; break;
        case at::kBFloat16: dtype = 3; break;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "group_norm: not implemented for ", h.scalar_type());
    }
    Operands ready;
    const void* vectors[kOperands + 2];
    bool full[kOperands];
    for (int k = 0; k < kOperands; ++k) {
        ready[k] = prepared(operands[k], h);
        vectors[k] = ready[k].data_ptr();
        full[k] = ready[k].dim() > 1;
    }
    vectors[kOperands] = gamma.data_ptr();
    vectors[kOperands + 1] = beta.data_ptr();
    const Sizes sizes = sizes_of(h, groups);
    const at::Tensor workspace = at::empty({group_norm_workspace(sizes.slices, sizes.n * h.element_size())}, h.options().dtype(at::kByte));
    const int error = group_norm_forward(dtype, input.data_ptr(), out.data_ptr(), vectors, full, sizes.slices, sizes.n, sizes.spatial,
        int(groups), eps, workspace.data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(error == 0, "group_norm: ", group_norm_error(error));
    return out;
}
#endif
// --- end shared: group norm arguments ---

static at::Tensor swish_group_norm_cpu(
    const at::Tensor& h, const at::Tensor& bias, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    return forward_on_cpu(h, {bias}, weight, group_bias, groups, eps);
}
static at::Tensor swish_group_norm_meta(
    const at::Tensor& h, const at::Tensor& bias, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    return forward_meta(h, {bias}, weight, group_bias, groups);
}
#ifdef WITH_CUDA
static at::Tensor swish_group_norm_cuda(
    const at::Tensor& h, const at::Tensor& bias, const at::Tensor& weight, const at::Tensor& group_bias, int64_t groups, double eps) {
    return forward_on_cuda(h, {bias}, weight, group_bias, groups, eps);
}
#endif

TORCH_LIBRARY(OPERATOR_NAMESPACE, m) {
    m.def("forward(Tensor h, Tensor bias, Tensor weight, Tensor group_bias, int groups, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, CPU, m) { m.impl("forward", swish_group_norm_cpu); }
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, Meta, m) { m.impl("forward", swish_group_norm_meta); }
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, CUDA, m) { m.impl("forward", swish_group_norm_cuda); }
#endif
"""

CUDA_FLAGS = ["-O3"]


# --- shared: build (home: kernels/instance_norm.py) ---
def _load_operators(name: str) -> str:
    """Compile the two strings, once per machine and version, and load them; returns the namespace of their operators in torch.ops.

    The namespace carries a hash of all that shapes the binary, so edited copies and other versions of torch live side by side. The
    build happens in a folder of its own under a lock that dies with its process, and only its finished library is moved into the cache:
    an interrupted build leaves nothing that the next import trusts or waits for.
    """
    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    simd = {"AVX2": ["-mavx2", "-mfma", "-mf16c"], "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]}
    capability = getattr(torch.backends.cpu, "get_cpu_capability", str)() if platform.machine() == "x86_64" else ""
    cpp_flags = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", *simd.get(capability, [])]
    cuda_flags = list(CUDA_FLAGS)
    if on_gpu:
        cpp_flags.append("-DWITH_CUDA")
        for major, minor in sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}):
            # The 'a' admits Hopper's own instructions (wgmma, setmaxnreg), which CUDA 12 brought.
            arch = f"{major}{minor}{'a' if major == 9 and int(torch.version.cuda.split('.')[0]) >= 12 else ''}"
            cuda_flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    ingredients = (CPP_SOURCE, CUDA_SOURCE if on_gpu else "", cpp_flags, cuda_flags, torch.__version__, torch.version.cuda, platform.machine())
    namespace = f"{name}_{hashlib.sha256(repr(ingredients).encode()).hexdigest()[:16]}"
    if hasattr(getattr(torch.ops, namespace), "forward"):
        return namespace  # this process has it: a reload, or a second copy of the file

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    library = os.path.join(folder, f"{namespace}.so")
    if not os.path.exists(library):
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            folder = tempfile.mkdtemp(prefix="torch_extensions_")
            warnings.warn(f"{os.path.dirname(library)} cannot be written: {name} is built anew by each process; set TORCH_EXTENSIONS_DIR")
            library = os.path.join(folder, f"{namespace}.so")
        with open(os.path.join(folder, f"{namespace}.lock"), "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: two processes may then build the same thing
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(library):
                _build(namespace, folder, cpp_flags, cuda_flags if on_gpu else None)
    torch.ops.load_library(library)
    return namespace


def _build(namespace: str, folder: str, cpp_flags: list, cuda_flags: list):
    """Compile into a new folder, then move the library to its place in one step. cuda_flags None: the C++ string alone."""
    from unittest import mock

    path = os.environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is None:  # a virtual environment that is not activated has it beside its python
        path = os.pathsep.join([path, os.path.dirname(sys.executable)])
    if shutil.which("ninja", path=path) is None:
        raise RuntimeError(f"{namespace}: building needs ninja, which is not on PATH: pip install ninja")
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        raise RuntimeError(f"{namespace}: building needs a C++ compiler, and {compiler!r} is not on PATH: install g++, or set CXX")
    with mock.patch.dict(os.environ, PATH=path), tempfile.TemporaryDirectory(prefix=f"{namespace}.", dir=folder) as build:
        from torch.utils import cpp_extension

        if cuda_flags is not None:
            home = cpp_extension.CUDA_HOME
            if home is None or not os.path.exists(os.path.join(home, "bin", "nvcc")):
                raise RuntimeError(
                    f"{namespace}: building for the GPU needs nvcc, and there is none in CUDA_HOME ({home}): install the CUDA toolkit "
                    f"{torch.version.cuda}, and set CUDA_HOME to its folder"
                )
        options = {"no_implicit_headers": True} if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters else {}
        cpp_extension.load_inline(
            name=namespace,
            cpp_sources=[CPP_SOURCE],
            cuda_sources=[] if cuda_flags is None else [CUDA_SOURCE],
            extra_cflags=[*cpp_flags, f"-DOPERATOR_NAMESPACE={namespace}"],
            extra_cuda_cflags=cuda_flags,
            extra_ldflags=["-fopenmp"],
            build_directory=build,
            is_python_module=False,
            **options,
        )
        os.replace(os.path.join(build, f"{namespace}.so"), os.path.join(folder, f"{namespace}.so"))
# --- end shared: build ---


NAMESPACE = _load_operators("linear_swish_group_norm")
_forward = getattr(torch.ops, NAMESPACE).forward


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


def _group_norm_arguments(group_norm: nn.GroupNorm, h: torch.Tensor) -> tuple:
    """weight, bias, groups and eps of the norm, after the checks that PyTorch makes in Python."""
    size = [h.shape[0] * h.shape[1] // group_norm.num_groups, group_norm.num_groups, *h.shape[2:]]
    if math.prod(size) == size[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    weight, bias = group_norm.weight, group_norm.bias
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


def _channel_sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum([d for d in range(values.dim()) if d != 1], dtype=torch.float64).to(values.dtype)


def _spread(vector: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """An operand as it broadcasts against h."""
    return vector.to(h.dtype).view(-1, *[1] * (h.dim() - 2)) if vector.dim() == 1 else vector.to(h.dtype)


def _gathered(grad: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """The gradient of an operand from the one of its broadcast self."""
    return (_channel_sum(grad) if operand.dim() == 1 else grad).to(operand.dtype)


def _group_norm_gradients(v, grad, weight, bias, groups: int, eps: float, needed: tuple) -> tuple:
    """Of v (or None), weight and bias, where they are needed: (for v, weight, bias)."""
    grouped = (v.shape[0], groups, v.shape[1] // groups, *v.shape[2:])
    within = list(range(2, len(grouped)))

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.mean(within, keepdim=True, dtype=torch.float64)

    v_mean = mean(v.view(grouped))
    rounded = v_mean.to(v.dtype)
    deviation = v.view(grouped) - rounded
    wide_rstd = (mean(deviation.square()) - (v_mean - rounded).square() + eps).rsqrt()
    rstd = wide_rstd.to(v.dtype)
    normal = torch.addcmul(((rounded - v_mean) * wide_rstd).to(v.dtype), deviation, rstd)
    grad_v = grad_weight = grad_bias = None
    if needed[0]:
        weighted = (grad * _spread(weight, grad)).view(grouped)
        weighted = weighted - mean(weighted).to(v.dtype)  # first of all: what it shares with `normal` cancels below
        grad_v = (rstd * (weighted - normal * mean(weighted * normal).to(v.dtype))).view(v.shape)
    if needed[1]:
        grad_weight = _channel_sum(grad * normal.view(v.shape)).to(weight.dtype)
    if needed[2]:
        grad_bias = _channel_sum(grad).to(bias.dtype)
    return grad_v, grad_weight, grad_bias
# --- end shared: group norm in Python ---


class SwishGroupNorm(torch.autograd.Function):
    """out = GroupNorm(sigmoid(h) * h + bias). Saves h and the vectors; the gradient is differentiable in turn."""

    @staticmethod
    def forward(h, bias, weight, group_bias, groups, eps):
        return _forward(h, bias, weight, group_bias, groups, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        h, bias, weight, group_bias = ctx.saved_tensors
        needs_h, needs_bias, *needs_norm = ctx.needs_input_grad[:4]
        dtype = torch.promote_types(h.dtype, torch.float32)
        wide, grad = h.to(dtype).contiguous(), grad.to(dtype).contiguous()
        gate = wide.sigmoid()
        v = gate * wide + _spread(bias, wide)
        needed = (needs_h or needs_bias, *needs_norm)
        grad_v, grad_weight, grad_group_bias = _group_norm_gradients(v, grad, weight, group_bias, ctx.groups, ctx.eps, needed)
        grad_h = grad_bias = None
        if needs_h:
            grad_h = (grad_v * (gate * (1 + wide * (1 - gate)))).to(h.dtype)
        if needs_bias:
            grad_bias = _gathered(grad_v, bias)
        return grad_h, grad_bias, grad_weight, grad_group_bias, None, None


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features) of float64, float32, float16 or bfloat16, on the CPU or a CUDA device, in any memory layout; returns a
    contiguous (B, out_features). The errors of nn.Linear and nn.GroupNorm for other shapes.
    """

    def __init__(self, in_features: int, out_features: int, num_groups: int, bias_shape: tuple):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, (bias,) = _as_operands(self.matmul(x), (self.bias,))
        arguments = (h, bias, *_group_norm_arguments(self.group_norm, h))
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in arguments[:4])
        return _laid_out_as(SwishGroupNorm.apply(*arguments) if needs_grad else _forward(*arguments), h)
