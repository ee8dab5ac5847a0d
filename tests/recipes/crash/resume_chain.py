"""A run that is killed and resumed until it is finished, checked after each start."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.recipes.crash import run_outputs
from tests.recipes.crash.child_runs import FINISHED, KILLED, STOPPED, Life, Start, live
from tests.recipes.crash.kill_points import LAST_SAVE, LAST_STEP, STEP, TRAIN, Point
from tests.recipes.crash.requested_stops import faults_of_a_stop
from tests.recipes.crash.summary import Tally
from tests.recipes.crash.variants import KEEP, SAVE_EVERY, STEPS, Variant

FIRST_PRUNING = KEEP * SAVE_EVERY
"""The first step whose save prunes."""


@dataclass
class Chain:
    start: Start
    reference: Path
    how: str
    """Command-line arguments that repeat this chain."""
    tally: Tally
    pending: int = field(default=0, init=False)
    """Kills and signals after which no step has been logged yet."""
    lives: int = field(default=0, init=False)
    broken: bool = field(default=False, init=False)

    @property
    def variant(self) -> Variant:
        return self.start.variant

    @property
    def out(self) -> Path:
        return self.start.folder / "out"

    def run(self, points: Iterator[Point]) -> None:
        """Run to the end, or until training is lost. Without points left, run undisturbed."""
        while True:
            point = next(points, None)
            life = self.live_once(point)
            if life.ended not in (KILLED, STOPPED):
                break
        if life.ended == FINISHED:
            self.check_end()

    def live_once(self, point: Point | None) -> Life:
        complete, logged = run_outputs.complete_checkpoints(self.out), run_outputs.logged_steps(self.start.folder)
        newest = max(complete.values(), default=0)
        life = live(self.start, self.lives, *aimed(point, newest, self.variant.stages))
        self.lives += 1
        how = f"{self.how}, life {self.lives - 1}, {point}"
        print(f"  {how}: {life.ended} {life.where} ({life.seconds:.1f} s)", flush=True)
        self._check_progress(logged, newest, how)
        self._check_pruning(complete, how)
        if life.ended == KILLED:
            self.pending += 1
            self.tally.kill(life.where, tune_run=self.start.tune_run)
        elif life.ended == STOPPED:
            self.pending += 1
            self.tally.stop(life.where, tune_run=self.start.tune_run)
            self._check_stop(point, life, logged, how)
        elif life.ended == FINISHED:
            self.tally.resumed += self.pending
            self.pending = 0
        else:
            self.broken = True
            self.tally.lose(f"{how}: {life.ended}\n{life.output}")
        return life

    def _check_progress(self, logged: list[int], newest: int, how: str) -> None:
        """Check that the run continued at the newest checkpoint, if it has logged a step."""
        steps = run_outputs.logged_steps(self.start.folder)[len(logged) :]
        if not steps:
            return
        resumed_from = steps[0] - 1
        if resumed_from < newest:
            self.tally.lose(f"{how}: resumed after step {resumed_from}, but a checkpoint of step {newest} existed")
        elif resumed_from > newest:
            self.tally.fault(f"{how}: resumed after step {resumed_from}, but the checkpoint is of step {newest}")
        if steps != list(range(steps[0], steps[-1] + 1)):
            self.tally.fault(f"{how}: logged steps {steps}")
        if logged:
            at_risk = logged[-1] - self.variant.safe_after(logged[-1])
            self.tally.steps(str(self.variant), logged[-1] - resumed_from, at_risk, how)
        self.tally.resumed += self.pending
        self.pending = 0

    def _check_stop(self, point: Point | None, life: Life, logged: list[int], how: str) -> None:
        """Check that the run printed what it did and saved what it trained."""
        assert point is not None
        trained = run_outputs.logged_steps(self.start.folder)[len(logged) :]
        complete = max(run_outputs.complete_checkpoints(self.out).values(), default=0)
        for fault in faults_of_a_stop(point, life, trained[-1] if trained else None, complete):
            self.tally.fault(f"{how}: {fault}\n{life.output}")

    def _check_pruning(self, before: dict[str, int], how: str) -> None:
        gone = run_outputs.lost_to_pruning(before, run_outputs.complete_checkpoints(self.out))
        if gone:
            self.tally.fault(f"{how}: gone are {gone}")

    def check_end(self) -> None:
        """Compare weights, figures and record with the undisturbed run; running the command again must change no
        file.
        """
        found = run_outputs.differences(self.start.folder, self.reference)
        before = run_outputs.picture_of(self.out)
        again = live(replace(self.start, tune_run=False), self.lives, None, STEPS)
        if again.ended != FINISHED or run_outputs.picture_of(self.out) != before:
            found.append(f"started again once it was done: {again.ended}, files changed\n{again.output}")
        if found:
            self.tally.fault(f"{self.how} (at its end): {'; '.join(found)}")


def aimed(point: Point | None, newest: int, stages: int) -> tuple[Point | None, int]:
    """Return the point for a run that continues after step `newest`, and the step after which operations count."""
    if point is not None and point.stage == LAST_STEP:
        point = replace(point, stage=STEP, at=(STEPS - newest) * stages)
    if point is not None and point.stage == LAST_SAVE:
        return replace(point, stage=TRAIN), STEPS - 1
    return point, max(newest, FIRST_PRUNING)
