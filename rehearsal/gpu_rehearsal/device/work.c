// Work: functions of kernels and libraries succeed without doing anything. Only host functions are run, at once.
#include "null.h"
#include <stdlib.h>
#include <string.h>

// Returns a handle for an opaque object: an address of 16 bytes that can be read and written. After 65,536 handles, addresses repeat.
API void *null_cuda_handle(void) {
  static char handles[1 << 16][16];
  static unsigned count;
  return handles[__atomic_fetch_add(&count, 1, __ATOMIC_RELAXED) % (1 << 16)];
}

#define MAKES_HANDLE(name) \
  API int name(void **out) { return *out = null_cuda_handle(), SUCCESS; }
#define ANSWERS(name, type, value) \
  API int name(const void *of, type *out) { return *out = (value), SUCCESS; }
#define SETS(name, type, value) \
  API int name(type *out) { return *out = (value), SUCCESS; }
#define UNSUPPORTED(name) \
  API int name(void) { return note(NOT_SUPPORTED); }

MAKES_HANDLE(cudaDeviceGetDefaultMemPool)
MAKES_HANDLE(cudaDeviceGetMemPool)
ANSWERS(cudaStreamGetPriority, int, 0)
// Functions of the runtime and of the driver that torch does not call, but extensions do.
ANSWERS(cudaStreamGetDevice, int, current_device())
ANSWERS(cudaStreamGetFlags, unsigned, 0)
ANSWERS(cudaStreamGetId, uint64_t, (uintptr_t)of)
ANSWERS(cuStreamGetCtx, void *, (void *)(intptr_t)(current_device() + 1))
SETS(cudaDeviceGetLimit, size_t, 1 << 20)
SETS(cudaDeviceGetP2PAttribute, int, 0)
SETS(cuDeviceCanAccessPeer, int, 0)
SETS(cudaOccupancyMaxActiveClusters, int, 16)
SETS(cudaOccupancyAvailableDynamicSMemPerBlock, size_t, 48 << 10)
MAKES_HANDLE(cudaGetSymbolAddress)
MAKES_HANDLE(cudaGetFuncBySymbol)
MAKES_HANDLE(cuLibraryLoadData)
MAKES_HANDLE(cuLibraryLoadFromFile)
MAKES_HANDLE(cuLibraryGetKernel)
MAKES_HANDLE(cuLibraryGetModule)
MAKES_HANDLE(cuKernelGetFunction)
UNSUPPORTED(cudaGetExportTable)
UNSUPPORTED(cudaMallocPitch)
UNSUPPORTED(cudaMalloc3D)
UNSUPPORTED(cudaMallocArray)
UNSUPPORTED(cudaMalloc3DArray)
UNSUPPORTED(cudaMallocMipmappedArray)
API int cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *out) { return *out = 0, SUCCESS; }
// CUDA graphs are empty. Captured operations run during the capture, with memory from the graph's pool. All streams count as captured.
static uint64_t captures;
static int capturing;
ANSWERS(cudaStreamIsCapturing, int, capturing)
ANSWERS(cuStreamIsCapturing, int, capturing)
API int cudaStreamBeginCapture(void *stream, int mode) { return captures++, capturing = 1, SUCCESS; }
API int cudaStreamEndCapture(void *stream, void **out) { return *out = null_cuda_handle(), capturing = 0, SUCCESS; }
API int cudaStreamGetCaptureInfo(void *stream, int *status, uint64_t *id, void **graph, void **needs, void **edges, size_t *count) {
  if (id) *id = captures;
  if (graph) *graph = NULL;
  if (count) *count = 0;
  return *status = capturing, SUCCESS;
}
MAKES_HANDLE(cudaGraphInstantiate)
MAKES_HANDLE(cudaGraphInstantiateWithFlags)
API int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { return *count = 1, SUCCESS; }
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *with) { return function(with), SUCCESS; }
API int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *with, unsigned flags) {
  return function(stream, SUCCESS, with), SUCCESS;
}

UNSUPPORTED(cudaStreamBeginCaptureToGraph)
UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemImportFromShareableHandle)
// Without this function, NVRTC works without a driver. Functions of the driver do not change the error that cudaGetLastError returns.
API int cuGetExportTable(void) { return NOT_SUPPORTED; }

