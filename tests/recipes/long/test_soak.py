"""The first steps of `make soak`."""

from pathlib import Path

from tests.recipes.long.soak import Weather, soak


def test_a_run_in_bad_weather_ends_where_one_in_fair_weather_does(tmp_path: Path) -> None:
    soak(Weather(seed=3, epochs=2, samples=128), tmp_path)
