"""A short version of the long run of `make soak`."""

from pathlib import Path

from tests.recipes.long.endurance import CASES, endure

STEPS = 240


def test_many_steps_with_many_saves_keep_nothing(tmp_path: Path) -> None:
    endure(CASES[-1], tmp_path, STEPS)
