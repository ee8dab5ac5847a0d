"""The gradient's noise scale as `adaptive.measure_noise` finds it, beside that of every sample's own gradient.

The learning rate is 0, so the truth stays: it is taken from one step of the whole dataset in microbatches of a single
sample. Then the recipe trains some 200 steps. For the cost, epochs that measure every step and epochs that measure none
run in turns.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.clock import Moment
from benchmarks.overhead import MODEL, time_of_our_epoch
from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.noise import HALF_LIFE, NoiseScale, StepNoise

SAMPLES, STEPS, SAMPLES_A_STEP = 384, 216, 16
WITHIN = 0.2
BY_LENGTH = ("adaptive.token_budget=512",)


@dataclass(frozen=True)
class Case:
    recipe: str
    ranks: int
    limit: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        rows = SAMPLES_A_STEP // self.ranks // 2
        return (
            f"batch_size={rows}",
            "gradient_accumulation_steps=2",
            f"dataset.samples={SAMPLES}",
            f"epochs={STEPS * SAMPLES_A_STEP // SAMPLES}",
            "optimizer.lr=0",
            "lr_scheduler=null",
            "adaptive.measure_noise=1",
            *self.limit,
        )


CASES = [Case(recipe, ranks, limit) for recipe in ("full", "lora") for ranks in (1, 2, 4) for limit in ((), BY_LENGTH)]
COSTS = [("full", 1), ("full", 2), ("lora", 1), ("lora", 2)]


def run(pairs: int) -> Result:
    rows = [measure(case) for case in CASES]
    costs = [cost(recipe, ranks, pairs) for recipe, ranks in COSTS]
    note = (
        "scale: of all steps together, in samples; error: beside the truth, and the standard error of so many steps; "
        f"within: steps from which on the scale stays {WITHIN:.0%} from the truth. Averages have a half-life of "
        f"{HALF_LIFE} steps. cost: CPU seconds of steps that measure over those that do not"
    )
    return Result([*rows, *costs], note, shown=rows)


def measure(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        steps, truth = run_on_ranks(case.ranks, noise_of, case, Path(folder), timeout_s=300, in_group=False)[0]
    exact = truth.noise / truth.signal
    means = [[fmean(part) for part in zip(*steps[:count], strict=True)] for count in range(1, len(steps) + 1)]
    scales = [noise / signal for signal, noise in means]
    outside = [count for count, scale in enumerate(scales, 1) if abs(scale / exact - 1) > WITHIN]
    signal, noise = means[-1]
    spread = stdev(b / noise - a / signal for a, b in steps) / len(steps) ** 0.5
    averaged = NoiseScale()
    for step in steps:
        averaged.record(StepNoise(*step))
    interval = averaged.interval()
    assert interval is not None
    return {
        "recipe": case.recipe,
        "ranks": case.ranks,
        "limit": "by length" if case.limit else "rows",
        "steps": len(steps),
        "exact": exact,
        "scale": scales[-1],
        "error": scales[-1] / exact - 1,
        "standard error": spread,
        "within": max(outside, default=0) + 1,
        "last interval": [round(interval.low, 2), round(interval.high, 2)],
    }


def noise_of(case: Case, folder: Path) -> tuple[list[tuple[float, float]], StepNoise]:
    """Collective: what each step found, and the truth."""
    recipe = load_ours(case.recipe)(demo_config(case.recipe, folder, *case.overrides))
    recipe.setup()
    recipe.run.checkpoints.save = lambda *_: None
    seen: list[tuple[float, float]] = []
    with mock.patch.object(NoiseScale, "record", lambda _, step: seen.append(tuple(step))):
        recipe.train()
    samples = recipe.data.dataset
    recipe.runner.use_limit(RowLimit(1))
    mine = [samples[index] for index in range(dist.get_rank(), len(samples), dist.get_world_size())]
    result = recipe.runner.run(mine, step=1)
    norm = recipe.optimization.update(result.target_tokens)
    truth = StepNoise.of(result.squares, norm, result.target_tokens, by_samples=False)
    assert truth is not None
    recipe.cleanup()
    return seen, truth


def cost(recipe: str, ranks: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        times = run_on_ranks(ranks, time_both, recipe, Path(folder), pairs, timeout_s=240, in_group=False)[0]
    ratios = compared([(off.cpu_s, on.cpu_s) for off, on in times])
    return {"cost of": recipe, "ranks": ranks, "cpu ms": 1e3 * median(off.cpu_s for off, _ in times), **ratios}


def time_both(recipe: str, folder: Path, pairs: int) -> list[tuple[Moment, Moment]]:
    """Collective: steps that do not measure, and steps that do."""
    ours = load_ours(recipe)(demo_config(recipe, folder, *MODEL))
    ours.setup()
    ours.run.checkpoints.save = lambda *_: None
    times: list[tuple[Moment, Moment]] = []
    for pair in range(-1, pairs):
        found: dict[int, Moment] = {}
        for every in (0, 1) if pair % 2 else (1, 0):
            ours.runner.measure_noise(every)
            found[every] = time_of_our_epoch(ours)
        times.append((found[0], found[1]))
    ours.cleanup()
    return times[1:]  # the first warms up
