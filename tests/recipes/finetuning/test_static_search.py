"""`adaptive.search: static`: a prediction, and one probe that confirms it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.run import static as static_search

SEARCHING = (
    "use_maximum_batch_size=True",
    "adaptive.memory_limit=40MiB",
    "adaptive.sequence_length=256",
    "adaptive.round_to=none",
    "adaptive.reuse_search=False",
)


def search(kind: str, folder: Path, strategy: str) -> None:
    """Collective: what a run does before it would train."""
    recipe = load_ours(kind)(demo_config(kind, folder / strategy, *SEARCHING, f"adaptive.search={strategy}"))
    recipe.setup()
    recipe.cleanup()


def found(kind: str, folder: Path, strategy: str) -> dict[str, Any]:
    run_on_ranks(2, search, kind, folder, strategy, timeout_s=240, in_group=False)
    record: dict[str, Any] = json.loads((folder / strategy / "out" / "batch_search.json").read_text())
    return record["result"]


def test_two_ranks_measure_what_was_predicted_and_nothing_else(tmp_path: Path) -> None:
    static, exact = found("full", tmp_path, "static"), found("full", tmp_path, "binary")
    assert static["rows"] == exact["rows"] > 2
    assert [probe["rows"] for probe in static["probes"]] == [static["rows"]]


@pytest.fixture
def alone() -> Iterator[None]:
    process_group.join_on(torch.device("cpu"))
    yield
    process_group.leave()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PROGRAM", "torchtune_adaptive.tune.plan.no_such_module", "No module named"),
        ("TIME_LIMIT_S", 0.05, "took longer than 0 s"),
    ],
)
def test_a_prediction_that_fails_leaves_the_search_to_linear(
    alone: None,
    name: str,
    value: Any,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(static_search, name, value)
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    assert static_search.predicted_rows(demo_config("full", tmp_path / "run"), tokens=256, budget_bytes=2**26) == 0
    assert "adaptive.search: linear" in caplog.text
    assert reason in caplog.text


def test_what_cannot_be_predicted_is_said_without_a_traceback(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    cfg = demo_config("full", tmp_path / "run", "dataset.packed=True")
    assert static_search.predicted_rows(cfg, tokens=256, budget_bytes=2**26) == 0
    assert caplog.messages[-1].endswith("which predictions do not cover: set it to False")
