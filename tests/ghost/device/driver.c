/* libcuda.so.1: what Triton and torch ask of the driver itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

int cudaDeviceGetAttribute(int *value, int attribute, int device);

static int devices(void) {
    const char *gpus = getenv("GHOST_GPUS");
    return gpus ? atoi(gpus) : 2;
}

static int initialised;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = devices(); return initialised ? 0 : 3; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x10; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)0x10; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error of the simulated GPU"; return 0; }
int cuModuleLoad(void **module, const char *image) { *module = (void *)0x20; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)0x20; return 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
    *module = (void *)0x20;
    return 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)0x30; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 3 ? 0 : 32; /* threads of a block, bytes of local memory, registers */
    return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) { *blocks = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { *clusters = 2; return 0; }

/* Kernels of Triton are launched here; libghost.so, loaded before everything else, has the counter. */
static int launched(void) {
    static long *counts;
    if (!counts) counts = dlsym(RTLD_DEFAULT, "ghost_counts");
    if (counts) __sync_add_and_fetch(&counts[0], 1);
    return 0;
}
int cuLaunchKernel(void) { return launched(); }
int cuLaunchKernelEx(void) { return launched(); }
int cuLaunchCooperativeKernel(void) { return launched(); }
int cuPointerGetAttribute(void *data, int attribute, unsigned long pointer) {
    if (attribute == 3) *(unsigned long *)data = pointer; /* CU_POINTER_ATTRIBUTE_DEVICE_POINTER */
    return 0;
}
int cuMemcpyDtoHAsync_v2(void) { return 0; }
int cuMemHostRegister(void) { return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, void *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? 0 : 1;
}

long cuCtxGetLimit(void) { return 0; }
long cuCtxSetLimit(void) { return 0; }
long cuLinkCreate_v2(void) { return 0; }
long cuLinkAddData_v2(void) { return 0; }
long cuLinkComplete(void) { return 0; }
