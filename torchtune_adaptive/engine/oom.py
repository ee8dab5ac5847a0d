"""Running out of memory: which errors mean it, and how to let go of what a failed attempt holds."""

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchtune_adaptive.errors import AdaptiveError

# Backends without a type for it raise RuntimeError, or a kind of it such as torch.AcceleratorError. Their texts are
# matched here and nowhere else. NCCL's "Cuda failure 2 'out of memory'" is not among them: its communicator is broken.
_OOM_TEXTS = re.compile(
    "|".join(
        (
            r"\b(CUDA|HIP) error: out of memory",  # c10/cuda/CUDAException.cpp
            r"\b(CUDA|HIP) driver error: out of memory",  # c10/cuda/driver_api.h, where expandable segments grow
            # The caching allocators, by a type of their own in later releases: c10/cuda and c10/xpu
            # (…CachingAllocator.cpp), aten/src/ATen/mps/MPSAllocator.mm, torch_npu's NPUCachingAllocator.cpp.
            r"\b(CUDA|HIP|XPU|NPU|MPS backend) out of memory\b",
            r"\bUR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b",  # XPU: Level Zero's name for it, through SYCL
            r"Triton Error \[\w+\]:.*out of memory",  # triton's backend/nvidia/driver.c and backend/amd/driver.c
            # ATen/cuda/Exceptions.h, ATen/native/cuda/CuFFTUtils.h and what hipify makes of them
            r"\b(CU|HIP|ROC)(BLAS|DNN|FFT|SOLVER|SPARSE)_(STATUS_)?ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b",  # since cuDNN 9
            r"resource allocation failed when calling `cusparse",  # cusparseGetErrorString, of CUSPARSE_…_ALLOC_FAILED
            # Each thread makes its handle at its first matrix product, and on a GPU that is full cuBLAS says this in
            # place of ALLOC_FAILED. The same stands for a context that is broken; then release() meets the error that
            # broke it, which is no matter of memory and ends the run. From any other call it is not about memory.
            r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create\b",
            r"\bstd::bad_alloc\b",  # the host's, wherever C++ code of torch allocates
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",  # c10/core/impl/alloc_cpu.cpp
        )
    )
)


def is_oom(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, the device's or the host's, so that a smaller microbatch may fit.

    That may be hidden in what the exception was raised from: torch.compile and DTensor wrap it. Our own errors never
    count: the code that raised them has already decided to end the run.
    """
    return any(_says_oom(each) for each in _origins(error))


@contextmanager
def fatal_where_memory_runs_out(explain: Callable[[Exception], AdaptiveError]) -> Iterator[None]:
    """Raises what `explain` makes in the place of an error about memory, where nothing can be run again."""
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise explain(error) from error


def _says_oom(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OOM_TEXTS.search(str(error)) is not None


def _origins(error: BaseException) -> Iterator[BaseException]:
    """The error, and everything that it was raised from.

    `__context__` is left out: an error met while another was being handled is not about that other one.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen or isinstance(current, AdaptiveError):
            continue
        seen.add(id(current))
        yield current
        pending += [current.__cause__, _inner(current)]


def _inner(error: BaseException) -> BaseException | None:
    """Where torch.compile keeps what its backend raised: BackendCompilerFailed, InductorError."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def forget_frames(error: BaseException | None) -> None:
    """Drops the local variables that an exception keeps alive: among them is the graph of the failed pass."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        pending += [current.__cause__, current.__context__, _inner(current)]


def release() -> None:
    """Returns what a failed pass held to the allocator. Call it outside of `except`."""
    _flush_autograd()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _flush_autograd() -> None:
    """Runs a trivial backward on this thread, and on autograd's thread for the device. It takes no memory.

    After an exception in backward() a thread's ready queue holds the failed graph, and all its activations, until its
    next backward(). The device's thread may not even have got that far when the exception arrives here; it starts the
    next backward() only after it has let go of the last.
    """
    for device in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
        with torch.enable_grad():
            torch.empty(0, device=device, requires_grad=True).clone().backward(torch.empty(0, device=device))
