// What all sections share: checks of results, medians of times, rows of the table, barriers and
// bulk copies.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <string>
#include <vector>

// Ends the section when a call of the runtime fails.
#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t result = (call);                                                               \
        if (result != cudaSuccess) {                                                               \
            printf("| %s, line %d | failed: %s |\n", #call, __LINE__, cudaGetErrorName(result));   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

// Ends the section when a call of the driver fails.
#define DRIVER(call)                                                                               \
    do {                                                                                           \
        CUresult result = (call);                                                                  \
        if (result != CUDA_SUCCESS) {                                                              \
            printf("| %s, line %d | failed: CUDA error %d |\n", #call, __LINE__, result);          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

// A function of the driver by its name in the library, so that no toolkit's stub is linked.
template <class F> F find_in_driver(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        printf("| %s | the driver does not have it |\n", name);
        exit(1);
    }
    return reinterpret_cast<F>(found);
}
#define DRIVER_FN(name) find_in_driver<decltype(&name)>(#name)

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// The median time of `work(i)` on the default stream, in µs, after two rounds that do not count.
template <class F> double time_us(F work, int rounds = 9) {
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    std::vector<double> times;
    for (int i = -2; i < rounds; i++) {
        CHECK(cudaEventRecord(from));
        work(i + 2);
        CHECK(cudaEventRecord(to));
        CHECK(cudaEventSynchronize(to));
        CHECK(cudaGetLastError());
        float ms;
        CHECK(cudaEventElapsedTime(&ms, from, to));
        if (i >= 0) times.push_back(ms * 1e3);
    }
    return median(times);
}

inline void print_gbps(const char *what, double bytes, double us) {
    printf("| %s | %.0f GB/s |\n", what, bytes / us / 1e3);
}

// Random words, the same in each run (splitmix64).
struct Random {
    uint64_t state;
    uint64_t draw() {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    // Uniform in -1 to 1.
    float draw_unit() { return (int64_t)draw() / 9.3e18f; }
    // Nearly normal, variance 1.
    float draw_normal() {
        return (draw_unit() + draw_unit() + draw_unit() + draw_unit()) * 0.866f;
    }
};

template <class T> T *copy_to_device(const std::vector<T> &values) {
    T *place;
    CHECK(cudaMalloc(&place, values.size() * sizeof(T)));
    CHECK(cudaMemcpy(place, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return place;
}

template <class T> std::vector<T> copy_to_host(const T *place, size_t count) {
    std::vector<T> values(count);
    CHECK(cudaMemcpy(values.data(), place, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

__device__ inline uint32_t shared_address(const void *place) {
    return (uint32_t)__cvta_generic_to_shared(place);
}

__device__ inline void init_barrier(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void expect_bytes(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void wait_for_phase(uint64_t *barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Copies `bytes` of device memory to shared memory; they count on the barrier.
__device__ inline void copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ inline uint4 xor_words(uint4 a, uint4 b) {
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

// Keeps what was read alive, and is never true on the data of this program.
__device__ inline void keep(uint4 sum, unsigned *sink) {
    if (sum.x == 0x9d1c0de5 && sum.y == 0x9d1c0de5) atomicAdd(sink, sum.z);
}
