"""A run of ours that is stopped between epochs and resumed by the stock recipe equals an uninterrupted run."""

from pathlib import Path

import torch

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import stopped_before_epoch
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours, run_stock, saved_weights

EPOCHS, STEPS_PER_EPOCH = 3, 3
WHOLE_RUN = (
    *SGD,
    f"epochs={EPOCHS}",
    f"max_steps_per_epoch={STEPS_PER_EPOCH}",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
RESUME = (
    "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]",
    "checkpointer.recipe_checkpoint=epoch_0/recipe_state.pt",
    "resume_from_checkpoint=True",
)


def run_both(folder: Path) -> None:
    """Collective: run ours uninterrupted, and once stopped and resumed by stock."""
    run_ours("full", demo_config("full", folder / "whole", *WHOLE_RUN))
    with stopped_before_epoch(1):
        run_ours("full", demo_config("full", folder / "resumed", *WHOLE_RUN))
    run_stock("full", demo_config("full", folder / "resumed", *WHOLE_RUN, *RESUME))


def test_stock_resumes_our_run_like_an_uninterrupted_one(tmp_path: Path) -> None:
    run_on_ranks(2, run_both, tmp_path, timeout_s=100, in_group=False)
    whole, resumed = (read_log(tmp_path / name / "log.jsonl") for name in ("whole", "resumed"))
    assert len(whole) == len({step["lr"] for step in whole}) == EPOCHS * STEPS_PER_EPOCH
    assert_same_figures(resumed, whole, ("step", "loss", "lr", "grad_norm"), rel=RELATIVE)
    whole_weights, weights = (saved_weights(tmp_path / name, EPOCHS - 1) for name in ("whole", "resumed"))
    torch.testing.assert_close(weights, whole_weights, rtol=RELATIVE, atol=1e-6)
