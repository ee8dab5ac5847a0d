"""A short version of the long run of `make soak`; and a test that it detects growth."""

from pathlib import Path

import pytest

from tests.recipes.long.endurance import CASES, Case, endure

STEPS = 240
LEAK: list[bytes] = []


def test_many_steps_with_many_saves_do_not_grow(tmp_path: Path) -> None:
    endure(CASES[-1], tmp_path, STEPS)


def leak() -> None:
    LEAK.append(b"1" * 100_000)


def test_growth_with_every_step_is_detected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in the last third a process has grown by"):
        endure(Case("full"), tmp_path, STEPS, leak)
