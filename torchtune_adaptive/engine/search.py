"""Finds the largest number of rows of a microbatch that fits into memory, with few probes.

1. All ranks measure the same number of rows together (`probes.py`) and get the same `Peak`.
2. A strategy returns the number of rows to measure next, or None to end the search. It depends only on the
   measurements, so all ranks decide the same without communication.
3. The result is the largest number of rows that was measured and accepted, rounded down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from operator import attrgetter
from typing import NamedTuple

from torchtune_adaptive.engine.limits import MAX_ROWS, Surface, candidate_rows
from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy
from torchtune_adaptive.formatting import format_apart, format_bytes


@dataclass(frozen=True)
class Peak:
    """The peak memory of a probe, equal on all ranks (see `probes.agreed_peak`)."""

    phase_bytes: Mapping[str, int]
    """Peak of each phase of the step, in order. Phases that were not measured are missing."""
    fits: bool
    """False if any rank ran out of memory."""
    retries: int = 0
    """Allocator retries. A probe with retries completes, but training with that many rows would be slow."""
    fullness: float = 0.0
    """Peak of reserved memory, cached blocks included, as a share of the memory that the process can obtain. It is the
    highest of all ranks; 0 without a cache."""
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the whole step; None if it ran out of memory, because the rest was not measured."""
        return max(self.phase_bytes.values()) if self.fits else None


class Budget(NamedTuple):
    """The memory that a rank may use in training steps."""

    total_bytes: int
    resident_bytes: int = 0
    """Resident memory, which stays in use between steps: weights and optimizer state."""

    @property
    def free_bytes(self) -> int:
        """The budget minus resident memory."""
        return self.total_bytes - self.resident_bytes


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measured microbatch."""

    rows: int
    length: int = 0
    """Tokens of each row; 0 if all probes of a search have the same length."""
    peak: Peak
    held_out: bool = False
    """True for a probe that the first fit does not use, so that it can measure the error of that fit."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the microbatch, padding included."""
        return self.rows * self.length

    def accepted(self, budget_bytes: int) -> bool:
        """Return True if the peak is within the budget and the allocator did not retry. A single row may have retries,
        because no smaller microbatch is possible."""
        peak_bytes = self.peak.peak_bytes
        within_budget = peak_bytes is not None and peak_bytes <= budget_bytes
        return within_budget and (self.peak.retries == 0 or self.rows == 1)


ONE_ROW_REMEDIES = (Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)


def one_row_error(
    *remedies: Remedy, length: int, need_bytes: int | None, budget_bytes: int, rank: int
) -> OneRowDoesNotFitError:
    """Return the error for a single row that does not fit; `need_bytes` is None if it ran out of memory."""
    need, budget = "runs out of memory", format_bytes(budget_bytes)
    if need_bytes is not None:
        needed, budget = format_apart(need_bytes, budget_bytes)
        need = f"needs {needed}"
    return OneRowDoesNotFitError(
        f"one row of {length} tokens {need} on rank {rank}, whose budget is {budget}",
        *(remedies or ONE_ROW_REMEDIES),
    )


def phase_points(probes: Sequence[Probe]) -> dict[str, dict[tuple[int, int], int]]:
    """Return the measured bytes of each phase by (rows, length), from all probes that did not run out of memory."""
    complete = [probe for probe in probes if probe.peak.fits]
    phases = list(complete[0].peak.phase_bytes) if complete else []
    if any(list(probe.peak.phase_bytes) != phases for probe in complete):
        raise ValueError(f"every complete probe must measure the same phases, but not all of these have {phases}")
    return {
        phase: {(probe.rows, probe.length): probe.peak.phase_bytes[phase] for probe in complete} for phase in phases
    }


def phase_rows(probes: Sequence[Probe]) -> dict[str, dict[int, int]]:
    """Return the measured bytes of each phase by rows, for probes that all have one length."""
    return {phase: {rows: need for (rows, _), need in at.items()} for phase, at in phase_points(probes).items()}


def fit_line(points: Mapping[int, int]) -> Surface:
    """Fit a line to the measured bytes of two or more numbers of rows.

    The line passes through the point with the most rows. Its slope is the steepest between that point and any other.
    No more rows fit than the line predicts. Reason: a peak is a maximum of affine functions of the rows, one for
    each moment of the phase. Beyond that point, memory therefore grows at least as steeply as the line. The measurement
    of one row is ignored if there are two larger ones, because kernels may treat a single row differently. If the fixed
    part would be negative, the line through the origin is returned.
    """
    most = max(points)
    others = [rows for rows in points if 1 < rows < most] or [rows for rows in points if rows < most]
    slope = max(0.0, *((points[most] - points[rows]) / (most - rows) for rows in others))
    fixed_bytes = points[most] - slope * most
    return Surface(fixed_bytes, slope) if fixed_bytes >= 0 else Surface(0.0, points[most] / most)


