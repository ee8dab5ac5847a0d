"""The interface through which a step prepares FSDP and issues collectives, and the protocol for steps without recovery.

If a rank stops in the middle of a step, its peers wait in a collective until they time out. So a rank that ran out of
memory drains the step: it issues the collectives that its peers still expect. Three classes decide which these are:

| class         | used if ranks                     | a healthy rank         | the drain of a failed rank             |
|---------------|-----------------------------------|------------------------|----------------------------------------|
| `Ledger`      | do not recover, or have no peers  | issues collectives     | has nothing to issue                   |
| `FsdpLedger`  | exchange parameters and gradients | records them, too      | issues the rest of the record: gathers |
|               |                                   |                        | with its parameters, others with zeros |
| `GhostLedger` | exchange activations, too (tensor | logs those of integers | repeats the failed microbatch and all  |
|               | or expert parallelism)            |                        | later ones without data                |

`new_ledger` in `recovery.py` chooses the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch.distributed as dist

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.messages import Obstacles
from torchtune_adaptive.engine.ranks import backend_for, explaining_failures, world_size
from torchtune_adaptive.errors import UnrecoverableError

Run = Callable[[int | None], object]
"""Runs forward and backward on the microbatch of this number, or on a filler if it is None."""


class Ledger:
    """Prepares FSDP for the microbatches of a step, and counts the collectives that it is asked to issue.

    `position` is the number of collectives that this rank has issued in this attempt. All ranks end an attempt at the
    same position. The stages of a step share a ledger. A stage owns its model and all frozen models. Only these are
    prepared and reset for it, so gradients in the models of other stages remain.

    With replicas, only the last microbatch of a step all-reduces gradients.
    """

    uses_ghost_passes: ClassVar[bool] = False

    def __init__(self, *roots: object) -> None:
        """Manage those models in `roots` that FSDP2 shards; whole models do not communicate."""
        self.position = 0
        self.obstacles = Obstacles()
        """What prevents recovery in the current stage."""
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]
        self._with_replicas = {root for root in self._roots if world_size() > 1 and fsdp.has_replicas(root)}
        # of the current step and stage:
        self._stage = ""
        self._owned = self._roots
        self._replicated: list[FSDPModule] = []
        self._reducing_once: list[FSDPModule] = []
        self._microbatches = 0
        self._number = -1  # of the current microbatch
        self._issuing = False  # so that a Listener ignores what the ledger issues

    @property
    def only_whole_models(self) -> bool:
        """True if no model is sharded, and ranks do not exchange activations."""
        return not self._roots

    @property
    def progress(self) -> int:
        """A number that grows with every collective that this rank issues."""
        return self.position

    def positions_in_groups(self) -> int:
        """Return this rank's part of `AttemptReport.positions_in_groups`."""
        return 0

    def begin_attempt(
        self, microbatches: int, models: Sequence[object], stage: str = "", *, reduce_once: bool = False
    ) -> None:
        """Begin an attempt at a step of a stage that owns these models: prepare FSDP, and count collectives from 0.

        With `reduce_once`, only the last of several microbatches reduce-scatters gradients.
        """
        self.position = 0
        self._stage, self._microbatches, self._number = stage, microbatches, -1
        self._owned = [root for root in self._roots if root in models]
        self._replicated = [root for root in self._owned if root in self._with_replicas]
        self._reducing_once = self._owned if reduce_once else []
        for root in self._owned:
            fsdp.prepare(root)

    def begin_microbatch(self, number: int) -> None:
        """Begin a microbatch of the step. Microbatches are numbered from 0."""
        self._number = number
        self._set_reductions(self._is_last(number))

    def listening(self) -> AbstractContextManager[object]:
        """Return the context of a microbatch, which may look for operations that communicate outside FSDP."""
        return nullcontext()

    def end_microbatch(self) -> None:
        """End a complete microbatch."""
        self._end_pass()
        # In the last microbatch, FSDP all-reduces the gradients of a parameter group only if this microbatch adds to
        # them. Otherwise, the sums of earlier microbatches stay local.
        waiting = [name for root in self._replicated for name in fsdp.modules_awaiting_all_reduce(root)]
        if self._is_last(self._number) and waiting:
            raise UnrecoverableError(
                f"{', '.join(waiting)}: an earlier microbatch of this step produced gradients, but the last one, "
                "which sums gradients over replicas, did not; use the same parameters in every microbatch, or shard "
                "without replicas"
            )

    def end_failed_microbatch(self) -> None:
        """End a microbatch that ran out of memory."""

    def issue(
        self,
        what: str,
        call: Callable[..., dist.Work | None],
        device_type: str,
        group: dist.ProcessGroup | None = None,
        *,
        async_op: bool,
    ) -> dist.Work | None:
        """Collective: run `call`, and count it as soon as peers can match it. Errors name it as `what`."""
        # On gloo, wait() allocates, so memory may run out after peers have matched the collective. Therefore issue it
        # asynchronously, count it, then wait. On NCCL, wait() does not allocate, and an asynchronous call would use
        # another stream, so the call stays as FSDP made it.
        on_gloo = backend_for(device_type, group) == "gloo"
        wait_here = not async_op and on_gloo
        messages, position = self._messages(), self.position

        def already_matched() -> bool:
            # gloo counts an all-gather and then allocates its copies. If that fails, it cannot be issued again.
            return on_gloo and self.position == position and self._messages() != messages

        self._issuing = True
        try:
            with explaining_failures(what, already_matched):
                work = call(async_op=async_op or wait_here)
                self._count(self._messages() - messages)
                if wait_here:
                    assert work is not None, "an asynchronous collective returns its work"
                    work.wait()
                    return None
            return work
        finally:
            self._issuing = False

    def drain(self, run: Run) -> None:
        """Collective: issue the remaining collectives of this step, so that every peer can finish it."""

    def reset(self) -> None:
        """Reset the models of this stage to their state between two steps, and drop their gradients."""
        self._set_reductions(True)
        for root in self._owned:
            fsdp.reset(root)

    def abandon(self) -> None:
        """Drop the gradients of an aborted step, so that a later backward does not add to them."""
        self._set_reductions(True)
        for root in self._roots:
            fsdp.abandon(root)

    def close(self) -> None:
        """Restore what the ledger has replaced in FSDP or torch."""
        self.abandon()

    def copy_record(self, *, of_stage: str, to_stage: str) -> None:
        """Copy what prevents recovery to another stage of the same model."""

    def _messages(self) -> int:
        """Return the number of messages that this rank has sent; 0 if they are not counted."""
        return 0

    def _count(self, messages: int) -> None:
        """Count a collective that sent these messages."""
        self.position += 1

    def _is_last(self, number: int) -> bool:
        return number == self._microbatches - 1

    def _set_reductions(self, wanted: bool) -> None:
        for root in self._replicated:
            root.set_requires_all_reduce(wanted)
        for root in self._reducing_once:
            root.set_requires_gradient_sync(wanted)

    def _make_gradients(self, number: int, run: Callable[[], object]) -> None:
        """Before microbatch `number`, run a pass that issues no collective, so that this rank has gradients of earlier
        microbatches, as its peers have. FSDP may issue additional reductions for such gradients."""
        if (self._replicated or self._reducing_once) and number:
            self._set_reductions(False)
            run()

    def _end_pass(self) -> None:
        for root in self._owned:
            fsdp.end_pass_without_backward(root)
