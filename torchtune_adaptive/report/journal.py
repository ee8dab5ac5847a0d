"""The journal of a run: `adaptive_steps.jsonl` has the logged steps, `adaptive_events.jsonl` has all other events.

Lines are only appended. A resumed run repeats the steps since its checkpoint, so these steps have several lines. The
reader uses the last one.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
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
VALIDATION = "validation"
"""Kinds of event, in addition to those of `governor.Change`."""

Record = dict[str, Any]
"""A parsed line. Its `step` is an integer, and `kind` and `stage` are strings if present. Other values may be wrong."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that is not a Change of the limit. Fields that are None are omitted from the file. The fields that a
    Change also has mean the same. In addition, `before` and `after` may be batch sizes."""

    kind: str
    step: int
    """The step in which, or after which, it happened."""
    stage: str | None = None
    reason: str
    """The log line."""
    unit: str | None = None
    before: int | None = None
    after: int | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    val_loss: float | None = None
    result: Mapping[str, Any] | None = None
    """The result of a search, with its probes."""


class Journal:
    """Appends lines to the files of the journal, on the rank that has a directory, rank 0.

    No method raises an error, because a failed write must not end the run. Only the first failure is logged. Each later
    line is tried, because a full disk may have space again.
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
        """Record that training starts after `steps_done` steps. Readers ignore later steps in lines before this one."""
        reason = f"training starts after step {steps_done}" if steps_done else "training starts"
        self.event(Event(kind=START, step=steps_done, reason=reason))
        if self._directory is not None and os.path.isfile(self._directory / STEPS_FILE):
            self._append(STEPS_FILE, {"kind": START, "step": steps_done})

    def event(self, event: Event | Change) -> None:
        """Append an event."""
        self._append(EVENTS_FILE, {name: value for name, value in asdict(event).items() if value is not None})

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append the metrics of a step."""
        self._append(STEPS_FILE, {"step": step, **metrics})

    def answers(self, step: int, prompt: str, answers: Sequence[str], rewards: Sequence[float]) -> None:
        """Append generated answers and their rewards."""
        self._append(ANSWERS_FILE, {"step": step, "prompt": prompt, "answers": answers, "rewards": rewards})

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        try:
            # without NaN and infinity, which JSON does not have
            values = {key: value for key, value in record.items() if not isinstance(value, float) or isfinite(value)}
            _append_line(self._directory / name, json.dumps({"time": round(time.time(), 3), **values}))
        except Exception as error:  # noqa: BLE001 - a metric may have any type, and a disk may fail in any way
            self._report(self._directory / name, error)

    def _report(self, path: Path | None, error: Exception) -> None:
        if not self._incomplete:
            logger.warning("the record of this run is incomplete: %s: %s; training continues", path, reason(error))
        self._incomplete = True


def _append_line(path: Path, line: str) -> None:
    """Append a line with a single write, so that a crash cannot damage earlier lines. Raises OSError."""
    # Opens the file for every line, because it may have been deleted.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        ends_within_a_line = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = b"\n" * ends_within_a_line + f"{line}\n".encode()
        if os.write(descriptor, content) < len(content):
            raise OSError("the line was only partly written")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Timeline:
    """The steps and events of a run in order, each once, even if the run has resumed."""

    steps: tuple[Record, ...]
    events: tuple[Record, ...]

    def series(self, *metrics: str) -> tuple[list[Any], ...]:
        """Return the step numbers and the values of each metric, for all steps that have all of these metrics."""
        complete = [record for record in self.steps if all(is_number(record.get(metric)) for metric in metrics)]
        return tuple([record[name] for record in complete] for name in ("step", *metrics))


def read_timeline(directory: Path) -> Timeline:
    """Read the journal in a directory. If there is none, the result is empty. Skips lines that cannot be parsed, and
    logs a warning. Raises OSError if a file cannot be read."""
    steps: list[Record] = []
    for line in _read(directory / STEPS_FILE):
        starts = line.get("kind") == START
        # The order of lines decides, not the time: a repeated step removes its earlier line and those of later steps.
        while steps and steps[-1]["step"] > line["step"] - (not starts):
            steps.pop()
        if not starts:
            steps.append(line)
    events: list[Record] = []
    for line in _read(directory / EVENTS_FILE):
        if line.get("kind") == START:
            events = [event for event in events if _remains_valid(event, line["step"])]
        events.append(line)
    return Timeline(tuple(steps), tuple(events))


def _remains_valid(event: Record, steps_done: int) -> bool:
    """Return True if an event is still part of the run when training starts after `steps_done` steps. If `steps_done`
    is 0, another run begins, and no earlier event is part of it."""
    if event.get("kind") in (EPOCH, SCHEDULE):  # recorded again when the epoch restarts
        return bool(event["step"] < steps_done)
    return steps_done > 0 and event["step"] <= steps_done


def _read(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    records = [record for line in lines if (record := _record_in(line)) is not None]
    if missing := len(lines) - len(records):
        logger.warning("%s: %d of %d lines cannot be read and are skipped", path, missing, len(lines))
    yield from records


def _record_in(line: bytes) -> Record | None:
    """Parse a line. Return None if it is incomplete, for example after a crash, or not a Record."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # deeply nested JSON raises RecursionError
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(key, ""), str) for key in ("kind", "stage")):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**63 else None


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite number that matplotlib can draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
