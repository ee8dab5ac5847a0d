// The properties of the simulated GPU ("card"), which come from environment variables, and the functions that return them.
#include "null.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Card the_card;
static _Thread_local int device, last_error;

// Properties by compute capability. Triton selects kernels by the shared memory of a block and of a multiprocessor.
static const struct { int capability, multiprocessors, per_block, per_multiprocessor; } generations[] = {
    {80, 108, 166912, 167936}, {86, 84, 101376, 102400},   {89, 142, 101376, 102400},
    {90, 132, 232448, 233472}, {100, 148, 232448, 233472}, {120, 188, 101376, 102400},
};

API void null_cuda_read_environment(void) {
  const char *memory = getenv("NULL_CUDA_MEMORY"), *devices = getenv("NULL_CUDA_DEVICES");
  const char *capability = getenv("NULL_CUDA_CAPABILITY"), *name = getenv("NULL_CUDA_NAME");
  Card *c = &the_card;
  c->memory = memory ? strtoull(memory, 0, 10) : 80ull << 30;
  c->devices = devices ? atoi(devices) : 1;
  if (c->devices > MAX_DEVICES) c->devices = MAX_DEVICES;
  c->major = 9, c->minor = 0;
  if (capability) sscanf(capability, "%d.%d", &c->major, &c->minor);
  for (size_t i = 0; i < sizeof generations / sizeof *generations; i++)
    if (i == 0 || generations[i].capability <= c->major * 10 + c->minor) {
      c->multiprocessors = generations[i].multiprocessors;
      c->shared_per_block = generations[i].per_block;
      c->shared_per_multiprocessor = generations[i].per_multiprocessor;
    }
  // torch caches compiled kernels under this name, so it must differ between compute capabilities.
  if (name) snprintf(c->name, sizeof c->name, "%s", name);
  else snprintf(c->name, sizeof c->name, "null device %d.%d", c->major, c->minor);
}

API const Card *card(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, null_cuda_read_environment);
  return &the_card;
}

int current_device(void) { return device; }

int note(int error) {
  if (error) last_error = error;
  return error;
}

API int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return error;
}
API int cudaPeekAtLastError(void) { return last_error; }

API const char *cudaGetErrorString(int error) {
  switch (error) {
  case SUCCESS: return "no error";
  case OUT_OF_MEMORY: return "out of memory";
  case INVALID_DEVICE: return "invalid device ordinal";
  case NO_ADDRESSES: return "this machine gives a null device no more addresses: is there a limit (ulimit -v)?";
  case NOT_SUPPORTED: return "a null device does not have this: memory that processes share, or an allocation of a rare kind";
  default: return "invalid argument";
  }
}
API const char *cudaGetErrorName(int error) {
  switch (error) {
  case SUCCESS: return "cudaSuccess";
  case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
  case INVALID_DEVICE: return "cudaErrorInvalidDevice";
  case NO_ADDRESSES: return "cudaErrorOperatingSystem";
  case NOT_SUPPORTED: return "cudaErrorNotSupported";
  default: return "cudaErrorInvalidValue";
  }
}
API int cuGetErrorString(int error, const char **out) { return *out = cudaGetErrorString(error), SUCCESS; }
API int cuGetErrorName(int error, const char **out) { return *out = cudaGetErrorName(error), SUCCESS; }

API int cudaGetDeviceCount(int *out) { return *out = card()->devices, SUCCESS; }
API int cudaGetDevice(int *out) { return *out = device, SUCCESS; }
API int cudaSetDevice(int which) {
  if (which < 0 || which >= card()->devices) return note(INVALID_DEVICE);
  return device = which, SUCCESS;
}
API int cudaRuntimeGetVersion(int *out) { return *out = CUDA, SUCCESS; }
API int cudaDriverGetVersion(int *out) { return *out = CUDA, SUCCESS; }
API int cudaDeviceGetPCIBusId(char *out, int bytes, int which) {
  snprintf(out, bytes, "0000:%02x:00.0", which + 1);
  return SUCCESS;
}
API int cudaDeviceCanAccessPeer(int *out, int which, int peer) { return *out = 0, SUCCESS; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }

