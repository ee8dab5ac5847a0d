"""Runs a step so that running out of memory, on any rank at any point, costs a repeated step and not the run.

A step is a fixed list of samples. What fits is a limit. A plan splits the step into microbatches under the
limit. Running out of memory changes the limit, never the step.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from os import PathLike
from typing import Generic, NamedTuple, TypeVar

from torch import nn

from torchtune_adaptive.attempts import Microbatch, Report, Reports, StepResult, exchange, failed_size, shrunk
from torchtune_adaptive.attempts import Totals as Totals
from torchtune_adaptive.collectives import Agreement, rank, sum_over_ranks
from torchtune_adaptive.errors import RecoveryUnsupportedError, UnrecoverableError
from torchtune_adaptive.fsdp import why_recovery_is_off
from torchtune_adaptive.ledger import CollectiveLedger
from torchtune_adaptive.limits import Limit
from torchtune_adaptive.memory import RngState, forget_frames, is_oom, release
from torchtune_adaptive.packing import Load, Plan, load_of, plan_step, spread

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")


class Attempt(NamedTuple):
    """One attempt at a step, the same on all ranks."""

    result: StepResult | None
    """None where some rank ran out of memory: there are no gradients then."""
    failed_ranks: tuple[int, ...]


class _Ahead(NamedTuple):
    """The plan of a step to come, with the number of microbatches that all ranks have agreed on."""

    limit: Limit
    lengths: list[int]
    plan: Plan

    def in_as_many(self, microbatches: int) -> "_Ahead":
        return self._replace(plan=spread(self.plan, self.lengths, self.limit, microbatches))


class StepRunner(Generic[Sample]):
    """Turns the samples of a step into gradients.

    `forward_backward` collates the samples that it is given, runs forward and backward on the unscaled loss
    sum, and returns the totals. It may be run again with other splits of the same samples, so it must leave
    nothing of its own behind when it raises. Every rank uses the same limit. Under a limit by rows they have the same
    number of samples.

    `stand_in` returns the smallest version of a sample that still passes through the whole model, say its
    first two tokens: if the very first microbatch fails, a pass over it keeps the peers company. `filler` does the
    same without any label: it is run where a rank has fewer samples than its peers have microbatches.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Sequence[Sample]], Totals],
        *,
        limit: Limit,
        length_of: Callable[[Sample], int],
        stand_in: Callable[[Sample], Sample],
        filler: Callable[[Sample], Sample] | None = None,
        recover: bool = True,
    ) -> None:
        """Collective: on CUDA it creates the group that the ranks agree on. The model has to be sharded."""
        if recover and (reason := why_recovery_is_off(model)) is not None:
            raise RecoveryUnsupportedError(
                f"a step of this model cannot be run again after running out of memory: {reason}; "
                "set adaptive.recover_from_oom: False"
            )
        self.limit = limit
        self.recoveries = 0
        self.model = model
        self.length_of = length_of
        self.stand_in = stand_in
        self.filler = filler
        self.recovers = recover
        self._forward_backward = forward_backward
        self._ledger = CollectiveLedger(model if recover else None)
        self._agreement = Agreement(len(Report._fields))
        self._ceiling: Limit | None = None  # what recovery has come down to
        self._ahead: _Ahead | None = None

    def use_limit(self, limit: Limit) -> None:
        """From the next step on; where recovery has come down to less, that stays."""
        self.limit = limit if self._ceiling is None else limit.at_most(self._ceiling)

    def close(self) -> None:
        """Puts FSDP's own collectives back."""
        self._ledger.close()

    def run(self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None) -> StepResult:
        """Collective: forward and backward over all samples, under smaller limits while some rank fails.

        Gradients must be None before, and are complete and unscaled afterwards. `step` is for the log. `upcoming`
        are the samples of the next call, where every rank knows its own: under a limit by length, the number of their
        microbatches is then agreed on beside the rest, and costs a reduction of its own only where they are not known.
        """
        self._check(samples)
        lengths = self._lengths(samples)
        rng = RngState.capture()
        plan = self._plan(lengths)
        recoveries = 0
        while True:
            totals, failed = self._attempt(samples, lengths, plan)
            ahead = self._look_ahead(upcoming)
            reports = self._agree(totals, failed, load_of(plan, lengths), len(ahead.plan) if ahead else 0)
            if not reports.failed:
                self._ahead = ahead and ahead.in_as_many(reports.upcoming_microbatches)
                return self._result(totals, reports, len(plan), recoveries)
            self._discard()
            rng.restore()
            self._shrink(reports, step)
            plan = self._plan(lengths)
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
        lengths = self._lengths(samples)
        totals, failed = self._attempt(samples, lengths, plan)
        reports = self._agree(totals, failed, load_of(plan, lengths))
        if reports.failed:
            self._discard()
            return Attempt(None, tuple(reports.failed))
        return Attempt(self._result(totals, reports, len(plan), recoveries=0), ())

    def _check(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise ValueError("a step has at least 1 sample on every rank, but this rank was given none")
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise ValueError(
                "gradients are left over from before this step and could not be told apart from its own; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )

    def _lengths(self, samples: Sequence[Sample]) -> list[int]:
        return [self.length_of(sample) for sample in samples]

    def _plan(self, lengths: list[int]) -> Plan:
        """Collective, under a limit by length that was not planned for ahead: as many microbatches on every rank."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.limit == self.limit:
            if ahead.lengths != lengths:
                raise ValueError("these are not the samples that were announced as `upcoming`; give the same ones")
            return ahead.plan
        plan = plan_step(lengths, self.limit)
        if not self.limit.by_length:
            return plan
        most = exchange(self._agreement, Report(upcoming_microbatches=len(plan))).upcoming_microbatches
        return spread(plan, lengths, self.limit, most)

    def _look_ahead(self, upcoming: Sequence[Sample] | None) -> _Ahead | None:
        """What the next step needs on this rank, under a limit by length."""
        if upcoming is None or not self.limit.by_length:
            return None
        lengths = self._lengths(upcoming)
        return _Ahead(self.limit, lengths, plan_step(lengths, self.limit))

    def _attempt(
        self, samples: Sequence[Sample], lengths: Sequence[int], plan: Plan
    ) -> tuple[Totals | None, Microbatch | None]:
        """Collective: runs the microbatches; after running out of memory, what the peers still need of them.

        Returns the totals, or the microbatch that failed.
        """
        totals = None
        self._ledger.begin_step(len(plan))
        for rows in plan:
            before = totals
            totals = self._run_microbatch([samples[index] for index in rows] or self._nothing(samples), before)
            if totals is None:  # outside of `except`, whose traceback would keep the failed pass alive
                self._drain(samples[rows[0] if rows else 0])
                return None, failed_size([lengths[index] for index in rows])
            if not rows and totals.target_tokens != (before.target_tokens if before else 0):
                raise ValueError("`filler` returned a sample that counts in the loss; it must not have any label")
        return totals, None

    def _nothing(self, samples: Sequence[Sample]) -> list[Sample]:
        """An empty microbatch: it communicates like any other, and counts nothing."""
        if self.filler is None:
            raise ValueError(
                f"rank {rank()} has fewer samples than its peers need microbatches for theirs; "
                "give StepRunner a `filler`: a stand-in without any label"
            )
        return [self.filler(samples[0])]

    def _run_microbatch(self, samples: Sequence[Sample], before: Totals | None) -> Totals | None:
        """Collective: adds a microbatch to the totals; None if it ran out of memory."""
        try:
            self._ledger.begin_microbatch()
            loss_sum, target_tokens = self._forward_backward(samples)
            self._ledger.end_microbatch()
            if before is not None:
                loss_sum, target_tokens = before.loss_sum + loss_sum, before.target_tokens + target_tokens
            return Totals(loss_sum, target_tokens)
        except Exception as error:
            if not (self.recovers and is_oom(error)):
                raise
            forget_frames(error)
        return None

    def _drain(self, sample: Sample) -> None:
        """Collective: takes part in what the peers still communicate in this step, with next to no memory."""
        stuck_at = -1
        while not self._try_to_drain(sample):
            if self._ledger.position == stuck_at:
                raise UnrecoverableError(
                    f"rank {rank()} ran out of memory with nothing but its shard of the training state "
                    "allocated, so it cannot even finish the collectives that its peers wait for; train on "
                    "more ranks"
                )
            stuck_at = self._ledger.position

    def _try_to_drain(self, sample: Sample) -> bool:
        """Collective: frees everything, then drains; False if that ran out of memory too."""
        try:
            self._discard()
            release()
            self._ledger.drain(lambda: self._forward_backward([self.stand_in(sample)]))
            return True
        except Exception as error:
            if not is_oom(error):
                raise
            forget_frames(error)
        return False

    def _discard(self) -> None:
        """Drops all gradients of the step, finished or not: they were None when it began."""
        self._ledger.reset()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _agree(self, totals: Totals | None, failed: Microbatch | None, load: Load, upcoming: int = 0) -> Reports:
        """Collective: what happened on every rank, the same everywhere."""
        loss_sum, target_tokens = (None, 0) if totals is None else totals
        # On CPU the loss rides along. On a GPU, reading it would wait for the GPU.
        loss_on_host = loss_sum.item() if loss_sum is not None and loss_sum.device.type == "cpu" else 0.0
        rows, length = failed or (0, 0)
        report = Report(rows, length, self._ledger.position, target_tokens, loss_on_host, upcoming, *load)
        reports = exchange(self._agreement, report)
        reports.check_positions()
        return reports

    def _result(self, totals: Totals | None, reports: Reports, microbatches: int, recoveries: int) -> StepResult:
        """Collective: on CUDA, where the loss did not ride on the agreement."""
        assert totals is not None
        if totals.loss_sum.device.type == "cpu":
            loss_sum = totals.loss_sum.new_tensor(reports.loss_sum)
        else:
            loss_sum = sum_over_ranks(totals.loss_sum)
        return StepResult(loss_sum, reports.target_tokens, microbatches, recoveries, reports.load)

    def _shrink(self, reports: Reports, step: int) -> None:
        """Takes the next smaller limit. Every rank comes to the same one, or to the same error."""
        self.limit, line = shrunk(self.limit, reports.failed, step)
        self._ceiling = self.limit
        self.recoveries += 1
        if rank() == 0:
            logger.warning("%s", line)

    @contextmanager
    def committing(self, what: str, *, last_checkpoint: str | PathLike[str] | None) -> Iterator[None]:
        """Guards what happens once all ranks have agreed: scaling, clipping, the optimizer's step.

        Weights may be half updated when that runs out of memory, so it ends the run with a clear error.
        """
        try:
            yield
        except Exception as error:
            if not is_oom(error):
                raise
            raise UnrecoverableError(
                f"out of memory in {what} on rank {rank()}: the weights may be half updated, so this step "
                "cannot be run again; start again from the last checkpoint "
                f"({last_checkpoint or 'there is none yet'}) with more ranks, a smaller model, or an "
                "optimizer with less state"
            ) from error