def fit_lines(probes: Sequence[Probe]) -> dict[str, Surface]:
    """Return the line of each phase that was measured with at least two numbers of rows."""
    return {phase: fit_line(points) for phase, points in phase_rows(probes).items() if len(points) > 1}


# Constants of the strategy `linear`. "With a cache" means: the allocator keeps freed blocks, as CUDA's does. Its cache
# may fill the device before allocated memory reaches the budget, and lines do not predict when.
_JUMP = 4  # a line through two probes is trusted up to 4 times the rows of the larger one
_ROUNDED_JUMP = 8  # the same if rows are rounded to powers of two, which hides small errors
_BEND = 0.01  # if a probe exceeds the line through smaller ones by this share, the slope has increased
_CLOSE = 0.95  # end the search once this share of the rows that may still fit was accepted
_CLOSE_WITH_CACHE = 0.8  # the same with a cache, from the fourth probe on
_LEAST_USABLE = 0.8  # `usable_bytes` is at least this share of the budget while at most two rows were measured
# After a rejected probe, the next one has fewer rows, by this share. Each further rejection doubles the share.
_STEP_BACK, _STEP_BACK_WITH_CACHE = 1 / 16, 1 / 8
_MARGIN = 1.25  # without a cache, the prediction from two probes may be too low by up to this factor


@dataclass(frozen=True)
class History:
    """The measurements so far, and the settings of the search."""

    budget_bytes: int
    candidates: Sequence[int]
    """The numbers of rows that may be the result, ascending from 1."""
    max_rows: int
    """The most rows that may be measured. The highest candidate may be lower."""
    resident_bytes: int = 0
    """Memory that stays in use between steps: weights and optimizer state."""
    probes: tuple[Probe, ...] = ()
    round_to: str = "none"

    @property
    def rejected(self) -> tuple[Probe, ...]:
        """The probes that were not accepted."""
        return tuple(probe for probe in self.probes if not probe.accepted(self.budget_bytes))

    @property
    def too_many(self) -> int:
        """The fewest rows that are known to be too many, because they were rejected or exceed the highest candidate."""
        return min((probe.rows for probe in self.rejected), default=self.candidates[-1] + 1)

    @property
    def accepted_rows(self) -> int:
        """The most rows that were measured and accepted, below `too_many`, or 0."""
        accepted = (probe.rows for probe in self.probes if probe.accepted(self.budget_bytes))
        return max((rows for rows in accepted if rows < self.too_many), default=0)

    @property
    def has_cache(self) -> bool:
        """True if the allocator keeps freed blocks in a cache."""
        return any(probe.peak.fullness for probe in self.probes)

    @property
    def usable_bytes(self) -> float:
        """The peak at which the budget is reached or, if that is earlier, the cache fills the device.

        Lines do not predict the cache. With more than a few rows, however, reserved memory is nearly proportional to
        allocated memory, so their ratio in the largest probe is used.
        """
        without_retries = [probe for probe in self.probes if probe.peak.fullness and not probe.peak.retries]
        if not without_retries:
            return self.budget_bytes
        largest = max(without_retries, key=attrgetter("rows"))
        usable_bytes = (largest.peak.peak_bytes or 0) / largest.peak.fullness
        if largest.rows <= 2:  # one or two rows leave a larger share in the cache than many rows
            usable_bytes = max(usable_bytes, _LEAST_USABLE * self.budget_bytes)
        return min(self.budget_bytes, usable_bytes)

    @property
    def predicted_rows(self) -> float:
        """The most rows, up to `max_rows`, for which the lines of all phases stay within the usable bytes."""
        lines = fit_lines(self.probes).values()
        rows = min((line.rows_within(self.usable_bytes) for line in lines), default=self.accepted_rows)
        return min(rows, self.max_rows)

    @property
    def trusted_jump(self) -> int:
        """The factor by which the next probe may exceed the larger of two probes."""
        return _ROUNDED_JUMP if self.round_to == "power_of_two" else _JUMP

    def is_close(self, goal: int) -> bool:
        """Return True if the rows that fit are close enough to `goal` to end the search."""
        share = _CLOSE_WITH_CACHE if self.has_cache and len(self.probes) >= 4 else _CLOSE
        return self.candidate_at_most(self.accepted_rows) >= share * goal

    def may_reach(self, rows: int) -> bool:
        """Return True unless the measurements show that the result will be below `rows`."""
        possible, measured = self.too_many - 1, {probe.rows for probe in self.probes if probe.peak.fits}
        if len(measured) > 1:
            # On a CPU, one of two probes may be too high, because a thread of gloo has freed a layer's weights late.
            margin = 1.0 if self.has_cache or len(measured) > 2 else _MARGIN
            possible = min(possible, floor(margin * self.predicted_rows))
        return self.candidate_at_most(possible) >= rows

    def candidate_at_most(self, rows: float) -> int:
        """Return the highest candidate that is at most `rows`, or 0."""
        index = bisect_right(self.candidates, floor(rows))
        return self.candidates[index - 1] if index else 0

    def candidate_above(self, rows: int) -> int | None:
        """Return the lowest candidate above `rows`, or None."""
        index = bisect_right(self.candidates, rows)
        return self.candidates[index] if index < len(self.candidates) else None


