"""Counts the messages of a rank, and finds operations that communicate outside FSDP.

A rank that ran out of memory issues FSDP's remaining collectives, but it cannot issue those of the model. If
microbatches communicate outside FSDP, or issue different collectives, an out-of-memory error therefore ends the run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.engine.ranks import message_counters, rank
from torchtune_adaptive.engine.tensors import wraps_tensors
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy
from torchtune_adaptive.formatting import count_of, ranks_named

if TYPE_CHECKING:
    from torch._ops import OpOverload

COMMUNICATING = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
"""Namespaces of operations."""
_SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
"""Operations in these namespaces that do not communicate."""
_OTHER_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Prefixes of the names of files that are not the user's: torch, this package, generated code."""


def messages() -> Counter[str]:
    """Return the number of messages that each process group has counted on this rank, by its name."""
    total = Counter[str]()
    for group, counter in message_counters():
        total[group.group_name] += counter()
    return total


def communicates(operation: OpOverload) -> bool:
    """Return True if the operation sends messages to other ranks."""
    return getattr(operation, "namespace", "") in COMMUNICATING and operation._opname not in _SILENT


class Listener(TorchDispatchMode):
    """Dispatch mode that calls `report` before each operation that communicates, with its name and its caller. Compiled
    code runs eagerly in a dispatch mode, so use this for one microbatch only."""

    supports_higher_order_operators = True

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):
            return NotImplemented
        if communicates(func):
            self._report(f"{func.namespace}::{func._opname}{caller()}")
        return func(*args, **(kwargs or {}))


@dataclass
class Obstacles:
    """What is known about collectives in microbatches of a stage that a rank that is out of memory could not issue."""

    differs: str = ""
    """Why microbatches issue different collectives; "" if they do not."""
    most: int = 0
    """The most messages of a microbatch outside FSDP."""
    _operations: tuple[str, ...] = ()
    """The operations that sent them."""
    _searched: bool = False
    """True if a microbatch has run under a Listener, which finds these operations."""

    @property
    def reported(self) -> int:
        """The most messages of a microbatch; 0 until a Listener has looked for their operations."""
        return self.most if self._searched else 0

    def counted(self, messages: int) -> None:
        """Note the messages of a microbatch. It may have failed before it sent some of them."""
        self.most = max(self.most, messages)

    def listening(self, report: Callable[[str], None]) -> AbstractContextManager[object]:
        """Return a Listener for the first microbatch after one that sent messages; otherwise, an empty context."""
        if not self.most or self._searched:
            return nullcontext()
        self._searched = True
        return Listener(report)

    def add_operation(self, name: str) -> None:
        """Note an operation that a Listener has found."""
        if name not in self._operations:
            self._operations += (name,)

    def refuse_recovery(self, messages: int, differing: Sequence[int]) -> str:
        """Make out-of-memory errors fatal, because of these messages of any rank, or because the collectives of these
        ranks differ. Return the reason and a remedy."""
        if differing:
            self.differs = self.differs or f"on {ranks_named(differing)}"
            return f"microbatches issue different collectives ({self.differs})"
        self.most = messages
        return (
            f"microbatches communicate outside FSDP ({self}), and a rank that is out of memory cannot take part "
            "(communicate after the step, for example in the update; if ranks exchange activations, pass "
            "exchanges_activations=True to Recovery)"
        )

    def check(self) -> None:
        """Raise RecoveryUnsupportedError on a rank that ran out of memory, if there is an obstacle."""
        if self.differs:
            raise RecoveryUnsupportedError(
                f"out of memory on rank {rank()}, and microbatches issue different collectives ({self.differs}), so "
                "the remaining ones of this step are unknown",
                Remedy.SMALLER_LIMIT,
            )
        if self.most:
            raise outside_fsdp_error(self)

    def __str__(self) -> str:
        """Name the operations outside FSDP. If another thread or rank called them, count their messages."""
        if not self._operations:
            return f"{count_of(self.most, 'message')} per microbatch"
        return ", ".join(self._operations)


def outside_fsdp_error(description: object) -> RecoveryUnsupportedError:
    """Return the error for a rank that ran out of memory in a microbatch that communicates outside FSDP."""
    return RecoveryUnsupportedError(
        f"out of memory on rank {rank()}, and microbatches communicate outside FSDP ({description}): a failed rank "
        "cannot take part, so its peers would hang; communicate after the step, for example in the update",
        Remedy.SMALLER_LIMIT,
    )


def caller() -> str:
    """Return the innermost line of the user's code, for example ` at model.py:57`, or ""."""
    return place_of(sys._getframe(1))


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code from `frame` outwards, formatted as in `caller`."""
    while frame is not None and frame.f_code.co_filename.startswith(_OTHER_CODE):
        frame = frame.f_back
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
