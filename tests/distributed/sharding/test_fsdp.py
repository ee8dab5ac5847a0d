"""FSDP2, hybrid sharding and replicas in loops with frozen layers, errors, and microbatches of their own."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.count_collectives import ALL_REDUCE, CountCollectives
from tests.distributed.models import ModelConfig, build, forward_backward_of, mesh_of, runner_of, samples_of
from tests.fault_injection import FaultInjector, wrapping_passes
from tests.ranks import on_ranks
from torchtune_adaptive.engine.fsdp import exchanges_activations
from torchtune_adaptive.engine.ranks import full_tensor
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import UnrecoverableError

SAMPLES = 8
WHOLE = ModelConfig(layers=1, dropout=0.0, sharded=False)
SHARDED = replace(WHOLE, sharded=True)
IN_NODES, REPLICATED = replace(SHARDED, replicas=2), replace(SHARDED, replicated=True)


def samples_here() -> list[Tensor]:
    return samples_of(dist.get_rank(), SAMPLES)


def whole_gradients(model: nn.Module) -> Tensor:
    """Collective."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([(full_tensor(each) if isinstance(each, DTensor) else each).flatten() for each in found])


@cache
def gradients_of_one_process() -> Tensor:
    """Compute the gradients of all ranks' samples in one process, averaged over ranks like FSDP."""
    return mean_over_ranks(build(WHOLE), [samples_of(rank, SAMPLES) for rank in range(dist.get_world_size())])


def mean_over_ranks(model: nn.Module, samples: Sequence[Sequence[Tensor]]) -> Tensor:
    for sample in itertools.chain(*samples):
        forward_backward_of(model)([sample])
    return whole_gradients(model) / len(samples)


@on_ranks(4)
def test_replicas_reduce_gradients_once_per_step() -> None:
    sums = []
    for rows in (SAMPLES, 1):
        runner = runner_of(build(IN_NODES), rows)
        runner.run(samples_here(), step=0)  # the first step also compares replicas
        runner.model.zero_grad()
        with CountCollectives() as counted:
            runner.run(samples_here(), step=1)
        sums.append(counted.seen[ALL_REDUCE])
    assert sums[0] == sums[1] > 1  # one of them is the agreement


def break_off(config: ModelConfig, microbatch: int) -> StepRunner[Tensor]:
    """Collective: return a runner after user code raised an error on all ranks in one of four microbatches."""
    runner, begun = runner_of(build(config), 2), itertools.count()

    def broken(inside: str):
        if next(begun) == microbatch:
            raise KeyError("not a number")
        return nullcontext()

    with wrapping_passes(runner, broken), pytest.raises(KeyError):
        runner.run(samples_here(), step=1)
    return runner


def backward_of_the_user(runner: StepRunner[Tensor]) -> None:
    forward_backward_of(runner.model)(samples_here())


def use_the_model_after_the_runner(runner: StepRunner[Tensor]) -> None:
    runner.close()
    backward_of_the_user(runner)


def use_the_model_during_the_runner(runner: StepRunner[Tensor]) -> None:
    runner.model.zero_grad()
    backward_of_the_user(runner)


def use_the_runner_after_that(runner: StepRunner[Tensor]) -> None:
    runner.run(samples_here(), step=2)


USES = (use_the_model_after_the_runner, use_the_model_during_the_runner, use_the_runner_after_that)


@pytest.mark.smoke("sharded in nodes")
@pytest.mark.parametrize("config", [IN_NODES, REPLICATED], ids=["sharded in nodes", "replicated"])
@on_ranks(4)
def test_aborted_step_does_not_change_the_next_gradients(config: ModelConfig) -> None:
    """Nor does a runner without an aborted step."""
    for next_use, microbatch in itertools.product(USES, (None, 0, 2, 3)):
        runner = runner_of(build(config), 4) if microbatch is None else break_off(config, microbatch)
        next_use(runner)
        difference = whole_gradients(runner.model) - gradients_of_one_process()
        assert difference.abs().max() < 1e-3, (next_use.__name__, microbatch)
        runner.close()


class SometimesTwoHeads(nn.Module):
    """A model whose second head is used only by long samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = build(WHOLE), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.body(tokens)
        return self.head(found) if tokens.shape[1] > 8 else found


@on_ranks(4)
def test_gradients_missing_from_the_last_microbatch_are_reduced_or_end_the_run() -> None:
    """torch 2.15 and later reduce them; earlier versions would silently lose them."""
    samples = [[torch.arange(1, 20) + rank, torch.arange(1, 6)] for rank in range(dist.get_world_size())]
    model, alone = SometimesTwoHeads(), SometimesTwoHeads()
    alone.load_state_dict(model.state_dict())
    for module in (model.body, model.head, model):
        fully_shard(module, mesh=mesh_of(2))
    message = ""
    try:
        runner_of(model, 1).run(samples[dist.get_rank()], step=1)
    except UnrecoverableError as error:
        message = str(error)
    if message:
        assert message.startswith("head: an earlier microbatch of this step produced gradients, but the last one")
    else:
        assert (whole_gradients(model) - mean_over_ranks(alone, samples)).abs().max() < 1e-3


@on_ranks(2)
def test_weights_loaded_after_sharding_are_still_those_of_fsdp() -> None:
    """transformers replaces the parameters of a sharded model by others when it loads weights."""
    model = build(SHARDED)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    assert not exchanges_activations(model)


@on_ranks(2)
def test_layers_may_be_unfrozen_between_steps() -> None:
    """The first layer is frozen in step 1 and trained in step 2, which fails once."""
    model = build(SHARDED)
    model.layers[0].requires_grad_(False)
    runner = runner_of(model, 4)
    runner.run(samples_here(), step=1)
    model.layers[0].requires_grad_(True)
    model.zero_grad()
    with FaultInjector(runner).fail_at(rank=1, step=2, operation=60):
        assert runner.run(samples_here(), step=2).recoveries == 1
    expected = gradients_of_one_process()
    assert (whole_gradients(model) - expected).abs().max() < 1e-5 * expected.abs().max()


@on_ranks(2)
def test_skipped_step_does_not_change_the_next_gradients() -> None:
    """In a loop that reduce-scatters gradients only in the last microbatch."""

    def accumulating(samples: Sequence[Tensor]) -> Totals:
        number = next(numbers)
        model.set_requires_gradient_sync(number % 4 == 3)
        if number == 5:
            raise ValueError("a loss that is no number")
        return forward_backward_of(model)(samples)

    model, numbers = build(SHARDED), itertools.count()
    runner, samples = runner_of(model, 2, accumulating), samples_here()
    runner.run(samples, step=1)
    expected = whole_gradients(model)
    model.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match="no number"):
        runner.run(samples, step=2)
    numbers = itertools.count()
    runner.run(samples, step=3)
    assert (whole_gradients(model) - expected).abs().max() < 1e-6 * expected.abs().max()
