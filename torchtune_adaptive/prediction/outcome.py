"""What a change of settings comes to, beside others: rows, memory, speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtune_adaptive.prediction.capacity import Capacity
from torchtune_adaptive.prediction.roofline import Seconds, StepTime


@dataclass(frozen=True)
class Outcome:
    """What one setting comes to, at the most rows that may be chosen; at one row, where none fit."""

    name: str
    """The changes as one writes them, nothing for none; or the stage that this is about."""
    ranks: int
    tokens: int
    """Tokens of one row."""
    rows: int
    """0 where not even one fits."""
    one_row_bytes: int
    """What one row needs."""
    peak_bytes: int
    """What the allocator takes for those rows."""
    seconds: Seconds | None = None
    """Duration of a step of one microbatch; None where it cannot be told."""
    slowdown: float | None = None
    """Time of a step with the changes, over that of as many rows without them."""

    @property
    def fits(self) -> bool:
        return self.rows > 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together; 0 where that cannot be told."""
        return 0.0 if self.seconds is None else self._tokens / self.seconds.likely

    @property
    def range_of_tokens_per_s(self) -> tuple[float, float]:
        return (
            (0.0, 0.0) if self.seconds is None else (self._tokens / self.seconds.slow, self._tokens / self.seconds.fast)
        )

    @property
    def _tokens(self) -> int:
        return self.ranks * max(1, self.rows) * self.tokens


def outcome_of(name: str, ranks: int, capacity: Capacity, time: StepTime | None, as_it_is: StepTime | None) -> Outcome:
    rows = capacity.chosen_rows
    counted = max(1, rows)
    seconds = time.seconds(counted, capacity.tokens) if time else None
    before = as_it_is.seconds(counted, capacity.tokens) if as_it_is else None
    return Outcome(
        name=name,
        ranks=ranks,
        tokens=capacity.tokens,
        rows=rows,
        one_row_bytes=capacity.reserved_bytes(1),
        peak_bytes=capacity.reserved_bytes(counted),
        seconds=seconds,
        slowdown=seconds.likely / before.likely if seconds and before else None,
    )


def at_least(need_bytes: int, name: str, ranks: int, tokens: int) -> Outcome:
    """What does not fit, and was traced no further than to see that."""
    return Outcome(name, ranks, tokens, rows=0, one_row_bytes=need_bytes, peak_bytes=need_bytes)


def cheapest_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes that fit: on fewer ranks first, then by the time of a step; of two equally fast, more rows first."""
    fitting = [each for each in outcomes if each.fits]
    return sorted(fitting, key=lambda each: (each.ranks, round(each.slowdown or 1.0, 2), -each.rows))


def fastest_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes by tokens per second; those that do not fit come last."""
    return sorted(outcomes, key=lambda each: (not each.fits, -each.tokens_per_s))


def frontier_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes that fit, each faster than all that need less memory, from the least memory on."""
    chosen: list[Outcome] = []
    for each in sorted(outcomes, key=lambda each: (each.peak_bytes, -each.tokens_per_s)):
        if each.fits and (not chosen or each.tokens_per_s > chosen[-1].tokens_per_s):
            chosen.append(each)
    return chosen
