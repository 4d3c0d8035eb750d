"""Instance normalisation that reads its input from DRAM once: a drop-in for `nn.InstanceNorm2d(C)` (no affine, no running statistics).

    y[n, c] = (x[n, c] - mean) * rstd,    rstd = 1 / sqrt(M2 / (H * W) + eps),    M2 = sum((x[n, c] - mean)^2)

and its gradient, g being that of y:

    dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * mean((x - mean) * g))

A slice is the H x W values of one (sample, channel). Its statistics must be complete before its first output can be written, so every
value is used twice; the floor of one read of x (backward: and of g) and one write is reached only where the slice waits on chip in
between. Where it waits depends on its size alone, and so does the kernel; each is written once for both directions:

    slice                              waits in                                   DRAM traffic      on
    256 bytes (backward 512), halves   a warp's registers, 16 bytes a thread      one read, write   any GPU
    to 2 KiB (backward 1), not lines   shared memory, with its neighbours         one read, write   any GPU
    up to 64 KiB (backward 16 KiB)     registers of 4 to 512 threads              one read, write   any GPU
    up to 4 MiB (backward 2 MiB)       a cluster's registers and shared memory    one read, write   sm_90 and later
    up to 34 MiB (backward 17 MiB)     those of a gang of up to all SMs' blocks    one read, write   sm_90 and later
    any                                nowhere (L2, if it happens to)             two reads, write  any GPU

Accesses are of 16 bytes, and a warp's of whole lines of 128; where a slice is not whole lines, its loose values at both ends go apart, or
a tile of many slices is moved as one. A tensor that does not begin on 16 bytes is copied first.

Statistics are accumulated in float32 (float64 for float64) as (count, mean, M2) and merged after Chan, Golub and LeVeque (1979), never as
E[x^2] - E[x]^2; long sums keep what their roundings took, since equal terms round the same way. The mean is carried as an unevaluated sum
hi + lo, and the output is ((x - hi) - lo) * rstd, so that a mean far from zero (x = 1e4 + noise) costs no accuracy. Types of two bytes take
one sweep of sums around one of the slice's own values, which loses none of their bits. Sums have a fixed order: the same input gives the
same bits.

On the CPU one core takes a slice at a time, in blocks that stay in its first cache; on a machine without a GPU only that is compiled.
Gradients: first order in kernels, which need x alone again; of the second order that by g too, the rest in ATen operators.
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

// Which lines L2 keeps decides how the reads and writes mix on their way to DRAM. Whatever came before has left it full. Loads that are to
// be evicted first, and stores, never displace that: they share what little room is left, and a copy becomes slower. Loads that are to be
// evicted last make room for themselves and others. So do stores, of which more are left in L2 for whoever reads them next: LAST.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ uint64_t evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#endif
// volatile, memory and the predicate: or the compiler puts loads off until they are used, and uses some before the last is under way.
template <typename T, int V> __device__ __forceinline__ Pack<T, V> load(const T* p, bool exists = true) {
    Pack<T, V> pack = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (V * sizeof(T) == 16) {
        int4& words = *reinterpret_cast<int4*>(&pack);
        asm volatile("{\n.reg .pred exists;\nsetp.ne.s32 exists, %5, 0;\n"
            "@exists ld.global.L2::cache_hint.v4.s32 {%0, %1, %2, %3}, [%4], %6;\n}"
            : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w) : "l"(p), "r"(int(exists)), "l"(evict_last()) : "memory");
        return pack;
    }
#endif
    if (exists) pack = *reinterpret_cast<const Pack<T, V>*>(p);
    return pack;
}
template <bool LAST = false, typename T, int V> __device__ __forceinline__ void store(T* p, const Pack<T, V>& pack) {
    if constexpr (V * sizeof(T) == 16) {
        const int4& words = *reinterpret_cast<const int4*>(&pack);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        if constexpr (LAST) {
            asm volatile("st.global.L2::cache_hint.v4.s32 [%0], {%1, %2, %3, %4}, %5;"
                ::"l"(p), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "l"(evict_last()) : "memory");
            return;
        }
#endif
        *reinterpret_cast<int4*>(p) = words;
    } else {
        *reinterpret_cast<Pack<T, V>*>(p) = pack;
    }
}

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

// ---------------------------------------------------------------------------------------------------------------------------------
// The kernels below are written once for both directions. OPERANDS is 1 forward, where y = (x - mean) * rstd, and 2 backward, where g is
// the gradient of y and dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * co / n), co = sum((x - mean) * g).

// The packs at one place of a slice: x's, and backward g's.
template <typename T, int V, int OPERANDS> struct Place {
    Pack<T, V> of[OPERANDS];
};

// A pack's value, widened: of bfloat16 in one instruction, where the compiler takes two for every other one.
template <typename T, int V> __device__ __forceinline__ Acc<T> widened(const Pack<T, V>& pack, int i) { return to_acc(pack.value[i]); }
template <int V> __device__ __forceinline__ float widened(const Pack<__nv_bfloat16, V>& pack, int i) {
    if constexpr (V % 2 == 0) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(&pack)[i / 2];
        return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    } else {
        return to_acc(pack.value[i]);
    }
}

// And one value of each operand.
template <typename T, int OPERANDS> struct Values {
    Acc<T> of[OPERANDS];
};
template <typename T, int V, int OPERANDS> __device__ constexpr int values_of(const Place<T, V, OPERANDS>&) { return V; }
template <typename T, int V, int OPERANDS>
__device__ __forceinline__ Values<T, OPERANDS> values_at(const Place<T, V, OPERANDS>& place, int i) {
    Values<T, OPERANDS> values;
#pragma unroll
    for (int o = 0; o < OPERANDS; ++o) values.of[o] = widened(place.of[o], i);
    return values;
}
template <int V, int OPERANDS, typename T>
__device__ __forceinline__ Place<T, V, OPERANDS> load_place(const T* x, const T* g, int64_t i, bool exists = true) {
    Place<T, V, OPERANDS> place;
    place.of[0] = load<T, V>(x + i, exists);
    if constexpr (OPERANDS == 2) place.of[1] = load<T, V>(g + i, exists);
    return place;
}

// Backward: moments of x, mean of g, and co.
template <typename A> struct alignas(8 * sizeof(A)) Joint {
    Moments<A> x;
    A g = 0, co = 0;
};
template <typename A> __device__ __forceinline__ Joint<A> merge(const Joint<A>& a, const Joint<A>& b) {
    if (b.x.count == A(0)) return a;
    if (a.x.count == A(0)) return b;
    Joint<A> r;
    r.x = merge(a.x, b.x);
    const A delta = (b.x.hi - a.x.hi) + (b.x.lo - a.x.lo), delta_g = b.g - a.g;
    const A weight = b.x.count * reciprocal(a.x.count + b.x.count);
    r.g = a.g + delta_g * weight;
    r.co = a.co + b.co + delta * delta_g * (a.x.count * weight);
    return r;
}
template <typename A> __device__ __forceinline__ Moments<A>& moments_in(Moments<A>& m) { return m; }
template <typename A> __device__ __forceinline__ Moments<A>& moments_in(Joint<A>& m) { return m.x; }

// Several sums at once, over `group` lanes.
template <typename A, int K> __device__ __forceinline__ void add_across_lanes(A (&v)[K], int group) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        if (offset >= group) continue;
#pragma unroll
        for (int k = 0; k < K; ++k) v[k] += __shfl_xor_sync(~0u, v[k], offset);
    }
}

// What `lanes` lanes hold, in all of them; the first has values. A sum of deviations rounds less than merging two and two does.
template <int OPERANDS, typename S> __device__ __forceinline__ S merge_across_lanes(S own, int lanes = 32) {
    Moments<decltype(moments_in(own).count)>& m = moments_in(own);
    using A = decltype(m.count);
    A count[1] = {m.count};
    add_across_lanes(count, lanes);
    const A share = m.count > A(0) ? m.count * reciprocal(count[0]) : A(0), pivot = __shfl_sync(~0u, m.hi, threadIdx.x & -lanes);
    const A from_pivot = m.count > A(0) ? (m.hi - pivot) + m.lo : A(0);
    A means[OPERANDS] = {from_pivot * share};
    if constexpr (OPERANDS == 2) means[1] = own.g * share;
    add_across_lanes(means, lanes);
    const A delta = from_pivot - means[0];
    A sums[OPERANDS] = {m.m2 + m.count * delta * delta};
    if constexpr (OPERANDS == 2) sums[1] = own.co + m.count * delta * (own.g - means[1]);
    add_across_lanes(sums, lanes);
    m.count = count[0];
    m.hi = pivot + means[0];
    m.lo = means[0] - (m.hi - pivot);
    m.m2 = sums[0];
    if constexpr (OPERANDS == 2) own.g = means[1], own.co = sums[1];
    return own;
}

// A sum, and what its roundings took from it (Kahan 1965).
template <typename A> struct Sum {
    A value = 0, rest = 0;
    __device__ __forceinline__ void add(A v) {
        const A sum = value + v;
        rest += v - (sum - value);
        value = sum;
    }
    __device__ __forceinline__ A total() const { return isinf(value) ? value : value + rest; }
};

// What a slice is reduced to, and how a thread gathers its share of it: around its own first x, a batch of places at a time.
template <typename T, int OPERANDS> struct Gathered;
template <typename T> struct Gathered<T, 1> { using Type = Moments<Acc<T>>; };
template <typename T> struct Gathered<T, 2> { using Type = Joint<Acc<T>>; };
template <typename T, int OPERANDS> using Statistics = typename Gathered<T, OPERANDS>::Type;

// PLAIN, for types of two bytes: one sweep. With an outlier as anchor M2 loses as many of float's 24 bits as the count of this thread's
// values has; up to some hundred of them, values of at most 11 bits do not show it.
template <typename T, int V, int OPERANDS, bool PLAIN> struct Gatherer {
    using A = Acc<T>;
    A anchor = 0, places = 0, mean = 0, g_mean = 0;
    Sum<A> m2, co;

    template <int N> __device__ __forceinline__ void add(const Place<T, V, OPERANDS> (&batch)[N]) {
        if (places == A(0)) anchor = to_acc(batch[0].of[0].value[0]);
        A sums[N] = {}, squares[N] = {}, g_sums[N] = {}, products[N] = {};
        A sum = 0, square = 0, g_sum = 0, product = 0;
        const auto gather = [&](int p, int i, A deviation) {
            squares[p] += deviation * deviation;
            if constexpr (OPERANDS == 2) products[p] += deviation * to_acc(batch[p].of[1].value[i]);
        };
#pragma unroll
        for (int p = 0; p < N; ++p) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const A deviation = to_acc(batch[p].of[0].value[i]) - anchor;
                sums[p] += deviation;
                if constexpr (OPERANDS == 2) g_sums[p] += to_acc(batch[p].of[1].value[i]);
                if constexpr (PLAIN) gather(p, i, deviation);
            }
        }
#pragma unroll
        for (int p = 0; p < N; ++p) sum += sums[p], g_sum += g_sums[p];
        const A batch_mean = sum * (A(1) / (N * V)), batch_g = g_sum * (A(1) / (N * V));
        if constexpr (!PLAIN) {
#pragma unroll
            for (int p = 0; p < N; ++p) {
#pragma unroll
                for (int i = 0; i < V; ++i) gather(p, i, (to_acc(batch[p].of[0].value[i]) - anchor) - batch_mean);
            }
        }
#pragma unroll
        for (int p = 0; p < N; ++p) square += squares[p], product += products[p];
        if constexpr (PLAIN) {
            mean += batch_mean * A(N);  // sums of places until `total` divides them
            g_mean += batch_g * A(N);
            m2.value += square, co.value += product;
        } else {
            const A delta = batch_mean - mean, delta_g = batch_g - g_mean, weight = A(N) * reciprocal(places + A(N));
            const A both = places * weight * V;
            mean += delta * weight;
            g_mean += delta_g * weight;
            m2.add(square + delta * delta * both), co.add(product + delta * delta_g * both);
        }
        places += A(N);
    }
    __device__ __forceinline__ Statistics<T, OPERANDS> total() const {
        Statistics<T, OPERANDS> r;
        Moments<A>& m = moments_in(r);
        const A share = PLAIN && places > A(0) ? reciprocal(places) : A(1), x_mean = mean * share;
        m.count = places * V;
        m.hi = anchor + x_mean;
        m.lo = x_mean - (m.hi - anchor);
        m.m2 = m2.total();
        if (PLAIN && !isinf(m.m2)) m.m2 -= x_mean * x_mean * m.count;
        if constexpr (OPERANDS == 2) {
            r.g = g_mean * share;
            r.co = co.total() - (PLAIN ? x_mean * r.g * m.count : A(0));
        }
        return r;
    }
};

// Of one value.
template <typename T, int OPERANDS> __device__ __forceinline__ Statistics<T, OPERANDS> statistics_of(const Place<T, 1, OPERANDS>& place) {
    const Values<T, OPERANDS> values = values_at(place, 0);
    Statistics<T, OPERANDS> r;
    moments_in(r) = moments_of(values.of[0]);
    if constexpr (OPERANDS == 2) r.g = values.of[1];
    return r;
}

// What is written: y = (x - mean) * rstd or dx = (g - mean(g)) * rstd - (x - mean) * slope. In two bytes nobody sees what is lost where the
// terms of hi's remainder lo and mean(g) are multiplied out, and added as one.
template <typename T, int OPERANDS> struct Result {
    using A = Acc<T>;
    A hi, lo, rstd, g = 0, slope = 0, rest = 0;
    __device__ __forceinline__ Result(const Moments<A>& m, A share, A eps) : hi(m.hi), lo(m.lo) {
        const A variance = m.m2 * share + eps;
        if constexpr (sizeof(T) == 2) rstd = rsqrtf(variance), rest = -lo * rstd; else rstd = reciprocal_sqrt(variance);
    }
    __device__ __forceinline__ Result(const Joint<A>& m, A share, A eps) : Result(m.x, share, eps) {
        g = m.g;
        slope = rstd * rstd * rstd * (m.co * share);
        rest = lo * slope - g * rstd;
    }
    template <int V> __device__ __forceinline__ Pack<T, V> operator()(const Place<T, V, OPERANDS>& place) const {
        Pack<T, V> out;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const Values<T, OPERANDS> values = values_at(place, i);
            const A deviation = values.of[0] - hi;
            if constexpr (OPERANDS == 1) {
                from_acc(sizeof(T) == 2 ? fma(deviation, rstd, rest) : (deviation - lo) * rstd, out.value[i]);
            } else {
                const A own = values.of[1];
                if constexpr (sizeof(T) == 2) from_acc(fma(-deviation, slope, fma(own, rstd, rest)), out.value[i]);
                else from_acc(fma(own - g, rstd, -(deviation - lo) * slope), out.value[i]);
            }
        }
        return out;
    }
};
template <typename T, int V, int OPERANDS> __device__ __forceinline__ void keep_packed(Place<T, V, OPERANDS>& place) {
#pragma unroll
    for (int o = 0; o < OPERANDS; ++o) keep_packed(place.of[o]);
}

// A slice of n values that begins at value `begin` of the tensor: the values before its first whole unit (a line, or a pack), the packs of
// its units, and the values behind them. The loose ones belong to the first threads of the slice, one each.
template <typename T> struct Span {
    static constexpr int V = kPack<T>, kLine = 128 / sizeof(T);
    int head, tail;
    int64_t packs;
    __device__ __forceinline__ Span(int64_t begin, int64_t n, int unit = kLine) {
        head = int(min(-begin & (unit - 1), n));
        packs = ((n - head) & -unit) / V;
        tail = int(n - head - packs * V);
    }
    // Where thread `tid`'s loose value is in the slice, or -1.
    __device__ __forceinline__ int64_t loose(int tid) const {
        if (tid < head) return tid;
        return tid < head + tail ? packs * V + tid : -1;
    }
};

// A slice's statistics, in all of its threads. `each(take)` hands `take` every place that this thread holds, `add_up` adds an array up over
// the slice's threads. `anchor`, which all threads know, is one of the slice's values or the mean of a few: where all are equal nothing is
// left to round. Types of two bytes take one sweep around it; what Gatherer says of precision holds here too. So do others where it is NEAR
// the mean. Else they take a second: deviations from the rounded mean give M2 and what the rounding left over. `share`, 1 / n, is
// multiplied in before the sum, so that large values do not overflow it.
template <typename T, int OPERANDS, bool NEAR = false, typename Each, typename AddUp>
__device__ __forceinline__ Statistics<T, OPERANDS> statistics_of_slice(
    Acc<T> anchor, int n, Acc<T> share, const Each& each, const AddUp& add_up) {
    using A = Acc<T>;
    Statistics<T, OPERANDS> r;
    Moments<A>& m = moments_in(r);
    m.count = n;
    if constexpr (sizeof(T) == 2) {
        A sums[2 * OPERANDS] = {};  // of deviations, their squares; of g, products
        each([&](const auto& place) {
#pragma unroll
            for (int i = 0; i < values_of(place); ++i) {
                const Values<T, OPERANDS> values = values_at(place, i);
                const A deviation = values.of[0] - anchor;
                sums[0] += deviation * share;
                sums[1] += deviation * deviation;
                if constexpr (OPERANDS == 2) sums[2] += values.of[1] * share, sums[3] += deviation * values.of[1];
            }
        });
        add_up(sums);
        m.hi = anchor, m.lo = sums[0];
        m.m2 = isinf(sums[1]) ? sums[1] : sums[1] - sums[0] * sums[0] * n;
        if constexpr (OPERANDS == 2) r.g = sums[2], r.co = sums[3] - sums[0] * sums[2] * n;
    } else {
        A means[OPERANDS] = {};
        if constexpr (!NEAR) {
            each([&](const auto& place) {
#pragma unroll
                for (int i = 0; i < values_of(place); ++i) {
                    const Values<T, OPERANDS> values = values_at(place, i);
                    means[0] += (values.of[0] - anchor) * share;
                    if constexpr (OPERANDS == 2) means[1] += values.of[1] * share;
                }
            });
            add_up(means);
        }
        const A hi = anchor + means[0];
        A left = 0;
        Sum<A> sums[OPERANDS];  // of squares, products
        each([&](const auto& place) {
            A own[OPERANDS] = {};
#pragma unroll
            for (int i = 0; i < values_of(place); ++i) {
                const Values<T, OPERANDS> values = values_at(place, i);
                const A deviation = values.of[0] - hi;
                left += deviation;
                own[0] += deviation * deviation;
                if constexpr (OPERANDS == 2) own[1] += deviation * values.of[1];
            }
#pragma unroll
            for (int o = 0; o < OPERANDS; ++o) sums[o].add(own[o]);
        });
        A totals[OPERANDS + 1] = {left, sums[0].total()};
        if constexpr (OPERANDS == 2) totals[2] = sums[1].total();
        add_up(totals);
        const bool overflows = isinf(totals[1]);  // rstd is 0 then; inf * 0 must not make a NaN of it
        A shift = overflows ? A(0) : totals[0] * share;
        if (NEAR && overflows) {  // a mean of a few is too far off for differences that may overflow, too
            A again[1] = {};
            each([&](const auto& place) {
#pragma unroll
                for (int i = 0; i < values_of(place); ++i) again[0] += (values_at(place, i).of[0] - hi) * share;
            });
            add_up(again);
            shift = again[0];
        }
        m.hi = NEAR ? hi + shift : hi;
        m.lo = NEAR ? shift - (m.hi - hi) : shift;
        m.m2 = overflows ? totals[1] : totals[1] - totals[0] * shift;
        if constexpr (OPERANDS == 2) r.g = means[1], r.co = totals[2] - totals[0] * means[1];
    }
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Up to 64 KiB (backward 16 KiB): the slice waits in registers.
// `group` threads (a power of two) own a slice, each ITEMS packs of it; a group is part of a warp, or whole warps of the block.
// WHOLE: every thread has all of its packs, and nothing is loose. BLOCK: it is the whole block's, too.

constexpr int kFewItems = 4;
template <typename T, int OPERANDS> constexpr int kRegisterItems = OPERANDS == 2 || sizeof(T) == 8 ? kFewItems : 8;
template <typename T, int OPERANDS> constexpr int kMaxGroup = kRegisterItems<T, OPERANDS> == 8 ? 512 : 256;
template <typename T, int OPERANDS> constexpr int kMostInRegisters = kMaxGroup<T, OPERANDS> * kRegisterItems<T, OPERANDS> * 16;  // bytes
constexpr int kRegisterBlock = 64;  // threads of a block at least, whole groups of it
constexpr int kMaxWarps = 16;         // of a block
// As many blocks as hide each other's waiting, as far as registers reach.
template <typename T, int OPERANDS> constexpr int kRegisterBlocks = sizeof(T) == 8 ? 2 : OPERANDS == 2 ? 3 : 2;

// Several sums at once over `group` threads, part of a warp or whole warps of the block. Every call has warp_sums of its own.
template <bool BLOCK, typename A, int K>
__device__ __forceinline__ void add_across_group(A (&v)[K], int group, A (*warp_sums)[kMaxWarps]) {
    add_across_lanes(v, BLOCK ? 32 : min(group, 32));
    if (!BLOCK && group <= 32) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = group / 32;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (lane == 0) warp_sums[k][warp] = v[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = warp_sums[k][(warp & -warps) + (lane & (warps - 1))];
    add_across_lanes(v, warps);
}

template <typename T, int OPERANDS, int ITEMS, bool WHOLE, bool BLOCK = false>
__global__ void __launch_bounds__(WHOLE && ITEMS > kFewItems ? kRegisterBlock : kMaxGroup<T, OPERANDS>, kRegisterBlocks<T, OPERANDS>)
    norm_in_registers(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int slices, int n, Acc<T> share, Acc<T> eps, int log_group) {
    using A = Acc<T>;
    constexpr int V = kPack<T>;
    const int group = 1 << log_group, lane = threadIdx.x & (group - 1);
    const int slice = BLOCK ? blockIdx.x : blockIdx.x * (blockDim.x >> log_group) + (threadIdx.x >> log_group);
    const int64_t begin = int64_t(slice) * n;
    const bool exists = BLOCK || slice < slices;
    int packs = ITEMS * group, first = lane * V, loose = -1;
    if constexpr (!WHOLE) {
        const Span<T> span(begin, exists ? n : 0, V);
        packs = int(span.packs), loose = int(span.loose(lane)), first += span.head;
    }
    const auto mine = [&](int i) { return WHOLE ? exists : i * group + lane < packs; };

    Place<T, V, OPERANDS> r[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) r[i] = load_place<V, OPERANDS>(x, g, begin + first + i * group * V, mine(i));
    const Place<T, 1, OPERANDS> loose_place = load_place<1, OPERANDS>(x, g, begin + loose, loose >= 0);
    A anchor = 0;
    if (sizeof(T) == 2 && (BLOCK || group > 32)) {  // many values: an outlier among them as anchor would cost more
        const Pack<T, V> few = load<T, V>(x + begin + first - lane * V, exists);
#pragma unroll
        for (int j = 0; j < V; ++j) anchor += widened(few, j) * (1.0f / V);
    } else if (exists) {
        anchor = to_acc(x[begin]);
    }
    constexpr bool kNear = sizeof(T) > 2 && BLOCK && OPERANDS == 1;
    if constexpr (kNear) {  // the mean of what 16 threads hold: one barrier, and no shuffle
        __shared__ A samples[4][4];
        A own = 0;
#pragma unroll
        for (int i = 0; i < ITEMS / 2; ++i) {
#pragma unroll
            for (int j = 0; j < V; ++j) own += (to_acc(r[i].of[0].value[j]) - anchor) * (A(1) / (ITEMS / 2 * V * 16));
        }
        if ((lane & (group / 16 - 1)) == 0) samples[lane >> (log_group - 2)][lane >> (log_group - 4) & 3] = own;
        __syncthreads();
        A means[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) means[k] = (samples[k][0] + samples[k][1]) + (samples[k][2] + samples[k][3]);
        anchor += (means[0] + means[1]) + (means[2] + means[3]);
    }
    // What is computed from few packs a thread stays in its registers, wide.
    const auto keep = [&](int i) { if constexpr (!WHOLE && ITEMS > kFewItems || OPERANDS == 2) keep_packed(r[i]); };
    const auto each = [&](auto take) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            keep(i);
            if (WHOLE || mine(i)) take(r[i]);
        }
        if (loose >= 0) take(loose_place);
    };
    __shared__ A warp_sums[2 * OPERANDS + 1][kMaxWarps];
    int row = 0;
    const auto m = statistics_of_slice<T, OPERANDS, kNear>(anchor, n, share, each, [&](auto& v) {
        add_across_group<BLOCK>(v, group, warp_sums + row);
        row += kNear ? 2 : OPERANDS;
    });
    const Result<T, OPERANDS> result(m, share, eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        keep(i);
        if (mine(i)) store<OPERANDS == 1>(y + begin + first + i * group * V, result(r[i]));
    }
    if (loose >= 0) store(y + begin + loose, result(loose_place));
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Slices that divide a pack, or the 512 bytes of a warp's packs: the threads of a block have what is side by side, twice.
// N is how many of a pack's values are a slice's, `lanes` how many packs.

constexpr int kPackBlock = 64, kPackItems = 2;

template <typename T, int N, int OPERANDS>
__global__ void __launch_bounds__(kPackBlock) norm_in_packs(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int64_t values, Acc<T> share, Acc<T> eps, int lanes) {
    using A = Acc<T>;
    constexpr int V = kPack<T>;
    const int64_t first = (int64_t(blockIdx.x) * kPackItems * kPackBlock + threadIdx.x) * V;
    const int n = N < V ? N : N * lanes;
    Place<T, V, OPERANDS> places[kPackItems];
#pragma unroll
    for (int p = 0; p < kPackItems; ++p) {
        const int64_t begin = first + p * kPackBlock * V;
        places[p] = load_place<V, OPERANDS>(x, g, begin, begin + V <= values);
        if (N < V && begin + V > values) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (begin + i < values) {
                    places[p].of[0].value[i] = x[begin + i];
                    if constexpr (OPERANDS == 2) places[p].of[1].value[i] = g[begin + i];
                }
            }
        }
    }
#pragma unroll
    for (int p = 0; p < kPackItems; ++p) {
        const int64_t begin = first + p * kPackBlock * V;
        Pack<T, V> out;
#pragma unroll
        for (int s = 0; s < V; s += N) {
            Place<T, N, OPERANDS> slice;
#pragma unroll
            for (int i = 0; i < N; ++i) {
#pragma unroll
                for (int o = 0; o < OPERANDS; ++o) slice.of[o].value[i] = places[p].of[o].value[s + i];
            }
            A anchor = to_acc(slice.of[0].value[0]);
            if (N == V) anchor = __shfl_sync(~0u, anchor, threadIdx.x & -lanes);
            const auto m = statistics_of_slice<T, OPERANDS>(anchor, n, share, [&](auto take) { take(slice); }, [&](auto& v) {
                if (N == V) add_across_lanes(v, lanes);
            });
            const Pack<T, N> normed = Result<T, OPERANDS>(m, share, eps)(slice);
#pragma unroll
            for (int i = 0; i < N; ++i) out.value[s + i] = normed.value[i];
        }
        if (begin + V <= values) {
            store<OPERANDS == 1>(y + begin, out);
        } else if (N < V) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (begin + i < values) y[begin + i] = out.value[i];
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Up to 2 KiB (backward 1 KiB), but not whole lines: a tile of many slices waits in shared memory.
// A block takes a run of slices that is whole packs in DRAM, whatever each of them is, and moves it in whole lines. In the tile `group`
// lanes own a slice, and read it by words of 4 bytes (of 8, float64): lanes that are an odd number of words apart meet in no bank.

constexpr int kTileBlock = 64;
constexpr int kTileBytes = 18 * 1024;  // at most; twelve blocks' are a multiprocessor's
constexpr int kMostInTiles = 2048;     // bytes of a slice, of all operands
static_assert(kTileBytes / kMostInTiles >= 8, "at least the slices of two bytes that are whole packs together");
template <typename T> constexpr int kWord = sizeof(T) < 4 ? 2 : 1;  // values

// 16 bytes into shared memory, under way until wait_for_copies.
__device__ __forceinline__ void begin_copy(void* shared, const void* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
        ::"r"(uint32_t(__cvta_generic_to_shared(shared))), "l"(global), "l"(evict_last()) : "memory");
#else
    *static_cast<int4*>(shared) = *static_cast<const int4*>(global);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <typename T, int OPERANDS, bool ALONE>
__global__ void __launch_bounds__(kTileBlock) norm_in_tiles(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int64_t slices, int n, Acc<T> share, Acc<T> eps,
    int tile_slices, int log_lanes) {
    using A = Acc<T>;
    constexpr int V = kPack<T>, W = kWord<T>;
    const int log_group = ALONE ? 0 : log_lanes, group = 1 << log_group;
    extern __shared__ __align__(128) unsigned char ring[];
    T* const tile = reinterpret_cast<T*>(ring);
    T* const g_tile = tile + (OPERANDS - 1) * (tile_slices * n);  // forward there is none
    const int64_t first = int64_t(blockIdx.x) * tile_slices;
    const int here = int(min(int64_t(tile_slices), slices - first)), packs = here * n / V;
    x += first * n, g += first * n, y += first * n;
    const int line_begin = -int(first * n / V % 8);  // warps move whole 128-byte lines, the block's first and last apart
    const int loose_end = packs * V + threadIdx.x;  // the last tile's may be no whole packs

#pragma unroll 4
    for (int i = line_begin + int(threadIdx.x); i < packs; i += kTileBlock) {
        if (i >= 0) {
            begin_copy(tile + i * V, x + i * V);
            if constexpr (OPERANDS == 2) begin_copy(g_tile + i * V, g + i * V);
        }
    }
    if (loose_end < here * n) {
        tile[loose_end] = x[loose_end];
        if constexpr (OPERANDS == 2) g_tile[loose_end] = g[loose_end];
    }
    wait_for_copies();
    __syncthreads();

    const int own = threadIdx.x >> log_group, lane = threadIdx.x & (group - 1);
    for (int s = own; s - own < here; s += kTileBlock >> log_group) {
        // n odd in words of two: every other slice begins amid a word. What is before the first or behind the last whole one is lane 0's.
        // Lanes without a slice come along to the shuffles, and read nothing: the last slice's owner may be writing there.
        const bool exists = s < here;
        const int begin = min(s, here - 1) * n, words_begin = begin + (W == 2 ? begin & 1 : 0);
        const int loose = exists && W == 2 && (n & 1) && lane == 0 ? (begin & 1 ? begin : begin + n - 1) : -1;
        const int own_begin = words_begin + lane * W, words = exists ? (n / W - lane + group - 1) >> log_group : 0;  // this lane's
        const auto each = [&](auto take) {
#pragma unroll 4
            for (int w = 0; w < words; ++w) take(load_place<W, OPERANDS>(tile, g_tile, own_begin + w * group * W));
            if (loose >= 0) take(load_place<1, OPERANDS>(tile, g_tile, loose));
        };
        const A anchor = exists ? to_acc(tile[begin]) : A(0);
        const auto m = statistics_of_slice<T, OPERANDS>(anchor, n, share, each, [&](auto& v) { add_across_lanes(v, group); });
        const Result<T, OPERANDS> result(m, share, eps);
        if (exists) {
#pragma unroll 4
            for (int w = 0; w < words; ++w) {
                const int i = own_begin + w * group * W;
                store(tile + i, result(load_place<W, OPERANDS>(tile, g_tile, i)));
            }
            if (loose >= 0) store(tile + loose, result(load_place<1, OPERANDS>(tile, g_tile, loose)));
        }
    }
    __syncthreads();

#pragma unroll 4
    for (int i = line_begin + int(threadIdx.x); i < packs; i += kTileBlock) {
        if (i >= 0) store<OPERANDS == 1>(y + i * V, reinterpret_cast<const Pack<T, V>*>(tile)[i]);
    }
    if (loose_end < here * n) y[loose_end] = tile[loose_end];
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Up to 4 MiB: the slice waits in the registers and the shared memory of a cluster; above, as far as all multiprocessors reach, of a gang:
// of any blocks that run at once.
// Clusters are persistent: each takes a slice when it has room for one, and its blocks the slice's chunks of up to 14 KiB in turn. (With
// the slices shared out beforehand the fast clusters end long before the slow ones.) Gangs share them out beforehand.
// The producer warp's bulk copies fill a ring of stages in shared memory as they fall empty. Two teams of consumers take the slices in
// turn, so that one stores while the other gathers. A team takes the first chunks of its part into registers, which empties their stages at
// once, and leaves the others where they are until the slice's statistics are complete.
// Blocks of a cluster tell each other their parts' moments by st.async, one 16-byte message a pair, and count the arrivals on an mbarrier;
// there is no cluster-wide barrier but at the start and the end. Those of a gang write theirs to L2, once for all, where each thread of a
// team waits for one peer's: all blocks must be running then, which a cooperative launch sees to.

constexpr int kTeam = 224;         // threads of a team: two and the producer warp are 15 warps, which may have 128 registers a thread
constexpr int kHeldPacks = 4;      // of a chunk, a thread, shared among the operands
constexpr int kChunkBytes = kTeam * kHeldPacks * 16;
constexpr int kRingStages = 16;
constexpr int kHeldChunks = 3;     // of a part, in its team's registers
constexpr int kWaitingChunks = 7;  // of a part, in the ring, as far as clusters reach: the other team's fit beside them, and some to come
constexpr int kMaxCluster = 16;
constexpr int kMailRounds = 256;   // until a message's head looks the same again
constexpr int kMailBytes = 2 * 2 * 2 * sizeof(uint4);  // of a block: two teams' in two turns, each of one message, backward two
constexpr int kQueue = 16;         // slices a cluster has been told of and not all of its threads have heard of, at most
constexpr int kRingSharedBytes = kRingStages * kChunkBytes;
constexpr int kClusterSharedBytes = kRingSharedBytes + 3072;
static_assert(kClusterSharedBytes <= 227 * 1024, "the ring, its barriers and inboxes are one block's shared memory on sm_90");
static_assert(kChunkBytes / 2 % 128 == 0, "stages, and their halves backward, stay aligned for the bulk copies");
static_assert(2 * kWaitingChunks < kRingStages, "both teams' waiting chunks leave room for the next slice's");
static_assert(kTeam >= 128, "a thread for each loose value of two bytes");
static_assert(kHeldPacks / 2 % 2 == 0, "batches of 8 values come out even in both directions, but for the part's end");
static_assert((kHeldChunks + kRingStages) * (kChunkBytes / 2) < (1u << 31) / kMailRounds, "a head has bits for the count");
static_assert(sizeof(Moments<float>) == 16, "one st.async.v4 carries a block's moments, another what follows them backward");
// The producer is at most kRingStages chunks ahead of the team that gathers, which is at most two slices ahead of the last one that every
// block has gathered, and so has heard of.
static_assert(kMostInRegisters<float, 2> > kChunkBytes && kRingStages / 2 + 3 < kQueue, "two chunks a part, at least");

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

#if CUDART_VERSION >= 12000 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)), "l"(evict_last()) : "memory");
}
__device__ __forceinline__ uint32_t peer_address(const void* p, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
// By one warp: this block's statistics to every block of its cluster. A block without peers keeps them itself: st.async is for clusters.
template <typename S> __device__ __forceinline__ void post(S own, S* inbox, uint64_t* bar, int rank, int blocks, int lane) {
    constexpr bool kJoint = sizeof(S) > sizeof(Moments<float>);
    const Moments<float>& m = moments_in(own);
    if (blocks == 1) {
        if (lane == 0) inbox[0] = own, mbarrier_arrive(bar);
        return;
    }
    if (lane == 0) mbarrier_expect_bytes(bar, blocks * (kJoint ? 24 : 16));
    if (lane < blocks) {
        const uint32_t to = peer_address(inbox + rank, lane), arrival = peer_address(bar, lane);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
            ::"r"(to), "f"(m.count), "f"(m.hi), "f"(m.lo), "f"(m.m2), "r"(arrival) : "memory");
        if constexpr (kJoint) {
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0 + 16], {%1, %2}, [%3];"
                ::"r"(to), "f"(own.g), "f"(own.co), "r"(arrival) : "memory");
        }
    }
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// By one thread: this block's statistics to all blocks of its gang, through L2, in messages of 16 bytes that are written and read as one.
// Each has a word for the round, which tells it from what lay there, and for the count.
#if CUDART_VERSION >= 12030
template <typename S> __device__ __forceinline__ void publish(S own, uint4* mail, int stride, int round) {
    const auto send = [](uint4* to, int head, float a, float b, float c) {
        asm volatile("{\n.reg .b64 low, high;\n.reg .b128 all;\nmov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
            "mov.b128 all, {low, high};\nst.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(to), "r"(head), "f"(a), "f"(b), "f"(c) : "memory");
    };
    const Moments<float>& m = moments_in(own);
    const int head = int(m.count) * kMailRounds + round % kMailRounds;
    send(mail, head, m.hi, m.lo, m.m2);
    if constexpr (sizeof(S) > sizeof(m)) send(mail + stride, head, own.g, own.co, 0);
}
// A peer's.
template <typename S> __device__ __forceinline__ S receive(const uint4* mail, int stride, int round) {
    int head;
    const auto wait = [&](const uint4* from, float& a, float& b, float& c) {
        do {
            asm volatile("{\n.reg .b64 low, high;\n.reg .b128 all;\nld.relaxed.gpu.global.b128 all, [%4];\nmov.b128 {low, high}, all;\n"
                "mov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}" : "=r"(head), "=f"(a), "=f"(b), "=f"(c) : "l"(from) : "memory");
        } while (head % kMailRounds != round % kMailRounds);
    };
    S from;
    Moments<float>& m = moments_in(from);
    float unused;
    wait(mail, m.hi, m.lo, m.m2);
    if constexpr (sizeof(S) > sizeof(m)) wait(mail + stride, from.g, from.co, unused);
    m.count = head / kMailRounds;
    return from;
}
#else
template <typename S> __device__ __forceinline__ void publish(S, uint4*, int, int) {}
template <typename S> __device__ __forceinline__ S receive(const uint4*, int, int) { return S(); }
#endif

__device__ __forceinline__ void send_slice(int slice, int* queue, uint64_t* bar, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
        ::"r"(peer_address(queue, rank)), "r"(slice), "r"(peer_address(bar, rank)) : "memory");
}
#endif

// A block's part of a slice: every `blocks`-th chunk of `chunk_packs` packs (of one operand), so that a cluster's blocks move along the
// slice together. Chunks are whole lines.
template <typename T> struct Part {
    int chunk_packs, stride, packs, chunks;  // packs: from the part's first one to the slice's end
    int64_t first_value;  // of the part's first pack, in the tensor
    __device__ __forceinline__ Part(int64_t slice, int n, int rank, int blocks, int chunk_packs)
        : chunk_packs(chunk_packs), stride(blocks * chunk_packs) {
        const Span<T> span(slice * n, n);
        packs = max(int(span.packs) - rank * chunk_packs, 0);
        chunks = (packs + stride - 1) / stride;
        first_value = slice * n + span.head + int64_t(rank) * chunk_packs * kPack<T>;
    }
    __device__ __forceinline__ int packs_of(int c) const { return min(chunk_packs, packs - c * stride); }
    __device__ __forceinline__ int64_t value_of(int c) const { return first_value + int64_t(c) * stride * kPack<T>; }
};

template <typename T, int OPERANDS>
__global__ void __launch_bounds__(2 * kTeam + 32, 1) norm_in_cluster(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int slices, int n, int blocks, int chunk_packs, float eps,
    int* taken, uint4* mail) {
#if CUDART_VERSION >= 12000 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    using S = Statistics<T, OPERANDS>;
    constexpr int V = kPack<T>, kPlaces = kHeldPacks / OPERANDS;  // of a chunk, a thread
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ __align__(8) uint64_t full[kRingStages], empty[kRingStages], gathered[2], exchanged[2][2], queued[kQueue];
    __shared__ S inbox[2][2][kMaxCluster], warp_statistics[2][kTeam / 32];
    __shared__ int queue[kQueue];

    const bool is_gang = mail != nullptr;
    const int team = threadIdx.x / kTeam, tid = threadIdx.x % kTeam;  // team 2 is the producer warp
    const int rank = blockIdx.x % blocks, first = blockIdx.x / blocks, clusters = gridDim.x / blocks;

    if (threadIdx.x == 0) {
        for (int s = 0; s < kRingStages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], kTeam);
        }
        for (int t = 0; t < 2; ++t) {
            mbarrier_init(&gathered[t], kTeam);
            mbarrier_init(&exchanged[t][0], 1);
            mbarrier_init(&exchanged[t][1], 1);
        }
        for (int q = 0; q < kQueue; ++q) mbarrier_init(&queued[q], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_sync();

    int stage = 0, phase = 0;
    const auto advance = [](int& s, int& p) {
        if (++s == kRingStages) s = 0, p ^= 1;
    };
    const auto slice_after = [&](int round) {  // the cluster's next one, or one that does not exist
        mbarrier_wait(&queued[round % kQueue], round / kQueue & 1);
        return queue[round % kQueue];
    };
    if (team == 2) {
        if (tid == 0) {  // one thread keeps the ring full
            int round = 0;
            for (int slice = first; slice < slices; slice = slice_after(round), ++round) {
                // The first block asks for the next slice while it loads this one, then tells all.
                const int next = is_gang ? slice + clusters : rank > 0 || taken == nullptr ? slices : clusters + atomicAdd(taken, 1);
                const Part<T> part(slice, n, rank, blocks, chunk_packs);
                for (int c = 0; c < part.chunks; ++c, advance(stage, phase)) {
                    const int bytes = part.packs_of(c) * 16;
                    unsigned char* to = ring + stage * kChunkBytes;
                    mbarrier_wait(&empty[stage], phase ^ 1);
                    mbarrier_expect_bytes(&full[stage], OPERANDS * bytes);
                    bulk_load(to, x + part.value_of(c), bytes, &full[stage]);
                    if constexpr (OPERANDS == 2) bulk_load(to + kChunkBytes / 2, g + part.value_of(c), bytes, &full[stage]);
                }
                const int q = round % kQueue;
                if (blocks == 1 || is_gang) {
                    queue[q] = next, mbarrier_arrive(&queued[q]);
                } else {
                    mbarrier_expect_bytes(&queued[q], sizeof(int));
                    for (int r = 0; rank == 0 && r < blocks; ++r) send_slice(next, &queue[q], &queued[q], r);
                }
            }
        }
        __syncwarp();
    } else {
        const auto wait_for_team = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kTeam) : "memory"); };
        uint4* const team_mail = mail + (first * 2 + team) * 4 * blocks;
        int round = 0;
        for (int slice = first; slice < slices; slice = slice_after(round), ++round) {
            const Part<T> part(slice, n, rank, blocks, chunk_packs);
            if ((round & 1) != team) {  // the other team's
                for (int c = 0; c < part.chunks; ++c) advance(stage, phase);
                continue;
            }
            // Place i of a chunk is pack i * kTeam + tid of it: a thread has this many.
            const auto places_of = [&](int c) { return (part.packs_of(c) - tid + kTeam - 1) / kTeam; };
            const auto my_place = [&](int s, int i) {
                Place<T, V, OPERANDS> place;
#pragma unroll
                for (int o = 0; o < OPERANDS; ++o) {
                    const unsigned char* from = ring + s * kChunkBytes + o * (kChunkBytes / OPERANDS);
                    place.of[o] = reinterpret_cast<const Pack<T, V>*>(from)[tid + i * kTeam];
                }
                return place;
            };
            const int64_t loose = rank == 0 ? Span<T>(int64_t(slice) * n, n).loose(tid) : -1;
            Place<T, 1, OPERANDS> loose_place;
            if (loose >= 0) loose_place = load_place<1, OPERANDS>(x, g, int64_t(slice) * n + loose);

            // A stage's parity tells its last two fillings apart and no more: wait for none before the other team has had all of its own.
            mbarrier_wait(&gathered[team ^ 1], ((round - 1) >> 1) & 1);

            // The first chunks into registers, their stages free at once.
            Gatherer<T, V, OPERANDS, sizeof(T) == 2> gatherer;
            const auto gather = [&](int count, auto place) {  // up to kPlaces of them, 8 values at a time
                constexpr int kBatch = 8 / V;
#pragma unroll
                for (int i = 0; i < kPlaces; i += kBatch) {
                    if (i + kBatch <= count) {
                        Place<T, V, OPERANDS> batch[kBatch];
#pragma unroll
                        for (int j = 0; j < kBatch; ++j) batch[j] = place(i + j);
                        gatherer.add(batch);
                    } else if (i < count) {
                        const Place<T, V, OPERANDS> last[1] = {place(i)};
                        gatherer.add(last);
                    }
                }
            };
            Place<T, V, OPERANDS> held[kHeldChunks][kPlaces];
#pragma unroll
            for (int c = 0; c < kHeldChunks; ++c) {
                if (c < part.chunks) {
                    const int count = places_of(c);
                    mbarrier_wait(&full[stage], phase);
#pragma unroll
                    for (int i = 0; i < kPlaces; ++i) {
                        if (i < count) held[c][i] = my_place(stage, i);
                    }
                    mbarrier_arrive(&empty[stage]);
                    gather(count, [&](int i) { return held[c][i]; });
                    advance(stage, phase);
                }
            }
            // The others stay in the ring.
            for (int c = kHeldChunks, s = stage, p = phase; c < part.chunks; ++c, advance(s, p)) {
                mbarrier_wait(&full[s], p);
                gather(places_of(c), [&](int i) { return my_place(s, i); });
            }
            mbarrier_arrive(&gathered[team]);
            S m = gatherer.total();
            if (loose >= 0) m = merge(m, statistics_of(loose_place));
            m = merge_across_lanes<OPERANDS>(m);
            if (tid % 32 == 0) warp_statistics[team][tid / 32] = m;
            wait_for_team();

            // To every peer: this block's statistics. From every peer: theirs. Two inboxes, or places for mail, take turns: a peer's team
            // can only be one slice ahead, since it needs this block's message for that slice, which is sent after this slice's were read.
            const int turn = (round >> 1) & 1;
            uint4* const turn_mail = team_mail + turn * 2 * blocks;
            if (tid < 32) {
                m = merge_across_lanes<OPERANDS>(tid % 8 < kTeam / 32 ? warp_statistics[team][tid % 8] : S(), 8);
                if (!is_gang) post(m, inbox[team][turn], &exchanged[team][turn], rank, blocks, tid);
                else if (tid == 0) publish(m, turn_mail + rank, blocks, round + 1);
            }
            if (!is_gang) {
                mbarrier_wait(&exchanged[team][turn], (round >> 2) & 1);
                m = inbox[team][turn][tid & (blocks - 1)];
                if (blocks > 1) m = merge_across_lanes<OPERANDS>(m, blocks);
            } else {
                m = merge_across_lanes<OPERANDS>(tid < blocks ? receive<S>(turn_mail + tid, blocks, round + 1) : S());
                if (tid % 32 == 0) inbox[team][turn][tid / 32] = m;
                wait_for_team();
                m = merge_across_lanes<OPERANDS>(tid % 8 < kTeam / 32 ? inbox[team][turn][tid % 8] : S(), 8);
            }
            const Result<T, OPERANDS> result(m, reciprocal(float(n)), eps);

            if (loose >= 0) store(y + int64_t(slice) * n + loose, result(loose_place));
            const auto write = [&](int c, auto place) {
                const int count = places_of(c);
                T* const to = y + part.value_of(c) + tid * V;
#pragma unroll
                for (int i = 0; i < kPlaces; ++i) {
                    if (i < count) store(to + i * (kTeam * V), result(place(i)));
                }
            };
#pragma unroll
            for (int c = 0; c < kHeldChunks; ++c) {
                if (c < part.chunks) write(c, [&](int i) { keep_packed(held[c][i]); return held[c][i]; });
            }
            for (int c = kHeldChunks; c < part.chunks; ++c, advance(stage, phase)) {
                write(c, [&](int i) { return my_place(stage, i); });
                mbarrier_arrive(&empty[stage]);
            }
        }
    }
    cluster_sync();  // no block leaves while a peer may still write to its inbox
#endif
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Any slice: it waits nowhere. Two kernels: block (part, slice) leaves the statistics of its part, then merges those of its slice and
// normalises its part. With one part a slice the second kernel takes the statistics itself. Otherwise they lie where the slice's first
// outputs will be, behind a count of the blocks that have read them: the last to do so writes those outputs too.
// The second kernel goes backwards: what the first has read last may still be in L2.

constexpr int kStreamBlock = 512;

template <typename T, int OPERANDS> struct StreamPart {
    using S = Statistics<T, OPERANDS>;
    static constexpr int V = kPack<T>;
    int64_t begin, first, end, loose;  // of the slice the first pack's value; of the part packs of the slice; the loose value in the tensor
    __device__ __forceinline__ StreamPart(int64_t block, int64_t n, int64_t part_packs, int parts) {
        const int64_t slice = block / parts;
        const Span<T> span(slice * n, n);
        begin = slice * n + span.head;
        first = block % parts * part_packs;
        end = min(first + part_packs, span.packs);
        loose = first == 0 ? span.loose(threadIdx.x) : -1;
        if (loose >= 0) loose += slice * n;
    }
    __device__ __forceinline__ static int64_t packs_of_statistics(int parts) { return parts > 1 ? 4 + parts * int64_t(sizeof(S) / 16) : 0; }
    __device__ __forceinline__ int* readers(T* y) const { return reinterpret_cast<int*>(y + begin); }
    __device__ __forceinline__ S* statistics(T* y) const {
        return reinterpret_cast<S*>((reinterpret_cast<uintptr_t>(y + begin) + 16 + 63) / 64 * 64);
    }
};

template <int OPERANDS, typename S> __device__ __forceinline__ S merge_across_block(S m) {
    __shared__ S warp_statistics[kStreamBlock / 32];
    m = merge_across_lanes<OPERANDS>(m);
    if (threadIdx.x % 32 == 0) warp_statistics[threadIdx.x / 32] = m;
    __syncthreads();
    return merge_across_lanes<OPERANDS>(warp_statistics[threadIdx.x % (kStreamBlock / 32)], kStreamBlock / 32);
}

template <typename T, int OPERANDS> __device__ __forceinline__ Statistics<T, OPERANDS> statistics_of_block(
    const T* __restrict__ x, const T* __restrict__ g, const StreamPart<T, OPERANDS>& part) {
    constexpr int V = kPack<T>, kBatch = 16 / (V * 2);  // places of 8 values
    Gatherer<T, V, OPERANDS, false> gatherer;
    const auto place_at = [&](int64_t j) { return load_place<V, OPERANDS>(x, g, part.begin + j * V); };
    int64_t j = part.first + threadIdx.x;
#pragma unroll 2
    for (; j + (kBatch - 1) * kStreamBlock < part.end; j += kBatch * kStreamBlock) {
        Place<T, V, OPERANDS> batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) batch[b] = place_at(j + b * kStreamBlock);
        gatherer.add(batch);
    }
    for (; j < part.end; j += kStreamBlock) {
        const Place<T, V, OPERANDS> last[1] = {place_at(j)};
        gatherer.add(last);
    }
    Statistics<T, OPERANDS> m = gatherer.total();
    if (part.loose >= 0) m = merge(m, statistics_of(load_place<1, OPERANDS>(x, g, part.loose)));
    return merge_across_block<OPERANDS>(m);
}

template <typename T, int OPERANDS> __global__ void __launch_bounds__(kStreamBlock, 1) statistics_of_parts(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int64_t n, int64_t part_packs, int parts) {
    const StreamPart<T, OPERANDS> part(blockIdx.x, n, part_packs, parts);
    const auto m = statistics_of_block<T, OPERANDS>(x, g, part);
    if (threadIdx.x == 0) part.statistics(y)[blockIdx.x % parts] = m;
    if (threadIdx.x == 0 && part.first == 0) *part.readers(y) = 0;
}

template <typename T, int OPERANDS> __global__ void __launch_bounds__(kStreamBlock, 1) norm_of_parts(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ y, int64_t n, int64_t part_packs, int parts, Acc<T> eps) {
    constexpr int V = kPack<T>;
    const StreamPart<T, OPERANDS> part(gridDim.x - 1 - blockIdx.x, n, part_packs, parts);
    const int64_t kept = part.packs_of_statistics(parts);
    __shared__ bool last_reader;
    Statistics<T, OPERANDS> m;
    if (parts == 1) {
        m = statistics_of_block<T, OPERANDS>(x, g, part);
    } else {
        for (int p = threadIdx.x; p < parts; p += kStreamBlock) m = merge(m, part.statistics(y)[p]);
        m = merge_across_block<OPERANDS>(m);
        if (threadIdx.x == 0) {
            __threadfence();
            last_reader = atomicAdd(part.readers(y), 1) == parts - 1;
            __threadfence();
        }
        __syncthreads();
    }
    const Result<T, OPERANDS> result(m, reciprocal(Acc<T>(n)), eps);
    const auto write = [&](int64_t first, int64_t end) {
        constexpr int kBatch = 4;
        for (int64_t j = first + threadIdx.x; j < end; j += kBatch * kStreamBlock) {
            Place<T, V, OPERANDS> batch[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int64_t at = j + b * kStreamBlock;
                batch[b] = load_place<V, OPERANDS>(x, g, part.begin + at * V, at < end);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int64_t at = j + b * kStreamBlock;
                if (at < end) store(y + part.begin + at * V, result(batch[b]));
            }
        }
    };
    write(max(part.first, kept), part.end);
    if (parts > 1 && last_reader) write(0, kept);
    if (part.loose >= 0) store(y + part.loose, result(load_place<1, OPERANDS>(x, g, part.loose)));
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

// `slices` contiguous slices of `n` values: x, backward g, and y or dx, each of which begins on 16 bytes.
struct Task {
    const void *x, *g;
    void* y;
    int64_t slices, n;
    double eps;
    void* workspace;
    cudaStream_t stream;
    Device device;
};

// Parts of a slice in the two-read kernels: enough blocks for several waves, none under 128 KiB.
static int stream_parts(int64_t slices, int64_t slice_bytes, int sms) {
    const int64_t wanted = divide_up(32 * sms, slices), most = slice_bytes / (128 * 1024);
    return int(wanted < most ? wanted : (most > 1 ? most : 1));
}

template <typename T, int OPERANDS> static cudaError_t launch_in_registers(const Task& task) {
    // As few threads a slice as hold it, which means fewer shuffles and more loads in flight each; but twice as many while the whole input
    // finds threads at once, or they are one warp. A thread has one loose value at most: slices that are not whole lines are too large for
    // tiles, and have 16 or more.
    const int n = int(task.n), packs = int(divide_up(n, kPack<T>));
    const bool at_once = task.slices * packs <= int64_t(kFewItems) * 1024 * task.device.sms, power_of_two = (n & (n - 1)) == 0;
    const bool few = packs <= kFewItems * (at_once ? kMaxGroup<T, OPERANDS> : power_of_two ? 32 : 0);
    constexpr int kMost = kRegisterItems<T, OPERANDS>;
    const int items = few ? kFewItems : kMost;
    int log_group = 0;
    while (items << log_group < packs) ++log_group;
    const int group = 1 << log_group, block = group > kRegisterBlock ? group : kRegisterBlock;
    const bool whole = n == items * group * kPack<T> && (few || group <= 32);
    constexpr bool kForward = OPERANDS == 1;
    const auto kernel = whole && group > 32 ? norm_in_registers<T, OPERANDS, kFewItems, kForward, kForward>
                      : whole ? few ? norm_in_registers<T, OPERANDS, kFewItems, kForward> : norm_in_registers<T, OPERANDS, kMost, kForward>
                              : few ? norm_in_registers<T, OPERANDS, kFewItems, false> : norm_in_registers<T, OPERANDS, kMost, false>;
    kernel<<<unsigned(divide_up(task.slices, block / group)), block, 0, task.stream>>>(
        static_cast<const T*>(task.x), static_cast<const T*>(task.g), static_cast<T*>(task.y), int(task.slices), n, Acc<T>(1.0 / n),
        Acc<T>(task.eps), log_group);
    return cudaGetLastError();
}

template <typename T, int N, int OPERANDS> static cudaError_t launch_in_packs(const Task& task) {
    const int64_t values = task.slices * task.n;
    norm_in_packs<T, N, OPERANDS><<<unsigned(divide_up(values, kPackBlock * kPackItems * kPack<T>)), kPackBlock, 0, task.stream>>>(
        static_cast<const T*>(task.x), static_cast<const T*>(task.g), static_cast<T*>(task.y), values, Acc<T>(1.0 / task.n),
        Acc<T>(task.eps), int(divide_up(task.n, N)));
    return cudaGetLastError();
}

// How many words that a warp reads at once share a bank, at most.
static int bank_conflicts(int n, int word, int group) {
    int most = 0, words[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
        int& bank = words[((lane / group * n + word - 1) / word + lane % group) % 32];
        if (++bank > most) most = bank;
    }
    return most;
}
// Tiles of how many slices, and lanes for each: as few as leave little of the tile unused, few lanes idle and none waiting for a bank.
// Half a tile is enough where it has two slices a thread, and while the input has not two whole ones for each multiprocessor.
template <typename T, int OPERANDS> static void tile_shape(const Task& task, int* slices, int* log_group) {
    constexpr int V = kPack<T>;
    const int64_t n = task.n, power = n & -n, unit = power < V ? V / power : 1;  // slices that are whole packs together
    const int64_t bytes = OPERANDS * n * sizeof(T);
    const bool half = kTileBytes / 2 >= 2 * kTileBlock * bytes || task.slices * bytes < int64_t(2 * kTileBytes) * task.device.sms;
    const int64_t units = (half ? kTileBytes / 2 : kTileBytes) / bytes / unit, fit = (units > 0 ? units : 1) * unit;
    for (*log_group = 0;; ++*log_group) {
        const int64_t groups = kTileBlock >> *log_group, whole = fit / groups * groups;
        *slices = int(whole > 0 ? whole : fit);
        if (*log_group == 5) return;
        if (3 * *slices >= 2 * fit && 8 * *slices >= 7 * groups && bank_conflicts(int(n), kWord<T>, 1 << *log_group) <= 2) return;
    }
}
template <typename T, int OPERANDS> static cudaError_t launch_in_tiles(const Task& task) {
    const int n = int(task.n);
    int slices, log_group;
    tile_shape<T, OPERANDS>(task, &slices, &log_group);
    const auto kernel = log_group == 0 ? norm_in_tiles<T, OPERANDS, true> : norm_in_tiles<T, OPERANDS, false>;
    kernel<<<unsigned(divide_up(task.slices, slices)), kTileBlock, OPERANDS * slices * n * sizeof(T), task.stream>>>(
        static_cast<const T*>(task.x), static_cast<const T*>(task.g), static_cast<T*>(task.y), task.slices, n, Acc<T>(1.0 / n),
        Acc<T>(task.eps), slices, log_group);
    return cudaGetLastError();
}

// The smallest cluster whose blocks hold the slice; forward, but for the largest ones, with room for some of the next. 0: it does not fit.
static int cluster_size(int64_t bytes, bool leave_room) {
    for (int blocks = 1; blocks <= kMaxCluster; blocks *= 2) {
        const int chunks = kHeldChunks + (leave_room && blocks < kMaxCluster / 2 ? kWaitingChunks : kRingStages);
        if (bytes <= int64_t(blocks) * chunks * kChunkBytes) return blocks;
    }
    return 0;
}

// Blocks of the cluster for a slice of `bytes` an operand, or 0.
template <typename T, int OPERANDS> static int cluster_blocks_for(int64_t bytes, const Device& device) {
    if (CUDART_VERSION < 12000 || sizeof(T) == 8 || device.major < 9 || device.shared_bytes < kClusterSharedBytes) return 0;  // PTX 8.0
    return cluster_size(OPERANDS * bytes, OPERANDS == 1);
}

// Blocks of a gang for a slice that is too large for clusters: as many gangs as the device has room for, and no more rounds. 0: it does
// not fit.
template <typename T, int OPERANDS> static int gang_blocks_for(int64_t slices, int64_t bytes, const Device& device) {
    if (CUDART_VERSION < 12030 || sizeof(T) == 8 || device.major < 9 || device.shared_bytes < kClusterSharedBytes) return 0;  // PTX 8.3
    const int64_t fewest = divide_up(OPERANDS * bytes, (kHeldChunks + kRingStages) * kChunkBytes);
    if (fewest > device.sms || fewest > kTeam) return 0;
    const int64_t rounds = divide_up(slices, device.sms / fewest), blocks = device.sms / divide_up(slices, rounds);
    return int(blocks < kTeam ? blocks : kTeam);
}

// *launched is false where the device cannot hold such a cluster or gang (a small partition of a GPU).
template <typename T, int OPERANDS> static cudaError_t launch_on_chip(const Task& task, int blocks, bool is_gang, bool* launched) {
    auto kernel = norm_in_cluster<T, OPERANDS>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingSharedBytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = is_gang ? cudaLaunchAttributeCooperative : cudaLaunchAttributeClusterDimension;
    if (is_gang) {
        attribute.val.cooperative = 1;
    } else {
        attribute.val.clusterDim.x = blocks;
        attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(2 * kTeam + 32);
    config.dynamicSmemBytes = kRingSharedBytes;
    config.stream = task.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = task.device.sms / blocks;
    if (!is_gang) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    *launched = error == cudaSuccess && clusters > 0;
    if (!*launched) return error;
    config.gridDim = dim3(unsigned((task.slices < clusters ? task.slices : clusters) * blocks));
    // Clusters count the slices beyond each one's first; gangs write to each other.
    int* taken = !is_gang && task.slices > clusters ? static_cast<int*>(task.workspace) : nullptr;
    uint4* mail = is_gang ? static_cast<uint4*>(task.workspace) : nullptr;
    if (taken != nullptr) error = cudaMemsetAsync(taken, 0, sizeof(int), task.stream);
    if (mail != nullptr) error = cudaMemsetAsync(mail, 0, config.gridDim.x * kMailBytes, task.stream);
    if (error != cudaSuccess) return error;
    // Equal chunks, as many for every block.
    const int64_t packs = task.n / kPack<T>, chunks = divide_up(packs, blocks * (kChunkBytes / 16 / OPERANDS)) * blocks;
    const int chunk_packs = int(divide_up(divide_up(packs, chunks), 8) * 8);
    error = cudaLaunchKernelEx(&config, kernel, static_cast<const T*>(task.x), static_cast<const T*>(task.g), static_cast<T*>(task.y),
        int(task.slices), int(task.n), blocks, chunk_packs, float(task.eps), taken, mail);
    *launched = error != cudaErrorCooperativeLaunchTooLarge;
    return *launched ? error : (cudaGetLastError(), cudaSuccess);
}

template <typename T, int OPERANDS> static cudaError_t launch_two_reads(const Task& task) {
    const T *x = static_cast<const T*>(task.x), *g = static_cast<const T*>(task.g);
    T* const y = static_cast<T*>(task.y);
    const int64_t packs = task.n / kPack<T>;
    const int64_t part_packs = divide_up(divide_up(packs, stream_parts(task.slices, task.n * sizeof(T), task.device.sms)), 8) * 8;
    const int parts = int(divide_up(packs, part_packs));
    const dim3 grid(unsigned(task.slices * parts));
    if (parts > 1) statistics_of_parts<T, OPERANDS><<<grid, kStreamBlock, 0, task.stream>>>(x, g, y, task.n, part_packs, parts);
    norm_of_parts<T, OPERANDS><<<grid, kStreamBlock, 0, task.stream>>>(x, g, y, task.n, part_packs, parts, Acc<T>(task.eps));
    return cudaGetLastError();
}

template <typename T, int OPERANDS> static cudaError_t launch(const Task& task) {
    if (!aligned_16(task.x, task.y) || !aligned_16(task.g, task.y)) return cudaErrorMisalignedAddress;
    const int64_t bytes = task.n * sizeof(T);
    if constexpr (kPack<T> > 2) if (task.n == 2) return launch_in_packs<T, 2, OPERANDS>(task);
    if constexpr (kPack<T> > 4) if (task.n == 4) return launch_in_packs<T, 4, OPERANDS>(task);
    if ((OPERANDS == 1 ? 256 : 512) % bytes == 0) return launch_in_packs<T, kPack<T>, OPERANDS>(task);
    if (bytes % 128 != 0 && OPERANDS * bytes <= kMostInTiles) return launch_in_tiles<T, OPERANDS>(task);
    if (bytes <= kMostInRegisters<T, OPERANDS>) return launch_in_registers<T, OPERANDS>(task);
    if constexpr (sizeof(T) < 8) {
        const int cluster = cluster_blocks_for<T, OPERANDS>(bytes, task.device);
        const int gang = cluster > 0 ? 0 : gang_blocks_for<T, OPERANDS>(task.slices, bytes, task.device);
        bool launched = false;
        cudaError_t error = cudaSuccess;
        if (cluster > 0 || gang > 0) error = launch_on_chip<T, OPERANDS>(task, cluster > 0 ? cluster : gang, gang > 0, &launched);
        if (launched || error != cudaSuccess) return error;
    }
    return launch_two_reads<T, OPERANDS>(task);
}

template <typename T, int OPERANDS> static int64_t workspace(int64_t slices, int64_t n, const Device& device) {
    const int64_t bytes = n * sizeof(T);
    if (bytes <= kMostInRegisters<T, OPERANDS>) return 0;
    if (cluster_blocks_for<T, OPERANDS>(bytes, device) > 0) return sizeof(int);
    return gang_blocks_for<T, OPERANDS>(slices, bytes, device) > 0 ? device.sms * int64_t(kMailBytes) : 0;
}

template <int OPERANDS> static cudaError_t launch(int dtype, Task task) {
    const cudaError_t error = current_device(&task.device);
    if (error != cudaSuccess) return error;
    switch (dtype) {
        case 0: return launch<float, OPERANDS>(task);
        case 1: return launch<double, OPERANDS>(task);
        case 2: return launch<__half, OPERANDS>(task);
        default: return launch<__nv_bfloat16, OPERANDS>(task);
    }
}

// dtype: 0 float32, 1 float64, 2 float16, 3 bfloat16. workspace: instance_norm_workspace bytes, or null if those are none.
extern "C" int64_t instance_norm_workspace(int backward, int dtype, int64_t slices, int64_t n) {
    Device device;
    if (dtype == 1 || current_device(&device) != cudaSuccess) return 0;
    if (dtype == 0) return backward ? workspace<float, 2>(slices, n, device) : workspace<float, 1>(slices, n, device);
    return backward ? workspace<__half, 2>(slices, n, device) : workspace<__half, 1>(slices, n, device);
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

template <typename A> Moments slice_moments(const Values<A>& x, int64_t begin, int64_t n) {
    A buffer[kBlock];
    Moments m;
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        m.merge(block_moments(x.read(begin + i, count, buffer), count));
    }
    return m;
}

template <typename A> void normalize(const Values<A>& x, const Values<A>& y, int64_t begin, int64_t end, const Moments& m, double eps) {
    const A hi = static_cast<A>(m.mean), lo = static_cast<A>(m.mean - hi), rstd = static_cast<A>(1 / std::sqrt(m.m2 / m.count + eps));
    A buffer[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
        const int64_t count = std::min(kBlock, end - i);
        const A* from = x.read(i, count, buffer);
        A* to = y.target(i, buffer);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) to[j] = ((from[j] - hi) - lo) * rstd;
        y.leave(i, count, buffer);
    }
}

// One sweep over a block in the first cache, around an anchor that is the slice's mean so far: how far the block's own mean is from it
// counts in the slice's M2 as well, so nothing is lost that the slice would notice.
template <typename A> inline Joint block_joint(const A* x, const A* g, int64_t n, A anchor) {
    double sum = 0, square = 0, g_sum = 0, product = 0;  // in double: the roundings of equal terms all go one way
#pragma omp simd reduction(+ : sum, square, g_sum, product)
    for (int64_t i = 0; i < n; ++i) {
        const double deviation = x[i] - anchor;
        sum += deviation;
        square += deviation * deviation;
        g_sum += g[i];
        product += deviation * g[i];
    }
    const double mean = sum / n;
    return {{double(n), anchor + mean, square > 0 ? std::max(0.0, square - mean * sum) : square}, g_sum, product - mean * g_sum};
}

template <typename A> Joint slice_joint(const Values<A>& x, const Values<A>& g, int64_t begin, int64_t n) {
    A x_buffer[kBlock], g_buffer[kBlock];
    Joint m;
    for (int64_t i = 0; i < n; i += kBlock) {
        const int64_t count = std::min(kBlock, n - i);
        const A *values = x.read(begin + i, count, x_buffer), *gradients = g.read(begin + i, count, g_buffer);
        A anchor = static_cast<A>(m.v.mean);
        if (i == 0) {
            const A share = A(1) / count;
#pragma omp simd reduction(+ : anchor)
            for (int64_t j = 0; j < count; ++j) anchor += values[j] * share;
        }
        m.merge(block_joint(values, gradients, count, anchor));
    }
    return m;
}

// dx = rstd * (g - mean(g) - (x - mean) * rstd^2 * co / n)
template <typename A> void differentiate(
    const Values<A>& x, const Values<A>& g, const Values<A>& dx, int64_t begin, int64_t end, const Joint& m, double eps) {
    const double share = 1 / m.v.count, rstd2 = 1 / (m.v.m2 * share + eps);
    const A hi = static_cast<A>(m.v.mean), lo = static_cast<A>(m.v.mean - hi), rstd = static_cast<A>(std::sqrt(rstd2));
    const A g_mean = static_cast<A>(m.sum * share), slope = static_cast<A>(rstd2 * (m.co * share));
    A x_buffer[kBlock], g_buffer[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
        const int64_t count = std::min(kBlock, end - i);
        const A *values = x.read(i, count, x_buffer), *gradients = g.read(i, count, g_buffer);
        A* to = dx.target(i, x_buffer);
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) to[j] = ((gradients[j] - g_mean) - ((values[j] - hi) - lo) * slope) * rstd;
        dx.leave(i, count, x_buffer);
    }
}

// Whole slices to each thread where there are enough of them, or else parts of one slice after the other. `gather(begin, count)` gives the
// statistics of values from `begin` on, `write(begin, end, statistics)` the result of a slice's values in [begin, end).
template <typename S, typename Gather, typename Write> void each_slice(const at::Tensor& x, const Gather& gather, const Write& write) {
    if (x.numel() == 0) return;
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n;
    if (slices >= at::get_num_threads()) {
        in_parallel(slices, std::max<int64_t>(1, 32768 / n), [&](int64_t begin, int64_t end) {
            for (int64_t s = begin; s < end; ++s) write(s * n, s * n + n, gather(s * n, n));
        });
        return;
    }
    const int64_t part = 16 * kBlock, parts = (n + part - 1) / part;  // of fixed size: the sum's order is the same on any machine
    std::vector<S> statistics(parts);
    for (int64_t s = 0; s < slices; ++s) {
        const int64_t first = s * n;
        in_parallel(parts, 1, [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) statistics[p] = gather(first + p * part, std::min(part, n - p * part));
        });
        S m;
        for (const S& other : statistics) m.merge(other);
        in_parallel(parts, 1, [&](int64_t begin, int64_t end) { write(first + begin * part, first + std::min(n, end * part), m); });
    }
}

// x (..., H, W), H * W > 0; y contiguous, as InstanceNorm2d's is.
at::Tensor instance_norm_cpu(const at::Tensor& x, double eps) {
    const at::Tensor input = x.contiguous();
    at::Tensor y = at::empty_like(input);
    in_type_for(x, "instance_norm", [&](auto zero) {
        const Values<decltype(zero)> from(input), to(y);
        each_slice<Moments>(
            x, [=](int64_t begin, int64_t count) { return slice_moments(from, begin, count); },
            [=](int64_t begin, int64_t end, const Moments& m) { normalize(from, to, begin, end, m, eps); });
    });
    return y;
}

void check_gradient(const at::Tensor& grad, const at::Tensor& x) {
    TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && grad.device() == x.device(),
        "instance_norm: the gradient must have the input's shape, dtype and device");
}

// The gradient of x, contiguous; grad is that of y.
at::Tensor instance_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& x, double eps) {
    check_gradient(grad, x);
    const at::Tensor input = x.contiguous(), gradient = grad.contiguous();
    at::Tensor dx = at::empty_like(input);
    in_type_for(x, "instance_norm", [&](auto zero) {
        const Values<decltype(zero)> from(input), given(gradient), to(dx);
        each_slice<Joint>(
            x, [=](int64_t begin, int64_t count) { return slice_joint(from, given, begin, count); },
            [=](int64_t begin, int64_t end, const Joint& m) { differentiate(from, given, to, begin, end, m, eps); });
    });
    return dx;
}

at::Tensor instance_norm_meta(const at::Tensor& x, double eps) { return at::empty_like(x, x.options(), at::MemoryFormat::Contiguous); }
at::Tensor instance_norm_backward_meta(const at::Tensor& grad, const at::Tensor& x, double eps) { return instance_norm_meta(x, eps); }

#ifdef WITH_CUDA
extern "C" int64_t instance_norm_workspace(int backward, int dtype, int64_t slices, int64_t n);
extern "C" int instance_norm_forward(
    int dtype, const void* x, void* y, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream);
extern "C" int instance_norm_backward(
    int dtype, const void* grad, const void* x, void* dx, int64_t slices, int64_t n, double eps, void* workspace, cudaStream_t stream);

// A tensor like x, which `launch(dtype, out, slices, n, workspace, stream)` fills.
template <typename Launch> at::Tensor run_on_gpu(const at::Tensor& x, bool backward, const Launch& launch) {
    at::Tensor out = at::empty_like(x);
    const int dtype = dtype_number(x, "instance_norm");
    if (x.numel() == 0) return out;
    const int64_t n = x.size(-1) * x.size(-2), slices = x.numel() / n, bytes = instance_norm_workspace(backward, dtype, slices, n);
    const at::Tensor workspace = bytes > 0 ? workspace_of(bytes, x) : at::Tensor();
    check_launch(launch(dtype, out.data_ptr(), slices, n, bytes > 0 ? workspace.data_ptr() : nullptr, current_stream()), "instance_norm");
    return out;
}
at::Tensor instance_norm_cuda(const at::Tensor& x, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor input = aligned(x);
    return run_on_gpu(input, false, [&](int dtype, void* y, int64_t slices, int64_t n, void* workspace, cudaStream_t stream) {
        return instance_norm_forward(dtype, input.data_ptr(), y, slices, n, eps, workspace, stream);
    });
}
at::Tensor instance_norm_backward_cuda(const at::Tensor& grad, const at::Tensor& x, double eps) {
    check_gradient(grad, x);
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor input = aligned(x), gradient = aligned(grad);
    return run_on_gpu(input, true, [&](int dtype, void* dx, int64_t slices, int64_t n, void* workspace, cudaStream_t stream) {
        return instance_norm_backward(dtype, gradient.data_ptr(), input.data_ptr(), dx, slices, n, eps, workspace, stream);
    });
}
#endif

}  // namespace

TORCH_LIBRARY(NAMESPACE, m) {
    m.def("forward(Tensor x, float eps) -> Tensor");
    m.def("backward(Tensor grad, Tensor x, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) {
    m.impl("forward", instance_norm_cpu);
    m.impl("backward", instance_norm_backward_cpu);
}
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
// Gradients are the business of the autograd.Functions below; whoever differentiates a bare operator, or in forward mode, is told.
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
    def forward(x, eps):
        return _forward(x, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.eps = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return InstanceNormGradient.apply(grad, x, ctx.eps), None

    @staticmethod
    def vmap(info, in_dims, x, eps):
        return InstanceNorm.apply(x.movedim(in_dims[0], 0), eps), 0


class InstanceNormGradient(torch.autograd.Function):
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), xhat = (x - mean) * rstd. Linear in g, and its own transpose."""

    @staticmethod
    def forward(grad, x, eps):
        return _backward(grad, x, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, x, ctx.eps = inputs
        ctx.save_for_backward(grad, x)

    @staticmethod
    def backward(ctx, v):
        """Second derivatives, of the scalar v . dx; that by x in ATen operators, which can be differentiated in turn."""
        grad, x = ctx.saved_tensors
        by_grad = InstanceNormGradient.apply(v, x, ctx.eps) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return by_grad, None, None

        def mean(t):
            return t.mean((-2, -1), keepdim=True)

        dtype = torch.promote_types(x.dtype, torch.float32)
        v, g, deviation = (t.to(dtype) - mean(t.to(dtype)) for t in (v, grad, x))
        rstd = (mean(deviation.square()) + ctx.eps).rsqrt()
        of_v, of_g, of_both = mean(v * deviation), mean(g * deviation), mean(v * g)
        by_x = rstd**3 * (deviation * (3 * rstd.square() * of_v * of_g - of_both) - v * of_g - g * of_v)
        return by_grad, by_x.to(x.dtype), None

    @staticmethod
    def vmap(info, in_dims, grad, x, eps):
        grad, x = (
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((grad, x), in_dims[:2])
        )
        return InstanceNormGradient.apply(grad, x, eps), 0


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
