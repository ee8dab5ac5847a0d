"""The first steps of `make soak`."""

from pathlib import Path

import pytest

from tests.recipes.soak import Weather, soak


@pytest.mark.parametrize(
    ("seed", "samples"),
    [(0, 256), (1, 256), (3, 128), (4, 128), (5, 208)],
    ids=["full", "lora", "pairs", "lora pairs", "ppo"],
)
def test_a_run_in_bad_weather_ends_where_one_in_fair_weather_does(seed: int, samples: int, tmp_path: Path) -> None:
    soak(Weather(seed, epochs=2, samples=samples), tmp_path)
