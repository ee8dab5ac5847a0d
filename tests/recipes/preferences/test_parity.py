"""torchtune's DPO recipes and ours on two ranks: the same figures at every step, the same weights."""

from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.recorders import read_log
from tests.recipes.running import RELATIVE, demo_config, run_ours, run_stock, saved_weights

SGD = (
    "optimizer._component_=tests.recipes.recorders.NormSGD",
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
RUNS = [*(("full_dpo", case) for case in CASES), ("lora_dpo", "several")]
FIGURES = (
    "loss",
    "lr",
    *(f"rewards/{figure}" for figure in ("chosen", "rejected", "accuracies", "margins")),
    *(f"log_probs/{answer}" for answer in ("chosen", "rejected")),
)


BETA = 0.1


def exactness(figure: str, of: dict[str, float]) -> float:
    """Return the tolerance of a figure. A reward is beta times a difference of sums of log-probabilities: rounding
    errors of fp32 scale with the sums.
    """
    if not figure.startswith("rewards/"):
        return 1e-6
    magnitude = abs(of["log_probs/chosen"]) + abs(of["log_probs/rejected"])
    return 4 * torch.finfo(torch.float32).eps * BETA * magnitude


def run_both(kind: str, folder: Path, case: str) -> None:
    for who, run in (("stock", run_stock), ("ours", run_ours)):
        (folder / who).mkdir(exist_ok=True)
        cfg = demo_config(kind, folder / who, *SGD, f"optimizer.norms={folder / who / 'norms'}", *CASES[case])
        if case.startswith("RSO"):
            del cfg.loss["beta"], cfg.loss["label_smoothing"]
        run(kind, cfg)


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    kind, case = request.param
    folder = tmp_path_factory.mktemp(kind)
    run_on_ranks(2, run_both, kind, folder, case, timeout_s=60, in_group=False)
    return kind, case, folder


@pytest.mark.smoke("full_dpo-several")
def test_every_step_has_the_figures_of_the_stock_recipe(runs: tuple[str, str, Path]) -> None:
    kind, _, folder = runs
    stock, ours = (read_log(folder / who / "log.jsonl") for who in ("stock", "ours"))
    assert len(ours) == len(stock) >= 4
    for step_of_stock, step_of_ours in zip(stock, ours, strict=True):
        if kind == "lora_dpo":
            step_of_stock["loss"] /= 2  # stock adds up both ranks
        for figure in FIGURES:
            expected = pytest.approx(step_of_stock[figure], rel=RELATIVE, abs=exactness(figure, step_of_stock))
            assert step_of_ours[figure] == expected, figure
    assert ours[-1]["rewards/margins"] != 0


def test_every_gradient_norm_is_that_of_the_stock_recipe(runs: tuple[str, str, Path]) -> None:
    stock, ours = (norms_of(runs[2] / who) for who in ("stock", "ours"))
    assert len(ours) == len(stock) >= 4
    assert min(stock) > 0
    assert ours == pytest.approx(stock, rel=RELATIVE)


def test_saved_weights_are_those_of_the_stock_recipe(runs: tuple[str, str, Path]) -> None:
    _, case, folder = runs
    stock, ours = (saved_weights(folder / who, epoch=int(case == "several")) for who in ("stock", "ours"))
    torch.testing.assert_close(ours, stock, rtol=RELATIVE, atol=1e-6)


def norms_of(folder: Path) -> list[float]:
    """Read the norms recorded by the optimizer."""
    return [float(line) for line in (folder / "norms").read_text().splitlines()]
