"""The panels of a limit: how much may be in a microbatch, in which spells that was less, and what its marks mean."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from torchtune_adaptive.limits.change import EXHAUSTED, GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.record.charts.style import (
    ALARM,
    BLUE,
    CHARACTER,
    GREEN,
    INK,
    PINK,
    SKY,
    TEXT_SIZE,
    heading,
    legible,
    unit_of,
)
from torchtune_adaptive.record.limit_course import AFTER, LimitCourse
from torchtune_adaptive.wording import count_of, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWERED = "#FBE3D2"
"""Between the limit and what it had been, in the spells in which it was lower."""
SHADED = "shaded: lowered during the run"
SPELL = "spell"
"""The gid of the text that says what a shade means."""


class Sign(NamedTuple):
    """The mark of a kind of change."""

    means: str
    """What is said of it, with a place for how often if it may happen again."""
    colour: str
    marker: str


SIGNS = {
    RECOVERY: Sign("out of memory{}: step repeated in smaller microbatches", ALARM, "v"),
    THRASHING: Sign("allocator thrashing{}: smaller microbatches on trial", PINK, "s"),
    TRIAL: Sign("trial decided{}", SKY, "D"),
    EXHAUSTED: Sign("out of memory, and nothing smaller is left", ALARM, "X"),
    GROWTH: Sign("larger microbatches tried again{}", GREEN, "^"),
}
ROOM_OF_TEXT, MARGIN = 0.17, 0.08
"""Room for a line of what marks mean, and where there is none; as shares of a panel's height."""
LOW, LOW_IN_SMALL = 0.16, 0.34
"""A shade that is lower than this has no room for what it means, in a panel of its own and in one of several."""
IN_SMALL = 0.12, 0.88
"""The lowest and the highest size of a limit, as shares of the height of one of several panels."""
STEEP = 8
"""The largest limit over the smallest from which on a scale is logarithmic: the lower ones would lie on each other."""


class Scale(NamedTuple):
    """The sizes of a limit on the height of its panel, from `lowest` to `highest` as shares of it."""

    low: float
    high: float
    lowest: float
    highest: float

    @property
    def logarithmic(self) -> bool:
        return self.high > STEEP * self.low

    def share(self, size: float) -> float:
        """The height of a size; the only size of a run stands in the middle."""
        if self.high == self.low:
            return 0.5
        of = log2(size / self.low) / log2(self.high / self.low) if self.logarithmic else self._linear(size)
        return self.lowest + of * (self.highest - self.lowest)

    def size(self, share: float) -> float:
        """The size at a height."""
        of = (share - self.lowest) / (self.highest - self.lowest)
        if self.high == self.low:
            return self.high * (0.5 + share)
        return self.low * (self.high / self.low) ** of if self.logarithmic else self.low + of * (self.high - self.low)

    def _linear(self, size: float) -> float:
        return (size - self.low) / (self.high - self.low)


def draw_limit(axes: Axes, *, course: LimitCourse, end: float) -> None:
    """The limit of a run whose steps have one, with what its marks mean."""
    above = {mark.kind for mark in course.marks} - {GROWTH}
    below = any(mark.kind == GROWTH for mark in course.marks)
    scale = _scale(course, max(MARGIN, ROOM_OF_TEXT * below), 1 - max(MARGIN, ROOM_OF_TEXT * len(above)))
    _draw_course(axes, course, end, scale, apart=0.1)
    shaded = SHADED * (not _say_spell(axes, course, end, scale, LOW) and bool(course.spells(end)))
    stage, logarithmic = f"stage {course.stage}" * bool(course.stage), "logarithmic" * scale.logarithmic
    heading(axes, ", ".join(filter(None, (_what(course), stage, logarithmic, shaded))))
    _explain_marks(axes, course, end)


def draw_small_limit(axes: Axes, *, course: LimitCourse, end: float) -> None:
    """One of several: its marks are explained above all of them."""
    scale = _scale(course, *IN_SMALL)
    repeated = sum(mark.kind == RECOVERY for mark in course.marks)
    unit, logarithmic = f"{_unit(course)[0]}" * (course.unit != "rows"), "logarithmic" * scale.logarithmic
    named = ", ".join(filter(None, (course.stage, unit, logarithmic)))
    heading(axes, named + (f" · out of memory {times(repeated)}" if repeated else ""))
    _draw_course(axes, course, end, scale, apart=0.28)
    _say_spell(axes, course, end, scale, LOW_IN_SMALL)


def draw_key(axes: Axes, *, courses: Sequence[LimitCourse], end: float) -> None:
    """Explains the panels below and their marks: a line for each kind that there is."""
    units = dict.fromkeys(each.unit for each in courses)
    heading(axes, f"most {' or '.join(units)} in a microbatch, by stage")
    axes.set_axis_off()
    axes.set_ylim(max(1, len(key_lines(courses, end))), 0)
    for row, (means, colour, marker) in enumerate(key_lines(courses, end)):
        size = 10 if marker == "s" and colour == LOWERED else 6
        across = axes.get_yaxis_transform()  # x as a share of the width, y in lines
        axes.plot(0.012, row + 0.5, marker, color=colour, markersize=size, transform=across, clip_on=False)
        said = INK if colour == LOWERED else colour
        axes.text(
            0.03,
            row + 0.5,
            means.format(""),
            color=said,
            fontsize=TEXT_SIZE,
            transform=across,
            verticalalignment="center",
        )


