// Memory: an allocation reserves host addresses and counts towards the memory of a card. Its pages read as zeros, and take host memory
// only when they are written.
#include "null.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, GRANULE = 2 << 20 };

typedef struct Block {
  char *start;
  size_t bytes, counted; // `counted` is 0 for addresses of cuMemAddressReserve, because cuMemCreate counts the memory
  int place;
  struct Block *next;
} Block;

typedef struct { size_t bytes; int place; } Physical; // what a handle of cuMemCreate points to

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t used[PLACES], limits[PLACES];
static int limited[PLACES];

static size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
static size_t limit_of(int place) { return limited[place] ? limits[place] : place >= PINNED ? SIZE_MAX : card()->memory; }

// Changes the limit for later allocations. Memory in use stays allocated, even above the limit. Tests use this to reduce memory.
API void null_cuda_set_memory(int place, size_t bytes) {
  pthread_mutex_lock(&lock);
  limits[place] = bytes;
  limited[place] = 1;
  pthread_mutex_unlock(&lock);
}
API size_t null_cuda_used(int place) { return used[place]; }

// A rehearsal counts the memory of one process. If another process, for example a child, allocates memory of a card, this function
// ends the rehearsal: it appends the other process's command line to the rehearsal's record, as JSON, and kills the rehearsed process.
// NULL_CUDA_REHEARSAL is "PID FD": the rehearsed process, and its file descriptor of the record.
static void end_rehearsal_of_another(void) {
  const char *rehearsal = getenv("NULL_CUDA_REHEARSAL");
  int process, number;
  if (!rehearsal || sscanf(rehearsal, "%d %d", &process, &number) != 2 || process == getpid()) return;
  char path[64], command[4096];
  int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t length = read(file, command, sizeof command - 1);
  close(file);
  if (length > 0 && !command[length - 1]) length--;
  for (ssize_t i = 0; i < length; i++)
    if (command[i] == '"' || command[i] == '\\') command[i] = '\'';
    else if ((unsigned char)command[i] < ' ') command[i] = ' ';
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, number);
  file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
  dprintf(file, "{\"kind\": \"child\", \"command\": \"%.*s\"}\n", (int)(length < 0 ? 0 : length), command);
  kill(process, SIGKILL);
}

// Adds bytes to the memory in use at a place. The caller holds the lock.
static int take(int place, size_t bytes) {
  if (place < PINNED) end_rehearsal_of_another();
  if (bytes > limit_of(place) || used[place] > limit_of(place) - bytes) return OUT_OF_MEMORY;
  used[place] += bytes;
  return SUCCESS;
}

static int add_block(int place, size_t bytes, size_t counted, void **out) {
  char *start = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return NO_ADDRESSES;
  madvise(start, bytes, MADV_NOHUGEPAGE); // with huge pages, one byte would take 2 MiB of host memory
  Block *block = malloc(sizeof *block);
  *block = (Block){start, bytes, counted, place, blocks};
  blocks = block;
  *out = start;
  return SUCCESS;
}

int allocate(int place, size_t bytes, void **out) {
  bytes = round_up(bytes, place >= PINNED ? PAGE : GRANULE);
  *out = NULL;
  if (!bytes) return SUCCESS;
  pthread_mutex_lock(&lock);
  int error = take(place, bytes);
  if (!error && (error = add_block(place, bytes, bytes, out))) used[place] -= bytes;
  pthread_mutex_unlock(&lock);
  return note(error);
}

int release(void *memory) {
  pthread_mutex_lock(&lock);
  for (Block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == memory) {
      Block *block = *at;
      *at = block->next;
      used[block->place] -= block->counted;
      before_release(block->start, block->bytes);
      munmap(block->start, block->bytes);
      free(block);
      break;
    }
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

// Returns the place of an address; -1 for host memory that this library did not allocate.
int place_of(const void *memory) {
  int place = -1;
  pthread_mutex_lock(&lock);
  for (Block *block = blocks; block && place < 0; block = block->next)
    if ((char *)memory >= block->start && (char *)memory < block->start + block->bytes) place = block->place;
  pthread_mutex_unlock(&lock);
  return place;
}
static int on_card(const void *memory) {
  int place = place_of(memory);
  return place >= 0 && place < PINNED;
}

API int cudaMalloc(void **out, size_t bytes) { return allocate(current_device(), bytes, out); }
API int cudaFree(void *memory) { return cudaDeviceSynchronize(), release(memory); }
API int cudaMallocAsync(void **out, size_t bytes, void *stream) { return allocate(current_device(), bytes, out); }
API int cudaFreeAsync(void *memory, void *stream) { return release(memory); }
API int cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return allocate(PINNED, bytes, out); }
API int cudaMallocHost(void **out, size_t bytes) { return allocate(PINNED, bytes, out); }
API int cudaMallocManaged(void **out, size_t bytes, unsigned flags) { return allocate(MANAGED, bytes, out); }
API int cudaFreeHost(void *memory) { return cudaDeviceSynchronize(), release(memory); }

