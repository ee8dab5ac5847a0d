"""`adaptive_plan` for PPO: each stage beside what the recipe really allocates in it on CPUs, all models resident."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.ranks import free_ports, run_on_ranks
from tests.recipes.plan.test_plan import ask
from tests.recipes.ppo.rollouts import NEW, TINY, load_ppo, ppo_config
from tests.recipes.recording import events_of
from tests.recipes.tracing import peaks_of
from torchtune_adaptive.memory.cpu_meter import MemoryMeter
from torchtune_adaptive.tune.parts.limited_memory import resident_tensors
from torchtune_adaptive.tune.plan.commands import Wanted, command
from torchtune_adaptive.tune.plan.question import Question
from torchtune_adaptive.tune.plan.settings import read_plan_settings
from torchtune_adaptive.tune.rl.models import give_gradients
from torchtune_adaptive.tune.rl.rollouts import Rollout, worst_rollout
from torchtune_adaptive.tune.rl.stages import GENERATE, STAGES, TRAIN_POLICY, TRAIN_VALUE
from torchtune_adaptive.tune.start.catalogue import PPO
from torchtune_adaptive.tune.trace.steps import fake_steps

SIZES = ((1, 64), (5, 96), (9, 32))
"""Rows, and tokens of each prompt."""
A_FEW_BYTES = 1024
"""What a rank holds a moment longer than predicted, or shorter: scales of a few norms, in 2 MiB."""
STEPS_OF_TWO = "gradient_accumulation_steps=2"


def metered(folder: Path, ports: list[int]) -> dict[str, list[int]]:
    """Collective: what the recipe's own meter counts on this rank, in each stage."""
    os.environ["MASTER_PORT"] = str(ports[0])
    cfg = ppo_config(folder, STEPS_OF_TWO)
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
        return {name: peaks_of(step, SIZES) for name, step in steps.items()}


def test_each_stage_allocates_what_was_predicted(tmp_path: Path) -> None:
    real = run_on_ranks(2, metered, tmp_path / "run", free_ports(1), timeout_s=120, in_group=False)
    expected = predicted(ppo_config(tmp_path / "run", STEPS_OF_TWO), world_size=2)
    for rank in real:
        for stage, peaks in rank.items():
            assert expected[stage] == [pytest.approx(peak, rel=0, abs=A_FEW_BYTES) for peak in peaks], stage


SEARCHED = (
    *(each for each in TINY if not each.startswith("adaptive")),
    "use_maximum_batch_size=True",
    "adaptive.memory_limit=4MiB",
    "adaptive.round_to=none",
    "adaptive.sequence_length=64",
)


def set_up(folder: Path, ports: list[int]) -> None:
    os.environ["MASTER_PORT"] = str(ports[0])
    recipe = load_ppo()(ppo_config(folder, *SEARCHED))
    recipe.setup()
    recipe.cleanup()


def test_the_command_answers_what_the_searches_of_a_run_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask("adaptive/demo/ppo", "format=json", *SEARCHED)
    rows = json.loads(capsys.readouterr().out)["predictions"]
    run_on_ranks(1, set_up, tmp_path / "run", free_ports(1), timeout_s=60, in_group=False)
    found = {event["stage"]: event["after"] for event in events_of(tmp_path / "run", "search")}
    assert {row["stage"]: row["rows"] for row in rows if row["chosen"]} == found
    assert found[TRAIN_POLICY] < found[GENERATE]


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [("null", "use_maximum_batch_size=True"), ("400", "adaptive.token_budget=auto")],
)
def test_what_to_run_next_measures_rows_or_tokens(tmp_path: Path, budget: str, sizes: str) -> None:
    cfg = ppo_config(tmp_path / "run", f"adaptive.token_budget={budget}")
    plan = read_plan_settings(OmegaConf.create({"world_size": 2, "memory_limit": "4MiB"}))
    told = command(Question(cfg, plan, "adaptive/demo/ppo"), Wanted(rows=1, tokens=64))
    assert told == f"tune run --nproc_per_node 2 {PPO} --config adaptive/demo/ppo adaptive.memory_limit=4MiB {sizes}"
