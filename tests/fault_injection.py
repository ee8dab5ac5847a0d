"""Fault injection for tests of a training loop: a chosen operation runs out of memory."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.engine.ranks import rank as this_rank
from torchtune_adaptive.engine.ranks import world_size
from torchtune_adaptive.engine.step import ContextForPass, PassKind, StepRunner
from torchtune_adaptive.engine.tensors import wraps_tensors

if TYPE_CHECKING:
    from torch._ops import OpOverload


@contextmanager
def wrapping_passes(runner: StepRunner[Any], context_for: ContextForPass) -> Iterator[None]:
    """Run every microbatch and every drain inside the context that `context_for` returns for this kind of pass."""
    before = runner.context_for

    @contextmanager
    def nested(kind: PassKind) -> Iterator[None]:
        with before(kind), context_for(kind):
            yield

    runner.context_for = nested
    try:
        yield
    finally:
        runner.context_for = before


class _Place(NamedTuple):
    """The step, and the kind of pass in it, in which operations fail."""

    step: int
    pass_kind: PassKind


class FaultInjector:
    """Context manager in which chosen operations of a StepRunner run out of memory.

        with FaultInjector(runner).fail_at(rank=1, step=3, operation=40) as faults:
            train()
        assert faults.fired == (rank == 1)

    The chosen operation does not run. It raises torch.OutOfMemoryError, or `error(message)` to imitate backends that
    have no type for it. Operations are all calls that torch's dispatcher sees, including collectives, and every growth
    of a storage, which is how FSDP allocates parameters. They are counted from 1 in every step, over all its
    microbatches. After a failure, the count restarts at 1. A second `fail_at` for the same step therefore fails in the
    repetition of the step.

    All ranks may make the same calls, because only the named rank fails. Without a process group, the rank is 0.
    """

    def __init__(self, runner: StepRunner[Any], *, error: Callable[[str], Exception] = torch.OutOfMemoryError) -> None:
        self.fired = 0
        """Number of operations that have failed on this rank."""
        self.operations: list[str] = []
        """Names of the operations of the latest attempt on this rank, in order."""
        self._runner = runner
        self._error = error
        self._to_fail: defaultdict[_Place, deque[int]] = defaultdict(deque)  # numbers of operations
        self._counting: _Place | None = None
        self._open = ExitStack()

    def fail_at(self, *, rank: int, step: int, operation: int = 1, times: int = 1) -> FaultInjector:
        """Fail an operation of this step's microbatches, in `times` consecutive attempts at the step."""
        return self._plan(rank, _Place(step, "microbatch"), operation, times)

    def fail_in_drain(self, *, rank: int, step: int, operation: int = 1, times: int = 1) -> FaultInjector:
        """Fail an operation while a failed rank issues the remaining collectives of this step."""
        return self._plan(rank, _Place(step, "drain"), operation, times)

    def count(self, *, rank: int, step: int) -> FaultInjector:
        """Let no operation of this step fail. Afterwards, `operations` lists those that could."""
        return self.fail_at(rank=rank, step=step, operation=sys.maxsize)

    def _plan(self, rank: int, place: _Place, operation: int, times: int) -> FaultInjector:
        if operation < 1 or times < 1:
            raise ValueError(f"operation={operation}, times={times}: both count from 1")
        if not 0 <= rank < world_size():
            raise ValueError(f"there is no rank {rank} among {world_size()}: ranks count from 0")
        if rank == this_rank():
            self._to_fail[place].extend([operation] * times)
        return self

    def __enter__(self) -> FaultInjector:
        self._open.enter_context(wrapping_passes(self._runner, self._context_for))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @contextmanager
    def _context_for(self, pass_kind: PassKind) -> Iterator[None]:
        step = self._runner.current_step  # None in a probe
        # A dispatch mode changes how autograd accumulates gradients, so it is only used in passes with a fault.
        if step is None or not self._to_fail[place := _Place(step, pass_kind)]:
            yield
            return
        if place != self._counting:
            self._counting, self.operations = place, []
        grow = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            if size > storage.size():
                self.tick("resize_")
            return grow(storage, size)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            with _CountOperations(self):
                yield
        finally:
            torch.UntypedStorage.resize_ = grow  # type: ignore[method-assign]

    def tick(self, operation: str) -> None:
        """Count an operation, and raise the error if this one was chosen to fail."""
        assert self._counting is not None
        self.operations.append(operation)
        to_fail = self._to_fail[self._counting]
        if to_fail and len(self.operations) == to_fail[0]:
            to_fail.popleft()
            self.fired += 1
            self.operations = []
            raise self._error(f"injected: {operation} in step {self._counting.step}")


class _CountOperations(TorchDispatchMode):
    def __init__(self, faults: FaultInjector) -> None:
        super().__init__()
        self._faults = faults

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # fake tensors take no memory
        self._faults.tick(str(func))
        if any(wraps_tensors(kind) for kind in types):  # DTensor and similar types dispatch their inner operations
            return NotImplemented
        return func(*args, **(kwargs or {}))
