"""The installed stock recipe and ours on two ranks: the same figures at every step."""

import math
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours, run_stock, saved_weights

EVERYTHING = (
    "batch_size=2",
    "gradient_accumulation_steps=4",
    "enable_activation_checkpointing=True",
    "clip_grad_norm=0.7",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=3",
    "epochs=2",
)
PACKED = ("dataset.packed=True", "gradient_accumulation_steps=1", "batch_size=1", "clip_grad_norm=inf")
UNSHARDED_BETWEEN = (
    "fsdp_reshard_after_forward=False",
    "custom_sharded_layers=[tok_embeddings]",
    "clip_grad_norm=inf",
)
CASES = {"everything": EVERYTHING, "packed": PACKED, "no-reshard": UNSHARDED_BETWEEN}
RUNS = [*(("full", case) for case in CASES), ("lora", "everything")]


def run_both(kind: str, folder: Path, case: str) -> None:
    for who, run in (("stock", run_stock), ("ours", run_ours)):
        run(kind, demo_config(kind, folder / who, *SGD, *CASES[case]))


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind, case = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{case}")
    run_on_ranks(2, run_both, kind, folder, case, timeout_s=60, in_group=False)
    return case, folder


@pytest.mark.smoke("full-everything", "lora-everything")
def test_every_step_has_the_figures_of_the_stock_recipe(runs: tuple[str, Path]) -> None:
    _, folder = runs
    stock, ours = (read_log(folder / who / "log.jsonl") for who in ("stock", "ours"))
    assert len(ours) == len(stock) >= 4
    assert not any(math.isnan(step["loss"]) for step in stock)
    assert_same_figures(ours, stock, ("step", "loss", "grad_norm", "lr"), rel=RELATIVE)


@pytest.mark.smoke("full-everything", "lora-everything")
def test_saved_weights_are_those_of_the_stock_recipe(runs: tuple[str, Path]) -> None:
    case, folder = runs
    stock, ours = (saved_weights(folder / who, epoch=int(case == "everything")) for who in ("stock", "ours"))
    torch.testing.assert_close(ours, stock, rtol=RELATIVE, atol=1e-6)
