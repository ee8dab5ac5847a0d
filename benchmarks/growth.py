"""Measure the samples and steps to a loss, with a small batch, a large one, and one that doubles by epoch.

    python -m benchmarks --only growth

The demo's model is trained from scratch, in one process, on two problems. In the first, the loss is on the answers. In
the second, it is also on the instructions, whose numbers and words are random, so gradients are mostly noise. The
learning rate is proportional to the square root of the samples per step. The loss to reach is the highest final loss of
the runs, smoothed over 256 samples. All figures are means over seeds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.results import Result
from tests.ranks import run_on_ranks
from tests.recipes.recorders import read_log
from tests.recipes.running import demo_config, run_ours
from tests.timeline import read_timeline

SEEDS = (0, 1, 2)
SAMPLES, EPOCHS = 1024, 4
SMALL, LARGE = 8, 128
"""Samples of a step."""
SMOOTHED_OVER = 256
SCHEDULE = "batch_increase_function._component_=torchtune_adaptive.tune.schedule"
COMMON = (
    f"dataset.samples={SAMPLES}",
    f"epochs={EPOCHS}",
    "shuffle=True",
    "lr_scheduler=null",
    "gradient_accumulation_steps=2",
    "tokenizer.max_seq_len=128",
    "adaptive.memory_limit=null",
    "adaptive.lr_scaling=sqrt",
    f"adaptive.max_batch_size={LARGE // 2}",
)
PROBLEMS = {"instructions": (), "instructions, loss on all tokens": ("dataset.train_on_input=True",)}
SCHEDULES = {
    f"{SMALL} samples": (),
    f"{LARGE} samples": (f"batch_size={LARGE // 2}", f"optimizer.lr={3e-3 * (LARGE / SMALL) ** 0.5}"),
    "double_every epoch": (f"{SCHEDULE}.double_every", "batch_increase_function.epochs=1"),
}


class Curve(NamedTuple):
    """The loss over a run, smoothed, after each step."""

    samples: list[int]
    losses: list[float]

    def first_below(self, loss: float) -> tuple[int, int]:
        """Samples and steps until the loss is reached."""
        at = next(at for at, each in enumerate(self.losses) if each <= loss)
        return self.samples[at], at + 1


def run(pairs: int) -> Result:
    rows = [row for problem in PROBLEMS for row in measure(problem)]
    return Result(rows, f"means of {len(SEEDS)} seeds; {SAMPLES * EPOCHS} samples in all")


def measure(problem: str) -> list[dict[str, Any]]:
    curves = {name: [curve(problem, name, seed) for seed in SEEDS] for name in SCHEDULES}
    ends = {name: fmean(each.losses[-1] for each in of) for name, of in curves.items()}
    goal = max(each.losses[-1] for of in curves.values() for each in of)
    rows = []
    for name, of in curves.items():
        samples, steps = zip(*(each.first_below(goal) for each in of), strict=True)
        ran = {"steps": fmean(len(each.losses) for each in of), "loss at the end": ends[name]}
        to_it = {"samples to it": fmean(samples), "steps to it": fmean(steps)}
        rows.append({"problem": problem, "batch": name, **ran, "loss": goal, **to_it})
    return rows


def curve(problem: str, schedule: str, seed: int) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        options = (*COMMON, f"batch_size={SMALL // 2}", f"seed={seed}", *PROBLEMS[problem], *SCHEDULES[schedule])
        run_on_ranks(1, train, Path(folder) / "run", options, timeout_s=600, in_group=False)
        losses = [line["loss"] for line in read_log(Path(folder) / "run" / "log.jsonl")]
        sizes = [int(step["samples"]) for step in read_timeline(Path(folder) / "run" / "out").steps]
    samples, smoothed, kept = 0, losses[0], Curve([], [])
    for loss, size in zip(losses, sizes, strict=True):
        share = min(1.0, size / SMOOTHED_OVER)
        samples, smoothed = samples + size, (1 - share) * smoothed + share * loss
        kept.samples.append(samples)
        kept.losses.append(smoothed)
    return kept


def train(folder: Path, options: tuple[str, ...]) -> None:
    """Collective."""
    run_ours("full", demo_config("full", folder, *options))
