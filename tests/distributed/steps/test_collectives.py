"""Collectives of a step without failures."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.models import ModelConfig, build, forward_backward_of, runner_of, samples_of
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.step import Recovery

Figures = tuple[float, float]
"""The loss and its number of tokens."""


def stock_and_adaptive(recover: bool) -> tuple[Counter[str], Figures, Counter[str], Figures]:
    """Collective: return collectives and figures of two microbatches of stock torchtune, and of StepRunner."""
    model = build(ModelConfig(dropout=0.0))
    samples, forward_backward = samples_of(dist.get_rank(), 4), forward_backward_of(model)
    forward_backward(samples)
    model.zero_grad()
    with CountCollectives() as stock:
        totals = [forward_backward(samples[:2]), forward_backward(samples[2:])]
        dist.all_reduce(tokens := torch.tensor(sum(each.target_tokens for each in totals)))
        dist.all_reduce(loss := totals[0].loss_sum + totals[1].loss_sum)
    model.zero_grad()
    runner = runner_of(model, 2, recovery=Recovery(model, enabled=recover))
    with CountCollectives() as adaptive:
        result = runner.run(samples, step=0)
    return stock.seen, (loss.item(), tokens.item()), adaptive.seen, (result.loss_sum.item(), result.target_tokens)


@pytest.mark.smoke
def test_step_has_one_collective_less_than_stock():
    for recover in (True, False):
        for stock, summed, adaptive, found in run_on_ranks(2, stock_and_adaptive, recover):
            assert stock - adaptive == Counter({ALL_REDUCE: 1})
            assert adaptive - stock == Counter()
            assert found == pytest.approx(summed, rel=1e-6)


def plain_step_after_close() -> tuple[int, int]:
    model = build(ModelConfig())
    forward_backward, samples = forward_backward_of(model), samples_of(dist.get_rank(), 2)
    runner = runner_of(model, 2)
    runner.run(samples, step=0)
    counted = runner.recovery.ledger.position
    runner.close()
    forward_backward(samples)
    return counted, runner.recovery.ledger.position


def test_close_restores_fsdps_collectives():
    for counted, counted_after_close in run_on_ranks(2, plain_step_after_close):
        assert counted == counted_after_close > 0


def recoveries_of_one_model() -> int:
    model = build(ModelConfig())
    first = Recovery(model)
    with pytest.raises(ValueError, match="already has a Recovery: pass that one to all runners of the model"):
        Recovery(model)
    first.close()
    runner = runner_of(model, 2, recovery=Recovery(model))
    return runner.run(samples_of(dist.get_rank(), 2), step=0).microbatches


def test_model_has_one_recovery_at_a_time():
    assert run_on_ranks(2, recoveries_of_one_model) == [1, 1]
