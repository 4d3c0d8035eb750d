# SPDX-License-Identifier: MIT
"""A linear layer, then a norm over each row, a sum and a product, fused: a drop-in for the Model of the same name.

    h = x W^T + b;    z = (h - mean) * rstd over each row;    out = (z + y) * y

The unsqueezes around the Model's `InstanceNorm2d` make one channel of 1 x F pixels of each row: `mean` and `rstd` are
the row's own, rstd = 1 / sqrt(sum((h - mean)^2) / F + eps).

This file is for Hopper GPUs (sm_90). It builds nothing elsewhere: there ModelNew runs the Model's own layers. For other
GPUs and for CPUs there is a portable file of the same name, one folder up.

Two ways, chosen by `_fits`. The fast way is the operator below. It takes plain 2-D tensors of float32, float16 or
bfloat16, F a multiple of 8, products of at least 2^30 multiplications (`_product_fits`), and no hooks, autocast or
transforms; with gradients F is at most 8192. Float32 products without TF32 run on the fp16 tensor cores; others are
ATen's. Everything else goes the plain way: the Model's own lines.

At the benchmark shape, 1024 x 8192 to 8192: 137 GFLOP, done three times in fp16: 0.52 ms at cuBLAS's rate. Before, W is
read, 0.27 GB, and its pieces are written, 0.27. harness.py, H200: 0.72 ms, 3.85x eager; with the backward 2.20, 3.74x.
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
from torch.utils import cpp_extension

CUDA_SOURCE = r"""
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Arrives, and makes the phase wait also for `bytes` bytes, which asynchronous copies write.
__device__ __forceinline__ void mbarrier_expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}"
                 ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
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
template <typename T, int V> struct alignas(V * sizeof(T)) Pack { T value[V]; };

// ---- The product x W^T on fp16 tensor cores, as accurate as float32; infinities give NaN. In both linear_*.py. ----
// Each row of x (m, k) and W (n, k) is scaled by a power of two, its maximum (if >= 2^-112) to [2^14, 2^15), and
// each value is split into two fp16 numbers, hi + lo: its pieces. The product is hi hi + hi lo + lo hi, with the scales
// taken out of the sum. The tensor cores truncate when they accumulate, so each sum over 64 of K starts at zero, takes
// the small products first, and is then added to float32 registers. split_rows writes the pieces to device memory.
//
// `multiply` is persistent: a block computes every gridDim.x-th 128 x 128 tile. A line is 32 of K of a row: 32 hi, then
// their 32 lo. In shared memory a stage holds a line of 128 rows of x and of W; a slot holds 64 x 64 of the sums.
//
//     warpgroup 3, one thread  producer   wait empty[s]  TMA brings a line of both operands to stage s    -> full[s]
//     warpgroups 0 and 1       consumers  wait full[s]   multiply it, 64 rows of the tile each            -> empty[s]
//                                         wait taken[t]  write their sums, 64 x 64 at a time, to slot t   -> ready[t]
//     warpgroup 2              finishers  wait ready[t]  read the sums of slot t                          -> taken[t]
//                                                        unscale them, apply the epilogue, store
//
// So the epilogue of a tile runs while the next tile is multiplied.
//
// Range: a value that is scaled to less than 2^-2 loses bits to fp16's subnormals: it is kept to 2^-25 after scaling.
// With c such values in its two rows a sum is off by less than 2^-25 * 2^15 * c, which is within float32's own
// error where the accumulator is at least 2^14 * c. Any other output, one in 10^6 of ordinary data, is "uncertain": the
// finishers work it out in float32 from x and W themselves.

constexpr int kTile = 128;
constexpr int kTerms = 32, kLine = 64;  // of K in a line; fp16 values of a row in it: 32 of hi, and the same 32 of lo
constexpr int kStages = 4;  // of 32 KiB. The loop over them is unrolled (worth 1-4%), so lines come in multiples of 4
constexpr int kSlots = 3;   // of 16 KiB. With 2, a consumer could be two rounds ahead, and misread the parity of taken
constexpr int kBand = 16;   // rows of tiles that are taken column by column, so that operands are still in L2
constexpr int kMultiplyThreads = 512, kConsumerRegisters = 168, kFinisherRegisters = 152, kProducerRegisters = 24;
static_assert(2 * kConsumerRegisters + kFinisherRegisters + kProducerRegisters <= 4 * 128, "65536 registers a block");
constexpr float kLargestUnscale = 0x1p60f;  // outputs of rows beyond it are uncertain: they might overflow

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < INFINITY; }
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }
// Brings `largest`, if >= 2^-112, to [2^14, 2^15). At most 126: 2^-149 becomes 2^-23, scale and 1 / scale are normal.
__device__ __forceinline__ int scale_exponent(float largest) {
    return min(14 + 127 - int(__float_as_uint(largest) >> 23), 126);
}
// An atomic minimum of exponents, all below 1024, in a word zeroed beforehand: it holds the largest 1024 - exponent.
__device__ __forceinline__ void take_smallest(int* word, int exponent) { atomicMax(word, 1024 - exponent); }
__device__ __forceinline__ int smallest_of(const int* word) { return 1024 - *word; }
__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64_t padded_k(int64_t k) { return divide_up(k, kTerms) * kTerms; }
struct Sum { __device__ __forceinline__ float operator()(float a, float b) const { return a + b; } };
struct Max { __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); } };
// Op over the v of `group` threads, a power of two. Whole warps call; beyond 32 the whole block. warp_values: 1 a warp.
template <class Op> __device__ __forceinline__ float reduce_group(float v, int group, float* warp_values, Op op) {
    for (int offset = min(group, 32) / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(~0u, v, offset));
    if (group <= 32) return v;
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = v;
    __syncthreads();
    const int warps = group / 32;
    v = warp_values[threadIdx.x / group * warps + threadIdx.x % warps];
    for (int offset = warps / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}
// COUNT neighbouring values (4 or 8) from k on, already scaled, into the pieces of their row, in two stores.
template <int COUNT> __device__ __forceinline__ void store_pieces(__half* row, int k, const float (&v)[COUNT]) {
    Pack<__half, COUNT> hi, lo;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        hi.value[i] = __float2half_rn(v[i]);
        lo.value[i] = __float2half_rn(v[i] - __half2float(hi.value[i]));
    }
    auto* const to = reinterpret_cast<Pack<__half, COUNT>*>(row + k / kTerms * kLine + k % kTerms);
    to[0] = hi, to[kTerms / COUNT] = lo;
}
// Of a row of x or W. output = accumulator * both rows' unscale; uncertain if |accumulator| < the sum of their doubt.
struct RowScale {
    float unscale, doubt;
};
// What split_rows reads and writes.
struct Operand {
    const float* values;
    __half* pieces;
    int64_t rows;
    int k;
    // Forward: row i is scaled by its maximum. Writes scales[i], exponents[i] and, of W, the smallest exponent.
    RowScale* scales;
    int *exponents, *smallest;
    // Backward, scales null: row i is scaled by 2^(smallest_of(common) - less[i]), or by its maximum if that is less.
    const int *common, *less;
    __device__ __forceinline__ int exponent(int64_t row, float largest) const {
        const int own = scale_exponent(largest);
        return scales != nullptr ? own : max(min(smallest_of(common) - less[row], own), -252);  // 2^-252: 0 in fp16
    }
};
constexpr int kSplitThreads = 256, kSplitItems = 8;
// `group` threads, whole warps, own a row of x, and from block blocks_x on one of W. Rows of up to 8192 values
// wait in registers between the search for the largest and the split; longer ones are read twice.
__global__ void __launch_bounds__(kSplitThreads, 3)
    split_rows(const __grid_constant__ Operand x, const __grid_constant__ Operand w, int group, unsigned blocks_x) {
    __shared__ float warp_values[kSplitThreads / 32];
    const Operand& own = blockIdx.x < blocks_x ? x : w;
    const int lane = threadIdx.x % group, step = group * kSplitItems;
    const int64_t block = blockIdx.x < blocks_x ? blockIdx.x : blockIdx.x - blocks_x;
    const int64_t row = block * (kSplitThreads / group) + threadIdx.x / group;
    const bool exists = row < own.rows;
    const int padded = int(padded_k(own.k)), quads = padded / 4;
    const float4* values = reinterpret_cast<const float4*>(own.values + row * own.k);
    float4 held[kSplitItems];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) {
            const int at = first + lane + i * group;
            held[i] = exists && at < own.k / 4 ? values[at] : make_float4(0, 0, 0, 0);
        }
    };
    float largest = 0, lost = 0;  // largest: of the finite ones
    for (int first = 0; first < quads; first += step) {
        load(first);
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) {
            for (float v : {held[i].x, held[i].y, held[i].z, held[i].w}) {
                largest = fmaxf(largest, is_finite(v) ? fabsf(v) : 0);
            }
        }
    }
    largest = reduce_group(largest, group, warp_values, Max());
    const int exponent = exists ? own.exponent(row, largest) : 0;
    const float scale_1 = power_of_two(exponent / 2), scale_2 = power_of_two(exponent - exponent / 2);
    for (int first = 0; first < quads; first += step) {
        if (quads > step) load(first);
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) {
            const int at = first + lane + i * group;
            float v[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float scaled = v[j] * scale_1 * scale_2;
                lost += fabsf(scaled) < 0x1p-2f && v[j] != 0 ? 1.0f : 0.0f;  // see Range
                v[j] = scaled;
            }
            if (exists && at < quads) store_pieces(own.pieces + row * padded * 2, at * 4, v);
        }
    }
    if (own.scales == nullptr) return;
    lost = reduce_group(lost, group, warp_values, Sum());
    if (lane != 0 || !exists) return;
    RowScale result = {power_of_two(-exponent), lost * 0x1p14f};
    if (result.unscale > kLargestUnscale) result.doubt = INFINITY;
    if (largest == 0) result.doubt = -INFINITY;  // the sums are 0, whatever finite row meets this one
    own.scales[row] = result;
    own.exponents[row] = exponent;
    if (own.smallest != nullptr) take_smallest(own.smallest, exponent);
}

