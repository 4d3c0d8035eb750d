# SPDX-License-Identifier: MIT
"""Instance normalisation that reads its input from DRAM once: a drop-in for `nn.InstanceNorm2d(C)` (no affine, no running statistics).

    y[n, c] = (x[n, c] - mean) * rstd,    rstd = 1 / sqrt(var + eps)

over the H x W values of each (sample, channel), a slice; var is the biased variance. Its gradient, g being that of y:

    dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * mean((x - mean) * g))

The kernels take float32, float16 and bfloat16 on a GPU, and the forward without gradients on a CPU; `fits` says so in code. All else
(float64, gradients on a CPU, hooks, function transforms, second derivatives, errors) is PyTorch's own instance_norm.

A slice's statistics must be complete before its first output can be written, so every value is used twice. To read it once, the slice
waits on chip in between; where, depends on its size alone:

    slice (backward, of x and of g each)   waits in                                  DRAM traffic
    up to 64 KiB (32 KiB)                  registers of 1 to 512 threads             one read, one write
    up to 4 MiB (2 MiB), whole packs       a cluster's shared memory and registers   one read, one write; sm_90 and sm_100
    any                                    nowhere (L2, if it happens to)            two reads, one write

A pack is 16 bytes. Slices of another size are loaded value by value, up to 8192 values (4096) in registers, else in two reads.

At x (112, 64, 512, 512) in float32 the forward moves 15.03 GB, with about 10 FLOPs a value; the backward 22.5 GB. On one H200, by
`python harness.py instance_norm --backward`: forward MEASURE ms, MEASURE% of the copy's bandwidth, MEASURE x eager; forward and backward
MEASURE ms, MEASURE x eager.
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
from torch.nn import functional
from torch.utils import cpp_extension

CUDA_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// ---- PTX
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* bar, uint32_t bytes) {  // arrives, and announces bytes that a copy will bring
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}"
                 ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Barrier `id` (1 to 15) of `threads` threads of this block.
__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// ---------------------------------------------------------------------------------------------------------------------------------
// Memory. A pack is 16 bytes, what a thread loads or stores at once; V = 1 instead where slices are not whole packs. A place holds the
// values at one position of a slice: OPERANDS is 1 forward (x) and 2 backward (x and g, the gradient of y).

template <typename T> constexpr int kPack = 16 / sizeof(T);
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T value[V]; };
template <typename T, int V, int OPERANDS> struct Place { Pack<T, V> of[OPERANDS]; };

// Loads ask L2 to evict their lines last. Measured: a copy kernel reaches 100% of cudaMemcpy so, and 91% to 93% with evict_first.
__device__ __forceinline__ uint64_t evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// volatile: the compiler keeps all loads of a thread before the first use.
template <typename T, int V> __device__ __forceinline__ Pack<T, V> load(const T* p, bool exists) {
    Pack<T, V> pack = {};
    if constexpr (V > 1) {
        int4& words = *reinterpret_cast<int4*>(&pack);
        asm volatile("{\n.reg .pred exists;\nsetp.ne.s32 exists, %5, 0;\n"
            "@exists ld.global.L2::cache_hint.v4.s32 {%0, %1, %2, %3}, [%4], %6;\n}"
            : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w) : "l"(p), "r"(int(exists)), "l"(evict_last()) : "memory");
    } else if (exists) {
        pack.value[0] = *p;
    }
    return pack;
}
template <int V, int OPERANDS, typename T>
__device__ __forceinline__ Place<T, V, OPERANDS> load_place(const T* x, const T* g, int64_t i, bool exists) {
    Place<T, V, OPERANDS> place;
    place.of[0] = load<T, V>(x + i, exists);
    if constexpr (OPERANDS == 2) place.of[1] = load<T, V>(g + i, exists);
    return place;
}
template <typename T, int V> __device__ __forceinline__ void store(T* p, const Pack<T, V>& pack) {
    if constexpr (V > 1) *reinterpret_cast<int4*>(p) = *reinterpret_cast<const int4*>(&pack);
    else *p = pack.value[0];
}

// 16-bit values wait in registers as they came: the compiler may not assume that it has widened this pack before, and keep that.
template <typename T, int V, int OPERANDS> __device__ __forceinline__ void keep_packed(Place<T, V, OPERANDS>& place) {
    if constexpr (V > 1 && sizeof(T) == 2) {
#pragma unroll
        for (int o = 0; o < OPERANDS; ++o) {
            int4& words = *reinterpret_cast<int4*>(&place.of[o]);
            asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Arithmetic. A slice is reduced to four sums in double (forward two): of d, d^2, g and d * g, where d = x - anchor and the anchor is the
// slice's first value. One sweep is enough: the anchor is one of the n values, so the sum of d^2 is at most n times that of the squared
// deviations from the mean, and subtracting one from the other loses at most log2(n) of a double's 53 bits. Equal values leave zeros.

template <int OPERANDS> struct alignas(16) Sums {
    double of[2 * OPERANDS];

    // The values of a pack are summed in float, around their own mean, and the pack as a whole in double.
    template <typename T, int V> __device__ __forceinline__ void add(const Place<T, V, OPERANDS>& place, float anchor) {
        float d[V], sum = 0, square = 0, g_sum = 0, product = 0;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            d[i] = to_float(place.of[0].value[i]) - anchor;
            sum += d[i];
            if constexpr (OPERANDS == 2) g_sum += to_float(place.of[1].value[i]);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const float deviation = d[i] - sum * (1.0f / V);
            square = fmaf(deviation, deviation, square);
            if constexpr (OPERANDS == 2) product = fmaf(deviation, to_float(place.of[1].value[i]), product);
        }
        const double all = sum, mean = all * (1.0 / V);
        of[0] += all;
        of[1] += fma(all, mean, double(square));
        if constexpr (OPERANDS == 2) {
            of[2] += double(g_sum);
            of[3] += fma(mean, double(g_sum), double(product));
        }
    }
    __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
        for (int k = 0; k < 2 * OPERANDS; ++k) of[k] += other.of[k];
    }
    // Over `lanes` neighbouring lanes of a warp, a power of two; all of them get the same bits.
    __device__ __forceinline__ void add_across_lanes(int lanes) {
        for (int offset = 1; offset < lanes; offset *= 2) {
#pragma unroll
            for (int k = 0; k < 2 * OPERANDS; ++k) of[k] += __shfl_xor_sync(~0u, of[k], offset);
        }
    }
};

// y = (x - mean) * rstd, or dx = (g - mean(g)) * rstd - (x - mean) * slope, each by fused multiply-adds. x - hi, where hi is the mean
// rounded to float, is nearly exact however far the mean is from zero; what the rounding left over is in `rest`.
template <int OPERANDS> struct Result {
    float hi, rstd, slope, rest;

    __device__ __forceinline__ Result(const Sums<OPERANDS>& sums, float anchor, double share, double eps) {  // share: 1 / n
        const double shift = sums.of[0] * share, mean = anchor + shift,
                     variance = (sums.of[1] - sums.of[0] * shift) * share;
        const double r = rsqrt((variance < 0 ? 0 : variance) + eps);  // not fmax, which would drop a NaN
        hi = float(mean), rstd = float(r);
        const double lo = mean - hi;
        if constexpr (OPERANDS == 1) {
            rest = float(-lo * r);
        } else {
            const double g_mean = sums.of[2] * share, s = r * r * r * ((sums.of[3] - sums.of[0] * g_mean) * share);
            slope = float(s), rest = float(lo * s - g_mean * r);
        }
    }
    template <typename T, int V> __device__ __forceinline__ Pack<T, V> operator()(const Place<T, V, OPERANDS>& place) const {
        Pack<T, V> out;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const float deviation = to_float(place.of[0].value[i]) - hi;
            if constexpr (OPERANDS == 1) out.value[i] = from_float<T>(fmaf(deviation, rstd, rest));
            else out.value[i] = from_float<T>(fmaf(-deviation, slope, fmaf(to_float(place.of[1].value[i]), rstd, rest)));
        }
        return out;
    }
};

// ---------------------------------------------------------------------------------------------------------------------------------
// Slices of up to 64 KiB (backward 32 KiB) wait in registers. `group` threads, a power of two, own a slice: lane l has the packs l,
// l + group, ... of it, kItems at most. A block has whole groups.

constexpr int kMaxGroup = 512, kSmallBlock = 64;
template <int V, int OPERANDS> constexpr int kItems = (V > 1 ? 8 : 16) / OPERANDS;

// The sums of `group` threads, in each of them. Called once a kernel.
template <int OPERANDS> __device__ __forceinline__ Sums<OPERANDS> sums_of_group(Sums<OPERANDS> own, int group) {
    own.add_across_lanes(min(group, 32));
    if (group <= 32) return own;
    __shared__ Sums<OPERANDS> warp_sums[kMaxGroup / 32];
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = own;
    __syncthreads();
    own = {};
    for (int w = 0; w < group / 32; ++w) own.add(warp_sums[(threadIdx.x & -group) / 32 + w]);
    return own;
}

template <typename T, int V, int OPERANDS> __global__ void __launch_bounds__(kMaxGroup, 2) norm_in_registers(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int64_t slices, int n, double share, double eps, int group) {
    const int64_t slice = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / group, begin = slice * n;
    const int first = (threadIdx.x & (group - 1)) * V, end = slice < slices ? n : 0;
    const float anchor = end > 0 ? to_float(x[begin]) : 0;
    x += begin, g += begin, y += begin;

    Place<T, V, OPERANDS> held[kItems<V, OPERANDS>];
    Sums<OPERANDS> sums = {};
#pragma unroll
    for (int i = 0; i < kItems<V, OPERANDS>; ++i) {
        const int at = first + i * group * V;
        held[i] = load_place<V, OPERANDS>(x, g, at, at < end);
    }
#pragma unroll
    for (int i = 0; i < kItems<V, OPERANDS>; ++i) {
        if (first + i * group * V < end) sums.add(held[i], anchor);
    }
    const Result<OPERANDS> result(sums_of_group(sums, group), anchor, share, eps);
#pragma unroll
    for (int i = 0; i < kItems<V, OPERANDS>; ++i) {
        const int at = first + i * group * V;
        keep_packed(held[i]);
        if (at < end) store(y + at, result(held[i]));
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// CLUSTER

constexpr int kTeam = 224;         // threads: two teams and the producer warp are 15 warps, which may have 128 registers a thread
constexpr int kPlaces = 4;         // packs of a chunk a thread, of all operands
constexpr int kChunkBytes = kTeam * kPlaces * 16;
constexpr int kStages = 16;        // of the ring
constexpr int kHeldChunks = 3;     // of a part, in its team's registers
constexpr int kWaitingChunks = 7;  // of a part, in the ring, in small clusters: both teams' leave room for the next slice
constexpr int kMaxCluster = 16;
constexpr int kQueue = 16;         // slices that the producers know of and not yet all consumers, at most
constexpr int kRingBytes = kStages * kChunkBytes;
static_assert(kChunkBytes / 2 % 128 == 0, "stages, and their halves backward, stay aligned for the bulk copies");
static_assert(2 * kWaitingChunks < kStages, "both teams' waiting chunks leave room for the next slice");
// A part has at least three chunks, so the ring is at most six slices ahead of the team that gathers, which is at most two ahead of the
// last slice that every thread of the cluster has heard of.
static_assert(kStages / 3 + 3 < kQueue, "no entry of the queue is written before all have read it");

__device__ __forceinline__ uint32_t peer_address(const void* p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Into the shared memory of block `rank`: `bar` there counts the bytes.
__device__ __forceinline__ void send(int* to, int value, uint64_t* bar, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
        ::"r"(peer_address(to, rank)), "r"(value), "r"(peer_address(bar, rank)) : "memory");
}
template <int OPERANDS> __device__ __forceinline__ void send(Sums<OPERANDS>* to, const Sums<OPERANDS>& sums, uint64_t* bar, int rank) {
#pragma unroll
    for (int o = 0; o < OPERANDS; ++o) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];"
            ::"r"(peer_address(to->of + 2 * o, rank)), "d"(sums.of[2 * o]), "d"(sums.of[2 * o + 1]), "r"(peer_address(bar, rank)) : "memory");
    }
}
__device__ __forceinline__ void bulk_load_evict_last(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(evict_last()) : "memory");
}

// Position in the ring: the stage, and the parity of its barriers.
struct Cursor {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

template <typename T> struct ClusterTask {
    const T *x, *g;
    T* y;
    int slices, packs, blocks, chunk_packs;  // packs of a slice; blocks of a cluster
    double share, eps;
    int* taken;  // slices given out beyond each cluster's first one

    __device__ __forceinline__ int rank() const { return blockIdx.x % blocks; }
    __device__ __forceinline__ int first_slice() const { return blockIdx.x / blocks; }
    // A block's part of every slice: each `blocks`-th chunk, so that a cluster moves along the slice together.
    __device__ __forceinline__ int first_pack(int c) const { return (c * blocks + rank()) * chunk_packs; }
    __device__ __forceinline__ int packs_of(int c) const { return min(chunk_packs, packs - first_pack(c)); }
    __device__ __forceinline__ int chunks() const {
        return (max(packs - first_pack(0), 0) + blocks * chunk_packs - 1) / (blocks * chunk_packs);
    }
};

template <int OPERANDS> struct BlockState {
    uint64_t full[kStages], empty[kStages], gathered[2], exchanged[2][2], queued[kQueue];
    Sums<OPERANDS> mailbox[2][2][kMaxCluster], warp_sums[2][kTeam / 32];
    int queue[kQueue];

    // The cluster's slice of this round, or one that does not exist. Waits until rank 0's producer has sent it.
    __device__ __forceinline__ int slice_of(int round) {
        mbarrier_wait(&queued[round % kQueue], round / kQueue & 1);
        return queue[round % kQueue];
    }
};

template <typename T, int OPERANDS>
__device__ __forceinline__ void produce(const ClusterTask<T>& task, BlockState<OPERANDS>& state, unsigned char* ring) {
    const int chunks = task.chunks(), clusters = gridDim.x / task.blocks;
    Cursor at;
    int slice = task.first_slice();
    for (int round = 0; slice < task.slices; slice = state.slice_of(round), ++round) {
        const int next = task.rank() == 0 ? clusters + atomicAdd(task.taken, 1) : 0;
        for (int c = 0; c < chunks; ++c, at.advance()) {
            const int64_t from = (int64_t(slice) * task.packs + task.first_pack(c)) * kPack<T>;
            const int bytes = task.packs_of(c) * 16;
            unsigned char* const to = ring + at.stage * kChunkBytes;
            mbarrier_wait(&state.empty[at.stage], at.parity ^ 1);
            mbarrier_expect(&state.full[at.stage], OPERANDS * bytes);
            bulk_load_evict_last(to, task.x + from, bytes, &state.full[at.stage]);
            if constexpr (OPERANDS == 2) bulk_load_evict_last(to + kChunkBytes / 2, task.g + from, bytes, &state.full[at.stage]);
        }
        const int q = round % kQueue;
        mbarrier_expect(&state.queued[q], sizeof(int));
        for (int r = 0; task.rank() == 0 && r < task.blocks; ++r) send(&state.queue[q], next, &state.queued[q], r);
    }
}

// All blocks' sums of the slice, in each thread of the team.
template <int OPERANDS> __device__ __forceinline__ Sums<OPERANDS> exchange(
    Sums<OPERANDS> sums, BlockState<OPERANDS>& state, int team, int turn, int parity, int rank, int blocks) {
    const int tid = threadIdx.x % kTeam;
    uint64_t* const exchanged = &state.exchanged[team][turn];
    sums.add_across_lanes(32);
    if (tid % 32 == 0) state.warp_sums[team][tid / 32] = sums;
    barrier_sync(1 + team, kTeam);
    if (tid < 32) {
        sums = {};
        for (int w = 0; w < kTeam / 32; ++w) sums.add(state.warp_sums[team][w]);
        if (tid == 0) mbarrier_expect(exchanged, blocks * sizeof(sums));
        __syncwarp();
        if (tid < blocks) send(&state.mailbox[team][turn][rank], sums, exchanged, tid);
    }
    mbarrier_wait(exchanged, parity);
    sums = {};
    for (int r = 0; r < blocks; ++r) sums.add(state.mailbox[team][turn][r]);
    return sums;
}

template <typename T, int OPERANDS>
__device__ __forceinline__ void consume(const ClusterTask<T>& task, BlockState<OPERANDS>& state, const unsigned char* ring, int team) {
    constexpr int V = kPack<T>, kMine = kPlaces / OPERANDS;
    const int tid = threadIdx.x % kTeam, chunks = task.chunks();
    const auto place_of = [&](int stage, int i) {
        Place<T, V, OPERANDS> place;
#pragma unroll
        for (int o = 0; o < OPERANDS; ++o) {
            place.of[o] = reinterpret_cast<const Pack<T, V>*>(ring + stage * kChunkBytes + o * (kChunkBytes / 2))[i * kTeam + tid];
        }
        return place;
    };
    Cursor at;
    int slice = task.first_slice();
    for (int round = 0; slice < task.slices; slice = state.slice_of(round), ++round) {
        if (round % 2 != team) {  // the other team's
            for (int c = 0; c < chunks; ++c) at.advance();
            continue;
        }
        const int64_t begin = int64_t(slice) * task.packs * V;
        const float anchor = to_float(task.x[begin]);
        // A barrier's parity tells its last two phases apart and no more: wait for no stage before the other team has had all of its own.
        if (round > 0) mbarrier_wait(&state.gathered[team ^ 1], (round - 1) / 2 & 1);

        Sums<OPERANDS> sums = {};
        Place<T, V, OPERANDS> held[kHeldChunks][kMine];
#pragma unroll
        for (int c = 0; c < kHeldChunks; ++c) {
            if (c < chunks) {
                const int packs = task.packs_of(c);
                mbarrier_wait(&state.full[at.stage], at.parity);
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    if (i * kTeam + tid < packs) held[c][i] = place_of(at.stage, i);
                }
                mbarrier_arrive(&state.empty[at.stage]);
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    if (i * kTeam + tid < packs) sums.add(held[c][i], anchor);
                }
                at.advance();
            }
        }
        Cursor ahead = at;
        for (int c = kHeldChunks; c < chunks; ++c, ahead.advance()) {
            const int packs = task.packs_of(c);
            mbarrier_wait(&state.full[ahead.stage], ahead.parity);
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                if (i * kTeam + tid < packs) sums.add(place_of(ahead.stage, i), anchor);
            }
        }
        mbarrier_arrive(&state.gathered[team]);

        const int turn = round / 2 & 1, parity = round / 4 & 1;
        sums = exchange(sums, state, team, turn, parity, task.rank(), task.blocks);
        const Result<OPERANDS> result(sums, anchor, task.share, task.eps);

        const auto write = [&](int c, auto place) {
            const int packs = task.packs_of(c);
            T* const to = task.y + begin + int64_t(task.first_pack(c)) * V;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                if (i * kTeam + tid < packs) store(to + (i * kTeam + tid) * V, result(place(i)));
            }
        };
#pragma unroll
        for (int c = 0; c < kHeldChunks; ++c) {
            if (c < chunks) write(c, [&](int i) { keep_packed(held[c][i]); return held[c][i]; });
        }
        for (int c = kHeldChunks; c < chunks; ++c, at.advance()) {
            write(c, [&](int i) { return place_of(at.stage, i); });
            mbarrier_arrive(&state.empty[at.stage]);
        }
    }
}

template <typename T, int OPERANDS>
__global__ void __launch_bounds__(2 * kTeam + 32, 1) norm_in_cluster(const __grid_constant__ ClusterTask<T> task) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ BlockState<OPERANDS> state;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) mbarrier_init(&state.full[s], 1), mbarrier_init(&state.empty[s], kTeam);
        for (int t = 0; t < 2; ++t) {
            mbarrier_init(&state.gathered[t], kTeam);
            for (int turn = 0; turn < 2; ++turn) mbarrier_init(&state.exchanged[t][turn], 1);
        }
        for (int q = 0; q < kQueue; ++q) mbarrier_init(&state.queued[q], 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_sync();
    const int team = threadIdx.x / kTeam;
    if (team < 2) consume(task, state, ring, team);
    else if (threadIdx.x % 32 == 0) produce(task, state, ring);
    __syncwarp();
    cluster_sync();  // no block ends while a peer may still write to its shared memory
#endif
}

// ---------------------------------------------------------------------------------------------------------------------------------
// All other slices are read twice, by two kernels: the first leaves the sums of each part of a slice in the workspace, the second adds up
// those of its slice and writes its part. It goes through the parts backwards: what the first one read last may still be in L2.

constexpr int kPartBlock = kMaxGroup;  // threads, one block a part

// use(i, place) for the values [first, end); a thread has four loads of each operand in flight.
template <int V, int OPERANDS, typename T, typename Use>
__device__ __forceinline__ void each_place(const T* x, const T* g, int64_t first, int64_t end, const Use& use) {
    constexpr int kBatch = 4, kStep = kPartBlock * V;
    for (int64_t i = first + threadIdx.x * V; i < end; i += kBatch * kStep) {
        Place<T, V, OPERANDS> batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) batch[b] = load_place<V, OPERANDS>(x, g, i + b * kStep, i + b * kStep < end);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            if (i + b * kStep < end) use(i + b * kStep, batch[b]);
        }
    }
}
template <typename T, int V, int OPERANDS> __global__ void __launch_bounds__(kPartBlock, 2) sums_of_parts(
    const T* __restrict__ x, const T* __restrict__ g, Sums<OPERANDS>* sums, int64_t n, int64_t part, int parts) {
    const int64_t slice = blockIdx.x / parts, begin = slice * n, first = blockIdx.x % parts * part;
    const float anchor = to_float(x[begin]);
    Sums<OPERANDS> own = {};
    each_place<V, OPERANDS>(x, g, begin + first, begin + min(first + part, n), [&](int64_t, const auto& place) { own.add(place, anchor); });
    own = sums_of_group(own, kPartBlock);
    if (threadIdx.x == 0) sums[blockIdx.x] = own;
}
template <typename T, int V, int OPERANDS> __global__ void __launch_bounds__(kPartBlock, 2) norm_of_parts(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, const Sums<OPERANDS>* __restrict__ sums, int64_t n, int64_t part,
    int parts, double share, double eps) {
    const int64_t block = gridDim.x - 1 - blockIdx.x, slice = block / parts, begin = slice * n, first = block % parts * part;
    Sums<OPERANDS> own = {};
    for (int p = threadIdx.x; p < parts; p += kPartBlock) own.add(sums[slice * parts + p]);
    const Result<OPERANDS> result(sums_of_group(own, kPartBlock), to_float(x[begin]), share, eps);
    each_place<V, OPERANDS>(x, g, begin + first, begin + min(first + part, n), [&](int64_t i, const auto& place) { store(y + i, result(place)); });
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Launchers. Pointers are device memory of the current device, on 16 bytes; they return a cudaError_t.

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `slices` contiguous slices of n values: x, backward g, and y or dx.
struct Task {
    const void *x, *g;
    void* y;
    int64_t slices, n;
    double eps;
    void* workspace;
    cudaStream_t stream;
};

template <typename T, int V, int OPERANDS> static cudaError_t launch_in_registers(const Task& task) {
    // Few threads a slice need few shuffles; at least eight, where it has as many packs, load whole lines.
    const int64_t packs = task.n / V;
    int group = 1;
    while (group < packs && (group < 8 || group * kItems<V, OPERANDS> < packs)) group *= 2;
    const int block = group > kSmallBlock ? group : kSmallBlock;
    norm_in_registers<T, V, OPERANDS><<<unsigned(divide_up(task.slices, block / group)), block, 0, task.stream>>>(
        static_cast<const T*>(task.x), static_cast<const T*>(task.g), static_cast<T*>(task.y), task.slices, int(task.n), 1.0 / task.n, task.eps, group);
    return cudaGetLastError();
}

// The smallest cluster that holds a slice of `bytes`, of all operands; 0: none does. Forward, small clusters leave room for the next slice.
static int cluster_size(int64_t bytes, bool leave_room) {
    for (int blocks = 2; blocks <= kMaxCluster; blocks *= 2) {
        const int chunks = kHeldChunks + (leave_room && blocks < 8 ? kWaitingChunks : kStages);
        if (bytes <= int64_t(blocks) * chunks * kChunkBytes) return blocks;
    }
    return 0;
}

// *launched is false where there is no room for such a cluster: another chip than sm_90 or sm_100, or a small partition of one.
template <typename T, int OPERANDS> static cudaError_t launch_in_cluster(const Task& task, int blocks, bool* launched) {
    const auto kernel = norm_in_cluster<T, OPERANDS>;
    int device, shared_bytes, clusters = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess || shared_bytes < kRingBytes + int(sizeof(BlockState<OPERANDS>))) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(2 * kTeam + 32);
    config.dynamicSmemBytes = kRingBytes;
    config.stream = task.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess || clusters == 0) return error;
    *launched = true;
    config.gridDim = dim3(unsigned((task.slices < clusters ? task.slices : clusters) * blocks));
    error = cudaMemsetAsync(task.workspace, 0, sizeof(int), task.stream);
    if (error != cudaSuccess) return error;
    // Equal chunks, as many for every block, of whole lines.
    const int64_t packs = task.n / kPack<T>, chunks = divide_up(packs, blocks * (kChunkBytes / 16 / OPERANDS)) * blocks;
    const int chunk_packs = int(divide_up(divide_up(packs, chunks), 8) * 8);
    return cudaLaunchKernelEx(&config, kernel, ClusterTask<T>{
        static_cast<const T*>(task.x), static_cast<const T*>(task.g), static_cast<T*>(task.y), int(task.slices), int(packs), blocks,
        chunk_packs, 1.0 / task.n, task.eps, static_cast<int*>(task.workspace)});
}

// Parts of a slice that is read twice: some 32 blocks a multiprocessor in all, no part under 64 KiB.
static int64_t parts_of(int64_t slices, int64_t bytes) {
    const int64_t wanted = divide_up(4096, slices), most = bytes >> 16;
    return wanted < most ? wanted : most > 1 ? most : 1;
}
template <typename T, int V, int OPERANDS> static cudaError_t launch_two_reads(const Task& task) {
    const T *x = static_cast<const T*>(task.x), *g = static_cast<const T*>(task.g);
    Sums<OPERANDS>* const sums = static_cast<Sums<OPERANDS>*>(task.workspace);
    const int64_t part = divide_up(divide_up(task.n, parts_of(task.slices, task.n * sizeof(T))), 64) * 64;  // values, whole lines
    const int parts = int(divide_up(task.n, part));
    const unsigned grid = unsigned(task.slices * parts);
    sums_of_parts<T, V, OPERANDS><<<grid, kPartBlock, 0, task.stream>>>(x, g, sums, task.n, part, parts);
    norm_of_parts<T, V, OPERANDS><<<grid, kPartBlock, 0, task.stream>>>(
        x, g, static_cast<T*>(task.y), sums, task.n, part, parts, 1.0 / task.n, task.eps);
    return cudaGetLastError();
}

template <typename T, int OPERANDS> static cudaError_t launch(const Task& task) {
    constexpr int V = kPack<T>;
    const bool whole_packs = task.n % V == 0;
    if (whole_packs && task.n <= kMaxGroup * kItems<V, OPERANDS> * V) return launch_in_registers<T, V, OPERANDS>(task);
    if (!whole_packs && task.n <= kMaxGroup * kItems<1, OPERANDS>) return launch_in_registers<T, 1, OPERANDS>(task);
    if (!whole_packs) return launch_two_reads<T, 1, OPERANDS>(task);
    const int blocks = cluster_size(OPERANDS * task.n * sizeof(T), OPERANDS == 1);
    bool launched = false;
    const cudaError_t error = blocks > 0 ? launch_in_cluster<T, OPERANDS>(task, blocks, &launched) : cudaSuccess;
    return launched || error != cudaSuccess ? error : launch_two_reads<T, V, OPERANDS>(task);
}
template <int OPERANDS> static cudaError_t launch(int dtype, const Task& task) {
    return dtype == 0 ? launch<float, OPERANDS>(task) : dtype == 1 ? launch<__half, OPERANDS>(task) : launch<__nv_bfloat16, OPERANDS>(task);
}

// dtype: 0 float32, 1 float16, 2 bfloat16. workspace: instance_norm_workspace bytes.
extern "C" int64_t instance_norm_workspace(int64_t slices, int64_t n, int64_t element_size) {
    return slices * parts_of(slices, n * element_size) * int64_t(sizeof(Sums<2>));
}
extern "C" int instance_norm_forward(
    int dtype, const void* x, void* y, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    return launch<1>(dtype, Task{x, x, y, slices, n, eps, workspace, stream});
}
extern "C" int instance_norm_backward(
    int dtype, const void* grad, const void* x, void* dx, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream) {
    return launch<2>(dtype, Task{x, grad, dx, slices, n, eps, workspace, stream});
}
"""

