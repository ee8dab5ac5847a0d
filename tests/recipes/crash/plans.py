"""Plans: runs that are killed at every operation of a save and at random, or receive signals at any point."""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

from tests.recipes.crash.child_runs import EVERYTHING, FINISHED, LAUNCHER_FIRST, RANK_FIRST, Start, live
from tests.recipes.crash.kill_points import INT, LAST_SAVE, LAST_STEP, PROBE, START, STEP, TERM, TIME, TRAIN, Point
from tests.recipes.crash.resume_chain import FIRST_PRUNING
from tests.recipes.crash.summary import place
from tests.recipes.crash.variants import (
    FULL,
    LORA,
    PAIRS,
    PAIRS_LORA,
    PPO,
    SAVES,
    Variant,
    write_config,
)
from torchtune_adaptive.rl.ppo import VALUE_FOLDER

WHAT_COUNTS_IS_WRITTEN = ("rename", "link", "unlink", "rmdir")
"""Operations at which a power failure would reveal missing syncs."""


@dataclass(frozen=True)
class Scout:
    """Measurements of an undisturbed run, used to choose points and to compare results."""

    folder: Path
    milliseconds: int
    stages: int
    """Stages per step."""

    def operations(self, stage: str) -> list[str]:
        """Return the largest number of operations before the first step of a process, or between two saves."""
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
    return Scout(folder, round(1000 * life.seconds), variant.stages)


Aim = Callable[[Scout, random.Random], Iterator[Point]]


@dataclass(frozen=True)
class Plan:
    name: str
    variant: Variant
    aim: Aim
    tune_run: bool = False
    manner: str = EVERYTHING
    launched: bool = False
    """Use the launcher even for one rank."""

    def __str__(self) -> str:
        return f"{self.variant} {self.name}"


def every_operation(every: int = 1, rank: int = 0, *, torn: bool = True, cut: bool = False) -> Aim:
    """Yield each operation of a save and its pruning, alternating with operations of the next start after a kill."""

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
    """Yield the last operation of each kind, torn if possible."""
    operations = seen.operations(TRAIN)
    last = {label.partition(" ")[0]: at for at, label in enumerate(operations, start=1) if not is_record(label)}
    for at in last.values():
        yield Point(TRAIN, at, torn=can_be_torn(operations[at - 1]))


def between_models(seen: Scout, _: random.Random) -> Iterator[Point]:
    """Yield each operation on the value model: the policy is written and the value model is not yet complete."""
    for at, label in enumerate(seen.operations(TRAIN), start=1):
        if f"/{VALUE_FOLDER}" in label and label.startswith(("mkdir", "write", "rename", "fsync")):
            yield Point(TRAIN, at, rank=at % 2)
            if can_be_torn(label):
                yield Point(TRAIN, at, torn=True)


def random_stages(count: int) -> Aim:
    """Return an aim before a stage of one of the first three steps."""
    return lambda seen, draw: (replace(in_a_stage(seen, draw), rank=number % 2) for number in range(count))


def can_be_torn(label: str) -> bool:
    return label.startswith("write") and not is_record(label)


def is_record(label: str) -> bool:
    """Return True for lines of the run's record: they are appended whole and are not part of a checkpoint."""
    return label.startswith("write adaptive_")


def unlike(operations: list[str]) -> list[int]:
    """Return the numbers of the operations, from 1; of similar ones the outermost and one more."""
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


Moment = Callable[[Scout, random.Random], Point]
RANK_0, RANK_1, LAUNCHER = Point(TIME, 0), Point(TIME, 0, rank=1), Point(TIME, 0, launcher=True)
"""The process that receives the signal."""


def in_a_step(_: Scout, draw: random.Random) -> Point:
    return Point(STEP, draw.randrange(1, 4))


def in_a_stage(seen: Scout, draw: random.Random) -> Point:
    """Return a stage of one of the first three steps."""
    return Point(STEP, draw.randrange(1, 3 * seen.stages + 1))


def in_the_search(_: Scout, draw: random.Random) -> Point:
    return Point(PROBE, draw.randrange(1, 3))


def at_the_start(seen: Scout, draw: random.Random) -> Point:
    return Point(START, draw.randrange(1, len(seen.operations(START)) + 1))


def in_a_save(seen: Scout, draw: random.Random) -> Point:
    return Point(TRAIN, draw.randrange(1, len(seen.operations(TRAIN)) + 1))


def in_the_last_step(*_: object) -> Point:
    return Point(LAST_STEP, 0)