__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(bar)) : "memory");
}
// d = a * b^T + (keep ? d : 0), m64n128k16, a and b in shared memory, K-major or, if TURNED, MN-major (imm-trans).
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
template <bool TURNED_A, bool TURNED_B>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int keep) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
        "%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, keep, 1, 1, %67, %68;\n}"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
        : "l"(a), "l"(b), "r"(keep), "n"(int(TURNED_A)), "n"(int(TURNED_B)));
}
struct Stage {  // a swizzled tile begins at a multiple of 1024 bytes
    unsigned char a[kTile * 128], b[kTile * 128];
};
struct MultiplyShared {
    Stage stages[kStages];
    float4 slots[kSlots][64 * 64 / 4];
    uint64_t full[kStages], empty[kStages], ready[kSlots], taken[kSlots];
};
template <int COUNT> struct Ring {  // a place in a ring, and the parity of the round
    int place = 0, phase = 0;
    __device__ __forceinline__ void advance(int by = 1) {
        place += by;
        if (place >= COUNT) place -= COUNT, phase ^= 1;
    }
};
struct Corner {
    int row, column;
};
struct Tiles {
    int across, down, count;
    __device__ __forceinline__ Tiles(int m, int n)
        : across((n + kTile - 1) / kTile), down((m + kTile - 1) / kTile), count(across * down) {}
    __device__ __forceinline__ Corner find(int tile) const {
        const int band = tile / (kBand * across), inside = tile % (kBand * across);
        const int height = min(kBand, down - band * kBand);
        return {(band * kBand + inside % height) * kTile, inside / height * kTile};
    }
};

template <bool TURNED_A, bool TURNED_B> __device__ __forceinline__ void producer(
    MultiplyShared& shared, const CUtensorMap* map_a, const CUtensorMap* map_b, const Tiles& tiles, int lines) {
    Ring<kStages> ring;
    const auto load = [&](bool turned, void* to, const CUtensorMap* map, int line, int row) {
        uint64_t* bar = &shared.full[ring.place];
        if (turned) tensor_load(to, map, 0, line * kTerms, row / 32 * 2, bar);
        else tensor_load(to, map, line * kLine, row, 0, bar);
    };
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const Corner corner = tiles.find(tile);
        for (int line = 0; line < lines; ++line, ring.advance()) {
            Stage& stage = shared.stages[ring.place];
            mbarrier_wait(&shared.empty[ring.place], ring.phase ^ 1);
            mbarrier_expect(&shared.full[ring.place], sizeof(Stage));
            load(TURNED_A, stage.a, map_a, line, corner.row);
            load(TURNED_B, stage.b, map_b, line, corner.column);
        }
    }
}
// wgmma's descriptor of a tile. K-major: 128 bytes a row, 128-byte swizzle, atoms of 8 rows (1024 bytes). TURNED: 4096
// bytes for each 32 rows, 32 k of hi and then 32 k of lo; 64 bytes a k, 64-byte swizzle, atoms of 8 k (512 bytes).
template <bool TURNED> __device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
    const uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
    return TURNED ? address | uint64_t(4096 >> 4) << 16 | uint64_t(512 >> 4) << 32 | uint64_t(2) << 62
                  : address | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
// The products of a line, 16 of K at a time: the small ones, hi lo and lo hi, and the large ones, hi hi. Steps of K and
// the distance from hi to lo are in the descriptors' units of 16 bytes.
template <bool A, bool B>
__device__ __forceinline__ void multiply_small(float (&d)[64], uint64_t a, uint64_t b, int keep) {
    constexpr int kStepA = A ? 64 : 2, kStepB = B ? 64 : 2, kLowA = A ? 128 : 4, kLowB = B ? 128 : 4;
    wgmma<A, B>(d, a + kLowA, b, keep);
    wgmma<A, B>(d, a, b + kLowB, 1);
    wgmma<A, B>(d, a + kLowA + kStepA, b + kStepB, 1);
    wgmma<A, B>(d, a + kStepA, b + kLowB + kStepB, 1);
}
template <bool A, bool B> __device__ __forceinline__ void multiply_large(float (&d)[64], uint64_t a, uint64_t b) {
    wgmma<A, B>(d, a, b, 1);
    wgmma<A, B>(d, a + (A ? 64 : 2), b + (B ? 64 : 2), 1);
}
// Stores a warp's 16 x 64 sums to its 4 KiB of a slot. By wgmma a lane has rows lane / 4 and that + 8, and columns
// lane % 4 * 2 + 8j and the next: four values, stored as one float4, at a place permuted by XOR: no bank conflicts.
__device__ __forceinline__ int place_of(int j) { return (j & 1) | (j & 2) << 1; }
__device__ __forceinline__ void leave_sums(float4* to, const float* sum) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int unit = threadIdx.x % 32 ^ place_of(j);
        to[j * 32 + unit] = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    }
}
// Read back as v[r][i]: row lane / 8 + 4r, column lane % 8 * 4 + i, and 32 + lane % 8 * 4 + i - 4 from i = 4 on.
__device__ __forceinline__ void take_sums(const float4* from, float (&v)[4][8]) {
    const int eighth = threadIdx.x % 8, row = threadIdx.x % 32 / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // bits of i: the next pair of columns, 32 columns on, 4 rows on
        const int unit = (row + (i & 4)) * 4 + eighth % 2 * 2 + (i & 1), r = i / 4, c = (i & 2) * 2 + (i & 1) * 2;
        const float4 four = from[((i & 2) * 2 + eighth / 2) * 32 + (unit ^ place_of(eighth / 2))];
        v[r][c] = four.x, v[r][c + 1] = four.y, v[r + 2][c] = four.z, v[r + 2][c + 1] = four.w;
    }
}

