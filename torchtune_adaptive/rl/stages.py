"""The stages of an iteration: their names and sizes, their microbatch functions, and their step runners.

Each stage has its own microbatch limit and its own record of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import Stages, StepRunner
from torchtune_adaptive.objectives.finetuning import logits_only_for
from torchtune_adaptive.objectives.stages import OnChange, build_recovery
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl.rollouts import Rollout, answer_tokens, counts_of, results_of, sequences_of, store, valued_of

GENERATE, FIND_REWARDS = "generate", "rewards"
SCORE_POLICY, SCORE_REFERENCE = "policy log-probabilities", "reference log-probabilities"
FIND_VALUES = "values"
FORWARD = (FIND_REWARDS, SCORE_POLICY, SCORE_REFERENCE, FIND_VALUES)
TRAIN_VALUE, TRAIN_POLICY = "train value", "train policy"


@dataclass(frozen=True)
class RolloutStage:
    """A stage of an iteration and its configured sizes."""

    model: nn.Module
    run_microbatch: Callable[[Sequence[Rollout]], Totals]
    samples: int
    """Number of rollouts that a rank runs in this stage: per iteration or, if the stage trains, per update."""
    rows: int
    """Configured rows per microbatch."""
    trains: str | None = None
    """The name of the trained model; None for a stage without a backward."""


def build_runners(stages: Mapping[str, RolloutStage], settings: Settings, on_change: OnChange) -> Stages[Rollout]:
    """Collective: build a step runner for each stage."""
    recovery = build_recovery(settings, on_change, *dict.fromkeys(stage.model for stage in stages.values()))
    # The length of an answer is unknown before it is generated, so plan for the maximum.
    generating = SampleKind(length_of=attrgetter("padded_length"), filler=Rollout.filler_to_generate)
    of_answers = SampleKind(length_of=attrgetter("whole_length"), filler=Rollout.filler)
    return Stages(
        {
            name: StepRunner(
                stage.model,
                stage.run_microbatch,
                limit=RowLimit(min(stage.rows, stage.samples)),
                recovery=recovery,
                kind=generating if name == GENERATE else of_answers,
                stage=name,
            )
            for name, stage in stages.items()
        }
    )


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


@torch.no_grad()
def compute(
    result: Callable[[nn.Module, Sequence[Rollout]], Tensor], model: nn.Module, name: str, rollouts: Sequence[Rollout]
) -> Totals:
    """Run a model without a backward, and store its result in each rollout under `name`."""
    computed = result(model, rollouts)
    store(rollouts, name, computed)
    return Totals(torch.zeros((), device=computed.device), answer_tokens(rollouts))


def train_policy(model: nn.Module, scorer: AnswerScorer, epsilon: float, rollouts: Sequence[Rollout]) -> Totals:
    """Run forward and backward with the clipped policy loss."""
    stored = partial(results_of, rollouts, device=scorer.device)
    log_probs = scorer.log_probs(model, rollouts)
    before, advantages = stored(results.LOG_PROBS), stored(results.ADVANTAGES)
    loss, sums = policy_loss(log_probs, before, advantages, counts_of(rollouts, scorer.device), epsilon)
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


def train_value(
    model: nn.Module, scorer: AnswerScorer, clip_range: float, coeff: float, rollouts: Sequence[Rollout]
) -> Totals:
    """Run forward and backward with the value loss times `coeff`; return the loss without the coefficient."""
    stored = partial(results_of, rollouts, device=scorer.device)
    before, returns, valued = stored(results.VALUES), stored(results.RETURNS), valued_of(counts_of(rollouts))
    values = scorer.values(model, rollouts)
    loss = value_loss(values, before, returns, valued.to(scorer.device), clip_range)
    (loss * coeff).backward()
    return Totals(loss.detach(), int(valued.sum()))


def value_loss(values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, clip_range: float) -> Tensor:
    """Return half the sum of squared errors over the mask; each is the larger one with and without clipping."""
    clipped = values.clamp(before - clip_range, before + clip_range)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * torch.where(mask, errors, 0.0).sum()
