// A float32-accurate C[M, N] = A[M, K] * B[N, K]^T on Hopper's fp16 tensor cores: split, three products, promotion, fused epilogues.
//
// A row of either operand is scaled by a power of two so that its largest magnitude lies in [2^14, 2^15), and each value becomes
// hi + lo, two fp16 numbers. C = (hi*hi + hi*lo + lo*hi) * unscale_a * unscale_b. The tensor cores truncate when they accumulate, so every
// sum of `kPromote` lines starts at zero and is added to the main accumulator in float32 registers, rounded to nearest; in it the small
// corrections come first, while there is nothing to truncate them against.
//
// What one SM moves (a wgmma m64nNk16 takes N/2 cycles; shared memory gives 128 B a cycle). Tile and line = 32 of K of both operands:
//
//     tile (2 warpgroups)        A from        wgmma    L2 -> shared   shared, read      together, of 128    registers a thread
//     128x128, 2 x 64x128        shared        n128     42.7 B/clk     96.0 B/clk        138.7  (108%)       64 + 64
//     128x192, 2 x 64x192        shared        n192     35.6           85.3              120.9  (94%)        96 + 96
//     128x256, 2 x 64x(2x128)    shared        n128     32.0           96.0              128.0  (100%)       128 + 64
//     128x256, 2 x 64x(2x128)    hi registers  n128     32.0           80.0              112.0  (87%)        128 + 64 + 16 (64 of K)
//     128x256, 2 x 64x(2x128)    registers     n128     32.0           74.7              106.7  (83%)        128 + 64 + 16
//     256x128, 2 x (2x64)x128    registers     n128     32.0           85.3              117.3  (92%)        128 + 64 + 16
//     a cluster of 2 that shares B: L2 reads fall to 21.3 (128x256) and 24.9 (128x192) B/clk; shared memory takes the same writes.
//     one product, 128x256       shared        n256     48.0 (32.0)    80.0              128.0               128
//
// 64x(2x128): a warpgroup has 128 main accumulators and one temporary of 64, which its two halves of the tile use in turn, while the other
// warpgroup keeps the tensor cores busy.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <type_traits>

// ---------------------------------------------------------------------------------------------------------------------------------
// Split. Rows of lines of 128 bytes. Two pieces: 32 values of hi, then the same 32 of lo. One piece: 64 values of hi.

constexpr int kLine = 64;         // fp16 values
constexpr int kPadK = 64;         // K is padded with zeros to a multiple of it: an even number of lines of two pieces
constexpr int kSplitItems = 8;    // quads a thread holds
constexpr int kSplitBlock = 256;  // threads; rows longer than 8192 take kSplitBlockLong, and beyond 32768 are read twice
constexpr int kSplitBlockLong = 1024;

__host__ __device__ constexpr int padded_k(int k) { return (k + kPadK - 1) / kPadK * kPadK; }

struct alignas(8) Quad16 { __half2 a, b; };

template <int kPieces> __device__ __forceinline__ void store_pieces(__half* row, int k, float4 v) {
    Quad16 hi;
    hi.a = __floats2half2_rn(v.x, v.y);
    hi.b = __floats2half2_rn(v.z, v.w);
    if constexpr (kPieces == 1) {
        *reinterpret_cast<Quad16*>(row + k) = hi;
    } else {
        const float2 a = __half22float2(hi.a), b = __half22float2(hi.b);
        Quad16 lo;
        lo.a = __floats2half2_rn(v.x - a.x, v.y - a.y);
        lo.b = __floats2half2_rn(v.z - b.x, v.w - b.y);
        __half* line = row + k / 32 * kLine + k % 32;
        *reinterpret_cast<Quad16*>(line) = hi;
        *reinterpret_cast<Quad16*>(line + 32) = lo;
    }
}

template <bool kVector> __device__ __forceinline__ float4 load_quad(const float* row, int k, int n) {
    if constexpr (kVector) {
        return k < n ? __ldcs(reinterpret_cast<const float4*>(row + k)) : make_float4(0, 0, 0, 0);
    } else {
        float4 v = make_float4(0, 0, 0, 0);
        if (k < n) v.x = __ldcs(row + k);
        if (k + 1 < n) v.y = __ldcs(row + k + 1);
        if (k + 2 < n) v.z = __ldcs(row + k + 2);
        if (k + 3 < n) v.w = __ldcs(row + k + 3);
        return v;
    }
}

__device__ __forceinline__ uint32_t magnitude_bits(float4 v) {  // as integers, so that Inf and NaN are the largest
    return max(max(__float_as_uint(v.x) & 0x7fffffffu, __float_as_uint(v.y) & 0x7fffffffu),
               max(__float_as_uint(v.z) & 0x7fffffffu, __float_as_uint(v.w) & 0x7fffffffu));
}

