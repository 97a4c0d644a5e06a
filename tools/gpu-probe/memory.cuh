// The card, the ceilings of its memory, the word that counts layers, pages in two orders, and
// tiles that stream.
#pragma once
#include "probe.cuh"
#include <chrono>

inline double now_us() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

inline void probe_card() {
    cudaDeviceProp card;
    CHECK(cudaGetDeviceProperties(&card, 0));
    int driver;
    size_t free, total;
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaMemGetInfo(&free, &total));
    printf("| card | %s, compute capability %d.%d |\n", card.name, card.major, card.minor);
    printf("| CUDA version of the driver | %d.%d |\n", driver / 1000, driver % 1000 / 10);
    printf("| multiprocessors, L2, shared memory for a block | %d, %d MiB, %zu KiB |\n",
           card.multiProcessorCount, card.l2CacheSize >> 20, card.sharedMemPerBlockOptin >> 10);
    printf("| memory, free at the start | %.1f GiB, %.1f GiB |\n", total / 1073741824.0,
           free / 1073741824.0);
    struct {
        const char *name;
        CUdevice_attribute which;
    } attributes[] = {
        {"virtual memory management", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
        {"memory handles as descriptors",
         CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
        {"fabric handles", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED},
        {"dmabuf", CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED},
        {"GPUDirect RDMA", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED},
        {"GPUDirect RDMA with memory handles",
         CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
        {"flush of RDMA writes, options", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS},
        {"order of RDMA writes (100: owner, 200: all devices)",
         CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING},
        {"IPC of events", CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED},
        {"copy engines", CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
        {"registered host memory at its own address",
         CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM},
    };
    auto get = DRIVER_FN(cuDeviceGetAttribute);
    for (auto &attribute : attributes) {
        int value;
        CUresult result = get(&value, attribute.which, 0);
        if (result == CUDA_SUCCESS) printf("| %s | %d |\n", attribute.name, value);
        else printf("| %s | CUDA error %d |\n", attribute.name, result);
    }
}

__global__ void read_all(const uint4 *from, size_t count, unsigned *sink) {
    uint4 sum = {};
    size_t step = (size_t)gridDim.x * blockDim.x;
#pragma unroll 8
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        sum = xor_words(sum, __ldg(from + i));
    keep(sum, sink);
}

// Not zeros: a card can move zeros faster than data.
__global__ void fill(uint4 *to, size_t count, unsigned seed) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        unsigned x = (unsigned)i * 2654435761u + seed;
        to[i] = make_uint4(x, x ^ 0x5bd1e995, x * 3, ~x);
    }
}

inline char *allocate_filled(size_t bytes, unsigned seed) {
    char *place;
    CHECK(cudaMalloc(&place, bytes));
    fill<<<1024, 256>>>((uint4 *)place, bytes / 16, seed);
    CHECK(cudaDeviceSynchronize());
    return place;
}

inline unsigned *allocate_sink() {
    unsigned *sink;
    CHECK(cudaMalloc(&sink, 4));
    return sink;
}

inline void probe_ceilings() {
    size_t bytes = (size_t)2 << 30;
    char *a = allocate_filled(bytes, 1), *b = allocate_filled(bytes, 2), *host;
    unsigned *sink = allocate_sink();
    CHECK(cudaMallocHost(&host, 256 << 20));
    memset(host, 7, 256 << 20);
    print_gbps("copy within the card, bytes read and written", 2.0 * bytes, time_us([&](int) {
                   CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice));
               }));
    print_gbps("reads alone", bytes,
               time_us([&](int) { read_all<<<132 * 8, 512>>>((uint4 *)a, bytes / 16, sink); }));
    for (size_t size : {(size_t)64 << 10, (size_t)2 << 20, (size_t)256 << 20}) {
        char what[80];
        snprintf(what, sizeof what, "pinned host to device, copies of %zu KiB", size >> 10);
        print_gbps(what, 256 << 20, time_us([&](int) {
                       for (size_t at = 0; at < 256 << 20; at += size)
                           CHECK(cudaMemcpyAsync(a + at, host + at, size, cudaMemcpyDefault));
                   }));
        snprintf(what, sizeof what, "device to pinned host, copies of %zu KiB", size >> 10);
        print_gbps(what, 256 << 20, time_us([&](int) {
                       for (size_t at = 0; at < 256 << 20; at += size)
                           CHECK(cudaMemcpyAsync(host + at, a + at, size, cudaMemcpyDefault));
                   }));
    }
    size_t pinned = (size_t)1 << 30;
    void *pages = aligned_alloc(4096, pinned);
    memset(pages, 1, pinned);
    double start = now_us();
    CHECK(cudaHostRegister(pages, pinned, cudaHostRegisterDefault));
    printf("| cudaHostRegister of 1 GiB | %.0f ms |\n", (now_us() - start) / 1e3);
    uint4 *mapped;
    CHECK(cudaHostGetDevicePointer(&mapped, host, 0));
    print_gbps("a kernel that writes to mapped host memory", 256 << 20,
               time_us([&](int) { fill<<<64, 512>>>(mapped, (256 << 20) / 16, 3); }));
    print_gbps("a kernel that reads mapped host memory", 256 << 20,
               time_us([&](int) { read_all<<<64, 512>>>(mapped, (256 << 20) / 16, sink); }));
}

