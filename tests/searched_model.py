"""A small model with a training step to search, and brute force to compare with."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.plans import Load, SampleKind
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size
from torchtune_adaptive.engine.ranks import world_size
from torchtune_adaptive.engine.results import StepResult, Totals
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.engine.step import StepRunner


@dataclass(frozen=True)
class Shape:
    """The sizes that decide which phase of a step needs the most memory."""

    vocabulary: int = 32
    dim: int = 16
    hidden: int = 64
    layers: int = 2
    length: int = 16
    checkpointing: bool = False
    foreach: bool = True

    @classmethod
    def drawn(cls, seed: int) -> "Shape":
        draw = random.Random(seed)
        return cls(
            vocabulary=draw.choice([16, 128, 1024]),
            dim=draw.choice([16, 31, 48]),
            hidden=draw.choice([32, 257]),
            layers=draw.choice([1, 2, 4]),
            length=draw.choice([8, 33]),
            checkpointing=draw.random() < 0.5,
            foreach=draw.random() < 0.5,
        )


HEAD_DOMINATED = Shape(vocabulary=4096, dim=32, hidden=512, layers=4, length=8, foreach=False)
"""At one and two rows, the layers or the update need the most memory; at more rows, logits and loss."""


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.dim)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(1)  # in place
        self.mean = x.detach().mean()  # or assign another tensor
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary)
        self.checkpointing = shape.checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(self.norm(x))


def build(shape: Shape, seed: int = 0) -> nn.Module:
    """Collective: return the model, sharded if a process group exists."""
    torch.manual_seed(seed)
    model = Model(shape)
    if dist.is_initialized():
        for module in (*model.layers, model):
            fully_shard(module)
        # Fill the model like torchtune: uneven shards move to padded storage when FSDP first runs.
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    return model


@dataclass
class Trained:
    """A model with its optimizer, and methods to train it."""

    shape: Shape
    optimizer_kind: Any = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    limit: int = 1

    def __post_init__(self) -> None:
        self.model = build(self.shape)
        self.optimizer = self.optimizer_kind(
            self.model.parameters(), **{"lr": 0.01, "foreach": self.shape.foreach, **self.options}
        )
        self.sample = torch.arange(self.shape.length) % self.shape.vocabulary
        self.loss = nn.CrossEntropyLoss(reduction="sum")
        self.runner = StepRunner(
            self.model,
            self.forward_backward,
            limit=RowLimit(self.limit),
            kind=SampleKind(length_of=len, filler=lambda tokens: tokens[:2]),
        )

    def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
        tokens = torch.stack(list(samples))
        loss = self.loss(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return Totals(loss.detach(), tokens.numel())

    def update(self, result: StepResult) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(world_size() / result.target_tokens)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def step(self) -> TrainingStep[Tensor]:
        boundaries = {"layers": self.model.norm, "head": self.model.head, "loss": self.loss}
        return TrainingStep(
            runner=self.runner,
            sample=self.sample,
            update=self.update,
            optimizers=[self.optimizer],
            boundaries=boundaries,
        )

    def train(self, microbatches: Sequence[int]) -> float:
        """Collective: take one plain PyTorch step with these numbers of rows per microbatch; return its loss."""
        losses = [self.forward_backward([self.sample] * rows).loss_sum.item() for rows in microbatches]
        tokens = sum(microbatches) * self.shape.length
        load = Load(tokens, tokens, max(microbatches), max(microbatches) * self.shape.length, cost=tokens)
        result = StepResult(
            loss_sum=torch.tensor(0.0), target_tokens=tokens, microbatches=len(microbatches), recoveries=0, load=load
        )
        self.update(result)
        self.optimizer.zero_grad(set_to_none=True)
        return sum(losses)


def measured_peaks(
    trained: Trained, meter: MemoryMeter, sizes: Iterable[int], *, whole_step_rows: float = math.inf
) -> list[list[int]]:
    """Collective: return the peak memory of a training step for each rank and number of rows. A step has two
    microbatches, or one if the rows are a whole step.
    """
    trained.train([1])
    peaks = []
    for rows in sizes:
        meter.reset_peak()
        trained.train([rows] if rows >= whole_step_rows else [rows, rows])
        peaks.append(meter.peak_bytes)
    if not dist.is_initialized():
        return [peaks]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, peaks)
    return gathered


def search_within(step: Any, meter: MemoryMeter, cap_bytes: int, **options: Any) -> SearchResult:
    meter.cap_bytes = cap_bytes
    try:
        return find_max_batch_size(step, memory=meter, **{"round_to": "none", **options})
    finally:
        meter.cap_bytes = None


def between(peaks: Sequence[int], rows: int) -> int:
    """Return a budget that allows this many rows and not one more."""
    return (peaks[rows - 1] + peaks[rows]) // 2


def brute_force(peaks: Sequence[Sequence[int]], budgets: Sequence[int]) -> int:
    """Return the largest number of rows that fits on every rank."""
    fitting = [all(p <= b for p, b in zip(column, budgets, strict=True)) for column in zip(*peaks, strict=True)]
    assert fitting[0]
    assert not fitting[-1]
    return fitting.index(False)


def drawn_budgets(peaks: Sequence[Sequence[int]], seed: int, slack: int = 0) -> list[int]:
    """Draw a budget for each rank: one is tight between two sizes, the others may allow more rows.

    Budgets are at least `slack` above the required memory: gloo's threads can hold a gathered buffer for a moment.
    """
    draw = random.Random(seed)
    rows = draw.randint(1, len(peaks[0]) - 4)
    tight = draw.randrange(len(peaks))
    budgets = []
    for rank, own in enumerate(peaks):
        has = rows if rank == tight else rows + draw.randint(0, 3)
        while own[has] - own[has - 1] <= slack:  # a flat section, where the update needs the most memory
            has += 1
        budgets.append(draw.randrange(own[has - 1] + slack, own[has]))
    return budgets


def state_of(trained: Trained) -> Any:
    """Return everything that training depends on, bit by bit, in a form that compares with ==."""
    optimizer = trained.optimizer
    state = [
        {key: _bits(value) for key, value in optimizer.state.get(p, {}).items()} for p in trained.model.parameters()
    ]
    groups = [
        {key: _bits(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    model = {name: _bits(value) for name, value in trained.model.state_dict().items()}
    gradients = [p.grad is None for p in trained.model.parameters()]
    return model, state, groups, gradients, _bits(torch.get_rng_state())


def _bits(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    return (str(value.dtype), value.numpy(force=True).tobytes()) if isinstance(value, Tensor) else value
