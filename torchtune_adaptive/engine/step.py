"""Runs a step so that running out of memory, on any rank at any point, costs a repeated step and not the run.

A step is a fixed list of samples. What fits is a limit. Running out of memory changes the limit, never the step:

1. Plan: the samples are split into microbatches under the limit, equally many on every rank.
2. Microbatches: forward and backward, one after another, while the ledger counts FSDP's collectives.
3. Failure: a rank that runs out of memory drops everything that the attempt has allocated.
4. Drain: it issues the collectives that its peers still expect of it, with zeros. Now all ranks are at one position.
5. Agreement: every rank gets one small table of all ranks' reports.
6. If no rank failed, gradients are complete. Otherwise all ranks discard theirs, restore their random generators, and
   start again at 1, under the same smaller limit; only a single row that fails is retried once under the same one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from os import PathLike
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from torch import nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.governor import RECOVERY, Change, Governor, LimitState, in_step
from torchtune_adaptive.engine.ledger import CollectiveLedger
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.engine.memory import Gauge, MemorySource, RngState
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, forget_frames, is_oom, release
from torchtune_adaptive.engine.plans import Plan, join_step, load_of, plan_step, spread, spread_joined
from torchtune_adaptive.engine.ranks import (
    Agreement,
    EqualCounts,
    average_gradients,
    compare_replicas,
    let_go,
    rank,
    world_size,
)
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
KindOfPass: TypeAlias = Literal["microbatch", "drain"]
AroundPass: TypeAlias = Callable[[KindOfPass], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class SampleKind(Generic[Sample]):
    """How long a sample is, and what may take its place. A step never looks into a sample itself."""

    length_of: Callable[[Sample], int]
    """The tokens of a sample, which limits by length go by."""
    stand_in: Callable[[Sample], Sample]
    """The smallest version of a sample that still passes through the whole model, for example its first two tokens: if
    the very first microbatch fails, a pass over it keeps the other ranks company."""
    row_lengths_of: Callable[[Sample], Sequence[int]] | None = None
    """For samples of several rows, such as pairs of answers: the tokens of each row. `length_of` returns the longest,
    and limits count samples all the same."""
    filler: Callable[[Sample], Sample] | None = None
    """A stand-in without any label, run where a rank has fewer samples than the others have microbatches."""
    padded: bool = True
    """Whether rows are padded to the longest of their microbatch. Otherwise samples follow one another in a single row,
    and under a limit by length all their tokens count, whichever of them share a microbatch."""
    cost_of: Callable[[int], float] = float
    """What a row of so many tokens takes, by default its tokens: results compare the ranks by it."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """A sample without tokens counts as one of padding: it takes room too, and no limit divides by its length."""
        return [max(1, self.length_of(sample)) for sample in samples]

    def row_lengths(self, samples: Sequence[Sample]) -> list[Sequence[int]] | None:
        """The tokens of every row; None where each sample is one."""
        return None if self.row_lengths_of is None else [*map(self.row_lengths_of, samples)]


class Recovery:
    """What the stages of a step share: the collectives of their models, and what happens around a change of limit.

    `models` are all that the stages run, frozen ones included. A stage owns the model of its runner and every model
    without a trainable weight: only these are reset when it fails, so the gradients of other stages stay as they are.

    `regrow_after` steps without trouble are followed by a try of the next larger limit, up to the given one; 0: never.
    `asked_to_stop` says whether this rank is to end the run, after a signal for example: all ranks read it in the
    result of the same step. `on_change` is called on every rank when a limit has changed or is exhausted, `on_attempt`
    before each attempt with the stage, the step and the plan.
    """

    def __init__(
        self,
        *models: nn.Module,
        enabled: bool = True,
        regrow_after: int = 200,
        asked_to_stop: Callable[[], bool] = bool,
        on_change: Callable[[Change], object] = lambda _: None,
        on_attempt: Callable[[str, int, Plan], object] = lambda *_: None,
    ) -> None:
        """Collective: on CUDA it creates the group that the ranks agree on. Shard the models before."""
        for reason in filter(None, map(fsdp.why_recovery_is_off, models if enabled else ())):
            raise RecoveryUnsupportedError(
                f"a step of this model cannot be repeated after an out-of-memory error: {reason}", Remedy.NO_RECOVERY
            )
        self.models, self.enabled, self.regrow_after = models, enabled, regrow_after
        self.asked_to_stop, self.on_change, self.on_attempt = asked_to_stop, on_change, on_attempt
        self.ledger = CollectiveLedger(*models, watches=enabled)
        self.agreement = Agreement(len(Report._fields))
        self._stages: set[str] = set()
        self._compared = self._closed = False

    def add_stage(self, stage: str, model: nn.Module) -> None:
        """Refuses a model that is not one of these, and a second stage of the same name: they would share a record."""
        if not any(model is known for known in self.models):
            raise ValueError("the model of a StepRunner has to be one of its Recovery's: pass it to Recovery(...)")
        if stage in self._stages:
            raise ValueError(f"this Recovery has a runner for stage {stage!r} already: give each its own `stage`")
        self._stages.add(stage)

    def with_gradients(self, *but: nn.Module) -> list[nn.Module]:
        """The other models that have gradients now."""
        others = [each for each in self.models if not any(each is known for known in but)]
        return [each for each in others if any(p.grad is not None for p in each.parameters())]

    def owned_by(self, model: nn.Module) -> list[nn.Module]:
        """The models that a stage of this model owns."""
        return [each for each in self.models if each is model or not any(p.requires_grad for p in each.parameters())]

    def prepare(self) -> None:
        """Before each step. Collective the first time: compares replicas, since weights may be loaded until then."""
        if self._closed:
            raise ValueError("this runner is closed and would hang if a rank ran out of memory: create a new one")
        if not self._compared:
            compare_replicas(self.models)
            self._compared = True

    def close(self) -> None:
        """Puts FSDP's own collectives back. Call it last: the process should end afterwards."""
        self._closed = True
        self.ledger.close()
        let_go()


