"""Keeps a failed rank in step with its peers: it issues the collectives that they still expect of it.

A rank that stops in the middle of a step leaves its peers waiting in a collective. The ledger stands between
FSDP2 and its collectives, counts them, knows from an earlier microbatch which ones follow, and issues those with zeros.
It cannot do so for anything else that a microbatch communicates, so it detects that, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.fsdp import AllGather, FSDPModule, ReduceScatter
from torchtune_adaptive.engine.ghost import GhostPasses, messages
from torchtune_adaptive.engine.listener import Listener
from torchtune_adaptive.engine.ranks import backend_for, explaining_failures, message_counters, rank, world_size
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy, UnrecoverableError
from torchtune_adaptive.text import count_of


@dataclass(frozen=True)
class Collective:
    """One collective, with everything that a rank without the data needs to take part in it."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    numel: int
    """Elements on the unsharded side; of an all-reduce, of the shard."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    # Not compared: some reductions compare by identity, and this one follows from the dtype and the group.
    op: Any = field(compare=False)
    # Not compared: peers cannot see which object issues it.
    comm: Any = field(compare=False)
    """What issues it for FSDP."""


class _Counted:
    """A collective of FSDP that is issued through a ledger."""

    kind: Literal["all-gather", "reduce-scatter"]
    whole: str
    """The argument that has the unsharded side."""

    def __init__(self, ledger: CollectiveLedger, comm: AllGather | ReduceScatter) -> None:
        if isinstance(cast(object, comm), _Counted):
            raise ValueError(
                "this model has a Recovery already: pass that one to each of its runners, or close it first"
            )
        self._ledger, self._comm = ledger, comm

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._comm.allocate(size, dtype=dtype, device=device)

    def __call__(self, *, async_op: bool = False, **arguments: Any) -> dist.Work | None:
        """Collective: FSDP's own, which FSDP calls by keywords."""
        whole, group = arguments[self.whole], arguments["group"]
        this = Collective(self.kind, whole.numel(), whole.dtype, whole.device, group, arguments.get("op"), self._comm)
        return self._ledger.issue(this, partial(self._comm, **arguments), async_op)


class CountedAllGather(_Counted, AllGather):  # type: ignore[misc]
    kind, whole = "all-gather", "output_tensor"


class CountedReduceScatter(_Counted, ReduceScatter):  # type: ignore[misc]
    kind, whole = "reduce-scatter", "input_tensor"


class CountedReplicas:
    """The process group of a shard's replicas, with its all-reduces counted.

    FSDP has setters for its other two collectives. It issues this one by `dist.all_reduce`, which only compares, hashes
    and calls the group. So no function of torch has to be replaced, and no other model is affected.
    """

    def __init__(self, ledger: CollectiveLedger, group: dist.ProcessGroup, comm: ReduceScatter) -> None:
        self._ledger, self._group, self._comm = ledger, group, comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __hash__(self) -> int:
        return hash(self._group)

    def __eq__(self, other: object) -> bool:
        return bool(self._group == other)

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work | None:
        """Collective: the group's own all-reduce, of one tensor."""
        [shard] = tensors
        op = options.reduceOp
        this = Collective("all-reduce", shard.numel(), shard.dtype, shard.device, self._group, op, self._comm)

        def call(async_op: bool) -> dist.Work:
            options.asyncOp = async_op
            return self._group.allreduce(tensors, options)

        return self._ledger.issue(this, call, async_op=options.asyncOp)


class Schedule(NamedTuple):
    """The collectives of one microbatch, the same on every rank."""

    collectives: tuple[Collective, ...]
    messages: tuple[int, ...]
    """The messages that the process groups count for each of them."""


@dataclass
class CollectiveRecord:
    """The collectives of a stage's microbatches, noted from those that have run."""

    trained: tuple[bool, ...]
    """Whether each weight was trained then."""
    schedules: dict[tuple[bool, bool], Schedule] = field(default_factory=dict)
    """By whether a microbatch sums gradients over replicas, and whether others came before it in its step. Without
    replicas one schedule holds for all. With them, a head that is applied in chunks sums what earlier microbatches have
    left in an all-reduce of its own, which the first microbatch does not have."""
    varies: bool = False
    unsteady: str | None = None
    """The setting by which microbatches issue different collectives."""
    foreign: int = 0
    """Messages of one microbatch that are not FSDP's."""
    names: tuple[str, ...] = ()
    """The operations that sent them."""
    listened: bool = False
    """Whether a microbatch has run under a listener for those names."""


