"""Writes down, line by line, what each step of a script did to the card's memory: the allocator's peaks between two
readings, although the script reads and resets them as well."""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
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
from torchtune_adaptive.rehearse.holders import holders
from torchtune_adaptive.rehearse.launchers import CannotRehearse
from torchtune_adaptive.rehearse.rehearsed import CONVOLVED

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class StepWriter:
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
