"""PPO: stages, advantages, and the losses of policy and value model.

Advantages are whitened over the answers of all ranks, before these are split into microbatches. The losses are sums
over tokens, not means as in torchtune, so they do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torchtune import rlhf

from torchtune_adaptive.engine.results import StepResult, Totals
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl import stages
from torchtune_adaptive.rl.generation import Generate
from torchtune_adaptive.rl.microbatches import AnswerScorer, Score, TrainPolicy, figures_of_policy
from torchtune_adaptive.rl.models import Models
from torchtune_adaptive.rl.rollouts import Rollout, counts_of, results_of, store, valued_of
from torchtune_adaptive.rl.settings import PPO_REFERENCE_FILES, PPOLoss, PPOSettings
from torchtune_adaptive.rl.stages import check_frozen_results


def keep_advantages(rollouts: Sequence[Rollout], ppo: PPOSettings) -> dict[str, float]:
    """Add advantages and returns to the rollouts of all ranks. Return figures for the log."""
    check_frozen_results(rollouts, PPO_REFERENCE_FILES)
    counts = counts_of(rollouts)
    valued, last = valued_of(counts), counts.sum(1) - 1
    scores, reference = results_of(rollouts, results.SCORE), results_of(rollouts, results.REFERENCE_LOG_PROBS)
    penalised = rlhf.get_reward_penalty_mask(~counts, last, ppo.penalise_no_eos, ppo.min_response_length)
    scores = torch.where(penalised, ppo.reward_penalty, scores)
    log_probs, values = results_of(rollouts, results.LOG_PROBS), results_of(rollouts, results.VALUES)
    rewards, kl, kl_rewards = rlhf.get_rewards_ppo(scores, log_probs, reference, ppo.kl_coeff, valued.sum(1) - 1)
    if ppo.whiten_rewards and valued.sum() > 1:
        rewards = rlhf.whiten(rewards, valued) * valued
    advantages, returns = rlhf.estimate_advantages(values, rewards, ppo.gamma, ppo.lmbda, masks=counts)
    if counts.sum() == 1:  # one number has no variance: torchtune's whitening would return NaN
        advantages = (returns - values) * counts
    store(rollouts, results.ADVANTAGES, advantages)
    store(rollouts, results.RETURNS, returns)
    store(rollouts, results.WEIGHT, torch.ones(len(rollouts)))
    score, kl_reward = float(scores.mean()), float(kl_rewards.sum(1).mean())
    return {
        "scores": score,
        "num_stop_tokens": float((~counts.all(1)).sum()),  # answers that end early, as torchtune counts them
        "rlhf_reward": score + kl_reward,
        "kl": float(kl.sum(1).mean()),
        "kl_reward": kl_reward,
        "response_lengths": float(last.float().mean()),
    }


def value_loss(values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, clip_range: float) -> Tensor:
    """Return half the sum of squared errors over the mask, using the larger of the clipped and the unclipped error."""
    clipped = values.clamp(before - clip_range, before + clip_range)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * torch.where(mask, errors, 0.0).sum()


@dataclass(frozen=True)
class TrainValue:
    """Runs forward and backward of the value loss times its coefficient."""

    model: nn.Module
    scorer: AnswerScorer
    loss: PPOLoss

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Add the gradients of the microbatch."""
        of = partial(results_of, rollouts, device=self.scorer.device)
        before, returns, valued = of(results.VALUES), of(results.RETURNS), valued_of(counts_of(rollouts))
        values = self.scorer.values(self.model, rollouts)
        loss = value_loss(values, before, returns, valued.to(self.scorer.device), self.loss.value_clip_range)
        (loss * self.loss.value_coeff).backward()
        return Totals(loss.detach(), int(valued.sum()))


def figures_of_update(value: StepResult, policy: StepResult, loss: PPOLoss) -> dict[str, float]:
    """Return means over the tokens of all ranks. Waits for the GPU."""
    of_policy = float(policy.loss_sum) / max(1, policy.target_tokens)
    of_value = float(value.loss_sum) / max(1, value.target_tokens)
    whole = of_policy + loss.value_coeff * of_value
    return {"loss": whole, "policy_loss": of_policy, "value_loss": of_value, **figures_of_policy(policy)}


def ppo_stages(
    models: Models, generate: Generate, ppo: PPOSettings, device: torch.device
) -> dict[str, stages.RolloutStage]:
    """Return the stages of PPO, in order."""
    (policy, value, reference, reward), loss = models, ppo.loss
    scorer = AnswerScorer(device=device, temperature=ppo.temperature)
    before = partial(stages.RolloutStage, samples=ppo.batch_size, rows=ppo.forward_batch_size)
    rows = ppo.ppo_batch_size // ppo.gradient_accumulation_steps
    training = partial(stages.RolloutStage, samples=ppo.ppo_batch_size, rows=rows)
    return {
        stages.GENERATE: before(generate),
        stages.FIND_REWARDS: before(Score(reward, scorer.scores, results.SCORE)),
        stages.SCORE_POLICY: before(Score(policy, scorer.log_probs, results.LOG_PROBS)),
        stages.SCORE_REFERENCE: before(Score(reference, scorer.log_probs, results.REFERENCE_LOG_PROBS)),
        stages.FIND_VALUES: before(Score(value, scorer.values, results.VALUES)),
        stages.TRAIN_VALUE: training(TrainValue(value, scorer, loss), trains="value"),
        stages.TRAIN_POLICY: training(TrainPolicy(policy, scorer, (loss.epsilon, loss.epsilon)), trains="policy"),
    }
