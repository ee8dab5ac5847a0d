"""Every 10 seconds, the command writes to standard error which rehearsals run, and for how long."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EVERY_S = 10
_folder: Path | None = None
"""A file for each process that rehearses: what it rehearses, and the folder of the record. None: nothing is shown."""
_case = ""
"""Which case this worker rehearses."""


def set_case(text: str) -> None:
    """Name the case that this process rehearses next."""
    global _case
    _case = text


@contextmanager
def shown(what: str, record: Path) -> Iterator[None]:
    """Within the context, progress lines have this rehearsal, with the step from its record."""
    if _folder is None:
        yield
        return
    file = _folder / str(os.getpid())
    file.write_text("\n".join([", ".join(filter(None, [_case, what])), str(record)]))
    yield
    file.unlink(missing_ok=True)


@contextmanager
def progress_lines() -> Iterator[None]:
    """Within the context, write a line every 10 seconds."""
    global _folder
    ended = threading.Event()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _folder = Path(folder)
        clock = threading.Thread(target=_write_lines, args=(_folder, ended), daemon=True)
        clock.start()
        try:
            yield
        finally:
            _folder = None
            ended.set()
            clock.join()


def _write_lines(folder: Path, ended: threading.Event) -> None:
    while not ended.wait(EVERY_S):
        running = []
        for file in sorted(folder.iterdir()):
            with suppress(OSError, ValueError):  # the rehearsal has just ended
                running.append(_describe(file))
        # not print: a process that is forked meanwhile would inherit the lock of sys.stderr
        with suppress(OSError):  # the pipe is closed
            os.write(2, f"rehearse: {'; '.join(running) or 'preparing'}\n".encode(errors="replace"))


def _describe(file: Path) -> str:
    """Return what a process rehearses, its step, and the seconds since the start."""
    what, folder = file.read_text().split("\n")
    records = (path.read_text(errors="replace") for path in Path(folder).iterdir() if path.name.isdecimal())
    record = max(records, key=len, default="")
    step = record.count('{"kind": "step"') + 1
    doing = "reads later batches" if '{"kind": "end"' in record else f"step {step}"
    return f"{what}, {doing}, {time.time() - file.stat().st_mtime:.0f} s"
