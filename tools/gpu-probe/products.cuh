// Whether the two kinds of matrix instructions give the same bits: `mma.sync` and `wgmma`, all
// widths, both roles of the operands, and both halves of 16 products of one step.
#pragma once
#include "probe.cuh"
#include <cmath>

// Sixteen products of each output are added: D = A (16 rows) x B (8 columns) + D.
template <class T>
__device__ inline void multiply_16_8_16(float *d, const uint32_t *a, const uint32_t *b) {
#define MMA(types)                                                                                 \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." types ".f32 {%0,%1,%2,%3}, "             \
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                          \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (std::is_same_v<T, __nv_bfloat16>) MMA("bf16.bf16");
    else MMA("f16.f16");
#undef MMA
}

// The same with eight products of each output.
template <class T>
__device__ inline void multiply_16_8_8(float *d, const uint32_t *a, const uint32_t *b) {
#define MMA(types)                                                                                 \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." types ".f32 {%0,%1,%2,%3}, "              \
                 "{%4,%5}, {%6}, {%0,%1,%2,%3};"                                                   \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]))
    if constexpr (std::is_same_v<T, __nv_bfloat16>) MMA("bf16.bf16");
    else MMA("f16.f16");
#undef MMA
}

template <class T> __device__ inline uint32_t load_pair(const T *rows, int row, int k, int depth) {
    return *(const uint32_t *)(rows + (size_t)row * depth + k);
}

// out[i][j] = sum over k of a[i][k] x b[j][k], in order. A warp makes 16 x 8 outputs.
// `Step` is 16, or 8: each step in two halves.
template <class T, int Step>
__global__ void multiply_by_mma(const T *a, const T *b, float *out, int depth, int columns) {
    int lane = threadIdx.x, row = blockIdx.x * 16 + lane / 4, column = blockIdx.y * 8;
    float d[4] = {};
    for (int k = 0; k < depth; k += 16) {
        int at = k + lane % 4 * 2;
        uint32_t x[4] = {load_pair(a, row, at, depth), load_pair(a, row + 8, at, depth),
                         load_pair(a, row, at + 8, depth), load_pair(a, row + 8, at + 8, depth)};
        uint32_t y[2] = {load_pair(b, column + lane / 4, at, depth),
                         load_pair(b, column + lane / 4, at + 8, depth)};
        if (Step == 16) {
            multiply_16_8_16<T>(d, x, y);
        } else {
            multiply_16_8_8<T>(d, x, y);
            multiply_16_8_8<T>(d, x + 2, y + 1);
        }
    }
    for (int i = 0; i < 4; i++)
        out[(size_t)(row + i / 2 * 8) * columns + column + lane % 4 * 2 + i % 2] = d[i];
}

template <class T>
__global__ void multiply_by_fma(const T *a, const T *b, float *out, int depth, int columns) {
    int row = blockIdx.x * 16 + threadIdx.x / 8, column = blockIdx.y * 8 + threadIdx.x % 8;
    float sum = 0;
    for (int k = 0; k < depth; k++)
        sum = fmaf((float)a[(size_t)row * depth + k], (float)b[(size_t)column * depth + k], sum);
    out[(size_t)row * columns + column] = sum;
}

// A tile of rows of 128 bytes with the swizzle of 128 bytes, at a multiple of 1024 bytes.
__device__ inline uint64_t describe_tile(const void *tile) {
    uint64_t address = shared_address(tile);
    return (address & 0x3ffff) >> 4 | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

__host__ __device__ inline int swizzle_128(int row, int byte) {
    return row * 128 + ((byte >> 4 ^ row & 7) << 4 | byte & 15);
}

#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)
#define OUT64(i) OUT16(i), OUT16(i + 16), OUT16(i + 32), OUT16(i + 48)
#define NAMES4 "%0,%1,%2,%3"
#define NAMES16 NAMES4 ",%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES32                                                                                    \
    NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64                                                                                    \
    NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"                     \
            ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES128                                                                                   \
    NAMES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"                     \
            ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"                     \
            ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"         \
            ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(width, types, names, from_a, from_b, outs)                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" width "k16.f32." types " {" names "}, "       \
                 "%" from_a ", %" from_b ", 1, 1, 1, 0, 0;"                                        \
                 : outs                                                                            \
                 : "l"(a), "l"(b))
#define WIDTHS(types)                                                                              \
    if constexpr (N == 8) WGMMA("8", types, NAMES4, "4", "5", OUT4(0));                            \
    else if constexpr (N == 32) WGMMA("32", types, NAMES16, "16", "17", OUT16(0));                 \
    else if constexpr (N == 64)                                                                    \
        WGMMA("64", types, NAMES32, "32", "33", OUT16(0) JOIN OUT16(16));                          \
    else if constexpr (N == 128) WGMMA("128", types, NAMES64, "64", "65", OUT64(0));               \
    else WGMMA("256", types, NAMES128, "128", "129", OUT64(0) JOIN OUT64(64))
#define JOIN ,

template <class T, int N>
__device__ inline void multiply_64_n_16(float *d, uint64_t a, uint64_t b) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        WIDTHS("bf16.bf16");
    } else {
        WIDTHS("f16.f16");
    }
}