def in_the_last_save(seen: Scout, draw: random.Random) -> Point:
    return Point(LAST_SAVE, draw.randrange(1, len(seen.operations(TRAIN)) // 2))


def at_a_moment(seen: Scout, draw: random.Random) -> Point:
    return Point(TIME, draw.randrange(1, seen.milliseconds))


def signals_at(moments: Sequence[Moment], whom: Sequence[Point] = (RANK_0,)) -> Aim:
    """Yield SIGTERM and SIGINT to each target at each moment, one run each."""

    def aim(seen: Scout, draw: random.Random) -> Iterator[Point]:
        for blow in (TERM, INT):
            for each in whom:
                for moment in moments:
                    yield replace(moment(seen, draw), blow=blow, rank=each.rank, launcher=each.launcher)

    return aim


def all_plans() -> list[Plan]:
    """Return all plans, most important first."""
    return [*tune_run_plans(), *signal_plans(), *kill_plans()]


def kill_plans() -> list[Plan]:
    """With forked ranks."""
    full, lora = Variant("full", 2), Variant("lora", 2, budget=True)
    peer = every_operation(4, rank=1, torn=False)
    return [
        *(Plan("every operation", variant, every_operation(cut=True)) for variant in (FULL, LORA)),
        Plan("every operation", full, every_operation()),
        *(Plan("every fourth, the peer", variant, peer) for variant in (full, lora)),
        *(Plan("moments", variant, random_moments(6)) for variant in (FULL, LORA)),
        *(Plan("moments", variant, random_moments(6, ranks=2)) for variant in (full, lora, PAIRS)),
        Plan("operations", PAIRS_LORA, random_operations(6)),
        Plan("between policy and value", PPO, between_models),
        Plan("stages", PPO, random_stages(6)),
        Plan("operations", PPO, random_operations(4, ranks=2)),
    ]


def signal_plans() -> list[Plan]:
    """SIGTERM and SIGINT, to ranks and to the launcher."""
    full, lora = Variant("full", 2), Variant("lora", 2, budget=True)
    full_searched, lora_searched = Variant("full", 2, searched=True), Variant("lora", 1, searched=True)
    ends = (in_the_last_step, in_the_last_save)
    everywhere = (in_a_step, in_a_save, at_the_start, *ends)
    through_it = (
        (full, signals_at((in_a_step, in_a_save, *ends), (LAUNCHER, RANK_1))),
        (full, signals_at((at_a_moment,), (LAUNCHER,))),
        (full_searched, signals_at((in_the_search,), (LAUNCHER,))),
        (FULL, signals_at((in_a_step, in_a_save, at_a_moment))),
        (LORA, signals_at((at_the_start, in_the_last_step))),
    )
    alone = (
        (FULL, signals_at((in_a_step, in_a_save, in_the_last_step), (LAUNCHER,))),
        (lora_searched, signals_at((in_the_search, in_a_step), (LAUNCHER,))),
    )
    return [
        *(
            Plan(f"signals to tune run {at}", variant, aim, tune_run=True)
            for at, (variant, aim) in enumerate(through_it)
        ),
        *(Plan("signals to its launcher", variant, aim, tune_run=True, launched=True) for variant, aim in alone),
        Plan("signals", full, signals_at(everywhere, (RANK_0, RANK_1))),
        Plan("signals", FULL, signals_at(everywhere)),
        Plan("signals", LORA, signals_at(everywhere)),
        Plan("signals", lora, signals_at((in_a_step, in_a_save), (RANK_1,))),
        Plan("signals", PAIRS, signals_at((in_a_step, in_a_save, in_the_last_step), (RANK_0, RANK_1))),
        Plan("signals", PAIRS_LORA, signals_at((in_a_step, at_the_start))),
        Plan("signals", PPO, signals_at((in_a_stage, in_a_save, in_the_last_step), (RANK_0, RANK_1))),
        Plan("signals", full_searched, signals_at((in_the_search, in_a_step), (RANK_0, RANK_1))),
        Plan("signals", lora_searched, signals_at((in_the_search, in_a_save))),
    ]


def tune_run_plans() -> list[Plan]:
    """With `tune run`, and a launcher if there are two ranks."""
    full, lora = Variant("full", 2), Variant("lora", 2, budget=True)
    manners = ((full, LAUNCHER_FIRST), (full, RANK_FIRST), (lora, RANK_FIRST))
    return [
        *(Plan("tune run, moments", variant, random_moments(4), tune_run=True) for variant in (FULL, LORA)),
        *(Plan("tune run", variant, random_operations(10, 2), tune_run=True) for variant in (full, lora)),
        *(Plan("tune run", variant, random_operations(6), tune_run=True) for variant in (FULL, LORA)),
        Plan("tune run", PPO, random_operations(3, 2), tune_run=True),
        *(
            Plan(f"tune run, {manner}", variant, random_moments(5, 2), tune_run=True, manner=manner)
            for variant, manner in manners
        ),
    ]
