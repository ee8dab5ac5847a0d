"""What a script reads from a card that computes nothing: values that let it go on, and a word where they matter."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _get_value
from torch.utils._pytree import tree_map

from torchtune_adaptive.rehearse.fake_ranks import replace
from torchtune_adaptive.rehearse.result import INTEGER, MASK

LARGE = 2**20
"""Elements of a tensor that is read as it is, and of a weight that is not drawn."""
FROM_INTEGERS = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge",
    "sum", "max", "min", "amax", "amin", "long", "int", "bool", "to", "logical_not", "__invert__", "__and__", "__or__",
)  # fmt: skip
"""Methods that make integers or masks: of known ones, the results are known."""
_ALL = "_is_so_of_all"


class Values:
    """Numbers are 0, checks for NaN find none, and what is asked of all, or asserted, is so. Integers and masks that
    the host wrote, and the card has not changed since, are read as they are, and so is what is counted or compared in
    them; any other mask selects everything.
    """

    def __init__(self, on_guess: Callable[[str, FrameType], object]) -> None:
        """`on_guess` is called where an integer that nobody knows is read as 0, or a mask selects everything."""
        self._on_guess = on_guess
        self.zeros = 0
        """How often a number that only the card would know was read as 0."""
        self._reads = dict[tuple[tuple[CodeType, int], ...], bool]()
        """Whether a number that was read at a place, called from another, can become a size."""
        self._writes = deque[tuple[int, int, StorageWeakRef, int | None]](maxlen=4096)
        """The latest of the host's: where they begin and end, what they were written to, and as which version of it."""

    def install(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        library.impl("_local_scalar_dense", self._number, "CUDA")
        library.impl("nonzero", self._selected, "CUDA")
        library.impl("all", _all, "CUDA")
        for name in "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor":
            operation = attrgetter(name)(torch.ops.aten)
            library.impl(name, self._by_values(operation), "CUDA")
        self._library = library  # what it implements is gone with it
        self._cpu, whole = torch.Tensor.cpu, torch.Tensor.__int__
        for name in "cpu", "to", "cuda", "copy_", "clone", "contiguous":
            setattr(torch.Tensor, name, self._watched(getattr(torch.Tensor, name)))
        for name in "tensor", "as_tensor":
            setattr(torch, name, self._watched(getattr(torch, name)))
        for where, name in [(where, name) for where in (torch.Tensor, torch) for name in FROM_INTEGERS]:
            if callable(getattr(where, name, None)):  # torch.int is a type
                setattr(where, name, self._followed(getattr(where, name)))
        listed, finite = torch.Tensor.tolist, torch.isfinite
        torch.Tensor.tolist = lambda tensor: listed(tensor.cpu())  # type: ignore[method-assign,assignment]

        def is_finite(tensor: torch.Tensor) -> torch.Tensor:
            found = finite(tensor)
            if found.numel() == 1 and tensor.device.type == "cuda":
                setattr(found, _ALL, True)
            return found

        def as_length(tensor: torch.Tensor) -> int:
            if tensor.is_cuda and tensor.is_floating_point():
                self._on_guess(INTEGER, _caller())
            return whole(tensor)

        torch.isfinite = torch.Tensor.isfinite = is_finite  # type: ignore[assignment]
        torch.Tensor.__int__ = as_length  # type: ignore[method-assign,assignment]
        self._know_what_is_sent()

    def _know_what_is_sent(self) -> None:
        """Integers that the host wrote are known after a collective, too: all ranks have the same."""
        reduces, gathers, gathers_into = dist.all_reduce, dist.all_gather, dist.all_gather_into_tensor

        def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            known = not torch.compiler.is_compiling() and op == dist.ReduceOp.SUM and self._host_wrote(tensor)
            work = reduces(tensor, op, group, async_op)
            if known:
                tensor.copy_(self._cpu(tensor) * dist.get_world_size(group))
            return work

        def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
            work = gathers(tensor_list, tensor, group, async_op)
            if not torch.compiler.is_compiling() and self._host_wrote(tensor):
                for each in tensor_list:
                    each.copy_(self._cpu(tensor))
            return work

        def all_gather_into_tensor(
            output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
        ) -> Any:
            if torch.compiler.is_compiling():
                return gathers_into(output_tensor, input_tensor, group, async_op)
            # NCCL compares the numbers of elements alone, and a fake group the shapes
            work = gathers_into(output_tensor.view(-1), input_tensor.reshape(-1), group, async_op)
            if self._host_wrote(input_tensor):
                every = self._cpu(input_tensor).flatten().repeat(dist.get_world_size(group))
                output_tensor.copy_(every.view(output_tensor.shape))
            return work

        replace(reduces, all_reduce)
        replace(gathers, all_gather)
        replace(gathers_into, all_gather_into_tensor)

    def _watched(self, copies: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function that copies: to the card is remembered, and of the card's only what is known."""

        @functools.wraps(copies)
        def copy(given: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return copies(given, *args, **kwargs)
            source = next(iter((*args, *kwargs.values()))) if copies.__name__ == "copy_" else given
            was_on_card = isinstance(source, torch.Tensor) and source.is_cuda
            if was_on_card and source.is_floating_point() and source.numel() >= LARGE and _is_plain(source):
                source.data.zero_()  # integers of the host may have lain there
            found = copies(given, *args, **kwargs)
            # copies of rows and columns take a kernel, and so do those that change a type on the card
            is_true = found.is_contiguous()
            if was_on_card:
                same = found is not given and source.is_contiguous() and source.dtype is found.dtype
                is_true &= same and self._host_wrote(source) is True
            if found.is_cuda and is_true and not found.is_floating_point() and _is_plain(found):
                storage = found.untyped_storage()
                begin = storage.data_ptr()
                self._writes.append((begin, begin + storage.nbytes(), StorageWeakRef(storage), _version(found)))
            elif was_on_card and not found.is_cuda and found.numel() < LARGE:
                self._take_what_is_known(found.detach(), source)
            return found

        return copy

    def _followed(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose results are computed on the host too, where it has what they are made of."""

        @functools.wraps(compute)
        def follow(*args: Any, **kwargs: Any) -> Any:
            found = compute(*args, **kwargs)
            if torch.compiler.is_compiling() or not _is_plain(found) or not found.is_cuda:
                return found
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if found.is_floating_point() or any(found is each for each in given) or not any(e.is_cuda for e in given):
                return found
            if all(not each.is_cuda or (each.numel() < LARGE and self._host_wrote(each)) for each in given):
                found.copy_(compute(*tree_map(self._on_host, args), **tree_map(self._on_host, kwargs)))
            return found

        return follow

    def _on_host(self, given: Any) -> Any:
        """A tensor with the same values. The card itself would bring rows and columns together by a kernel."""
        if not isinstance(given, torch.Tensor) or not given.is_cuda:
            return "cpu" if isinstance(given, torch.device) else given
        storage = given.untyped_storage().cpu()
        return given.new_empty(0, device="cpu").set_(storage, given.storage_offset(), given.size(), given.stride())

    def _take_what_is_known(self, copied: torch.Tensor, source: torch.Tensor) -> None:
        """The rest of a copy on the host becomes 0, or selects everything."""
        if source.is_floating_point():
            copied.zero_()
            self.zeros += 1
        # bytes are those of objects, whose lengths travel beside them
        if source.is_floating_point() or source.dtype is torch.uint8 or not _is_plain(source):
            return
        wrote, is_mask = self._host_wrote(source), source.dtype is torch.bool and source.numel() > 1
        if wrote and not source.is_contiguous():
            copied.copy_(self._on_host(source))
        elif wrote is False:
            copied.fill_(is_mask)
            self.zeros += not is_mask
        if not wrote and (is_mask or source.dtype is not torch.bool):  # and not a check for NaN
            self._on_guess(MASK if is_mask else INTEGER, _caller())

    def _host_wrote(self, tensor: torch.Tensor) -> bool | None:
        """And nothing has changed it since. None: a change could not be noticed."""
        if not _is_plain(tensor) or tensor.is_floating_point():
            return None
        storage = tensor.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for first, last, wrote, version in reversed(self._writes):
            if first < end and begin < last:
                if first != begin or wrote.expired():
                    return False
                return None if version is None else version == _version(tensor)
        return False

    def _number(self, tensor: torch.Tensor) -> Any:
        asks = _caller()
        if hasattr(tensor, _ALL):
            return True
        if tensor.is_floating_point():
            # steps of an optimizer whose state was loaded to the card: what is divided by them needs one at least
            is_step = asks.f_code is _get_value.__code__
            self.zeros += not is_step
            return float(is_step)
        wrote = self._host_wrote(tensor)
        if tensor.dtype is torch.bool and not wrote:
            asserted = any(_asserts(frame) for frame in (asks, asks.f_back) if frame)
            self.zeros += not asserted
            return asserted
        number = 0 if wrote is False else self._cpu(tensor).item()
        self.zeros += wrote is False
        if not wrote and self._sizes_something(asks):
            self._on_guess(INTEGER, asks)
        return number

    def _sizes_something(self, frame: FrameType) -> bool:
        while frame.f_code.co_filename == __file__ and frame.f_back:
            frame = frame.f_back
        place = tuple((each.f_code, each.f_lasti) for each in (frame, frame.f_back) if each)
        if place not in self._reads:
            self._reads[place] = may_become_size(frame)
        return self._reads[place]

    def _selected(self, mask: torch.Tensor) -> torch.Tensor:
        """The most that a mask may select, which needs the most memory, unless the host wrote it."""
        if self._host_wrote(mask):
            return self._on_host(mask).nonzero().to(mask.device)  # type: ignore[no-any-return]
        self._on_guess(MASK, _caller())
        return torch.ones(mask.shape, dtype=torch.bool).nonzero().to(mask.device)

    def _by_values(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An operation whose values decide how large its results are."""

        def sized(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._host_wrote(tensor):
                self._on_guess(INTEGER, _caller())
            return tree_map(lambda each: each.to(tensor.device), operation(tensor.cpu(), *args, **kwargs))

        return sized


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor with storage: no subclass, and no tensor inside vmap or grad."""
    return type(value) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _version(tensor: torch.Tensor) -> int | None:
    """How often it has been changed in place; None in inference mode, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


def _caller() -> FrameType:
    """The frame that called; autograd's threads have none: there it is where the script waits for the backward."""
    called = sys._getframe(1)
    return called.f_back or sys._current_frames()[threading.main_thread().ident or 0]


def _asserts(frame: FrameType) -> bool:
    """Whether it evaluates an assertion: that of a helper is one frame further out."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("assert")


def _all(tensor: torch.Tensor) -> torch.Tensor:
    """What is asked of all is so: "are all finite?"."""
    answer = torch.ones((), dtype=torch.bool, device=tensor.device)
    setattr(answer, _ALL, True)
    return answer


_SHOW = {
    "print", "float", "str", "repr", "log", "debug", "info", "warning", "write", "set_postfix", "set_description",
    "add_scalar", "add_scalars", "log_metrics", "isnan", "isfinite",
}  # fmt: skip
_PASS_ON = {"int", "max", "min", "abs", "round", "sum"}
_COUNT = {"fused_linear_cross_entropy_forward"}
"""Functions of libraries (liger) that count labels, and pass the count on to be divided by."""
_Variable = tuple[str, str]
"""A kind of variable (name, attribute, key) and its name."""


class _Source:
    def __init__(self, text: str) -> None:
        self.nodes = list(ast.walk(ast.parse(text)))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def call_at(self, position: tuple[int | None, ...]) -> ast.Call | None:
        calls = (each for each in self.nodes if isinstance(each, ast.Call))
        at = attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
        return next((each for each in calls if at(each) == position), None)

    def reads(self, place: _Variable, near: ast.AST) -> Iterator[ast.expr]:
        """Yield where a variable is read: a name in its function, an attribute or a key in the whole file."""
        scope: ast.AST | None = near
        while scope is not None and not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            scope = self.parents.get(scope)
        for node in self.nodes if scope is None or place[0] != "Name" else ast.walk(scope):
            if isinstance(getattr(node, "ctx", None), ast.Load) and _place(node) == place:
                yield node  # type: ignore[misc]


def may_become_size(frame: FrameType) -> bool:
    """Return whether the number that this frame reads can become a size; True if its source does not tell."""
    return frame.f_code.co_name not in _COUNT and _may_become_size(frame, ("item", "int", "float"))


def _may_become_size(frame: FrameType | None, by: tuple[str, ...] = ()) -> bool:
    source = _source(frame.f_code.co_filename) if frame else None
    if frame is None or source is None:
        return True
    node = source.call_at(list(frame.f_code.co_positions())[frame.f_lasti // 2])
    return node is None or bool(by and _name(node.func) not in by) or _reaches_size(node, source, frame, set())


@functools.lru_cache
def _source(file: str) -> _Source | None:
    try:
        return _Source("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _place(node: ast.AST) -> _Variable | None:
    if isinstance(node, ast.Name | ast.Attribute):
        return type(node).__name__, _name(node)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return "key", node.slice.value
    return None


def _reaches_size(node: ast.AST, source: _Source, frame: FrameType, seen: set[_Variable]) -> bool:
    above = source.parents.get(node)
    match above:
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()) | ast.FormattedValue() | ast.Expr():
            return False
        case ast.Call(func=ast.Subscript()):  # kernel[grid](...)
            return False
        case ast.Call() if above.func is not node and _name(above.func) in _SHOW:
            return False
        case ast.Call() if above.func is not node and _name(above.func) not in _PASS_ON:
            return True
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
            for target in above.targets if isinstance(above, ast.Assign) else [above.target]:
                if (place := _place(target)) is None:
                    return True
                if place not in seen:
                    seen.add(place)
                    if any(_reaches_size(each, source, frame, seen) for each in source.reads(place, target)):
                        return True
            return False
        case ast.Return():
            return _may_become_size(frame.f_back)
        case ast.Attribute() if isinstance(source.parents.get(above), ast.Call):  # a method of what was read
            return _reaches_size(above, source, frame, seen)
        case ast.BinOp() | ast.UnaryOp() | ast.keyword() | ast.Dict() | ast.Call():
            return _reaches_size(above, source, frame, seen)
    return True
