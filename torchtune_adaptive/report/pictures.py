"""The picture of a run. It needs matplotlib, which is optional."""

from __future__ import annotations

import io
import logging
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.engine.governor import EXHAUSTED, GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.report.journal import EPOCH, Record, Timeline, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel = tuple[float, Callable[[Axes], None]]
    """Relative height and drawing function."""

logger = logging.getLogger(__name__)

REPORT_FILE = "adaptive_report.png"

# Okabe and Ito's palette, which people with color blindness can distinguish
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
GREY, INK, PALE = "#999999", "#333333", "#FBE3D2"
MARKS = {
    RECOVERY: ("v", RED, "out of memory: step repeated"),
    EXHAUSTED: ("X", RED, "out of memory: run ended"),
    GROWTH: ("^", GREEN, "larger microbatches tried"),
    THRASHING: ("s", PINK, "allocator thrashing: smaller tried"),
    TRIAL: ("D", SKY, "trial decided"),
}
BETWEEN = 0.5
"""Offset for events that happen between two steps."""
STEEP = 8
"""Ratio of maximum to minimum above which a limit is drawn on a logarithmic scale."""
UNEVEN = 1.05
"""Mean imbalance above which the panel is drawn; balanced ranks are at about 1.01."""


def draw_run(directory: Path, timeline: Timeline) -> Path | None:
    """Draw `adaptive_report.png`: the limits that changed during a run, and the metrics that explain why."""
    end = max((record["step"] for record in (*timeline.steps, *timeline.events[-1:])), default=0) + BETWEEN
    limits = _limits(timeline)
    panels: list[Panel] = []
    if len(set(timeline.series("samples")[1])) > 1:
        panels.append((1.2, partial(_draw_samples, timeline=timeline)))
    if timeline.series("peak_bytes", "budget_bytes")[0]:
        panels.append((1.8, partial(_draw_memory, timeline=timeline)))
    imbalances = timeline.series("rank_imbalance")[1]
    if imbalances and fmean(imbalances) > UNEVEN and any(each[-1].get("unit") != "rows" for each in limits.values()):
        panels.append((1.2, partial(_draw_imbalance, timeline=timeline)))  # only token budgets balance the ranks
    shown = {name: changes for name, changes in limits.items() if _changes(changes) or not panels}
    panels = [
        (2.2 if len(limits) == 1 else 1.0, partial(_draw_limit, name=name, changes=changes, end=end))
        for name, changes in shown.items()
    ] + panels
    if not timeline.steps or not panels:
        return None

    if REHEARSAL.on:
        return None
    path = directory / REPORT_FILE
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("%s is not drawn: pip install matplotlib", path.name)
        return None
    try:  # a picture must not end a run
        inches = 7.2, 1.4 + sum(heights for heights, _ in panels)
        figure = Figure(figsize=inches, layout="constrained")  # without pyplot: no window and no global state
        _draw(figure, run_title(timeline), panels, end)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=200)
        replace_file(path, image.getvalue())
    except Exception as error:  # noqa: BLE001
        logger.warning("%s is not drawn: %s", path.name, reason(error))
        return None
    return path


def _in_lines(title: str) -> str:
    """Break lines after commas only."""
    return textwrap.fill(title.replace(" ", "\xa0").replace(",\xa0", ", "), 68).replace("\xa0", " ")