__global__ void do_nothing() {}

// One thread: what earlier kernels wrote is ordered before the word.
__global__ void count_up(volatile unsigned long long *word, unsigned long long value) {
    __threadfence_system();
    *word = value;
}

inline void probe_word() {
    unsigned long long *word, *mapped, next = 1;
    CHECK(cudaHostAlloc(&word, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&mapped, word, 0));
    *word = 0;
    auto see = [&](unsigned long long value) {
        while (*(volatile unsigned long long *)word < value) {}
    };
    std::vector<double> launches, seen, synchronised;
    for (int i = 0; i < 500; i++, next++) {
        CHECK(cudaDeviceSynchronize());
        double start = now_us();
        count_up<<<1, 1>>>(mapped, next);
        launches.push_back(now_us() - start);
        see(next);
        seen.push_back(now_us() - start);
        CHECK(cudaDeviceSynchronize());
        start = now_us();
        do_nothing<<<1, 1>>>();
        CHECK(cudaStreamSynchronize(0));
        synchronised.push_back(now_us() - start);
    }
    printf("| launch call on the host | %.1f us |\n", median(launches));
    printf("| launch until the host polls the word | %.1f us |\n", median(seen));
    printf("| launch until cudaStreamSynchronize returns | %.1f us |\n", median(synchronised));
    auto write = find_in_driver<decltype(&cuStreamWriteValue64)>("cuStreamWriteValue64_v2");
    std::vector<double> written;
    for (int i = 0; i < 500; i++, next++) {
        CHECK(cudaDeviceSynchronize());
        double start = now_us();
        DRIVER(write(0, (CUdeviceptr)mapped, next, 0));
        see(next);
        written.push_back(now_us() - start);
    }
    printf("| cuStreamWriteValue64 until the host polls the word | %.1f us |\n", median(written));

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    double cost[2];
    for (int with : {0, 1}) {
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        for (int layer = 0; layer < 128; layer++) {
            do_nothing<<<132, 128, 0, stream>>>();
            if (with) count_up<<<1, 1, 0, stream>>>(mapped, layer);
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&ready, graph, 0));
        cost[with] = time_us([&](int) { CHECK(cudaGraphLaunch(ready, 0)); });
    }
    printf("| a kernel of a graph of 128 | %.2f us |\n", cost[0] / 128);
    printf("| a word after each of them adds | %.2f us |\n", (cost[1] - cost[0]) / 128);
    double plain = time_us([&](int) {
        for (int i = 0; i < 128; i++) do_nothing<<<132, 128>>>();
    });
    printf("| a kernel of 128 without a graph | %.2f us |\n", plain / 128);

    // The host must see all bytes that kernels before the word wrote to mapped memory.
    size_t bytes = 4 << 20;
    uint4 *data, *data_mapped;
    CHECK(cudaHostAlloc(&data, bytes, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&data_mapped, data, 0));
    int late = 0;
    for (int i = 0; i < 300; i++, next++) {
        fill<<<64, 256>>>(data_mapped, bytes / 16, i);
        count_up<<<1, 1>>>(mapped, next);
        see(next);
        for (size_t at = 0; at < bytes / 16; at++) {
            late += ((volatile uint4 *)data)[at].x != (unsigned)at * 2654435761u + i;
        }
    }
    printf("| 300 x 4 MiB before the word: words that the host saw too late | %d |\n", late);
}

