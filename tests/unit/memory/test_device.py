import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from torchtune_adaptive.memory.device import RngState, forget_frames, is_oom, release
from torchtune_adaptive.memory.meter import MemoryMeter

# What torch raises where it has no type for it, and what only sounds like it.
OOM_TEXTS = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)",
]
OTHER_TEXTS = [
    "CUDA error: device-side assert triggered",
    "NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'",
    "the limit of tokens is out of range",
]


def test_the_type_is_enough():
    assert is_oom(torch.OutOfMemoryError("any text"))


@pytest.mark.parametrize("text", OOM_TEXTS)
def test_backends_without_a_type_are_known_by_their_text(text: str):
    assert is_oom(RuntimeError(text))


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_runtime_errors_are_not_out_of_memory(text: str):
    assert not is_oom(RuntimeError(text))


def test_the_text_of_another_type_does_not_count():
    assert not is_oom(ValueError(OOM_TEXTS[0]))


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


def test_forgetting_an_error_frees_what_its_frames_hold():
    held = torch.ones(1000)
    alive = weakref.ref(held)
    try:
        fail_holding(held)
    except torch.OutOfMemoryError as error:
        forget_frames(error)
        kept = error
    del held
    gc.collect()
    assert alive() is None
    assert kept.__cause__.__traceback__ is None


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
    with MemoryMeter(cap_bytes=0):
        release()


def test_random_numbers_repeat_after_restoring():
    state = RngState.capture()
    first = torch.rand(8)
    state.restore()
    assert torch.equal(torch.rand(8), first)
