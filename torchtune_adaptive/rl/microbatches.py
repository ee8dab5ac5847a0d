"""Microbatch functions of the stages that score answers with a model, and of those that train on answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.objectives.finetuning import logits_only_for
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl.rollouts import Rollout, answer_tokens, counts_of, results_of, sequences_of, store, valued_of


@dataclass(frozen=True, kw_only=True)
class AnswerScorer:
    """Computes log-probabilities, values and scores of answers; those of an answer do not depend on other answers."""

    device: torch.device
    temperature: float

    def log_probs(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """Return log-probabilities [rollouts, new tokens], 0 for tokens that do not count."""
        sequences = sequences_of(rollouts, self.device)
        with logits_only_for(model, sequences.of_answers):
            logits = model(sequences.tokens).float() / self.temperature
        losses = cross_entropy(logits.flatten(0, 1), sequences.answers.flatten(), reduction="none")
        counts = counts_of(rollouts, self.device)
        log_probs = -pad(losses.view(sequences.answers.shape), (0, counts.size(1) - sequences.answers.size(1)))
        return torch.where(counts, log_probs, 0.0)

    def values(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """Return values [rollouts, new tokens], 0 for tokens without a value."""
        valued = valued_of(counts_of(rollouts, self.device))
        sequences = sequences_of(rollouts, self.device, valued.size(1))
        return torch.where(valued, sequences.of_answers(model(sequences.tokens)[..., 0]).float(), 0.0)

    def scores(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """Return the model's output [rollouts] at the last token of each answer."""
        sequences = sequences_of(rollouts, self.device)
        outputs: Tensor = model(sequences.tokens)[..., 0]
        return outputs.gather(1, sequences.last[:, None])[:, 0].float()


@dataclass(frozen=True)
class Score:
    """Runs a model without a backward, and stores its result in each rollout under `name`."""

    model: nn.Module
    compute: Callable[[nn.Module, Sequence[Rollout]], Tensor]
    name: str

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Compute and store the results."""
        with torch.no_grad():
            results = self.compute(self.model, rollouts)
        store(rollouts, self.name, results)
        return Totals(torch.zeros((), device=results.device), answer_tokens(rollouts))


@dataclass(frozen=True)
class TrainPolicy:
    """Runs forward and backward with the clipped policy loss."""

    model: nn.Module
    scorer: AnswerScorer
    epsilon: float

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Accumulate the gradients of the microbatch."""
        stored = partial(results_of, rollouts, device=self.scorer.device)
        log_probs = self.scorer.log_probs(self.model, rollouts)
        before, advantages = stored(results.LOG_PROBS), stored(results.ADVANTAGES)
        counts = counts_of(rollouts, self.scorer.device)
        loss, sums = policy_loss(log_probs, before, advantages, counts, self.epsilon)
        loss.backward()
        return Totals(loss.detach(), answer_tokens(rollouts), sums)


def policy_loss(
    log_probs: Tensor, before: Tensor, advantages: Tensor, counts: Tensor, epsilon: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the figures for the log, all summed over tokens that count.

    Tensors are [answers, tokens]. `before` has the log-probabilities of the policy that generated the answers. Half the
    mean of `squares` estimates the KL divergence from that policy.
    """
    change = torch.where(counts, log_probs - before, 0.0)
    ratios = change.exp()
    unclipped, clipped = advantages * ratios, advantages * ratios.clamp(1 - epsilon, 1 + epsilon)
    sums = {
        "clipped": ((clipped < unclipped) & counts).sum(),
        "ratios": (ratios * counts).sum(),
        "squares": (change**2).sum(),
        "log_probs": torch.where(counts, log_probs, 0.0).sum(),
    }
    total = -(torch.minimum(unclipped, clipped) * counts).sum()
    return total, {name: value.detach().float() for name, value in sums.items()}


@dataclass(frozen=True)
class TrainValue:
    """Runs forward and backward with the value loss times `coeff`."""

    model: nn.Module
    scorer: AnswerScorer
    clip_range: float
    coeff: float

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Accumulate the gradients of the microbatch; return the loss without the coefficient."""
        stored = partial(results_of, rollouts, device=self.scorer.device)
        before, returns, valued = stored(results.VALUES), stored(results.RETURNS), valued_of(counts_of(rollouts))
        values = self.scorer.values(self.model, rollouts)
        loss = value_loss(values, before, returns, valued.to(self.scorer.device), self.clip_range)
        (loss * self.coeff).backward()
        return Totals(loss.detach(), int(valued.sum()))


def value_loss(values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, clip_range: float) -> Tensor:
    """Return half the sum of squared errors over the mask; each is the larger one with and without clipping."""
    clipped = values.clamp(before - clip_range, before + clip_range)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * torch.where(mask, errors, 0.0).sum()
