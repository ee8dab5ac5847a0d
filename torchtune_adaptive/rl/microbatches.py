"""Microbatch functions of the stages: generate answers, score them with a model, and train on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, pad
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.engine.results import StepResult, Totals
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl.generation import Sampling, draws, generate
from torchtune_adaptive.rl.rollouts import Rollout, answer_tokens, counts_of, results_of, sequences_of, store, valued_of
from torchtune_adaptive.tune.finetuning import logits_only_for


class RunMicrobatch(Protocol):
    """Runs one microbatch of rollouts through a model."""

    @property
    def model(self) -> nn.Module:
        """Model that runs."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Run the microbatch and return its totals."""


@dataclass(kw_only=True)
class Generate:
    """Generates answers with the policy. Random draws depend only on seed, iteration and rollout."""

    model: TransformerDecoder
    device: torch.device
    dtype: torch.dtype
    sampling: Sampling
    reshards: bool
    """True if training reshards parameters after each forward."""
    keep_gathered: bool = True
    """If True, parameters stay gathered while a microbatch generates; otherwise they are gathered for each token."""

    @property
    def gathers(self) -> bool:
        """Return True if keeping parameters gathered takes memory that training does not need."""
        return self.keep_gathered and self.reshards and isinstance(self.model, FSDPModule)

    def stand_in(self, rollout: Rollout) -> Rollout:
        """Return the smallest rollout that issues the same collectives.

        If parameters stay gathered, one token suffices. A rank that cannot hold them must match its peers as well.
        """
        least = rollout.stand_in()
        return replace(least, answer=least.answer[:1]) if self.keep_gathered else least

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Collective: generate an answer for each rollout and store it with its length."""
        prompts, width = [rollout.prompt for rollout in rollouts], len(rollouts[0].answer)
        drawn = draws([(self.sampling.seed, "generate", each.iteration, each.number) for each in rollouts], width)
        policy: Any = self.model
        # With a single token, no later one needs the gathered parameters.
        keeps = self.gathers and width > 1
        if keeps:
            policy.set_reshard_after_forward(False)
        try:
            with torch.compiler.set_stance("force_eager"):
                answers = generate(
                    policy,
                    prompts,
                    drawn,
                    self.sampling,
                    device=self.device,
                    dtype=self.dtype,
                    groups=[rollout.group for rollout in rollouts],
                ).cpu()
        finally:
            if keeps:
                policy.set_reshard_after_forward(True)
        for rollout, answer, length in zip(
            rollouts, answers, lengths_of(answers, self.sampling.stop_tokens), strict=True
        ):
            rollout.answer, rollout.length = answer.clone(), length
        return Totals(torch.zeros((), device=self.device), answer_tokens(rollouts))


def lengths_of(answers: Tensor, stop_tokens: Sequence[int]) -> list[int]:
    """Return the number of tokens of each answer, up to its first stop token."""
    stops = torch.isin(answers, answers.new_tensor(stop_tokens))
    lengths: list[int] = (stops.cumsum(1) - stops.long() == 0).sum(1).tolist()
    return lengths


@dataclass(frozen=True, kw_only=True)
class AnswerScorer:
    """Computes log-probabilities, values and scores of answers, whatever the microbatch."""

    device: torch.device
    temperature: float

    def log_probs(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """Return log-probabilities [rollouts, new tokens], 0 for tokens that do not count."""
        sequences = sequences_of(rollouts, self.device)
        with logits_only_for(model, sequences.of_answers):
            logits = model(sequences.tokens).float() / self.temperature
        of_token = cross_entropy(logits.flatten(0, 1), sequences.answers.flatten(), reduction="none")
        counts = counts_of(rollouts, self.device)
        log_probs = -pad(of_token.view(sequences.answers.shape), (0, counts.size(1) - sequences.answers.size(1)))
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
    """Runs a model without a backward, and stores its result for each rollout under `name`."""

    model: nn.Module
    compute: Callable[[nn.Module, Sequence[Rollout]], Tensor]
    name: str
    around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Compute and store the results."""
        with torch.no_grad(), self.around(self.model):
            results = self.compute(self.model, rollouts)
        store(rollouts, self.name, results)
        return Totals(torch.zeros((), device=results.device), answer_tokens(rollouts))


@dataclass(frozen=True)
class TrainPolicy:
    """Runs forward and backward of the clipped policy loss."""

    model: nn.Module
    scorer: AnswerScorer
    clip: tuple[float, float]
    kl_coeff: float = 0.0
    """Coefficient of the divergence from the reference."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        """Add the gradients of the microbatch."""
        of = partial(results_of, rollouts, device=self.scorer.device)
        log_probs = self.scorer.log_probs(self.model, rollouts)
        # without stored log-probabilities, the policy has not changed since it generated
        before = of(results.LOG_PROBS) if results.LOG_PROBS in rollouts[0].results else log_probs.detach()
        reference = of(results.REFERENCE_LOG_PROBS) if self.kl_coeff else None
        advantages, weights, counts = (
            of(results.ADVANTAGES),
            of(results.WEIGHT),
            counts_of(rollouts, self.scorer.device),
        )
        loss, sums = policy_loss(log_probs, before, advantages, counts, weights, self.clip, reference, self.kl_coeff)
        loss.backward()
        return Totals(loss.detach(), answer_tokens(rollouts), sums)


def policy_loss(
    log_probs: Tensor,
    before: Tensor,
    advantages: Tensor,
    counts: Tensor,
    weights: Tensor,
    clip: tuple[float, float],
    reference: Tensor | None = None,
    kl_coeff: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss and the figures for the log, all summed over tokens that count.

    Rows are answers, columns are tokens; `weights` has one weight per answer. The divergence from the reference is
    estimated as e^d - d - 1, where d is the reference's log-probability minus the policy's. Half the mean of `squares`
    estimates the divergence from the policy that generated the answers.
    """
    change = torch.where(counts, log_probs - before, 0.0)
    ratios, (low, high) = change.exp(), clip
    free, clipped = advantages * ratios, advantages * ratios.clamp(1 - low, 1 + high)
    losses, kl = -torch.minimum(free, clipped), torch.zeros_like(change)
    if reference is not None:
        apart = torch.where(counts, reference - log_probs, 0.0)
        kl = apart.exp() - apart - 1
        losses = losses + kl_coeff * kl
    sums = {
        "kl": kl.sum(),
        "clipped": ((clipped < free) & counts).sum(),
        "ratios": (ratios * counts).sum(),
        "squares": (change**2).sum(),
        "log_probs": torch.where(counts, log_probs, 0.0).sum(),
    }
    total = (losses * weights[:, None] * counts).sum()
    return total, {name: value.detach().float() for name, value in sums.items()}


def figures_of_policy(policy: StepResult) -> dict[str, float]:
    """Return means over the tokens of all ranks. Waits for the GPU."""
    mean = {name: float(value) / max(1, policy.target_tokens) for name, value in policy.sums.items()}
    return {
        "clipfrac": mean["clipped"],
        "ratios": mean["ratios"],
        "approx_policy_kl": 0.5 * mean["squares"],
        "entropy": -mean["log_probs"],
    }
