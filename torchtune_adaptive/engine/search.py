"""Finds the largest number of rows that fits, in few probes. No torch.

1. All ranks measure the same rows together and see the same agreed `Peak`.
2. A strategy names the rows to measure next, or None when it is done. It is a pure function of what was measured so
   far, and all ranks see the same, so they decide the same without a word.
3. The result is the most rows, rounded down, that were measured themselves and accepted.
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
from torchtune_adaptive.text import format_apart, format_bytes


@dataclass(frozen=True)
class Peak:
    """The memory that one probe needed, already agreed: the same value on every rank."""

    phase_bytes: Mapping[str, int]
    """Peak of each phase of the step, in the order they run; some may be missing where `fits` is False."""
    fits: bool
    """False where some rank ran out of memory."""
    retries: int = 0
    """Times the allocator had to flush its cache to go on: it fit, but training at this size would crawl."""
    fullness: float = 0.0
    """The largest share of a rank's memory that its allocator took, cached blocks included; 0 where none are cached."""
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int | None:
        """The step's peak; None where it ran out of memory, since what the rest would need is unknown."""
        return max(self.phase_bytes.values()) if self.fits else None


class Room(NamedTuple):
    """What a rank has for its training steps."""

    budget_bytes: int
    resident_bytes: int = 0
    """What stays between two steps: weights and optimizer state."""

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.resident_bytes


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measured microbatch."""

    rows: int
    length: int = 0
    """Tokens of each row; 0 where all probes of a search have the same."""
    peak: Peak
    held_out: bool = False
    """Whether the first fit has not seen it, and so can be judged by it."""

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch, padding included."""
        return self.rows * self.length

    def accepted(self, budget_bytes: int) -> bool:
        """Whether this microbatch can be trained with.

        One row is forgiven its allocator retries: there is nothing smaller to fall back on.
        """
        peak_bytes = self.peak.peak_bytes
        within = peak_bytes is not None and peak_bytes <= budget_bytes
        return within and (self.peak.retries == 0 or self.rows == 1)


NEEDS_LESS = (Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)


Refuse: TypeAlias = Callable[..., OneRowDoesNotFitError]
"""Makes the error for the row that was measured last, with these remedies: who measured it knows the numbers."""


def one_row_error(
    *remedies: Remedy, length: int, need_bytes: int | None, budget_bytes: int, rank: int, of: str = ""
) -> OneRowDoesNotFitError:
    """`need_bytes` is None where the row ran out of memory; `of` names one of several training steps."""
    need, budget = "runs out of memory", format_bytes(budget_bytes)
    if need_bytes is not None:
        needed, budget = format_apart(need_bytes, budget_bytes)
        need = f"needs {needed}"
    return OneRowDoesNotFitError(
        f"one row of {length} tokens{of and f' of {of}'} {need} on rank {rank}, whose budget is {budget}",
        *remedies,
        need_bytes=need_bytes,
        budget_bytes=budget_bytes,
    )


def phase_points(probes: Sequence[Probe]) -> dict[str, dict[tuple[int, int], int]]:
    """Measured bytes by rows and length for each phase, from the probes that ran to their end."""
    complete = [probe for probe in probes if probe.peak.fits]
    phases = list(complete[0].peak.phase_bytes) if complete else []
    if any(list(probe.peak.phase_bytes) != phases for probe in complete):
        raise ValueError(f"every complete probe measures the same phases, but not all of these have {phases}")
    return {
        phase: {(probe.rows, probe.length): probe.peak.phase_bytes[phase] for probe in complete} for phase in phases
    }


def phase_rows(probes: Sequence[Probe]) -> dict[str, dict[int, int]]:
    """Measured bytes by rows alone, where all rows have one length."""
    return {phase: {rows: need for (rows, _), need in at.items()} for phase, at in phase_points(probes).items()}


def fit_line(points: Mapping[int, int]) -> Surface:
    """A line through the largest of two or more measurements, as steep as the steepest chord that ends there.

    The steepest, because a phase is the maximum of many points of the program, each affine in the rows, and
    so bends upwards if at all. One row is left out as soon as two other sizes are known: kernels and chunking
    may treat it differently. A phase holds no negative memory without rows, so a line that says so is
    replaced with the one through zero.
    """
    last = max(points)
    others = [rows for rows in points if 1 < rows < last] or [rows for rows in points if rows < last]
    slope = max(0.0, *((points[last] - points[rows]) / (last - rows) for rows in others))
    fixed_bytes = points[last] - slope * last
    return Surface(fixed_bytes, slope) if fixed_bytes >= 0 else Surface(0.0, points[last] / last)


