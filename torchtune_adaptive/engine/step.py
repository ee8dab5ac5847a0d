"""Runs a step so that running out of memory, on any rank at any point, costs a repeated step and not the run.

A step is a fixed list of samples. What fits is a limit. Running out of memory changes the limit, never the step:

1. Plan: the samples are split into microbatches under the limit, equally many on every rank.
2. Microbatches: forward and backward, one after another, while the ledger counts FSDP's collectives.
3. Failure: a rank runs out of memory, and the pass that failed is forgotten.
4. Drain: that rank drops everything else that the attempt has allocated, and issues the collectives that its peers
   still expect of it, with zeros. Now all ranks are at one position.
5. Agreement: every rank gets one small table of all ranks' reports.
6. If no rank failed, gradients are complete. Otherwise all ranks discard theirs, restore their random generators, and
   start again at 1. The limit is now smaller, and equal on all ranks; if only single rows failed, it first stays.

`StepRunner.run` has 1, 5 and 6, `StepRunner._attempt` has 2 to 4.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import index
from os import PathLike
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from torch import nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.collectives import CollectiveLedger
from torchtune_adaptive.engine.governor import EXHAUSTED, RECOVERY, Change, Governor, LimitState, in_step
from torchtune_adaptive.engine.limits import Limit, Microbatch
from torchtune_adaptive.engine.memory import Gauge, MemorySource
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, forget_frames, is_oom, release
from torchtune_adaptive.engine.plans import Plan, load_of, plan_step, size_of, spread
from torchtune_adaptive.engine.ranks import (
    Agreement,
    EqualSteps,
    average_gradients,
    compare_replicas,
    let_go,
    rank,
    world_size,
)
from torchtune_adaptive.engine.results import (
    REPORT_COLUMNS,
    AttemptReport,
    AttemptReports,
    StepResult,
    Totals,
    exchange,
    result_of,
)
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.errors import (
    ConfigError,
    LimitExhaustedError,
    RecoveryUnsupportedError,
    Remedy,
    UnrecoverableError,
    without_backward,
)
from torchtune_adaptive.text import is_whole

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
        lengths = [self.length_of(sample) for sample in samples]
        try:
            return [max(1, index(length)) for length in lengths]
        except TypeError as error:
            raise TypeError(f"SampleKind's length_of returns no whole numbers of tokens: {lengths[:3]}") from error


class Recovery:
    """What the stages of a step share: the collectives of their models, and what happens around a change of limit.

    `models` are all that the stages run, frozen ones included. A stage owns the model of its runner and every model
    without a trainable weight: only these are reset when it fails, so the gradients of other stages stay as they are.

    `exchanges_activations`: microbatches communicate besides FSDP2, as under context parallelism. Meshes of parameters
    show tensor and expert parallelism. Ranks that share a sample pass the same samples to `run`.
    `regrow_after` steps without trouble are followed by a try of the next larger limit, up to the given one; 0: never.
    `asked_to_stop` says whether this rank is to end the run, after a signal for example: all ranks read it in the
    result of the same step. `on_change` is called on every rank when a limit has changed or is exhausted, `on_attempt`
    before each attempt with the stage, the step and the plan.
    """

    def __init__(
        self,
        *models: nn.Module,
        enabled: bool = True,
        exchanges_activations: bool = False,
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
        if not is_whole(regrow_after, at_least=0):
            raise ConfigError(f"regrow_after: {regrow_after!r} steps; give 0 (never) or a larger whole number")
        self.models, self.enabled, self.regrow_after = models, enabled, regrow_after
        self.asked_to_stop, self.on_change, self.on_attempt = asked_to_stop, on_change, on_attempt
        self.ledger = CollectiveLedger(*models, watches=enabled, exchanges_activations=exchanges_activations)
        self.agreement = Agreement(REPORT_COLUMNS)
        self._stages: set[str] = set()
        self._compared = self._closed = False

    def add_stage(self, stage: str, model: nn.Module) -> None:
        """Refuses a model that is not one of these, and a second stage of the same name: they would share a record."""
        if not any(model is known for known in self.models):
            raise ValueError("the model of a StepRunner has to be one of its Recovery's: pass it to Recovery(...)")
        if stage in self._stages:
            raise ValueError(f"this Recovery has a runner for stage {stage!r} already: give each its own `stage`")
        self._stages.add(stage)

    def owned_by(self, model: nn.Module) -> list[nn.Module]:
        """The models that a stage of this model owns."""
        return [each for each in self.models if each is model or not any(p.requires_grad for p in each.parameters())]

    def gradients_beside(self, model: nn.Module) -> int:
        """How many of the other models have gradients now."""
        return sum(_has_gradients(each) for each in self.models if each is not model)

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


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def _check_limit(limit: object) -> None:
    if isinstance(limit, type) or not hasattr(limit, "by_length"):
        raise TypeError(f"the limit of a StepRunner is {limit!r}; pass a RowLimit or a TokenLimit, such as RowLimit(8)")


class _Ahead(NamedTuple):
    """The plan of the next step, where its samples are known."""

    limit: Limit
    lengths: list[int]
    plan: Plan


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
        _check_limit(limit)
        if not isinstance(kind, SampleKind):
            raise TypeError(f"the kind of a StepRunner is {kind!r}; pass SampleKind(length_of=..., stand_in=...)")
        self.model, self.kind, self.stage = model, kind, stage
        self.recovery = recovery or Recovery(model)
        self.recovery.add_stage(stage, model)
        self.recovers = self.recovery.enabled
        """Whether an attempt can be repeated; False from the moment on that its microbatches communicate themselves."""
        self.trains: bool | None = None
        """Whether microbatches leave gradients; None until the first attempt has succeeded."""
        self.current_step: int | None = None
        """The number of the step that runs or has run last; None after `attempt`, which belongs to no step."""
        self._forward_backward, self._ledger = forward_backward, self.recovery.ledger
        self._governor = Governor(limit, regrow_after=self.recovery.regrow_after, stage=stage)
        self._around_pass: AroundPass = lambda _: nullcontext()
        self._ahead: _Ahead | None = None
        self._gradients_beside = 0  # models of other stages that had some before the first attempt
        self._equal_steps = EqualSteps()
        # where a collective needs every rank, its end shows that all have begun the step
        self._checks_steps = fsdp.gathers_from_all(model)
        self._is_whole = fsdp.is_whole(model)
        self._averages = world_size() > 1 and self._is_whole
        self.watch(None)

    @property
    def limit(self) -> Limit:
        """What microbatches are planned under: what is allowed, or less where that did not fit."""
        return self._governor.limit

    @property
    def recoveries(self) -> int:
        return self._governor.recoveries

    def use_limit(self, limit: Limit) -> None:
        """Sets the limit from the next step on; where recovery has come down to less of the same unit, that stays."""
        _check_limit(limit)
        self._governor.allow(limit)

    def start_over(self) -> None:
        """Call it on all ranks where microbatches need less, or communicate otherwise, from the next step on.

        All that was allowed may be tried again, and what a microbatch communicates is learnt anew.
        """
        self._governor.start_over()
        self._ledger.forget(self.stage)

    def watch(self, memory: MemorySource | None) -> None:
        """Watches memory from the next step on: results have its peak, and a thrashing allocator changes the limit."""
        self._gauge = Gauge(memory, shared=bool(self.stage))

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

        Gradients must be None before, and are complete and unscaled afterwards. `step` is the same on all ranks, and
        another one in each call. `upcoming` are this rank's samples of the next call, if it knows them already: under a
        limit by length, the number of their microbatches then travels with this step's agreement, and needs no
        reduction of its own.

        Raises LimitExhaustedError on every rank where nothing smaller is left. Gradients and torch's random generators
        are then as they were before, so a caller that can make room elsewhere may call it again.
        """
        self._check(samples)
        self.current_step = step
        self._gauge.begin_step()
        lengths, rng, recoveries = self.kind.lengths(samples), RngState.capture(), 0
        while True:
            plan = self._plan(lengths)
            if self._checks_steps and not self.limit.by_length:
                self._equal_steps.announce(f"{len(samples)} in {len(plan)}")
            self.recovery.on_attempt(self.stage, step, plan)
            began = time.perf_counter()
            totals, failed = self._attempt(samples, plan)
            # Before the agreement, which carries the number of microbatches of the next step along.
            ahead = self._plan_ahead(upcoming) if upcoming is not None and self.limit.by_length else None
            reports = self._agree(totals, failed, plan, samples, len(ahead.plan) if ahead else 0)
            if totals is not None and not reports.failed:
                self._gauge.end_step()
                if ahead is not None and (most := reports.upcoming_microbatches):
                    same_number = spread(ahead.plan, ahead.lengths, ahead.limit, most, padded=self.kind.padded)
                    self._ahead = ahead._replace(plan=same_number)
                # Without recovery no other limit can be tried.
                if self.recovers and (change := self._governor.completed(step, reports.rate, reports.retrying)):
                    self._tell(change, reports)
                return self._complete(totals, reports, plan, recoveries)
            # On every rank, failed or not: the attempt leaves neither gradients nor drawn random numbers, so the next
            # one is the same step.
            del totals  # a loss on the device, where this rank had not failed
            self._discard()
            rng.restore()
            if hooks := fsdp.why_hooks_forbid_it(self.model):  # installed since the Recovery was made
                raise RecoveryUnsupportedError(
                    f"out of memory in {in_step(step, self.stage)}, which cannot be repeated: {hooks}",
                    Remedy.NO_RECOVERY,
                )
            change = self._governor.out_of_memory(reports.failed, step)
            if change.kind == EXHAUSTED:
                raise self._exhausted(change, reports)
            self._tell(replace(change, lost_seconds=time.perf_counter() - began), reports)
            recoveries += 1

    def attempt(self, microbatches: Sequence[Sequence[Sample]]) -> tuple[StepResult | None, AttemptReports]:
        """Collective: forward and backward over exactly these microbatches, once.

        Nothing shrinks and nothing is run again: where memory runs out, on any rank, there is no result, and all
        gradients are dropped. Random generators stay where the attempt left them.
        """
        samples = [sample for microbatch in microbatches for sample in microbatch]
        self._check(samples)
        self.current_step = None
        numbers = iter(range(len(samples)))
        plan = tuple(tuple(islice(numbers, len(microbatch))) for microbatch in microbatches)
        totals, failed = self._attempt(samples, plan)
        reports = self._agree(totals, failed, plan, samples)
        if totals is not None and not reports.failed:
            return self._complete(totals, reports, plan, 0), reports
        self._discard()
        return None, reports

    def _check(self, samples: Sequence[Sample]) -> None:
        self.recovery.prepare()
        if not isinstance(samples, Sequence):
            raise TypeError(f"samples is a {type(samples).__name__}: pass a list with an entry for each sample")
        if not samples:
            raise ValueError("a step needs at least 1 sample on every rank, but this rank got none")
        if self.trains is None and self._is_whole != fsdp.is_whole(self.model):
            raise ValueError("the model was sharded after its StepRunner was made: call fully_shard before")
        if _has_gradients(self.model):
            raise ValueError(
                "parameters have gradients from before this step, which would mix with its own; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )

    def _plan(self, lengths: list[int]) -> Plan:
        """Collective, under a limit by length that was not planned for ahead: equally many microbatches on every rank.

        Under a limit by rows, ranks with equally many samples have that anyway.
        """
        limit, padded, ahead = self.limit, self.kind.padded, self._ahead
        self._ahead = None
        if ahead is not None and ahead.limit == limit:
            if ahead.lengths != lengths:
                raise ValueError("the samples differ from those announced as `upcoming`; pass the same ones")
            return ahead.plan
        plan = plan_step(lengths, limit, padded=padded)
        if not limit.by_length:
            return plan
        if self._checks_steps:
            self._equal_steps.announce("by length")
            self._equal_steps.check(waits=True)
        most = exchange(self.recovery.agreement, AttemptReport(upcoming_microbatches=len(plan))).upcoming_microbatches
        return spread(plan, lengths, limit, most, padded=padded)

    def _plan_ahead(self, upcoming: Sequence[Sample]) -> _Ahead:
        """The fewest microbatches that the next step takes on this rank."""
        limit, lengths = self.limit, self.kind.lengths(upcoming)
        return _Ahead(limit, lengths, plan_step(lengths, limit, padded=self.kind.padded))

    def _attempt(self, samples: Sequence[Sample], plan: Plan) -> tuple[Totals | None, int | None]:
        """Collective: the totals of all microbatches, or the number of the one that ran out of memory. After either,
        all ranks are at the same position."""
        if self.trains is None:
            self._gradients_beside = self.recovery.gradients_beside(self.model)
        totals: Totals | None = None
        microbatches = [[samples[index] for index in rows] or self._nothing(samples) for rows in plan]
        try:
            self._ledger.begin_step(len(microbatches), self.recovery.owned_by(self.model), self.stage)
            for number, (rows, microbatch) in enumerate(zip(plan, microbatches, strict=True)):
                try:
                    self._ledger.begin_microbatch(number)
                    with self._around_pass("microbatch"), self._ledger.listening():
                        own = Totals.of(self._forward_backward(microbatch))
                    self._ledger.end_microbatch()
                    totals = own if totals is None else totals.plus(own)
                except Exception as error:
                    if not (self.recovery.enabled and is_oom(error)):
                        raise
                    forget_frames(error)
                else:
                    if number == 0:
                        self._equal_steps.check()
                    if not rows and own.target_tokens:
                        raise ValueError(
                            "`filler` returned a sample that counts in the loss; return one without labels"
                        )
                    continue
                # Outside of `except`, whose traceback would keep the failed pass alive. Before the drain, which first
                # needs to know whether this microbatch has followed the record so far.
                self._ledger.break_off_microbatch()
                self._drain(microbatches, samples[rows[0] if rows else 0])
                return None, number
        except BaseException:
            self._ledger.abandon()
            raise
        return totals, None

    def _nothing(self, samples: Sequence[Sample]) -> list[Sample]:
        """An empty microbatch: it communicates like any other, and counts nothing."""
        if self.kind.filler is None:
            raise ValueError(
                f"rank {rank()} has fewer samples than its peers have microbatches; "
                "give its SampleKind a `filler`: a stand-in without labels"
            )
        return [self.kind.filler(samples[0])]

    def _drain(self, microbatches: Sequence[Sequence[Sample]], sample: Sample) -> None:
        """Collective: takes part in what the peers still communicate in this step, with next to no memory."""
        # A drain may run out of memory too. What it has issued by then counts, so each try goes on from there, and
        # only one that gets nowhere is the end.
        stuck_at: int | None = None
        while True:
            try:
                # Gradients first: what they hold may be what the drain needs.
                self._discard()
                release()
                with self._around_pass("drain"):
                    self._ledger.drain(
                        # Of copies, since a stage may keep its results in the samples.
                        [partial(self._forward_backward, [*map(copy.copy, each)]) for each in microbatches],
                        # Any sample will do, since FSDP communicates no data. It is run only if there is no record yet.
                        lambda: self._forward_backward([self.kind.stand_in(sample)]),
                    )
                return
            except Exception as error:
                if not is_oom(error):
                    raise
                forget_frames(error)
            if (position := self._ledger.progress) == stuck_at:
                raise UnrecoverableError(
                    f"rank {rank()} ran out of memory with only its shard of the training state allocated, so it "
                    "cannot complete the collectives that its peers are waiting for",
                    Remedy.MORE_RANKS,
                    Remedy.LARGER_BUDGET,
                )
            stuck_at = position

    def _discard(self) -> None:
        """Drops all gradients of the step, finished or not: they were None when it began."""
        self._ledger.reset()
        self.model.zero_grad(set_to_none=True)

    def _agree(
        self, totals: Totals | None, failed: int | None, plan: Plan, samples: Sequence[Sample], upcoming: int = 0
    ) -> AttemptReports:
        """Collective: what happened on every rank, the same everywhere."""
        kind, reading, lengths = self.kind, self._gauge.read(), self.kind.lengths(samples)
        sizes, trouble = [size_of(rows, lengths, padded=kind.padded) for rows in plan], Microbatch(0, 0)
        if failed is not None:
            trouble = sizes[failed]
        elif reading.retries:
            trouble = max(sizes, key=lambda size: size.room_tokens)
        rows = None if kind.row_lengths_of is None else [*map(kind.row_lengths_of, samples)]
        mine = AttemptReport(
            microbatch=trouble,
            load=load_of(plan, lengths, padded=kind.padded, rows=rows, cost=kind.cost_of),
            reading=reading,
            failed=failed is not None,
            position=self._ledger.position,
            target_tokens=totals.target_tokens if totals else 0,
            # On CPU the loss rides along. On a GPU, reading it would wait for the GPU.
            loss_sum=totals.loss_sum.item() if totals and totals.loss_sum.device.type == "cpu" else 0.0,
            upcoming_microbatches=upcoming,
            asked_to_stop=self.recovery.asked_to_stop(),
            foreign_messages=self._ledger.foreign_messages,
            gradients=(self.trains is None or self._averages) and _has_gradients(self.model),
            step=self.current_step or 0,
        )
        reports = exchange(self.recovery.agreement, mine)
        reports.check_positions()
        foreign = max(report.foreign_messages for report in reports)
        if self.recovers and foreign:
            self.recovers, why = False, self._ledger.refuse_recovery(foreign)
            where = self.stage if self.current_step is None else in_step(self.current_step, self.stage)
            if rank() == 0:
                logger.warning(
                    "%s%s: training continues without recovery; the next out-of-memory error ends it",
                    where and f"{where}: ",
                    why,
                )
        return reports

    def _complete(self, totals: Totals, reports: AttemptReports, plan: Plan, recoveries: int) -> StepResult:
        """Collective: the result of an attempt in which no rank failed."""
        gradients = any(report.gradients for report in reports)
        if self.trains is None:
            self.trains = gradients
            if self.recovery.gradients_beside(self.model) > self._gradients_beside:
                raise ValueError(
                    "this stage has left gradients in a model that is not its own, which a failed attempt would not "
                    "drop: give each trained model a StepRunner, or both one parent module"
                )
        if gradients and self._averages:
            with fatal_where_memory_runs_out(
                lambda _: UnrecoverableError(
                    f"out of memory on rank {rank()} while the gradients were averaged, which is not repeated",
                    Remedy.LESS_STATE,
                    Remedy.LARGER_BUDGET,
                )
            ):
                average_gradients(self.model.parameters())
        return result_of(totals, reports, len(plan), recoveries)

    def _exhausted(self, change: Change, reports: AttemptReports) -> LimitExhaustedError:
        """The error where there is no smaller limit, with the memory of the rank that failed."""
        fact, remedies = change.reason, [Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS]
        if (shortage := reports.shortage) is not None:
            fact, remedies = f"{fact} ({shortage})", [*remedies, Remedy.LARGER_BUDGET]
        self._tell(replace(change, reason=fact), reports)
        return LimitExhaustedError(fact, *(without_backward(remedies) if self.trains is False else remedies))

    def _tell(self, change: Change, reports: AttemptReports) -> None:
        if rank() == 0 and change.kind != EXHAUSTED:  # which is an error
            logger.log(logging.WARNING if change.kind == RECOVERY else logging.INFO, "%s", change.reason)
        fullest = reports.fullest
        self.recovery.on_change(change if fullest is None else replace(change, **fullest._asdict()))

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
