"""Which runs are killed where: every operation of a save once, and others at random."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from tests.recipes.crash.chain import FIRST_PRUNING, Chain
from tests.recipes.crash.points import START, TIME, TRAIN, Point
from tests.recipes.crash.tally import Tally, place
from tests.recipes.crash.variants import ASYNC, FULL, LORA, PAIRS, PAIRS_LORA, SAVES, Variant, write_config
from tests.recipes.crash.victims import EVERYTHING, FINISHED, LAUNCHER_FIRST, RANK_FIRST, Start, live

WHAT_COUNTS_IS_WRITTEN = ("rename", "link", "unlink", "rmdir")
"""Where a failing power would show what had not been synced before."""


@dataclass(frozen=True)
class Scout:
    """What an undisturbed run tells: where others are aimed at, and what they are compared with."""

    folder: Path
    milliseconds: int

    def operations(self, stage: str) -> list[str]:
        """The most that it did in one life before its first step, or from one save to the next."""
        notes = (self.folder / "lives" / "0000" / "operations0").read_text()
        after_step = [part.splitlines() for part in re.split(r"^step \d+\n", notes, flags=re.MULTILINE)]
        pruning = [save for save in SAVES if save > FIRST_PRUNING]
        saves = [list(chain.from_iterable(after_step[save:following])) for save, following in pairwise(pruning)]
        lines = max(saves, key=len) if stage == TRAIN else after_step[0]
        return [line.partition(" ")[2] for line in lines]


def scout(variant: Variant, folder: Path, *, tune_run: bool = False) -> Scout:
    arguments = write_config(variant, folder)
    life = live(Start(variant, folder, tuple(arguments), tune_run), 0, None, 0)
    assert life.ended == FINISHED, f"{variant}: the undisturbed run {life.ended}\n{life.output}"
    return Scout(folder, round(1000 * life.seconds))


Aim = Callable[[Scout, random.Random], Iterator[Point]]


@dataclass(frozen=True)
class Plan:
    name: str
    variant: Variant
    aim: Aim
    tune_run: bool = False
    manner: str = EVERYTHING

    def __str__(self) -> str:
        return f"{self.variant} {self.name}"


def every_operation(every: int = 1, rank: int = 0, *, torn: bool = True, cut: bool = False) -> Aim:
    """Each of a save and of what it prunes; in between, of the next start, which finds what the last kill has left."""

    def aim(seen: Scout, _: random.Random) -> Iterator[Point]:
        operations, starts = seen.operations(TRAIN), math.ceil(1.5 * len(seen.operations(START)))
        for at in unlike(operations)[::every]:
            yield Point(TRAIN, at, rank=rank)
            if torn and can_be_torn(operations[at - 1]):
                yield Point(TRAIN, at, torn=True)
            if cut and operations[at - 1].startswith(WHAT_COUNTS_IS_WRITTEN):
                yield Point(TRAIN, at, cut=True)
            if at <= starts:
                yield Point(START, at, rank=rank)

    return aim


def one_of_each(seen: Scout, _: random.Random) -> Iterator[Point]:
    """Of each kind of operation the last, half done where that can be."""
    operations = seen.operations(TRAIN)
    last = {label.partition(" ")[0]: at for at, label in enumerate(operations, start=1) if not is_record(label)}
    for at in last.values():
        yield Point(TRAIN, at, torn=can_be_torn(operations[at - 1]))


def can_be_torn(label: str) -> bool:
    return label.startswith(("write", "save")) and not is_record(label)


def is_record(label: str) -> bool:
    """Lines of the run's record are appended whole, and are not of a checkpoint."""
    return label.startswith("write adaptive_")