// The same functions of the driver.
API int cuMemAlloc_v2(void **out, size_t bytes) { return allocate(current_device(), bytes, out); }
API int cuMemAllocAsync(void **out, size_t bytes, void *stream) { return allocate(current_device(), bytes, out); }
API int cuMemAllocHost_v2(void **out, size_t bytes) { return allocate(PINNED, bytes, out); }
API int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { return allocate(PINNED, bytes, out); }
API int cuMemAllocManaged(void **out, size_t bytes, unsigned flags) { return allocate(MANAGED, bytes, out); }
API int cuMemFree_v2(void *memory) { return cudaFree(memory); }
API int cuMemFreeAsync(void *memory, void *stream) { return release(memory); }
API int cuMemFreeHost(void *memory) { return cudaFree(memory); }
API int cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool, void *stream) { return allocate(current_device(), bytes, out); }

// Memory that processes share counts in the process that has allocated it. Another process sees zeros there.
typedef struct { size_t bytes, place, unused[6]; } SharedHandle;
API int cudaIpcGetMemHandle(SharedHandle *out, const void *memory) {
  int error = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (Block *block = blocks; block; block = block->next)
    if ((char *)memory >= block->start && (char *)memory < block->start + block->bytes)
      *out = (SharedHandle){block->bytes, block->place}, error = SUCCESS;
  pthread_mutex_unlock(&lock);
  return note(error);
}
API int cudaIpcOpenMemHandle(void **out, SharedHandle handle, unsigned flags) {
  if (!handle.bytes || handle.place >= PLACES) return note(INVALID_VALUE);
  pthread_mutex_lock(&lock);
  int error = add_block(handle.place, handle.bytes, 0, out);
  pthread_mutex_unlock(&lock);
  return note(error);
}
API int cudaIpcCloseMemHandle(void *memory) { return release(memory); }

static int memory_info(size_t *left, size_t *total) {
  int place = current_device();
  pthread_mutex_lock(&lock);
  *total = card()->memory;
  *left = limit_of(place) > used[place] ? limit_of(place) - used[place] : 0;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
API int cudaMemGetInfo(size_t *left, size_t *total) { return memory_info(left, total); }
API int cuMemGetInfo_v2(size_t *left, size_t *total) { return memory_info(left, total); }

API int cudaPointerGetAttributes(int *out, const void *memory) { // {type, device, address for devices, for the host}
  int place = place_of(memory);
  memset(out, 0, 88);
  out[0] = place < 0 ? 0 : place == PINNED ? 1 : place == MANAGED ? 3 : 2;
  out[1] = on_card(memory) ? place : current_device();
  *(const void **)(out + 2) = memory;
  if (place >= PINNED) *(const void **)(out + 4) = memory;
  return SUCCESS;
}
API int cuPointerGetAttribute(void *out, int attribute, const void *memory) {
  if (attribute == 1 || attribute == 3) *(const void **)out = attribute == 1 ? (void *)(intptr_t)(place_of(memory) + 1) : memory; // context, address
  else *(int *)out = attribute == 9 ? place_of(memory) : 0; // device
  return SUCCESS;
}

// Expandable segments: cuMemAddressReserve reserves addresses without counting them; cuMemCreate counts the memory that is mapped there.
API int cuMemGetAllocationGranularity(size_t *out, const void *of, int which) { return *out = GRANULE, SUCCESS; }
API int cuMemAddressReserve(void **out, size_t bytes, size_t alignment, void *at, uint64_t flags) {
  pthread_mutex_lock(&lock);
  int error = add_block(current_device(), bytes, 0, out);
  pthread_mutex_unlock(&lock);
  return error;
}
API int cuMemAddressFree(void *at, size_t bytes) { return release(at); }
API int cuMemCreate(Physical **out, size_t bytes, const int *of, uint64_t flags) { // of[3]: the device, or the host's node
  pthread_mutex_lock(&lock);
  int place = of[2] == 1 ? of[3] : PINNED, error = take(place, bytes);
  pthread_mutex_unlock(&lock);
  if (error) return error;
  *out = malloc(sizeof **out);
  **out = (Physical){bytes, place};
  return SUCCESS;
}
API int cuMemRelease(Physical *memory) {
  pthread_mutex_lock(&lock);
  used[memory->place] -= memory->bytes;
  pthread_mutex_unlock(&lock);
  free(memory);
  return SUCCESS;
}
API int cuMemMap(void *at, size_t bytes, size_t offset, void *memory, uint64_t flags) { return SUCCESS; }
API int cuMemUnmap(void *at, size_t bytes) { return madvise(at, bytes, MADV_DONTNEED), SUCCESS; }
API int cuMemSetAccess(void *at, size_t bytes, const void *access, size_t count) { return SUCCESS; }

// Copies transfer the data. Where the source is zero, `clear` frees the pages of the target instead, so that they take no host memory.
static const char zeros[PAGE];
static void clear(char *at, size_t bytes) {
  char *first = (char *)round_up((size_t)at, PAGE), *last = (char *)((size_t)(at + bytes) / PAGE * PAGE);
  if (first >= last) {
    memset(at, 0, bytes);
    return;
  }
  memset(at, 0, first - at);
  if (place_of(at) >= 0) madvise(first, last - first, MADV_DONTNEED);
  else
    for (char *page = first; page < last; page += PAGE) // in other host memory, compare first, because a write would allocate the page
      if (memcmp(page, zeros, PAGE)) memset(page, 0, PAGE);
  memset(last, 0, at + bytes - last);
}

// Returns 1 if a page was written or read, so that it is present or swapped out. Reads /proc/self/pagemap for 512 pages at a time.
typedef struct { int file; size_t first; uint64_t entries[512]; } Pagemap;
static int written(Pagemap *map, const char *at) {
  size_t page = (size_t)at / PAGE;
  if (page - map->first >= 512) {
    map->first = page / 512 * 512;
    if (pread(map->file, map->entries, sizeof map->entries, map->first * 8) != sizeof map->entries)
      memset(map->entries, 0xff, sizeof map->entries); // unknown: treat the pages as written
  }
  return map->entries[page - map->first] >> 62 != 0;
}

static void copy(char *to, const char *from, size_t bytes) {
  before_copy(to, from, bytes);
  int known = place_of(from) >= 0;
  if (bytes <= PAGE || !(on_card(from) || on_card(to))) {
    memcpy(to, from, bytes);
    return;
  }
  Pagemap map = {known ? open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC) : -1, SIZE_MAX};
  for (size_t done = 0; done < bytes;) { // for each run of pages that are all zero, or all not zero
    size_t run = 0;
    int empty = -1;
    while (done + run < bytes) {
      const char *at = from + done + run;
      size_t part = PAGE - (size_t)at % PAGE;
      if (part > bytes - done - run) part = bytes - done - run;
      int here = (known && !written(&map, at)) || !memcmp(at, zeros, part);
      if (empty >= 0 && here != empty) break;
      empty = here;
      run += part;
    }
    if (empty) clear(to + done, run);
    else memcpy(to + done, from + done, run);
    done += run;
  }
  if (map.file >= 0) close(map.file);
}

