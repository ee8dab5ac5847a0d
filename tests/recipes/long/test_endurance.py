"""A short version of the long run of `make soak`; and that it would notice what grows."""

from pathlib import Path

import pytest

from tests.recipes.long.endurance import CASES, Case, endure

STEPS = 240
LEAK: list[bytes] = []


def test_many_steps_with_many_saves_keep_nothing(tmp_path: Path) -> None:
    endure(CASES[-1], tmp_path, STEPS)


def leak() -> None:
    LEAK.append(b"1" * 100_000)


def test_what_grows_with_every_step_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in the last third a process has grown by"):
        endure(Case("full"), tmp_path, STEPS, leak)
