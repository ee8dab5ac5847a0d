"""The first steps of `make soak`; and a test that its long run detects growth."""

from pathlib import Path

import pytest

from tests.recipes.long.soak import CASES, Weather, endure, soak

STEPS = 240
LEAK: list[bytes] = []


def test_run_under_memory_pressure_ends_like_an_undisturbed_run(tmp_path: Path) -> None:
    soak(Weather(seed=3, epochs=2, samples=128), tmp_path)


def test_many_steps_with_many_saves_do_not_grow(tmp_path: Path) -> None:
    endure(CASES[-1], tmp_path, STEPS)


def leak() -> None:
    LEAK.append(b"1" * 100_000)


def test_growth_with_every_step_is_detected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in the last third a process has grown by"):
        endure(CASES[0], tmp_path, STEPS, leak)
