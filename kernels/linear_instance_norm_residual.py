"""A linear layer, then a norm over each row, a sum and a product, fused: a drop-in for the Model of the same name.

    h = x W^T + b;    h = (h - mean) * rstd over each row;    out = (h + y) * y

The unsqueezes around the Model's `InstanceNorm2d` make one channel of 1 x F pixels of each row, so `mean` and `rstd` are a row's own, over
its F features; rstd = 1 / sqrt(M2 / F + eps), M2 = sum((h - mean)^2).

In float32 the matrix product is ours, and so are its gradients. On Hopper (sm_90, CUDA 12) it runs on the fp16 tensor cores with the accuracy
of float32, from 128 rows and features and 2^30 multiplications on: x and W are split into two fp16 pieces, and three products of pieces make
one of float32; where TF32 is allowed one product of the first pieces does, with TF32's error, as a rule less where x is of one sign.
float16 and bfloat16 are multiplied as they are, by the same loop, and rounded once; their gradients are PyTorch's. `freeze_weight()` splits W
once instead of in each call. On sm_80 and sm_100 a plainer loop makes the three products. Few rows, for which reading W is all the work, have
a kernel of their own on sm_80 and newer. Everything else (float64 and other chips, small products, hooks on the linear layer, autocast) takes
PyTorch's. All that follows the product is one kernel:

    row                       waits in                                   traffic                       on
    up to 32 KiB              registers of 1 to 256 threads              h, y read, out written        any GPU
    any                       nowhere                                    h read twice                  any GPU

At the benchmark shape h is 33.5 MB, fresh from the matrix product and still in L2. Statistics are accumulated in float32 (float64 for
float64) and merged after Chan, Golub and LeVeque (1979); the mean is an unevaluated sum hi + lo, so one far from zero costs nothing.

On the CPU each core takes whole rows. Gradients: one operator, whose traffic is the forward's and one operand more;
second derivatives in ATen operators.
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

// (h - mean) * rstd, then (that + y) * y
template <typename A> struct Finish {
    A hi, lo, rstd;
    __device__ __forceinline__ Finish(const Moments<A>& m, A n, A eps) : hi(m.hi), lo(m.lo), rstd(reciprocal_sqrt(m.m2 * reciprocal(n) + eps)) {}
    template <typename T, int V> __device__ __forceinline__ Pack<T, V> operator()(const Pack<T, V>& h, const Pack<T, V>& y) const {
        Pack<T, V> out;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const A other = to_acc(y.value[i]);
            from_acc((((to_acc(h.value[i]) - hi) - lo) * rstd + other) * other, out.value[i]);
        }
        return out;
    }
};

// ---------------------------------------------------------------------------------------------------------------------------------
// Up to 32 KiB: the row waits in registers.
// `group` threads (a power of two) own a row, each ITEMS packs of it; a group is part of a warp, or whole warps of a block.

constexpr int kRegisterItems = 8;
constexpr int kMaxGroup = 256;  // threads of a block, whole groups of it

// The sum over `group` threads, a power of two, that are part of a warp or else whole warps of the block.
template <typename A> __device__ __forceinline__ A sum_across_group(A v, int group, A* warp_sums) {
    for (int offset = min(group, 32) / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    if (group <= 32) return v;
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    const A* own = warp_sums + threadIdx.x / group * (group / 32);
    for (int w = 0; w < group / 32; ++w) v += own[w];
    return v;
}

// Of n values that a group holds in `packs` packs; in all of its threads. Two sweeps over registers.
template <typename T, int V, int ITEMS, typename A> __device__ __forceinline__ Moments<A> moments_in_registers(
    Pack<T, V> (&r)[ITEMS], int packs, int n, int lane, int group, A* warp_sums) {
    const A share = reciprocal(A(n));  // multiplied in before the sum, so that large values do not overflow it
    A sum = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) {
#pragma unroll
            for (int j = 0; j < V; ++j) sum += to_acc(r[i].value[j]) * share;
        }
    }
    // Deviations from the rounded mean give M2 and what the rounding left over.
    Moments<A> m;
    m.count = n;
    m.hi = sum_across_group(sum, group, warp_sums);
    A rest = 0;
    m.m2 = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keep_packed(r[i]);
        if (lane + i * group < packs) {
            A pack_rest = 0, pack_m2 = 0;  // sums of sums: one outlier must not drown the others
#pragma unroll
            for (int j = 0; j < V; ++j) {
                const A deviation = to_acc(r[i].value[j]) - m.hi;
                pack_rest += deviation;
                pack_m2 += deviation * deviation;
            }
            rest += pack_rest;
            m.m2 += pack_m2;
        }
    }
    m.lo = sum_across_group(rest, group, warp_sums) * share;
    m.m2 = sum_across_group(m.m2, group, warp_sums);
    if (isinf(m.m2)) m.lo = 0;  // rstd is 0 then; inf * 0 must not make a NaN of it
    return m;
}

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

template <typename T, int V, int ITEMS>
__global__ void __launch_bounds__(kMaxGroup, 1) finish_in_registers(
    const T* __restrict__ h, const T* __restrict__ y, T* __restrict__ out, int64_t rows, int n, Acc<T> eps, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[kMaxGroup / 32];
    const int64_t row = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group, packs = row < rows ? n / V : 0;

#if CUDART_VERSION >= 12000
    wait_for_predecessor();
#endif
    Pack<T, V> r[ITEMS], own_y[ITEMS];  // both on their way at once
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) r[i] = load_streaming<T, V>(h + row * n + int64_t(lane + i * group) * V);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) own_y[i] = load_streaming<T, V>(y + row * n + int64_t(lane + i * group) * V);
    }
    const Moments<A> m = moments_in_registers(r, packs, n, lane, group, warp_sums);
    const Finish<A> finish(m, A(n), eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) store_streaming(out + row * n + int64_t(lane + i * group) * V, finish(r[i], own_y[i]));
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Any row: it waits nowhere. Two kernels: block (part, row) leaves the moments of its part in global memory, then merges those of its row
// and finishes its part. With one part a row the second kernel takes the moments itself.

constexpr int kStreamBlock = 512;

template <typename T, int V> __device__ __forceinline__ Moments<Acc<T>> moments_of_block(const T* __restrict__ gh, int64_t values) {
    using A = Acc<T>;
    __shared__ Moments<A> warp_moments[kStreamBlock / 32];
    Accumulator<A> accumulator;
#pragma unroll 4
    for (int64_t j = threadIdx.x; j < values / V; j += kStreamBlock) accumulator.add(*reinterpret_cast<const Pack<T, V>*>(gh + j * V));
    Moments<A> m = merge_across_warp(accumulator.template moments<V>());
    if (threadIdx.x % 32 == 0) warp_moments[threadIdx.x / 32] = m;
    __syncthreads();
    m = warp_moments[0];
    for (int w = 1; w < kStreamBlock / 32; ++w) m = merge(m, warp_moments[w]);
    return m;
}

template <typename T, int V> __global__ void __launch_bounds__(kStreamBlock, 1) moments_of_parts(
    const T* __restrict__ h, Moments<Acc<T>>* __restrict__ moments, int64_t n, int64_t part_values, int parts) {
    const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts, begin = part * part_values;
    const Moments<Acc<T>> m = moments_of_block<T, V>(h + row * n + begin, min(part_values, n - begin));
    if (threadIdx.x == 0) moments[blockIdx.x] = m;
}

template <typename T, int V> __global__ void __launch_bounds__(kStreamBlock, 1) finish_parts(
    const T* __restrict__ h, const T* __restrict__ y, T* __restrict__ out, const Moments<Acc<T>>* __restrict__ moments, int64_t n,
    int64_t part_values, int parts, Acc<T> eps) {
    using A = Acc<T>;
    const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts, begin = part * part_values;
    const int64_t at = row * n + begin, packs = min(part_values, n - begin) / V;
    Moments<A> m;
    if (parts == 1) {
        m = moments_of_block<T, V>(h + at, n);
    } else {
        m = merge_parts(moments + row * parts, parts);
    }
    const Finish<A> finish(m, A(n), eps);
#pragma unroll 4
    for (int64_t j = threadIdx.x; j < packs; j += kStreamBlock) {
        store_streaming(out + at + j * V, finish(load_streaming<T, V>(h + at + j * V), load_streaming<T, V>(y + at + j * V)));
    }
}

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

// How the gradient of h is read one by one.
struct GradientReader {
    const float* grad;
    explicit GradientReader(const float* const* from) : grad(from[0]) {}
    __device__ __forceinline__ float value(int64_t row, int column, int columns) const { return grad[row * columns + column]; }
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
struct GradientEpilogue : StoreEpilogue {
    static constexpr bool kRestores = false;
    GradientReader grad;
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

__global__ void __launch_bounds__(kRecomputeBlock, 2) recompute_gradient(const GradientEpilogue epilogue) {
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
static cudaError_t launch_gradient(const GradientReader& grad, const float* other, float* out, int64_t m, int64_t n, int64_t k,
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
    GradientEpilogue epilogue = {{product, out}, grad, 0, int(k), kOfWeight, of.deficit};
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
// grad: what a GradientReader reads. other: W (n, k) for the gradient of x (m, k), or x for W's. split_workspace: the gradient's, split.
extern "C" int product_gradient(bool of_weight, const float* const* grad, const float* other, float* out, int64_t m, int64_t n, int64_t k,
    bool tf32, void* split_workspace, void* workspace, cudaStream_t stream) {
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const auto launch = [&](auto launcher) {
        return launcher(GradientReader(grad), other, out, m, n, k, split_workspace, workspace, device, stream);
    };
    if (tf32) return of_weight ? launch(launch_gradient<OneProduct, true>) : launch(launch_gradient<OneProduct, false>);
    return of_weight ? launch(launch_gradient<ThreeProducts, true>) : launch(launch_gradient<ThreeProducts, false>);
}
// --- end shared: product gradients ---
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
#endif

// Parts of a row in the two-read kernels: enough blocks for two waves, none under 64 KiB.
static int stream_parts(int64_t rows, int64_t row_bytes, int sms) {
    const int64_t wanted = divide_up(8 * sms, rows), most = row_bytes / (64 * 1024);
    return int(wanted < most ? wanted : (most > 1 ? most : 1));
}

template <typename T, int V>
static cudaError_t launch_in_registers(
    const T* h, const T* y, T* out, int64_t rows, int n, double eps, const Device& device, cudaStream_t stream) {
    const int packs = n / V;
    int group = 1;
    while (V > 1 && group < 32 && group < packs) group *= 2;
    const int wanted = V > 4 ? kRegisterItems / 2 : kRegisterItems;  // 16-bit rows are in more flight with twice the threads
    while (group < kMaxGroup && group * wanted < packs) group *= 2;
    const int items = V > 1 ? int(divide_up(packs, group)) : kRegisterItems;
    auto kernel = finish_in_registers<T, V, kRegisterItems>;
    if constexpr (V > 1) {
        if (items == 1) kernel = finish_in_registers<T, V, 1>;
        else if (items <= 4) kernel = finish_in_registers<T, V, 4>;
    }
    const int64_t blocks = divide_up(rows, kMaxGroup / group);
#if CUDART_VERSION >= 12000
    return launch_early(kernel, blocks, kMaxGroup, 0, device, stream, h, y, out, rows, n, Acc<T>(eps), group);
#else
    kernel<<<unsigned(blocks), kMaxGroup, 0, stream>>>(h, y, out, rows, n, Acc<T>(eps), group);
    return cudaGetLastError();
#endif
}

template <typename T, int V>
static cudaError_t launch_two_reads(
    const T* h, const T* y, T* out, int64_t rows, int64_t n, double eps, void* workspace, int sms, cudaStream_t stream) {
    int parts = stream_parts(rows, n * sizeof(T), sms);
    const int64_t part_values = divide_up(divide_up(n, parts), kPack<T>) * kPack<T>;
    parts = int(divide_up(n, part_values));
    auto* moments = static_cast<Moments<Acc<T>>*>(workspace);
    const dim3 grid(unsigned(rows * parts));
    if (parts > 1) moments_of_parts<T, V><<<grid, kStreamBlock, 0, stream>>>(h, moments, n, part_values, parts);
    finish_parts<T, V><<<grid, kStreamBlock, 0, stream>>>(h, y, out, moments, n, part_values, parts, Acc<T>(eps));
    return cudaGetLastError();
}

template <typename T>
static cudaError_t launch(
    const void* hv, const void* yv, void* outv, int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    const T* h = static_cast<const T*>(hv);
    const T* y = static_cast<const T*>(yv);
    T* out = static_cast<T*>(outv);
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    const int64_t bytes = n * sizeof(T);
    const bool aligned = aligned_16(h, out) && aligned_16(y, out) && bytes % 16 == 0;
    if (!aligned && n <= kMaxGroup * kRegisterItems) return launch_in_registers<T, 1>(h, y, out, rows, int(n), eps, device, stream);
    if (aligned && bytes <= kMaxGroup * kRegisterItems * 16) {
        return launch_in_registers<T, kPack<T>>(h, y, out, rows, int(n), eps, device, stream);
    }
    if (aligned) return launch_two_reads<T, kPack<T>>(h, y, out, rows, n, eps, workspace, device.sms, stream);
    return launch_two_reads<T, 1>(h, y, out, rows, n, eps, workspace, device.sms, stream);
}

template <class Launch> static cudaError_t in_type(int dtype, const Launch& launch) {
    switch (dtype) {
        case 0: return launch(float());
        case 1: return launch(double());
        case 2: return launch(__half());
        default: return launch(__nv_bfloat16());
    }
}

// h, y, out: `rows` contiguous rows of `n` values. dtype: 0 float32, 1 float64, 2 float16, 3 bfloat16.
// workspace: row_norm_residual_workspace bytes.
extern "C" int row_norm_residual_forward(
    int dtype, const void* h, const void* y, void* out, int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    return in_type(dtype, [&](auto zero) { return launch<decltype(zero)>(h, y, out, rows, n, eps, workspace, stream); });
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The backward. With normal = (h - mean) * rstd and w = grad * y, means over a row:
//     grad_h = rstd * ((w - mean(w)) - normal * slope),   slope = mean((w - mean(w)) * normal);   grad_y = grad * (normal + 2 y)

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
// What a row is to its gradients.
template <typename A> struct RowGradient {
    A hi, lo, rstd, mean, slope;  // h's mean as hi + lo; the mean of w
    __device__ __forceinline__ RowGradient(const Moments<A>& m, A mean, A co, A n, A eps) : mean(mean) {
        const Finish<A> finish(m, n, eps);
        hi = finish.hi, lo = finish.lo, rstd = finish.rstd;
        slope = rstd * (co * reciprocal(n));
    }
    template <typename T, int V> __device__ __forceinline__ void operator()(
        const Pack<T, V>& h, const Pack<T, V>& y, const Pack<T, V>& grad, T* grad_h, T* grad_y, int64_t at) const {
        Pack<T, V> of_h, of_y;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const A given = to_acc(grad.value[i]), other = to_acc(y.value[i]), normal = ((to_acc(h.value[i]) - hi) - lo) * rstd;
            from_acc(rstd * ((given * other - mean) - normal * slope), of_h.value[i]);
            from_acc(given * (normal + A(2) * other), of_y.value[i]);
        }
        if (grad_h != nullptr) *reinterpret_cast<Pack<T, V>*>(grad_h + at) = of_h;  // the linear layer's gradients read it next, from L2
        if (grad_y != nullptr) store_streaming(grad_y + at, of_y);
    }
};

// As finish_in_registers: h, y and grad are read once.
template <typename T, int V, int ITEMS> __global__ void __launch_bounds__(kMaxGroup, sizeof(T) == 4 ? 2 : 1) gradients_in_registers(
    const T* __restrict__ grad, const T* __restrict__ h, const T* __restrict__ y, T* __restrict__ grad_h, T* __restrict__ grad_y,
    int64_t rows, int n, Acc<T> eps, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[kMaxGroup / 32];
    const int64_t row = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group, packs = row < rows ? n / V : 0;
    const auto at = [&](int i) { return row * n + int64_t(lane + i * group) * V; };
    Pack<T, V> raw[ITEMS], other[ITEMS], given[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) {
            raw[i] = *reinterpret_cast<const Pack<T, V>*>(h + at(i));
            other[i] = *reinterpret_cast<const Pack<T, V>*>(y + at(i));
            given[i] = *reinterpret_cast<const Pack<T, V>*>(grad + at(i));
        }
    }
    const Moments<A> m = moments_in_registers(raw, packs, n, lane, group, warp_sums);
    const A share = reciprocal(A(n));
    A mean = 0, co = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) {
            A pack_mean = 0;
#pragma unroll
            for (int j = 0; j < V; ++j) pack_mean += to_acc(given[i].value[j]) * to_acc(other[i].value[j]);
            mean += pack_mean * share;
        }
    }
    mean = sum_across_group(mean, group, warp_sums);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keep_packed(raw[i]), keep_packed(other[i]), keep_packed(given[i]);
        if (lane + i * group < packs) {
            A pack_co = 0;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                const A deviation = (to_acc(raw[i].value[j]) - m.hi) - m.lo;
                pack_co += deviation * (to_acc(given[i].value[j]) * to_acc(other[i].value[j]) - mean);
            }
            co += pack_co;
        }
    }
    const RowGradient<A> gradient(m, mean, sum_across_group(co, group, warp_sums), A(n), eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keep_packed(raw[i]), keep_packed(other[i]), keep_packed(given[i]);
        if (lane + i * group < packs) gradient(raw[i], other[i], given[i], grad_h, grad_y, at(i));
    }
}

// Any row: two kernels, each reading all three, as in the forward: block (part, row) leaves the joint moments of h and w.
template <typename T, int V> __global__ void __launch_bounds__(kStreamBlock, 1) joint_moments_of_parts(
    const T* __restrict__ grad, const T* __restrict__ h, const T* __restrict__ y, Joint<Acc<T>>* __restrict__ joints, int64_t n,
    int64_t part_values, int parts) {
    using A = Acc<T>;
    __shared__ Joint<A> warp_joints[kStreamBlock / 32];
    const int64_t row = blockIdx.x / parts, begin = blockIdx.x % parts * part_values, at = row * n + begin;
    const int64_t packs = min(part_values, n - begin) / V;
    JointAccumulator<A, V> accumulator;
#pragma unroll 2
    for (int64_t j = threadIdx.x; j < packs; j += kStreamBlock) {
        const auto raw = *reinterpret_cast<const Pack<T, V>*>(h + at + j * V), other = *reinterpret_cast<const Pack<T, V>*>(y + at + j * V);
        const auto given = *reinterpret_cast<const Pack<T, V>*>(grad + at + j * V);
        Pack<A, V> v, w;
#pragma unroll
        for (int i = 0; i < V; ++i) v.value[i] = to_acc(raw.value[i]), w.value[i] = to_acc(given.value[i]) * to_acc(other.value[i]);
        accumulator.add(v, w);
    }
    const Joint<A> joint = merge_across_group(accumulator.joint(), kStreamBlock, warp_joints);
    if (threadIdx.x == 0) joints[blockIdx.x] = joint;
}

template <typename T, int V> __global__ void __launch_bounds__(kStreamBlock, 1) gradients_of_parts(
    const T* __restrict__ grad, const T* __restrict__ h, const T* __restrict__ y, T* __restrict__ grad_h, T* __restrict__ grad_y,
    const Joint<Acc<T>>* __restrict__ joints, int64_t n, int64_t part_values, int parts, Acc<T> eps) {
    using A = Acc<T>;
    const int64_t row = blockIdx.x / parts, begin = blockIdx.x % parts * part_values, at = row * n + begin;
    const int64_t packs = min(part_values, n - begin) / V;
    Joint<A> joint = joints[row * parts];
    for (int p = 1; p < parts; ++p) joint = merge(joint, joints[row * parts + p]);
    const RowGradient<A> gradient(joint.v, joint.sum * reciprocal(A(n)), joint.co, A(n), eps);
#pragma unroll 2
    for (int64_t j = threadIdx.x; j < packs; j += kStreamBlock) {
        const int64_t here = at + j * V;
        gradient(load_streaming<T, V>(h + here), load_streaming<T, V>(y + here), load_streaming<T, V>(grad + here), grad_h, grad_y, here);
    }
}

template <typename T, int V> static void launch_gradients_in_registers(
    const T* grad, const T* h, const T* y, T* grad_h, T* grad_y, int64_t rows, int n, double eps, cudaStream_t stream) {
    const int packs = n / V;
    int group = 1;
    while (V > 1 && group < 32 && group < packs) group *= 2;
    while (group < kMaxGroup && group * kRegisterItems < packs) group *= 2;
    auto kernel = gradients_in_registers<T, V, kRegisterItems>;
    if constexpr (V > 1) {
        if (packs <= 2 * group) kernel = gradients_in_registers<T, V, 2>;
    }
    kernel<<<unsigned(divide_up(rows, kMaxGroup / group)), kMaxGroup, 0, stream>>>(grad, h, y, grad_h, grad_y, rows, n, Acc<T>(eps), group);
}

template <typename T, int V> static void launch_gradients_in_two_reads(const T* grad, const T* h, const T* y, T* grad_h, T* grad_y,
    int64_t rows, int64_t n, double eps, void* workspace, int sms, cudaStream_t stream) {
    int parts = stream_parts(rows, n * sizeof(T), sms);
    const int64_t part_values = divide_up(divide_up(n, parts), kPack<T>) * kPack<T>;
    parts = int(divide_up(n, part_values));
    auto* joints = static_cast<Joint<Acc<T>>*>(workspace);
    const unsigned blocks = unsigned(rows * parts);
    joint_moments_of_parts<T, V><<<blocks, kStreamBlock, 0, stream>>>(grad, h, y, joints, n, part_values, parts);
    gradients_of_parts<T, V><<<blocks, kStreamBlock, 0, stream>>>(grad, h, y, grad_h, grad_y, joints, n, part_values, parts, Acc<T>(eps));
}

template <typename T> static cudaError_t launch_backward(const void* gradv, const void* hv, const void* yv, void* grad_hv, void* grad_yv,
    int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    const T *grad = static_cast<const T*>(gradv), *h = static_cast<const T*>(hv), *y = static_cast<const T*>(yv);
    T *grad_h = static_cast<T*>(grad_hv), *grad_y = static_cast<T*>(grad_yv);
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    constexpr int V = kPack<T>;
    const bool aligned = aligned_16(h, y) && aligned_16(grad, grad_h) && aligned_16(grad_y, grad_y) && n % V == 0;
    const int64_t most = kMaxGroup * kRegisterItems * (aligned ? V : 1);
    if (aligned && n <= most) launch_gradients_in_registers<T, V>(grad, h, y, grad_h, grad_y, rows, int(n), eps, stream);
    else if (n <= most) launch_gradients_in_registers<T, 1>(grad, h, y, grad_h, grad_y, rows, int(n), eps, stream);
    else if (aligned) launch_gradients_in_two_reads<T, V>(grad, h, y, grad_h, grad_y, rows, n, eps, workspace, device.sms, stream);
    else launch_gradients_in_two_reads<T, 1>(grad, h, y, grad_h, grad_y, rows, n, eps, workspace, device.sms, stream);
    return cudaGetLastError();
}

// As the forward's; grad_h, grad_y: null if not wanted.
extern "C" int row_norm_residual_backward(int dtype, const void* grad, const void* h, const void* y, void* grad_h, void* grad_y,
    int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    return in_type(dtype, [&](auto zero) {
        return launch_backward<decltype(zero)>(grad, h, y, grad_h, grad_y, rows, n, eps, workspace, stream);
    });
}
extern "C" int64_t row_norm_residual_workspace(int64_t rows, int64_t row_bytes) {  // of either, for the larger moments
    Device device;
    if (current_device(&device) != cudaSuccess) return 0;
    return rows * stream_parts(rows, row_bytes, device.sms) * int64_t(sizeof(Joint<double>));
}

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

// The row of n values from `at` on.
template <typename A> void finish_row(const Values<A>& h, const Values<A>& y, const Values<A>& out, int64_t at, int64_t n, double eps) {
    A buffer[kBlock], y_buffer[kBlock];
    Moments m;
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        m.merge(block_moments(h.read(at + i, count, buffer), count));
    }
    const A hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / n + eps));
    for (int64_t i = at; i < at + n; i += kBlock) {
        const int64_t count = std::min(kBlock, at + n - i);
        const A *values = h.read(i, count, buffer), *others = y.read(i, count, y_buffer);
        A* to = out.target(i, buffer);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) to[j] = (((values[j] - hi) - lo) * rstd + others[j]) * others[j];
        out.leave(i, count, buffer);
    }
}

void check(const at::Tensor& h, const at::Tensor& y) {
    TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(h.scalar_type()), "row_norm_residual: not implemented for ", h.scalar_type());
    TORCH_CHECK(h.dim() > 0 && h.sym_sizes() == y.sym_sizes(), "row_norm_residual: h and y must have one shape");
    TORCH_CHECK(h.scalar_type() == y.scalar_type(), "row_norm_residual: h and y must have one dtype, got ", h.scalar_type(), " and ", y.scalar_type());
    TORCH_CHECK(h.device() == y.device(), "row_norm_residual: h and y must be on one device, got ", h.device(), " and ", y.device());
}

// h, y (..., F) of one shape and dtype; out contiguous.
at::Tensor row_norm_residual_meta(const at::Tensor& h, const at::Tensor& y, double) {
    check(h, y);
    return at::empty_like(h, h.options(), at::MemoryFormat::Contiguous);
}
at::Tensor row_norm_residual_cpu(const at::Tensor& h, const at::Tensor& y, double eps) {
    at::Tensor out = row_norm_residual_meta(h, y, eps);
    if (h.numel() == 0) return out;
    const at::Tensor first = h.contiguous(), second = y.contiguous();
    in_type_for(h, "row_norm_residual", [&](auto zero) {
        const Values<decltype(zero)> of_h(first), of_y(second), to(out);
        const int64_t n = h.size(-1);
        in_parallel(h.numel() / n, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
            for (int64_t at = begin * n; at < end * n; at += n) finish_row(of_h, of_y, to, at, n, eps);
        });
    });
    return out;
}

#ifdef WITH_CUDA
extern "C" int64_t row_norm_residual_workspace(int64_t rows, int64_t row_bytes);
extern "C" int row_norm_residual_forward(
    int dtype, const void* h, const void* y, void* out, int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream);

at::Tensor row_norm_residual_cuda(const at::Tensor& h, const at::Tensor& y, double eps) {
    at::Tensor out = row_norm_residual_meta(h, y, eps);
    if (h.numel() == 0) return out;
    const c10::cuda::CUDAGuard guard(h.device());
    const at::Tensor first = h.contiguous(), second = y.contiguous();
    const int64_t n = h.size(-1), rows = h.numel() / n;
    const at::Tensor workspace = workspace_of(row_norm_residual_workspace(rows, n * h.element_size()), h);
    check_launch(row_norm_residual_forward(dtype_number(h, "row_norm_residual"), first.data_ptr(), second.data_ptr(), out.data_ptr(), rows,
        n, eps, workspace.data_ptr(), current_stream()), "row_norm_residual");
    return out;
}
#endif

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

// ---- The backward.

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

// The gradients of the row of n values from `at` on.
template <typename A> void differentiate_row(const Values<A>& grad, const Values<A>& h, const Values<A>& y, const Values<A>& grad_h,
    const Values<A>& grad_y, int64_t at, int64_t n, double eps) {
    A h_buffer[kBlock], y_buffer[kBlock], buffer[kBlock], of_h[kBlock], of_y[kBlock];
    Joint joint;
    for (int64_t i = at; i < at + n; i += kBlock) {
        const int64_t count = std::min(kBlock, at + n - i);
        const A *given = grad.read(i, count, buffer), *others = y.read(i, count, y_buffer);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) of_h[j] = given[j] * others[j];
        joint.merge(block_joint(h.read(i, count, h_buffer), of_h, count));
    }
    const Moments& m = joint.v;
    const A hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / n + eps));
    const A mean = static_cast<A>(joint.sum / n), slope = static_cast<A>(rstd * joint.co / n);
    for (int64_t i = at; i < at + n; i += kBlock) {
        const int64_t count = std::min(kBlock, at + n - i);
        const A *values = h.read(i, count, h_buffer), *others = y.read(i, count, y_buffer), *given = grad.read(i, count, buffer);
        A *to_h = grad_h.target(i, of_h), *to_y = grad_y.target(i, of_y);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
            const A normal = ((values[j] - hi) - lo) * rstd;
            to_h[j] = rstd * ((given[j] * others[j] - mean) - normal * slope);
            to_y[j] = given[j] * (normal + 2 * others[j]);
        }
        grad_h.leave(i, count, of_h);
        grad_y.leave(i, count, of_y);
    }
}

// The gradients of h and y; one that is not needed comes back without elements.
std::vector<at::Tensor> row_norm_residual_backward_meta(
    const at::Tensor& grad, const at::Tensor& h, const at::Tensor& y, double, std::array<bool, 2> needs) {
    check(h, y);
    TORCH_CHECK(grad.sym_sizes() == h.sym_sizes() && grad.scalar_type() == h.scalar_type() && grad.device() == h.device(),
        "row_norm_residual: the gradient must have the shape, dtype and device of the input");
    const auto result = [&](bool need) {
        return need ? at::empty_like(h, h.options(), at::MemoryFormat::Contiguous) : at::empty({0}, h.options());
    };
    return {result(needs[0]), result(needs[1])};
}

std::vector<at::Tensor> row_norm_residual_backward_cpu(
    const at::Tensor& grad, const at::Tensor& h, const at::Tensor& y, double eps, std::array<bool, 2> needs) {
    std::vector<at::Tensor> results = row_norm_residual_backward_meta(grad, h, y, eps, needs);
    if (h.numel() == 0) return results;
    const at::Tensor given = grad.contiguous(), first = h.contiguous(), second = y.contiguous();
    in_type_for(h, "row_norm_residual", [&](auto zero) {
        const Values<decltype(zero)> of_grad(given), of_h(first), of_y(second), to_h(results[0]), to_y(results[1]);
        const int64_t n = h.size(-1);
        in_parallel(h.numel() / n, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
            for (int64_t at = begin * n; at < end * n; at += n) differentiate_row(of_grad, of_h, of_y, to_h, to_y, at, n, eps);
        });
    });
    return results;
}

#ifdef WITH_CUDA
extern "C" int row_norm_residual_backward(int dtype, const void* grad, const void* h, const void* y, void* grad_h, void* grad_y,
    int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream);

std::vector<at::Tensor> row_norm_residual_backward_cuda(
    const at::Tensor& grad, const at::Tensor& h, const at::Tensor& y, double eps, std::array<bool, 2> needs) {
    const c10::cuda::CUDAGuard guard(h.device());
    std::vector<at::Tensor> results = row_norm_residual_backward_meta(grad, h, y, eps, needs);
    if (h.numel() == 0) return results;
    const at::Tensor given = grad.contiguous(), first = h.contiguous(), second = y.contiguous();
    const int64_t n = h.size(-1), rows = h.numel() / n;
    const at::Tensor workspace = workspace_of(row_norm_residual_workspace(rows, n * h.element_size()), h);
    check_launch(row_norm_residual_backward(dtype_number(h, "row_norm_residual"), given.data_ptr(), first.data_ptr(), second.data_ptr(),
        needs[0] ? results[0].data_ptr() : nullptr, needs[1] ? results[1].data_ptr() : nullptr, rows, n, eps, workspace.data_ptr(),
        current_stream()), "row_norm_residual");
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
    m.def("forward(Tensor h, Tensor y, float eps) -> Tensor");
    m.def("backward(Tensor grad, Tensor h, Tensor y, float eps, bool[2] needs) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("forward", row_norm_residual_cpu);
    m.impl("backward", row_norm_residual_backward_cpu);
}
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", row_norm_residual_meta);
    m.impl("backward", row_norm_residual_backward_meta);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", row_norm_residual_cuda);
    m.impl("backward", row_norm_residual_backward_cuda);
}
#endif
// Gradients are the business of the autograd.Function below; whoever differentiates the bare operators, or in forward mode, is told.
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"forward", "backward"}) m.impl(name, torch::autograd::autogradNotImplementedFallback());
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


NAMESPACE = _load("linear_instance_norm_residual")
_linear, _linear_gradients, _freeze, _forward, _backward = (
    getattr(getattr(torch.ops, NAMESPACE), name) for name in ("linear", "linear_gradients", "freeze", "forward", "backward")
)


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


class RowNormResidual(torch.autograd.Function):
    """out = (norm(h) + y) * y over the last dimension. Saves h and y; one operator backward, ATen's for second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, y, eps):
        return _forward(h, y, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        h, y, ctx.eps = inputs
        ctx.save_for_backward(h, y)

    @staticmethod
    def backward(ctx, grad):
        h, y = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if not torch.is_grad_enabled():
            found = _backward(grad, h, y, ctx.eps, needs)
            return *(own if need else None for own, need in zip(found, needs)), None

        def norm_residual(h, y):
            dtype = torch.promote_types(h.dtype, torch.float32)
            return ((nn.functional.layer_norm(h.to(dtype), h.shape[-1:], eps=ctx.eps) + y) * y).to(h.dtype)

        return *_differentiated(norm_residual, (h, y), grad, needs), None


class ModelNew(Freezable):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features), y (B, out_features) or broadcastable to it, of float64, float32, float16 or bfloat16, on the CPU or a
    CUDA device, in any memory layout; returns a contiguous (B, out_features). ValueError for another rank, and for one feature a row.
    Beside the Model's methods: freeze_weight.
    """

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.bmm = nn.Linear(in_features, out_features)
        self.instance_norm = nn.InstanceNorm2d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = _apply(self.bmm, x, self._frozen)
        if h.dim() != 2:
            raise ValueError(f"expected 2D input (got {x.dim()}D input)")
        if h.shape[-1] == 1:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {h.shape}")
        dtype = torch.promote_types(h.dtype, y.dtype) if y.dim() else h.dtype  # a 0-d y takes no part in promotion
        h, y = torch.broadcast_tensors(h.to(dtype), y.to(dtype))
        if torch.is_grad_enabled() and (h.requires_grad or y.requires_grad):
            return RowNormResidual.apply(h, y, self.instance_norm.eps)
        return _forward(h, y, self.instance_norm.eps)