// One block reads the keys and values of one head in 16 pages of 16 tokens (128 KiB).
__global__ void read_pages(const char *pool, const int *pages, size_t page_stride,
                           size_t layer_start, unsigned *sink) {
    uint4 sum = {};
    const int *mine = pages + blockIdx.y * 16;
#pragma unroll 4
    for (int piece = 0; piece < 32; piece++) {
        const char *from = pool + mine[piece / 2] * page_stride + layer_start +
                           (piece & 1) * 32768 + blockIdx.x * 4096;
        sum = xor_words(sum, __ldg((const uint4 *)from + threadIdx.x));
        sum = xor_words(sum, __ldg((const uint4 *)from + threadIdx.x + 128));
    }
    keep(sum, sink);
}

// The same by bulk copies, eight pieces of 4 KiB in flight.
__global__ void copy_pages(const char *pool, const int *pages, size_t page_stride,
                           size_t layer_start, unsigned *sink) {
    constexpr int depth = 8;
    __shared__ __align__(128) char ring[depth][4096];
    __shared__ uint64_t full[depth];
    const int *mine = pages + blockIdx.y * 16;
    auto issue = [&](int piece) {
        const char *from = pool + mine[piece / 2] * page_stride + layer_start +
                           (piece & 1) * 32768 + blockIdx.x * 4096;
        expect_bytes(&full[piece % depth], 4096);
        copy_bulk(ring[piece % depth], from, 4096, &full[piece % depth]);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < depth; i++) init_barrier(&full[i], 1);
        for (int i = 0; i < depth; i++) issue(i);
    }
    __syncthreads();
    uint4 sum = {};
    for (int piece = 0; piece < 32; piece++) {
        wait_for_phase(&full[piece % depth], piece / depth % 2);
        const uint4 *there = (const uint4 *)ring[piece % depth];
        sum = xor_words(sum, xor_words(there[threadIdx.x], there[threadIdx.x + 128]));
        __syncthreads();
        if (threadIdx.x == 0 && piece + depth < 32) issue(piece + depth);
    }
    keep(sum, sink);
}

// Llama-3.1-8B's pages: 16 tokens, 32 layers, 64 KiB a layer. A step's attention reads one layer.
inline void probe_pages() {
    constexpr int layers = 32, pages = 16384;
    size_t layer_bytes = 65536, bytes = (size_t)pages * layers * layer_bytes;
    char *pool = allocate_filled(bytes, 4);
    unsigned *sink = allocate_sink();
    std::vector<int> order(pages);
    for (int i = 0; i < pages; i++) order[i] = i;
    Random random{5};
    for (int i = pages - 1; i > 0; i--) std::swap(order[i], order[random.draw() % (i + 1)]);
    int *lists = copy_to_device(order);
    struct {
        int rows, tokens;
    } shapes[] = {{256, 1024}, {32, 1024}, {32, 8192}, {1, 8192}};
    for (auto shape : shapes) {
        int segments = shape.rows * shape.tokens / 256;
        double read = (double)segments * 16 * layer_bytes;
        for (int way = 0; way < 2; way++) {
            auto kernel = way ? copy_pages : read_pages;
            auto measure = [&](size_t page_stride, size_t layer_stride) {
                return time_us([&](int i) {
                    kernel<<<dim3(8, segments), 128>>>(pool, lists, page_stride,
                                                      i % layers * layer_stride, sink);
                }, 29);
            };
            double by_page = measure(layers * layer_bytes, layer_bytes);
            double by_layer = measure(layer_bytes, pages * layer_bytes);
            printf("| %d rows of %d tokens, %s: page-major, layer-major | %.0f GB/s, %.0f GB/s |\n",
                   shape.rows, shape.tokens, way ? "bulk copies" : "loads", read / by_page / 1e3,
                   read / by_layer / 1e3);
        }
    }
}

