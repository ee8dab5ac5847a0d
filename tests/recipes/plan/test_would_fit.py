"""What docs/coverage.md says would fit a card: every line starts as it is, on two ranks, with models that are shrunk.

Offloading, which a machine without a GPU cannot have, is left out, as for torchtune's configs (stock_configs.py).
That a run would take the line as a whole, on its ranks and on GPUs, is checked without one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.tune.plan.overrides import changed
from torchtune_adaptive.tune.start.catalogue import our_configs
from torchtune_adaptive.tune.validate.config import check_config

RECORD = json.loads((Path(__file__).parents[3] / "docs" / "coverage.json").read_text(encoding="utf-8"))
LINES: dict[str, dict[str, Any]] = {name: line for name, line in RECORD["would fit"].items() if line["rows"]}
OURS = {each.name.removeprefix("adaptive/"): each for each in our_configs()}


def with_appended(name: str) -> DictConfig:
    cfg = OmegaConf.load(OURS[name].path)
    assert isinstance(cfg, DictConfig)
    return changed(cfg, tuple(LINES[name]["append"].split()))


def test_a_line_is_kept_for_what_does_not_fit_and_for_nothing_else() -> None:
    smallest = next(iter(next(iter(RECORD["rows"].values()))))
    assert set(RECORD["would fit"]) <= {name for name, cards in RECORD["rows"].items() if not cards[smallest]}
    assert len(LINES) >= 3


@pytest.mark.parametrize("name", LINES)
def test_a_run_would_take_the_line_on_its_ranks(name: str) -> None:
    found = check_config(with_appended(name), OURS[name].recipe, LINES[name]["ranks"], here=False)
    assert found.wrong == []
