"""The noise of the gradient, measured with microbatches that are run anyway: how large a batch is worth its samples.

The gradient g of a microbatch is a sum over its t target tokens: t·G on average, and noise. Different microbatches have
different samples, so their noise is independent, and drops out of the mean of a product of two:

    |G|² = (|Σg|² - Σ|g|²) / (T² - Σt²)            over the microbatches of all ranks, T = Σt
    of the step's mean gradient Σg / T, the noise is (Σ|g|² - |G|²·Σt²) / T², N times that of a single sample of its N

Nothing here assumes that tokens, or samples of different lengths, are equally noisy: only that samples are
independent, and that a microbatch of t tokens expects t·G. Noise scale = noise of a single sample / |G|²: a batch of
so many samples is half noise. (McCandlish et al., arXiv:1812.06162.)
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
"""Measured steps after which one counts half."""
FEWEST = 10
"""Measured steps before anything is said."""
TWO_SIDED_95 = 1.96


class Squares(NamedTuple):
    """Sums over the microbatches of a step, on all ranks."""

    gradients: float
    """The squared norms of their gradients."""
    target_tokens: float
    """Their target tokens, squared."""
    samples: float
    """Their samples, squared."""
    all_samples: float
    """Their samples."""


class SquareMeter:
    """Adds up the squares of one step's microbatches as they run, on one rank."""

    def __init__(self, model: nn.Module, ledger: CollectiveLedger) -> None:
        self._model, self._ledger = model, ledger
        self._gradients: Tensor | float = 0.0
        self._microbatches: list[tuple[int, int]] = []
        """Target tokens and samples of each."""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around an attempt: what an earlier one has added does not count."""
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
        """A part of the gradient of one microbatch, before it is added to anything."""
        self._gradients = self._gradients + torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()

    def count(self, target_tokens: int, samples: int) -> None:
        """After a microbatch."""
        self._microbatches.append((target_tokens, samples))

    def of_all_ranks(self, device: torch.device) -> Squares:
        """Collective. Waits for the device."""
        squares = (sum(count**2 for count in counts) for counts in zip(*self._microbatches, strict=True))
        samples = sum(samples for _, samples in self._microbatches)
        mine = torch.tensor([0.0, *squares, samples], dtype=torch.float64, device=device)
        mine[0] = self._gradients
        return Squares(*sum_over_ranks(mine).tolist())


class StepNoise(NamedTuple):
    """One step's estimates, each without bias; their ratio is not."""

    signal: float
    """|G|², which one step may find below 0."""
    noise: float
    """The noise of one sample."""

    @classmethod
    def of(cls, squares: Squares, norm: float, weight: float, *, by_samples: bool) -> StepNoise | None:
        """`norm`: of the mean gradient, over so many target tokens or samples. None where all of the step was one
        microbatch."""
        of_parts, whole = squares.samples if by_samples else squares.target_tokens, weight**2
        if whole <= of_parts:
            return None
        signal = (norm**2 * whole - squares.gradients) / (whole - of_parts)
        return cls(signal, squares.all_samples * (squares.gradients - signal * of_parts) / whole)


class Interval(NamedTuple):
    """A noise scale in samples, with its interval of 95 %; infinite where the signal drowns."""

    scale: float
    low: float
    high: float


class NoiseScale:
    """Averages signal and noise apart, so that their ratio is hardly biased; later steps count more."""

    def __init__(self, state: Sequence[float] = ()) -> None:
        self._sums = list(state) or [0.0] * 7
        """Sums of weights, their squares, signal, noise, and products of these two."""

    def record(self, step: StepNoise) -> None:
        keep, (a, b) = 0.5 ** (1 / HALF_LIFE), step
        new = (1.0, 1.0, a, b, a * a, a * b, b * b)
        self._sums = [(keep**2 if at == 1 else keep) * old + new[at] for at, old in enumerate(self._sums)]

    def state(self) -> list[float]:
        return self._sums

    def interval(self) -> Interval | None:
        """None after too few steps. By Fieller's theorem, for a ratio of two means."""
        weights, squared, *sums = self._sums
        if not weights or (count := weights**2 / squared) < FEWEST - 0.5:
            return None
        a, b, aa, ab, bb = (each / weights for each in sums)
        z2 = TWO_SIDED_95**2 / (count - 1)  # of a mean, in units of the spread of single steps
        first, half, last = a * a - z2 * (aa - a * a), a * b - z2 * (ab - a * b), b * b - z2 * (bb - b * b)
        root = math.sqrt(max(0.0, half**2 - first * last))
        scale = max(0.0, b / a) if a > 0 else math.inf
        if first > 0:
            return Interval(scale, max(0.0, (half - root) / first), max(0.0, (half + root) / first))
        # the signal may be 0, so the ratio has no upper bound
        low = (half - root) / first if first < 0 < last else 0.0
        return Interval(scale, max(0.0, low), math.inf)