CPP_SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <cmath>

namespace {

// One slice of n values on one core, in blocks of float that stay in its first cache; sums in double, around the slice's first value.
template <typename T> void normalize_slice(const T* x, T* y, int64_t n, double eps) {
    constexpr int64_t kBlock = 1024;
    float buffer[kBlock];
    const double anchor = x[0];
    double sum = 0, square = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        at::vec::convert(x + i, buffer, count);
#pragma omp simd reduction(+ : sum, square)
        for (int64_t j = 0; j < count; ++j) {
            const double deviation = buffer[j] - anchor;
            sum += deviation;
            square += deviation * deviation;
        }
    }
    const double shift = sum / n, variance = (square - sum * shift) / n;
    const double r = 1 / std::sqrt((variance < 0 ? 0 : variance) + eps);  // not std::max, which would drop a NaN
    const float hi = float(anchor + shift), rstd = float(r), rest = float((hi - (anchor + shift)) * r);
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        at::vec::convert(x + i, buffer, count);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) buffer[j] = (buffer[j] - hi) * rstd + rest;
        at::vec::convert(buffer, y + i, count);
    }
}
template <typename T> void normalize(const at::Tensor& x, const at::Tensor& y, int64_t slices, int64_t n, double eps) {
    const T* const from = x.const_data_ptr<T>();
    T* const to = y.mutable_data_ptr<T>();
    at::parallel_for(0, slices, std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) normalize_slice(from + s * n, to + s * n, n, eps);
    });
}