def fit_lines(probes: Sequence[Probe]) -> dict[str, Surface]:
    """The line of each phase; empty before two sizes are measured."""
    return {phase: fit_line(points) for phase, points in phase_rows(probes).items() if len(points) > 1}


_TRUSTED_JUMP, _ROUNDED_JUMP = 4, 8
"""After two measurements, the next has at most this many times the rows of the larger one; after three in line, any
number. The second figure is for sizes that are rounded down to a power of two, which a prediction that is a little off
rarely changes."""
_TWO_MAY_MISS = 1.25
"""A search that needs some number of rows gives up after two measurements only if they promise less even when
multiplied by this."""
_BEND = 0.01
"""A measurement this far above the line through the smaller ones shows that another law has taken over."""
_CLOSE = 0.98
"""Not worth another probe while lines say how much is left ..."""
_CLOSE_WITHOUT_LINES = 0.95
"""... and when only the bracket between what fit and what did not says it."""
_CLOSE_BESIDE_A_CACHE = 0.8
"""Not worth a fifth probe where an allocator's cache ends a size, since that follows no line."""
_LEAST_BESIDE_A_CACHE = 0.8
"""Share of the budget that is counted on while only two rows are known, which leave a larger cache than many do."""
_MISSED_ROWS = 0.75
"""Rows by which a prediction from what is cached may be too low."""


@dataclass(frozen=True)
class History:
    """What a strategy decides from."""

    budget_bytes: int
    rungs: Sequence[int]
    """The rows that may be chosen, ascending, from 1."""
    max_rows: int
    """Never more than this; the highest rung may be lower."""
    resident_bytes: int = 0
    """What is there at every point of a step, however few the rows: weights and optimizer state."""
    probes: tuple[Probe, ...] = ()

    @property
    def rejected(self) -> tuple[Probe, ...]:
        return tuple(probe for probe in self.probes if not probe.accepted(self.budget_bytes))

    @property
    def too_many(self) -> int:
        """The fewest rows known to be too many: rejected, or above the highest rung."""
        return min((probe.rows for probe in self.rejected), default=self.rungs[-1] + 1)

    @property
    def fit_rows(self) -> int:
        """The most rows known to fit below those; 0 before any did."""
        accepted = (probe.rows for probe in self.probes if probe.accepted(self.budget_bytes))
        return max((rows for rows in accepted if rows < self.too_many), default=0)

    @property
    def caches(self) -> bool:
        """Whether the allocator keeps blocks that it could return to the device."""
        return any(probe.peak.fullness for probe in self.probes)

    @property
    def usable_bytes(self) -> float:
        """What may be allocated: the budget, or less where the cache fills the device before that.

        What is cached follows no line. Its proportion to what is allocated changes little from some rows on.
        """
        unflushed = [probe for probe in self.probes if probe.peak.fullness and not probe.peak.retries]
        if not unflushed:
            return self.budget_bytes
        largest = max(unflushed, key=attrgetter("rows"))
        usable_bytes = (largest.peak.peak_bytes or 0) / largest.peak.fullness
        if largest.rows <= 2:
            usable_bytes = max(usable_bytes, _LEAST_BESIDE_A_CACHE * self.budget_bytes)
        return min(self.budget_bytes, usable_bytes)

    @property
    def predicted_rows(self) -> float:
        """How many rows the lines promise, up to `max_rows`: the phase that is full first decides."""
        lines = fit_lines(self.probes).values()
        promised = min((line.rows_within(self.usable_bytes) for line in lines), default=self.fit_rows)
        return min(promised, self.max_rows)

    def is_close(self, goal: int) -> bool:
        """Whether what is known of a cache is not worth a fifth probe."""
        return self.caches and len(self.probes) >= 4 and self.fit_rows >= _CLOSE_BESIDE_A_CACHE * goal

    def may_reach(self, rows: int) -> bool:
        """Whether so many may fit, as far as measurements tell."""
        below, sizes = self.too_many - 1, {probe.rows for probe in self.probes if probe.peak.fits}
        if len(sizes) > 1:
            promised = self.predicted_rows
            # one of two may be off: on a CPU, by weights of a layer that a thread of gloo has freed late
            below = min(below, floor(promised if self.caches or len(sizes) > 2 else _TWO_MAY_MISS * promised))
        return self.rung_at_most(below) >= rows

    @property
    def trusted_jump(self) -> int:
        return _ROUNDED_JUMP if self.rungs[2:3] == [4] else _TRUSTED_JUMP

    def rung_at_most(self, rows: float) -> int:
        index = bisect_right(self.rungs, floor(rows))
        return self.rungs[index - 1] if index else 0

    def rung_above(self, rows: int) -> int | None:
        index = bisect_right(self.rungs, rows)
        return self.rungs[index] if index < len(self.rungs) else None


