import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.oom import forget_frames, is_oom, release
from torchtune_adaptive.errors import UnrecoverableError

# What backends raise where they have no type for it, word for word, and what only sounds like it.
OOM_TEXTS = [
    "std::bad_alloc",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 6.00 GiB total capacity; 5.18 GiB already allocated)",
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API call",
    "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which 7 GiB is",
    "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of which 5.65 GiB is free.",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 GiB already allocated)",
    "MPS backend out of memory (MPS allocated: 8.84 GiB, other allocations: 1.2 GiB, max allowed: 9.07 GiB). Tried to "
    "allocate 1.00 GiB on private pool.",
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
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "the limit of tokens is out of range",
]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_the_type_is_enough(error: type[Exception]):
    assert is_oom(error("any text"))


@pytest.mark.parametrize("text", OOM_TEXTS)
def test_backends_without_a_type_are_known_by_their_text(text: str):
    assert is_oom(RuntimeError(text))
    assert is_oom(torch.AcceleratorError(text))


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_runtime_errors_are_not_out_of_memory(text: str):
    assert not is_oom(RuntimeError(text))


def test_the_text_of_another_type_does_not_count():
    assert not is_oom(ValueError(OOM_TEXTS[0]))


@pytest.mark.parametrize(
    "cause", [torch.OutOfMemoryError("in a kernel"), RuntimeError("CUDA driver error: out of memory")]
)
def test_an_error_that_was_raised_from_running_out_of_memory_is_one(cause: Exception):
    sharding = RuntimeError("in a kernel\n\nSharding propagation failed for aten._fused_adamw_")
    sharding.__cause__ = cause
    outer = KeyError("two steps away")
    outer.__cause__ = sharding
    assert is_oom(sharding)
    assert is_oom(outer)


def test_what_torch_compile_wraps_is_looked_into():
    cause = torch.OutOfMemoryError("while tuning")
    assert is_oom(InductorError(cause, None))
    assert is_oom(BackendCompilerFailed(print, cause, None))
    assert not is_oom(BackendCompilerFailed(print, KeyError("no such kernel"), None))


def fail_while_handling() -> None:
    try:
        raise torch.OutOfMemoryError
    except torch.OutOfMemoryError:
        raise KeyError("in the handler")  # noqa: B904 - the context is what is tested


def test_an_error_met_while_out_of_memory_was_handled_is_another_one():
    with pytest.raises(KeyError) as raised:
        fail_while_handling()
    assert isinstance(raised.value.__context__, torch.OutOfMemoryError)
    assert not is_oom(raised.value)


def test_an_error_of_ours_has_judged_already():
    verdict = UnrecoverableError("the weights may be partly updated")
    verdict.__cause__ = torch.OutOfMemoryError()
    assert not is_oom(verdict)


def test_errors_that_are_each_others_cause_do_not_hang():
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_oom(first)
    forget_frames(first)


def test_asking_a_cpu_for_too_much_is_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert is_oom(raised.value)


def fail_holding(tensor: Tensor) -> None:
    activations = tensor + 1
    try:
        raise KeyError
    except KeyError as error:
        raise torch.OutOfMemoryError(f"with {activations.numel()} numbers in a frame") from error


@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "by torch.compile"])
def test_forgetting_an_error_frees_what_its_frames_hold(wrapped: bool):
    held = torch.ones(1000)
    alive = weakref.ref(held)
    try:
        fail_holding(held)
    except torch.OutOfMemoryError as error:
        kept = InductorError(error, None) if wrapped else error
        forget_frames(kept)
    del held
    gc.collect()
    assert alive() is None
    assert (kept.inner_exception if wrapped else kept.__cause__).__traceback__ is None


def a_failing_backward(model: nn.Module) -> None:
    """Fails at its first gradient, when the rest of the graph waits to be run."""
    hidden = model(torch.ones(64, 256))
    model[-1].bias.register_hook(raise_out_of_memory)
    hidden.sum().backward()


def raise_out_of_memory(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("in a hook")


def test_release_frees_the_graph_that_a_failed_backward_leaves_in_autograd():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    with MemoryMeter() as meter:
        try:
            a_failing_backward(model)
        except torch.OutOfMemoryError as error:
            forget_frames(error)
        model.zero_grad()
        held_by_autograd = meter.live_bytes
        release()
    assert held_by_autograd > 0
    assert meter.live_bytes == 0


def test_release_survives_when_nothing_at_all_is_left():
    with MemoryMeter(cap_bytes=0) as meter:
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1)
        release()
    assert meter.live_bytes == 0