API int cudaDeviceGetAttribute(int *out, int attribute, int which) {
  const Card *c = card();
  switch (attribute) {
  case 1: case 2: case 3: *out = 1024; break; // threads of a block: in total, in x, in y
  case 4: *out = 64; break; // in z
  case 5: *out = 2147483647; break; // blocks of a grid in x
  case 6: case 7: *out = 65535; break; // in y, in z
  case 8: *out = 49152; break; // default shared memory of a block
  case 10: *out = 32; break;   // threads of a warp
  case 12: case 82: *out = 65536; break; // registers of a block, and of a multiprocessor
  case 13: case 36: *out = 1000000; break; // clock rates of the GPU and of its memory, in kHz
  case 16: *out = c->multiprocessors; break;
  case 37: *out = 5120; break; // bits of the memory bus
  case 38: *out = 50 << 20; break; // bytes of the L2 cache
  case 39: *out = 2048; break; // threads of a multiprocessor
  case 41: *out = 1; break; // unified addressing
  case 75: *out = c->major; break;
  case 76: *out = c->minor; break;
  case 81: *out = c->shared_per_multiprocessor; break;
  case 97: *out = c->shared_per_block; break;
  case 102: *out = 1; break; // virtual memory management (cuMemCreate)
  case 106: *out = 32; break; // blocks of a multiprocessor
  case 115: *out = 1; break; // cudaMallocAsync
  default: *out = 0;
  }
  return SUCCESS;
}

// Fills the caller's cudaDeviceProp. In CUDA 13, it has 1008 bytes. `place` is the offset of an attribute's value in it.
API int cudaGetDeviceProperties(char *out, int which) {
  static const struct { int place, attribute; } ints[] = {
      {304, 12}, {308, 10}, {320, 1}, {324, 2}, {328, 3}, {332, 4}, {336, 5}, {340, 6}, {344, 7}, {360, 75}, {364, 76},
      {384, 16}, {588, 41}, {592, 37}, {596, 38}, {604, 39}, {632, 82}, {688, 106},
  };
  static const struct { int place, attribute; } sizes[] = {{296, 8}, {624, 81}, {672, 97}};
  if (which < 0 || which >= card()->devices) return note(INVALID_DEVICE);
  memset(out, 0, 1008);
  memcpy(out, card()->name, sizeof card()->name);
  out[256 + 15] = which + 1; // uuid
  *(size_t *)(out + 288) = card()->memory;
  *(size_t *)(out + 368) = 512; // alignment of textures
  *(int *)(out + 560) = 1;      // concurrent kernels
  *(int *)(out + 568) = which + 1; // PCI bus
  for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) cudaDeviceGetAttribute((int *)(out + ints[i].place), ints[i].attribute, which);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    int value;
    cudaDeviceGetAttribute(&value, sizes[i].attribute, which);
    *(size_t *)(out + sizes[i].place) = value;
  }
  return SUCCESS;
}

