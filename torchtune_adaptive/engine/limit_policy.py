"""Adjusts the microbatch limit during a run: lowers it after OOM errors or allocator retries, raises it again later.

The policy does not communicate: it gets the same reports on all ranks, and so computes the same limit on all ranks.
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
"""Kinds of change. RECOVERY lowers the limit after an out-of-memory error, THRASHING after allocator retries. GROWTH
raises it by one size. EXHAUSTED means that memory ran out at the smallest limit, so the run ends."""


def in_step(step: int, stage: str = "") -> str:
    """Return the beginning of a log line, such as `step 3` or, with a stage, `step 3, policy`."""
    return f"step {step}, {stage}" if stage else f"step {step}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the limit, equal on all ranks."""

    kind: str
    step: int
    """The step in which, or after which, the limit changes."""
    stage: str | None = None
    """The stage, if a step has several."""
    reason: str
    """The log line."""
    unit: str
    """The unit of `before` and `after`."""
    before: int
    after: int
    ranks: tuple[int, ...] | None = None
    """The ranks that ran out of memory or whose allocator retried; None for GROWTH."""
    peak_bytes: int | None = None
    """Peak memory of the rank that came closest to its budget."""
    budget_bytes: int | None = None
    """The budget of that rank."""


class LimitState(TypedDict):
    """The state of a policy, for a checkpoint."""

    unit: str
    size: int | None
    failed_tries: int
    quiet_steps: int
    before_growth: int | None
    recoveries: int


