"""What each stage of preference training is found to fit holds for a whole run, and not only for its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import demo_config, run_ours

TIGHT = (
    "use_maximum_batch_size=True",
    "adaptive.round_to=none",
    "adaptive.sequence_length=128",
    "adaptive.memory_limit=36MiB",
    "dataset._component_=benchmarks.stages.random_pairs",
    "dataset.tokens=128",
    "dataset.samples=192",
    "batch_size=64",
    "gradient_accumulation_steps=1",
)


def train(folder: Path, *overrides: str) -> None:
    run_ours("full_dpo", demo_config("full_dpo", folder, *TIGHT, *overrides))


def found(folder: Path, place: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "out" / place / "batch_search.json").read_text())["result"]
    return result


@pytest.mark.parametrize("precompute", [False, True])
def test_the_reference_fits_beside_optimizer_state_that_the_search_has_not_left_behind(
    precompute: bool, tmp_path: Path
) -> None:
    run_on_ranks(
        1, train, tmp_path / "run", f"adaptive.precompute_reference={precompute}", timeout_s=60, in_group=False
    )
    policy, reference = found(tmp_path / "run", ""), found(tmp_path / "run", "reference")
    assert policy["rows"] < reference["rows"] < 64
    steps = read_log(tmp_path / "run" / "log.jsonl")
    assert [step["oom_recoveries"] for step in steps] == [0, 0, 0]
