"""Token budgets in whole runs: parity with stock, recovery, growth, resume, packed and long samples."""

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.finetuning.test_adaptive_runs import Runs, run_and_listen
from tests.recipes.recorders import assert_same_figures, read_log, search_results
from tests.recipes.running import (
    RELATIVE,
    RELATIVE_AFTER_ADAM,
    SGD,
    demo_config,
    run_ours,
    run_stock,
    saved_weights,
    start_in_process,
)
from torchtune_adaptive.errors import AdaptiveError

STEPS = (*SGD, "batch_size=2", "gradient_accumulation_steps=4", "clip_grad_norm=0.7", "dataset.samples=96")
BUDGET = ("adaptive.sequence_length=null", "adaptive.memory_limit=null")
"""Other keys of the section keep the demo config's values."""
LIMIT = "adaptive.memory_limit=[120MiB,48MiB]"
"""Rank 1 has little memory."""
SHORT = "adaptive.memory_limit=[120MiB,20MiB]"
"""Rank 1 cannot run its share of a step at once."""
RUNS: dict[str, tuple[str, ...]] = {
    "budget": ("adaptive.token_budget=600",),
    "rows": ("adaptive.token_budget=600", "adaptive.padding=True", "adaptive.deal=False"),
    "auto": ("adaptive.token_budget=auto", LIMIT),
    "short": ("adaptive.token_budget=4000", SHORT),
}


def run_all(kind: str, folder: Path) -> dict[str, list[str]]:
    lines = {}
    for name, overrides in RUNS.items():
        if {LIMIT, SHORT} & {*overrides} and os.environ["WORLD_SIZE"] != "2":
            continue
        lines[name] = run_and_listen(kind, folder / name, *STEPS, *BUDGET, *overrides)
    run_stock(kind, demo_config(kind, folder / "stock", *STEPS))
    return lines


@pytest.fixture(scope="module", params=[("full", 2), ("lora", 3)], ids=str)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    kind, ranks = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{ranks}")
    return Runs(folder, run_on_ranks(ranks, run_all, kind, folder, timeout_s=250, in_group=False))


@pytest.mark.parametrize("name", ["budget", "rows"])
def test_every_step_has_the_figures_of_the_stock_recipe(runs: Runs, name: str) -> None:
    stock, ours = runs.log("stock"), runs.log(name)
    assert len(ours) == len(stock) >= 4
    assert_same_figures(ours, stock, ("step", "loss", "grad_norm", "lr"), rel=RELATIVE)


@pytest.mark.parametrize("name", ["budget", "rows"])
def test_saved_weights_are_those_of_the_stock_recipe(runs: Runs, name: str) -> None:
    stock, ours = (saved_weights(runs.folder / who) for who in ("stock", name))
    torch.testing.assert_close(ours, stock, rtol=RELATIVE, atol=1e-6)


def test_microbatches_stay_within_the_budget_and_dealing_balances_ranks(runs: Runs) -> None:
    rows, joined = runs.log("rows"), runs.log("budget")
    assert all(step["microbatch_tokens"] <= 600 for step in (*rows, *joined))
    assert all(0 < step["padding_fraction"] < 0.5 for step in rows)
    assert all(step["padding_fraction"] == 0 for step in joined)
    assert sum(step["microbatches"] for step in rows) > sum(step["microbatches"] for step in joined)
    assert all(1 <= step["rank_imbalance"] < 1.1 for step in joined)
    assert sum(step["rank_imbalance"] for step in rows) > sum(step["rank_imbalance"] for step in joined)


ON_TWO_RANKS = pytest.mark.parametrize("runs", [("full", 2)], ids=str, indirect=True)
"""The runs that measure memory."""


