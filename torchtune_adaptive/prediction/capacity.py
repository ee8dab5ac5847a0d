"""How many rows fit, by a law: without flushing the allocator's cache, and at all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torchtune_adaptive.bisecting import most_that_fit
from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.prediction.allocator_replay import Reserved, replay
from torchtune_adaptive.prediction.law import MemoryLaw

MOST_ROWS = 2**20
"""Looked at; where as many fit, memory is hardly what bounds them."""
LOOKED_ABOVE = 16
"""Rows above the first that do not fit in which more may fit again: holes in the cache do not grow with the rows."""


@dataclass(frozen=True)
class Budget:
    """Memory of one rank."""

    limit_bytes: int
    overhead_bytes: int
    """The part of the limit that no tensor can have: the device's context, communication, workspaces of libraries."""
    expandable_segments: bool = False
    """How the caching allocator is set, where there is one."""

    @property
    def usable_bytes(self) -> int:
        return self.limit_bytes - self.overhead_bytes


@dataclass(frozen=True)
class Prediction:
    """What so many rows need."""

    rows: int
    peak: Peak
    reserved_bytes: int
    """What the allocator takes from the device, if that has enough."""
    fits: bool
    retries: int
    """Times that the allocator has to flush its cache to stay within the budget, where it fits so."""

    @property
    def phase(self) -> str:
        """The phase that needs the most."""
        return max(self.peak.phase_bytes, key=self.peak.phase_bytes.__getitem__)


class Capacity:
    """Predictions for rows of one length, within one budget."""

    def __init__(self, law: MemoryLaw, tokens: int, budget: Budget, rungs: Sequence[int]) -> None:
        """`rungs` are the rows that may be chosen, ascending."""
        self.tokens = tokens
        self.budget = budget
        self.law = law
        self._rungs = rungs
        self._replayed = lru_cache(maxsize=None)(self._replay)

    @property
    def counted_tokens(self) -> int:
        """The length that this is about: rounded up to what the loss cuts into equal chunks."""
        return self.law.rounded_up(self.tokens)

    @cached_property
    def most_rows(self) -> int:
        """The most that fit without flushing the cache; 0 if no number of rows does."""
        return self._most(self._fits_at_once)

    @cached_property
    def most_rows_with_retries(self) -> int:
        """The most that run at all."""
        return self._most(self._fits_somehow)

    @cached_property
    def chosen_rows(self) -> int:
        """The most rows without flushing, among those that may be chosen; 0 if there are none."""
        fitting = self._rungs[: bisect_right(self._rungs, self.most_rows)]
        return next((rows for rows in reversed(fitting) if self._fits_at_once(rows)), 0)

    @property
    def passed_over(self) -> int | None:
        """Rows that may be chosen and need more than some that may not: the fewest beyond those that are chosen."""
        index = bisect_right(self._rungs, self.chosen_rows)
        following = self._rungs[index] if index < len(self._rungs) else None
        return following if following is not None and following <= self.most_rows else None

    @property
    def fits_by_flushing(self) -> bool:
        """Whether one row runs, but has to flush the cache for it."""
        return not self._fits_at_once(1) and self._fits_somehow(1)

    def at(self, tokens: int) -> Capacity:
        """The capacity for rows of another length."""
        return Capacity(self.law, tokens, self.budget, self._rungs)

    def within(self, budget: Budget) -> Capacity:
        """The capacity of another budget."""
        return Capacity(self.law, self.tokens, budget, self._rungs)

    def predictions(self) -> list[Prediction]:
        """Predictions for powers of two up to what fits, and for whatever bounds the capacity."""
        bounds = {1, self.chosen_rows, self.most_rows, self.most_rows_with_retries} - {0}
        powers = {1 << exponent for exponent in range(max(bounds).bit_length())}
        return [self.predict(rows) for rows in sorted(bounds | powers)]

    def peak(self, rows: int) -> Peak:
        """The most that is alive at once in each phase."""
        return self.law.peak(rows, self.tokens)

    def reserved_bytes(self, rows: int) -> int:
        """What the allocator takes from a device that has enough."""
        return self._unlimited(rows).peak_bytes

    def predict(self, rows: int) -> Prediction:
        within = self._replayed(rows, self.budget.usable_bytes)
        return Prediction(
            rows=rows,
            peak=self.peak(rows),
            reserved_bytes=self._unlimited(rows).peak_bytes,
            fits=within is not None,
            retries=0 if within is None else within.retries,
        )

    @cached_property
    def _most_allocated(self) -> int:
        """No more can fit than tensors alone leave room for."""

        def fits(rows: int) -> bool:
            return (self.peak(rows).peak_bytes or 0) <= self.budget.usable_bytes

        return most_that_fit(fits, MOST_ROWS)

    def _most(self, fits: Callable[[int], bool]) -> int:
        """The most rows that fit.

        What is reserved may fall from one number of rows to the next, where blocks happen to fill holes, so bisecting
        finds a number beyond which one row more does not fit, but two may.
        """
        found = most_that_fit(fits, self._most_allocated)
        looked_at = range(min(self._most_allocated, found + 1 + LOOKED_ABOVE), found + 1, -1)
        return next((rows for rows in looked_at if fits(rows)), found) if self.law.caches else found

    def _fits_at_once(self, rows: int) -> bool:
        return self._unlimited(rows).peak_bytes <= self.budget.usable_bytes

    def _fits_somehow(self, rows: int) -> bool:
        return self._replayed(rows, self.budget.usable_bytes) is not None

    def _unlimited(self, rows: int) -> Reserved:
        reserved = self._replayed(rows, None)
        assert reserved is not None, "a device without end has run out of memory"
        return reserved

    def _replay(self, rows: int, capacity_bytes: int | None) -> Reserved | None:
        if not self.law.caches:
            need = self.peak(rows).peak_bytes or 0
            return Reserved(need, retries=0) if capacity_bytes is None or need <= capacity_bytes else None
        sizes = self.law.sizes(rows, self.tokens).tolist()
        expandable = self.budget.expandable_segments
        return replay(self.law.program, sizes, capacity_bytes, expandable_segments=expandable)
