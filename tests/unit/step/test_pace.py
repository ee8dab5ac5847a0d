"""Who is said to hold the others up, and when."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

from torchtune_adaptive.limits.change import BEFORE_THE_FIRST
from torchtune_adaptive.step.pace import STEPS_LOOKED_AT, Pace

EVEN, THIRD_IS_SLOW = (0.9, 0.85, 0.9, 0.88), (0.5, 0.6, 0.97, 0.55)


def told(pace: Pace, shares: tuple[float, ...], steps: int = STEPS_LOOKED_AT) -> list[str]:
    return [line for _ in range(steps) if (line := after_step(pace, shares)) is not None]


NUMBERS = itertools.count()


def after_step(pace: Pace, shares: Sequence[float]) -> str | None:
    return pace.message_after(next(NUMBERS), shares, passed_s=1.0)


def test_a_rank_for_which_the_others_wait_is_named_once_with_its_share_of_the_step() -> None:
    pace = Pace()
    assert told(pace, THIRD_IS_SLOW, STEPS_LOOKED_AT - 1) == []
    (line,) = told(pace, THIRD_IS_SLOW, 3 * STEPS_LOOKED_AT)
    assert line.startswith(
        f"rank 2 holds the others up: in the last {STEPS_LOOKED_AT} steps it worked 97% of the time and "
    )
    assert "the others 55%" in line


def test_ranks_that_keep_pace_are_not_told_of() -> None:
    assert told(Pace(), EVEN, 3 * STEPS_LOOKED_AT) == []
    assert told(Pace(), (0.9,), 3 * STEPS_LOOKED_AT) == []


def test_a_few_slow_steps_among_many_are_not_told_of() -> None:
    pace = Pace()
    for _ in range(5):
        assert told(pace, THIRD_IS_SLOW, 8) + told(pace, EVEN, 12) == []


def test_a_rank_that_is_slow_again_is_named_again() -> None:
    pace = Pace()
    lines = [told(pace, shares, 2 * STEPS_LOOKED_AT) for shares in (THIRD_IS_SLOW, EVEN, THIRD_IS_SLOW)]
    assert [len(each) for each in lines] == [1, 0, 1]


def test_another_slow_rank_is_named_too() -> None:
    pace = Pace()
    assert len(told(pace, THIRD_IS_SLOW)) == 1
    assert told(pace, (0.99, 0.5, 0.5, 0.5), 2 * STEPS_LOOKED_AT)[0].startswith("rank 0 ")


def test_a_slow_node_is_named_once_with_all_its_ranks() -> None:
    draw = random.Random(0)
    steps = [tuple(draw.gauss(0.95 if rank >= 8 else 0.55, 0.03) for rank in range(16)) for _ in range(1000)]
    pace = Pace()
    (line,) = (line for shares in steps if (line := after_step(pace, shares)) is not None)
    assert line.startswith("ranks 8, 9, 10, 11, 12, 13, 14, 15 hold the others up: in the last 20 steps they worked 9")


def test_where_most_are_busy_nobody_is_named_for_whom_one_waits() -> None:
    assert told(Pace(), (0.9, 0.3, 0.9, 0.92), 3 * STEPS_LOOKED_AT) == []


def test_a_rank_that_idles_hides_no_slow_one() -> None:
    (line,) = told(Pace(), (0.1, *[0.5] * 6, 0.85), 3 * STEPS_LOOKED_AT)
    assert line.startswith("rank 7 holds the others up")


def test_one_about_as_slow_as_is_told_is_named_once() -> None:
    draw = random.Random(0)
    pace = Pace()
    lines = [after_step(pace, (0.55, 0.55, 0.55, draw.gauss(0.8, 0.02))) for _ in range(1000)]
    assert len([line for line in lines if line]) == 1


def test_a_rank_that_is_slow_in_one_stage_of_many_is_named_once_by_its_share_of_the_whole_step() -> None:
    pace, lines = Pace(), []
    for step in range(3 * STEPS_LOOKED_AT):
        stages = [(0.9, 0.9, 0.9, 1.0)] * 6 + [(0.5, 0.5, 0.5, 1.0)]
        lines += [pace.message_after(step, shares, passed_s=10.0 if shares[0] == 0.5 else 0.1) for shares in stages]
    (line,) = [each for each in lines if each]
    assert line.startswith(
        f"rank 3 holds the others up: in the last {STEPS_LOOKED_AT} steps it worked 100% of the time"
    )
    assert "the others 52%" in line


def test_short_stages_do_not_make_a_step_slow() -> None:
    pace = Pace()
    for step in range(3 * STEPS_LOOKED_AT):
        assert pace.message_after(step, (0.1, 0.1, 1.0), passed_s=0.1) is None
        assert pace.message_after(step, (0.95, 0.95, 1.0), passed_s=10.0) is None


def test_a_share_is_of_the_time_since_the_last_one() -> None:
    pace, waits, before = Pace(), SimpleNamespace(waited_s=0.0), SimpleNamespace(waited_s=70.0)
    pace.add_waits(waits, before)
    pace.add_waits(waits)
    time.sleep(0.02)
    assert pace.share_worked() == 1.0
    waits.waited_s = 0.015
    time.sleep(0.02)
    assert 0 <= pace.share_worked() < 0.8
    time.sleep(0.02)
    assert pace.share_worked() == 1.0, "counted once"
    before.waited_s = 170.0
    assert pace.share_worked() == 0.0


class OfAModel:
    waited_s = 5.0


def test_what_is_over_is_neither_counted_nor_kept() -> None:
    pace, over, goes_on = Pace(), OfAModel(), SimpleNamespace(waited_s=1.0)
    kept = weakref.ref(over)
    pace.add_waits(over, goes_on)
    pace.remove_waits(over)
    del over
    assert kept() is None
    assert pace.share_worked() == 1.0
    time.sleep(0.02)
    goes_on.waited_s += 0.015
    assert 0 <= pace.share_worked() < 0.8


def test_steps_before_the_first_are_counted_one_by_one() -> None:
    pace = Pace()
    lines = [pace.message_after(BEFORE_THE_FIRST, THIRD_IS_SLOW, passed_s=1.0) for _ in range(STEPS_LOOKED_AT)]
    assert [line is not None for line in lines] == [False] * (STEPS_LOOKED_AT - 1) + [True]
