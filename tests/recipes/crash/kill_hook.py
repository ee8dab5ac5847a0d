"""Count file operations under output_dir inside a run, and kill the run at the requested operation.

Python reports every opened, renamed and removed file to its audit hooks. It does not report `fsync`, which is wrapped.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tests.recipes.crash.kill_points import KILL, PROBE, START, STEP, TIME, TRAIN, Order, Point
from tests.recipes.recorders import JsonLogger
from torchtune_adaptive.engine.probes import Prober
from torchtune_adaptive.engine.step import StepRunner

DIR_FD_AT = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.symlink": 2, "os.mkdir": 2}
"""Position of the folder argument that the path of an event is relative to."""
PATH_AT = {"os.symlink": 1}
NAMES = {"os.remove": "unlink", "os.rmdir": "rmdir", "os.rename": "rename", "os.symlink": "link", "os.mkdir": "mkdir"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
HEARD_S = 0.3
"""Time for a signal to be handled and forwarded by a launcher."""


class Trap:
    """Stays installed until its process ends."""

    def __init__(self, order: Order, rank: int) -> None:
        self._order, self._rank = order, rank
        self._stage, self._count = START, 0
        self._in_hook = threading.local()
        self._lock = threading.Lock()
        self._tears = ""
        order.notes_folder.mkdir(parents=True, exist_ok=True)
        own_pid = order.notes_folder / f"pid{rank}"
        own_pid.write_text(str(os.getpid()))
        self._began_ns = own_pid.stat().st_mtime_ns  # by the clock of file times, which lags by some milliseconds
        self._synced = set[tuple[int, int]]()
        self._notes = os.open(order.notes_folder / f"operations{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def install(self) -> None:
        sys.addaudithook(self._audit)
        os.fsync = self._wrapped_fsync(os.fsync)  # type: ignore[assignment]
        io.open = builtins.open = self._wrapped_open(io.open)  # type: ignore[assignment]
        StepRunner.run = self._counting_calls(StepRunner.run, STEP)  # type: ignore[method-assign]
        Prober.exchange = self._counting_calls(Prober.exchange, PROBE)  # type: ignore[method-assign]
        point = self._order.point
        if point is not None and point.stage == TIME and point.rank == self._rank:
            threading.Thread(target=self._strike_later, args=(point,), daemon=True).start()

    def stepped(self, step: int) -> None:
        """Call this after a step has been logged."""
        self._note(f"step {step}")
        if self._stage == START and step > self._order.after_step:
            self._stage, self._count = TRAIN, 0

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" and event not in NAMES:
            return
        if event == "open":
            path, _, flags = arguments
            writes = bool(flags & WRITING)
            self._operation("write" if writes else "read", path)
        else:
            path, folder = arguments[PATH_AT.get(event, 0)], arguments[DIR_FD_AT[event]]
            self._operation(NAMES[event], path, folder)

    def _operation(self, name: str, path: Any, folder: int = -1) -> bool:
        """Count an operation; return True if it is the one to write half of."""
        if getattr(self._in_hook, "busy", False) or not isinstance(path, str | bytes | os.PathLike):
            return False
        where = os.fsdecode(path)
        if not os.path.isabs(where) and folder >= 0:
            where = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), where)
        where = os.path.abspath(where)
        if not f"{where}/".startswith(f"{self._order.watched}/"):
            return False
        if name == "read" and (self._stage == TRAIN or os.path.isdir(where)):
            return False
        return self._count_one(f"{name} {os.path.relpath(where, self._order.watched)}")

    def _count_one(self, label: str) -> bool:
        with self._lock:
            self._count += 1
            point, here = self._order.point, f"{self._stage}:{self._count} {label}"
            hit = point is not None and self._rank == 0 and (point.stage, point.at) == (self._stage, self._count)
            self._note(here)
        if not hit or point is None:
            return False
        if point.torn:
            self._tears = here
            return True
        if point.cut:
            self._empty_what_is_not_synced()
        self._strike(here, point)
        return False

    def _counting_calls(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        calls = itertools.count(1)

        def counted(*args: Any, **options: Any) -> Any:
            point, call = self._order.point, next(calls)
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
            return TornFile(file, lambda: self._kill(f"{here}, half of it"))

        return torn_if_ordered

    def _empty_what_is_not_synced(self) -> None:
        """Truncate unsynced files in checkpoint folders, by time of change, since copies keep the modification time."""
        for path in Path(self._order.watched).glob("*/**/*"):
            stat = path.lstat()
            if S_ISREG(stat.st_mode) and stat.st_ctime_ns >= self._began_ns and inode(stat) not in self._synced:
                os.truncate(path, 0)

    def _strike_later(self, point: Point) -> None:
        time.sleep(point.at / 1000)
        self._strike(f"after {point.at / 1000:.3f} s", point)

    def _kill(self, where: str) -> None:
        """Kill this process."""
        self._strike(where, Point(TRAIN, 0, rank=self._rank))

    def _strike(self, where: str, point: Point) -> None:
        """Send the signal to this process, or to another one when this one reaches the point."""
        self._note(f"HIT {where}")
        os.kill(self._victim(point), signal.Signals[f"SIG{point.blow}"])
        if point.blow != KILL:
            time.sleep(HEARD_S)

    def _victim(self, point: Point) -> int:
        if point.launcher:
            return os.getppid()
        if point.rank == self._rank:
            return os.getpid()
        return int((self._order.notes_folder / f"pid{point.rank}").read_text())

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
