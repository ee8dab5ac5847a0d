"""Count file operations under output_dir inside a run, and send a signal at the requested operation.

Python reports every opened, renamed and removed file to its audit hooks. It does not report `fsync`, which is wrapped.
"""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tests.recipes.recorders import JsonLogger
from torchtune_adaptive.engine.probes import Prober
from torchtune_adaptive.engine.step import StepRunner

ORDER = "TORCHTUNE_ADAPTIVE_TEST_KILL"
START, TRAIN, TIME = "start", "train", "time"
"""Count file operations in output_dir since the start or since a step; or wait for milliseconds."""
PROBE, STEP = "probe", "step"
"""Count the probes of the search, or the steps of this process, once for each stage of a step."""
LAST_STEP, LAST_SAVE = "last-step", "last-save"
"""The last stage of the last step; and the operations of the save after it."""
KILL, TERM, INT, HUP, TWICE = "KILL", "TERM", "INT", "HUP", "INT INT"
"""Signals; two are sent one right after the other."""

DIR_FD_AT = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.symlink": 2, "os.mkdir": 2}
"""Position of the folder argument that the path of an event is relative to."""
PATH_AT = {"os.symlink": 1}
NAMES = {"os.remove": "unlink", "os.rmdir": "rmdir", "os.rename": "rename", "os.symlink": "link", "os.mkdir": "mkdir"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
HEARD_S = 0.3
"""Time for a signal to be handled and forwarded by a launcher."""


@dataclass(frozen=True)
class Point:
    """Where a run receives a signal: before the operation with this number, counted on rank 0."""

    stage: str
    at: int
    torn: bool = False
    """Write half of the data of this operation."""
    cut: bool = False
    """Simulate a power failure: unsynced files are empty afterwards."""
    rank: int = 0
    """The rank that receives the signal."""
    launcher: bool = False
    """Send the signal to the launcher instead of a rank."""
    blow: str = KILL

    def __str__(self) -> str:
        marks = "/torn" * self.torn + "/cut" * self.cut + f"/{self.blow}" * (self.blow != KILL)
        return f"{self.stage}:{self.at}{marks}{f'/rank{self.rank}' * (self.rank > 0)}{'/launcher' * self.launcher}"


@dataclass(frozen=True)
class Order:
    """Instructions for a run."""

    point: Point | None
    watched: str
    """The folder whose operations are counted."""
    notes: str
    """The folder for the log of the hook and the process IDs of the ranks."""
    after_step: int
    """The step after which `train` begins."""

    def struck_at(self) -> str:
        """Return where the hook struck; empty if the run ended before."""
        for path in sorted(Path(self.notes).glob("operations*")):
            for line in path.read_text().splitlines():
                if line.startswith("HIT "):
                    return line.removeprefix("HIT ")
        return ""


def write_order(order: Order) -> str:
    return json.dumps(asdict(order))


def read_order() -> Order | None:
    """Read the order of this process from its environment."""
    if ORDER not in os.environ:
        return None
    order = Order(**json.loads(os.environ[ORDER]))
    return replace(order, point=Point(**order.point) if isinstance(order.point, dict) else None)


class Trap:
    """Stays installed until its process ends."""

    def __init__(self, order: Order, rank: int) -> None:
        self._point, self._rank, self._after_step = order.point, rank, order.after_step
        self._watched, self._notes_folder = order.watched, Path(order.notes)
        self._stage, self._count, self._tears = START, 0, ""
        self._lock = threading.Lock()
        self._notes_folder.mkdir(parents=True, exist_ok=True)
        own_pid = self._notes_folder / f"pid{rank}"
        own_pid.write_text(str(os.getpid()))
        self._began_ns = own_pid.stat().st_mtime_ns  # by the clock of file times, which lags by some milliseconds
        self._synced = set[tuple[int, int]]()
        self._notes = os.open(self._notes_folder / f"operations{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def install(self) -> None:
        sys.addaudithook(self._audit)
        os.fsync = self._wrapped_fsync(os.fsync)  # type: ignore[assignment]
        io.open = builtins.open = self._wrapped_open(io.open)  # type: ignore[assignment]
        StepRunner.run = self._counting_calls(StepRunner.run, STEP)  # type: ignore[method-assign]
        Prober.exchange = self._counting_calls(Prober.exchange, PROBE)  # type: ignore[method-assign]
        point = self._point
        if point is not None and point.stage == TIME and point.rank == self._rank:
            timer = threading.Timer(point.at / 1000, self._strike, (f"after {point.at} ms", point))
            timer.daemon = True  # a run that ends earlier does not wait
            timer.start()

    def stepped(self, step: int) -> None:
        """Call this after a step has been logged."""
        self._note(f"step {step}")
        if self._stage == START and step > self._after_step:
            self._stage, self._count = TRAIN, 0

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            self._operation("write" if flags & WRITING else "read", path)
        elif event in NAMES:
            self._operation(NAMES[event], arguments[PATH_AT.get(event, 0)], arguments[DIR_FD_AT[event]])

    def _operation(self, name: str, path: Any, folder: int = -1) -> None:
        """Count an operation below the watched folder; strike if it is the requested one."""
        if not isinstance(path, str | bytes | os.PathLike):
            return
        where = os.fsdecode(path)
        if not os.path.isabs(where) and folder >= 0:
            where = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), where)
        where = os.path.abspath(where)
        if not f"{where}/".startswith(f"{self._watched}/"):
            return
        if name == "read" and (self._stage == TRAIN or os.path.isdir(where)):
            return
        point = self._point
        with self._lock:
            self._count += 1
            here = f"{self._stage}:{self._count} {name} {os.path.relpath(where, self._watched)}"
            self._note(here)
            hit = point is not None and self._rank == 0 and (point.stage, point.at) == (self._stage, self._count)
        if point is None or not hit:
            return
        if point.torn:
            self._tears = here
            return
        if point.cut:
            self._empty_what_is_not_synced()
        self._strike(here, point)

    def _counting_calls(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        calls = itertools.count(1)

        def counted(*args: Any, **options: Any) -> Any:
            point, call = self._point, next(calls)
            if point is not None and self._rank == 0 and (point.stage, point.at) == (stage, call):
                self._strike(f"{stage}:{call}", point)
            return function(*args, **options)

        return counted

    def _wrapped_fsync(self, fsync: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            self._operation("fsync", os.readlink(f"/proc/self/fd/{number}"))
            fsync(file)
            self._synced.add(inode(os.fstat(number)))

        return counted

    def _wrapped_open(self, open_: Callable[..., Any]) -> Callable[..., Any]:
        def torn_if_ordered(*args: Any, **options: Any) -> Any:
            file = open_(*args, **options)
            if not self._tears:
                return file
            here, self._tears = self._tears, ""
            return TornFile(file, lambda: self._strike(f"{here}, half of it", Point(TRAIN, 0, rank=self._rank)))

        return torn_if_ordered

    def _empty_what_is_not_synced(self) -> None:
        """Truncate unsynced files in checkpoint folders, by time of change, since copies keep the modification time."""
        for path in Path(self._watched).glob("*/**/*"):
            stat = path.lstat()
            if S_ISREG(stat.st_mode) and stat.st_ctime_ns >= self._began_ns and inode(stat) not in self._synced:
                os.truncate(path, 0)

    def _strike(self, where: str, point: Point) -> None:
        """Send the signal to the launcher, to this process, or to the rank that has to receive it."""
        self._note(f"HIT {where}")
        own = os.getppid() if point.launcher else os.getpid()
        other = self._notes_folder / f"pid{point.rank}"
        victim = own if point.launcher or point.rank == self._rank else int(other.read_text())
        for name in point.blow.split():
            os.kill(victim, signal.Signals[f"SIG{name}"])
        if point.blow != KILL:
            time.sleep(HEARD_S)

    def _note(self, line: str) -> None:
        os.write(self._notes, f"{line}\n".encode())


def inode(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class TornFile:
    """A file whose first write stops halfway."""

    def __init__(self, file: Any, kill: Callable[[], None]) -> None:
        self._file, self._kill_here = file, kill

    def write(self, content: Any) -> None:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        self._kill_here()

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_installed: list[Trap] = []


def install(order: Order | None, rank: int) -> None:
    if order is not None:
        _installed.append(Trap(order, rank))
        _installed[0].install()


class WatchedLogger(JsonLogger):
    """The metric logger of these runs: reports each step to the hook."""

    def log_dict(self, payload: Any, step: int) -> None:
        super().log_dict(payload, step)
        for trap in _installed:
            trap.stepped(step)
