"""Writes down every allocation of a step, and when it is freed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import UntypedStorage

from torchtune_adaptive.memory.cpu_meter import MemoryMeter
from torchtune_adaptive.prediction.work import Work, WorkCounter

if TYPE_CHECKING:
    from torch._ops import OpOverload

Workspace = Callable[..., int]


NO_OP = "resident or resized"
"""What FSDP allocates by resizing storages, and what was there before."""


@dataclass(frozen=True)
class Allocation:
    """One allocation: what made it, and the stream that it belongs to."""

    op: str
    stream: int


@dataclass(frozen=True)
class Recording:
    """Allocations and frees in the order of the program, of blocks numbered from 0 on."""

    blocks: tuple[Allocation, ...]
    of_block: array[int]
    bytes_change: array[int]
    """Bytes that each event allocates, or minus what it frees."""
    phases: Mapping[str, int]
    """Phase -> number of events before its end, in the order in which phases end."""
    work: Work | None = None
    """Work of its kernels, where that was counted."""

    @property
    def update_start(self) -> int:
        """The event with which the last phase begins."""
        return [0, *self.phases.values()][-2]


class Recorder(MemoryMeter):
    """A meter that keeps what it counts."""

    counts_fakes = True

    def __init__(self, workspaces: Mapping[OpOverload, Workspace], counter: WorkCounter | None = None) -> None:
        """`workspaces` says what an operation's kernel takes for itself: bytes, from the operation's arguments.

        `counter` is told of all operations.
        """
        super().__init__()
        self.counter = counter
        self._workspaces = workspaces
        self._op = NO_OP
        self._streams: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._blocks: list[Allocation] = []
        self._of_block = array("q")
        self._bytes_change = array("q")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: without it torch.compile silently leaves eager whatever runs under a mode."""
        return True

    @property
    def events(self) -> int:
        return len(self._of_block)

    def recording(self, phases: Mapping[str, int]) -> Recording:
        work = None if self.counter is None else self.counter.work
        return Recording(tuple(self._blocks), self._of_block[:], self._bytes_change[:], dict(phases), work)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._op = str(func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in self._workspaces:
            # in use only while the kernel runs, when its outputs are there already
            size = self._workspaces[func](*args, **(kwargs or {}))
            block = self._allocated(size)
            self._note(block, -size)
        self._op = NO_OP
        if self.counter is not None:
            self.counter.operation(func, args, kwargs or {}, result)
        return result

    def _update(self, storage: UntypedStorage, *, may_be_new: bool) -> None:
        before = self._size_of(storage._cdata)
        super()._update(storage, may_be_new=may_be_new)
        after = self._size_of(storage._cdata)
        if before == after:
            return
        if before:
            self._note(self._block_of.pop(storage._cdata), -before)
        if after:
            self._block_of[storage._cdata] = self._allocated(after)

    def _forget(self, key: int) -> None:
        if size := self._size_of(key):
            self._note(self._block_of.pop(key), -size)
        super()._forget(key)

    def _size_of(self, key: int) -> int:
        known = self._storages.get(key)
        return 0 if known is None else known[0]

    def _allocated(self, size: int) -> int:
        stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
        self._blocks.append(Allocation(self._op, stream))
        self._note(len(self._blocks) - 1, size)
        return len(self._blocks) - 1

    def _note(self, block: int, bytes_change: int) -> None:
        self._of_block.append(block)
        self._bytes_change.append(bytes_change)
