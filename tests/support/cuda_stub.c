/* A CUDA driver with two GPUs that computes nothing. It is as strict about contexts as the real driver may be: calls
   that need a current context fail without one (201); an event can be recorded only on streams of its context (400).
   A handle is a pointer: where the real driver may crash, on one that no driver made, this one aborts the process.
   cuda.core and cuda.bindings look up all its functions with cuGetProcAddress. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

typedef struct { int device; } context_t;
typedef struct { unsigned magic; context_t *context; } thing_t; /* a stream or an event; never freed */
#define MAGIC 0xC0DAC0DAu

enum {
  INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900
};

static context_t primary[2] = {{0}, {1}};
static __thread context_t *stack[16];
static __thread int depth;
static int query_code, status, elsewhere; /* set by tests */
static volatile int blocked; /* as if the launch queue were full */
static __thread int capture_mode; /* GLOBAL, THREAD_LOCAL, RELAXED */
static int waiting = -1; /* GPU of the stream that was last made to wait */
static int record_code; /* of every record, as after an error of a launch */
static int gone_code = INVALID_HANDLE, spoilt; /* for destroyed streams, where a real driver may crash */

/* The functions that this thread called, one a line, for tests that count them. */
static __thread char called[1 << 14];
static __thread size_t called_used;
static void note(const char *name) {
  if (called_used + strlen(name) + 2 > sizeof called) return;
  called_used += sprintf(called + called_used, "%s\n", name);
}
const char *stub_called(void) { return called; }
void stub_forget_calls(void) { called[called_used = 0] = 0; }

static context_t *current(void) { return depth ? stack[depth - 1] : NULL; }
/* Whether it is the handle of a stream that was made here, which may have been destroyed. Asks the kernel whether the
   address can be read. */
static thing_t *made(thing_t *thing) {
  unsigned magic = 0;
  struct iovec here = {&magic, sizeof magic}, there = {thing, sizeof magic};
  if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) != sizeof magic || magic != MAGIC) {
    fprintf(stderr, "CUDA stub: %p is not a stream or event of this driver\n", (void *)thing);
    abort();
  }
  return thing;
}
static context_t *of(thing_t *stream) { return (size_t)stream > 2 ? made(stream)->context : current(); }
#define CALLED note(__func__)
#define NEEDS_CONTEXT if (!current()) return INVALID_CONTEXT
#define MAY_BLOCK while (blocked) usleep(1000)
#define NEEDS(stream) if ((size_t)(stream) > 2 && !made(stream)->context) return gone_code
/* As while any stream of the process is being captured in the default mode, which torch uses. */
#define UNSAFE if (elsewhere && capture_mode != 2) return spoilt++, CAPTURE_UNSUPPORTED

void stub_query(int code) { query_code = code; }
void stub_capture(int on) { status = on; }
void stub_capture_elsewhere(int on) { elsewhere = on; }
void stub_block(int on) { blocked = on; }
void stub_gone(int code) { gone_code = code; }
int stub_spoilt(void) { return spoilt; }
int stub_waiting(void) { return waiting; }
void stub_record_code(int code) { record_code = code; }

