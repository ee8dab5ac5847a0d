"""Writes down, line by line, what each step of a script did to the card's memory: the allocator's peaks between two
readings, although the script reads and resets them as well."""

from __future__ import annotations

import gc
import json
import linecache
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef

from torchtune_adaptive.null_cuda import used_convolutions, used_memory
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.rehearse.result import CONVOLVED
from torchtune_adaptive.rehearse.start import CannotRehearse

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class StepRecorder:
    """Steps are told by the optimizers, without the script's help.

    A script may have several optimizers. The first step is over when one of them steps for the second time, each later
    one when all that had a part in the first have stepped.
    """

    def __init__(self, path: Path, *, most_steps: int) -> None:
        self._file = path.open("w", buffering=1)
        self._process = os.getpid()
        self._most_steps = most_steps
        self._peaks = Peaks()
        self.steps = 0
        self._stepped: set[WeakIdRef] = set()
        self._all: set[WeakIdRef] | None = None
        self._reading = Usage()
        self._before_update, self._allocated = Usage(), 0
        self._state_bytes = self._most_before_update = 0
        self.notes = set[str]()
        """Keys of notes for the end of the report."""
        self._replays = 0
        self._guesses = set[tuple[str, str, int]]()
        self._optimizers = WeakSet[torch.optim.Optimizer]()
        self._have_stepped = set[WeakIdRef]()

    def __enter__(self) -> None:
        # not before the script: whether CUDA has started decides where a DeviceMesh puts the rank, and what may fork
        torch.cuda._lazy_call(self._cuda_starts)
        register_optimizer_step_pre_hook(self._optimizer_steps)
        register_optimizer_step_post_hook(self._optimizer_stepped)
        make = torch.optim.Optimizer.__init__

        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign,assignment]
        REHEARSAL.when_tried.append(self._forget_peaks_of_a_trial)
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self._replays += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign,assignment]

    def _cuda_starts(self) -> None:
        torch.cuda.memory._record_memory_history(enabled="state", context="alloc", stacks="python")
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._first_is_over or (self._stepped and _error(error) is None):
            self._step_is_over()
        self._reading.add(self._before_update)
        self._reading.add(self._peaks.read())
        self._write_end(self._reading, error)

    def _write_end(self, after_last_step: Usage, error: BaseException | None = None, *, stopped: bool = False) -> None:
        weights = [
            weight for each in self._idle().values() for group in each.param_groups for weight in group["params"]
        ]
        idle_bytes = sum(getattr(each, "_local_tensor", each).nbytes for each in weights if each.is_cuda)
        ended = {
            "error": _error(error),
            "by_memory": _by_memory(error),
            "replays": self._replays,
            "idle_bytes": idle_bytes,
            "stopped": stopped,
            "state_bytes": self._state_bytes,
            "next_bytes": self._most_before_update + self._state_bytes,
            "managed_bytes": used_memory(managed=True),
            "notes": [*self.notes, *([CONVOLVED] if used_convolutions() else [])],
        }
        self.write("end", {**after_last_step.figures(), **ended})

    def _forget_peaks_of_a_trial(self) -> None:
        """A step's figures begin after a search's probes."""
        self._peaks.read()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if REHEARSAL.trying:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            _refuse_lbfgs(optimizer)
        self._before_update.add(self._peaks.read())
        self._allocated = _allocated()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if REHEARSAL.trying:
            return
        reading, updates = self._before_update, _updated(optimizer)
        self._before_update = Usage()
        if updates not in self._have_stepped:
            self._most_before_update = max(self._most_before_update, reading.allocated_bytes)
            self._state_bytes += max(_allocated() - self._allocated, 0)
        reading.add(self._peaks.read())
        self._have_stepped.add(updates)
        gone = any(each() is None for each in self._stepped)  # the next step has a model of its own
        if gone or updates in self._stepped:
            self._all = None if gone else self._stepped
            self._step_is_over()
        self._reading.add(reading)
        self._stepped = self._stepped | {updates}
        if self._all is None and not self.steps:  # if the script is killed before another step tells
            self.write("first", {"step": 1, **self._reading.figures()})
        if self._stepped == self._all:
            self._step_is_over()

    @property
    def _first_is_over(self) -> bool:
        """Whether every optimizer has taken part in the first step, though none has begun the next one."""
        return self._all is None and bool(self._stepped) and not self._idle()

    def _idle(self) -> dict[WeakIdRef, torch.optim.Optimizer]:
        return {_updated(each): each for each in self._optimizers if _updated(each) not in self._have_stepped}

    def _step_is_over(self) -> None:
        self.steps += 1
        self.write("step", {"step": self.steps, **self._reading.figures()})
        self._reading, self._stepped = Usage(), set()
        if self.steps == self._most_steps:
            self._write_end(Usage(), stopped=True)
            flush()
            os._exit(0)  # nothing that the script catches, or does at its end

    def _out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        """Called by the allocator, on the thread whose request has failed."""
        frames = _stack(sys._getframe().f_back) or _stack(sys._current_frames()[threading.main_thread().ident or 0])
        node = torch._C._current_autograd_node()
        where = _outside_torch(frames)
        stats = torch.cuda.memory_stats(device)
        self.write(
            "out_of_memory",
            {
                "step": self.steps + 1 + self._first_is_over,
                "tried": REHEARSAL.trying,
                "trains": bool(self._optimizers),
                "file": where[0],
                "line": where[1],
                "source": linecache.getline(*where).strip(),
                "operation": node.name() if node else linecache.getline(*frames[0]).strip(),
                "asked_bytes": asked,
                "free_bytes": free,
                "allowed_bytes": int(total * torch.cuda.get_per_process_memory_fraction(device)),
                "allocated_bytes": stats["allocated_bytes.all.current"],
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "held_bytes": holders(device),
            },
        )

    def guessed(self, what: str, frame: FrameType) -> None:
        """Once for each place."""
        file, line = innermost(frame)
        if (what, file, line) not in self._guesses:
            self._guesses.add((what, file, line))
            self.write("guess", {"what": what, "file": file, "line": line})

    def write(self, kind: str, figures: Mapping[str, Any]) -> None:
        if os.getpid() == self._process:  # and not one that the script has forked
            with suppress(OSError):
                self._file.write(json.dumps({"kind": kind, **figures}) + "\n")


