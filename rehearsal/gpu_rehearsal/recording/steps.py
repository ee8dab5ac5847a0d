"""Record the allocator's peaks of each step in a file, one JSON line per step, and classify the memory after an error.

The script can read and reset the same peaks without affecting the record.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef

from gpu_rehearsal.adapters import folders_with_adapters
from gpu_rehearsal.device import used_convolutions, used_memory, used_workspaces
from gpu_rehearsal.recording.calls import LIBRARIES, lines_of
from gpu_rehearsal.recording.holders import memory_by_holder
from gpu_rehearsal.recording.later_batches import larger_batch, note_batches
from gpu_rehearsal.recording.operations import RECORDER
from gpu_rehearsal.report.record import END, END_OF_STEP, MOST_READS, NEEDS_OTHERS
from gpu_rehearsal.settings import RankSettings

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


class StepRecorder:
    """Detects steps by hooks on the optimizers.

    At first, the number of optimizers is unknown, so the first step ends when an optimizer steps for the second time.
    Each later step ends when all optimizers of the first step have stepped.
    """

    def __init__(self, path: Path, settings: RankSettings) -> None:
        """Record in a file."""
        self.move_to(path, self._look_ahead_and_exit)
        self._most_steps = settings.steps
        self._peaks = Peaks()
        self.steps = 0
        self._stepping: torch.optim.Optimizer | None = None
        """An optimizer that is taking a step. It may consist of others, whose steps do not count."""
        self._stepped: set[WeakIdRef] = set()
        """The first parameters of the optimizers that have taken the current step."""
        self._stepped_by, self._exist = WeakSet[torch.optim.Optimizer](), WeakSet[torch.optim.Optimizer]()
        """These optimizers, and all that existed when the first of them took the step."""
        self._all: tuple[set[WeakIdRef], int] | None = None
        self._reading: Usages = {}
        self._run: Usages = {}
        """The peaks of all steps and of the time after the last one."""
        self._searching = False
        self._reads = 0
        self._decisions = set[str]()
        self._optimizers = WeakSet[torch.optim.Optimizer]()
        self._have_stepped = set[WeakIdRef]()
        self._traced: int | None = None
        """The step whose operations are recorded."""
        self._graphs = 0

    def move_to(self, path: Path, after_last_step: Callable[[], object]) -> None:
        """Write the record of this process to this file, and call `after_last_step` after the last step."""
        self._file, self._process, self._after_last_step = path.open("w", buffering=1), os.getpid(), after_last_step
        # a null device ends the rehearsal if a child process allocates memory
        os.environ["NULL_CUDA_REHEARSAL"] = f"{self._process} {self._file.fileno()}"

    def __enter__(self) -> None:
        # Do not initialize CUDA here. That would change the device of a DeviceMesh, and the script could not fork.
        torch.cuda._lazy_call(
            lambda: torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]
        )
        # so that Dynamo does not trace them if the script compiles its optimizer's step
        register_optimizer_step_pre_hook(torch.compiler.disable(self._before_optimizer_step))
        register_optimizer_step_post_hook(torch.compiler.disable(self._after_optimizer_step))
        note_batches()
        construct = torch.optim.Optimizer.__init__

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign,assignment]
        exit_at_once = os._exit

        def exit_after_record(status: int) -> NoReturn:
            self.__exit__(None, None, None)
            exit_at_once(status)

        os._exit = exit_after_record

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if os.getpid() != self._process:
            return
        if self._first_step_is_complete or (self._stepped and _message(error) is None):
            self._end_step()
        _add(self._reading, self._peaks.read())
        self._write_end(self._reading, error)

    def _write_end(self, after_last_step: Usages, error: BaseException | None = None, *, stopped: bool = False) -> None:
        _add(self._run, after_last_step)
        self.has_read(END)
        message = _message(error)
        idle = message is None and any(getattr(parameter(), "is_cuda", False) for parameter in self._idle())
        conditions = {
            "cuDNN's workspaces for convolutions are not counted. If memory is short, torch selects an algorithm with "
            "a smaller workspace": used_convolutions(),
            "workspaces of cuFFT, cuSOLVER and cuSPARSE are not counted: training needs more memory": used_workspaces(),
            "managed memory (a paged optimizer's state) is counted as host memory": used_memory(managed=True) > 0,
        }
        facts = {
            "error": message,
            "needs_ranks": _ranks_needed(error),
            "lines": lines_of(reversed([*traceback.walk_tb(error.__traceback__)])) if error else "",
            "by_memory": _is_out_of_memory(error),
            "checks_for_nan": _script_contains(r"isnan|isinf|isfinite"),
            "idle": idle,
            "stopped": stopped,
            "devices": [{"device": at, **asdict(each)} for at, each in self._run.items() if each.reserved_bytes],
            "notes": [note for note, applies in conditions.items() if applies],
        }
        self.write("end", {**asdict(_fullest(after_last_step)), **facts})
        self._process = 0  # the record is complete

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Within the context, optimizer steps and errors are those of a search, and peaks are not counted."""
        self._searching = True
        try:
            yield
        finally:
            self._searching = False
            self._peaks.read()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._searching or self._stepping not in (None, optimizer):
            return
        self._stepping = optimizer

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._searching:
            return
        parameter = _parameter_of(optimizer)
        if optimizer is not self._stepping:  # another consists of this one
            self._have_stepped.add(parameter)
            return
        self._stepping, usage = None, self._peaks.read()
        ended, traced = self.steps, self._traced
        self._have_stepped.add(parameter)
        gone = any(each() is None for each in self._stepped)  # the script trains a new model in each step
        # an optimizer that did not exist replaces the one that had its parameters; otherwise, both take a step
        again = optimizer in self._stepped_by or (parameter in self._stepped and optimizer not in self._exist)
        if gone or again:
            self._all = None if gone else (self._stepped, len(self._stepped_by))
            self._end_step()
        _add(self._reading, usage)
        if not self._stepped:
            self._exist = WeakSet(self._optimizers)
        self._stepped = self._stepped | {parameter}
        self._stepped_by.add(optimizer)
        if (self._stepped, len(self._stepped_by)) == self._all:
            self._end_step()
        # Do not trace the first step, which allocates the optimizer state and compiles. If a traced step has compiled,
        # trace another one, but not the next: torch's observer corrupts memory if it is replaced inside a hook.
        if self._traced is traced is None and (self.steps > ended or self._first_step_is_complete):
            if devices := self._run | self._reading:
                self.write("held", {"held_bytes": memory_by_holder(max(devices, key=torch.cuda.memory_allocated))})
            self._traced, self._graphs = self._current_step, _compiled_graphs()
            RECORDER.start()

    @property
    def _current_step(self) -> int:
        return self.steps + 1 + self._first_step_is_complete

    @property
    def _first_step_is_complete(self) -> bool:
        """True if every optimizer has stepped, but the end of the first step is not recorded yet."""
        return self._all is None and bool(self._stepped) and not self._idle()

    def _idle(self) -> set[WeakIdRef]:
        """Return the first parameters of optimizers that have taken no step."""
        return set(map(_parameter_of, self._optimizers)) - self._have_stepped

    def _end_step(self) -> None:
        self.steps += 1
        self.write("step", {"step": self.steps, **asdict(_fullest(self._reading))})
        self.has_read(END_OF_STEP)
        if self.steps == self._traced:
            self.write("work", {"step": self.steps, "work": RECORDER.stop()})
            self._traced = self.steps if _compiled_graphs() == self._graphs else None
        _add(self._run, self._reading)
        self._reading, self._stepped, self._stepped_by = {}, set(), WeakSet()
        if self.steps == self._most_steps:
            self._write_end({}, stopped=True)
            flush()
            self._after_last_step()

    def _look_ahead_and_exit(self) -> NoReturn:
        """Record whether later data is larger, and end this process. The script cannot catch this."""
        if larger := larger_batch(self.steps):
            self._file.write(json.dumps({"kind": "later", **larger}) + "\n")
        os._exit(0)

    def _out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        """Record an out-of-memory error. The allocator calls this on the thread whose request failed."""
        frames = _stack(sys._getframe().f_back) or _stack(sys._current_frames()[threading.main_thread().ident or 0])
        node = torch._C._current_autograd_node()
        place = next((each for each in frames if not each[0].startswith(_TORCH)), frames[-1])
        stats = torch.cuda.memory_stats(device)
        self.write(
            "out_of_memory",
            {
                "step": self._current_step,
                "in_search": self._searching,
                "has_optimizer": bool(self._optimizers),
                "device": device,
                "file": place[0],
                "line": place[1],
                "source": linecache.getline(*place).strip(),
                "operation": node.name() if node else linecache.getline(*frames[0]).strip(),
                "asked_bytes": asked,
                "free_bytes": free,
                "allowed_bytes": total,
                "allocated_bytes": stats["allocated_bytes.all.current"],
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "held_bytes": memory_by_holder(device),
            },
        )

    def has_read(self, place: str, is_check: bool = False) -> None:
        """Record that the script reads an unknown value, and how many bytes it has allocated until then."""
        self._reads += 1
        if self._reads < MOST_READS or not place[-1].isdecimal():
            self.write("read", {"at": place, "total_bytes": _total_bytes(), "is_check": is_check})

    def has_decided(self, place: str) -> None:
        """Record that an unknown value that is read at this place may decide something, also in a forked process."""
        if place not in self._decisions:
            self._decisions.add(place)
            with suppress(OSError):
                self._file.write(json.dumps({"kind": "decision", "place": place}) + "\n")

    def routes(self, place: str) -> None:
        """Record that the script counts the tokens of experts at this place."""
        self.write("routing", {"place": place})

    def write(self, kind: str, figures: Mapping[str, Any]) -> None:
        """Write a line, except in processes that the script forked."""
        if os.getpid() == self._process:
            with suppress(OSError):
                self._file.write(json.dumps({"kind": kind, **figures}) + "\n")