Strategy = Callable[[History], int | None]
"""Returns the number of rows to measure next, or None to end the search."""


def binary(history: History) -> int | None:
    """Double the rows until a probe fails, then bisect. Finds the exact maximum if memory grows with the rows."""
    low, high = history.accepted_rows, history.too_many
    if not history.probes:
        return 1
    if not history.rejected:
        doubled = history.candidate_at_most(2 * low)
        return doubled if doubled > low else history.candidate_above(low)
    first, end = bisect_right(history.candidates, low), bisect_right(history.candidates, high - 1)
    return history.candidates[(first + end) // 2] if first < end else None


def decrease(history: History) -> int | None:
    """Start at the highest candidate and halve it until a probe fits. The result may be half of what is possible."""
    if history.accepted_rows:
        return None
    last_rejected = history.too_many
    halved = last_rejected // 2 if history.rejected else last_rejected
    return history.candidate_at_most(halved) or None


def linear(history: History) -> int | None:
    """Measure 1 and 2 rows, predict the most rows from the line of each phase, and measure these; repeat if needed."""
    if history.rejected:
        return _narrow(history)
    if len(history.probes) < 2:
        rows = len(history.probes) + 1
        return rows if rows <= history.candidates[-1] else None
    low, predicted = history.accepted_rows, history.predicted_rows
    goal, above = history.candidate_at_most(predicted), history.candidate_above(low)
    if history.has_cache and above and len(history.probes) < 4 and above <= predicted + 1:
        goal = max(goal, above)  # the prediction may be one row too low; if not, this costs one rejected probe
    if history.is_close(goal):
        # A line through two points cannot show its error. A third point shows whether a single row is a special case.
        return 3 if above and len(history.probes) == 2 and predicted >= 3 else None
    trusted = _trusted_rows(history)
    if trusted >= goal:
        return goal
    candidate = history.candidate_at_most(trusted)
    return candidate if candidate > low else max(floor(trusted), low + 1)


def _trusted_rows(history: History) -> float:
    """Return the number of rows up to which the lines of all phases are trusted."""
    phases = phase_rows(history.probes).values()
    rows = min(_trusted_rows_of_phase(points, history) for points in phases)
    # While all phases are constant, lines do not show where one begins to grow.
    grows = any(fit_line(points).bytes_per_row > 0 for points in phases)
    return rows if grows else min(rows, history.trusted_jump * history.accepted_rows)


def _trusted_rows_of_phase(points: Mapping[int, int], history: History) -> float:
    """Return the number of rows up to which the line of this phase is trusted.

    Because a peak is a maximum of affine functions, k times the rows need at most k times the non-resident bytes. This
    bound is always trusted. A line through two points is also trusted up to `trusted_jump` times the larger number of
    rows. A line through more points is trusted everywhere, unless the largest point is above the line through the
    others. (It is below only if a single row was a special case, which `fit_line` ignores from three points on.)
    """
    most = max(points)
    resident_bytes = history.resident_bytes
    bound = most * (history.usable_bytes - resident_bytes) / max(1, points[most] - resident_bytes)
    if len(points) == 2:
        return max(bound, history.trusted_jump * most)
    line_of_others = fit_line({rows: points[rows] for rows in points if rows != most})
    return bound if points[most] > line_of_others.bytes_at(most) * (1 + _BEND) else inf


def _narrow(history: History) -> int | None:
    """Return the next rows after a probe was rejected, or None if the accepted rows are close enough to them.

    If the last probe was rejected without an OOM error or a retry, the lines now include it, so their prediction is
    used. Otherwise the prediction was probably only a little too high. The next probe has slightly fewer rows. This
    reduction doubles after each rejection, up to half of the interval, where the search becomes a bisection.
    """
    low, high, last = history.accepted_rows, history.too_many, history.probes[-1]
    if history.is_close(history.candidate_at_most(high - 1)):
        return None
    goal = history.candidate_at_most(history.predicted_rows)
    retried = history.has_cache and last.peak.retries
    if last in history.rejected and not retried and low < goal < high:
        return goal
    share = _STEP_BACK_WITH_CACHE if history.has_cache else _STEP_BACK
    step_back = max(1, int(high * share * 2 ** (len(history.rejected) - 1)))
    rows = history.candidate_at_most(max((low + high) // 2, high - step_back))
    return rows if rows > low else history.candidate_above(low)


STRATEGIES: Mapping[str, Strategy] = {"linear": linear, "binary": binary, "decrease": decrease}


@dataclass(frozen=True)
class SearchResult:
    """The measurements of a search, and the number of rows that it has chosen."""

    strategy: str
    round_to: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    """All probes, in the order in which they were measured."""
    unrounded_rows: float
    """The rows before rounding: the prediction of the lines (`linear`), or the most rows that were accepted."""
    rows: int
    """The chosen number of rows of a microbatch."""
    reason: str
    """Explains why it is not larger: rounding, rejected rows, or an upper bound."""
    accumulates: bool = True
    """True if the gradients of an earlier microbatch were in memory during the probes."""

    @property
    def out_of_memory_count(self) -> int:
        """The number of probes that ran out of memory."""
        return sum(not probe.peak.fits for probe in self.probes)


def search(
    measure: Callable[[int], Peak],
    budget: Budget,
    *,
    no_fit_error: Callable[[], OneRowDoesNotFitError],
    strategy: str = "linear",
    round_to: str = "power_of_two",
    max_rows: int | None = None,
    least_rows: int = 0,
) -> SearchResult:
    """Return the largest number of rows, rounded down, whose peak is within the budget on all ranks.

    `measure` is called with the same rows on every rank and returns the same Peak. If one row does not fit, the error
    that `no_fit_error` returns is raised. The strategy `decrease` starts at `max_rows`. The search ends early if the
    measurements show that the result will be below `least_rows`.
    """
    candidates = candidate_rows(max_rows, round_to)
    most = MAX_ROWS if max_rows is None else max_rows
    history = History(budget.total_bytes, candidates, most, budget.resident_bytes, round_to=round_to)
    while history.may_reach(least_rows) and (rows := STRATEGIES[strategy](history)) is not None:
        probe = Probe(rows=rows, peak=measure(rows))
        history = replace(history, probes=(*history.probes, probe))
        if rows == 1 and not probe.accepted(budget.total_bytes):
            raise no_fit_error()
    # Lines may predict more rows than were measured. They must predict fewer rows than were rejected.
    unrounded_rows = float(max(history.accepted_rows, history.predicted_rows if strategy == "linear" else 0.0))
    if history.rejected and unrounded_rows >= history.too_many:
        unrounded_rows = float(history.accepted_rows)
    chosen = history.candidate_at_most(history.accepted_rows)
    return SearchResult(
        strategy=strategy,
        round_to=round_to,
        budget_bytes=history.budget_bytes,
        probes=history.probes,
        unrounded_rows=unrounded_rows,
        rows=chosen,
        reason=_reason(history, unrounded_rows, chosen),
    )


def _reason(history: History, unrounded_rows: float, rows: int) -> str:
    if history.rejected and unrounded_rows == rows:
        return f"{history.too_many} did not fit"
    at_maximum = unrounded_rows >= history.max_rows or unrounded_rows == rows == history.candidates[-1]
    if at_maximum and not history.rejected:
        bound, highest = f"limited to {history.max_rows}", float(history.max_rows)
    else:
        # Truncated, not rounded: "9 fit" would be wrong for 8.97.
        bound, highest = f"{floor(unrounded_rows * 10 + 1e-6) / 10:g} fit", unrounded_rows
    rounded = rows + 1e-6 < highest and history.round_to == "power_of_two"
    return f"{bound}, rounded down to a power of two" if rounded else bound
