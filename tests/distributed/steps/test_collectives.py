"""What a step communicates when nothing fails."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.distributed.counting import ALL_REDUCE, CountCollectives
from tests.distributed.models import ModelConfig, build, forward_backward_of, runner_of, samples_of
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.ranks import Agreement
from torchtune_adaptive.engine.step import Recovery


def stock_and_adaptive(recover: bool) -> tuple[Counter[str], Counter[str]]:
    """Collective: what two microbatches of stock torchtune communicate, and the same through StepRunner."""
    model = build(ModelConfig())
    samples, forward_backward = samples_of(dist.get_rank(), 4), forward_backward_of(model)
    forward_backward(samples)
    model.zero_grad()
    with CountCollectives() as stock:
        totals = [forward_backward(samples[:2]), forward_backward(samples[2:])]
        dist.all_reduce(torch.tensor(sum(each.target_tokens for each in totals)))
        dist.all_reduce(totals[0].loss_sum + totals[1].loss_sum)
    model.zero_grad()
    runner = runner_of(model, 2, recovery=Recovery(model, enabled=recover))
    with CountCollectives() as adaptive:
        runner.run(samples, step=0)
    return stock.seen, adaptive.seen


def test_a_step_has_one_collective_less_than_stock():
    for recover in (True, False):
        for stock, adaptive in run_on_ranks(2, stock_and_adaptive, recover):
            assert stock - adaptive == Counter({ALL_REDUCE: 1})
            assert adaptive - stock == Counter()


def reduced_totals() -> tuple[float, int, float, int]:
    model = build(ModelConfig(dropout=0.0))
    samples, forward_backward = samples_of(dist.get_rank(), 2), forward_backward_of(model)
    totals = forward_backward(samples)
    expected = torch.tensor([totals.loss_sum.item(), totals.target_tokens], dtype=torch.float64)
    dist.all_reduce(expected)
    model.zero_grad()
    runner = runner_of(model, 2, recovery=Recovery(model, enabled=False))
    result = runner.run(samples, step=0)
    return result.loss_sum.item(), result.target_tokens, float(expected[0].float()), int(expected[1])


def test_loss_and_tokens_are_sums_over_all_ranks():
    for loss_sum, target_tokens, expected_loss, expected_tokens in run_on_ranks(3, reduced_totals):
        assert (loss_sum, target_tokens) == (expected_loss, expected_tokens)


def plain_step_after_close() -> tuple[int, int]:
    model = build(ModelConfig())
    forward_backward, samples = forward_backward_of(model), samples_of(dist.get_rank(), 2)
    runner = runner_of(model, 2)
    runner.run(samples, step=0)
    counted = runner.recovery.ledger.position
    runner.close()
    forward_backward(samples)
    return counted, runner.recovery.ledger.position


def test_close_puts_the_collectives_of_fsdp_back():
    for counted, counted_after_close in run_on_ranks(2, plain_step_after_close):
        assert counted == counted_after_close > 0


def recoveries_of_one_model() -> int:
    model = build(ModelConfig())
    first = Recovery(model)
    with pytest.raises(ValueError, match="has a Recovery already: pass that one to each of its runners, or close it"):
        Recovery(model)
    first.close()
    runner = runner_of(model, 2, recovery=Recovery(model))
    return runner.run(samples_of(dist.get_rank(), 2), step=0).microbatches


def test_a_model_has_one_recovery_at_a_time():
    assert run_on_ranks(2, recoveries_of_one_model) == [1, 1]


def agree_twice() -> list[tuple[float, ...]]:
    agreement = Agreement(2)
    agreement.gather([9.0, 9.0])  # nothing of it is left in the next
    return agreement.gather([dist.get_rank(), 0.1 * dist.get_rank()])


def test_all_ranks_read_the_same_table():
    expected = [(float(rank), 0.1 * rank) for rank in range(3)]
    assert run_on_ranks(3, agree_twice) == [expected] * 3
