/* A libnccl of any version that moves no data and records its calls; see libraries.py.

   Compiled with -DVERSION=22105, it has only the functions of 2.21.5. Prototypes are copied from nccl.h by hand. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int rank, nranks, device, spoilt; } *comm_t;
typedef struct { char internal[128]; } unique_id_t;
typedef void *stream_t;
typedef struct { size_t size; unsigned int magic, version; char rest[]; } config_t;

enum { INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, IN_PROGRESS = 7 };

/* Rules set by a test: one function per kind of rule. */
enum { FAIL, SLEEP_MS, POLLS, FINAL, NULLED, WHOLE, KINDS };
static struct { char name[64]; int value; } rules[KINDS];
static char record[1 << 18];
static size_t used;
static int polls, inside, overlaps;
static comm_t *late, late_value; /* a new communicator that appears when its parent is out of IN_PROGRESS */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

const char *stub_record(void) { return record; }
void stub_clear(void) {
  pthread_mutex_lock(&writing);
  record[used = 0] = 0;
  pthread_mutex_unlock(&writing);
}
void stub_rule(int kind, const char *name, int value) {
  snprintf(rules[kind].name, sizeof rules[kind].name, "%s", name);
  rules[kind].value = value;
}
int stub_overlaps(void) { return overlaps; }
static int rule(int kind, const char *name) { return strcmp(rules[kind].name, name) ? 0 : rules[kind].value; }

static void put(const char *format, va_list args) {
  used += vsnprintf(record + used, sizeof record - used, format, args);
  if (used >= sizeof record - 1) { fputs("the stub's record is full\n", stderr); abort(); }
}
static void write_down(const char *format, ...) {
  va_list args;
  va_start(args, format);
  put(format, args);
  va_end(args);
}
/* Also append to a file, which a test reads after the process has exited. */
static void copy_to_log(size_t from) {
  const char *path = getenv("STUB_LOG");
  FILE *log = path ? fopen(path, "a") : NULL;
  if (log) { fputs(record + from, log); fclose(log); }
}
static int note(const char *name, const char *format, ...) {
  if (__atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST) > 1) __atomic_add_fetch(&overlaps, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_lock(&writing);
  size_t from = used;
  write_down("%s", name);
  va_list args;
  va_start(args, format);
  put(format, args);
  va_end(args);
  write_down("\n");
  copy_to_log(from);
  pthread_mutex_unlock(&writing);
  if (rule(SLEEP_MS, name)) usleep(1000 * rule(SLEEP_MS, name));
  __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
  if (rule(POLLS, name)) { polls = rule(POLLS, name); return IN_PROGRESS; }
  return rule(FAIL, name);
}
static void note_config(const char *what, const config_t *config) {
  pthread_mutex_lock(&writing);
  size_t from = used;
  write_down("%s size=%zu version=%u magic=%u hex=", what, config->size, config->version, config->magic);
  for (size_t i = 0; i < config->size; i++) write_down("%02x", ((unsigned char *)config)[i]);
  write_down("\n");
  copy_to_log(from);
  pthread_mutex_unlock(&writing);
}
static comm_t make(int rank, int nranks, int device) {
  comm_t made = malloc(sizeof *made);
  *made = (typeof(*made)){rank, nranks, device};
  return made;
}
/* As in NCCL, the child handle of a nonblocking parent is set only when the parent is no longer IN_PROGRESS. */
static int made_by(comm_t parent, comm_t *out, comm_t made, int code) {
  int waits = parent != NULL && code == IN_PROGRESS;
  *out = waits ? NULL : made;
  if (waits) late = out, late_value = made;
  return code;
}

/* The calls of an open group. As in NCCL, a simulation leaves its communicators unusable: their work lists remain. */
static __thread comm_t members[64];
static __thread int grouped, count, collectives;
static int enter(comm_t comm, int collective) {
  if (comm->spoilt) return note("spoilt", ""), INTERNAL_ERROR;
  if (!grouped || comm->nranks == 1) return 0; /* NCCL runs calls of a single rank at once */
  if (count < 64) members[count++] = comm;
  collectives += collective;
  return 0;
}
static int closed(int simulated) {
  int estimated = simulated && collectives; /* NCCL has no estimate for sends and receives */
  for (int i = 0; i < count; i++) members[i]->spoilt |= simulated;
  grouped = count = collectives = 0;
  return estimated;
}

/* Library */

