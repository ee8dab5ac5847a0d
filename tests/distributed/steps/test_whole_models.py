"""Ranks that hold whole models: gradients are averaged once per step, after all ranks have succeeded."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.count_collectives import CountCollectives
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.ranks import LATE_S
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import SampleKind, StepRunner
from torchtune_adaptive.errors import UnrecoverableError
from torchtune_adaptive.testing import FaultInjector

KIND = SampleKind(length_of=len, filler=lambda sample: sample[:2])
SAMPLES = 6


class TwoHeads(nn.Module):
    """One head for samples of odd length, one for others: a rank may have a gradient that its peers lack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.odd, self.even = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, sample: Tensor) -> Tensor:
        head = self.odd if len(sample) % 2 else self.even
        return head(self.embedding(sample)).sum()


def samples_of(rank: int) -> list[Tensor]:
    """Return samples of odd length on rank 0 only, of even length on all ranks."""
    lengths = range(2, 2 + SAMPLES) if rank == 0 else [4] * SAMPLES
    return [torch.arange(length) + rank for length in lengths]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def expected_mean(scale: float = 1.0) -> Tensor:
    """Compute the gradients of all ranks' samples in one process, averaged over ranks like FSDP."""
    model = TwoHeads()
    for rank in range(dist.get_world_size()):
        for sample in samples_of(rank):
            (scale * model(sample) / dist.get_world_size()).backward()
    return flat(model)


def runner_of(
    model: nn.Module, *, scale: float = 1.0, after: Callable[[], object] = lambda: None
) -> StepRunner[Tensor]:
    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = torch.stack([model(sample) for sample in samples]).sum() * scale
        loss.backward()
        after()
        return Totals(loss.detach(), len(samples))

    return StepRunner(model, forward_backward, kind=KIND, limit=RowLimit(4))


def step_of_a_whole_model(in_ddp: bool, operation: int | None) -> tuple[int, float, int]:
    """Collective: return recoveries, gradient error and collectives of a first step, which also compares the weights.

    Samples are not collated, and the loss is divided by a number of the whole step.
    """
    model = TwoHeads()
    if in_ddp:  # train the wrapped module without DDP's hooks
        model = DistributedDataParallel(model).module
    number_of_the_step = 3.0
    runner = runner_of(model, scale=1 / number_of_the_step)
    with FaultInjector(runner) as faults, CountCollectives() as counted:
        if operation is not None:
            faults.fail_at(rank=1, step=1, operation=operation)
        runner.run(samples_of(dist.get_rank()), step=1)
    expected = expected_mean(1 / number_of_the_step)
    error = ((flat(model) - expected).abs().max() / expected.abs().max()).item()
    return runner.recoveries, error, counted.seen.total()


@pytest.mark.parametrize("in_ddp", [True, False])
def test_whole_models_recover_the_mean_gradient_of_all_ranks(in_ddp: bool) -> None:
    parameters = len(list(TwoHeads().parameters()))
    for recoveries, error, collectives in run_on_ranks(2, step_of_a_whole_model, in_ddp, None):
        assert (recoveries, collectives) == (0, 4 + parameters)
        assert error < 1e-6
    for recoveries, error, collectives in run_on_ranks(3, step_of_a_whole_model, in_ddp, 15):
        assert (recoveries, collectives) == (1, 5 + parameters)
        assert error < 1e-6


def ask_a_whole_model() -> bool:
    model = TwoHeads()

    def ask(samples: Sequence[Tensor]) -> Totals:
        with torch.no_grad():
            return Totals(torch.stack([model(sample) for sample in samples]).sum(), len(samples))

    StepRunner(model, ask, kind=KIND, limit=RowLimit(4)).run(samples_of(dist.get_rank()), step=1)
    return all(parameter.grad is None for parameter in model.parameters())


def test_stage_without_backward_leaves_no_gradients() -> None:
    assert run_on_ranks(2, ask_a_whole_model) == [True, True]


def communicate_in_microbatches() -> tuple[bool, int]:
    model = TwoHeads()
    runner = runner_of(model, after=lambda: dist.all_reduce(model.embedding.weight.grad))
    runner.run(samples_of(dist.get_rank()), step=1)
    return runner.recovers, runner.recoveries


def test_communicating_microbatches_are_not_repeated() -> None:
    assert run_on_ranks(2, communicate_in_microbatches) == [(False, 0)] * 2


def late_by(seconds: float, unlike: bool) -> str:
    """Collective: run two steps of whole models with different numbers of samples; one rank is late."""
    model = TwoHeads()
    if unlike:
        model.odd.weight.data += dist.get_rank()
    runner = runner_of(model)
    try:
        for step, count in enumerate((6, 4)):
            time.sleep(seconds * dist.get_rank())
            runner.run(samples_of(dist.get_rank())[:count], step=step)
            model.zero_grad()
    except UnrecoverableError as error:
        return str(error)
    return ""


def test_late_rank_is_not_mistaken_for_one_with_different_samples() -> None:
    assert run_on_ranks(2, late_by, LATE_S + 1, False) == ["", ""]


def test_whole_models_with_different_weights_are_refused_on_all_ranks() -> None:
    first, second = run_on_ranks(2, late_by, 0.0, True)
    assert first == second
    assert first.startswith("the weights on rank 1 differ from those on rank 0")


def error_with_unusual_strides(rank_with_a_fault: int) -> tuple[int, float]:
    """Collective: return recoveries and gradient error of a model whose parameters are not contiguous."""
    model, reduce = TwoHeads(), dist.all_reduce
    table = torch.randn(16, 8, 2)
    model.embedding.weight = nn.Parameter(table[..., 0])  # not dense
    model.odd.weight = nn.Parameter(torch.randn(8, 2).t()[:1])
    model.even.weight = nn.Parameter(torch.randn(8, 4).t()[::4])
    assert not any(module.weight.is_contiguous() for module in (model.embedding, model.odd, model.even))

    def like_nccl(tensor: Tensor, *args: object, **options: object) -> object:
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        return reduce(tensor, *args, **options)

    losses = [model(sample) for rank in range(dist.get_world_size()) for sample in samples_of(rank)]
    (sum(losses) / dist.get_world_size()).backward()
    expected = flat(model)
    model.zero_grad()
    dist.all_reduce = like_nccl
    runner = runner_of(model)
    with FaultInjector(runner).fail_at(rank=rank_with_a_fault, step=1, operation=15):
        runner.run(samples_of(dist.get_rank()), step=1)
    return runner.recoveries, (flat(model) - expected).abs().max().item()


def test_parameters_of_any_strides_are_trained() -> None:
    for recoveries, error in run_on_ranks(2, error_with_unusual_strides, 1):
        assert recoveries == 1
        assert error < 1e-4