def _refuse_lbfgs(optimizer: torch.optim.LBFGS) -> None:
    (group,) = optimizer.param_groups
    copies = 2 * group["history_size"] + 5
    size = copies * sum(each.nbytes for each in group["params"])
    raise CannotRehearse(
        f"torch.optim.LBFGS keeps up to 2 × history_size + 5 = {copies} copies of its parameters "
        f"({size / 2**30:.2f} GiB), depending on values: rehearse with torch.optim.SGD and add them"
    )


def _allocated() -> int:
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))) if torch.cuda.is_initialized() else 0


def _updated(optimizer: torch.optim.Optimizer) -> WeakIdRef:
    """A parameter that it updates, by which it is known: scripts may make new optimizers."""
    return WeakIdRef(next((each for group in optimizer.param_groups for each in group["params"]), optimizer))


def flush() -> None:
    """Writes out what the script has printed, if it has left anything to print to."""
    for stream in sys.stdout, sys.stderr:
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def innermost(frame: FrameType) -> tuple[str, int]:
    """File and line of the script, or of a library that is neither torch nor this one."""
    return _outside_torch(_stack(frame) or [(frame.f_code.co_filename, frame.f_lineno)])


def _outside_torch(frames: Sequence[tuple[str, int]]) -> tuple[str, int]:
    return next((each for each in frames if not each[0].startswith(_TORCH)), frames[-1])


def _stack(frame: FrameType | None) -> list[tuple[str, int]]:
    """File and line of each frame, innermost first, without this room's own."""
    found = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_HERE, "<")):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def _error(error: BaseException | None) -> str | None:
    """What ended the script; None where it ended well."""
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"exit status {error.code}"
    if error is None:
        return None
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.split(r"\. GPU \d+ has", said)[0]  # torch's out of memory goes on for long


