"""Unrecoverable errors end every rank promptly and with a reason."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.faults.meshes import MeshCase, parts_of, tensor_parallel
from tests.distributed.models import ModelConfig, build, forward_backward_of, runner_of, samples_of
from tests.fault_injection import FaultInjector
from tests.ranks import PATIENCE, RankFailed, run_on_ranks
from torchtune_adaptive.engine.fsdp import why_recovery_is_off
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.errors import (
    AdaptiveError,
    LimitExhaustedError,
    RecoveryUnsupportedError,
    UnrecoverableError,
)


def run_where_one_row_does_not_fit() -> tuple[str, str]:
    runner = runner_of(build(ModelConfig()), 2)
    samples = [torch.ones(7, dtype=torch.int64)] * 2
    runner.run(samples, step=0)
    runner.model.zero_grad()
    with FaultInjector(runner).fail_at(rank=1, step=5, times=3):
        try:
            runner.run(samples, step=5)
        except AdaptiveError as error:
            return type(error).__name__, str(error)


@pytest.mark.smoke
def test_all_ranks_raise_same_error_if_one_row_does_not_fit():
    first, second = run_on_ranks(2, run_where_one_row_does_not_fit)
    assert first == second
    kind, message = first
    assert kind == LimitExhaustedError.__name__
    assert message.startswith("step 5: out of memory on rank 1 (longest sample 7 tokens): a microbatch of 1 row of 7 ")


def run_without_memory_to_drain() -> None:
    runner = runner_of(build(ModelConfig()), 2)
    with FaultInjector(runner).fail_at(rank=1, step=0, operation=300).fail_in_drain(rank=1, step=0, times=1000):
        runner.run(samples_of(dist.get_rank(), 2), step=0)


def test_rank_without_memory_to_drain_ends_the_run():
    started = time.monotonic()
    text = "UnrecoverableError: rank 1 ran out of memory although .* waiting for; train on more ranks "
    with pytest.raises(RankFailed, match=text):
        run_on_ranks(2, run_without_memory_to_drain)
    assert time.monotonic() - started < 30 * PATIENCE  # half the timeout for a silent rank


def issue_one_collective_too_many() -> str:
    runner, ledger = None, None

    def miscounting(samples):
        ledger.position += dist.get_rank()
        return train(samples)

    train = forward_backward_of(model := build(ModelConfig()))
    runner = runner_of(model, 2, miscounting)
    ledger = runner.recovery.ledger
    with pytest.raises(UnrecoverableError) as raised:
        runner.run(samples_of(dist.get_rank(), 2), step=0)
    return str(raised.value)


def test_ranks_at_different_collectives_end_together():
    first, second = run_on_ranks(2, issue_one_collective_too_many)
    assert first == second
    assert "different numbers of collectives" in first


def skip_a_step_alone() -> str:
    def reading(samples):
        if runner.current_step == 2 and dist.get_rank() == 1:
            raise KeyError("a bad sample")
        return train(samples)

    train = forward_backward_of(model := build(ModelConfig()))
    runner = runner_of(model, 2, reading)
    for step in 1, 2, 3:
        try:
            runner.run(samples_of(dist.get_rank(), 2), step=step)
        except KeyError:
            continue
        except UnrecoverableError as error:
            return str(error)
        model.zero_grad()
    return "no error"


def test_ranks_in_different_steps_end_together():
    first, second = run_on_ranks(2, skip_a_step_alone)
    assert first == second
    assert first.startswith("the ranks are in different steps ([2, 3], by rank), so gradients of different steps")


def run_tensor_parallel_ranks_that_differ(samples: tuple[int, int], limits: tuple[int, int]) -> str:
    rank = dist.get_rank()
    [model], train = parts_of(MeshCase("tensor parallel", tensor_parallel))
    with pytest.raises(UnrecoverableError) as raised:
        runner_of(model, limits[rank], train).run([torch.ones(8, dtype=torch.int64)] * samples[rank], step=1)
    return str(raised.value)


@pytest.mark.parametrize(
    ("samples", "limits", "steps"),
    [
        ((8, 7), (8, 8), "8 samples in 1 microbatch, 7 samples in 1 microbatch"),
        ((8, 8), (8, 4), "8 samples in 1 microbatch, 8 samples in 2 microbatches"),
    ],
)
def test_tensor_parallel_ranks_with_other_numbers_end_together(
    samples: tuple[int, int], limits: tuple[int, int], steps: str
) -> None:
    """This is checked before the first collective, because collectives of different sizes crash gloo."""
    first, second = run_on_ranks(2, run_tensor_parallel_ranks_that_differ, samples, limits)
    assert first == second
    assert f"({steps}, by rank)" in first


def return_other_sums_on_rank_1(names: str) -> str:
    def with_sums(samples):
        return train(samples)._replace(sums=dict.fromkeys("a" if dist.get_rank() == 0 else names, torch.ones(())))

    train = forward_backward_of(model := build(ModelConfig()))
    with pytest.raises(UnrecoverableError) as raised:
        runner_of(model, 2, with_sums).run(samples_of(dist.get_rank(), 2), step=1)
    return str(raised.value)


@pytest.mark.parametrize("names", ["b", "ab"])
def test_ranks_that_return_different_sums_end_together(names: str) -> None:
    first, second = run_on_ranks(2, return_other_sums_on_rank_1, names)
    assert first == second
    assert "Totals.sums has other names on some ranks" in first


def shard_what_a_runner_has() -> None:
    runner = runner_of(build(ModelConfig(sharded=False)), 2)
    fully_shard(runner.model)
    with pytest.raises(ValueError, match="was sharded after its StepRunner was created: shard it first"):
        runner.run(samples_of(dist.get_rank(), 2), step=0)


def test_model_sharded_after_its_runner_is_refused():
    run_on_ranks(2, shard_what_a_runner_has)


def lose_a_peer(kind: str) -> str:
    if kind == "FSDP":
        model = build(ModelConfig())
        runner = runner_of(model, 2)
    else:
        [model], train = parts_of(MeshCase("tensor parallel", tensor_parallel))
        runner = runner_of(model, 2, train)
    samples = samples_of(0, 2)
    runner.run(samples, step=0)
    runner.model.zero_grad()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(UnrecoverableError) as raised:
        runner.run(samples, step=1)
    dist.destroy_process_group()
    return str(raised.value)


@pytest.mark.parametrize(("kind", "what"), [("FSDP", "an FSDP collective"), ("TP", "a collective of the model")])
def test_error_inside_a_collective_is_fatal_with_a_clear_message(kind: str, what: str) -> None:
    message, _ = run_on_ranks(2, lose_a_peer, kind)
    assert f"({what} failed on rank 0: " in message
    assert message.endswith("restart, from the last checkpoint if there is one")


def change_what_a_microbatch_communicates() -> None:
    model = build(ModelConfig())
    runner = runner_of(model, 2)
    samples = samples_of(dist.get_rank(), 2)
    runner.run(samples, step=0)
    model.zero_grad()
    model.set_reshard_after_forward(False)
    runner.run(samples, step=1)
    model.zero_grad()
    with FaultInjector(runner).fail_at(rank=1, step=2):
        runner.run(samples, step=2)


def test_changed_order_of_collectives_is_not_drained():
    with pytest.raises(
        RankFailed, match="RecoveryUnsupportedError: out of memory, and microbatches issue different collectives"
    ):
        run_on_ranks(2, change_what_a_microbatch_communicates)


def reasons() -> dict[str, str | None]:
    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4))

    flat = init_device_mesh("cpu", (2,))
    two_dimensional = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    hooked = fully_shard(linear(), mesh=flat)
    hooked[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    reduced = fully_shard(linear(), mesh=flat)
    reduced.set_all_reduce_hook(lambda gradient: None)
    symmetric = fully_shard(linear(), mesh=flat)
    symmetric.set_symm_mem_for_comm()
    inner_only = linear()
    fully_shard(inner_only[0], mesh=flat)
    with pytest.raises(RecoveryUnsupportedError, match=r"a step of this model .*; pass Recovery"):
        Recovery(inner_only)
    return {
        "sharded": why_recovery_is_off(fully_shard(linear(), mesh=flat)),
        "hybrid": why_recovery_is_off(fully_shard(linear(), mesh=two_dimensional)),
        "replicated": why_recovery_is_off(replicate(linear())),
        "some ranks": why_recovery_is_off(fully_shard(linear(), mesh=two_dimensional["a"])),
        "tensor parallel inside": why_recovery_is_off(
            fully_shard(distribute_module(linear(), two_dimensional["b"]), mesh=two_dimensional["a"])
        ),
        "tensor parallel on some ranks": why_recovery_is_off(distribute_module(linear(), two_dimensional["a"])),
        "whole": why_recovery_is_off(linear()),
        "hooks of DDP": why_recovery_is_off(DistributedDataParallel(linear())),
        "root not sharded": why_recovery_is_off(inner_only),
        "tensor parallel": why_recovery_is_off(distribute_module(linear(), flat)),
        "optimizer in backward": why_recovery_is_off(hooked),
        "all-reduce hook": why_recovery_is_off(reduced),
        "symmetric memory": why_recovery_is_off(symmetric),
    }


def test_unsupported_models_are_refused_with_a_reason():
    for found in run_on_ranks(2, reasons):
        supported = ("sharded", "hybrid", "replicated", "whole", "tensor parallel", "tensor parallel inside")
        assert [found.pop(name) for name in supported] == [None] * len(supported)
        assert "some of the ranks" in found["some ranks"]
        assert "some of the ranks" in found["tensor parallel on some ranks"]
        assert "an optimizer in the backward" in found["optimizer in backward"]
        assert "all-reduce hook" in found["all-reduce hook"]
        assert "set_symm_mem_for_comm" in found["symmetric memory"]
        assert "pass its `module` instead" in found["hooks of DDP"]
        assert all(found.values())
