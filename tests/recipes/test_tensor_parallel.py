"""Tensor parallelism through the full recipe: beside stock, and out of memory in the middle of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.failing import over_ranks
from tests.distributed.models import Gradients, gradients_of, same_gradients
from tests.ranks import free_ports, run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, load_ours, run_ours, run_stock, saved_weights
from torchtune_adaptive.record.timeline import read_timeline
from torchtune_adaptive.testing import FaultInjector

SHARED = (
    *SGD,
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "clip_grad_norm=null",  # torch cannot take the norm of gradients of which some are not distributed
    "dataset.samples=24",
    "batch_size=2",
    "adaptive.regrow_after=0",
)
RECOVERING = (*SHARED, "adaptive.recover_from_oom=True")
STEPS = 3
BY_ONE = ("batch_size=1", "gradient_accumulation_steps=4")
"""The same steps in microbatches of one row."""

PLACES = 12
"""Operations of a step that are let run out of memory, on each rank in turn."""


def run_all(folder: Path, ports: list[int]) -> None:
    os.environ["MASTER_PORT"] = str(ports[0])
    run_stock("full", demo_config("full", folder / "stock", *SHARED))
    os.environ["MASTER_PORT"] = str(ports[1])
    run_ours("full", demo_config("full", folder / "by_one", *RECOVERING, *BY_ONE))
    os.environ["MASTER_PORT"] = str(ports[2])
    recipe = load_ours("full")(demo_config("full", folder / "failing", *RECOVERING))
    recipe.setup()
    last = torch.distributed.get_world_size() - 1
    with FaultInjector(recipe.runner).fail_at(rank=last, step=1, operation=300):
        recipe.train()
    recipe.cleanup()


@pytest.fixture(scope="module", params=[2, 4])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    run_on_ranks(request.param, run_all, folder, free_ports(3), timeout_s=120, in_group=False)
    return folder


def test_losses_are_those_of_the_stock_recipe(runs: Path) -> None:
    stock, ours = (read_log(runs / case / "log.jsonl") for case in ("stock", "by_one"))
    assert len(ours) == len(stock) >= STEPS
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in stock], rel=RELATIVE)


def test_a_run_that_ran_out_of_memory_ends_with_the_weights_of_one_that_took_one_row_from_the_start(runs: Path) -> None:
    told = [event["reason"] for event in read_timeline(runs / "failing" / "out").events if event["kind"] == "recovery"]
    assert len(told) == 1
    assert "2 -> 1 row," in told[0]
    expected, found = (saved_weights(runs / case) for case in ("by_one", "failing"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class _Swept(Exception):
    """The first step of a recipe has been swept, which is all that was to be done."""


def sweep(folder: Path, at_most: int) -> tuple[int, int, int]:
    """Collective: how many operations of the first step failed, how often it was repeated, and came out wrong."""
    recipe = load_ours("full")(demo_config("full", folder, *RECOVERING))
    recipe.setup()
    found: list[tuple[int, int, int]] = []

    def swept(samples: Sequence[Any], **_: Any) -> Any:
        found.append(sweep_step(recipe, run, samples, at_most))
        raise _Swept

    run, recipe.runner.run = recipe.runner.run, swept
    with suppress(_Swept):
        recipe.train()
    recipe.cleanup()
    return found[0]


def sweep_step(recipe: Any, run: Callable[..., Any], samples: Sequence[Any], at_most: int) -> tuple[int, int, int]:
    """Collective: runs out of memory at evenly spread operations of one step, on the ranks in turn."""
    fresh, ranks = recipe.runner.state_dict(), torch.distributed.get_world_size()

    def step(rows: int, place: int, failing: int) -> tuple[Gradients, FaultInjector]:
        recipe.model.zero_grad(set_to_none=True)
        recipe.runner.load_state_dict({**fresh, "size": rows})
        with FaultInjector(recipe.runner).fail_at(rank=failing, step=0, operation=place) as faults:
            run(samples, step=0)
        return gradients_of(recipe.model), faults

    expected, _ = step(1, sys.maxsize, 0)
    operations = int(over_ranks(len(step(2, sys.maxsize, 0)[1].operations)))  # of rank 0: the others do not count
    injected = repeated = wrong = 0
    for number, place in enumerate(range(1, operations + 1, -(-operations // at_most))):
        gradients, faults = step(2, place, number % ranks)
        injected += over_ranks(faults.fired) > 0
        repeated += recipe.runner.limit.rows == 1
        wrong += over_ranks(not same_gradients(gradients, expected)) > 0
    return injected, repeated, wrong


def test_a_step_of_the_recipe_comes_out_bitwise_wherever_any_rank_runs_out_of_memory(tmp_path: Path) -> None:
    outcomes = run_on_ranks(4, sweep, tmp_path / "run", PLACES, timeout_s=120, in_group=False)
    assert outcomes == [(PLACES, PLACES, 0)] * 4
