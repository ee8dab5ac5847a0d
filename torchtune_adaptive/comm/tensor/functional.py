"""The collectives that DTensor issues, each of which tells somebody before it communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune_adaptive.patching import replaced

LISTED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives that a drain can take part in. Whatever else a microbatch communicates is counted as foreign."""


class FunctionalCollective(NamedTuple):
    """One collective of a tensor-parallel group, with all that a partner without the data needs to take part in it."""

    name: str
    shape: tuple[int, ...]
    """Shape of what this rank puts in."""
    dtype: torch.dtype
    device: torch.device
    rest: tuple[object, ...]
    """The other arguments: ranks, the reduction, the name of the group."""


class FunctionalCounter(Protocol):
    """Whoever counts: it is told of a functional collective and issues it."""

    def issue_functional(self, collective: FunctionalCollective, call: Callable[[], Tensor]) -> Tensor:
        """Collective: counts, and calls."""

    def wait_functional(self, issued: Tensor, call: Callable[[], Tensor]) -> Tensor:
        """Waits for what a collective returned."""


@contextmanager
def counted(counter: FunctionalCounter, group: dist.ProcessGroup) -> Iterator[None]:
    """While open, every listed collective of this group goes through the counter.

    DTensor looks these operations up by name whenever it calls one, so replacing the names is enough, on all threads.
    A dispatch mode would be asked about every operation, and gradients would add up out of place.
    """
    space = torch.ops._c10d_functional
    wait = space.wait_tensor

    def waited(issued: Tensor) -> Tensor:
        return counter.wait_functional(issued, partial(wait, issued))

    issuing = [
        (space, name, _InPlaceOf(getattr(space, name), partial(_issue, counter, group.group_name, name)))
        for name in LISTED
    ]
    with replaced((space, "wait_tensor", _InPlaceOf(wait, lambda _, issued: waited(issued))), *issuing):
        yield


class _InPlaceOf:
    """An operation whose call is another one's; its overloads are still there."""

    def __init__(self, operation: Callable[..., Tensor], call: Callable[..., Tensor]) -> None:
        self._operation, self._call = operation, call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(self._operation, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)


def _issue(
    counter: FunctionalCounter,
    group_name: str,
    name: str,
    operation: Callable[..., Tensor],
    tensor: Tensor,
    *rest: object,
    **named: object,
) -> Tensor:
    call = partial(operation, tensor, *rest, **named)
    if named or not rest or getattr(rest[-1], "group_name", rest[-1]) != group_name:
        return call()  # not DTensor's: its messages will be found to be foreign
    arguments = (*rest[:-1], group_name)
    return counter.issue_functional(
        FunctionalCollective(name, tuple(tensor.shape), tensor.dtype, tensor.device, arguments), call
    )


def issue_functional_zeros(collective: FunctionalCollective, counter: FunctionalCounter) -> None:
    """Collective: takes part in it without any data."""
    space = torch.ops._c10d_functional
    zeros = torch.zeros(collective.shape, dtype=collective.dtype, device=collective.device)
    issued = counter.issue_functional(collective, partial(getattr(space, collective.name), zeros, *collective.rest))
    counter.wait_functional(issued, partial(space.wait_tensor, issued))
