"""Adaptive workers against SkyRL's own, without and with out-of-memory errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("skyrl")

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.skyrl.sweeps import CASES, ENTROPY, Case, Swept, relative, run, sweep_all
from tests.skyrl.workers import KINDS, batch, gradients, use_cpus, worker
from torchtune_adaptive.skyrl import adaptive
from torchtune_adaptive.testing import FaultInjector

pytestmark = pytest.mark.timeout(1800)
PLACES = {1: 10, 2: 100, 3: 10}
"""The operations that fail in each case, one at a time, by number of ranks."""


@pytest.fixture(scope="module", params=PLACES, ids="{} ranks".format)
def swept(request: pytest.FixtureRequest) -> list[dict[str, Swept]]:
    """The results of each rank."""
    return run_on_ranks(request.param, sweep_all, PLACES[request.param], timeout_s=600)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_equals_skyrls_and_recovers_from_errors(swept: list[dict[str, Swept]], name: str) -> None:
    for of_rank in (each[name] for each in swept):
        assert of_rank.bitwise
        assert of_rank.metrics_bitwise
        assert of_rank.recovered == of_rank.injected == PLACES[len(swept)]
        assert of_rank.difference < 5e-7


@pytest.mark.parametrize("name", CASES)
def test_collectives_of_a_pass_do_not_depend_on_its_microbatches(swept: list[dict[str, Swept]], name: str) -> None:
    """One agreement at the end. Under a limit by tokens, another one replaces SkyRL's."""
    assert all(each[name].added_collectives == [1, 1] for each in swept)


def on_cpus(function: Callable[..., Any], *args: Any) -> Any:
    """Collective."""
    use_cpus()
    return function(*args)


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_on_ranks(ranks, on_cpus, function, *args, timeout_s=120)


def pair(case: Case, **arguments: Any) -> tuple[Any, Any]:
    """Collective: return SkyRL's worker and an adaptive one."""
    bases = None, adaptive(KINDS[case.kind], **arguments)
    return tuple(worker(case.kind, base, case.overrides) for base in bases)


def test_gradients_add_up_over_batches_before_an_update() -> None:
    """Tinker calls `forward_backward` several times before `optim_step`."""
    assert max(on_ranks(2, _two_batches_before_an_update)) < 1e-6


def _two_batches_before_an_update() -> float:
    difference = 0.0
    for case in (CASES["policy"], CASES["critic"]):
        stock, ours = pair(case)
        run(ours, case)
        for made in (stock, ours):
            run(made, case)
        with FaultInjector(ours.passes.runners["forward_backward"]).fail_at(rank=1, step=3, operation=50):
            for made in (stock, ours):
                made.forward_backward(batch(seed=8))
        assert ours.passes.runners["forward_backward"].recoveries == 1
        for made in (stock, ours):
            made.optim_step()
        weights = [[each.to_local() for each in made.model.parameters()] for made in (ours, stock)]
        difference = max(difference, relative(*weights))
    return difference


def test_entropy_bonus_is_exact_in_parts_and_reported_if_parts_span_several_microbatches() -> None:
    [(difference, reports)] = on_ranks(1, _entropy_of_parts)
    assert difference < 1e-6
    assert [report.count("use_entropy_loss") for report in reports] == [1]


def _entropy_of_parts() -> tuple[float, list[str]]:
    logging.disable(logging.NOTSET)
    reports: list[str] = []
    logging.getLogger("torchtune_adaptive.skyrl.passes").addFilter(lambda record: reports.append(record.getMessage()))
    case = Case("policy", overrides=ENTROPY)
    stock, ours = pair(case)
    run(ours, case)
    runner, expected = ours.passes.runners["forward_backward"], run(stock, case)
    with FaultInjector(runner).fail_at(rank=0, step=2, operation=50):
        exact = relative(run(ours, case).gradients, expected.gradients)
    assert runner.recoveries == 1
    assert reports == []
    state = runner.state_dict()
    for size in (3, 3):  # 8 rows in microbatches of 3, 3 and 2, although 4 and 4 are configured
        runner.load_state_dict({**state, "size": size})
        run(ours, case)
    return exact, reports


def test_losses_that_select_tokens_of_a_microbatch_are_reported() -> None:
    [reports] = on_ranks(1, _selecting_loss)
    assert len(reports) == 1
    assert "trainer.algorithm.policy_loss_type=kl_cov" in reports[0]


def _selecting_loss() -> list[str]:
    logging.disable(logging.NOTSET)
    reports: list[str] = []
    logging.getLogger("torchtune_adaptive.skyrl.passes").addFilter(lambda record: reports.append(record.getMessage()))
    case = Case("policy", overrides=("trainer.algorithm.policy_loss_type=kl_cov",))
    _, ours = pair(case)
    run(ours, case)
    assert reports == []
    with FaultInjector(ours.passes.runners["forward_backward"]).fail_at(rank=0, step=2, operation=50):
        run(ours, case)
    run(ours, case)
    return reports


def test_ranks_with_different_numbers_of_microbatches_train_on_all_rows() -> None:
    assert max(on_ranks(2, _different_numbers)) < 1e-6


def _different_numbers() -> float:
    case = CASES["policy, by tokens"]
    stock, ours = pair(case)
    data = batch(seed=2 + dist.get_rank())  # other lengths on each rank
    outputs = [made.forward_backward(data) for made in (ours, stock)]
    counts = torch.tensor([outputs[1].metrics["num_padding_microbatches"]])
    dist.all_reduce(counts)
    assert counts.item() > 0  # SkyRL adds microbatches of padding on one rank
    assert outputs[0].loss_fn_outputs == outputs[1].loss_fn_outputs
    return relative(gradients(ours), gradients(stock))
