"""Runs a step so that running out of memory, on any rank at any point, costs a repeated step and not the run.

A step is a fixed list of samples. What fits is a limit. A plan splits the step into microbatches under the
limit. Running out of memory changes the limit, never the step.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from torchtune_adaptive.collectives import Agreement, rank, sum_over_ranks
from torchtune_adaptive.errors import LimitExhaustedError, RecoveryUnsupportedError, UnrecoverableError
from torchtune_adaptive.fsdp import CollectiveLedger, why_recovery_is_off
from torchtune_adaptive.limits import RowLimit, shrink_after_oom
from torchtune_adaptive.memory import RngState, forget_frames, is_oom, release
from torchtune_adaptive.packing import Plan, plan_rows

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")


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


class Attempt(NamedTuple):
    """One attempt at a step, the same on all ranks."""

    result: StepResult | None
    """None where some rank ran out of memory: there are no gradients then."""
    failed_ranks: tuple[int, ...]


class _Report(NamedTuple):
    """What a rank says about its attempt. Numbers only: they travel as one row of a table."""

    failed: float
    longest: float
    position: float
    target_tokens: float
    loss_sum: float


class StepRunner(Generic[Sample]):
    """Turns the samples of a step into gradients.

    `forward_backward` collates the samples that it is given, runs forward and backward on the unscaled loss
    sum, and returns the totals. It may be run again with other splits of the same samples, so it must leave
    nothing of its own behind when it raises. Every rank uses the same limit and the same number of samples.

    `stand_in` returns the smallest version of a sample that still passes through the whole model, say its
    first two tokens: if the very first microbatch fails, a pass over it keeps the peers company.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Sequence[Sample]], Totals],
        *,
        limit: RowLimit,
        length_of: Callable[[Sample], int],
        stand_in: Callable[[Sample], Sample],
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
        self.recovers = recover
        self._forward_backward = forward_backward
        self._ledger = CollectiveLedger(model if recover else None)
        self._agreement = Agreement(len(_Report._fields))

    def use_rows(self, rows: int) -> None:
        """From the next step on, microbatches of so many rows; of fewer, if recovery has come down to fewer."""
        shrunk = self.recoveries > 0 and self.limit.rows < rows
        self.limit = self.limit if shrunk else RowLimit(rows)

    def close(self) -> None:
        """Puts FSDP's own collectives back."""
        self._ledger.close()

    def run(self, samples: Sequence[Sample], *, step: int) -> StepResult:
        """Collective: forward and backward over all samples, under smaller limits while some rank fails.

        Gradients must be None before, and are complete and unscaled afterwards. `step` is for the log.
        """
        self._check(samples)
        lengths = [self.length_of(sample) for sample in samples]
        rng = RngState.capture()
        recoveries = 0
        while True:
            plan = plan_rows(lengths, self.limit)
            totals, longest = self._attempt(samples, lengths, plan)
            reports = self._agree(totals, longest)
            if not _failed_ranks(reports):
                return self._result(totals, reports, len(plan), recoveries)
            self._discard()
            rng.restore()
            self._shrink(plan, reports, step)
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
        totals, longest = self._attempt(samples, [self.length_of(sample) for sample in samples], plan)
        reports = self._agree(totals, longest)
        if failed := _failed_ranks(reports):
            self._discard()
            return Attempt(None, failed)
        return Attempt(self._result(totals, reports, len(plan), recoveries=0), ())

    def _check(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise ValueError("a step has at least 1 sample on every rank, but this rank was given none")
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise ValueError(
                "gradients are left over from before this step and could not be told apart from its own; "
                "call optimizer.zero_grad(set_to_none=True) after every optimizer.step()"
            )

    def _attempt(self, samples: Sequence[Sample], lengths: Sequence[int], plan: Plan) -> tuple[Totals | None, int]:
        """Collective: runs the microbatches; after running out of memory, what the peers still need of them.

        Returns the totals; or None and the longest sample of the microbatch that failed.
        """
        totals = None
        self._ledger.begin_step(len(plan))
        for rows in plan:
            totals = self._run_microbatch([samples[index] for index in rows], totals)
            if totals is None:  # outside of `except`, whose traceback would keep the failed pass alive
                self._drain(samples[rows[0]])
                return None, max(lengths[index] for index in rows)
        return totals, 0

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

    def _agree(self, totals: Totals | None, longest: int) -> list[_Report]:
        """Collective: what happened on every rank, the same list everywhere."""
        loss_sum, target_tokens = (None, 0) if totals is None else totals
        # On CPU the loss rides along. On a GPU, reading it would wait for the GPU.
        loss_on_host = loss_sum.item() if loss_sum is not None and loss_sum.device.type == "cpu" else 0.0
        report = _Report(totals is None, longest, self._ledger.position, target_tokens, loss_on_host)
        reports = [_Report(*row) for row in self._agreement.gather(report)]
        positions = [int(report.position) for report in reports]
        if len(set(positions)) > 1:
            raise UnrecoverableError(
                f"the ranks issued different numbers of collectives in one step ({positions}, by rank), so "
                "what they received is not what they expected; give all ranks the same model and the same "
                "number of samples"
            )
        return reports

    def _result(
        self, totals: Totals | None, reports: Sequence[_Report], microbatches: int, recoveries: int
    ) -> StepResult:
        """Collective: on CUDA, where the loss did not ride on the agreement."""
        assert totals is not None
        if totals.loss_sum.device.type == "cpu":
            loss_sum = totals.loss_sum.new_tensor(sum(report.loss_sum for report in reports))
        else:
            loss_sum = sum_over_ranks(totals.loss_sum)
        target_tokens = int(sum(report.target_tokens for report in reports))
        return StepResult(loss_sum, target_tokens, microbatches, recoveries)

    def _shrink(self, plan: Plan, reports: Sequence[_Report], step: int) -> None:
        """Takes the next smaller limit. Every rank comes to the same one, or to the same error."""
        failed = _failed_ranks(reports)
        where = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
        longest = int(max(report.longest for report in reports))
        what = f"step {step}: out of memory on {where} (longest sample {longest} tokens)"
        rows = max(map(len, plan))  # less than the limit if the step has fewer samples
        try:
            self.limit = shrink_after_oom(RowLimit(rows))
        except LimitExhaustedError as error:
            raise LimitExhaustedError(f"{what}: {error}") from None
        self.recoveries += 1
        if rank() == 0:
            logger.warning("%s: microbatch %d -> %d rows, step repeated", what, rows, self.limit.rows)

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


def _failed_ranks(reports: Sequence[_Report]) -> tuple[int, ...]:
    return tuple(index for index, report in enumerate(reports) if report.failed)