// `group` threads, a power of two and whole warps, own a row. kHeld: the row waits in their registers, else it is read twice.
// Scale: 2^14 / 2^(exponent of the largest), at most 2^126: then 2^-149 becomes 2^-23, still above fp16's 2^-24, and both the scale and
// its reciprocal are normal numbers. A row with Inf or NaN becomes zeros whose unscale factor is NaN: the whole row of C is NaN.
template <int kPieces, bool kVector, bool kHeld, int kBlock>
__global__ void __launch_bounds__(kBlock) split_rows(
    const float* __restrict__ x, __half* __restrict__ pieces, float* __restrict__ unscale, int64_t rows, int k, int group) {
    __shared__ uint32_t warp_max[kBlock / 32];
    const int64_t row = int64_t(blockIdx.x) * (kBlock / group) + threadIdx.x / group;
    const int lane = threadIdx.x % group, quads = row < rows ? padded_k(k) / 4 : 0;
    const float* gx = x + row * k;
    __half* gp = pieces + row * padded_k(k) * kPieces;

    float4 held[kHeld ? kSplitItems : 1];
    uint32_t largest = 0;
    if constexpr (kHeld) {
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) held[i] = load_quad<kVector>(gx, (lane + i * group) * 4, row < rows ? k : 0);
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) largest = max(largest, magnitude_bits(held[i]));
    } else {
#pragma unroll 4
        for (int q = lane; q < quads; q += group) largest = max(largest, magnitude_bits(load_quad<kVector>(gx, q * 4, k)));
    }
    largest = __reduce_max_sync(~0u, largest);
    if (group > 32) {
        if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = largest;
        __syncthreads();
        const uint32_t* own = warp_max + threadIdx.x / group * (group / 32);
        for (int w = 0; w < group / 32; ++w) largest = max(largest, own[w]);
    }
    const bool finite = largest < 0x7f800000u;
    const int exponent = min(14 + 127 - int(largest >> 23), 126);
    const float scale = finite ? __uint_as_float(uint32_t(127 + exponent) << 23) : 0.0f;
    const auto store = [&](int q, float4 v) {
        v.x = finite ? v.x * scale : 0.0f;
        v.y = finite ? v.y * scale : 0.0f;
        v.z = finite ? v.z * scale : 0.0f;
        v.w = finite ? v.w * scale : 0.0f;
        store_pieces<kPieces>(gp, q * 4, v);
    };
    if constexpr (kHeld) {
#pragma unroll
        for (int i = 0; i < kSplitItems; ++i) {
            if (lane + i * group < quads) store(lane + i * group, held[i]);
        }
    } else {
#pragma unroll 4
        for (int q = lane; q < quads; q += group) store(q, load_quad<kVector>(gx, q * 4, k));
    }
    if (lane == 0 && row < rows) unscale[row] = finite ? __uint_as_float(uint32_t(127 - exponent) << 23) : NAN;
}

template <int kPieces> cudaError_t launch_split(const float* x, __half* pieces, float* unscale, int64_t rows, int k, cudaStream_t stream) {
    const int quads = padded_k(k) / 4;
    int group = 32;
    while (group < kSplitBlockLong && group * kSplitItems < quads) group *= 2;
    const bool held = group * kSplitItems >= quads, vector = k % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const auto launch = [&](auto kernel, int block, int threads) {
        const int64_t per_block = block / threads;
        kernel<<<unsigned((rows + per_block - 1) / per_block), block, 0, stream>>>(x, pieces, unscale, rows, k, threads);
    };
    if (held && group <= kSplitBlock) {
        vector ? launch(split_rows<kPieces, true, true, kSplitBlock>, kSplitBlock, group)
               : launch(split_rows<kPieces, false, true, kSplitBlock>, kSplitBlock, group);
    } else if (held) {
        vector ? launch(split_rows<kPieces, true, true, kSplitBlockLong>, kSplitBlockLong, kSplitBlockLong)
               : launch(split_rows<kPieces, false, true, kSplitBlockLong>, kSplitBlockLong, kSplitBlockLong);
    } else {
        vector ? launch(split_rows<kPieces, true, false, kSplitBlockLong>, kSplitBlockLong, kSplitBlockLong)
               : launch(split_rows<kPieces, false, false, kSplitBlockLong>, kSplitBlockLong, kSplitBlockLong);
    }
    return cudaGetLastError();
}

