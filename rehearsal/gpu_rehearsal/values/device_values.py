"""Supply the values that a script reads from a null device, which runs no kernels."""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from gpu_rehearsal.device import settle
from gpu_rehearsal.recording.calls import record_fake
from gpu_rehearsal.replacing import after_import
from gpu_rehearsal.report.record import NEEDS_OTHERS
from gpu_rehearsal.values.guesses import Guesses

LARGE, LARGE_TO_SEND = 2**23, 2**20
"""Tensors with at least `LARGE` elements are not computed, and those with at least `LARGE_TO_SEND` are not sent."""
_RETURN_INTEGERS = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge",
    "sum", "max", "min", "amax", "amin", "long", "int", "bool", "to", "logical_not", "__invert__", "__and__", "__or__",
    "any", "all", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__", "add",
    "sub", "mul", "floor_divide", "remainder", "clamp", "prod", "cumsum", "diff", "cat", "stack", "pad",
    "repeat_interleave", "index_select", "bincount", "histc", "reshape", "div", "__truediv__", "ceil", "floor", "round",
    "detach", "float", "double", "mean", "squeeze", "flatten", "view",
)  # fmt: skip
"""Functions whose integers and masks the host computes if all inputs are known. Unknown inputs give unknown results."""
_TO_ROUND = {"div", "__truediv__", "ceil", "floor", "round"}
"""Of these, functions that can return a float with one element, from which a script computes an integer."""
_COUNTS = {"bincount", "histc"}
"""Functions that count how many tokens a router sends to each expert."""
_LIMITS: dict[str, Callable[..., tuple[int, int] | None]] = {
    "randint": lambda first, second=None, *_, high=None, **__: (
        (first, high or second) if isinstance(high or second, int) else (0, first)
    ),
    "randperm": lambda size, **_: (0, size),
    "multinomial": lambda weights, *_, **__: (0, weights.shape[-1]),
    "argsort": lambda x, dim=-1, *_, **__: (0, x.shape[dim] if x.ndim else 1),
    "argmax": lambda x, dim=None, *_, **__: (0, x.numel() if dim is None or not x.ndim else x.shape[dim]),
    "sum": lambda tensor, *_, **__: (0, tensor.numel() + 1) if tensor.dtype is torch.bool else None,
}
"""Functions that return integers, and the limits of these for their arguments."""
_IN_PLACE = ("__setitem__", "scatter_", "fill_", "zero_", "add_", "sub_", "mul_", "__iadd__", "__isub__", "__ior__")
"""Methods that change their tensor."""
_CREATE = ("full", "ones", "zeros", "arange", "full_like", "ones_like", "zeros_like")
"""Functions that create tensors with known values."""
_MESSAGES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "allgather_into_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_",
    "recv_any_source_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
)  # fmt: skip
"""Operations of process groups."""
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_")
_RECEIVING = ("broadcast_", "scatter_", "recv_", "recv_any_source_")
"""Operations after which a tensor has the values of another rank."""
_CHECK, _ALL = "_null_device_check", "_null_device_all"
"""Attributes of tensors: of checks for NaN and infinity, with the result of the check; and of results of `all`."""
_CHECKS = {"isfinite": True, "isnan": False, "isinf": False}
_NEGATIONS = ("logical_not", "__invert__")


class Source(Enum):
    """The origin of a tensor's values."""

    HOST = auto()
    """The host wrote them, and no kernel has changed them since."""
    DEVICE = auto()
    """A kernel would have computed them."""
    UNCERTAIN = auto()
    """Changes of this tensor cannot be detected."""


