"""The arithmetic of PPO: pure functions of what the models have said of some answers.

Rows are answers, columns their tokens. Everything up to the advantages needs the answers of all ranks, so it comes
before anything is split. The losses are sums over tokens, so that they add up to the same whatever the split.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-8


class Answered(NamedTuple):
    """Where answers end."""

    last: Tensor
    """The index of the last token that counts: a stop token, or the last one there is."""
    counts: Tensor
    """The tokens up to there: those that the policy has chosen."""
    valued: Tensor
    """One token more, where there is one: the state in which an answer is complete has a value, too."""


def where_answers_end(answers: Tensor, stop_tokens: Collection[int]) -> Answered:
    stops = torch.isin(answers, answers.new_tensor(sorted(stop_tokens)))
    counts = stops.cumsum(-1) - stops.long() == 0
    last = counts.sum(-1) - 1
    width = answers.size(-1)
    # torchtune's rule: the reward of an answer of a single token stays at that token
    complete = torch.where((last > 0) & (last < width - 1), last + 1, last)
    valued = torch.arange(width) <= torch.maximum(complete, last)[:, None]
    return Answered(last, counts, valued)


def penalised(scores: Tensor, ends: Answered, *, no_stop: bool, shorter_than: int | None, penalty: float) -> Tensor:
    """Scores, replaced by the penalty where an answer does not end, or ends too early, as torchtune counts."""
    bad = torch.zeros_like(scores, dtype=torch.bool)
    if no_stop:
        bad |= ends.counts.all(-1)
    if shorter_than is not None:
        bad |= ends.last < shorter_than
    return torch.where(bad, penalty, scores)


class Rewards(NamedTuple):
    total: Tensor
    kl: Tensor
    """The policy's log-probabilities less the reference's, by token."""
    of_kl: Tensor
    """What that costs."""


def rewards_of(scores: Tensor, log_probs: Tensor, reference: Tensor, ends: Answered, kl_coeff: float) -> Rewards:
    """Rewards by token: minus the cost of leaving the reference and, where a complete answer ends, its score."""
    kl = (log_probs - reference) * ends.counts
    of_kl = -kl_coeff * kl
    at = ends.valued.sum(-1, keepdim=True) - 1
    return Rewards(of_kl.scatter_add(1, at, scores[:, None]), kl, of_kl)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Values of unit variance over the mask, about the mean that they had. One value alone stays as it is."""
    count = mask.sum()
    mean = (values * mask).sum() / (count + EPSILON)
    variance = (((values - mean) * mask) ** 2).sum() / (count - 1).clamp(min=1)
    return (values - mean) * torch.rsqrt(variance + EPSILON) + mean if count > 1 else values


class Estimates(NamedTuple):
    advantages: Tensor
    returns: Tensor


def estimates_of(values: Tensor, rewards: Tensor, ends: Answered, gamma: float, lmbda: float) -> Estimates:
    """Generalised advantage estimation (arXiv 1506.02438); advantages are whitened over all answers given."""
    values = values * ends.valued
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    surprises = rewards + gamma * following - values
    found, advantage = [], torch.zeros_like(values[:, 0])
    for surprise in surprises.flip(1).unbind(1):
        advantage = surprise + gamma * lmbda * advantage
        found.append(advantage)
    advantages = torch.stack(found[::-1], dim=1)
    return Estimates(whitened(advantages, ends.counts) * ends.counts, advantages + values)


class PolicySums(NamedTuple):
    """Over tokens that count."""

    loss: Tensor
    clipped: Tensor
    ratios: Tensor
    squares: Tensor
    """Squared changes of log-probabilities: half their mean is about the divergence from the policy that answered."""


def policy_sums(log_probs: Tensor, before: Tensor, advantages: Tensor, mask: Tensor, epsilon: float) -> PolicySums:
    """What does not count is 0, with a gradient of 0."""
    change = torch.where(mask, log_probs - before, 0.0)
    ratios = change.exp()
    free, clipped = -advantages * ratios, -advantages * ratios.clamp(1 - epsilon, 1 + epsilon)
    loss = (torch.maximum(free, clipped) * mask).sum()
    figures = ((clipped > free) & mask).sum(), (ratios * mask).sum(), (change**2).sum()
    return PolicySums(loss, *(figure.detach().float() for figure in figures))


def value_sum(values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, clip_range: float) -> Tensor:
    """Half the squared error, summed over tokens that count; of the free and the clipped value the worse."""
    clipped = values.clamp(before - clip_range, before + clip_range)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * torch.where(mask, errors, 0.0).sum()
