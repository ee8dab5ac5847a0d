"""Reads the record of a run back: its steps and events, as one story across resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.record.events import EVENTS_FILE, START, STEPS_FILE

Record = dict[str, Any]


@dataclass(frozen=True)
class Timeline:
    """What became of a run, in order of its steps."""

    steps: tuple[Record, ...]
    events: tuple[Record, ...]

    def series(self, figure: str) -> tuple[list[int], list[float]]:
        """Step numbers and values, where the figure was measured."""
        known = [record for record in self.steps if figure in record]
        return [record["step"] for record in known], [record[figure] for record in known]


def read_timeline(directory: Path) -> Timeline:
    """The run that is in this directory."""
    events = _lines(directory / EVENTS_FILE)
    starts = [event for event in events if event["kind"] == START]
    steps = {record["step"]: record for record in _lines(directory / STEPS_FILE) if _counts(record, starts)}
    return Timeline(
        tuple(steps[number] for number in sorted(steps)), tuple(event for event in events if _counts(event, starts))
    )


def _counts(record: Record, starts: Sequence[Record]) -> bool:
    """Whether it is part of the run: not of another one before it, nor of steps that were lost and trained again."""
    later = [start["step"] for start in starts if start["time"] > record["time"]]
    return 0 not in later and all(record["step"] <= step for step in later)


def _lines(path: Path) -> list[Record]:
    """Every whole line; a crash may have left the last one unfinished."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