int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "some error"; }
const char *ncclGetLastError(comm_t comm) { return comm ? "what the stub has to say" : ""; }
#if VERSION >= 23200
typedef struct { size_t size; unsigned int magic, version; int mode; const char *psk; } encryption_t;
int ncclSetEncryption(const encryption_t *config) {
  const char *psk = config->psk;
  return note("ncclSetEncryption", " size=%zu version=%u magic=%u mode=%d length=%d first=%d", config->size,
              config->version, config->magic, config->mode, psk ? (int)strlen(psk) : -1, psk ? psk[0] : 0);
}
#endif

/* Init */

int ncclGetUniqueId(unique_id_t *id) { memset(id, 7, sizeof *id); return note("ncclGetUniqueId", ""); }
int ncclCommInitRank(comm_t *comm, int nranks, unique_id_t id, int rank) {
  *comm = make(rank, nranks, 0);
  return note("ncclCommInitRank", " nranks=%d rank=%d first=%d last=%d", nranks, rank, id.internal[0],
              id.internal[127]);
}
int ncclCommInitRankConfig(comm_t *comm, int nranks, unique_id_t id, int rank, config_t *config) {
  *comm = make(rank, nranks, 0);
  note_config("config", config);
  return note("ncclCommInitRankConfig", " nranks=%d rank=%d first=%d last=%d", nranks, rank, id.internal[0],
              id.internal[127]);
}
#if VERSION >= 22300
int ncclCommInitRankScalable(comm_t *comm, int nranks, int rank, int nids, unique_id_t *ids, config_t *config) {
  *comm = make(rank, nranks, 0);
  if (config) note_config("config", config);
  return note("ncclCommInitRankScalable", " nranks=%d rank=%d nids=%d first=%d last=%d", nranks, rank, nids,
              ids[0].internal[0], ids[nids - 1].internal[127]);
}
#endif
int ncclCommInitAll(comm_t *comms, int n, const int *devices) {
  for (int i = 0; i < n; i++) comms[i] = make(i, n, devices ? devices[i] : i);
  return note("ncclCommInitAll", " n=%d", n);
}
int ncclCommSplit(comm_t comm, int color, int key, comm_t *out, config_t *config) {
  if (config) note_config("config", config);
  int whole = rule(WHOLE, "ncclCommSplit"); /* as if all ranks passed the same color */
  comm_t made = color >= 0 ? make(whole ? comm->rank : 0, whole ? comm->nranks : 1, comm->device) : NULL;
  return made_by(comm, out, made, note("ncclCommSplit", " color=%d key=%d", color, key));
}
#if VERSION >= 22700
int ncclCommShrink(comm_t comm, int *exclude, int count, comm_t *out, config_t *config, int flags) {
  if (config) note_config("config", config);
  int before = 0;
  for (int i = 0; i < count; i++) before += exclude[i] < comm->rank;
  comm_t made = make(comm->rank - before, comm->nranks - count, comm->device);
  return made_by(comm, out, made, note("ncclCommShrink", " count=%d first=%d last=%d flags=%d", count, exclude[0],
                                    exclude[count - 1], flags));
}
#endif
#if VERSION >= 22900
int ncclCommGetUniqueId(comm_t comm, unique_id_t *id) {
  memset(id, 9, sizeof *id);
  return note("ncclCommGetUniqueId", " rank=%d", comm->rank);
}
int ncclCommGrow(comm_t comm, int nranks, const unique_id_t *id, int rank, comm_t *out, config_t *config) {
  if (config) note_config("config", config);
  comm_t made = make(comm ? comm->rank : rank, nranks, comm ? comm->device : 0);
  return made_by(comm, out, made, note("ncclCommGrow", " member=%d nranks=%d id=%d rank=%d", comm != NULL, nranks,
                              id ? id->internal[127] : -1, rank));
}
#endif

/* Life and end */

