"""What is said of a run before it starts."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.config import keys
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.schedules.growth import EpochSizes
from torchtune_adaptive.tune.epochs import announce

KEYS = {"device": "cpu", "dtype": "fp32", "output_dir": "out", "shuffle": True, "epochs": 2}


@pytest.mark.parametrize(("ranks", "before", "said"), [(1, 2, "1 rank (before: 2)"), (2, 1, "2 ranks (before: 1)")])
def test_another_number_of_ranks_is_told_in_the_right_number(
    ranks: int, before: int, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", int)
    cfg = OmegaConf.create({**KEYS, "batch_size": 2, "gradient_accumulation_steps": 1})
    sizes = EpochSizes(
        epoch=0, batch_size=2, microbatches=1, microbatch_rows=2, samples_per_step=2, steps=3, lr_factor=1.0
    )
    progress = Progress(seed=0, epochs_run=1, total_epochs=2, max_steps_per_epoch=None, past=(sizes,), ranks=before)
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive"):
        announce((sizes, sizes), keys.read(Settings, cfg), progress, ranks, None, 6)
    samples = f"{2 * ranks} samples a step (before: {2 * before})"
    assert caplog.messages[0] == f"resumed on {said}: {samples}"


@pytest.mark.parametrize(
    ("rows", "samples_per_rank", "more", "said"),
    [
        (8, 12, {}, ["8 of 24 samples do not fill a step and are dropped in each epoch (as configured: 0)"]),
        (8, 15, {}, ["14 of 30 samples do not fill a step and are dropped in each epoch (as configured: 2)"]),
        (8, 16, {}, []),
        (8, 17, {}, []),
        (2, 13, {}, []),
        (8, 12, {"max_steps_per_epoch": 1}, []),
    ],
)
def test_a_step_that_has_grown_says_what_it_leaves_out_of_an_epoch(
    rows: int,
    samples_per_rank: int,
    more: dict[str, int],
    said: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", int)
    cfg = OmegaConf.create({**KEYS, "batch_size": 2, "gradient_accumulation_steps": 1, **more})
    sizes = EpochSizes(
        epoch=0, batch_size=rows, microbatches=1, microbatch_rows=rows, samples_per_step=rows, steps=1, lr_factor=1.0
    )
    progress = Progress(seed=0, epochs_run=0, total_epochs=2, max_steps_per_epoch=None, ranks=2)
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive"):
        announce((sizes, sizes), keys.read(Settings, cfg), progress, 2, None, samples_per_rank)
    assert [message.split(";")[0] for message in caplog.messages[1:]] == said
