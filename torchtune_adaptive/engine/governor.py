"""Adjust the microbatch limit during a run: lower it after OOM errors or allocator thrashing, raise it again later.

The governor is deterministic and does not communicate: all ranks pass it the same facts and get the same limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from torchtune_adaptive.engine.limits import Limit, MicrobatchSize
from torchtune_adaptive.formatting import count_of, ranks_named

RECOVERY = "recovery"
THRASHING = "thrashing"
GROWTH = "growth"
EXHAUSTED = "exhausted"
"""Kinds of change. RECOVERY and THRASHING lower the limit. GROWTH raises it by one size. EXHAUSTED leaves it: memory
ran out at the smallest limit, so the run ends."""


def in_step(step: int, stage: str = "") -> str:
    """Return the beginning of a log line: `step 3, policy`."""
    return f"step {step}, {stage}" if stage else f"step {step}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A decision about the limit, identical on all ranks."""

    kind: str
    step: int
    """The step during or after which it happened."""
    stage: str | None = None
    """The stage, if steps have several."""
    reason: str
    """The log line."""
    unit: str
    before: int
    """Size of the limit in `unit`."""
    after: int
    ranks: tuple[int, ...] | None = None
    """The ranks that caused it."""
    rows: int | None = None
    """Rows of the largest microbatch that caused it."""
    length: int | None = None
    """Tokens of the longest sample in it."""
    lost_seconds: float | None = None
    """Duration of the failed attempt on this rank."""
    peak_bytes: int | None = None
    """Peak memory of the rank that came closest to its budget."""
    budget_bytes: int | None = None
    """The budget of that rank."""


class LimitState(TypedDict):
    """State of a governor in a checkpoint."""

    unit: str
    size: int | None
    failed_tries: int
    quiet_steps: int
    before_growth: int | None
    recoveries: int