// ---------------------------------------------------------------------------------------------------------------------------------
// PTX, one instruction a wrapper.

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
// At another block's barrier. Only reads came before, and they are complete: a release to the cluster would add a MEMBAR.GPU.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t bar, int rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(rank) : "memory");
}
#ifdef GEMM_TRAP  // says which barrier hangs, and ends the kernel
#include <stdio.h>
__device__ __noinline__ void report_hang(uint32_t bar, int parity) {
    printf("hang: block %d thread %d barrier at %u parity %d\n", blockIdx.x, threadIdx.x, bar, parity);
    __trap();
}
#endif
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, int parity) {
#ifdef GEMM_TRAP
    for (int i = 0;; ++i) {
        int done;
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.s32 %0, 1, 0, done;\n}"
            : "=r"(done) : "r"(bar), "r"(parity) : "memory");
        if (done) return;
        if (i > 1000000) report_hang(bar, parity);
    }
#else
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}"
        ::"r"(bar), "r"(parity) : "memory");
#endif
}
__device__ __forceinline__ void tensor_load(uint32_t shared, const CUtensorMap* map, int x, int y, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ __forceinline__ void tensor_load_multicast(uint32_t shared, const CUtensorMap* map, int x, int y, uint32_t bar, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(bar), "h"(blocks) : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ int cluster_rank() { int r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int kRegisters> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {  // four 8x8 of fp16, an A fragment of m16k16
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
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

// Descriptor of a K-major tile whose rows are 128-byte lines, swizzled, 8 rows (1024 bytes) an atom. Along K it moves inside the line.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t shared) {
    return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
#define F96(d) F64(d), F16(d, 64), F16(d, 80)
#define F128(d) F96(d), F16(d, 96), F16(d, 112)
#define P64                                                                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,"    \
    "%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define P96                                                                                                                        \
    P64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,"  \
        "%94,%95"
#define P128                                                                                                                       \
    P96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120," \
        "%121,%122,%123,%124,%125,%126,%127"

// d = a * b^T + (add ? d : 0), m64nNk16: a from shared memory (descriptor) or from registers (fragment).
#define WGMMA_SHARED(N, P, F, a, b, add)                                                                                           \
    template <> struct WgmmaShared<N> {                                                                                            \
        static __device__ __forceinline__ void run(float (&d)[N / 2], uint64_t da, uint64_t db, int keep) {                        \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16.f32.f16.f16 {" P "}, %" #a ", %" #b ", keep, 1, 1, 0, 0;\n}" : F(d) : "l"(da), "l"(db), "r"(keep));  \
        }                                                                                                                          \
    };
#define WGMMA_REGISTERS(N, P, F, a0, a1, a2, a3, b, add)                                                                           \
    template <> struct WgmmaRegisters<N> {                                                                                         \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t db, int keep) {             \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16.f32.f16.f16 {" P "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", keep, 1, 1, 0;\n}"              \
                         : F(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db), "r"(keep));                                 \
        }                                                                                                                          \
    };
template <int N> struct WgmmaShared;
template <int N> struct WgmmaRegisters;
WGMMA_SHARED(128, P64, F64, 64, 65, 66)
WGMMA_SHARED(192, P96, F96, 96, 97, 98)
WGMMA_SHARED(256, P128, F128, 128, 129, 130)
WGMMA_REGISTERS(128, P64, F64, 64, 65, 66, 67, 68, 69)

// ---------------------------------------------------------------------------------------------------------------------------------
// The main loop.

constexpr int kConsumers = 2;                      // warpgroups
constexpr int kThreads = (kConsumers + 1) * 128;   // the last warpgroup is the producer: one thread of it
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBandRows = 2048;                    // rows of C whose tiles go column by column, so that A's and B's lines meet in L2
static_assert(kProducerRegisters * 128 + kConsumerRegisters * 128 * kConsumers <= 65536, "an SM's registers");

// kSubsM x kSubsN: wgmma tiles of 64 x kSubN that a warpgroup owns. kPromote: lines (32 of K) summed from zero, 0: never promoted.
// kRegisterA: A's pieces in registers (0, 1: hi, 2: hi and lo). kCluster: blocks, one below the other, that share B's lines.
template <int kSubsM_, int kSubsN_, int kSubN_, int kStages_, int kPromote_, int kRegisterA_, int kCluster_, int kPieces_> struct Shape {
    static constexpr int kSubsM = kSubsM_, kSubsN = kSubsN_, kSubN = kSubN_, kStages = kStages_, kPromote = kPromote_;
    static constexpr int kRegisterA = kRegisterA_, kCluster = kCluster_, kPieces = kPieces_;
    static constexpr int kSubs = kSubsM * kSubsN;
    static constexpr int kTileM = kConsumers * 64 * kSubsM, kTileN = kSubN * kSubsN;
    static constexpr int kBytesA = kTileM * 128, kBytesB = kTileN * 128, kStageBytes = kBytesA + kBytesB;
    static constexpr int kSharedBytes = kStages * (kStageBytes + 16) + 1024;
    static constexpr int kAccumulators = kSubN / 2;
    static constexpr int kBand = kBandRows / (kTileM * kCluster);
    static_assert(kSharedBytes <= 227 * 1024, "one block's shared memory on sm_90");
    static_assert(kSubN % 64 == 0, "the epilogue takes slabs of 64 columns");
    static_assert(kTileM <= 256 && kTileN / kCluster <= 256, "a TMA box has at most 256 rows");
    static_assert(kTileN / kCluster % 8 == 0, "a block's share of B is whole swizzle atoms");
    static_assert(kSubs <= 2, "two wgmma tiles at most share the temporary");
    static_assert(kSubs == 1 || kPieces == 2, "the temporary in turns is for three products");
    static_assert(kSubs > 1 || kRegisterA == 0, "lines in flight across stages would need A's fragments twice");
    static_assert(kSubs == 1 || kPromote == 1 || (kPromote == 2 && kStages % 2 == 0), "an interval's lines are in the ring together");
    static_assert(kSubs * kAccumulators + (kPromote ? kAccumulators : 0) + kPromote * (kSubs > 1) * kRegisterA * 8 <= 208, "registers");
};

// Where a thread's values of a slab of 64 columns are: rows `row` and `row + 8`, columns `column + 8j` and `column + 8j + 1`, j = 0..7.
// A quad of lanes has the rows' 64 columns.
struct Place {
    int row, column;    // of this thread
    int rows, columns;  // of C
};

template <class Config> struct Tiles {
    int across, down, count;  // down: in clusters
    __device__ __forceinline__ Tiles(int m, int n) {
        across = (n + Config::kTileN - 1) / Config::kTileN;
        down = (m + Config::kTileM * Config::kCluster - 1) / (Config::kTileM * Config::kCluster);
        count = across * down;
    }
    __device__ __forceinline__ void find(int tile, int rank, int& row, int& column) const {
        const int band = tile / (Config::kBand * across), inside = tile - band * Config::kBand * across;
        const int height = min(Config::kBand, down - band * Config::kBand);
        row = ((band * Config::kBand + inside % height) * Config::kCluster + rank) * Config::kTileM;
        column = inside / height * Config::kTileN;
    }
};

// Steps of 16 of K in a line: two pieces: hi, hi, lo, lo; one piece: four of hi. A's fragment of a step is in registers or the step is read
// from the tile in shared memory; 32 bytes on in the descriptor's units of 16.
template <class Config> struct Lines {
    static constexpr int kFragments = 2 * Config::kRegisterA;
    uint32_t fragment[kFragments ? Config::kPromote : 1][kFragments ? kFragments : 1][4];

    template <int kLineOf, int kStepA, int kStepB>
    __device__ __forceinline__ void multiply(float (&d)[Config::kAccumulators], uint64_t a, uint64_t b, int keep) const {
        if constexpr (kStepA < kFragments) {
            WgmmaRegisters<Config::kSubN>::run(d, fragment[kLineOf][kStepA], b + 2 * kStepB, keep);
        } else {
            WgmmaShared<Config::kSubN>::run(d, a + 2 * kStepA, b + 2 * kStepB, keep);
        }
    }
    template <int kLineOf> __device__ __forceinline__ void corrections(float (&d)[Config::kAccumulators], uint64_t a, uint64_t b, int keep) const {
        multiply<kLineOf, 2, 0>(d, a, b, keep);
        multiply<kLineOf, 0, 2>(d, a, b, 1);
        multiply<kLineOf, 3, 1>(d, a, b, 1);
        multiply<kLineOf, 1, 3>(d, a, b, 1);
    }
    template <int kLineOf> __device__ __forceinline__ void main(float (&d)[Config::kAccumulators], uint64_t a, uint64_t b, int keep) const {
        multiply<kLineOf, 0, 0>(d, a, b, keep);
        multiply<kLineOf, 1, 1>(d, a, b, 1);
        if constexpr (Config::kPieces == 1) {
            multiply<kLineOf, 2, 2>(d, a, b, 1);
            multiply<kLineOf, 3, 3>(d, a, b, 1);
        }
    }
    // `rows`: the shared address of this warp's 16 rows. Lane l reads row l % 16 of the step's 16-byte half l / 16; TMA's swizzle has put
    // 16-byte unit u of row r at u ^ (r % 8).
    template <int kLineOf> __device__ __forceinline__ void load(uint32_t rows) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < kFragments; ++step) {
            load_matrices(fragment[kLineOf][step], rows + lane % 16 * 128 + (((2 * step + lane / 16) ^ (lane % 8)) << 4));
        }
    }
};

template <bool kFirst, class A, class B> __device__ __forceinline__ auto& pick(A& a, B& b) {
    if constexpr (kFirst) return a;
    else return b;
}

// The epilogue takes a wgmma tile in slabs of 64 columns, 32 values a thread.
template <int kSlab, class Epilogue, int kCount>
__device__ __forceinline__ void finish_slabs(const Epilogue& epilogue, const float (&sum)[kCount], Place place) {
    if constexpr (kSlab * 32 < kCount) {
        place.column += kSlab > 0 ? 64 : 0;
        if ((place.column & ~63) < place.columns) epilogue.template slab<kSlab * 32>(sum, place);  // the same for the whole warp
        finish_slabs<kSlab + 1>(epilogue, sum, place);
    }
}

// A block (or a cluster of two, one below the other) takes every so-many-th tile of C. Warpgroups 0 and 1 own its upper and lower half; one
// thread of warpgroup 2 keeps the ring of stages full. full[s]: the copy engine has brought stage s. empty[s]: every warp that reads it,
// in both blocks of a cluster, is done with it.
template <class Config, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1) gemm(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, int m, int n, int lines, const Epilogue epilogue) {
    constexpr int kStages = Config::kStages, kCluster = Config::kCluster;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t ring = (shared_address(shared) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes; the same place in every block
    const uint32_t full = ring + kStages * Config::kStageBytes, empty = full + kStages * 8;

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int rank = kCluster > 1 ? cluster_rank() : 0;
    const Tiles<Config> tiles(m, n);
    const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, kConsumers * 4 * kCluster);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if constexpr (kCluster > 1) cluster_sync();

    int stage = 0, phase = 0;
    const auto advance = [&] {
        if (++stage == kStages) stage = 0, phase ^= 1;
    };

    if (warpgroup == kConsumers) {
        registers_down<kProducerRegisters>();
        if (threadIdx.x == kConsumers * 128) {
            prefetch_map(&map_a);
            prefetch_map(&map_b);
            for (int tile = first; tile < tiles.count; tile += step) {
                int row, column;
                tiles.find(tile, rank, row, column);
                for (int line = 0; line < lines; ++line, advance()) {
                    const uint32_t a = ring + stage * Config::kStageBytes, b = a + Config::kBytesA, bar = full + 8 * stage;
                    mbarrier_wait(empty + 8 * stage, phase ^ 1);
                    mbarrier_expect_bytes(bar, Config::kStageBytes);
                    tensor_load(a, &map_a, line * kLine, row, bar);
                    if constexpr (kCluster == 1) {
                        tensor_load(b, &map_b, line * kLine, column, bar);
                    } else {  // this block's share of B, to all blocks of the cluster
                        constexpr int kShare = Config::kTileN / kCluster;
                        tensor_load_multicast(
                            b + rank * kShare * 128, &map_b, line * kLine, column + rank * kShare, bar, uint16_t((1 << kCluster) - 1));
                    }
                }
            }
        }
        __syncwarp();
    } else {
        registers_up<kConsumerRegisters>();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int own_row = warpgroup * 64 * Config::kSubsM;
        const uint64_t tile_a = tile_descriptor(ring + own_row * 128), tile_b = tile_descriptor(ring + Config::kBytesA);
        const auto descriptor_a = [&](int s, int sub_m) { return tile_a + ((s * Config::kStageBytes + sub_m * 64 * 128) >> 4); };
        const auto descriptor_b = [&](int s, int sub_n) { return tile_b + ((s * Config::kStageBytes + sub_n * Config::kSubN * 128) >> 4); };
        const auto leave = [&](int s) {  // each warp waits for its own quarter of a wgmma, so each tells
            if constexpr (kCluster == 1) {
                if (lane == 0) mbarrier_arrive(empty + 8 * s);
            } else {
                if (lane < kCluster) mbarrier_arrive_at(empty + 8 * s, lane);
            }
        };

        for (int tile = first; tile < tiles.count; tile += step) {
            float sum[Config::kSubs][Config::kAccumulators], part[Config::kPromote ? Config::kAccumulators : 1];
#pragma unroll
            for (int i = 0; i < (Config::kPromote ? Config::kAccumulators : 1); ++i) part[i] = 0;
#pragma unroll
            for (int sub = 0; sub < Config::kSubs; ++sub) {
#pragma unroll
                for (int i = 0; i < Config::kAccumulators; ++i) sum[sub][i] = 0;
            }
            const auto promote = [&](float (&to)[Config::kAccumulators]) {
#pragma unroll
                for (int i = 0; i < Config::kAccumulators; ++i) to[i] += part[Config::kPromote ? i : 0];
            };

            if constexpr (Config::kSubs > 1) {
                // An interval's lines stay in the ring while the wgmma tiles take turns with the temporary.
                constexpr int kInterval = Config::kPromote;
                Lines<Config> held;
                const auto await = [&] {
#pragma unroll
                    for (int i = 0; i < kInterval; ++i) mbarrier_wait(full + 8 * (stage + i), phase);
                };
                const auto load = [&](int sub_m) {
                    const uint32_t rows = ring + stage * Config::kStageBytes + (own_row + sub_m * 64 + warp * 16) * 128;
                    held.template load<0>(rows);
                    if constexpr (kInterval == 2) held.template load<kInterval - 1>(rows + Config::kStageBytes);
                };
                await();
                load(0);
                for (int line = 0; line < lines; line += kInterval) {
#pragma unroll
                    for (int sub = 0; sub < Config::kSubs; ++sub) {
                        const int sub_m = sub / Config::kSubsN, sub_n = sub % Config::kSubsN;
                        const uint64_t a = descriptor_a(stage, sub_m), b = descriptor_b(stage, sub_n);
                        constexpr int kNext = Config::kStageBytes >> 4;
                        pin(part);
                        wgmma_fence();
                        held.template corrections<0>(part, a, b, 0);
                        if constexpr (kInterval == 2) held.template corrections<kInterval - 1>(part, a + kNext, b + kNext, 1);
                        held.template main<0>(part, a, b, 1);
                        if constexpr (kInterval == 2) held.template main<kInterval - 1>(part, a + kNext, b + kNext, 1);
                        wgmma_commit();
                        wgmma_wait<0>();
                        // A's next fragments come while the additions below are made.
                        if (sub == Config::kSubs - 1) {
#pragma unroll
                            for (int i = 0; i < kInterval; ++i) leave(stage), advance();
                            if (line + kInterval < lines) await(), load(0);
                        } else if ((sub + 1) / Config::kSubsN != sub_m) {
                            load(sub_m + 1);
                        }
                        pin(part);
                        promote(sum[sub]);
                    }
                }
            } else {
                // One wgmma tile a warpgroup: the previous line's products are still running when the next line's are issued.
                const Lines<Config> unused{};
                auto& d = pick<(Config::kPromote > 0)>(part, sum[0]);
                for (int line = 0; line < lines;) {
                    const int end = Config::kPromote > 0 ? min(line + Config::kPromote, lines) : lines;
                    int before = -1;
                    for (int summed = 0; line < end; ++line, summed = 1, advance()) {
                        mbarrier_wait(full + 8 * stage, phase);
                        const uint64_t a = descriptor_a(stage, 0), b = descriptor_b(stage, 0);
                        wgmma_fence();
                        if constexpr (Config::kPieces == 2) unused.template corrections<0>(d, a, b, summed);
                        unused.template main<0>(d, a, b, Config::kPieces == 2 ? 1 : summed);
                        wgmma_commit();
                        wgmma_wait<1>();
                        if (before >= 0) leave(before);
                        before = stage;
                    }
                    wgmma_wait<0>();
                    leave(before);
                    pin(d);
                    if constexpr (Config::kPromote > 0) promote(sum[0]);
                }
            }

            int row, column;
            tiles.find(tile, rank, row, column);
            row += own_row + warp * 16 + lane / 4;
            column += lane % 4 * 2;
            const auto finish = [&](auto sub_) {
                constexpr int kSub = decltype(sub_)::value;
                const Place place = {row + kSub / Config::kSubsN * 64, column + kSub % Config::kSubsN * Config::kSubN, m, n};
                finish_slabs<0>(epilogue, sum[kSub], place);
            };
            finish(std::integral_constant<int, 0>());
            if constexpr (Config::kSubs > 1) finish(std::integral_constant<int, Config::kSubs - 1>());
        }
    }
    if constexpr (kCluster > 1) cluster_sync();  // no block leaves while the other may still write to it
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Epilogues.

// 16 of a slab's 64 columns of a vector; beyond the last column, anything. C's columns are a multiple of kMultiple: 1, 2 or 64.
template <int kMultiple> __device__ __forceinline__ void load_columns(const float* vector, const Place& place, float (&v)[16]) {
    const float* own = vector + place.column;
    if constexpr (kMultiple == 1) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = __ldg(own + min(i / 2 * 8 + i % 2, place.columns - 1 - place.column));
    } else {
        const int last = kMultiple == 64 ? 56 : place.columns - 2 - place.column;
        if (last >= 56) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 pair = __ldg(reinterpret_cast<const float2*>(own + 8 * j));
                v[2 * j] = pair.x, v[2 * j + 1] = pair.y;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 pair = __ldg(reinterpret_cast<const float2*>(own + min(8 * j, last)));
                v[2 * j] = pair.x, v[2 * j + 1] = pair.y;
            }
        }
    }
}