// As the CUDA string numbers them.
int dtype_number(const at::Tensor& t) {
    switch (t.scalar_type()) {
        case at::kFloat: return 0;
        case at::kHalf: return 1;
        case at::kBFloat16: return 2;
        default: TORCH_CHECK_NOT_IMPLEMENTED(false, "instance_norm: not implemented for ", t.scalar_type());
    }
}

// x (..., H, W); y contiguous, as InstanceNorm2d's is.
at::Tensor instance_norm_cpu(const at::Tensor& x, double eps) {
    const at::Tensor input = x.contiguous();
    at::Tensor y = at::empty_like(input);
    const int dtype = dtype_number(x);
    if (x.numel() == 0) return y;
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n;
    if (dtype == 0) normalize<float>(input, y, slices, n, eps);
    else if (dtype == 1) normalize<at::Half>(input, y, slices, n, eps);
    else normalize<at::BFloat16>(input, y, slices, n, eps);
    return y;
}

at::Tensor instance_norm_meta(const at::Tensor& x, double eps) { return at::empty_like(x, x.options(), at::MemoryFormat::Contiguous); }
at::Tensor instance_norm_backward_meta(const at::Tensor& grad, const at::Tensor& x, double eps) { return instance_norm_meta(x, eps); }

#ifdef WITH_CUDA
extern "C" int64_t instance_norm_workspace(int64_t slices, int64_t n, int64_t element_size);
extern "C" int instance_norm_forward(
    int dtype, const void* x, void* y, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream);
