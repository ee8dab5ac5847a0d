"""The totals of a microbatch, the report of each rank about an attempt at a step, and the result of the step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from torchtune_adaptive.engine.limits import MicrobatchSize
from torchtune_adaptive.engine.memory import Reading
from torchtune_adaptive.engine.plans import Load
from torchtune_adaptive.engine.ranks import Agreement, sum_over_ranks
from torchtune_adaptive.errors import UnrecoverableError


class Totals(NamedTuple):
    """Sums over the samples of a microbatch."""

    loss_sum: Tensor
    """The loss summed over the target tokens: a detached scalar tensor."""
    target_tokens: int
    sums: Mapping[str, Tensor] = MappingProxyType({})
    """Further sums by name, as detached scalar tensors. Every microbatch of every rank must return the same names."""

    @classmethod
    def of(cls, returned: object) -> Totals:
        """Check the return value of `forward_backward`, and convert its sums to at least single precision.

        The sums are added over ranks, so all ranks need the same dtype. Without this, a rank without labels could
        return bf16 while others return float32.
        """
        if not isinstance(returned, Totals):
            raise TypeError(
                f"forward_backward must return Totals(loss.detach(), target_tokens), but returned "
                f"{type(returned).__name__}"
            )
        for name, value in {"loss_sum": returned.loss_sum, **returned.sums}.items():
            if not isinstance(value, Tensor) or value.dim() or value.requires_grad:
                raise TypeError(f"{name} of Totals must be a detached scalar tensor, but is {value!r}")
        tokens = float(returned.target_tokens)
        if tokens < 0 or not tokens.is_integer():
            raise ValueError(
                f"target_tokens of Totals is {tokens:g}, but must be a whole number, 0 or more; "
                "put weighted counts into sums"
            )
        return cls(_wide(returned.loss_sum), int(tokens), {name: _wide(value) for name, value in returned.sums.items()})

    @property
    def checksum(self) -> int:
        """A checksum of the names, types and devices of the sums that `result_of` reduces."""
        on_host = self.loss_sum.device.type == "cpu"
        reduced = {**self.sums, **({} if on_host else {"": self.loss_sum})}
        kinds = [(name, reduced[name].dtype, reduced[name].device.type) for name in sorted(reduced)]
        return zlib.crc32(repr((on_host, kinds)).encode())

    def plus(self, other: Totals) -> Totals:
        """Return the sum of two totals. Raises KeyError if their `sums` have different names."""
        sums = {name: self.sums[name] + other.sums[name] for name in self.sums.keys() | other.sums.keys()}
        return Totals(self.loss_sum + other.loss_sum, self.target_tokens + other.target_tokens, sums)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


class Fullest(NamedTuple):
    """Peak and budget of the rank that came closest to its budget."""

    peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a complete step, equal on all ranks. Gradients then include each sample exactly once."""

    loss_sum: Tensor
    """The loss summed over the target tokens of all ranks."""
    target_tokens: int
    """Target tokens of all ranks."""
    microbatches: int
    """Microbatches of each rank, in the attempt that succeeded."""
    recoveries: int
    """Number of times that the step was repeated."""
    load: Load
    """Tokens and cost summed over all ranks, and the largest microbatch of any rank."""
    retries: int = 0
    """Allocator retries of all ranks."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """`Totals.sums`, summed over all microbatches and ranks."""
    imbalance: float = 1.0
    """The highest computing cost of a rank, padding included, relative to the mean of all ranks."""
    memory: Fullest | None = None
    """Memory of the fullest rank; None if memory is not measured."""
    stop_requested: bool = False
    """True if `stop_requested` of `Recovery` has returned True on any rank."""


class AttemptReport(NamedTuple):
    """The report of one rank about an attempt at a step. It has only numbers, so that an all-reduce can collect it."""

    microbatch: MicrobatchSize = MicrobatchSize(0, 0)
    """The microbatch that ran out of memory; otherwise the largest one if the allocator has retried; otherwise 0."""
    load: Load = Load(0, 0, 0, 0, 0.0)
    reading: Reading = Reading(0, 0, 0)
    loss_sum: float = 0.0
    failed: int = 0
    """1 if a microbatch ran out of memory."""
    position: int = 0
    """Number of collectives that this rank has issued in this step."""
    target_tokens: int = 0
    upcoming_microbatches: int = 0
    """Microbatches that this rank needs for the next step; 0 if unknown."""
    stop_requested: int = 0
    non_fsdp_messages: int = 0
    """The most messages that a microbatch has sent outside FSDP."""
    differs: int = 0
    """1 if microbatches of this rank have issued different collectives of FSDP."""
    gradients: int = 0
    """1 if the attempt left gradients that are not reduced. Under FSDP, only set if no attempt has succeeded yet."""
    with_gradients: int = 0
    """A checksum of the parameters of a whole model that have gradients."""
    step: int = 0
    """The number of the step; 0 in a probe of a search."""
    sums: int = 0
    """A checksum of the names, types and devices of the sums that `result_of` reduces."""
    positions_in_groups: int = 0
    """With ghost passes, a number whose sum over the ranks is 0 if the ranks of each process group have issued equally
    many collectives."""

    @classmethod
    def of(cls, outcome: Totals | int) -> AttemptReport:
        """Return a report with the totals of a complete attempt, or with `failed` set."""
        if isinstance(outcome, int):
            return cls(failed=1)
        loss = outcome.loss_sum
        # on a GPU, reading the loss would wait for the device, so it is reduced later
        loss_sum = loss.item() if loss.device.type == "cpu" else 0.0
        return cls(loss_sum=loss_sum, target_tokens=outcome.target_tokens, sums=outcome.checksum)

    def to_row(self) -> list[float]:
        """Return the report as a row of numbers for `Agreement.gather`."""
        rows, length, tokens = self.microbatch
        return [rows, length, tokens or 0, *self.load, *self.reading, *self[3:]]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> AttemptReport:
        """Return the report that `to_row` converted to this row."""
        rows, length, unpadded_tokens, tokens, padded_tokens, most_rows, most_tokens = map(int, row[:7])
        return cls(
            MicrobatchSize(rows, length, unpadded_tokens or None),
            Load(tokens, padded_tokens, most_rows, most_tokens, row[7]),
            Reading(*map(int, row[8:11])),
            row[11],
            *map(int, row[12:]),
        )


REPORT_COLUMNS = len(AttemptReport().to_row())


class AttemptReports(tuple[AttemptReport, ...]):
    """The reports of all ranks, in order of rank, equal on all ranks."""

    @property
    def failed(self) -> dict[int, MicrobatchSize]:
        """The microbatches that ran out of memory, by rank."""
        return {rank: report.microbatch for rank, report in enumerate(self) if report.failed}

    @property
    def flushed_cache(self) -> dict[int, MicrobatchSize]:
        """The largest microbatch of each rank whose allocator flushed its cache in this step."""
        return {rank: report.microbatch for rank, report in enumerate(self) if report.reading.retries}

    @property
    def fullest(self) -> Fullest | None:
        """Peak and budget of the rank that came closest to its budget, if memory is measured."""
        measured = [Fullest(*report.reading[1:]) for report in self if report.reading.budget_bytes]
        return max(measured, key=lambda each: each.peak_bytes / each.budget_bytes, default=None)

    def have_room_for(self, additional_bytes: int) -> bool:
        """Return True if no rank flushed its cache, and each has this much memory beyond its peak, or measures none."""
        readings = [report.reading for report in self if report.reading.budget_bytes]
        fits = all(each.peak_bytes + additional_bytes <= each.budget_bytes for each in readings)
        return fits and not self.flushed_cache

    @property
    def target_tokens(self) -> int:
        """Target tokens of all ranks."""
        return sum(report.target_tokens for report in self)

    @property
    def upcoming_microbatches(self) -> int:
        """The most microbatches that a rank needs for the next step; 0 unless all ranks know their number."""
        needs = [report.upcoming_microbatches for report in self]
        return max(needs) if all(needs) else 0

    @property
    def stop_requested(self) -> bool:
        """True if any rank has requested to stop the run."""
        return any(report.stop_requested for report in self)

    @property
    def imbalance(self) -> float:
        """The highest computing cost of a rank relative to the mean of all ranks."""
        costs = [report.load.cost for report in self]
        # `fsum` is exact: the result is never below 1, and exactly 1 if all costs are equal
        return max(costs) * len(costs) / math.fsum(costs) if any(costs) else 1.0

    def check_positions(self) -> None:
        """Raise UnrecoverableError if ranks differ in their steps, collectives or sums."""
        if len({report.step for report in self}) > 1:
            raise UnrecoverableError(
                f"the ranks are in different steps ({[report.step for report in self]}, by rank), so gradients of "
                "different steps were added: if one rank leaves a step because of an error, all ranks must end"
            )
        positions = [report.position for report in self]
        differ = self.failed and sum(report.positions_in_groups for report in self)  # after ghost passes
        if differ or len(set(positions)) > 1:
            numbers = f" ({positions}, by rank)" if len(set(positions)) > 1 else ""
            raise UnrecoverableError(
                f"the ranks issued different numbers of collectives in one step{numbers}, so they have exchanged wrong "
                "data; use the same model and the same number of samples on all ranks"
            )
        if len({report.sums for report in self if not report.failed}) > 1:
            raise UnrecoverableError(
                "Totals has other names in sums, or tensors of another type or device, on some ranks, so they cannot "
                "be added over ranks"
            )


def gather_reports(agreement: Agreement, report: AttemptReport) -> AttemptReports:
    """Collective: return the reports of all ranks, equal on all ranks. Raise UnrecoverableError if ranks differ in
    their steps, collectives or sums."""
    reports = AttemptReports(map(AttemptReport.from_row, agreement.gather(report.to_row())))
    reports.check_positions()
    return reports


def result_of(
    totals: Totals, reports: AttemptReports, microbatches: int, recoveries: int, agreement: Agreement
) -> StepResult:
    """Collective if there are `sums` or, on CUDA, because of the loss: return the result of a complete step."""
    names = sorted(totals.sums)
    own_sums = [totals.sums[name] for name in names]
    if totals.loss_sum.device.type == "cpu":
        loss_sum = totals.loss_sum.new_tensor(sum(report.loss_sum for report in reports))
        group = agreement.group if own_sums and own_sums[0].is_cpu else None
        sums = list(sum_over_ranks(torch.stack(own_sums), group)) if own_sums else []
    else:
        loss_sum, *sums = sum_over_ranks(torch.stack([totals.loss_sum, *own_sums]))
    tokens, padded_tokens, most_rows, most_tokens, cost = zip(*(report.load for report in reports), strict=True)
    return StepResult(
        loss_sum=loss_sum,
        target_tokens=reports.target_tokens,
        microbatches=microbatches,
        recoveries=recoveries,
        load=Load(sum(tokens), sum(padded_tokens), max(most_rows), max(most_tokens), sum(cost)),
        retries=sum(report.reading.retries for report in reports),
        imbalance=reports.imbalance,
        sums=dict(zip(names, sums, strict=True)),
        memory=reports.fullest,
        stop_requested=reports.stop_requested,
    )