def _script_contains(pattern: str) -> bool:
    """Return True if the source of the script, or of a module outside of libraries, contains a pattern."""
    modules = (getattr(each, "__dict__", {}) for each in [*sys.modules.values()])  # does not import lazy ones
    files = {*sys.argv[:1], *(str(each.get("__file__")) for each in modules)}
    own = (
        Path(each)
        for each in files
        if each.endswith(".py") and not each.startswith((_PACKAGE, *LIBRARIES, *folders_with_adapters()))
    )
    return any(re.search(pattern, path.read_text(errors="replace")) for path in own if path.exists())


def _total_bytes() -> int:
    """Return how many bytes the allocator has given to the script so far, on all devices."""
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return sum(torch._C._cuda_memoryStats(each)["allocated_bytes"]["all"]["allocated"] for each in range(devices))


def _compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def _parameter_of(optimizer: torch.optim.Optimizer) -> WeakIdRef:
    """Return an optimizer's first parameter, which identifies it even if the script constructs it anew in each step."""
    return WeakIdRef(next((each for group in optimizer.param_groups for each in group["params"]), optimizer))


def flush() -> None:
    """Flush standard output and error, unless the script closed them."""
    for stream in sys.stdout, sys.stderr:
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _stack(frame: FrameType | None) -> list[tuple[str, int]]:
    """Return file and line of each frame outside this package, innermost first."""
    frames = traceback.walk_stack(frame) if frame else ()
    found = ((each.f_code.co_filename, line) for each, line in frames)
    return [each for each in found if not each[0].startswith((_PACKAGE, "<"))]