class LimitPolicy:
    """Holds the current limit, which never exceeds `allowed`.

    After `regrow_after` steps without OOM errors or allocator retries, the limit grows by one size. The larger limit is
    on probation for another `regrow_after` steps. If it fails, the limit returns to the previous one or a smaller one,
    and the wait until the next growth doubles. With `regrow_after=0`, the limit never grows.
    """

    def __init__(self, allowed: Limit, *, regrow_after: int, stage: str = "") -> None:
        self.limit = allowed
        self.recoveries = 0
        self._stage = stage
        self._allowed = allowed
        self._size: int | None = None  # None while the limit is the allowed one
        self._regrow_after = regrow_after
        self._failed_tries = 0  # consecutive failed growths; each doubles the wait
        self._quiet_steps = 0  # consecutive steps without OOM errors or allocator retries
        self._size_before_growth: int | None = None  # size to return to if probation fails
        self._thrashes_at_smallest = False  # set so that this is logged only once
        self._flushed_last_step = False  # whether the allocator flushed its cache in the previous step
        self._retried_single_row = False  # whether this step was repeated under the same limit

    @property
    def _regrow_wait(self) -> int:
        return self._regrow_after << self._failed_tries

    def allow(self, limit: Limit) -> None:
        """Set the allowed limit, which a search has measured. If the current one is smaller, with the same unit, it
        stays."""
        if limit.unit != self._allowed.unit:
            self._failed_tries = 0
            self._switch_to(None)
        self._allowed = limit
        self._set_size(self._size)

    def begin_step(self) -> None:
        """Allow one more retry of a single row under the same limit."""
        self._retried_single_row = False

    def out_of_memory(self, failed: Mapping[int, MicrobatchSize], step: int, *, reduced_once: bool = False) -> Change:
        """Lower the limit after microbatches ran out of memory. `failed` maps ranks to their failed microbatch.

        Returns a change of kind EXHAUSTED at the smallest limit. A single row may fail because larger microbatches have
        fragmented the memory, or because of another process on the device. So the first time that only single rows fail
        in a step, the limit stays or, on probation, returns to the previous one. The limit also stays if the step
        reduced gradients only once (`reduced_once`), because it needs less memory if every microbatch reduces them.
        """
        before, after = self.limit, _shrunk(self.limit, failed)
        longest = max(microbatch.length for microbatch in failed.values())
        event = f"out of memory on {ranks_named(failed)} (longest sample {longest} tokens)"
        if reduced_once:
            self._quiet_steps = 0
            wait_text, reaction = "", f"gradients are reduced in every microbatch from now on, limit stays at {before}"
        elif not self._retried_single_row and all(microbatch.rows == 1 for microbatch in failed.values()):
            self._retried_single_row = True
            wait_text = self._step_down(self._size)  # keeps the current size, unless on probation
            reaction = f"a single row failed, which may be temporary: microbatch at most {self.limit}"
        elif after is None:
            event += f": a microbatch of 1 row of {longest} tokens does not fit and cannot be made smaller"
            return self._make_change(EXHAUSTED, step, event, before, failed)
        else:
            wait_text = self._step_down(after.size)
            largest = max(failed.values(), key=lambda microbatch: microbatch.padded_tokens)
            reaction = f"microbatch {before.format_need(*largest)} -> {self.limit}"
            if self._retried_single_row and largest.rows == 1:
                reaction = f"a single row failed again: microbatch at most {before} -> {self.limit}"
        self.recoveries += 1
        return self._make_change(RECOVERY, step, f"{event}: {reaction}, step repeated{wait_text}", before, failed)

    def completed(self, step: int, flushed_cache: Mapping[int, MicrobatchSize]) -> Change | None:
        """Record a completed step, and lower or raise the limit if that is due; return None if it is not.
        `flushed_cache` contains the ranks whose allocator flushed its cache, each with its largest microbatch."""
        thrashing = bool(flushed_cache) and self._flushed_last_step
        self._flushed_last_step = bool(flushed_cache)
        self._quiet_steps = 0 if flushed_cache else self._quiet_steps + 1
        if not thrashing or self._thrashes_at_smallest:
            return self._grow_if_due(step)
        event = f"the allocator flushed its cache on {ranks_named(flushed_cache)} in two consecutive steps"
        before, after = self.limit, _shrunk(self.limit, flushed_cache)
        if after is None:
            self._thrashes_at_smallest = True
            event += f", and {before} is already the smallest limit: continuing"
            return self._make_change(THRASHING, step, event, before, flushed_cache)
        wait_text = self._step_down(after.size)
        reason = f"{event}: {before} -> {self.limit}{wait_text}"
        return self._make_change(THRASHING, step, reason, before, flushed_cache)

    def _grow_if_due(self, step: int) -> Change | None:
        due = self._regrow_after if self._size_before_growth is not None else self._regrow_wait
        if not self._regrow_after or self._quiet_steps < due:
            return None
        if self._size_before_growth is not None:  # probation passed
            self._size_before_growth, self._failed_tries = None, 0
        before, quiet = self.limit, self._quiet_steps
        self._quiet_steps = 0
        if before.size >= self._allowed.size:
            self._set_size(None)
            return None
        self._switch_to(min(before.next_size, self._allowed.size))
        self._size_before_growth = before.size
        reason = f"{count_of(quiet, 'step')} without memory problems: {before} -> {self.limit}, on probation"
        return self._make_change(GROWTH, step, reason, before)

    def state(self) -> LimitState:
        """Return the state for a checkpoint."""
        return {
            "unit": self.limit.unit,
            "size": self._size,
            "failed_tries": self._failed_tries,
            "quiet_steps": self._quiet_steps,
            "before_growth": self._size_before_growth,
            "recoveries": self.recoveries,
        }

    def restore(self, state: LimitState) -> None:
        """Restore a saved state. If the limit has another unit now, restore only the number of recoveries."""
        if missing := LimitState.__annotations__.keys() - state.keys():
            raise ValueError(f"not the state of a limit: missing {', '.join(sorted(missing))}")
        self.recoveries = state["recoveries"]
        if state["unit"] != self.limit.unit:
            return
        self._failed_tries = state["failed_tries"]
        self._quiet_steps = state["quiet_steps"]
        self._size_before_growth = state["before_growth"] if self._regrow_after else None
        self._set_size(state["size"])

    def _set_size(self, size: int | None) -> None:
        self._size = size
        self.limit = self._allowed if size is None or size >= self._allowed.size else self._allowed.resized(size)

    def _switch_to(self, size: int | None) -> None:
        """Change the size of the limit, and reset everything that was observed under the previous size."""
        self._set_size(size)
        self._quiet_steps = 0
        self._size_before_growth = None
        self._thrashes_at_smallest = False
        self._flushed_last_step = False

    def _step_down(self, size: int | None) -> str:
        """Change to this size or, on probation, to the previous one if that is smaller. Returns the end of the log
        line: on probation, the steps until the next growth."""
        if self._size_before_growth is None:
            self._switch_to(size)
            return ""
        self._failed_tries += 1
        self._switch_to(self._size_before_growth if size is None else min(size, self._size_before_growth))
        return f"; {self._regrow_wait} steps until the next try"

    def _make_change(
        self, kind: str, step: int, reason: str, before: Limit, causes: Mapping[int, MicrobatchSize] | None = None
    ) -> Change:
        return Change(
            kind=kind,
            step=step,
            stage=self._stage or None,
            reason=f"{in_step(step, self._stage)}: {reason}",
            unit=before.unit,
            before=before.size,
            after=self.limit.size,
            ranks=tuple(causes) if causes else None,
        )


def _shrunk(limit: Limit, microbatches: Mapping[int, MicrobatchSize]) -> Limit | None:
    """Return a smaller limit that excludes all these microbatches of several rows; None if no limit is smaller. A
    single row runs alone under any limit. So if all are single rows, shrink the limit once, as if a full microbatch of
    rows like the first of them had failed."""
    smaller: Limit | None = limit
    for microbatch in sorted(microbatches.values(), key=lambda each: each.rows, reverse=True):
        if smaller is limit and microbatch.rows == 1:
            smaller = limit.after_oom(max(1, limit.rows_at(microbatch.length)), microbatch.length)
        elif smaller is not None and (smaller is limit or (microbatch.rows > 1 and smaller.fits(*microbatch))):
            smaller = smaller.after_oom(*microbatch)
    return smaller
