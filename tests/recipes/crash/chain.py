"""A run that is killed and resumed until it is finished, checked after each start."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.recipes.crash import outputs
from tests.recipes.crash.hook import LAST_SAVE, LAST_STEP, STEP, TRAIN, Point
from tests.recipes.crash.plans import Plan, Scout
from tests.recipes.crash.runs import (
    FINISHED,
    FIRST_PRUNING,
    FORKED,
    KILLED,
    STEPS,
    STOPPED,
    Life,
    Start,
    folder_of,
    live,
    prepared,
    safe_after,
)


@dataclass
class Tally:
    """Results of kills and signals."""

    counts: Counter[str] = field(default_factory=Counter)
    """Runs that were KILLED, STOPPED by a signal, and resumed afterwards; and those of a `tune run`."""
    faults: list[str] = field(default_factory=list)
    steps_lost: int = 0

    def fault(self, case: str) -> None:
        print(f"FAULT {case}", flush=True)
        self.faults.append(case)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.faults += other.faults
        self.steps_lost = max(self.steps_lost, other.steps_lost)

    @property
    def good(self) -> bool:
        return not self.faults and self.counts[KILLED] + self.counts[STOPPED] == self.counts["resumed"]

    def summary(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{counts}; {len(self.faults)} faults; steps lost at most {self.steps_lost}"


def follow(plan: Plan, seen: Scout, folder: Path, seed: int = 0, deadline: float = float("inf")) -> Tally:
    """Repeat runs of this plan, each struck until it is finished, until all points have been used."""
    tally, number = Tally(), 0
    points = deque(plan.aim(seen, random.Random(f"{seed}/{plan}")))
    while points:
        if time.monotonic() > deadline:
            tally.fault(f"{plan}: no time for {len(points)} points")
            break
        number += 1
        name = f"{plan.way} {plan.name} {number}".replace(" ", "-")
        start = prepared(plan.variant, folder_of(plan.variant, folder) / name, way=plan.way)
        Chain(start, seen.folder, f'--only "{plan}" --seed {seed}, run {number}', tally).run(points)
    return tally


@dataclass
class Chain:
    start: Start
    reference: Path
    how: str
    """Command-line arguments that repeat this chain."""
    tally: Tally
    pending: int = 0
    """Kills and signals after which no step has been logged yet."""
    lives: int = 0

    def run(self, points: deque[Point]) -> None:
        """Run to the end, or until training is lost. Without points left, run undisturbed."""
        life = self.live_once(points.popleft())
        while life.ended in (KILLED, STOPPED):
            life = self.live_once(points.popleft() if points else None)
        if life.ended == FINISHED and not outputs.END.search(life.output):
            self.check_end()
        else:
            self.tally.fault(f"{self.how}: {life.ended}\n{life.output}")

    def live_once(self, point: Point | None) -> Life:
        out, folder = self.start.out, self.start.folder
        complete, logged = outputs.complete_checkpoints(out), outputs.logged_steps(folder)
        newest = max(complete.values(), default=0)
        life = live(self.start, self.lives, *aimed(point, newest, self.start.variant.stages))
        how = f"{self.how}, life {self.lives}, {point}"
        print(f"  {how}: {life.ended} {life.where} ({life.seconds:.1f} s)", flush=True)
        self.lives += 1
        steps = outputs.logged_steps(folder)[len(logged) :]
        if steps:
            self._check_progress(steps, logged, newest, how)
        if steps or life.ended == FINISHED:
            self.tally.counts["resumed"] += self.pending
            self.pending = 0
        left = outputs.complete_checkpoints(out)
        if gone := outputs.lost_to_pruning(complete, left):
            self.tally.fault(f"{how}: gone are {gone}")
        if life.ended in (KILLED, STOPPED):
            self.pending += 1
            self.tally.counts[life.ended] += 1
            self.tally.counts[f"{life.ended} by tune run"] += self.start.way != FORKED
        if life.ended == STOPPED and point is not None:
            trained = steps[-1] if steps else None
            for fault in outputs.faults_of_a_stop(point, life, trained, max(left.values(), default=0)):
                self.tally.fault(f"{how}: {fault}\n{life.output}")
        return life

    def _check_progress(self, steps: list[int], logged: list[int], newest: int, how: str) -> None:
        """Check that the run continued at the newest checkpoint, and lost no step before it."""
        resumed_from = steps[0] - 1
        if resumed_from != newest:
            self.tally.fault(f"{how}: resumed after step {resumed_from}, but the newest checkpoint is of step {newest}")
        if steps != list(range(steps[0], steps[-1] + 1)):
            self.tally.fault(f"{how}: logged steps {steps}")
        lost = logged[-1] - resumed_from if logged else 0
        self.tally.steps_lost = max(self.tally.steps_lost, lost)
        if logged and lost > logged[-1] - safe_after(logged[-1]):
            self.tally.fault(f"{how}: lost {lost} steps")

    def check_end(self) -> None:
        """Compare with the undisturbed run; running the command again must change no file."""
        found = [*outputs.differences(self.start.folder, self.reference)]
        before = outputs.picture_of(self.start.out)
        life = live(replace(self.start, way=FORKED), self.lives, None, STEPS)
        if life.ended != FINISHED or outputs.picture_of(self.start.out) != before:
            found.append(f"started again once it was done: {life.ended}, files changed\n{life.output}")
        if found:
            self.tally.fault(f"{self.how} (at its end): {'; '.join(found)}")


def aimed(point: Point | None, newest: int, stages: int) -> tuple[Point | None, int]:
    """Return the point for a run that continues after step `newest`, and the step after which operations count."""
    if point is not None and point.stage == LAST_STEP:
        point = replace(point, stage=STEP, at=(STEPS - newest) * stages)
    if point is not None and point.stage == LAST_SAVE:
        return replace(point, stage=TRAIN), STEPS - 1
    return point, max(newest, FIRST_PRUNING)
