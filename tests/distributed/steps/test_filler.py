"""A rank that fails in the first microbatch of a run computes with copies of its own shard. No model must fail then."""

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner

DIM, TOKENS, LAYERS, SAMPLES = 8, 6, 4, 4
OPERATIONS = range(25, 200, 25)


class Drawing(nn.Linear):
    """Keeps the features that it draws."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.multinomial(torch.softmax(super().forward(x), -1), DIM // 2, replacement=True)
        return super().forward(x) * torch.zeros_like(x).scatter(1, drawn, 1.0)


class LookingUp(nn.Linear):
    """Adds a row of a table, chosen by a score and by the distance between two vectors of length 1."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.table = nn.Parameter(torch.randn(16, DIM))
        self.temperature = nn.Parameter(torch.ones(1))  # one of the ranks has no element of it

    def forward(self, x: Tensor) -> Tensor:
        score = torch.sigmoid(nn.functional.normalize(super().forward(x), eps=0.0).sum(-1) / self.temperature)
        return super().forward(x) + self.table[(score * 15.9).long()] * self.temperature


class Checked(nn.Linear):
    """Refuses infinite results."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if not result.isfinite().all():
            raise FloatingPointError("a layer returned NaN")
        return result


class Experts(nn.Module):
    """Two experts, each of which gets the samples that a router chooses. Recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._route, x, use_reentrant=False) if x.requires_grad else self._route(x)

    def _route(self, x: Tensor) -> Tensor:
        chosen, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            result = result.index_add(0, rows, torch.tanh(expert(x[rows])))
        return x + result


LAYERS_OF: dict[str, Callable[[], nn.Module]] = {
    "multinomial": lambda: Drawing(DIM, DIM),
    "lookup": LookingUp,
    "finite": lambda: Checked(DIM, DIM),
    "experts": Experts,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(DIM, DIM), *(LAYERS_OF[kind]() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def runner_of(model: nn.Module, rows: int) -> StepRunner[Tensor]:
    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = model(torch.cat([*samples])).square().sum()
        loss.backward()
        return Totals(loss.detach(), len(samples))

    kind = SampleKind[Tensor](length_of=lambda _: 1, filler=lambda sample: sample)
    return StepRunner(model, forward_backward, kind=kind, limit=RowLimit(rows))


def errors_in_the_first_microbatch(kind: str) -> tuple[int, int]:
    """Collective: return how many errors were injected on rank 1, and how many steps had the expected gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    model = build(kind)
    samples = [*torch.randn(SAMPLES, TOKENS, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))]

    def gradients(runner: StepRunner[Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        runner.run(samples, step=1)
        found = [each.grad.to_local() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        runner.close()
        return found

    expected, injected, right = gradients(runner_of(model, SAMPLES // 2)), 0, 0
    gc.freeze()  # releasing memory collects garbage, and torch has many objects
    for operation in OPERATIONS:
        runner = runner_of(model, SAMPLES)  # without a record
        with FaultInjector(runner).fail_at(rank=1, step=1, operation=operation) as faults:
            found = gradients(runner)
        injected += faults.fired
        right += runner.limit.rows == SAMPLES // 2 and all(map(torch.equal, found, expected))
    return injected, right


@pytest.mark.parametrize("kind", LAYERS_OF)
def test_first_microbatch_of_a_model_whose_values_matter_is_recovered(kind: str):
    outcomes = run_on_ranks(2, errors_in_the_first_microbatch, kind)
    assert outcomes == [(0, len(OPERATIONS)), (len(OPERATIONS), len(OPERATIONS))]
