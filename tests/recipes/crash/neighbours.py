"""Two runs in one folder: the second ends with an error that says who is there, and the first is none the worse."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.ranks import PATIENCE
from tests.recipes.crash import evidence
from tests.recipes.crash.points import HOLD, STEP, TRAIN, Point
from tests.recipes.crash.tally import Tally
from tests.recipes.crash.trap import GO, HELD
from tests.recipes.crash.variants import Variant, write_config
from tests.recipes.crash.victims import FAILED, FINISHED, Start, live

HELD_UP = (Point(STEP, 1, blow=HOLD), Point(STEP, 8, blow=HOLD), Point(TRAIN, 6, blow=HOLD))
"""Where the first run is while the second starts: before its first checkpoint, between two, in a save."""
OTHERWISE = ("resume_from_checkpoint=False", "overwrite_output_dir=True")
"""How the second may be started, beside the command of the first."""
UNTIL_HELD_S = 30


def second_runs(
    variant: Variant, folder: Path, reference: Path, points: Sequence[Point] = HELD_UP, *, tune_run: bool = False
) -> Tally:
    """With `tune_run` it is the second run that is started by it."""
    tally = Tally()
    for number, point in enumerate(points):
        place = folder / str(number)
        start = Start(variant, place, tuple(write_config(variant, place)))
        how = f'--only "neighbours", {variant}, the first held at {point}'
        with held_up(start, point, tally, how):
            _the_second(replace(start, tune_run=tune_run), 1, tally, how)
            if not tune_run:
                more = tuple(write_config(variant, place, *OTHERWISE))
                _the_second(replace(start, arguments=more), 2, tally, f"{how}, the second overwrites")
        for each in evidence.differences(place, reference):
            tally.fault(f"{how}: {each}")
    return tally


@contextmanager
def held_up(start: Start, point: Point, tally: Tally, how: str) -> Iterator[None]:
    """A run that waits there while this is open, and then goes on to its end."""
    notes = start.folder / "lives" / "0000"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live, start, 0, point, 0)
        try:
            deadline = time.monotonic() + UNTIL_HELD_S * PATIENCE
            while not (notes / HELD).exists():
                assert not first.done(), f"{how}: it never came there, but {first.result()}"
                assert time.monotonic() < deadline, f"{how}: it takes too long to come there"
                time.sleep(0.05)
            yield
        finally:
            (notes / GO).touch()
        life = first.result()
    print(f"  {how}: {life.ended} ({life.seconds:.1f} s)", flush=True)
    if life.ended != FINISHED:
        tally.lose(f"{how}: {life.ended}\n{life.output}")


def _the_second(start: Start, number: int, tally: Tally, how: str) -> None:
    before = evidence.picture_of(start.folder / "out")
    life = live(start, number, None, 0)
    tally.second_runs += 1
    errors = [line for line in life.output.splitlines() if line.startswith("error")]
    if life.ended != FAILED or len(errors) != 1 or "is in use by process" not in errors[0]:
        tally.fault(f"{how}: the second {life.ended}\n{life.output}")
    if evidence.picture_of(start.folder / "out") != before:
        tally.fault(f"{how}: the second has changed files of the first")


def both_at_once(variant: Variant, folder: Path, reference: Path) -> Tally:
    """Neither is first: one of them trains, and the other is refused, or comes when all is done."""
    tally, how = Tally(), f'--only "neighbours", {variant}, both at once'
    start = Start(variant, folder, tuple(write_config(variant, folder)))
    with ThreadPoolExecutor(2) as pool:
        lives = [each.result() for each in [pool.submit(live, start, number, None, 0) for number in range(2)]]
    print(f"  {how}: {' and '.join(life.ended for life in lives)}", flush=True)
    tally.second_runs += 1
    late = [life for life in lives if "is in use by process" in life.output or "nothing left to train" in life.output]
    if len(late) != 1 or FINISHED not in [life.ended for life in lives]:
        tally.fault(f"{how}: {' and '.join(life.ended + life.output for life in lives)}")
    for each in evidence.differences(folder, reference):
        tally.fault(f"{how}: {each}")
    return tally
