"""Other collectives in a microbatch disable recovery. The message names them, and no rank hangs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.captured_logs import captured_log
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
from tests.ranks import RankFailed, on_ranks, run_on_ranks
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner

SAMPLES = 4


def reduce_asynchronously(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()


def reduce_functionally(group: dist.ProcessGroup) -> None:
    functional.all_reduce(torch.ones(3), "sum", group).sum()


def redistribute(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None).redistribute(mesh, [Replicate()])


def to_the_neighbour(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, torch.ones(2), (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


FOREIGN: dict[str, tuple[Callable[[dist.ProcessGroup], Any], str]] = {
    "all_reduce": (lambda group: dist.all_reduce(torch.ones(3), group=group), "c10d::allreduce_"),
    "asynchronous": (reduce_asynchronously, "c10d::allreduce_"),
    "functional": (reduce_functionally, "_c10d_functional::all_reduce"),
    "objects": (lambda group: dist.broadcast_object_list([1], group=group), "c10d::broadcast_"),
    "barrier": (lambda group: dist.barrier(group=group), "c10d::barrier"),
    "dtensor": (redistribute, "_c10d_functional::all_gather_into_tensor"),
    "neighbours": (to_the_neighbour, "c10d::send"),
}
"""Collectives in the forward pass of a model, and torch's names for them."""


class InBackward(torch.autograd.Function):
    """Sums part of its gradient over the ranks, like synchronized norms."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.sum()
        dist.all_reduce(total)
        return gradient + 0 * total


def runner_with(foreign: Callable[[], object]) -> StepRunner[Tensor]:
    """Collective: return a runner whose model calls `foreign` before its layer."""
    model = build(ModelConfig(layers=1, dropout=0.0))

    def before(module: nn.Module, inputs: object) -> None:
        foreign()

    model.layers[-1].register_forward_pre_hook(before)
    return runner_of(model, 2)


def step_of(runner: StepRunner[Tensor], step: int, samples: int = SAMPLES) -> None:
    """Collective: run one step."""
    runner.model.zero_grad(set_to_none=True)
    runner.run(samples_of(dist.get_rank(), samples), step=step)


@contextmanager
def hearing_warnings() -> Iterator[list[str]]:
    with captured_log() as lines:
        captured: list[str] = []
        yield captured
        captured += [line for line in lines if "recovery" in line]


@pytest.mark.parametrize("samples", [1, SAMPLES], ids=["one microbatch a step", "two microbatches a step"])
@on_ranks(2, timeout_s=100)
def test_foreign_collective_disables_recovery_and_training_continues(samples: int) -> None:
    # The same ranks but a new communicator: its collectives cannot be confused with others.
    group = dist.new_group()
    for kind, (foreign, name) in FOREIGN.items():
        runner = runner_with(partial(foreign, group))
        with hearing_warnings() as captured:
            for step in range(3):
                step_of(runner, step, samples)
        got = gradients_of(runner.model)
        runner.model.zero_grad(set_to_none=True)
        for start in range(0, samples, 2):
            forward_backward_of(runner.model)(samples_of(dist.get_rank(), samples)[start : start + 2])
        assert not runner.recovers, kind
        assert gradients_equal(got, gradients_of(runner.model)), "those of plain FSDP"
        assert len(captured) == (dist.get_rank() == 0), kind
        for line in captured:
            assert name in line, kind
            assert "test_foreign_collectives.py:" in line or kind == "dtensor", kind
        runner.close()


def run_out_later(kind: str, step: int, operation: int, first_step: int) -> None:
    """Run out of memory on rank 1 in this step; the model communicates from `first_step` on."""
    if kind == "backward":
        model = build(ModelConfig(layers=1, dropout=0.0))
        model.layers[0].register_forward_hook(lambda module, inputs, output: InBackward.apply(output))
        runner = runner_of(model, 2)
    else:
        group = dist.new_group()
        foreign = FOREIGN[kind][0]
        runner = runner_with(lambda: runner.current_step < first_step or foreign(group))
    with FaultInjector(runner).fail_at(rank=1, step=step, operation=operation):
        for each in range(step + 1):
            step_of(runner, each)


@pytest.mark.parametrize(
    ("kind", "step", "operation", "first_step"),
    [
        *(pytest.param(kind, 2, 100, 0, id=f"{kind}, later") for kind in ("functional", "neighbours", "backward")),
        pytest.param("all_reduce", 0, 10, 0, id="before the collective"),
        pytest.param("all_reduce", 0, 300, 0, id="after the collective"),
        pytest.param("all_reduce", 0, 700, 0, id="in the second microbatch"),
        pytest.param("backward", 0, 300, 0, id="in a backward"),
        pytest.param("all_reduce", 3, 300, 3, id="in the first step with the collective"),
        pytest.param("all_reduce", 4, 300, 3, id="after that step"),
    ],
)
def test_out_of_memory_error_with_foreign_collectives_ends_all_ranks(
    kind: str, step: int, operation: int, first_step: int
) -> None:
    """Without counting, the failed rank would drain only FSDP's collectives while its peers wait for the others."""
    with pytest.raises(RankFailed, match="RecoveryUnsupportedError: out of memory on rank 1"):
        run_on_ranks(2, run_out_later, kind, step, operation, first_step, timeout_s=15)


