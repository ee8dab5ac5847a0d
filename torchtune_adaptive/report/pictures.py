"""Draws loss, speed, memory and limits of a run by step. Needs matplotlib, which is optional."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.engine.governor import EXHAUSTED, GROWTH, RECOVERY, THRASHING
from torchtune_adaptive.formatting import count_of, printable
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.report.journal import EPOCH, Record, Timeline, is_number, read_timeline

logger = logging.getLogger(__name__)

REPORT_FILE = "adaptive_report.png"

# Okabe and Ito's palette, which people with color blindness can distinguish
BLUE, GREEN, PINK, SKY, RED = "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
INK = "#333333"
MARKS = {
    RECOVERY: ("v", RED, "out of memory: step repeated"),
    EXHAUSTED: ("X", RED, "out of memory with one row"),
    GROWTH: ("^", GREEN, "larger microbatches tried"),
    THRASHING: ("s", PINK, "allocator thrashing: smaller limit"),
}
HALF_A_STEP = 0.5
"""Offset of events that happen between two steps."""
LOSS = "loss"
LONGEST_NAME = 50
"""Maximum number of characters of a run's path in a title."""


class Curve(NamedTuple):
    """A line, or all marks of one kind, in a panel of the picture."""

    panel: str
    label: str
    points: Sequence[Sequence[float]]
    """The steps, and the values at these steps."""
    color: str
    style: Mapping[str, Any] = {}


def draw_run(directory: Path) -> None:
    """Draw `adaptive_report.png` at the end of a run. If that fails, log it: a picture must not fail a run."""
    if REHEARSAL.on:
        return
    try:
        if (run := read_timeline(directory)).steps:
            draw(directory, run, directory / REPORT_FILE)
    except ImportError:
        logger.info("%s is not drawn: pip install matplotlib", REPORT_FILE)
    except Exception as error:  # noqa: BLE001
        logger.warning("%s is not drawn: %s", REPORT_FILE, reason(error))


