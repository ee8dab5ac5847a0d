"""How a limit has changed, and why: what a log line, a record and a user's callback are made of."""

from __future__ import annotations

from dataclasses import dataclass

RECOVERY = "recovery"
THRASHING = "thrashing"
TRIAL = "trial"
GROWTH = "growth"
EXHAUSTED = "exhausted"
"""Kinds of change. A recovery shrinks the limit; so does thrashing, on trial; growth takes a step of either back. An
exhausted limit stays as it is: memory ran out, and there is no smaller one, so the run ends."""

BEFORE_THE_FIRST = -1
"""The step number of whatever runs before training."""


def in_step(step: int, stage: str = "") -> str:
    """Where a line of the log begins: `step 3, policy`."""
    when = "before the first step" if step == BEFORE_THE_FIRST else f"step {step}"
    return f"{when}, {stage}" if stage else when


@dataclass(frozen=True, kw_only=True)
class Change:
    """One decision about the limit, the same on all ranks."""

    kind: str
    step: int
    """The step in which it happened, or after which; 0 before the first."""
    stage: str | None = None
    """The stage of the step; None where steps have only one."""
    reason: str
    """The line of the log."""
    unit: str
    before: int
    """The size of the limit, in `unit`."""
    after: int
    ranks: tuple[int, ...] | None = None
    """The ranks that caused it."""
    rows: int | None = None
    """Rows of the largest microbatch that caused it."""
    length: int | None = None
    """Tokens of its longest sample."""
    lost_seconds: float | None = None
    """What the attempt at the step took that did not count, on this rank."""
    peak_bytes: int | None = None
    """The peak of the rank that came closest to its own budget."""
    budget_bytes: int | None = None
    """The budget of that rank."""
