// nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a gemm_test.cu -o t -ldl -lpthread && ./t
//
// Small to large: exact integers, odd sizes, bad scales, epilogues, then the two benchmark sizes. `./t quick` stops before the benchmarks,
// `./t bench` runs them alone, `./t profile` runs each configuration once on the first (for ncu). A hang is reported with the name of its test after 30 s ($GEMM_TIMEOUT; more under
// compute-sanitizer); -DGEMM_TRAP names the barrier.
#include "gemm.cuh"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <glob.h>
#include <random>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                                                  \
    do {                                                                                                             \
        const cudaError_t error_ = (call);                                                                           \
        if (error_ != cudaSuccess) {                                                                                 \
            printf("FAILED %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));                  \
            fflush(stdout);                                                                                          \
            _exit(2);                                                                                                \
        }                                                                                                            \
    } while (0)

// --- watchdog ---
static std::atomic<int64_t> deadline{0};
static char doing[256] = "";
static int64_t now_ms() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
template <class... Args> static void begin(const char* format, Args... args) {
    snprintf(doing, sizeof doing, format, args...);
    static const int seconds = getenv("GEMM_TIMEOUT") ? atoi(getenv("GEMM_TIMEOUT")) : 30;
    deadline = now_ms() + seconds * 1000;
}
static void start_watchdog() {
    begin("%s", "start");
    std::thread([] {
        for (;; usleep(200000)) {
            if (now_ms() > deadline) {
                printf("\nHANG in: %s\n", doing);
                fflush(stdout);
                _exit(3);
            }
        }
    }).detach();
}

// --- configurations ---
//                       subs M, N, wgmma N, stages, promote, A in registers, cluster, pieces
using Wide32 = Shape<1, 2, 128, 4, 1, 2, 1, 2>;
using Wide64 = Shape<1, 2, 128, 4, 2, 1, 1, 2>;
using Wide32Shared = Shape<1, 2, 128, 4, 1, 0, 1, 2>;
using Tall32 = Shape<2, 1, 128, 4, 1, 2, 1, 2>;
using Mid128 = Shape<1, 1, 192, 5, 4, 0, 1, 2>;
using Square128 = Shape<1, 1, 128, 6, 4, 0, 1, 2>;
using Wide32Pair = Shape<1, 2, 128, 4, 1, 2, 2, 2>;
using Wide64Pair = Shape<1, 2, 128, 4, 2, 1, 2, 2>;
using Mid128Pair = Shape<1, 1, 192, 5, 4, 0, 2, 2>;
using One = Shape<1, 1, 256, 4, 0, 0, 1, 1>;
using OnePair = Shape<1, 1, 256, 4, 0, 0, 2, 1>;
template <class F> static void for_three_products(F f) {
    f(Square128(), "128x128 A shared  /128");
    f(Mid128(), "128x192 A shared  /128");
    f(Mid128Pair(), "128x192 A shared  /128 x2");
    f(Wide32Shared(), "128x256 A shared  /32");
    f(Wide32(), "128x256 A regs    /32");
    f(Wide32Pair(), "128x256 A regs    /32 x2");
    f(Wide64(), "128x256 A hi regs /64");
    f(Wide64Pair(), "128x256 A hi regs /64 x2");
    f(Tall32(), "256x128 A regs    /32");
}
template <class F> static void for_one_product(F f) {
    f(One(), "128x256 one product");
    f(OnePair(), "128x256 one product x2");
}

// --- data ---
enum Kind { kIntegers, kUniform, kNormal, kScaledRows, kBalancedK, kOutliers, kExtremes, kNonFinite };
static const char* kind_names[] = {"integers", "uniform", "normal", "rows 2^+-40", "k 2^+-40 against", "outliers", "extremes", "Inf and NaN"};

__device__ uint32_t hash(uint64_t v) {
    v += 0x9e3779b97f4a7c15ull;
    v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
    v = (v ^ (v >> 27)) * 0x94d049bb133111ebull;
    return uint32_t((v ^ (v >> 31)) >> 16);
}
__device__ float uniform(uint64_t v) { return float(hash(v) >> 8) * 0x1p-24f; }

__global__ void fill(float* x, int64_t rows, int k, Kind kind, bool weight, uint64_t seed) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * k; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / k;
        const int column = int(i % k);
        const float u = uniform(i * 2 + seed), u2 = uniform(i * 2 + 1 + seed);
        const float normal = sqrtf(-2.0f * logf(u + 0x1p-25f)) * cospif(2.0f * u2);
        float v = normal;
        if (kind == kIntegers) v = float(int(u * 17.0f) - 8);
        if (kind == kUniform) v = weight ? (2.0f * u - 1.0f) * rsqrtf(float(k)) : u;
        if (kind == kScaledRows) v = ldexpf(normal, int(row % 81) - 40);
        if (kind == kBalancedK) v = ldexpf(normal, (weight ? -1 : 1) * (column % 81 - 40));
        if (kind == kOutliers && column == int(hash(row + seed) % k)) v = row % 3 == 0 ? 1e6f : row % 3 == 1 ? 1e30f : v;
        if (kind == kExtremes) {
            if (row % 7 == 0) v = 0;
            if (row % 7 == 1) v = ldexpf(normal, -140);                    // denormals
            if (row % 7 == 2 && !weight) v = (u2 < 0.5f ? -1 : 1) * (0.5f + 0.5f * u) * 3.402823e38f;
            if (row % 7 == 3) v = ldexpf(normal, -126);
            if (row % 7 == 4) v = ldexpf(normal, 100);
            if (row % 7 == 5 && weight) v = ldexpf(normal, -100);
        }
        if (kind == kNonFinite) {
            if (row % 11 == 3 && column == int(row) % k) v = INFINITY;
            if (row % 11 == 5 && column == int(row) % k) v = NAN;
            if (row % 11 == 7 && column == int(row) % k) v = -INFINITY;
        }
        x[i] = v;
    }
}
static void make(float* x, int64_t rows, int k, Kind kind, bool weight, uint64_t seed) {
    fill<<<1024, 256>>>(x, rows, k, kind, weight, seed * 0x1234567891ull + (weight ? 0x777777777ull : 0));
    CHECK(cudaGetLastError());
}

// A warp a value: sums of a*b and |a*b| in float64, of every stride-th row.
__global__ void reference(const float* a, const float* b, double* sums, double* sizes, int rows, int stride, int n, int k) {
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (i >= int64_t(rows) * n) return;
    const float *ra = a + i / n * stride * k, *rb = b + i % n * k;
    double sum = 0, size = 0;
    for (int j = threadIdx.x % 32; j < k; j += 32) {
        const double product = double(ra[j]) * double(rb[j]);
        sum += product;
        size += fabs(product);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
        size += __shfl_xor_sync(~0u, size, offset);
    }
    if (threadIdx.x % 32 == 0) sums[i] = sum, sizes[i] = size;
}
__global__ void count_different(const uint32_t* a, const uint32_t* b, int64_t n, unsigned* count) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        if (a[i] != b[i]) atomicAdd(count, 1);
    }
}
// What cuBLAS needs for the same three products: [lo hi hi] and [hi lo hi] over a tripled K.
__global__ void triple(const __half* pieces, __half* out, int64_t rows, int k, bool weight) {
    const int padded = padded_k(k);
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * k; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / k;
        const int column = int(i % k);
        const __half* line = pieces + row * padded * 2 + column / 32 * 64 + column % 32;
        __half* to = out + row * 3 * k + column;
        to[0] = line[weight ? 0 : 32];
        to[k] = line[weight ? 32 : 0];
        to[2 * int64_t(k)] = line[0];
    }
}