// Full 32-byte sectors a quad and store. kStreaming: evicted first.
template <int kMultiple, bool kStreaming> __device__ __forceinline__ void store_slab(float* c, const Place& place, const float (&v)[2][16]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (place.row + 8 * r >= place.rows) continue;
        float* own = c + int64_t(place.row + 8 * r) * place.columns + place.column;
        const int columns = kMultiple == 64 ? 64 : place.columns - place.column;  // from this thread's first on
        if constexpr (kMultiple > 1) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 pair = make_float2(v[r][2 * j], v[r][2 * j + 1]);
                if (8 * j < columns) {
                    if constexpr (kStreaming) __stcs(reinterpret_cast<float2*>(own + 8 * j), pair);
                    else *reinterpret_cast<float2*>(own + 8 * j) = pair;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i / 2 * 8 + i % 2 < columns) own[i / 2 * 8 + i % 2] = v[r][i];
            }
        }
    }
}

// acc * 2^a * 2^b where each factor is normal but both together, or the first step alone, may leave float32's range. acc is under 2^46: the
// part of the row's factor above 2^60 is multiplied in last, so that nothing overflows on the way to a value that fits. (What underflows on
// the way is below float32's own error for these rows: 2^-149 * 2^113 against 2^-24 * 2^30 * 2^-126 * 2^113.)
struct Unscale {
    const float *rows, *columns;

