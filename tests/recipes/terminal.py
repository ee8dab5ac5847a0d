"""Start `tune run` as a terminal does, in a new session; read its output and send signals while it runs."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked_commands import Forked

STARTS_S = 200.0
"""Ranks share the cores with other processes."""


@dataclass
class Started:
    """A running `tune run` in a new session, and its output so far."""

    process: Forked
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def when(self, condition: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """Return the processes of the command other than the launcher."""
        return [pid for pid in self.process.processes() if pid != self.process.pid]


@contextmanager
def run_in_terminal(folder: Path, arguments: Sequence[str], **variables: str) -> Iterator[Started]:
    """Start `tune run` with these extra environment variables; see tests/forked_commands.py."""
    command = [str(Path(sys.executable).parent / "tune"), "run", *arguments]
    started = Started(Forked(command, folder, **variables))
    reader = threading.Thread(target=started.read, daemon=True)
    reader.start()
    try:
        yield started
    finally:
        started.process.end()
        started.process.wait(10)
        reader.join(10)
