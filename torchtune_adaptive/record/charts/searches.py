"""Draws what a search or a profile measured: `batch_search.png`."""

from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.record.charts.figures import (
    ALARM,
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    label,
    legend_beside,
    new_figure,
    no_run_ends_over,
    save,
    unit_of,
)
from torchtune_adaptive.search.lengths import Profile
from torchtune_adaptive.search.peaks import Probe
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "batch_search.png"

_PHASE_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW)


@no_run_ends_over(PLOT_FILE)
def draw_search(directory: Path, result: SearchResult, sequence_length: int) -> Path | None:
    """Draws `batch_search.png`; without matplotlib, logs one line on how to get it, and returns None."""
    if (figure := new_figure(directory / PLOT_FILE, 7.2, 3.8)) is None:
        return None
    axes = figure.add_subplot()
    unit, unit_bytes = unit_of(result.budget_bytes)
    # A search from far above would squeeze all that fits into a corner.
    shown = [probe for probe in result.probes if probe.rows <= 3 * result.fits_rows]
    _draw_phases(axes, result, shown, unit_bytes)
    _draw_budget(axes, result, shown, unit, unit_bytes)
    _draw_choice(axes, result, shown, unit, unit_bytes)
    hidden = len(result.probes) - len(shown)
    beyond = f" ({hidden} larger not shown)" if hidden else ""
    title = f"{result.strategy} search, {sequence_length} tokens a row"
    _label(axes, title, f"rows in a microbatch{beyond}", unit)
    return save(figure, directory / PLOT_FILE)


@no_run_ends_over(PLOT_FILE)
def draw_profile(directory: Path, result: Profile) -> Path | None:
    """Draws `batch_search.png`: what was measured at each length, and the surfaces there; None without matplotlib."""
    if (figure := new_figure(directory / PLOT_FILE, 7.2, 3.8)) is None:
        return None
    axes = figure.add_subplot()
    unit, unit_bytes = unit_of(result.budget_bytes)
    right = 1.15 * max(result.constant_tokens, *(point.tokens for point in result.points))
    for index, length in enumerate(sorted({point.length for point in result.points}, reverse=True)):
        _draw_length(axes, result, length, right, unit_bytes, _PHASE_COLOURS[index % len(_PHASE_COLOURS)])
    budget = result.budget_bytes / unit_bytes
    axes.axhline(budget, color=ALARM, linewidth=1.2, linestyle="--", label=f"budget, {budget:.1f} {unit}")
    tokens = f"fits at any length, {result.constant_tokens} tokens"
    axes.axvline(result.constant_tokens, color=INK, linewidth=1.0, linestyle=":", label=tokens)
    axes.plot([], [], "o", color=INK, markerfacecolor="white", markersize=5, label="held out of the first fit")
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.18 * budget)
    off = f"off by {100 * result.held_out_error:.1f} % where not fitted to"
    _label(axes, f"peak over rows and length, {off}", "padded tokens in a microbatch", unit)
    return save(figure, directory / PLOT_FILE)


def _draw_length(axes: "Axes", result: Profile, length: int, right: float, unit_bytes: int, colour: str) -> None:
    """What rows of one length need, as measured and as fitted, up to what fits."""
    surfaces = result.surfaces.values()
    rows_that_fit = min(surface.rows_within(result.limit_bytes, length) for surface in surfaces)
    # The phase that is full first changes along the way, so the line has corners.
    steps = [min(right, rows_that_fit * length) * part / 40 for part in range(41)]
    needs = [max(surface.bytes_at(tokens / length, length) for surface in surfaces) / unit_bytes for tokens in steps]
    axes.plot(steps, needs, color=colour, linewidth=1.4, label=f"{length} tokens a row")
    for point in result.points:
        if point.length == length and point.peak.peak_bytes is not None:
            face = "white" if point.held_out else colour
            at = point.tokens, point.peak.peak_bytes / unit_bytes
            axes.plot(*at, "o", color=colour, markerfacecolor=face, markersize=5, zorder=3)


def _draw_phases(axes: "Axes", result: SearchResult, shown: list[Probe], unit_bytes: int) -> None:
    """The measurements of each phase, and its line up to the budget."""
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
    axes.axhline(budget, color=ALARM, linewidth=1.2, linestyle="--", label=f"budget, {budget:.1f} {unit}", zorder=2)
    refused = [probe for probe in shown if not probe.accepted(result.budget_bytes)]
    heights = [(probe.peak.peak_bytes or result.budget_bytes) / unit_bytes for probe in refused]
    if refused:
        rows = [probe.rows for probe in refused]
        axes.plot(
            rows,
            heights,
            "x",
            color=ALARM,
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
    axes.plot(result.rows, peak, "o", color="none", markeredgecolor=INK, markersize=11, mew=1.6, zorder=5)
    # Above the budget nothing is drawn left of the choice, so that is where its label has room.
    at_left = result.rows > 0.45 * _right_edge(result, shown)
    axes.annotate(
        f"chosen: {count_of(result.rows, 'row')}, {peak:.1f} {unit}",
        xy=(result.rows, peak),
        xytext=(result.rows, 1.05 * budget),
        horizontalalignment="right" if at_left else "left",
        verticalalignment="bottom",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        arrowprops={
            "arrowstyle": "-",
            "color": INK,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 6,
            "relpos": (float(at_left), 0),
        },
    )


def _label(axes: "Axes", title: str, below: str, unit: str) -> None:
    label(axes, title, below, f"peak memory of a rank ({unit})")
    axes.locator_params(axis="x", integer=True)
    legend_beside(axes)


def _right_edge(result: SearchResult, shown: list[Probe]) -> float:
    return 1.08 * max(result.fits_rows, *(probe.rows for probe in shown))
