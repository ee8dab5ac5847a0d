"""Whole iterations of PPO and GRPO as their recipes run them, and the ways in which a stage may run out of memory."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from tests.distributed.faults.failing import fail_there, operations_of, ways_to_fail
from tests.distributed.models import ModelConfig
from tests.recipes.grpo.tiny import grpo_config
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import load_ours
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.rl.rollouts import Rollout
from torchtune_adaptive.rl.stages import GENERATE, SCORE_POLICY, SCORE_REFERENCE, STAGES, TRAIN_POLICY
from torchtune_adaptive.testing import FaultInjector
from torchtune_adaptive.tune import place

ANSWERS, ITERATION = 4, 1
"""Of a rank in an iteration, which is always the same one."""
OF_GRPO = (GENERATE, SCORE_POLICY, SCORE_REFERENCE, TRAIN_POLICY)
KINDS = {"full_ppo": STAGES, "full_grpo": OF_GRPO, "lora_grpo": OF_GRPO}


@dataclass(frozen=True)
class RolloutCase:
    """The stage in which memory runs out, and how. The rest is as in finetuning.Case."""

    name: str
    kind: str
    stage: str
    model: ModelConfig = field(default_factory=ModelConfig)
    """Says only whether parameters are freed after a forward."""
    layer_by_layer: bool = False
    """To generate, parameters are gathered anew for every token."""
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    again: str = "never"
    first_pass: bool = False
    """Whether the models have never run before."""
    stride: int = 1

    def bench(self) -> "RolloutBench":
        """Collective."""
        return RolloutBench(self)


def cases() -> Iterator[RolloutCase]:
    """Every operation of every stage, then other ways to fail in it, of which some operations are left out."""
    for kind, stages in KINDS.items():
        for stage in stages:
            plain = RolloutCase(f"rollouts, {kind}, {stage}", kind, stage)
            yield plain
            yield from (replace(way, stride=max(17, way.stride)) for way in ways_to_fail(plain, {}))
    by_layer = RolloutCase("rollouts, full_ppo, layer by layer", "full_ppo", GENERATE, layer_by_layer=True)
    yield by_layer
    yield replace(by_layer, name=f"{by_layer.name}, first pass", first_pass=True, stride=17)


ROLLOUT_CASES = tuple(cases())


def config_of(case: RolloutCase, folder: Path) -> DictConfig:
    same = ("max_generated_tokens=3", f"fsdp_reshard_after_forward={case.model.reshard_after_forward}")
    if case.kind == "full_ppo":
        sizes = (f"batch_size={ANSWERS}", f"ppo_batch_size={ANSWERS}", f"forward_batch_size={case.rows}")
        splits = ("ppo_epochs=1", f"gradient_accumulation_steps={ANSWERS // case.rows}")
        return ppo_config(folder, *same, *sizes, *splits)
    one_group = ("batch_size=1", f"grpo_samples={ANSWERS}", "forward_batch_size=1", "resample_groups=0")
    # two updates have a stage more, but where the second one fails, the first has run with other rows
    updates = f"ppo_epochs={1 if case.stage == TRAIN_POLICY else 2}"
    return grpo_config(case.kind, folder, *same, *one_group, updates, "without_signal=keep")


class Iterated(NamedTuple):
    """What comes out of an iteration, bit by bit."""

    weights: list[Tensor]
    figures: dict[str, float]
    rng: Tensor

    def same_as(self, other: "Iterated") -> bool:
        return (
            all(torch.equal(mine, its) for mine, its in zip(self.weights, other.weights, strict=True))
            and self.figures == other.figures
            and torch.equal(self.rng, other.rng)
        )


class RolloutBench:
    """Collective: a recipe, and its first iteration, over and over."""

    def __init__(self, case: RolloutCase) -> None:
        self.case = case
        self._build()

    def _build(self) -> None:
        """Collective."""
        folder = [tempfile.mkdtemp(prefix="faults-")]
        dist.broadcast_object_list(folder)
        with mock.patch.object(place, "join_on"):  # the ranks have met
            self.recipe: Any = load_ours(self.case.kind)(config_of(self.case, Path(folder[0]) / "run"))
        self.recipe.setup()
        self.stages = self.recipe.stages
        if self.case.layer_by_layer:
            self.stages.go_layer_by_layer()
        for runner in self.stages.runners.values():
            runner.use_limit(RowLimit(self.case.rows))
        self._fresh = self.stages.state_dict()
        prompts = self.recipe.iterations.data.dataset
        self._prompts = [prompts[index] for index in range(dist.get_rank(), ANSWERS * 2, 2)]
        if self.case.kind != "full_ppo":
            self._prompts = self._prompts[:1]
        self._weights = [weight.clone() for weight in self._shards()]

    def _shards(self) -> list[Tensor]:
        return [
            getattr(each.detach(), "_local_tensor", each.detach()) for each in self.recipe.trainer.model.parameters()
        ]

    def _allow(self, rows: int) -> None:
        """Forgets what has failed before; the stage that is to fail has so many rows."""
        self.stages.load_state_dict(self._fresh)
        self.stages.runners[self.case.stage].use_limit(RowLimit(rows))

    def _iterate(self) -> Iterated:
        """Collective: from the same weights, with the same random numbers."""
        for shard, weight in zip(self._shards(), self._weights, strict=True):
            shard.copy_(weight)
        torch.manual_seed(7 + dist.get_rank())
        figures = self.recipe.iterate(self._prompts, ITERATION)
        return Iterated([shard.clone() for shard in self._shards()], figures, torch.get_rng_state())

    def undisturbed(self, rows: int) -> Iterated:
        """Collective: an iteration in which nothing fails, with so many rows in the stage that is to."""
        self._allow(rows)
        return self._iterate()

    def operations(self) -> list[str]:
        """Collective: what the first failing rank does in the stage that is to fail."""
        runner = self.new_runner()
        self._allow(self.case.rows)
        return operations_of(runner, lambda _: self._iterate(), ITERATION, self.case)

    def new_runner(self) -> StepRunner[Rollout]:
        """Collective: that of the stage that is to fail; of models that have never run, if so said."""
        if self.case.first_pass:
            self.stages.runners.training.close()
            self._build()
        runner: StepRunner[Rollout] = self.stages.runners[self.case.stage]
        return runner

    def disturbed(self, runner: StepRunner[Rollout], at: int | None) -> tuple[Iterated, int]:
        """Collective: an iteration that runs out of memory there; how often it did so on this rank."""
        self._allow(self.case.rows)
        with FaultInjector(runner) as faults:
            if at is not None:
                fail_there(faults, self.case, ITERATION, at)
            iterated = self._iterate()
        return iterated, faults.fired