def unlike(operations: list[str]) -> list[int]:
    """The number of each, from 1 on; of many alike, as the files of an asynchronous save are, the outermost and one."""
    alike: dict[str, list[int]] = {}
    for at, label in enumerate(operations, start=1):
        alike.setdefault(place(label), []).append(at)
    return sorted(at for group in alike.values() for at in {group[0], group[len(group) // 2], group[-1]})


def random_moments(count: int, ranks: int = 1) -> Aim:
    def aim(seen: Scout, draw: random.Random) -> Iterator[Point]:
        for _ in range(count):
            yield Point(TIME, draw.randrange(1, max(2, seen.milliseconds)), rank=draw.randrange(ranks))

    return aim


def random_operations(count: int, ranks: int = 1) -> Aim:
    def aim(seen: Scout, draw: random.Random) -> Iterator[Point]:
        for number in range(count):
            stage = START if number % 4 == 3 else TRAIN
            at = draw.randrange(1, len(seen.operations(stage)) + 1)
            torn = stage == TRAIN and can_be_torn(seen.operations(stage)[at - 1]) and draw.random() < 0.5
            yield Point(stage, at, torn=torn, rank=0 if torn else draw.randrange(ranks))

    return aim


def exactly(point: Point) -> Aim:
    return lambda *_: iter([point])


def all_plans() -> list[Plan]:
    full, lora = Variant("full", 2), Variant("lora", 2, budget=True)
    one_async = Variant("full", 1, budget=True, asynchronous=True)
    peer = every_operation(4, rank=1, torn=False)
    return [
        *(Plan("every operation", variant, every_operation(cut=True)) for variant in (FULL, LORA)),
        Plan("every operation", ASYNC, every_operation()),
        *(Plan("every fourth, the peer", variant, peer) for variant in (full, ASYNC, lora)),
        *(Plan("moments", variant, random_moments(6)) for variant in (FULL, LORA, one_async)),
        *(Plan("moments", variant, random_moments(6, ranks=2)) for variant in (full, lora, PAIRS)),
        Plan("operations", PAIRS_LORA, random_operations(6)),
        *tune_run_plans(),
    ]


def tune_run_plans() -> list[Plan]:
    """By `tune run`, with a launcher where there are two ranks."""
    full, lora = Variant("full", 2), Variant("lora", 2, budget=True)
    manners = ((full, LAUNCHER_FIRST), (full, RANK_FIRST), (ASYNC, LAUNCHER_FIRST), (lora, RANK_FIRST))
    return [
        *(Plan("tune run", variant, random_operations(10, 2), tune_run=True) for variant in (full, ASYNC, lora)),
        *(Plan("tune run", variant, random_operations(6), tune_run=True) for variant in (FULL, LORA)),
        *(
            Plan(f"tune run, {manner}", variant, random_moments(5, 2), tune_run=True, manner=manner)
            for variant, manner in manners
        ),
        *(Plan("tune run, moments", variant, random_moments(4), tune_run=True) for variant in (FULL, LORA)),
    ]


@dataclass
class Session:
    """All plans, one after the other, until the time is over."""

    folder: Path
    seed: int
    deadline: float
    tally: Tally

    def __post_init__(self) -> None:
        self._scouts: dict[tuple[Variant, bool], Scout] = {}

    def scout(self, plan: Plan) -> Scout:
        key = (plan.variant, plan.tune_run)
        if key not in self._scouts:
            folder = self.folder_of(plan.variant) / f"undisturbed{'-tune' * plan.tune_run}"
            self._scouts[key] = scout(plan.variant, folder, tune_run=plan.tune_run)
        return self._scouts[key]

    def reference(self, variant: Variant) -> Path:
        """The folder of the undisturbed run."""
        return self.scout(Plan("", variant, random_moments(0))).folder

    def folder_of(self, variant: Variant) -> Path:
        return self.folder / str(variant).replace("/", "-")

    def follow(self, plan: Plan) -> None:
        """Runs of this plan, each killed until it is done, until all points have been met."""
        seen = self.scout(plan)
        points = iter(plan.aim(seen, random.Random(f"{self.seed}/{plan}")))
        left = Remaining(points, self.deadline)
        number = 0
        while not left.over:
            number += 1
            folder = self.folder_of(plan.variant) / f"{plan.name.replace(' ', '-')}-{number}{'-tune' * plan.tune_run}"
            start = Start(plan.variant, folder, tuple(write_config(plan.variant, folder)), plan.tune_run, plan.manner)
            how = f'--only "{plan}" --seed {self.seed}, run {number}'
            Chain(start, seen.folder, how, self.tally).run(left)


class Remaining(Iterator[Point]):
    """The points that are left, which are none once the time is over."""

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
