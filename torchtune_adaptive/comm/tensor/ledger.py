"""The ledger under tensor parallelism: what a microbatch communicates, and what is missing of one that has failed.

Collectives that carry activations depend on the microbatch, so no record of an earlier one will do. A rank that has
failed runs the interrupted microbatch once more on a shadow of the model, on tensors without data: that writes the
script of what its peers expect, whose rest it sends as zeros.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from torchtune_adaptive.comm import fsdp
from torchtune_adaptive.comm.collectives import Agreement, backend_for, explaining_failures
from torchtune_adaptive.comm.counting import (
    Collective,
    CountedAllGather,
    CountedReduceScatter,
    CountedReplicas,
    Sent,
    issue_zeros,
)
from torchtune_adaptive.comm.foreign_messages import Listener, MessageCount
from torchtune_adaptive.comm.tensor.functional import FunctionalCollective, counted, issue_functional_zeros
from torchtune_adaptive.comm.tensor.masks import Masks
from torchtune_adaptive.comm.tensor.refusals import (
    NEEDS_DATA,
    SAYS_OTHERWISE,
    outside_of_the_script,
    refused,
    why_tensors_are_off,
)
from torchtune_adaptive.comm.tensor.scripts import Entry, Script, Scripts
from torchtune_adaptive.comm.tensor.shadow import Rehearsal, Shadow

Sample = TypeVar("Sample")
T = TypeVar("T")


class TensorLedger(Generic[Sample]):
    """Counts all collectives of a tensor-parallel model's microbatches, FSDP's and DTensor's, and issues those to come.

    `position` counts FSDP's and is alike on all ranks at the end of a step; `tensor_position` counts DTensor's and is
    alike within a group. How many those are may depend on the microbatch, which other groups have another of.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        rehearsal: Rehearsal[Sample],
        *,
        untested_backends: bool = False,
    ) -> None:
        """Collective. `group`: the ranks that share each microbatch. Backends other than gloo have not been tested."""
        self.tensor_groups = _all_groups(group)
        self.sent, self.waited_s = Sent(), 0.0
        self._group, self._untested_backends = group, untested_backends
        self._model, self._root = model, model if isinstance(model, fsdp.FSDPModule) else None
        self._groups = [] if self._root is None else fsdp.groups_of(self._root)
        self._closed, self._put_back = False, self._watch(model)
        self.shadow = Shadow(rehearsal, self._watch, lambda: Listener(self._refuse))
        self.scripts = Scripts(rehearsal.key_of, self._rehearse)
        self._trained: list[bool] = []  # flags of the weights that the scripts are for
        self._masks, self._messages = Masks(), MessageCount()
        self._microbatches: Sequence[Sequence[Sample]] = ()
        self._issued: list[Entry] = []  # since the step began
        self._rehearsed: list[Entry] | None = None  # while a shadow runs
        self._outstanding: dict[int, Tensor] = {}  # by storage: nobody has waited for these yet
        self._number = self._begun = self._begun_messages = 0  # of the running microbatch
        self._foreign = self._known_messages = 0  # messages that no script has; of what was counted, all in all
        self._issuing = self._listened = False
        self._names: tuple[str, ...] = ()

    def _watch(self, model: nn.Module) -> Callable[[], None]:
        if not isinstance(model, fsdp.FSDPModule):
            return lambda: None
        gather, scatter = partial(CountedAllGather, self), partial(CountedReduceScatter, self)
        return fsdp.replace_collectives(model, gather, scatter, partial(CountedReplicas, self))

    def close(self) -> None:
        """Puts FSDP's own collectives back."""
        self._put_back()
        self._closed = True
        self.abandon()

    def abandon(self) -> None:
        """Whatever has ended a step halfway: a backward outside of steps has gradients of its own alone."""
        if self._root is not None:
            fsdp.abandon(self._root)

    def why_recovery_is_off(self, model: nn.Module) -> str | None:
        """Why a step of this model cannot be run again after running out of memory; None if it can."""
        return why_tensors_are_off(model, self._group, self._untested_backends)

    @property
    def position(self) -> int:
        return sum(isinstance(entry, Collective) for entry in self._issued)

    @property
    def tensor_position(self) -> int:
        return len(self._issued) - self.position

    def begin_step(self, microbatches: Sequence[Sequence[Sample]], stage: str = "") -> None:
        self._microbatches, self._issued, self.sent = microbatches, [], Sent()
        self._messages.look_for_groups()
        if self._root is not None:
            fsdp.prepare(self._root)
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if trained != self._trained:  # what is frozen has no gradients to communicate
            self._trained = trained
            self.scripts.forget()
            self.shadow.train(trained)
        fsdp.check_scattered(self._groups)

    def begin_microbatch(self, number: int) -> None:
        self._number, self._begun = number, len(self._issued)
        self._begun_messages = self._messages() - self._known_messages

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Open it around a microbatch."""
        names_are_missing = self._foreign > 0 and not self._listened
        self._listened = self._listened or names_are_missing
        hearing = Listener(self._note) if names_are_missing else nullcontext()
        with counted(self, self._group), self._masks.noting(), hearing:
            yield

    def end_microbatch(self) -> None:
        """Compares what a microbatch has communicated with the script of its shape, or makes that the script."""
        if self._root is not None:
            fsdp.settle(self._root)
        self._wait_for_outstanding()
        self._masks.forget()
        if not self.scripts.agrees(self._microbatches[self._number], tuple(self._issued[self._begun :])):
            self._note("another order or other sizes than a microbatch of the same shape")
            self._foreign, self._listened = max(1, self._foreign), True
        self._look_for_foreign()

    def break_off_microbatch(self) -> None:
        self._look_for_foreign()

    def _look_for_foreign(self) -> None:
        self._foreign = max(self._foreign, self._messages() - self._known_messages - self._begun_messages)

    @property
    def foreign_messages(self) -> int:
        """Not 0 where a microbatch has communicated what no script has, or in another order; 0 until it has a name."""
        return self._foreign if self._listened else 0

    def refuse_recovery(self, messages: int) -> str:
        """From now on, running out of memory is fatal. Returns why."""
        self._foreign = messages
        return outside_of_the_script(self._names)

    def _note(self, name: str) -> None:
        if not self._issuing and name not in self._names:
            self._names += (name,)

    def _refuse(self, name: str) -> None:
        if not self._issuing:
            raise refused(outside_of_the_script((name,)))

    def issue(self, collective: Collective, call: Callable[..., dist.Work | None], async_op: bool) -> dist.Work | None:
        """Collective: one of FSDP's."""
        if self._closed:  # with another ledger's around it
            return call(async_op=async_op)
        if self._rehearsed is not None:
            self._rehearsed.append(collective)
            return None
        # as in CollectiveLedger.issue: gloo's wait() may run out of memory after peers have matched the collective
        wait_here = not async_op and backend_for(collective.device.type, collective.group) == "gloo"
        work: dist.Work | None = self._count(collective, partial(call, async_op=async_op or wait_here))
        self.sent = self.sent.plus(collective)
        if not wait_here:
            return work
        assert work is not None, "it was asked to be asynchronous"
        with self._waiting():
            work.wait()
        return None

    def issue_functional(self, collective: FunctionalCollective, call: Callable[[], Tensor]) -> Tensor:
        """Collective: one of DTensor's. It is asynchronous, so peers can match it as soon as it returns."""
        if self._rehearsed is not None:
            self._rehearsed.append(collective)
            return self._as_ours(call)  # without data, so nobody is asked
        issued = self._count(collective, call)
        # Held until somebody waits: what is dropped before that stays in torch's registry of works for good.
        self._outstanding[issued.untyped_storage()._cdata] = issued
        return issued

    def wait_functional(self, issued: Tensor, call: Callable[[], Tensor]) -> Tensor:
        if self._rehearsed is not None:
            return self._as_ours(call)
        with self._waiting():
            done = call()
        self._outstanding.pop(issued.untyped_storage()._cdata, None)
        return done

    def _count(self, entry: Entry, call: Callable[[], T]) -> T:
        """Collective: issues it, and counts it from the moment that peers can match it."""
        before = self._messages()
        with explaining_failures("a collective of a tensor-parallel step"):
            work = self._as_ours(call)
        self._issued.append(entry)
        self._known_messages += self._messages() - before
        return work

    def _as_ours(self, call: Callable[[], T]) -> T:
        """Calls what no listener is to take for foreign."""
        self._issuing = True
        try:
            return call()
        finally:
            self._issuing = False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        with explaining_failures("a collective of a tensor-parallel step"):
            yield
        self.waited_s += time.perf_counter() - began

    def _wait_for_outstanding(self) -> None:
        """Waits for what the program has issued and then had no use for."""
        for issued in list(self._outstanding.values()):
            self.wait_functional(issued, partial(torch.ops._c10d_functional.wait_tensor, issued))

    def drain(self, _: Callable[[], object]) -> None:
        """Collective: issues all that is left of this step, so that every peer finishes it."""
        if self._foreign:
            raise refused(outside_of_the_script(self._names, self._foreign))
        if unsteady := fsdp.why_unsteady(self._groups):
            raise refused(f"{unsteady}, so what peers expect is not known")
        self._wait_for_outstanding()
        expected: list[Entry] = []
        for microbatch in self._microbatches:
            expected += self.scripts.script_for(microbatch, self._microbatches[: self._number])
            known = min(len(expected), len(self._issued))
            if self._issued[:known] != expected[:known]:
                raise refused(SAYS_OTHERWISE)
            for entry in expected[len(self._issued) :]:
                if isinstance(entry, Collective):
                    issue_zeros(entry, self)
                else:
                    issue_functional_zeros(entry, self)

    def _rehearse(self, microbatch: Sequence[Sample]) -> Script:
        """The script of a pass of the shadow."""
        self._rehearsed = []
        try:
            with counted(self, self._group), self._masks.noting():
                self.shadow.run(microbatch)
            return tuple(self._rehearsed)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise refused(NEEDS_DATA) from error
        finally:
            self._rehearsed = None

    def reset(self) -> None:
        """Brings FSDP and DTensor back to where they are between two steps."""
        self._masks.empty()
        if self._root is not None:
            fsdp.reset(self._root)


def _all_groups(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Collective: the ranks of every tensor-parallel group, of which each rank knows its own."""
    first = min(dist.get_process_group_ranks(group))
    table = [int(leader) for (leader,) in Agreement(1).gather([first])]
    return tuple(tuple(rank for rank, of in enumerate(table) if of == leader) for leader in sorted(set(table)))