API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  if (on_card(from) && place_of(to) < 0) cudaStreamSynchronize(stream);
  issue_work();
  return copy(to, from, bytes), SUCCESS;
}
API int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
API int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, void *stream) {
  return copy(to, from, bytes), SUCCESS;
}
API int cudaMemcpy2DAsync(char *to, size_t stride, const char *from, size_t their_stride, size_t bytes, size_t rows, int kind, void *stream) {
  for (size_t row = 0; row < rows; row++) copy(to + row * stride, from + row * their_stride, bytes);
  return SUCCESS;
}
API int cuMemcpy(void *to, const void *from, size_t bytes) { return cudaMemcpy(to, from, bytes, 0); }
API int cuMemcpyAsync(void *to, const void *from, size_t bytes, void *stream) { return cudaMemcpyAsync(to, from, bytes, 0, stream); }
#define COPIES(name) \
  API int name(void *to, const void *from, size_t bytes) { return cudaMemcpy(to, from, bytes, 0); }
#define COPIES_LATER(name) \
  API int name(void *to, const void *from, size_t bytes, void *stream) { return cudaMemcpyAsync(to, from, bytes, 0, stream); }
COPIES(cuMemcpyHtoD_v2)
COPIES(cuMemcpyDtoH_v2)
COPIES(cuMemcpyDtoD_v2)
COPIES_LATER(cuMemcpyHtoDAsync_v2)
COPIES_LATER(cuMemcpyDtoHAsync_v2)
COPIES_LATER(cuMemcpyDtoDAsync_v2)
API int cudaMemset(void *at, int value, size_t bytes) {
  before_release(at, bytes);
  if (value) memset(at, value, bytes);
  else clear(at, bytes);
  return SUCCESS;
}
API int cuMemsetD8_v2(void *at, unsigned char value, size_t bytes) { return cudaMemset(at, value, bytes); }
API int cuMemsetD8Async(void *at, unsigned char value, size_t bytes, void *stream) { return issue_work(), cudaMemset(at, value, bytes); }
API int cudaMemsetAsync(void *at, int value, size_t bytes, void *stream) { return issue_work(), cudaMemset(at, value, bytes); }