template <class T> struct Buffer {
    T* p = nullptr;
    int64_t n;
    explicit Buffer(int64_t count) : n(count) { CHECK(cudaMalloc(&p, std::max<int64_t>(count, 1) * sizeof(T))); }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(p); }
    std::vector<T> host() const {
        std::vector<T> h(n);
        CHECK(cudaMemcpy(h.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return h;
    }
};

// --- cuBLAS and NVML, found at run time ---
struct Cublas {
    void* handle = nullptr;
    int (*sgemm)(void*, int, int, int, int, int, const float*, const float*, int, const float*, int, const float*, float*, int) = nullptr;
    int (*gemm_ex)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*, void*, int, int, int, int) = nullptr;

    static void* open(const std::vector<std::string>& patterns) {
        for (const std::string& pattern : patterns) {
            glob_t found;
            if (pattern[0] != '/') {
                if (void* library = dlopen(pattern.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
            } else if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
                for (size_t i = 0; i < found.gl_pathc; ++i) {
                    if (void* library = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_GLOBAL)) return library;
                }
                globfree(&found);
            }
        }
        return nullptr;
    }
    Cublas() {
        std::vector<std::string> paths[2];
        const char* names[2] = {"libcublasLt.so.13", "libcublas.so.13"};
        for (int i = 0; i < 2; ++i) {
            paths[i] = {names[i], std::string("/usr/local/cuda*/lib64/") + names[i], std::string("/usr/local/cuda*/targets/*/lib/") + names[i],
                        std::string("/opt/torch/.venv/lib/python3*/site-packages/nvidia/*/lib/") + names[i],
                        std::string("/opt/*/lib/python3*/site-packages/nvidia/*/lib/") + names[i],
                        std::string("/usr/lib/x86_64-linux-gnu/") + names[i], std::string("/usr/local/lib/python3*/*-packages/nvidia/*/lib/") + names[i]};
        }
        open(paths[0]);
        void* library = open(paths[1]);
        if (library == nullptr) {
            printf("cuBLAS not found: its rows are left out\n");
            return;
        }
        const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
        sgemm = reinterpret_cast<decltype(sgemm)>(dlsym(library, "cublasSgemm_v2"));
        gemm_ex = reinterpret_cast<decltype(gemm_ex)>(dlsym(library, "cublasGemmEx"));
        if (create == nullptr || create(&handle) != 0) handle = nullptr, printf("cublasCreate failed\n");
    }
    // C (m, n) row-major = A (m, k) B (n, k)^T
    void single(const float* a, const float* b, float* c, int m, int n, int k) const {
        const float one = 1, zero = 0;
        const int status = sgemm(handle, 1, 0, n, m, k, &one, b, k, a, k, &zero, c, n);
        if (status) printf("cublasSgemm: %d\n", status);
    }
    void half(const __half* a, const __half* b, float* c, int m, int n, int k) const {
        const float one = 1, zero = 0;
        const int status = gemm_ex(handle, 1, 0, n, m, k, &one, b, 2, k, a, 2, k, &zero, c, 0, n, 68, -1);
        if (status) printf("cublasGemmEx: %d\n", status);
    }
};
struct Nvml {
    void* device = nullptr;
    int (*clock)(void*, int, unsigned*) = nullptr;
    int (*power)(void*, unsigned*) = nullptr;
    Nvml() {
        void* library = Cublas::open({"libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"});
        if (library == nullptr) return;
        const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
        const auto get = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
        clock = reinterpret_cast<decltype(clock)>(dlsym(library, "nvmlDeviceGetClockInfo"));
        power = reinterpret_cast<decltype(power)>(dlsym(library, "nvmlDeviceGetPowerUsage"));
        if (init == nullptr || init() != 0 || get == nullptr || get(0, &device) != 0) device = nullptr;
    }
};
static Cublas* cublas;
static Nvml* nvml;
static int multiprocessors;