int cuInit(unsigned flags) { CALLED; return 0; }
int cuDriverGetVersion(int *version) { CALLED; *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { CALLED; *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { CALLED; *device = ordinal; return ordinal < 2 ? 0 : INVALID_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { CALLED; snprintf(name, size, "stub"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { CALLED; *bytes = 1 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { CALLED; *value = 1; return 0; }
int cuDevicePrimaryCtxRetain(context_t **context, int device) { CALLED; *context = &primary[device]; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { CALLED; return 0; }
int cuCtxGetCurrent(context_t **context) { CALLED; *context = current(); return 0; }
int cuCtxSetCurrent(context_t *context) { CALLED;
  if (!context) { if (depth) depth--; }
  else { if (!depth) depth = 1; stack[depth - 1] = context; }
  return 0;
}
int cuCtxPushCurrent_v2(context_t *context) { CALLED; stack[depth++] = context; return 0; }
int cuCtxPopCurrent_v2(context_t **context) { CALLED; NEEDS_CONTEXT; *context = stack[--depth]; return 0; }
int cuCtxGetDevice(int *device) { CALLED; NEEDS_CONTEXT; *device = current()->device; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { CALLED; NEEDS_CONTEXT; *least = 0; *greatest = -5; return 0; }
int cuCtxSynchronize(void) { CALLED; NEEDS_CONTEXT; return 0; }

static int make(thing_t **thing) {
  NEEDS_CONTEXT;
  *thing = malloc(sizeof(thing_t));
  **thing = (thing_t){MAGIC, current()};
  return 0;
}
int cuStreamCreateWithPriority(thing_t **stream, unsigned flags, int priority) { CALLED; return make(stream); }
int cuStreamCreate(thing_t **stream, unsigned flags) { CALLED; return make(stream); }
int cuStreamDestroy_v2(thing_t *stream) { CALLED; NEEDS(stream); stream->context = NULL; return 0; }
int cuStreamGetCtx(thing_t *stream, context_t **context) { CALLED; *context = of(stream); return *context ? 0 : INVALID_CONTEXT; }
int cuStreamGetDevice(thing_t *stream, int *device) { CALLED;
  if (!of(stream)) return INVALID_CONTEXT;
  *device = of(stream)->device;
  return 0;
}
int cuStreamQuery(thing_t *stream) { CALLED; NEEDS_CONTEXT; NEEDS(stream); UNSAFE; return query_code; }
int cuStreamSynchronize(thing_t *stream) { CALLED; NEEDS_CONTEXT; NEEDS(stream); return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { CALLED;
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
int cuStreamIsCapturing(thing_t *stream, int *found) { CALLED; NEEDS_CONTEXT; NEEDS(stream); *found = status; return 0; }
int cuStreamWaitEvent(thing_t *stream, thing_t *event, unsigned flags) { CALLED;
  NEEDS_CONTEXT;
  NEEDS(stream);
  waiting = of(stream)->device;
  return event && made(event) ? 0 : INVALID_HANDLE;
}
int cuEventCreate(thing_t **event, unsigned flags) { CALLED; return make(event); }
int cuEventDestroy_v2(thing_t *event) { CALLED; made(event); return 0; }
int cuEventRecord(thing_t *event, thing_t *stream) { CALLED;
  NEEDS_CONTEXT;
  NEEDS(stream);
  MAY_BLOCK;
  if (record_code) return record_code;
  return made(event)->context == of(stream) ? 0 : INVALID_HANDLE;
}
int cuEventRecordWithFlags(thing_t *event, thing_t *stream, unsigned flags) { CALLED; return cuEventRecord(event, stream); }
int cuEventQuery(thing_t *event) { CALLED; NEEDS_CONTEXT; made(event); UNSAFE; MAY_BLOCK; return query_code; }
int cuEventSynchronize(thing_t *event) { CALLED; NEEDS_CONTEXT; made(event); return 0; }
int cuEventElapsedTime(float *ms, thing_t *start, thing_t *end) { CALLED; NEEDS_CONTEXT; *ms = 1; return 0; }
int cuEventElapsedTime_v2(float *ms, thing_t *start, thing_t *end) { CALLED; return cuEventElapsedTime(ms, start, end); }
int cuMemAllocHost_v2(void **pointer, size_t size) { CALLED; NEEDS_CONTEXT; *pointer = calloc(1, size); return 0; }
int cuMemHostAlloc(void **pointer, size_t size, unsigned flags) { CALLED; return cuMemAllocHost_v2(pointer, size); }
int cuMemFreeHost(void *pointer) { CALLED; NEEDS_CONTEXT; free(pointer); return 0; }
/* Device memory is host memory. */
int cuDeviceGetDefaultMemPool(void **pool, int device) { CALLED; *pool = (void *)0x9001; return 0; }
int cuDeviceGetMemPool(void **pool, int device) { CALLED; return cuDeviceGetDefaultMemPool(pool, device); }
int cuMemGetDefaultMemPool(void **pool, void *location, int type) { CALLED; return cuDeviceGetDefaultMemPool(pool, 0); }
int cuMemGetMemPool(void **pool, void *location, int type) { CALLED; return cuDeviceGetDefaultMemPool(pool, 0); }
int cuMemPoolGetAttribute(void *pool, int which, void *value) { CALLED; *(long long *)value = 0; return 0; }
int cuMemPoolSetAttribute(void *pool, int which, void *value) { CALLED; return 0; }
int cuMemAllocFromPoolAsync(void **pointer, size_t size, void *pool, thing_t *stream) { CALLED;
  NEEDS_CONTEXT;
  *pointer = calloc(1, size);
  return 0;
}
int cuMemFreeAsync(void *pointer, thing_t *stream) { CALLED; free(pointer); return 0; }
int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { CALLED; NEEDS_CONTEXT; memcpy(to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { CALLED; NEEDS_CONTEXT; memcpy(to, from, size); return 0; }
int cuGetErrorName(int code, const char **name) { CALLED; *name = "CUDA_ERROR_OF_THE_STUB"; return 0; }
int cuGetErrorString(int code, const char **text) { CALLED; *text = "an error of the stub"; return 0; }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long flags, int *found) { CALLED;
  char name[128];
  const char *endings[] = {"_v3", "_v2", ""};
  for (int i = 0; i < 3; i++) {
    snprintf(name, sizeof name, "%s%s", symbol, endings[i]);
    if ((*function = dlsym(RTLD_DEFAULT, name))) break;
  }
  if (!*function) {
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < 3 && self && !*function; i++) {
      snprintf(name, sizeof name, "%s%s", symbol, endings[i]);
      *function = dlsym(self, name);
    }
  }
  if (found) *found = *function ? 0 : 1;
  return *function ? 0 : NOT_FOUND;
}
int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long flags) { CALLED;
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