class DeviceValues:
    """Replaces the functions that read values from the device.

    Values are correct if they are integers, masks or single floats that come from the host, or integers and masks that
    are computed from these (by `_RETURN_INTEGERS`, below `LARGE`). All other values are chosen by `Guesses`. Checks for
    NaN are false, and `all` is true. Indices of `topk` are spread evenly, so that all experts get equally many tokens.
    """

    def __init__(self) -> None:
        self.guesses = Guesses()
        self.alone = True
        """True if the other ranks do not run."""
        self.skew = 1.0
        self._routes = False  # True after a `topk`
        self._writes = dict[int, tuple[StorageWeakRef, int | None]]()
        """Writes of the host, by address: the storage, and the version of the tensor after the write."""

    def install(self) -> None:
        """Replace torch's functions and operations."""
        _device_constructors()  # `with torch.device(...)` caches these functions and must find the original ones
        library = torch.library.Library("aten", "IMPL")
        library.impl("_local_scalar_dense", self._number, "CUDA")
        library.impl("nonzero", self._nonzero, "CUDA")
        library.impl("masked_select", self._masked_select, "CUDA")
        library.impl("all", _all, "CUDA")
        library.impl("_coalesce", _coalesce, "SparseCUDA")
        for name in "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor":
            operation = attrgetter(name)(torch.ops.aten)
            library.impl(name, self._with_dynamic_size(operation), "CUDA")
        self._library = library  # deleting it would remove its implementations
        self._cpu = torch.Tensor.cpu
        for name in "cpu", "to", "cuda", "copy_", "clone", "contiguous":
            setattr(torch.Tensor, name, self._track_copy(getattr(torch.Tensor, name)))
        for name in "tensor", "as_tensor":
            setattr(torch, name, self._track_copy(getattr(torch, name)))
        for where, name in product((torch.Tensor, torch, torch.nn.functional), _RETURN_INTEGERS):
            if callable(getattr(where, name, None)):  # torch.int is a type
                setattr(where, name, self._compute_on_host_too(getattr(where, name)))
        torch.topk = torch.Tensor.topk = self._spread_evenly(torch.topk)  # type: ignore[method-assign]
        for name in _IN_PLACE:
            setattr(torch.Tensor, name, self._change_on_host_too(getattr(torch.Tensor, name)))
        for name in [each for each in dir(torch) if re.match("_(foreach|fused)_.*_$", each)]:
            setattr(torch, name, self._forget_changed(getattr(torch, name)))
        for name in _CREATE:
            setattr(torch, name, self._create_on_host_too(getattr(torch, name)))
        for name, limits in _LIMITS.items():
            for where in (torch, torch.Tensor) if hasattr(torch.Tensor, name) else (torch,):
                setattr(where, name, _limit(getattr(where, name), limits))
        tensors: Any = torch.Tensor
        events: Any = torch.cuda.Event
        to_list, to_numpy, elapsed = tensors.tolist, tensors.numpy, events.elapsed_time
        tensors.item = self.guesses.compare_randomly(tensors.item)
        torch.serialization.add_safe_globals([float, int])  # as which random numbers are pickled
        tensors.tolist = lambda tensor: to_list(tensor.cpu())
        tensors.numpy = lambda tensor, *, force=False: to_numpy(tensor.cpu() if force else tensor, force=force)
        events.elapsed_time = lambda event, end: self.guesses.duration(elapsed(event, end))
        for where, name in product((torch.Tensor, torch), _CHECKS):
            setattr(where, name, _check(getattr(where, name)))

        def show_originals(dynamo: Any) -> None:
            def populate(fill: Callable[[], None] = dynamo.populate_builtin_to_tensor_fn_map) -> None:
                fill()
                for operators in dynamo.BUILTIN_TO_TENSOR_FN_MAP, dynamo.BUILTIN_TO_TENSOR_RFN_MAP:
                    operators.update({each: getattr(by, "__wrapped__", by) for each, by in operators.items()})

            dynamo.populate_builtin_to_tensor_fn_map = populate  # Dynamo cannot trace the replacements

        torch.jit._builtins._builtin_table = None  # TorchScript finds the replaced functions when it builds this again
        self._carry_messages()
        after_import("torch._dynamo.variables.builtin", show_originals)
        atexit.register(self._writes.clear)  # at the end of the process, a StorageWeakRef cannot be deleted

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
        known = all(_is_small(each) and self._source_of(each) is Source.HOST for each in sent)
        if not together and name == "_allgather_base_":
            # NCCL compares numbers of elements only, but a fake group compares shapes
            args = (args[0].view(-1), args[1].reshape(-1), *args[2:])
        if not together and not name.startswith(("send", "recv")):
            record_fake(group, name, sent)
        result = kernel.call_boxed(keys, *args)
        if together:
            known |= name in _RECEIVING and all(map(_is_small, written))
        elif known:
            self._write_of_other_ranks(name, args, group, reduction, [_on_host(each) for each in written])
        for each in written if known else ():
            self._note_write(each)
        return result

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
            written[0].view(ranks, -1).copy_(_on_host(args[1]).view(ranks, -1)[rank])

    def _track_copy(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap a function that copies: record copies to the device, and replace unknown values in copies from it."""

        @functools.wraps(function)
        def copy(*args: Any, **kwargs: Any) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            given: Any = args[0] if args else kwargs.get("data")
            source = next(iter((*args[1:], *kwargs.values()))) if function.__name__ == "copy_" else given
            from_device = isinstance(source, torch.Tensor) and source.is_cuda
            if from_device and source.is_floating_point() and source.numel() >= LARGE and _is_plain(source):
                source.data.zero_()  # it may contain integers of an earlier tensor, which are not valid floats
            copied = function(*args, **kwargs)
            if copied.is_cuda and copied.is_floating_point() and copied.numel() != 1:
                return copied
            # to convert types or to copy non-contiguous tensors, a device needs a kernel, so the result is unknown
            complete = copied.is_contiguous()
            if from_device:
                complete &= copied is not given and source.is_contiguous() and source.dtype is copied.dtype
                complete = complete and self._source_of(source) is Source.HOST
            if copied.is_cuda and complete and _is_plain(copied):
                self._note_write(copied)
            elif from_device and not copied.is_cuda and 0 < copied.numel() < LARGE:
                self._replace_unknown_values(copied.detach(), source)
            return copied

        return copy

    def _write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values without a kernel. The tensor keeps its version, because selective checkpointing compares it."""
        _on_host(tensor).copy_(values)
        self._note_write(tensor)

    def _note_write(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._writes[storage.data_ptr()] = StorageWeakRef(storage), _version(tensor)
        if len(self._writes) > 4096:
            for key in [key for key, write in self._writes.items() if write[0].expired()]:
                del self._writes[key]

    def _compute_on_host_too(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that returns integers or masks: compute its result if the values of all inputs are known."""
        name = function.__name__

        @functools.wraps(function)
        def compute(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            _pass_on_checks(args, result, name)
            if not self._can_be_known(result, floats=name in _TO_ROUND):
                return result
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if any(torch._C._is_alias_of(result, each) for each in given) or not any(each.is_cuda for each in given):  # type: ignore[attr-defined]
                return result
            known = [each for each in given if not each.is_cuda or (each.numel() < LARGE and self._was_written(each))]
            if len(known) == len(given):
                if self._routes and name in _COUNTS:
                    self.guesses.routing()
                # the CPU's histc supports only floats
                convert = partial(_on_host, as_float=name == "histc")
                found = function(*tree_map(convert, args), **tree_map(convert, kwargs))
                # bincount reads its size from the device: the largest value is read as 0, so the size is 1
                if found.shape != result.shape:
                    return found.to(result.device)
                self._write(result, found)
            elif name == "__and__" and any(not _on_host(each).any() for each in known):
                self._write(result, torch.zeros((), device="cpu"))
            elif name == "__or__" and any(each.dtype is torch.bool and _on_host(each).all() for each in known):
                self._write(result, torch.ones((), device="cpu"))
            return result

        return compute

    def _spread_evenly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `topk`: spread its indices evenly over the dimension or, with a skew, over the first part of it."""

        @functools.wraps(function)
        def top(input: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
            result = function(input, k, dim, *args, **kwargs)
            if self._can_be_known(result.indices):
                self._routes, last = True, result.indices.movedim(dim, -1)
                used = max(k, round(input.shape[dim] / self.skew))
                spread = (torch.arange(last.numel(), device="cpu") + self.guesses.offset(used)) % used
                self._write(result.indices, spread.view(last.shape).movedim(-1, dim))
            return result

        return top

    def _change_on_host_too(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that changes a tensor: if all inputs are known, the host computes it."""

        @functools.wraps(function)
        def change(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.is_cuda]
            known = all(self._can_be_known(each) and self._source_of(each) is Source.HOST for each in given)
            result = function(*args, **kwargs)
            if known and given:
                if self._routes and function.__name__ == "scatter_":  # by which a router may mark experts
                    self.guesses.routing()
                function(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))  # writes into the device's memory
                self._note_write(args[0])
            return result

        return change

    def _forget_changed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that changes lists of tensors, but not their versions: their values are unknown then."""

        @functools.wraps(function)
        def change(changed: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(changed, *args, **kwargs)
            for each in () if torch.compiler.is_compiling() else changed:
                if type(each) in (torch.Tensor, torch.nn.Parameter) and each.is_cuda:
                    self._writes.pop(each.untyped_storage().data_ptr(), None)
            return result

        return change

    def _create_on_host_too(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = function(*args, **kwargs)
            if self._can_be_known(result, floats=1) and kwargs.get("out") is None:
                self._write(result, function(*args, **{**kwargs, "device": "cpu"}))
            return result

        return create

    def _can_be_known(self, tensor: Any, floats: int = 0) -> bool:
        """Return True for integers and masks that are not large, and for at most this many floats."""
        if torch.compiler.is_compiling() or not _is_plain(tensor):
            return False
        with torch._C.DisableTorchFunction():  # Dynamo's function mode must not see these calls
            most = floats if tensor.is_floating_point() else LARGE - 1
            return bool(tensor.is_cuda and tensor.numel() <= most)

    def _replace_unknown_values(self, copied: torch.Tensor, original: torch.Tensor) -> None:
        """Replace values in a copy on the host if a kernel would have computed them."""
        source = self._source_of(original)
        if source is Source.HOST:
            if not original.is_contiguous():
                copied.copy_(_on_host(original))
        elif not _is_plain(copied) or original.dtype is torch.uint8:  # pickled objects travel as bytes
            if original.is_floating_point():
                copied.zero_()
        elif original.is_floating_point() or source is Source.DEVICE:
            usual = original.dtype is torch.bool and original.numel() > 1
            self.guesses.values(copied, usual, _limits_of(original))
        else:
            self.guesses.values(copied)

    def _source_of(self, tensor: torch.Tensor) -> Source:
        if not _is_plain(tensor) or (tensor.is_floating_point() and tensor.numel() != 1):
            return Source.UNCERTAIN
        written, version = self._writes.get(tensor.untyped_storage().data_ptr(), (None, None))
        if written is None or written.expired():
            return Source.DEVICE
        if version is None:
            return Source.UNCERTAIN
        return Source.HOST if version == _version(tensor) else Source.DEVICE

    def _was_written(self, tensor: torch.Tensor) -> bool:
        """Return True if the host wrote the values, and no kernel changed them since (unchecked in inference mode)."""
        unchecked = Source.UNCERTAIN if tensor.is_inference() and not tensor.is_floating_point() else Source.HOST
        return self._source_of(tensor) in (Source.HOST, unchecked)

    def _number(self, tensor: torch.Tensor) -> Any:
        source = self._source_of(tensor)
        if source is Source.HOST or (tensor.dtype is torch.bool and self._was_written(tensor)):
            return self._cpu(tensor).item()
        if tensor.is_floating_point():
            return self.guesses.number()
        if tensor.dtype is torch.bool:
            known = getattr(tensor, _CHECK, None)
            return self.guesses.condition(hasattr(tensor, _ALL)) if known is None else self.guesses.check(known)
        return self.guesses.integer(0 if source is Source.DEVICE else int(self._cpu(tensor)), _limits_of(tensor))

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """Select all elements of an unknown mask, because this needs the most memory."""
        if self._source_of(mask) is Source.HOST:
            return _on_host(mask).nonzero().to(mask.device)  # type: ignore[no-any-return]
        if mask.numel() >= LARGE:
            return torch.empty((mask.numel(), mask.ndim), dtype=torch.long, device=mask.device)
        selected = torch.ones(mask.shape, dtype=torch.bool)
        self.guesses.values(selected, True)
        if self.guesses.kept is not None and _is_plain(mask):
            self._write(mask, selected)  # the backward must select the same elements
        return selected.nonzero().to(mask.device)

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        known = self._source_of(mask) is Source.HOST  # before the mask is expanded, because that changes its version
        tensor, expanded = torch.broadcast_tensors(tensor, _on_host(mask) if known else mask)
        selected = expanded.nonzero().to(tensor.device) if known else self._nonzero(expanded)
        return tensor[tuple(selected.unbind(1))]

    def _with_dynamic_size(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an operation whose result has a size that depends on values: run it on the host."""

        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            known = self._source_of(tensor) is Source.HOST
            if not known and (size := kwargs.get("output_size")) is not None:  # of repeat_interleave
                return torch.empty(size, dtype=tensor.dtype, device=tensor.device)
            values, distinct = tensor.cpu(), None if known else self.guesses.stated()
            if distinct and operation is not torch.ops.aten.repeat_interleave.Tensor:
                values = torch.arange(tensor.numel()).clamp(max=distinct - 1).to(tensor.dtype).view(tensor.shape)
            return tree_map(lambda each: each.to(tensor.device), operation(values, *args, **kwargs))

        return run


def _limit(function: Callable[..., torch.Tensor], limits: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that returns integers: note their limits at the storage, where views of the result find them."""

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = function(*args, **kwargs)
        if args and not torch.compiler.is_compiling() and result.is_cuda and _is_plain(result):
            vars(result.untyped_storage())["limits"] = limits(*args, **kwargs)
        return result

    return choose


def _limits_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    return getattr(tensor.untyped_storage(), "limits", None) if _is_plain(tensor) else None


def _is_plain(value: Any) -> bool:
    """Return True for a tensor with a storage: not for a sparse one or a subclass, and not inside vmap or grad."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return type(value) is torch.Tensor and torch._C._has_storage(value) and not wrapped(value)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() < LARGE_TO_SEND and (tensor.numel() <= 1 or not tensor.is_floating_point())


def _on_host(value: Any, as_float: bool = False) -> Any:
    """Return a CPU tensor that uses the memory of a tensor on the device, because no kernel could copy it."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return "cpu" if isinstance(value, torch.device) else value
    if not value.numel():
        return value.cpu()
    storage = value.untyped_storage()
    settle(storage.data_ptr(), storage.nbytes())
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    found = torch.empty(0, dtype=value.dtype, device="cpu")
    found.set_(raw, value.storage_offset(), value.size(), value.stride())
    return found.float() if as_float else found


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was changed in place; None in inference mode, where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _all(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unknown result that is marked as one of `all`."""
    result = tensor.new_empty((), dtype=torch.bool)
    setattr(result, _ALL, True)
    return result


def _coalesce(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, as if no index occurred twice, because this needs the most memory."""
    indices, values = tensor._indices().clone(), tensor._values().clone()
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True, check_invariants=False)


def _check(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a check for NaN or infinity: its result is marked as one of finite numbers."""

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling() and result.is_cuda:
            setattr(result, _CHECK, _CHECKS[function.__name__])
        return result

    return check


def _pass_on_checks(given: tuple[Any, ...], result: Any, function: str) -> None:
    """Mark the result of a function of checks, such as `any`, as a check."""
    if torch.compiler.is_compiling() or not isinstance(result, torch.Tensor):
        return
    checks = [known for each in given if (known := getattr(each, _CHECK, None)) is not None]
    if checks and (result.dtype is torch.bool or function == "sum"):
        setattr(result, _CHECK, checks[0] != (function in _NEGATIONS))
