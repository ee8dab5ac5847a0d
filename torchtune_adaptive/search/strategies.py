"""How a search chooses the rows to measure next.

A strategy reads what was measured so far and names the rows to measure next, or None when it is done. It is a
pure function of that history, and all ranks see the same history, so they decide the same without a word.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf

from torchtune_adaptive.search.line_fits import fit_line, fit_lines, phase_rows
from torchtune_adaptive.search.probe_result import Probe

_TRUSTED_JUMP = 4
"""Two measurements may predict up to this many times the larger one; a third in line, any distance."""
_BEND = 0.01
"""A measurement this far above the line through the smaller ones shows that another law has taken over."""
_CLOSE = 0.98
"""Not worth another probe while lines say how much is left ..."""
_CLOSE_WITHOUT_LINES = 0.95
"""... and when only the bracket between what fit and what did not says it."""


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

    def plus(self, probe: Probe) -> "History":
        return replace(self, probes=(*self.probes, probe))

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
    def predicted_rows(self) -> float:
        """How many rows the lines promise, up to `max_rows`: the phase that is full first decides."""
        lines = fit_lines(self.probes).values()
        promised = min((line.rows_within(self.budget_bytes) for line in lines), default=self.fit_rows)
        return min(promised, self.max_rows)

    def may_reach(self, rows: int) -> bool:
        """Whether so many may fit, as far as measurements tell."""
        below = self.too_many - 1
        if len({probe.rows for probe in self.probes if probe.peak.fits}) > 1:
            below = min(below, floor(self.predicted_rows))
        return self.rung_at_most(below) >= rows

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
    reach = min(_phase_reach(points, history.budget_bytes, history.resident_bytes) for points in phases)
    # If nothing has grown yet, no line says where something will.
    grows = any(fit_line(points).bytes_per_row > 0 for points in phases)
    return reach if grows else min(reach, _TRUSTED_JUMP * history.fit_rows)


def _phase_reach(points: Mapping[int, int], budget_bytes: int, resident_bytes: int) -> float:
    """The most rows at which this phase may be measured next without betting on a line that is not proven.

    Growing in proportion to all but what is resident is safe for every maximum of affine laws. A line through two
    sizes is trusted a little further. From the third on it is trusted wherever it leads, unless that one came
    out above the line: another point of the program has taken over. (Below the line, it was the first row
    that is different, and `fit_line` has left it out by now.)
    """
    last = max(points)
    safe = last * (budget_bytes - resident_bytes) / max(1, points[last] - resident_bytes)
    if len(points) == 2:
        return max(safe, _TRUSTED_JUMP * last)
    before = fit_line({rows: points[rows] for rows in points if rows != last})
    return safe if points[last] > before.bytes_at(last) * (1 + _BEND) else inf


def _narrow(history: History) -> int | None:
    """The next rows between what fit and what did not, or None when they are close enough.

    A failure taught most about the law if it was measured to its end; otherwise, the prediction was probably
    nearly right, so the steps back start small and double until they are those of a bisection.
    """
    low, high = history.fit_rows, history.too_many
    highest = history.rung_at_most(high - 1)
    if history.rung_at_most(low) >= _CLOSE_WITHOUT_LINES * highest:
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