class Governor:
    """Holds the current limit, which never exceeds the allowed one.

    After `regrow_after` steps without OOM or allocator retries, the limit grows by one size. The larger limit is on
    probation for another `regrow_after` steps. If it fails, the previous limit returns, and the wait until the next try
    doubles. With `regrow_after=0` the limit never grows.
    """

    def __init__(self, allowed: Limit, *, regrow_after: int, stage: str = "") -> None:
        self.limit = allowed
        self.recoveries = 0
        self._stage = stage
        self._allowed = allowed
        self._size: int | None = None  # None: as allowed
        self._regrow_after = regrow_after
        self._failed_tries = 0  # consecutive failed growth attempts; each doubles the wait
        self._quiet_steps = 0
        self._before_growth: int | None = None  # size to return to if probation fails
        self._thrashes_at_smallest = False  # logged once
        self._retried_before = False  # whether the allocator flushed its cache in the previous step
        self._row_retried_in: int | None = None  # the last step that kept the limit because only single rows failed

    @property
    def _wait(self) -> int:
        return self._regrow_after << self._failed_tries

    def allow(self, limit: Limit) -> None:
        """Set the allowed limit; a smaller current size in the same unit is kept."""
        if limit.unit != self._allowed.unit:
            self._failed_tries = 0
            self._change(None)
        self._allowed = limit
        self._use(self._size)

    def start_over(self) -> None:
        """Return to the allowed limit, for example because microbatches need less memory from now on."""
        self._row_retried_in = None
        self._change(None)

    def out_of_memory(self, failed: Mapping[int, MicrobatchSize], step: int) -> Change:
        """Lower the limit after these microbatches (by rank) ran out of memory; return EXHAUSTED at the smallest limit.

        A single row may fail because larger microbatches have fragmented the memory, or because of another process on
        the device. So the first time in a step that only single rows fail, the limit stays. On probation, the previous
        limit returns.
        """
        before, after = self.limit, _shrunk(self.limit, failed)
        longest = max(microbatch.length for microbatch in failed.values())
        what = f"out of memory on {ranks_named(failed)} (longest sample {longest} tokens)"
        if self._row_retried_in != step and all(microbatch.rows == 1 for microbatch in failed.values()):
            self._row_retried_in = step
            remark = self._step_down(self._size)  # keeps the current size, unless on probation
            change = f"a single row failed and is tried once more, in microbatches of at most {self.limit}"
        elif after is None:
            what += f": a microbatch of 1 row of {longest} tokens does not fit and cannot be made smaller"
            return self._note(EXHAUSTED, step, what, before, failed)
        else:
            remark = self._step_down(after.size)
            largest = max(failed.values(), key=lambda microbatch: microbatch.padded_tokens)
            change = f"microbatch {before.format_need(*largest)} -> {self.limit}"
        self.recoveries += 1
        return self._note(RECOVERY, step, f"{what}: {change}, step repeated{remark}", before, failed)

    def completed(self, step: int, retrying: Mapping[int, MicrobatchSize]) -> Change | None:
        """Record a completed step and change the limit if that is due.

        `retrying` maps the ranks whose allocator flushed its cache to their largest microbatch.
        """
        thrashing = bool(retrying) and self._retried_before
        self._retried_before = bool(retrying)
        self._quiet_steps = 0 if retrying else self._quiet_steps + 1
        if not thrashing or self._thrashes_at_smallest:
            return self._grow_if_due(step)
        what = f"the allocator flushed its cache on {ranks_named(retrying)} in two consecutive steps"
        before, after = self.limit, _shrunk(self.limit, retrying)
        if after is None:
            self._thrashes_at_smallest = True
            what += f", and {before} is already the smallest limit: continuing"
            return self._note(THRASHING, step, what, before, retrying)
        remark = self._step_down(after.size)
        return self._note(THRASHING, step, f"{what}: {before} -> {self.limit}{remark}", before, retrying)

    def _grow_if_due(self, step: int) -> Change | None:
        due = self._regrow_after if self._before_growth is not None else self._wait
        if not self._regrow_after or self._quiet_steps < due:
            return None
        if self._before_growth is not None:  # probation passed
            self._before_growth, self._failed_tries = None, 0
        before, quiet = self.limit, self._quiet_steps
        self._quiet_steps = 0
        if before.size >= self._allowed.size:
            self._use(None)
            return None
        self._change(min(before.next_size, self._allowed.size))
        self._before_growth = before.size
        reason = f"{count_of(quiet, 'step')} without trouble: {before} -> {self.limit}, on probation"
        return self._note(GROWTH, step, reason, before)

    def state(self) -> LimitState:
        """Return the state for a checkpoint."""
        return {
            "unit": self.limit.unit,
            "size": self._size,
            "failed_tries": self._failed_tries,
            "quiet_steps": self._quiet_steps,
            "before_growth": self._before_growth,
            "recoveries": self.recoveries,
        }

    def restore(self, state: LimitState) -> None:
        """Restore a saved state; if the unit of the limit has changed, only the number of recoveries is restored."""
        if missing := LimitState.__annotations__.keys() - state.keys():
            raise ValueError(f"not the state of a limit: missing {', '.join(sorted(missing))}")
        self.recoveries = state["recoveries"]
        if state["unit"] != self.limit.unit:
            return
        self._failed_tries = state["failed_tries"]
        self._quiet_steps = state["quiet_steps"]
        self._before_growth = state["before_growth"] if self._regrow_after else None
        self._use(state["size"])

    def _use(self, size: int | None) -> None:
        self._size = size
        self.limit = self._allowed if size is None or size >= self._allowed.size else self._allowed.resized(size)

    def _change(self, size: int | None) -> None:
        """Switch to another size and forget what was observed under the previous one."""
        self._use(size)
        self._quiet_steps = 0
        self._before_growth = None
        self._thrashes_at_smallest = False
        self._retried_before = False

    def _step_down(self, size: int | None) -> str:
        """Switch to this size or, on probation, to the previous one if that is smaller; return a remark for the log."""
        if self._before_growth is None:
            self._change(size)
            return ""
        self._failed_tries += 1
        self._change(self._before_growth if size is None else min(size, self._before_growth))
        return f"; {self._wait} steps until the next try"

    def _note(
        self, kind: str, step: int, reason: str, before: Limit, by: Mapping[int, MicrobatchSize] | None = None
    ) -> Change:
        largest = max(by.values(), key=lambda microbatch: microbatch.padded_tokens) if by else None
        return Change(
            kind=kind,
            step=step,
            stage=self._stage or None,
            reason=f"{in_step(step, self._stage)}: {reason}",
            unit=before.unit,
            before=before.size,
            after=self.limit.size,
            ranks=tuple(by) if by else None,
            rows=largest.rows if largest else None,
            length=largest.length if largest else None,
        )


def _shrunk(limit: Limit, microbatches: Mapping[int, MicrobatchSize]) -> Limit | None:
    """Return a smaller limit, or None if there is none.

    It excludes the microbatch with the most rows, and all others of more than one row.
    """
    smaller: Limit | None = limit
    for microbatch in sorted(microbatches.values(), key=lambda each: each.rows, reverse=True):
        if smaller is not None and (smaller is limit or (microbatch.rows > 1 and smaller.fits(*microbatch))):
            smaller = smaller.after_oom(*microbatch)
    return smaller
