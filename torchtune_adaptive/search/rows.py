"""Finds the largest number of rows that fits, in few probes.

1. All ranks measure the same rows together and see the same agreed `Peak`.
2. A strategy (strategies.py) names the rows to measure next, the same on every rank.
3. The result is the most rows, rounded down, that were measured themselves and accepted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor

from torchtune_adaptive.errors import check_choice
from torchtune_adaptive.limits.rounding import MAX_ROWS, rungs_up_to
from torchtune_adaptive.limits.surface import Surface
from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.search.line_fits import fit_lines
from torchtune_adaptive.search.probe_result import Probe, Room
from torchtune_adaptive.search.refusal import NEEDS_LESS, Refuse
from torchtune_adaptive.search.strategies import STRATEGIES, History

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
        history = history.plus(probe)
        if rows == 1 and not probe.accepted(room.budget_bytes):
            raise refuse(*NEEDS_LESS)
    return _result(history, strategy, round_to, samples_per_step)


def _result(history: History, strategy: str, round_to: str, samples_per_step: int | None) -> SearchResult:
    most = history.fit_rows
    promised = max(most, _promised(history, strategy))
    fits_rows = float(promised if promised < history.too_many or not history.rejected else most)
    rows = history.rung_at_most(most)
    return SearchResult(
        strategy=strategy,
        round_to=round_to,
        budget_bytes=history.budget_bytes,
        probes=history.probes,
        lines=fit_lines(history.probes),
        fits_rows=fits_rows,
        rows=rows,
        reason=_reason(history, fits_rows, rows, round_to, samples_per_step),
    )


def _promised(history: History, strategy: str) -> float:
    """Rows that were not measured, but are said to fit."""
    return history.predicted_rows if strategy == "linear" else 0.0


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
