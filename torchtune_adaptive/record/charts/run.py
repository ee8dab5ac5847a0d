"""Draws what became of a run: `adaptive_report.png`.

    python -m torchtune_adaptive.record.charts.run OUTPUT_DIR

From the record in the run's `output_dir`, so a run that is still going, or has failed, can be drawn as well.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.record import course
from torchtune_adaptive.record.charts import panels
from torchtune_adaptive.record.charts.figures import INK, new_figure, no_run_ends_over, percent_of, save, tidy
from torchtune_adaptive.record.timeline import Timeline, read_timeline
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_FILE = "adaptive_report.png"
SMALL_FROM = 3
"""Limits from which on they are small multiples, with one key above them."""
Panel = tuple[Callable[["Axes"], None], float]
"""What draws it, and its height beside the others'."""


@no_run_ends_over(REPORT_FILE)
def draw_run(directory: Path, timeline: Timeline) -> Path | None:
    """Draws the run into its directory; None, and a line that says why, without matplotlib, steps or luck."""
    shown = panels_of(timeline)
    if not shown:
        return None
    heights = [height for _, height in shown]
    figure = new_figure(directory / REPORT_FILE, 8.4, 0.9 + 1.25 * sum(heights))
    if figure is None:
        return None
    figure.suptitle(title(timeline), x=0.012, horizontalalignment="left", fontsize=13, color=INK)
    grid = figure.subplots(len(shown), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (draw, _) in zip(grid, shown, strict=True):
        draw(axes)
        tidy(axes)
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
    grid[-1].set_xlim(0.5, _last_step(timeline) + 0.5)
    grid[-1].set_xlabel("step")
    return save(figure, directory / REPORT_FILE)


def panels_of(timeline: Timeline) -> list[Panel]:
    """The panels for which the record has figures, from top to bottom."""
    end = _last_step(timeline) + course.AFTER
    limits, shown = course.courses(timeline), list[Panel]()
    if len(limits) < SMALL_FROM:
        shown += [(partial(panels.draw_limit, course=each, end=end), 1.6) for each in limits]
    else:
        shown.append((partial(panels.draw_key, courses=limits), 0.45))
        shown += [(partial(panels.draw_small_limit, course=each, end=end), 0.55) for each in limits]
    if not shown and timeline.series("microbatch_rows")[0]:
        shown.append((partial(panels.draw_rows, timeline=timeline), 1.6))
    if len(set(timeline.series("samples")[1])) > 1:
        shown.append((partial(panels.draw_samples, timeline=timeline), 0.9))
    if timeline.series("peak_bytes", "budget_bytes")[0]:
        shown.append((partial(panels.draw_memory, timeline=timeline), 1.4))
    if any(imbalance > 1 for imbalance in timeline.series("rank_imbalance")[1]):
        shown.append((partial(panels.draw_imbalance, timeline=timeline), 0.9))
    if (speed := course.speed(timeline)) is not None:
        shown.append((partial(panels.draw_speed, speed=speed), 1.2))
    return shown if timeline.steps else []


def title(timeline: Timeline) -> str:
    """What happened: `120 steps, 4 out-of-memory errors survived, 2 % of the time lost`."""
    steps = count_of(len(timeline.steps), "step" if _logs_all(timeline) else "logged step")
    survived = course.recoveries(timeline)
    if not survived:
        return f"{steps}, none out of memory"
    share = course.lost_share(timeline)
    lost = "" if share is None else f", {percent_of(share)} of the time lost"
    return f"{steps}, {count_of(survived, 'out-of-memory error')} survived{lost}"


def _logs_all(timeline: Timeline) -> bool:
    numbers = [record["step"] for record in timeline.steps]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _last_step(timeline: Timeline) -> int:
    return max(record["step"] for record in timeline.steps) if timeline.steps else 0


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
