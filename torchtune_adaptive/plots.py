"""Draws what a search measured: `batch_search.png`."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.peaks import Probe
from torchtune_adaptive.search import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "batch_search.png"

_log = logging.getLogger(__name__)
# Okabe and Ito's colours: told apart with any colour vision, and in print.
_PHASE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_ALARM = "#D55E00"
_INK = "#333333"


def draw_search(directory: Path, result: SearchResult, sequence_length: int) -> Path | None:
    """Draws `batch_search.png`; without matplotlib, logs one line on how to get it, and returns None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _log.info("%s is not drawn: pip install 'torchtune-adaptive[plot]'", PLOT_FILE)
        return None
    # A Figure of its own, without pyplot: no global state, no window, no backend to choose.
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    unit, unit_bytes = ("GiB", 2**30) if result.budget_bytes >= 2**30 else ("MiB", 2**20)
    # A search from far above would squeeze all that fits into a corner.
    shown = [probe for probe in result.probes if probe.rows <= 3 * result.fits_rows]
    _draw_phases(axes, result, shown, unit_bytes)
    _draw_budget(axes, result, shown, unit, unit_bytes)
    _draw_choice(axes, result, shown, unit, unit_bytes)
    _label(axes, result, sequence_length, unit, len(result.probes) - len(shown))
    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / PLOT_FILE, dpi=200)
    return directory / PLOT_FILE


def _draw_phases(axes: "Axes", result: SearchResult, shown: list[Probe], unit_bytes: int) -> None:
    """What each phase measured, and its line as far as the budget."""
    complete = [probe for probe in shown if probe.peak.fits]
    right = _right_edge(result, shown)
    for index, phase in enumerate(complete[0].peak.phase_bytes):
        colour = _PHASE_COLOURS[index % len(_PHASE_COLOURS)]
        peaks = [probe.peak.phase_bytes[phase] / unit_bytes for probe in complete]
        axes.plot([probe.rows for probe in complete], peaks, "o", color=colour, markersize=4.5, zorder=3)
        if phase in result.lines:
            line = result.lines[phase]
            ends = (0, min(right, line.rows_within(result.budget_bytes)))
            axes.plot(ends, [line.bytes_at(rows) / unit_bytes for rows in ends], color=colour, linewidth=1.4)
        axes.plot([], [], "-o" if phase in result.lines else "o", color=colour, markersize=4.5, label=phase)


def _draw_budget(axes: "Axes", result: SearchResult, shown: list[Probe], unit: str, unit_bytes: int) -> None:
    """The budget, and a cross for each size that did not fit: at its peak, or on the budget if unknown."""
    budget = result.budget_bytes / unit_bytes
    axes.axhline(budget, color=_ALARM, linewidth=1.2, linestyle="--", label=f"budget, {budget:.1f} {unit}", zorder=2)
    refused = [probe for probe in shown if not probe.accepted(result.budget_bytes)]
    heights = [(probe.peak.peak_bytes or result.budget_bytes) / unit_bytes for probe in refused]
    if refused:
        rows = [probe.rows for probe in refused]
        axes.plot(
            rows,
            heights,
            "x",
            color=_ALARM,
            markersize=7,
            mew=1.8,
            zorder=4,
            label="did not fit",
            clip_on=False,
        )
    axes.set_xlim(0, _right_edge(result, shown))
    axes.set_ylim(0, max(1.18 * budget, 1.05 * max(heights, default=0.0)))


def _draw_choice(axes: "Axes", result: SearchResult, shown: list[Probe], unit: str, unit_bytes: int) -> None:
    chosen = next(probe for probe in shown if probe.rows == result.rows)
    peak = (chosen.peak.peak_bytes or 0) / unit_bytes
    budget = result.budget_bytes / unit_bytes
    axes.plot(result.rows, peak, "o", color="none", markeredgecolor=_INK, markersize=11, mew=1.6, zorder=5)
    # Above the budget nothing is drawn left of the choice, so that is where its label has room.
    at_left = result.rows > 0.45 * _right_edge(result, shown)
    axes.annotate(
        f"chosen: {result.rows} row{'s' * (result.rows > 1)}, {peak:.1f} {unit}",
        xy=(result.rows, peak),
        xytext=(result.rows, 1.05 * budget),
        horizontalalignment="right" if at_left else "left",
        verticalalignment="bottom",
        color=_INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        arrowprops={
            "arrowstyle": "-",
            "color": _INK,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 6,
            "relpos": (float(at_left), 0),
        },
    )


def _label(axes: "Axes", result: SearchResult, sequence_length: int, unit: str, hidden: int) -> None:
    axes.set_title(f"{result.strategy} search, {sequence_length} tokens a row", loc="left", fontsize=10)
    beyond = f" ({hidden} larger not shown)" if hidden else ""
    axes.set_xlabel(f"rows in a microbatch{beyond}")
    axes.set_ylabel(f"peak memory of a rank ({unit})")
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, borderaxespad=0)


def _right_edge(result: SearchResult, shown: list[Probe]) -> float:
    return 1.08 * max(result.fits_rows, *(probe.rows for probe in shown))