Strategy = Callable[[History], int | None]


def binary(history: History) -> int | None:
    """Doubles until it fails, then bisects. Exact for any law that grows with the rows."""
    low, high = history.fit_rows, history.too_many
    if not history.probes:
        return 1
    if not history.rejected:
        doubled = history.rung_at_most(2 * low)
        return doubled if doubled > low else history.rung_above(low)
    between = bisect_right(history.rungs, low), bisect_right(history.rungs, high - 1)
    return history.rungs[sum(between) // 2] if between[0] < between[1] else None


def decrease(history: History) -> int | None:
    """Halves from the highest rung until it fits; what it finds may be half of what would have fit."""
    if history.fit_rows:
        return None
    last_rejected = history.too_many
    halved = last_rejected // 2 if history.rejected else last_rejected
    return history.rung_at_most(halved) or None


def linear(history: History) -> int | None:
    """Measures 1 and 2 rows, extrapolates each phase by itself, verifies; again, if that taught something."""
    if history.rejected:
        return _narrow(history)
    if len(history.probes) < 2:
        rows = len(history.probes) + 1
        return rows if rows <= history.rungs[-1] else None
    low, goal = history.fit_rows, history.rung_at_most(history.predicted_rows)
    if history.caches:
        if history.is_close(goal):
            return None
        above = history.rung_above(low)
        if above and above <= history.predicted_rows + _MISSED_ROWS:
            goal = max(goal, above)  # a flush at most
    if history.rung_at_most(low) >= _CLOSE * goal:
        # Any two sizes are on a line: where the result is one of them, a third shows if the first row misled.
        unchecked = len(history.probes) == 2 and history.predicted_rows >= 3 and history.rung_above(low)
        return 3 if unchecked else None
    reach = _reach(history)
    if reach >= goal:
        return goal
    step = history.rung_at_most(reach)
    return step if step > low else max(floor(reach), low + 1)


def _reach(history: History) -> float:
    phases = phase_rows(history.probes).values()
    reach = min(_phase_reach(points, history) for points in phases)
    # If nothing has grown yet, no line says where something will.
    grows = any(fit_line(points).bytes_per_row > 0 for points in phases)
    return reach if grows else min(reach, history.trusted_jump * history.fit_rows)


def _phase_reach(points: Mapping[int, int], history: History) -> float:
    """The most rows at which this phase may be measured next without betting on a line that is not proven.

    k times the rows need at most k times what is not resident, for every maximum of affine laws. A line through two
    sizes is trusted a little further. From the third on it is trusted wherever it leads, unless that one came
    out above the line: another point of the program has taken over. (Below the line, it was the first row
    that is different, and `fit_line` has left it out by now.)
    """
    last = max(points)
    resident_bytes = history.resident_bytes
    safe = last * (history.usable_bytes - resident_bytes) / max(1, points[last] - resident_bytes)
    if len(points) == 2:
        return max(safe, history.trusted_jump * last)
    before = fit_line({rows: points[rows] for rows in points if rows != last})
    return safe if points[last] > before.bytes_at(last) * (1 + _BEND) else inf


def _narrow(history: History) -> int | None:
    """The next rows between what fit and what did not, or None when they are close enough.

    A failure taught most about the law if it was measured to its end; otherwise, the prediction was probably
    nearly right, so the steps back start small and double until they are those of a bisection.
    """
    low, high = history.fit_rows, history.too_many
    highest = history.rung_at_most(high - 1)
    if history.is_close(highest) or history.rung_at_most(low) >= _CLOSE_WITHOUT_LINES * highest:
        return None
    goal = history.rung_at_most(history.predicted_rows)
    if history.probes[-1] in history.rejected and low < goal < high:
        return goal
    step_back = max(1, (high << len(history.rejected)) // 64)
    rows = history.rung_at_most(max((low + high) // 2, high - step_back))
    return rows if rows > low else history.rung_above(low)


NEED_RECOVERY = ("binary", "decrease")
"""Strategies that run out of memory on their way."""
STRATEGIES: Mapping[str, Strategy] = {"linear": linear, "binary": binary, "decrease": decrease}


_ROUNDED_TO = {"power_of_two": "a power of two", "divisor": "a divisor of the samples per step"}


@dataclass(frozen=True)
class SearchResult:
    """What a search measured and found."""

    strategy: str
    round_to: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    """Every probe, in the order they were measured."""
    lines: Mapping[str, Surface]
    """The line of each phase; empty where fewer than two sizes ran to their end."""
    fits_rows: float
    """Before rounding: where the lines cross the budget (linear), else the most rows that fit."""
    rows: int
    """Rows of a microbatch that were chosen."""
    reason: str
    """Why not more: what `rows` was rounded from, what did not fit, or which bound it met."""
    accumulates: bool = True
    """Whether the probes held gradients of an earlier microbatch."""

    @property
    def out_of_memory_count(self) -> int:
        return sum(not probe.peak.fits for probe in self.probes)


def search(
    measure: Callable[[int], Peak],
    room: Room,
    *,
    refuse: Refuse,
    strategy: str = "linear",
    round_to: str = "power_of_two",
    max_rows: int | None = None,
    samples_per_step: int | None = None,
    least_rows: int = 0,
) -> SearchResult:
    """The largest rows, rounded down, that `measure` accepts within the room's budget.

    `measure` is called with the same rows on every rank and must return the same agreed Peak on each: phases
    as the maximum over ranks, against a budget that is the minimum. `decrease` starts at `max_rows`;
    `samples_per_step` is what `divisor` divides. What is resident, which every point of a step needs whatever its rows,
    lets `linear` go further at once. Where one row does not fit, raises what `refuse` makes of it. Ends early once
    fewer than `least_rows` are expected.
    """
    check_choice("strategy", strategy, STRATEGIES)
    rungs = rungs_up_to(max_rows, round_to, samples_per_step)
    most = MAX_ROWS if max_rows is None else max_rows
    history = History(room.budget_bytes, rungs, most, room.resident_bytes)
    while history.may_reach(least_rows) and (rows := STRATEGIES[strategy](history)) is not None:
        probe = Probe(rows=rows, peak=measure(rows))
        history = replace(history, probes=(*history.probes, probe))
        if rows == 1 and not probe.accepted(room.budget_bytes):
            raise refuse(*NEEDS_LESS)
    # Only lines promise more rows than were measured, up to those that did not fit.
    fits_rows = float(max(history.fit_rows, history.predicted_rows if strategy == "linear" else 0.0))
    if history.rejected and fits_rows >= history.too_many:
        fits_rows = float(history.fit_rows)
    chosen = history.rung_at_most(history.fit_rows)
    return SearchResult(
        strategy=strategy,
        round_to=round_to,
        budget_bytes=history.budget_bytes,
        probes=history.probes,
        lines=fit_lines(history.probes),
        fits_rows=fits_rows,
        rows=chosen,
        reason=_reason(history, fits_rows, chosen, round_to, samples_per_step),
    )


def _reason(history: History, fits_rows: float, rows: int, round_to: str, samples_per_step: int | None) -> str:
    if history.rejected and fits_rows == rows:
        return f"{history.too_many} did not fit"
    if not history.rejected and (fits_rows >= history.max_rows or fits_rows == rows == history.rungs[-1]):
        known, highest = f"limited to {history.max_rows}", float(history.max_rows)
        if history.max_rows == samples_per_step:
            known = f"all {samples_per_step} samples of a step"
    else:
        # Cut, not rounded: 8.97 must not read as if 9 fit.
        known, highest = f"{floor(fits_rows * 10 + 1e-6) / 10:g} fit", fits_rows
    rounded = rows + 1e-6 < highest and round_to in _ROUNDED_TO
    return f"{known}, rounded down to {_ROUNDED_TO[round_to]}" if rounded else known
