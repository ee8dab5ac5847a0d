"""Reads the record of a run back: its steps and events, as one story across resumes."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.record.events import EPOCH, EVENTS_FILE, SCHEDULE, START, STEPS_FILE

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""A line of a record: it has a `step` and a `time`, and an event a `kind` too. Other values may be anything."""


@dataclass(frozen=True)
class Timeline:
    """What happened in a run, in the order of its steps."""

    steps: tuple[Record, ...]
    events: tuple[Record, ...]

    def series(self, *figures: str) -> tuple[list[Any], ...]:
        """Step numbers, then the values of each figure, where all of them were measured."""
        known = [record for record in self.steps if all(is_number(record.get(figure)) for figure in figures)]
        return tuple([record[name] for record in known] for name in ("step", *figures))


def read_timeline(directory: Path) -> Timeline:
    """The run that is in this directory. Never raises: what cannot be read is left out, and a line says so."""
    steps = read_steps(directory)
    events = _read(directory / EVENTS_FILE, lambda kind: isinstance(kind, str))
    return Timeline(tuple(steps), tuple(_events_that_count(events)))


def read_steps(directory: Path) -> list[Record]:
    """The logged steps of that run alone."""
    return _steps_that_count(_read(directory / STEPS_FILE, lambda kind: kind is None or kind == START))


def _steps_that_count(lines: Iterable[Record]) -> list[Record]:
    """The steps in the order in which they were written, whatever the machine's clock said: a step that comes again was
    lost with all that followed it, and trained again."""
    kept: list[Record] = []
    for line in lines:
        begins = line.get("kind") == START
        last_before = line["step"] if begins else line["step"] - 1
        while kept and kept[-1]["step"] > last_before:
            kept.pop()
        if not begins:
            kept.append(line)
    return kept


def _events_that_count(lines: Iterable[Record]) -> list[Record]:
    """All events but those of another run in the same place, or of steps that were lost."""
    kept: list[Record] = []
    for line in lines:
        if line["kind"] == START:
            kept = [event for event in kept if _lasts(event, line["step"])]
        kept.append(line)
    return kept


def _lasts(event: Record, steps_done: int) -> bool:
    """Whether it is part of the run that goes on after so many steps; after none, that is another run."""
    if event["kind"] in (EPOCH, SCHEDULE):  # told when an epoch begins: if that is next, it will be told again
        return bool(event["step"] < steps_done)
    return steps_done > 0 and event["step"] <= steps_done


def _read(path: Path, belongs: Callable[[object], bool]) -> list[Record]:
    """Every line that is a record of a kind that belongs there; a crash may have left some unfinished."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait
            raise OSError("not a file")
        with path.open("rb") as file:
            lines = [line for line in file if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, reason(error))
        return []
    records = [record for line in lines if (record := _record_of(line)) and belongs(record.get("kind"))]
    if missing := len(lines) - len(records):
        logger.warning("%s: %d of %d lines cannot be read and are left out", path, missing, len(lines))
    return records


def _record_of(line: bytes) -> Record | None:
    """The record in a line; None if no run has written it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # a line can nest deeper than Python's stack
        return None
    if not isinstance(record, dict) or not is_number(record.get("time")):
        return None
    step = record.get("step")
    return record if type(step) is int and is_number(step) and step >= 0 else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a finite number, small enough for a picture."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
