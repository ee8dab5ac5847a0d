"""The record of a run in the recipes, and messages about validation losses that are nan."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from tests.timeline import read_timeline
from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.loop import metrics
from torchtune_adaptive.loop.metrics import EPOCH, Journal, Metrics, record_epoch


def test_limit_of_an_epoch_is_recorded_again_after_a_resume(tmp_path: Path) -> None:
    """Kill the run after the second epoch began and resume it there; then again in the middle of the epoch."""
    for steps_done in (0, 4, 5):
        journal = Journal(tmp_path)
        journal.start(steps_done)
        for step in range(steps_done + 1, 4 + 1):
            journal.step(step, {})
        record_epoch(journal, 1, {"": RowLimit(2)}, max(4, steps_done))
        for step in range(max(4, steps_done) + 1, 6 + 1):
            journal.step(step, {})
    timeline = read_timeline(tmp_path)
    assert [event["step"] for event in timeline.events if event["kind"] == EPOCH] == [4, 5]
    assert [record["step"] for record in timeline.steps] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics.components, "build", lambda *_: mock.Mock())
    settings = Settings(**{**NEEDED, "output_dir": str(tmp_path)}, config=OmegaConf.create({}))
    return Metrics(settings, torch.device("cpu"), Journal(tmp_path))


def test_validation_loss_that_is_not_finite_is_a_warning(ours: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    ours.log_validation(4, {"val_loss": 1.5})
    ours.log_validation(8, {"val_loss": math.nan})
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("step 8: the validation loss is not finite")