int ncclCommFinalize(comm_t comm) { return note("ncclCommFinalize", " rank=%d", comm->rank); }
int ncclCommDestroy(comm_t comm) { return note("ncclCommDestroy", " rank=%d", comm->rank); }
int ncclCommAbort(comm_t comm) { return note("ncclCommAbort", " rank=%d", comm->rank); }
int ncclCommGetAsyncError(comm_t comm, int *code) {
  if (comm == NULL) return INVALID_ARGUMENT;
  *code = note("ncclCommGetAsyncError", "");
  if (polls > 0) {
    *code = IN_PROGRESS;
    if (--polls == 0) {
      *code = rules[FINAL].value;
      if (late) *late = late_value, late = NULL;
    }
  }
  return 0;
}
int ncclCommCount(comm_t comm, int *out) { *out = comm->nranks; return 0; }
int ncclCommCuDevice(comm_t comm, int *out) { *out = comm->device; return 0; }
int ncclCommUserRank(comm_t comm, int *out) { *out = comm->rank; return 0; }
#if VERSION >= 22800
/* As documented in nccl.h, it succeeds, and the communicator is in progress until it is quiescent. */
int ncclCommRevoke(comm_t comm, int flags) {
  int code = note("ncclCommRevoke", " rank=%d flags=%d", comm->rank, flags);
  return code == IN_PROGRESS ? 0 : code;
}
#endif
#if VERSION >= 22900
int ncclCommSuspend(comm_t comm, int flags) { return note("ncclCommSuspend", " rank=%d flags=%d", comm->rank, flags); }
int ncclCommResume(comm_t comm) { return note("ncclCommResume", " rank=%d", comm->rank); }
int ncclCommMemStats(comm_t comm, int stat, uint64_t *value) {
  *value = (1ull << 40) + stat;
  return note("ncclCommMemStats", " rank=%d stat=%d", comm->rank, stat);
}
#endif

/* Device API, of which torch needs one function */

#if VERSION >= 22800
int ncclDevCommDestroy(comm_t comm, const void *devcomm) { return note("ncclDevCommDestroy", " rank=%d", comm->rank); }
#endif

/* Memory */

#if VERSION >= 21900
int ncclMemAlloc(void **pointer, size_t size) {
  int code = note("ncclMemAlloc", " size=%zu", size);
  *pointer = code ? (void *)0xdeadbeef : malloc(size); /* on failure, callers must ignore the pointer */
  return code;
}
int ncclMemFree(void *pointer) {
  free(pointer);
  return note("ncclMemFree", " pointer=%zu", (size_t)pointer);
}
int ncclCommRegister(comm_t comm, void *buffer, size_t size, void **handle) {
  *handle = rule(NULLED, "ncclCommRegister") ? NULL : (void *)0x5000;
  return note("ncclCommRegister", " rank=%d buffer=%zu size=%zu", comm->rank, (size_t)buffer, size);
}
int ncclCommDeregister(comm_t comm, void *handle) {
  return note("ncclCommDeregister", " rank=%d handle=%zu", comm->rank, (size_t)handle);
}
#endif
#if VERSION >= 22700
int ncclCommWindowRegister(comm_t comm, void *buffer, size_t size, void **window, int flags) {
  *window = rule(NULLED, "ncclCommWindowRegister") ? NULL : (void *)0x6000;
  return note("ncclCommWindowRegister", " rank=%d buffer=%zu size=%zu flags=%d", comm->rank, (size_t)buffer, size,
              flags);
}
int ncclCommWindowDeregister(comm_t comm, void *window) {
  return note("ncclCommWindowDeregister", " rank=%d window=%zu", comm->rank, (size_t)window);
}
#endif
#if VERSION >= 22900
int ncclWinGetUserPtr(comm_t comm, void *window, void **pointer) {
  *pointer = (void *)0x7000;
  return note("ncclWinGetUserPtr", " rank=%d window=%zu", comm->rank, (size_t)window);
}
#endif

/* Operators */

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, comm_t comm) {
  *op = 1000 + dtype;
  unsigned long long bits = 0;
  if (residence == 1) memcpy(&bits, scalar, dtype == 8 ? 8 : 4);
  return note("ncclRedOpCreatePreMulSum", " dtype=%d residence=%d bits=%llu", dtype, residence, bits);
}
int ncclRedOpDestroy(int op, comm_t comm) { return note("ncclRedOpDestroy", " op=%d", op); }

/* Collectives. A null communicator is an error, as in every version. */

#define MOVED " send=%zu recv=%zu count=%zu dtype=%d"
#define WHERE " comm=%d stream=%zu"
#define MOVED_ARGS (size_t)send, (size_t)recv, count, dtype
#define WHERE_ARGS comm->rank, (size_t)stream
#define BUFFERS const void *send, void *recv, size_t count, int dtype
#define PLACE comm_t comm, stream_t stream

