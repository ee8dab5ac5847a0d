"""Find the largest number of rows that fits, in few probes.

1. All ranks measure the same rows together and get the same agreed `Peak`.
2. A strategy returns the rows to measure next, or None at the end. It depends only on the measurements, so all ranks
   decide the same without communication.
3. The result is the largest number of rows, rounded down, that was measured and accepted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from torchtune_adaptive.engine.limits import MAX_ROWS, Surface, rungs_up_to
from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy, check_choice
from torchtune_adaptive.formatting import format_apart, format_bytes


@dataclass(frozen=True)
class Peak:
    """The agreed memory need of one probe, equal on all ranks."""

    phase_bytes: Mapping[str, int]
    """Peak of each phase of the step, in order. Phases can be missing if the probe ran out of memory."""
    fits: bool
    """False if any rank ran out of memory."""
    retries: int = 0
    """Allocator retries. A probe with retries completes, but training at this size would be slow."""
    fullness: float = 0.0
    """Peak of reserved memory (with cached blocks) as a share of obtainable memory, on the fullest rank; 0 without a
    cache."""
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the step; None if it ran out of memory, because the rest was not measured."""
        return max(self.phase_bytes.values()) if self.fits else None


class Budget(NamedTuple):
    """Memory that a rank has for its training steps."""

    total_bytes: int
    resident_bytes: int = 0
    """Memory used between steps: weights and optimizer state."""

    @property
    def free_bytes(self) -> int:
        """The budget without resident memory."""
        return self.total_bytes - self.resident_bytes


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measured microbatch."""

    rows: int
    length: int = 0
    """Tokens of each row; 0 if all probes of a search have the same length."""
    peak: Peak
    held_out: bool = False
    """True for a probe that is excluded from the first fit, to measure its error."""

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch, padding included."""
        return self.rows * self.length

    def accepted(self, budget_bytes: int) -> bool:
        """Return True if training with this microbatch is possible: within the budget and without allocator retries.

        A single row may have retries, because it cannot be made smaller.
        """
        peak_bytes = self.peak.peak_bytes
        within = peak_bytes is not None and peak_bytes <= budget_bytes
        return within and (self.peak.retries == 0 or self.rows == 1)


NEEDS_LESS = (Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)

NoRowFits: TypeAlias = Callable[[], OneRowDoesNotFitError]
"""Returns the error for the last probe, of one row that does not fit."""


def one_row_error(
    *remedies: Remedy, length: int, need_bytes: int | None, budget_bytes: int, rank: int
) -> OneRowDoesNotFitError:
    """Return the error for a row that does not fit; `need_bytes` is None if it ran out of memory."""
    need, budget = "runs out of memory", format_bytes(budget_bytes)
    if need_bytes is not None:
        needed, budget = format_apart(need_bytes, budget_bytes)
        need = f"needs {needed}"
    return OneRowDoesNotFitError(
        f"one row of {length} tokens {need} on rank {rank}, whose budget is {budget}",
        *(remedies or NEEDS_LESS),
        need_bytes=need_bytes,
        budget_bytes=budget_bytes,
    )


def phase_points(probes: Sequence[Probe]) -> dict[str, dict[tuple[int, int], int]]:
    """Return the measured bytes of each phase by rows and length, from complete probes."""
    complete = [probe for probe in probes if probe.peak.fits]
    phases = list(complete[0].peak.phase_bytes) if complete else []
    if any(list(probe.peak.phase_bytes) != phases for probe in complete):
        raise ValueError(f"every complete probe must measure the same phases, but not all of these have {phases}")
    return {
        phase: {(probe.rows, probe.length): probe.peak.phase_bytes[phase] for probe in complete} for phase in phases
    }


def phase_rows(probes: Sequence[Probe]) -> dict[str, dict[int, int]]:
    """Return the measured bytes of each phase by rows, for rows of one length."""
    return {phase: {rows: need for (rows, _), need in at.items()} for phase, at in phase_points(probes).items()}


def fit_line(points: Mapping[int, int]) -> Surface:
    """Fit a line to the bytes of two or more sizes.

    It passes through the largest size. Its slope is the steepest of those from the smaller sizes to the largest: the
    peak of a phase can only bend upwards, because it is the maximum over many points of the program, each affine in the
    rows. The size of one row is ignored if two larger ones are known, since kernels may treat it differently. If the
    fixed part would be negative, the line through zero and the largest size is returned.
    """
    last = max(points)
    others = [rows for rows in points if 1 < rows < last] or [rows for rows in points if rows < last]
    slope = max(0.0, *((points[last] - points[rows]) / (last - rows) for rows in others))
    fixed_bytes = points[last] - slope * last
    return Surface(fixed_bytes, slope) if fixed_bytes >= 0 else Surface(0.0, points[last] / last)


