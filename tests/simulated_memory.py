"""Simulated devices whose memory use is a function: bytes of each phase by rows. Tests compare with brute force over
it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from torchtune_adaptive.engine.limits import MAX_ROWS
from torchtune_adaptive.engine.search import Budget, Peak, SearchResult, one_row_error, search
from torchtune_adaptive.errors import OneRowDoesNotFitError

GIB = 2**30
MIB = 2**20
PeakFunction = Callable[[int], dict[str, int]]


@dataclass
class Device:
    """Runs out of memory above the budget; a soft device only reports it."""

    peaks: PeakFunction
    budget_bytes: int
    soft: bool = False
    retries_above: float = float("inf")
    cached: Callable[[int], float] | None = None
    """Reserved bytes relative to allocated bytes, by rows. The device reserves at most 1/0.95 of the budget."""
    measured: list[int] = field(default_factory=list)

    def fits(self, rows: int) -> bool:
        within = max(self.peaks(rows).values()) <= self.budget_bytes and rows <= self.retries_above
        return within and (rows == 1 or self.fullness(rows) <= 1)

    def fullness(self, rows: int) -> float:
        reserved_bytes = 0 if self.cached is None else self.cached(rows) * max(self.peaks(rows).values())
        return reserved_bytes * 0.95 / self.budget_bytes

    def brute_force(self, candidates: Any = range(1, MAX_ROWS + 1)) -> int:
        best = 0
        for rows in candidates:
            if not self.fits(rows):
                break
            best = rows
        return best

    def measure(self, rows: int) -> Peak:
        self.measured.append(rows)
        phases = self.peaks(rows)
        if max(phases.values()) > self.budget_bytes and not self.soft:
            return Peak({}, fits=False)
        fullness = self.fullness(rows)
        retries = int(rows > self.retries_above or fullness > 1)
        return Peak(phases, fits=True, retries=retries, fullness=min(1.0, fullness))

    def search(self, **options: Any) -> SearchResult:
        return search(self.measure, Budget(self.budget_bytes), no_fit_error=self.no_fit_error, **options)

    def no_fit_error(self) -> OneRowDoesNotFitError:
        need_bytes = max(self.peaks(1).values()) if self.soft else None
        return one_row_error(length=1, need_bytes=need_bytes, budget_bytes=self.budget_bytes, rank=0)


def always_fits() -> OneRowDoesNotFitError:
    """For memory functions under which one row always fits."""
    raise AssertionError("one row did not fit")


def affine(*phases: tuple[int, int]) -> PeakFunction:
    """Return a memory function from (fixed, slope) of each phase, in MiB."""
    return lambda rows: {f"phase {i}": (a + b * rows) * MIB for i, (a, b) in enumerate(phases)}


def one_row_cheaper(lines: list[tuple[int, int]], share: float) -> PeakFunction:
    """Return a memory function with fewer activations at one row: chunking and other kernels save part of them."""
    plain = affine(*lines)

    def peaks(rows: int) -> dict[str, int]:
        return {
            name: need - int(share * slope * MIB) * (rows == 1)
            for (name, need), (_, slope) in zip(plain(rows).items(), lines, strict=True)
        }

    return peaks


def budget_for(peaks: PeakFunction, headroom: float, rows: int = 2) -> int:
    """Return a budget of at least `headroom` times the memory of `rows` rows."""
    return int(max(max(peaks(n).values()) for n in range(1, rows + 1)) * headroom)


phase = st.tuples(st.integers(0, 40_000), st.one_of(st.just(0), st.integers(20, 4000)))
phases = st.lists(phase, min_size=1, max_size=5).filter(lambda all_: any(slope for _, slope in all_))
headrooms = st.floats(1, 8)
roundings = st.sampled_from(["none", "power_of_two"])


class FakeMemory:
    """A memory device for policies: tests set its figures."""

    def __init__(self, *, budget_bytes: int = 1000, peak_bytes: int = 700) -> None:
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes
        self.retries = 0
        self.fullness = 0.0

    def reset_peak(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        yield
