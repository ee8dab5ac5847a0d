"""Running out of memory: how to recognise it, and how to get back what the failed pass still holds."""

import gc
import traceback
from contextlib import suppress
from dataclasses import dataclass

import torch

# Not every backend has a type for it. Matched only on RuntimeError, and only here.
_OOM_TEXTS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_oom(error: BaseException) -> bool:
    """Whether an exception says that device memory ran out, so that a smaller microbatch may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_TEXTS)


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
        pending += [current.__cause__, current.__context__]


def release() -> None:
    """Returns what a failed pass held to the allocator. Call it outside of `except`."""
    _flush_autograd()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _flush_autograd() -> None:
    """Runs a trivial backward on this thread.

    After an exception in backward() the thread's ready queue holds the failed graph, and all its activations,
    until the next backward(). Where even one number does not fit, that will be the next attempt's.
    """
    with torch.enable_grad(), suppress(torch.OutOfMemoryError):
        torch.ones(1, requires_grad=True).sum().backward()


@dataclass(frozen=True)
class RngState:
    """The state of the random generators that dropout draws from, on the host and on this rank's GPU."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @staticmethod
    def capture() -> "RngState":
        # Asked of the process rather than of a parameter, which may be offloaded to the host.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RngState(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
