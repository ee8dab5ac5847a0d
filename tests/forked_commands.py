"""Run `tune run`, or another Python command, in processes forked from the server that forks ranks.

A new interpreter spends five seconds on imports, and a launcher with two ranks needs three interpreters. Use this
module to test a recipe under a launcher. Tests of import output, of /proc or of interpreter shutdown use
`running.run_command`.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.ranks import PATIENCE, started
from tests.recipes.running import Ended, environment, tune_run

ROOT = Path(__file__).parents[1]
FIRST_FREE = 3
"""The first file descriptor after stdin, stdout and stderr."""
STARTS_S = 200.0
"""Ranks share the cores with other processes."""


def run_forked(command: Sequence[str], *, cwd: Path, timeout_s: float, expect_no_leftovers: bool = False) -> Ended:
    """Run a command like `running.run_command`: kill all its processes at the end or after the timeout (given for an
    idle machine).

    With `expect_no_leftovers`, raise an error if the command leaves a process behind.
    """
    timeout_s *= PATIENCE
    process = Forked(command, cwd)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    left = process.end()
    if status is None:
        raise AssertionError(f"still running after {timeout_s} s: {' '.join(command)}\n{process.output}")
    assert not (left and expect_no_leftovers), f"left running: {left}\n{process.output}"
    return Ended(status, process.output)


tune_run_forked = partial(tune_run, run=run_forked)


@contextmanager
def run_in_terminal(folder: Path, arguments: Sequence[str], **variables: str) -> Iterator[Forked]:
    """Start `tune run` as a terminal does, in a new session, with these extra environment variables."""
    started = Forked([str(Path(sys.executable).parent / "tune"), "run", *arguments], folder, **variables)
    try:
        yield started
    finally:
        started.end()


class Forked:
    """A running command and its output so far: the part of `subprocess.Popen` that tests use."""

    def __init__(self, command: Sequence[str], cwd: Path, **variables: str) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = started(_become, [*command], cwd, {**environment(), **variables}, sender)
        sender.close()
        self._pipe = os.readlink(f"/proc/self/fd/{receiver.fileno()}")
        self.lines: list[tuple[float, str]] = []
        """Times and lines of the output."""
        self._reader = threading.Thread(target=self._read, args=(os.dup(receiver.fileno()),), daemon=True)
        self._reader.start()
        receiver.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _read(self, pipe: int) -> None:
        with open(pipe, encoding="utf-8", errors="replace") as output:
            for line in output:
                self.lines.append((time.time(), line.rstrip()))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def when(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired([], timeout)
        return self.returncode

    def processes(self) -> list[int]:
        """Return the command and its child processes: all whose output goes into its pipe. They share no environment
        variable.
        """
        found = set()
        for outputs in Path("/proc").glob("[0-9]*/fd/[12]"):
            with suppress(OSError):  # ended in the meantime, or another user's
                if os.readlink(outputs) == self._pipe:
                    found.add(int(outputs.parts[2]))
        return sorted(found)

    def ranks(self) -> list[int]:
        """Return the processes of the command other than the launcher."""
        return [pid for pid in self.processes() if pid != self.pid]

    def end(self) -> list[int]:
        """Kill the command and all its child processes; return their process IDs."""
        left = self.processes()
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._process.join(10 * PATIENCE)
        self._reader.join(10 * PATIENCE)
        return left


def _become(command: list[str], cwd: Path, variables: Mapping[str, str], output: Connection) -> None:
    """In a process from the server: become this command, without repeating its imports."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    multiprocessing.current_process()._config.pop("daemon")  # type: ignore[attr-defined]  # loaders start processes
    multiprocessing.set_start_method(None, force=True)
    for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a user's process has none of these modules, or those of its own folder
    os.chdir(cwd)
    SubprocessHandler._popen = lambda handler, args, env: _ForkedRank(args, env, handler._stdout, handler._stderr)
    _exit_like_an_interpreter(lambda: _run(command, variables))


def _run(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run the script or module in this process."""
    os.environ.clear()
    os.environ.update(variables)
    words = [*command[command[0] == sys.executable :]]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        del words[0]
    is_module = words[0] == "-m"
    sys.orig_argv, sys.argv = [sys.executable, *words], words[is_module:]
    first = Path.cwd() if is_module else Path(words[0]).resolve().parent
    given = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(first), *given, *(path for path in sys.path if path not in ("", str(ROOT)))]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _exit_like_an_interpreter(work: Callable[[], None]) -> None:
    status = 0
    try:
        work()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:  # noqa: BLE001 - print it like an uncaught exception
        sys.excepthook(type(error), error, error.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


class _ForkedRank:
    """A rank as a launcher sees it, forked too."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: IO[str] | None, stderr: IO[str] | None):
        self.returncode: int | None = None
        leads, led = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._lead(led, stdout, stderr)
            _exit_like_an_interpreter(lambda: _run(args, env))
        os.close(led)
        os.read(leads, 1)  # from now on, a signal to the session reaches the rank
        os.close(leads)

    @staticmethod
    def _lead(led: int, *redirected: IO[str] | None) -> None:
        """Detach this process from the launcher: keep only its memory."""
        os.setsid()
        os.close(led)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        for stream, file in enumerate(redirected, 1):
            if file is not None:
                os.dup2(file.fileno(), stream)
        os.closerange(FIRST_FREE, os.sysconf("SC_OPEN_MAX"))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([], timeout or 0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
