"""The first steps of `make soak`."""

from pathlib import Path

from tests.recipes.long.soak import Weather, soak


def test_run_under_memory_pressure_ends_like_an_undisturbed_run(tmp_path: Path) -> None:
    soak(Weather(seed=3, epochs=2, samples=128), tmp_path)