// --- one product's buffers ---
struct Operands {
    int m, n, k;
    Buffer<float> a, b, unscale_a, unscale_b;
    Buffer<__half> pieces_a, pieces_b;
    Operands(int m_, int n_, int k_)
        : m(m_), n(n_), k(k_), a(int64_t(m) * k), b(int64_t(n) * k), unscale_a(m), unscale_b(n), pieces_a(int64_t(m) * padded_k(k) * 2),
          pieces_b(int64_t(n) * padded_k(k) * 2) {}
    template <int kPieces> void split_a() const { CHECK(launch_split<kPieces>(a.p, pieces_a.p, unscale_a.p, m, k, nullptr)); }
    template <int kPieces> void split_b() const { CHECK(launch_split<kPieces>(b.p, pieces_b.p, unscale_b.p, n, k, nullptr)); }
    Unscale unscale() const { return {unscale_a.p, unscale_b.p}; }
    template <class Config, class Epilogue> void run(const Epilogue& epilogue) const {
        CHECK((launch_gemm<Config, Epilogue>(pieces_a.p, pieces_b.p, m, n, k, epilogue, multiprocessors, nullptr)));
    }
    template <class Config> void store(float* c) const {
        if (n % 2 == 0) run<Config>(StoreEpilogue<2>{unscale(), nullptr, c});
        else run<Config>(StoreEpilogue<1>{unscale(), nullptr, c});
    }
    template <class Config> void moments(const float* bias, float* h, float2* partials) const {
        if (n % 2 == 0) run<Config>(MomentsEpilogue<2>{unscale(), bias, h, partials});
        else run<Config>(MomentsEpilogue<1>{unscale(), bias, h, partials});
    }
};

