/* The CUDA runtime without a device: memory is host memory, copies are real, kernels do nothing, streams are always idle. */
#define _GNU_SOURCE
#include "ghost.h"

#include <cuda_runtime_api.h>
#include <cudnn_version.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <library_types.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

/* ---- shared by the parts -------------------------------------------------------------------------------------- */

long ghost_counts[GHOST_COUNTERS];

long ghost_count(int counter) { return ghost_counts[counter]; }

static void count(enum ghost_counter counter) { __sync_add_and_fetch(&ghost_counts[counter], 1); }

/* What a real device would still have had to do when a thread that launches kernels got what it had waited for: the fewest
   kernels since the last call, 0 where it waited for all that was queued. Other threads may wait: they hold nobody up. */
static long least_queued = LONG_MAX;
static __thread int computes;
long ghost_least_queued(void) { return __sync_lock_test_and_set(&least_queued, LONG_MAX); }
static void waited(long queued) {
    count(GHOST_SYNCS);
    long before = least_queued;
    while (computes && queued < before && !__sync_bool_compare_and_swap(&least_queued, before, queued)) before = least_queued;
}

int ghost_devices(void) {
    const char *gpus = getenv("GHOST_GPUS");
    return gpus ? atoi(gpus) : 2;
}

void *ghost_handle(void) {
    static long last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}

void ghost_log(const char *format, ...) {
    const char *folder = getenv("GHOST_LOG");
    if (!folder) return;
    char path[512], line[1024];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    snprintf(path, sizeof path, "%s/%d", folder, getpid());
    /* Ranks leave by _exit: each line is written at once, and the file opened anew, since a fork changes its name. */
    int file = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (write(file, line, length) != length) fprintf(stderr, "[ghost] a line of the log was lost\n");
    close(file);
}

void ghost_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "[ghost] ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

#define PAGE 4096
struct block { size_t bytes; };

void *ghost_alloc(size_t bytes) {
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    char *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    ((struct block *)start)->bytes = whole;
    return start + PAGE;
}

void ghost_free(void *pointer) {
    if (!pointer) return;
    char *start = (char *)pointer - PAGE;
    munmap(start, ((struct block *)start)->bytes);
}

/* ---- devices: an H100 as its data sheet has it ------------------------------------------------------------------ */

static __thread int current;

/* As the real runtime does, the first question for devices initialises the driver: after that no fork can use it. */
cudaError_t cudaGetDeviceCount(int *count) {
    static int asked;
    if (!__sync_lock_test_and_set(&asked, 1)) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        int (*initialise)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
        if (initialise) initialise(0);
    }
    *count = ghost_devices();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= ghost_devices()) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
/* A failed call leaves its error behind, which the next one to ask takes: torch asks after each launch. */
static __thread cudaError_t last_error;
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) { return "error of the simulated GPU"; }
const char *cudaGetErrorName(cudaError_t error) { return "ghostError"; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    p->totalGlobalMem = 80ull << 30;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->totalConstMem = 65536;
    p->textureAlignment = 512;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    p->asyncEngineCount = 3;
    p->pciBusID = device + 1;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->managedMemory = 1;
    p->streamPrioritiesSupported = p->cooperativeLaunch = p->hostRegisterSupported = 1;
    p->memoryPoolsSupported = p->clusterLaunch = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int device) {
    return cudaGetDeviceProperties(p, device);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch ((int)attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
        case cudaDevAttrWarpSize: *value = p.warpSize; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
        default: *value = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }

/* ---- memory and copies ---------------------------------------------------------------------------------------- */

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *unused = *total = 80ull << 30; return cudaSuccess; }
static long largest_allocation;

/* Bytes of the largest allocation since the last call. */
long ghost_largest(void) { return __sync_lock_test_and_set(&largest_allocation, 0); }

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    long before = largest_allocation;
    while ((long)bytes > before && !__sync_bool_compare_and_swap(&largest_allocation, before, (long)bytes))
        before = largest_allocation;
    *pointer = ghost_alloc(bytes);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *pointer) { ghost_free(pointer); return cudaSuccess; }
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
/* Host memory that a device reads by itself; a copy of any other waits. */
#define PINNED (1 << 12)
static struct { const char *start, *end; } pinned[PINNED];
static void pin(const void *pointer, size_t bytes) {
    for (long i = 0; i < PINNED; i++)
        if (__sync_bool_compare_and_swap(&pinned[i].start, NULL, (const char *)pointer)) {
            pinned[i].end = (const char *)pointer + bytes;
            return;
        }
    ghost_fail("more than %d blocks of pinned memory", PINNED);
}
static long pinned_block(const void *pointer) {
    for (long i = 0; i < PINNED; i++)
        if (pinned[i].start && (const char *)pointer >= pinned[i].start && (const char *)pointer < pinned[i].end) return i;
    return -1;
}
static void unpin(const void *pointer) {
    long block = pinned_block(pointer);
    if (block >= 0) pinned[block].end = pinned[block].start = NULL;
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    cudaError_t error = cudaMalloc(pointer, bytes);
    if (!error) pin(*pointer, bytes);
    return error;
}
cudaError_t cudaFreeHost(void *pointer) { unpin(pointer); return cudaFree(pointer); }
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    if (getenv("GHOST_REGISTERS_NOTHING")) return last_error = cudaErrorNotSupported;
    pin(pointer, bytes);
    return last_error = cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) { unpin(pointer); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = pinned_block(pointer) < 0 ? cudaMemoryTypeUnregistered : cudaMemoryTypeHost;
    attributes->device = current;
    attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
}

