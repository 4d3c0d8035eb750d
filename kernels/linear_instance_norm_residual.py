"""A linear layer, then a norm over each row, a sum and a product in one kernel: a drop-in for the Model of the same name.

    h = x W^T + b;    h = (h - mean) * rstd over each row;    out = (h + y) * y

The unsqueezes around the Model's `InstanceNorm2d` make one channel of 1 x F pixels of each row, so `mean` and `rstd` are a row's own, over
its F features; rstd = 1 / sqrt(M2 / F + eps), M2 = sum((h - mean)^2). The matrix product is `self.bmm`; all that follows it is one kernel:

    row                       waits in                                   traffic                       on
    up to 32 KiB              registers of 1 to 256 threads              h, y read, out written        any GPU
    any                       nowhere                                    h read twice                  any GPU

At the benchmark shape h is 33.5 MB, fresh from the matrix product and still in L2. Statistics are accumulated in float32 (float64 for
float64) and merged after Chan, Golub and LeVeque (1979); the mean is an unevaluated sum hi + lo, so one far from zero costs nothing.

On the CPU each core takes whole rows. Gradients: first and higher order, in ATen operators.
"""

import contextlib
import fcntl
import hashlib
import inspect
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

// --- shared: group sum (home: kernels/instance_norm.py) ---
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
// --- end shared: group sum ---