extern "C" int instance_norm_backward(
    int dtype, const void* grad, const void* x, void* dx, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream);

// Contiguous, and on 16 bytes, which a slice of another tensor need not be.
at::Tensor aligned(const at::Tensor& t) {
    const at::Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
// Forward where grad is undefined.
at::Tensor run_on_gpu(const at::Tensor& x, const at::Tensor& grad, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor input = aligned(x);
    at::Tensor out = at::empty_like(input);
    const int dtype = dtype_number(x);
    if (x.numel() == 0) return out;
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n;
    const at::Tensor workspace = at::empty({instance_norm_workspace(slices, n, x.element_size())}, x.options().dtype(at::kByte));
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    int error;
    if (grad.defined()) {
        const at::Tensor gradient = aligned(grad);
        error = instance_norm_backward(
            dtype, gradient.data_ptr(), input.data_ptr(), out.data_ptr(), slices, n, eps, workspace.data_ptr(), stream);
    } else {
        error = instance_norm_forward(dtype, input.data_ptr(), out.data_ptr(), slices, n, eps, workspace.data_ptr(), stream);
    }
    TORCH_CHECK(error == 0, "instance_norm: ", cudaGetErrorString(cudaError_t(error)));
    return out;
}
at::Tensor instance_norm_cuda(const at::Tensor& x, double eps) { return run_on_gpu(x, at::Tensor(), eps); }
at::Tensor instance_norm_backward_cuda(const at::Tensor& grad, const at::Tensor& x, double eps) {
    TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && grad.device() == x.device(),
        "instance_norm: the gradient must have the input's shape, dtype and device");
    return run_on_gpu(x, grad, eps);
}
#endif

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor x, float eps) -> Tensor");
    m.def("backward(Tensor grad, Tensor x, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("forward", instance_norm_cpu); }
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", instance_norm_meta);
    m.impl("backward", instance_norm_backward_meta);
}
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", instance_norm_cuda);
    m.impl("backward", instance_norm_backward_cuda);
}
#endif
// Gradients are the autograd.Function's below; whoever differentiates a bare operator, or in forward mode, is told.
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"forward", "backward"}) m.impl(name, torch::autograd::autogradNotImplementedFallback());
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


