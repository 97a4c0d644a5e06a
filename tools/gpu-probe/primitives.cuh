// Inputs and outputs of single instructions, bit by bit, so that an emulator can be held to them.
// One line for each case: the name, then the inputs and the output in hexadecimal bytes.
#pragma once
#include "products.cuh"

inline void print_bytes(FILE *to, const void *bytes, size_t count) {
    fputc(' ', to);
    for (size_t i = 0; i < count; i++) fprintf(to, "%02x", ((const uint8_t *)bytes)[i]);
}

template <class T> void print_values(FILE *to, const std::vector<T> &values) {
    print_bytes(to, values.data(), values.size() * sizeof(T));
}

// Registers of a warp: A four words a lane, B two, C and D four.
template <class T>
__global__ void run_mma(const uint32_t *a, const uint32_t *b, const float *c, float *d) {
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c[threadIdx.x * 4 + i];
    multiply_16_8_16<T>(sum, a + threadIdx.x * 4, b + threadIdx.x * 2);
    for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = sum[i];
}

template <class T> void print_mma(FILE *to, const char *name, Kind kind, uint64_t seed) {
    Random random{seed};
    auto a = draw_matrix<T>(random, 32, 8, kind), b = draw_matrix<T>(random, 32, 4, kind);
    std::vector<float> c(128);
    for (auto &value : c) {
        value = random.draw_normal();
        if (kind == Wide) value = ldexpf(value, (int)(random.draw() % 49) - 24);
        if (kind == Tiny) value = ldexpf(value, -130);
    }
    float *d;
    CHECK(cudaMalloc(&d, 512));
    run_mma<T><<<1, 32>>>((uint32_t *)copy_to_device(a), (uint32_t *)copy_to_device(b),
                          copy_to_device(c), d);
    fprintf(to, "%s", name);
    print_values(to, a), print_values(to, b), print_values(to, c);
    print_values(to, copy_to_host(d, 128));
    fputc('\n', to);
}

// Shared memory of 512 bytes; lane i gives the address of row i (four matrices of 8 rows).
template <bool Transposed>
__global__ void run_ldmatrix(const uint4 *shared_image, const uint32_t *rows, uint32_t *out) {
    __shared__ uint4 image[32];
    image[threadIdx.x] = shared_image[threadIdx.x];
    __syncwarp();
    uint32_t r[4], at = shared_address(image) + rows[threadIdx.x] * 16;
    if (Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
    }
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}

template <bool Transposed> void print_ldmatrix(FILE *to, const char *name) {
    std::vector<uint16_t> image(256);
    std::vector<uint32_t> rows(32);
    for (int i = 0; i < 256; i++) image[i] = i;
    for (int i = 0; i < 32; i++) rows[i] = (i * 13 + 5) % 32;
    uint32_t *out;
    CHECK(cudaMalloc(&out, 512));
    run_ldmatrix<Transposed><<<1, 32>>>((uint4 *)copy_to_device(image), copy_to_device(rows), out);
    fprintf(to, "%s", name);
    print_values(to, image), print_values(to, rows), print_values(to, copy_to_host(out, 128));
    fputc('\n', to);
}

// Two images of shared memory as the instruction reads them, 64 rows of A and 8 of B.
__global__ void run_wgmma(const uint4 *image_a, const uint4 *image_b, float *out) {
    __shared__ __align__(1024) uint4 a[512], b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = image_a[i];
    if (threadIdx.x < 64) b[threadIdx.x] = image_b[threadIdx.x];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int step = 0; step < 4; step++)
        multiply_64_n_16<__nv_bfloat16, 8>(d, describe_tile(a) + 2 * step,
                                           describe_tile(b) + 2 * step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}

inline void print_wgmma(FILE *to) {
    Random random{21};
    auto a = draw_matrix<__nv_bfloat16>(random, 64, 64, Normal);
    auto b = draw_matrix<__nv_bfloat16>(random, 8, 64, Normal);
    float *out;
    CHECK(cudaMalloc(&out, 2048));
    run_wgmma<<<1, 128>>>((uint4 *)copy_to_device(a), (uint4 *)copy_to_device(b), out);
    fprintf(to, "wgmma.m64n8k16.bf16.swizzle128");
    print_values(to, a), print_values(to, b), print_values(to, copy_to_host(out, 512));
    fputc('\n', to);
}

// A box of `columns` x 8 words of 16 bits from a tensor of 96 x 24, as it lies in shared memory.
__global__ void run_tensor_copy(const __grid_constant__ CUtensorMap map, int column, int row,
                                uint32_t bytes, uint32_t *out) {
    __shared__ __align__(1024) uint32_t image[256];
    __shared__ uint64_t full;
    for (int i = threadIdx.x; i < 256; i += 32) image[i] = 0xeeeeeeee;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (threadIdx.x == 0) {
        init_barrier(&full, 1);
        expect_bytes(&full, bytes);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::"
                     "bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(image)),
                     "l"(&map), "r"(column), "r"(row), "r"(shared_address(&full))
                     : "memory");
    }
    __syncthreads();
    wait_for_phase(&full, 0);
    for (int i = threadIdx.x; i < 256; i += 32) out[i] = image[i];
}

