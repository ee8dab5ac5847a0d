"""The journal of a run: `adaptive_steps.jsonl` has the logged steps, `adaptive_events.jsonl` has all other events.

Lines are only appended. A resumed run repeats the steps since its checkpoint, so these steps have several lines. The
last one counts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.engine.limit_policy import Change

logger = logging.getLogger(__name__)

EVENTS_FILE = "adaptive_events.jsonl"
STEPS_FILE = "adaptive_steps.jsonl"

START = "start"
SEARCH = "search"
EPOCH = "epoch"
VALIDATION = "validation"
"""Kinds of event, in addition to those of `limit_policy.Change`."""


class Journal:
    """Appends lines to the files of the journal, on the rank that has a directory, rank 0.

    No method raises an error, because a failed write must not end the run. Only the first failure is logged. Each later
    line is tried, because a full disk may have space again.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._incomplete = False

    def start(self, steps_done: int) -> None:
        """Record that training starts after `steps_done` steps. Readers ignore later steps in lines before this one."""
        reason = f"training starts after step {steps_done}" if steps_done else "training starts"
        self.record(START, steps_done, reason)
        if self._directory is not None and os.path.isfile(self._directory / STEPS_FILE):
            self._append(STEPS_FILE, {"kind": START, "step": steps_done})

    def event(self, change: Change) -> None:
        """Append a change of the limit."""
        self.record(**asdict(change))

    def record(self, kind: str, step: int, reason: str, **figures: object) -> None:
        """Append an event that has happened in or after this step, with its log line. Figures that a Change also has
        mean the same. Those that are None are omitted."""
        known = {name: value for name, value in figures.items() if value is not None}
        self._append(EVENTS_FILE, {"kind": kind, "step": step, "reason": reason, **known})

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append the metrics of a step."""
        self._append(STEPS_FILE, {"step": step, **metrics})

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        try:
            # without NaN and infinity, which JSON does not have
            values = {key: value for key, value in record.items() if not isinstance(value, float) or isfinite(value)}
            _append_line(self._directory / name, json.dumps({"time": round(time.time(), 3), **values}))
        except Exception as error:  # noqa: BLE001 - a metric may have any type, and a disk may fail in any way
            if not self._incomplete:
                line = "the record of this run is incomplete: %s: %s; training continues"
                logger.warning(line, self._directory / name, reason(error))
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
