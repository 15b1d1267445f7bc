/* NCCL between processes of one machine. Sends and receives move bytes through /dev/shm; reductions and gathers keep
 * this rank's own part. Each collective is logged, so that a test can compare what the ranks of a group asked for. */
#define _GNU_SOURCE
#include "ghost.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Types and numbers of nccl.h, which are part of its binary interface. */
typedef int Result; /* ncclResult_t; 0 is ncclSuccess */
typedef struct { char text[128]; } UniqueId;
enum { NO_COLOR = -1, WAIT_S = 40, VERSION = 22809 };

struct communicator { int rank, ranks, splits; char id[128]; };

static size_t width(int type) { /* ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, half, float, double, bf16, fp8 x 2 */
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (type < 0 || type >= 12) ghost_fail("NCCL: data type %d is unknown", type);
    return bytes[type];
}

Result ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(Result result) { return "error of the simulated NCCL"; }
const char *ncclGetLastError(void *comm) { return ""; }
Result ncclMemAlloc(void **pointer, size_t bytes) { *pointer = ghost_alloc(bytes); return 0; }
Result ncclMemFree(void *pointer) { ghost_free(pointer); return 0; }

/* ---- communicators ---------------------------------------------------------------------------------------------- */

Result ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "%d-%ld-%p", getpid(), (long)time(NULL), ghost_handle());
    return 0;
}

static Result make(void **comm, int ranks, int rank, const char *id) {
    struct communicator *made = calloc(1, sizeof *made);
    made->rank = rank;
    made->ranks = ranks;
    snprintf(made->id, sizeof made->id, "%s", id);
    ghost_log("group %s %d %d\n", made->id, rank, ranks);
    *comm = made;
    return 0;
}
Result ncclCommInitRank(void **comm, int ranks, UniqueId id, int rank) { return make(comm, ranks, rank, id.text); }
Result ncclCommInitRankConfig(void **comm, int ranks, UniqueId id, int rank, void *config) {
    return make(comm, ranks, rank, id.text);
}
Result ncclCommInitRankScalable(void **comm, int ranks, int rank, int ids, UniqueId *id, void *config) {
    return make(comm, ranks, rank, id->text);
}

/* Writes a file as a whole, so that nobody reads a part of it. */
static void publish(const char *path, const void *data, size_t bytes) {
    char draft[440];
    snprintf(draft, sizeof draft, "%s.draft", path);
    int file = open(draft, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    for (size_t done = 0; done < bytes;) {
        ssize_t wrote = write(file, (const char *)data + done, bytes - done);
        if (wrote <= 0) ghost_fail("NCCL: %s can't be written", draft);
        done += wrote;
    }
    close(file);
    rename(draft, path);
}

/* Opens a file that another rank publishes, and fails when it doesn't come: a real device would wait for ever. */
static int await(const char *path, const char *what) {
    time_t end = time(NULL) + WAIT_S;
    int file;
    while ((file = open(path, O_RDONLY)) < 0) {
        if (time(NULL) > end) ghost_fail("NCCL: DEADLOCK in %s: nobody wrote %s in %d s", what, path, WAIT_S);
        usleep(200);
    }
    return file;
}

/* How many ranks of a communicator chose a color; waits until all have. */
static int members(struct communicator *parent, int color) {
    char path[400];
    const char *form = "/dev/shm/ghost_split_%s_%d_%d";
    snprintf(path, sizeof path, form, parent->id, parent->splits, parent->rank);
    publish(path, &color, sizeof color);
    int same = 0;
    for (int rank = 0; rank < parent->ranks; rank++) {
        snprintf(path, sizeof path, form, parent->id, parent->splits, rank);
        int file = await(path, "split"), chosen = NO_COLOR;
        if (read(file, &chosen, sizeof chosen) != sizeof chosen) ghost_fail("NCCL: %s is short", path);
        close(file);
        same += chosen == color;
    }
    return same;
}

Result ncclCommSplit(void *comm, int color, int key, void **made, void *config) {
    struct communicator *parent = comm;
    char id[128];
    int ranks = members(parent, color);
    snprintf(id, sizeof id, "%.100s-%d.%d", parent->id, parent->splits++, color);
    *made = NULL;
    return color == NO_COLOR ? 0 : make(made, ranks, key, id);
}
Result ncclCommGetAsyncError(void *comm, Result *error) { *error = 0; return 0; }
Result ncclCommCount(const void *comm, int *ranks) { *ranks = ((struct communicator *)comm)->ranks; return 0; }
Result ncclCommUserRank(const void *comm, int *rank) { *rank = ((struct communicator *)comm)->rank; return 0; }

/* ---- collectives: logged; a rank keeps its own part ----------------------------------------------------------------- */

static void record(const char *kind, struct communicator *comm, size_t bytes, int type, int operation) {
    ghost_log("collective %s %s %zu %d %d\n", comm->id, kind, bytes, type, operation);
}
Result ncclAllReduce(const void *from, void *to, size_t n, int type, int operation, void *comm, void *stream) {
    record("all_reduce", comm, n * width(type), type, operation);
    if (from != to) memmove(to, from, n * width(type));
    return 0;
}
Result ncclReduce(const void *from, void *to, size_t n, int type, int operation, int root, void *comm, void *stream) {
    record("reduce", comm, n * width(type), type, operation);
    if (from != to && to) memmove(to, from, n * width(type));
    return 0;
}
Result ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *comm, void *stream) {
    record("broadcast", comm, n * width(type), type, root);
    if (from != to) memmove(to, from, n * width(type));
    return 0;
}
Result ncclAllGather(const void *from, void *to, size_t n, int type, void *comm, void *stream) {
    struct communicator *group = comm;
    record("all_gather", group, n * width(type), type, 0);
    memmove((char *)to + group->rank * n * width(type), from, n * width(type));
    return 0;
}
Result ncclReduceScatter(const void *from, void *to, size_t n, int type, int operation, void *comm, void *stream) {
    struct communicator *group = comm;
    record("reduce_scatter", group, n * width(type), type, operation);
    memmove(to, (const char *)from + group->rank * n * width(type), n * width(type));
    return 0;
}

