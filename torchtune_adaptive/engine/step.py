"""Runs a step so that running out of memory, on any rank at any point, costs a repeated step and not the run.

A step is a fixed list of samples. What fits is a limit. A plan splits the step into microbatches under the
limit. Running out of memory changes the limit, never the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from os import PathLike
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from torch import nn

from torchtune_adaptive.engine.fsdp import why_recovery_is_off
from torchtune_adaptive.engine.governor import RECOVERY, Change, Governor, LimitState, in_step
from torchtune_adaptive.engine.ledger import CollectiveLedger
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.engine.memory import Gauge, MemorySource, RngState
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, forget_frames, is_oom, release
from torchtune_adaptive.engine.plans import Plan, join_step, load_of, plan_step, spread, spread_joined
from torchtune_adaptive.engine.ranks import Agreement, compare_replicas, let_go, rank
from torchtune_adaptive.engine.reports import (
    Attempt,
    Report,
    Reports,
    StepResult,
    Totals,
    exchange,
    result_of,
    troubling,
)
from torchtune_adaptive.errors import (
    LimitExhaustedError,
    RecoveryUnsupportedError,
    Remedy,
    UnrecoverableError,
    without_backward,
)

logger = logging.getLogger(__name__)


Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True)
class SampleKind(Generic[Sample]):
    """How long a sample is, and what may take its place."""

    length_of: Callable[[Sample], int]
    """The tokens of a sample, which limits by length go by."""
    stand_in: Callable[[Sample], Sample]
    """The smallest version of a sample that still passes through the whole model, say its first two tokens: if the very
    first microbatch fails, a pass over it keeps the other ranks company."""
    row_lengths_of: Callable[[Sample], Sequence[int]] | None = None
    """The tokens of each row of a sample that is several, as a pair of answers is. Its length is then that of the
    longest, and limits count samples all the same."""
    filler: Callable[[Sample], Sample] | None = None
    """A stand-in without any label, run where a rank has fewer samples than the others have microbatches."""
    padded: bool = True
    """Whether rows are padded to the longest of their microbatch. Otherwise samples follow one another in a single row,
    and under a limit by length all their tokens count, whichever of them share a microbatch."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """A sample without tokens counts as one of padding: it takes room too, and no limit divides by its length."""
        return [max(1, self.length_of(sample)) for sample in samples]

    def row_lengths(self, samples: Sequence[Sample]) -> list[Sequence[int]] | None:
        """The tokens of every row; None where each sample is one."""
        return None if self.row_lengths_of is None else [*map(self.row_lengths_of, samples)]


class Ahead(NamedTuple):
    """The plan of a step to come."""

    limit: Limit
    lengths: list[int]
    plan: Plan


class Planner:
    """Plans steps, and keeps the plan of the next one where its samples are known already."""

    def __init__(self, agreement: Agreement, *, padded: bool) -> None:
        """`padded`: whether the rows of a microbatch are padded to the longest."""
        self._agreement = agreement
        self._padded = padded
        self._ahead: Ahead | None = None

    def plan(self, lengths: list[int], limit: Limit) -> Plan:
        """Collective, under a limit by length that was not planned for ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.limit == limit:
            if ahead.lengths != lengths:
                raise ValueError("the samples differ from those announced as `upcoming`; pass the same ones")
            return ahead.plan
        if not limit.by_length:
            return plan_step(lengths, limit)
        plan = self._fewest(lengths, limit)
        most = exchange(self._agreement, Report(upcoming_microbatches=len(plan))).upcoming_microbatches
        return self._spread(plan, lengths, limit, most)

    def look_ahead(self, lengths: list[int] | None, limit: Limit) -> Ahead | None:
        """What the next step needs on this rank, under a limit by length."""
        if lengths is None or not limit.by_length:
            return None
        return Ahead(limit, lengths, self._fewest(lengths, limit))

    def keep(self, ahead: Ahead | None, microbatches: int) -> None:
        """Keeps the plan of the next step, in as many microbatches as all ranks have agreed on."""
        if ahead is not None:
            ahead = ahead._replace(plan=self._spread(ahead.plan, ahead.lengths, ahead.limit, microbatches))
        self._ahead = ahead

    def _fewest(self, lengths: list[int], limit: Limit) -> Plan:
        """A plan in as few microbatches as this rank needs, under a limit by length."""
        return plan_step(lengths, limit) if self._padded else join_step(lengths, limit)

    def _spread(self, plan: Plan, lengths: list[int], limit: Limit, microbatches: int) -> Plan:
        """A plan in as many microbatches as all ranks have agreed on."""
        return (spread if self._padded else spread_joined)(plan, lengths, limit, microbatches)


