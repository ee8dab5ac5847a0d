"""What the stages of an iteration do with one microbatch of rollouts: answer, ask a model, and train on answers."""

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

from torchtune_adaptive.engine.reports import StepResult, Totals
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl.generation import Sampling, draws, generate
from torchtune_adaptive.rl.rollouts import Rollout, Sequences, answer_tokens, results_of, sequences_of, store
from torchtune_adaptive.tune.finetuning import logits_only_for


class RolloutPass(Protocol):
    @property
    def model(self) -> nn.Module:
        """What it runs."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals: ...


@dataclass(kw_only=True)
class Generate:
    """A pass in which the policy answers. The numbers that it draws belong to iteration and rollout."""

    model: TransformerDecoder
    device: torch.device
    dtype: torch.dtype
    sampling: Sampling
    reshards: bool
    """Whether training frees the gathered parameters after a forward."""
    stays: bool = True
    """Whether the parameters stay gathered while a microbatch generates; else they are gathered for each token."""

    @property
    def gathers(self) -> bool:
        """Whether gathered parameters take room that training does not need."""
        return self.stays and self.reshards and isinstance(self.model, FSDPModule)

    def stand_in(self, rollout: Rollout) -> Rollout:
        """The least that communicates like the whole: where parameters stay gathered, a single token does, and a rank
        that has no room for all of them has to keep its peers company, too."""
        least = rollout.stand_in()
        return replace(least, answer=least.answer[:1]) if self.stays else least

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        prompts, width = [rollout.prompt for rollout in rollouts], len(rollouts[0].answer)
        drawn = draws([(self.sampling.seed, "generate", *rollout.attempted) for rollout in rollouts], width)
        policy: Any = self.model
        # A single token has no next one for which parameters would have to stay.
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
        counts, valued = answer_masks(answers, self.sampling.stop_tokens)
        for rollout, answer, length in zip(rollouts, answers, counts.sum(1).tolist(), strict=True):
            rollout.answer, rollout.length = answer.clone(), length
        store(rollouts, results.COUNTS, counts)
        store(rollouts, results.VALUED, valued)
        return Totals(torch.zeros((), device=self.device), answer_tokens(rollouts))


def answer_masks(answers: Tensor, stop_tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Masks of the tokens that count and of those that have a value, as in torchtune."""
    stops = torch.isin(answers, answers.new_tensor(stop_tokens))
    counts = stops.cumsum(1) - stops.long() == 0
    # torchtune's rule: a complete answer has one value more, but not one of a single token
    more = torch.roll(counts, 1, dims=1) & (counts.sum(1, keepdim=True) > 1)
    return counts, counts | more


@dataclass(frozen=True, kw_only=True)
class AnswerScorer:
    """What models say of answers, whichever rollouts share a microbatch."""

    device: torch.device
    temperature: float

    def log_probs(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts, new tokens]; what does not count is 0."""
        sequences = sequences_of(rollouts).to(self.device)
        with logits_only_for(model, sequences.of_answers):
            logits = model(sequences.tokens).float() / self.temperature
        of_token = cross_entropy(logits.flatten(0, 1), sequences.answers.flatten(), reduction="none")
        counts = results_of(rollouts, results.COUNTS, self.device)
        log_probs = -pad(of_token.view(sequences.answers.shape), (0, counts.size(1) - sequences.answers.size(1)))
        return torch.where(counts, log_probs, 0.0)

    def values(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts, new tokens]; what has no value is 0."""
        valued = results_of(rollouts, results.VALUED, self.device)
        sequences = sequences_of(rollouts, valued.size(1)).to(self.device)
        return torch.where(valued, sequences.of_answers(model(sequences.tokens)[..., 0]).float(), 0.0)

    def scores(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts]: what the model says once it has read a whole answer."""
        sequences: Sequences = sequences_of(rollouts).to(self.device)
        outputs: Tensor = model(sequences.tokens)[..., 0]
        return outputs.gather(1, sequences.last[:, None])[:, 0].float()


@dataclass(frozen=True)
class Ask:
    """A pass without a backward, which stores under a name what the model says of each rollout."""

    model: nn.Module
    question: Callable[[nn.Module, Sequence[Rollout]], Tensor]
    name: str
    around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        with torch.no_grad(), self.around(self.model):
            results = self.question(self.model, rollouts)
        store(rollouts, self.name, results)
        return Totals(torch.zeros((), device=results.device), answer_tokens(rollouts))


@dataclass(frozen=True)
class TrainPolicy:
    """A pass with a backward, through the clipped loss."""

    model: nn.Module
    scorer: AnswerScorer
    clip: tuple[float, float]
    kl_coeff: float = 0.0
    """What it costs to leave the reference."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        of = partial(results_of, rollouts, device=self.scorer.device)
        log_probs = self.scorer.log_probs(self.model, rollouts)
        # else the policy is still as it was when it answered
        before = of(results.LOG_PROBS) if results.LOG_PROBS in rollouts[0].results else log_probs.detach()
        reference = of(results.REFERENCE_LOG_PROBS) if self.kl_coeff else None
        advantages, counts, weights = (of(name) for name in (results.ADVANTAGES, results.COUNTS, results.WEIGHT))
        loss, sums = policy_loss(log_probs, before, advantages, counts, weights, self.clip, reference, self.kl_coeff)
        loss.backward()
        return Totals(loss.detach(), int(results_of(rollouts, results.COUNTS).sum()), sums)


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
    """The weighted loss and what is logged, summed over tokens that count. Rows are answers, columns their tokens;
    `weights` are those of answers. The divergence from the reference is estimated as e^d - d - 1, of its
    log-probabilities less ours; half the mean of `squares` is about that from the policy that gave the answers."""
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
    """Means over the tokens of all ranks. Reading them waits for the GPU."""
    mean = {name: float(value) / max(1, policy.target_tokens) for name, value in policy.sums.items()}
    return {
        "clipfrac": mean["clipped"],
        "ratios": mean["ratios"],
        "approx_policy_kl": 0.5 * mean["squares"],
        "entropy": -mean["log_probs"],
    }
