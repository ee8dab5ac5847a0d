"""One attempt at a step: its microbatches one after the other or, out of memory, what the peers still need of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Literal, TypeAlias

from torch import nn

from torchtune_adaptive.comm.collectives import rank
from torchtune_adaptive.comm.fsdp import why_recovery_is_off
from torchtune_adaptive.comm.ledger import CollectiveLedger
from torchtune_adaptive.comm.replicas_alike import compare_replicas
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy, UnrecoverableError
from torchtune_adaptive.limits.change import in_step
from torchtune_adaptive.limits.padded_plan import Plan
from torchtune_adaptive.memory.oom import forget_frames, is_oom, release
from torchtune_adaptive.step.reports import Totals
from torchtune_adaptive.step.samples import Sample, SampleKind

logger = logging.getLogger(__name__)

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
