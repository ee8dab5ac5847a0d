"""How long a step takes, from what its kernels compute and move: no kernel is faster than arithmetic or memory.

Absolute times depend on kernels that nobody has looked at here, so every time is a range. What matters is the order of
settings, and there most of what is not known is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtune_adaptive.prediction.allocator import rounded_up
from torchtune_adaptive.prediction.cards import Card
from torchtune_adaptive.prediction.law import units_of
from torchtune_adaptive.prediction.work import Work


@dataclass(frozen=True)
class Share:
    """Shares of its peaks that a card reaches in training."""

    flops: float
    attention: float
    bandwidth: float
    link: float


# chosen on the 3B table of torchtune's README (docs/published.md), whose lines they meet within 4 %
LIKELY = Share(flops=0.80, attention=0.65, bandwidth=0.70, link=0.70)
FAST = Share(flops=0.95, attention=0.80, bandwidth=0.95, link=0.90)
SLOW = Share(flops=0.50, attention=0.40, bandwidth=0.45, link=0.40)


@dataclass(frozen=True)
class Seconds:
    """The time of a step, and between which times it is expected to lie."""

    likely: float
    fast: float
    slow: float


@dataclass(frozen=True, eq=False)
class WorkLaw:
    """The work of every kernel as a function of rows and tokens, as MemoryLaw is for bytes."""

    coefficients: Tensor
    """Coefficients by field of `Work`, unit and kernel."""
    tokens_multiple: int

    def at(self, rows: int, tokens: int) -> Tensor:
        """The work by field and kernel; attention's flops in full."""
        rounded = rounded_up(tokens, self.tokens_multiple)
        degree = self.coefficients.shape[1] // 2 - 1
        work = units_of(rows, rounded, degree) @ self.coefficients
        work[1] *= rounded
        return work.clamp(min=0)


def fit_work(works: Mapping[tuple[int, int], Work], *, tokens_multiple: int) -> WorkLaw | None:
    """Through the work of the same steps as `fit_law`; None where other sizes have other kernels."""
    if len({len(work.flops) for work in works.values()}) != 1:
        return None
    degree = len(works) // 2 - 1
    units = torch.stack([units_of(rows, tokens, degree) for rows, tokens in works])
    counted = torch.stack([as_tensor(work) for work in works.values()], dim=1)
    return WorkLaw(torch.linalg.solve(units, counted), tokens_multiple)


def as_tensor(work: Work) -> Tensor:
    """A table of the work, by field and kernel."""
    fields = (work.flops, work.attention_flops, work.moved_bytes, work.linked_bytes, work.copied_bytes)
    return torch.stack([torch.tensor(field, dtype=torch.float64) for field in fields])


HOST_PASSES = 2
"""Weights, gradients and optimizer state are read, and most of it is written."""
HOST_BYTES_PER_S = 25e9
"""Bandwidth of the host's memory, for each rank."""


@dataclass(frozen=True)
class Timing:
    """What decides how fast the kernels of a step are."""

    card: Card
    half: bool
    """Whether matrices are multiplied in 16 bits."""
    link_bytes_per_s: float
    ranks: int
    host_bytes: int = 0
    """Bytes that the optimizer keeps on the host and updates there."""

    def seconds(self, work: Tensor) -> Seconds:
        return Seconds(*(self._seconds(work, share) for share in (LIKELY, FAST, SLOW)))

    def _seconds(self, work: Tensor, share: Share) -> float:
        card = self.card
        flops, attention, moved, linked, copied = work
        peak = card.half_flops if self.half else card.flops
        computing = flops / (peak * share.flops) + attention / (peak * share.attention)
        kernels = torch.maximum(computing, moved / (card.bytes_per_s * share.bandwidth))
        launching = card.launch_s * int((kernels > 0).sum())
        on_device = float(kernels.sum())
        on_device = max(on_device, launching) if card.queues else on_device + launching
        others = (self.ranks - 1) / self.ranks
        exchanging = float(linked.sum()) * others / (self.link_bytes_per_s * share.link)
        copying = float(copied.sum()) / (card.host_bytes_per_s * share.link)
        # collectives and copies run beside kernels; the optimizer on the host waits for all of them
        on_host = HOST_PASSES * self.host_bytes / (HOST_BYTES_PER_S * share.bandwidth)
        return max(on_device, exchanging, copying) + on_host


@dataclass(frozen=True)
class StepTime:
    """How long a step of any size takes."""

    work: WorkLaw
    timing: Timing

    def seconds(self, rows: int, tokens: int) -> Seconds:
        return self.timing.seconds(self.work.at(rows, tokens))
