"""What a script reads from a card that computes nothing: values that let it go on, and a word where they matter."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _get_value
from torch.utils._pytree import tree_map

from torchtune_adaptive.rehearse.one_of_many import replace
from torchtune_adaptive.rehearse.rehearsed import INTEGER, MASK
from torchtune_adaptive.rehearse.sizes import may_become_size

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
