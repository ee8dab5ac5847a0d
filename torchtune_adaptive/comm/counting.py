"""FSDP2's collectives, each of which tells somebody before it communicates. Nothing is known here of steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from torchtune_adaptive.comm.fsdp import AllGather, ReduceScatter

Reduction: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType


class Communicator(Protocol):
    """What issues a collective for FSDP: an all-gather or a reduce-scatter, which are called with other arguments."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None: ...


class AllReduce:
    """The sum of sharded gradients over the replicas of a shard, for which FSDP has no class."""


@dataclass(frozen=True)
class Collective:
    """One collective, with all that a partner without the data needs to take part in it."""

    kind: type[AllGather] | type[ReduceScatter] | type[AllReduce]
    numel: int
    """Elements on the unsharded side; of an all-reduce, of the shard."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    # Some reductions compare by identity; which one it is follows from the dtype and the group.
    op: Reduction | None = field(compare=False)
    # Not compared: peers cannot see which object issues it.
    comm: Communicator = field(compare=False)


class Counter(Protocol):
    """Whoever counts: it is told of a collective and issues it."""

    def issue(self, collective: Collective, call: Callable[..., dist.Work | None], async_op: bool) -> dist.Work | None:
        """Collective: counts, and calls."""


class _Counted:
    """A collective of FSDP that tells whoever counts before it communicates."""

    def __init__(self, counter: Counter, comm: Communicator) -> None:
        self._counter, self._comm = counter, comm

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._comm.allocate(size, dtype=dtype, device=device)


class CountedAllGather(_Counted, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Collective: FSDP's own all-gather."""
        whole = output_tensor
        this = Collective(AllGather, whole.numel(), whole.dtype, whole.device, group, None, self._comm)
        call = partial(self._comm, output_tensor=whole, input_tensor=input_tensor, group=group)
        return self._counter.issue(this, call, async_op)


class CountedReduceScatter(_Counted, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Reduction,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Collective: FSDP's own reduce-scatter."""
        whole = input_tensor
        this = Collective(ReduceScatter, whole.numel(), whole.dtype, whole.device, group, op, self._comm)
        call = partial(self._comm, output_tensor=output_tensor, input_tensor=whole, group=group, op=op)
        return self._counter.issue(this, call, async_op)


class CountedReplicas:
    """The group of a shard's replicas, which counts its all-reduces and is that group to all else.

    FSDP has setters for its other two collectives. This one it issues by `dist.all_reduce`, which asks nothing of a
    group but to be compared, hashed and called: so no function of torch's has to be replaced, and no other model sees
    anything of it.
    """

    def __init__(self, counter: Counter, group: dist.ProcessGroup, comm: Communicator) -> None:
        self._counter, self._group, self._comm = counter, group, comm

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
        this = Collective(AllReduce, shard.numel(), shard.dtype, shard.device, self._group, op, self._comm)

        def call(async_op: bool) -> dist.Work:
            options.asyncOp = async_op
            return self._group.allreduce(tensors, options)

        return self._counter.issue(this, call, async_op=options.asyncOp)


def issue_zeros(collective: Collective, counter: Counter) -> None:
    """Collective: takes part in it without any data."""
    group, comm = collective.group, collective.comm
    # Through FSDP's own allocation: a symmetric-memory communicator takes no other buffers.
    whole = comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
    whole.zero_()
    if collective.kind is AllReduce:
        counter.issue(collective, partial(dist.all_reduce, whole, collective.op, group), async_op=False)
        return
    shard = whole.chunk(group.size())[group.rank()]
    if collective.kind is AllGather:
        call = partial(comm, output_tensor=whole, input_tensor=shard, group=group)
    else:
        sums = torch.empty_like(shard)
        call = partial(comm, output_tensor=sums, input_tensor=whole, group=group, op=collective.op)
    counter.issue(collective, call, async_op=False)
