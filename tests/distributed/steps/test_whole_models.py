"""Ranks that hold whole models: gradients are averaged once per step, in buckets."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.count_collectives import CountCollectives
from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine import buckets
from torchtune_adaptive.engine.consistency import LATE_S
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.ranks import message_counters
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import UnrecoverableError

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
    for recoveries, error, collectives in run_on_ranks(2, step_of_a_whole_model, in_ddp, None):
        assert (recoveries, collectives) == (0, 5)
        assert error < 1e-6
    for recoveries, error, collectives in run_on_ranks(3, step_of_a_whole_model, in_ddp, 15):
        assert (recoveries, collectives) == (1, 6)
        assert error < 1e-6


class Layers(nn.Module):
    """Layers whose use depends on the way: "plain", "unused" on rank 1 (the others on rank 0), "shared" weights,
    "reentrant" checkpointing of a shared layer, "twice" (two backwards), or "changing" with the sample."""

    def __init__(self, way: str) -> None:
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
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
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


def runs_of(way: str) -> list[Compared]:
    """Collective."""
    return [steps_of(way, rows, fails) for rows, fails in WAYS_TO_RUN]


def steps_of(way: str, rows: int, fails: bool) -> Compared:
    """Collective: compare 6 steps with plain microbatches. The bias of the first layer is frozen in the first 4."""
    buckets.FIRST_BYTES, buckets.MOST_BYTES = 300, 600
    model, plain = Layers(way), Layers(way)
    messages = [counter for _, counter in message_counters()]
    seen: list[int] = []
    model.embedding.weight.register_hook(lambda _: seen.append(sum(counter() for counter in messages)))

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        return Totals(model.backward(samples), 1)

    runner = StepRunner(model, forward_backward, kind=KIND, limit=RowLimit(rows))
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
                alike &= ours.grad.stride() == ours.stride()
                scale = mean.abs().max().clamp(min=1e-9) * (2**16 if mean.dtype == torch.bfloat16 else 1)
                worst = max(worst, ((ours.grad.to_dense() - mean).abs().max() / scale).item())
        errors.append(worst)
    return Compared(runner.recoveries, errors, alike, seen[-1] > before)


@pytest.mark.parametrize("way", ["plain", "unused", "shared", "reentrant", "twice", "changing"])
def test_gradients_are_means_of_plain_gradients_in_every_step(way: str) -> None:
    for runs in run_on_ranks(2, runs_of, way):
        for compared, (rows, fails) in zip(runs, WAYS_TO_RUN, strict=True):
            assert max(compared.errors) < 1e-6, (rows, fails, compared)
            assert compared.alike, (rows, fails, compared)
            assert bool(compared.recoveries) == fails
            if not fails:
                assert compared.reduced_early == (way not in ("reentrant", "twice")) or way == "changing", compared


def messages_of_a_step() -> tuple[int, int, list[int]]:
    """Collective: return the messages of a step under DistributedDataParallel, and of steps of a StepRunner."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(150)))
    stock, rows = DistributedDataParallel(copy.deepcopy(model)), torch.randn(4, 128)
    [counter] = [counter for _, counter in message_counters()]

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = model(torch.stack([*samples])).sum()
        loss.backward()
        return Totals(loss.detach(), 1)

    runner, counts = StepRunner(model, forward_backward, kind=KIND, limit=RowLimit(4)), []
    for _ in range(3):
        before = counter()
        stock(rows).sum().backward()
        in_stock = counter() - before
    for step in range(3):
        before = counter()
        runner.run([*rows], step=step)
        model.zero_grad()
        counts.append(counter() - before)
    return len([*model.parameters()]), in_stock, counts


def test_step_sends_one_message_more_than_distributed_data_parallel() -> None:
    for parameters, stock, steps in run_on_ranks(2, messages_of_a_step):
        assert parameters == 300
        assert steps[1:] == [stock + 1, stock + 1]


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