    template <int kMultiple, int kOffset, int kCount>
    __device__ __forceinline__ void apply(const float (&sum)[kCount], const Place& place, float (&v)[2][16]) const {
        float column[16];
        load_columns<kMultiple>(columns, place, column);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float u = __ldg(rows + min(place.row + 8 * r, place.rows - 1)), low = u > 0x1p60f ? 0x1p60f : u;  // NaN stays
#pragma unroll
            for (int i = 0; i < 16; ++i) v[r][i] = sum[kOffset + 4 * (i / 2) + 2 * r + i % 2] * low * column[i];
            if (u > 0x1p60f) {
#pragma unroll
                for (int i = 0; i < 16; ++i) v[r][i] *= u * 0x1p-60f;
            }
        }
    }
};

__device__ __forceinline__ float sum_across_quad(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// C = A B^T (+ bias).
template <int kMultiple> struct StoreEpilogue {
    Unscale unscale;
    const float* bias;  // or null
    float* c;

    template <int kOffset, int kCount> __device__ __forceinline__ void slab(const float (&sum)[kCount], const Place& place) const {
        float v[2][16];
        unscale.apply<kMultiple, kOffset>(sum, place, v);
        if (bias != nullptr) {
            float b[16];
            load_columns<kMultiple>(bias, place, b);
#pragma unroll
            for (int i = 0; i < 16; ++i) v[0][i] += b[i], v[1][i] += b[i];
        }
        store_slab<kMultiple, true>(c, place, v);
    }
};

// 2^v to 2 ulps, 1 / v to 1; results under 2^-126 are 0.
__device__ __forceinline__ float fast_exp2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
__device__ __forceinline__ float fast_reciprocal(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }

// a * sigmoid(a), b * sigmoid(b) with one reciprocal for both: 1/x = y * 1/(xy). Below -42 the sigmoid stays at 2^-62, so that xy is finite
// (a row with -Inf in it has lost its group anyway).
__device__ __forceinline__ void swish(float& a, float& b) {
    const float x = 1.0f + fast_exp2(fminf(a * -1.44269504f, 62.0f)), y = 1.0f + fast_exp2(fminf(b * -1.44269504f, 62.0f));
    const float r = fast_reciprocal(x * y);
    a *= y * r;
    b *= x * r;
}

// out = (v - mean) * rstd * gamma + beta over each 64 columns of a row, v = swish(A B^T + linear_bias) + bias. N is a multiple of 64: a slab
// is a group, and a quad has its row.
struct SwishGroupNormEpilogue {
    static constexpr int kMultiple = 64;
    Unscale unscale;
    const float *linear_bias, *bias, *gamma, *beta;
    float eps;
    float* out;

    template <int kOffset, int kCount> __device__ __forceinline__ void slab(const float (&sum)[kCount], const Place& place) const {
        float v[2][16], before[16], after[16], rstd[2];
        unscale.apply<kMultiple, kOffset>(sum, place, v);
        load_columns<kMultiple>(linear_bias, place, before);
        load_columns<kMultiple>(bias, place, after);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 16; i += 2) {
                v[r][i] += before[i];
                v[r][i + 1] += before[i + 1];
                swish(v[r][i], v[r][i + 1]);
                v[r][i] += after[i];
                v[r][i + 1] += after[i + 1];
            }
            float total = 0, squares = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) total += v[r][i];
            const float mean = sum_across_quad(total) * (1.0f / 64);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                v[r][i] -= mean;
                squares += v[r][i] * v[r][i];
            }
            rstd[r] = rsqrtf(sum_across_quad(squares) * (1.0f / 64) + eps);
        }
        load_columns<kMultiple>(gamma, place, before);
        load_columns<kMultiple>(beta, place, after);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            v[0][i] = fmaf(v[0][i], rstd[0] * before[i], after[i]);
            v[1][i] = fmaf(v[1][i], rstd[1] * before[i], after[i]);
        }
        store_slab<kMultiple, true>(out, place, v);
    }
};

