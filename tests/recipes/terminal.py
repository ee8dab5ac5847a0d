"""Start `tune run` as a terminal does, in a new session; read its output and send signals while it runs."""

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked_commands import Forked
from tests.recipes.running import COMMAND_MARK, end_marked, environment, marked

STARTS_S = 200.0
"""Ranks share the cores with other processes."""


@dataclass
class Started:
    """A running `tune run` in a new session, and its output so far."""

    process: subprocess.Popen[str] | Forked
    mark: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
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
        """Return the processes of the command that have a rank."""
        if isinstance(self.process, Forked):
            return [pid for pid in self.process.processes() if pid != self.process.pid]
        found = []
        for pid in marked(COMMAND_MARK, self.mark):
            with suppress(OSError):  # ended in the meantime
                found += [pid] * (b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes())
        return found

    def end(self) -> None:
        """Kill the command and all its processes."""
        if isinstance(self.process, Forked):
            self.process.end()
        else:
            end_marked(COMMAND_MARK, self.mark)


@contextmanager
def run_in_terminal(
    folder: Path, arguments: Sequence[str], *, forked: bool = False, **variables: str
) -> Iterator[Started]:
    """Start `tune run` with these extra environment variables; with `forked`, see tests/forked_commands.py."""
    command = [str(Path(sys.executable).parent / "tune"), "run", *arguments]
    started = Started(Forked(command, folder, **variables)) if forked else _of_its_own(command, folder, **variables)
    reader = threading.Thread(target=started.read, daemon=True)
    reader.start()
    try:
        yield started
    finally:
        started.end()
        started.process.wait(10)
        reader.join(10)


def _of_its_own(command: Sequence[str], folder: Path, **variables: str) -> Started:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(), COMMAND_MARK: mark, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return Started(process, mark)