NAMESPACE = _load("instance_norm")
_forward = getattr(torch.ops, NAMESPACE).forward
_backward = getattr(torch.ops, NAMESPACE).backward


class InstanceNorm(torch.autograd.Function):
    """y = (x - mean) * rstd over the last two dimensions. Saves x alone."""

    @staticmethod
    def forward(x: torch.Tensor, eps: float) -> torch.Tensor:
        return _forward(x, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.eps = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _backward(grad, x, ctx.eps), None
        y = functional.instance_norm(x, eps=ctx.eps)  # create_graph=True: PyTorch's own, which can be differentiated again
        return *torch.autograd.grad(y, x, grad, create_graph=True), None


def fits(x: torch.Tensor, norm: nn.InstanceNorm2d) -> bool:
    """Whether the kernels take it: a plain norm of dense float32, float16 or bfloat16, on a GPU, or on a CPU without gradients."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return (
        type(norm) is nn.InstanceNorm2d
        and not (norm.affine or norm.track_running_stats or any(hooks))
        and x.layout is torch.strided
        and not x.is_nested
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and (x.is_cuda or x.device.type == "cpu" and not (torch.is_grad_enabled() and x.requires_grad))
        and x.dim() in (3, 4)
        and x.shape[-2] * x.shape[-1] != 1
        and torch._C._functorch.peek_interpreter_stack() is None  # grad, vmap, jvp
    )


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes and (empty) state_dict.

    forward: x (N, C, H, W) or (C, H, W) in any memory layout; returns a contiguous tensor of x's shape and dtype.
    """

    def __init__(self, num_features: int):
        super().__init__()
        self.inorm = nn.InstanceNorm2d(num_features=num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not fits(x, self.inorm):
            return self.inorm(x)
        if torch.is_grad_enabled() and x.requires_grad:
            return InstanceNorm.apply(x, self.inorm.eps)
        return _forward(x, self.inorm.eps)