def _by_memory(error: BaseException | None) -> bool:
    """Whether it is an out-of-memory error, or was raised because of one or while one was handled."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None


Statistics = dict[str, Any]
"""As torch has them: {"allocated_bytes": {"all": {"current": ..., "peak": ...}, ...}, "num_alloc_retries": ...}."""


@dataclass
class Usage:
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    flushes: int = 0
    """How often the allocator returned its cached blocks to the card and asked again."""

    def add(self, other: Usage) -> None:
        self.allocated_bytes = max(self.allocated_bytes, other.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, other.reserved_bytes)
        self.flushes += other.flushes

    def figures(self) -> dict[str, int]:
        return asdict(self)


class Peaks:
    """Stands between torch's Python functions and the allocator: a reset by one side does not reset the other's."""

    def __init__(self) -> None:
        self._statistics, self._reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self._scripts: dict[int, Statistics] = {}
        self._ours: dict[int, Usage] = {}
        self._flushes: dict[int, int] = {}
        torch._C._cuda_memoryStats = self._as_the_script_sees_them
        torch._C._cuda_resetPeakMemoryStats = self._script_resets

    def read(self) -> Usage:
        """What happened since the last reading, on the device that reserved most."""
        readings = (
            [self._read(device) for device in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
        )
        most = max(readings, key=lambda each: each.reserved_bytes, default=Usage())
        return replace(most, flushes=sum(each.flushes for each in readings))

    def _read(self, device: int) -> Usage:
        statistics = self._statistics(device)
        usage = self._ours.pop(device, Usage())
        usage.add(_peaks_of(statistics))
        retries = int(statistics["num_alloc_retries"])
        usage.flushes = max(retries - self._flushes.get(device, 0), 0)
        self._flushes[device] = retries
        self._scripts[device] = self._as_the_script_sees_them(device)
        self._reset(device)
        return usage

    def _as_the_script_sees_them(self, device: int) -> Statistics:
        statistics: Statistics = self._statistics(device)
        _raise_peaks(statistics, self._scripts.get(device, {}))
        return statistics

    def _script_resets(self, device: int) -> None:
        self._ours.setdefault(device, Usage()).add(_peaks_of(self._statistics(device)))
        self._scripts.pop(device, None)
        self._reset(device)


def _peaks_of(statistics: Statistics) -> Usage:
    return Usage(*(statistics[each]["all"]["peak"] for each in ("allocated_bytes", "reserved_bytes")))


def _raise_peaks(statistics: Statistics, to: Statistics) -> None:
    for name, value in to.items():
        if isinstance(value, dict):
            _raise_peaks(statistics[name], value)
        elif name == "peak":
            statistics[name] = max(statistics[name], value)


PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
BUFFERS, ACTIVATIONS, BACKWARD = "FSDP and DDP buffers", "activations", "backward pass"
STATE_DICT, OTHER = "state dict", "other"

_Frames = tuple[tuple[str, str], ...]
"""Ends of files and functions in them."""

_BEFORE_OWNERS: _Frames = (("_fully_shard/_fsdp_collectives.py", ""), ("_fully_shard/_fsdp_common.py", "alloc_storage"))
"""Where FSDP2 makes what it fills by communicating. Its parameters are there while they are whole."""
_FSDP_AND_DDP: _Frames = (
    ("/torch/distributed/fsdp/", ""),
    ("/torch/nn/parallel/distributed.py", "_ddp_init_helper"),
    ("/torch/nn/parallel/distributed.py", "_pre_forward"),  # makes other buckets, once it has seen a backward
)
_OPTIMIZER: _Frames = (("/torch/optim/", ""),)
_MODULES: _Frames = (("/torch/nn/modules/module.py", "_call_impl"), ("/torch/nn/functional.py", ""))
_STATE_DICT: _Frames = (("/torch/distributed/checkpoint/", ""),)


def holders(device: int) -> dict[str, int]:
    """Bytes in use on a device by what holds them."""
    owners = _owners(device)
    held: Counter[str] = Counter()
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                held[_holder(block, owners)] += block["size"]
    return dict(held.most_common())


def _holder(block: dict[str, Any], owners: dict[int, str]) -> str:
    frames, owner = block.get("frames", []), owners.get(block["address"])
    if owner != GRADIENTS and _any_in(frames, _BEFORE_OWNERS):
        return BUFFERS
    if owner is not None:
        return owner
    if not frames:  # autograd's own thread
        return BACKWARD
    # the innermost frame tells: FSDP1 calls the module, and an optimizer may call the whole forward
    by_frames = {BUFFERS: _FSDP_AND_DDP, OPTIMIZER: _OPTIMIZER, ACTIVATIONS: _MODULES, STATE_DICT: _STATE_DICT}
    told = (holder for frame in frames for holder, where in by_frames.items() if _any_in([frame], where))
    return next(told, OTHER)


def _any_in(frames: list[dict[str, Any]], where: _Frames) -> bool:
    return any(file in frame["filename"] and function in frame["name"] for frame in frames for file, function in where)


def _owners(device: int) -> dict[int, str]:
    """By the address of its storage: what parameters, buffers and optimizers refer to."""
    owners: dict[int, str] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would ask lazy modules what they are
        if issubclass(kind, torch.Tensor) and isinstance(thing, torch.nn.Parameter):
            owners[_address(thing, device)] = PARAMETERS
            if thing.grad is not None:
                owners[_address(thing.grad, device)] = GRADIENTS
        elif issubclass(kind, torch.nn.Module):
            owners |= {_address(each, device): PARAMETERS for each in thing._buffers.values() if each is not None}
        elif issubclass(kind, torch.optim.Optimizer):
            owners |= {_address(each, device): OPTIMIZER for each in _tensors(dict(thing.state))}
    return owners


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _address(tensor: torch.Tensor, device: int) -> int:
    """Where its memory begins; 0 for what is not on the device."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = local.untyped_storage()
        return int(storage.data_ptr()) if storage.device == torch.device("cuda", device) else 0
    except (RuntimeError, NotImplementedError):  # a subclass without storage of its own
        return 0
