"""Recognizes out-of-memory errors, and frees the memory that a failed pass still holds."""

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchtune_adaptive.errors import AdaptiveError

# Texts of out-of-memory errors that have no exception type. Backends raise them as RuntimeError or a subclass, such as
# torch.AcceleratorError. NCCL's "Cuda failure 2 'out of memory'" is not listed, because it breaks the communicator.
_OOM_TEXTS = re.compile(
    "|".join(
        (
            r"\b(CUDA|HIP) error: out of memory",  # c10/cuda/CUDAException.cpp
            r"\b(CUDA|HIP) driver error: out of memory",  # c10/cuda/driver_api.h, where expandable segments grow
            r"\b(CUDA|HIP) out of memory\b",  # the text of torch.OutOfMemoryError, in an error of another library
            r"Triton Error \[\w+\]:.*out of memory",  # triton's backend/nvidia/driver.c and backend/amd/driver.c
            # ATen/cuda/Exceptions.h, ATen/native/cuda/CuFFTUtils.h, and their versions for HIP
            r"\b(CU|HIP|ROC)(BLAS|DNN|FFT|SOLVER|SPARSE)_(STATUS_)?ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b",  # since cuDNN 9
            r"resource allocation failed when calling `cusparse",  # cusparseGetErrorString, of CUSPARSE_…_ALLOC_FAILED
            # On a full GPU, cuBLAS reports this instead of ALLOC_FAILED when it creates a handle, at the first matrix
            # product of a thread. A broken CUDA context has the same text; release_memory() then raises the error that
            # broke it. From any other call, this text does not mean out of memory.
            r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create\b",
            r"\bstd::bad_alloc\b",  # the host is out of memory
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",  # c10/core/impl/alloc_cpu.cpp
        )
    )
)


def is_oom(error: BaseException) -> bool:
    """Return True if the device or the host ran out of memory, so that a smaller microbatch may succeed. Follows
    causes, because torch.compile and DTensor wrap exceptions. An AdaptiveError never counts: it ends the run."""
    return any(_reports_oom(each) for each in _chain(error, all_linked=False))


@contextmanager
def fatal_on_oom(explain: Callable[[Exception], AdaptiveError]) -> Iterator[None]:
    """Replace an out-of-memory error by `explain(error)`, for code that cannot be repeated."""
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise explain(error) from error


def _reports_oom(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OOM_TEXTS.search(str(error)) is not None


def _chain(error: BaseException | None, *, all_linked: bool) -> Iterator[BaseException]:
    """Yield the error and its causes, without AdaptiveErrors; with `all_linked`, every exception it refers to.
    `__context__` is not a cause, because code that handles one error can raise an unrelated one."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen or (isinstance(current, AdaptiveError) and not all_linked):
            continue
        seen.add(id(current))
        yield current
        # torch.compile keeps its backend's exception in BackendCompilerFailed and InductorError
        inner = getattr(current, "inner_exception", None)
        pending += [current.__cause__, inner if isinstance(inner, BaseException) else None]
        if all_linked:
            pending.append(current.__context__)


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in an exception's traceback, which keep the autograd graph of the failed pass alive."""
    for each in _chain(error, all_linked=True):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def release_memory() -> None:
    """Free the memory of a failed pass and the allocator's cache. Call it outside of `except`."""
    _flush_autograd()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _flush_autograd() -> None:
    """Run an empty backward on this thread and on autograd's thread for the GPU, so that both drop the failed graph.

    After an exception in backward(), the ready queue of a thread keeps the failed graph and its activations until the
    next backward(). The GPU's thread may still be busy when the exception arrives here. It starts the next backward()
    only after it has freed the previous graph.
    """
    for device in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
        with torch.enable_grad():
            torch.empty(0, device=device, requires_grad=True).clone().backward(torch.empty(0, device=device))
