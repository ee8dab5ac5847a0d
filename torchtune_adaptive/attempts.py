"""What the ranks tell each other about an attempt at a step, and what they conclude from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchtune_adaptive.collectives import Agreement
from torchtune_adaptive.errors import LimitExhaustedError, UnrecoverableError
from torchtune_adaptive.limits import Limit
from torchtune_adaptive.packing import Load


class Totals(NamedTuple):
    """What a microbatch contributes to its step."""

    loss_sum: Tensor
    """Without dimensions, detached, summed over the target tokens."""
    target_tokens: int


@dataclass(frozen=True)
class StepResult:
    """A step whose gradients are complete on every rank and belong to each of its samples exactly once."""

    loss_sum: Tensor
    """Summed over the target tokens of all ranks."""
    target_tokens: int
    """Of all ranks."""
    microbatches: int
    """On each rank, in the attempt that counts."""
    recoveries: int
    """How often the step was run again."""
    load: Load
    """Of all ranks: tokens in sum, microbatches at their largest."""


class Microbatch(NamedTuple):
    """The size of a microbatch: rows, and the longest of them."""

    rows: int
    length: int


class Report(NamedTuple):
    """What a rank says about its attempt. Numbers only: they travel as one row of a table."""

    failed_rows: float = 0
    """Of the microbatch that ran out of memory; 0 if none did."""
    failed_length: float = 0
    position: float = 0
    target_tokens: float = 0
    loss_sum: float = 0
    upcoming_microbatches: float = 0
    """What this rank will need for the next step, where it knows that already."""
    tokens: float = 0
    padded_tokens: float = 0
    most_rows: float = 0
    most_tokens: float = 0


class Reports(tuple[Report, ...]):
    """One of every rank, in order of rank, the same on all of them."""

    @property
    def failed(self) -> dict[int, Microbatch]:
        """By rank, the microbatches that ran out of memory."""
        return {
            rank: Microbatch(int(report.failed_rows), int(report.failed_length))
            for rank, report in enumerate(self)
            if report.failed_rows
        }

    @property
    def target_tokens(self) -> int:
        return int(sum(report.target_tokens for report in self))

    @property
    def loss_sum(self) -> float:
        return sum(report.loss_sum for report in self)

    @property
    def upcoming_microbatches(self) -> int:
        return int(max(report.upcoming_microbatches for report in self))

    @property
    def load(self) -> Load:
        return Load(
            tokens=int(sum(report.tokens for report in self)),
            padded_tokens=int(sum(report.padded_tokens for report in self)),
            most_rows=int(max(report.most_rows for report in self)),
            most_tokens=int(max(report.most_tokens for report in self)),
        )

    def check_positions(self) -> None:
        positions = [int(report.position) for report in self]
        if len(set(positions)) > 1:
            raise UnrecoverableError(
                f"the ranks issued different numbers of collectives in one step ({positions}, by rank), so "
                "what they received is not what they expected; give all ranks the same model and the same "
                "number of samples"
            )


def exchange(agreement: Agreement, report: Report) -> Reports:
    """Collective: the reports of all ranks."""
    return Reports(Report(*row) for row in agreement.gather(report))


def shrunk(limit: Limit, failed: dict[int, Microbatch], step: int) -> tuple[Limit, str]:
    """The next smaller limit after these microbatches failed, by rank, and the line that says so.

    It is below each of them, except for those that are one row. Raises if the limit cannot shrink.
    """
    where = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
    longest = max(microbatch.length for microbatch in failed.values())
    what = f"step {step}: out of memory on {where} (longest sample {longest} tokens)"
    smaller = limit
    try:
        for microbatch in failed.values():
            if smaller is limit or (microbatch.rows > 1 and smaller.fits(*microbatch)):
                smaller = smaller.after_oom(*microbatch)
    except LimitExhaustedError as error:
        raise LimitExhaustedError(f"{what}: {error}") from None
    largest = max(failed.values(), key=lambda microbatch: microbatch.rows * microbatch.length)
    return smaller, f"{what}: microbatch {limit.size_of(*largest)} -> {smaller}, step repeated"


def failed_size(lengths: Sequence[int]) -> Microbatch:
    """Of the samples that ran out of memory; those that stood in for none count as one row."""
    return Microbatch(max(1, len(lengths)), max(lengths, default=1))
