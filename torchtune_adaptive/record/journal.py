"""Writes the record of a run, and never ends the run over it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torchtune_adaptive.atomic_files import reason, replace_file
from torchtune_adaptive.limits.change import Change
from torchtune_adaptive.record.events import EVENTS_FILE, START, STEPS_FILE, Event
from torchtune_adaptive.record.timeline import Record, read_steps

logger = logging.getLogger(__name__)

MOST_STEPS = 50_000
"""Steps in the record, about 20 MB: when there are as many, about half of them go."""


class Journal:
    """Appends lines to the two files of a run.

    Nothing here raises. The first line that cannot be written is reported; later ones are still tried, since
    a full disk may have room again. However long a run is, its steps take no more than so much room, and reading them
    no more memory; events are as rare as changes of the limit.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._incomplete = False
        self._steps = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._tell(directory, error)

    def start(self, event: Event) -> None:
        """Training starts after `event.step`: what the files hold of later steps is void."""
        self.event(event)
        if _has_content(self._directory / STEPS_FILE):
            self._cut_back(event.step)

    def event(self, event: Event | Change) -> None:
        self._append(EVENTS_FILE, {name: value for name, value in asdict(event).items() if value is not None})

    def step(self, step: int, figures: Mapping[str, object]) -> None:
        self._append(STEPS_FILE, {"step": step, **figures})
        self._steps += 1
        if self._steps >= MOST_STEPS:
            self._thin_out()

    def _cut_back(self, steps_done: int) -> None:
        """Leaves each step in its file once. Where the file cannot be replaced, a line in it voids the later steps."""
        kept = [record for record in read_steps(self._directory) if record["step"] <= steps_done]
        self._steps = len(kept)
        try:
            self._replace_steps(kept)
        except OSError:
            self._append(STEPS_FILE, {"kind": START, "step": steps_done})

    def _thin_out(self) -> None:
        kept = spread_out(read_steps(self._directory), MOST_STEPS // 2)
        self._steps = MOST_STEPS // 2  # where it fails it is not tried again after every step
        try:
            self._replace_steps(kept)
            self._steps = len(kept)
        except OSError as error:
            self._tell(self._directory / STEPS_FILE, error)

    def _replace_steps(self, records: Iterable[Record]) -> None:
        replace_file(self._directory / STEPS_FILE, "".join(f"{json.dumps(record)}\n" for record in records).encode())

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        try:
            _append_line(self._directory / name, json.dumps({"time": round(time.time(), 3), **record}))
        except Exception as error:  # noqa: BLE001 - whatever it is, a run is worth more than a line about it
            self._tell(self._directory / name, error)

    def _tell(self, path: Path, error: Exception) -> None:
        if not self._incomplete:
            logger.warning("the record of this run is incomplete: %s: %s; training goes on", path, reason(error))
        self._incomplete = True


def spread_out(records: Sequence[Record], most: int) -> list[Record]:
    """About so many of the steps, the first and the last among them, as evenly as they are there."""
    if len(records) <= most:
        return list(records)
    *others, last = records
    apart = (last["step"] - records[0]["step"]) / most
    kept: list[Record] = []
    for record in others:
        if not kept or record["step"] - kept[-1]["step"] >= apart:
            kept.append(record)
    return [*kept, last]


def _append_line(path: Path, line: str) -> None:
    """The whole line at once, so that what was written before a crash stays readable. Raises OSError.

    The file is opened for every line: one that was deleted or moved away is noticed. Without waiting, because there may
    be a pipe in its place, and nobody who reads it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        content = f"{_line_break_if_torn(descriptor)}{line}\n".encode()
        if os.write(descriptor, content) < len(content):
            raise OSError("no room for a whole line")
    finally:
        os.close(descriptor)


def _line_break_if_torn(descriptor: int) -> str:
    """A line break, if the last line was left unfinished: it would swallow the next one."""
    size = os.fstat(descriptor).st_size
    return "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""


def _has_content(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False
