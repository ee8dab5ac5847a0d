"""The report of each rank on an attempt at a step, and the result that follows from all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from torchtune_adaptive.engine.limits import Microbatch
from torchtune_adaptive.engine.noise import Squares
from torchtune_adaptive.engine.plans import Load
from torchtune_adaptive.engine.ranks import Agreement, sum_over_ranks
from torchtune_adaptive.errors import UnrecoverableError
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.text import format_apart


class Totals(NamedTuple):
    """What a microbatch contributes to its step, or to a stage of it."""

    loss_sum: Tensor
    """The loss summed over the target tokens: a detached tensor without dimensions."""
    target_tokens: int
    sums: Mapping[str, Tensor] = MappingProxyType({})
    """Further sums over the samples, by name: tensors like `loss_sum`. Every microbatch has the same names."""

    @classmethod
    def of(cls, returned: object) -> Totals:
        """Checks what a microbatch returned. Its sums become single precision at least, since ranks add them up, and a
        rank without labels may have them as bf16."""
        if not isinstance(returned, Totals):
            raise TypeError(
                f"forward_backward returned {type(returned).__name__}; it has to return "
                "Totals(loss.detach(), target_tokens)"
            )
        for name, value in {"loss_sum": returned.loss_sum, **returned.sums}.items():
            if not isinstance(value, Tensor) or value.dim() or value.requires_grad:
                raise TypeError(f"{name} of Totals has to be a detached tensor without dimensions, but is {value!r}")
        tokens = float(returned.target_tokens)
        if tokens < 0 or not tokens.is_integer():
            raise ValueError(
                f"target_tokens of Totals is {tokens:g}: it counts, so it is a whole number, from 0; weights go into "
                "sums"
            )
        return cls(_wide(returned.loss_sum), int(tokens), {name: _wide(value) for name, value in returned.sums.items()})

    def plus(self, other: Totals) -> Totals:
        """The totals of both; raises where one has sums that the other has not."""
        sums = {name: self.sums[name] + other.sums[name] for name in self.sums.keys() | other.sums.keys()}
        return Totals(self.loss_sum + other.loss_sum, self.target_tokens + other.target_tokens, sums)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


class Fullest(NamedTuple):
    """The rank that came closest to its own budget."""

    peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step whose gradients are complete on every rank and belong to each of its samples exactly once."""

    loss_sum: Tensor
    """The loss summed over the target tokens of all ranks."""
    target_tokens: int
    """Target tokens of all ranks together."""
    microbatches: int
    """Microbatches of each rank, in the attempt that counts."""
    recoveries: int
    """How often the step was repeated."""
    load: Load
    """The load of all ranks: their tokens and cost in sum, their largest microbatch."""
    retries: int = 0
    """Cache flushes of the allocators of all ranks."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """The sums of all microbatches on all ranks, by name."""
    imbalance: float = 1.0
    """Cost of the rank that had most to do, padding included, over the mean of the ranks."""
    memory: Fullest | None = None
    """None where nothing measures it."""
    asked_to_stop: bool = False
    """Whether some rank was asked to end the run: all of them know it at the same step."""
    squares: Squares | None = None
    """What the noise of the gradient follows from, in steps that measure it."""


class Report(NamedTuple):
    """One rank's attempt, in numbers: they travel as one row of a table."""

    failed: float = 0
    """1 where it ran out of memory."""
    rows: float = 0
    """Rows of the microbatch that ran out of memory; of the largest one where the allocator only retried."""
    length: float = 0
    joined_tokens: float = 0
    """Tokens of that microbatch where nothing is padded; 0 where it is."""
    position: float = 0
    target_tokens: float = 0
    loss_sum: float = 0
    upcoming_microbatches: float = 0
    """Microbatches that this rank needs for the next step, where it knows them already."""
    tokens: float = 0
    padded_tokens: float = 0
    most_rows: float = 0
    most_tokens: float = 0
    cost: float = 0
    seconds: float = 0
    """Seconds since the last step that counted."""
    retries: float = 0
    peak_bytes: float = 0
    budget_bytes: float = 0
    """0 where nothing measures memory."""
    asked_to_stop: float = 0
    foreign_messages: float = 0
    """What a microbatch communicates besides FSDP."""
    gradients: float = 0
    """1 if the attempt has left any, where that is not known yet or they are to be averaged."""
    step: float = 0
    """Its number, or 0 for one without."""

    @property
    def microbatch(self) -> Microbatch:
        return Microbatch(int(self.rows), int(self.length), int(self.joined_tokens) or None)