// h = A B^T + bias, and of each 64 columns of a row (fewer at the end) the mean and M2: partials[row][slab].
template <int kMultiple> struct MomentsEpilogue {
    Unscale unscale;
    const float* bias;
    float* h;
    float2* partials;

    template <int kOffset, int kCount> __device__ __forceinline__ void slab(const float (&sum)[kCount], const Place& place) const {
        float v[2][16], b[16];
        unscale.apply<kMultiple, kOffset>(sum, place, v);
        load_columns<kMultiple>(bias, place, b);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[0][i] += b[i], v[1][i] += b[i];
        store_slab<kMultiple, false>(h, place, v);

        const int first = place.column & ~63, slabs = (place.columns + 63) / 64, count = min(64, place.columns - first);
        const float share = __fdividef(1.0f, float(count));
        const auto within = [&](int i) { return place.column + i / 2 * 8 + i % 2 < place.columns; };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = 0, squares = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) total += within(i) ? v[r][i] : 0.0f;
            const float mean = sum_across_quad(total) * share;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float deviation = within(i) ? v[r][i] - mean : 0.0f;
                squares += deviation * deviation;
            }
            squares = sum_across_quad(squares);
            if (threadIdx.x % 4 == 0 && place.row + 8 * r < place.rows) {
                partials[int64_t(place.row + 8 * r) * slabs + first / 64] = make_float2(mean, squares);
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------------------
// Launch.

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
}