struct Truth {
    int rows, stride, n;
    std::vector<double> sums, sizes;
    Truth(const Operands& o, int samples) : rows(std::min(samples, o.m)), stride(std::max(1, (o.m / rows - 1) | 1)), n(o.n) {  // odd: all rows of a tile are met
        if (rows == o.m) stride = 1;
        Buffer<double> s(int64_t(rows) * n), z(int64_t(rows) * n);
        const int64_t threads = int64_t(rows) * n * 32;
        reference<<<unsigned((threads + 255) / 256), 256>>>(o.a.p, o.b.p, s.p, z.p, rows, stride, n, o.k);
        CHECK(cudaDeviceSynchronize());
        sums = s.host(), sizes = z.host();
    }
    std::vector<float> sampled(const float* c) const {
        std::vector<float> h(int64_t(rows) * n);
        CHECK(cudaMemcpy2D(h.data(), n * 4, c, int64_t(stride) * n * 4, n * 4, rows, cudaMemcpyDeviceToHost));
        return h;
    }
};

// c: the largest error in units of 2^-24 * sum |a||b|, which is what float32 guarantees a multiple of.
struct Errors {
    double max = 0, rms = 0, c = 0;
    int64_t bad = 0, inf_as_nan = 0;
};
static Errors compare(const Truth& truth, const std::vector<float>& got, double limit, bool print) {
    Errors e;
    int64_t finite = 0;
    const int tiles_m = (truth.rows + 63) / 64, tiles_n = (truth.n + 63) / 64;
    std::vector<int> map(int64_t(tiles_m) * tiles_n);
    int shown = 0;
    for (int64_t i = 0; i < int64_t(got.size()); ++i) {
        const double want = truth.sums[i], size = truth.sizes[i];
        const float as_float = float(want);
        bool bad = false;
        double c = 0;
        if (std::isnan(as_float)) {
            bad = !std::isnan(got[i]);
        } else if (std::isinf(as_float)) {
            if (std::isnan(got[i]) && std::isinf(size)) ++e.inf_as_nan;
            else bad = got[i] != as_float;
        } else {
            const double error = std::fabs(double(got[i]) - want);
            c = error / (0x1p-24 * size + 0x1p-149);
            bad = !(c <= limit);
            if (!bad || std::isfinite(error)) {
                e.max = std::max(e.max, error);
                e.rms += error * error;
                e.c = std::max(e.c, c);
                ++finite;
            }
        }
        if (bad) {
            const int row = int(i / truth.n), column = int(i % truth.n);
            ++e.bad;
            ++map[int64_t(row / 64) * tiles_n + column / 64];
            if (print && shown++ < 6) printf("      [%d, %d]: %.9g, want %.9g (c %.3g)\n", row * truth.stride, column, got[i], want, c);
        }
    }
    e.rms = std::sqrt(e.rms / std::max<int64_t>(finite, 1));
    if (print && e.bad) {
        printf("      %lld of %lld bad; by 64x64 (. none, + some, # all):\n", (long long)e.bad, (long long)got.size());
        for (int r = 0; r < std::min(tiles_m, 16); ++r) {
            printf("      ");
            for (int t = 0; t < std::min(tiles_n, 64); ++t) {
                const int count = map[int64_t(r) * tiles_n + t];
                const int whole = std::min(64, truth.rows - r * 64) * std::min(64, truth.n - t * 64);
                printf("%c", count == 0 ? '.' : count >= whole * 9 / 10 ? '#' : '+');
            }
            printf("\n");
        }
    }
    return e;
}

static int failures = 0;