class Reports(tuple[Report, ...]):
    """One of every rank, in order of rank, the same on all of them."""

    @property
    def failed(self) -> dict[int, Microbatch]:
        """Microbatches that ran out of memory, by rank."""
        return {rank: report.microbatch for rank, report in enumerate(self) if report.failed}

    @property
    def retrying(self) -> dict[int, Microbatch]:
        """Ranks whose allocator flushed its cache in this step, each with its largest microbatch."""
        return {rank: report.microbatch for rank, report in enumerate(self) if report.retries}

    @property
    def rate(self) -> float:
        """Target tokens a second. In a rehearsal, where nothing takes its time, always the same: smaller sizes stay."""
        return 1.0 if REHEARSAL.on else self.target_tokens / max(report.seconds for report in self)

    @property
    def fullest(self) -> Fullest | None:
        measured = [Fullest(int(each.peak_bytes), int(each.budget_bytes)) for each in self if each.budget_bytes]
        return max(measured, key=lambda each: each.peak_bytes / each.budget_bytes, default=None)

    @property
    def shortage(self) -> str | None:
        """What the rank with the least memory had, of those that ran out of it; None where nothing measures that."""
        measured = [(each.budget_bytes, rank) for rank, each in enumerate(self) if each.failed and each.budget_bytes]
        if not measured:
            return None
        budget_bytes, rank = min(measured)
        budget, peak = format_apart(budget_bytes, self[rank].peak_bytes)
        return f"rank {rank} peaked at {peak} of its budget of {budget}"

    @property
    def target_tokens(self) -> int:
        return int(sum(report.target_tokens for report in self))

    @property
    def upcoming_microbatches(self) -> int:
        """The most that any rank needs for the next step; 0 unless all of them know."""
        needs = [int(report.upcoming_microbatches) for report in self]
        return max(needs) if all(needs) else 0

    @property
    def asked_to_stop(self) -> bool:
        return any(report.asked_to_stop for report in self)

    @property
    def imbalance(self) -> float:
        costs = [report.cost for report in self]
        # summed exactly, so that it is never less than 1, and 1 where all have the same to do
        return max(costs) * len(costs) / math.fsum(costs) if any(costs) else 1.0

    def check_positions(self) -> None:
        """Raises where the ranks ran different steps, or have issued different numbers of collectives."""
        if len({report.step for report in self}) > 1:
            raise UnrecoverableError(
                f"the ranks are in different steps ({[int(report.step) for report in self]}, by rank), so they mixed "
                "their gradients: where one has left a step by an error of its own, all have to end"
            )
        positions = [int(report.position) for report in self]
        if len(set(positions)) > 1:
            raise UnrecoverableError(
                f"the ranks issued different numbers of collectives in one step ({positions}, by rank), so they "
                "exchanged the wrong data; use the same model and the same number of samples on all ranks"
            )


def exchange(agreement: Agreement, report: Report) -> Reports:
    """Collective: the reports of all ranks."""
    return Reports(Report(*row) for row in agreement.gather(report))


def result_of(totals: Totals, reports: Reports, microbatches: int, recoveries: int) -> StepResult:
    """Collective: for sums, and on CUDA for the loss, which did not ride on the agreement."""
    names = sorted(totals.sums)
    mine = [totals.sums[name] for name in names]
    if totals.loss_sum.device.type == "cpu":
        loss_sum = totals.loss_sum.new_tensor(sum(report.loss_sum for report in reports))
        sums = list(sum_over_ranks(torch.stack(mine))) if mine else []
    else:
        loss_sum, *sums = sum_over_ranks(torch.stack([totals.loss_sum, *mine]))
    return StepResult(
        loss_sum=loss_sum,
        target_tokens=reports.target_tokens,
        microbatches=microbatches,
        recoveries=recoveries,
        load=Load(
            tokens=int(sum(report.tokens for report in reports)),
            padded_tokens=int(sum(report.padded_tokens for report in reports)),
            most_rows=int(max(report.most_rows for report in reports)),
            most_tokens=int(max(report.most_tokens for report in reports)),
            cost=sum(report.cost for report in reports),
        ),
        retries=int(sum(report.retries for report in reports)),
        imbalance=reports.imbalance,
        sums=dict(zip(names, sums, strict=True)),
        memory=reports.fullest,
        asked_to_stop=reports.asked_to_stop,
    )