@pytest.mark.smoke("('full', 2)")
@ON_TWO_RANKS
def test_auto_measures_a_few_lengths_without_running_out_of_memory(runs: Runs) -> None:
    lines = runs.lines[0]["auto"]
    assert any(line.startswith("token budget · ") and "probes · budget 48.0 MiB a rank" in line for line in lines)
    assert any("16 samples a step, in microbatches of at most" in line for line in lines)
    assert runs.log("auto")[-1]["oom_recoveries"] == 0
    result = search_results(runs.folder / "auto" / "out")[""]
    points = result["points"]
    assert 4 <= len(points) <= 8
    assert all(point["peak"]["fits"] for point in points)
    assert points[0]["length"] == max(point["length"] for point in points)
    assert result["held_out_error"] < 0.05
    assert result["budget_bytes"] == 48 * 2**20


@pytest.mark.parametrize(
    ("growth", "most"),
    [((), 8), (("epochs=2", "batch_increase_function=tests.recipes.finetuning.test_token_budget.twice"), 16)],
)
def test_auto_probes_at_most_the_rows_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growth: tuple[str, ...], most: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ample = ("adaptive.memory_limit=1GiB", "adaptive.token_budget=auto", "use_maximum_batch_size=False")
    start_in_process("full", "--config", "adaptive/demo/full", *STEPS, *ample, *growth)
    points = search_results(tmp_path / "runs/demo/full")[""]["points"]
    assert max(point["rows"] for point in points) == most


def twice(epoch: int, batch_size: int) -> int:
    """A `batch_increase_function`."""
    return batch_size if epoch == 1 else 0


@pytest.mark.smoke("('full', 2)")
@ON_TWO_RANKS
def test_auto_has_the_losses_of_stock(runs: Runs) -> None:
    assert_same_figures(runs.log("auto"), runs.log("stock"), ["loss"], rel=RELATIVE)


@ON_TWO_RANKS
def test_recovery_under_a_token_budget_has_the_losses_of_stock(runs: Runs) -> None:
    lines = [line for line in runs.lines[0]["short"] if "out of memory" in line]
    assert lines
    assert all("on rank 1 (longest sample" in line and "tokens, step repeated" in line for line in lines)
    assert runs.log("short")[-1]["oom_recoveries"] == len(lines)
    assert_same_figures(runs.log("short"), runs.log("stock"), ["loss"], rel=RELATIVE)


SMALL = ("batch_size=2", "gradient_accumulation_steps=2", "clip_grad_norm=inf")
PACKED = ("dataset.packed=True", "tokenizer.max_seq_len=256", "dataset.samples=96")


def run_packed(folder: Path) -> list[str]:
    by_rows = ("batch_size=4", "gradient_accumulation_steps=1")
    run_ours("full", demo_config("full", folder / "rows", *PACKED, "clip_grad_norm=inf", *by_rows))
    return run_and_listen("full", folder / "tokens", *SMALL, *BUDGET, *PACKED, "adaptive.token_budget=1100")


def test_packed_dataset_uses_row_microbatches_and_logs_it_once(tmp_path: Path) -> None:
    lines, _ = run_on_ranks(2, run_packed, tmp_path, timeout_s=200, in_group=False)
    printed = [line for line in lines if "the dataset is packed" in line]
    assert printed == ["token budget · the dataset is packed, all rows have 256 tokens: microbatches of 4 rows"]
    by_rows, by_tokens = (read_log(tmp_path / name / "log.jsonl") for name in ("rows", "tokens"))
    assert_same_figures(by_tokens, by_rows, ["loss"], rel=RELATIVE_AFTER_ADAM)
    assert len(by_tokens) >= 2
    assert all(step["padding_fraction"] == 0 for step in by_tokens)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("200", r"^sample \d+ of the dataset has \d+ tokens.* raise adaptive\.token_budget"),
        ("auto", r"^one row of \d+ tokens .* \(sample \d+ of the dataset\); "),
    ],
)
def test_sample_that_does_not_fit_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    limit = "adaptive.memory_limit=13MiB" if budget == "auto" else "adaptive.memory_limit=null"
    asked = (f"adaptive.token_budget={budget}", "tokenizer.max_seq_len=null", limit, "use_maximum_batch_size=False")
    with pytest.raises(AdaptiveError, match=message):
        start_in_process("full", "--config", "adaptive/demo/full", *SMALL, *BUDGET[:1], *asked, "dataset.samples=48")
