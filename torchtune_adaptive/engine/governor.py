"""Moves the limit of a run: down when memory runs out or thrashes, up again when that has passed.

Pure: every rank feeds it what all ranks know of a step, and so comes to the same limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from torchtune_adaptive.engine.limits import Limit, Microbatch
from torchtune_adaptive.text import count_of, ranks_named

RECOVERY = "recovery"
THRASHING = "thrashing"
TRIAL = "trial"
GROWTH = "growth"
EXHAUSTED = "exhausted"
"""Kinds of change. A recovery shrinks the limit; so does thrashing, on trial; growth takes a step of either back. An
exhausted limit stays as it is: memory ran out, and there is no smaller one, so the run ends."""


def in_step(step: int, stage: str = "") -> str:
    """Where a line of the log begins: `step 3, policy`."""
    return f"step {step}, {stage}" if stage else f"step {step}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One decision about the limit, the same on all ranks."""

    kind: str
    step: int
    """The step in which it happened, or after which."""
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


TRIAL_STEPS = 4
"""Steps whose speed decides between two limits; the first after a change is not one of them."""


class LimitState(TypedDict):
    """What a checkpoint keeps of a limit: numbers, and the unit that they count."""

    unit: str
    size: int | None
    failed_tries: int
    quiet_steps: int
    before_growth: int | None
    tolerated: list[int]
    recoveries: int


@dataclass
class _Trial:
    """A smaller limit, in use until its speed is known."""

    larger: Limit
    rate_before: float
    rates: list[float] = field(default_factory=list)


