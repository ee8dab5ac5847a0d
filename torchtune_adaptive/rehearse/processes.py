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
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

INTERRUPT_S = 10
"""A script that is interrupted but does not end is killed after this time."""
_ERROR_LINE = re.compile("error|exception|fail|abort|cannot|invalid|refuse", re.IGNORECASE)
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_CARD = "NULL_CUDA_"
"""Begins the variables of a null device, which may differ between commands that share imports."""


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
                [sys.executable, "-P", "-m", "torchtune_adaptive.rehearse.run_script", str(theirs.fileno())],
                env=environ, stdin=subprocess.DEVNULL, stdout=shown, stderr=errors, pass_fds=[theirs.fileno()],
                preexec_fn=end_with_parent, process_group=0,
            )  # fmt: skip

    def start(self, request: Mapping[str, Any], shown: int, errors: int) -> None:
        """Fork a process that runs a command with this output and standard error."""
        self._channel.settimeout(None)
        with suppress(ConnectionError):  # if the server has ended, `wait` returns its status
            socket.send_fds(self._channel, [json.dumps(request).encode()], [shown, errors])
        self._pid = int(self._receive() or 0)

    def wait(self, seconds: float | None = None) -> dict[str, Any]:
        """Return the command's exit status, and the CPU seconds of the command and, for the first one, of imports."""
        self._channel.settimeout(seconds)
        answer, self._pid = self._receive(), 0
        return json.loads(answer) if answer else {"status": self._process.wait(), "cpu_s": 0.0}

    def _receive(self) -> bytes:
        """Return an answer of the server; b"" if it has ended."""
        with suppress(ConnectionError):
            return self._channel.recv(256)
        return b""

    def signal(self, number: int) -> None:
        """Send a signal to the running command and to the processes that it has started."""
        with suppress(ProcessLookupError):
            if self._pid:
                os.killpg(self._pid, number)

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


_kept: dict[str, _Server] | None = None
"""Servers by their environment; None: each command has its own."""


def share_imports() -> None:
    """From now on, let all commands of this process that have the same environment share the imports of torch."""
    global _kept
    _kept = {}


def end_shared_imports() -> None:
    """End the processes whose imports were shared."""
    global _kept
    kept, _kept = _kept or {}, None
    for server in kept.values():
        server.close()


def execute(
    request: Mapping[str, Any], environ: Mapping[str, str], timeout: float | None, output: IO[Any] | None = None
) -> dict[str, Any]:
    """Run a command (see `run_script.serve`) until it ends. The output is copied to `output`, or to standard error.

    Return the exit status, CPU seconds, the last error, and whether Ctrl-C or the timeout (in seconds) ended it.
    """
    imported = json.dumps({name: environ[name] for name in sorted(environ) if not name.startswith(_CARD)})
    card = {name: environ[name] for name in environ if name.startswith(_CARD)}
    printed, shown = bytearray(), output.fileno() if output else 2
    reading, errors = os.pipe()
    copying = threading.Thread(target=_copy, args=(reading, shown, printed), daemon=True)
    copying.start()
    server = None
    with interrupted_by_signals():
        try:
            server = (_kept or {}).pop(imported, None) or _Server(environ, shown, errors)
            server.start({**request, "card": card, "current": os.getcwd()}, shown, errors)
            ended = _wait(server, timeout)
            if _kept is not None and server.runs and not ended["interrupted"]:
                _kept[imported], server = server, None
        finally:
            if server is not None:
                server.close()
            os.close(errors)
            copying.join(1)
    return {**ended, "last_error": _last_error(printed.decode(errors="replace"))}


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
    """Copy the output of a script, and keep the last 8 KiB in `last`."""
    while part := os.read(source, 2**16):
        last += part
        del last[: -(2**13)]
        with suppress(OSError):
            os.write(to, part)
    os.close(source)


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

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
