"""`adaptive_plan` for PPO: each stage beside what the recipe really allocates in it on CPUs, all models resident."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.ranks import free_ports, run_on_ranks
from tests.recipes.rollouts import NEW, load_ppo, ppo_config
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.prediction.law import peak_of, sizes_of
from torchtune_adaptive.tune.parts.memory_limit import resident_tensors
from torchtune_adaptive.tune.plan.predict import fake_steps
from torchtune_adaptive.tune.rl.models import give_gradients
from torchtune_adaptive.tune.rl.rollouts import Rollout, worst_rollout
from torchtune_adaptive.tune.rl.stages import STAGES, TRAIN_POLICY, TRAIN_VALUE

SIZES = ((1, 64), (5, 96), (9, 32))
"""Rows, and tokens of each prompt."""
ADAM = ("optimizer._component_=torch.optim.AdamW", "optimizer.lr=0.001", "optimizer.fused=True")
CASES = {
    "plain": ("gradient_accumulation_steps=2",),
    "Adam, checkpointed": (*ADAM, "gradient_accumulation_steps=2", "enable_activation_checkpointing=True"),
    "one microbatch, clipped": (*ADAM, "clip_grad_norm=1.0"),
    "no reshard, top k": (*ADAM, "fsdp_reshard_after_forward=False", "top_k=5", "gradient_accumulation_steps=2"),
}


def metered(folder: Path, case: str, ports: list[int]) -> dict[str, list[int]]:
    """Collective: what the recipe's own meter counts on this rank, in each stage."""
    os.environ["MASTER_PORT"] = str(ports[0])
    cfg = ppo_config(folder, *CASES[case])
    recipe = load_ppo()(cfg)
    recipe.setup()
    stages = {name: stage_of(recipe, name, cfg) for name in STAGES}
    for stage in stages.values():
        stage(1, rollout_of(16))
    peaks = {
        # gloo's threads may let go of what was gathered a moment later
        name: [min(peak_in(recipe, name, stage, size) for _ in range(3)) for size in SIZES]
        for name, stage in stages.items()
    }
    recipe.cleanup()
    return peaks


def rollout_of(tokens: int) -> Rollout:
    return worst_rollout(torch.zeros(tokens, dtype=torch.long), NEW)


def stage_of(recipe: Any, name: str, cfg: DictConfig) -> Callable[[int, Rollout], None]:
    """Collective: this stage as training runs it, of so many rollouts."""
    runner = recipe.stages.runners[name]
    trains = name in (TRAIN_POLICY, TRAIN_VALUE) and cfg.gradient_accumulation_steps > 1

    def run(rows: int, rollout: Rollout) -> None:
        result = runner.attempt([*([[rollout.stand_in()]] if trains else []), [rollout] * rows]).result
        if name == TRAIN_POLICY:
            recipe.optimization.update({"policy": result.target_tokens, "value": result.target_tokens})

    return run


def peak_in(recipe: Any, name: str, stage: Callable[[int, Rollout], None], size: tuple[int, int]) -> int:
    models, optimizers = recipe.models, recipe.optimization.optimizers
    resident = [*resident_tensors(models.trained, optimizers)]
    resident += [tensor for each in (models.reference, models.reward) for tensor in resident_tensors(each, ())]
    models.trained.zero_grad(set_to_none=True)
    if name == TRAIN_POLICY:
        give_gradients(models.value)
        resident += [parameter.grad for parameter in models.value.parameters()]
    rows, rollout = size[0], rollout_of(size[1])
    gc.collect()
    with MemoryMeter() as meter:
        meter.count(resident)
        stage(rows, rollout)
    return meter.peak_bytes


def predicted(cfg: DictConfig, world_size: int) -> dict[str, list[int]]:
    with fake_steps(cfg, world_size) as steps:
        recordings = {name: [step.record(*size) for size in SIZES] for name, step in steps.items()}
    return {
        name: [peak_of(each.phases, sizes_of(each), caches=False).peak_bytes or 0 for each in of_stage]
        for name, of_stage in recordings.items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_each_stage_allocates_what_was_predicted(case: str, world_size: int, tmp_path: Path) -> None:
    real = run_on_ranks(world_size, metered, tmp_path / "run", case, free_ports(1), timeout_s=120, in_group=False)
    expected = predicted(ppo_config(tmp_path / "run", *CASES[case]), world_size)
    assert all(rank == expected for rank in real)
