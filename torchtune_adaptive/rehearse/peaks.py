"""The allocator's peaks between two readings, although the script reads and resets them as well."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

Statistics = dict[str, Any]
"""As torch has them: {"allocated_bytes": {"all": {"current": ..., "peak": ...}, ...}, "num_alloc_retries": ...}."""


@dataclass
class Usage:
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    flushes: int = 0
    """How often the allocator returned its cached blocks to the card and asked again."""

    def add(self, other: Usage) -> None:
        self.allocated_bytes = max(self.allocated_bytes, other.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, other.reserved_bytes)
        self.flushes += other.flushes

    def figures(self) -> dict[str, int]:
        return asdict(self)


class Peaks:
    """Stands between torch's Python functions and the allocator: a reset by one side does not reset the other's."""

    def __init__(self) -> None:
        self._statistics, self._reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self._scripts: dict[int, Statistics] = {}
        self._ours: dict[int, Usage] = {}
        self._flushes: dict[int, int] = {}
        torch._C._cuda_memoryStats = self._as_the_script_sees_them
        torch._C._cuda_resetPeakMemoryStats = self._script_resets

    def read(self) -> Usage:
        """What happened since the last reading, on the device that reserved most."""
        readings = (
            [self._read(device) for device in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
        )
        most = max(readings, key=lambda each: each.reserved_bytes, default=Usage())
        return replace(most, flushes=sum(each.flushes for each in readings))

    def _read(self, device: int) -> Usage:
        statistics = self._statistics(device)
        usage = self._ours.pop(device, Usage())
        usage.add(_peaks_of(statistics))
        retries = int(statistics["num_alloc_retries"])
        usage.flushes = max(retries - self._flushes.get(device, 0), 0)
        self._flushes[device] = retries
        self._scripts[device] = self._as_the_script_sees_them(device)
        self._reset(device)
        return usage

    def _as_the_script_sees_them(self, device: int) -> Statistics:
        statistics: Statistics = self._statistics(device)
        _raise_peaks(statistics, self._scripts.get(device, {}))
        return statistics

    def _script_resets(self, device: int) -> None:
        self._ours.setdefault(device, Usage()).add(_peaks_of(self._statistics(device)))
        self._scripts.pop(device, None)
        self._reset(device)


def _peaks_of(statistics: Statistics) -> Usage:
    return Usage(*(statistics[each]["all"]["peak"] for each in ("allocated_bytes", "reserved_bytes")))


def _raise_peaks(statistics: Statistics, to: Statistics) -> None:
    for name, value in to.items():
        if isinstance(value, dict):
            _raise_peaks(statistics[name], value)
        elif name == "peak":
            statistics[name] = max(statistics[name], value)