def _draw(figure: Figure, title: str, panels: Sequence[Panel], end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    figure.suptitle(_in_lines(title), x=0.02, ha="left", fontsize=14)
    heights = [height for height, _ in panels]
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (_, draw_panel) in zip(grid, panels, strict=True):
        draw_panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    grid[-1].set_xlim(BETWEEN, end)
    grid[-1].set_xlabel("step")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    named = {name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower left", ncols=2, frameon=False)


def run_title(timeline: Timeline) -> str:
    """Return a summary such as `120 steps, 4 out-of-memory errors survived, 2 % of the time in failed attempts`."""
    numbers = [record["step"] for record in timeline.steps]
    logs_all = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    found = [count_of(len(numbers), "step" if logs_all else "logged step")]
    recoveries = [event for event in timeline.events if event.get("kind") == RECOVERY]
    if recoveries:
        found.append(f"{count_of(len(recoveries), 'out-of-memory error')} survived")
        rates = zip(*timeline.series("target_tokens", "target_tokens_per_second"), strict=True)
        seconds = {step: tokens / rate for step, tokens, rate in rates if rate > 0}
        if all(is_number(event.get("lost_seconds")) and event["step"] in seconds for event in recoveries):
            share = sum(event["lost_seconds"] for event in recoveries) / sum(seconds.values())
            found.append(f"{100 * share:.1f} % of the time in failed attempts")
    if timeline.events and timeline.events[-1].get("kind") == EXHAUSTED:
        found.append(f"ended out of memory in step {timeline.events[-1]['step']}")
    if len(found) > 1:
        return ", ".join(found)
    constant = [changes[0] for changes in _limits(timeline).values() if not _changes(changes)]
    rows = [each for each in constant if each.get("unit") == "rows"]
    limit = (
        f" in microbatches of at most {count_of(rows[0]['after'], 'row')}" if len(constant) == len(rows) == 1 else ""
    )
    return f"{found[0]}{limit}, none out of memory"


def _limits(timeline: Timeline) -> dict[str, list[Record]]:
    """Return the events that set a limit, by stage and unit."""
    found: dict[str, list[Record]] = {}
    for event in timeline.events:
        before_training = (
            event["step"] == 0 and event.get("kind") != EPOCH
        )  # a model that is searched once, before training
        sets = event.get("kind") in (EPOCH, *MARKS) and is_number(event.get("after")) and event["after"] > 0
        if sets and not before_training:
            what = "bytes" if event.get("unit") == "bytes" else f"most {event.get('unit')} in a microbatch"
            survived = event["kind"] == EXHAUSTED and event is not timeline.events[-1]  # the run continued
            shown = {**event, "kind": RECOVERY} if survived else event
            found.setdefault(": ".join(filter(None, (event.get("stage"), what))), []).append(shown)
    return found


def _changes(limit: Sequence[Record]) -> bool:
    """Return True if a plot would show more than a horizontal line."""
    return len({event["after"] for event in limit}) > 1 or any(event["kind"] in MARKS for event in limit)


def _draw_limit(axes: Axes, name: str, changes: Sequence[Record], end: float) -> None:
    largest = max(event["after"] for event in changes)
    unit, per = _unit_of(largest) if changes[0].get("unit") == "bytes" else ("", 1)
    axes.set_title(name.replace("bytes", f"most memory of a microbatch, predicted ({unit})"), loc="left", fontsize=11)
    at = [event["step"] + BETWEEN * (event["kind"] in (GROWTH, EPOCH)) for event in changes]
    sizes = [event["after"] / per for event in changes]
    lasting, highest = [*sizes, sizes[-1]], list(accumulate([*sizes, sizes[-1]], max))
    axes.step([*at, end], lasting, where="post", color=BLUE, lw=2, label="limit")
    if lasting != highest:
        axes.fill_between([*at, end], lasting, highest, step="post", color=PALE, lw=0, label="lowered")
    for kind, (marker, colour, means) in MARKS.items():
        marks = [
            (x, (event["before"] if is_number(event.get("before")) else event["after"]) / per)
            for x, event in zip(at, changes, strict=True)
            if event["kind"] == kind
        ]
        if marks:
            axes.plot(*zip(*marks, strict=True), marker, color=colour, ms=7, zorder=4, clip_on=False, label=means)
    if max(sizes) > STEEP * min(sizes):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.15 * max(highest))
        if len(set(sizes)) <= 4:
            axes.set_yticks(sorted(set(sizes)))
            axes.yaxis.set_major_formatter("{x:.3g}" if unit else "{x:.0f}")


def _draw_samples(axes: Axes, timeline: Timeline) -> None:
    axes.set_title("samples of a step, all ranks", loc="left", fontsize=11)
    axes.step(*timeline.series("samples"), where="mid", color=GREY, lw=2)
    axes.set_ylim(bottom=0)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    steps, peaks, budgets = timeline.series("peak_bytes", "budget_bytes")
    unit, per = _unit_of(max(budgets))
    axes.set_title(f"peak memory of the fullest rank ({unit})", loc="left", fontsize=11)
    mark, line = (".", "_") if len(steps) == 1 else ("", "")  # a line with one point is invisible
    axes.plot(steps, [peak / per for peak in peaks], color=INK, lw=1.2, marker=mark, label="peak")
    bounds = [budget / per for budget in budgets]
    axes.step(steps, bounds, where="mid", color=RED, lw=1.2, ls="--", marker=line, label="budget")
    axes.set_ylim(0, 1.1 * max(*peaks, *budgets) / per)


def _draw_imbalance(axes: Axes, timeline: Timeline) -> None:
    steps, imbalances = timeline.series("rank_imbalance")
    more = 100 * (fmean(imbalances) - 1)
    axes.set_title(f"work of the busiest rank above the mean: {more:.0f} % on average", loc="left", fontsize=11)
    axes.plot(steps, [100 * (imbalance - 1) for imbalance in imbalances], color=GREY, lw=1.2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g} %")


def _unit_of(count: float) -> tuple[str, int]:
    return ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
