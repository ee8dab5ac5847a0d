"""The panels of a run's picture. Each says above itself what it shows; lines are named where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log
from statistics import fmean
from typing import TYPE_CHECKING

from torchtune_adaptive.limits.change import GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.record.charts.figures import (
    ALARM,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    percent_of,
    unit_of,
)
from torchtune_adaptive.record.course import AFTER, LimitCourse, Speed
from torchtune_adaptive.record.events import SCHEDULE
from torchtune_adaptive.record.timeline import Timeline
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWERED = "#FBE3D2"
"""Between the limit and what it had been, in the spells in which it was lower."""
_MARKS = {
    RECOVERY: ("out of memory: step repeated in smaller microbatches", ALARM, "v"),
    GROWTH: ("no trouble for a while: larger microbatches tried again", GREEN, "^"),
    THRASHING: ("allocator thrashing: smaller microbatches on trial", PINK, "s"),
    TRIAL: ("trial decided", SKY, "D"),
}
_TICKS_APART = {True: 0.07, False: 0.2}
"""Least distance of ticks, as a share of a panel's height, so that their numbers do not overlap: where there is room
for words, or not."""
_ROOM_ABOVE = 0.30
"""Room for what marks say, as a share of the panel's height."""


def draw_limit(axes: Axes, *, course: LimitCourse, end: float) -> None:
    """The limit of a run, or of one of few stages, with what its marks mean."""
    _heading(axes, f"most {_unit(course)[0]} in a microbatch" + (f", stage {course.stage}" if course.stage else ""))
    _draw_course(axes, course, end, room_above=_ROOM_ABOVE)
    _draw_marks(axes, course, end, explained=True)


def draw_small_limit(axes: Axes, *, course: LimitCourse, end: float) -> None:
    """One of many: its marks are explained above all of them."""
    repeated = sum(mark.kind == RECOVERY for mark in course.marks)
    unit = f", {_unit(course)[0]}" if course.unit == "bytes" else ""
    _heading(axes, course.stage + unit + (f" · repeated {count_of(repeated, 'time')}" if repeated else ""))
    _draw_course(axes, course, end, room_above=0)
    _draw_marks(axes, course, end, explained=False)


def draw_key(axes: Axes, *, courses: Sequence[LimitCourse]) -> None:
    """What the panels below show, and what their marks mean: a line for each kind that there is."""
    units = dict.fromkeys(each.unit for each in courses)
    _heading(axes, f"most {' or '.join(units)} in a microbatch, by stage")
    axes.set_axis_off()
    there = {mark.kind for each in courses for mark in each.marks}
    for row, kind in enumerate(kind for kind in _MARKS if kind in there):
        means, colour, marker = _MARKS[kind]
        height = 0.85 - 0.36 * row
        axes.plot(0.008, height, marker, color=colour, markersize=6, transform=axes.transAxes, clip_on=False)
        axes.text(0.02, height, means, color=colour, fontsize=9, transform=axes.transAxes, verticalalignment="center")


def _unit(course: LimitCourse) -> tuple[str, int]:
    return unit_of(max(course.sizes)) if course.unit == "bytes" else (course.unit, 1)


def _draw_course(axes: Axes, course: LimitCourse, end: float, room_above: float) -> None:
    """As steps, on a logarithmic scale: a limit is halved and doubled."""
    per = _unit(course)[1]
    sizes, highest = ([size / per for size in (*values, values[-1])] for values in (course.sizes, course.highest))
    at = [*course.at, end]
    axes.fill_between(at, sizes, highest, step="post", color=LOWERED, linewidth=0, zorder=0)
    axes.step(at, sizes, where="post", color=BLUE, linewidth=1.8, label="limit")
    axes.set_yscale("log", base=2)
    low, high = min(sizes), max(sizes)
    axes.set_ylim(low / 1.35, 1.15 * high * (high / low * 2) ** (room_above / (1 - room_above)))
    if len({*sizes}) <= 6:
        axes.set_yticks(legible(sizes, *axes.get_ylim(), apart=_TICKS_APART[room_above > 0]))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")


def legible(sizes: Iterable[float], low: float, high: float, apart: float) -> list[float]:
    """The sizes that can be written beside a logarithmic axis, from the largest on: the next one this share below."""
    shown: list[float] = []
    for size in sorted({*sizes}, reverse=True):
        if not shown or log(shown[-1] / size) >= apart * log(high / low):
            shown.append(size)
    return shown