// Of pieces (rows, halves), halves a multiple of kLine: boxes of one line of box_rows rows. Rows beyond the end read as zeros.
inline bool make_map(CUtensorMap* map, const __half* pieces, int64_t rows, int64_t halves, int box_rows) {
    static const EncodeTiled encode = encode_tiled();
    if (encode == nullptr) return false;
    const cuuint64_t sizes[2] = {cuuint64_t(halves), cuuint64_t(rows)}, strides[1] = {cuuint64_t(halves) * 2};
    const cuuint32_t box[2] = {kLine, cuuint32_t(box_rows)}, steps[2] = {1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<__half*>(pieces), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// a, b: the pieces of A (m, k) and B (n, k), as split_rows leaves them.
template <class Config, class Epilogue>
cudaError_t launch_gemm(const __half* a, const __half* b, int m, int n, int k, const Epilogue& epilogue, int multiprocessors, cudaStream_t stream) {
    const int64_t halves = int64_t(padded_k(k)) * Config::kPieces;
    CUtensorMap map_a, map_b;
    if (!make_map(&map_a, a, m, halves, Config::kTileM) || !make_map(&map_b, b, n, halves, Config::kTileN / Config::kCluster)) {
        return cudaErrorInvalidValue;
    }
    const auto kernel = gemm<Config, Epilogue>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
    if (error != cudaSuccess) return error;
    const int down = (m + Config::kTileM * Config::kCluster - 1) / (Config::kTileM * Config::kCluster);
    const int across = (n + Config::kTileN - 1) / Config::kTileN, clusters = multiprocessors / Config::kCluster;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = (down * across < clusters ? down * across : clusters) * Config::kCluster;
    launch.blockDim = kThreads;
    launch.dynamicSmemBytes = Config::kSharedBytes;
    launch.stream = stream;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = Config::kCluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    launch.attrs = &cluster;
    launch.numAttrs = 1;
    return cudaLaunchKernelEx(&launch, kernel, map_a, map_b, m, n, int(halves / kLine), epilogue);
}