@on_ranks(3)
def test_all_ranks_disable_recovery_if_some_communicate() -> None:
    group = dist.new_group([0, 1])
    runner = runner_with(lambda: dist.get_rank() == 2 or dist.all_reduce(torch.ones(1), group=group))
    with hearing_warnings() as captured:
        for step in range(2):
            step_of(runner, step)
    assert (runner.recovers, len(captured)) == (False, int(dist.get_rank() == 0))


@pytest.mark.parametrize("only_on_rank_1", [False, True])
@on_ranks(2)
def test_different_collectives_disable_recovery_and_the_limit_stays(only_on_rank_1: bool) -> None:
    model = build(ModelConfig(layers=1, dropout=0.0))
    runner, limits = runner_of(model, 4, recovery=Recovery(model, regrow_after=1)), []
    with hearing_warnings() as captured, FaultInjector(runner).fail_at(rank=1, step=0, operation=100):
        for step in range(4):
            step_of(runner, step)
            limits.append(runner.limit.rows)
            if not only_on_rank_1:
                model.set_reshard_after_forward(False)
            elif dist.get_rank() == 1:
                runner.recovery.ledger.obstacles.differs = "of this rank"
    assert (runner.recovers, runner.recoveries, limits) == (False, 1, limits[:1] * 4)
    reason = "on rank 1" if only_on_rank_1 else "others than in the first one"
    first = f"step 1: microbatches issue different collectives ({reason}): training continues without recovery"
    assert [line.startswith(first) for line in captured] == [True] * (dist.get_rank() == 0)


@on_ranks(2)
def test_communication_outside_microbatches_keeps_recovery_on() -> None:
    """An evaluation and clipping."""
    model, in_mode = build(ModelConfig(layers=1, dropout=0.0)), []

    def watched(samples: Sequence[Tensor]) -> Totals:
        in_mode.append(is_in_torch_dispatch_mode())
        return forward_backward_of(model)(samples)

    runner = runner_of(model, 2, watched)
    with FaultInjector(runner).fail_at(rank=1, step=3, operation=100):
        for step in range(3):
            step_of(runner, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                model(torch.ones(1, 4, dtype=torch.int64))
            dist.all_reduce(torch.ones(1))
        step_of(runner, 3)
    assert (runner.recovers, runner.recoveries) == (True, 1)
    assert in_mode[:6] == [False] * 6


@on_ranks(2)
def test_only_the_communicating_stage_loses_recovery() -> None:
    model = build(ModelConfig(layers=1, dropout=0.0))
    train = forward_backward_of(model)

    def speak(samples: Sequence[Tensor]) -> Totals:
        dist.all_reduce(torch.ones(1))
        return train(samples)

    recovery = Recovery(model)
    first, second = runner_of(model, 2, train, recovery, "score"), runner_of(model, 2, speak, recovery, "train")
    with hearing_warnings() as captured, FaultInjector(first).fail_at(rank=1, step=2, operation=100):
        for step in range(3):
            step_of(first, step)
            step_of(second, step)
    assert first.recoveries == 1
    assert (first.recovers, second.recovers) == (True, False)
    assert [line.partition(": ")[0] for line in captured] == ["step 0, train"] * (dist.get_rank() == 0)
