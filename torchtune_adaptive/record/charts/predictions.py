"""Draws a capacity: memory over rows, and the rows that fit over the length of a row."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.prediction.capacity import Capacity
from torchtune_adaptive.record.charts.style import (
    ALARM,
    BLUE,
    INK,
    LINE_COLOURS,
    LineName,
    label,
    name_lines,
    new_figure,
    save,
    unit_of,
)
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALIKE = 0.004
"""The share of the budget within which one line hides another."""
_RESIDENT = ("weights", "optimizer state")


def check_drawable(path: Path, key: str) -> None:
    """Refuses what cannot be saved before there is anything to draw; says nothing where matplotlib is missing."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return
    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(
            f"{key} is '{path}', and matplotlib cannot write '{path.suffix}'; end the name in .png, .svg or .pdf"
        )
    try:
        if path.is_dir():
            raise ConfigError(f"{key} is '{path}', which is a folder: give a file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{key} is '{path}', which is not a regular file: give another name")
        there = next(each for each in path.absolute().parents if each.exists())
        with tempfile.NamedTemporaryFile(dir=there):  # permissions say nothing of /proc, or of a full disk
            pass
    except OSError as error:
        raise ConfigError(
            f"{key} is '{path}', which cannot be written to: {error.strerror}; give a file in a folder of yours"
        ) from error


def draw(path: Path, capacity: Capacity, frontier: Sequence[Capacity], title: str) -> Path | None:
    """Draws a capacity and those for other lengths; without matplotlib, logs one line and returns None."""
    if (figure := new_figure(path, 11, 4.2)) is None:
        return None
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(left, capacity)
    draw_frontier(right, frontier)
    return save(figure, path)


def _draw_memory(axes: Axes, capacity: Capacity) -> None:
    unit, unit_bytes = unit_of(capacity.budget.usable_bytes)
    last = max(2, round(1.15 * capacity.most_rows_with_retries))
    rows = sorted({*range(1, last + 1, max(1, last // 60)), last})
    peaks = [capacity.peak(count).phase_bytes for count in rows]
    phases = [phase for phase in peaks[0] if phase not in _RESIDENT]
    for colour, phase in zip(LINE_COLOURS, phases, strict=False):
        axes.plot(rows, [peak[phase] / unit_bytes for peak in peaks], color=colour, linewidth=1.4)
    predictions = capacity.predictions()
    reserved = [each.reserved_bytes / unit_bytes for each in predictions]
    axes.plot([each.rows for each in predictions], reserved, "o", color=INK, markersize=4)
    budget = capacity.budget.usable_bytes / unit_bytes
    axes.axhline(budget, color=ALARM, linewidth=1.2, linestyle="--")
    if capacity.most_rows:
        most = capacity.reserved_bytes(capacity.most_rows) / unit_bytes
        axes.plot(capacity.most_rows, most, "o", color="none", markeredgecolor=INK, markersize=11, mew=1.6, zorder=5)
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.18 * budget)
    ends = [LineName(phase, peaks[-1][phase] / unit_bytes, c) for c, phase in zip(LINE_COLOURS, phases, strict=False)]
    # a phase that needs more than there is leaves the axes at their top
    inside = [name._replace(end=min(name.end, 1.18 * budget)) for name in ends]
    name_lines(axes, [*sharing(inside, ALIKE * budget), LineName(f"usable, {budget:.1f} {unit}", budget, ALARM)])
    fits = count_of(capacity.most_rows, "row") if capacity.most_rows else "not even one row"
    verb = "fit" if capacity.most_rows > 1 else "fits"
    title = f"{fits} of {capacity.tokens} tokens {verb}; dots: what the allocator reserves"
    label(axes, title, "rows in a microbatch", f"peak memory of a rank ({unit})")
    axes.locator_params(axis="x", integer=True)


def sharing(names: Sequence[LineName], apart: float) -> list[LineName]:
    """The names, from the top on; lines that end less than this apart, of which one hides the other, share one."""
    shared: list[LineName] = []
    for line in sorted(names, key=lambda line: -line.end):
        if shared and shared[-1].end - line.end < apart:
            shared[-1] = line._replace(name=f"{shared[-1].name}, {line.name}")
        else:
            shared.append(line)
    return shared


def draw_frontier(axes: Axes, frontier: Sequence[Capacity]) -> None:
    """Rows that fit over lengths, and those that fit with allocator retries where these are more."""
    fitting = [each for each in frontier if each.most_rows]
    tokens = [each.tokens for each in fitting]
    most = [each.most_rows for each in fitting]
    with_retries = [each.most_rows_with_retries for each in fitting]
    axes.plot(tokens, most, "-o", color=BLUE, markersize=4.5)
    if most != with_retries:
        axes.plot(tokens, with_retries, "-x", color=ALARM, markersize=4.5)
        _name_line(axes, tokens, most, "without allocator retries", BLUE, above=False)
        _name_line(axes, tokens, with_retries, "at all", ALARM, above=True)
    axes.margins(y=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}k")
    axes.yaxis.set_major_formatter("{x:.0f}")
    label(axes, "what fits", "tokens in a row", "rows in a microbatch")


def _name_line(axes: Axes, x: Sequence[int], y: Sequence[int], name: str, colour: str, *, above: bool) -> None:
    """Names a line clear of both, which fall: above and right of the upper one, or below and left of the lower one."""
    at = len(x) // 3 if above else 2 * len(x) // 3
    side = 7 if above else -7
    axes.annotate(
        name,
        (x[at], y[at]),
        xytext=(side, side),
        textcoords="offset points",
        horizontalalignment="left" if above else "right",
        verticalalignment="bottom" if above else "top",
        color=colour,
        fontsize=9,
    )
