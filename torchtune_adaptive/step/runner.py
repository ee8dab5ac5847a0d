"""Runs a step so that running out of memory, on any rank at any point, costs a repeated step and not the run.

A step is a fixed list of samples. What fits is a limit. A plan splits the step into microbatches under the
limit. Running out of memory changes the limit, never the step.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import Generic

from torch import nn

from torchtune_adaptive.comm.collectives import Agreement, let_go, rank
from torchtune_adaptive.comm.ledger import CollectiveLedger
from torchtune_adaptive.errors import LimitExhaustedError, Remedy, UnrecoverableError, without_backward
from torchtune_adaptive.limits.change import RECOVERY, Change
from torchtune_adaptive.limits.governor import Governor, LimitState
from torchtune_adaptive.limits.limit import Limit
from torchtune_adaptive.limits.padded_plan import Plan, load_of
from torchtune_adaptive.memory.device import MemorySource, RngState
from torchtune_adaptive.memory.gauge import Gauge
from torchtune_adaptive.memory.oom import fatal_where_memory_runs_out
from torchtune_adaptive.step.agreed_plan import Planner
from torchtune_adaptive.step.attempt import AroundPass, PlanRunner
from torchtune_adaptive.step.reports import Attempt, Report, Reports, StepResult, exchange, result_of, troubling
from torchtune_adaptive.step.reports import Totals as Totals
from torchtune_adaptive.step.samples import Sample, SampleKind

logger = logging.getLogger(__name__)


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
