"""Ranks that hold whole models: gradients are averaged once per step, in buckets."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.fault_injection import FaultInjector
from tests.ranks import on_ranks, run_on_ranks
from torchtune_adaptive.engine import buckets
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.ranks import message_counters
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner

SAMPLES = 6


def samples_of(rank: int) -> list[Tensor]:
    """Return samples of unequal lengths on rank 0 only."""
    lengths = range(2, 2 + SAMPLES) if rank == 0 else [4] * SAMPLES
    return [torch.arange(length) + rank for length in lengths]


def runner_of(model: nn.Module, loss_of: Callable[[Sequence[Tensor]], Tensor], rows: int = 4) -> StepRunner[Tensor]:
    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        return Totals(loss_of(samples).detach(), len(samples))

    kind = SampleKind(length_of=len, filler=lambda sample: sample[:2])
    return StepRunner(model, forward_backward, kind=kind, limit=RowLimit(rows))


class Layers(nn.Module):
    """Layers whose use depends on the way: "plain", "unused" on rank 1 (the others on rank 0), "shared" weights,
    "strides" that are not contiguous, "reentrant" checkpointing of a shared layer, "twice" (two backwards), or
    "changing" with the sample. Samples are not collated."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[2].requires_grad_(False)
        self.layers[3].weight.data = self.layers[3].weight.data.t()  # gradients get the strides of the parameters
        self.bf16_layer = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.never_used = nn.Linear(8, 8)
        if way == "shared":
            self.layers[4].weight = self.layers[1].weight
        if way == "strides":
            self.embedding.weight = nn.Parameter(torch.randn(16, 8, 2)[..., 0])  # not dense
            self.layers[4].weight = nn.Parameter(torch.randn(8, 32).t()[::4])

    def forward(self, sample: Tensor) -> Tensor:
        found = self.embedding(sample)
        for number, layer in enumerate(self.layers):
            if self.way == "unused" and number == 4 * dist.get_rank():
                continue
            if self.way == "changing" and number == len(sample) % 6:
                continue
            if self.way == "reentrant":
                found = checkpoint(lambda rows, layer=layer: self.layers[1](layer(rows)), found, use_reentrant=True)
            else:
                found = layer(found)
        return self.bf16_layer(found.bfloat16()).float().sin().sum()

    def backward(self, samples: Sequence[Tensor]) -> Tensor:
        losses = [self(sample) for sample in samples]
        for loss in losses if self.way == "twice" else [torch.stack(losses).sum()]:
            loss.backward()
        return torch.stack(losses).sum().detach()


def mean_of(parameter: Tensor) -> Tensor | None:
    """Collective: return the mean of a gradient over ranks; None if no rank has it."""
    gradient = torch.zeros(parameter.shape, dtype=parameter.dtype)
    gradient += 0 if parameter.grad is None else parameter.grad.to_dense()
    count = torch.tensor(parameter.grad is not None).int()
    for each in (gradient, count):
        dist.all_reduce(each)
    return gradient / dist.get_world_size() if count else None


class Compared(NamedTuple):
    recoveries: int
    errors: list[float]
    """The largest difference from the gradients of plain microbatches, averaged over ranks, by step."""
    alike: bool
    """True if the same gradients are None, and all others have the strides of their parameters."""
    reduced_early: bool
    """True if the last step has reduced a bucket before its backward has reached the embedding."""


WAYS_TO_RUN = ((6, False), (2, False), (3, True))
"""Rows of a microbatch, and whether each step fails once."""


def reduce_like_nccl() -> None:
    """From here on, in this process, refuse tensors that are not contiguous."""
    reduce = dist.all_reduce

    def like_nccl(tensor: Tensor, *args: object, **options: object) -> object:
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        return reduce(tensor, *args, **options)

    dist.all_reduce = like_nccl


def runs_of(way: str) -> list[Compared]:
    """Collective."""
    reduce_like_nccl()
    return [steps_of(way, rows, fails) for rows, fails in WAYS_TO_RUN]


