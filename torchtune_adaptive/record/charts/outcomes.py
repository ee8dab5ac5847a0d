"""Draws settings beside each other: tokens per second over the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.prediction.outcome import Outcome, frontier_of
from torchtune_adaptive.record.charts.style import ALARM, BLUE, GREY, INK, label, new_figure, save, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDEST_NAME = 44
POINTS_INCHES, CHARACTER_INCHES = 6.6, 0.075
"""Width of the points, and of a character in the list beside them."""
LINE_HEIGHT = 0.047
"""Height of a line, as a share of the picture's."""


def draw_speeds(
    path: Path, outcomes: Sequence[Outcome], names: Sequence[str], usable_bytes: int, title: str
) -> Path | None:
    """Draws each setting as a numbered point with its range; without matplotlib, logs one line and returns None."""
    entries = [_entry(number, name) for number, name in enumerate(names, start=1)]
    listed = max(len(line) for entry in entries for line in entry) * CHARACTER_INCHES
    if (figure := new_figure(path, POINTS_INCHES + listed, 4.6)) is None:
        return None
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left")
    axes, beside = figure.subplots(1, 2, width_ratios=(POINTS_INCHES, listed))
    unit, unit_bytes = unit_of(usable_bytes)
    best = frontier_of(outcomes)
    _draw_points(axes, outcomes, best, unit_bytes)
    usable = usable_bytes / unit_bytes
    axes.axvline(usable, color=ALARM, linewidth=1.2, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    name = f"{usable:.1f} {unit} usable "
    axes.text(usable, 0, name, horizontalalignment="right", verticalalignment="bottom", color=ALARM, fontsize=9)
    what = "number 1 is the fastest that fits" if outcomes[0].fits else "nothing that was tried fits"
    if any(each.fits and each not in best for each in outcomes):
        what += "; grey: another is as fast in less memory"
    label(axes, what, f"memory of a rank ({unit})", "tokens per second, and the range expected")
    _list_entries(beside, entries)
    return save(figure, path)


def _draw_points(axes: Axes, outcomes: Sequence[Outcome], best: Sequence[Outcome], unit_bytes: int) -> None:
    axes.plot([each.peak_bytes / unit_bytes for each in best], [each.tokens_per_s for each in best], color=BLUE)
    for number, each in enumerate(outcomes, start=1):
        memory, (slow, fast) = each.peak_bytes / unit_bytes, each.range_of_tokens_per_s
        colour = BLUE if each in best else GREY if each.fits else ALARM
        axes.plot([memory, memory], [slow, fast], color=colour, linewidth=0.8, alpha=0.5)
        axes.plot([memory], [each.tokens_per_s], "o" if each.fits else "x", color=colour, markersize=5)
        axes.annotate(
            str(number),
            (memory, each.tokens_per_s),
            xytext=(6, 6 if number % 2 else -6),  # neighbours by speed do not share a side
            textcoords="offset points",
            verticalalignment="bottom" if number % 2 else "top",
            color=INK,
            fontsize=9,
        )


def _entry(number: int, name: str) -> list[str]:
    """The lines of a name; a long one has a change on each."""
    first, *others = name.split() if len(name) > WIDEST_NAME else [name]
    return [f"{number}  {first}", *(f"    {each}" for each in others)]


def _list_entries(axes: Axes, entries: Sequence[Sequence[str]]) -> None:
    axes.set_axis_off()
    line = 0
    for entry in entries:
        axes.text(0, 1 - line * LINE_HEIGHT, "\n".join(entry), fontsize=8, color=INK, verticalalignment="top")
        line += len(entry)
