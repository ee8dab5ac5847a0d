"""What is told of a run whose samples have nothing to learn."""

import pytest

from torchtune_adaptive.tune.run import loss_watch
from torchtune_adaptive.tune.run.loss_watch import LossWatch


def test_that_nothing_is_saved_for_want_of_labels_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(loss_watch.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(loss_watch.logger, "warning", lambda text, *values: told.append(text % values))
    losses, worth = LossWatch("warn"), []
    for step, tokens in enumerate([0, 0, 0, 5, 5], start=1):
        losses.record(step, 1.0, tokens)
        worth.append(losses.worth_saving(step))
    assert worth == [False, False, False, True, True]
    assert told == ["step 1: no checkpoint is saved yet, since no sample so far has a token to learn"]