_MOST_NAMES = 3


def what_is_foreign(messages: int, names: tuple[str, ...]) -> str:
    """The names of operations that communicated; their number if another thread or another rank ran them."""
    if not names:
        return f"{count_of(messages, 'message')} each"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def refusal(what: str) -> RecoveryUnsupportedError:
    return RecoveryUnsupportedError(
        f"out of memory on rank {rank()}, and microbatches communicate outside FSDP ({what}): a failed rank cannot "
        "take part, so its peers would hang; communicate after the step, for example in the update",
        Remedy.SMALLER_LIMIT,
    )


class CollectiveLedger:
    """Counts FSDP's collectives since the step began, and issues those that are still to come.

    `position` is where this rank is in the step; at the end of a step all ranks are at the same position. The stages of
    a step share one ledger, which keeps a record for each of them. A stage owns the models that it runs: only those are
    prepared, settled and reset for it, so gradients that another stage has finished stay as they are.
    """

    def __init__(self, *roots: object, watches: bool = True, exchanges_activations: bool = False) -> None:
        """Watches the collectives of models sharded by FSDP2. Whole models have none.

        Without `watches`, it only sums gradients over replicas once a step, and leaves nothing gathered after a forward
        without a backward. Where ranks exchange activations, ghost passes take the place of records.
        """
        self.position = 0
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]
        modules = [root for root in roots if isinstance(root, nn.Module)]
        several = watches and world_size() > 1
        exchanges = exchanges_activations or any(map(fsdp.exchanges_activations, modules))
        self._ghosts = GhostPasses(modules) if several and exchanges else None
        self._watches = several and self._ghosts is None
        self._groups_of = {root: fsdp.groups_of(root) if self._watches else [] for root in self._roots}
        self._with_replicas = {root for root in self._roots if world_size() > 1 and fsdp.has_replicas(root)}
        self._records: dict[str, CollectiveRecord] = {}  # by stage
        self._counters: list[Callable[[], int]] = []  # of messages
        # Of the stage that runs:
        self._record = CollectiveRecord(trained=())
        self._owned = self._roots
        self._groups: list[Any] = []
        self._replicated: list[FSDPModule] = []
        self._microbatches = 0
        # Of the microbatch that runs:
        self._number = -1
        self._current: list[Collective] = []  # what it has communicated
        self._messages_of: list[int] = []  # of each of its collectives, where there is no record yet
        self._begun_at = (0, 0)  # messages and position
        self._already_issued = 0  # collectives that a stand-in must not repeat
        self._issuing = False
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
        if self._ghosts:
            self._ghosts.close()
        self.abandon()

    def abandon(self) -> None:
        """Cleans up after an aborted step, so that a later backward does not add to its gradients."""
        for root in self._roots:
            fsdp.abandon(root)

    def forget(self, stage: str) -> None:
        """Call it on all ranks if a stage issues other collectives from its next step on."""
        self._records.pop(stage, None)
        if self._ghosts:
            self._ghosts.forget(stage)

    def begin_step(self, microbatches: int, models: Sequence[object], stage: str = "") -> None:
        """Starts counting a step of a stage that owns these models."""
        self.position = 0
        self._stage, self._microbatches, self._number = stage, microbatches, -1
        if self._watches:
            self._counters = [counter for _, counter in message_counters()]
        self._owned = [root for root in self._roots if root in models]
        self._groups = [group for root in self._owned for group in self._groups_of[root]]
        self._replicated = [root for root in self._owned if root in self._with_replicas]
        for root in self._owned:
            fsdp.prepare(root)
        trained, record = fsdp.trainable(self._groups), self._records.get(stage)
        if record is None or record.trained != trained:  # frozen weights have no gradients to communicate
            record = self._records[stage] = CollectiveRecord(trained)
        self._record = record
        fsdp.check_scattered(self._groups)

    def begin_microbatch(self, number: int) -> None:
        """Before each microbatch of a step, counted from 0. Gradients are summed over replicas in the last one."""
        if number != self._number:  # otherwise it continues, as a stand-in
            self._messages_of = []
        self._current, self._number = [], number
        self._sum_over_replicas(wanted=self._sums_over_replicas(number))
        self._begun_at = self._messages(), self.position
        if self._ghosts:
            self._ghosts.begin_microbatch()

    def end_microbatch(self) -> None:
        """Records the collectives of a microbatch, or compares them with the record."""
        for root in self._owned:
            fsdp.settle(root)
        if self._ghosts:
            self._ghosts.end_microbatch()
        self._compare(complete=True)
        self._record.unsteady = self._record.unsteady or fsdp.why_unsteady(self._groups)
        if self._record.unsteady and self._number == self._microbatches - 1:
            fsdp.check_scattered(self._groups)
        if not (self._replicated and self._sums_over_replicas(self._number)):
            return
        # FSDP sums over replicas only gradients that this microbatch has produced.
        left_over = [name for root in self._replicated for name in fsdp.partially_summed(root)]
        if left_over:
            raise UnrecoverableError(
                f"{', '.join(left_over)}: an earlier microbatch of this step produced gradients, but the last one, "
                "which sums gradients over replicas, did not; use the same parameters in every microbatch, or shard "
                "without replicas"
            )

    def break_off_microbatch(self) -> None:
        """Compares the collectives up to the point where memory ran out with the record."""
        self._compare(complete=False)

    def _compare(self, *, complete: bool) -> None:
        record, seen, place = self._record, tuple(self._current), self._place(self._number)
        schedule = record.schedules.get(place) or Schedule(seen, tuple(self._messages_of))
        if complete:
            record.schedules[place] = schedule
        if seen != (schedule.collectives if complete else schedule.collectives[: len(seen)]):
            record.varies = True
            return
        messages, position = self._begun_at
        # FSDP's messages as far as they were issued, since a failed microbatch has not reached the rest. And the
        # maximum, since one that failed early may not have sent its foreign messages yet.
        of_fsdp = schedule.messages[: self.position - position]
        record.foreign = max(record.foreign, self._messages() - messages - sum(of_fsdp))

    def _sums_over_replicas(self, number: int) -> bool:
        """Whether this microbatch does: the last of a step. True for all where there are no replicas."""
        return not self._replicated or number == self._microbatches - 1

    def _place(self, number: int) -> tuple[bool, bool]:
        """What decides which schedule a microbatch follows."""
        return self._sums_over_replicas(number), bool(self._replicated) and number > 0

    @property
    def foreign_messages(self) -> int:
        """Messages of a microbatch of this stage besides FSDP's; 0 until a listener has looked for their names."""
        return self._record.foreign if self._record.listened else 0

    def refuse_recovery(self, messages: int) -> str:
        """Makes running out of memory in this stage fatal. Returns the reason and the remedy."""
        self._record.foreign = messages
        return (
            f"microbatches communicate outside FSDP ({what_is_foreign(messages, self._record.names)}), and a rank that "
            "is out of memory cannot take part (communicate after the step, for example in the update)"
        )

    def listening(self) -> AbstractContextManager[object]:
        """A context for a microbatch: a listener, the first time after foreign messages were counted."""
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

    def _messages(self) -> int:
        return sum(counter() for counter in self._counters)

    def issue(self, collective: Collective, call: Callable[..., dist.Work | None], async_op: bool) -> dist.Work | None:
        """Collective: runs `call`, and counts it from the moment that peers can match it."""
        if not self._watches:  # closed, but another ledger still wraps it
            return call(async_op=async_op)
        self._current.append(collective)
        if self._already_issued > 0:
            self._already_issued -= 1
            return None
        # gloo handles tensors inside wait(), which may run out of memory after peers matched the collective.
        # NCCL's wait() handles none, and its synchronous path uses another stream than its asynchronous one.
        on_gloo = backend_for(collective.device.type, collective.group) == "gloo"
        wait_here = not async_op and on_gloo
        learns = self._place(self._number) not in self._record.schedules
        before, position = self._messages() if learns or on_gloo else 0, self.position

        def is_lost() -> bool:
            # gloo numbers an all-gather before it allocates its copies, so it cannot be issued again
            return on_gloo and self.position == position and self._messages() != before

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

    @property
    def progress(self) -> int:
        """What grows with every collective that this rank issues."""
        return messages().total() if self._ghosts else self.position

    def drain(self, passes: Sequence[Callable[[], object]], run_stand_in: Callable[[], object]) -> None:
        """Collective: issues the rest of this step, so that every peer finishes it.

        A microbatch without a record is run by `run_stand_in`, a forward and backward of any size. A ghost pass runs
        those of the `passes`, one for each microbatch, that are not complete.
        """
        if self._ghosts:
            self._finish_as_ghost(self._ghosts, passes)
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
        if not self._groups:  # whole models, whose microbatches communicate nothing
            return
        # The position alone determines what peers expect next: earlier microbatches are over on every rank. Zeros are
        # enough: they go into this attempt's gradients, which all ranks discard after the agreement.
        begins_at = 0
        for number in range(self._microbatches):
            schedule = self._record.schedules.get(self._place(number))
            if schedule is None:
                schedule = self._record_by_stand_in(number, max(0, self.position - begins_at), run_stand_in)
            for collective in schedule.collectives[max(0, self.position - begins_at) :]:
                self._issue_zeros(collective)
            begins_at += len(schedule.collectives)

    def _finish_as_ghost(self, ghosts: GhostPasses, passes: Sequence[Callable[[], object]]) -> None:
        """Collective: issues what is left of this microbatch and of those that follow."""
        ghosts.check(passes[self._number], self._owned, self._stage)
        with ghosts.ghost_mode(self._owned) as ghost:
            if self._replicated and self._number:
                # Peers hold sums of earlier microbatches, which FSDP may send by themselves.
                self._sum_over_replicas(wanted=False)
                ghost.run(passes[self._number])
            for number in range(self._number, self._microbatches):
                if number > self._number:
                    self.begin_microbatch(number)
                self._sum_over_replicas(wanted=self._sums_over_replicas(number))
                ghosts.finish(ghost, passes[number])
                for root in self._owned:
                    fsdp.settle(root)

    def _sum_over_replicas(self, *, wanted: bool) -> None:
        for root in self._replicated:
            root.set_requires_all_reduce(wanted)

    def _issue_zeros(self, collective: Collective) -> None:
        """Collective: takes part with zeros."""
        group, comm = collective.group, collective.comm
        # Through FSDP's own allocation: a symmetric-memory communicator takes no other buffers.
        whole = comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
        whole.zero_()
        if collective.kind == "all-reduce":
            self.issue(collective, partial(dist.all_reduce, whole, collective.op, group), async_op=False)
            return
        shard = whole.chunk(group.size())[group.rank()]
        if collective.kind == "all-gather":
            call = partial(comm, output_tensor=whole, input_tensor=shard, group=group)
        else:
            sums = torch.empty_like(shard)
            call = partial(comm, output_tensor=sums, input_tensor=whole, group=group, op=collective.op)
        self.issue(collective, call, async_op=False)

    def _record_by_stand_in(self, number: int, issued: int, run_stand_in: Callable[[], object]) -> Schedule:
        """Collective: finishes a microbatch that has no record yet, without repeating what was issued already."""
        if self._replicated and number:
            # Peers still hold partial sums of earlier microbatches, which FSDP may send separately. This rank lost its
            # own in the failed pass, so it makes others first.
            self._sum_over_replicas(wanted=False)
            self._run_without(sys.maxsize, run_stand_in)
        self.begin_microbatch(number)
        # Peers have matched the collectives of the failed pass, and would not match them a second time.
        self._run_without(issued, run_stand_in)
        schedule = Schedule(tuple(self._current), tuple(self._messages_of))
        self._record.schedules[self._place(number)] = schedule
        return schedule

    def _run_without(self, issued: int, run_stand_in: Callable[[], object]) -> None:
        """Collective: a stand-in that does not issue the first so many of its collectives."""
        self._already_issued = issued
        try:
            with Listener(self._refuse):  # before it is issued: peers may be waiting for something else
                run_stand_in()
        finally:
            self._already_issued = 0
        for root in self._owned:
            fsdp.settle(root)

    def reset(self) -> None:
        """Returns the models of the stage that runs to their state between two steps, without their gradients."""
        for root in self._owned:
            fsdp.reset(root)
        if self._ghosts:
            self._ghosts.drop_masks()
