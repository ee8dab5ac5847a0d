"""Draws what a search or a profile measured: `batch_search.png`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.record.charts.figures import (
    ALARM,
    INK,
    LINE_COLOURS,
    LineName,
    label,
    name_lines,
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


@no_run_ends_over(PLOT_FILE)
def draw_search(directory: Path, result: SearchResult, sequence_length: int, stage: str = "") -> Path | None:
    """Draws `batch_search.png`; without matplotlib, logs one line on how to get it, and returns None."""
    if (figure := new_figure(directory / PLOT_FILE, 7.2, 3.8)) is None:
        return None
    axes = figure.add_subplot()
    unit, unit_bytes = unit_of(result.budget_bytes)
    # A search from far above would squeeze all that fits into a corner.
    shown = [probe for probe in result.probes if probe.rows <= 3 * result.fits_rows]
    names = [_draw_budget(axes, result, shown, unit, unit_bytes), *_draw_phases(axes, result, shown, unit_bytes)]
    _draw_choice(axes, result, shown, unit, unit_bytes)
    hidden = len(result.probes) - len(shown)
    beyond = f"; {hidden} larger not shown" if hidden else ""
    below = f"rows in a microbatch ({result.strategy} search, {count_of(len(result.probes), 'probe')}{beyond})"
    name_lines(axes, names)
    fitting = f"{count_of(result.rows, 'row')} of {sequence_length} tokens fit"
    label(axes, _of(stage, f"{fitting} (peak: {_fullest(result)})"), below, f"peak memory of a rank ({unit})")
    axes.locator_params(axis="x", integer=True)
    return save(figure, directory / PLOT_FILE)


@no_run_ends_over(PLOT_FILE)
def draw_profile(directory: Path, result: Profile, stage: str = "") -> Path | None:
    """Draws `batch_search.png`: what was measured at each length, and the surfaces there; None without matplotlib."""
    if (figure := new_figure(directory / PLOT_FILE, 7.2, 3.8)) is None:
        return None
    axes = figure.add_subplot()
    unit, unit_bytes = unit_of(result.budget_bytes)
    right = 1.15 * max(result.constant_tokens, *(point.tokens for point in result.points))
    budget = result.budget_bytes / unit_bytes
    axes.axhline(budget, color=ALARM, linewidth=1.2, linestyle="--", label="budget")
    names = [LineName(f"budget, {budget:.1f} {unit}", budget, ALARM)]
    for index, length in enumerate(sorted({point.length for point in result.points}, reverse=True)):
        names.append(_draw_length(axes, result, length, right, unit_bytes, LINE_COLOURS[index % len(LINE_COLOURS)]))
    axes.plot(result.constant_tokens, budget, "v", color=INK, markersize=7, zorder=4, label="fits at any length")
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.18 * budget)
    name_lines(axes, names)
    off = f"hollow points, not fitted to, are {100 * result.held_out_error:.1f} % off"
    axes.text(0.02, 0.97, off, transform=axes.transAxes, verticalalignment="top", color=INK, fontsize=9)
    title = f"samples of any length fit, up to {result.constant_tokens} tokens in all"
    label(axes, _of(stage, title), "tokens in a microbatch, padding included", f"peak memory of a rank ({unit})")
    axes.locator_params(axis="x", integer=True)
    return save(figure, directory / PLOT_FILE)


def _of(stage: str, title: str) -> str:
    return f"{stage}: {title}" if stage else title


def _draw_length(axes: "Axes", result: Profile, length: int, right: float, unit_bytes: int, colour: str) -> LineName:
    """What rows of one length need, as measured and as fitted, up to what fits."""
    surfaces = result.surfaces.values()
    rows_that_fit = min(surface.rows_within(result.limit_bytes, length) for surface in surfaces)
    # The phase that is full first changes along the way, so the line has corners.
    steps = [min(right, rows_that_fit * length) * part / 40 for part in range(41)]
    needs = [max(surface.bytes_at(tokens / length, length) for surface in surfaces) / unit_bytes for tokens in steps]
    axes.plot(steps, needs, color=colour, linewidth=1.4)
    for point in result.points:
        if point.length == length and point.peak.peak_bytes is not None:
            face = "white" if point.held_out else colour
            at = point.tokens, point.peak.peak_bytes / unit_bytes
            axes.plot(*at, "o", color=colour, markerfacecolor=face, markersize=5, zorder=3)
    return LineName(f"rows of {length} tokens", needs[-1], colour)


def _draw_phases(axes: "Axes", result: SearchResult, shown: list[Probe], unit_bytes: int) -> list[LineName]:
    """The measurements of each phase, and its line up to the budget. The first of the names needs most."""
    complete = [probe for probe in shown if probe.peak.fits]
    right = _right_edge(result, shown)
    names = []
    for index, phase in enumerate(complete[0].peak.phase_bytes):
        colour = LINE_COLOURS[index % len(LINE_COLOURS)]
        peaks = [probe.peak.phase_bytes[phase] / unit_bytes for probe in complete]
        axes.plot([probe.rows for probe in complete], peaks, "o", color=colour, markersize=4.5, zorder=3)
        end = peaks[-1]
        if phase in result.lines:
            line = result.lines[phase]
            ends = (0, min(right, line.rows_within(result.budget_bytes)))
            axes.plot(ends, [line.bytes_at(rows) / unit_bytes for rows in ends], color=colour, linewidth=1.4)
            end = min(line.bytes_at(right), result.budget_bytes) / unit_bytes
        names.append(LineName(phase, end, colour))
    needs = _needs(result)
    return sorted(names, key=lambda name: -needs[name.name])


def _needs(result: SearchResult) -> Mapping[str, int]:
    """Bytes of each phase at the rows that were chosen."""
    return next(probe for probe in result.probes if probe.rows == result.rows).peak.phase_bytes


def _fullest(result: SearchResult) -> str:
    needs = _needs(result)
    return max(needs, key=needs.__getitem__)


def _draw_budget(axes: "Axes", result: SearchResult, shown: list[Probe], unit: str, unit_bytes: int) -> LineName:
    """The budget, and a cross for each size that did not fit: at its peak, or on the budget if unknown."""
    budget = result.budget_bytes / unit_bytes
    axes.axhline(budget, color=ALARM, linewidth=1.2, linestyle="--", label="budget", zorder=2)
    refused = [probe for probe in shown if not probe.accepted(result.budget_bytes)]
    heights = [(probe.peak.peak_bytes or result.budget_bytes) / unit_bytes for probe in refused]
    if refused:
        rows = [probe.rows for probe in refused]
        axes.plot(rows, heights, "x", color=ALARM, markersize=7, mew=1.8, zorder=4, clip_on=False)
        axes.annotate(
            "did not fit",
            (rows[0], heights[0]),
            xytext=(0, -8),
            textcoords="offset points",
            horizontalalignment="center",
            verticalalignment="top",
            color=ALARM,
            fontsize=9,
        )
    axes.set_xlim(0, _right_edge(result, shown))
    axes.set_ylim(0, max(1.18 * budget, 1.05 * max(heights, default=0.0)))
    return LineName(f"budget, {budget:.1f} {unit}", budget, ALARM)


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


def _right_edge(result: SearchResult, shown: list[Probe]) -> float:
    return 1.08 * max(result.fits_rows, *(probe.rows for probe in shown))
