"""Makes an operation of a chosen kind or number run out of memory."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.exc import InductorError
from torch.utils._python_dispatch import TorchDispatchMode

OUT_OF_MEMORY = torch.OutOfMemoryError


def without_a_type(text: str) -> Callable[[str], Exception]:
    """What backends raise that have no type for it."""

    def build(_: str) -> Exception:
        return RuntimeError(text)

    return build


def as_dtensor_does(what: str) -> Exception:
    """What DTensor makes of an error in an operation."""
    error = RuntimeError(f"{what}\n\nSharding propagation failed for aten.mm.default")
    error.__cause__ = OUT_OF_MEMORY(what)
    return error


def as_torch_compile_does(what: str) -> Exception:
    return InductorError(RuntimeError("Triton Error [CUDA]: out of memory"), None)


KINDS: dict[str, Callable[[str], Exception]] = {
    "a type of torch's": OUT_OF_MEMORY,
    "driver": without_a_type("CUDA driver error: out of memory"),
    "triton": without_a_type("Triton Error [CUDA]: out of memory"),
    "hip": without_a_type("HIP error: out of memory"),
    "xpu": without_a_type("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "npu": without_a_type("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity)"),
    "cublas handle": without_a_type("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cufft": without_a_type("cuFFT error: CUFFT_ALLOC_FAILED"),
    "host": without_a_type("DefaultCPUAllocator: not enough memory: you tried to allocate 911360 bytes."),
    "dtensor": as_dtensor_does,
    "torch.compile": as_torch_compile_does,
}
"""The ways in which running out of memory reaches us."""


class Injector:
    """Raises an error of some kind before the k-th operation that runs under `watching()`, instead of running it.

    An operation is what the dispatcher sees, collectives among them, and every storage that grows in place,
    which is how FSDP allocates parameters and which no dispatcher sees.
    """

    def __init__(self, kind: str = "a type of torch's") -> None:
        self._kind = kind
        self.fired = 0
        self.operations: list[str] = []
        self._fail_at: list[int] = []
        self._active = False

    def arm(self, fail_at: Sequence[int] = ()) -> None:
        """Each number counts from 1, and from the failure before it."""
        self.fired = 0
        self.operations = []
        self._fail_at = list(fail_at)

    def arm_to_count(self) -> None:
        """Never fails; `operations` says what there was."""
        self.arm([sys.maxsize])

    def tick(self, operation: str) -> None:
        self.operations.append(operation)
        if self._fail_at and len(self.operations) == self._fail_at[0]:
            self._fail_at.pop(0)
            self.fired += 1
            self.operations = []
            raise KINDS[self._kind](f"injected failure number {self.fired}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._active or not self._fail_at:  # a replay runs inside of a drain
            yield
            return
        self._active = True
        grow = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if size > storage.size():
                self.tick("resize_")
            return grow(storage, size)

        torch.UntypedStorage.resize_ = resize_
        try:
            with _Watch(self):
                yield
        finally:
            torch.UntypedStorage.resize_ = grow
            self._active = False


class _Watch(TorchDispatchMode):
    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self._injector = injector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._injector.tick(str(func))
        return func(*args, **(kwargs or {}))
