"""Who is said to hold the others up, and when."""

from __future__ import annotations

import random
import time

from torchtune_adaptive.step.pace import STEPS, Pace

EVEN, THIRD_IS_SLOW = (0.9, 0.85, 0.9, 0.88), (0.5, 0.6, 0.97, 0.55)


def told(pace: Pace, shares: tuple[float, ...], steps: int = STEPS) -> list[str]:
    return [line for _ in range(steps) if (line := pace.after_step(shares)) is not None]


def test_a_rank_for_which_the_others_wait_is_named_once_with_its_share_of_the_step() -> None:
    pace = Pace()
    assert told(pace, THIRD_IS_SLOW, STEPS - 1) == []
    (line,) = told(pace, THIRD_IS_SLOW, 3 * STEPS)
    assert line.startswith(f"rank 2 holds the others up: in the last {STEPS} steps it worked 97% of the time and ")
    assert "the others 55%" in line


def test_ranks_that_keep_pace_are_not_told_of() -> None:
    assert told(Pace(), EVEN, 3 * STEPS) == []
    assert told(Pace(), (0.9,), 3 * STEPS) == []


def test_a_few_slow_steps_among_many_are_not_told_of() -> None:
    pace = Pace()
    for _ in range(5):
        assert told(pace, THIRD_IS_SLOW, 8) + told(pace, EVEN, 12) == []


def test_a_rank_that_is_slow_again_is_named_again() -> None:
    pace = Pace()
    lines = [told(pace, shares, 2 * STEPS) for shares in (THIRD_IS_SLOW, EVEN, THIRD_IS_SLOW)]
    assert [len(each) for each in lines] == [1, 0, 1]


def test_another_slow_rank_is_named_too() -> None:
    pace = Pace()
    assert len(told(pace, THIRD_IS_SLOW)) == 1
    assert told(pace, (0.99, 0.5, 0.5, 0.5), 2 * STEPS)[0].startswith("rank 0 ")


def test_a_slow_node_is_named_once_with_all_its_ranks() -> None:
    draw = random.Random(0)
    steps = [tuple(draw.gauss(0.95 if rank >= 8 else 0.55, 0.03) for rank in range(16)) for _ in range(1000)]
    pace = Pace()
    (line,) = (line for shares in steps if (line := pace.after_step(shares)) is not None)
    assert line.startswith("ranks 8, 9, 10, 11, 12, 13, 14, 15 hold the others up: in the last 20 steps they worked 9")


def test_where_most_are_busy_nobody_is_named_for_whom_one_waits() -> None:
    assert told(Pace(), (0.9, 0.3, 0.9, 0.92), 3 * STEPS) == []


def test_one_about_as_slow_as_is_told_is_named_once() -> None:
    draw = random.Random(0)
    pace = Pace()
    lines = [pace.after_step((0.55, 0.55, 0.55, draw.gauss(0.8, 0.02))) for _ in range(1000)]
    assert len([line for line in lines if line]) == 1


def test_a_share_is_of_the_time_since_the_last_one() -> None:
    pace = Pace()
    time.sleep(0.02)
    assert pace.worked(waited_s=0.0) == 1.0
    time.sleep(0.02)
    assert 0 <= pace.worked(waited_s=0.015) < 0.8
    assert pace.worked(waited_s=100.0) == 0.0
