"""The record of a run: `adaptive_steps.jsonl`, and `adaptive_events.jsonl` for what happened besides."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

EVENTS_FILE = "adaptive_events.jsonl"
STEPS_FILE = "adaptive_steps.jsonl"

START = "start"
SEARCH = "search"
RECOVERY = "recovery"
THRASHING = "thrashing"
TRIAL = "trial"
GROWTH = "growth"
SCHEDULE = "schedule"
"""Kinds of event. A recovery shrinks the limit; so does thrashing, on trial; growth takes a step of either back."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the record. What does not apply is None, and is left out of the file."""

    kind: str
    step: int
    """The step that it happened in, or after."""
    reason: str
    """The line of the log."""
    unit: str | None = None
    before: int | None = None
    """The size of the limit (or batch), in `unit`."""
    after: int | None = None
    ranks: tuple[int, ...] | None = None
    """Those that caused it."""
    rows: int | None = None
    """Of the microbatch that was too large."""
    length: int | None = None
    """Likewise: its longest sample."""
    peak_bytes: int | None = None
    """Of the rank that was fullest, of its own budget."""
    budget_bytes: int | None = None
    """Of that rank."""


class Journal:
    """Appends to the two files of a run. Whole lines, at once: what was written before a crash stays readable."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Kept open, since a line is written at every step; line by line, so that nothing waits in a buffer.
        self._events = (directory / EVENTS_FILE).open("a", buffering=1, encoding="utf-8")
        self._steps = (directory / STEPS_FILE).open("a", buffering=1, encoding="utf-8")

    def event(self, event: Event) -> None:
        _append(self._events, {name: value for name, value in asdict(event).items() if value is not None})

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        _append(self._steps, {"step": step, **figures})

    def close(self) -> None:
        self._events.close()
        self._steps.close()


def _append(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")
