"""The record of a run: `adaptive_steps.jsonl`, and `adaptive_events.jsonl` for what happened besides."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.limits.change import Change

EVENTS_FILE = "adaptive_events.jsonl"
STEPS_FILE = "adaptive_steps.jsonl"

START = "start"
SEARCH = "search"
SCHEDULE = "schedule"
"""Kinds of event, beside those of a change of the limit (limits/change.py)."""


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


def event_of(change: Change) -> Event:
    """A change of the limit, for the record."""
    return Event(**vars(change))
