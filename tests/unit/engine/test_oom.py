import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.oom import clear_frames, is_oom, release_memory
from torchtune_adaptive.errors import UnrecoverableError

# Exact messages of backends that raise untyped errors, and messages that only resemble them.
OOM_TEXTS = [
    "std::bad_alloc",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 6.00 GiB total capacity; 5.18 GiB already allocated)",
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API call",
    "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which 7 GiB is",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "CUDA error: resource allocation failed when calling `cusparseCreate(handle)`",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: tried to allocate 911360 bytes.",
]
OTHER_TEXTS = [
    "CUDA error: device-side assert triggered",
    "CUDA driver error: device not ready",
    "NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes may help.",
    "the limit of tokens is out of range",
]


def raised_from(cause: Exception, error: Exception) -> Exception:
    error.__cause__ = cause
    return error


def met_while_handling(handled: Exception, error: Exception) -> Exception:
    error.__context__ = handled
    return error


OOM, DRIVER = torch.OutOfMemoryError("any text"), RuntimeError("CUDA driver error: out of memory")
SHARDING = "in a kernel\n\nSharding propagation failed for aten._fused_adamw_"


@pytest.mark.parametrize(
    "error",
    [
        *(kind(text) for kind in (RuntimeError, torch.AcceleratorError) for text in OOM_TEXTS),
        *(OOM, MemoryError()),
        *(raised_from(cause, RuntimeError(SHARDING)) for cause in (OOM, DRIVER)),
        raised_from(raised_from(OOM, RuntimeError(SHARDING)), KeyError("two steps away")),
        *(InductorError(OOM, None), BackendCompilerFailed(print, OOM, None)),
    ],
    ids=repr,
)
def test_type_text_cause_or_wrapper_of_torch_compile_shows_an_out_of_memory_error(error: Exception):
    assert is_oom(error)


@pytest.mark.parametrize(
    "error",
    [
        *map(RuntimeError, OTHER_TEXTS),
        ValueError(OOM_TEXTS[0]),
        BackendCompilerFailed(print, KeyError("no such kernel"), None),
        met_while_handling(OOM, KeyError("in the handler")),
        raised_from(OOM, UnrecoverableError("an error of ours has judged already")),
    ],
    ids=repr,
)
def test_similar_texts_other_types_and_handled_errors_do_not_count(error: Exception):
    assert not is_oom(error)


def test_circular_causes_do_not_hang():
    first = KeyError("first")
    raised_from(raised_from(first, KeyError("second")), first)
    assert not is_oom(first)
    clear_frames(first)


def test_huge_cpu_allocation_is_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert is_oom(raised.value)


def fail_holding(tensor: Tensor) -> None:
    activations = tensor + 1
    try:
        raise KeyError
    except KeyError as error:
        raise torch.OutOfMemoryError(f"with {activations.numel()} numbers in a frame") from error


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped by torch.compile"])
def test_forgetting_an_error_frees_the_tensors_in_its_frames(wrapped: bool):
    held = torch.ones(1000)
    alive = weakref.ref(held)
    try:
        fail_holding(held)
    except torch.OutOfMemoryError as error:
        kept = InductorError(error, None) if wrapped else error
        clear_frames(kept)
    del held
    gc.collect()
    assert alive() is None
    assert (kept.inner_exception if wrapped else kept.__cause__).__traceback__ is None


def a_failing_backward(model: nn.Module) -> None:
    """Fail at the first gradient, while the rest of the graph waits to run."""
    hidden = model(torch.ones(64, 256))
    model[-1].bias.register_hook(raise_out_of_memory)
    hidden.sum().backward()


def raise_out_of_memory(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("in a hook")


def test_release_frees_the_graph_of_a_failed_backward():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    with MemoryMeter() as meter:
        try:
            a_failing_backward(model)
        except torch.OutOfMemoryError as error:
            clear_frames(error)
        model.zero_grad()
        held_by_autograd = meter.live_bytes
        release_memory()
    assert held_by_autograd > 0
    assert meter.live_bytes == 0


def test_release_works_without_any_free_memory():
    with MemoryMeter(cap_bytes=0) as meter:
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1)
        release_memory()
    assert meter.live_bytes == 0
