// Events and streams. A GPU works behind the host, so an event completes late: when the host has waited for it or for later work of its
// stream, or when the host has issued so much work since then that a real device would have made it wait. Until then, torch's allocator
// does not reuse memory that `record_stream` keeps for another stream.
#include "null.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_READY = 600 };
enum { AHEAD = 1024 }; // how much work the host can issue before it waits for the device: the length of CUDA's queue of launches
enum { POLLS = 16 };   // an event completes if it is queried so often while the host issues nothing else: it waits for the event
enum { WAITS = 4096 };

typedef struct { uint64_t done; int device; } Stream; // all work until `done` is complete; times count the work that the host has issued
typedef struct { Stream *on; uint64_t at, polled_at; int polls; } Event; // `on` is NULL if it was not recorded
typedef struct { Stream *waits, *on; uint64_t from, at; } Wait; // work on stream `waits`, from `from` on, waits for `on` until `at`

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t issued[MAX_DEVICES], synchronized[MAX_DEVICES];
static Stream defaults[MAX_DEVICES];
static Wait waits[WAITS]; // the latest ones
static unsigned wait_count;

static Stream *stream_of(void *handle) { // 0 to 2 are default streams of the current device
  if ((uintptr_t)handle > 2) return handle;
  defaults[current_device()].device = current_device();
  return &defaults[current_device()];
}
static uint64_t issue(int device) { return __atomic_add_fetch(&issued[device], 1, __ATOMIC_RELAXED); }
void issue_work(void) { issue(current_device()); }

static void finish(Stream *stream, uint64_t until) {
  if (until <= stream->done) return;
  stream->done = until;
  for (Wait *each = waits; each < waits + WAITS; each++)
    if (each->waits == stream && each->from <= until) finish(each->on, each->at);
}
static void finish_locked(Stream *stream, uint64_t until) {
  pthread_mutex_lock(&lock);
  finish(stream, until);
  pthread_mutex_unlock(&lock);
}

static int make_stream(void **out) {
  Stream *stream = *out = calloc(1, sizeof *stream);
  return stream->device = current_device(), SUCCESS;
}
API int cudaStreamCreate(void **out) { return make_stream(out); }
API int cudaStreamCreateWithFlags(void **out) { return make_stream(out); }
API int cudaStreamCreateWithPriority(void **out) { return make_stream(out); }
API int cudaEventCreate(void **out) { return *out = calloc(1, sizeof(Event)), SUCCESS; }
API int cudaEventCreateWithFlags(void **out) { return cudaEventCreate(out); }
API int cuEventCreate(void **out) { return cudaEventCreate(out); }
API int cudaIpcGetEventHandle(char *out, void *event) { return memset(out, 0, 64), SUCCESS; }
API int cudaIpcOpenEventHandle(void **out) { return cudaEventCreate(out); } // of another process, whose work is complete
API int cuStreamCreate(void **out) { return make_stream(out); }
API int cuStreamCreateWithPriority(void **out) { return make_stream(out); }
API int cudaEventDestroy(void *event) { return free(event), SUCCESS; }

API int cudaEventRecord(Event *event, void *handle) {
  Stream *stream = stream_of(handle);
  *event = (Event){.on = stream, .at = issued[stream->device]};
  return record_order("record", handle, event);
}
API int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
API int cudaEventQuery(Event *event) {
  uint64_t now = event->on ? issued[event->on->device] : 0;
  if (!event->on || event->at <= event->on->done || event->at <= synchronized[event->on->device] || now - event->at >= AHEAD) return SUCCESS;
  event->polls = event->polled_at == now ? event->polls + 1 : 1, event->polled_at = now;
  if (event->polls < POLLS) return NOT_READY;
  return finish_locked(event->on, event->at), SUCCESS;
}
API int cudaEventSynchronize(Event *event) {
  if (event->on) finish_locked(event->on, event->at);
  return record_order("event", event, 0);
}
API int cudaStreamWaitEvent(void *handle, Event *event, unsigned flags) {
  Stream *stream = stream_of(handle);
  pthread_mutex_lock(&lock);
  if (event->on) waits[wait_count++ % WAITS] = (Wait){stream, event->on, issue(stream->device), event->at};
  pthread_mutex_unlock(&lock);
  return record_order("wait", handle, event);
}
API int cudaStreamSynchronize(void *handle) {
  Stream *stream = stream_of(handle);
  finish_locked(stream, issued[stream->device]);
  return record_order("stream", handle, 0);
}
API int cudaDeviceSynchronize(void) {
  synchronized[current_device()] = issued[current_device()];
  return record_order("device", 0, 0);
}
API int cuEventRecord(Event *event, void *stream) { return cudaEventRecord(event, stream); }
API int cuEventQuery(Event *event) { return cudaEventQuery(event); }
API int cuEventSynchronize(Event *event) { return cudaEventSynchronize(event); }
API int cuEventDestroy_v2(void *event) { return cudaEventDestroy(event); }
API int cuStreamWaitEvent(void *stream, Event *event, unsigned flags) { return cudaStreamWaitEvent(stream, event, flags); }
API int cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }
API int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
// Every interval is one second. Autotuners repeat a kernel until its time is long enough, so they run it once.
API int cudaEventElapsedTime(float *out, void *start, void *end) { return *out = 1000, SUCCESS; }

API int __cudaLaunchKernel(void) { return issue_work(), SUCCESS; }
API int cudaLaunchKernel(void) { return issue_work(), SUCCESS; }
API int cudaLaunchKernelExC(void) { return issue_work(), SUCCESS; }
API int cuLaunchKernel(void) { return issue_work(), SUCCESS; }
API int cuLaunchKernelEx(void) { return issue_work(), SUCCESS; }
API int cudnnBackendExecute(void) { return issue_work(), SUCCESS; }
