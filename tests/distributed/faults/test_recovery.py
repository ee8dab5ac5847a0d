"""What a recovery leaves behind: memory, gradients, parameters and a log line. test_sweeps.py compares the steps."""

import gc
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.faults.bench import Bench
from tests.distributed.faults.scenarios import SCENARIOS
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
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.collectives import CollectiveLedger
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals


def recover_after_evaluation() -> tuple[int, bool]:
    model = build(ModelConfig(dropout=0.0, reshard_after_forward=False))  # so evaluation leaves it unsharded
    samples = samples_of(dist.get_rank(), 2)
    forward_backward_of(model)(samples[:1])
    forward_backward_of(model)(samples[1:])
    expected = gradients_of(model)
    model.zero_grad()
    runner = runner_of(model, 2)
    runner.run(samples, step=0)
    model.zero_grad()
    with torch.no_grad():
        model(samples[0][None])
    with FaultInjector(runner).fail_at(rank=1, step=1, operation=200):
        runner.run(samples, step=1)
    return runner.recoveries, gradients_equal(gradients_of(model), expected)


def test_evaluation_before_the_step_does_not_confuse_recovery():
    assert run_on_ranks(2, recover_after_evaluation) == [(1, True)] * 2


def gradient_after_a_discarded_pass_without_reduction() -> bool:
    model = build(ModelConfig(dropout=0.0, bf16=True))
    forward_backward, samples = forward_backward_of(model), samples_of(dist.get_rank(), 1)
    forward_backward(samples)
    expected = gradients_of(model)
    model.zero_grad()
    model.set_requires_gradient_sync(False)  # gradients stay with FSDP, unsharded and upcast
    forward_backward(samples)
    CollectiveLedger(model).reset()
    model.set_requires_gradient_sync(True)
    forward_backward(samples)
    return gradients_equal(gradients_of(model), expected)


def test_reset_drops_unreduced_gradients():
    assert run_on_ranks(2, gradient_after_a_discarded_pass_without_reduction) == [True, True]


# In the first all-gather, which may leave parameters half unsharded; then through forward and backward.
FAILURES = (*range(20, 60, 4), 200, 400, 600)


def memory_left_over_by_failures() -> list[int]:
    """Return for each repeated step by how much its initial memory exceeds that of the failed attempt, on this rank."""
    model = build(ModelConfig(dropout=0.0))
    samples, live, left_over = samples_of(dist.get_rank(), 2), [], []
    forward_backward = forward_backward_of(model)

    def observed(samples):
        live.append(meter.live_bytes)
        return forward_backward(samples)

    meter = MemoryMeter()
    runner = runner_of(model, 2, observed)
    runner.run(samples, step=0)  # permanent allocations such as positional embeddings happen here
    model.zero_grad()
    gc.freeze()  # releasing memory collects garbage, and torch has many objects
    fresh = runner.state_dict()
    with meter, FaultInjector(runner) as faults:
        for step, operation in enumerate(FAILURES, 1):
            runner.load_state_dict(fresh)
            live.clear()
            faults.fail_at(rank=1, step=step, operation=operation)
            runner.run(samples, step=step)
            model.zero_grad()
            left_over.append(live[1] - live[0])
    return left_over


def test_repeated_step_starts_with_the_memory_of_the_failed_one():
    healthy, failing = run_on_ranks(2, memory_left_over_by_failures)
    assert failing == healthy == [0] * len(FAILURES)


def operations_that_copy() -> tuple[int, int]:
    plain, offloaded = (Bench(SCENARIOS[name]) for name in ("plain", "offloaded"))
    return tuple(sum(name.startswith("aten.clone") for name in bench.operations()) for bench in (plain, offloaded))


def test_offloaded_tensors_are_copied_to_the_device_and_back():
    for plain, offloaded in run_on_ranks(2, operations_that_copy):
        assert offloaded >= plain + 100  # every parameter in forward and backward, and every gradient


def is_gathered(model: nn.Module) -> bool:
    return fsdp.awaits_backward(model) or not all(group.is_sharded for group in fsdp.groups_of(model))


def left_gathered(recover: bool) -> tuple[bool, bool]:
    """Collective: do parameters stay gathered after a plain forward, and after a stage without a backward?"""
    model, tokens = build(ModelConfig(dropout=0.0)), torch.arange(6)

    def ask(samples: Sequence[torch.Tensor]) -> Totals:
        with torch.no_grad():
            return Totals(model(torch.stack([*samples])).sum(), len(samples))

    ask([tokens])
    plain = is_gathered(model)
    runner_of(model, 2, ask, Recovery(model, enabled=recover)).run([tokens, tokens], step=0)
    return plain, is_gathered(model)


@pytest.mark.parametrize("recover", [True, False])
def test_stage_without_backward_leaves_no_parameters_gathered(recover: bool):
    """Writing into gathered parameters, as a search does at its end, would be lost."""
    assert run_on_ranks(2, left_gathered, recover, timeout_s=30) == [(True, False)] * 2
