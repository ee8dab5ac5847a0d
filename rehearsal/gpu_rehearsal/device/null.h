// Declarations that the files of this library share. Names, numbers and layouts follow the ABI of CUDA 13, without NVIDIA's headers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_ADDRESSES = 304, NOT_SUPPORTED = 801 };

// A "place" of memory is a card (0 to 15), or pinned or managed host memory.
enum { MAX_DEVICES = 16, PINNED = MAX_DEVICES, MANAGED, PLACES };

typedef struct {
  size_t memory; // bytes of each card
  int devices, major, minor, multiprocessors, shared_per_block, shared_per_multiprocessor;
  char name[256];
} Card;

API const Card *card(void);
int current_device(void);
int note(int error); // stores an error for cudaGetLastError, and returns it
API void *null_cuda_handle(void);
extern int null_cuda_solvers;
size_t null_cuda_used(int place);
int allocate(int place, size_t bytes, void **out);
int release(void *memory);
int place_of(const void *memory);
// The recording of NCCL (nccl.c): a copy reads results of collectives, and writes or releases memory that results would go to.
void before_copy(const void *to, const void *from, size_t bytes);
void before_release(const void *at, size_t bytes);
int record_order(const char *what, const void *first, const void *second);
// Streams and events (events.c).
void issue_work(void); // counts a kernel or a copy on the current device
API int cudaStreamSynchronize(void *stream);
API int cudaDeviceSynchronize(void);