template <bool TURNED_A, bool TURNED_B>
__device__ __forceinline__ void consumer(MultiplyShared& shared, const Tiles& tiles, int lines, int warpgroup) {
    const int warp = threadIdx.x / 32 % 4;
    const uint64_t a = tile_descriptor<TURNED_A>(shared.stages[0].a + warpgroup * 64 * 128);
    const uint64_t b = tile_descriptor<TURNED_B>(shared.stages[0].b);
    constexpr int kStep = sizeof(Stage) / 16;
    const auto free_stage = [&](int s) {  // a warp waits for its own quarter of a wgmma, so each arrives
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[s]);
    };
    float sum[64], part[64] = {};
    int phase = 0;
    Ring<kSlots> slot;
    slot.advance(warpgroup * 2);
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        // Warpgroup 1 begins a tile once 0 has: they add in turns. 0 may be a tile of 4 lines ahead: two barriers
        if (warpgroup > 0) barrier_sync(1 + phase, 256);
        else barrier_arrive(1 + phase, 256);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] = 0;
#pragma unroll 1
        for (int line = 0; line < lines; line += kStages, phase ^= 1) {
#pragma unroll
            for (int s = 0; s < kStages; s += 2) {
                const int next = s + 1;
                mbarrier_wait(&shared.full[s], phase);
                wgmma_fence();
                multiply_small<TURNED_A, TURNED_B>(part, a + s * kStep, b + s * kStep, 0);
                mbarrier_wait(&shared.full[next], phase);
                wgmma_fence();
                multiply_small<TURNED_A, TURNED_B>(part, a + next * kStep, b + next * kStep, 1);
                multiply_large<TURNED_A, TURNED_B>(part, a + s * kStep, b + s * kStep);
                wgmma_commit();
                multiply_large<TURNED_A, TURNED_B>(part, a + next * kStep, b + next * kStep);
                wgmma_commit();
                wgmma_wait<1>();
                free_stage(s);
                wgmma_wait<0>();
                free_stage(next);
#pragma unroll
                for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");  // not above the wait
#pragma unroll
                for (int i = 0; i < 64; ++i) sum[i] += part[i];
            }
        }
#pragma unroll
        for (int s = 0; s < 2; ++s, slot.advance()) {
            mbarrier_wait(&shared.taken[slot.place], slot.phase ^ 1);
            leave_sums(shared.slots[slot.place] + warp * 256, sum + 32 * s);
            mbarrier_arrive(&shared.ready[slot.place]);
        }
        slot.advance(2);
    }
}
template <class Epilogue>
__device__ __forceinline__ void finisher(MultiplyShared& shared, const Tiles& tiles, const Epilogue& epilogue) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Ring<kSlots> slot;
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const Corner corner = tiles.find(tile);
#pragma unroll 1
        for (int s = 0; s < 4; ++s, slot.advance()) {  // in the ring's order: rows 0-63 left, right, 64-127
            const int row = corner.row + s / 2 * 64 + warp * 16, column = corner.column + s % 2 * 64;
            const Corner first = {row + lane / 8, column + lane % 8 * 4};  // of this thread's values
            const auto scales = epilogue.load(first);  // before the wait, which hides it
            float sum[4][8];
            mbarrier_wait(&shared.ready[slot.place], slot.phase);
            take_sums(shared.slots[slot.place] + warp * 256, sum);
            mbarrier_arrive(&shared.taken[slot.place]);
            if (row < epilogue.m && column < epilogue.n) epilogue.finish(sum, first, scales);
        }
    }
}

template <bool TURNED_A, bool TURNED_B, class Epilogue> __global__ void __launch_bounds__(kMultiplyThreads, 1) multiply(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, int lines,
    const Epilogue epilogue) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    MultiplyShared& shared = *reinterpret_cast<MultiplyShared*>(dynamic_shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Tiles tiles(epilogue.m, epilogue.n);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) mbarrier_init(&shared.full[s], 1), mbarrier_init(&shared.empty[s], 8);
        for (int s = 0; s < kSlots; ++s) mbarrier_init(&shared.ready[s], 128), mbarrier_init(&shared.taken[s], 128);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warpgroup == 3) {
        fewer_registers<kProducerRegisters>();
        if (threadIdx.x % 128 == 0) producer<TURNED_A, TURNED_B>(shared, &map_a, &map_b, tiles, lines);
    } else if (warpgroup == 2) {
        more_registers<kFinisherRegisters>();
        finisher(shared, tiles, epilogue);
    } else {
        more_registers<kConsumerRegisters>();
        consumer<TURNED_A, TURNED_B>(shared, tiles, lines, warpgroup);
    }
