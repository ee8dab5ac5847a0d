"""Run all plans in parallel until the time is over."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tests.recipes.crash.child_runs import Start
from tests.recipes.crash.kill_points import Point
from tests.recipes.crash.plans import Plan, Scout, random_moments, scout
from tests.recipes.crash.resume_chain import Chain
from tests.recipes.crash.summary import Tally
from tests.recipes.crash.variants import Variant, write_config


@dataclass
class Session:
    """Shared by plans: a folder, a seed, and the undisturbed runs. Plans may run in several threads."""

    folder: Path
    seed: int
    deadline: float

    def __post_init__(self) -> None:
        self._scouts: dict[tuple[Variant, bool], Future[Scout]] = {}
        self._lock = threading.Lock()

    def scout(self, plan: Plan) -> Scout:
        """Return the scout of a plan: the first caller runs it while others wait."""
        key, mine = (plan.variant, plan.tune_run), Future[Scout]()
        with self._lock:
            found = self._scouts.setdefault(key, mine)
        if found is mine:
            folder = self.folder_of(plan.variant) / f"undisturbed{'-tune' * plan.tune_run}"
            try:
                mine.set_result(scout(plan.variant, folder, tune_run=plan.tune_run))
            except BaseException as error:
                mine.set_exception(error)
                raise
        return found.result()

    def reference(self, variant: Variant) -> Path:
        """Return the folder of the undisturbed run."""
        return self.scout(Plan("", variant, random_moments(0))).folder

    def folder_of(self, variant: Variant) -> Path:
        return self.folder / str(variant).replace("/", "-")

    def draw(self, name: object) -> random.Random:
        """Return a random generator that does not depend on other plans or their order."""
        return random.Random(f"{self.seed}/{name}")

    def follow(self, plan: Plan) -> Tally:
        """Repeat runs of this plan, killed until finished, until all points have been used."""
        tally, seen = Tally(), self.scout(plan)
        left = Remaining(iter(plan.aim(seen, self.draw(plan))), self.deadline)
        number = 0
        while not left.over:
            number += 1
            folder = self.folder_of(plan.variant) / f"{plan.name.replace(' ', '-')}-{number}{'-tune' * plan.tune_run}"
            arguments = tuple(write_config(plan.variant, folder))
            start = Start(plan.variant, folder, arguments, plan.tune_run, plan.manner, plan.launched)
            how = f'--only "{plan}" --seed {self.seed}, run {number}'
            Chain(start, seen.folder, how, tally).run(left)
        return tally


class Remaining(Iterator[Point]):
    """The remaining points; empty once the time is over."""

    def __init__(self, points: Iterator[Point], deadline: float) -> None:
        self._points, self._deadline = points, deadline
        self._next = next(points, None)

    @property
    def over(self) -> bool:
        return self._next is None or time.monotonic() > self._deadline

    def __next__(self) -> Point:
        if self.over or self._next is None:
            raise StopIteration
        point, self._next = self._next, next(self._points, None)
        return point
