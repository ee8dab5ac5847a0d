"""Capacities under a law that is made up, and outcomes with figures that are."""

from __future__ import annotations

from array import array

from torchtune_adaptive.prediction.capacity import Budget, Capacity
from torchtune_adaptive.prediction.law import MemoryLaw, fit_law
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.prediction.recorder import Allocation, Recording
from torchtune_adaptive.prediction.roofline import Seconds

MIB = 2**20
PHASES = {"weights": 1, "optimizer state": 2, "forward": 4, "update": 6}
SIZES = ((2, 64), (3, 64), (2, 128), (3, 128))
POWERS = [1 << exponent for exponent in range(12)]


def recording(rows: int, tokens: int) -> Recording:
    """10 MiB forever, 3 MiB a row for 64 tokens, and after those are freed 30 MiB more than that."""
    row_bytes = 3 * MIB * rows * tokens // 64
    changes = array("q", [6 * MIB, 4 * MIB, row_bytes, -row_bytes, 30 * MIB + row_bytes, -30 * MIB - row_bytes])
    return Recording(tuple(Allocation("op", 0) for _ in range(4)), array("q", [0, 1, 2, 2, 3, 3]), changes, PHASES)


def law(*, caches: bool) -> MemoryLaw:
    return fit_law({size: recording(*size) for size in SIZES}, tokens_multiple=1, caches=caches)


def filling_holes() -> MemoryLaw:
    """10 MiB forever, 16 MiB a row for 64 tokens, and after those are freed 48 MiB whatever the rows."""

    def recording(rows: int, tokens: int) -> Recording:
        row_bytes = 16 * MIB * rows * tokens // 64
        changes = array("q", [6 * MIB, 4 * MIB, row_bytes, -row_bytes, 48 * MIB, -48 * MIB])
        return Recording(tuple(Allocation("op", 0) for _ in range(4)), array("q", [0, 1, 2, 2, 3, 3]), changes, PHASES)

    return fit_law({size: recording(*size) for size in SIZES}, tokens_multiple=1, caches=True)


def capacity(limit_mib: int, *, overhead_mib: int = 0, caches: bool = False, tokens: int = 64) -> Capacity:
    return Capacity(law(caches=caches), tokens, Budget(limit_mib * MIB, overhead_mib * MIB), POWERS)


def outcome(name: str, *, rows: int = 4, seconds: float = 1.0, peak: int = 10, ranks: int = 1) -> Outcome:
    time = Seconds(seconds, 0.8 * seconds, 2 * seconds)
    return Outcome(name, ranks, 1024, rows, peak, peak, time, seconds)