template <class Config> static void test_config(const char* name, const Operands& o, const Truth& truth, Kind kind, double limit, const Errors* single) {
    Buffer<float> c(int64_t(o.m) * o.n), again(int64_t(o.m) * o.n);
    Buffer<unsigned> different(1);
    begin("%s, %s, %d x %d x %d", name, kind_names[kind], o.m, o.n, o.k);
    CHECK(cudaMemset(c.p, 0xff, c.n * 4));
    CHECK(cudaMemset(different.p, 0, 4));
    o.split_a<Config::kPieces>();
    o.split_b<Config::kPieces>();
    CHECK(cudaDeviceSynchronize());
    o.store<Config>(c.p);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 3; ++i) {
        CHECK(cudaMemset(again.p, 0xff, again.n * 4));
        o.store<Config>(again.p);
        count_different<<<256, 256>>>(reinterpret_cast<uint32_t*>(c.p), reinterpret_cast<uint32_t*>(again.p), c.n, different.p);
    }
    CHECK(cudaDeviceSynchronize());
    const unsigned changed = different.host()[0];
    const std::vector<float> got = truth.sampled(c.p);
    const Errors e = compare(truth, got, limit, false);
    const bool ok = e.bad == 0 && changed == 0;
    failures += !ok;
    printf("  %-4s %-26s %5d %5d %5d  %-16s max %.2e rms %.2e c %6.2f", ok ? "ok" : "BAD", name, o.m, o.n, o.k, kind_names[kind], e.max, e.rms, e.c);
    if (single) printf("  (SGEMM %.2e %.2e %6.2f)", single->max, single->rms, single->c);
    if (e.inf_as_nan) printf("  %lld Inf came as NaN", (long long)e.inf_as_nan);
    if (changed) printf("  %u values differ from run to run", changed);
    printf("\n");
    if (e.bad) compare(truth, got, limit, true);
    fflush(stdout);
}

static Errors sgemm_errors(const Operands& o, const Truth& truth) {
    Buffer<float> c(int64_t(o.m) * o.n);
    cublas->single(o.a.p, o.b.p, c.p, o.m, o.n, o.k);
    CHECK(cudaDeviceSynchronize());
    return compare(truth, truth.sampled(c.p), INFINITY, false);
}

template <bool kAllConfigs> static void test_size(int m, int n, int k, Kind kind, double limit) {
    begin("data %d x %d x %d", m, n, k);
    Operands o(m, n, k);
    make(o.a.p, m, k, kind, false, 1);
    make(o.b.p, n, k, kind, true, 2);
    const Truth truth(o, m);
    Errors single;
    if (cublas->handle) single = sgemm_errors(o, truth);
    const auto test = [&](auto config, const char* name) {
        test_config<decltype(config)>(name, o, truth, kind, limit, cublas->handle ? &single : nullptr);
    };
    if constexpr (kAllConfigs) {
        for_three_products(test);
        // fp16's 11 bits: 2^-11 a product at worst; integers are exact
        const auto one = [&](auto config, const char* name) {
            test_config<decltype(config)>(name, o, truth, kind, kind == kIntegers ? limit : 0x1p14, nullptr);
        };
        for_one_product(one);
    } else {
        test(Wide32(), "128x256 A regs    /32");
        test(Wide32Pair(), "128x256 A regs    /32 x2");
    }
}

// --- epilogues ---
template <class Config> static void test_group_norm(const char* name, int m, int n, int k, double limit) {
    begin("group norm %s, %d x %d x %d", name, m, n, k);
    Operands o(m, n, k);
    make(o.a.p, m, k, kUniform, false, 1);
    make(o.b.p, n, k, kUniform, true, 2);
    const Truth truth(o, 64);
    Buffer<float> vectors(4 * n), out(int64_t(m) * n);
    make(vectors.p, 4, n, kNormal, false, 3);
    const std::vector<float> v = vectors.host();
    const float eps = 1e-5f;
    o.split_a<Config::kPieces>();
    o.split_b<Config::kPieces>();
    CHECK(cudaMemset(out.p, 0xff, out.n * 4));
    o.run<Config>(SwishGroupNormEpilogue{o.unscale(), vectors.p, vectors.p + n, vectors.p + 2 * n, vectors.p + 3 * n, eps, out.p});
    CHECK(cudaDeviceSynchronize());
    const std::vector<float> got = truth.sampled(out.p);
    double worst = 0, rms = 0;
    int64_t bad = 0;
    for (int r = 0; r < truth.rows; ++r) {
        for (int g = 0; g < n; g += 64) {
            double h[64], mean = 0, m2 = 0;
            for (int i = 0; i < 64; ++i) {
                h[i] = truth.sums[int64_t(r) * n + g + i] + v[g + i];
                h[i] = h[i] / (1 + std::exp(-h[i])) + v[n + g + i];
                mean += h[i] / 64;
            }
            for (int i = 0; i < 64; ++i) m2 += (h[i] - mean) * (h[i] - mean);
            for (int i = 0; i < 64; ++i) {
                const double want = (h[i] - mean) / std::sqrt(m2 / 64 + double(eps)) * v[2 * n + g + i] + v[3 * n + g + i];
                const double error = std::fabs(got[int64_t(r) * n + g + i] - want);
                if (!(error <= limit) && bad++ < 4) printf("      [%d, %d]: %.9g, want %.9g\n", r * truth.stride, g + i, got[int64_t(r) * n + g + i], want);
                worst = std::max(worst, error);
                rms += error * error;
            }
        }
    }
    failures += bad > 0;
    printf("  %-4s %-26s %5d %5d %5d  swish+group norm max %.2e rms %.2e\n", bad ? "BAD" : "ok", name, m, n, k, worst, std::sqrt(rms / (double(truth.rows) * n)));
    fflush(stdout);
}

