// What the files of this library share. Names, numbers and layouts are the ABI of CUDA 13; no header of NVIDIA's is needed.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_ADDRESSES = 304, NOT_SUPPORTED = 801 };

enum { MAX_DEVICES = 16, PINNED = MAX_DEVICES, MANAGED, PLACES }; // where memory is: on a card, or pinned or managed on the host

typedef struct {
  size_t memory; // of one card, in bytes
  int devices, major, minor, multiprocessors, shared_per_block, shared_per_multiprocessor;
  char name[256];
} Card;

const Card *card(void);
int current_device(void);
int note(int error); // keeps an error for cudaGetLastError
void *new_handle(void);
size_t null_cuda_used(int place);
int allocate(int place, size_t bytes, void **out);
int release(void *memory);
