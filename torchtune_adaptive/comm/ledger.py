"""The collective ledger: what a microbatch communicates under FSDP2, so that it can be finished without one.

FSDP2's collectives depend on the parameters alone. When a rank fails in the middle of a pass, its peers need
partners for the collectives that they will still issue, not the failed rank's data. The ledger stands between
FSDP2 and its collectives, counts them, knows from an earlier microbatch what follows each position, and
issues the rest with zeros.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtune_adaptive.comm import fsdp
from torchtune_adaptive.comm.collectives import backend_for, explaining_failures, world_size
from torchtune_adaptive.comm.foreign import Listener, MessageCount, refusal, what_is_foreign
from torchtune_adaptive.comm.fsdp import AllGather, FSDPModule, ReduceScatter
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy


@dataclass(frozen=True)
class Collective:
    """One collective, with all that a partner without the data needs to take part in it."""

    kind: type[AllGather] | type[ReduceScatter]
    numel: int
    """Elements on the unsharded side."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    # Some reductions compare by identity; which one it is follows from the dtype and the group.
    op: Any = field(compare=False)
    comm: Any = field(compare=False)


@dataclass
class _Record:
    """What one microbatch of a stage communicates, on every rank and in every microbatch alike."""

    collectives: tuple[Collective, ...] | None = None
    messages: tuple[int, ...] = ()
    """How many messages the process groups count for each of them."""
    varies: bool = False
    foreign: int = 0
    """Messages of one microbatch that are not FSDP's."""
    names: tuple[str, ...] = ()
    """What asked for them."""
    listened: bool = False
    """Whether a microbatch was listened to for those names."""