// Kernels. A launch with <<<...>>> pushes its configuration, and the kernel's stub pops it.
typedef struct { unsigned x, y, z; } Dim;
static _Thread_local struct { Dim grid, block; size_t shared; void *stream; } launch;
API unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *stream) {
  launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
  return 0;
}
API int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void **stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared, *stream = launch.stream;
  return SUCCESS;
}
API void **__cudaRegisterFatBinary(void *binary) { return null_cuda_handle(); }
API int __cudaGetKernel(void **out, void *function) { return *out = function, SUCCESS; }
API int cudaFuncGetAttributes(char *out, const void *function) { // threads of a block, registers, versions
  // Architectures for which torch was compiled. CUB asks which one is in use: a card of capability 8.9 runs code for 8.6.
  static const int codes[] = {CODES};
  int code = codes[0];
  for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
    if (codes[i] <= card()->major * 10 + card()->minor) code = codes[i];
  memset(out, 0, 144);
  *(int *)(out + 24) = 1024, *(int *)(out + 28) = 32;
  *(int *)(out + 32) = *(int *)(out + 36) = code;
  return SUCCESS;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out) { return *out = 2, SUCCESS; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out) { return *out = 2, SUCCESS; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out) { return *out = 2, SUCCESS; }
API int cuOccupancyMaxActiveClusters(int *out) { return *out = 16, SUCCESS; }
API int cuFuncGetAttribute(int *out, int attribute, void *function) { // threads of a block, registers
  return *out = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, SUCCESS;
}
MAKES_HANDLE(cuModuleLoad)
MAKES_HANDLE(cuModuleLoadData)
MAKES_HANDLE(cuModuleLoadDataEx)
MAKES_HANDLE(cuModuleGetFunction)
MAKES_HANDLE(cudaLibraryLoadData)
MAKES_HANDLE(cudaLibraryLoadFromFile)
MAKES_HANDLE(cudaLibraryGetKernel)

// Libraries. Functions that create objects (…Create…) are among the stubs that build.py generates.
API int cublasGetVersion_v2(void *of, int *out) { return *out = CUDA * 10, SUCCESS; }
API size_t cublasLtGetVersion(void) { return CUDA * 10; }
ANSWERS(cublasGetPointerMode_v2, int, 0)
ANSWERS(cublasGetMathMode, int, 0)
API int cublasLtMatmulAlgoGetHeuristic(void *of, void *what, void *a, void *b, void *c, void *d, void *like, int most, void *out, int *found) {
  memset(out, 0, 96); // one algorithm, which needs no workspace
  return *found = 1, SUCCESS;
}
#define MULTIPLIES(name) API int name(void) { return issue_work(), SUCCESS; }
MULTIPLIES(cublasGemmEx)
MULTIPLIES(cublasSgemmEx)
MULTIPLIES(cublasSgemm_v2)
MULTIPLIES(cublasGemmStridedBatchedEx)
MULTIPLIES(cublasSgemmStridedBatched)
MULTIPLIES(cublasLtMatmul)
API size_t cudnnGetVersion(void) { return CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100 + CUDNN_PATCH; }
API size_t cudnnGetCudartVersion(void) { return CUDA; }
API int cudnnGetProperty(int which, int *out) {
  return *out = which == 0 ? CUDNN_MAJOR : which == 1 ? CUDNN_MINOR : CUDNN_PATCH, SUCCESS;
}
API int null_cuda_convolutions, null_cuda_solvers; // used cuDNN's convolutions; used functions with workspaces of unknown size
API int cudnnBackendCreateDescriptor(int kind, void **out) { // kind 1 is a convolution
  null_cuda_convolutions |= kind == 1;
  return *out = null_cuda_handle(), SUCCESS;
}
// Every operation has one plan, which needs no workspace: a list of objects has one entry, and a list of numbers consists of one 0.
API int cudnnBackendGetAttribute(void *of, int name, int type, int64_t most, int64_t *count, void *out) {
  enum { INT64 = 3, OBJECT = 15, INT32 = 23 };
  int number = type == INT64 || type == INT32;
  if (count) *count = number || type == OBJECT;
  if (number && most > 0) memset(out, 0, type == INT64 ? 8 : 4);
  return SUCCESS;
}
