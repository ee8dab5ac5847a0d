"""What a rank reads off its clock and its memory at the end of every attempt."""

from __future__ import annotations

import time
from typing import NamedTuple

from torchtune_adaptive.memory.device import MemorySource


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

    def __init__(self, memory: MemorySource | None = None, *, shared: bool = False) -> None:
        """`shared`: other stages of a step use the memory too, so only what a stage sees while it runs is its own."""
        self._memory = memory
        self._shared = shared
        self._budget_bytes = 0 if memory is None else memory.budget_bytes  # asking a GPU's driver takes time
        self._retries = 0 if memory is None else memory.retries
        self._since: float | None = None

    def for_memory(self, memory: MemorySource | None) -> Gauge:
        """A gauge like this one for another memory."""
        return Gauge(memory, shared=self._shared)

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
