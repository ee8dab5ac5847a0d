"""Runs a step so that an out-of-memory error, on any rank and at any point, costs a repeated step and not the run.

A step is a fixed list of samples. Running out of memory changes the limit of a microbatch, never the step:

1. Plan: split the samples into microbatches within the limit, the same number on every rank.
2. Attempt: run the forward and backward of every microbatch, while the ledger counts collectives.
3. Drain, only on a rank that ran out of memory: free what the attempt has allocated, and issue the collectives that
   peers still expect, with zeros. Then all ranks are at the same position.
4. Agree: every rank gets the reports of all ranks, in one small collective.
5. Recover, if any rank failed: all ranks discard gradients, restore random generators and lower the limit equally, and
   start again at 1. If only single rows failed, the first retry keeps the limit.

`StepRunner.run` is this loop.
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
from torchtune_adaptive.engine.limits import Limit, MicrobatchSize
from torchtune_adaptive.engine.memory import Gauge, MemorySource
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, forget_frames, is_oom, release
from torchtune_adaptive.engine.plans import Plan, load_of, plan_step, size_of, spread
from torchtune_adaptive.engine.ranks import (
    Agreement,
    EqualSteps,
    average_gradients,
    compare_replicas,
    let_gloo_threads_finish,
    rank,
    world_size,
)
from torchtune_adaptive.engine.results import (
    REPORT_COLUMNS,
    AttemptReport,
    AttemptReports,
    StepResult,
    Totals,
    gather_reports,
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
from torchtune_adaptive.formatting import format_apart, is_whole

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")
KindOfPass: TypeAlias = Literal["microbatch", "drain"]
AroundPass: TypeAlias = Callable[[KindOfPass], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class SampleKind(Generic[Sample]):
    """Describes samples to a step, which never looks into them."""

    length_of: Callable[[Sample], int]
    """Returns the number of tokens of a sample, for limits by length."""
    filler: Callable[[Sample], Sample]
    """Returns a small sample without labels that passes through the whole model, for example two tokens. A rank runs it
    if the others have more microbatches, and a drain runs it in place of a microbatch that has no record."""
    row_lengths_of: Callable[[Sample], Sequence[int]] | None = None
    """For samples of several rows, such as pairs of answers: returns the tokens of each row. `length_of` then returns
    those of the longest row. A RowLimit still counts samples, not rows."""
    padded: bool = True
    """True if rows are padded to the longest one. Otherwise samples are concatenated into one row, and a limit by
    length counts all tokens."""
    cost_of: Callable[[int], float] = float
    """Returns the relative cost of a row with this number of tokens. `StepResult.imbalance` compares ranks by it."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Return the lengths of samples, at least 1: an empty sample is padded to one token."""
        return [max(1, index(self.length_of(sample))) for sample in samples]


class Recovery:
    """The state that the stages of a step share: the ledger of collectives, and callbacks.

    `models` are all models that the stages run, also frozen ones. A stage owns the runner's model and all frozen
    models: only these are reset when it fails, so the gradients of other stages stay as they are.

    Set `exchanges_activations` if microbatches communicate besides FSDP2, as in context parallelism; tensor and expert
    parallelism are detected. Ranks that share samples, for example under tensor parallelism, must pass the same samples
    to `run`. After `regrow_after` steps without out-of-memory errors or allocator retries, a lowered limit grows again;
    0 disables this. `asked_to_stop` is called once per attempt. If it returns True on any rank, for example after a
    signal, the result of that step has `asked_to_stop` on all ranks. `on_change` is called on every rank when a limit
    changes or is exhausted, and `on_attempt` before each attempt, with the stage, the step and the plan.
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
        """Collective: on CUDA, create the group of the agreement. Shard the models first."""
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
        """Register a stage; raise ValueError for an unknown model or a second stage of the same name."""
        if not any(model is known for known in self.models):
            raise ValueError("the model of a StepRunner is unknown to its Recovery: pass it to Recovery(...)")
        if stage in self._stages:
            raise ValueError(f"this Recovery has a runner for stage {stage!r} already: give each its own `stage`")
        self._stages.add(stage)

    def owned_by(self, model: nn.Module) -> list[nn.Module]:
        """Return the models that the stage of this model owns."""
        return [each for each in self.models if each is model or not any(p.requires_grad for p in each.parameters())]

    def others_with_gradients(self, model: nn.Module) -> int:
        """Return the number of other models that have gradients now."""
        return sum(_has_gradients(each) for each in self.models if each is not model)

    def prepare(self) -> None:
        """Prepare a step. The first call is collective and compares the replicas' weights, so load them before it."""
        if self._closed:
            raise ValueError("this runner is closed and would hang if a rank ran out of memory: create a new one")
        if not self._compared:
            compare_replicas(self.models)
            self._compared = True

    def close(self) -> None:
        """Restore FSDP's own collectives. Call it last; the process should end afterwards."""
        self._closed = True
        self.ledger.close()
        let_gloo_threads_finish()


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


