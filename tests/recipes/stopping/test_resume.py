"""A run that is stopped and resumed, by our recipe or by stock, equals an uninterrupted run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import stopped_before_epoch
from tests.recipes.recorders import read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours, run_stock

EPOCHS, STEPS_PER_EPOCH = 3, 3
WHOLE_RUN = (
    f"epochs={EPOCHS}",
    f"max_steps_per_epoch={STEPS_PER_EPOCH}",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
SAVED_WEIGHTS = "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]"
SAVED_STATE = "checkpointer.recipe_checkpoint=epoch_0/recipe_state.pt"
IN_BACKWARD = ("optimizer_in_bwd=True", "gradient_accumulation_steps=1", "clip_grad_norm=null")


@dataclass(frozen=True)
class Case:
    """The recipe of later epochs, overrides, and overrides for resuming."""

    kind: str = "full"
    then: Callable[..., Any] = run_ours
    overrides: tuple[str, ...] = ()
    resume_arguments: tuple[str, ...] = ()
    weights: str = "model-00001-of-00001.bin"


CASES = {
    "ours-by-stock": Case(then=run_stock, resume_arguments=(SAVED_WEIGHTS, SAVED_STATE)),
    "in-backward": Case(overrides=IN_BACKWARD, resume_arguments=(SAVED_WEIGHTS,)),
    "adapter-only": Case("lora", overrides=("save_adapter_weights_only=True",), weights="adapter_model.pt"),
}


def run_both(name: str, folder: Path) -> None:
    """Collective: run ours uninterrupted, and once stopped and resumed."""
    case = CASES[name]
    overrides = (*WHOLE_RUN, *SGD, *case.overrides)
    run_ours(case.kind, demo_config(case.kind, folder / "whole", *overrides))
    with stopped_before_epoch(1):
        run_ours(case.kind, demo_config(case.kind, folder / "resumed", *overrides))
    mode = "True" if case.then is run_stock else "auto"
    resume = (*overrides, *case.resume_arguments, f"resume_from_checkpoint={mode}")
    case.then(case.kind, demo_config(case.kind, folder / "resumed", *resume))


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, run_both, request.param, folder, timeout_s=100, in_group=False)
    return CASES[request.param], folder


def test_every_step_is_that_of_an_uninterrupted_run(runs: tuple[Case, Path]) -> None:
    _, folder = runs
    whole, resumed = (read_log(folder / name / "log.jsonl") for name in ("whole", "resumed"))
    assert [step["step"] for step in resumed] == [step["step"] for step in whole]
    assert len(whole) == EPOCHS * STEPS_PER_EPOCH
    assert len({step["lr"] for step in whole}) == len(whole)
    for step_of_whole, step in zip(whole, resumed, strict=True):
        for figure in {"loss", "lr", "grad_norm"} & step_of_whole.keys():
            assert step[figure] == pytest.approx(step_of_whole[figure], rel=RELATIVE), (step["step"], figure)


def test_final_weights_are_those_of_an_uninterrupted_run(runs: tuple[Case, Path]) -> None:
    case, folder = runs
    files = (folder / name / "out" / f"epoch_{EPOCHS - 1}" / case.weights for name in ("whole", "resumed"))
    whole, resumed = (torch.load(file, weights_only=True) for file in files)
    torch.testing.assert_close(resumed, whole, rtol=RELATIVE, atol=1e-6)
