"""The collective ledger: what a microbatch communicates under FSDP2, so that it can be finished without one.

FSDP2's collectives depend on the parameters alone. When a rank fails in the middle of a pass, its peers need
partners for the collectives that they will still issue, not the failed rank's data. The ledger stands between
FSDP2 and its collectives, counts them, knows from an earlier microbatch what follows each position, and
issues the rest with zeros.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist

from torchtune_adaptive.comm import fsdp
from torchtune_adaptive.comm.collective_record import CollectiveRecord, Schedule
from torchtune_adaptive.comm.collectives import backend_for, explaining_failures, world_size
from torchtune_adaptive.comm.counting import (
    Collective,
    CountedAllGather,
    CountedReduceScatter,
    CountedReplicas,
    issue_zeros,
)
from torchtune_adaptive.comm.foreign_messages import Listener, MessageCount, refusal, what_is_foreign
from torchtune_adaptive.comm.fsdp import FSDPModule
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy, UnrecoverableError


class CollectiveLedger:
    """Counts FSDP's collectives since the step began, and issues those that are still to come.

    `position` is where this rank is in the step; at the end of a step all ranks are at the same position. The stages of
    a step share one ledger, which keeps a record for each of them. A stage owns the models that it runs: only those are
    prepared, settled and reset for it, so gradients that another stage has finished stay as they are.
    """

    def __init__(self, *roots: object, watches: bool = True) -> None:
        """Watches the collectives of models sharded by FSDP2; of anything else, or None, nothing.

        Without `watches` it only sees to it that gradients are summed over replicas once a step, and that a pass
        without a backward leaves nothing gathered.
        """
        self.position = 0
        self._microbatches = 0
        self._records: dict[str, CollectiveRecord] = {}  # by stage
        self._record = CollectiveRecord(trained=())  # of the stage that runs
        self._number = -1  # of the running microbatch
        self._current: list[Collective] = []  # what it has communicated
        self._already_issued = 0  # collectives that running a stand-in leaves out
        self._issuing = False
        self._messages = MessageCount()
        self._messages_of: list[int] = []  # of each of its collectives, where there is no record yet
        self._begun_at = (0, 0)  # messages and position when the running microbatch began
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]
        self._watches = watches and bool(self._roots) and world_size() > 1
        self._groups_of = {root: fsdp.groups_of(root) if self._watches else [] for root in self._roots}
        self._with_replicas = {root for root in self._roots if world_size() > 1 and fsdp.has_replicas(root)}
        self._use(self._roots)
        self._put_back = [
            fsdp.replace_collectives(
                root,
                partial(CountedAllGather, self),
                partial(CountedReduceScatter, self),
                partial(CountedReplicas, self),
            )
            for root in self._roots
            if self._watches
        ]

    def close(self) -> None:
        """Puts FSDP's own collectives back."""
        for put_back in self._put_back:
            put_back()
        self._watches = False
        self.abandon()

    def abandon(self) -> None:
        """Cleans up after an aborted step, so that a later backward does not add to its gradients."""
        for root in self._roots:
            fsdp.abandon(root)

    def forget(self, stage: str) -> None:
        """Collective in effect: call it on all ranks, where a stage communicates otherwise from its next step on."""
        self._records.pop(stage, None)

    def _use(self, models: Sequence[object]) -> None:
        """From here on, the stage that runs owns these models."""
        self._owned = [root for root in self._roots if root in models]
        self._groups = [group for root in self._owned for group in self._groups_of[root]]
        self._replicated = [root for root in self._owned if root in self._with_replicas]

    def begin_step(self, microbatches: int, models: Sequence[object], stage: str = "") -> None:
        """Starts counting a step of a stage that runs these models, from a state in which every microbatch
        communicates the same."""
        self.position = 0
        self._microbatches, self._number = microbatches, -1
        if self._watches:
            self._messages.look_for_groups()
        self._use(models)
        for root in self._owned:
            fsdp.prepare(root)
        trained, record = fsdp.trainable(self._groups), self._records.get(stage)
        if record is None or record.trained != trained:  # what is frozen has no gradients to communicate
            record = self._records[stage] = CollectiveRecord(trained)
        self._record = record
        fsdp.check_scattered(self._groups)

    def begin_microbatch(self, number: int) -> None:
        """Before each microbatch of a step, which count from 0. Only in the last are gradients summed over replicas."""
        if number != self._number:  # else it goes on, as a stand-in
            self._messages_of = []
        self._current, self._number = [], number
        for root in self._replicated:
            fsdp.reduce_over_replicas(root, self._is_last(number))
        self._begun_at = self._messages(), self.position

    def end_microbatch(self) -> None:
        """Records what a microbatch communicates, or compares with the record."""
        self._settle()
        self._compare(complete=True)
        self._record.unsteady = self._record.unsteady or fsdp.why_unsteady(self._groups)
        if self._replicated and self._is_last(self._number):
            self._check_summed()

    def _check_summed(self) -> None:
        """After the last microbatch of a step: FSDP sums over replicas only what has a gradient in that one."""
        left_over = [name for root in self._replicated for name in fsdp.partially_summed(root)]
        if left_over:
            raise UnrecoverableError(
                f"{', '.join(left_over)}: an earlier microbatch of this step produced gradients, but the last one, "
                "which sums gradients over replicas, did not; use the same parameters in every microbatch, or shard "
                "without replicas"
            )

    def break_off_microbatch(self) -> None:
        """Compares what a microbatch has communicated until it ran out of memory with the record."""
        self._compare(complete=False)

    def _compare(self, *, complete: bool) -> None:
        record, seen, last = self._record, tuple(self._current), self._is_last(self._number)
        schedule = record.schedules.get(last) or Schedule(seen, tuple(self._messages_of))
        if complete:
            record.schedules[last] = schedule
        if seen != (schedule.collectives if complete else schedule.collectives[: len(seen)]):
            record.varies = True
            return
        messages, position = self._begun_at
        # Of FSDP's messages only those that were issued: a microbatch that failed has not come to the rest. And the
        # maximum, since one that failed early may have been quiet until then.
        of_fsdp = schedule.messages[: self.position - position]
        record.foreign = max(record.foreign, self._messages() - messages - sum(of_fsdp))

    def _is_last(self, number: int) -> bool:
        """Whether a microbatch communicates what the last of a step does; without replicas, every one does."""
        return not self._replicated or number == self._microbatches - 1

    @property
    def foreign_messages(self) -> int:
        """What a microbatch of this stage communicates besides FSDP, in messages; 0 until they were listened to."""
        return self._record.foreign if self._record.listened else 0

    def refuse_recovery(self, messages: int) -> str:
        """From now on, running out of memory in this stage is fatal. Returns why, and what to do about it."""
        self._record.foreign = messages
        return (
            f"microbatches communicate outside FSDP ({what_is_foreign(messages, self._record.names)}), and a rank that "
            "is out of memory cannot take part (communicate after the step, for example in the update)"
        )

    def listening(self) -> AbstractContextManager[object]:
        """Open it around a microbatch: where one before it has communicated besides FSDP, this one is listened to."""
        if not self._record.foreign or self._record.listened:
            return nullcontext()
        self._record.listened = True
        return Listener(self._note)

    def _note(self, name: str) -> None:
        if not self._issuing and name not in self._record.names:
            self._record.names += (name,)

    def _refuse(self, name: str) -> None:
        if not self._issuing:
            raise refusal(what_is_foreign(0, (name,)))

    def _settle(self) -> None:
        """Brings FSDP back to idle after a pass without a backward, which would leave parameters gathered.

        The next pass would communicate less than the record says, and whoever writes into parameters find none.
        """
        for root in self._owned:
            fsdp.settle(root)

    def issue(self, collective: Collective, call: Callable[..., dist.Work | None], async_op: bool) -> dist.Work | None:
        """Collective: runs `call`, and counts it from the moment that peers can match it."""
        if not self._watches:  # closed, with another ledger's around it
            return call(async_op=async_op)
        self._current.append(collective)
        if self._already_issued > 0:
            self._already_issued -= 1
            return None
        # gloo handles tensors inside wait(), which may run out of memory after peers matched the collective.
        # NCCL's wait() handles none, and its synchronous path uses another stream than its asynchronous one.
        wait_here = not async_op and backend_for(collective.device.type, collective.group) == "gloo"
        learns = self._is_last(self._number) not in self._record.schedules
        copies = wait_here and collective.device.type != "cpu"  # gloo's own, on the card
        before, position = self._messages() if learns or copies else 0, self.position

        def is_lost() -> bool:
            # gloo numbers an all-gather before it finds no room for its copies: no other can take its place
            return copies and self.position == position and self._messages() != before

        self._issuing = True
        try:
            with explaining_failures("an FSDP collective", is_lost):
                work = call(async_op=async_op or wait_here)
                self.position += 1
                if learns:
                    self._messages_of.append(self._messages() - before)
                if wait_here:
                    assert work is not None, "an asynchronous collective returns its work"
                    work.wait()
                    return None
            return work
        finally:
            self._issuing = False

    def drain(self, run_stand_in: Callable[[], object]) -> None:
        """Collective: issues all that is left of this step, so that every peer finishes it.

        A microbatch without a record is run as `run_stand_in`, a forward and backward of any size.
        """
        if not self._watches:
            return
        unsteady = self._record.unsteady or fsdp.why_unsteady(self._groups)
        if self._record.varies or unsteady:
            raise RecoveryUnsupportedError(
                "out of memory, and microbatches issue different collectives"
                f"{f' ({unsteady})' if unsteady else ''}, so the remaining ones of this step cannot be completed",
                Remedy.SMALLER_LIMIT,
            )
        if self._record.foreign:
            raise refusal(what_is_foreign(self._record.foreign, self._record.names))
        # The position alone says what peers expect next: microbatches that lie before it are over everywhere. Zeros
        # will do: they go into this attempt's gradients, which all ranks throw away at the agreement.
        begins_at = 0
        for number in range(self._microbatches):
            schedule = self._record.schedules.get(self._is_last(number))
            if schedule is None:
                schedule = self._record_by_stand_in(number, max(0, self.position - begins_at), run_stand_in)
            for collective in schedule.collectives[max(0, self.position - begins_at) :]:
                issue_zeros(collective, self)
            begins_at += len(schedule.collectives)

    def _record_by_stand_in(self, number: int, issued: int, run_stand_in: Callable[[], object]) -> Schedule:
        """Collective: finishes a microbatch unlike any before, leaving out what of it has been issued already."""
        # The failed pass has issued the first of these, and peers have matched them: a second time nobody would.
        self._already_issued = issued
        self.begin_microbatch(number)
        try:
            with Listener(self._refuse):  # before it is issued: peers may be waiting for something else
                run_stand_in()
        finally:
            self._already_issued = 0
        self._settle()
        schedule = Schedule(tuple(self._current), tuple(self._messages_of))
        self._record.schedules[self._is_last(number)] = schedule
        return schedule

    def reset(self) -> None:
        """Returns the models of the stage that runs to their state between two steps, without their gradients."""
        for root in self._owned:
            fsdp.reset(root)
