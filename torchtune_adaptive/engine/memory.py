"""Reads the memory budget and the peak of a step, from CUDA's allocator or, on a CPU, from a MemoryMeter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.formatting import MemorySize

FRAGMENTATION = 0.05
"""Share of a GPU that a search leaves free, because steps with different lengths fragment the memory. A probe has one
length, so it does not show this. docs/decisions.md has the measurement."""


class MemorySource(Protocol):
    """Interface through which searches and steps read the memory of this rank's device."""

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated memory since the last reset."""

    @property
    def budget_bytes(self) -> int:
        """The highest acceptable `peak_bytes`. It depends on the memory that other processes use."""

    @property
    def retries(self) -> int:
        """Allocator retries so far: allocations that succeeded only after the allocator had flushed its cache."""

    @property
    def fullness(self) -> float:
        """Peak of reserved memory since the last reset, as a share of the memory that the process can obtain. At 1, the
        allocator flushes its cache. 0 if the allocator has no cache."""

    def reset_peak(self) -> None:
        """Set the peak to the memory that is in use now."""

    def unlimited(self) -> AbstractContextManager[None]:
        """Return a context in which a limit below the size of the device is not enforced."""


class CudaMemory:
    """Memory of a GPU, by default the current one, as CUDA's allocator reports it. The budget is the memory that this
    process can obtain, without the memory of other processes. If these hold more at some readings than at others (an
    inference engine that sleeps, for example), the highest counts. If there is a `limit`, the allocator enforces it."""

    def __init__(
        self,
        limit: MemorySize | None = None,
        device: torch.device | None = None,
        earlier: MemorySource | None = None,
    ) -> None:
        self._device = device
        self._most_elsewhere: int | None = earlier._most_elsewhere if isinstance(earlier, CudaMemory) else None
        if limit is not None:
            total_bytes = torch.cuda.mem_get_info(device)[1]
            fraction = limit.bytes_of(total_bytes) / total_bytes
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    @property
    def peak_bytes(self) -> int:
        """The peak of allocated memory since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def budget_bytes(self) -> int:
        """The memory that the process can obtain, minus `FRAGMENTATION`."""
        return int(self._obtainable_bytes * (1 - FRAGMENTATION))

    @property
    def fullness(self) -> float:
        """The peak of reserved memory, as a share of the memory that the process can obtain."""
        return torch.cuda.max_memory_reserved(self._device) / self._obtainable_bytes

    @property
    def _obtainable_bytes(self) -> float:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        allowed_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)
        elsewhere = total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
        self._most_elsewhere = elsewhere if self._most_elsewhere is None else max(self._most_elsewhere, elsewhere)
        return min(total_bytes - self._most_elsewhere, allowed_bytes)

    @property
    def retries(self) -> int:
        """The number of allocations that succeeded only after the allocator had flushed its cache."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        """Set the peak to the memory that is in use now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Do not enforce the limit while open."""
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)


@contextmanager
def memory_within(
    limit: MemorySize | None,
    device: torch.device,
    resident: Iterable[Tensor],
    earlier: MemorySource | None = None,
) -> Iterator[MemorySource | None]:
    """Enforce this rank's memory limit while open: by the allocator on CUDA, by a MemoryMeter on a CPU. `resident` are
    the tensors that are already on the device. Yields None on a CPU without a limit. On CUDA, the most memory that
    `earlier`, a source of an earlier context, has seen elsewhere counts, too."""
    if device.type == "cuda":
        fraction = torch.cuda.get_per_process_memory_fraction(device)
        try:
            yield CudaMemory(limit, device, earlier)
        finally:
            torch.cuda.set_per_process_memory_fraction(fraction, device)
    elif limit is None:
        yield None
    else:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # A dispatch mode makes compilation fail, for example in torchao's optimizers, so run compiled code eagerly.
        eagerly = torch.compiler.set_stance("force_eager")
        with eagerly, MemoryMeter(limit.bytes_of(machine_bytes)) as meter:
            meter.count(resident)
            yield meter


def resident_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the tensors that stay on the device between steps: parameters, buffers and optimizer state."""
    states = [leaf for optimizer in optimizers for leaf in tree_iter(dict(optimizer.state))]
    return [*model.parameters(), *model.buffers(), *(leaf for leaf in states if isinstance(leaf, Tensor))]


class Reading(NamedTuple):
    """The values that a Gauge has read; all 0 without a MemorySource."""

    retries: int
    """Allocator retries since the last reading."""
    peak_bytes: int
    budget_bytes: int


@dataclass
class RetriesSeen:
    """The allocator's retries at the latest reading of any stage, shared by the Gauges of all stages."""

    count: int = 0


class Gauge:
    """Reads the memory of a stage's steps from a MemorySource, if there is one."""

    def __init__(self, memory: MemorySource | None, seen: RetriesSeen, *, several_stages: bool) -> None:
        """If a step has `several_stages`, retries between two runs of this one are not counted."""
        self._memory, self._seen, self._several_stages = memory, seen, several_stages
        self._budget_bytes = 0 if memory is None else memory.budget_bytes  # read once, because it is slow on a GPU
        if memory is not None:
            seen.count = memory.retries

    def begin_step(self, *, resets_peak: bool = False) -> None:
        """Ignore the retries of other stages since the last reading and, with `resets_peak`, earlier peaks."""
        if self._several_stages and self._memory is not None:
            self._seen.count = self._memory.retries
        if resets_peak and self._memory is not None:
            self._memory.reset_peak()

    def read(self) -> Reading:
        """Return the memory, with the retries since the last reading of any stage; 0 if the count was reset."""
        if self._memory is None:
            return Reading(0, 0, 0)
        before, self._seen.count = self._seen.count, self._memory.retries
        return Reading(max(0, self._seen.count - before), self._memory.peak_bytes, self._budget_bytes)
