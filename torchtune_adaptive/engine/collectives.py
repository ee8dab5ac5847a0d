"""Completes the collectives of a rank that ran out of memory, so that its peers finish the step.

A rank that stops in the middle of a step leaves its peers waiting in a collective. The ledger therefore counts FSDP2's
collectives and records those of the first microbatch. After a failure it issues the remaining ones with zeros. It
cannot complete other communication inside a microbatch, but it detects it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.fsdp import AllGather, FSDPModule, ReduceScatter
from torchtune_adaptive.engine.ghost import GhostPasses, Listener, messages
from torchtune_adaptive.engine.ranks import backend_for, explaining_failures, message_counters, rank, world_size
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy, UnrecoverableError
from torchtune_adaptive.formatting import count_of


@dataclass(frozen=True)
class Collective:
    """A collective, with everything that a rank without data needs to issue it."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    numel: int
    """Elements of the unsharded tensor; for an all-reduce, of the shard."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    op: Any = field(compare=False)
    """The reduction. Not compared: equal ones may be different objects, and dtype and group determine it."""
    comm: Any = field(compare=False)
    """FSDP's object that issues it. Not compared: peers do not depend on it."""


class CountedComm:
    """Wraps FSDP's all-gather or reduce-scatter, and issues it through a ledger."""

    def __init__(
        self, ledger: CollectiveLedger, kind: Literal["all-gather", "reduce-scatter"], comm: AllGather | ReduceScatter
    ) -> None:
        if isinstance(cast(object, comm), CountedComm):
            raise ValueError(
                "this model has a Recovery already: pass it to all runners of the model, or close it first"
            )
        self._ledger, self._kind, self._comm = ledger, kind, comm

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the collective."""
        return self._comm.allocate(size, dtype=dtype, device=device)

    def __call__(self, *, async_op: bool = False, **arguments: Any) -> dist.Work | None:
        """Collective: issue FSDP's own. FSDP passes keyword arguments."""
        unsharded = arguments["output_tensor" if self._kind == "all-gather" else "input_tensor"]
        group, op = arguments["group"], arguments.get("op")
        collective = Collective(self._kind, unsharded.numel(), unsharded.dtype, unsharded.device, group, op, self._comm)
        return self._ledger.issue(collective, partial(self._comm, **arguments), async_op)


class CountedReplicas:
    """Wraps the process group of a shard's replicas, and counts its all-reduces.

    FSDP has setters for its other two collectives, but not for this one: it calls `dist.all_reduce`. That function only
    compares, hashes and calls the group, so this object can replace the group. torch's functions and other models stay
    unchanged.
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
        """Collective: the group's all-reduce of one tensor."""
        [shard] = tensors
        op = options.reduceOp
        collective = Collective("all-reduce", shard.numel(), shard.dtype, shard.device, self._group, op, self._comm)

        def call(async_op: bool) -> dist.Work:
            options.asyncOp = async_op
            return self._group.allreduce(tensors, options)

        return self._ledger.issue(collective, call, async_op=options.asyncOp)


class PlaceInStep(Enum):
    """Place of a microbatch in its step. If there are replicas, the collectives of a microbatch depend on its place.

    Only the last microbatch of a step all-reduces gradients over replicas. A module that runs several times in a
    microbatch (for example, a head applied in chunks) issues more collectives if earlier microbatches left gradients.
    """

    ONLY = auto()
    """The only microbatch of a step, or any microbatch without replicas."""
    FIRST = auto()
    MIDDLE = auto()
    LAST = auto()


@dataclass
class CollectiveRecord:
    """The collectives that the microbatches of a stage were seen to issue."""

    trained: tuple[bool, ...]
    """For each parameter, whether it was trained when the record began."""
    schedules: dict[PlaceInStep, tuple[Collective, ...]] = field(default_factory=dict)
    """Equal on all ranks."""
    varies: bool = False
    """True if a microbatch differed from its schedule."""
    unsteady: str | None = None
    """The setting that makes microbatches issue different collectives."""
    foreign: int = 0
    """The number of messages of a microbatch that are not FSDP's."""
    names: tuple[str, ...] = ()
    """The operations that sent them."""
    listened: bool = False
    """True if a microbatch has run under a listener that finds these operations."""


_MOST_NAMES = 3


