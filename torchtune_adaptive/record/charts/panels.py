"""The panels of a run's picture beside those of its limits. Each says above itself what it shows; what else there is to
name is named where it is."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from torchtune_adaptive.limits.change import RECOVERY
from torchtune_adaptive.record.charts.style import (
    ALARM,
    BLUE,
    GREY,
    INK,
    ORANGE,
    TEXT_SIZE,
    heading,
    legible,
    percent_of,
    unit_of,
)
from torchtune_adaptive.record.events import SCHEDULE
from torchtune_adaptive.record.limit_course import AFTER
from torchtune_adaptive.record.timeline import Timeline
from torchtune_adaptive.wording import times

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_rows(axes: Axes, *, timeline: Timeline) -> None:
    """Draws what ran, where the record does not say what was allowed."""
    heading(axes, "rows of the largest microbatch")
    axes.step(*timeline.series("microbatch_rows"), where="mid", color=BLUE, linewidth=1.6, label="rows")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True, nbins=5)


def draw_samples(axes: Axes, *, timeline: Timeline) -> None:
    """Samples of a step, where they change over the run; a mark where the schedule lets them."""
    heading(axes, "samples of a step, all ranks")
    steps, samples = timeline.series("samples")
    axes.step(steps, samples, where="mid", color=GREY, linewidth=2, label="samples")
    highest = max(samples)
    axes.set_ylim(0, 1.3 * highest)
    if len({*samples}) <= 4:
        axes.set_yticks(sorted(legible(samples, 0.13 * highest)))
    rises = [event for event in timeline.events if event["kind"] == SCHEDULE and event["step"] + 1 in steps]
    if rises:
        at = [event["step"] + AFTER for event in rises]
        sizes = [samples[steps.index(event["step"] + 1)] for event in rises]
        axes.plot(at, sizes, "o", color=ORANGE, markersize=6, zorder=4, linestyle="none")
        _say(axes, f"changed by the batch schedule, {times(len(rises))}", ORANGE)


def draw_memory(axes: Axes, *, timeline: Timeline) -> None:
    """The peak of each step under the budget, and which steps ran out of memory."""
    steps, peaks, budgets = timeline.series("peak_bytes", "budget_bytes")
    unit, unit_bytes = unit_of(max(budgets))
    used, allowed = ([count / unit_bytes for count in counts] for counts in (peaks, budgets))
    heading(axes, f"peak memory of the fullest rank ({unit})")
    axes.plot(steps, used, color=BLUE, linewidth=1.2, label="peak")
    axes.step(steps, allowed, where="mid", color=INK, linewidth=1.2, linestyle="--", label="budget")
    failed = {event["step"] for event in timeline.events if event["kind"] == RECOVERY}
    dots = [(step, peak) for step, peak in zip(steps, used, strict=True) if step in failed]
    top = max(*used, *allowed)
    if dots:
        axes.plot(*zip(*dots, strict=True), "o", color=ALARM, markersize=6, zorder=4, linestyle="none")
        _say(axes, "out of memory: peak before the allocation that failed", ALARM)
    axes.set_ylim(0, (1.5 if dots else 1.25) * top)
    axes.locator_params(axis="y", nbins=4)
    ticks = axes.yaxis.get_major_locator().tick_values(0, top)
    axes.set_yticks([tick for tick in ticks if 0 <= tick <= top])  # above the budget are words
    axes.annotate(
        f"budget, {allowed[-1]:.4g} {unit}",
        (steps[-1], allowed[-1]),
        xytext=(0, 2),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="bottom",
        color=INK,
        fontsize=TEXT_SIZE,
    )


def draw_imbalance(axes: Axes, *, timeline: Timeline) -> None:
    """The extra work of the fullest rank of each step, for which its peers wait."""
    steps, imbalances = timeline.series("rank_imbalance")
    more = fmean(imbalances) - 1
    heading(axes, f"work of the busiest rank beyond the mean of all: {percent_of(more)} on average")
    percents = [100 * (imbalance - 1) for imbalance in imbalances]
    axes.plot(steps, percents, color=BLUE, linewidth=1.1, label="busiest")
    axes.set_ylim(0, 1.15 * max(percents))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g} %")
    axes.locator_params(axis="y", nbins=3)


def _say(axes: Axes, text: str, colour: str) -> None:
    """Explains the dots, above all that is drawn, behind a dot."""
    axes.plot(0.012, 0.9, "o", color=colour, markersize=6, transform=axes.transAxes)
    axes.text(0.03, 0.9, text, transform=axes.transAxes, verticalalignment="center", color=INK, fontsize=TEXT_SIZE)