#endif
}
// Stores a thread's part of a slot; n is a multiple of 4. STREAMING: it leaves L2 first; operands stay.
template <bool STREAMING>
__device__ __forceinline__ void store_part(float* out, const float (&v)[4][8], const Corner& corner, int m, int n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = corner.row + i / 2 * 4, column = corner.column + i % 2 * 32;
        if (row >= m || column >= n) continue;
        const float* own = v[i / 2] + i % 2 * 4;
        float4* to = reinterpret_cast<float4*>(out + int64_t(row) * n + column);
        if (STREAMING) __stcs(to, make_float4(own[0], own[1], own[2], own[3]));
        else *to = make_float4(own[0], own[1], own[2], own[3]);
    }
}
// What an epilogue of h = x W^T + bias begins with.
struct LinearProduct {
    const float *x, *weight, *bias;
    float* out;
    int m, n, k;
    RowScale* scales;  // of W's rows, then of x's
    int* exponents;    // of both for the backward, then the smallest of W's
    struct Scales {
        alignas(16) RowScale rows[4], columns[8];
        alignas(16) float bias[8];
    };
    __device__ __forceinline__ Scales load(const Corner& corner) const {
        Scales scales;
        const RowScale *columns = this->scales, *rows = columns + n;
#pragma unroll
        for (int r = 0; r < 4; ++r) scales.rows[r] = rows[min(corner.row + 4 * r, m - 1)];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const int column = min(corner.column + i * 8, n - 4);
            *reinterpret_cast<float4*>(&scales.columns[i]) = reinterpret_cast<const float4*>(columns + column)[0];
            *reinterpret_cast<float4*>(&scales.columns[i + 2]) = reinterpret_cast<const float4*>(columns + column)[1];
            *reinterpret_cast<float4*>(&scales.bias[i]) = *reinterpret_cast<const float4*>(bias + column);
        }
        return scales;
    }
    // From accumulators to h.
    __device__ __forceinline__ void unscale(float (&v)[4][8], const Corner& corner, const Scales& scales) const {
        unsigned uncertain = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float& own = v[i / 8][i % 8];
            const RowScale &row = scales.rows[i / 8], &column = scales.columns[i % 8];
            if (fabsf(own) < row.doubt + column.doubt) uncertain |= 1u << i;
            own = fmaf(own * row.unscale, column.unscale, scales.bias[i % 8]);
        }
        while (const unsigned lanes = __ballot_sync(~0u, uncertain != 0)) {  // the warp works out one after the other
            const int owner = __ffs(lanes) - 1, which = __shfl_sync(~0u, __ffs(uncertain) - 1, owner);
            const int row = __shfl_sync(~0u, corner.row, owner) + which / 8 * 4;
            const int column = __shfl_sync(~0u, corner.column, owner) + which % 8 / 4 * 32 + which % 4;
            const float sum = row < m && column < n ? multiply_rows(row, column) : 0;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (threadIdx.x % 32 == owner && i == which) v[i / 8][i % 8] = sum + scales.bias[i % 8];
            }
            if (threadIdx.x % 32 == owner) uncertain &= uncertain - 1;
        }
    }
    __device__ __noinline__ float multiply_rows(int64_t row, int64_t column) const {  // a warp, in float32
        const auto* a = reinterpret_cast<const float4*>(x + row * k);
        const auto* b = reinterpret_cast<const float4*>(weight + column * k);
        float sum[4] = {};
#pragma unroll 8
        for (int at = threadIdx.x % 32; at < k / 4; at += 32) {
            sum[0] = fmaf(a[at].x, b[at].x, sum[0]), sum[1] = fmaf(a[at].y, b[at].y, sum[1]);
            sum[2] = fmaf(a[at].z, b[at].z, sum[2]), sum[3] = fmaf(a[at].w, b[at].w, sum[3]);
        }
        return reduce_group((sum[0] + sum[1]) + (sum[2] + sum[3]), 32, nullptr, Sum());
    }
};
// ---- Launching the product. Functions that launch kernels return a cudaError_t, to the C++ as an int. ----
static int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, attribute, device);
    return value;
}
static int sm_count() { return device_attribute(cudaDevAttrMultiProcessorCount); }
// Whether h = x W^T, in float32, is for our product: the larger ones on sm_90, n and k multiples of 4.
extern "C" bool product_fits(int64_t m, int64_t n, int64_t k) {
    const bool shape = n % 4 == 0 && k % 4 == 0 && m >= 128 && n >= 128 && k >= 128 && (m | n | k) < 1 << 24;
    return shape && double(m) * n * k >= 0x1p30 && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
}
// Splits rows of x and of W, of the same length. W may have no rows.
static cudaError_t launch_split(const Operand& x, const Operand& w, cudaStream_t stream) {
    int group = 32;
    while (group < kSplitThreads && group * kSplitItems * 4 < padded_k(x.k)) group *= 2;
    const int rows = kSplitThreads / group;  // of a block
    const unsigned blocks_x = unsigned(divide_up(x.rows, rows)), blocks_w = unsigned(divide_up(w.rows, rows));
    split_rows<<<blocks_x + blocks_w, kSplitThreads, 0, stream>>>(x, w, group, blocks_x);
    return cudaGetLastError();
}
// The pieces of a (rows, columns) matrix, and their TMA map. A box is an operand's part of a stage: a line of 128 rows
// or, TURNED, 32 rows (k) of 4 strips of 32 columns, of hi and of lo. What is out of bounds is filled with zeros.
struct Pieces {
    __half* values;
    int64_t rows, columns;
};
template <bool TURNED> static cudaError_t make_map(CUtensorMap* map, const Pieces& pieces) {
    static const auto encode = [] {  // the driver's own function, without linking against the driver
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    const cuuint64_t halves = padded_k(pieces.columns) * 2, rows = pieces.rows, strides[2] = {halves * 2, 64};
    const cuuint64_t sizes[3] = {TURNED ? 32 : halves, rows, TURNED ? halves / 32 : 1};
    const cuuint32_t box[3] = {TURNED ? 32u : kLine, TURNED ? unsigned(kTerms) : kTile, TURNED ? 8 : 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    if (encode == nullptr) return cudaErrorNotSupported;
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, pieces.values, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, TURNED ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
        TURNED ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
template <bool TURNED_A, bool TURNED_B, class Epilogue> static cudaError_t launch_multiply(
    const Pieces& a, const Pieces& b, int64_t terms, const Epilogue& epilogue, cudaStream_t stream) {
    CUtensorMap map_a, map_b;
    const auto kernel = multiply<TURNED_A, TURNED_B, Epilogue>;
    cudaError_t error = make_map<TURNED_A>(&map_a, a);
    if (error == cudaSuccess) error = make_map<TURNED_B>(&map_b, b);
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, most, sizeof(MultiplyShared));
    if (error != cudaSuccess) return error;
    const int64_t tiles = divide_up(epilogue.m, kTile) * divide_up(epilogue.n, kTile), sms = sm_count();
    const unsigned blocks = unsigned(tiles < sms ? tiles : sms);
    const int lines = int(divide_up(terms, kTerms * kStages) * kStages);
    kernel<<<blocks, kMultiplyThreads, sizeof(MultiplyShared), stream>>>(map_a, map_b, lines, epilogue);
    return cudaGetLastError();
}
// All launches of h = x W^T + b: the splits, then the product with its epilogue.
template <class Epilogue> static cudaError_t launch_linear(
    const Epilogue& epilogue, __half* pieces_x, __half* pieces_w, cudaStream_t stream) {
    const int64_t m = epilogue.m, n = epilogue.n;
    const int k = epilogue.k;
    int *const exponents = epilogue.exponents, *const smallest = exponents + n + m;
    const Operand x = {epilogue.x, pieces_x, m, k, epilogue.scales + n, exponents + n, nullptr};
    const Operand w = {epilogue.weight, pieces_w, n, k, epilogue.scales, exponents, smallest};
    cudaError_t error = cudaMemsetAsync(smallest, 0, sizeof(int), stream);
    if (error == cudaSuccess) error = launch_split(x, w, stream);
    if (error != cudaSuccess) return error;
    return launch_multiply<false, false>({pieces_x, m, k}, {pieces_w, n, k}, k, epilogue, stream);
}

// ---- The gradients of h = x W^T + b from h's, G (m, n): dX = G W and dW = G^T x. The same text in both files. ----
// G is split once, and both products read its pieces: K-major for dX, MN-major (TURNED) for dW. W and x are MN-major
// too, so nothing is transposed in memory. These sums run over the rows of W (dX), or of G and x (dW), so the scales of
// those rows cannot be taken out of the sum. Instead, beside one scale for all of W and one for all of x:
//     G's row i is scaled by 2^a_i, to its own maximum, and x's row i by 2^-a_i; dX's row i is unscaled;
//     W's row j, if below 2^-12 of W's largest, is scaled up by 2^-b_j (b_j: -12 to 0), G's column j down by 2^b_j;
//     dW's row j is unscaled.
// So errors are small beside the norms of dX's rows (unless W's below 2^-28 of the largest count) and of all dW.
constexpr int kSpareBits = 12;  // hi + lo lose 2^-23 of a value, at 2^-12 of the maximum as at it
struct SplitGradient {  // device memory that the kernels of a backward share
    __half* pieces;
    const int* forward;   // the forward's exponents: of W's rows, of x's, then the smallest of W's
    int *columns, *rows;  // b_j, a_i
    int* smallest;        // zeroed beforehand: the smallest a_i + exponent of x's row i, where G's row is not 0, or 252
};
// Runs after G is split. A thread finds b_j and, if it is not 0, scales column j of every gridDim.y-th row of G.
__global__ void scale_columns(const SplitGradient to, int64_t m, int64_t n) {
    const int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j >= n) return;
    const int below = to.forward[j] - smallest_of(to.forward + n + m) - kSpareBits, b = -min(max(below, 0), kSpareBits);
    if (blockIdx.y == 0) to.columns[j] = b;
    for (int64_t i = blockIdx.y; i < m && b != 0; i += gridDim.y) {
        __half* const piece = to.pieces + i * padded_k(n) * 2 + j / kTerms * kLine + j % kTerms;
        for (int part : {0, kTerms}) piece[part] = __hmul(piece[part], __float2half(power_of_two(b)));
    }
}
// The epilogue of dX, or of dW: unscales row i by 2^-(smallest_of(common) + rows[i]).
struct StoreGradient {
    const int *common, *rows;
    float* out;
    int m, n;
    struct Scales {
        float first[4], second[4];  // of a row: a power of two that may not be a float, in two steps
    };
    __device__ __forceinline__ Scales load(const Corner& corner) const {
        Scales scales;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int exponent = -smallest_of(common) - rows[min(corner.row + 4 * r, m - 1)];
            scales.first[r] = power_of_two(exponent / 2), scales.second[r] = power_of_two(exponent - exponent / 2);
        }
        return scales;
    }
    __device__ __forceinline__ void finish(float (&v)[4][8], const Corner& corner, const Scales& scales) const {
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i / 8][i % 8] = v[i / 8][i % 8] * scales.first[i / 8] * scales.second[i / 8];
        store_part<true>(out, v, corner, m, n);
    }
};

