"""The tables of measurements in README and docs/measured.md follow benchmarks/results/."""

from pathlib import Path

import pytest

from tools import measured


@pytest.mark.parametrize(
    ("page", "name"), [(measured.README, "measured at a glance"), (measured.PAGE, "measured")], ids=["README", "page"]
)
def test_page_shows_the_current_measurements(page: Path, name: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert measured.begin(name) in text
    assert measured.renewed(text) == text, "it has drifted: python -m tools.measured"


def test_page_of_several_models_shows_what_separate_limits_save() -> None:
    page = " ".join((measured.README.parent / "docs" / "preference-and-rl.md").read_text(encoding="utf-8").split())
    cases = measured.rows_of("stages"), measured.rows_of("rollouts")
    dpo, ppo = (measured.span((row["ratio by CPU time"] for row in rows), 2) for rows in cases)
    assert f"a step takes {dpo} times the CPU time in DPO, and {ppo} times in PPO" in page
