"""The picture of a run: its limits and its memory by step. It needs matplotlib, which is optional."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.engine.governor import EXHAUSTED, GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.report.journal import EPOCH, Record, Timeline, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

REPORT_FILE = "adaptive_report.png"

# Okabe and Ito's palette, which people with color blindness can distinguish
BLUE, GREEN, PINK, SKY, RED = "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
INK, PALE = "#333333", "#FBE3D2"
MARKS = {
    RECOVERY: ("v", RED, "out of memory: step repeated"),
    EXHAUSTED: ("X", RED, "out of memory with one row"),
    GROWTH: ("^", GREEN, "larger microbatches tried"),
    THRASHING: ("s", PINK, "allocator thrashing: smaller tried"),
    TRIAL: ("D", SKY, "trial decided"),
}
BETWEEN = 0.5
"""Offset for events that happen between two steps."""


def draw_run(directory: Path, timeline: Timeline) -> Path | None:
    """Draw `adaptive_report.png`; return its path, or None if it is not drawn."""
    if not timeline.steps or REHEARSAL.on:
        return None
    path = directory / REPORT_FILE
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("%s is not drawn: pip install matplotlib", path.name)
        return None
    try:  # a picture must not end a run
        figure = Figure(layout="constrained")  # without pyplot: no window and no global state
        _draw(figure, timeline)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=200)
        replace_file(path, image.getvalue())
    except Exception as error:  # noqa: BLE001
        logger.warning("%s is not drawn: %s", path.name, reason(error))
        return None
    return path


def _draw(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.ticker import MaxNLocator

    has_memory = bool(timeline.series("peak_bytes", "budget_bytes")[0])
    limits = {name: changes for name, changes in _limits(timeline).items() if _changes(changes) or not has_memory}
    validated = [event for event in timeline.events if is_number(event.get("val_loss"))]
    panels = max(1, len(limits) + has_memory + bool(validated))
    end = max(record["step"] for record in (*timeline.steps, *timeline.events[-1:])) + BETWEEN
    figure.set_size_inches(7.2, 1.4 + 2 * panels)
    figure.suptitle(run_title(timeline), x=0.02, ha="left", fontsize=14)
    grid = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
    for axes, (name, changes) in zip(grid, limits.items(), strict=False):
        _draw_limit(axes, name, changes, end)
    if validated:
        _draw_losses(grid[len(limits)], timeline, validated)
    if has_memory:
        _draw_memory(grid[-1], timeline)
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    grid[-1].set_xlim(BETWEEN, end)
    grid[-1].set_xlabel("step")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    named = {name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower left", ncols=2, frameon=False)


def run_title(timeline: Timeline) -> str:
    """Return a summary such as `120 steps, 4 out-of-memory errors survived`, and the time they took."""
    steps = count_of(timeline.steps[-1]["step"], "step")
    recoveries = [event for event in timeline.events if event.get("kind") == RECOVERY]
    if timeline.events and timeline.events[-1].get("kind") == EXHAUSTED:
        return f"{steps}, ended out of memory in step {timeline.events[-1]['step']}"
    if not recoveries:
        return f"{steps}, no out-of-memory error"
    title = f"{steps}, {count_of(len(recoveries), 'out-of-memory error')} survived"
    rates = zip(*timeline.series("target_tokens", "target_tokens_per_second"), strict=True)
    seconds = {step: tokens / rate for step, tokens, rate in rates if rate > 0}
    if all(is_number(event.get("lost_seconds")) and event["step"] in seconds for event in recoveries):
        share = sum(event["lost_seconds"] for event in recoveries) / sum(seconds.values())
        title += f",\n{100 * share:.1f} % of the time in failed attempts"
    return title


def _limits(timeline: Timeline) -> dict[str, list[Record]]:
    """Return the events that set a limit, by stage and unit."""
    found: dict[str, list[Record]] = {}
    for event in timeline.events:
        before_training = event["step"] == 0 and event.get("kind") != EPOCH  # for example in a search
        sets = event.get("kind") in (EPOCH, *MARKS) and is_number(event.get("after")) and event["after"] > 0
        if sets and not before_training:
            what = "bytes" if event.get("unit") == "bytes" else f"most {event.get('unit')} in a microbatch"
            found.setdefault(": ".join(filter(None, (event.get("stage"), what))), []).append(event)
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
    axes.set_ylim(0, 1.15 * max(highest))
    if len(set(sizes)) <= 4:
        axes.set_yticks(sorted(set(sizes)))
        axes.yaxis.set_major_formatter("{x:.3g}" if unit else "{x:.0f}")


def _draw_losses(axes: Axes, timeline: Timeline, validated: Sequence[Record]) -> None:
    axes.set_title("loss", loc="left", fontsize=11)
    axes.plot(*timeline.series("loss"), color=SKY, lw=1.2, label="training loss")
    steps, losses = [event["step"] for event in validated], [event["val_loss"] for event in validated]
    axes.plot(steps, losses, color=GREEN, lw=1.2, marker="o", ms=4, label="validation loss")


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    steps, peaks, budgets = timeline.series("peak_bytes", "budget_bytes")
    unit, per = _unit_of(max(budgets))
    axes.set_title(f"peak memory of the fullest rank ({unit})", loc="left", fontsize=11)
    axes.plot(steps, [peak / per for peak in peaks], color=INK, lw=1.2, marker=".", ms=2, label="peak")
    axes.step(steps, [budget / per for budget in budgets], where="mid", color=RED, lw=1.2, ls="--", label="budget")
    axes.set_ylim(0, 1.1 * max(*peaks, *budgets) / per)


def _unit_of(count: float) -> tuple[str, int]:
    return ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