template <class Config> static void test_moments(const char* name, int m, int n, int k) {
    begin("moments %s, %d x %d x %d", name, m, n, k);
    Operands o(m, n, k);
    make(o.a.p, m, k, kUniform, false, 1);
    make(o.b.p, n, k, kUniform, true, 2);
    const Truth truth(o, 64);
    const int slabs = (n + 63) / 64;
    Buffer<float> bias(n), h(int64_t(m) * n);
    Buffer<float2> partials(int64_t(m) * slabs);
    make(bias.p, 1, n, kNormal, false, 3);
    const std::vector<float> b = bias.host();
    o.split_a<Config::kPieces>();
    o.split_b<Config::kPieces>();
    CHECK(cudaMemset(partials.p, 0xff, partials.n * 8));
    o.moments<Config>(bias.p, h.p, partials.p);
    CHECK(cudaDeviceSynchronize());
    const std::vector<float> got = truth.sampled(h.p);
    const std::vector<float2> parts = partials.host();
    double worst_h = 0, worst_mean = 0, worst_m2 = 0;
    for (int r = 0; r < truth.rows; ++r) {
        double mean = 0, m2 = 0, merged_mean = 0, merged_m2 = 0, count = 0;
        for (int i = 0; i < n; ++i) {
            const double want = truth.sums[int64_t(r) * n + i] + b[i];
            worst_h = std::max(worst_h, std::fabs(got[int64_t(r) * n + i] - want));
            mean += want / n;
        }
        for (int i = 0; i < n; ++i) m2 += std::pow(truth.sums[int64_t(r) * n + i] + b[i] - mean, 2);
        for (int s = 0; s < slabs; ++s) {
            const float2 p = parts[int64_t(r) * truth.stride * slabs + s];
            const double more = std::min(64, n - s * 64), delta = p.x - merged_mean;
            merged_mean += delta * more / (count + more);
            merged_m2 += p.y + delta * delta * count * more / (count + more);
            count += more;
        }
        worst_mean = std::max(worst_mean, std::fabs(merged_mean - mean));
        worst_m2 = std::max(worst_m2, std::fabs(merged_m2 / m2 - 1));
        if (std::isnan(merged_m2)) worst_m2 = INFINITY;
    }
    const bool ok = worst_h < 1e-4 && worst_mean < 1e-5 && worst_m2 < 1e-5;
    failures += !ok;
    printf("  %-4s %-26s %5d %5d %5d  h max %.2e, mean %.2e, M2 relative %.2e\n", ok ? "ok" : "BAD", name, m, n, k, worst_h, worst_mean, worst_m2);
    fflush(stdout);
}

// --- timing ---
struct Timing {
    double ms, sustained_ms;
    unsigned mhz, watts;
};
template <class F> static Timing measure(F f) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    const auto elapsed = [&](int count) {
        float ms;
        CHECK(cudaEventRecord(start));
        for (int i = 0; i < count; ++i) f();
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        return double(ms) / count;
    };
    for (int i = 0; i < 3; ++i) elapsed(1);
    std::vector<double> times;
    for (int i = 0; i < 11; ++i) times.push_back(elapsed(1));
    std::sort(times.begin(), times.end());
    Timing t = {times[5], 0, 0, 0};
    const int count = std::max(3, int(150 / t.ms));  // 0.15 s to heat up, 0.15 s measured with a look at the clock
    for (int i = 0; i < count; ++i) f();
    CHECK(cudaEventRecord(start));
    for (int i = 0; i < count; ++i) f();
    CHECK(cudaEventRecord(stop));
    usleep(220000);
    if (nvml->device) {
        nvml->clock(nvml->device, 1, &t.mhz);
        nvml->power(nvml->device, &t.watts);
        t.watts /= 1000;
    }
    float ms;
    CHECK(cudaEventSynchronize(stop));
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    t.sustained_ms = ms / count;
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    return t;
}