def _message(error: BaseException | None) -> str | None:
    """Return the first line with text of the error; None if the script ended with success."""
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"exit status {error.code}"
    if error is None:
        return None
    line = next((each for each in str(error).splitlines() if re.search(r"\w", each)), "")
    return f"{type(error).__name__}: " + re.split(r"\. GPU \d+ has", line)[0]  # torch's out-of-memory errors are long


def _ranks_needed(error: BaseException | None) -> list[int]:
    """Return the ranks of the process group in which this rank cannot run alone."""
    if NEEDS_OTHERS not in str(error):
        return []
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    groups = [value for at, _ in frames for value in at.f_locals.values() if isinstance(value, dist.ProcessGroup)]
    return dist.get_process_group_ranks(groups[-1]) if groups else []


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for an out-of-memory error, and for an error that was caused by one or raised while handling one."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None


@dataclass
class Usage:
    """The peaks of a device in a period of time."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    flushes: int = 0
    """How often the allocator released its cache and tried again."""

    def add(self, other: Usage) -> None:
        """Extend the period by that of `other`."""
        self.allocated_bytes = max(self.allocated_bytes, other.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, other.reserved_bytes)
        self.flushes += other.flushes


Usages = dict[int, Usage]
"""The usage of each device."""


def _add(total: Usages, other: Usages) -> None:
    for device, usage in other.items():
        total.setdefault(device, Usage()).add(usage)


def _fullest(usages: Usages) -> Usage:
    """Return the peaks of the device that reserved the most memory, and the flushes of all devices."""
    most = max(usages.values(), key=attrgetter("reserved_bytes"), default=Usage())
    return replace(most, flushes=sum(each.flushes for each in usages.values()))


class Peaks:
    """Wraps torch's functions for peaks, so that the script and the recorder can reset them independently."""

    def __init__(self) -> None:
        self._statistics, self._reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self._scripts: dict[int, dict[str, Any]] = {}
        """The script's peaks at the recorder's last reset."""
        self._ours: Usages = {}
        """The recorder's peaks at the script's last reset."""
        self._flushes: dict[int, int] = {}
        torch._C._cuda_memoryStats = self._statistics_of_script
        torch._C._cuda_resetPeakMemoryStats = self._reset_by_script

    def read(self) -> Usages:
        """Return the peaks since the last call."""
        devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        return {device: self._read(device) for device in range(devices)}

    def _read(self, device: int) -> Usage:
        statistics = self._statistics(device)
        usage = self._ours.pop(device, Usage())
        usage.add(_peaks_of(statistics))
        retries = int(statistics["num_alloc_retries"])
        usage.flushes = max(retries - self._flushes.get(device, 0), 0)
        self._flushes[device] = retries
        self._scripts[device] = self._statistics_of_script(device)
        self._reset(device)
        return usage

    def _statistics_of_script(self, device: int) -> dict[str, Any]:
        statistics: dict[str, Any] = self._statistics(device)
        _raise_peaks(statistics, self._scripts.get(device, {}))
        return statistics

    def _reset_by_script(self, device: int) -> None:
        self._ours.setdefault(device, Usage()).add(_peaks_of(self._statistics(device)))
        self._scripts.pop(device, None)
        self._reset(device)


def _peaks_of(statistics: dict[str, Any]) -> Usage:
    return Usage(*(statistics[each]["all"]["peak"] for each in ("allocated_bytes", "reserved_bytes")))


def _raise_peaks(statistics: dict[str, Any], to: dict[str, Any]) -> None:
    for name, value in to.items():
        if isinstance(value, dict):
            _raise_peaks(statistics[name], value)
        elif name == "peak":
            statistics[name] = max(statistics[name], value)
