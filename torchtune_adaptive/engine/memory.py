"""Device memory: how much there is, and how much a step needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch

from torchtune_adaptive.text import MemorySize

FRAGMENTATION = 0.05
"""The share of a GPU that a search leaves free.

A probe shows what one step needs, and is not accepted if the allocator had to flush its cache for it. This is for
what a probe cannot show: holes that steps of different lengths leave between blocks (measured: docs/decisions.md).
"""


class MemorySource(Protocol):
    """What a search asks the memory of this rank's device."""

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once since the last reset."""

    @property
    def budget_bytes(self) -> int:
        """What `peak_bytes` may reach, with what is in use now."""

    @property
    def retries(self) -> int:
        """How often an allocation succeeded only after the allocator had returned cached blocks to the device."""

    @property
    def fullness(self) -> float:
        """The largest share of obtainable memory that was taken since the last reset, cached blocks included; from 1 on
        the allocator flushes its cache. 0 where there is no cache."""

    def reset_peak(self) -> None:
        """Starts a new peak; the old one is lost."""

    def unlimited(self) -> AbstractContextManager[None]:
        """Suspends a limit that is lower than what the device has."""


class CudaMemory:
    """The memory of a GPU, the current one by default. What other processes hold of it is not available.

    A limit stays in force: the allocator itself runs out of memory there, so a big GPU can stand in for a small one.
    """

    def __init__(self, limit: MemorySize | None = None, device: torch.device | None = None) -> None:
        self._device = device
        if limit is not None:
            total_bytes = torch.cuda.mem_get_info(device)[1]
            fraction = limit.bytes_of(total_bytes) / total_bytes
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def budget_bytes(self) -> int:
        return int(self._obtainable_bytes * (1 - FRAGMENTATION))

    @property
    def fullness(self) -> float:
        return torch.cuda.max_memory_reserved(self._device) / self._obtainable_bytes

    @property
    def _obtainable_bytes(self) -> float:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        allowed_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)
        return min(free_bytes + torch.cuda.memory_reserved(self._device), allowed_bytes)

    @property
    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)


def plain_tensors(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The plain tensors inside a tensor (for example, a DTensor), each with its own storage."""
    if not wraps_tensors(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]  # from torch 2.13, also the mesh of a DTensor
    return [plain for each in inner if isinstance(each, torch.Tensor) for plain in plain_tensors(each)]


def wraps_tensors(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


class Reading(NamedTuple):
    seconds: float
    """Seconds since the last step that counted; in the first step, since it began."""
    retries: int
    """Allocator retries since the last reading."""
    peak_bytes: int
    budget_bytes: int
    """0 where nothing measures memory."""


class Gauge:
    """Reads a clock, and a memory source where there is one."""

    def __init__(self, memory: MemorySource | None, *, shared: bool) -> None:
        """`shared`: other stages of a step use the memory too, so only what a stage sees while it runs is its own."""
        self._memory, self._shared = memory, shared
        self._budget_bytes = 0 if memory is None else memory.budget_bytes  # asking a GPU's driver takes time
        self._retries = 0 if memory is None else memory.retries
        self._since: float | None = None

    def begin_step(self) -> None:
        if self._shared and self._memory is not None:
            self._retries = self._memory.retries
        if self._since is None:
            self._since = time.perf_counter()

    def end_step(self) -> None:
        self._since = time.perf_counter()

    def read(self) -> Reading:
        seconds = 0.0 if self._since is None else time.perf_counter() - self._since
        if self._memory is None:
            return Reading(seconds, 0, 0, 0)
        before, self._retries = self._retries, self._memory.retries
        return Reading(seconds, self._retries - before, self._memory.peak_bytes, self._budget_bytes)
