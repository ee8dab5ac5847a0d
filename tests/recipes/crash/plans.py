"""A table of plans: runs that are killed at every operation of a save and at random, or receive signals anywhere."""

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from tests.recipes.crash.hook import INT, KILL, LAST_SAVE, LAST_STEP, PROBE, START, STEP, TERM, TIME, TRAIN, Point
from tests.recipes.crash.runs import (
    FINISHED,
    FIRST_PRUNING,
    FORKED,
    LAUNCHED,
    SAVES,
    TUNE_RUN,
    Variant,
    live,
    prepared,
)
from torchtune_adaptive.rl.ppo import VALUE_FOLDER

SHOWS_MISSING_SYNCS = ("rename", "link", "unlink", "rmdir")
"""Operations at which a power failure would reveal missing syncs."""


@dataclass(frozen=True)
class Scout:
    """Measurements of an undisturbed run, used to choose points and to compare results."""

    folder: Path
    stages: int
    """Stages per step."""

    @property
    def _notes(self) -> Path:
        return self.folder / "lives" / "0000"

    @property
    def milliseconds(self) -> int:
        began, ended = (self._notes / name for name in ("pid0", "operations0"))
        return (ended.stat().st_mtime_ns - began.stat().st_mtime_ns) // 10**6

    def operations(self, stage: str) -> list[str]:
        """Return the largest number of operations before the first step of a process, or between two saves."""
        notes = (self._notes / "operations0").read_text()
        after_step = [part.splitlines() for part in re.split(r"^step \d+\n", notes, flags=re.MULTILINE)]
        pruning = [save for save in SAVES if save > FIRST_PRUNING]
        saves = [list(chain.from_iterable(after_step[save:following])) for save, following in pairwise(pruning)]
        lines = max(saves, key=len) if stage == TRAIN else after_step[0]
        return [line.partition(" ")[2] for line in lines]


def scout(variant: Variant, way: str, folder: Path) -> Scout:
    life = live(prepared(variant, folder, way=way), 0, None, 0)
    assert life.ended == FINISHED, f"{variant}: the undisturbed run {life.ended}\n{life.output}"
    return Scout(folder, variant.stages)


Aim = Callable[[Scout, random.Random], Iterator[Point]]
Moment = Callable[[Scout, random.Random], Point]


class Plan(NamedTuple):
    name: str
    variant: Variant
    aim: Aim
    way: str = FORKED

    def __str__(self) -> str:
        return f"{self.variant} {self.way} {self.name}"


def every_operation(every: int = 1, rank: int = 0, *, among: str = "", cut: bool = False) -> Aim:
    """Yield each operation of a save and its pruning, alternating with operations of the next start after a kill."""

    def aim(seen: Scout, _: random.Random) -> Iterator[Point]:
        operations, starts = seen.operations(TRAIN), math.ceil(1.5 * len(seen.operations(START)))
        for at in [at for at in unlike(operations) if among in operations[at - 1]][::every]:
            yield Point(TRAIN, at, rank=rank)
            if rank == 0 and can_be_torn(operations[at - 1]):
                yield Point(TRAIN, at, torn=True)
            if cut and operations[at - 1].startswith(SHOWS_MISSING_SYNCS):
                yield Point(TRAIN, at, cut=True)
            if at <= starts and not among:
                yield Point(START, at, rank=rank)

    return aim


def one_of_each(seen: Scout, _: random.Random) -> Iterator[Point]:
    """Yield the last operation of each kind, torn if possible."""
    operations = seen.operations(TRAIN)
    last = {label.partition(" ")[0]: at for at, label in enumerate(operations, start=1) if not is_record(label)}
    for at in last.values():
        yield Point(TRAIN, at, torn=can_be_torn(operations[at - 1]))


def can_be_torn(label: str) -> bool:
    return label.startswith("write") and not is_record(label)


def is_record(label: str) -> bool:
    """Return True for lines of the run's record: they are appended whole and are not part of a checkpoint."""
    return label.startswith("write adaptive_")