def describe_foreign(messages: int, names: tuple[str, ...]) -> str:
    """Name the operations that communicate, or count their messages if another thread or rank called them."""
    if not names:
        return f"{count_of(messages, 'message')} per microbatch"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _refusal(foreign: str) -> RecoveryUnsupportedError:
    return RecoveryUnsupportedError(
        f"out of memory on rank {rank()}, and microbatches communicate outside FSDP ({foreign}): a failed rank cannot "
        "take part, so its peers would hang; communicate after the step, for example in the update",
        Remedy.SMALLER_LIMIT,
    )


class CollectiveLedger:
    """Counts FSDP's collectives in each step, and issues the remaining ones after a failure.

    `position` is the number of collectives that this rank has issued in this step. All ranks end a step at the same
    position. The stages of a step share a ledger, which keeps one record per stage. A stage owns its model and all
    frozen models: only these are prepared and reset for it, so the gradients of other stages stay as they are.
    """

    def __init__(self, *roots: object, watches: bool = True, exchanges_activations: bool = False) -> None:
        """Count the collectives of models that FSDP2 shards; whole models do not communicate.

        Without `watches`, the ledger counts nothing. It then only tells FSDP to all-reduce over replicas once per step,
        and reshards after a forward without a backward. If ranks exchange activations, ghost passes replace records.
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
        self._message_counters: list[Callable[[], int]] = []
        # of the current step and stage:
        self._record = CollectiveRecord(trained=())
        self._owned = self._roots
        self._groups: list[Any] = []
        self._replicated: list[FSDPModule] = []
        self._microbatches = 0
        # of the current microbatch:
        self._number = -1
        self._current: list[Collective] = []
        self._fsdp_messages = 0  # messages of these collectives, as the process groups count them
        self._messages_before = 0
        self._skips = 0  # collectives that the filler must not issue, because this rank has issued them
        self._issuing = False
        self._restore = [
            fsdp.replace_collectives(
                root,
                partial(CountedComm, self, "all-gather"),
                partial(CountedComm, self, "reduce-scatter"),
                partial(CountedReplicas, self),
            )
            for root in self._roots
            if self._watches
        ]

    def close(self) -> None:
        """Restore FSDP's own collectives."""
        for restore in self._restore:
            restore()
        self._watches = False
        if self._ghosts:
            self._ghosts.close()
        self.abandon()

    def abandon(self) -> None:
        """Clean up after an aborted step, so that a later backward does not add to its gradients."""
        for root in self._roots:
            fsdp.abandon(root)

    def forget(self, stage: str) -> None:
        """Start a new record. Call it on all ranks if the collectives of a stage change from its next step on."""
        self._records.pop(stage, None)
        if self._ghosts:
            self._ghosts.forget(stage)

    def begin_step(self, microbatches: int, models: Sequence[object], stage: str = "") -> None:
        """Start counting for a step of a stage that owns these models."""
        self.position = 0
        self._stage, self._microbatches, self._number = stage, microbatches, -1
        if self._watches:
            self._message_counters = [counter for _, counter in message_counters()]
        self._owned = [root for root in self._roots if root in models]
        self._groups = [group for root in self._owned for group in self._groups_of[root]]
        self._replicated = [root for root in self._owned if root in self._with_replicas]
        for root in self._owned:
            fsdp.prepare(root)
        trained, record = fsdp.trainable(self._groups), self._records.get(stage)
        if record is None or record.trained != trained:  # gradients of frozen weights are not communicated
            record = self._records[stage] = CollectiveRecord(trained)
        self._record = record
        fsdp.check_scattered(self._groups)

    def begin_microbatch(self, number: int) -> None:
        """Start a microbatch of the step, numbered from 0."""
        self._current, self._fsdp_messages, self._number = [], 0, number
        self._set_all_reduce(number == self._microbatches - 1)
        self._messages_before = self._messages()
        if self._ghosts:
            self._ghosts.begin_microbatch()

    def end_microbatch(self) -> None:
        """Record the collectives of a microbatch, or compare them with the record."""
        for root in self._owned:
            fsdp.end_pass_without_backward(root)
        if self._ghosts:
            self._ghosts.end_microbatch()
        self._compare(complete=True)
        self._record.unsteady = self._record.unsteady or fsdp.why_unsteady(self._groups)
        is_last = self._number == self._microbatches - 1
        if self._record.unsteady and is_last:
            fsdp.check_scattered(self._groups)
        # FSDP all-reduces only gradients that the last microbatch produced
        if is_last and (left_over := [name for root in self._replicated for name in fsdp.partially_summed(root)]):
            raise UnrecoverableError(
                f"{', '.join(left_over)}: an earlier microbatch of this step produced gradients, but the last one, "
                "which sums gradients over replicas, did not; use the same parameters in every microbatch, or shard "
                "without replicas"
            )

    def break_off_microbatch(self) -> None:
        """Compare the collectives up to the out-of-memory error with the record."""
        self._compare(complete=False)

    def _compare(self, *, complete: bool) -> None:
        record, issued, place = self._record, tuple(self._current), self._place(self._number)
        schedule = record.schedules.get(place, issued)
        if complete:
            record.schedules[place] = schedule
        if issued != (schedule if complete else schedule[: len(issued)]):
            record.varies = True
            return
        # the maximum, because a failed microbatch may not have sent its foreign messages yet
        record.foreign = max(record.foreign, self._messages() - self._messages_before - self._fsdp_messages)

    def _place(self, number: int) -> PlaceInStep:
        if not self._replicated or self._microbatches == 1:
            return PlaceInStep.ONLY
        if number == 0:
            return PlaceInStep.FIRST
        return PlaceInStep.LAST if number == self._microbatches - 1 else PlaceInStep.MIDDLE

    @property
    def foreign_messages(self) -> int:
        """The number of messages of a microbatch that are not FSDP's; 0 until a listener has looked for their names."""
        return self._record.foreign if self._record.listened else 0

    def refuse_recovery(self, messages: int) -> str:
        """Make out-of-memory errors of this stage fatal. Return the reason and the remedy."""
        self._record.foreign = messages
        return (
            f"microbatches communicate outside FSDP ({describe_foreign(messages, self._record.names)}), and a rank "
            "that is out of memory cannot take part (communicate after the step, for example in the update)"
        )

    def listening(self) -> AbstractContextManager[object]:
        """Return a context for a microbatch. The first one after foreign messages were counted finds their names."""
        if not self._record.foreign or self._record.listened:
            return nullcontext()
        self._record.listened = True
        return Listener(self._note)

    def _note(self, name: str) -> None:
        if not self._issuing and name not in self._record.names:
            self._record.names += (name,)

    def _refuse(self, name: str) -> None:
        if not self._issuing:
            raise _refusal(name)

    def _messages(self) -> int:
        return sum(counter() for counter in self._message_counters)

    def issue(self, collective: Collective, call: Callable[..., dist.Work | None], async_op: bool) -> dist.Work | None:
        """Collective: run `call`, and count it as soon as peers can match it."""
        if not self._watches:  # closed, but a ledger that was created later may still call the collectives of this one
            return call(async_op=async_op)
        self._current.append(collective)
        if self._skips > 0:
            self._skips -= 1
            return None
        # On gloo, wait() allocates, so memory may run out after peers have matched the collective: issue it
        # asynchronously, count it, then wait. On NCCL, wait() does not allocate, and an asynchronous call would use
        # another stream than a synchronous one, so the call stays as FSDP made it.
        on_gloo = backend_for(collective.device.type, collective.group) == "gloo"
        wait_here = not async_op and on_gloo
        messages, position = self._messages(), self.position

        def is_lost() -> bool:
            # gloo counts an all-gather, then allocates its copies. If that fails, it cannot be issued again.
            return on_gloo and self.position == position and self._messages() != messages

        self._issuing = True
        try:
            with explaining_failures("an FSDP collective", is_lost):
                work = call(async_op=async_op or wait_here)
                self.position += 1
                self._fsdp_messages += self._messages() - messages
                if wait_here:
                    assert work is not None, "an asynchronous collective returns its work"
                    work.wait()
                    return None
            return work
        finally:
            self._issuing = False

    @property
    def progress(self) -> int:
        """A number that grows with every collective of this rank."""
        return messages().total() if self._ghosts else self.position

    def drain(self, passes: Sequence[Callable[[], object]], run_filler: Callable[[], object]) -> None:
        """Collective: issue the remaining collectives of this step, so that every peer finishes it.

        `passes` run the microbatches of the step; ghost passes repeat the unfinished ones. `run_filler` is a forward
        and backward of any size, for microbatches without a record.
        """
        if self._ghosts:
            self._drain_by_ghost_passes(self._ghosts, passes)
        if not self._watches:
            return
        if (unsteady := self._record.unsteady or fsdp.why_unsteady(self._groups)) or self._record.varies:
            raise RecoveryUnsupportedError(
                "out of memory, and microbatches issue different collectives"
                f"{f' ({unsteady})' if unsteady else ''}, so the remaining ones of this step cannot be completed",
                Remedy.SMALLER_LIMIT,
            )
        if self._record.foreign:
            raise _refusal(describe_foreign(self._record.foreign, self._record.names))
        if not self._groups:  # whole models
            return
        # The position determines which collective peers expect next. Zeros suffice: all ranks discard their gradients.
        begins_at = 0
        for number in range(self._microbatches):
            issued = max(0, self.position - begins_at)
            schedule = self._record.schedules.get(self._place(number))
            if schedule is None:
                schedule = self._record_by_filler(number, issued, run_filler)
                issued = len(schedule)
            for collective in schedule[issued:]:
                self._issue_zeros(collective)
            begins_at += len(schedule)

    def _drain_by_ghost_passes(self, ghosts: GhostPasses, passes: Sequence[Callable[[], object]]) -> None:
        """Collective: complete this microbatch and the later ones."""
        ghosts.check(passes[self._number], self._owned, self._stage)
        with ghosts.ghost_mode(self._owned) as ghost:
            if self._replicated and self._number:
                self._set_all_reduce(False)
                ghost.run(passes[self._number])  # see _record_by_filler
            for number in range(self._number, self._microbatches):
                if number > self._number:
                    self.begin_microbatch(number)
                self._set_all_reduce(number == self._microbatches - 1)
                ghosts.finish(ghost, passes[number])
                for root in self._owned:
                    fsdp.end_pass_without_backward(root)

    def _set_all_reduce(self, wanted: bool) -> None:
        for root in self._replicated:
            root.set_requires_all_reduce(wanted)

    def _issue_zeros(self, collective: Collective) -> None:
        """Collective: issue it with zeros."""
        group, comm = collective.group, collective.comm
        # allocated by FSDP's object, because symmetric memory accepts only its own buffers
        tensor = comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
        tensor.zero_()
        if collective.kind == "all-reduce":
            self.issue(collective, partial(dist.all_reduce, tensor, collective.op, group), async_op=False)
            return
        shard = tensor.chunk(group.size())[group.rank()]
        if collective.kind == "all-gather":
            call = partial(comm, output_tensor=tensor, input_tensor=shard, group=group)
        else:
            output = torch.empty_like(shard)
            call = partial(comm, output_tensor=output, input_tensor=tensor, group=group, op=collective.op)
        self.issue(collective, call, async_op=False)

    def _record_by_filler(self, number: int, issued: int, run_filler: Callable[[], object]) -> tuple[Collective, ...]:
        """Collective: complete a microbatch that has no record, and return its schedule."""
        if self._replicated and number:
            # FSDP may all-reduce the gradients of earlier microbatches separately. Peers have such gradients, but this
            # rank has dropped its own. So it first makes new ones, in a pass that issues no collective.
            self._set_all_reduce(False)
            self._run_filler(sys.maxsize, run_filler)
        if number > self._number:
            self.begin_microbatch(number)
        self._current = []
        self._set_all_reduce(number == self._microbatches - 1)
        self._run_filler(issued, run_filler)
        schedule = self._record.schedules[self._place(number)] = tuple(self._current)
        return schedule

    def _run_filler(self, skips: int, run_filler: Callable[[], object]) -> None:
        """Collective: run the filler, but do not issue its first `skips` collectives."""
        self._skips = skips
        try:
            with Listener(self._refuse):
                run_filler()
        finally:
            self._skips = 0
        for root in self._owned:
            fsdp.end_pass_without_backward(root)

    def reset(self) -> None:
        """Return the models of this stage to their state between two steps, without gradients."""
        for root in self._owned:
            fsdp.reset(root)
        if self._ghosts:
            self._ghosts.drop_masks()
