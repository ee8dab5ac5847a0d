"""GRPO (arXiv 2402.03300): models, stages, advantages relative to the group, and the divisor of the loss.

The loss is a weighted sum over tokens, divided by a number that belongs to the whole step (see `loss.average`). So it
does not depend on how the step is split into microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchtune_adaptive.checkpoints.loading import load_reference
from torchtune_adaptive.checkpoints.store import State
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl.generation import Generate
from torchtune_adaptive.rl.microbatches import AnswerScorer, Score, TrainPolicy, figures_of_policy
from torchtune_adaptive.rl.ppo import build_reward_model
from torchtune_adaptive.rl.rollouts import Rollout, counts_of, results_of, store
from torchtune_adaptive.rl.settings import GRPO_REFERENCE_FILES, REWARD_SECTION, GRPOSettings
from torchtune_adaptive.rl.stages import (
    FIND_REWARDS,
    GENERATE,
    SCORE_POLICY,
    SCORE_REFERENCE,
    TRAIN_POLICY,
    RolloutStage,
)
from torchtune_adaptive.tune.distributed import Devices
from torchtune_adaptive.tune.model import build_frozen_model, build_full_model, build_lora_model, disable_dropout
from torchtune_adaptive.tune.preference import without_adapters

logger = logging.getLogger(__name__)

EPSILON = 1e-4
"""Added to the standard deviation of a group, as in torchtune's recipe."""


def build_policy(settings: Settings, grpo: GRPOSettings, devices: Devices, checkpoint: State) -> nn.Module:
    """Collective: build the policy, with adapters if configured."""
    build = build_full_model if grpo.lora is None else build_lora_model
    policy = build(settings, devices, checkpoint)
    disable_dropout(policy)  # dropout would make log-probabilities incomparable
    return policy


def grpo_stages(
    policy: nn.Module, generate: Generate, settings: Settings, grpo: GRPOSettings, devices: Devices
) -> dict[str, RolloutStage]:
    """Collective: build the stages of GRPO, in order.

    Log-probabilities of the policy are stored only if an iteration has several updates, those of the reference only if
    `kl_coeff` is not 0.
    """
    scorer = AnswerScorer(device=devices.device, temperature=grpo.temperature)
    loss, rows = grpo.loss, grpo.forward_batch_size * grpo.grpo_samples
    stage = partial(RolloutStage, samples=grpo.answers, rows=rows)
    stages = {GENERATE: stage(generate)}
    if settings.config.get(REWARD_SECTION) is not None:
        reward_model = build_reward_model(settings, devices, REWARD_SECTION)
        stages[FIND_REWARDS] = stage(Score(reward_model, scorer.scores, results.MODEL_SCORE))
    if grpo.updates > 1:
        stages[SCORE_POLICY] = stage(Score(policy, scorer.log_probs, results.LOG_PROBS))
    if loss.kl_coeff:
        score = Score(policy, scorer.log_probs, results.REFERENCE_LOG_PROBS, without_adapters)
        if grpo.lora is None:
            weights = load_reference(settings, GRPO_REFERENCE_FILES)
            reference = build_frozen_model(settings, devices, weights, files=GRPO_REFERENCE_FILES)
            score = Score(reference, scorer.log_probs, results.REFERENCE_LOG_PROBS)
        stages[SCORE_REFERENCE] = stage(score)
    stages[TRAIN_POLICY] = stage(TrainPolicy(policy, scorer, loss.clip, loss.kl_coeff), trains="")
    return stages


def advantages_of(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Subtract the mean of the group from rewards [groups, answers]; if `scaled`, divide by the standard deviation."""
    rewards = rewards.double()  # the mean of equal numbers in single precision may differ from them
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + EPSILON) if scaled else centred).float()


def add_advantages(rollouts: Sequence[Rollout], grpo: GRPOSettings) -> tuple[int, dict[str, float]]:
    """Add advantages and weights to the rollouts of all ranks.

    Return the number of tokens or answers over which the loss is averaged, and figures for the log.
    """
    size, average = grpo.grpo_samples, grpo.loss.average
    rewards, counts = results_of(rollouts, results.SCORE).view(-1, size), counts_of(rollouts)
    lengths, weights = counts.sum(1), torch.ones(len(rollouts))
    if average == "answers":
        weights /= lengths.clamp(min=1)
    elif average == "length":
        weights /= grpo.max_generated_tokens
    advantages = advantages_of(rewards, scaled=grpo.scale_rewards).view(-1, 1)
    store(rollouts, results.ADVANTAGES, advantages.expand(counts.shape))
    store(rollouts, results.WEIGHT, weights)
    divisor = int(lengths.sum()) if average == "tokens" else len(rollouts)
    return divisor, {
        "scores": float(rewards.mean()),
        "scores_deviation": float(rewards.std(1).mean()),
        "groups_without_signal": int((rewards == rewards[:, :1]).all(1).sum()),
        "response_lengths": float(lengths.float().mean()),
    }


def figures_of_update(policy: StepResult, divisor: int) -> dict[str, float]:
    """Return the loss divided by `divisor`, and other figures, which are means over the tokens of all ranks."""
    kl = float(policy.sums["kl"]) / max(1, policy.target_tokens)
    return {"loss": float(policy.loss_sum) / divisor, "kl": kl, **figures_of_policy(policy)}