KindOfPass: TypeAlias = Literal["microbatch", "drain"]
AroundPass: TypeAlias = Callable[[KindOfPass], AbstractContextManager[object]]


def _check_recovery(models: Sequence[nn.Module]) -> None:
    for reason in filter(None, map(why_recovery_is_off, models)):
        raise RecoveryUnsupportedError(
            f"a step of this model cannot be repeated after an out-of-memory error: {reason}", Remedy.NO_RECOVERY
        )


class PlanRunner(Generic[Sample]):
    """Runs plans. After every run, whether memory ran out or not, all ranks are at the same `position`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        forward_backward: Callable[[Sequence[Sample]], Totals],
        kind: SampleKind[Sample],
        ledger: CollectiveLedger | None,
        *,
        recover: bool,
        stage: str = "",
    ) -> None:
        if recover:
            _check_recovery(models)
        self.around_pass: AroundPass = lambda _: nullcontext()
        self._forward_backward, self._kind = forward_backward, kind
        self.ledger = ledger or CollectiveLedger(*models, watches=recover)
        self._models = models
        self._recover = recover
        self._stage = stage
        self._compared = False

    def run(self, samples: Sequence[Sample], plan: Plan) -> tuple[Totals | None, int | None]:
        """Collective: the totals of all microbatches, or the number of the one that ran out of memory."""
        try:
            return self._run(samples, plan)
        except BaseException:
            self.ledger.abandon()
            raise

    def _run(self, samples: Sequence[Sample], plan: Plan) -> tuple[Totals | None, int | None]:
        if not self._compared:  # not before: weights may be loaded until the first step
            compare_replicas(self._models)
            self._compared = True
        totals: Totals | None = None
        self._began = time.perf_counter()
        microbatches = [[samples[index] for index in rows] or self._nothing(samples) for rows in plan]
        self.ledger.begin_step(len(microbatches), self._models, self._stage)
        for number, (rows, microbatch) in enumerate(zip(plan, microbatches, strict=True)):
            before = totals
            totals = self._run_microbatch(number, microbatch, before)
            if totals is None:  # outside of `except`, whose traceback would keep the failed pass alive
                self._drain(samples[rows[0] if rows else 0])
                return None, number
            if not rows and totals.target_tokens != (before.target_tokens if before else 0):
                raise ValueError("`filler` returned a sample that counts in the loss; return one without labels")
        return totals, None

    def discard(self) -> float:
        """Drops all gradients of the step, finished or not: they were None when it began. Returns the lost seconds."""
        self.ledger.reset()
        for parameter in (each for model in self._models for each in model.parameters()):
            parameter.grad = None
        return time.perf_counter() - self._began

    def refuse_recovery(self, messages: int, step: int | None) -> None:
        """What all ranks have agreed on: running out of memory in this stage ends the run from now on."""
        why = self.ledger.refuse_recovery(messages)
        where = self._stage if step is None else in_step(step, self._stage)
        if rank() == 0:
            logger.warning(
                "%s%s: training continues without recovery; the next out-of-memory error ends it",
                where and f"{where}: ",
                why,
            )

    def _nothing(self, samples: Sequence[Sample]) -> list[Sample]:
        """An empty microbatch: it communicates like any other, and counts nothing."""
        if self._kind.filler is None:
            raise ValueError(
                f"rank {rank()} has fewer samples than its peers have microbatches; "
                "give its SampleKind a `filler`: a stand-in without labels"
            )
        return [self._kind.filler(samples[0])]

    def _run_microbatch(self, number: int, samples: Sequence[Sample], before: Totals | None) -> Totals | None:
        """Collective: adds a microbatch to the totals; None if it ran out of memory."""
        try:
            self.ledger.begin_microbatch(number)
            with self.around_pass("microbatch"), self.ledger.listening():
                totals = self._forward_backward(samples).widened()
            self.ledger.end_microbatch()
            return totals if before is None else before.plus(totals)
        except Exception as error:
            if not (self._recover and is_oom(error)):
                raise
            forget_frames(error)
        # Before the drain, which has to know whether what was issued is how the record begins.
        self.ledger.break_off_microbatch()
        return None

    def _drain(self, sample: Sample) -> None:
        """Collective: takes part in what the peers still communicate in this step, with next to no memory."""
        # A drain may run out of memory too. What it has issued by then counts, so each try goes on from there, and
        # only one that gets nowhere is the end.
        stuck_at: int | None = None
        while not self._try_to_drain(sample):
            if (position := self.ledger.position) == stuck_at:
                raise UnrecoverableError(
                    f"rank {rank()} ran out of memory with only its shard of the training state allocated, so it "
                    "cannot complete the collectives that its peers are waiting for",
                    Remedy.MORE_RANKS,
                    Remedy.LARGER_BUDGET,
                )
            stuck_at = position

    def _try_to_drain(self, sample: Sample) -> bool:
        """Collective: frees everything, then drains; False if that ran out of memory too."""
        try:
            # Gradients first: what they hold may be what the drain needs.
            self.discard()
            release()
            # Any sample will do, since FSDP communicates parameters only; and it is run only where no record says what
            # comes next.
            with self.around_pass("drain"):
                self.ledger.drain(lambda: self._forward_backward([self._kind.stand_in(sample)]))
            return True
        except Exception as error:
            if not is_oom(error):
                raise
            forget_frames(error)
        return False


class StepRunner(Generic[Sample]):
    """Turns the samples of a step into gradients.

    `forward_backward` collates the samples that it is given, runs forward and backward on the unscaled loss
    sum, and returns the totals. It may be run again with other splits of the same samples, so it must leave
    nothing of its own behind when it raises. Every rank uses the same limit. Under a limit by rows they have the same
    number of samples.

    `kind` says how long a sample is and what may stand in for it. `cost_of` says what a row of so many tokens takes, by
    default its tokens: results compare the ranks by it.

    `limit` is what a microbatch may be. `regrow_after` steps without trouble are followed by a try of the next larger
    limit, up to the given one; 0: never. Give a Governor in place of the limit to decide that yourself. `ledger` counts
    the collectives of the models, and finishes them for a rank that failed; by default it is made for them.

    A step of several stages has a runner for each: `stage` is its name, in messages and in the record. `frozen` are
    models that a microbatch runs beside the trained one. A stage may have no backward at all; it keeps its results by
    sample, since a repeated attempt writes them again: give it `trains=False`, for advice that helps. Stages that share
    models share a `ledger`.

    `asked_to_stop` says whether this rank is to end the run, by a signal say: what the ranks agree on anyway tells all
    of them, in the result of the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Sequence[Sample]], Totals],
        *,
        kind: SampleKind[Sample],
        limit: Limit | Governor,
        cost_of: Callable[[int], float] = float,
        recover: bool = True,
        regrow_after: int = 200,
        ledger: CollectiveLedger | None = None,
        frozen: Sequence[nn.Module] = (),
        stage: str = "",
        trains: bool = True,
        asked_to_stop: Callable[[], bool] = bool,
    ) -> None:
        """Collective: on CUDA it creates the group that the ranks agree on. The model has to be sharded."""
        self.model, self.kind, self.cost_of = model, kind, cost_of
        self.trains, self.recovers, self._asked_to_stop = trains, recover, asked_to_stop
        self.current_step: int | None = None
        """The number of the step that runs; None between two steps."""
        self.on_change: Callable[[Change], None] | None = None
        """Told whenever the limit changes, or is exhausted, on every rank."""
        self.on_plan: Callable[[int, Plan], object] | None = None
        """Told the step and the plan of every attempt before it begins."""
        self.fall_back: Callable[[], str | None] = lambda: None
        """Called on every rank where what has failed cannot be made smaller. It may see to it that microbatches need
        less from then on, and says how. None, as by default: nothing can be done, so the run ends."""
        self._plan_runner = PlanRunner((model, *frozen), forward_backward, kind, ledger, recover=recover, stage=stage)
        self.ledger = self._plan_runner.ledger
        self._agreement, self._closed = Agreement(len(Report._fields)), False
        self._planner = Planner(self._agreement, padded=kind.padded)
        self._governor = Governor.of(limit, regrow_after=regrow_after, stage=stage)
        self._gauge = Gauge(shared=bool(stage))

    @property
    def limit(self) -> Limit:
        """What microbatches are planned under: what is allowed, or less where that did not fit."""
        return self._governor.limit

    @property
    def recoveries(self) -> int:
        return self._governor.counters.recoveries

    @property
    def around_pass(self) -> AroundPass:
        """Opened around every pass that may run out of memory and be repeated: microbatches and drains.

        Replace it while no step runs, to measure passes or to let them fail.
        """
        return self._plan_runner.around_pass

    @around_pass.setter
    def around_pass(self, around: AroundPass) -> None:
        self._plan_runner.around_pass = around

    def use_limit(self, limit: Limit) -> None:
        """Sets the limit from the next step on; where recovery has come down to less, that stays."""
        self._governor.allow(limit)

    def watch(self, memory: MemorySource | None) -> None:
        """Watches memory from the next step on: results tell the peak, and a thrashing allocator changes the limit."""
        self._gauge = self._gauge.for_memory(memory)

    def state_dict(self) -> LimitState:
        """What the limit has come to, and why; the same on all ranks."""
        return self._governor.state()

    def load_state_dict(self, state: LimitState) -> None:
        self._governor.restore(state)

    def close(self) -> None:
        """Puts FSDP's own collectives back. Call it last: the process should end afterwards."""
        self._closed = True
        self.ledger.close()
        let_go()

    def run(self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None) -> StepResult:
        """Collective: forward and backward over all samples, under smaller limits while some rank fails.

        Gradients must be None before, and are complete and unscaled afterwards. `step` is for the log, and may
        be BEFORE_THE_FIRST. `upcoming` are the samples of the next call, where every rank knows its own: under a limit
        by length, the number of their microbatches is then agreed on beside the rest. Without them, that costs a
        reduction of its own.
        """
        self._check(samples)
        self.current_step = step
        try:
            return self._run_until_it_fits(samples, step, upcoming)
        finally:
            self.current_step = None

    def _run_until_it_fits(self, samples: Sequence[Sample], step: int, upcoming: Sequence[Sample] | None) -> StepResult:
        """Collective: attempts, each under a smaller limit than the one before."""
        self._gauge.begin_step()
        lengths = self.kind.lengths(samples)
        rng = RngState.capture()
        recoveries = 0
        while True:
            plan = self._planner.plan(lengths, self.limit)
            if self.on_plan is not None:
                self.on_plan(step, plan)
            totals, failed = self._plan_runner.run(samples, plan)
            # Before the agreement, which tells all ranks how many microbatches the next step has: no further reduction.
            ahead = self._planner.look_ahead(None if upcoming is None else self.kind.lengths(upcoming), self.limit)
            reports = self._agree(totals, failed, plan, samples, len(ahead.plan) if ahead else 0)
            if not reports.failed:
                self._gauge.end_step()
                self._planner.keep(ahead, reports.upcoming_microbatches)
                self._reconsider(reports, step)
                return result_of(totals, reports, len(plan), recoveries)
            # On every rank, failed or not: the attempt leaves neither gradients nor drawn random numbers, so the next
            # one is the same step.
            del totals  # a loss on the device, where this rank had not failed
            lost_seconds = self._plan_runner.discard()
            rng.restore()
            self._tell(replace(self._shrink(reports, step), lost_seconds=lost_seconds), reports)
            recoveries += 1

    def _shrink(self, reports: Reports, step: int) -> Change:
        """The next smaller limit; where there is none, whatever else is left, or an error that says what a rank had."""
        try:
            return self._governor.out_of_memory(reports.failed, step)
        except LimitExhaustedError as error:
            if (how := self.fall_back()) is not None:
                return self._governor.start_over(reports.failed, step, how)
            fact, remedies = error.fact, error.remedies if self.trains else without_backward(error.remedies)
            if (had := reports.shortage) is not None:
                fact, remedies = f"{fact} ({had})", (*remedies, Remedy.LARGER_BUDGET)
            self._record(self._governor.exhausted(reports.failed, step, fact), reports)
            raise LimitExhaustedError(fact, *remedies) from None

    def attempt(self, microbatches: Sequence[Sequence[Sample]]) -> Attempt:
        """Collective: forward and backward over exactly these microbatches, once.

        Nothing shrinks and nothing is run again: where memory runs out, on any rank, all gradients are dropped.
        Random generators stay where the attempt left them.
        """
        samples = [sample for microbatch in microbatches for sample in microbatch]
        self._check(samples)
        numbers = iter(range(len(samples)))
        plan = tuple(tuple(islice(numbers, len(microbatch))) for microbatch in microbatches)
        totals, failed = self._plan_runner.run(samples, plan)
        reports = self._agree(totals, failed, plan, samples)
        if reports.failed:
            self._plan_runner.discard()
            return Attempt(None, tuple(reports.failed), reports.asked_to_stop)
        result = result_of(totals, reports, len(plan), 0)
        return Attempt(result, (), reports.asked_to_stop)

    def _check(self, samples: Sequence[Sample]) -> None:
        if self._closed:
            raise ValueError("this runner is closed and would hang if a rank ran out of memory: create a new one")
        if not samples:
            raise ValueError("a step needs at least 1 sample on every rank, but this rank got none")
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise ValueError(
                "parameters have gradients from before this step, which would mix with its own; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )

    def _agree(
        self, totals: Totals | None, failed: int | None, plan: Plan, samples: Sequence[Sample], upcoming: int = 0
    ) -> Reports:
        """Collective: what happened on every rank, the same everywhere."""
        # On CPU the loss rides along. On a GPU, reading it would wait for the GPU.
        loss_on_host = totals.loss_sum.item() if totals and totals.loss_sum.device.type == "cpu" else 0.0
        reading, lengths, padded = self._gauge.read(), self.kind.lengths(samples), self.kind.padded
        size = troubling(plan, lengths, failed, reading.retries, padded=padded)
        mine = Report(
            failed=failed is not None,
            rows=size.rows,
            length=size.length,
            joined_tokens=size.tokens or 0,
            position=self.ledger.position,
            target_tokens=totals.target_tokens if totals else 0,
            loss_sum=loss_on_host,
            upcoming_microbatches=upcoming,
            **load_of(plan, lengths, padded=padded, rows=self.kind.row_lengths(samples), cost=self.cost_of)._asdict(),
            **reading._asdict(),
            asked_to_stop=self._asked_to_stop(),
            foreign_messages=self.ledger.foreign_messages,
        )
        reports = exchange(self._agreement, mine)
        reports.check_positions()
        if self.recovers and reports.foreign_messages:
            self.recovers = False
            self._plan_runner.refuse_recovery(reports.foreign_messages, self.current_step)
        return reports

    def _reconsider(self, reports: Reports, step: int) -> None:
        """Lets the limit change after a step that counted. Without recovery no other limit can be tried."""
        if self.recovers and (change := self._governor.completed(step, reports.completed)) is not None:
            self._tell(change, reports)

    def _tell(self, change: Change, reports: Reports) -> None:
        if rank() == 0:
            logger.log(logging.WARNING if change.kind == RECOVERY else logging.INFO, "%s", change.reason)
        self._record(change, reports)

    def _record(self, change: Change, reports: Reports) -> None:
        if self.on_change is not None:
            self.on_change(change if (full := reports.fullest) is None else replace(change, **full._asdict()))

    def committing(self, what: str, *, last_checkpoint: str | PathLike[str] | None) -> AbstractContextManager[None]:
        """Guards what happens once all ranks have agreed: scaling, clipping, the optimizer's step.

        Weights may be half updated when that runs out of memory, so it ends the run with a clear error.
        """
        saved = "nothing is saved yet" if last_checkpoint is None else f"last checkpoint: {last_checkpoint}"
        return fatal_where_memory_runs_out(
            lambda _: UnrecoverableError(
                f"out of memory in {what} on rank {rank()}: the weights may be partly updated, so this step cannot be "
                f"repeated ({saved})",
                Remedy.LESS_STATE,
                Remedy.MORE_RANKS,
                Remedy.LARGER_BUDGET,
            )
        )


class Stages(dict[str, StepRunner[Sample]]):
    """What runs each stage, by its name and in their order: the last one trains. A single stage needs no name."""

    @property
    def training(self) -> StepRunner[Sample]:
        return [*self.values()][-1]

    @property
    def limits(self) -> dict[str, Limit]:
        return {stage: runner.limit for stage, runner in self.items()}

    @property
    def recoveries(self) -> int:
        return sum(runner.recoveries for runner in self.values())

    def run(
        self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None
    ) -> dict[str, StepResult]:
        """Collective: all stages, one after the other. Each sample keeps what a stage says of it for those to come."""
        return {stage: runner.run(samples, step=step, upcoming=upcoming) for stage, runner in self.items()}

    def watch(self, memory: MemorySource | None) -> None:
        for runner in self.values():
            runner.watch(memory)

    def use_limits(self, limits: Mapping[str, Limit]) -> None:
        for stage, limit in limits.items():
            self[stage].use_limit(limit)

    def state_dict(self) -> dict[str, LimitState]:
        """What the limits have come to, by stage; the same on all ranks."""
        return {stage: runner.state_dict() for stage, runner in self.items()}