class _NextPlan(NamedTuple):
    """The plan of the next step."""

    limit: Limit
    lengths: list[int]
    plan: Plan


class StepRunner(Generic[Sample]):
    """Turns the samples of a step into gradients.

    `forward_backward` collates the given samples, runs forward and backward on the sum of their losses, and returns the
    totals. It must not divide the loss by a number that differs between microbatches, such as their tokens. To get the
    mean over tokens, divide the gradients by `result.target_tokens` afterwards. A repeated step calls it with other
    splits of the same samples.

    `limit` is the limit of a microbatch, the same on every rank. Under a limit by rows, all ranks need the same number
    of samples. By default, the runner creates a Recovery for its model.

    A step of several stages has one runner per stage, with a shared `recovery`. `stage` is the stage's name in messages
    and records. A stage without backward stores its results per sample; a repeated attempt overwrites them.

    Ranks may hold whole models. Their microbatches must not communicate: call the module inside
    DistributedDataParallel, not the wrapper. Gradients are averaged after all ranks have succeeded.
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
        """Collective, because of `Recovery`."""
        self.model, self.kind, self.stage = model, kind, stage
        self.recovery = recovery or Recovery(model)
        self.recovery.add_stage(stage, model)
        self.recovers = self.recovery.enabled
        """True while attempts can be repeated; False after microbatches have communicated outside FSDP."""
        self.trains: bool | None = None
        """True if microbatches produce gradients; unknown until the first attempt has succeeded."""
        self.current_step: int | None = None
        """Number of the current or latest step; None after `attempt`."""
        self._forward_backward, self._ledger = forward_backward, self.recovery.ledger
        self._governor = Governor(limit, regrow_after=self.recovery.regrow_after, stage=stage)
        self._around_pass: AroundPass = lambda _: nullcontext()
        self._next_plan: _NextPlan | None = None
        self._others_with_gradients = 0  # the number of other models with gradients before the first attempt
        self._equal_steps = EqualSteps()
        # EqualSteps needs a collective of all ranks: when it ends, every rank has announced its step.
        self._checks_steps = fsdp.gathers_from_all(model)
        self._is_whole = fsdp.is_whole(model)
        self._averages = world_size() > 1 and self._is_whole
        self.measure_memory(None)

    @property
    def limit(self) -> Limit:
        """The current limit, at most the allowed one."""
        return self._governor.limit

    @property
    def recoveries(self) -> int:
        """Number of repeated attempts so far."""
        return self._governor.recoveries

    def use_limit(self, limit: Limit) -> None:
        """Allow this limit from the next step on.

        If recovery has lowered the limit, and the unit stays the same, the smaller of both is used.
        """
        self._governor.allow(limit)

    def start_over(self) -> None:
        """Return to the allowed limit and record collectives anew, because microbatches change.

        Call it on all ranks if microbatches need less memory or communicate differently from the next step on.
        """
        self._governor.start_over()
        self._ledger.forget(self.stage)

    def measure_memory(self, memory: MemorySource | None) -> None:
        """Measure memory from the next step on: for results, and to lower the limit if the allocator thrashes."""
        self._gauge = Gauge(memory, shared=bool(self.stage))

    @contextmanager
    def wrapping(self, around: AroundPass) -> Iterator[None]:
        """Enter `around(kind)` for every pass that may run out of memory and be repeated: microbatches and drains."""
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
        """Return the state of the limit, which is the same on all ranks."""
        return self._governor.state()

    def load_state_dict(self, state: LimitState) -> None:
        """Restore the state of the limit."""
        self._governor.restore(state)

    def close(self) -> None:
        """Close the recovery, for all stages."""
        self.recovery.close()

    def run(self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None) -> StepResult:
        """Collective: run forward and backward over all samples, and retry under smaller limits while any rank fails.

        Gradients must be None before, and are complete and unscaled afterwards. `step` is the same on all ranks, and
        differs from call to call. `upcoming` are this rank's samples of the next call, if they are known. Under a limit
        by length, this step's agreement then includes their number of microbatches, which saves an agreement in the
        next call.

        Raises LimitExhaustedError on every rank if memory runs out at the smallest limit. Gradients and torch's random
        generators are then as before the call, so the caller may free memory and call it again.
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
            outcome = self._attempt(samples, plan)
            upcoming_plan = self._plan_upcoming(upcoming)
            reports = self._agree(outcome, plan, samples, len(upcoming_plan.plan) if upcoming_plan else 0)
            if isinstance(outcome, Totals) and not reports.failed:
                self._keep_plan(upcoming_plan, reports.upcoming_microbatches)
                # without recovery, no other limit can be tried
                if self.recovers and (change := self._governor.completed(step, reports.retrying)):
                    self._announce(change, reports)
                return self._complete(outcome, reports, plan, recoveries)
            del outcome  # frees the loss, if it is on the device
            self._recover(reports, rng, step, began)
            recoveries += 1

    def attempt(self, microbatches: Sequence[Sequence[Sample]]) -> tuple[StepResult | None, AttemptReports]:
        """Collective: run forward and backward over exactly these microbatches, once.

        If any rank runs out of memory, all ranks drop the gradients and return no result. The limit stays, and random
        generators are not restored.
        """
        samples = [sample for microbatch in microbatches for sample in microbatch]
        self._check(samples)
        self.current_step = None
        numbers = iter(range(len(samples)))
        plan = tuple(tuple(islice(numbers, len(microbatch))) for microbatch in microbatches)
        outcome = self._attempt(samples, plan)
        reports = self._agree(outcome, plan, samples)
        if isinstance(outcome, Totals) and not reports.failed:
            return self._complete(outcome, reports, plan, 0), reports
        self._discard()
        return None, reports

    def _check(self, samples: Sequence[Sample]) -> None:
        self.recovery.prepare()
        if not samples:
            raise ValueError("a step needs at least 1 sample on every rank, but this rank got 0")
        if self.trains is None and self._is_whole != fsdp.is_whole(self.model):
            raise ValueError("the model was sharded after its StepRunner was created: call fully_shard first")
        if _has_gradients(self.model):
            raise ValueError(
                "parameters have gradients from before this step, which would be added to those of the step; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )

    def _plan(self, lengths: list[int]) -> Plan:
        """Split the samples into equally many microbatches on all ranks. A limit by rows needs equally many samples.

        Collective under a limit by length, unless the previous call of `run` has planned these samples as `upcoming`.
        """
        limit, padded, planned = self.limit, self.kind.padded, self._next_plan
        self._next_plan = None
        if planned is not None and planned.limit == limit:
            if planned.lengths != lengths:
                raise ValueError("the samples differ from those announced as `upcoming`; pass the same ones")
            return planned.plan
        plan = plan_step(lengths, limit, padded=padded)
        if not limit.by_length:
            return plan
        if self._checks_steps:
            self._equal_steps.announce("by length")
            self._equal_steps.check(waits=True)
        needs = gather_reports(self.recovery.agreement, AttemptReport(upcoming_microbatches=len(plan)))
        return spread(plan, lengths, limit, needs.upcoming_microbatches, padded=padded)

    def _plan_upcoming(self, upcoming: Sequence[Sample] | None) -> _NextPlan | None:
        """Plan the next step in the fewest microbatches; None if its samples are unknown, or under a limit by rows."""
        limit = self.limit
        if upcoming is None or not limit.by_length:
            return None
        lengths = self.kind.lengths(upcoming)
        return _NextPlan(limit, lengths, plan_step(lengths, limit, padded=self.kind.padded))

    def _keep_plan(self, upcoming: _NextPlan | None, microbatches: int) -> None:
        """Keep the next step's plan, spread over this number of microbatches; drop it if a rank has no plan (0)."""
        if upcoming is not None and microbatches:
            limit, lengths, plan = upcoming
            self._next_plan = _NextPlan(
                limit, lengths, spread(plan, lengths, limit, microbatches, padded=self.kind.padded)
            )

    def _attempt(self, samples: Sequence[Sample], plan: Plan) -> Totals | int:
        """Collective: run all microbatches. Return their totals, or the number of the one that ran out of memory.

        In both cases, this rank has issued all collectives of the step.
        """
        if self.trains is None:
            self._others_with_gradients = self.recovery.others_with_gradients(self.model)
        microbatches = [[samples[index] for index in rows] or [self.kind.filler(samples[0])] for rows in plan]
        totals: Totals | None = None
        try:
            self._ledger.begin_step(len(microbatches), self.recovery.owned_by(self.model), self.stage)
            for number, microbatch in enumerate(microbatches):
                target_tokens = totals.target_tokens if totals else 0
                totals = self._run_microbatch(number, microbatch, totals)
                if totals is None:
                    self._drain(microbatches, samples[0])
                    return number
                if number == 0:
                    self._equal_steps.check()
                if not plan[number] and totals.target_tokens > target_tokens:
                    raise ValueError("`filler` returned a sample that counts in the loss; return one without labels")
        except BaseException:
            self._ledger.abandon()
            raise
        assert totals is not None, "a plan has at least one microbatch"
        return totals

    def _run_microbatch(self, number: int, microbatch: Sequence[Sample], totals: Totals | None) -> Totals | None:
        """Collective: run a microbatch and add it to the totals. Return None if memory runs out."""
        try:
            self._ledger.begin_microbatch(number)
            with self._around_pass("microbatch"), self._ledger.listening():
                added = Totals.of(self._forward_backward(microbatch))
            self._ledger.end_microbatch()
            return added if totals is None else totals.plus(added)
        except Exception as error:
            if not (self.recovery.enabled and is_oom(error)):
                raise
            forget_frames(error)
        # outside of `except`, whose traceback keeps the failed pass alive
        self._ledger.break_off_microbatch()
        return None

    def _drain(self, microbatches: Sequence[Sequence[Sample]], sample: Sample) -> None:
        """Collective: issue the remaining collectives of this step, with almost no memory."""
        # A drain that runs out of memory has issued some collectives, and the next try continues from there. The run
        # ends if a try makes no progress.
        stuck_at: int | None = None
        while True:
            try:
                self._discard()  # frees memory for the drain
                release()
                with self._around_pass("drain"):
                    self._ledger.drain(
                        # copies, because a stage may store results in its samples
                        [partial(self._forward_backward, [*map(copy.copy, each)]) for each in microbatches],
                        # any sample will do: FSDP's collectives do not depend on it
                        lambda: self._forward_backward([self.kind.filler(sample)]),
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
        """Reset FSDP and drop all gradients. They are from this step, which began without any."""
        self._ledger.reset()
        self.model.zero_grad(set_to_none=True)

    def _recover(self, reports: AttemptReports, rng: RngState, step: int, began: float) -> None:
        """Undo a failed attempt and lower the limit, on every rank; raise if the step cannot be repeated."""
        self._discard()
        rng.restore()
        if hooks := fsdp.why_hooks_forbid_it(self.model):  # installed after the Recovery was created
            raise RecoveryUnsupportedError(
                f"out of memory in {in_step(step, self.stage)}, which cannot be repeated: {hooks}", Remedy.NO_RECOVERY
            )
        change = self._governor.out_of_memory(reports.failed, step)
        if change.kind == EXHAUSTED:
            raise self._exhausted(change, reports)
        self._announce(replace(change, lost_seconds=time.perf_counter() - began), reports)

    def _agree(
        self, outcome: Totals | int, plan: Plan, samples: Sequence[Sample], upcoming_microbatches: int = 0
    ) -> AttemptReports:
        """Collective: return the reports of all ranks, the same on every rank."""
        kind, reading, lengths = self.kind, self._gauge.read(), self.kind.lengths(samples)
        sizes, trouble = [size_of(rows, lengths, padded=kind.padded) for rows in plan], MicrobatchSize(0, 0)
        totals = outcome if isinstance(outcome, Totals) else None
        if isinstance(outcome, int):
            trouble = sizes[outcome]
        elif reading.retries:
            trouble = max(sizes, key=lambda size: size.padded_tokens)
        rows = None if kind.row_lengths_of is None else [*map(kind.row_lengths_of, samples)]
        mine = AttemptReport(
            microbatch=trouble,
            load=load_of(plan, lengths, padded=kind.padded, rows=rows, cost=kind.cost_of),
            reading=reading,
            failed=totals is None,
            position=self._ledger.position,
            target_tokens=totals.target_tokens if totals else 0,
            # not on a GPU, where reading the loss would wait for the device
            loss_sum=totals.loss_sum.item() if totals and totals.loss_sum.device.type == "cpu" else 0.0,
            upcoming_microbatches=upcoming_microbatches,
            asked_to_stop=self.recovery.asked_to_stop(),
            foreign_messages=self._ledger.foreign_messages,
            gradients=(self.trains is None or self._averages) and _has_gradients(self.model),
            step=self.current_step or 0,
        )
        reports = gather_reports(self.recovery.agreement, mine)
        reports.check_positions()
        foreign = max(report.foreign_messages for report in reports)
        if self.recovers and foreign:
            self.recovers, reason = False, self._ledger.refuse_recovery(foreign)
            where = self.stage if self.current_step is None else in_step(self.current_step, self.stage)
            if rank() == 0:
                logger.warning(
                    "%s%s: training continues without recovery; the next out-of-memory error ends it",
                    where and f"{where}: ",
                    reason,
                )
        return reports

    def _complete(self, totals: Totals, reports: AttemptReports, plan: Plan, recoveries: int) -> StepResult:
        """Collective: return the result of an attempt in which all ranks succeeded."""
        gradients = any(report.gradients for report in reports)
        if self.trains is None:
            self.trains = gradients
            if self.recovery.others_with_gradients(self.model) > self._others_with_gradients:
                raise ValueError(
                    "this stage has left gradients in the model of another stage, and a failed attempt would not drop "
                    "them: give each trained model its own StepRunner, or put both models into one parent module"
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
        """Return the error for a failure at the smallest limit, with the memory of the fullest rank."""
        fact, remedies = change.reason, [Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS]
        if (fullest := reports.fullest) is not None:
            peak, budget = format_apart(*fullest)
            fact, remedies = f"{fact} (peak {peak} of a budget of {budget})", [*remedies, Remedy.LARGER_BUDGET]
        self._announce(replace(change, reason=fact), reports)
        return LimitExhaustedError(fact, *(without_backward(remedies) if self.trains is False else remedies))

    def _announce(self, change: Change, reports: AttemptReports) -> None:
        """Log a change of the limit on rank 0, and pass it to `on_change` on every rank."""
        if rank() == 0 and change.kind != EXHAUSTED:  # raised as an error
            logger.log(logging.WARNING if change.kind == RECOVERY else logging.INFO, "%s", change.reason)
        fullest = reports.fullest
        self.recovery.on_change(change if fullest is None else replace(change, **fullest._asdict()))

    def committing(self, what: str, *, last_checkpoint: str | PathLike[str] | None) -> AbstractContextManager[None]:
        """Return a context for the update: scaling, clipping and the optimizer's step, after all ranks have agreed.

        Running out of memory there may leave weights half updated, so it ends the run.
        """
        saved = "no checkpoint yet" if last_checkpoint is None else f"last checkpoint: {last_checkpoint}"
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
    """The runners of a step's stages by name, in order: the last one trains. A single stage needs no name.

    All stages run the same samples, each with its own limit and recoveries.
    """

    @property
    def training(self) -> StepRunner[Sample]:
        """The runner of the last stage."""
        return [*self.values()][-1]

    @property
    def limits(self) -> dict[str, Limit]:
        """The limit of each stage."""
        return {stage: runner.limit for stage, runner in self.items()}

    @property
    def recoveries(self) -> int:
        """Number of repeated attempts of all stages."""
        return sum(runner.recoveries for runner in self.values())

    def run(
        self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None
    ) -> dict[str, StepResult]:
        """Collective: run all stages in order. Samples store the results of a stage for later ones."""
        return {stage: runner.run(samples, step=step, upcoming=upcoming) for stage, runner in self.items()}

    def measure_memory(self, memory: MemorySource | None) -> None:
        """Measure memory in all stages."""
        for runner in self.values():
            runner.measure_memory(memory)

    def use_limits(self, limits: Mapping[str, Limit]) -> None:
        """Allow these limits by stage."""
        for stage, limit in limits.items():
            self[stage].use_limit(limit)

    def state_dict(self) -> dict[str, LimitState]:
        """Return the state of each stage's limit, which is the same on all ranks."""
        return {stage: runner.state_dict() for stage, runner in self.items()}
