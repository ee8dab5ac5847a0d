"""Whole runs without padding, compared with stock, with checkpointing, clipping, accumulation and a schedule."""

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.finetuning.test_parity import EVERYTHING
from tests.recipes.recorders import read_log
from tests.recipes.running import SGD, demo_config, run_ours, run_stock

RELATIVE = 2e-5
"""Tolerance of losses and gradient norms at any step, in fp32."""
BUDGET = ("adaptive.token_budget=500",)
SAMPLES = {1: 64, 2: 32}
"""Samples by number of ranks: at least four steps."""
WHERE = [("full", 2, True), ("full", 1, False)]
"""Kind, ranks, and activation checkpointing. test_token_budget.py covers runs that store activations, and adapters."""


def run_both(kind: str, folder: Path, *more: str) -> None:
    run_stock(kind, demo_config(kind, folder / "stock", *SGD, *EVERYTHING, *more))
    run_ours(kind, demo_config(kind, folder / "ours", *SGD, *EVERYTHING, *more, *BUDGET))


@pytest.mark.smoke("full-2-True")
@pytest.mark.parametrize(("kind", "ranks", "checkpointed"), WHERE)
def test_checkpointing_clipping_accumulation_and_schedule_match_stock(
    kind: str, ranks: int, checkpointed: bool, tmp_path: Path
) -> None:
    epochs = 1 if ranks == 1 else 2
    more = (f"enable_activation_checkpointing={checkpointed}", f"epochs={epochs}", f"dataset.samples={SAMPLES[ranks]}")
    run_on_ranks(ranks, run_both, kind, tmp_path, *more, timeout_s=120, in_group=False)
    stock, ours = (read_log(tmp_path / who / "log.jsonl") for who in ("stock", "ours"))
    assert len(ours) == len(stock) >= 4
    assert max(step["microbatches"] for step in ours) > 1
    for step_of_stock, step_of_ours in zip(stock, ours, strict=True):
        assert step_of_ours["padding_fraction"] == 0
        for figure in ("step", "loss", "grad_norm", "lr"):
            assert step_of_ours[figure] == pytest.approx(step_of_stock[figure], rel=RELATIVE), figure