static void count_copy(enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyHostToDevice) count(GHOST_TO_DEVICE);
    if (kind == cudaMemcpyDeviceToHost) count(GHOST_TO_HOST);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memmove(to, from, bytes);
    count_copy(kind);
    const void *host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : NULL;
    if (host && bytes >= PAGE && pinned_block(host) < 0) count(GHOST_PAGEABLE);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    waited(0);
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t bytes, cudaStream_t stream) {
    memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { memset(to, value, bytes); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(to, value, bytes);
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char symbols[1 << 16];
    *pointer = symbols;
    return cudaSuccess;
}

/* ---- streams and events: done as soon as they are asked for, but for a hang -------------------------------------- */

cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = ghost_handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
/* From ghost_hang on, the device finishes nothing: who waits for it waits for good, and an event stays unready. */
static volatile int hangs;
void ghost_hang(void) { hangs = 1; }
static void hang_while(volatile const char *stuck) {
    while (stuck ? *stuck : hangs) usleep(10000);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return hangs ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { waited(0); hang_while(NULL); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { waited(0); hang_while(NULL); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = 0;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = ghost_handle(); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
/* Launches of the process when an event was recorded, by its handle; a place is used again after a million handles. */
#define EVENTS (1 << 20)
static long launches_at[EVENTS];
static char stuck_events[EVENTS];
static long place_of(cudaEvent_t event) { return ((unsigned long)event >> 4) % EVENTS; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    launches_at[place_of(event)] = ghost_counts[GHOST_LAUNCHES];
    stuck_events[place_of(event)] = hangs;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return stuck_events[place_of(event)] ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    waited(ghost_counts[GHOST_LAUNCHES] - launches_at[place_of(event)]);
    hang_while(&stuck_events[place_of(event)]);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { *ms = 1.0f; return cudaSuccess; }
cudaError_t cudaEventElapsedTime_v2(float *ms, cudaEvent_t start, cudaEvent_t end) {
    return cudaEventElapsedTime(ms, start, end);
}

/* ---- kernels: counted, never run ------------------------------------------------------------------------------- */

void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}

/* Names of kernels, as the wheel registers them: a table by address. GHOST_KERNELS names a file of what was launched. */
#define NAMES (1 << 20)
static struct { const void *function; const char *name; } names[NAMES];
static long slot_of(const void *function) {
    long slot = ((unsigned long)function >> 4) * 0x9E3779B97F4A7C15ul >> 44;
    while (names[slot].function && names[slot].function != function) slot = (slot + 1) % NAMES;
    return slot;
}
void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name) {
    long slot = slot_of(function);
    names[slot].name = name;
    names[slot].function = function;
}
static void launched(const void *function) {
    computes = 1;
    count(GHOST_LAUNCHES);
    const char *path = getenv("GHOST_KERNELS");
    if (!path) return;
    const char *name = names[slot_of(function)].name;
    char line[512];
    int length = snprintf(line, sizeof line - 1, "%d %s", getpid(), name ? name : "unknown");
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    int file = open(path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (write(file, line, length) != length) fprintf(stderr, "[ghost] a line of the kernels was lost\n");
    close(file);
}
void __cudaRegisterVar(void) {}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void *k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    launched(k);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    launched(k);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
    launched(function);
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

/* torch asks for the driver's functions by name; what the process itself links to is in driver.c. */
static int context_state(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    *function = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)context_state;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(
    const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

/* ---- libraries of products and convolutions: versions, and one algorithm each ------------------------------------- */

int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int asked, void *result, int *found) {
    *found = 1;
    return 0;
}
int cublasGetVersion_v2(void *handle, int *version) { *version = 130002; return 0; }
size_t cublasGetCudartVersion(void) { return CUDART_VERSION; }
/* Older than what torch 2.15 prefers to its own attention of documents, which is called here as a kernel that does nothing. */
size_t cudnnGetVersion(void) { return 90100; }
/* The version by its parts, which torch compares with that it was compiled against. */
int cudnnGetProperty(libraryPropertyType part, int *value) {
    *value = part == MAJOR_VERSION ? CUDNN_MAJOR : part == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return 0;
}
