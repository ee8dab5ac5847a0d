"""How the rows that fit and the configured samples per step become microbatches."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchtune_adaptive.errors import check_choice

ACCUMULATION_MODES = ("rebalance", "fixed", "keep")
LR_SCALINGS: Mapping[str, Callable[[float], float]] = {
    "none": lambda growth: 1.0,
    "sqrt": math.sqrt,
    "linear": lambda growth: growth,
}


@dataclass(frozen=True)
class Accumulation:
    """One rank's step: `samples_per_step` in `microbatches` of `rows`, some of them a row short if uneven."""

    rows: int
    microbatches: int
    samples_per_step: int
    growth: float
    """Samples per step over the configured samples per step."""


def accumulate(
    rows: int, *, batch_size: int, gradient_accumulation_steps: int, mode: str = "rebalance"
) -> Accumulation:
    """The step that `rows` (what fits in a microbatch) makes of the configured one.

    `rebalance` keeps the configured samples per step, in as few microbatches as hold them, and grows the
    step only where one microbatch holds more than all of them. `fixed` leaves `gradient_accumulation_steps`
    alone, so the step grows or shrinks with the rows. `keep` never changes the samples per step.
    """
    check_choice("mode", mode, ACCUMULATION_MODES)
    configured = batch_size * gradient_accumulation_steps
    if mode == "fixed":
        samples = rows * gradient_accumulation_steps
        return Accumulation(rows, gradient_accumulation_steps, samples, samples / configured)
    return split_step(configured if mode == "keep" else max(rows, configured), rows, configured)


def split_step(samples_per_step: int, most_rows: int, configured: int) -> Accumulation:
    """The fewest microbatches of at most `most_rows` that hold the step, as even as they can be."""
    microbatches = math.ceil(samples_per_step / most_rows)
    rows = math.ceil(samples_per_step / microbatches)
    return Accumulation(rows, microbatches, samples_per_step, samples_per_step / configured)


def lr_factor(growth: float, scaling: str) -> float:
    """What the learning rate is multiplied with when the samples per step grow by `growth`."""
    check_choice("lr_scaling", scaling, LR_SCALINGS)
    return LR_SCALINGS[scaling](growth)