/* ---- sends and receives: bytes move ---------------------------------------------------------------------------------- */

struct transfer { int send, peer; void *data; size_t bytes; struct communicator *comm; };
static __thread int depth, waiting;
static __thread struct transfer queue[4096];

/* The number of a transfer between two ranks of a group: the n-th send meets the n-th receive. */
static long next_number(const char *id, int send, int from, int to) {
    static struct { char id[128]; int send, from, to; long next; } pairs[8192];
    static int known;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < known && (pairs[i].send != send || pairs[i].from != from || pairs[i].to != to || strcmp(pairs[i].id, id))) i++;
    if (i == known) {
        if (++known > 8192) ghost_fail("NCCL: more pairs of ranks than the simulation has room for");
        snprintf(pairs[i].id, sizeof pairs[i].id, "%s", id);
        pairs[i].send = send;
        pairs[i].from = from;
        pairs[i].to = to;
    }
    long number = pairs[i].next++;
    pthread_mutex_unlock(&lock);
    return number;
}

static void move(struct transfer *transfer) {
    struct communicator *comm = transfer->comm;
    int from = transfer->send ? comm->rank : transfer->peer, to = transfer->send ? transfer->peer : comm->rank;
    char path[400];
    snprintf(path, sizeof path, "/dev/shm/ghost_%s_%d_%d_%ld", comm->id, from, to,
             next_number(comm->id, transfer->send, from, to));
    if (transfer->send) {
        publish(path, transfer->data, transfer->bytes);
        return;
    }
    int file = await(path, "receive");
    off_t sent = lseek(file, 0, SEEK_END);
    if ((size_t)sent != transfer->bytes)
        ghost_fail("NCCL: rank %d sent %ld bytes, rank %d wants %zu", from, (long)sent, to, transfer->bytes);
    lseek(file, 0, SEEK_SET);
    for (size_t done = 0; done < transfer->bytes;) {
        ssize_t got = read(file, (char *)transfer->data + done, transfer->bytes - done);
        if (got <= 0) ghost_fail("NCCL: %s is short", path);
        done += got;
    }
    close(file);
    unlink(path);
}

static void add(int send, void *data, size_t bytes, int peer, struct communicator *comm) {
    struct transfer transfer = {send, peer, data, bytes, comm};
    ghost_log("%s %s %d %d %zu\n", send ? "send" : "receive", comm->id, comm->rank, peer, bytes);
    if (!depth) {
        move(&transfer);
    } else {
        if (waiting == 4096) ghost_fail("NCCL: more than 4096 transfers in a group");
        queue[waiting++] = transfer;
    }
}
Result ncclGroupStart(void) { depth++; return 0; }
Result ncclGroupEnd(void) {
    if (--depth) return 0;
    for (int send = 1; send >= 0; send--)
        for (int i = 0; i < waiting; i++)
            if (queue[i].send == send) move(&queue[i]);
    waiting = 0;
    return 0;
}
Result ncclSend(const void *data, size_t n, int type, int peer, void *comm, void *stream) {
    add(1, (void *)data, n * width(type), peer, comm);
    return 0;
}
Result ncclRecv(void *data, size_t n, int type, int peer, void *comm, void *stream) {
    add(0, data, n * width(type), peer, comm);
    return 0;
}
