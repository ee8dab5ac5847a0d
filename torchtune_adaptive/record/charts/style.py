"""Things that all pictures share: a figure if matplotlib is there, colours, units, the look of axes."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, ParamSpec

from torchtune_adaptive.atomic_files import reason, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")

# Okabe and Ito's: told apart with any colour vision, and in print.
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
ALARM = "#D55E00"
GREY = "#999999"
INK = "#333333"
LINE_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)
"""Lines that are alike in kind, in this order."""


TEXT_SIZE, HEADING, TITLE = 10.5, 11.0, 13.0
"""Sizes of type in the picture of a run, which has to be read as a thumbnail, too."""
CHARACTER = 0.01198
"""Width of a character of its text, as a share of the axes' width."""
NAME = "name"
"""The gid of a text that names a line."""
NAME_HEIGHT = 0.075
"""Height of a name, as a share of the axes'."""


class LineName(NamedTuple):
    name: str
    end: float
    """The end of the line, in the units of the axis."""
    colour: str


def new_figure(path: Path, width: float, height: float) -> Figure | None:
    """A new figure; without matplotlib None, and one line on how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _log.info("%s is not drawn: pip install matplotlib", path.name)
        return None
    # A Figure of its own, without pyplot: no global state, no window, no backend to choose.
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Saves a figure in the format that the file's name asks for."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:] or "png", dpi=200)
    replace_file(path, image.getvalue())
    return path


def no_run_ends_over(
    name: str,
) -> Callable[[Callable[Arguments, Path | None]], Callable[Arguments, Path | None]]:
    """Decorates what draws a picture: however that fails, one line says why, and it returns None."""

    def decorate(draw: Callable[Arguments, Path | None]) -> Callable[Arguments, Path | None]:
        @wraps(draw)
        def draw_if_possible(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Path | None:
            try:
                return draw(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - matplotlib, its fonts, its cache, the disk
                _log.warning("%s is not drawn: %s", name, reason(error))
                return None

        return draw_if_possible

    return decorate


def unit_of(count: float) -> tuple[str, int]:
    """The unit in which an amount of memory is shown: its name and its bytes."""
    return ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)


def percent_of(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"


def heading(axes: Axes, text: str) -> None:
    """The heading of a panel of a run's picture."""
    axes.set_title(text, loc="left", fontsize=HEADING, color=INK)


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    tidy(axes)


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def legible(sizes: Iterable[float], apart: float, height: Callable[[float], float] = float) -> list[float]:
    """The sizes that can be written beside an axis, from the largest on: the next one this much below it."""
    shown: list[float] = []
    for size in sorted({*sizes}, reverse=True):
        if not shown or height(shown[-1]) - height(size) >= apart:
            shown.append(size)
    return shown


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Heights of an axis from the top on, moved as little as lets each be this much below the one before it."""
    # Moved up by what those above it need, they only have not to rise: those that do are levelled out.
    levels: list[list[float]] = []
    for at, height in enumerate(heights):
        levels.append([height + at * apart])
        while len(levels) > 1 and fmean(levels[-2]) < fmean(levels[-1]):
            levels[-2:] = [levels[-2] + levels[-1]]
    level = [fmean(each) for each in levels for _ in each]
    return [min(each, 1.0) - at * apart for at, each in enumerate(level)]


def name_lines(axes: Axes, names: Sequence[LineName]) -> None:
    """Names right of the axes, each as near to the end of its line as the others leave room."""
    lowest, highest = axes.get_ylim()
    from_the_top = sorted(names, key=lambda line: -line.end)
    heights = spread([(line.end - lowest) / (highest - lowest) for line in from_the_top], NAME_HEIGHT)
    for line, height in zip(from_the_top, heights, strict=True):
        axes.text(
            1.015,
            height,
            line.name,
            transform=axes.transAxes,
            verticalalignment="center",
            color=line.colour,
            fontsize=9,
            gid=NAME,
        )