inline void print_tensor_copy(FILE *to, const char *name, CUtensorMapSwizzle swizzle,
                              unsigned columns, int column, int row) {
    std::vector<uint16_t> tensor(96 * 24);
    for (size_t i = 0; i < tensor.size(); i++) tensor[i] = i + 1;
    uint16_t *place = copy_to_device(tensor);
    CUtensorMap map;
    cuuint64_t sizes[2] = {96, 24}, strides[1] = {192};
    cuuint32_t box[2] = {columns, 8}, steps[2] = {1, 1};
    DRIVER(DRIVER_FN(cuTensorMapEncodeTiled)(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, place, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    uint32_t *out;
    CHECK(cudaMalloc(&out, 1024));
    run_tensor_copy<<<1, 32>>>(map, column, row, columns * 16, out);
    int32_t at[2] = {column, row};
    fprintf(to, "%s", name);
    print_bytes(to, at, sizeof at);
    print_values(to, copy_to_host(out, 256));
    fputc('\n', to);
}

#define UNARY(name, body)                                                                          \
    __global__ void run_##name(const float *in, float *out) {                                      \
        float x = in[threadIdx.x], y;                                                              \
        body;                                                                                      \
        out[threadIdx.x] = y;                                                                      \
    }
UNARY(ex2, asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)))
UNARY(lg2, asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)))
UNARY(rcp, asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)))
UNARY(rsqrt, asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)))
UNARY(tanh, asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)))
UNARY(sin, asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)))
UNARY(exact_rcp, y = __frcp_rn(x))
UNARY(exact_rsqrt, y = __frsqrt_rn(x))
UNARY(exp, y = expf(x))
UNARY(cos, y = cosf(x))
UNARY(bf16_pair, uint32_t pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(-x));
      y = __uint_as_float(pair))

inline void print_unary(FILE *to, const char *name, void (*kernel)(const float *, float *)) {
    Random random{31};
    std::vector<float> in(128);
    for (int i = 0; i < 128; i++) {
        in[i] = ldexpf(random.draw_unit(), (int)(random.draw() % 40) - 26);
        if (i < 32) in[i] = random.draw_unit() * 20;
    }
    float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-42f, 1.00390625f, 1.01171875f};
    std::copy(special, special + 8, in.end() - 8);
    float *out;
    CHECK(cudaMalloc(&out, 512));
    kernel<<<1, 128>>>(copy_to_device(in), out);
    fprintf(to, "%s", name);
    print_values(to, in), print_values(to, copy_to_host(out, 128));
    fputc('\n', to);
}

inline int print_primitives(FILE *to) {
    print_mma<__nv_bfloat16>(to, "mma.m16n8k16.bf16", Normal, 11);
    print_mma<__nv_bfloat16>(to, "mma.m16n8k16.bf16", Wide, 12);
    print_mma<__nv_bfloat16>(to, "mma.m16n8k16.bf16", Cancelling, 13);
    print_mma<__nv_bfloat16>(to, "mma.m16n8k16.bf16", Tiny, 14);
    print_mma<__half>(to, "mma.m16n8k16.f16", Normal, 15);
    print_mma<__half>(to, "mma.m16n8k16.f16", Wide, 16);
    print_mma<__half>(to, "mma.m16n8k16.f16", Tiny, 17);
    print_ldmatrix<false>(to, "ldmatrix.m8n8.x4");
    print_ldmatrix<true>(to, "ldmatrix.m8n8.x4.trans");
    print_wgmma(to);
    print_tensor_copy(to, "tensor.swizzle0", CU_TENSOR_MAP_SWIZZLE_NONE, 64, 16, 3);
    print_tensor_copy(to, "tensor.swizzle128", CU_TENSOR_MAP_SWIZZLE_128B, 64, 16, 3);
    print_tensor_copy(to, "tensor.swizzle64", CU_TENSOR_MAP_SWIZZLE_64B, 32, 16, 3);
    print_tensor_copy(to, "tensor.swizzle32", CU_TENSOR_MAP_SWIZZLE_32B, 16, 16, 3);
    print_tensor_copy(to, "tensor.swizzle128", CU_TENSOR_MAP_SWIZZLE_128B, 64, 64, 20);
    print_tensor_copy(to, "tensor.swizzle128", CU_TENSOR_MAP_SWIZZLE_128B, 64, -8, -2);
    print_unary(to, "ex2.approx.ftz", run_ex2);
    print_unary(to, "lg2.approx.ftz", run_lg2);
    print_unary(to, "rcp.approx.ftz", run_rcp);
    print_unary(to, "rsqrt.approx.ftz", run_rsqrt);
    print_unary(to, "tanh.approx", run_tanh);
    print_unary(to, "sin.approx.ftz", run_sin);
    print_unary(to, "rcp.rn", run_exact_rcp);
    print_unary(to, "rsqrt.rn", run_exact_rsqrt);
    print_unary(to, "expf", run_exp);
    print_unary(to, "cosf", run_cos);
    print_unary(to, "cvt.rn.bf16x2", run_bf16_pair);
    CHECK(cudaGetLastError());
    return ferror(to) ? 1 : 0;
}