class CollectiveLedger:
    """Counts FSDP's collectives since the step began, and issues those that are still to come.

    `position` is where this rank is in the step; at the end of a step all ranks are at the same position. Stages that
    run the same models share one ledger, which keeps a record for each of them.
    """

    def __init__(self, *roots: Any) -> None:
        """Watches the collectives of models sharded by FSDP2; of anything else, or None, nothing."""
        self.position = 0
        self._microbatches = 0
        self._records: dict[str, _Record] = {}  # by stage
        self._record = _Record()  # of the stage that runs
        self._current: list[Collective] = []  # what the running microbatch has communicated
        self._already_issued = 0  # collectives that a replay leaves out
        self._issuing = False
        self._messages = MessageCount()
        self._messages_of: list[int] = []  # of each collective of a stage's first microbatch
        self._begun_at = (0, 0)  # messages and position when the running microbatch began
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]
        self._watches = bool(self._roots) and world_size() > 1
        self._put_back = [
            fsdp.replace_collectives(root, partial(_CountedAllGather, self), partial(_CountedReduceScatter, self))
            for root in self._roots
            if self._watches
        ]

    def close(self) -> None:
        """Puts FSDP's own collectives back."""
        for put_back in self._put_back:
            put_back()
        self._watches = False

    def begin_step(self, microbatches: int, stage: str = "") -> None:
        """Starts counting, from a state in which every microbatch communicates the same."""
        self.position = 0
        self._microbatches = microbatches
        self._record = self._records.setdefault(stage, _Record())
        self._messages_of = []
        if self._watches:
            self._messages.look_for_groups()
        for root in self._roots:
            # Cannot be repeated when it fails halfway, so it must not happen inside of a microbatch.
            fsdp.initialize(root)
            # What ran outside of a step, say an evaluation, may have ended anywhere.
            if not fsdp.is_idle(root):
                fsdp.reset(root)

    def begin_microbatch(self) -> None:
        self._current = []
        self._begun_at = self._messages(), self.position

    def end_microbatch(self) -> None:
        """Records what a microbatch communicates, or compares with the record."""
        self._settle()
        self._compare(complete=True)

    def break_off_microbatch(self) -> None:
        """Compares what a microbatch has communicated until it ran out of memory with the record."""
        self._compare(complete=False)

    def _compare(self, *, complete: bool) -> None:
        record, seen = self._record, tuple(self._current)
        if record.collectives is None:
            if complete:
                record.collectives, record.messages = seen, tuple(self._messages_of)
        elif seen != (record.collectives if complete else record.collectives[: len(seen)]):
            record.varies = True
            return
        messages, position = self._begun_at
        of_fsdp = (record.messages or self._messages_of)[: self.position - position]
        record.foreign = max(record.foreign, self._messages() - messages - sum(of_fsdp))

    @property
    def foreign_messages(self) -> int:
        """What a microbatch of this stage communicates besides FSDP, in messages; 0 until they were listened to."""
        return self._record.foreign if self._record.listened else 0

    def refuse_recovery(self, messages: int) -> str:
        """From now on, running out of memory in this stage is fatal. Returns what it communicates besides FSDP."""
        self._record.foreign = messages
        return what_is_foreign(messages, self._record.names)

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

        The next pass would communicate less than the record says.
        """
        for root in self._roots:
            if fsdp.awaits_backward(root):
                fsdp.settle(root)

    def issue(self, collective: Collective, call: Callable[..., Any], async_op: bool) -> Any:
        """Collective: runs `call`, and counts it from the moment that peers can match it."""
        self._current.append(collective)
        if self._already_issued > 0:
            self._already_issued -= 1
            return None
        # gloo handles tensors inside wait(), which may run out of memory after peers matched the collective.
        # NCCL's wait() handles none, and its synchronous path uses another stream than its asynchronous one.
        wait_here = not async_op and backend_for(collective.device.type, collective.group) == "gloo"
        learns = self._record.collectives is None
        before = self._messages() if learns else 0
        self._issuing = True
        try:
            with explaining_failures("a collective of FSDP"):
                work = call(async_op=async_op or wait_here)
                self.position += 1
                if learns:
                    self._messages_of.append(self._messages() - before)
                if wait_here:
                    work.wait()
                    return None
            return work
        finally:
            self._issuing = False

    def drain(self, replay: Callable[[], object]) -> None:
        """Collective: issues all that is left of this step, so that every peer finishes it.

        Without a record, `replay` (a forward and backward of any size) first finishes the running microbatch.
        """
        if not self._watches:
            return
        if self._record.varies:
            raise RecoveryUnsupportedError(
                "out of memory, and what a microbatch communicates changes from one to the next, so what the "
                "peers still expect is not known",
                Remedy.SMALLER_LIMIT,
                Remedy.NO_RECOVERY,
            )
        if self._record.foreign:
            raise refusal(what_is_foreign(self._record.foreign, self._record.names))
        record = self._record.collectives or self._record_by_replay(replay)
        # Every microbatch communicates the same, so the position alone says what peers expect next. Zeros will do:
        # they go into this attempt's gradients, which all ranks throw away at the agreement.
        for collective in (record * self._microbatches)[self.position :]:
            self._issue_zeros(collective)

    def _record_by_replay(self, replay: Callable[[], object]) -> tuple[Collective, ...]:
        """Collective: finishes the step's first microbatch, leaving out what it has already communicated."""
        # The failed pass has issued the first of these, and peers have matched them: a second time nobody would.
        self._already_issued = self.position
        self.begin_microbatch()
        try:
            with Listener(self._refuse):  # before it is issued: peers may be waiting for something else
                replay()
        finally:
            self._already_issued = 0
        self._settle()
        self._record.collectives = record = tuple(self._current)
        self._record.messages = tuple(self._messages_of)
        return record

    def _issue_zeros(self, collective: Collective) -> None:
        group, comm = collective.group, collective.comm
        # Through FSDP's own allocation: a symmetric-memory communicator takes no other buffers.
        whole = comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
        whole.zero_()
        shard = whole.chunk(group.size())[group.rank()]
        if collective.kind is AllGather:
            call = partial(comm, output_tensor=whole, input_tensor=shard, group=group)
        else:
            sums = torch.empty_like(shard)
            call = partial(comm, output_tensor=sums, input_tensor=whole, group=group, op=collective.op)
        self.issue(collective, call, async_op=False)

    def reset(self) -> None:
        """Brings FSDP back to where it is between two steps, without the gradients of an unfinished pass."""
        for root in self._roots:
            fsdp.reset(root)


class _Counted:
    """A collective of FSDP that tells the ledger before it communicates."""

    def __init__(self, ledger: CollectiveLedger, comm: Any) -> None:
        self._ledger, self._comm = ledger, comm

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return buffer


class _CountedAllGather(_Counted, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Collective: FSDP's own all-gather."""
        whole = output_tensor
        this = Collective(AllGather, whole.numel(), whole.dtype, whole.device, group, None, self._comm)
        call = partial(self._comm, output_tensor=whole, input_tensor=input_tensor, group=group)
        return self._ledger.issue(this, call, async_op)


class _CountedReduceScatter(_Counted, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Collective: FSDP's own reduce-scatter."""
        whole = input_tensor
        this = Collective(ReduceScatter, whole.numel(), whole.dtype, whole.device, group, op, self._comm)
        call = partial(self._comm, output_tensor=output_tensor, input_tensor=whole, group=group, op=op)
        return self._ledger.issue(this, call, async_op)