def fit_lines(probes: Sequence[Probe]) -> dict[str, Surface]:
    """Return the line of each phase, if two sizes are measured."""
    return {phase: fit_line(points) for phase, points in phase_rows(probes).items() if len(points) > 1}


# How `linear` searches. "With a cache" means an allocator that keeps freed blocks, as CUDA's does: it may fill the
# device before the budget is reached, at a size that no line predicts.
_JUMP = 4  # a line through two probes is trusted up to 4 times the rows of the larger one
_ROUNDED_JUMP = 8  # the same if rows are rounded to powers of two, which absorbs small errors
_BEND = 0.01  # a probe this far above the line through smaller ones shows that another part of the phase dominates
_CLOSE = 0.95  # stop at this share of the rows that are still possible
# The same with a cache, from the fourth probe on. Also the smallest share of the budget that `usable_bytes` returns
# while the largest probe has one or two rows.
_CLOSE_WITH_CACHE = 0.8
_STEP_BACK, _STEP_BACK_WITH_CACHE = 1 / 16, 1 / 8  # share of failed rows to step back by, doubled at each failure
_MARGIN = 1.25  # without a cache, two probes may predict too few rows, by up to this factor


@dataclass(frozen=True)
class History:
    """The measurements so far, and the rows that are allowed."""

    budget_bytes: int
    rungs: Sequence[int]
    """Rows that may be the result, ascending from 1."""
    max_rows: int
    """The most rows that may be measured; the highest rung may be lower."""
    resident_bytes: int = 0
    """Memory in use at every point of a step, for any number of rows: weights and optimizer state."""
    probes: tuple[Probe, ...] = ()

    @property
    def rejected(self) -> tuple[Probe, ...]:
        """The probes that were not accepted."""
        return tuple(probe for probe in self.probes if not probe.accepted(self.budget_bytes))

    @property
    def too_many(self) -> int:
        """The fewest rows known to be too many: rejected, or above the highest rung."""
        return min((probe.rows for probe in self.rejected), default=self.rungs[-1] + 1)

    @property
    def measured_rows(self) -> int:
        """The most accepted rows below `too_many`, or 0."""
        accepted = (probe.rows for probe in self.probes if probe.accepted(self.budget_bytes))
        return max((rows for rows in accepted if rows < self.too_many), default=0)

    @property
    def caches(self) -> bool:
        """True if the allocator keeps freed blocks."""
        return any(probe.peak.fullness for probe in self.probes)

    @property
    def usable_bytes(self) -> float:
        """The budget, or less if the cache fills the device first.

        Lines do not predict the cache. But except for a few rows, its size is nearly proportional to the allocated
        bytes, so the ratio in the largest probe is used.
        """
        unflushed = [probe for probe in self.probes if probe.peak.fullness and not probe.peak.retries]
        if not unflushed:
            return self.budget_bytes
        largest = max(unflushed, key=attrgetter("rows"))
        usable_bytes = (largest.peak.peak_bytes or 0) / largest.peak.fullness
        if largest.rows <= 2:  # one and two rows leave relatively more in the cache than many rows
            usable_bytes = max(usable_bytes, _CLOSE_WITH_CACHE * self.budget_bytes)
        return min(self.budget_bytes, usable_bytes)

    @property
    def predicted_rows(self) -> float:
        """The most rows for which the lines of all phases stay within the usable bytes, up to `max_rows`."""
        lines = fit_lines(self.probes).values()
        promised = min((line.rows_within(self.usable_bytes) for line in lines), default=self.measured_rows)
        return min(promised, self.max_rows)

    @property
    def trusted_jump(self) -> int:
        """The factor by which rows may grow after two probes."""
        return _ROUNDED_JUMP if self.rungs[2:3] == [4] else _JUMP

    def is_close(self, goal: int) -> bool:
        """Return True if the rows that fit are close enough to the goal to stop."""
        share = _CLOSE_WITH_CACHE if self.caches and len(self.probes) >= 4 else _CLOSE
        return self.rung_at_most(self.measured_rows) >= share * goal

    def may_reach(self, rows: int) -> bool:
        """Return True unless the measurements rule out this many rows."""
        below, sizes = self.too_many - 1, {probe.rows for probe in self.probes if probe.peak.fits}
        if len(sizes) > 1:
            # On a CPU, one of two probes may be off because a thread of gloo freed a layer's weights late.
            margin = 1.0 if self.caches or len(sizes) > 2 else _MARGIN
            below = min(below, floor(margin * self.predicted_rows))
        return self.rung_at_most(below) >= rows

    def rung_at_most(self, rows: float) -> int:
        """Return the highest rung up to these rows, or 0."""
        index = bisect_right(self.rungs, floor(rows))
        return self.rungs[index - 1] if index else 0

    def rung_above(self, rows: int) -> int | None:
        """Return the lowest rung above these rows."""
        index = bisect_right(self.rungs, rows)
        return self.rungs[index] if index < len(self.rungs) else None