// dX = G W, or dW = G^T x. G is split already; splits `other` (W or x) to `pieces`, then multiplies.
extern "C" int linear_gradient(bool of_weight, const float* other, __half* pieces, float* out, int64_t m, int64_t n,
    int64_t k, const SplitGradient* grad, cudaStream_t stream) {
    const int64_t terms = of_weight ? m : n;
    Operand split = {other, pieces, terms, int(k)};
    split.common = of_weight ? grad->smallest : grad->forward + n + m;
    split.less = of_weight ? grad->rows : grad->columns;
    const cudaError_t error = launch_split(split, {}, stream);
    if (error != cudaSuccess) return error;
    const int* const unscale_by = of_weight ? grad->columns : grad->rows;  // dW's rows are G's columns
    const StoreGradient epilogue = {split.common, unscale_by, out, int(of_weight ? n : m), int(k)};
    const Pieces a = {grad->pieces, m, n}, b = {pieces, terms, k};
    return of_weight ? launch_multiply<true, true>(a, b, terms, epilogue, stream)
                     : launch_multiply<false, true>(a, b, terms, epilogue, stream);
}
// ---- The rows of linear_instance_norm_residual ----
struct StoreLinear : LinearProduct {
    __device__ __forceinline__ void finish(float (&v)[4][8], const Corner& corner, const Scales& scales) const {
        unscale(v, corner, scales);
        store_part<false>(out, v, corner, m, n);  // to stay in L2, for finish_rows
    }
};
// out = ((h - mean) * rstd + y) * y. To change it: finish_rows, row_gradients, _finish_plainly.
// `group` threads, at most the block, own a row; each keeps 32 values of h and of y in registers: 8192 a whole block.
// The rest of a longer row is read from memory or L2 each time. `out` may be h.
constexpr int kRowThreads = 256;
template <typename T> __global__ void __launch_bounds__(kRowThreads, 2) finish_rows(
    const T* h, const T* __restrict__ y, T* out, int64_t rows, int n, float eps, int group) {
    constexpr int V = 16 / sizeof(T), ITEMS = 32 / V;
    __shared__ float warp_values[kRowThreads / 32];
    const int64_t row = int64_t(blockIdx.x) * (kRowThreads / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group, packs = row < rows ? n / V : 0;
    const auto* from = reinterpret_cast<const Pack<T, V>*>(h + row * n);
    const auto* other = reinterpret_cast<const Pack<T, V>*>(y + row * n);
    Pack<T, V> held[ITEMS], held_y[ITEMS];  // all loads are issued before the first is used
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (lane + i * group < packs) held[i] = from[lane + i * group], held_y[i] = other[lane + i * group];
    }
    const auto over_row = [&](const auto& use) {  // calls use(pack of h, pack of y, their index in the row)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (lane + i * group < packs) use(held[i], held_y[i], lane + i * group);
        }
        for (int at = lane + ITEMS * group; at < packs; at += group) use(from[at], other[at], at);
    };
    const float share = 1.0f / n;  // a factor of each of the mean's terms: their bare sum could overflow
    float mean = 0, rest = 0, squares = 0;
    over_row([&](const Pack<T, V>& pack, const Pack<T, V>&, int) {
        for (int j = 0; j < V; ++j) mean = fmaf(to_float(pack.value[j]), share, mean);
    });
    mean = reduce_group(mean, group, warp_values, Sum());
    over_row([&](const Pack<T, V>& pack, const Pack<T, V>&, int) {
        float pack_rest = 0, pack_squares = 0;  // a pack's own sums: small terms added to a large total would be lost
        for (int j = 0; j < V; ++j) {
            const float deviation = to_float(pack.value[j]) - mean;
            pack_rest += deviation, pack_squares = fmaf(deviation, deviation, pack_squares);
        }
        rest += pack_rest, squares += pack_squares;
    });
    rest = reduce_group(rest, group, warp_values, Sum()) * share;  // what the rounding of the mean left over
    squares = reduce_group(squares, group, warp_values, Sum()) * share;
    if (isinf(squares)) rest = 0;  // rstd is 0 then; an infinite rest would make NaN of it
    const float rstd = 1 / sqrtf(fmaxf(squares - rest * rest, 0) + eps);  // fmaxf drops a NaN; h - mean or rest has it
    over_row([&](const Pack<T, V>& pack, const Pack<T, V>& own_y, int at) {
        Pack<T, V> result;
        for (int j = 0; j < V; ++j) {
            const float add = to_float(own_y.value[j]);
            result.value[j] = from_float<T>((((to_float(pack.value[j]) - mean) - rest) * rstd + add) * add);
        }
        reinterpret_cast<Pack<T, V>*>(out + row * n)[at] = result;
    });
}
// A block of row_gradients holds a row in registers, kColumns neighbouring columns a thread. It has the fewest warps, a
// power of two, that cover the row, so that an SM has many blocks if rows are short.
constexpr int kColumns = 16;
static int row_threads(int64_t n) {
    int threads = 32;
    while (threads * kColumns < n) threads *= 2;
    return threads;
}
extern "C" int64_t row_blocks(int64_t m, int64_t n) {  // each writes one row of partial sums
    const int64_t most = sm_count() * 512 / row_threads(n);
    return m < most ? m : most;
}
// Reads a thread's columns of a row to v, 0 beyond n. n is a multiple of 8.
template <typename T> __device__ __forceinline__ void read_columns(const T* from, float (&v)[kColumns], int n) {
    constexpr int V = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kColumns; i += V) {
        const int column = threadIdx.x * kColumns + i;
        Pack<T, V> pack = {};
        if (column < n) pack = *reinterpret_cast<const Pack<T, V>*>(from + column);
        for (int j = 0; j < V; ++j) v[i + j] = to_float(pack.value[j]);
    }
}
template <typename T> __device__ __forceinline__ void write_columns(T* to, const float (&v)[kColumns], int n) {
    constexpr int V = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kColumns; i += V) {
        const int column = threadIdx.x * kColumns + i;
        Pack<T, V> pack;
        for (int j = 0; j < V; ++j) pack.value[j] = from_float<T>(v[i + j]);
        if (column < n) *reinterpret_cast<Pack<T, V>*>(to + column) = pack;
    }
}
// Scales, splits and stores a row of G; v is 0 beyond n.
__device__ __forceinline__ void store_split_row(
    const float (&v)[kColumns], int row, int n, const SplitGradient& to, float* warp_values) {
    const int first = threadIdx.x * kColumns, padded = int(padded_k(n));
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) largest = fmaxf(largest, is_finite(v[i]) ? fabsf(v[i]) : 0.0f);
    largest = reduce_group(largest, blockDim.x, warp_values, Max());
    const int exponent = scale_exponent(largest);