// The same queries in the driver API, which Triton calls, and in NVML, through which torch counts devices.
API int cuInit(unsigned flags) { return SUCCESS; }
API int cuDriverGetVersion(int *out) { return *out = CUDA, SUCCESS; }
API int cuDeviceGetCount(int *out) { return cudaGetDeviceCount(out); }
API int cuDeviceGet(int *out, int which) { return *out = which, SUCCESS; }
API int cuDeviceGetName(char *out, int bytes, int which) { return snprintf(out, bytes, "%s", card()->name), SUCCESS; }
API int cuDeviceTotalMem_v2(size_t *out, int which) { return *out = card()->memory, SUCCESS; }
API int cuDeviceGetAttribute(int *out, int attribute, int which) { return cudaDeviceGetAttribute(out, attribute, which); }
API int cuDevicePrimaryCtxGetState(int which, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
API int cuDevicePrimaryCtxRetain(void **out, int which) { return *out = (void *)(intptr_t)(which + 1), SUCCESS; }
API int cuCtxGetCurrent(void **out) { return *out = (void *)(intptr_t)(device + 1), SUCCESS; }
API int cuCtxGetDevice(int *out) { return *out = device, SUCCESS; }
API int cuCtxGetLimit(size_t *out, int limit) { return *out = 1 << 20, SUCCESS; }
API int nvmlInit(void) { return SUCCESS; }
API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
API int nvmlDeviceGetCount_v2(unsigned *out) { return *out = card()->devices, SUCCESS; }
API int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }
API int nvmlShutdown(void) { return SUCCESS; }
API int nvmlSystemGetDriverVersion(char *out, unsigned bytes) { return snprintf(out, bytes, "580.00"), SUCCESS; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned which, void **out) { // a handle is the device's number plus 1
  if (which >= (unsigned)card()->devices) return 2;
  return *out = (void *)(intptr_t)(which + 1), SUCCESS;
}
API int nvmlDeviceGetHandleByIndex(unsigned which, void **out) { return nvmlDeviceGetHandleByIndex_v2(which, out); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *at, void **out) {
  unsigned bus = 0;
  sscanf(at, "%*x:%x", &bus);
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, out);
}
API int nvmlDeviceGetIndex(void *which, unsigned *out) { return *out = (intptr_t)which - 1, SUCCESS; }
API int nvmlDeviceGetName(void *which, char *out, unsigned bytes) { return snprintf(out, bytes, "%s", card()->name), SUCCESS; }
API int nvmlDeviceGetMemoryInfo(void *which, uint64_t *out) { // total, free, used
  out[0] = card()->memory, out[2] = null_cuda_used((intptr_t)which - 1), out[1] = out[0] - out[2];
  return SUCCESS;
}
API int nvmlDeviceGetMemoryInfo_v2(void *which, uint64_t *out) { // version, total, reserved, free, used
  uint64_t found[3];
  nvmlDeviceGetMemoryInfo(which, found);
  return out[1] = found[0], out[2] = 0, out[3] = found[1], out[4] = found[2], SUCCESS;
}
API int nvmlDeviceGetUtilizationRates(void *which, unsigned *out) { return out[0] = out[1] = 0, SUCCESS; }
API int nvmlDeviceGetTemperature(void *which, int sensor, unsigned *out) { return *out = 40, SUCCESS; }
API int nvmlDeviceGetPowerUsage(void *which, unsigned *out) { return *out = 100000, SUCCESS; } // mW
API int nvmlDeviceGetGpuFabricInfoV(void *which, char *out) { return out[28] = 0, SUCCESS; } // no fabric
API int nvmlDeviceGetComputeRunningProcesses(void *which, unsigned *count, void *out) { return *count = 0, SUCCESS; }
// Functions that only engines of inference call.
API int nvmlSystemGetCudaDriverVersion(int *out) { return *out = CUDA, SUCCESS; }
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { return *out = CUDA, SUCCESS; }
API int nvmlDeviceGetCudaComputeCapability(void *which, int *major, int *minor) { return *major = card()->major, *minor = card()->minor, SUCCESS; }
API int nvmlDeviceGetUUID(void *which, char *out, unsigned bytes) { // as nvidia_smi.c prints it
  return snprintf(out, bytes, "GPU-%d", (int)(intptr_t)which - 1), SUCCESS;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  unsigned which = MAX_DEVICES;
  sscanf(uuid, "GPU-%u", &which);
  return nvmlDeviceGetHandleByIndex_v2(which, out);
}
API int nvmlDeviceGetMinorNumber(void *which, unsigned *out) { return nvmlDeviceGetIndex(which, out); }
API int nvmlDeviceGetNumaNodeId(void *which, unsigned *out) { return *out = 0, SUCCESS; }
API int nvmlDeviceGetP2PStatus(void *which, void *peer, int kind, int *out) { return *out = 1, SUCCESS; } // not supported
API int nvmlDeviceGetTopologyCommonAncestor(void *which, void *peer, int *out) { return *out = 50, SUCCESS; } // the same host
