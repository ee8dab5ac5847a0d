"""A validated run that is stopped and resumed validates after the same steps; its best checkpoint is kept."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.running import demo_config, load_ours, run_ours
from tests.timeline import read_timeline
from torchtune_adaptive.errors import RunStopped
from torchtune_adaptive.lifecycle.run_state import THIS_RUN
from torchtune_adaptive.report.journal import VALIDATION
from torchtune_adaptive.tune import distributed
from torchtune_adaptive.tune.validation import Validation

RUN = (
    *("batch_size=2", "gradient_accumulation_steps=1", "dataset.samples=32", "tokenizer.max_seq_len=128"),
    *("resume_from_checkpoint=auto", "save_every_n_steps=3", "seed=1"),
    *("run_val_every_n_steps=2", "keep_best_checkpoint=True"),
    "dataset_val._component_=torchtune_adaptive.demo.dataset.demo_dataset",
    *("dataset_val.samples=5", "dataset_val.seed=7"),
)
SCRIPTED = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}
"""Losses of the run whose checkpoints are pruned."""


@contextmanager
def signalled_in(recipe: Any, step: int) -> Iterator[None]:
    """Collective: rank 1 receives a signal in this step, whose end is the end of the run."""
    run = recipe.runner.run

    def run_signalled(samples: Any, *, step: int, **options: Any) -> Any:
        THIS_RUN.signal = signal.SIGTERM if step == at and dist.get_rank() == 1 else None
        return run(samples, step=step, **options)

    at, recipe.runner.run = step, run_signalled
    with pytest.raises(RunStopped, match=f"stopped after step {step}"):
        yield
    THIS_RUN.signal = None
    distributed.leave()


def run_all(folder: Path) -> None:
    """Collective: train undisturbed; with a signal in a step to be validated, and a kill; and with scripted losses."""
    run_ours("full", demo_config("full", folder / "whole", *RUN))
    for stop in ("signal", 7, None):
        recipe = load_ours("full")(demo_config("full", folder / "stopped", *RUN))
        recipe.setup()
        if stop == "signal":
            with signalled_in(recipe, 4):
                recipe.train()
        else:
            train_until(recipe, recipe.runner, stop)
    with mock.patch.object(Validation, "run", lambda _, step, samples_each: {"val_loss": SCRIPTED[step]}):
        run_ours("full", demo_config("full", folder / "pruned", *RUN, "keep_last_n_checkpoints=1"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validated")
    run_on_ranks(2, run_all, folder, timeout_s=120, in_group=False)
    return folder


def saved_progress(folder: Path) -> dict[str, Any]:
    state = torch.load(folder / "out" / "epoch_0" / "recipe_state.pt", weights_only=True)
    progress: dict[str, Any] = json.loads(state["adaptive"])
    return progress


def test_stopped_run_has_the_validations_of_the_undisturbed_run(runs: Path) -> None:
    found = {
        name: [
            (event["step"], event["val_loss"])
            for event in read_timeline(runs / name / "out").events
            if event["kind"] == VALIDATION
        ]
        for name in ("whole", "stopped")
    }
    assert [step for step, _ in found["whole"]] == [2, 4, 6, 8]
    assert found["stopped"] == found["whole"]
    for key in ("validated_step", "best_val_loss", "best_step"):
        assert saved_progress(runs / "stopped")[key] == saved_progress(runs / "whole")[key]


def test_best_checkpoint_is_kept_next_to_the_last_one(runs: Path) -> None:
    assert sorted(path.name for path in (runs / "pruned" / "out").glob("*_[0-9]*")) == ["epoch_0", "step_4"]
    assert saved_progress(runs / "pruned")["best_step"] == 4
