"""The journal of a run: `adaptive_steps.jsonl` has its logged steps, `adaptive_events.jsonl` everything else.

Both files are only appended to. A resumed run repeats the steps since its checkpoint; the reader keeps the later ones.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.engine.governor import Change

logger = logging.getLogger(__name__)

EVENTS_FILE = "adaptive_events.jsonl"
STEPS_FILE = "adaptive_steps.jsonl"
ANSWERS_FILE = "adaptive_answers.jsonl"

START = "start"
SEARCH = "search"
SCHEDULE = "schedule"
EPOCH = "epoch"
"""Kinds of event, in addition to those of a Change."""

Record = dict[str, Any]
"""A line that was read back. Its `step` is a whole number and its `kind`, if any, a string; other values may be
anything."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that is not a Change. Fields that are None are left out of the file.

    From `unit` on, the fields mean what they mean in a Change; `before` and `after` may also be batch sizes.
    """

    kind: str
    step: int
    """The step in which it happened, or after which."""
    stage: str | None = None
    reason: str
    """The line in the log."""
    unit: str | None = None
    before: int | None = None
    after: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None


class Journal:
    """Appends lines to the two files.

    Nothing here raises, since a run is worth more than its journal. The first line that cannot be written is reported;
    later ones are still tried, because a full disk may have room again. Without a directory, as on all ranks but the
    first, nothing is kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._incomplete = False
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._report(directory, error)

    def start(self, steps_done: int) -> None:
        """Training starts after so many steps: later ones in the files are void."""
        reason = f"training starts after step {steps_done}" if steps_done else "training starts"
        self.event(Event(kind=START, step=steps_done, reason=reason))
        if self._directory is not None and os.path.isfile(self._directory / STEPS_FILE):
            self._append(STEPS_FILE, {"kind": START, "step": steps_done})

    def event(self, event: Event | Change) -> None:
        self._append(EVENTS_FILE, {name: value for name, value in asdict(event).items() if value is not None})

    def step(self, step: int, figures: Mapping[str, object]) -> None:
        self._append(STEPS_FILE, {"step": step, **figures})

    def answers(self, step: int, prompt: str, answers: Sequence[str], rewards: Sequence[float]) -> None:
        self._append(ANSWERS_FILE, {"step": step, "prompt": prompt, "answers": answers, "rewards": rewards})

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        try:
            _append_line(self._directory / name, json.dumps({"time": round(time.time(), 3), **record}))
        except Exception as error:  # noqa: BLE001 - a figure of any type, or any failure of the disk
            self._report(self._directory / name, error)

    def _report(self, path: Path | None, error: Exception) -> None:
        if not self._incomplete:
            logger.warning("the record of this run is incomplete: %s: %s; training continues", path, reason(error))
        self._incomplete = True


def _append_line(path: Path, line: str) -> None:
    """Writes the line in one call, so that a crash cannot damage earlier ones. Raises OSError."""
    # Opened for every line, so that a deleted file is noticed. Without blocking, in case a pipe is in its place.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = b"\n" * torn + f"{line}\n".encode()
        if os.write(descriptor, content) < len(content):
            raise OSError("no room for a whole line")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Timeline:
    """What happened in a run, in the order of its steps, across resumes."""

    steps: tuple[Record, ...]
    events: tuple[Record, ...]

    def series(self, *figures: str) -> tuple[list[Any], ...]:
        """Step numbers, then the values of each figure, for the steps that have all of them."""
        known = [record for record in self.steps if all(is_number(record.get(figure)) for figure in figures)]
        return tuple([record[name] for record in known] for name in ("step", *figures))


def read_timeline(directory: Path) -> Timeline:
    """The run in this directory. Never raises: lines that cannot be read are left out, with a warning."""
    steps: list[Record] = []
    for line in _read(directory / STEPS_FILE):
        starts = line.get("kind") == START
        # In the order of the file, whatever the clocks said: a step that comes again was lost, with all later ones.
        while steps and steps[-1]["step"] > line["step"] - (not starts):
            steps.pop()
        if not starts:
            steps.append(line)
    events: list[Record] = []
    for line in _read(directory / EVENTS_FILE):
        if line.get("kind") == START:
            events = [event for event in events if _lasts(event, line["step"])]
        events.append(line)
    return Timeline(tuple(steps), tuple(events))


def _lasts(event: Record, steps_done: int) -> bool:
    """Whether an event still counts when training starts after so many steps. After none, it is another run."""
    if event.get("kind") in (EPOCH, SCHEDULE):  # recorded again when the epoch begins again
        return bool(event["step"] < steps_done)
    return steps_done > 0 and event["step"] <= steps_done


def _read(path: Path) -> Iterator[Record]:
    try:
        if not path.is_file() and path.exists():  # opening a pipe would wait
            raise OSError("not a file")
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, reason(error))
        return
    records = [record for line in lines if (record := _record_in(line)) is not None]
    if missing := len(lines) - len(records):
        logger.warning("%s: %d of %d lines cannot be read and are skipped", path, missing, len(lines))
    yield from records


def _record_in(line: bytes) -> Record | None:
    """The record in a line; None if no run has written it. A crash may have left a line unfinished."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # a line can nest deeper than Python's stack
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind", ""), str):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**63 else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a finite number, small enough to draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
