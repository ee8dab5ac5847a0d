"""torchtune's DPO recipes and ours beside each other on two ranks: the same figures at every step, the same weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import free_ports, run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import RELATIVE, demo_config, run_ours, run_stock, saved_weights

SGD = (
    "optimizer._component_=tests.recipes.recording.NormSGD",
    "optimizer.fused=False",
    "optimizer.lr=0.01",
    "optimizer.momentum=0.9",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
CASES = {
    "one microbatch": ("gradient_accumulation_steps=1", "clip_grad_norm=inf"),
    "several": ("batch_size=2", "gradient_accumulation_steps=4", "clip_grad_norm=null", "epochs=2"),
    "RSO, checkpointed": (
        "loss._component_=torchtune.rlhf.loss.RSOLoss",
        "enable_activation_checkpointing=True",
        "fsdp_reshard_after_forward=False",
        "clip_grad_norm=null",
    ),
}
FIGURES = (
    "loss",
    "lr",
    *(f"rewards/{figure}" for figure in ("chosen", "rejected", "accuracies", "margins")),
    *(f"{what}/{answer}" for what in ("log_probs", "logits") for answer in ("chosen", "rejected")),
)


BETA = 0.1


def exactness(figure: str, of: dict[str, float]) -> float:
    """How exact a figure can be. A reward is beta times a difference of sums of log-probabilities: what fp32 rounds off
    is of their size and not of its own."""
    if not figure.startswith("rewards/"):
        return 1e-6
    magnitude = abs(of["log_probs/chosen"]) + abs(of["log_probs/rejected"])
    return 4 * torch.finfo(torch.float32).eps * BETA * magnitude


def run_both(kind: str, folder: Path, ports: list[int]) -> None:
    runs = [(case, who) for case in CASES for who in ("stock", "ours")]
    for (case, who), port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        here = folder / case.replace(" ", "_") / who
        cfg = demo_config(kind, here, *SGD, f"optimizer.norms={here / 'norms'}", *CASES[case])
        if case.startswith("RSO"):
            del cfg.loss["beta"], cfg.loss["label_smoothing"]
        here.mkdir(parents=True, exist_ok=True)
        (run_stock if who == "stock" else run_ours)(kind, cfg)


@pytest.fixture(scope="module", params=["full_dpo", "lora_dpo"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, run_both, request.param, folder, free_ports(2 * len(CASES)), timeout_s=150, in_group=False)
    return request.param, folder


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_figures_of_the_stock_recipe(runs: tuple[str, Path], case: str) -> None:
    kind, folder = runs
    stock, ours = (read_log(folder / case.replace(" ", "_") / who / "log.jsonl") for who in ("stock", "ours"))
    assert len(ours) == len(stock) >= 4
    for step_of_stock, step_of_ours in zip(stock, ours, strict=True):
        if kind == "lora_dpo":
            step_of_stock["loss"] /= 2  # of both ranks: it adds them up
        for figure in FIGURES:
            expected = pytest.approx(step_of_stock[figure], rel=RELATIVE, abs=exactness(figure, step_of_stock))
            assert step_of_ours[figure] == expected, figure
    assert ours[-1]["rewards/margins"] != 0


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_has_the_norm_that_it_has_in_the_stock_recipe(runs: tuple[str, Path], case: str) -> None:
    _, folder = runs
    stock, ours = (
        [float(line) for line in (folder / case.replace(" ", "_") / who / "norms").read_text().splitlines()]
        for who in ("stock", "ours")
    )
    assert len(ours) == len(stock) >= 4
    assert min(stock) > 0
    assert ours == pytest.approx(stock, rel=RELATIVE)


@pytest.mark.parametrize("case", CASES)
def test_the_saved_weights_are_those_of_the_stock_recipe(runs: tuple[str, Path], case: str) -> None:
    _, folder = runs
    epoch = int(case == "several")
    stock, ours = (saved_weights(folder / case.replace(" ", "_") / who, epoch) for who in ("stock", "ours"))
    assert ours.keys() == stock.keys()
    for name, weight in stock.items():
        torch.testing.assert_close(ours[name], weight, rtol=RELATIVE, atol=1e-6, msg=name)


def test_the_norm_in_the_log_is_that_of_the_gradient(runs: tuple[str, Path]) -> None:
    here = runs[1] / "one_microbatch" / "ours"
    norms = [float(line) for line in (here / "norms").read_text().splitlines()]
    assert [step["grad_norm"] for step in read_log(here / "log.jsonl")] == pytest.approx(norms, rel=RELATIVE)
