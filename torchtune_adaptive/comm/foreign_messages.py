"""What a microbatch communicates besides FSDP's collectives: nobody could finish that for a rank that has failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.comm.collectives import is_aside, rank
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy
from torchtune_adaptive.memory.device import wraps_tensors
from torchtune_adaptive.wording import count_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

_NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem"}
_SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
"""Operations of those namespaces that only wait, or wrap what has been waited for."""
_MOST_NAMES = 3
_OTHERS_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Where a call does not come from, for whoever wants to change it: torch, this package, what has no file."""


class MessageCount:
    """How many messages this rank has taken part in, as its process groups count them anyway.

    Reading a number in C++ for every group is all that it costs. Nothing is hooked, so neither what autograd's threads
    communicate nor what compiled code does is missed, and nothing runs in another way for being watched. Messages of
    two ranks only are counted by gloo, and not by NCCL.
    """

    def __init__(self) -> None:
        self._counters: tuple[Callable[[], int], ...] = ()

    def look_for_groups(self) -> None:
        """Counts for the groups that exist now, but those that are set aside."""
        self._counters = tuple(_counters())

    def __call__(self) -> int:
        return sum(counter() for counter in self._counters)


def _counters() -> Iterator[Callable[[], int]]:
    for group in distributed_c10d._world.pg_map:
        if group.size() == 1 or is_aside(group):
            continue
        # One for each kind of device, say gloo for the host and NCCL for GPUs, unless one serves all.
        for backend in {id(each): each for each in map(group._get_backend, group._device_types)}.values():
            counter: Callable[[], int] = backend._get_sequence_number_for_group  # type: ignore[attr-defined]
            try:
                counter()
            except RuntimeError:  # a backend that does not count, say one of imaginary ranks
                continue
            yield counter


class Listener(TorchDispatchMode):
    """Tells the name of every operation that communicates, and the line that asked for it, before it runs.

    Under a dispatch mode what is compiled runs eagerly, so this listens to one microbatch, or to one that is run only
    to be thrown away.
    """

    supports_higher_order_operators = True

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):  # DTensor and its like come back with what they do inside
            return NotImplemented
        if getattr(func, "namespace", "") in _NAMESPACES and func._opname not in _SILENT:
            self._tell(f"{func.namespace}::{func._opname}{_caller()}")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """` at model.py:57`, the innermost line that is neither torch's nor ours; nothing if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS_CODE):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def what_is_foreign(messages: int, names: tuple[str, ...]) -> str:
    """Messages by name where they were heard, else by number: another thread or another rank may know them."""
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
