"""Find out if the loss of a batch is the sum or a mean of its microbatches' losses, by a comparison of two samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

FP32_TOLERANCE, TF32_TOLERANCE, HALF_TOLERANCE = 3e-5, 0.002, 0.02
"""Tolerances relative to the loss, by the precision of the model; HALF is 16 bits."""
ROUNDING_ERROR = 1e-6
"""The largest rounding error relative to the loss in full precision."""


class Counts(NamedTuple):
    """The numbers by which the mean loss of a batch may be divided."""

    rows: int = 0
    labels: int = 0
    """Labels that count in the loss."""
    next_tokens: int = 0
    """Labels without the first position of each row."""

    @classmethod
    def of_rows(cls, rows: int) -> Counts:
        """Count the rows of a batch whose labels are not per token."""
        return cls(rows, rows, rows)

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        """Add up the counts of microbatches."""
        return cls(*map(sum, zip(*counts, strict=True)))


class Reduction(Enum):
    """How the losses of microbatches are combined to the loss of a batch."""

    SUM = "sum"
    MEAN_OF_ROWS = "mean over rows"
    MEAN_OF_LABELS = "mean over labels"
    MEAN_OF_NEXT_TOKENS = "mean over labels of next tokens"

    def weight(self, part: Counts, whole: Counts) -> float:
        """Return the factor of a microbatch's loss, given the counts of the microbatch and of the whole batch."""
        if self is Reduction.SUM:
            return float(part.rows > 0)
        name = {Reduction.MEAN_OF_ROWS: "rows", Reduction.MEAN_OF_LABELS: "labels"}.get(self, "next_tokens")
        return float(getattr(part, name) / max(1, getattr(whole, name)))


class BatchLoss(NamedTuple):
    """The loss of a batch."""

    loss: Any
    """A number, or a tensor whose value has not been read yet."""
    counts: Counts
    is_random: bool = False
    """True if the forward pass drew random numbers."""


class TwoSamples(NamedTuple):
    """The losses of two samples on one rank: in one batch, and in separate batches."""

    both: BatchLoss
    first: BatchLoss
    second: BatchLoss

    def __str__(self) -> str:
        separate = f"{self.first.loss:.4g} and {self.second.loss:.4g} in separate batches"
        return f"the loss of two samples is {self.both.loss:.4g} in one batch, and {separate}"

    def errors(self, scale: float) -> dict[Reduction, float]:
        """Return the error of each reduction, relative to the loss of both samples or to `scale` if that is larger."""
        both, apart = self.both.loss, (self.first, self.second)
        whole, largest = Counts.total(each.counts for each in apart), max(abs(both), scale) or 1.0
        weighted = {each: sum(one.loss * each.weight(one.counts, whole) for one in apart) for each in Reduction}
        errors = {each: abs(loss - both) / largest for each, loss in weighted.items()}
        return {each: math.inf if math.isnan(error) else error for each, error in errors.items()}


def how_losses_add_up(
    on_ranks: Sequence[TwoSamples], *, shifts_labels: bool, tolerance: float, scale: float = 0.0
) -> Reduction | None:
    """Return the reduction with the smallest error over all ranks; None if every error exceeds the tolerance.

    `shifts_labels` selects the likely one of the two means over labels. In full precision, the other one is preferred
    if only its error is small enough to be rounding.
    """
    worst = {each: worst_error(on_ranks, each, scale) for each in Reduction}
    likely, other = Reduction.MEAN_OF_NEXT_TOKENS, Reduction.MEAN_OF_LABELS
    if not shifts_labels:
        likely, other = other, likely
    if tolerance == FP32_TOLERANCE and worst[likely] > ROUNDING_ERROR > worst[other]:
        likely = other
    candidates = (likely, Reduction.SUM, Reduction.MEAN_OF_ROWS)  # if several errors are equal, `min` takes the first
    best = min(candidates, key=lambda each: max(worst[each], ROUNDING_ERROR))
    return None if worst[best] > tolerance else best


def worst_error(on_ranks: Sequence[TwoSamples], reduction: Reduction, scale: float) -> float:
    """Return the largest error of a reduction over the ranks."""
    return max(tried.errors(scale)[reduction] for tried in on_ranks)


def tolerance_of(model: nn.Module, *, mixed_precision: bool) -> float:
    """Return the tolerance for the precision in which the model computes."""
    parameter = next(model.parameters())
    if mixed_precision or parameter.dtype.itemsize < 4:
        return HALF_TOLERANCE
    if parameter.device.type == "cuda" and (
        torch.backends.cuda.matmul.fp32_precision == "tf32"
        or any(isinstance(module, _ConvNd) for module in model.modules())  # in TF32 by default
    ):
        return TF32_TOLERANCE
    return FP32_TOLERANCE


class WithoutDropout(TorchFunctionMode):
    """Disables dropout, including that of attention, while the model stays in training mode."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function is nn.functional.dropout:
            return args[0] if args else options["input"]
        if function is nn.functional.scaled_dot_product_attention:
            args = args if len(args) <= 4 else (*args[:4], 0.0, *args[5:])
            options.pop("dropout_p", None)
        return function(*args, **options)
