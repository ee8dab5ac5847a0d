"""Adds to the recording of NCCL what only Python knows: lines, groups, and calls of gloo and of fake groups."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import sysconfig
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from gpu_rehearsal import device
from gpu_rehearsal.hangs.replay import NO_STREAM

_METHODS = {
    "allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "scatter",
    "send",
}  # fmt: skip
"""Methods of a process group that communicate."""
_SIZES_DIFFER = {"alltoall", "alltoall_base", "all_to_all_single", "barrier", "gather", "monitored_barrier", "scatter"}
"""Methods for which ranks may pass tensors of different sizes."""
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_TORCH = (str(Path(torch.__file__).parent) + os.sep, contextlib.__file__, str(Path(__file__).parents[1]), "<")
MOST_BYTES = 480
"""Of the lines that led to a call."""
_started = False
_described = set[str]()
_numbers = itertools.count()


def start_recording() -> None:
    """Record lines and host collectives of this process from here on, into the folder NULL_CUDA_RECORD."""
    global _started
    _started = True
    device.record_lines(lines)
    for name in _METHODS & {*vars(dist.ProcessGroup)}:
        setattr(dist.ProcessGroup, name, _recorded(name, getattr(dist.ProcessGroup, name)))


def record_host_call(group: str, ranks: Sequence[int], what: str) -> None:
    """Record that this host waits for the others of a group that has these ranks."""
    if _started:
        at = [*ranks].index(dist.get_rank()) if dist.is_initialized() else int(os.environ["RANK"])
        device.record("host", group, at, len(ranks), what, lines(), _thread())


def record_description(text: str) -> None:
    """Describe the communicator that is created next."""
    if _started:
        device.record("describe", text)


def record_group(group: Any) -> None:
    """Record that this rank is a member of a group, in which it may not make a call."""
    if _started and isinstance(group, dist.ProcessGroup) and group.size() > 1:
        fake = dist.get_backend(group) == "fake"
        _describe(f"{number_of(group):x}" if fake else _on_hosts(group), group, 0 if fake else group.size())


def number_of(group: dist.ProcessGroup) -> int:
    """Return a number of a group of which only some ranks run, equal on these."""
    return 2**32 + zlib.crc32(group.group_name.encode())


def record_fake(group: dist.ProcessGroup, what: str, tensors: Sequence[torch.Tensor]) -> int:
    """Record a collective of a group of which only some ranks run, and return its number. No stream waits for it."""
    number = next(_numbers)
    if _started and group.size() > 1:
        _describe(name := f"{number_of(group):x}", group, 0)
        what = what.strip("_")
        what = what if what in _SIZES_DIFFER else _with_size(what, tensors)
        device.record("call", name, "", "", what, lines(), f"{NO_STREAM}{name}", number)
    return number


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        without_tensors = name == "monitored_barrier" or dist.get_backend(group) == "gloo"
        on_host = not any(each.is_cuda for each in tensors) if tensors else without_tensors
        if on_host and group.size() > 1 and dist.get_backend(group) != "fake":
            _record(name, group, tensors, args, sys._getframe(1))
        return method(group, *args, **kwargs)

    return call


def _record(
    name: str, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], args: Sequence[Any], function: FrameType
) -> None:
    """Record a call of gloo. Its host waits at once, unless the function of torch that calls is asynchronous."""
    _describe(key := _on_hosts(group), group, group.size())
    between, verb, waits = "", "", not function.f_locals.get("async_op")
    if name in ("send", "recv"):
        own, peer = group.rank(), args[1]
        between, verb = (f"{own}>{peer}", "sends") if name == "send" else (f"{peer}>{own}", "receives")
        name, waits = "a message", function.f_code.co_name == "recv"
    elif function.f_globals.get("__name__") == dist.all_reduce.__module__:
        name = function.f_code.co_name
    what = f"{name} on hosts" if name in _SIZES_DIFFER else f"{_with_size(name, tensors)} on hosts"
    if waits:
        device.record("host", key, group.rank(), group.size(), what, lines(), _thread(), between, verb)
    else:
        device.record("call", key, between, verb, what, lines(), f"{NO_STREAM}{key}{between}", next(_numbers))


def _on_hosts(group: dist.ProcessGroup) -> str:
    return f"{group.group_name} on hosts"


def _describe(key: str, group: dist.ProcessGroup, size: int) -> None:
    if key not in _described:
        _described.add(key)
        device.record("place", key, group.rank(), size, group.group_desc.replace("default_pg", "all ranks"))


def _with_size(what: str, tensors: Sequence[torch.Tensor]) -> str:
    return f"{what} of {tensors[0].numel()} {str(tensors[0].dtype).removeprefix('torch.')}" if tensors else what


def _thread() -> str:
    """Return "" for the main thread and for threads of autograd, for which the main thread waits."""
    thread = threading.current_thread()
    ours = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    return "" if ours else f"thread {thread.ident}"


def lines() -> str:
    """Return the line of the script that runs, and those that led to it: "model.py:12 < train.py:30"."""
    # A thread of autograd may have no frame; the main thread then waits for it. A variable with our own frame would
    # be a reference cycle, which would keep the tensors of the callers.
    main = threading.main_thread().ident or 0
    return lines_of(traceback.walk_stack(sys._getframe(1))) or lines_of(
        traceback.walk_stack(sys._current_frames().get(main))
    )


def lines_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the lines of frames, from the innermost, without those of libraries unless there are no others."""
    scripts, innermost = list[str](), ""
    for frame, line in frames:
        file, of_script = _file(frame.f_code.co_filename)
        if file and not innermost:
            innermost = f"{file}:{line}"
        if of_script and sum(map(len, scripts)) + len(file) < MOST_BYTES - 10 * len(scripts):
            scripts.append(f"{file}:{line}")
    return " < ".join(scripts) or innermost


@functools.cache
def _file(name: str) -> tuple[str, bool]:
    """Return a file outside of torch, its compiled code and Cython, else "", and whether it belongs to no library."""
    if name.startswith(_TORCH) or "/torchinductor_" in name or name.endswith((".pyx", ".pxi")):
        return "", False
    return os.path.relpath(name) if name.startswith(os.getcwd()) else name, not name.startswith(LIBRARIES)
