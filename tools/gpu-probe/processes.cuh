// Memory of another process: handles of IPC and of virtual memory, mappings for reading only,
// exporters that die, restarts, and descriptors for a NIC (dmabuf).
#pragma once
#include "memory.cuh"
#include <csignal>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

constexpr size_t exported_bytes = (size_t)1 << 30;
constexpr size_t run_bytes = 65536;

inline void send_descriptor(int socket, int descriptor) {
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
    iovec data = {&byte, 1};
    msghdr message = {};
    message.msg_iov = &data, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    if (sendmsg(socket, &message, 0) != 1) exit(1);
}

inline int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    iovec data = {&byte, 1};
    msghdr message = {};
    message.msg_iov = &data, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    if (recvmsg(socket, &message, 0) != 1 || !CMSG_FIRSTHDR(&message)) return -1;
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    return descriptor;
}

inline CUmemAllocationProp describe_exportable() {
    CUmemAllocationProp what = {};
    what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    what.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    what.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    what.allocFlags.gpuDirectRDMACapable = 1;
    return what;
}

// Maps a handle at a fresh address; the result is that of cuMemSetAccess.
inline CUresult map_handle(CUmemGenericAllocationHandle handle, CUmemAccess_flags access,
                           CUdeviceptr *at) {
    DRIVER(DRIVER_FN(cuMemAddressReserve)(at, exported_bytes, 0, 0, 0));
    DRIVER(DRIVER_FN(cuMemMap)(*at, exported_bytes, 0, handle, 0));
    CUmemAccessDesc who = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, access};
    return DRIVER_FN(cuMemSetAccess)(*at, exported_bytes, &who, 1);
}

// Falls back to memory that no NIC can reach, and says so.
inline CUmemGenericAllocationHandle create_exportable() {
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp what = describe_exportable();
    CUresult result = DRIVER_FN(cuMemCreate)(&handle, exported_bytes, &what, 0);
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "cuMemCreate for GPUDirect RDMA: CUDA error %d\n", result);
        what.allocFlags.gpuDirectRDMACapable = 0;
        DRIVER(DRIVER_FN(cuMemCreate)(&handle, exported_bytes, &what, 0));
    }
    return handle;
}

// Waits for a byte of the importer; 'b' asks for kernels of about 1 ms until the next byte.
inline int serve_importer(int socket, char *pool) {
    char byte;
    if (read(socket, &byte, 1) != 1) return 1;
    if (byte != 'b') return 0;
    unsigned *sink = allocate_sink();
    while (recv(socket, &byte, 1, MSG_DONTWAIT) != 1) {
        for (int i = 0; i < 3; i++)
            read_all<<<1056, 512>>>((uint4 *)pool, exported_bytes / 16, sink);
        CHECK(cudaDeviceSynchronize());
    }
    return 0;
}

// The other process: exports 1 GiB with a pattern over the socket, then waits for a byte.
inline int run_exporter(const char *way, int socket) {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(0));
    if (!strcmp(way, "ipc")) {
        char *pool = allocate_filled(exported_bytes, 8);
        cudaIpcMemHandle_t handle;
        CHECK(cudaIpcGetMemHandle(&handle, pool));
        if (write(socket, &handle, sizeof handle) != sizeof handle) return 1;
        return serve_importer(socket, pool);
    } else {
        CUmemGenericAllocationHandle handle = create_exportable();
        CUdeviceptr pool;
        DRIVER(map_handle(handle, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &pool));
        fill<<<1024, 256>>>((uint4 *)pool, exported_bytes / 16, 8);
        CHECK(cudaDeviceSynchronize());
        int descriptor;
        DRIVER(DRIVER_FN(cuMemExportToShareableHandle)(
            &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        send_descriptor(socket, descriptor);
        close(descriptor);
        return serve_importer(socket, (char *)pool);
    }
}

struct Exporter {
    pid_t process;
    int socket;
};

inline Exporter start_exporter(const char *way) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) exit(1);
    pid_t process = fork();
    if (process == 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", pair[1]);
        close(pair[0]);
        execl("/proc/self/exe", "gpu-probe", "exporter", way, number, nullptr);
        _exit(127);
    }
    close(pair[1]);
    return {process, pair[0]};
}

