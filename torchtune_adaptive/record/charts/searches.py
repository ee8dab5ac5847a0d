"""Draws what a search or a profile measured: `batch_search.png`."""

from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchtune_adaptive.limits.surface import Surface
from torchtune_adaptive.record.charts.style import (
    ALARM,
    BLUE,
    GREY,
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
from torchtune_adaptive.search.probe_result import Probe
from torchtune_adaptive.search.profile import Profile
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "batch_search.png"
OTHERS = "#BBBBBB"
"""The colour of phases that do not need most."""
PHASE = "phase"
"""The gid of a text that names the phase which needs most."""
PHASE_CHARACTER = 0.0145
"""The width of a character of a phase's name, as a share of the axes' width."""
LONG_ENOUGH = 0.15
"""The share of the width from which on a phase that needs most is named."""


@no_run_ends_over(PLOT_FILE)
def draw_search(
    directory: Path, result: SearchResult, sequence_length: int, stage: str = "", sample: str = "row"
) -> Path | None:
    """Draws `batch_search.png`, which calls what it counts a `sample`; without matplotlib, logs one line on how to get
    it, and returns None."""
    if (figure := new_figure(directory / PLOT_FILE, 7.2, 3.8)) is None:
        return None
    axes = figure.add_subplot()
    unit, unit_bytes = unit_of(result.budget_bytes)
    # A search from far above would squeeze all that fits into a corner.
    shown = [probe for probe in result.probes if probe.rows <= 3 * result.fits_rows]
    names = [_draw_budget(axes, result, shown, unit, unit_bytes), *_draw_phases(axes, result, shown, unit_bytes)]
    _draw_choice(axes, result, shown, unit, unit_bytes, sample)
    hidden = len(result.probes) - len(shown)
    beyond = f"; {hidden} larger not shown" if hidden else ""
    below = f"{sample}s in a microbatch ({result.strategy} search, {count_of(len(result.probes), 'probe')}{beyond})"
    name_lines(axes, names)
    chosen = f"{count_of(result.rows, sample)} of {sequence_length} tokens chosen ({result.reason})"
    label(axes, _of(stage, chosen), below, f"peak memory of a rank ({unit})")
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
    most = f"{result.constant_tokens} tokens"
    axes.annotate(most, (result.constant_tokens, budget), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1.18 * budget)
    name_lines(axes, names)
    off = f"hollow points were held out of the fit: at most {100 * result.held_out_error:.1f} % off"
    axes.text(0.02, 0.97, off, transform=axes.transAxes, verticalalignment="top", color=INK, fontsize=9)
    title = f"samples of any length fit, up to {result.constant_tokens} tokens in all"
    label(axes, _of(stage, title), "tokens in a microbatch, padding included", f"peak memory of a rank ({unit})")
    axes.locator_params(axis="x", integer=True)
    return save(figure, directory / PLOT_FILE)


def _of(stage: str, title: str) -> str:
    return f"{stage}: {title}" if stage else title


def _draw_length(axes: "Axes", result: Profile, length: int, right: float, unit_bytes: int, colour: str) -> LineName:
    """Draws what rows of one length need, as measured and as fitted, up to what fits."""
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


class Binding(NamedTuple):
    """A phase, and the rows from which to which it needs most of all."""

    phase: str
    begins: float
    ends: float


def binding_phases(lines: Mapping[str, Surface], end: float) -> list[Binding]:
    """The phases that need most, from no rows to `end`: they change where two lines cross."""
    pairs = combinations(lines.values(), 2)
    crossings = {
        (one.fixed_bytes - other.fixed_bytes) / (other.bytes_per_row - one.bytes_per_row)
        for one, other in pairs
        if one.bytes_per_row != other.bytes_per_row
    }
    found: list[Binding] = []
    for begins, ends in pairwise([0.0, *sorted(rows for rows in crossings if 0 < rows < end), end]):
        phase = max(lines, key=lambda phase: lines[phase].bytes_at((begins + ends) / 2))
        if found and found[-1].phase == phase:
            found[-1] = found[-1]._replace(ends=ends)
        else:
            found.append(Binding(phase, begins, ends))
    return found


def _draw_phases(axes: "Axes", result: SearchResult, shown: list[Probe], unit_bytes: int) -> list[LineName]:
    """Draws what each phase was measured to need, in grey, and what all of them need, up to the budget, as a line that
    names the phase which needs it. Returns the name of the grey ones."""
    lines, right = result.lines, _right_edge(result, shown)
    end = min(right, *(line.rows_within(result.budget_bytes) for line in lines.values()), right)
    for phase, line in lines.items():
        axes.plot((0, end), [line.bytes_at(rows) / unit_bytes for rows in (0, end)], color=OTHERS, lw=0.8, label=phase)
    for probe in shown:
        if probe.peak.fits:
            needs = sorted(need / unit_bytes for need in probe.peak.phase_bytes.values())
            axes.plot([probe.rows] * len(needs), needs, "o", color=OTHERS, markersize=3, zorder=3)
            axes.plot(probe.rows, needs[-1], "o", color=BLUE, markersize=5, zorder=4)
    if not lines:
        return []
    binding = binding_phases(lines, end)
    corners = [0.0, *(each.ends for each in binding)]
    most = [max(line.bytes_at(rows) for line in lines.values()) / unit_bytes for rows in corners]
    axes.plot(corners, most, color=BLUE, linewidth=1.8, label="needed")
    named = [each for each in binding if each.ends - each.begins > LONG_ENOUGH * right]
    between = [at for at, (one, other) in enumerate(pairwise(binding), 1) if {one, other} <= set(named)]
    axes.plot([corners[at] for at in between], [most[at] for at in between], "|", color=BLUE, markersize=9, mew=1.4)
    for each in named:
        _name_phase(axes, each, result, right, unit_bytes)
    others = lines.keys() - {each.phase for each in named}
    lowest = min((lines[phase].bytes_at(end) / unit_bytes for phase in others), default=0.0)
    return [LineName("other phases", lowest, GREY)] if others else []


def _name_phase(axes: "Axes", binding: Binding, result: SearchResult, right: float, unit_bytes: int) -> None:
    """Writes its name at the middle of its line: above and left of it, where nothing else is, or below and right of it
    where that would leave the axes or meet the leader of the choice."""
    middle = (binding.begins + binding.ends) / 2
    above = PHASE_CHARACTER * len(binding.phase) < middle / right and middle < result.rows
    axes.annotate(
        binding.phase,
        (middle, result.lines[binding.phase].bytes_at(middle) / unit_bytes),
        xytext=(-12, 10) if above else (12, -10),
        arrowprops={"arrowstyle": "-", "color": BLUE, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0},
        textcoords="offset points",
        horizontalalignment="right" if above else "left",
        verticalalignment="bottom" if above else "top",
        color=BLUE,
        fontsize=9,
        gid=PHASE,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=3.5,
    )


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


def _draw_choice(
    axes: "Axes", result: SearchResult, shown: list[Probe], unit: str, unit_bytes: int, sample: str
) -> None:
    chosen = next(probe for probe in shown if probe.rows == result.rows)
    peak = (chosen.peak.peak_bytes or 0) / unit_bytes
    budget = result.budget_bytes / unit_bytes
    axes.plot(result.rows, peak, "o", color="none", markeredgecolor=INK, markersize=11, mew=1.6, zorder=5)
    # Above the budget nothing is drawn left of the choice, so that is where its label has room.
    at_left = result.rows > 0.45 * _right_edge(result, shown)
    axes.annotate(
        f"chosen: {count_of(result.rows, sample)}, {peak:.1f} {unit} in {_fullest(result)}",
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
