"""What is GRPO's own (arXiv 2402.03300): its models and stages, and what an answer counts beside others of its group.

Whatever `loss.average` averages over is a number of the whole step: a loss is a sum of weighted tokens over it, and so
does not depend on how the step is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from torchtune_adaptive.checkpoints.loading import load_reference
from torchtune_adaptive.checkpoints.saving import Contents
from torchtune_adaptive.checkpoints.store import State
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import world_size
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl.generation import Sampling
from torchtune_adaptive.rl.models import build_judge
from torchtune_adaptive.rl.passes import AnswerScorer, Ask, TrainPolicy, figures_of_policy
from torchtune_adaptive.rl.rollouts import Rollout, differ, results_of, store
from torchtune_adaptive.rl.settings import GRPO_REFERENCE_FILES, REWARD_SECTION, GRPOSettings
from torchtune_adaptive.rl.stages import (
    FIND_REWARDS,
    GENERATE,
    SCORE_POLICY,
    SCORE_REFERENCE,
    TRAIN_POLICY,
    RolloutStage,
    generating,
)
from torchtune_adaptive.tune.model import build_frozen_model, build_full_model, build_lora_model, drop_nothing
from torchtune_adaptive.tune.place import Place
from torchtune_adaptive.tune.preference import without_adapters

EPSILON = 1e-4
"""Number that is added to the deviation of a group, as in torchtune's recipe."""


def contents_of(settings: Settings, grpo: GRPOSettings) -> Contents:
    """What a checkpoint has: the policy, or its adapters."""
    name = "full_grpo" if grpo.lora is None else "lora_grpo"
    return Contents(name, grpo.lora, settings.save_adapter_weights_only)


def build_policy(settings: Settings, grpo: GRPOSettings, place: Place, checkpoint: State) -> nn.Module:
    """Collective."""
    build = build_full_model if grpo.lora is None else build_lora_model
    policy = build(settings, place, checkpoint)
    drop_nothing(policy)  # log-probabilities are compared
    return policy


def grpo_stages(
    policy: nn.Module, sampling: Sampling, settings: Settings, grpo: GRPOSettings, place: Place
) -> dict[str, RolloutStage]:
    """Collective: the stages of GRPO, in order. The policy is asked only where an iteration has several updates, the
    reference only where leaving it costs something."""
    scorer = AnswerScorer(device=place.device, temperature=sampling.temperature)
    loss, rows = grpo.loss, grpo.forward_batch_size * grpo.grpo_samples
    stage = partial(RolloutStage, samples=grpo.answers, rows=rows)
    stages = {GENERATE: stage(generating(policy, sampling, settings, place.device))}
    if settings.config.get(REWARD_SECTION) is not None:
        judge = build_judge(settings, place, REWARD_SECTION, sampling.seed)
        stages[FIND_REWARDS] = stage(Ask(judge, scorer.scores, results.SCORE))
    if grpo.updates > 1:
        stages[SCORE_POLICY] = stage(Ask(policy, scorer.log_probs, results.LOG_PROBS))
    if loss.kl_coeff:
        ask = Ask(policy, scorer.log_probs, results.REFERENCE_LOG_PROBS, without_adapters)
        if grpo.lora is None:
            weights = load_reference(settings, GRPO_REFERENCE_FILES)
            reference = build_frozen_model(settings, place, weights, files=GRPO_REFERENCE_FILES)
            ask = Ask(reference, scorer.log_probs, results.REFERENCE_LOG_PROBS)
        stages[SCORE_REFERENCE] = stage(ask)
    stages[TRAIN_POLICY] = stage(TrainPolicy(policy, scorer, loss.clip, loss.kl_coeff), trains="")
    return stages


def advantages_of(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Rewards [groups, answers] above the mean of their group, over its deviation unless that is left out."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + EPSILON) if scaled else centred


@dataclass(frozen=True)
class TrainingBatch:
    """What an iteration trains on, the same on every rank."""

    rollouts: list[Rollout]
    """Rollouts that count, in equal numbers for all ranks: fillers make up what is missing."""
    divisor: int
    """Tokens or answers that the loss is a mean over."""
    figures: Mapping[str, float]

    @property
    def of_a_rank(self) -> int:
        return len(self.rollouts) // world_size()


def prepared(everyone: Sequence[Rollout], grpo: GRPOSettings) -> TrainingBatch:
    """Adds advantages and weights to the rollouts, which are those of all ranks, in order of their numbers."""
    size, average = grpo.grpo_samples, grpo.loss.average
    rewards, counts = results_of(everyone, results.SCORE).view(-1, size), results_of(everyone, results.COUNTS)
    lengths, weights = counts.sum(1), torch.ones(len(everyone))
    if average == "answers":
        weights /= lengths.clamp(min=1)
    elif average == "length":
        weights /= grpo.max_generated_tokens
    advantages = advantages_of(rewards, scaled=grpo.scale_rewards).view(-1, 1)
    store(everyone, results.ADVANTAGES, advantages.expand(counts.shape))
    store(everyone, results.WEIGHT, weights)
    groups = [everyone[start : start + size] for start in range(0, len(everyone), size)]
    kept = [rollout for group in groups if differ(group) for rollout in group]
    figures = {
        "scores": float(rewards.mean()),
        "scores_deviation": float(rewards.std(1).mean()),
        "groups_without_signal": len(groups) - len(kept) / size,
        "response_lengths": float(lengths.float().mean()),
    }
    if grpo.without_signal == "keep" or not kept:  # an iteration has its updates whatever came of it
        kept = [*everyone]
    divisor = len(kept) if average != "tokens" else sum(rollout.length for rollout in kept)
    filled = [everyone[0].filler() for _ in range(-len(kept) % world_size())]
    return TrainingBatch([*kept, *filled], max(1, divisor), figures)


def figures_of_update(policy: StepResult, divisor: int) -> dict[str, float]:
    """The loss as it is averaged, the rest as means over the tokens of all ranks."""
    kl = float(policy.sums["kl"]) / max(1, policy.target_tokens)
    return {"loss": float(policy.loss_sum) / divisor, "kl": kl, **figures_of_policy(policy)}