// --- shared: moments in registers (home: kernels/instance_norm.py) ---
// Of n values that a group holds, `packs` packs and one loose value a thread; in all of its threads. Two sweeps over registers.
template <typename T, int V, int ITEMS, typename A> __device__ __forceinline__ Moments<A> moments_in_registers(
    Pack<T, V> (&r)[ITEMS], int packs, bool has_loose, A loose_value, int n, int lane, int group, A* warp_sums) {
    const A share = reciprocal(A(n));  // multiplied in before the sum, so that large values do not overflow it
    A sum = has_loose ? loose_value * share : A(0);
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
    A rest = has_loose ? loose_value - m.hi : A(0);
    m.m2 = rest * rest;
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
// --- end shared: moments in registers ---

template <typename T, int V, int ITEMS>
__global__ void __launch_bounds__(kMaxGroup, 1) finish_in_registers(
    const T* __restrict__ h, const T* __restrict__ y, T* __restrict__ out, int64_t rows, int n, Acc<T> eps, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[kMaxGroup / 32];
    const int64_t row = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group, packs = row < rows ? n / V : 0;

    Pack<T, V> r[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) r[i] = load_streaming<T, V>(h + row * n + int64_t(lane + i * group) * V);
    }
    const Moments<A> m = moments_in_registers(r, packs, false, A(0), n, lane, group, warp_sums);
    const Finish<A> finish(m, A(n), eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int64_t at = row * n + int64_t(lane + i * group) * V;
        if (lane + i * group < packs) store_streaming(out + at, finish(r[i], load_streaming<T, V>(y + at)));
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
        for (int p = 0; p < parts; ++p) m = merge(m, moments[row * parts + p]);
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

// Parts of a row in the two-read kernels: enough blocks for two waves, none under 64 KiB.
static int stream_parts(int64_t rows, int64_t row_bytes, int sms) {
    const int64_t wanted = divide_up(8 * sms, rows), most = row_bytes / (64 * 1024);
    return int(wanted < most ? wanted : (most > 1 ? most : 1));
}

template <typename T, int V>
static cudaError_t launch_in_registers(const T* h, const T* y, T* out, int64_t rows, int n, double eps, cudaStream_t stream) {
    const int packs = n / V;
    int group = 1;
    while (V > 1 && group < 32 && group < packs) group *= 2;
    while (group < kMaxGroup && group * kRegisterItems < packs) group *= 2;
    const int items = V > 1 ? int(divide_up(packs, group)) : kRegisterItems;
    auto kernel = finish_in_registers<T, V, kRegisterItems>;
    if constexpr (V > 1) {
        if (items == 1) kernel = finish_in_registers<T, V, 1>;
        else if (items <= 4) kernel = finish_in_registers<T, V, 4>;
    }
    kernel<<<unsigned(divide_up(rows, kMaxGroup / group)), kMaxGroup, 0, stream>>>(h, y, out, rows, n, Acc<T>(eps), group);
    return cudaGetLastError();
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
    if (!aligned && n <= kMaxGroup * kRegisterItems) return launch_in_registers<T, 1>(h, y, out, rows, int(n), eps, stream);
    if (aligned && bytes <= kMaxGroup * kRegisterItems * 16) {
        return launch_in_registers<T, kPack<T>>(h, y, out, rows, int(n), eps, stream);
    }
    if (aligned) return launch_two_reads<T, kPack<T>>(h, y, out, rows, n, eps, workspace, device.sms, stream);
    return launch_two_reads<T, 1>(h, y, out, rows, n, eps, workspace, device.sms, stream);
}

// h, y, out: `rows` contiguous rows of `n` values. dtype: 0 float32, 1 float64, 2 float16, 3 bfloat16.
// workspace: row_norm_residual_workspace bytes.
extern "C" int64_t row_norm_residual_workspace(int64_t rows, int64_t row_bytes) {
    Device device;
    if (current_device(&device) != cudaSuccess) return 0;
    return rows * stream_parts(rows, row_bytes, device.sms) * int64_t(sizeof(Moments<double>));
}
extern "C" int row_norm_residual_forward(
    int dtype, const void* h, const void* y, void* out, int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    switch (dtype) {
        case 0: return launch<float>(h, y, out, rows, n, eps, workspace, stream);
        case 1: return launch<double>(h, y, out, rows, n, eps, workspace, stream);
        case 2: return launch<__half>(h, y, out, rows, n, eps, workspace, stream);
        default: return launch<__nv_bfloat16>(h, y, out, rows, n, eps, workspace, stream);
    }
}
extern "C" const char* row_norm_residual_error(int error) { return cudaGetErrorString(cudaError_t(error)); }
"""

CPP_SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
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

template <typename T> void finish_row(const T* h, const T* y, T* out, int64_t n, double eps) {
    using A = acc_t<T>;
    A values[kBlock], others[kBlock];
    Moments m;
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        load_values(h + i, values, count);
        m.merge(block_moments(values, count));
    }
    const A hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / n + eps));
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        load_values(h + i, values, count);
        load_values(y + i, others, count);
        for (int64_t j = 0; j < count; ++j) values[j] = (((values[j] - hi) - lo) * rstd + others[j]) * others[j];
        store_values(values, out + i, count);
    }
}

template <typename T> void forward_cpu(const at::Tensor& h, const at::Tensor& y, at::Tensor& out, double eps) {
    const int64_t n = h.size(-1);
    const T *gh = h.data_ptr<T>(), *gy = y.data_ptr<T>();
    T* gout = out.data_ptr<T>();
    at::parallel_for(0, h.numel() / n, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) finish_row(gh + r * n, gy + r * n, gout + r * n, n, eps);
    });
}

void check(const at::Tensor& h, const at::Tensor& y) {
    TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(h.scalar_type()), "row_norm_residual: not implemented for ", h.scalar_type());
    TORCH_CHECK(h.dim() > 0 && h.sym_sizes() == y.sym_sizes(), "row_norm_residual: h and y must have one shape");
    TORCH_CHECK(h.scalar_type() == y.scalar_type(), "row_norm_residual: h and y must have one dtype, got ", h.scalar_type(), " and ", y.scalar_type());
    TORCH_CHECK(h.device() == y.device(), "row_norm_residual: h and y must be on one device, got ", h.device(), " and ", y.device());
}

// h, y (..., F) of one shape and dtype; out contiguous.
at::Tensor row_norm_residual_cpu(const at::Tensor& h, const at::Tensor& y, double eps) {
    check(h, y);
    const at::Tensor first = h.contiguous(), second = y.contiguous();
    at::Tensor out = at::empty_like(first);
    if (h.numel() == 0) return out;
    switch (h.scalar_type()) {
        case at::kFloat: forward_cpu<float>(first, second, out, eps); break;
        case at::kDouble: forward_cpu<double>(first, second, out, eps); break;
        case at::kHalf: forward_cpu<at::Half>(first, second, out, eps); break;
        case at::kBFloat16: forward_cpu<at::BFloat16>(first, second, out, eps); break;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "row_norm_residual: not implemented for ", h.scalar_type());
    }
    return out;
}

at::Tensor row_norm_residual_meta(const at::Tensor& h, const at::Tensor& y, double eps) {
    check(h, y);
    return at::empty_like(h, h.options(), at::MemoryFormat::Contiguous);
}

}  // namespace

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

extern "C" int64_t row_norm_residual_workspace(int64_t rows, int64_t row_bytes);
extern "C" int row_norm_residual_forward(
    int dtype, const void* h, const void* y, void* out, int64_t rows, int64_t n, double eps, void* workspace, cudaStream_t stream);
extern "C" const char* row_norm_residual_error(int error);

static at::Tensor row_norm_residual_cuda(const at::Tensor& h, const at::Tensor& y, double eps) {
    check(h, y);
    const c10::cuda::CUDAGuard guard(h.device());
    const at::Tensor first = h.contiguous(), second = y.contiguous();
    at::Tensor out = at::empty_like(first);
    if (h.numel() == 0) return out;
    int dtype = 0;
    switch (h.scalar_type()) {
        case at::kFloat: dtype = 0; break;
        case at::kDouble: dtype = 1; break;
        case at::kHalf: dtype = 2; break;
        case at::kBFloat16: dtype = 3; break;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "row_norm_residual: not implemented for ", h.scalar_type());
    }
    const int64_t n = h.size(-1), rows = h.numel() / n;
    const at::Tensor workspace = at::empty({row_norm_residual_workspace(rows, n * h.element_size())}, h.options().dtype(at::kByte));
    const int error = row_norm_residual_forward(dtype, first.data_ptr(), second.data_ptr(), out.data_ptr(), rows, n, eps,
        workspace.data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(error == 0, "row_norm_residual: ", row_norm_residual_error(error));
    return out;
}
#endif

TORCH_LIBRARY(OPERATOR_NAMESPACE, m) { m.def("forward(Tensor h, Tensor y, float eps) -> Tensor"); }
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, CPU, m) { m.impl("forward", row_norm_residual_cpu); }
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, Meta, m) { m.impl("forward", row_norm_residual_meta); }
// Gradients are the business of the autograd.Function below; whoever differentiates the bare operator, or in forward mode, is told.
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, Autograd, m) { m.impl("forward", torch::autograd::autogradNotImplementedFallback()); }
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, CUDA, m) { m.impl("forward", row_norm_residual_cuda); }
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


NAMESPACE = _load_operators("linear_instance_norm_residual")
_forward = getattr(torch.ops, NAMESPACE).forward


class RowNormResidual(torch.autograd.Function):
    """out = (norm(h) + y) * y over the last dimension. Saves h and y; the gradient is differentiable in turn."""

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
        dtype = torch.promote_types(h.dtype, torch.float32)
        deviation, other, grad = h.to(dtype), y.to(dtype), grad.to(dtype)
        deviation = deviation - deviation.mean(-1, keepdim=True)
        rstd = (deviation.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normal = deviation * rstd
        grad_h = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_h = grad * other
            grad_h = rstd * (grad_h - grad_h.mean(-1, keepdim=True) - normal * (grad_h * normal).mean(-1, keepdim=True))
            grad_h = grad_h.to(h.dtype)
        if ctx.needs_input_grad[1]:
            grad_y = (grad * (normal + 2 * other)).to(y.dtype)
        return grad_h, grad_y, None


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features), y (B, out_features) or broadcastable to it, of float64, float32, float16 or bfloat16, on the CPU or a
    CUDA device, in any memory layout; returns a contiguous (B, out_features). ValueError for another rank, and for one feature a row.
    """

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.bmm = nn.Linear(in_features, out_features)
        self.instance_norm = nn.InstanceNorm2d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.bmm(x)
        if h.dim() != 2:
            raise ValueError(f"expected 2D input (got {x.dim()}D input)")
        if h.shape[-1] == 1:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {h.shape}")
        dtype = torch.promote_types(h.dtype, y.dtype) if y.dim() else h.dtype  # a 0-d y takes no part in promotion
        h, y = torch.broadcast_tensors(h.to(dtype), y.to(dtype))
        if torch.is_grad_enabled() and (h.requires_grad or y.requires_grad):
            return RowNormResidual.apply(h, y, self.instance_norm.eps)
        return _forward(h, y, self.instance_norm.eps)
