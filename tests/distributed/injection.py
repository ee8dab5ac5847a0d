"""Makes an operation of a chosen kind or number run out of memory."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OUT_OF_MEMORY = torch.OutOfMemoryError


class Injector:
    """Raises OutOfMemoryError before the k-th operation that runs under `watching()`, instead of running it.

    An operation is what the dispatcher sees, collectives among them, and every storage that grows in place,
    which is how FSDP allocates parameters and which no dispatcher sees.
    """

    def __init__(self) -> None:
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
            raise OUT_OF_MEMORY(f"injected failure number {self.fired}")

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
