"""Instance normalisation that reads its input from DRAM once: a drop-in for `nn.InstanceNorm2d(C)` (no affine, no running statistics).

    y[n, c] = (x[n, c] - mean) * rstd,    rstd = 1 / sqrt(M2 / (H * W) + eps),    M2 = sum((x[n, c] - mean)^2)

A slice is the H x W values of one (sample, channel). Its statistics must be complete before its first output can be written, so every
value is used twice; the floor of one read and one write is reached only where the slice waits on chip in between. Where it waits
depends on its size alone, and so does the kernel:

    slice                     waits in                                   DRAM traffic        on
    up to 32 KiB              registers of 1 to 256 threads              1 read, 1 write     any GPU
    up to 4 MiB               a cluster's registers and shared memory    1 read, 1 write     sm_90 and later
    any                       nowhere (L2, if it happens to)             2 reads, 1 write    any GPU

Accesses are of 16 bytes; where a slice is not whole packs of 16, its few loose values at both ends go apart. Only a tensor that does not
begin on 16 bytes, and such slices of less than 32 packs, are read value by value.

Statistics are accumulated in float32 (float64 for float64) as (count, mean, M2) and merged pairwise after Chan, Golub and LeVeque
(1979), never as E[x^2] - E[x]^2. The mean is carried as an unevaluated sum hi + lo, and the output is ((x - hi) - lo) * rstd, so that a
mean far from zero (x = 1e4 + noise) costs no accuracy. Sums have a fixed order: the same input gives the same bits.

On the CPU one core takes a slice at a time, in blocks that stay in its first cache; on a machine without a GPU only that is compiled.
Gradients: first and higher order, in ATen operators.
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

// (x - mean) * rstd
template <typename A> struct Scale {
    A hi, lo, rstd;
    __device__ __forceinline__ Scale(const Moments<A>& m, A n, A eps) : hi(m.hi), lo(m.lo), rstd(reciprocal_sqrt(m.m2 * reciprocal(n) + eps)) {}
    template <typename T> __device__ __forceinline__ T operator()(T value) const {
        T out;
        from_acc(normal(to_acc(value)), out);
        return out;
    }
    __device__ __forceinline__ A normal(A value) const { return ((value - hi) - lo) * rstd; }
    template <typename T, int V> __device__ __forceinline__ Pack<T, V> operator()(const Pack<T, V>& pack) const {
        Pack<T, V> out;
#pragma unroll
        for (int i = 0; i < V; ++i) out.value[i] = (*this)(pack.value[i]);
        return out;
    }
};

// A slice of n values that begins at value `begin` of a 16-byte aligned tensor: up to V - 1 values before the first whole pack, the packs,
// and up to V - 1 values after them. The loose ones belong to the first threads of the slice, one each.
template <int V> struct Span {
    int head, tail;
    int64_t packs;
    __device__ __forceinline__ Span(int64_t begin, int64_t n) {
        head = int(min(-begin & (V - 1), n));
        packs = (n - head) / V;
        tail = int(n - head - packs * V);
    }
    // Where thread `tid`'s loose value is in the slice, or -1.
    __device__ __forceinline__ int64_t loose(int tid) const {
        if (tid < head) return tid;
        return tid < head + tail ? packs * V + tid : -1;
    }
};

// ---------------------------------------------------------------------------------------------------------------------------------
// Up to 32 KiB: the slice waits in registers.
// `group` threads (a power of two) own a slice, each ITEMS packs of it; a group is part of a warp, or the whole block.

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
__global__ void __launch_bounds__(kMaxGroup, 1) normalize_in_registers(
    const T* __restrict__ x, T* __restrict__ y, int64_t slices, int n, Acc<T> eps, int group) {
    using A = Acc<T>;
    __shared__ A warp_sums[kMaxGroup / 32];
    const int64_t slice = int64_t(blockIdx.x) * (kMaxGroup / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group;
    const Span<V> span(slice * n, slice < slices ? n : 0);
    const int packs = int(span.packs), loose = int(span.loose(lane));
    const T* gx = x + slice * n;
    T* gy = y + slice * n;

    Pack<T, V> r[ITEMS];
    A loose_value = 0;
    if (loose >= 0) loose_value = to_acc(gx[loose]);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) r[i] = load_streaming<T, V>(gx + span.head + (lane + i * group) * V);
    }
    const Moments<A> m = moments_in_registers(r, packs, loose >= 0, loose_value, n, lane, group, warp_sums);
    const Scale<A> scale(m, A(n), eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keep_packed(r[i]);
        if (lane + i * group < packs) store_streaming(gy + span.head + (lane + i * group) * V, scale(r[i]));
    }
    if (loose >= 0) gy[loose] = scale(gx[loose]);
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Up to 4 MiB: the slice waits in the registers and the shared memory of a cluster.
// Clusters are persistent: each takes every so-many-th slice, and each of its blocks a contiguous part of the slice, in chunks of 14 KiB.
// The producer warp's bulk copies fill a ring of stages in shared memory as they fall empty. Two teams of consumers take the slices in turn,
// so that one stores while the other gathers. A team takes the first chunks of its part into registers, which empties their stages at once,
// and leaves the others where they are until the slice's statistics are complete. Blocks tell each other their parts' moments by st.async,
// one 16-byte message a pair, and count the arrivals on an mbarrier; there is no cluster-wide barrier but at the start and the end.

constexpr int kTeam = 224;         // threads of a team: two and the producer warp are 15 warps, which may have 128 registers a thread
constexpr int kHeldPacks = 4;      // of a chunk, a thread
constexpr int kChunkBytes = kTeam * kHeldPacks * 16;
constexpr int kRingStages = 16;
constexpr int kHeldChunks = 3;     // of a part, in its team's registers
constexpr int kWaitingChunks = 7;  // of a part, in the ring, as far as clusters reach: the other team's fit beside them, and some to come
constexpr int kMaxCluster = 16;
constexpr int kRingSharedBytes = kRingStages * kChunkBytes;
static_assert(kRingSharedBytes + 2048 <= 227 * 1024, "the ring and its barriers are one block's shared memory on sm_90");
static_assert(kChunkBytes % 128 == 0, "stages stay aligned for the bulk copies");
static_assert(2 * kWaitingChunks < kRingStages, "both teams' waiting chunks leave room for the next slice's");
static_assert(kHeldPacks % 2 == 0, "batches of 8 values come out even, but for the part's end");
static_assert(sizeof(Moments<float>) == 16, "one st.async.v4 carries a block's moments");

// --- shared: cluster (home: kernels/instance_norm.py) ---
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals));
}
__device__ __forceinline__ void mbarrier_expect_bytes(uint64_t* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}"
        ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, uint64_t* bar) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}"
        ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ uint32_t peer_address(const void* p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
__device__ __forceinline__ void send_moments(const Moments<float>& m, Moments<float>* inbox, uint64_t* bar, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        ::"r"(peer_address(inbox, rank)), "f"(m.count), "f"(m.hi), "f"(m.lo), "f"(m.m2), "r"(peer_address(bar, rank)) : "memory");
}
// By one warp: this block's moments to every block of its cluster. A block without peers keeps them itself: st.async is for clusters.
__device__ __forceinline__ void post_moments(const Moments<float>& m, Moments<float>* inbox, uint64_t* bar, int rank, int blocks, int lane) {
    if (blocks == 1) {
        if (lane == 0) inbox[0] = m, mbarrier_arrive(bar);
    } else {
        if (lane == 0) mbarrier_expect_bytes(bar, blocks * int(sizeof(m)));
        if (lane < blocks) send_moments(m, inbox + rank, bar, lane);
    }
}
__device__ __forceinline__ int cluster_rank() { int r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ int cluster_blocks() { int r; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
// --- end shared: cluster ---

// A block's part of a slice, counted in packs; parts are whole 128-byte lines but for the last.
template <typename T> struct Part {
    static constexpr int kChunkPacks = kChunkBytes / 16;
    int packs, chunks;
    int64_t first_value;  // of the part's first pack, in the tensor
    __device__ __forceinline__ Part(int64_t slice, int n, int rank, int part_packs) {
        const Span<kPack<T>> span(slice * n, n);
        packs = min(max(int(span.packs) - rank * part_packs, 0), part_packs);
        chunks = (packs + kChunkPacks - 1) / kChunkPacks;
        first_value = slice * n + span.head + int64_t(rank) * part_packs * kPack<T>;
    }
    __device__ __forceinline__ int chunk_packs(int c) const { return min(kChunkPacks, packs - c * kChunkPacks); }
    __device__ __forceinline__ int64_t chunk_value(int c) const { return first_value + int64_t(c) * kChunkPacks * kPack<T>; }
};

template <typename T>
__global__ void __launch_bounds__(2 * kTeam + 32, 1) normalize_in_cluster(
    const T* __restrict__ x, T* __restrict__ y, int slices, int n, int part_packs, float eps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int V = kPack<T>;
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ __align__(8) uint64_t full[kRingStages], empty[kRingStages], gathered[2], exchanged[2][2];
    __shared__ Moments<float> inbox[2][2][kMaxCluster], warp_moments[2][kTeam / 32];

    const int rank = cluster_rank(), blocks = cluster_blocks();
    const int team = threadIdx.x / kTeam, tid = threadIdx.x % kTeam;  // team 2 is the producer warp
    const int first = blockIdx.x / blocks, step = gridDim.x / blocks;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kRingStages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], kTeam / 32);
        }
        for (int t = 0; t < 2; ++t) {
            mbarrier_init(&gathered[t], kTeam / 32);
            mbarrier_init(&exchanged[t][0], 1);
            mbarrier_init(&exchanged[t][1], 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();

    int stage = 0, phase = 0;
    const auto advance = [](int& s, int& p) {
        if (++s == kRingStages) s = 0, p ^= 1;
    };
    if (team == 2) {
        if (tid == 0) {  // one thread keeps the ring full
            for (int slice = first; slice < slices; slice += step) {
                const Part<T> part(slice, n, rank, part_packs);
                for (int c = 0; c < part.chunks; ++c, advance(stage, phase)) {
                    mbarrier_wait(&empty[stage], phase ^ 1);
                    mbarrier_expect_bytes(&full[stage], part.chunk_packs(c) * 16);
                    bulk_load(ring + stage * kChunkBytes, x + part.chunk_value(c), part.chunk_packs(c) * 16, &full[stage]);
                }
            }
        }
        __syncwarp();
    } else {
        const auto leave_stage = [&](int s) {
            __syncwarp();
            if (tid % 32 == 0) mbarrier_arrive(&empty[s]);
        };
        int round = 0;
        for (int slice = first; slice < slices; slice += step, ++round) {
            const Part<T> part(slice, n, rank, part_packs);
            if ((round & 1) != team) {  // the other team's
                for (int c = 0; c < part.chunks; ++c) advance(stage, phase);
                continue;
            }
            // Pack k of this thread is pack k * kTeam + tid of the part, as long as k < mine.
            const int mine = (part.packs - tid + kTeam - 1) / kTeam;
            T* const gy = y + part.first_value + tid * V;
            const auto my_pack = [&](int s, int i) { return reinterpret_cast<const Pack<T, V>*>(ring + s * kChunkBytes)[tid + i * kTeam]; };
            const int loose = rank == 0 ? int(Span<V>(int64_t(slice) * n, n).loose(tid)) : -1;
            T loose_value = T();
            if (loose >= 0) loose_value = x[int64_t(slice) * n + loose];

            // A stage's parity tells its last two fillings apart and no more: wait for none before the other team has had all of its own.
            mbarrier_wait(&gathered[team ^ 1], ((round - 1) >> 1) & 1);

            // The first chunks into registers, their stages free at once.
            Accumulator<float> accumulator;
            const auto gather = [&](int count, auto pack) {  // up to kHeldPacks of them, 8 values at a time
                constexpr int kBatch = 8 / V;
#pragma unroll
                for (int i = 0; i < kHeldPacks; i += kBatch) {
                    if (i + kBatch <= count) {
                        Pack<T, V> batch[kBatch];
#pragma unroll
                        for (int j = 0; j < kBatch; ++j) batch[j] = pack(i + j);
                        accumulator.add(batch);
                    } else if (i < count) {
                        accumulator.add(pack(i));
                    }
                }
            };
            Pack<T, V> held[kHeldChunks][kHeldPacks];
#pragma unroll
            for (int c = 0; c < kHeldChunks; ++c) {
                if (c < part.chunks) {
                    mbarrier_wait(&full[stage], phase);
#pragma unroll
                    for (int i = 0; i < kHeldPacks; ++i) {
                        if (c * kHeldPacks + i < mine) held[c][i] = my_pack(stage, i);
                    }
                    leave_stage(stage);
                    gather(mine - c * kHeldPacks, [&](int i) { return held[c][i]; });
                    advance(stage, phase);
                }
            }
            // The others stay in the ring.
            for (int c = kHeldChunks, s = stage, p = phase; c < part.chunks; ++c, advance(s, p)) {
                mbarrier_wait(&full[s], p);
                gather(mine - c * kHeldPacks, [&](int i) { return my_pack(s, i); });
            }
            __syncwarp();
            if (tid % 32 == 0) mbarrier_arrive(&gathered[team]);
            Moments<float> m = accumulator.template moments<V>();
            if (loose >= 0) m = merge(m, moments_of(to_acc(loose_value)));
            m = merge_across_warp(m);
            if (tid % 32 == 0) warp_moments[team][tid / 32] = m;
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kTeam) : "memory");  // the team alone

            // To every peer: this block's moments. From every peer: theirs. Two inboxes take turns: a peer's team can only be one slice
            // ahead, since it needs this block's message for that slice, which is sent after this slice's inbox was read.
            const int turn = (round >> 1) & 1;
            if (tid < 32) {
                m = merge_across_warp(tid < kTeam / 32 ? warp_moments[team][tid] : Moments<float>());
                m.count = __shfl_sync(~0u, m.count, 0);
                m.hi = __shfl_sync(~0u, m.hi, 0);
                m.lo = __shfl_sync(~0u, m.lo, 0);
                m.m2 = __shfl_sync(~0u, m.m2, 0);
                post_moments(m, inbox[team][turn], &exchanged[team][turn], rank, blocks, tid);
            }
            mbarrier_wait(&exchanged[team][turn], (round >> 2) & 1);
            m = inbox[team][turn][0];
            for (int r = 1; r < blocks; ++r) m = merge(m, inbox[team][turn][r]);
            const Scale<float> scale(m, float(n), eps);

            if (loose >= 0) y[int64_t(slice) * n + loose] = scale(loose_value);
#pragma unroll
            for (int c = 0; c < kHeldChunks; ++c) {
#pragma unroll
                for (int i = 0; i < kHeldPacks; ++i) {
                    const int k = c * kHeldPacks + i;
                    keep_packed(held[c][i]);
                    if (k < mine) store_streaming(gy + k * (kTeam * V), scale(held[c][i]));
                }
            }
            for (int c = kHeldChunks; c < part.chunks; ++c, advance(stage, phase)) {
#pragma unroll
                for (int i = 0; i < kHeldPacks; ++i) {
                    const int k = c * kHeldPacks + i;
                    if (k < mine) store_streaming(gy + k * (kTeam * V), scale(my_pack(stage, i)));
                }
                leave_stage(stage);
            }
        }
    }
    cluster_sync();  // no block leaves while a peer may still write to its inbox
#endif
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Any slice: it waits nowhere. Two kernels: block (part, slice) leaves the moments of its part in global memory, then merges those of
// its slice and normalises its part. With one part a slice the second kernel takes the moments itself.

constexpr int kStreamBlock = 512;

template <typename T, int V> struct StreamPart {
    int64_t slice, first, packs, loose;  // the first value and the loose one's place, in the tensor
    __device__ __forceinline__ StreamPart(int64_t n, int64_t part_packs, int parts) {
        slice = blockIdx.x / parts;
        const int64_t skipped = int64_t(blockIdx.x % parts) * part_packs;
        const Span<V> span(slice * n, n);
        first = slice * n + span.head + skipped * V;
        packs = min(part_packs, span.packs - skipped);
        loose = skipped == 0 ? span.loose(threadIdx.x) : -1;
        if (loose >= 0) loose += slice * n;
    }
};

template <typename T, int V> __device__ __forceinline__ Moments<Acc<T>> moments_of_block(const T* __restrict__ x, const StreamPart<T, V>& part) {
    using A = Acc<T>;
    __shared__ Moments<A> warp_moments[kStreamBlock / 32];
    Accumulator<A> accumulator;
    const Pack<T, V>* gx = reinterpret_cast<const Pack<T, V>*>(x + part.first);
#pragma unroll 4
    for (int64_t j = threadIdx.x; j < part.packs; j += kStreamBlock) accumulator.add(gx[j]);
    Moments<A> m = accumulator.template moments<V>();
    if (part.loose >= 0) m = merge(m, moments_of(to_acc(x[part.loose])));
    m = merge_across_warp(m);
    if (threadIdx.x % 32 == 0) warp_moments[threadIdx.x / 32] = m;
    __syncthreads();
    m = warp_moments[0];
    for (int w = 1; w < kStreamBlock / 32; ++w) m = merge(m, warp_moments[w]);
    return m;
}

template <typename T, int V> __global__ void __launch_bounds__(kStreamBlock, 1) moments_of_parts(
    const T* __restrict__ x, Moments<Acc<T>>* __restrict__ moments, int64_t n, int64_t part_packs, int parts) {
    const Moments<Acc<T>> m = moments_of_block(x, StreamPart<T, V>(n, part_packs, parts));
    if (threadIdx.x == 0) moments[blockIdx.x] = m;
}

template <typename T, int V> __global__ void __launch_bounds__(kStreamBlock, 1) normalize_parts(
    const T* __restrict__ x, T* __restrict__ y, const Moments<Acc<T>>* __restrict__ moments, int64_t n, int64_t part_packs, int parts,
    Acc<T> eps) {
    using A = Acc<T>;
    const StreamPart<T, V> part(n, part_packs, parts);
    Moments<A> m;
    if (parts == 1) {
        m = moments_of_block(x, part);
    } else {
        for (int p = 0; p < parts; ++p) m = merge(m, moments[part.slice * parts + p]);
    }
    const Scale<A> scale(m, A(n), eps);
    if (part.loose >= 0) y[part.loose] = scale(x[part.loose]);
    const T* gx = x + part.first;
    T* gy = y + part.first;
#pragma unroll 4
    for (int64_t j = threadIdx.x; j < part.packs; j += kStreamBlock) store_streaming(gy + j * V, scale(load_streaming<T, V>(gx + j * V)));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Launchers. Every function returns a cudaError_t; pointers are device memory of x's device, which is current.

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

// Parts of a slice in the two-read kernels: enough blocks for several waves, none under 64 KiB.
static int stream_parts(int64_t slices, int64_t slice_bytes, int sms) {
    const int64_t wanted = divide_up(32 * sms, slices), most = slice_bytes / (64 * 1024);
    return int(wanted < most ? wanted : (most > 1 ? most : 1));
}

template <typename T, int V>
static cudaError_t launch_in_registers(const T* x, T* y, int64_t slices, int n, double eps, cudaStream_t stream) {
    // As few threads a slice as hold it: fewer shuffles, more loads in flight each. But side by side they fill 32-byte sectors.
    const int packs = int(divide_up(n, V));
    int group = 1;
    while (group < packs && group * V * sizeof(T) < 32) group *= 2;
    while (group * kRegisterItems < packs || (V > 1 && n % V != 0 && group < 32)) group *= 2;
    const int items = int(divide_up(packs, group));
    auto kernel = normalize_in_registers<T, V, kRegisterItems>;
    if (items == 1) kernel = normalize_in_registers<T, V, 1>;
    else if (items == 2) kernel = normalize_in_registers<T, V, 2>;
    else if (items <= 4) kernel = normalize_in_registers<T, V, 4>;
    kernel<<<unsigned(divide_up(slices, kMaxGroup / group)), kMaxGroup, 0, stream>>>(x, y, slices, n, Acc<T>(eps), group);
    return cudaGetLastError();
}

// The smallest cluster whose blocks' parts leave room for the next slice; the largest one may fill the ring. 0: the slice does not fit.
static int cluster_size(int64_t slice_bytes) {
    for (int blocks = 1; blocks <= kMaxCluster; blocks *= 2) {
        const int chunks = kHeldChunks + (blocks < kMaxCluster ? kWaitingChunks : kRingStages);
        if (slice_bytes <= int64_t(blocks) * chunks * kChunkBytes) return blocks;
    }
    return 0;
}

// *launched is false where the device cannot hold such a cluster (a small partition of a GPU).
template <typename T>
static cudaError_t launch_in_cluster(
    const T* x, T* y, int64_t slices, int n, int blocks, double eps, cudaStream_t stream, bool* launched) {
    auto kernel = normalize_in_cluster<T>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingSharedBytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(2 * kTeam + 32);
    config.dynamicSmemBytes = kRingSharedBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    *launched = error == cudaSuccess && clusters > 0;
    if (!*launched) return error;
    config.gridDim = dim3(unsigned((slices < clusters ? slices : clusters) * blocks));
    const int part_packs = int(divide_up(divide_up(n / kPack<T>, blocks), 8) * 8);
    return cudaLaunchKernelEx(&config, kernel, x, y, int(slices), n, part_packs, float(eps));
}

template <typename T, int V>
static cudaError_t launch_two_reads(
    const T* x, T* y, int64_t slices, int64_t n, double eps, void* workspace, int sms, cudaStream_t stream) {
    int parts = stream_parts(slices, n * sizeof(T), sms);
    const int64_t part_packs = divide_up(divide_up(n / V, parts), 8) * 8;
    parts = int(divide_up(n / V, part_packs));
    auto* moments = static_cast<Moments<Acc<T>>*>(workspace);
    const dim3 grid(unsigned(slices * parts));
    if (parts > 1) moments_of_parts<T, V><<<grid, kStreamBlock, 0, stream>>>(x, moments, n, part_packs, parts);
    normalize_parts<T, V><<<grid, kStreamBlock, 0, stream>>>(x, y, moments, n, part_packs, parts, Acc<T>(eps));
    return cudaGetLastError();
}

template <typename T>
static cudaError_t launch(const void* xv, void* yv, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    const T* x = static_cast<const T*>(xv);
    T* y = static_cast<T*>(yv);
    Device device;
    const cudaError_t error = current_device(&device);
    if (error != cudaSuccess) return error;
    constexpr int V = kPack<T>;
    const bool aligned = aligned_16(x, y);
    const int64_t bytes = n * sizeof(T);
    const bool by_packs = aligned && (n % V == 0 || n >= 32 * V);  // a group of 32 threads has one for each loose value
    if (by_packs && bytes <= kMaxGroup * kRegisterItems * 16) return launch_in_registers<T, V>(x, y, slices, int(n), eps, stream);
    if (!by_packs && n <= kMaxGroup * kRegisterItems) return launch_in_registers<T, 1>(x, y, slices, int(n), eps, stream);
    if constexpr (sizeof(T) < 8) {
        const int blocks = cluster_size(bytes);
        if (aligned && blocks > 0 && device.major >= 9 && device.shared_bytes >= kRingSharedBytes + 2048) {
            bool launched = false;
            const cudaError_t error = launch_in_cluster(x, y, slices, int(n), blocks, eps, stream, &launched);
            if (launched || error != cudaSuccess) return error;
        }
    }
    if (aligned) return launch_two_reads<T, V>(x, y, slices, n, eps, workspace, device.sms, stream);
    return launch_two_reads<T, 1>(x, y, slices, n, eps, workspace, device.sms, stream);
}

// x, y: `slices` contiguous slices of `n` values. dtype: 0 float32, 1 float64, 2 float16, 3 bfloat16.
// workspace: instance_norm_workspace bytes.
extern "C" int64_t instance_norm_workspace(int64_t slices, int64_t slice_bytes) {
    Device device;
    if (current_device(&device) != cudaSuccess) return 0;
    return slices * stream_parts(slices, slice_bytes, device.sms) * int64_t(sizeof(Moments<double>));
}
extern "C" int instance_norm_forward(
    int dtype, const void* x, void* y, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    switch (dtype) {
        case 0: return launch<float>(x, y, slices, n, eps, workspace, stream);
        case 1: return launch<double>(x, y, slices, n, eps, workspace, stream);
        case 2: return launch<__half>(x, y, slices, n, eps, workspace, stream);
        default: return launch<__nv_bfloat16>(x, y, slices, n, eps, workspace, stream);
    }
}
extern "C" const char* instance_norm_error(int error) { return cudaGetErrorString(cudaError_t(error)); }
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

template <typename T> Moments slice_moments(const T* x, int64_t n) {
    acc_t<T> values[kBlock];
    Moments m;
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        if constexpr (std::is_same_v<T, acc_t<T>>) {
            m.merge(block_moments(x + i, count));
        } else {
            load_values(x + i, values, count);
            m.merge(block_moments(values, count));
        }
    }
    return m;
}

template <typename T> void normalize(const T* x, T* y, int64_t begin, int64_t end, const Moments& m, double eps) {
    using A = acc_t<T>;
    const A hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / m.count + eps));
    const auto scale = [=](const A* from, A* to, int64_t n) {
        for (int64_t j = 0; j < n; ++j) to[j] = ((from[j] - hi) - lo) * rstd;
    };
    if constexpr (std::is_same_v<T, A>) {
        scale(x + begin, y + begin, end - begin);
    } else {
        A values[kBlock];
        for (int64_t i = begin; i < end; i += kBlock) {
            const int64_t count = std::min(kBlock, end - i);
            load_values(x + i, values, count);
            scale(values, values, count);
            store_values(values, y + i, count);
        }
    }
}

// Whole slices to each thread where there are enough of them, or else parts of one slice after the other.
template <typename T> void forward_cpu(const T* x, T* y, int64_t slices, int64_t n, double eps) {
    if (slices >= at::get_num_threads()) {
        at::parallel_for(0, slices, std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
            for (int64_t s = begin; s < end; ++s) normalize(x + s * n, y + s * n, 0, n, slice_moments(x + s * n, n), eps);
        });
        return;
    }
    const int64_t part = 16 * kBlock, parts = (n + part - 1) / part;  // of fixed size: the sum's order is the same on any machine
    std::vector<Moments> moments(parts);
    for (int64_t s = 0; s < slices; ++s) {
        const T* gx = x + s * n;
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) moments[p] = slice_moments(gx + p * part, std::min(part, n - p * part));
        });
        Moments m;
        for (const Moments& other : moments) m.merge(other);
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
            normalize(gx, y + s * n, begin * part, std::min(n, end * part), m, eps);
        });
    }
}

// x (..., H, W), H * W > 0; y contiguous, as InstanceNorm2d's is.
at::Tensor instance_norm_cpu(const at::Tensor& x, double eps) {
    TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(x.scalar_type()), "instance_norm: not implemented for ", x.scalar_type());
    const at::Tensor input = x.contiguous();
    at::Tensor y = at::empty_like(input);
    if (x.numel() == 0) return y;
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n;
    switch (x.scalar_type()) {
        case at::kFloat: forward_cpu(input.data_ptr<float>(), y.data_ptr<float>(), slices, n, eps); break;
        case at::kDouble: forward_cpu(input.data_ptr<double>(), y.data_ptr<double>(), slices, n, eps); break;
        case at::kHalf: forward_cpu(input.data_ptr<at::Half>(), y.data_ptr<at::Half>(), slices, n, eps); break;
        case at::kBFloat16: forward_cpu(input.data_ptr<at::BFloat16>(), y.data_ptr<at::BFloat16>(), slices, n, eps); break;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "instance_norm: not implemented for ", x.scalar_type());
    }
    return y;
}

at::Tensor instance_norm_meta(const at::Tensor& x, double eps) { return at::empty_like(x, x.options(), at::MemoryFormat::Contiguous); }

}  // namespace

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

extern "C" int64_t instance_norm_workspace(int64_t slices, int64_t slice_bytes);
extern "C" int instance_norm_forward(
    int dtype, const void* x, void* y, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream);
extern "C" const char* instance_norm_error(int error);

static at::Tensor instance_norm_cuda(const at::Tensor& x, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor input = x.contiguous();
    at::Tensor y = at::empty_like(input);
    if (x.numel() == 0) return y;
    int dtype = 0;
    switch (x.scalar_type()) {
        case at::kFloat: dtype = 0; break;
        case at::kDouble: dtype = 1; break;
        case at::kHalf: dtype = 2; break;
        case at::kBFloat16: dtype = 3; break;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "instance_norm: not implemented for ", x.scalar_type());
    }
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n;
    const at::Tensor workspace = at::empty({instance_norm_workspace(slices, n * x.element_size())}, x.options().dtype(at::kByte));
    const int error = instance_norm_forward(
        dtype, input.data_ptr(), y.data_ptr(), slices, n, eps, workspace.data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(error == 0, "instance_norm: ", instance_norm_error(error));
    return y;
}
#endif

TORCH_LIBRARY(OPERATOR_NAMESPACE, m) { m.def("forward(Tensor x, float eps) -> Tensor"); }
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, CPU, m) { m.impl("forward", instance_norm_cpu); }
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, Meta, m) { m.impl("forward", instance_norm_meta); }
// Gradients are the business of the autograd.Function below; whoever differentiates the bare operator, or in forward mode, is told.
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, Autograd, m) { m.impl("forward", torch::autograd::autogradNotImplementedFallback()); }
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(OPERATOR_NAMESPACE, CUDA, m) { m.impl("forward", instance_norm_cuda); }
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


NAMESPACE = _load_operators("instance_norm")
_forward = getattr(torch.ops, NAMESPACE).forward


class InstanceNorm(torch.autograd.Function):
    """y = (x - mean) * rstd over the last two dimensions. Saves x alone; the gradient is differentiable in turn."""

    @staticmethod
    def forward(x, eps):
        return _forward(x, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.eps = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, torch.float32)
        deviation = x.to(dtype)
        deviation = deviation - deviation.mean((-2, -1), keepdim=True)
        rstd = (deviation.square().mean((-2, -1), keepdim=True) + ctx.eps).rsqrt()
        normal, grad = deviation * rstd, grad.to(dtype)
        grad = rstd * (grad - grad.mean((-2, -1), keepdim=True) - normal * (grad * normal).mean((-2, -1), keepdim=True))
        return grad.to(x.dtype), None


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes and (empty) state_dict.

    forward: x (N, C, H, W) or (C, H, W) of float64, float32, float16 or bfloat16, on the CPU or a CUDA device, in any memory layout;
    returns a contiguous tensor of x's shape and dtype. ValueError for another rank, and for slices of a single value.
    """

    def __init__(self, num_features: int):
        super().__init__()
        self.inorm = nn.InstanceNorm2d(num_features=num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() not in (3, 4):
            raise ValueError(f"expected 3D or 4D input (got {x.dim()}D input)")
        if x.shape[-2] * x.shape[-1] == 1:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.shape}")
        if torch.is_grad_enabled() and x.requires_grad:
            return InstanceNorm.apply(x, self.inorm.eps)
        return _forward(x, self.inorm.eps)
