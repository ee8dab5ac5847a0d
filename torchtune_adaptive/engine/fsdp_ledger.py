"""The protocol for ranks that exchange only parameters and gradients: a record of FSDP2's collectives.

The ledger counts FSDP2's collectives, and records those of complete microbatches. After a failure, it issues the
remaining ones from the record: gathers with the parameters of this rank, others with zeros. A microbatch without a
record is run on a filler, a small sample. Communication outside FSDP2 is detected, but cannot be completed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.fsdp import AllGather, ReduceScatter
from torchtune_adaptive.engine.ledger import Ledger, Run
from torchtune_adaptive.engine.messages import Listener, Obstacles, outside_fsdp_error
from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.ranks import message_counters, rank
from torchtune_adaptive.errors import AdaptiveError, RecoveryUnsupportedError, Remedy


@dataclass(frozen=True)
class Collective:
    """A collective of FSDP, with everything that is needed to issue it again."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    numel: int
    """Number of elements of the unsharded tensor; for an all-reduce, of the shard."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    op: Any = field(compare=False)
    """The reduction. Not compared, because equal reductions may be different objects. The dtype and the group determine
    which one it is."""
    comm: Any = field(compare=False)
    """FSDP's object that issues the collective. Not compared, because peers do not depend on it."""
    gathers: Any = field(compare=False, default=None)
    """FSDP's parameter group that an all-gather gathers. Not compared, for the same reason."""


class CountedComm:
    """Wraps FSDP's all-gather or reduce-scatter, so that a ledger issues and counts it."""

    def __init__(self, ledger: FsdpLedger, comm: AllGather | ReduceScatter, gathers: Any = None) -> None:
        self._ledger, self._comm, self._gathers = ledger, comm, gathers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the collective."""
        return self._comm.allocate(size, dtype=dtype, device=device)

    def __call__(self, *, async_op: bool = False, **arguments: Any) -> dist.Work | None:
        """Collective: issue FSDP's collective through the ledger. FSDP passes keyword arguments only."""
        kind: Literal["all-gather", "reduce-scatter"] = "all-gather" if self._gathers else "reduce-scatter"
        name = "output_tensor" if self._gathers else "input_tensor"
        tensor, group, op = arguments[name], arguments["group"], arguments.get("op")
        collective = Collective(kind, tensor.numel(), tensor.dtype, tensor.device, group, op, self._comm, self._gathers)
        work = self._ledger.issue_recorded(collective, partial(self._comm, **arguments), async_op)
        if not (self._gathers and self._ledger.runs_filler):
            return work
        if work is not None:
            work.wait()
        fsdp.copy_shards(self._gathers, shard := arguments["input_tensor"], ones_if_empty=True)
        for part in tensor.chunk(group.size()):
            part.copy_(shard)
        return None


class CountedReplicas:
    """Wraps the process group over which FSDP all-reduces gradients of replicas, and counts the all-reduces.

    FSDP has setters for its all-gather and its reduce-scatter. The all-reduce has none: FSDP calls `dist.all_reduce`.
    That function only compares, hashes and calls the group, so this object can replace the group. Other models and
    torch's own functions are not changed.
    """

    def __init__(self, ledger: FsdpLedger, group: dist.ProcessGroup, comm: ReduceScatter) -> None:
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

        return self._ledger.issue_recorded(collective, call, async_op=options.asyncOp)


class PlaceInStep(Enum):
    """Place of a microbatch in its step. If there are replicas, or if gradients are reduced once per step, the
    collectives of a microbatch depend on its place.

    With replicas, only the last microbatch of a step all-reduces gradients. If gradients are reduced once per step,
    only the last one reduce-scatters them. The first one differs from the others if a module runs several times in a
    microbatch, for example a head that is applied in chunks: such a module issues more collectives if there are
    gradients of earlier microbatches.
    """

    ONLY = auto()
    """The only microbatch of a step, or any microbatch of a step in which all of them reduce gradients."""
    FIRST = auto()
    MIDDLE = auto()
    LAST = auto()


@dataclass
class CollectiveRecord:
    """The collectives that the microbatches of a stage have issued so far."""

    trained: tuple[bool, ...]
    """For each parameter, True if it was trained when the record began."""
    schedules: dict[PlaceInStep, tuple[Collective, ...]] = field(default_factory=dict)
    """The collectives of a complete microbatch, in order. Equal on all ranks."""
    obstacles: Obstacles = field(default_factory=Obstacles)


