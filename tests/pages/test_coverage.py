"""The table of what is predicted to fit has every config that comes with the package, and says what was predicted."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def coverage() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "coverage.py"))


def test_every_config_for_training_is_in_the_record(coverage: dict[str, Any]) -> None:
    rows = coverage["read_record"]()["rows"]
    assert set(rows) == set(coverage["mirrored"]())
    assert len(rows) > 25
    assert all(set(cards) == set(coverage["CARDS"]) for cards in rows.values())


def test_more_memory_never_fits_less(coverage: dict[str, Any]) -> None:
    for name, cards in coverage["read_record"]()["rows"].items():
        in_order = [cards[card] for card in coverage["CARDS"]]
        assert in_order == sorted(in_order), name


def test_the_page_shows_the_record(coverage: dict[str, Any]) -> None:
    record, page = coverage["read_record"](), coverage["PAGE"].read_text()
    assert coverage["BEGIN"] + coverage["table"](record["rows"]) + coverage["END"] in page
    changes = coverage["table_of_changes"](record)
    assert coverage["WOULD_FIT_BEGIN"] + changes + coverage["WOULD_FIT_END"] in page


def test_what_would_fit_goes_on_behind_what_was_tried(
    coverage: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, asked = "gemma2/27B_full", []

    def ended_at_the_third(cfg: DictConfig, ranks: int) -> int:
        asked.append(cfg)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return int(len(asked) == 4)

    inside = coverage["predict_what_would_fit"].__globals__
    monkeypatch.setitem(inside, "rows_with", ended_at_the_third)
    monkeypatch.setitem(inside, "RECORD", tmp_path / "coverage.json")
    with pytest.raises(KeyboardInterrupt):
        coverage["predict_what_would_fit"](name, coverage["read_record"]())
    coverage["predict_what_would_fit"](name, coverage["read_record"]())
    assert len(asked) == 4
    assert asked[3] == asked[2]
    found = coverage["read_record"]()
    assert found["would fit"][name]["rows"] == 1
    assert coverage["TRIED"] not in found


def test_of_models_that_are_built_alike_one_is_predicted(coverage: dict[str, Any]) -> None:
    trained = coverage["what_is_trained"]
    assert trained("llama3_3/70B_full") == trained("llama3_1/70B_full")
    others = ("llama3_1/70B_lora", "llama3_3/70B_lora", "llama3_3/70B_qlora", "qwen2_5/72B_lora", "gemma2/27B_full")
    assert [trained(name) == trained("llama3_1/70B_lora") for name in others] == [True, True, False, False, False]


def test_a_prediction_of_today_is_that_of_the_record(coverage: dict[str, Any]) -> None:
    name = "qwen2_5/0.5B_lora"
    assert coverage["rows_by_card"](name) == coverage["read_record"]()["rows"][name]
