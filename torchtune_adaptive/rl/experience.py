"""From what the stages have found for all rollouts of an iteration to what both models are trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_adaptive.errors import NotLearningError
from torchtune_adaptive.rl.arithmetic import (
    Answered,
    estimates_of,
    penalised,
    rewards_of,
    where_answers_end,
    whitened,
)
from torchtune_adaptive.rl.rollouts import (
    ADVANTAGES,
    LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    SCORE,
    VALUES,
    Rollout,
    keep,
    kept_of,
)
from torchtune_adaptive.rl.settings import REFERENCE_FILES, REWARD_FILES, PPOSettings
from torchtune_adaptive.text import count_of


def estimate(everything: Sequence[Rollout], ppo: PPOSettings, stop_tokens: Sequence[int]) -> dict[str, float]:
    """Each rollout keeps its advantages and returns, which need those of all ranks. Returns the figures of the log."""
    ends = where_answers_end(torch.stack([each.answer for each in everything]), stop_tokens)
    scores = penalised(
        kept_of(everything, SCORE),
        ends,
        no_stop=ppo.penalise_no_eos,
        shorter_than=ppo.min_response_length,
        penalty=ppo.reward_penalty,
    )
    reference = kept_of(everything, REFERENCE_LOG_PROBS)
    _check_finite(scores, everything[0].iteration, "reward model's score", REWARD_FILES)
    _check_finite(reference, everything[0].iteration, "reference's log-probability", REFERENCE_FILES)
    rewards = rewards_of(scores, kept_of(everything, LOG_PROBS), reference, ends, ppo.kl_coeff)
    total = whitened(rewards.total, ends.valued) * ends.valued if ppo.whiten_rewards else rewards.total
    estimates = estimates_of(kept_of(everything, VALUES), total, ends, ppo.gamma, ppo.lmbda)
    keep(everything, ADVANTAGES, estimates.advantages)
    keep(everything, RETURNS, estimates.returns)
    of_kl = float(rewards.of_kl.sum(1).mean())
    return {
        "scores": float(scores.mean()),
        "num_stop_tokens": float(_stopped(ends)),
        "rlhf_reward": float(scores.mean()) + of_kl,
        "kl": float(rewards.kl.sum(1).mean()),
        "kl_reward": of_kl,
        "response_lengths": float(ends.last.float().mean()),
    }


def _check_finite(said: Tensor, iteration: int, what: str, files: str) -> None:
    """Refuses what a model that no training changes says of answers: one number that is not finite would make all
    weights NaN, since advantages are whitened over all answers."""
    wrong = ~said.isfinite()
    if wrong.any():
        answers = int(wrong.reshape(len(said), -1).any(1).sum())
        raise NotLearningError(
            f"iteration {iteration}: the {what} is {float(said[wrong][0])} for {answers} of "
            f"{count_of(len(said), 'answer')}, which would make every weight NaN: check that the weights in "
            f"{files}.checkpoint_files are intact, or set dtype: fp32 if they exceed the range of bf16"
        )


def _stopped(ends: Answered) -> int:
    """Answers that end before they have to, as torchtune counts them."""
    return int((~ends.counts.all(-1)).sum())