class FsdpLedger(Ledger):
    """Counts and records FSDP's collectives, and issues the remaining ones of a failed rank from the record.

    It keeps one record per stage. Whole models have no collectives of FSDP; of them, only messages are counted.
    """

    def __init__(self, *roots: object) -> None:
        super().__init__(*roots)
        self._groups_of = {root: fsdp.groups_of(root) for root in self._roots}
        self._records: dict[str, CollectiveRecord] = {}  # by stage
        self._message_counters: list[Callable[[], int]] = []
        # of the current step and stage:
        self._record = CollectiveRecord(trained=())
        self._groups: dict[Any, None] = {}  # the owned groups in order, with a fast lookup
        # of the current microbatch:
        self._current: list[Collective] | None = None  # None outside of a microbatch
        self._fsdp_messages = 0  # messages of these collectives, counted by the process groups
        self._messages_before = 0  # messages counted when the microbatch began
        self._to_skip = 0  # collectives that the filler must not issue, because this rank has issued them
        self.runs_filler = False  # the filler computes with this rank's shards only
        for group in (group for groups in self._groups_of.values() for group in groups):
            if isinstance(cast(object, group._all_gather_comm), CountedComm):
                raise ValueError(
                    "this model already has a Recovery: pass that one to all runners of the model, or close it first"
                )
        comm, replicas = partial(CountedComm, self), partial(CountedReplicas, self)
        self._restore = [fsdp.replace_collectives(root, comm, comm, replicas) for root in self._roots]
        self._closed = False

    def close(self) -> None:
        """Restore FSDP's own collectives."""
        for restore in self._restore:
            restore()
        self._closed = True
        super().close()

    def abandon(self) -> None:
        """Drop the gradients of an aborted step, so that a later backward does not add to them."""
        self._current = None
        super().abandon()

    def copy_record(self, *, of_stage: str, to_stage: str) -> None:
        """Copy what prevents recovery to another stage of the same model."""
        found = self._records[of_stage]
        self._records[to_stage] = replace(found, schedules={}, obstacles=replace(found.obstacles))

    def begin_attempt(
        self, microbatches: int, models: Sequence[object], stage: str = "", *, reduce_once: bool = False
    ) -> None:
        """Begin an attempt, as in `Ledger`, with the record of the stage."""
        self._message_counters = [counter for _, counter in message_counters()]
        super().begin_attempt(microbatches, models, stage, reduce_once=reduce_once)
        self._groups = {group: None for root in self._owned for group in self._groups_of[root]}
        trained, record = fsdp.trainable(self._groups), self._records.get(stage)
        # FSDP does not communicate gradients of frozen weights, so freezing some changes the collectives
        if record is None or record.trained != trained:
            record = self._records[stage] = CollectiveRecord(trained)
        self._record, self.obstacles = record, record.obstacles
        fsdp.check_gradients_reduced(self._groups)

    def begin_microbatch(self, number: int) -> None:
        """Begin a microbatch, and list its collectives."""
        super().begin_microbatch(number)
        self._current, self._fsdp_messages = [], 0
        self._messages_before = self._messages()

    def end_microbatch(self) -> None:
        """End a complete microbatch: compare its collectives with the record, or make them the record."""
        super().end_microbatch()
        is_last = self._is_last(self._number)
        if is_last or not self._reducing_once:
            self._find_varying_setting()
        self._record_or_compare(complete=True)
        if self.obstacles.differs and is_last:
            fsdp.check_gradients_reduced(self._groups)

    def end_failed_microbatch(self) -> None:
        """End a microbatch that ran out of memory: compare its collectives up to the error with the record."""
        self._record_or_compare(complete=False)

    def _find_varying_setting(self) -> None:
        self.obstacles.differs = fsdp.varying_setting(self._groups) or self.obstacles.differs

    def _record_or_compare(self, *, complete: bool) -> None:
        record, issued, place = self._record, tuple(self._current or ()), self._place(self._number)
        self._current = None
        schedule = record.schedules.get(place, issued)
        if complete:
            record.schedules[place] = schedule
        if issued != (schedule if complete else schedule[: len(issued)]):
            self.obstacles.differs = self.obstacles.differs or "others than in the first one"
            return
        self.obstacles.counted(self._messages() - self._messages_before - self._fsdp_messages)

    def _place(self, number: int) -> PlaceInStep:
        if not (self._replicated or self._reducing_once) or self._microbatches == 1:
            return PlaceInStep.ONLY
        if number == 0:
            return PlaceInStep.FIRST
        return PlaceInStep.LAST if self._is_last(number) else PlaceInStep.MIDDLE

    def listening(self) -> AbstractContextManager[object]:
        """Return the context of a microbatch, which may look for operations that communicate outside FSDP."""
        return self.obstacles.listening(self._add_operation)

    def _add_operation(self, name: str) -> None:
        if not self._issuing:
            self.obstacles.add_operation(name)

    def _refuse_operation(self, name: str) -> None:
        if not self._issuing:
            raise outside_fsdp_error(name)

    def _messages(self) -> int:
        """Return the number of messages that this rank has sent, in all process groups."""
        return sum(counter() for counter in self._message_counters)

    def issue_recorded(
        self, collective: Collective, call: Callable[..., dist.Work | None], async_op: bool
    ) -> dist.Work | None:
        """Collective: issue a collective of FSDP, and list it for the record of the microbatch."""
        if self._closed:  # other code has wrapped this object, so `close` could not remove it
            return call(async_op=async_op)
        if self._current is not None:
            self._current.append(collective)
            if collective.gathers and collective.gathers not in self._groups:  # it is not reset with this stage
                self.obstacles.differs = "a forward of a model that another stage trains"
        if self._to_skip > 0:
            self._to_skip -= 1
            return None
        return self.issue("an FSDP collective", call, collective.device.type, collective.group, async_op=async_op)

    def _count(self, messages: int) -> None:
        super()._count(messages)
        self._fsdp_messages += messages

    def drain(self, run: Run) -> None:
        """Collective: issue the remaining collectives of this step from the record, or by running a filler."""
        self._find_varying_setting()
        self.obstacles.check()
        if not self._groups:  # whole models
            return
        # Walk through the collectives of the whole step, and issue those after `position`. Gradients may be zero,
        # because all ranks discard them.
        begins_at = 0  # the position at which the microbatch begins
        for number in range(self._microbatches):
            issued = max(0, self.position - begins_at)
            schedule = self._record.schedules.get(self._place(number))
            if schedule is None:
                schedule = self._record_by_filler(number, issued, partial(run, None))
                issued = len(schedule)
            for collective in schedule[issued:]:
                self._issue_from_record(collective)
            begins_at += len(schedule)

    def _issue_from_record(self, collective: Collective) -> None:
        """Collective: issue this collective with the parameters of this rank, or with zeros."""
        group, comm = collective.group, collective.comm
        # allocated by FSDP's object, because symmetric memory accepts only its own buffers
        tensor = comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
        tensor.zero_()
        if collective.kind == "all-reduce":
            self.issue_recorded(collective, partial(dist.all_reduce, tensor, collective.op, group), async_op=False)
            return
        shard = tensor.chunk(group.size())[group.rank()]
        if collective.kind == "all-gather":
            fsdp.copy_shards(collective.gathers, shard)
            call = partial(comm, output_tensor=tensor, input_tensor=shard, group=group)
        else:
            output = torch.empty_like(shard)
            call = partial(comm, output_tensor=output, input_tensor=tensor, group=group, op=collective.op)
        self.issue_recorded(collective, call, async_op=False)

    def _record_by_filler(self, number: int, issued: int, run_filler: Callable[[], object]) -> tuple[Collective, ...]:
        """Collective: complete a microbatch that has no record, by running the filler. Return its schedule. `issued` is
        the number of its collectives that this rank has already issued."""
        self._make_gradients(number, partial(self._run_filler, sys.maxsize, run_filler))
        if number > self._number:
            self.begin_microbatch(number)
        self._current = []
        self._set_reductions(self._is_last(number))
        self._run_filler(issued, run_filler)
        schedule = self._record.schedules[self._place(number)] = tuple(self._current)
        self._current = None
        return schedule

    def _run_filler(self, to_skip: int, run_filler: Callable[[], object]) -> None:
        """Collective: run the filler, but do not issue its first `to_skip` collectives. Since the peers' shards are
        missing for those, copies of this rank's shard replace them in every all-gather."""
        self._to_skip, self.runs_filler = to_skip, True
        try:
            with Listener(self._refuse_operation):
                run_filler()
        except Exception as error:
            if is_oom(error) or isinstance(error, AdaptiveError):
                raise
            raise RecoveryUnsupportedError(
                f"out of memory on rank {rank()} in a microbatch whose collectives are not recorded yet, and the model "
                f"raises an error for the filler, a small sample that shows them ({type(error).__name__}: {error})",
                Remedy.SMALLER_LIMIT,
            ) from error
        finally:
            self._to_skip, self.runs_filler = 0, False
        self._end_pass()
