/* libnvidia-ml.so.1: how many GPUs the driver lists. */
#include <stdio.h>
#include <stdlib.h>

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(int *count) {
    const char *gpus = getenv("GHOST_GPUS");
    *count = gpus ? atoi(gpus) : 2;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(int index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012ld", (long)handle);
    return 0;
}
