"""Run commands in processes that are forked from one that has imported torch."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

INTERRUPT_S = 10
"""A script that is interrupted but does not end is killed after this time."""
_ERROR_LINE = re.compile("error|exception|fail|abort|cannot|invalid|refuse", re.IGNORECASE)
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Let the operating system kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)


class _Server:
    """A process that imports torch once, and forks a process for each command (see `run_script.serve`)."""

    def __init__(self, environ: Mapping[str, str], shown: int, errors: int) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = 0
        with theirs:
            # -P: do not put the current folder on the path; `run_script.run` adds the script's folder
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpu_rehearsal.processes.run_script", str(theirs.fileno())],
                env=environ, stdin=subprocess.DEVNULL, stdout=shown, stderr=errors, pass_fds=[theirs.fileno()],
                preexec_fn=end_with_parent, process_group=0,
            )  # fmt: skip

    def start(self, request: Mapping[str, Any], shown: int, errors: int) -> None:
        """Fork a process that runs a command with this output and standard error."""
        self._channel.settimeout(None)
        with tempfile.TemporaryFile() as file:  # a message of the channel cannot be long
            file.write(json.dumps(request).encode())
            file.seek(0)
            with suppress(ConnectionError):  # if the server has ended, `wait` returns its status
                socket.send_fds(self._channel, [b"start"], [file.fileno(), shown, errors])
        self._pid = int(self._receive() or 0)

    def wait(self, seconds: float | None = None) -> dict[str, Any]:
        """Return the command's exit status, and the CPU seconds of the command and, for the first one, of imports."""
        self._channel.settimeout(seconds)
        if answer := self._receive():
            self._pid = 0
        return json.loads(answer) if answer else {"status": self._process.wait(), "cpu_s": 0.0}

    def _receive(self) -> bytes:
        """Return an answer of the server; b"" if it has ended."""
        with suppress(ConnectionError):
            return self._channel.recv(256)
        return b""

    def signal(self, number: int) -> None:
        """Send a signal to the running command and to the processes that it has started."""
        for send in (os.killpg, os.kill) if self._pid else ():  # a script can leave its process group
            with suppress(ProcessLookupError):
                return send(self._pid, number)
        return None

    def close(self) -> None:
        """End the server, and the command if it runs."""
        self.signal(signal.SIGKILL)
        self._channel.close()
        self._process.kill()
        self._process.wait()

    @property
    def runs(self) -> bool:
        """True if the server can start another command."""
        return self._process.poll() is None


_Place = tuple[int, int, str, list[tuple[str, str]]]
_kept: list[tuple[_Place, _Server]] = []
"""The server of the last command, and where it can run another: the process and the thread, because the server
ends with the thread that started it, the folder and the environment."""


def execute(
    request: Mapping[str, Any], environ: Mapping[str, str], timeout: float | None, output: IO[Any] | None = None
) -> dict[str, Any]:
    """Run a command (see `run_script.serve`) until it ends. The output is copied to `output`, or to standard error.

    Return the exit status, CPU seconds, the last error, and whether Ctrl-C or the timeout (in seconds) ended it.
    """
    variables = sorted(each for each in environ.items() if not each[0].startswith("NULL_CUDA_"))
    where = os.getpid(), threading.get_native_id(), os.getcwd(), variables
    printed, shown = bytearray(), output.fileno() if output else 2
    reading, errors = os.pipe()
    copying = threading.Thread(target=_copy, args=(reading, os.dup(shown), printed), daemon=True)
    copying.start()
    server = None
    with interrupted_by_signals():
        try:
            server = _kept_server(where) or _Server(environ, shown, errors)
            server.start({**request, "environ": dict(environ)}, shown, errors)
            ended = _wait(server, timeout)
            if server.runs and not ended["interrupted"] and not _kept:
                _kept.append((where, server))
                server = None
        finally:
            if server is not None:
                server.close()
            os.close(errors)
            copying.join(1)
    return {**ended, "last_error": _last_error(printed.decode(errors="replace"))}


def _kept_server(where: _Place) -> _Server | None:
    """Return the kept server if it can run a command there. Close it if it belongs to this process, but cannot."""
    try:
        kept, server = _kept.pop()
    except IndexError:
        return None
    if kept == where and server.runs:
        return server
    if kept[0] == os.getpid():
        server.close()
    return None


def _wait(server: _Server, timeout: float | None) -> dict[str, Any]:
    """Wait for a command. A timeout or a second Ctrl-C kills it."""
    try:
        return {**server.wait(timeout), "interrupted": False}
    except TimeoutError:
        server.signal(signal.SIGKILL)
        return {**server.wait(), "interrupted": False, "timeout": timeout}
    except KeyboardInterrupt:
        server.signal(signal.SIGINT)
    with suppress(KeyboardInterrupt, TimeoutError):
        return {**server.wait(INTERRUPT_S), "interrupted": True}
    return {"status": -signal.SIGKILL, "cpu_s": 0.0, "interrupted": True}


def _copy(source: int, to: int, last: bytearray) -> None:
    """Copy the output of a script, keep the last 8 KiB in `last`, and close both files."""
    while part := os.read(source, 2**16):
        last += part
        del last[: -(2**13)]
        with suppress(OSError):
            os.write(to, part)
    os.close(source)
    os.close(to)


def _last_error(printed: str) -> str:
    """Return the text of a box at the end, or else the last line that looks like an error, or else the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if (box := re.search(r"╭[^\n]*\n([^╭]*)╰[^\n]*\s*$", printed)) is not None:
        return " ".join(box[1].replace("│", " ").split())
    return next((line for line in reversed(lines) if _ERROR_LINE.search(line)), "".join(lines[-1:]))


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Within the context, treat signals that would end this process as Ctrl-C."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only this one can handle signals
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
