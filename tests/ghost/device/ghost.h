/* What the parts of the simulated GPU share: memory, counters, the log. */
#pragma once
#include <stddef.h>

/* How many simulated GPUs there are: GHOST_GPUS, 2 when it isn't set. */
int ghost_devices(void);

/* Zeroed host memory that stands for device memory; pages are only taken when they are written. */
void *ghost_alloc(size_t bytes);
void ghost_free(void *pointer);

/* Counters of this process, read by ctypes through ghost_count. */
enum ghost_counter { GHOST_LAUNCHES, GHOST_SYNCS, GHOST_TO_DEVICE, GHOST_TO_HOST, GHOST_PAGEABLE, GHOST_COUNTERS };
extern long ghost_counts[GHOST_COUNTERS];
long ghost_count(int counter);
long ghost_largest(void);
long ghost_least_queued(void);

/* A handle that no other stream, event or communicator of this process has. */
void *ghost_handle(void);

/* Appends a line to GHOST_LOG/<process id>; nothing where the variable isn't set. */
void ghost_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Says what is wrong and aborts: an error that a real device would answer with a hang or garbage. */
void ghost_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
