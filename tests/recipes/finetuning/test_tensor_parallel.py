"""Tensor parallelism in the full recipe: parity with stock; search, token budget, recovery."""

import json
from pathlib import Path

import pytest

from tests.forked_commands import tune_run_forked
from tests.ranks import run_on_ranks
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours, run_stock
from tests.timeline import read_timeline

STEPS = 3
TENSOR = (
    *SGD,
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "clip_grad_norm=null",  # stock fails with it
    "dataset.samples=24",
    "batch_size=2",
)
BY_ONE = ("batch_size=1", "gradient_accumulation_steps=4")
"""The same steps in microbatches of one row."""

SEARCHED = ("use_maximum_batch_size=True", "adaptive.search=binary", "adaptive.sequence_length=256")
BUDGET = ("adaptive.token_budget=auto", "adaptive.sequence_length=null")
LIMITS = "adaptive.memory_limit=[64MiB,64MiB,64MiB,16MiB]"
CLIPPED = "clip_grad_norm=0.5"
APART = (*SGD, "dataset.samples=24", "batch_size=1")
"""The same steps without tensor parallelism, on ranks with different samples."""

ON_TWO = ("use_maximum_batch_size=False", "gradient_accumulation_steps=2", "shuffle=False", "epochs=1")


def run_all(folder: Path) -> None:
    run_stock("full", demo_config("full", folder / "stock", *TENSOR))
    run_ours("full", demo_config("full", folder / "by_one", *TENSOR, *BY_ONE))
    run_ours("full", demo_config("full", folder / "searched", *TENSOR, LIMITS, *SEARCHED))
    run_ours("full", demo_config("full", folder / "budget", *TENSOR, LIMITS, *BUDGET))
    run_ours("full", demo_config("full", folder / "clipped", *TENSOR, CLIPPED))
    run_ours("full", demo_config("full", folder / "apart", *APART, CLIPPED))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups of two ranks; each group holds a shard."""
    folder = tmp_path_factory.mktemp("tensor")
    run_on_ranks(4, run_all, folder, timeout_s=180, in_group=False)
    return folder


@pytest.mark.parametrize("case", ["by_one", "searched", "budget"])
def test_losses_are_those_of_the_stock_recipe(runs: Path, case: str) -> None:
    stock, ours = (read_log(runs / which / "log.jsonl") for which in ("stock", case))
    assert len(ours) == len(stock) >= STEPS
    assert_same_figures(ours, stock, ["loss"], rel=RELATIVE)


def test_search_and_token_budget_fit_the_tightest_rank(runs: Path) -> None:
    search, profile = (
        json.loads((runs / case / "out/batch_search.json").read_text()) for case in ("searched", "budget")
    )
    assert search["result"]["rows"] == 2
    assert not all(probe["peak"]["fits"] for probe in search["result"]["probes"])
    assert profile["result"]["budget_bytes"] == 16 * 2**20
    assert all(step["microbatches"] > 1 for step in read_log(runs / "searched" / "log.jsonl"))


def test_clipping_and_records_equal_those_without_tensor_parallelism(runs: Path) -> None:
    together, apart = (read_timeline(runs / case / "out").steps for case in ("clipped", "apart"))
    assert len(together) == len(apart) >= STEPS
    assert_same_figures(together, apart, ("loss", "grad_norm", "samples", "target_tokens"), rel=RELATIVE)
    assert all(step["grad_norm"] > 0.5 for step in apart)


def test_run_with_too_little_memory_on_one_rank_recovers_and_has_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for name, limits in (("enough", "[256MiB,256MiB]"), ("scarce", "[256MiB,10MiB]")):
        (tmp_path / name).mkdir()
        command = ("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full", *TENSOR, *ON_TWO)
        limit = f"adaptive.memory_limit={limits}"
        ended = tune_run_forked(*command, limit, ranks=2, cwd=tmp_path / name, timeout_s=120)
        assert ended.status == 0, ended.output
        assert ("out of memory on rank 1" in ended.output) == (name == "scarce"), ended.output
        losses.append([step["loss"] for step in read_timeline(tmp_path / name / "runs/demo/full").steps])
    enough, scarce = losses
    assert len(enough) >= STEPS
    assert scarce == pytest.approx(enough, rel=RELATIVE)