static void print_row(const char* name, const Timing& t, double flops, int products, const Errors* e) {
    printf("  %-28s %8.4f ms %7.1f | sustained %8.4f ms %7.1f  %4u MHz %4u W", name, t.ms, flops / t.ms * 1e-9, t.sustained_ms,
           flops / t.sustained_ms * 1e-9, t.mhz, t.watts);
    if (products && t.mhz) {
        printf("  tensor %5.1f%%", 100 * products * flops / (t.sustained_ms * 1e-3) / (double(multiprocessors) * 4096 * t.mhz * 1e6));
    } else {
        printf("               ");
    }
    if (e) printf("  max %.2e rms %.2e c %.2f%s", e->max, e->rms, e->c, e->bad ? " BAD" : "");
    printf("\n");
    fflush(stdout);
}

static void benchmark(int m, int n, int k, Kind kind) {
    begin("benchmark data %d x %d x %d", m, n, k);
    const double flops = 2.0 * m * n * k;
    printf("\n%d x %d x %d (M x N x K), %s; TFLOP/s of float32-equivalent work after the times\n", m, n, k, kind_names[kind]);
    Operands o(m, n, k);
    make(o.a.p, m, k, kind, false, 1);
    make(o.b.p, n, k, kind, true, 2);
    const Truth truth(o, 64);
    Buffer<float> c(int64_t(m) * n);
    const auto print_split = [&](const char* name, const Timing& t, int64_t rows, int pieces) {
        const double bytes = double(rows) * k * 4 + double(rows) * padded_k(k) * 2 * pieces;
        printf("  %-28s %8.4f ms %7.2f TB/s | sustained %8.4f ms %7.2f TB/s\n", name, t.ms, bytes / t.ms * 1e-9, t.sustained_ms, bytes / t.sustained_ms * 1e-9);
        fflush(stdout);
    };
    begin("splits %d x %d x %d", m, n, k);
    print_split("split A, one piece", measure([&] { o.split_a<1>(); }), m, 1);
    print_split("split B, one piece", measure([&] { o.split_b<1>(); }), n, 1);
    const auto bench = [&](auto config, const char* name) {
        using Config = decltype(config);
        begin("benchmark %s, %d x %d x %d", name, m, n, k);
        CHECK(cudaMemset(c.p, 0xff, c.n * 4));
        const Timing t = measure([&] { o.store<Config>(c.p); });
        const Errors e = compare(truth, truth.sampled(c.p), Config::kPieces == 2 ? 10 : 0x1p14, false);
        failures += e.bad > 0;
        print_row(name, t, flops, Config::kPieces == 2 ? 3 : 1, &e);
    };
    for_one_product(bench);
    if (cublas->handle) {
        begin("cuBLAS fp16 %d x %d x %d", m, n, k);
        print_row("cuBLAS fp16, one product", measure([&] { cublas->half(o.pieces_a.p, o.pieces_b.p, c.p, m, n, padded_k(k)); }), flops, 1, nullptr);
    }
    begin("splits %d x %d x %d", m, n, k);
    print_split("split A, two pieces", measure([&] { o.split_a<2>(); }), m, 2);
    print_split("split B, two pieces", measure([&] { o.split_b<2>(); }), n, 2);
    for_three_products(bench);
    if (cublas->handle) {
        begin("cuBLAS %d x %d x %d", m, n, k);
        Buffer<__half> a3(int64_t(m) * k * 3), b3(int64_t(n) * k * 3);
        triple<<<1024, 256>>>(o.pieces_a.p, a3.p, m, k, false);
        triple<<<1024, 256>>>(o.pieces_b.p, b3.p, n, k, true);
        CHECK(cudaDeviceSynchronize());
        print_row("cuBLAS fp16 over 3K", measure([&] { cublas->half(a3.p, b3.p, c.p, m, n, 3 * k); }), flops, 3, nullptr);
        const Timing t = measure([&] { cublas->single(o.a.p, o.b.p, c.p, m, n, k); });
        const Errors e = compare(truth, truth.sampled(c.p), INFINITY, false);
        print_row("cuBLAS SGEMM", t, flops, 0, &e);
    }

    if (n % 64 == 0) {
        Buffer<float> vectors(4 * n);
        Buffer<float2> partials(int64_t(m) * (n / 64));
        make(vectors.p, 4, n, kNormal, false, 3);
        const SwishGroupNormEpilogue group_norm = {o.unscale(), vectors.p, vectors.p + n, vectors.p + 2 * n, vectors.p + 3 * n, 1e-5f, c.p};
        begin("epilogues %d x %d x %d", m, n, k);
        print_row("swish+gn  A regs /32", measure([&] { o.run<Wide32>(group_norm); }), flops, 3, nullptr);
        print_row("swish+gn  A regs /32 x2", measure([&] { o.run<Wide32Pair>(group_norm); }), flops, 3, nullptr);
        print_row("h+moments A regs /32", measure([&] { o.moments<Wide32>(vectors.p, c.p, partials.p); }), flops, 3, nullptr);
        print_row("h+moments A regs /32 x2", measure([&] { o.moments<Wide32Pair>(vectors.p, c.p, partials.p); }), flops, 3, nullptr);
        begin("chains %d x %d x %d", m, n, k);
        print_row("splits + swish+gn x2", measure([&] { o.split_a<2>(), o.split_b<2>(), o.run<Wide32Pair>(group_norm); }), flops, 0, nullptr);
        print_row("splits + h+moments x2", measure([&] { o.split_a<2>(), o.split_b<2>(), o.moments<Wide32Pair>(vectors.p, c.p, partials.p); }), flops, 0, nullptr);
        print_row("one: splits + swish+gn x2", measure([&] { o.split_a<1>(), o.split_b<1>(), o.run<OnePair>(group_norm); }), flops, 0, nullptr);
    }
}

