"""Gradient noise scale, measured from the microbatches of training steps; it estimates the largest useful batch.

The gradient g of a microbatch is a sum over its t target tokens: t·G on average, plus noise. Different microbatches
have different samples, so their noise is independent and averages out in the product of two gradients:

    |G|² = (|Σg|² - Σ|g|²) / (T² - Σt²)            over the microbatches of all ranks, T = Σt
    noise of the step's mean gradient Σg / T: (Σ|g|² - |G|²·Σt²) / T²; times N for a single one of its N samples

The only assumptions are independent samples, and an expected gradient of t·G for a microbatch of t tokens. Tokens, and
samples of different lengths, need not be equally noisy. Noise scale = noise of a single sample / |G|². In the gradient
of a batch of that size, noise and signal are equally large. (McCandlish et al., arXiv:1812.06162.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.collectives import CollectiveLedger
from torchtune_adaptive.engine.ranks import sum_over_ranks

HALF_LIFE = 50
"""Measured steps after which the weight of a step is halved."""
FEWEST = 10
"""Measured steps before the scale is reported."""
TWO_SIDED_95 = 1.96


class Squares(NamedTuple):
    """Sums over the microbatches of a step, on all ranks."""

    gradients: float
    """Sum of the squared norms of their gradients."""
    target_tokens: float
    """Sum of their squared numbers of target tokens."""
    samples: float
    """Sum of their squared numbers of samples."""
    all_samples: float
    """Sum of their numbers of samples."""


class SquareMeter:
    """Accumulate the squares of one step's microbatches on this rank."""

    def __init__(self, model: nn.Module, ledger: CollectiveLedger) -> None:
        self._model, self._ledger = model, ledger
        self._gradients: Tensor | float = 0.0
        self._microbatches: list[tuple[int, int]] = []
        """Target tokens and samples of each microbatch."""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Measure an attempt at a step and discard the sums of earlier attempts."""
        self._gradients, self._microbatches = 0.0, []
        hooks = []
        if fsdp.is_whole(self._model):
            hooks = [each.register_hook(self._add) for each in self._model.parameters() if each.requires_grad]
        try:
            with self._ledger.showing_gradients(self._add):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, gradient: Tensor) -> None:
        """Add a part of a microbatch's gradient, before it is accumulated."""
        self._gradients = self._gradients + torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()

    def count(self, target_tokens: int, samples: int) -> None:
        """Record a completed microbatch."""
        self._microbatches.append((target_tokens, samples))

    def of_all_ranks(self, device: torch.device) -> Squares:
        """Collective: sum over ranks. Synchronizes with the device."""
        squares = (sum(count**2 for count in counts) for counts in zip(*self._microbatches, strict=True))
        samples = sum(samples for _, samples in self._microbatches)
        mine = torch.tensor([0.0, *squares, samples], dtype=torch.float64, device=device)
        mine[0] = self._gradients
        return Squares(*sum_over_ranks(mine).tolist())


class StepNoise(NamedTuple):
    """Estimates of one step. Each is unbiased, but their ratio is not."""

    signal: float
    """Estimate of |G|², which may be negative."""
    noise: float
    """Noise of one sample."""

    @classmethod
    def of(cls, squares: Squares, norm: float, weight: float, *, by_samples: bool) -> StepNoise | None:
        """Estimate from a step; None if it had a single microbatch.

        `norm` is that of the mean gradient, `weight` the number of target tokens or samples that the mean is over.
        """
        of_parts, whole = squares.samples if by_samples else squares.target_tokens, weight**2
        if whole <= of_parts:
            return None
        signal = (norm**2 * whole - squares.gradients) / (whole - of_parts)
        return cls(signal, squares.all_samples * (squares.gradients - signal * of_parts) / whole)


class Interval(NamedTuple):
    """A noise scale in samples with its 95 % interval; infinite if the signal is not distinguishable from 0."""

    scale: float
    low: float
    high: float


class NoiseScale:
    """Average signal and noise separately, so that their ratio is almost unbiased; recent steps weigh more."""

    def __init__(self, state: Sequence[float] = ()) -> None:
        self._sums = list(state) or [0.0] * 7
        """Sums of the weights, squared weights, signal, noise, and the products of signal and noise."""

    def record(self, step: StepNoise) -> None:
        """Add a step."""
        keep, (a, b) = 0.5 ** (1 / HALF_LIFE), step
        new = (1.0, 1.0, a, b, a * a, a * b, b * b)
        self._sums = [(keep**2 if at == 1 else keep) * old + new[at] for at, old in enumerate(self._sums)]

    def state(self) -> list[float]:
        """Return the state for a checkpoint."""
        return self._sums

    def interval(self) -> Interval | None:
        """Return the scale with its interval (Fieller's theorem for a ratio of means); None after too few steps."""
        weights, squared, *sums = self._sums
        if not weights or (count := weights**2 / squared) < FEWEST - 0.5:
            return None
        a, b, aa, ab, bb = (each / weights for each in sums)
        z2 = TWO_SIDED_95**2 / (count - 1)  # for a mean, in units of the variance of single steps
        first, half, last = a * a - z2 * (aa - a * a), a * b - z2 * (ab - a * b), b * b - z2 * (bb - b * b)
        root = math.sqrt(max(0.0, half**2 - first * last))
        scale = max(0.0, b / a) if a > 0 else math.inf
        if first > 0:
            return Interval(scale, max(0.0, (half - root) / first), max(0.0, (half + root) / first))
        # the signal may be 0, so the ratio has no upper bound
        low = (half - root) / first if first < 0 < last else 0.0
        return Interval(scale, max(0.0, low), math.inf)
