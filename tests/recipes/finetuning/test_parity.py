"""The installed stock recipe and ours, run beside each other on two ranks: the same figures at every step."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from tests.ranks import free_ports, run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import (
    RELATIVE,
    RELATIVE_AFTER_ADAM,
    SGD,
    demo_config,
    run_ours,
    run_stock,
    saved_weights,
)

PLAIN = ("gradient_accumulation_steps=1", "clip_grad_norm=inf")
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
WITH_SGD = {"plain": PLAIN, "everything": EVERYTHING, "packed": PACKED, "no-reshard": UNSHARDED_BETWEEN}
CASES = {**{case: (*SGD, *overrides) for case, overrides in WITH_SGD.items()}, "adamw": EVERYTHING}


def run_both(kind: str, folder: Path, ports: list[int]) -> None:
    runs = [(case, who) for case in CASES for who in ("stock", "ours")]
    for (case, who), port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        run = run_stock if who == "stock" else run_ours
        run(kind, demo_config(kind, folder / case / who, *CASES[case]))


@pytest.fixture(scope="module", params=["full", "lora"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, run_both, request.param, folder, free_ports(2 * len(CASES)), timeout_s=150, in_group=False)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_figures_of_the_stock_recipe(runs: Path, case: str) -> None:
    relative = RELATIVE if case in WITH_SGD else RELATIVE_AFTER_ADAM
    stock, ours = (read_log(runs / case / who / "log.jsonl") for who in ("stock", "ours"))
    assert len(ours) == len(stock) >= 4
    assert not any(math.isnan(step["loss"]) for step in stock)
    for step_of_stock, step_of_ours in zip(stock, ours, strict=True):
        for figure in ("step", "loss", "grad_norm", "lr"):
            assert step_of_ours[figure] == pytest.approx(step_of_stock[figure], rel=relative), figure


@pytest.mark.parametrize("case", WITH_SGD)
def test_the_saved_weights_are_those_of_the_stock_recipe(runs: Path, case: str) -> None:
    epoch = 1 if case == "everything" else 0
    stock, ours = (saved_weights(runs / case / who, epoch) for who in ("stock", "ours"))
    assert ours.keys() == stock.keys()
    for name, weight in stock.items():
        torch.testing.assert_close(ours[name], weight, rtol=RELATIVE, atol=1e-6, msg=name)