class StepRunner(Generic[Sample]):
    """Turns the samples of a step into gradients.

    `forward_backward` collates the samples that it is given, runs forward and backward on the unscaled loss sum, and
    returns the totals. It may divide the loss by a number of the whole step, never by one of the microbatch: scale
    gradients by `result.target_tokens` afterwards. It may be run again with other splits of the same samples, so it
    must leave nothing of its own behind when it raises.

    `limit` is what a microbatch may be, the same on every rank. Under a limit by rows all ranks have the same number of
    samples. `recovery` is made for the model if none is given.

    A step of several stages has a runner for each, and they share a `recovery`: `stage` is its name, in messages and in
    the record. A stage may have no backward at all; it keeps its results by sample, since a repeated attempt writes
    them again.

    Ranks may hold whole models. Their microbatches must not communicate: call the module inside
    DistributedDataParallel, never the wrapper. Gradients are averaged once all ranks have succeeded.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Sequence[Sample]], Totals],
        *,
        kind: SampleKind[Sample],
        limit: Limit,
        recovery: Recovery | None = None,
        stage: str = "",
    ) -> None:
        """Collective, as `Recovery` is."""
        self.model, self.kind, self.stage = model, kind, stage
        self.recovery = recovery or Recovery(model)
        if not hasattr(limit, "by_length"):
            raise TypeError(f"the limit of a StepRunner is {limit!r}; pass RowLimit({limit!r}) or a TokenLimit")
        self.recovers = self.recovery.enabled
        """Whether an attempt can be repeated; False from the moment on that its microbatches communicate themselves."""
        self.trains: bool | None = None
        """Whether microbatches leave gradients; None until the first attempt has succeeded."""
        self.current_step: int | None = None
        """The number of the step that runs; None between two steps."""
        self._forward_backward, self._ledger = forward_backward, self.recovery.ledger
        self._planner = Planner(self.recovery.agreement, padded=kind.padded)
        self._governor = Governor(limit, regrow_after=self.recovery.regrow_after, stage=stage)
        self._gauge, self._counts = Gauge(shared=bool(stage)), EqualCounts()
        self.recovery.add_stage(stage, model)
        self._had_gradients: list[nn.Module] = []  # models that had gradients before the first attempt
        self._checks_counts = fsdp.gathers_from_all(model)  # else a collective does not show that all have begun
        self._around_pass: AroundPass = lambda _: nullcontext()
        self._averages = world_size() > 1 and fsdp.is_whole(model)

    @property
    def limit(self) -> Limit:
        """What microbatches are planned under: what is allowed, or less where that did not fit."""
        return self._governor.limit

    @property
    def recoveries(self) -> int:
        return self._governor.counters.recoveries

    def use_limit(self, limit: Limit) -> None:
        """Sets the limit from the next step on; where recovery has come down to less, that stays."""
        self._governor.allow(limit)

    def start_over(self) -> None:
        """Call it on all ranks where microbatches need less, or communicate otherwise, from the next step on.

        All that was allowed may be tried again, and what a microbatch communicates is learnt anew.
        """
        self._governor.start_over()
        self._ledger.forget(self.stage)

    def watch(self, memory: MemorySource | None) -> None:
        """Watches memory from the next step on: results have its peak, and a thrashing allocator changes the limit."""
        self._gauge = self._gauge.for_memory(memory)

    @contextmanager
    def wrapping(self, around: AroundPass) -> Iterator[None]:
        """Opens `around` around every pass that may run out of memory and be repeated: microbatches and drains."""
        before = self._around_pass

        @contextmanager
        def nested(kind: KindOfPass) -> Iterator[None]:
            with before(kind), around(kind):
                yield

        self._around_pass = nested
        try:
            yield
        finally:
            self._around_pass = before

    def state_dict(self) -> LimitState:
        """What the limit has come to, and why; the same on all ranks."""
        return self._governor.state()

    def load_state_dict(self, state: LimitState) -> None:
        self._governor.restore(state)

    def close(self) -> None:
        """Closes the recovery, that of all stages."""
        self.recovery.close()

    def run(self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None) -> StepResult:
        """Collective: forward and backward over all samples, under smaller limits while some rank fails.

        Gradients must be None before, and are complete and unscaled afterwards. `step` is for the log.
        `upcoming` are the samples of the next call, where every rank knows its own: under a limit
        by length, the number of their microbatches is then agreed on beside the rest. Without them, that costs a
        reduction of its own.

        Raises LimitExhaustedError on every rank where nothing smaller is left. Gradients and random generators are
        then as they were before, so a caller that can make room elsewhere may call it again.
        """
        self._check(samples)
        self.current_step = step
        try:
            return self._run_until_it_fits(samples, step, upcoming)
        finally:
            self.current_step = None

    def _run_until_it_fits(self, samples: Sequence[Sample], step: int, upcoming: Sequence[Sample] | None) -> StepResult:
        self._gauge.begin_step()
        lengths, rng = self.kind.lengths(samples), RngState.capture()
        recoveries = 0
        while True:
            plan = self._planner.plan(lengths, self.limit)
            if self._checks_counts and not self.limit.by_length:
                self._counts.announce(len(samples))
            self.recovery.on_attempt(self.stage, step, plan)
            began = time.perf_counter()
            totals, failed = self._attempt(samples, plan)
            # Before the agreement, which carries the number of microbatches of the next step along.
            ahead = self._planner.look_ahead(None if upcoming is None else self.kind.lengths(upcoming), self.limit)
            reports = self._agree(totals, failed, plan, samples, len(ahead.plan) if ahead else 0)
            if not reports.failed:
                self._gauge.end_step()
                self._planner.keep(ahead, reports.upcoming_microbatches)
                self._reconsider(reports, step)
                return self._complete(totals, reports, plan, recoveries)
            # On every rank, failed or not: the attempt leaves neither gradients nor drawn random numbers, so the next
            # one is the same step.
            del totals  # a loss on the device, where this rank had not failed
            self._discard()
            rng.restore()
            lost_seconds = time.perf_counter() - began
            self._tell(replace(self._shrink(reports, step), lost_seconds=lost_seconds), reports)
            recoveries += 1

    def attempt(self, microbatches: Sequence[Sequence[Sample]]) -> Attempt:
        """Collective: forward and backward over exactly these microbatches, once.

        Nothing shrinks and nothing is run again: where memory runs out, on any rank, all gradients are dropped.
        Random generators stay where the attempt left them.
        """
        samples = [sample for microbatch in microbatches for sample in microbatch]
        self._check(samples)
        numbers = iter(range(len(samples)))
        plan = tuple(tuple(islice(numbers, len(microbatch))) for microbatch in microbatches)
        totals, failed = self._attempt(samples, plan)
        reports = self._agree(totals, failed, plan, samples)
        if reports.failed:
            self._discard()
            return Attempt(None, tuple(reports.failed), reports.asked_to_stop)
        return Attempt(self._complete(totals, reports, plan, 0), (), reports.asked_to_stop)

    def _check(self, samples: Sequence[Sample]) -> None:
        self.recovery.prepare()
        if not samples:
            raise ValueError("a step needs at least 1 sample on every rank, but this rank got none")
        if self._has_gradients():
            raise ValueError(
                "parameters have gradients from before this step, which would mix with its own; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )

    def _attempt(self, samples: Sequence[Sample], plan: Plan) -> tuple[Totals | None, int | None]:
        """Collective: the totals of all microbatches, or the number of the one that ran out of memory. After either,
        all ranks are at the same position."""
        if self.trains is None:
            self._had_gradients = self.recovery.with_gradients(self.model)
        try:
            return self._run_microbatches(samples, plan)
        except BaseException:
            self._ledger.abandon()
            raise

    def _run_microbatches(self, samples: Sequence[Sample], plan: Plan) -> tuple[Totals | None, int | None]:
        totals: Totals | None = None
        microbatches = [[samples[index] for index in rows] or self._nothing(samples) for rows in plan]
        self._ledger.begin_step(len(microbatches), self.recovery.owned_by(self.model), self.stage)
        for number, (rows, microbatch) in enumerate(zip(plan, microbatches, strict=True)):
            before = totals
            totals = self._run_microbatch(number, microbatch, before)
            if totals is None:  # outside of `except`, whose traceback would keep the failed pass alive
                self._drain(samples[rows[0] if rows else 0])
                return None, number
            if number == 0:
                self._counts.check()
            if not rows and totals.target_tokens != (before.target_tokens if before else 0):
                raise ValueError("`filler` returned a sample that counts in the loss; return one without labels")
        return totals, None

    def _nothing(self, samples: Sequence[Sample]) -> list[Sample]:
        """An empty microbatch: it communicates like any other, and counts nothing."""
        if self.kind.filler is None:
            raise ValueError(
                f"rank {rank()} has fewer samples than its peers have microbatches; "
                "give its SampleKind a `filler`: a stand-in without labels"
            )
        return [self.kind.filler(samples[0])]

    def _run_microbatch(self, number: int, samples: Sequence[Sample], before: Totals | None) -> Totals | None:
        """Collective: adds a microbatch to the totals; None if it ran out of memory."""
        try:
            self._ledger.begin_microbatch(number)
            with self._around_pass("microbatch"), self._ledger.listening():
                totals = Totals.of(self._forward_backward(samples))
            self._ledger.end_microbatch()
            return totals if before is None else before.plus(totals)
        except Exception as error:
            if not (self.recovery.enabled and is_oom(error)):
                raise
            forget_frames(error)
        # Before the drain, which has to know whether what was issued is how the record begins.
        self._ledger.break_off_microbatch()
        return None

    def _drain(self, sample: Sample) -> None:
        """Collective: takes part in what the peers still communicate in this step, with next to no memory."""
        # A drain may run out of memory too. What it has issued by then counts, so each try goes on from there, and
        # only one that gets nowhere is the end.
        stuck_at: int | None = None
        while not self._try_to_drain(sample):
            if (position := self._ledger.position) == stuck_at:
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
            self._discard()
            release()
            # Any sample will do, since FSDP communicates no data. The stand-in runs only if there is no record yet.
            with self._around_pass("drain"):
                self._ledger.drain(lambda: self._forward_backward([self.kind.stand_in(sample)]))
            return True
        except Exception as error:
            if not is_oom(error):
                raise
            forget_frames(error)
        return False

    def _discard(self) -> None:
        """Drops all gradients of the step, finished or not: they were None when it began."""
        self._ledger.reset()
        self.model.zero_grad(set_to_none=True)

    def _agree(
        self, totals: Totals | None, failed: int | None, plan: Plan, samples: Sequence[Sample], upcoming: int = 0
    ) -> Reports:
        """Collective: what happened on every rank, the same everywhere."""
        # On CPU the loss rides along. On a GPU, reading it would wait for the GPU.
        loss_on_host = totals.loss_sum.item() if totals and totals.loss_sum.device.type == "cpu" else 0.0
        reading, lengths, padded = self._gauge.read(), self.kind.lengths(samples), self.kind.padded
        size = troubling(plan, lengths, failed, reading.retries, padded=padded)
        rows, cost = self.kind.row_lengths(samples), self.kind.cost_of
        mine = Report(
            failed=failed is not None,
            rows=size.rows,
            length=size.length,
            joined_tokens=size.tokens or 0,
            position=self._ledger.position,
            target_tokens=totals.target_tokens if totals else 0,
            loss_sum=loss_on_host,
            upcoming_microbatches=upcoming,
            **load_of(plan, lengths, padded=padded, rows=rows, cost=cost)._asdict(),
            **reading._asdict(),
            asked_to_stop=self.recovery.asked_to_stop(),
            foreign_messages=self._ledger.foreign_messages,
            gradients=(self.trains is None or self._averages) and self._has_gradients(),
        )
        reports = exchange(self.recovery.agreement, mine)
        reports.check_positions()
        if self.recovers and reports.foreign_messages:
            self.recovers = False
            self._refuse_recovery(reports.foreign_messages)
        return reports

    def _refuse_recovery(self, messages: int) -> None:
        """All ranks have agreed on it: running out of memory in this stage ends the run from now on."""
        why = self._ledger.refuse_recovery(messages)
        where = self.stage if self.current_step is None else in_step(self.current_step, self.stage)
        if rank() == 0:
            logger.warning(
                "%s%s: training continues without recovery; the next out-of-memory error ends it",
                where and f"{where}: ",
                why,
            )

    def _complete(self, totals: Totals | None, reports: Reports, plan: Plan, recoveries: int) -> StepResult:
        """Collective: the result of an attempt in which no rank failed."""
        if self.trains is None:
            self.trains = reports.gradients
            if self.recovery.with_gradients(self.model, *self._had_gradients):
                raise ValueError(
                    "this stage has left gradients in a model that is not its own, which a failed attempt would not "
                    "drop: give each trained model a StepRunner, or both one parent module"
                )
        if reports.gradients and self._averages:
            with fatal_where_memory_runs_out(
                lambda _: UnrecoverableError(
                    f"out of memory on rank {rank()} while the gradients were averaged, which is not repeated",
                    Remedy.LESS_STATE,
                    Remedy.LARGER_BUDGET,
                )
            ):
                average_gradients(self.model.parameters())
        return result_of(totals, reports, len(plan), recoveries)

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def _shrink(self, reports: Reports, step: int) -> Change:
        """Takes the next smaller limit; if there is none, raises an error with the memory of the rank that failed."""
        try:
            return self._governor.out_of_memory(reports.failed, step)
        except LimitExhaustedError as error:
            fact, remedies = error.fact, error.remedies
            if self.trains is False:
                remedies = without_backward(remedies)
            if (had := reports.shortage) is not None:
                fact, remedies = f"{fact} ({had})", (*remedies, Remedy.LARGER_BUDGET)
            self._record(self._governor.exhausted(reports.failed, step, fact), reports)
            raise LimitExhaustedError(fact, *remedies) from None

    def _reconsider(self, reports: Reports, step: int) -> None:
        """Lets the limit change after a step that counted. Without recovery no other limit can be tried."""
        if self.recovers and (change := self._governor.completed(step, reports.completed)) is not None:
            self._tell(change, reports)

    def _tell(self, change: Change, reports: Reports) -> None:
        if rank() == 0:
            logger.log(logging.WARNING if change.kind == RECOVERY else logging.INFO, "%s", change.reason)
        self._record(change, reports)

    def _record(self, change: Change, reports: Reports) -> None:
        full = reports.fullest
        self.recovery.on_change(change if full is None else replace(change, **full._asdict()))

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


class Ahead(NamedTuple):
    """The plan of a step to come."""

    limit: Limit
    lengths: list[int]
    plan: Plan


class Planner:
    """Plans with the same number of microbatches on every rank; that of the next step too, where its samples are known.

    Under a limit by rows ranks with equally many samples have equally many microbatches. Under a limit by length they
    agree on the most that any of them needs.
    """

    def __init__(self, agreement: Agreement, *, padded: bool) -> None:
        """`padded`: whether the rows of a microbatch are padded to the longest."""
        self._agreement, self._padded = agreement, padded
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
        return plan_step(lengths, limit) if self._padded else join_step(lengths, limit)

    def _spread(self, plan: Plan, lengths: list[int], limit: Limit, microbatches: int) -> Plan:
        return (spread if self._padded else spread_joined)(plan, lengths, limit, microbatches)


class Stages(dict[str, StepRunner[Sample]]):
    """What runs each stage of a step, by its name and in their order: the last one trains. A single one needs no name.

    Each has its limit and its recoveries; all run the same samples.
    """

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
        """Collective: all stages, one after another. Samples keep the results of a stage for those that follow."""
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