inline void end_exporter(Exporter &exporter, bool by_signal) {
    if (by_signal) kill(exporter.process, SIGKILL);
    else if (write(exporter.socket, "", 1) != 1) exit(1);
    waitpid(exporter.process, nullptr, 0);
    close(exporter.socket);
}

struct Import {
    char *place;
    CUmemGenericAllocationHandle handle;
    double us;
};

inline Import import_pool(const char *way, Exporter &exporter, CUmemAccess_flags access,
                          CUresult *mapped) {
    Import import = {};
    *mapped = CUDA_SUCCESS;
    if (!strcmp(way, "ipc")) {
        cudaIpcMemHandle_t handle;
        if (read(exporter.socket, &handle, sizeof handle) != sizeof handle) {
            printf("| %s | the exporter failed |\n", way);
            exit(1);
        }
        double start = now_us();
        CHECK(cudaIpcOpenMemHandle((void **)&import.place, handle,
                                   cudaIpcMemLazyEnablePeerAccess));
        import.us = now_us() - start;
        return import;
    }
    int descriptor = receive_descriptor(exporter.socket);
    double start = now_us();
    DRIVER(DRIVER_FN(cuMemImportFromShareableHandle)(&import.handle, (void *)(intptr_t)descriptor,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    CUdeviceptr at;
    *mapped = map_handle(import.handle, access, &at);
    import.place = (char *)at;
    import.us = now_us() - start;
    return import;
}

inline void drop_import(const char *way, Import &import) {
    if (!strcmp(way, "ipc")) {
        CHECK(cudaIpcCloseMemHandle(import.place));
        return;
    }
    DRIVER(DRIVER_FN(cuMemUnmap)((CUdeviceptr)import.place, exported_bytes));
    DRIVER(DRIVER_FN(cuMemAddressFree)((CUdeviceptr)import.place, exported_bytes));
    DRIVER(DRIVER_FN(cuMemRelease)(import.handle));
}

// Each block copies runs of 64 KiB; the sources are in a random order.
__global__ void gather_runs(uint4 *to, const char *from, const int *runs, int count, int rounds) {
    for (int round = 0; round < rounds; round++) {
        for (int run = blockIdx.x; run < count; run += gridDim.x) {
            const uint4 *source = (const uint4 *)(from + runs[run] * run_bytes);
            uint4 *target = to + run * (run_bytes / 16);
#pragma unroll 4
            for (int i = threadIdx.x; i < run_bytes / 16; i += blockDim.x)
                target[i] = __ldcs(source + i);
        }
    }
}

__global__ void count_wrong(const uint4 *got, const int *runs, size_t count, unsigned seed,
                            unsigned *wrong) {
    size_t step = (size_t)gridDim.x * blockDim.x, words = run_bytes / 16;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count * words; i += step) {
        unsigned x = (unsigned)(runs[i / words] * words + i % words) * 2654435761u + seed;
        uint4 at = got[i];
        if (at.x != x || at.y != (x ^ 0x5bd1e995) || at.z != x * 3 || at.w != ~x)
            atomicAdd(wrong, 1);
    }
}

struct Destination {
    uint4 *pool;
    int *runs;
    int count;
    unsigned *wrong;

    Destination() {
        count = exported_bytes / run_bytes;
        std::vector<int> order(count);
        for (int i = 0; i < count; i++) order[i] = i;
        Random random{9};
        for (int i = count - 1; i > 0; i--) std::swap(order[i], order[random.draw() % (i + 1)]);
        runs = copy_to_device(order);
        pool = (uint4 *)allocate_filled(exported_bytes, 1);
        CHECK(cudaMalloc(&wrong, 4));
    }
    unsigned check() {
        CHECK(cudaMemset(wrong, 0, 4));
        count_wrong<<<1024, 256>>>(pool, runs, count, 8, wrong);
        return copy_to_host(wrong, 1)[0];
    }
};

inline void probe_import(const char *way, Destination &to) {
    Exporter exporter = start_exporter(way);
    CUresult mapped;
    Import import = import_pool(way, exporter, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &mapped);
    printf("| %s: import and map 1 GiB | %.0f us |\n", way, import.us);
    to.count = exported_bytes / run_bytes;
    CHECK(cudaMemset(to.pool, 0, exported_bytes));
    gather_runs<<<264, 512>>>(to.pool, import.place, to.runs, to.count, 1);
    CHECK(cudaDeviceSynchronize());
    printf("| %s: wrong words of 1 GiB gathered | %u |\n", way, to.check());
    for (size_t bytes : {(size_t)1 << 20, (size_t)16 << 20, (size_t)64 << 20, (size_t)1 << 30}) {
        int count = bytes / run_bytes;
        auto time_gather = [&](int blocks, const char *from) {
            return time_us([&](int) {
                gather_runs<<<blocks, 512>>>(to.pool, from, to.runs, count, 1);
            });
        };
        double bare = time_us([&](int) {
            CHECK(cudaMemcpyAsync(to.pool, import.place, bytes, cudaMemcpyDeviceToDevice));
        });
        double all = time_gather(264, import.place), few = time_gather(32, import.place);
        printf("| %s: %zu MiB: runs by 264 blocks; by 32 blocks; bare copy (bytes moved once) | "
               "%.0f, %.0f, %.0f GB/s |\n",
               way, bytes >> 20, bytes / all / 1e3, bytes / few / 1e3, bytes / bare / 1e3);
    }
    drop_import(way, import);
    end_exporter(exporter, false);
}

// Both processes use the GPU at once: the driver gives them turns.
inline void probe_busy(const char *way, Destination &to) {
    Exporter exporter = start_exporter(way);
    CUresult mapped;
    Import import = import_pool(way, exporter, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &mapped);
    int count = ((size_t)64 << 20) / run_bytes;
    for (int busy : {0, 1}) {
        // 'b' makes the exporter compute until the next byte.
        if (busy && write(exporter.socket, "b", 1) != 1) exit(1);
        usleep(300000);
        // By the host's clock: events do not see the turns of the other process.
        std::vector<double> times;
        for (int i = 0; i < 300; i++) {
            double start = now_us();
            gather_runs<<<264, 512>>>(to.pool, import.place, to.runs, count, 1);
            CHECK(cudaStreamSynchronize(0));
            times.push_back(now_us() - start);
        }
        std::sort(times.begin(), times.end());
        printf("| %s: 64 MiB while the exporter %s, host clock: median, p99 | %.0f us, %.0f us |\n",
               way, busy ? "computes" : "is idle", times[150], times[297]);
    }
    drop_import(way, import);
    end_exporter(exporter, false);
}

// The exporter is killed while a kernel of about a second reads its memory.
inline void probe_death(const char *way, Destination &to) {
    Exporter exporter = start_exporter(way);
    CUresult mapped;
    Import import = import_pool(way, exporter, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &mapped);
    CHECK(cudaMemset(to.pool, 0, exported_bytes));
    double start = now_us();
    gather_runs<<<264, 512>>>(to.pool, import.place, to.runs, to.count, 1500);
    usleep(200000);
    bool runs = cudaStreamQuery(0) == cudaErrorNotReady;
    end_exporter(exporter, true);
    double killed = now_us() - start;
    cudaError_t result = cudaDeviceSynchronize();
    printf("| %s: exporter killed while it is read: time; gather; result; end | "
           "%.1f s; %s; %s; %.1f s |\n",
           way, killed / 1e6, runs ? "in flight" : "had ended", cudaGetErrorName(result),
           (now_us() - start) / 1e6);
    if (result != cudaSuccess) return;
    printf("| %s: wrong words of that gather | %u |\n", way, to.check());
    usleep(500000);
    CHECK(cudaMemset(to.pool, 0, exported_bytes));
    gather_runs<<<264, 512>>>(to.pool, import.place, to.runs, to.count, 1);
    result = cudaDeviceSynchronize();
    printf("| %s: a gather that starts 0.5 s after the death: result | %s |\n", way,
           cudaGetErrorName(result));
    if (result != cudaSuccess) return;
    printf("| %s: wrong words of that one | %u |\n", way, to.check());
    drop_import(way, import);
}

inline size_t read_free_memory() {
    size_t free, total;
    CHECK(cudaMemGetInfo(&free, &total));
    return free;
}

inline void probe_restarts(const char *way, Destination &to) {
    size_t before = 0;
    unsigned wrong = 0;
    double start = now_us();
    for (int i = 0; i < 20; i++) {
        Exporter exporter = start_exporter(way);
        CUresult mapped;
        Import import = import_pool(way, exporter, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &mapped);
        CHECK(cudaMemset(to.pool, 0, exported_bytes));
        gather_runs<<<264, 512>>>(to.pool, import.place, to.runs, to.count, 1);
        CHECK(cudaDeviceSynchronize());
        wrong += to.check();
        // Every second exporter dies before the mapping ends.
        if (i % 2) end_exporter(exporter, true);
        drop_import(way, import);
        if (i % 2 == 0) end_exporter(exporter, false);
        usleep(100000);
        if (i == 1) before = read_free_memory();
    }
    printf("| %s: 20 exporters, half of them killed: wrong words; memory lost; seconds | %u; %lld "
           "MiB; %.0f |\n",
           way, wrong, (long long)(before - read_free_memory()) >> 20, (now_us() - start) / 1e6);
}

// A process of its own, as a write that is refused ends all its work.
inline int run_read_only() {
    Destination to;
    Exporter exporter = start_exporter("vmm");
    CUresult mapped;
    Import import = import_pool("vmm", exporter, CU_MEM_ACCESS_FLAGS_PROT_READ, &mapped);
    printf("| vmm: map for reading only, result | CUDA error %d |\n", mapped);
    if (mapped == CUDA_SUCCESS) {
        CHECK(cudaMemset(to.pool, 0, exported_bytes));
        gather_runs<<<264, 512>>>(to.pool, import.place, to.runs, to.count, 1);
        printf("| vmm: reading through it | %s |\n", cudaGetErrorName(cudaDeviceSynchronize()));
        printf("| vmm: wrong words | %u |\n", to.check());
        fill<<<1, 32>>>((uint4 *)import.place, 32, 1);
        printf("| vmm: writing through it | %s |\n", cudaGetErrorName(cudaDeviceSynchronize()));
    }
    end_exporter(exporter, false);
    return 0;
}

inline void probe_processes() {
    Destination to;
    for (const char *way : {"ipc", "vmm"}) {
        probe_import(way, to);
        probe_busy(way, to);
        probe_restarts(way, to);
    }
}

inline void probe_dmabuf() {
    auto get = DRIVER_FN(cuMemGetHandleForAddressRange);
    auto tell = [&](const char *what, CUdeviceptr at, unsigned flags) {
        int descriptor = -1;
        CUresult result = get(&descriptor, at, (size_t)2 << 20,
                              CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, flags);
        printf("| dmabuf of %s: result, descriptor | CUDA error %d, %s |\n", what, result,
               descriptor >= 0 ? "yes" : "no");
        if (descriptor >= 0) close(descriptor);
    };
    char *plain = allocate_filled((size_t)64 << 20, 1);
    tell("cudaMalloc", (CUdeviceptr)plain, 0);
    CUdeviceptr at;
    DRIVER(map_handle(create_exportable(), CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &at));
    tell("cuMemCreate", at, 0);
    tell("cuMemCreate, mapped over PCIe", at, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE);
}
