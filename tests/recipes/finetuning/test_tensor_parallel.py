"""Tensor parallelism through the full recipe: beside stock, and out of memory in the middle of a step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.faults.sweeps import Outcome
from tests.ranks import free_ports, run_on_ranks
from tests.recipes.long.tensor_sweep import RANKS, RECOVERING, TENSOR, sweep
from tests.recipes.recording import read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, load_ours, run_ours, run_stock, saved_weights
from torchtune_adaptive.record.timeline import read_timeline
from torchtune_adaptive.testing import FaultInjector

STEPS = 3
BY_ONE = ("batch_size=1", "gradient_accumulation_steps=4")
"""The same steps in microbatches of one row."""

CLIPPED = "clip_grad_norm=0.5"
APART = (*SGD, "dataset.samples=24", "batch_size=1", "adaptive.regrow_after=0")
"""The same steps by as many ranks, each with samples of its own."""

PLACES = 12
"""Operations of a step that are let run out of memory, on the ranks in turn; `tensor_sweep` tries all."""


def run_all(folder: Path, ports: list[int]) -> None:
    os.environ["MASTER_PORT"] = str(ports[0])
    run_stock("full", demo_config("full", folder / "stock", *TENSOR))
    os.environ["MASTER_PORT"] = str(ports[1])
    run_ours("full", demo_config("full", folder / "by_one", *RECOVERING, *BY_ONE))
    os.environ["MASTER_PORT"] = str(ports[2])
    run_ours("full", demo_config("full", folder / "clipped", *RECOVERING, CLIPPED))
    os.environ["MASTER_PORT"] = str(ports[3])
    run_ours("full", demo_config("full", folder / "apart", *APART, CLIPPED))
    os.environ["MASTER_PORT"] = str(ports[4])
    recipe = load_ours("full")(demo_config("full", folder / "failing", *RECOVERING))
    recipe.setup()
    last = torch.distributed.get_world_size() - 1
    with FaultInjector(recipe.runner).fail_at(rank=last, step=1, operation=300):
        recipe.train()
    recipe.cleanup()


@pytest.fixture(scope="module", params=[2, 4])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    run_on_ranks(request.param, run_all, folder, free_ports(5), timeout_s=120, in_group=False)
    return folder


def test_losses_are_those_of_the_stock_recipe(runs: Path) -> None:
    stock, ours = (read_log(runs / case / "log.jsonl") for case in ("stock", "by_one"))
    assert len(ours) == len(stock) >= STEPS
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in stock], rel=RELATIVE)


def test_gradients_are_clipped_and_steps_recorded_as_without_tensor_parallelism(runs: Path) -> None:
    together, apart = (read_timeline(runs / case / "out").steps for case in ("clipped", "apart"))
    assert len(together) == len(apart) >= STEPS
    for figure in ("loss", "grad_norm", "samples", "target_tokens"):
        assert [step[figure] for step in together] == pytest.approx([step[figure] for step in apart], rel=RELATIVE)
    assert all(step["grad_norm"] > 0.5 for step in apart)


def test_a_run_that_ran_out_of_memory_ends_with_the_weights_of_one_that_took_one_row_from_the_start(runs: Path) -> None:
    told = [event["reason"] for event in read_timeline(runs / "failing" / "out").events if event["kind"] == "recovery"]
    assert len(told) == 1
    assert "2 -> 1 row," in told[0]
    expected, found = (saved_weights(runs / case) for case in ("by_one", "failing"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_step_of_the_recipe_comes_out_bitwise_wherever_any_rank_runs_out_of_memory(tmp_path: Path) -> None:
    outcomes = run_on_ranks(RANKS, sweep, tmp_path / "run", PLACES, timeout_s=120, in_group=False)
    assert outcomes == [Outcome(injected=PLACES, recovered=PLACES)] * RANKS