// The same for eight columns, with the rows of A in registers instead of shared memory.
template <class T>
__device__ inline void multiply_64_8_16(float *d, const uint32_t *rows, uint64_t b) {
#define WGMMA_OF_REGISTERS(types)                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." types " {%0,%1,%2,%3}, "             \
                 "{%4,%5,%6,%7}, %8, 1, 1, 1, 0;"                                                  \
                 : OUT4(0)                                                                         \
                 : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(b))
    if constexpr (std::is_same_v<T, __nv_bfloat16>) WGMMA_OF_REGISTERS("bf16.bf16");
    else WGMMA_OF_REGISTERS("f16.f16");
#undef WGMMA_OF_REGISTERS
}

// 64 x N outputs by one warpgroup, K in order. `InRegisters` is for N = 8 alone.
template <class T, int N, bool InRegisters = false>
__global__ void multiply_by_wgmma(const T *a, const T *b, float *out, int depth, int columns) {
    extern __shared__ __align__(1024) char tiles[];
    char *rows = tiles, *others = tiles + 64 * 128;
    int first_row = blockIdx.x * 64, first_column = blockIdx.y * N;
    float d[N / 2] = {};
    for (int k = 0; k < depth; k += 64) {
        for (int i = threadIdx.x; i < (64 + N) * 8; i += 128) {
            int row = i / 8, chunk = i % 8;
            const T *from = row < 64 ? a + (size_t)(first_row + row) * depth
                                     : b + (size_t)(first_column + row - 64) * depth;
            char *to = row < 64 ? rows + swizzle_128(row, chunk * 16)
                                : others + swizzle_128(row - 64, chunk * 16);
            *(uint4 *)to = *(const uint4 *)(from + k + chunk * 8);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int step = 0; step < 4; step++) {
            // 32 bytes further along K, in units of 16 bytes.
            uint64_t b_step = describe_tile(others) + 2 * step;
            if constexpr (InRegisters) {
                int lane = threadIdx.x % 32, at = k + step * 16 + lane % 4 * 2;
                int row = first_row + threadIdx.x / 32 * 16 + lane / 4;
                uint32_t x[4] = {load_pair(a, row, at, depth), load_pair(a, row + 8, at, depth),
                                 load_pair(a, row, at + 8, depth),
                                 load_pair(a, row + 8, at + 8, depth)};
                multiply_64_8_16<T>(d, x, b_step);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            } else {
                multiply_64_n_16<T, N>(d, describe_tile(rows) + 2 * step, b_step);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads();
    }
    int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < N / 2; i++) {
        int column = first_column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        out[(size_t)(row + i / 2 % 2 * 8) * columns + column] = d[i];
    }
}

// Words that differ; NaN counts as a difference unless both have the same bits.
inline size_t count_differences(const std::vector<float> &a, const std::vector<float> &b) {
    size_t count = 0;
    for (size_t i = 0; i < a.size(); i++) count += memcmp(&a[i], &b[i], 4) != 0;
    return count;
}

enum Kind { Normal, Wide, Cancelling, Tiny, Kinds };
static const char *kind_names[] = {"normal", "exponents spread over 2^-12 to 2^12",
                                   "sums that cancel", "subnormal inputs and products"};

template <class T> std::vector<T> draw_matrix(Random &random, int rows, int depth, Kind kind) {
    bool is_half = std::is_same_v<T, __half>;
    std::vector<T> values((size_t)rows * depth);
    for (size_t i = 0; i < values.size(); i++) {
        float value = random.draw_normal();
        if (kind == Wide) value = ldexpf(value, (int)(random.draw() % 25) - 12);
        if (kind == Tiny) value = ldexpf(value, (is_half ? -14 : -70) - (int)(random.draw() % 10));
        values[i] = T(value);
        // Each pair of neighbours in A nearly cancels, as B's pairs are equal.
        if (kind == Cancelling && i % 2) values[i] = T(-(float)values[i - 1] * 1.01f);
    }
    return values;
}

template <class T, int N, bool InRegisters = false>
std::vector<float> run_wgmma(const T *a, const T *b, float *out, int rows, int columns, int depth) {
    size_t count = (size_t)rows * columns;
    CHECK(cudaMemset(out, 0xff, count * 4));
    int shared = (64 + N) * 128;
    auto kernel = multiply_by_wgmma<T, N, InRegisters>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    kernel<<<dim3(rows / 64, columns / N), 128, shared>>>(a, b, out, depth, columns);
    CHECK(cudaDeviceSynchronize());
    return copy_to_host(out, count);
}

// How many outputs have other bits than those of `mma.sync` with m16n8k16.
struct Differences {
    size_t wgmma_256, wgmma_narrower, in_registers, swapped, in_halves, fma, outputs;
};

// The largest error beside the sum of absolute products, which no order of sums changes.
template <class T> double find_worst_error(const std::vector<float> &got, const std::vector<T> &a,
                                           const std::vector<T> &b, int columns, int depth) {
    double worst = 0;
    for (size_t i = 0; i < a.size() / depth; i += 17) {
        for (int j = 0; j < columns; j += 3) {
            double sum = 0, size = 1e-300;
            for (int k = 0; k < depth; k++) {
                double product = (double)(float)a[i * depth + k] * (float)b[(size_t)j * depth + k];
                sum += product;
                size += fabs(product);
            }
            worst = fmax(worst, fabs(got[i * columns + j] - sum) / size);
        }
    }
    return worst;
}

template <class T>
void compare_products(const char *type, Kind kind, int depth, Differences &differences) {
    constexpr int rows = 256, columns = 256;
    constexpr size_t count = rows * columns;
    Random random{(uint64_t)kind * 100 + depth};
    auto a = draw_matrix<T>(random, rows, depth, kind);
    auto b = draw_matrix<T>(random, columns, depth, kind == Cancelling ? Normal : kind);
    if (kind == Cancelling)
        for (size_t i = 1; i < b.size(); i += 2) b[i] = b[i - 1];
    T *da = copy_to_device(a), *db = copy_to_device(b);
    float *out;
    CHECK(cudaMalloc(&out, count * 4));
    auto run = [&](auto kernel, int threads, const T *x, const T *y) {
        CHECK(cudaMemset(out, 0xff, count * 4));
        kernel<<<dim3(rows / 16, columns / 8), threads>>>(x, y, out, depth, columns);
        CHECK(cudaDeviceSynchronize());
        return copy_to_host(out, count);
    };
    auto by_mma = run(multiply_by_mma<T, 16>, 32, da, db);
    auto by_fma = run(multiply_by_fma<T>, 128, da, db);
    auto swapped = run(multiply_by_mma<T, 16>, 32, db, da);
    std::vector<float> turned(count);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) turned[i * columns + j] = swapped[j * rows + i];
    auto differs = [&](const std::vector<float> &other) {
        return count_differences(by_mma, other);
    };
    differences.outputs += count;
    differences.wgmma_256 += differs(run_wgmma<T, 256>(da, db, out, rows, columns, depth));
    differences.wgmma_narrower += differs(run_wgmma<T, 8>(da, db, out, rows, columns, depth)) +
                                  differs(run_wgmma<T, 32>(da, db, out, rows, columns, depth)) +
                                  differs(run_wgmma<T, 64>(da, db, out, rows, columns, depth)) +
                                  differs(run_wgmma<T, 128>(da, db, out, rows, columns, depth));
    differences.in_registers += differs(run_wgmma<T, 8, true>(da, db, out, rows, columns, depth));
    differences.swapped += differs(turned);
    differences.in_halves += differs(run(multiply_by_mma<T, 8>, 32, da, db));
    differences.fma += differs(by_fma);
    if (depth == 4096) {
        printf("| %s, %s, K = %d: error of mma.sync, of fma | %.1e, %.1e |\n", type,
               kind_names[kind], depth, find_worst_error(by_mma, a, b, columns, depth),
               find_worst_error(by_fma, a, b, columns, depth));
    }
    cudaFree(da), cudaFree(db), cudaFree(out);
}

template <class T> void probe_products_of(const char *type) {
    Differences d = {};
    for (int kind = 0; kind < Kinds; kind++)
        for (int depth : {64, 4096, 14336}) compare_products<T>(type, (Kind)kind, depth, d);
    printf("| %s: outputs compared with mma.sync m16n8k16 | %zu |\n", type, d.outputs);
    printf("| %s: other bits in wgmma m64n256k16 | %zu |\n", type, d.wgmma_256);
    printf("| %s: in wgmma of 8, 32, 64 and 128 columns | %zu |\n", type, d.wgmma_narrower);
    printf("| %s: in wgmma with A in registers | %zu |\n", type, d.in_registers);
    printf("| %s: in mma.sync with A and B swapped | %zu |\n", type, d.swapped);
    printf("| %s: in mma.sync m16n8k8, twice | %zu |\n", type, d.in_halves);
    printf("| %s: in a sum by fma | %zu |\n", type, d.fma);
}

inline void probe_products() {
    probe_products_of<__nv_bfloat16>("bf16");
    probe_products_of<__half>("f16");
}