Strategy = Callable[[History], int | None]


def binary(history: History) -> int | None:
    """Double until a probe fails, then bisect. Exact if memory grows with the rows."""
    low, high = history.measured_rows, history.too_many
    if not history.probes:
        return 1
    if not history.rejected:
        doubled = history.rung_at_most(2 * low)
        return doubled if doubled > low else history.rung_above(low)
    between = bisect_right(history.rungs, low), bisect_right(history.rungs, high - 1)
    return history.rungs[sum(between) // 2] if between[0] < between[1] else None


def decrease(history: History) -> int | None:
    """Halve from the highest rung until a probe fits. The result may be half of the best one."""
    if history.measured_rows:
        return None
    last_rejected = history.too_many
    halved = last_rejected // 2 if history.rejected else last_rejected
    return history.rung_at_most(halved) or None


def linear(history: History) -> int | None:
    """Measure 1 and 2 rows, extrapolate each phase by its line, measure the prediction, and repeat until close."""
    if history.rejected:
        return _narrow(history)
    if len(history.probes) < 2:
        rows = len(history.probes) + 1
        return rows if rows <= history.rungs[-1] else None
    low, predicted = history.measured_rows, history.predicted_rows
    goal, above = history.rung_at_most(predicted), history.rung_above(low)
    if history.caches and above and len(history.probes) < 4 and above <= predicted + 1:
        goal = max(goal, above)  # the prediction may be one row too low; this risks one flush
    if history.is_close(goal):
        # Two points are always on a line. A third one shows whether one row is a special case.
        return 3 if above and len(history.probes) == 2 and predicted >= 3 else None
    reach = _reach(history)
    if reach >= goal:
        return goal
    step = history.rung_at_most(reach)
    return step if step > low else max(floor(reach), low + 1)


def _reach(history: History) -> float:
    """Return the most rows that can be measured next without relying on an unproven line."""
    phases = phase_rows(history.probes).values()
    reach = min(_phase_reach(points, history) for points in phases)
    # While all phases are constant, lines do not show where one will grow.
    grows = any(fit_line(points).bytes_per_row > 0 for points in phases)
    return reach if grows else min(reach, history.trusted_jump * history.measured_rows)


def _phase_reach(points: Mapping[int, int], history: History) -> float:
    """Return the rows up to which the line of this phase is trusted.

    The need is a maximum of affine functions. So k times the rows need at most k times the non-resident bytes. As many
    rows as fit by this bound are safe. A line through two sizes is also trusted up to `trusted_jump` times the larger
    one. A line through three or more is trusted everywhere, unless the largest size needs more than the line through
    the others predicts. (If it needs less, only one row was a special case, which `fit_line` ignores from now on.)
    """
    last = max(points)
    resident_bytes = history.resident_bytes
    safe = last * (history.usable_bytes - resident_bytes) / max(1, points[last] - resident_bytes)
    if len(points) == 2:
        return max(safe, history.trusted_jump * last)
    before = fit_line({rows: points[rows] for rows in points if rows != last})
    return safe if points[last] > before.bytes_at(last) * (1 + _BEND) else inf


def _narrow(history: History) -> int | None:
    """Return the next rows between those that fit and those that do not, or None if they are close enough.

    If the last probe was rejected but complete, the lines include it: follow them, unless it flushed the cache.
    Otherwise the prediction was probably nearly right. So step back a little, and twice as far after each failure, but
    not below the middle, where this becomes a bisection.
    """
    low, high, last = history.measured_rows, history.too_many, history.probes[-1]
    if history.is_close(history.rung_at_most(high - 1)):
        return None
    goal = history.rung_at_most(history.predicted_rows)
    flushed = history.caches and last.peak.retries
    if last in history.rejected and not flushed and low < goal < high:
        return goal
    share = _STEP_BACK_WITH_CACHE if history.caches else _STEP_BACK
    step_back = max(1, int(high * share * 2 ** (len(history.rejected) - 1)))
    rows = history.rung_at_most(max((low + high) // 2, high - step_back))
    return rows if rows > low else history.rung_above(low)


NEED_RECOVERY = ("binary", "decrease")
"""Strategies that rely on running out of memory."""
STRATEGIES: Mapping[str, Strategy] = {"linear": linear, "binary": binary, "decrease": decrease}


@dataclass(frozen=True)
class SearchResult:
    """The measurements of a search and the rows it chose."""

    strategy: str
    round_to: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    """All probes, in the order they were measured."""
    lines: Mapping[str, Surface]
    """The line of each phase; empty if fewer than two sizes were measured completely."""
    unrounded_rows: float
    """Before rounding: where the lines reach the budget (linear), or the most rows that fit."""
    rows: int
    """The chosen rows of a microbatch."""
    reason: str
    """Explains why there are not more rows: rounding, a failed size, or a bound."""
    accumulates: bool = True
    """True if gradients of an earlier microbatch were in memory during the probes."""

    @property
    def out_of_memory_count(self) -> int:
        """The number of probes that ran out of memory."""
        return sum(not probe.peak.fits for probe in self.probes)


def search(
    measure: Callable[[int], Peak],
    budget: Budget,
    *,
    no_row_fits: NoRowFits,
    strategy: str = "linear",
    round_to: str = "power_of_two",
    max_rows: int | None = None,
    samples_per_step: int | None = None,
    least_rows: int = 0,
) -> SearchResult:
    """Return the largest rows, rounded down, that `measure` accepts within the `budget`.

    `measure` is called with the same rows on every rank and returns the same agreed Peak. If one row does not fit,
    the error that `no_row_fits` returns is raised. The strategy `decrease` starts at `max_rows`. The
    search ends early if the measurements rule out `least_rows`.
    """
    check_choice("strategy", strategy, STRATEGIES)
    rungs = rungs_up_to(max_rows, round_to)
    most = MAX_ROWS if max_rows is None else max_rows
    history = History(budget.total_bytes, rungs, most, budget.resident_bytes)
    while history.may_reach(least_rows) and (rows := STRATEGIES[strategy](history)) is not None:
        probe = Probe(rows=rows, peak=measure(rows))
        history = replace(history, probes=(*history.probes, probe))
        if rows == 1 and not probe.accepted(budget.total_bytes):
            raise no_row_fits()
    # Lines may promise more rows than were measured. Rows that were rejected bound them.
    unrounded_rows = float(max(history.measured_rows, history.predicted_rows if strategy == "linear" else 0.0))
    if history.rejected and unrounded_rows >= history.too_many:
        unrounded_rows = float(history.measured_rows)
    chosen = history.rung_at_most(history.measured_rows)
    return SearchResult(
        strategy=strategy,
        round_to=round_to,
        budget_bytes=history.budget_bytes,
        probes=history.probes,
        lines=fit_lines(history.probes),
        unrounded_rows=unrounded_rows,
        rows=chosen,
        reason=_reason(history, unrounded_rows, chosen, round_to, samples_per_step),
    )


def _reason(history: History, unrounded_rows: float, rows: int, round_to: str, samples_per_step: int | None) -> str:
    if history.rejected and unrounded_rows == rows:
        return f"{history.too_many} did not fit"
    if not history.rejected and (unrounded_rows >= history.max_rows or unrounded_rows == rows == history.rungs[-1]):
        known, highest = f"limited to {history.max_rows}", float(history.max_rows)
        if history.max_rows == samples_per_step:
            known = f"all {samples_per_step} samples of a step"
    else:
        # Truncated, not rounded: 8.97 must not read as if 9 fit.
        known, highest = f"{floor(unrounded_rows * 10 + 1e-6) / 10:g} fit", unrounded_rows
    rounded = rows + 1e-6 < highest and round_to == "power_of_two"
    return f"{known}, rounded down to a power of two" if rounded else known
