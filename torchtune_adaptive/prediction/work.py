"""What the kernels of a step compute and move, counted beside what it allocates."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torchtune_adaptive.memory.device import plain_tensors

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten

BACKWARD_OF_ATTENTION = 2.5
"""Matrix products of attention's backward over those of its forward: five, with scores computed again, over two."""
WITHOUT_KERNEL = {
    aten.detach,
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.lift_fresh,
    aten.new_empty,
    aten.new_empty_strided,
    aten.resize_,
    aten.set_,
}


@dataclass(frozen=True)
class Work:
    """The work of each kernel, in the order of the program."""

    flops: array[float]
    attention_flops: array[float]
    """A token: those of attention grow with the square of the length."""
    moved_bytes: array[float]
    """Read and written on the device."""
    linked_bytes: array[float]
    """Exchanged with other ranks."""
    copied_bytes: array[float]
    """Between host and device."""


class WorkCounter:
    """Takes note of operations as they run."""

    def __init__(self) -> None:
        self.work = Work(*(array("d") for _ in range(5)))

    def operation(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        packet = func.overloadpacket
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(linked=_exchanged(str(packet), args))
        elif packet in WITHOUT_KERNEL or _is_view(func):
            return
        elif "attention" in (name := str(packet)) or "varlen_attn" in name:
            backward = "backward" in name
            self._note(attention=_of_attention(args[backward:], backward=backward), moved=_bytes_of(args, result))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self._note(flops=flops, moved=_bytes_of(args, result))
        elif _crosses_over(args, result):
            self._note(copied=_bytes_of((), result))
        else:
            self._note(moved=_bytes_of((*args, *kwargs.values()), result))

    def kernel(self, args: tuple[object, ...]) -> None:
        """One that Inductor has written: what goes in and out, each once."""
        self._note(moved=_bytes_of(args, None))

    def _note(
        self, flops: float = 0, attention: float = 0, moved: float = 0, linked: float = 0, copied: float = 0
    ) -> None:
        work = self.work
        work.flops.append(flops)
        work.attention_flops.append(attention)
        work.moved_bytes.append(moved)
        work.linked_bytes.append(linked)
        work.copied_bytes.append(copied)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from plain_tensors(value)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _bytes_of(args: tuple[object, ...], result: object) -> int:
    return sum(tensor.nbytes for tensor in _tensors_in((*args, result)))


def _exchanged(name: str, args: tuple[object, ...]) -> int:
    """What goes over the link of a rank: the whole of what is gathered or scattered, twice what is reduced."""
    largest = max((tensor.nbytes for tensor in _tensors_in(args)), default=0)
    return 2 * largest if "allreduce" in name or "all_reduce" in name else largest


def _of_attention(sides: tuple[Any, ...], *, backward: bool) -> float:
    """Flops for each token of a row. Without a mask attention is causal, and half of the scores are never computed."""
    query, key = sides[0], sides[1]
    flops: float = 4 * prod(query.shape) * (BACKWARD_OF_ATTENTION if backward else 1)
    masked = query.dim() == 4 and len(sides) > 3 and isinstance(sides[3], Tensor) and sides[3].dim() == 4
    return flops if masked or key.shape[-2] != query.shape[-2] else flops / 2


def _crosses_over(args: tuple[object, ...], result: object) -> bool:
    """Whether a copy goes from the host to the device, or back."""
    devices = {tensor.device for tensor in _tensors_in((*args, result))}
    return len(devices) > 1


@cache
def _is_view(func: OpOverload) -> bool:
    """Whether an operation only looks at its arguments in another way."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
