"""Supply the values that a script reads from a null device, which runs no kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from gpu_rehearsal import device
from gpu_rehearsal.recording.calls import number_of, record_fake
from gpu_rehearsal.report.record import NEEDS_OTHERS
from gpu_rehearsal.values.followed import KINDS
from gpu_rehearsal.values.guesses import Guesses
from gpu_rehearsal.values.kernels import Kernel, Kernels
from gpu_rehearsal.values.known import LARGE, Known, is_gradient, is_large, on_host

LARGE_TO_SEND = 2**20
"""Tensors with at least this many elements are not sent."""
_MESSAGES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "allgather_into_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_",
    "recv_any_source_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
)  # fmt: skip
"""Operations of process groups."""
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")
_EQUAL_ON_RANKS = ("allreduce_", "broadcast_", "allgather_", "_allgather_base_")
"""Operations after which all ranks of a group have the same values."""
_RECEIVING = ("broadcast_", "scatter_", "recv_", "recv_any_source_")
"""Operations after which a tensor has the values of another rank."""
_EXCHANGED = {"_allgather_base_": 0, "allreduce_": 1, "broadcast_": 3, "allgather_": 3}
"""Operations that the running ranks of an incomplete group exchange, with their numbers in nccl.c: `allgather_`
broadcasts the tensor of each rank."""
_REDUCTIONS = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG
_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.bool: 1, torch.int32: 2, torch.int64: 4, torch.float32: 7, torch.float64: 8,
}  # fmt: skip
_DYNAMIC = "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor"
"""Operations whose results have a size that depends on values."""
_ALL = "_null_device_all"
"""Attribute of the results of `all`."""


class DeviceValues:
    """Replaces the operations that read values from the device.

    Values are correct if they come from the host, or are computed from such values, in tensors that are not large. All
    other values are chosen by `Guesses`. Indices of `topk` are spread evenly, so that all experts get equally many
    tokens.
    """

    def __init__(self) -> None:
        self.guesses, self.known = Guesses(), Known()
        self.known.check = self.guesses.check
        self.alone = True
        """True if the other ranks do not run."""
        self.running: Sequence[int] = ()
        """The ranks that run."""
        self.skew = 1.0
        self._routes = False  # True after a `topk`

    def install(self) -> None:
        """Replace torch's operations."""
        _device_constructors()  # `with torch.device(...)` caches these functions and must find the original ones
        self._kernels = kernels = Kernels(self.known)
        kernels.install(
            {
                "copy_": self._copy, "topk": self._spread_evenly, "all": _mark, "bincount": self._route,
                "histc": self._route, "scatter_.value": self._route, "scatter_.src": self._route,
            }
        )  # fmt: skip
        kernels.replace("_local_scalar_dense", self._number)
        kernels.replace("equal", lambda a, b: a.shape == b.shape and torch.eq(a, b).all().item())
        kernels.replace("nonzero", self._nonzero)
        kernels.replace("masked_select", self._masked_select)
        kernels.replace("_coalesce", _coalesce, "SparseCUDA")
        for name in _DYNAMIC:
            kernels.replace(name, self._with_dynamic_size(attrgetter(name)(torch.ops.aten)))
        tensors: Any = torch.Tensor
        events: Any = torch.cuda.Event
        tensors.item, elapsed = self.guesses.follow(tensors.item), events.elapsed_time
        torch.serialization.add_safe_globals([float, int, *KINDS])  # which are pickled
        events.elapsed_time = lambda event, end: self.guesses.duration(elapsed(event, end))
        self._carry_messages()

    def _carry_messages(self) -> None:
        """Replace c10d's operations on CUDA tensors by `_carry`."""
        self._messages = torch.library.Library("c10d", "IMPL")
        for name in _MESSAGES:
            operation, kernel = getattr(torch.ops.c10d, name), torch.library.get_kernel(f"c10d::{name}", "CUDA")
            self._messages.impl(name, partial(self._carry, operation, kernel), "CUDA", with_keyset=True)

    def _carry(self, operation: Any, kernel: Any, keys: Any, *args: Any) -> Any:
        """Run a collective, and note whether it returns known values: in a recording, small ones of other ranks."""
        boxed = {str(each._type()).rpartition(".")[2]: each for each in args if isinstance(each, torch.ScriptObject)}
        group, name = dist.ProcessGroup.unbox(boxed["ProcessGroup"]), operation.__name__
        reduction: Any = dist.ReduceOp.unbox(boxed["ReduceOp"]) if "ReduceOp" in boxed else None
        leaves = map(tree_leaves, args)
        tensors = [each for each in leaves if each and isinstance(each[0], torch.Tensor)]
        written, sent = tensors[0], tensors[-1]
        together = dist.get_backend(group) != "fake"
        if self.alone and not together and name in _BETWEEN_TWO:
            raise RuntimeError(f"{name.rstrip('_')} is {NEEDS_OTHERS}")
        known = all(_is_small(each) and self.known.has(each) for each in sent)
        if not together and name == "_allgather_base_":
            # NCCL compares numbers of elements only, but a fake group compares shapes
            args = (args[0].view(-1), args[1].reshape(-1), *args[2:])
        if not together and not name.startswith(("send", "recv")):
            number = record_fake(group, name, sent)
        result = kernel.call_boxed(keys, *args)
        if together or (name in _EXCHANGED and self._exchange(name, args, group, reduction, written, sent[0], number)):
            known |= name in _RECEIVING and all(map(_is_small, written))
        elif known:
            self._write_of_other_ranks(name, args, group, reduction, [on_host(each) for each in written])
        for each in written:
            (self.known.add if known and each.is_cuda else self.known.forget)(each)
            if group.size() == dist.get_world_size() and name in _EQUAL_ON_RANKS and not is_gradient(each):
                vars(each.untyped_storage())["equal"] = _version(each)
        return result

    def _exchange(
        self, name: str, args: Any, group: dist.ProcessGroup, reduction: Any, written: list[torch.Tensor],
        sent: torch.Tensor, number: int,
    ) -> bool:  # fmt: skip
        """Exchange small tensors with the ranks of an incomplete group that run. The others have the data of the one
        before them. Return False if this rank is the only one, or if the tensors are not exchanged."""
        ranks, running = dist.get_process_group_ranks(group), {*self.running}
        there = [at for at, rank in enumerate(ranks) if rank in running]
        small = all(_is_small(each) and each.is_contiguous() and each.is_cuda for each in (*written, sent))
        operation = [at for at, each in enumerate(_REDUCTIONS) if reduction == each] or [0] * (reduction is None)
        if len(there) < 2 or not small or sent.dtype not in _TYPES or not operation:
            return False
        sources = [max((each for each in there if each <= at), default=there[0]) for at in range(len(ranks))]
        for at, each in enumerate(written):
            root = args[2] if name == "broadcast_" else at if name == "allgather_" else operation[0]
            given = each if name in ("allreduce_", "broadcast_") else sent
            device.exchange(
                _EXCHANGED[name], given.data_ptr(), each.data_ptr(), given.numel(), _TYPES[sent.dtype], root,
                number_of(group), group.rank(), sources, number,
            )  # fmt: skip
        return True

    def _write_of_other_ranks(
        self, name: str, args: Any, group: dist.ProcessGroup, reduction: Any, written: list[torch.Tensor]
    ) -> None:
        """Write known values as if all ranks had sent the data of this one; random ones may differ from its own."""
        rank, ranks = group.rank(), group.size()
        if name in ("allgather_", "_allgather_base_"):
            parts = written if len(written) > 1 else written[0].view(ranks, -1)
            received = [part for at, part in enumerate(parts) if at != rank]
        elif name == "broadcast_":
            received = written if args[2] != rank else []
        else:
            received = written if any(reduction == each for each in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)) else []
        for each in received:
            self.guesses.received(each)
        if reduction == dist.ReduceOp.SUM:
            for each in written:
                each.mul_(ranks)
        if name == "alltoall_base_" and not args[3]:  # in equal parts
            written[0].view(ranks, -1).copy_(on_host(args[1]).view(ranks, -1)[rank])

    def _copy(self, kernel: Kernel) -> Kernel:
        """Wrap the kernel that copies: replace unknown values in copies from the device to the host."""

        def copy(keys: Any, to: torch.Tensor, source: torch.Tensor, *args: Any) -> torch.Tensor:
            if to.is_cuda or not isinstance(source, torch.Tensor):
                return kernel(keys, to, source, *args)  # type: ignore[no-any-return]
            if source.is_floating_point() and source.numel() >= LARGE:
                source.data.zero_()  # it may contain integers of an earlier tensor, which are not valid floats
            kernel(keys, to, source, *args)
            small = to.numel() < LARGE or source.dtype is torch.bool
            if small and not self.known.has(source) and source.dtype is not torch.uint8:
                bounds = self.known.bounds(source)  # pickled objects travel as bytes
                usual = source.dtype is torch.bool and source.numel() > 1
                self.guesses.values(to, usual, bounds)
            return to

        return copy

    def _spread_evenly(self, kernel: Kernel) -> Kernel:
        """Wrap `topk`: spread unknown indices evenly over the dimension or, with a skew, over the first part of it."""

        def top(keys: Any, tensor: torch.Tensor, k: int, dim: int = -1, *args: Any) -> Any:
            values, indices = kernel(keys, tensor, k, dim, *args)
            if not is_large(indices) and not self.known.has(indices):
                self._routes, last = True, indices.movedim(dim, -1)
                used = max(k, round(tensor.shape[dim] / self.skew))
                spread = (torch.arange(last.numel(), device="cpu") + self.guesses.offset(used)) % used
                self._kernels.write([indices], [spread.view(last.shape).movedim(-1, dim)])
            return values, indices

        return top

    def _route(self, kernel: Kernel) -> Kernel:
        """Wrap a kernel that counts or marks experts: report the place, if a router has chosen them."""

        def count(keys: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if self._routes and all(map(self.known.has, tensors)):
                self.guesses.routing()
            return kernel(keys, *args, **kwargs)

        return count

    def _number(self, tensor: torch.Tensor) -> Any:
        if self.known.has(tensor):
            return on_host(tensor).item()
        bounds = self.known.bounds(tensor)
        if bounds and bounds[0] == bounds[1]:
            return torch.tensor(bounds[0], dtype=tensor.dtype, device="cpu").item()
        if tensor.dtype is torch.bool:
            return self.guesses.condition(hasattr(tensor, _ALL))
        if tensor.is_floating_point() or tensor.is_complex():
            equal = getattr(tensor.untyped_storage(), "equal", None) == _version(tensor)
            return 0.0 if equal and self.guesses.decides_apart else self.guesses.number(bounds)
        return self.guesses.integer(bounds)

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """Select all elements of an unknown mask, because this needs the most memory."""
        if not self.known.has(mask):
            if mask.numel() >= LARGE:
                return torch.empty(
                    (self.guesses.selected(mask.numel()), mask.ndim), dtype=torch.long, device=mask.device
                )
            selected = torch.ones(mask.shape, dtype=torch.bool, device="cpu")
            self.guesses.values(selected, True)
            self._kernels.write([mask], [selected])  # the backward must select the same elements
        return on_host(mask).nonzero().to(mask.device)  # type: ignore[no-any-return]

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tensor, mask = torch.broadcast_tensors(tensor, mask)
        return tensor[tuple(self._nonzero(mask).unbind(1))]

    def _with_dynamic_size(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an operation whose result has a size that depends on values: run it on the host."""

        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            known = self.known.has(tensor)
            if not known and (size := kwargs.get("output_size")) is not None:  # of repeat_interleave
                return torch.empty(size, dtype=tensor.dtype, device=tensor.device)
            bounds = None if known or tensor.is_floating_point() else self.known.bounds(tensor)
            low, high = bounds if bounds and bounds[0] > -inf else (0, inf)
            most = min(tensor.numel(), high - low + 1)
            values, distinct = tensor.cpu(), None if known else self.guesses.distinct(most)
            if distinct and operation is not torch.ops.aten.repeat_interleave.Tensor:
                values = (
                    torch.arange(tensor.numel()).clamp(max=distinct - 1).add(low).to(tensor.dtype).view(tensor.shape)
                )
            return tree_map(lambda each: each.to(tensor.device), operation(values, *args, **kwargs))

        return run


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() < LARGE_TO_SEND and (tensor.numel() <= 1 or not tensor.is_floating_point())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _mark(kernel: Kernel) -> Kernel:
    """Wrap `all`: mark its result."""

    def mark(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = kernel(keys, tensor)
        setattr(result, _ALL, True)
        return result

    return mark


def _coalesce(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, as if no index occurred twice, because this needs the most memory."""
    indices, values = tensor._indices().clone(), tensor._values().clone()
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True, check_invariants=False)
