"""Runs a training step, and repeats it in smaller microbatches if any rank runs out of memory.

A step is a fixed list of samples. The limit is the largest microbatch that is allowed. An out-of-memory error lowers
the limit, but does not change the samples. `StepRunner.run` is this loop:

1. Plan (`plans.py`): split the samples into microbatches within the limit, equally many on every rank.
2. Attempt: run the forward and backward of every microbatch, while the ledger counts collectives.
3. Drain, only on a rank that ran out of memory: free the memory of the attempt (`oom.py`), then issue the collectives
   that peers still expect (`ledger.py`). Now all ranks have issued equally many collectives.
4. Agree: one small all-reduce gives every rank the reports of all ranks (`results.py`).
5. Recover, if any rank failed: all ranks discard their gradients (`fsdp.py`), restore the random generators, lower the
   limit (`limit_policy.py`) and start again at 1. The limit stays in two cases: every failed microbatch has one
   row (at most one such repetition per step), or the attempt reduced gradients only once (`reduce_once`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import Generic, Literal, NamedTuple, TypeAlias

from torch import nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.buckets import GradientBuckets
from torchtune_adaptive.engine.consistency import EqualSteps
from torchtune_adaptive.engine.limit_policy import EXHAUSTED, RECOVERY, Change, LimitPolicy, LimitState, in_step
from torchtune_adaptive.engine.limits import Limit, MicrobatchSize
from torchtune_adaptive.engine.memory import Gauge, MemorySource
from torchtune_adaptive.engine.oom import clear_frames, fatal_on_oom, is_oom, release_memory
from torchtune_adaptive.engine.plans import Plan, Sample, SampleKind
from torchtune_adaptive.engine.ranks import explaining_failures, rank, world_size
from torchtune_adaptive.engine.recovery import Recovery, has_gradients
from torchtune_adaptive.engine.results import (
    AttemptReport,
    AttemptReports,
    StepResult,
    Totals,
    gather_reports,
    result_of,
)
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.errors import (
    LimitExhaustedError,
    RecoveryUnsupportedError,
    Remedy,
    UnrecoverableError,
    without_backward,
)
from torchtune_adaptive.formatting import count_of, format_apart, ranks_named

logger = logging.getLogger(__name__)

PassKind: TypeAlias = Literal["microbatch", "drain"]
ContextForPass: TypeAlias = Callable[[PassKind], AbstractContextManager[object]]


class _NextPlan(NamedTuple):
    """The plan of the next step, with the limit and the lengths that it was made for."""

    limit: Limit
    lengths: list[int]
    plan: Plan
    microbatches: int = 0
    """The number of microbatches into which all ranks split the step."""


class _ReduceOnce:
    """Decides if a step reduce-scatters gradients only in its last microbatch, which needs memory for all gradients."""

    def __init__(self, model: nn.Module, *, possible: bool) -> None:
        self.possible, self.in_next_attempt, self._complete_steps = possible, False, 0
        sizes = (each.numel() * max(4, each.element_size()) for each in model.parameters() if each.requires_grad)
        self._gradients = sum(sizes)  # in bytes, at least those of fp32

    def completed(self, reports: AttemptReports) -> None:
        """Decide about the next step after a complete one. The peak of the first step lacks the optimizer state."""
        self._complete_steps += 1
        if self.in_next_attempt and not reports.have_room_for(0):
            self.failed()
        elif self.possible and self._complete_steps > 1:
            self.in_next_attempt = self.in_next_attempt or reports.have_room_for(self._gradients)

    def failed(self) -> None:
        """Reduce gradients in every microbatch from now on, because such a step needs too much memory."""
        self.in_next_attempt = self.possible = False


class StepRunner(Generic[Sample]):
    """Runs forward and backward over the samples of a step, in microbatches that fit into memory.

    Args:
        model: sharded by FSDP2 or whole. If several ranks hold whole models, microbatches must not communicate: call
            the module inside DistributedDataParallel, not the wrapper. The runner averages gradients over the ranks.
            From the second step on, it does so in the last microbatch, after which gradients are None until `run` ends.
        forward_backward: runs one microbatch. It collates the given samples, runs forward and backward on the sum of
            their losses, and returns the totals. It must not divide the loss by a number that differs between
            microbatches, such as their tokens, because a repeated step splits the samples differently. To train on the
            mean over tokens, multiply the gradients, which are means over ranks, by `ranks / result.target_tokens`.
        kind: describes the samples.
        limit: the largest microbatch, equal on all ranks. Under a limit by rows, every rank must have equally many
            samples.
        recovery: shared by the runners of all stages, if a step has several. By default, a new one for this model.
        stage: the name of the stage in messages and records, if a step has several. A stage without a backward stores
            its results in the samples. A repeated attempt overwrites them.
        reduce_once: under FSDP2, from the third step on, reduce-scatter gradients only in the last microbatch of a
            step, if the latest step left room for the gradients of the whole model, or if memory is not measured.
            After an out-of-memory error in such a step, every microbatch reduces gradients. Each step resets the peak
            of the device.
        on_attempt: called before each attempt of `run`, with the step and the plan. It may communicate.
        adds_gradients: let `run` add to gradients from before the step. `on_attempt` must then restore them, because a
            failed attempt drops all gradients. Only for models that are sharded by FSDP2.
        finish: called after the last microbatch of each attempt of `run`. It must not communicate. If memory runs out
            in it, the step is repeated.
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
        reduce_once: bool = False,
        on_attempt: Callable[[int, Plan], object] = lambda *_: None,
        adds_gradients: bool = False,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective, because it creates a Recovery."""
        self.model, self.kind, self.stage, self.on_attempt, self._finish = model, kind, stage, on_attempt, finish
        self._adds_gradients, self.recovery = adds_gradients, recovery or Recovery(model)
        self.recovery.add_stage(stage, model)
        self.recovers = self.recovery.enabled
        """True if the limit may grow, and searches may exceed the memory limit, because an out-of-memory error would be
        recovered. False after microbatches have communicated outside FSDP, or issued different collectives."""
        self.cannot_repeat = ""
        """If set, the reason why a step must not be repeated; running out of memory then ends the run with it."""
        self.trains: bool | None = None
        """True if microbatches produce gradients; unknown until the first attempt has succeeded."""
        self.current_step: int | None = None
        """Number of the current or latest step; None after `attempt`."""
        self._forward_backward, self._ledger = forward_backward, self.recovery.ledger
        self._policy = LimitPolicy(limit, regrow_after=self.recovery.regrow_after, stage=stage)
        self.context_for: ContextForPass = lambda _: nullcontext()
        """Returns a context for each microbatch and each drain. Tests inject faults with it."""
        self._next_plan: _NextPlan | None = None
        self._others_with_gradients = 0  # number of other models with gradients before the latest attempt
        self._gathers_from_all = fsdp.spans_all_ranks(model) and not fsdp.has_replicas(model)
        can_reduce_once = reduce_once and self._gathers_from_all and not self._ledger.uses_ghost_passes
        self._reduce_once = _ReduceOnce(model, possible=can_reduce_once)
        self._equal_steps = EqualSteps(enabled=self._ledger.uses_ghost_passes or fsdp.spans_all_ranks(model))
        self._is_whole = fsdp.is_whole(model)
        averages = world_size() > 1 and self._is_whole
        self._buckets = GradientBuckets(self._ledger.issue) if averages else None
        self.measure_memory(None)

    @property
    def limit(self) -> Limit:
        """The limit in use: the one that was passed in, or a smaller one that the policy has chosen."""
        return self._policy.limit

    @property
    def recoveries(self) -> int:
        """Number of repeated attempts so far."""
        return self._policy.recoveries

    def use_limit(self, limit: Limit) -> None:
        """Use this limit from the next step on. If recovery has chosen a smaller one in the same unit, keep that."""
        self._policy.allow(limit)

    def adopt_refusal_of(self, other: StepRunner[Sample]) -> None:
        """If microbatches of the other stage have turned recovery off, assume this for this stage, too."""
        if other.recovery.enabled and not other.recovers:
            self.recovers = False
            self._ledger.copy_record(of_stage=other.stage, to_stage=self.stage)

    def measure_memory(self, memory: MemorySource | None) -> None:
        """Measure memory from the next step on. Results then contain it, and allocator retries lower the limit."""
        self._gauge = Gauge(memory, self.recovery.retries_seen, several_stages=bool(self.stage))

    def state_dict(self) -> LimitState:
        """Return the state of the limit for a checkpoint. It is the same on all ranks."""
        return self._policy.state()

    def load_state_dict(self, state: LimitState) -> None:
        """Restore a state that `state_dict` returned."""
        self._policy.restore(state)

    def close(self) -> None:
        """Close the Recovery, which ends all stages that share it."""
        self.recovery.close()

    def run(self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None) -> StepResult:
        """Collective: run forward and backward over all samples; repeat both until no rank runs out of memory.

        Gradients must be None when it begins, except with `adds_gradients`. When it returns, they are complete and not
        scaled. `step` must be equal on all ranks. Pass a new number for each step, so that ranks that run different
        steps are detected. `upcoming` are this rank's samples of the next call, if they are known.
        Under a limit by length, the ranks must agree on a number of microbatches. With `upcoming`, the agreement at the
        end of this step includes that number for the next step, so the next call needs no separate agreement.

        Raises LimitExhaustedError on every rank if memory runs out at the smallest limit. Gradients and torch's random
        generators are then as before the call, so the caller may free memory and call it again.
        """
        self._check(samples)
        self.current_step = step
        self._gauge.begin_step(resets_peak=self._reduce_once.possible)
        self._policy.begin_step()
        lengths, rng, recoveries = self.kind.lengths(samples), RngState.capture(), 0
        while True:
            plan = self._plan(lengths)
            if not self.limit.by_length:
                sizes = f"{len(samples)} samples in " if self._ledger.uses_ghost_passes else ""
                self._equal_steps.announce(f"{sizes}{count_of(len(plan), 'microbatch', 'microbatches')}")
            self.on_attempt(step, plan)
            reduce_once = self._reduce_once.in_next_attempt and len(plan) > 1
            outcome = self._attempt(samples, plan, reduce_once=reduce_once)
            upcoming_plan = self._plan_upcoming(upcoming)
            reports = self._agree(outcome, plan, samples, len(upcoming_plan.plan) if upcoming_plan else 0)
            if isinstance(outcome, Totals) and not reports.failed:
                if upcoming_plan and (microbatches := reports.upcoming_microbatches):  # 0 if a rank has no plan
                    self._next_plan = upcoming_plan._replace(microbatches=microbatches)
                self._reduce_once.completed(reports)
                # without recovery, the limit stays: a larger one could run out of memory
                if self.recovers and (change := self._policy.completed(step, reports.flushed_cache)):
                    self._announce(change, reports)
                return self._complete(outcome, reports, plan, recoveries)
            del outcome  # frees the loss tensor before the retry
            self._recover(reports, rng, step, reduced_once=reduce_once)
            recoveries += 1

    def attempt(self, microbatches: Sequence[Sequence[Sample]]) -> tuple[StepResult | None, AttemptReports]:
        """Collective: run forward and backward over exactly these microbatches, without a retry.

        If any rank runs out of memory, all ranks drop the gradients and return None as the result. The limit stays
        unchanged. Random generators are not restored.
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
        self.recovery.begin_step()
        if not samples:
            raise ValueError("a step needs at least 1 sample on every rank, but this rank got 0")
        if self.trains is None and self._is_whole != fsdp.is_whole(self.model):
            raise ValueError("the model was sharded after its StepRunner was created: shard it first")
        parameters = [*self.model.parameters()]
        if not self._adds_gradients and any(each.grad is not None for each in parameters):
            raise ValueError(
                "parameters have gradients from before this step, which would be added to those of the step; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )
        if self._buckets:
            self._buckets.assign(parameters)

    def _plan(self, lengths: list[int]) -> Plan:
        """Return a plan with equally many microbatches on all ranks.

        Collective under a limit by length, unless the previous call of `run` has planned these samples as `upcoming`.
        Under a limit by rows, the numbers are equal because all ranks have equally many samples.
        """
        limit, planned = self.limit, self._next_plan
        self._next_plan = None
        if planned is not None and planned.limit == limit:
            if planned.lengths != lengths:
                raise ValueError("the samples differ from `upcoming` of the previous call; pass the same ones")
            plan, microbatches = planned.plan, planned.microbatches
        else:
            plan = self.kind.plan(lengths, limit)
            if not limit.by_length:
                return plan
            self._equal_steps.announce("by length")
            self._equal_steps.check(waits=True)
            needs = gather_reports(self.recovery.agreement, AttemptReport(upcoming_microbatches=len(plan)))
            microbatches = needs.upcoming_microbatches
        return self.kind.spread(plan, lengths, limit, microbatches)

    def _plan_upcoming(self, upcoming: Sequence[Sample] | None) -> _NextPlan | None:
        """Return a plan of the next step in the fewest microbatches.

        Returns None under a limit by rows, where no agreement is needed, or if the samples are unknown.
        """
        limit = self.limit
        if upcoming is None or not limit.by_length:
            return None
        lengths = self.kind.lengths(upcoming)
        return _NextPlan(limit, lengths, self.kind.plan(lengths, limit))

    def _attempt(self, samples: Sequence[Sample], plan: Plan, *, reduce_once: bool = False) -> Totals | int:
        """Collective: run all microbatches. Return their totals, or the index of the one that ran out of memory.

        In both cases, this rank has issued all collectives of the step when this returns.
        """
        if self.trains is None:
            self._others_with_gradients = self.recovery.count_others_with_gradients(self.model)
        microbatches = [[samples[index] for index in rows] or [self.kind.filler(samples[0])] for rows in plan]
        totals: Totals | None = None
        try:
            owned = self.recovery.owned_by(self.model)
            self._ledger.begin_attempt(len(microbatches), owned, self.stage, reduce_once=reduce_once)
            if self._buckets:
                self._buckets.begin()
            for number, microbatch in enumerate(microbatches):
                target_tokens = totals.target_tokens if totals else 0
                is_last = number == len(microbatches) - 1
                totals = self._run_microbatch(number, microbatch, totals, is_last=is_last)
                if totals is None:
                    self._drain(microbatches, samples[0])
                    return number
                if number == 0 and self._gathers_from_all:  # all ranks took part, so all have announced their step
                    self._equal_steps.check()
                if not plan[number] and totals.target_tokens > target_tokens:
                    raise ValueError("`filler` returned a sample that counts in the loss; return one without labels")
        except BaseException:
            self._ledger.abandon()
            if self._buckets:
                self._buckets.begin()  # drops averaged gradients
            raise
        assert totals is not None, "a plan has at least one microbatch"
        return totals

    @property
    def _reduces_in_attempt(self) -> bool:
        """True if the last microbatch averages the gradients of whole models. Equal on all ranks. It is False in the
        first attempt, which shows whether this stage has gradients, and if other models communicate."""
        return self._buckets is not None and bool(self.trains) and self._ledger.only_whole_models

    def _run_microbatch(
        self, number: int, microbatch: Sequence[Sample], totals: Totals | None, *, is_last: bool
    ) -> Totals | None:
        """Collective: run a microbatch and add it to the totals. Return None if memory runs out."""
        buckets = self._buckets if is_last and self._reduces_in_attempt else None
        try:
            self._ledger.begin_microbatch(number)
            # if other code communicates in the backward, too, the order of collectives could differ between ranks
            reducing = buckets.reducing(overlaps=not self._ledger.obstacles.most) if buckets else nullcontext()
            with self.context_for("microbatch"), self._ledger.listening(), reducing:
                added = Totals.of(self._forward_backward(microbatch))
                if is_last and self.current_step is not None:
                    self._finish()
            self._ledger.end_microbatch()
            return added if totals is None else totals.plus(added)
        except Exception as error:
            if not (self.recovery.enabled and is_oom(error)):
                with explaining_failures("a collective of the model", in_other_code=True):  # FSDP's are explained
                    raise
            clear_frames(error)
        # outside of `except`, because the traceback in it keeps the activations of the failed pass alive
        self._ledger.end_failed_microbatch()
        return None

    def _drain(self, microbatches: Sequence[Sequence[Sample]], sample: Sample) -> None:
        """Collective: issue the remaining collectives of this step, with almost no memory."""

        def run(number: int | None) -> None:
            # A stage may store its results in its samples, so a ghost pass gets copies. FSDP's collectives do not
            # depend on the sample, so any sample may be passed to the filler.
            samples = [self.kind.filler(sample)] if number is None else [*map(copy.copy, microbatches[number])]
            self._forward_backward(samples)

        # If the drain itself runs out of memory, try again from the position that it has reached. If two tries in a row
        # end at the same position, the run ends.
        failed_at: int | None = None
        while True:
            try:
                self._discard()
                release_memory()
                with self.context_for("drain"):
                    self._ledger.drain(run)
                    if self._buckets and self._reduces_in_attempt:
                        self._buckets.drain()
                return
            except Exception as error:
                if not is_oom(error):
                    raise
                clear_frames(error)
            if (position := self._ledger.progress) == failed_at:
                raise UnrecoverableError(
                    f"rank {rank()} ran out of memory although it holds only weights and optimizer state, "
                    "so it cannot issue the collectives that its peers are waiting for",
                    Remedy.MORE_RANKS,
                    Remedy.LARGER_BUDGET,
                )
            failed_at = position

    def _discard(self) -> None:
        """Reset FSDP and drop all gradients. They all come from this step, because it began without gradients."""
        self._ledger.reset()
        if self._buckets:
            self._buckets.reset()
        self.model.zero_grad(set_to_none=True)

    def _recover(self, reports: AttemptReports, rng: RngState, step: int, *, reduced_once: bool) -> None:
        """Undo a failed attempt and lower the limit, on every rank; raise if the step cannot be repeated."""
        self._discard()
        rng.restore()
        # again, because hooks may have been installed after the Recovery was created
        if reason := self.cannot_repeat or fsdp.why_hooks_forbid_it(self.model):
            raise RecoveryUnsupportedError(
                f"out of memory on {ranks_named(reports.failed)} in {in_step(step, self.stage)}, which cannot be "
                f"repeated: {reason}",
                Remedy.SMALLER_LIMIT,
                Remedy.CHECKPOINT_ACTIVATIONS,
                Remedy.LARGER_BUDGET,
            )
        if reduced_once:
            self._reduce_once.failed()
        change = self._policy.out_of_memory(reports.failed, step, reduced_once=reduced_once)
        if change.kind == EXHAUSTED:
            raise self._exhausted(change, reports)
        self._announce(change, reports)

    def _agree(
        self, outcome: Totals | int, plan: Plan, samples: Sequence[Sample], upcoming_microbatches: int = 0
    ) -> AttemptReports:
        """Collective: return the reports of all ranks about this attempt. Turn off recovery, on all ranks, if
        microbatches communicate in a way that a failed rank cannot complete."""
        mine = self._report(outcome, plan, samples)._replace(upcoming_microbatches=upcoming_microbatches)
        reports = gather_reports(self.recovery.agreement, mine)
        messages = max(report.non_fsdp_messages for report in reports)
        differing = [number for number, report in enumerate(reports) if report.differs]
        if self.recovers and (messages or differing):
            self.recovers, reason = False, self._ledger.obstacles.refuse_recovery(messages, differing)
            place = self.stage if self.current_step is None else in_step(self.current_step, self.stage)
            if rank() == 0:
                logger.warning(
                    "%s%s: training continues without recovery; the next out-of-memory error ends it",
                    place and f"{place}: ",
                    reason,
                )
        return reports

    def _report(self, outcome: Totals | int, plan: Plan, samples: Sequence[Sample]) -> AttemptReport:
        """Return this rank's report about an attempt, without `upcoming_microbatches`."""
        reading, lengths = self._gauge.read(), self.kind.lengths(samples)
        reported_size, sizes = MicrobatchSize(0, 0), self.kind.sizes(plan, lengths)
        if isinstance(outcome, int):
            reported_size = sizes[outcome]
        elif reading.retries:
            reported_size = max(sizes, key=lambda size: size.padded_tokens)
        if self._buckets:
            any_gradients, with_gradients = self._buckets.describe()
        else:
            any_gradients, with_gradients = self.trains is None and has_gradients(self.model), 0
        return AttemptReport.of(outcome)._replace(
            microbatch=reported_size,
            load=self.kind.load(plan, lengths, samples),
            reading=reading,
            position=self._ledger.position,
            positions_in_groups=self._ledger.positions_in_groups(),
            stop_requested=self.recovery.stop_requested(),
            non_fsdp_messages=self._ledger.obstacles.reported,
            differs=bool(self._ledger.obstacles.differs),
            gradients=any_gradients,
            with_gradients=with_gradients,
            step=self.current_step or 0,
        )

    def _complete(self, totals: Totals, reports: AttemptReports, plan: Plan, recoveries: int) -> StepResult:
        """Collective: return the result of an attempt in which all ranks succeeded.

        Raises ValueError if the attempt left gradients in a model that this stage does not own.
        """
        gradients = any(report.gradients for report in reports)
        if self.trains is None:
            self.trains = gradients
            if self.recovery.count_others_with_gradients(self.model) > self._others_with_gradients:
                raise ValueError(
                    "this stage has left gradients in the model of another stage, which a failed attempt would not "
                    "drop: give each trained model its own StepRunner, or put both models into one parent module"
                )
        if self._buckets:
            same_parameters = len({report.with_gradients for report in reports}) == 1
            with fatal_on_oom(
                lambda _: UnrecoverableError(
                    f"out of memory on rank {rank()} while averaging gradients, which cannot be repeated",
                    Remedy.LESS_STATE,
                    Remedy.LARGER_BUDGET,
                )
            ):
                self._buckets.finish(self.recovery.agreement, any_left=gradients, same_parameters=same_parameters)
        return result_of(totals, reports, len(plan), recoveries, self.recovery.agreement)

    def _exhausted(self, change: Change, reports: AttemptReports) -> LimitExhaustedError:
        """Announce that memory ran out at the smallest limit. Return the error, with the memory of the fullest rank."""
        fact, remedies = change.reason, [Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS]
        if (fullest := reports.fullest) is not None:
            peak, budget = format_apart(*fullest)
            fact, remedies = f"{fact} (peak {peak} of a budget of {budget})", [*remedies, Remedy.LARGER_BUDGET]
        self._announce(replace(change, reason=fact), reports)
        return LimitExhaustedError(fact, *(without_backward(remedies) if self.trains is False else remedies))

    def _announce(self, change: Change, reports: AttemptReports) -> None:
        """Log a change of the limit on rank 0, and pass it to `on_change` on every rank."""
        if rank() == 0 and change.kind != EXHAUSTED:  # which is raised as an error instead
            logger.log(logging.WARNING if change.kind == RECOVERY else logging.INFO, "%s", change.reason)
        fullest = reports.fullest
        self.recovery.on_change(change if fullest is None else replace(change, **fullest._asdict()))

    def committing(self, what: str, *, last_checkpoint: str | PathLike[str] | None) -> AbstractContextManager[None]:
        """Return a context for the update after `run`: scaling, clipping and the optimizer's step.

        An out-of-memory error may leave weights partly updated, so it raises UnrecoverableError, which names `what`.
        """
        saved = "no checkpoint yet" if last_checkpoint is None else f"last checkpoint: {last_checkpoint}"
        return fatal_on_oom(
            lambda _: UnrecoverableError(
                f"out of memory in {what} on rank {rank()}: the weights may be partly updated, so this step cannot be "
                f"repeated ({saved})",
                Remedy.LESS_STATE,
                Remedy.MORE_RANKS,
                Remedy.LARGER_BUDGET,
            )
        )


class Stages(dict[str, StepRunner[Sample]]):
    """The runners of a step by the name of their stage, in the order in which they run. The last one always trains.

    All stages run the same samples, each with its own limit and recoveries. A single stage is named "".
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
        """Collective: run all stages in order, and return their results. Stages pass data on in the samples."""
        return {stage: runner.run(samples, step=step, upcoming=upcoming) for stage, runner in self.items()}

    def measure_memory(self, memory: MemorySource | None) -> None:
        """Call `measure_memory` of all stages."""
        for runner in self.values():
            runner.measure_memory(memory)

    def use_limits(self, limits: Mapping[str, Limit]) -> None:
        """Call `use_limit` of each stage that is a key of `limits`."""
        for stage, limit in limits.items():
            self[stage].use_limit(limit)

    def state_dict(self) -> dict[str, LimitState]:
        """Return the state of each stage's limit, which is the same on all ranks."""
        return {stage: runner.state_dict() for stage, runner in self.items()}
