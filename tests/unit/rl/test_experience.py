"""What models that no training changes say of answers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.rl.test_settings import DEMO, config
from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.rl.experience import estimate
from torchtune_adaptive.rl.rollouts import REFERENCE_LOG_PROBS, SCORE, Rollout, worst_rollout
from torchtune_adaptive.rl.settings import read_ppo_settings

NEW, STOP = 4, 257


def answered(score: float, reference: float = 0.0, *, ends: bool = True) -> Rollout:
    rollout = worst_rollout(torch.arange(3), NEW)
    rollout.iteration = 5
    if ends:
        rollout.answer[2] = STOP
    rollout.kept |= {SCORE: torch.tensor(score), REFERENCE_LOG_PROBS: torch.full((NEW,), reference)}
    return rollout


def scores(*rollouts: Rollout, penalised: bool = False) -> float:
    ppo = read_ppo_settings(config(DEMO, f"penalise_no_eos={penalised}"))[1]
    return estimate(rollouts, ppo, [STOP])["scores"]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_the_reward_models_fault(score: float) -> None:
    with pytest.raises(
        NotLearningError,
        match=rf"^iteration 5: the reward model's score is {score} for 1 of 2 answers, .*"
        r" reward_checkpointer.checkpoint_files are intact",
    ):
        scores(answered(1.0), answered(score))


def test_a_log_probability_that_is_no_number_is_the_references() -> None:
    with pytest.raises(
        NotLearningError, match=r"reference's log-probability is nan for 1 of 1 answer, .* ref_policy_checkpointer"
    ):
        scores(answered(1.0, math.nan))


def test_a_score_that_the_penalty_replaces_does_not_count() -> None:
    assert scores(answered(3.0), answered(math.nan, ends=False), penalised=True) == 1.0  # of 3 and -1
