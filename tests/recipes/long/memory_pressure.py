"""Memory pressure for a recipe: the memory of every rank changes, and operations fail, in every stage of a step."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.fault_injection import FaultInjector
from torchtune_adaptive.data.samples import INDEX
from torchtune_adaptive.engine.plans import Plan
from torchtune_adaptive.objectives.preference import POLICY, REFERENCE
from torchtune_adaptive.rl.stages import FORWARD, GENERATE, TRAIN_POLICY, TRAIN_VALUE

LONGEST = 256
KIB, MIB = 2**10, 2**20
CALM_BYTES = 64 * MIB


class Climate(NamedTuple):
    """Memory limits and failures of a stage."""

    least_bytes: int
    """Enough memory for one of the longest samples."""
    most_bytes: int
    """The limit of a squeeze: enough for two or three samples."""
    operations: int
    """The approximate number of operations of a microbatch."""


CLIMATES = {
    "": Climate(15 * MIB, CALM_BYTES // 3, 1500),
    REFERENCE: Climate(9 * MIB, 14 * MIB, 400),
    POLICY: Climate(22 * MIB, 40 * MIB, 1500),
}
ROLLOUT_CLIMATES = {
    GENERATE: Climate(1700 * KIB, 1745 * KIB, 1500),
    **{stage: Climate(1620 * KIB, 1685 * KIB, 200) for stage in FORWARD[:2]},
    **{stage: Climate(1560 * KIB, 1620 * KIB, 200) for stage in FORWARD[2:]},
    TRAIN_VALUE: Climate(1920 * KIB, 2200 * KIB, 500),
    TRAIN_POLICY: Climate(2260 * KIB, 2550 * KIB, 500),
}
"""One answer needs 1629, 1477, 1412, 1754 and 2104 KiB. gloo frees a buffer of 68 KiB eventually, so reserve two of
them in stages that reduce gradients; eight answers never fit.
"""


def stages_of(recipe: Any) -> dict[str, Any]:
    """Return the runners of a step by stage, in order."""
    return dict(recipe.loop.stages)


def memories_of(runner: Any) -> list[Any]:
    """Return a list into which this runner's memory goes when training begins."""
    watch, found = runner.measure_memory, list[Any]()

    def watch_too(memory: Any) -> None:
        found.append(memory)
        watch(memory)

    runner.measure_memory = watch_too
    return found


def number_of(sample: Any) -> int:
    """Return the number of a sample in its dataset, or of a rollout in its iteration."""
    return int(sample[INDEX] if isinstance(sample, dict) else sample.number)


class Cut(NamedTuple):
    """How a stage of a step was finally split on one rank, as sample numbers. It may have run more than once."""

    step: int
    stage: str
    microbatches: list[list[int]]


class Storm:
    """Changes the memory of this rank or injects a failure before every stage, and records the splits."""

    def __init__(self, recipe: Any, seed: int, stages: dict[str, Any], cuts: Path) -> None:
        self._stages = stages
        self._together = random.Random(f"{seed}/{recipe.run.progress.step}")  # equal on all ranks
        self._alone = random.Random(f"{seed}/{recipe.run.progress.step}/{dist.get_rank()}")
        self._faults = {name: FaultInjector(runner) for name, runner in stages.items()}
        self._storm, self._left_of_spell = False, 0
        self._cuts = cuts
        self._last_plan: Plan = ()
        for name, runner in stages.items():
            runner.run = partial(self._run, name, runner.run)
            runner.on_attempt = self._on_attempt
        self._memories = memories_of(next(iter(stages.values())))
        self._open = ExitStack()

    def __enter__(self) -> Storm:
        for faults in self._faults.values():
            self._open.enter_context(faults)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _on_attempt(self, step: int, plan: Plan) -> None:
        self._last_plan = plan

    def _run(self, name: str, run: Any, samples: Sequence[Any], *, step: int, **options: Any) -> Any:
        """Collective: run the stage under the current memory."""
        climates = ROLLOUT_CLIMATES if GENERATE in self._stages else CLIMATES
        climate, memory = climates[name], self._memories[-1]
        memory.cap_bytes = CALM_BYTES
        event = self._together.choice(["squeeze", "strike"]) if self._stormy() else "calm"
        if event == "squeeze":
            memory.cap_bytes = self._alone.randrange(climate.least_bytes, climate.most_bytes)
        struck = self._together.choice([{0}, {1}, {0, 1}])
        # failing at the smallest size would rightly end the run, so do not inject it
        if event == "strike" and self._room(name) and dist.get_rank() in struck:
            at = self._alone.randrange(1, climate.operations)
            self._faults[name].fail_at(rank=dist.get_rank(), step=step, operation=at)
        result = run(samples, step=step, **options)
        cut = [[number_of(samples[index]) for index in rows] for rows in self._last_plan]
        with self._cuts.open("a") as file:
            file.write(json.dumps(Cut(step, name, cut)._asdict()) + "\n")
        return result

    def _stormy(self) -> bool:
        """Return True in a phase of pressure; between phases, limits regrow."""
        if self._left_of_spell == 0:
            self._storm = not self._storm
            self._left_of_spell = self._together.randrange(*(4, 9) if self._storm else (10, 31)) * len(self._stages)
        self._left_of_spell -= 1
        return self._storm

    def _room(self, name: str) -> bool:
        return bool(self._stages[name].limit.rows_at(LONGEST) >= 2)


def read_cuts(path: Path) -> list[Cut]:
    return [Cut(**json.loads(line)) for line in path.read_text().splitlines()]