def key_lines(courses: Sequence[LimitCourse], end: float) -> list[Sign]:
    """Things to explain above small panels."""
    there = {mark.kind for each in courses for mark in each.marks}
    signs = [sign for kind, sign in SIGNS.items() if kind in there]
    shaded = [each for each in courses if each.spells(end)]
    unsaid = [each for each in shaded if not _of_a_spell(each, end, _scale(each, *IN_SMALL), LOW_IN_SMALL)]
    return signs + [Sign(SHADED, LOWERED, "s")] * bool(unsaid)


def _what(course: LimitCourse) -> str:
    unit, _ = _unit(course)
    return (
        f"predicted peak of a microbatch, at most ({unit})"
        if course.unit == "bytes"
        else f"most {unit} in a microbatch"
    )


def _unit(course: LimitCourse) -> tuple[str, int]:
    return unit_of(max(course.sizes)) if course.unit == "bytes" else (course.unit, 1)


def _scale(course: LimitCourse, lowest: float, highest: float) -> Scale:
    per = _unit(course)[1]
    return Scale(min(course.sizes) / per, max(course.sizes) / per, lowest, highest)


def _draw_course(axes: Axes, course: LimitCourse, end: float, scale: Scale, apart: float) -> None:
    per = _unit(course)[1]
    sizes, highest = ([size / per for size in (*values, values[-1])] for values in (course.sizes, course.highest))
    at = [*course.at, end]
    axes.fill_between(at, sizes, highest, step="post", color=LOWERED, linewidth=0, zorder=0)
    axes.step(at, sizes, where="post", color=BLUE, linewidth=2, label="limit")
    if scale.logarithmic:
        axes.set_yscale("log", base=2)
    axes.set_ylim(scale.size(0), scale.size(1))
    axes.set_yticks(legible(sizes, apart, scale.share))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}" if per == 1 else f"{value:.3g}")
    for kind, (_, colour, marker) in SIGNS.items():
        marks = [(mark.at, mark.size / per) for mark in course.marks if mark.kind == kind]
        if marks:
            axes.plot(*zip(*marks, strict=True), marker, color=colour, markersize=7, zorder=4, clip_on=False)


def _say_spell(axes: Axes, course: LimitCourse, end: float, scale: Scale, low: float) -> bool:
    """Writes what the shade means into the first that has room for it; returns whether there is one."""
    if (found := _of_a_spell(course, end, scale, low)) is None:
        return False
    at, height, said = found
    axes.text(at, height, said, color=INK, fontsize=TEXT_SIZE, gid=SPELL, ha="center", va="center")
    return True


def _of_a_spell(course: LimitCourse, end: float, scale: Scale, low: float) -> tuple[float, float, str] | None:
    """The middle of the first that has room for it, and what it means."""
    unit, per = _unit(course)
    for spell in course.spells(end):
        size, instead_of = spell.size / per, spell.instead_of / per
        named = count_of(1, unit.removesuffix("s")) if size == 1 and per == 1 else f"{size:.4g} {unit}"
        said = f"{named} instead of {instead_of:.4g}"
        wide = (spell.ends - spell.begins) / (end - AFTER) > CHARACTER * (len(said) + 2)
        bottom, top = scale.share(size), scale.share(instead_of)
        if wide and top - bottom >= low:
            return (spell.begins + spell.ends) / 2, scale.size((bottom + top) / 2), said
    return None


def _explain_marks(axes: Axes, course: LimitCourse, end: float) -> None:
    """Names the marks: those that a limit grew from below the line; the others above it, the first to happen on top, so
    that no leader crosses another's words."""
    per, first = _unit(course)[1], {mark.kind: mark for mark in reversed(course.marks)}
    row = 0
    for kind in sorted(first, key=lambda kind: first[kind].at):
        mark, (means, colour, _) = first[kind], SIGNS[kind]
        said = means.format(f" {times(sum(each.kind == kind for each in course.marks))}")
        below = kind == GROWTH
        height = 0.03 if below else 0.97 - row * (ROOM_OF_TEXT - 0.03)
        row += not below
        at = (mark.at - AFTER) / (end - AFTER)
        _say(axes, (mark.at, mark.size / per), at, said, colour, height=height, below=below)


def _say(
    axes: Axes, mark: tuple[float, float], at: float, text: str, colour: str, *, height: float, below: bool
) -> None:
    """A text that begins where its mark is, or as near to it as its length lets it, with a thin leader to the mark."""
    length = CHARACTER * len(text)
    begins = max(0.005, min(at - 0.012, 0.995 - length))
    axes.annotate(
        text,
        xy=mark,
        xytext=(begins, height),
        textcoords="axes fraction",
        verticalalignment="bottom" if below else "top",
        color=colour,
        fontsize=TEXT_SIZE,
        arrowprops={
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 3,
            "relpos": (min(1.0, (at - begins) / length), float(below)),
        },
    )