#pragma unroll
    for (int i = 0; i < kColumns; i += 8) {
        float eight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) eight[j] = v[i + j] * power_of_two(exponent);
        if (first + i < padded) store_pieces(to.pieces + int64_t(row) * padded * 2, first + i, eight);
    }
    if (threadIdx.x > 0) return;
    to.rows[row] = exponent;
    take_smallest(to.smallest, largest > 0 ? exponent + to.forward[n + row] : 252);  // 252: no other is larger
}
// The gradients of out by y, and by h: with z = (h - mean) * rstd and d = grad * y
//     grad_y = grad * (z + y) + d;    G = rstd * (d - mean(d) - z mean(d z))
// G goes to `whole`, for ATen's products, split to `to`, for linear_gradient, or nowhere; its sums over a block's rows,
// for the bias's gradient, to partials[block]. A block owns every gridDim.x-th row, a thread the same columns of each.
// The tensor cores truncate: multiply's h, and so 1 / rstd, is on average kTruncated of itself too small (K of 128 to
// 20000). That cancels in z, but makes G too large: so `restored`, unless G is `whole`.
constexpr float kTruncated = 0.75f * 0x1p-23f;
template <typename T> __global__ void __launch_bounds__(512) row_gradients(
    const T* __restrict__ grad, const T* __restrict__ h, const T* __restrict__ y, T* __restrict__ grad_y,
    float* __restrict__ partials, int64_t rows, int n, float eps, const SplitGradient to, T* __restrict__ whole) {
    __shared__ float warp_values[512 / 32];
    const float share = 1.0f / n;
    const auto sum_of = [&](float v) { return reduce_group(v, blockDim.x, warp_values, Sum()); };
    const auto each = [&](const auto& use) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            if (int(threadIdx.x) * kColumns + i < n) use(i);
        }
    };
    double column_sums[kColumns] = {};
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {  // z: first h; own_y: y, then grad_y; g: grad, d, G
        float z[kColumns], own_y[kColumns], g[kColumns], mean = 0, rest = 0, of_d = 0, of_dz = 0;
        float parts[4] = {};  // of the squares: shorter sums, so that each is rounded fewer times
        read_columns(h + row * n, z, n), read_columns(y + row * n, own_y, n), read_columns(grad + row * n, g, n);
        each([&](int i) { mean = fmaf(z[i], share, mean); });
        mean = sum_of(mean);
        each([&](int i) { z[i] -= mean, rest += z[i], parts[i % 4] = fmaf(z[i], z[i], parts[i % 4]); });
        const float squares = sum_of((parts[0] + parts[1]) + (parts[2] + parts[3])) * share;
        rest = sum_of(rest) * share;
        if (isinf(squares)) rest = 0;
        const float rstd = 1 / sqrtf(fmaxf(squares - rest * rest, 0) + eps);
        each([&](int i) {
            z[i] = (z[i] - rest) * rstd;
            const float d = g[i] * own_y[i];
            own_y[i] = fmaf(g[i], z[i] + own_y[i], d);  // grad_y
            g[i] = d;
            of_d += d, of_dz = fmaf(d, z[i], of_dz);
        });
        if (grad_y != nullptr) write_columns(grad_y + row * n, own_y, n);
        of_d = sum_of(of_d) * share, of_dz = sum_of(of_dz) * share;
        const float restored = whole == nullptr ? fmaf(rstd, -kTruncated, rstd) : rstd;
        each([&](int i) {
            g[i] = restored * (g[i] - of_d - z[i] * of_dz);
            column_sums[i] += g[i];
        });
        if (whole != nullptr) write_columns(whole + row * n, g, n);
        else if (to.pieces != nullptr) store_split_row(g, row, n, to, warp_values);
    }
    float* const sums = partials + int64_t(blockIdx.x) * n + threadIdx.x * kColumns;
    each([&](int i) { sums[i] = float(column_sums[i]); });
}
// ---- What else the C++ calls. Pointers are device memory, 16-byte aligned, but a SplitGradient is the host's. ----
extern "C" int linear_forward(const float* x, const float* weight, const float* bias, float* h, RowScale* scales,
    int* exponents, __half* pieces_x, __half* pieces_w, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    const StoreLinear epilogue = {{x, weight, bias, h, int(m), int(n), int(k), scales, exponents}};
    return launch_linear(epilogue, pieces_x, pieces_w, stream);
}
// dtype: 0 float32, 1 float16, 2 bfloat16. n is a multiple of 8.
extern "C" int row_norm_residual(
    int dtype, const void* h, const void* y, void* out, int64_t rows, int64_t n, float eps, cudaStream_t stream) {
    int group = 8;
    while (group < kRowThreads && group * 32 < n) group *= 2;
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        finish_rows<<<unsigned(divide_up(rows, kRowThreads / group)), kRowThreads, 0, stream>>>(
            static_cast<const T*>(h), static_cast<const T*>(y), static_cast<T*>(out), rows, int(n), eps, group);
    };
    dtype == 0 ? launch(0.0f) : dtype == 1 ? launch(__half()) : launch(__nv_bfloat16());
    return cudaGetLastError();
}
// Launches row_gradients and, given `to` (for float32 alone), scale_columns. n is at most 8192.
extern "C" int residual_gradients(int dtype, const void* grad, const void* h, const void* y, void* grad_y,
    float* partials, int64_t m, int64_t n, float eps, const SplitGradient* to, void* whole, cudaStream_t stream) {
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        row_gradients<<<unsigned(row_blocks(m, n)), row_threads(n), 0, stream>>>(
            static_cast<const T*>(grad), static_cast<const T*>(h), static_cast<const T*>(y), static_cast<T*>(grad_y),
            partials, m, int(n), eps, to != nullptr ? *to : SplitGradient(), static_cast<T*>(whole));
    };
    dtype == 0 ? launch(0.0f) : dtype == 1 ? launch(__half()) : launch(__nv_bfloat16());
    if (to != nullptr) scale_columns<<<dim3(unsigned(divide_up(n, 256)), 64), 256, 0, stream>>>(*to, m, n);
    return cudaGetLastError();
}
"""

CPP_SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace {
using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// x (m, k), weight (n, k), bias (n), y (m, n), of one dtype and device. Returns out and, if `recorded`, also
// h = x weight^T + bias and, of float32 without TF32, the exponents of weight's and x's scales: zeros if ATen made h.
Outputs forward_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y, double,
    bool tf32, bool recorded) {
    const c10::SymInt m = x.sym_size(0), n = weight.sym_size(0);
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.sym_size(1) == weight.sym_size(1), "x (m, k), weight (n, k)");
    TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == n, "bias (n)");
    TORCH_CHECK(y.dim() == 2 && y.sym_size(0) == m && y.sym_size(1) == n, "y (m, n)");
    for (const at::Tensor& t : {weight, bias, y}) {
        TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.device() == x.device(), "one dtype and device");
    }
    const at::Tensor out = at::empty_symint({m, n}, x.options());
    const at::Tensor h = recorded ? at::empty_like(out) : at::empty({0}, x.options());
    const c10::SymInt exponents = recorded && !tf32 && x.scalar_type() == at::kFloat ? n + m + 1 : 0;
    return {out, h, at::empty_symint({exponents}, x.options().dtype(at::kInt))};
}
// The gradients of x, weight, bias and y; one that is not needed comes back without elements.
std::vector<at::Tensor> backward_meta(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& h, const at::Tensor&, const at::Tensor& y, double, std::array<bool, 4> needs) {
    for (const at::Tensor& t : {grad, weight, h, y}) TORCH_CHECK(t.scalar_type() == x.scalar_type(), "one dtype");
    const auto result = [&](bool need, c10::SymIntArrayRef size) {
        return need ? at::empty_symint(size, x.options()) : at::empty({0}, x.options());
    };
    return {result(needs[0], x.sym_sizes()), result(needs[1], weight.sym_sizes()),
        result(needs[2], weight.sym_sizes().slice(0, 1)), result(needs[3], y.sym_sizes())};
}

// ---- The product in C++: the same text in both linear files. ----
struct GradientPointers {  // the kernels' SplitGradient
    void* pieces;
    const int* forward;
    int *columns, *rows, *smallest;
};
extern "C" bool product_fits(int64_t m, int64_t n, int64_t k);
extern "C" int linear_gradient(bool of_weight, const float* other, void* pieces, float* out, int64_t m, int64_t n,
    int64_t k, const GradientPointers* grad, cudaStream_t stream);
at::Tensor pieces_of(int64_t rows, int64_t k, const at::Tensor& like) {
    return at::empty({rows, (k + 31) / 32 * 64}, like.options().dtype(at::kHalf));
}
at::Tensor aligned(const at::Tensor& t) {  // contiguous, and 16-byte aligned
    const at::Tensor ready = t.contiguous();
    return reinterpret_cast<uintptr_t>(ready.data_ptr()) % 16 == 0 ? ready : ready.clone();
}
float* floats(const at::Tensor& t) { return t.data_ptr<float>(); }
cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream(); }
void check_launch(int error) { TORCH_CHECK(error == 0, "launch failed: ", cudaGetErrorString(cudaError_t(error))); }
// dX and dW, where wanted, from x, W and the forward's exponents. split_gradient(to) splits G.
void product_gradients(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& exponents, bool of_x,
    bool of_weight, std::vector<at::Tensor>& results, c10::function_ref<int(const GradientPointers*)> split_gradient) {
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    TORCH_CHECK(product_fits(m, n, k) && n <= 8192 && exponents.numel() == n + m + 1, "h is not of this product");
    const at::Tensor g = pieces_of(m, n, x), own = at::zeros({n + m + 1}, exponents.options());
    int *const columns = own.data_ptr<int>(), *const rows = columns + n;
    const GradientPointers grad = {g.data_ptr(), exponents.data_ptr<int>(), columns, rows, rows + m};
    check_launch(split_gradient(&grad));
    const auto find = [&](bool weights, const at::Tensor& other) {  // one after the other, for memory
        const at::Tensor pieces = pieces_of(other.size(0), k, x), ready = aligned(other);
        const at::Tensor& out = results[weights] = at::empty({weights ? n : m, k}, x.options());
        check_launch(linear_gradient(
            weights, floats(ready), pieces.data_ptr(), floats(out), m, n, k, &grad, current_stream()));
    };
    if (of_x) find(false, weight);
    if (of_weight) find(true, x);
}

extern "C" int linear_forward(const float* x, const float* weight, const float* bias, float* h, void* scales,
    int* exponents, void* pieces_x, void* pieces_w, int64_t m, int64_t n, int64_t k, cudaStream_t stream);
extern "C" int row_norm_residual(
    int dtype, const void* h, const void* y, void* out, int64_t rows, int64_t n, float eps, cudaStream_t stream);
extern "C" int64_t row_blocks(int64_t m, int64_t n);
extern "C" int residual_gradients(int dtype, const void* grad, const void* h, const void* y, void* grad_y,
    float* partials, int64_t m, int64_t n, float eps, const GradientPointers* to, void* whole, cudaStream_t stream);
int kernel_dtype(const at::Tensor& t) {  // as the kernels' launchers count
    return t.scalar_type() == at::kFloat ? 0 : t.scalar_type() == at::kHalf ? 1 : 2;
}

Outputs forward_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y,
    double eps, bool tf32, bool recorded) {
    const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    const c10::cuda::CUDAGuard guard(x.device());
    TORCH_CHECK(product_fits(m, n, k) && n % 8 == 0, "a large product on a GPU of compute capability 9");
    Outputs outputs = forward_meta(x, weight, bias, y, eps, tf32, recorded);
    auto& [out, h, exponents] = outputs;
    at::Tensor product = recorded ? h : out;  // row_norm_residual reads it, and, if not recorded, writes out there
    if (x.scalar_type() == at::kFloat && !tf32) {
        const at::Tensor rows = aligned(x), columns = aligned(weight), plus = aligned(bias);
        const at::Tensor found = recorded ? exponents : at::empty({n + m + 1}, x.options().dtype(at::kInt));
        const at::Tensor scales = at::empty({n + m, 2}, x.options());
        const at::Tensor pieces_x = pieces_of(m, k, x), pieces_w = pieces_of(n, k, x);
        check_launch(linear_forward(floats(rows), floats(columns), floats(plus), floats(product), scales.data_ptr(),
            found.data_ptr<int>(), pieces_x.data_ptr(), pieces_w.data_ptr(), m, n, k, current_stream()));
    } else {
        at::linear_out(product, x, weight, bias);
        exponents.zero_();  // no backward reads these, but results are to be the same each time
    }
    check_launch(row_norm_residual(kernel_dtype(x), product.data_ptr(), aligned(y).data_ptr(), out.data_ptr(), m, n,
        float(eps), current_stream()));
    return outputs;
}

std::vector<at::Tensor> backward_cuda(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
    const at::Tensor& h, const at::Tensor& exponents, const at::Tensor& y, double eps, std::array<bool, 4> needs) {
    std::vector<at::Tensor> results = backward_meta(grad, x, weight, h, exponents, y, eps, {});
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t m = h.size(0), n = h.size(1);
    TORCH_CHECK(m > 0 && n > 0 && n % 8 == 0 && n <= 8192, "rows of 8 to 8192 features, in eights");
    const bool split = exponents.numel() > 0;  // then h is multiply's
    const at::Tensor given = aligned(grad), kept = aligned(h), ready_y = aligned(y);
    const at::Tensor g = split ? at::Tensor() : at::empty_like(kept);
    const auto find = [&](const GradientPointers* to) {
        const bool last = to == nullptr;  // if `split`: first G, for the products; then, behind them, y's gradient
        if (last && needs[3]) results[3] = at::empty_like(kept);
        const at::Tensor parts = at::empty({row_blocks(m, n), n}, x.options().dtype(at::kFloat));
        const int error = residual_gradients(kernel_dtype(x), given.data_ptr(), kept.data_ptr(), ready_y.data_ptr(),
            last && needs[3] ? results[3].data_ptr() : nullptr, floats(parts), m, n, float(eps), to,
            split ? nullptr : g.data_ptr(), current_stream());
        if (needs[2] && split != last) results[2] = parts.sum(at::IntArrayRef{0}, false, at::kDouble).to(x.options());
        return error;
    };
    if (split) product_gradients(x, weight, exponents, needs[0], needs[1], results, find);
    if (!split || needs[3]) check_launch(find(nullptr));  // y's gradient last: 7% less memory for 1.02 of the time
    if (!split && needs[0]) results[0] = g.mm(weight);
    if (!split && needs[1]) results[1] = g.t().mm(x);
    return results;
}

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor bias, Tensor y, float eps, bool tf32, bool recorded)"
          " -> (Tensor, Tensor, Tensor)");
    m.def("backward(Tensor grad, Tensor x, Tensor weight, Tensor h, Tensor exponents, Tensor y, float eps, "
          "bool[4] needs) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(NAMESPACE, Meta, m) {
    m.impl("forward", forward_meta);
    m.impl("backward", backward_meta);
}
TORCH_LIBRARY_IMPL(NAMESPACE, CUDA, m) {
    m.impl("forward", forward_cuda);
    m.impl("backward", backward_cuda);
}
TORCH_LIBRARY_IMPL(NAMESPACE, Autograd, m) {
    for (const char* name : {"forward", "backward"}) m.impl(name, torch::autograd::autogradNotImplementedFallback());
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

    GPU code is made for `arch` ("90a", say). Without it PyTorch decides: for what TORCH_CUDA_ARCH_LIST names, or for
    the GPUs present. The name has a hash of sources, flags and torch's version, so a library of that name, once whole,
    is loaded as it is, and edited copies live side by side. RuntimeError, with what to do, where a tool is missing.
    """
    gpus = range(torch.cuda.device_count() if torch.version.cuda else 0)
    cpp_flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", *["-DWITH_CUDA"] * bool(gpus)]
    simd = torch.backends.cpu.get_cpu_capability()
    if march := {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}.get(simd):  # the two defines are for at::vec, where used
        cpp_flags += [f"-march={march}", f"-DCPU_CAPABILITY={simd}", f"-DCPU_CAPABILITY_{simd}"]
    cuda_flags = ["-O3", "--split-compile=0", *[f"-gencode=arch=compute_{arch},code=sm_{arch}"] * bool(arch)]
    present = sorted({torch.cuda.get_device_capability(gpu) for gpu in gpus})
    targets = os.environ.get("TORCH_CUDA_ARCH_LIST") or present
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
    if not os.environ.get("CXX", "c++").strip():  # set, but empty: PyTorch would run a compiler of no name
        del os.environ["CXX"]
    if not shutil.which("ninja"):  # pip puts it beside python, which is not on PATH if the environment is not activated
        os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + os.path.dirname(sys.executable)
    needs = {"ninja": "pip install ninja", os.environ.get("CXX", "c++").split()[0]: "install g++, or set CXX"}
    if gpus:
        needs[f"{cpp_extension.CUDA_HOME}/bin/nvcc"] = "install the CUDA toolkit, and set CUDA_HOME to its folder"
    for tool in filter(lambda tool: not shutil.which(tool), needs):
        raise RuntimeError(f"building {name} needs {tool}, which is not there: {needs[tool]}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise RuntimeError(f"{folder} cannot be written: set TORCH_EXTENSIONS_DIR to a folder that can be")
    with open(folder / "build.lock", "w") as lock:
        # One process builds at a time. This lock ends with its process; PyTorch's own file, `lock`, outlives a build
        # that was killed (pytorch#189245). A file system without flock raises OSError: PyTorch's lock is left to it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
        if _is_whole(library):  # another process built it while this one waited
            torch.ops.load_library(library)
            return name
        library.unlink(missing_ok=True)  # of a build that was interrupted, or of 0 bytes since a disk was full
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


def _is_plain(module: nn.Module, kind: type) -> bool:
    """Whether calling the module is no more than `kind.forward`: no hooks, no tracing, no forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if type(module) is not kind or hooks or nn.modules.module._has_any_global_hook() or torch.jit.is_tracing():
        return False
    return isinstance(module.forward, types.MethodType) and module.forward.__func__ is kind.forward


def _are_plain(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether these are ordinary tensors of one Hopper and one of the dtypes, with no autocast or transform."""
    tensors, dtypes = (x, *others), (torch.float32, torch.float16, torch.bfloat16)
    if torch._C._are_functorch_transforms_active() or any(type(t) not in (torch.Tensor, nn.Parameter) for t in tensors):
        return False
    here = x.is_cuda and x.device.index in _HOPPERS
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if not here or x.dtype not in dtypes or autocast or torch.autograd.forward_ad._current_level >= 0:
        return False
    return all(t.layout is torch.strided and t.dtype is x.dtype and t.device == x.device for t in tensors)


def _is_exporting() -> bool:  # PyTorch 2.11 and older trace torch.compiler.is_exporting as True wherever they compile
    return torch.compiler.is_exporting()


def _product_fits(m: int, n: int, k: int) -> bool:
    """Whether a product x (m, k) by weight (n, k) is for the operator: the larger ones, n and k multiples of 4."""
    return n % 4 == k % 4 == 0 and 128 <= min(m, n, k) and max(m, n, k) < 2**24 and m * n * k >= 2**30


def _is_recorded(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and not _is_exporting() and any(t.requires_grad for t in tensors)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


# torch.compiler.assume_constant_result without its import of torch._dynamo; a change of the setting compiles anew.
_allows_tf32._dynamo_marked_constant = _is_exporting._dynamo_marked_constant = True

NEEDS = "sm_90"  # the fast way's GPU; without one, nothing is built
_HOPPERS = [
    i
    for i in range(torch.cuda.device_count() if torch.version.cuda else 0)
    if torch.cuda.get_device_capability(i)[0] == 9
]
NAMESPACE = _load("hopper_linear_instance_norm_residual", "90a") if _HOPPERS else ""


def _is_ordinary(norm: nn.Module) -> bool:
    bare = norm.weight is norm.bias is norm.running_mean is norm.running_var is None
    return _is_plain(norm, nn.InstanceNorm2d) and bare and norm.eps > 0


def _finish_plainly(norm: nn.Module, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The Model's lines; a usual norm without its warning, which would break torch.compile's graph. On a CPU PyTorch
    2.13's instance norm reads a transposed gradient as if it were contiguous: the hook makes it so."""
    if not isinstance(h, torch.Tensor) or not _is_ordinary(norm) or h.dim() != 2 or h.shape[1] < 2:
        h = norm(h.unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
    else:
        h = nn.functional.instance_norm(h.unsqueeze(1).unsqueeze(1), eps=norm.eps).squeeze(1).squeeze(1)
        if h.is_cpu and h.requires_grad and not torch.compiler.is_compiling():
            h.register_hook(torch.Tensor.contiguous)
    h = h + y  # which frees the old h
    return h * y


def _fits(linear: nn.Module, norm: nn.Module, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the operator may stand for the Model's lines."""
    if not _is_plain(linear, nn.Linear) or not _is_ordinary(norm) or linear.bias is None:
        return False
    weight, bias = linear.weight, linear.bias
    if not _are_plain(x, weight, bias, y) or x.dim() != 2 or weight.dim() != 2:
        return False
    n = weight.shape[0]
    shapes = x.shape[1] == weight.shape[1] and bias.shape == (n,) and y.shape == (x.shape[0], n)
    if not shapes or n % 8 != 0 or _is_recorded(x, weight, bias, y) and n > 8192:
        return False
    return _product_fits(x.shape[0], n, x.shape[1])


class LinearRowNormResidual(torch.autograd.Function):
    """The whole network. Saves its inputs, h and exponents. With create_graph all derivatives are ATen's."""

    @staticmethod
    def forward(ctx, x, weight, bias, y, eps, tf32):
        out, h, exponents = getattr(torch.ops, NAMESPACE).forward(x, weight, bias, y, eps, tf32, True)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, bias, y, h, exponents)
        return out

    @staticmethod
    def backward(ctx, grad):
        (x, weight, bias, y, h, exponents), needs = ctx.saved_tensors, ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # they are to be differentiated in turn
            tensors = [t.view_as(t) for t in (x, weight, bias, y)]  # views: if y is made of x, x's gradient omits that
            out = _finish_plainly(nn.InstanceNorm2d(1, eps=ctx.eps), nn.functional.linear(*tensors[:3]), tensors[3])
            wanted = [t for t, need in zip(tensors, needs) if need]
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return *(next(found) if need else None for need in needs), None, None
        found = getattr(torch.ops, NAMESPACE).backward(grad, x, weight, h, exponents, y, ctx.eps, needs)
        return *(own if need else None for own, need in zip(found, needs)), None, None


class ModelNew(nn.Module):
    """A drop-in for `Model`: the same constructor, attributes, parameters and state_dict.

    forward: x (B, in_features), y (B, out_features) or broadcastable to it. The Model's own errors for other shapes.
    """

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.bmm = nn.Linear(in_features, out_features)
        self.instance_norm = nn.InstanceNorm2d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        linear, norm = self.bmm, self.instance_norm
        if not _fits(linear, norm, x, y):
            return _finish_plainly(norm, linear(x), y)
        tensors, others = (x, linear.weight, linear.bias, y), (norm.eps, _allows_tf32())
        if _is_recorded(*tensors):
            return LinearRowNormResidual.apply(*tensors, *others)
        return getattr(torch.ops, NAMESPACE).forward(*tensors, *others, False)[0]