def steps_of(way: str, rows: int, fails: bool) -> Compared:
    """Collective: compare 6 steps with plain microbatches. The bias of the first layer is frozen in the first 4."""
    buckets.FIRST_BYTES, buckets.MOST_BYTES = 300, 600
    model, plain = Layers(way), Layers(way)
    if way == "in DDP":  # train the wrapped module without DDP's hooks
        model = DistributedDataParallel(model).module
    messages = [counter for _, counter in message_counters()]
    seen: list[int] = []
    model.embedding.weight.register_hook(lambda _: seen.append(sum(counter() for counter in messages)))
    runner = runner_of(model, model.backward, rows)
    errors, alike, before = [], True, 0
    for step in range(6):
        for each in (model, plain):
            each.layers[0].bias.requires_grad_(step > 3)
            each.zero_grad()
        samples = [(sample + step) % 16 for sample in samples_of(dist.get_rank())]
        samples = samples[step:] + samples[:step]
        before = sum(counter() for counter in messages)
        with FaultInjector(runner) as faults:
            if fails:
                faults.fail_at(rank=1, step=step, operation=60 + 11 * step)
            runner.run(samples, step=step)
        used_rows = runner.limit.size
        for start in range(0, SAMPLES, used_rows):
            plain.backward(samples[start : start + used_rows])
        worst = 0.0
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mean = mean_of(theirs)
            alike &= (ours.grad is None) == (mean is None)
            if ours.grad is not None and mean is not None:
                alike &= ours.grad.stride() == torch.empty_like(ours).stride()
                scale = mean.abs().max().clamp(min=1e-9) * (2**16 if mean.dtype == torch.bfloat16 else 1)
                worst = max(worst, ((ours.grad.to_dense() - mean).abs().max() / scale).item())
        errors.append(worst)
    return Compared(runner.recoveries, errors, alike, seen[-1] > before)


WAYS = ("plain", "unused", "shared", "strides", "reentrant", "twice", "changing")


@pytest.mark.parametrize(("way", "ranks"), [*((way, 2) for way in WAYS), ("in DDP", 3)])
def test_gradients_are_means_of_plain_gradients_in_every_step(way: str, ranks: int) -> None:
    for runs in run_on_ranks(ranks, runs_of, way):
        for compared, (rows, fails) in zip(runs, WAYS_TO_RUN, strict=True):
            assert max(compared.errors) < 1e-6, (rows, fails, compared)
            assert compared.alike, (rows, fails, compared)
            assert bool(compared.recoveries) == fails
            if not fails:
                assert compared.reduced_early == (way not in ("reentrant", "twice")) or way == "changing", compared


@on_ranks(2)
def test_step_sends_one_message_more_than_distributed_data_parallel() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(150)))
    stock, rows = DistributedDataParallel(copy.deepcopy(model)), torch.randn(4, 128)
    [counter] = [counter for _, counter in message_counters()]

    def loss_of(samples: Sequence[Tensor]) -> Tensor:
        loss = model(torch.stack([*samples])).sum()
        loss.backward()
        return loss

    runner, counts = runner_of(model, loss_of), []
    for _ in range(3):
        before = counter()
        stock(rows).sum().backward()
        in_stock = counter() - before
    with FaultInjector(runner).fail_at(rank=1, step=3, operation=100):
        for step in range(4):
            before = counter()
            runner.run([*rows], step=step)
            model.zero_grad()
            counts.append(counter() - before)
    # the first step also compares the weights, and the last is repeated
    assert [sent - in_stock for sent in counts] == [3, 1, 1, 4]


@on_ranks(2)
def test_stage_without_backward_leaves_no_gradients() -> None:
    model = Layers()
    with torch.no_grad():
        runner_of(model, lambda samples: model(samples[0])).run(samples_of(dist.get_rank()), step=1)
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_communicating_microbatches_are_not_repeated() -> None:
    model = Layers()

    def loss_of(samples: Sequence[Tensor]) -> Tensor:
        loss = model.backward(samples)
        dist.all_reduce(model.embedding.weight.grad)
        return loss

    runner = runner_of(model, loss_of)
    runner.run(samples_of(dist.get_rank()), step=1)
    assert (runner.recovers, runner.recoveries) == (False, 0)
