"""Collectives of a step without failures, and limits that all ranks change together in its agreement."""

import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.captured_logs import captured_log
from tests.distributed.count_collectives import ALL_REDUCE, REDUCE_SCATTER, CountCollectives
from tests.distributed.faults.meshes import OnMesh, tensor_parallel
from tests.distributed.models import (
    ModelConfig,
    build,
    forward_backward_of,
    gradients_equal,
    gradients_of,
    runner_of,
    samples_of,
)
from tests.fault_injection import FaultInjector
from tests.ranks import on_ranks
from tests.simulated_memory import FakeMemory
from torchtune_adaptive.engine.consistency import LATE_S
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals


@pytest.mark.smoke
@pytest.mark.parametrize("recover", [True, False])
@on_ranks(2)
def test_step_has_one_collective_less_than_stock(recover: bool) -> None:
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
    assert stock.seen - adaptive.seen == Counter({ALL_REDUCE: 1})
    assert adaptive.seen - stock.seen == Counter()
    assert result.loss_sum.item() == pytest.approx(loss.item(), rel=1e-6)
    assert result.target_tokens == tokens.item()


@on_ranks(2)
def test_close_restores_fsdps_collectives() -> None:
    model = build(ModelConfig())
    forward_backward, samples = forward_backward_of(model), samples_of(dist.get_rank(), 2)
    runner = runner_of(model, 2)
    runner.run(samples, step=0)
    counted = runner.recovery.ledger.position
    runner.close()
    forward_backward(samples)
    assert counted == runner.recovery.ledger.position > 0


@on_ranks(2)
def test_model_has_one_recovery_at_a_time() -> None:
    model = build(ModelConfig())
    first = Recovery(model)
    with pytest.raises(ValueError, match="already has a Recovery: pass that one to all runners of the model"):
        Recovery(model)
    first.close()
    runner = runner_of(model, 2, recovery=Recovery(model))
    assert runner.run(samples_of(dist.get_rank(), 2), step=0).microbatches == 1


@pytest.mark.parametrize("room_for_gradients", [None, 1, 0.99], ids=["not_measured", "enough", "too_little"])
@on_ranks(2)
def test_gradients_are_reduced_once_per_step_while_memory_allows(room_for_gradients: float | None) -> None:
    """They are bitwise those of a plain loop that reduces them in every microbatch, or in the last one only. Step 5
    runs out of memory. With 1, there is exactly enough memory for the gradients of the whole model. What used more
    memory before a step, such as an evaluation, does not count.
    """
    model = build(ModelConfig(dropout=0.0))
    assert isinstance(model, FSDPModule)
    samples, forward_backward = samples_of(dist.get_rank(), 4), forward_backward_of(model)
    plain_loops, same_as = [], ([], [])
    for reduces in (True, False):
        model.zero_grad()
        model.set_requires_gradient_sync(reduces)
        forward_backward(samples[:2])
        model.set_requires_gradient_sync(True)
        forward_backward(samples[2:])
        plain_loops.append(gradients_of(model))
    memory = FakeMemory(peak_bytes=10**9)

    def measured(samples: Sequence[Tensor]) -> Totals:
        memory.peak_bytes = max(memory.peak_bytes, 700)
        return forward_backward(samples)

    runner, scatters = runner_of(model, 2, measured, reduce_once=True), []
    model.zero_grad()
    runner.attempt([samples[:2], samples[2:]])  # a probe does not count as a step
    if room_for_gradients is not None:
        of_the_model = 4 * sum(parameter.numel() for parameter in model.parameters())
        memory.budget_bytes = 700 + int(room_for_gradients * of_the_model)
        runner.measure_memory(memory)
    with FaultInjector(runner).fail_at(rank=1, step=5, operation=300), captured_log() as log:
        for step in range(1, 7):
            model.zero_grad()
            with CountCollectives() as counted:
                runner.run(samples, step=step)
            scatters.append(counted.seen[REDUCE_SCATTER])
            for same, plain in zip(same_as, plain_loops, strict=True):
                same.append(gradients_equal(gradients_of(model), plain))
    if dist.get_rank() == 0:
        in_every_microbatch = "gradients are reduced in every microbatch from now on, limit stays at 2 rows"
        assert any(in_every_microbatch in line for line in log) == (room_for_gradients != 0.99)
    every, once = scatters[0], scatters[0] // 2
    in_every, in_last = same_as
    if room_for_gradients == 0.99:
        assert scatters[:4] == [every] * 4
        assert all(in_every[:4])
    else:  # the first two steps measure memory, and step 5 runs out of it
        assert scatters == [every, every, once, once, once + every, every]
        assert in_every == [True, True, False, False, True, True]
        assert in_last[2:4] == [True, True]


LATE = {
    "whole": (ModelConfig(sharded=False), 2),
    "hybrid": (ModelConfig(replicas=2), 4),
    "tensor parallel and replicas": (OnMesh(tensor_parallel, replicas=2), 4),
}


@pytest.mark.parametrize("name", LATE)
@on_ranks(lambda name: LATE[name][1], timeout_s=30)
def test_late_rank_is_not_mistaken_for_one_with_different_samples(name: str) -> None:
    """The last rank is late in two steps, and the second step has fewer samples. Replicas take part in no common
    collective before the last microbatch."""
    [model], train = LATE[name][0].parts()
    runner = runner_of(model, 2, train)
    for step, count in enumerate((6, 4)):
        time.sleep(LATE_S + 1 if dist.get_rank() == dist.get_world_size() - 1 else 0)
        trained = runner.run([torch.arange(8)] * count, step=step).target_tokens
        model.zero_grad(set_to_none=True)
    assert (trained, runner.recoveries) == (dist.get_world_size() * 4 * 7, 0)


@on_ranks(2)
def test_thrashing_on_one_rank_changes_the_limit_of_all_without_extra_collectives() -> None:
    model, memory, events = build(ModelConfig(dropout=0.0)), FakeMemory(), []
    recovery = Recovery(model, regrow_after=3, on_change=lambda event: events.append((event.kind, event.ranks)))
    runner = runner_of(model, 4, recovery=recovery)
    runner.measure_memory(memory)
    rows = []
    with CountCollectives() as counted:
        for step in range(14):
            memory.retries += dist.get_rank() == 1 and step in (2, 3)
            rows.append(runner.limit.rows)
            runner.run(samples_of(dist.get_rank(), 4), step=step)
            model.zero_grad()
    assert rows[:5] == [4, 4, 4, 4, 2]
    assert counted.seen[ALL_REDUCE] == len(rows)
    assert events[0] == ("thrashing", (1,))


@on_ranks(2)
def test_fullest_rank_is_closest_to_its_budget() -> None:
    runner = runner_of(build(ModelConfig()), 4)
    runner.measure_memory([FakeMemory(peak_bytes=700), FakeMemory(budget_bytes=500, peak_bytes=400)][dist.get_rank()])
    assert runner.run(samples_of(dist.get_rank(), 4), step=0).memory == (400, 500)
