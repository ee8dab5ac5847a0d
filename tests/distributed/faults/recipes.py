"""Whole steps of DPO and PPO in their recipes, with out-of-memory errors in one stage."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from tests.distributed.faults.bench import Stepped, fail_there, operations_of
from tests.distributed.faults.scenarios import ON_PAIRS, Scenario
from tests.distributed.models import computes, device
from tests.fault_injection import FaultInjector
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.data.samples import REFERENCE_LOG_PROBS
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.step import Stages, StepRunner
from torchtune_adaptive.lifecycle import distributed
from torchtune_adaptive.objectives.preference import figures_of
from torchtune_adaptive.rl import generation

SAMPLES, STEP = 4, 1
"""Samples of a rank in a step; all steps use the same step number."""
SIZES = ("num_layers=1", "embed_dim=32")


def config_of(kind: str, folder: Path, *overrides: str) -> DictConfig:
    overrides = (f"device={device().type}", *overrides)
    if kind in ON_PAIRS:
        frozen = ["ref_checkpointer.sizes"] if kind == "full_dpo" else []
        models = [f"{section}.{size}" for section in ("model", "checkpointer.sizes", *frozen) for size in SIZES]
        sizes = (f"batch_size={SAMPLES}", "gradient_accumulation_steps=1", "adaptive.memory_limit=null")
        lengths = ("tokenizer.max_seq_len=48", "dataset.samples=64")
        return demo_config(kind, folder, *models, *sizes, *lengths, *overrides)
    sizes = (f"batch_size={SAMPLES}", f"ppo_batch_size={SAMPLES}", "gradient_accumulation_steps=1")
    return ppo_config(folder, "max_generated_tokens=3", "ppo_epochs=1", *sizes, *overrides)


def build(kind: str, overrides: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Collective: set up a recipe; return it with the initial limits of its stages."""
    with tempfile.TemporaryDirectory(prefix="faults-") as own:  # only rank 0's folder is used
        folder = [own]
        dist.broadcast_object_list(folder)
        with mock.patch.object(distributed, "join_on"):  # the process group exists already
            recipe: Any = load_ours(kind)(config_of(kind, Path(folder[0]) / "run", *overrides))
        recipe.setup()
        dist.barrier()
    if not computes():
        generation.generate = _answers_of_zeros
    for runner in recipe.stages.values():
        runner.use_limit(RowLimit(SAMPLES))
    return recipe, {stage: runner.state_dict() for stage, runner in recipe.stages.items()}


_generate = generation.generate


def _answers_of_zeros(*args: Any, **kwargs: Any) -> Tensor:
    """Generate on a null device, which computes no answers."""
    return torch.zeros_like(_generate(*args, **kwargs), device="cpu")


build_once = cache(build)


class RecipeBench:
    """Collective: a recipe that repeats its first step."""

    def __init__(self, case: Scenario) -> None:
        self.case = case
        self._build()

    def _build(self) -> None:
        """Collective: build the recipe or reuse it."""
        case, make = self.case, build if self.case.first_pass else build_once
        self.recipe, self._fresh = make(case.model.kind, case.model.overrides)
        self.runners: Stages[Any] = self.recipe.stages
        dataset = self.recipe.loop.data.dataset
        self.samples = [dataset[at * case.world_size + dist.get_rank()] for at in range(SAMPLES)]
        self._weights = [weight.clone() for weight in self._shards()]

    def _shards(self) -> list[Tensor]:
        return [_local(each.detach()) for each in self.recipe.loop.model.parameters()]

    def _allow(self, rows: int) -> None:
        """Reset the limits; the failing stage gets `rows` rows."""
        for name, runner in self.runners.items():
            runner.load_state_dict(self._fresh[name])
            runner.use_limit(RowLimit(self.case.rows))
        self.runners[self.case.model.stage].use_limit(RowLimit(rows))

    def _run(self) -> Stepped:
        """Collective: run the step from the same weights with the same random numbers."""
        for shard, weight in zip(self._shards(), self._weights, strict=True):
            shard.copy_(weight)
        torch.manual_seed(7 + dist.get_rank())
        if self.case.model.kind not in ON_PAIRS:
            figures = self.recipe.iterate(self.samples, STEP)
            return Stepped([shard.clone() for shard in self._shards()], figures, torch.get_rng_state())
        pairs, model = [dict(pair) for pair in self.samples], self.recipe.loop.model
        results = self.runners.run(pairs, step=STEP)
        gradients = [_local(each.grad).clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        assert not any(getattr(each, "disabled", False) for each in model.modules()), "the policy has its adapters"
        losses = {f"{stage} loss": result.loss_sum.item() for stage, result in results.items()}
        kept = [pair[REFERENCE_LOG_PROBS] for pair in pairs]
        return Stepped([*gradients, *kept], figures_of(results) | losses, torch.get_rng_state())

    def undisturbed(self, rows: int) -> Stepped:
        """Collective: run a step without failures, with `rows` rows in the stage under test."""
        self._allow(rows)
        return self._run()

    def operations(self) -> list[str]:
        """Collective: list the operations of the first failing rank in the stage under test."""
        runner = self.new_runner()
        self._allow(self.case.rows)
        return operations_of(runner, lambda _: self._run(), STEP, self.case)

    def new_runner(self) -> StepRunner[Any]:
        """Collective: return the runner of the stage under test, with new models for a failure in the first pass."""
        if self.case.first_pass:
            self.recipe.loop.stages.training.close()
            self._build()
        return self.runners[self.case.model.stage]

    def warm_up(self, runner: StepRunner[Any], place: int = 0) -> None:
        """Do nothing: recipes reduce gradients in every microbatch."""

    def disturbed(self, runner: StepRunner[Any], at: int | None) -> tuple[Stepped, int]:
        """Collective: run a step that runs out of memory at `at`; return its outcome and the failures on this rank."""
        self._allow(self.case.rows)
        with FaultInjector(runner) as faults:
            if at is not None:
                fail_there(faults, self.case, STEP, at)
            stepped = self._run()
        return stepped, faults.fired


def _local(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