class Governor:
    """The limit in use, which is never above the allowed one.

    `regrow_after` steps without trouble are followed by one step up, on probation for as long: if that fails, it is
    taken back, and the next try waits for twice as many. 0: never.
    """

    def __init__(self, allowed: Limit, *, regrow_after: int, stage: str = "") -> None:
        self.limit = allowed
        self.recoveries = 0
        self._stage = stage
        self._allowed = allowed
        self._size: int | None = None  # None: as allowed
        self._regrow_after = regrow_after
        self._failed_tries = 0  # of more, in a row: each doubles the wait for the next
        self._quiet_steps = 0
        self._before_growth: int | None = None  # the size to go back to while on probation
        self._trial: _Trial | None = None
        self._thrashing_rates: list[float] = []
        self._thrashed_before = False
        self._tolerated: set[int] = set()  # sizes that are best in spite of the retries
        self._row_retried_in: int | None = None  # the last step in which a single row failed

    @property
    def _wait(self) -> int:
        return self._regrow_after << self._failed_tries

    def allow(self, limit: Limit) -> None:
        """Allows no more than this limit from now on, and less where the run has come down to less of the same unit."""
        if limit.unit != self._allowed.unit:
            self._tolerated, self._failed_tries = set(), 0
            self._change(None)
        self._allowed = limit
        self._use(self._size)

    def start_over(self) -> None:
        """Uses all that is allowed: microbatches need less from now on."""
        self._row_retried_in = None
        self._change(None)

    def out_of_memory(self, failed: Mapping[int, Microbatch], step: int) -> Change:
        """Takes the next smaller limit, after these microbatches failed, by rank; the limit is EXHAUSTED if there is
        none.

        A single row may have met what larger microbatches have left behind, or a process that shares the device: the
        first time in a step that only single rows fail, the limit stays as it is, or as it was before it was last
        raised if that has yet to prove itself.
        """
        before, after = self.limit, _shrunk(self.limit, failed)
        longest = max(microbatch.length for microbatch in failed.values())
        what = f"out of memory on {ranks_named(failed)} (longest sample {longest} tokens)"
        if self._row_retried_in != step and all(microbatch.rows == 1 for microbatch in failed.values()):
            self._row_retried_in = step
            remark = self._step_down(self._size)  # the size it has, unless on probation
            change = f"a single row failed and is retried once, other rows in microbatches of at most {self.limit}"
        elif after is None:
            what += f": a microbatch of 1 row of {longest} tokens does not fit and cannot be made smaller"
            return self._note(EXHAUSTED, step, what, before, failed)
        else:
            remark = self._step_down(after.size)
            largest = max(failed.values(), key=lambda microbatch: microbatch.room_tokens)
            change = f"microbatch {before.size_of(*largest)} -> {self.limit}"
        self.recoveries += 1
        return self._note(RECOVERY, step, f"{what}: {change}, step repeated{remark}", before, failed)

    def completed(self, step: int, rate: float, retrying: Mapping[int, Microbatch]) -> Change | None:
        """Records a completed step, and changes the limit if that is due.

        `rate` is its target tokens a second; `retrying` are the ranks whose allocator flushed its cache, each with its
        largest microbatch.
        """
        thrashing = bool(retrying) and self._thrashed_before
        self._thrashed_before = bool(retrying)
        self._quiet_steps = 0 if retrying else self._quiet_steps + 1
        if self._trial is not None:
            return self._judge(self._trial, step, rate)
        if retrying:
            self._thrashing_rates = [*self._thrashing_rates, rate][-TRIAL_STEPS:]
        if thrashing and self.limit.size not in self._tolerated:
            return self._try_smaller(step, retrying)
        return self._grow_if_due(step)

    def _try_smaller(self, step: int, retrying: Mapping[int, Microbatch]) -> Change:
        """Takes a smaller limit. The step is complete, so it is not repeated."""
        what = f"the allocator flushed its cache on {ranks_named(retrying)} in two consecutive steps"
        before, after, rates = self.limit, _shrunk(self.limit, retrying), self._thrashing_rates
        if after is None:
            self._tolerated.add(before.size)
            what += f", and {before} is already the smallest limit: continuing"
            return self._note(THRASHING, step, what, before, retrying)
        proven = self._before_growth is not None
        remark = self._step_down(after.size)
        if not proven:
            self._trial = _Trial(before, statistics.median(rates))
            remark = ", on trial"
        return self._note(THRASHING, step, f"{what}: {before} -> {self.limit}{remark}", before, retrying)

    def _judge(self, trial: _Trial, step: int, rate: float) -> Change | None:
        """Keeps the faster of the two limits, once enough steps have run."""
        trial.rates.append(rate)
        if len(trial.rates) <= TRIAL_STEPS:
            return None
        smaller, now = self.limit, statistics.median(trial.rates[1:])
        faster = smaller if now >= trial.rate_before else trial.larger
        if faster is trial.larger:
            self._tolerated.add(faster.size)
        self._change(faster.size)
        speeds = f"{smaller}: {now:.0f} target tokens/s, {trial.larger}: {trial.rate_before:.0f}"
        return self._note(TRIAL, step, f"{speeds}; keeping {self.limit}", smaller)

    def _grow_if_due(self, step: int) -> Change | None:
        due = self._regrow_after if self._before_growth is not None else self._wait
        if not self._regrow_after or self._quiet_steps < due:
            return None
        if self._before_growth is not None:  # probation has passed
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
        """What a checkpoint keeps."""
        return {
            "unit": self.limit.unit,
            "size": self._size,
            "failed_tries": self._failed_tries,
            "quiet_steps": self._quiet_steps,
            "before_growth": self._before_growth,
            "tolerated": sorted(self._tolerated),
            "recoveries": self.recoveries,
        }

    def restore(self, state: LimitState) -> None:
        """Restores a saved state. If the kind of limit has changed, only the count of recoveries carries over."""
        if missing := LimitState.__annotations__.keys() - state.keys():
            raise ValueError(f"not the state of a limit, since it has no {', '.join(sorted(missing))}")
        self.recoveries = state["recoveries"]
        if state["unit"] != self.limit.unit:
            return
        self._failed_tries = state["failed_tries"]
        self._quiet_steps = state["quiet_steps"]
        self._before_growth = state["before_growth"] if self._regrow_after else None
        self._tolerated = set(state["tolerated"])
        self._use(state["size"])

    def _use(self, size: int | None) -> None:
        self._size = size
        self.limit = self._allowed if size is None or size >= self._allowed.size else self._allowed.resized(size)

    def _change(self, size: int | None) -> None:
        """Starts anew under another limit."""
        self._use(size)
        # All of this was observed under the previous limit.
        self._quiet_steps = 0
        self._before_growth = None
        self._trial = None
        self._thrashing_rates = []
        self._thrashed_before = False

    def _step_down(self, size: int | None) -> str:
        """Takes this size or, on probation, the one before if that is smaller; returns what to add to the log line."""
        if self._before_growth is None:
            self._change(size)
            return ""
        self._failed_tries += 1
        self._change(self._before_growth if size is None else min(size, self._before_growth))
        return f"; {self._wait} steps until the next try"

    def _note(
        self, kind: str, step: int, reason: str, before: Limit, by: Mapping[int, Microbatch] | None = None
    ) -> Change:
        largest = max(by.values(), key=lambda microbatch: microbatch.room_tokens) if by else None
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


def _shrunk(limit: Limit, microbatches: Mapping[int, Microbatch]) -> Limit | None:
    """The next smaller limit, one that none of these fits in, unless it is a single row; None if there is none."""
    smaller: Limit | None = limit
    for microbatch in sorted(microbatches.values(), key=lambda each: each.rows, reverse=True):
        if smaller is not None and (smaller is limit or (microbatch.rows > 1 and smaller.fits(*microbatch))):
            smaller = smaller.after_oom(*microbatch)
    return smaller
