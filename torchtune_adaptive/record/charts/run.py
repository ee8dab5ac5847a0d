"""Draws what became of a run: `adaptive_report.png`.

    python -m torchtune_adaptive.run_picture OUTPUT_DIR

From the record in the run's `output_dir`, so a run that is still going, or has failed, can be drawn as well.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from torchtune_adaptive.record import limit_course
from torchtune_adaptive.record.charts import limits as limit_panels
from torchtune_adaptive.record.charts import panels
from torchtune_adaptive.record.charts.style import (
    INK,
    TEXT_SIZE,
    TITLE,
    new_figure,
    no_run_ends_over,
    percent_of,
    save,
    tidy,
)
from torchtune_adaptive.record.timeline import Timeline, read_timeline
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_FILE = "adaptive_report.png"
WIDTH, PAGE_MARGIN = 7.2, 0.1
"""Inches."""
FULL_LINE = 64
"""Characters of a title in its full size."""
UNEVEN = 1.05
"""Work of the busiest rank over the mean from which on it is shown. Where limits do not count rows, samples are
dealt, and then it is 1.01 or so, unless one sample is more than a rank's share: that is worth a look. Where rows are
counted, it is chance."""
Panel = tuple[Callable[["Axes"], None], float]
"""The function that draws it, and its height beside the others'."""


@no_run_ends_over(REPORT_FILE)
def draw_run(directory: Path, timeline: Timeline) -> Path | None:
    """Draws the run into its directory. None where there are no steps; None and a line of the log where matplotlib is
    missing or drawing fails."""
    shown = panels_of(timeline)
    if not shown:
        return None
    heights = [height for _, height in shown]
    figure = new_figure(directory / REPORT_FILE, WIDTH, 0.75 + sum(heights))
    if figure is None:
        return None
    figure.set_layout_engine("constrained", w_pad=PAGE_MARGIN, h_pad=0.06)
    said = title(timeline)
    # it begins where the numbers beside the panels do
    figure.suptitle(
        said, x=PAGE_MARGIN / WIDTH, ha="left", fontsize=min(TITLE, TITLE * FULL_LINE / len(said)), color=INK
    )
    grid = figure.subplots(len(shown), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (draw, _) in zip(grid, shown, strict=True):
        draw(axes)
        tidy(axes)
        axes.grid(visible=False, axis="x")
        axes.locator_params(axis="x", integer=True)
    grid[-1].set_xlim(limit_course.AFTER, _end(timeline))
    grid[-1].set_xlabel("step", fontsize=TEXT_SIZE)
    return save(figure, directory / REPORT_FILE)


def panels_of(timeline: Timeline) -> list[Panel]:
    """The panels for which the record has figures, from top to bottom. Speed has none: tokens a second tell how long
    the samples were, and what was lost is in the title."""
    limits, end, shown = limit_course.courses(timeline), _end(timeline), list[Panel]()
    if len(limits) == 1:
        shown.append(
            (partial(limit_panels.draw_limit, course=limits[0], end=end), 2.0 if len({*limits[0].sizes}) > 1 else 0.9)
        )
    elif limits:
        lines = len(limit_panels.key_lines(limits, end))
        shown.append((partial(limit_panels.draw_key, courses=limits, end=end), 0.3 + 0.2 * lines))
        heights = [0.75 if len({*each.sizes}) > 1 else 0.55 for each in limits]
        shown += [
            (partial(limit_panels.draw_small_limit, course=each, end=end), height)
            for each, height in zip(limits, heights, strict=True)
        ]
    elif timeline.series("microbatch_rows")[0]:
        shown.append((partial(panels.draw_rows, timeline=timeline), 1.6))
    if len(set(timeline.series("samples")[1])) > 1:
        shown.append((partial(panels.draw_samples, timeline=timeline), 1.3))
    if timeline.series("peak_bytes", "budget_bytes")[0]:
        shown.append((partial(panels.draw_memory, timeline=timeline), 1.8))
    imbalances = timeline.series("rank_imbalance")[1]
    if any(each.unit != "rows" for each in limits) and imbalances and fmean(imbalances) > UNEVEN:
        shown.append((partial(panels.draw_imbalance, timeline=timeline), 1.1))
    return shown if timeline.steps else []


def title(timeline: Timeline) -> str:
    """A run in a line: `120 steps, 4 out-of-memory errors survived, 2 % of the time lost in failed attempts`."""
    steps = count_of(len(timeline.steps), "step" if _logs_all(timeline) else "logged step")
    survived, last = limit_course.recoveries(timeline), limit_course.ended_in(timeline)
    ended = "" if last is None else f", out of memory for good in step {last}"
    if not survived:
        return f"{steps}{ended or ', none out of memory'}"
    share = limit_course.lost_share(timeline)
    lost = "" if share is None else f", {percent_of(share)} of the time lost in failed attempts"
    return f"{steps}, {count_of(survived, 'out-of-memory error')} survived{lost}{ended}"


def _logs_all(timeline: Timeline) -> bool:
    numbers = [record["step"] for record in timeline.steps]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _end(timeline: Timeline) -> float:
    """The end of the last step, or of the one that never ended."""
    last = max((record["step"] for record in timeline.steps), default=0)
    return max(last, limit_course.ended_in(timeline) or 0) + limit_course.AFTER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    directory = parser.parse_args().output_dir
    # or nobody would learn what is missing: lines of the record, or matplotlib
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchtune_adaptive").setLevel(logging.INFO)
    timeline = read_timeline(directory)
    if not timeline.steps:
        why = f"no step of the run in {directory} has ended" if timeline.events else f"{directory} holds no record"
        parser.exit(1, f"nothing to draw: {why}\n")
    path = draw_run(directory, timeline)
    parser.exit(0 if path else 1, f"{path}\n" if path else None)


if __name__ == "__main__":
    main()
