"""Compare preference training with a limit for each stage to the same with one limit, the smaller, for both stages.

    python -m benchmarks --only stages

In one run on two ranks, two kinds of epochs alternate: in every second one, the reference stage has the policy's limit.
The search finds both limits in the same memory. They are compared with brute force, which measures 1, 2, 3, ... pairs
until one does not fit. Goals: the step at least 1.15 times as fast, each limit at least 0.97 of that of brute force.
Timed epochs neither limit nor count memory, because this would slow both down.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch.utils.data import Dataset

from benchmarks.results import Result, compared
from benchmarks.strategies import BRUTE_FORCE, one_more
from tests.ranks import run_on_ranks
from tests.recipes.recorders import search_results
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.engine.search import STRATEGIES
from torchtune_adaptive.objectives.preference import POLICY, REFERENCE

RANKS = 2
EPOCH_STEPS = 2
MEMORY_WITHIN = "torchtune_adaptive.loop.training_loop.memory_within"
STAGES = (POLICY, REFERENCE)
"""The folder with the search record of each stage."""


@dataclass(frozen=True)
class Shape:
    """Model sizes and memory limit."""

    name: str
    kind: str
    """A key of `OURS` in tests/recipes/running.py."""
    width: int
    tokens: int
    """Tokens of each answer, prompt included."""
    memory_mib: int
    pairs_per_step: int
    """Pairs of one rank."""

    @property
    def config(self) -> tuple[str, ...]:
        return (
            "dataset._component_=benchmarks.stages.random_pairs",
            f"dataset.tokens={self.tokens}",
            f"dataset.samples={self.pairs_per_step * EPOCH_STEPS * RANKS}",
            *(f"{section}.embed_dim={self.width}" for section in ("model", "checkpointer.sizes")),
            *([] if self.kind == "lora_dpo" else [f"ref_checkpointer.sizes.embed_dim={self.width}"]),
            f"tokenizer.max_seq_len={self.tokens}",
            "adaptive.sequence_length=null",
            f"batch_size={self.pairs_per_step}",
            "gradient_accumulation_steps=1",
            "use_maximum_batch_size=True",
            "adaptive.round_to=none",
            f"adaptive.memory_limit={self.memory_mib}MiB",
        )


SHAPES = (
    Shape("short answers, wide model", "full_dpo", 512, 32, 72, 16),
    Shape("the same, LoRA", "lora_dpo", 512, 32, 64, 16),
    Shape("the demo's model", "full_dpo", 128, 128, 24, 16),
    Shape("long answers", "full_dpo", 128, 512, 48, 8),
)


def run(pairs: int) -> Result:
    rows = [measure(shape, pairs) for shape in SHAPES]
    note = (
        "pairs: what a microbatch of each stage has; of brute force: over the most that fit, the worse of both stages. "
        "ratio: seconds of a step with one number for both stages over those with two, by wall time and by CPU time of "
        "all ranks"
    )
    shown = [{"figure": name, **{row["shape"]: row[name] for row in rows}} for name in rows[0] if name != "shape"]
    return Result(rows, note, shown)


def measure(shape: Shape, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = searched(shape, Path(folder) / "linear", "linear")
        most = searched(shape, Path(folder) / "brute", BRUTE_FORCE)
        timeout_s = 120 + 60 * pairs
        timed = run_on_ranks(RANKS, compare, shape, Path(folder) / "timed", pairs, timeout_s=timeout_s, in_group=False)
    return {
        "shape": shape.name,
        "policy pairs": found[POLICY],
        "reference pairs": found[REFERENCE],
        "of brute force": min(found[stage] / most[stage] for stage in STAGES),
        **timed[0],
    }


def searched(shape: Shape, folder: Path, strategy: str) -> dict[str, int]:
    """Search with this strategy for the most pairs of each stage."""
    run_on_ranks(RANKS, set_up, shape, folder, strategy, timeout_s=300, in_group=False)
    return {stage: int(result["rows"]) for stage, result in search_results(folder / "out").items()}


def set_up(shape: Shape, folder: Path, strategy: str) -> None:
    """Collective: set up a run, without training. Brute force may measure more pairs than a step has."""
    brute = strategy == BRUTE_FORCE
    stand_in, named = ({"binary": one_more}, "binary") if brute else ({}, strategy)
    with mock.patch.dict(STRATEGIES, stand_in):
        recipe = recipe_of(shape, folder, f"adaptive.search={named}")
    recipe.cleanup()


def recipe_of(shape: Shape, folder: Path, *overrides: str) -> Any:
    recipe = load_ours(shape.kind)(demo_config(shape.kind, folder, *shape.config, *overrides))
    recipe.setup()
    return recipe


class RandomPairs(Dataset[dict[str, list[int]]]):
    """Answers of one length; half of each is the prompt, which both share."""

    def __init__(self, samples: int, tokens: int) -> None:
        self._samples = samples
        self._tokens = tokens

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draw, half = random.Random(index), self._tokens // 2
        prompt = draw.choices(range(256), k=half)
        pair = {}
        for answer in ("chosen", "rejected"):
            tokens = draw.choices(range(256), k=self._tokens - half)
            pair |= {f"{answer}_input_ids": prompt + tokens, f"{answer}_labels": [-100] * half + tokens}
        return pair


def random_pairs(tokenizer: Any, *, samples: int, tokens: int) -> RandomPairs:
    """Component for a config's `dataset:`."""
    return RandomPairs(samples, tokens)


class Cost(NamedTuple):
    """The cost of a step."""

    wall_s: float
    cpu_s: float
    """CPU time of all ranks."""


def compare(shape: Shape, folder: Path, pairs: int) -> dict[str, Any]:
    """Collective: epochs with two limits and with one, in turns, after one of each to warm up."""
    recipe = recipe_of(shape, folder, f"epochs={2 * pairs + 2}")
    recipe.run.checkpoints.save = lambda *_: None
    schedule = recipe.loop.schedule
    single = replace(schedule, limits={POLICY: schedule.limits[POLICY]} if POLICY in schedule.limits else {})
    rounds = [(epoch(recipe, single), epoch(recipe, schedule)) for _ in range(pairs + 1)][1:]
    wall = compared([(own.wall_s, one.wall_s) for one, own in rounds])
    cpu = compared([(own.cpu_s, one.cpu_s) for one, own in rounds])
    return {
        "step s": statistics.median(own.wall_s for _, own in rounds),
        **wall,
        **{f"{figure} by CPU time": cpu[figure] for figure in ("ratio", "lowest", "highest")},
    }


def epoch(recipe: Any, schedule: Any) -> Cost:
    """Collective: train the next epoch with this schedule."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    recipe.loop.schedule = replace(schedule, epochs=schedule.epochs[: recipe.run.progress.epochs_run + 1])
    with mock.patch(MEMORY_WITHIN, return_value=nullcontext()):
        recipe.train()
    everywhere: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everywhere, time.process_time() - cpu_began)
    return Cost((time.perf_counter() - began) / EPOCH_STEPS, sum(everywhere) / EPOCH_STEPS)