def draw(directory: Path, run: Timeline, path: Path) -> None:
    """Draw a run of at least one step and save the picture. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(layout="constrained")  # pyplot would open windows and change global state
    figure.suptitle(_heading(directory, run), x=0.02, ha="left", fontsize=12)
    unit, per = ("GiB", 2**30) if max(run.series("budget_bytes")[1], default=0) >= 2**30 else ("MiB", 2**20)
    curves = [curve for curve in curves_of(run, unit, per) if curve.points[0]]
    titles = list(dict.fromkeys(curve.panel for curve in curves)) or [LOSS]
    figure.set_size_inches(7.2, 1.7 + 1.4 * len(titles))
    panels = dict(zip(titles, figure.subplots(len(titles), sharex=True, squeeze=False)[:, 0], strict=True))
    legend: dict[str, Any] = {}
    for curve in curves:
        style = {"color": curve.color, "lw": 1.2, "label": curve.label, **curve.style}
        (line,) = panels[curve.panel].plot(*curve.points, **style)
        legend.setdefault(curve.label, line)
    for title, axes in panels.items():
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 4, 5, 10], integer=title != LOSS))
        if title != LOSS:
            axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower left", ncols=2, frameon=False)
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # shown as a box, for example in a Chinese name
        figure.savefig(image, format="png", dpi=200)
    replace_file(path, image.getvalue())


def curves_of(run: Timeline, unit: str, per: int) -> Iterator[Curve]:
    """Yield the curves of a run, some of them empty. Memory is in `unit`, which has `per` bytes."""
    validated = [event for event in run.events if is_number(event.get("val_loss"))]
    validation = [event["step"] for event in validated], [event["val_loss"] for event in validated]
    yield Curve(LOSS, "training loss", run.series("loss"), SKY)
    yield Curve(LOSS, "validation loss", validation, INK, {"marker": "o", "ms": 4})
    yield Curve("target tokens per second", "speed", run.series("target_tokens_per_second"), GREEN)
    steps, *memory = run.series("peak_bytes", "budget_bytes")
    peaks, budgets = ([count / per for count in counts] for counts in memory)
    panel = f"peak memory of the fullest rank ({unit})"
    yield Curve(panel, "peak memory", (steps, peaks), INK)
    yield Curve(panel, "memory limit", (steps, budgets), RED, {"ls": "--"})
    end = max((record["step"] for record in (*run.steps, *run.events[-1:])), default=0) + HALF_A_STEP
    for name, changes in _limits(run).items():
        is_bytes = changes[0].get("unit") == "bytes"
        panel = name.replace("bytes", f"most memory of a microbatch, predicted ({unit})")
        at = [event["step"] + HALF_A_STEP * (event["kind"] in (GROWTH, EPOCH)) for event in changes]
        after, before = (
            [event[key if is_number(event.get(key)) else "after"] / (per if is_bytes else 1) for event in changes]
            for key in ("after", "before")
        )
        yield Curve(panel, "limit", ([*at, end], [*after, after[-1]]), BLUE, {"drawstyle": "steps-post", "lw": 2})
        for kind, (marker, color, means) in MARKS.items():
            marked = [index for index, event in enumerate(changes) if event["kind"] == kind]
            points = [at[index] for index in marked], [before[index] for index in marked]
            style = {"ls": "", "marker": marker, "ms": 7, "zorder": 4, "clip_on": False}
            yield Curve(panel, means, points, color, style)


def _heading(directory: Path, run: Timeline) -> str:
    """Return the name, the start time and a summary of a run."""
    name = printable(str(directory))
    name = name if len(name) <= LONGEST_NAME else f"…{name[-LONGEST_NAME:]}"
    times = (record.get("time") for record in (*run.events, *run.steps))
    began = next((each for each in times if is_number(each) and 0 < each < 2**35), None)
    date = "" if began is None else time.strftime(", %Y-%m-%d %H:%M", time.localtime(began))
    return f"{name}{date}\n{summary(run)}".replace("$", r"\$")  # a plain $ would start a formula


def summary(run: Timeline) -> str:
    """Return the number of steps and of out-of-memory errors, for example `120 steps, no out-of-memory error`."""
    steps = count_of(run.steps[-1]["step"], "step")
    recoveries = [event for event in run.events if event.get("kind") == RECOVERY]
    if run.events and run.events[-1].get("kind") == EXHAUSTED:
        return f"{steps}, ended out of memory in step {run.events[-1]['step']}"
    if not recoveries:
        return f"{steps}, no out-of-memory error"
    text = f"{steps}, {count_of(len(recoveries), 'out-of-memory error')} survived"
    rates = zip(*run.series("target_tokens", "target_tokens_per_second"), strict=True)
    seconds = {step: tokens / rate for step, tokens, rate in rates if rate > 0}
    if all(is_number(event.get("lost_seconds")) and event["step"] in seconds for event in recoveries):
        share = sum(event["lost_seconds"] for event in recoveries) / sum(seconds.values())
        text += f", {100 * share:.1f} % of the time in failed attempts"
    return text


def _limits(run: Timeline) -> dict[str, list[Record]]:
    """Return the events that set a limit, by stage and unit. Limits that have never changed are left out."""
    found: dict[str, list[Record]] = {}
    for event in run.events:
        before_training = event["step"] == 0 and event.get("kind") != EPOCH  # for example in a search
        sets = event.get("kind") in (EPOCH, *MARKS) and is_number(event.get("after")) and event["after"] > 0
        if sets and not before_training:
            limited = "bytes" if event.get("unit") == "bytes" else f"most {event.get('unit')} in a microbatch"
            found.setdefault(": ".join(filter(None, (event.get("stage"), limited))), []).append(event)
    return {
        name: events
        for name, events in found.items()
        if len({event["after"] for event in events}) > 1 or any(event["kind"] in MARKS for event in events)
    }