def _draw_marks(axes: Axes, course: LimitCourse, end: float, *, explained: bool) -> None:
    """A mark for every change and, where they are explained, beside the first of a kind what it is."""
    row, per = 0, _unit(course)[1]
    for kind, (means, colour, marker) in _MARKS.items():
        at = [mark.at for mark in course.marks if mark.kind == kind]
        sizes = [mark.size / per for mark in course.marks if mark.kind == kind]
        if not at:
            continue
        axes.plot(at, sizes, marker, color=colour, markersize=6, zorder=4, clip_on=False, linestyle="none")
        if explained:
            _say(axes, (at[0], sizes[0]), f"{means} ({len(at)})", colour, row=row, end=end)
        row += 1


def _say(axes: Axes, mark: tuple[float, float], text: str, colour: str, *, row: int, end: float) -> None:
    """Above the line, where nothing else is, with a thin leader down to the mark."""
    at, height = mark[0], 0.97 - 0.13 * row
    # The longest takes more than half of the width: from a mark in the middle it goes both ways.
    side, towards = ("left", 0.0) if at < 0.42 * end else ("right", 1.0) if at > 0.58 * end else ("center", 0.5)
    axes.annotate(
        text,
        xy=mark,
        xytext=(at, height),
        textcoords=("data", "axes fraction"),
        horizontalalignment=side,
        verticalalignment="top",
        color=colour,
        fontsize=9,
        arrowprops={
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.7,
            "shrinkA": 0,
            "shrinkB": 3,
            "relpos": (towards, 0.5),
        },
    )


def draw_rows(axes: Axes, *, timeline: Timeline) -> None:
    """What ran, where the record does not say what was allowed."""
    _heading(axes, "rows of the largest microbatch")
    axes.step(*timeline.series("microbatch_rows"), where="mid", color=BLUE, linewidth=1.6, label="rows")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)


def draw_samples(axes: Axes, *, timeline: Timeline) -> None:
    """Samples of a step, where they change over the run; a mark where the schedule lets them."""
    _heading(axes, "samples of a step, all ranks")
    steps, samples = timeline.series("samples")
    axes.step(steps, samples, where="mid", color=GREY, linewidth=1.6, label="samples")
    rises = [event for event in timeline.events if event["kind"] == SCHEDULE and event["step"] + 1 in steps]
    at = [event["step"] + AFTER for event in rises]
    sizes = [samples[steps.index(event["step"] + 1)] for event in rises]
    axes.plot(at, sizes, "o", color=ORANGE, markersize=5, zorder=4, linestyle="none")
    axes.set_ylim(0, 1.2 * max(samples))


def draw_memory(axes: Axes, *, timeline: Timeline) -> None:
    steps, peaks, budgets = timeline.series("peak_bytes", "budget_bytes")
    unit, unit_bytes = unit_of(max(budgets))
    used, allowed = ([count / unit_bytes for count in counts] for counts in (peaks, budgets))
    _heading(axes, f"peak memory of the fullest rank ({unit})")
    axes.plot(steps, used, color=BLUE, linewidth=1.1, label="peak")
    axes.step(steps, allowed, where="mid", color=ALARM, linewidth=1.2, linestyle="--", label="budget")
    top = max(*used, *allowed)
    axes.set_ylim(0, 1.25 * top)
    _name(axes, steps[-1], allowed[-1], f"its budget, {allowed[-1]:.3g} {unit}", ALARM)


def draw_imbalance(axes: Axes, *, timeline: Timeline) -> None:
    """How much more the fullest rank of each step has to do: what its peers wait for."""
    steps, imbalances = timeline.series("rank_imbalance")
    more = fmean(imbalances) - 1
    _heading(axes, f"work of the fullest rank over the mean of the ranks: on average {percent_of(more)} more")
    percents = [100 * (imbalance - 1) for imbalance in imbalances]
    axes.plot(steps, percents, color=BLUE, linewidth=1.1, label="fullest")
    axes.set_ylim(0, 1.15 * max(percents))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g} %")
    axes.locator_params(axis="y", nbins=3)


def draw_speed(axes: Axes, *, speed: Speed) -> None:
    _heading(axes, f"target tokens a second, all ranks, mean of {speed.window} steps")
    if speed.without_losses != speed.tokens_per_second:
        axes.plot(speed.steps, speed.without_losses, color=GREY, linewidth=1.1, linestyle="--", label="without losses")
        _name(axes, speed.steps[-1], 0, "dashed: if no step had been repeated", GREY)
    axes.plot(speed.steps, speed.tokens_per_second, color=BLUE, linewidth=1.6, label="tokens")
    axes.set_ylim(0, 1.15 * max(*speed.tokens_per_second, *speed.without_losses))


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9.5, color=INK)


def _name(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Above the end of a line."""
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 3),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="bottom",
        color=colour,
        fontsize=9,
    )
