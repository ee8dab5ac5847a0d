"""Ranks that stand for all others are the first, middle and last of each dimension."""

import pytest

from gpu_rehearsal.processes.representatives import representatives

GRID = [0, 4, 7, 512, 516, 519, 1016, 1020, 1023]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], [0, 512, 1023]),
        ([range(8), range(0, 1024, 8)], GRID),
        ([range(8)], GRID),  # all ranks are the second dimension
        ([range(8), range(0, 1024, 8), range(1024), range(8, 16)], GRID),  # what these reach is no dimension
    ],
)
def test_representatives_have_three_coordinates_of_each_dimension(groups: list[range], expected: list[int]) -> None:
    assert representatives(groups, 1024) == expected


def test_all_stages_of_a_pipeline_are_chosen() -> None:
    stages = range(32, 1024, 256)
    chosen = representatives([range(32, 40), stages], 1024, stages)
    assert chosen == [256 * stage + 8 * at + each for stage in range(4) for at in (0, 16, 31) for each in (0, 4, 7)]


def test_four_dimensions_do_not_exceed_the_ranks_that_can_run() -> None:
    chosen = representatives([range(4), range(0, 32, 4), range(0, 256, 32), range(0, 1024, 256)], 1024)
    assert (chosen[0], len(chosen)) == (0, 27)
