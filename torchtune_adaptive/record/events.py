"""The record of a run: `adaptive_steps.jsonl`, and `adaptive_events.jsonl` for what happened besides."""

from __future__ import annotations

from dataclasses import dataclass

EVENTS_FILE = "adaptive_events.jsonl"
STEPS_FILE = "adaptive_steps.jsonl"

START = "start"
SEARCH = "search"
SCHEDULE = "schedule"
EPOCH = "epoch"
"""Kinds of event, beside those of a change of the limit (limits/change.py)."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the record. What does not apply is None, and is left out of the file.

    From `unit` on, the fields mean what they mean in a Change; `before` and `after` may also be batch sizes.
    """

    kind: str
    step: int
    """The step in which it happened, or after which."""
    stage: str | None = None
    reason: str
    """The line of the log."""
    unit: str | None = None
    before: int | None = None
    after: int | None = None
    ranks: tuple[int, ...] | None = None
    rows: int | None = None
    length: int | None = None
    lost_seconds: float | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
