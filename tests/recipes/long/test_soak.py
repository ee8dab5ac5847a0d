"""The first steps of `make soak`."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.recipes.long.soak import Weather, check_weather, soak
from torchtune_adaptive.engine.governor import GROWTH, RECOVERY
from torchtune_adaptive.tune.preference import POLICY, REFERENCE


def test_a_run_in_bad_weather_ends_where_one_in_fair_weather_does(tmp_path: Path) -> None:
    soak(Weather(seed=3, epochs=2, samples=128), tmp_path)


@pytest.mark.parametrize(
    ("recoveries", "growths", "flaw"),
    [((9, 16), (11, 14), None), ((6, 16), (11, 14), "no storm"), ((9, 16), (5, 14), "no end")],
)
def test_weather_that_spares_a_stage_is_no_soak(
    recoveries: tuple[int, int], growths: tuple[int, int], flaw: str | None
) -> None:
    stages = (REFERENCE, POLICY)
    kinds = Counter({(RECOVERY, stage): count for stage, count in zip(stages, recoveries, strict=True)})
    kinds |= Counter({(GROWTH, stage): count for stage, count in zip(stages, growths, strict=True)})
    with pytest.raises(AssertionError, match=flaw) if flaw else nullcontext():
        check_weather(Weather(seed=4), kinds)
