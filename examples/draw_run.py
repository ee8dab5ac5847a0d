"""Draws a run of a recipe, which may still be active: loss, speed, memory, and the limits of microbatches.

pip install '.[plot]'
python examples/draw_run.py runs/demo/full    # writes runs/demo/full/adaptive_report.png
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

MARKS = {
    "recovery": ("v", "#D55E00", "out of memory: step repeated"),
    "exhausted": ("X", "#D55E00", "out of memory with one row"),
    "growth": ("^", "#009E73", "larger microbatches tried"),
    "thrashing": ("s", "#CC79A7", "allocator thrashing: smaller limit"),
}
LINES = {
    "loss": ("loss", "#56B4E9", 1),
    "target_tokens_per_second": ("target tokens per second", "#009E73", 1),
    "peak_bytes": ("peak memory and its limit (MiB)", "#333333", 2**20),
    "budget_bytes": ("peak memory and its limit (MiB)", "#D55E00", 2**20),
}
"""The metrics of a step, each with its panel, its color and its unit."""


def read(path):
    """Return the lines of a file in the order of steps. A resumed run has repeated some steps: the last line counts."""
    lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        starts = line.get("kind") == "start"
        while starts and lines and lines[-1]["step"] > line["step"]:
            lines.pop()
        lines += [] if starts else [line]
    return lines


folder = Path(sys.argv[1])
steps, events = read(folder / "adaptive_steps.jsonl"), read(folder / "adaptive_events.jsonl")
limits = {}
for event in events:
    if event["kind"] in ("epoch", *MARKS):
        limits.setdefault(f"{event.get('stage', '')} {event['unit']} in a microbatch".strip(), []).append(event)
titles = [*dict.fromkeys(panel for panel, *_ in LINES.values()), *limits]
figure = Figure(figsize=(7.2, 1.7 + 1.4 * len(titles)), layout="constrained")
axes_of = dict(zip(titles, figure.subplots(len(titles), sharex=True, squeeze=False)[:, 0], strict=True))
for metric, (panel, color, unit) in LINES.items():
    points = [(step["step"], step[metric] / unit) for step in steps if step.get(metric) is not None]
    axes_of[panel].plot(*zip(*points, strict=True) if points else ([], []), color=color, lw=1.2)
validations = [(event["step"], event["val_loss"]) for event in events if event["kind"] == "validation"]
axes_of["loss"].plot(*zip(*validations, strict=True) if validations else ([], []), "o", color="#333333", ms=4)
for panel, changes in limits.items():
    at, after = [event["step"] for event in changes], [event["after"] for event in changes]
    axes_of[panel].step([*at, steps[-1]["step"]], [*after, after[-1]], where="post", color="#0072B2", lw=2)
    for kind, (marker, color, label) in MARKS.items():
        marked = [(event["step"], event["before"]) for event in changes if event["kind"] == kind]
        if marked:
            axes_of[panel].plot(*zip(*marked, strict=True), marker, color=color, ms=7, label=label, clip_on=False)
            axes_of[panel].legend(frameon=False, fontsize=8)
for title, axes in axes_of.items():
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=None if title == "loss" else 0)
    if title in limits:
        axes.set_yticks(sorted({0, *(event["after"] for event in limits[title])}))
axes.set_xlabel("step")
figure.savefig(folder / "adaptive_report.png", dpi=200)
print(folder / "adaptive_report.png")