/* EXTRA and VALUES are parameters and arguments in parentheses, each followed by a comma. */
#define OPEN(...) __VA_ARGS__
#define PLAIN(NAME, EXTRA, FORMAT, VALUES)                                              \
  int NAME(BUFFERS, OPEN EXTRA PLACE) {                                                 \
    if (comm == NULL) return INVALID_ARGUMENT;                                          \
    int code = enter(comm, 1);                                                          \
    if (code) return code;                                                              \
    return note(#NAME, MOVED FORMAT WHERE, MOVED_ARGS, OPEN VALUES WHERE_ARGS);         \
  }
#if VERSION >= 23100
#define CONFIGURED(NAME, EXTRA, FORMAT, VALUES)                                         \
  int NAME(BUFFERS, OPEN EXTRA PLACE, config_t *config) {                               \
    note_config("config", config);                                                      \
    return note(#NAME, MOVED FORMAT WHERE, MOVED_ARGS, OPEN VALUES WHERE_ARGS);         \
  }
#else
#define CONFIGURED(...)
#endif
#define COLLECTIVE(NAME, ...) PLAIN(NAME, __VA_ARGS__) CONFIGURED(NAME##Config, __VA_ARGS__)

COLLECTIVE(ncclReduce, (int op, int root,), " op=%d root=%d", (op, root,))
COLLECTIVE(ncclBroadcast, (int root,), " root=%d", (root,))
COLLECTIVE(ncclAllReduce, (int op,), " op=%d", (op,))
COLLECTIVE(ncclReduceScatter, (int op,), " op=%d", (op,))
COLLECTIVE(ncclAllGather, (), "", ())
#if VERSION >= 22800
COLLECTIVE(ncclAlltoAll, (), "", ())
COLLECTIVE(ncclGather, (int root,), " root=%d", (root,))
COLLECTIVE(ncclScatter, (int root,), " root=%d", (root,))
#endif

/* Point to point, one-sided */

#define PEER " buffer=%zu count=%zu dtype=%d peer=%d"
#define PEER_ARGS (size_t)buffer, count, dtype, peer
int ncclSend(const void *buffer, size_t count, int dtype, int peer, PLACE) {
  enter(comm, 0);
  return note("ncclSend", PEER WHERE, PEER_ARGS, WHERE_ARGS);
}
int ncclRecv(void *buffer, size_t count, int dtype, int peer, PLACE) {
  enter(comm, 0);
  return note("ncclRecv", PEER WHERE, PEER_ARGS, WHERE_ARGS);
}
#if VERSION >= 22900
typedef struct { int opCnt, peer, sigIdx, ctx; } wait_t;
int ncclPutSignal(const void *buffer, size_t count, int dtype, int peer, void *window, size_t offset, int signal,
                  int context, unsigned int flags, PLACE) {
  return note("ncclPutSignal", PEER " window=%zu offset=%zu signal=%d context=%d flags=%u" WHERE, PEER_ARGS,
              (size_t)window, offset, signal, context, flags, WHERE_ARGS);
}
int ncclSignal(int peer, int signal, int context, unsigned int flags, PLACE) {
  return note("ncclSignal", " peer=%d signal=%d context=%d flags=%u" WHERE, peer, signal, context, flags, WHERE_ARGS);
}
int ncclWaitSignal(int rows, wait_t *row, PLACE) {
  for (int i = 0; i < rows; i++)
    note("row", " count=%d peer=%d signal=%d context=%d", row[i].opCnt, row[i].peer, row[i].sigIdx, row[i].ctx);
  return note("ncclWaitSignal", " rows=%d" WHERE, rows, WHERE_ARGS);
}
#endif

/* Groups */

int ncclGroupStart(void) { return grouped = 1, note("ncclGroupStart", ""); }
int ncclGroupEnd(void) { return closed(0), note("ncclGroupEnd", ""); }
#if VERSION >= 22200
typedef struct { size_t size; unsigned int magic, version; float estimatedTime; } sim_info_t;
int ncclGroupSimulateEnd(sim_info_t *info) {
  if (closed(1)) info->estimatedTime = 12.5f;
  return note("ncclGroupSimulateEnd", " size=%zu version=%u magic=%u", info->size, info->version, info->magic);
}
#endif

/* Parameters */

#if VERSION >= 23000
static const char *keys[] = {"NCCL_ALGO", "NCCL_NTHREADS"}, *values[] = {"", "512"};
int ncclParamGetAllParameterKeys(const char ***table, int *length) {
  *table = keys;
  *length = 2;
  return note("ncclParamGetAllParameterKeys", "");
}
int ncclParamGetParameter(const char *key, const char **value, int *length) {
  for (int i = 0; i < 2; i++)
    if (strcmp(key, keys[i]) == 0) { *value = values[i]; *length = strlen(values[i]); return 0; }
  return INVALID_ARGUMENT;
}
#endif