// Each block streams its own bytes through a ring of shared memory. Where the launch allows it, the
// next kernel starts at once, and this one ends after the last one: weights depend on no kernel.
__global__ void stream_tile(const char *from, size_t tile_bytes, int stages, int stage_bytes,
                            unsigned *sink) {
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t full[16];
    asm volatile("griddepcontrol.launch_dependents;");
    const char *mine = from + blockIdx.x * tile_bytes;
    int count = tile_bytes / stage_bytes;
    auto issue = [&](int step) {
        expect_bytes(&full[step % stages], stage_bytes);
        copy_bulk(ring + step % stages * stage_bytes, mine + (size_t)step * stage_bytes,
                  stage_bytes, &full[step % stages]);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) init_barrier(&full[i], 1);
        for (int i = 0; i < min(stages, count); i++) issue(i);
    }
    __syncthreads();
    uint4 sum = {};
    for (int step = 0; step < count; step++) {
        wait_for_phase(&full[step % stages], step / stages % 2);
        const uint4 *there = (const uint4 *)(ring + step % stages * stage_bytes);
        for (int i = threadIdx.x; i < stage_bytes / 16; i += blockDim.x)
            sum = xor_words(sum, there[i]);
        __syncthreads();
        if (threadIdx.x == 0 && step + stages < count) issue(step + stages);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    keep(sum, sink);
}

inline void probe_tiles() {
    size_t bytes = (size_t)4 << 30;
    char *pool = allocate_filled(bytes, 6);
    unsigned *sink = allocate_sink();
    CHECK(cudaFuncSetAttribute(stream_tile, cudaFuncAttributeMaxDynamicSharedMemorySize, 196608));
    auto stream = [&](int tiles, size_t tile_bytes, int stages, int stage_bytes, size_t start) {
        stream_tile<<<tiles, 256, stages * stage_bytes>>>(pool + start, tile_bytes, stages,
                                                          stage_bytes, sink);
    };
    for (int tiles : {32, 64, 96, 128, 132}) {
        printf("| %d long tiles, a ring of 32, 64, 128, 192 KiB |", tiles);
        for (int stages : {2, 4, 8, 12}) {
            size_t tile_bytes = ((size_t)1 << 30) / tiles / 16384 * 16384;
            double us = time_us([&](int i) {
                stream(tiles, tile_bytes, stages, 16384, (size_t)(i & 1) << 31);
            });
            printf("%s %.0f", stages == 2 ? "" : ",", tiles * tile_bytes / us / 1e3);
        }
        printf(" GB/s |\n");
    }
    // A matrix of 4096 x 4096 in bf16 is 32 MiB. 64 matrices follow each other in a graph.
    struct {
        const char *what;
        int tiles, stages, stage_bytes;
    } ways[] = {
        {"64 tiles of 64 rows", 64, 12, 16384},
        {"128 tiles: 64 rows, K in two parts", 128, 12, 16384},
        {"128 tiles of 32 rows, small stages", 128, 12, 8192},
        {"256 tiles of 16 rows", 256, 12, 8192},
        {"256 tiles: 64 rows, K in four parts", 256, 6, 16384},
        {"512 tiles: 64 rows, K in eight parts", 512, 6, 8192},
    };
    cudaStream_t on;
    CHECK(cudaStreamCreate(&on));
    for (auto &way : ways) {
        size_t matrix = 32 << 20;
        double us[2];
        for (int early : {0, 1}) {
            cudaLaunchAttribute attribute;
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = early;
            cudaLaunchConfig_t config = {};
            config.gridDim = way.tiles, config.blockDim = 256, config.stream = on;
            config.dynamicSmemBytes = way.stages * way.stage_bytes;
            config.attrs = &attribute, config.numAttrs = 1;
            cudaGraph_t graph;
            cudaGraphExec_t ready;
            CHECK(cudaStreamBeginCapture(on, cudaStreamCaptureModeGlobal));
            for (int i = 0; i < 64; i++) {
                CHECK(cudaLaunchKernelEx(&config, stream_tile, (const char *)pool + i * matrix,
                                         matrix / way.tiles, way.stages, way.stage_bytes, sink));
            }
            CHECK(cudaStreamEndCapture(on, &graph));
            CHECK(cudaGraphInstantiate(&ready, graph, 0));
            us[early] = time_us([&](int) { CHECK(cudaGraphLaunch(ready, 0)); }) / 64;
        }
        printf("| a matrix of 4096 x 4096 in a graph, %s: after the last one, started early | "
               "%.1f us (%.0f GB/s), %.1f us (%.0f GB/s) |\n",
               way.what, us[0], matrix / us[0] / 1e3, us[1], matrix / us[1] / 1e3);
    }
}
