"""Draws what became of a run: `adaptive_report.png`.

    python -m torchtune_adaptive.record.charts.run OUTPUT_DIR

From the record in the run's `output_dir`, so a run that is still going, or has failed, can be drawn as well.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.limits.change import GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.record.charts.figures import (
    ALARM,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    legend_beside,
    new_figure,
    no_run_ends_over,
    save,
    tidy,
    unit_of,
)
from torchtune_adaptive.record.events import SCHEDULE
from torchtune_adaptive.record.timeline import Timeline, read_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_FILE = "adaptive_report.png"

_EVENTS = {
    RECOVERY: ("out of memory, step repeated", ALARM, "v"),
    THRASHING: ("thrashing", PINK, "s"),
    TRIAL: ("trial decided", SKY, "D"),
    GROWTH: ("grown back, on probation", GREEN, "^"),
    SCHEDULE: ("batch schedule", ORANGE, "o"),
}


@no_run_ends_over(REPORT_FILE)
def draw_run(directory: Path, timeline: Timeline) -> Path | None:
    """Draws the run into its directory; None, and a line that says why, without matplotlib, steps or luck."""
    panels = [draw for draw, figures in _PANELS.items() if timeline.series(*figures)[0]]
    if not panels:
        return None
    figure = new_figure(directory / REPORT_FILE, 8.4, 1.2 + 2.0 * len(panels))
    if figure is None:
        return None
    for axes, draw in zip(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True):
        draw(axes, timeline)
        _mark_events(axes, timeline)
        tidy(axes)
        axes.locator_params(axis="x", integer=True)
        legend_beside(axes)
        bottom = axes
    bottom.set_xlabel("step")
    _name_events(figure, timeline)
    return save(figure, directory / REPORT_FILE)


def _draw_sizes(axes: Axes, timeline: Timeline) -> None:
    """The sizes, on a logarithmic scale: they are halved and doubled."""
    axes.step(
        *timeline.series("samples"), where="post", color=GREY, linewidth=1.2, label="samples of a step, all ranks"
    )
    rows = timeline.series("microbatch_rows")
    axes.step(*rows, where="post", color=BLUE, linewidth=1.4, label="rows of the largest microbatch")
    reference = timeline.series("reference_microbatch_rows")
    if reference[0]:
        axes.step(*reference, where="post", color=GREEN, linewidth=1.2, label="the same, reference stage")
    axes.set_yscale("log", base=2)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("batch size")


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    steps, peaks, budgets = timeline.series("peak_bytes", "budget_bytes")
    unit, unit_bytes = unit_of(max(budgets))
    used, allowed = ([count / unit_bytes for count in counts] for counts in (peaks, budgets))
    axes.plot(steps, used, color=BLUE, linewidth=1.2, label="peak of the fullest rank")
    axes.plot(steps, allowed, color=ALARM, linewidth=1.2, linestyle="--", label="its budget")
    axes.set_ylim(0, 1.15 * max(*used, *allowed))
    axes.set_ylabel(f"memory ({unit})")


def _draw_speed(axes: Axes, timeline: Timeline) -> None:
    steps, rates = timeline.series("target_tokens_per_second")
    axes.plot(steps, rates, color=BLUE, linewidth=0.6, alpha=0.45)
    smooth = [statistics.median(rates[max(0, at - 5) : at + 6]) for at in range(len(rates))]
    axes.plot(steps, smooth, color=BLUE, linewidth=1.4, label="all ranks, median of 11 steps")
    axes.set_ylim(0, 1.15 * max(rates))
    axes.set_ylabel("target tokens / s")


_PANELS: dict[Callable[[Axes, Timeline], None], tuple[str, ...]] = {
    _draw_sizes: (),
    _draw_memory: ("peak_bytes", "budget_bytes"),
    _draw_speed: ("target_tokens_per_second",),
}
"""Each with the figures that it cannot do without."""


def _mark_events(axes: Axes, timeline: Timeline) -> None:
    for event in timeline.events:
        if event["kind"] in _EVENTS:
            axes.axvline(event["step"], color=_EVENTS[event["kind"]][1], linewidth=0.8, alpha=0.6, zorder=1)


def _name_events(figure: Figure, timeline: Timeline) -> None:
    """Above all panels: each kind that there was, and how often; at the top of the first one a mark for each event."""
    first = figure.axes[0]
    top = first.get_xaxis_transform()
    marks, names = [], []
    for kind, (name, colour, marker) in _EVENTS.items():
        steps = [event["step"] for event in timeline.events if event["kind"] == kind]
        if steps:
            heights = [1.0] * len(steps)
            marks += first.plot(steps, heights, marker, color=colour, markersize=5, transform=top, clip_on=False)
            names.append(f"{name} ({len(steps)})")
    if marks:
        figure.legend(marks, names, loc="outside upper center", ncols=3, frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    directory = parser.parse_args().output_dir
    # or nobody would learn what is missing: lines of the record, or matplotlib
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchtune_adaptive").setLevel(logging.INFO)
    timeline = read_timeline(directory)
    if not timeline.steps:
        parser.exit(1, f"nothing to draw: {directory} holds no record of a run\n")
    path = draw_run(directory, timeline)
    parser.exit(0 if path else 1, f"{path}\n" if path else None)


if __name__ == "__main__":
    main()