def unlike(operations: list[str]) -> list[int]:
    """Return the numbers of the operations, from 1; of similar ones the outermost and one more."""
    alike: dict[str, list[int]] = {}
    for at, label in enumerate(operations, start=1):
        alike.setdefault(re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "N", label), []).append(at)
    return sorted(at for group in alike.values() for at in {group[0], group[len(group) // 2], group[-1]})


def in_a_step(seen: Scout, draw: random.Random) -> Point:
    """Return a stage of one of the first three steps."""
    return Point(STEP, draw.randrange(1, 3 * seen.stages + 1))


def in_the_search(_: Scout, draw: random.Random) -> Point:
    return Point(PROBE, draw.randrange(1, 3))


def at_the_start(seen: Scout, draw: random.Random) -> Point:
    return Point(START, draw.randrange(1, len(seen.operations(START)) + 1))


def in_a_save(seen: Scout, draw: random.Random) -> Point:
    operations = seen.operations(TRAIN)
    at = draw.randrange(1, len(operations) + 1)
    return Point(TRAIN, at, torn=can_be_torn(operations[at - 1]) and draw.random() < 0.5)


def in_the_last_step(*_: object) -> Point:
    return Point(LAST_STEP, 0)


def in_the_last_save(seen: Scout, draw: random.Random) -> Point:
    return Point(LAST_SAVE, draw.randrange(1, len(seen.operations(TRAIN)) // 2))


def at_a_moment(seen: Scout, draw: random.Random) -> Point:
    return Point(TIME, draw.randrange(1, max(2, seen.milliseconds)))


RANK_0, RANK_1, LAUNCHER = Point(TIME, 0), Point(TIME, 0, rank=1), Point(TIME, 0, launcher=True)
"""The process that receives the signal."""
BOTH = (RANK_0, RANK_1)
SIGNALS = (TERM, INT)


def at(*moments: Moment, times: int = 1, whom: tuple[Point, ...] = (RANK_0,), blows: tuple[str, ...] = (KILL,)) -> Aim:
    """Yield each signal to each process at each moment, as often as `times`."""

    def aim(seen: Scout, draw: random.Random) -> Iterator[Point]:
        for blow in blows * times:
            for who in whom:
                for moment in moments:
                    point = moment(seen, draw)
                    torn = point.torn and (blow, who) == (KILL, RANK_0)
                    yield replace(point, blow=blow, rank=who.rank, launcher=who.launcher, torn=torn)

    return aim


FULL, LORA = Variant("full", 1, "tokens"), Variant("lora", 1)
"""Variants that are killed at every operation."""
FULL_2, LORA_2 = Variant("full", 2), Variant("lora", 2, "tokens")
PAIRS, PAIRS_LORA, PPO = Variant("full_dpo", 2), Variant("lora_dpo", 1, "tokens"), Variant("full_ppo", 2)
SEARCHED, SEARCHED_LORA = Variant("full", 2, "searched"), Variant("lora", 1, "searched")
OPERATIONS = (in_a_save, in_a_save, in_a_save, at_the_start)
ENDS = (in_the_last_step, in_the_last_save)
ANYWHERE = (in_a_step, in_a_save, at_the_start, *ENDS)
PLANS = (
    # kills of `tune run`
    *(Plan("moments", variant, at(at_a_moment, times=4), TUNE_RUN) for variant in (FULL, LORA)),
    *(Plan("operations", variant, at(*OPERATIONS, whom=BOTH), TUNE_RUN) for variant in (FULL_2, LORA_2)),
    *(Plan("operations", variant, at(*OPERATIONS, times=2), TUNE_RUN) for variant in (FULL, LORA)),
    Plan("operations", PPO, at(in_a_save, whom=(RANK_0, RANK_1, RANK_0)), TUNE_RUN),
    Plan("launcher", FULL_2, at(at_a_moment, times=5, whom=(LAUNCHER,)), TUNE_RUN),
    *(Plan("rank", variant, at(at_a_moment, times=3, whom=BOTH), TUNE_RUN) for variant in (FULL_2, LORA_2)),
    # SIGTERM and SIGINT to `tune run`
    Plan("signals", FULL_2, at(in_a_step, in_a_save, *ENDS, whom=(LAUNCHER, RANK_1), blows=SIGNALS), TUNE_RUN),
    Plan("signals at moments", FULL_2, at(at_a_moment, whom=(LAUNCHER,), blows=SIGNALS), TUNE_RUN),
    Plan("signals", SEARCHED, at(in_the_search, whom=(LAUNCHER,), blows=SIGNALS), TUNE_RUN),
    Plan("signals", FULL, at(in_a_step, in_a_save, at_a_moment, blows=SIGNALS), TUNE_RUN),
    Plan("signals", LORA, at(at_the_start, in_the_last_step, blows=SIGNALS), TUNE_RUN),
    Plan("signals", FULL, at(in_a_step, in_a_save, in_the_last_step, whom=(LAUNCHER,), blows=SIGNALS), LAUNCHED),
    Plan("signals", SEARCHED_LORA, at(in_the_search, in_a_step, whom=(LAUNCHER,), blows=SIGNALS), LAUNCHED),
    # SIGTERM and SIGINT to forked ranks
    Plan("signals", FULL_2, at(*ANYWHERE, whom=BOTH, blows=SIGNALS)),
    *(Plan("signals", variant, at(*ANYWHERE, blows=SIGNALS)) for variant in (FULL, LORA)),
    Plan("signals", LORA_2, at(in_a_step, in_a_save, whom=(RANK_1,), blows=SIGNALS)),
    *(
        Plan("signals", each, at(in_a_step, in_a_save, in_the_last_step, whom=BOTH, blows=SIGNALS))
        for each in (PAIRS, PPO)
    ),
    Plan("signals", PAIRS_LORA, at(in_a_step, at_the_start, blows=SIGNALS)),
    Plan("signals", SEARCHED, at(in_the_search, in_a_step, whom=BOTH, blows=SIGNALS)),
    Plan("signals", SEARCHED_LORA, at(in_the_search, in_a_save, blows=SIGNALS)),
    # kills of forked ranks
    *(Plan("every operation", variant, every_operation(cut=True)) for variant in (FULL, LORA)),
    Plan("every operation", FULL_2, every_operation()),
    *(Plan("every fourth on the peer", variant, every_operation(4, rank=1)) for variant in (FULL_2, LORA_2)),
    *(Plan("moments", variant, at(at_a_moment, times=6)) for variant in (FULL, LORA)),
    *(Plan("moments", variant, at(at_a_moment, times=3, whom=BOTH)) for variant in (FULL_2, LORA_2, PAIRS)),
    Plan("operations", PAIRS_LORA, at(*OPERATIONS, times=2)),
    Plan("between policy and value", PPO, every_operation(among=f"/{VALUE_FOLDER}")),
    Plan("stages", PPO, at(in_a_step, times=3, whom=BOTH)),
    Plan("operations", PPO, at(in_a_save, at_the_start, whom=BOTH)),
)