int main(int count, char** arguments) {
    const std::string mode = count > 1 ? arguments[1] : "all";
    setvbuf(stdout, nullptr, _IOLBF, 0);
    start_watchdog();
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    multiprocessors = device.multiProcessorCount;
    cublas = new Cublas;
    nvml = new Nvml;
    printf("%s, %d multiprocessors; cuBLAS %s, NVML %s\n", device.name, multiprocessors, cublas->handle ? "found" : "missing", nvml->device ? "found" : "missing");

    if (mode == "profile") {
        begin("%s", "profile");
        Operands o(1024, 8192, 8192);
        Buffer<float> c(int64_t(o.m) * o.n);
        make(o.a.p, o.m, o.k, kUniform, false, 1);
        make(o.b.p, o.n, o.k, kUniform, true, 2);
        o.split_a<2>();
        o.split_b<2>();
        for_three_products([&](auto config, const char* name) {
            o.store<decltype(config)>(c.p);
            CHECK(cudaDeviceSynchronize());
            printf("  %s\n", name);
        });
        _exit(0);
    }
    if (mode != "bench") {
        printf("\nsmall and odd sizes (M N K)\n");
        test_size<true>(128, 256, 64, kIntegers, 0);
        test_size<true>(128, 256, 512, kIntegers, 0);
        test_size<true>(300, 520, 1000, kIntegers, 0);
        test_size<true>(300, 520, 1000, kNormal, 10);
        test_size<true>(2500, 3000, 777, kUniform, 10);
        for (const auto& s : {std::array<int, 3>{1, 1, 1}, {1, 7, 1}, {7, 1, 33}, {16, 4096, 64}, {64, 128, 65}, {129, 257, 97}, {257, 513, 4100}, {40, 70, 20000}, {9, 33, 40001}}) {
            test_size<false>(s[0], s[1], s[2], kNormal, 10);
        }
        printf("\nscales (the last two are what one scale a row cannot keep: look at c, they are not judged)\n");
        for (const Kind kind : {kScaledRows, kExtremes, kNonFinite}) test_size<false>(300, 520, 1000, kind, 10);
        for (const Kind kind : {kOutliers, kBalancedK}) test_size<false>(300, 520, 1000, kind, 1e30);
        printf("\nepilogues\n");
        test_group_norm<Wide32>("A regs /32", 200, 192, 300, 1e-4);
        test_group_norm<Wide32Pair>("A regs /32 x2", 1000, 4096, 1024, 1e-4);
        test_group_norm<OnePair>("one product x2", 1000, 4096, 1024, 3e-2);
        test_moments<Wide32>("A regs /32", 200, 201, 300);
        test_moments<Wide32Pair>("A regs /32 x2", 1000, 2050, 1024);
    }
    if (mode != "quick") {
        benchmark(1024, 8192, 8192, kUniform);
        benchmark(32768, 4096, 1024, kUniform);
    }
    printf("\n%s: %d\n", failures ? "FAILURES" : "done, failures", failures);
    fflush(stdout);
    _exit(failures ? 1 : 0);
}
