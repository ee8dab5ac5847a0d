"""What a run says of losses that are no numbers, and of samples that have nothing to learn."""

import math

import pytest

from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.tune import loss_watch
from torchtune_adaptive.tune.loss_watch import LossWatch


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of rank 0."""
    lines: list[str] = []
    monkeypatch.setattr(loss_watch.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(loss_watch.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_that_nothing_is_saved_for_want_of_labels_is_told_once(told: list[str]) -> None:
    losses, worth = LossWatch(10), []
    for step, tokens in enumerate([0, 0, 0, 5, 5], start=1):
        losses.record(step, 1.0, tokens, 0.5)
        worth.append(losses.worth_saving(step))
    assert worth == [False, False, False, True, True]
    assert told == ["step 1: no checkpoint is saved yet, since no sample so far has a token to learn"]


def test_a_run_ends_after_too_many_consecutive_steps_that_are_nan_and_each_streak_is_told_once(told: list[str]) -> None:
    losses = LossWatch(2)
    for step, norm in enumerate([1.0, math.nan, math.inf, 1.0, math.nan, math.nan], start=1):
        losses.record(step, 2.5, 10, norm)
    with pytest.raises(NotLearningError, match=r"step 7: the loss is nan, in 3 consecutive steps, .* is 2;"):
        losses.record(7, math.nan, 10, math.nan)
    assert told == [
        "step 2: the gradient norm is nan; the weights are not updated",
        "step 5: the gradient norm is nan; the weights are not updated",
    ]


def test_an_optimizer_in_the_backward_has_updated_the_weights_already(told: list[str]) -> None:
    LossWatch(2).record(1, math.nan, 10, None)
    assert told == ["step 1: the loss is nan; the weights may be NaN now"]
