"""What each stage of an iteration does with one microbatch of rollouts.

generate            answers to the prompts
policy              log-probabilities of the answers, as they were when the policy gave them
reference           the same, of the model that the policy is held to
values, rewards     what the value model expects, and what the reward model says
train value         forward and backward
train policy        forward and backward
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torchtune.modules import TransformerDecoder
from torchtune.rlhf.loss import PPOLoss

from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.rl.arithmetic import policy_sums, value_sum, where_answers_end
from torchtune_adaptive.rl.draws import draws
from torchtune_adaptive.rl.generation import Sampling, generate
from torchtune_adaptive.rl.prompt_room import check_whole_length
from torchtune_adaptive.rl.rollouts import (
    ADVANTAGES,
    COUNTS,
    LOG_PROBS,
    RETURNS,
    VALUED,
    VALUES,
    Rollout,
    answer_tokens,
    keep,
    kept_of,
    sequences_of,
)
from torchtune_adaptive.tune.finetuning import scoring_only

RolloutPass: TypeAlias = Callable[[Sequence[Rollout]], Totals]


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Answers of the policy. The numbers that they are drawn with belong to iteration and rollout."""

    model: TransformerDecoder
    device: torch.device
    dtype: torch.dtype
    sampling: Sampling
    gathered: Callable[[], AbstractContextManager[object]]
    """Opened around a microbatch: whether parameters stay gathered from one token to the next."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        width = len(rollouts[0].answer)
        numbers = [each.number for each in rollouts]
        drawn = draws(self.sampling.seed, rollouts[0].iteration, numbers, width, stage="generate")
        check_whole_length(self.model, max(len(each.prompt) for each in rollouts) + width)
        # A single token has no next one for which they would have to stay.
        keeping = self.gathered() if width > 1 else nullcontext()
        with keeping, torch.compiler.set_stance("force_eager"):
            answers = generate(
                self.model,
                [each.prompt for each in rollouts],
                drawn,
                self.sampling,
                device=self.device,
                dtype=self.dtype,
            ).cpu()
        keep_answers(rollouts, answers, self.sampling.stop_tokens)
        return _nothing(answer_tokens(rollouts), self.device)


def keep_answers(rollouts: Sequence[Rollout], answers: Tensor, stop_tokens: Collection[int]) -> None:
    """Each rollout keeps its answer, and which tokens of it count."""
    ends = where_answers_end(answers, stop_tokens)
    for rollout, answer, last in zip(rollouts, answers, ends.last.tolist(), strict=True):
        rollout.answer, rollout.length = answer.clone(), last + 1
    keep(rollouts, COUNTS, ends.counts)
    keep(rollouts, VALUED, ends.valued)


@dataclass(frozen=True, kw_only=True)
class AnswerScorer:
    """What models say of answers, whichever rollouts share a microbatch."""

    device: torch.device
    temperature: float

    def log_probs(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts, new tokens]; what does not count is 0."""
        sequences = sequences_of(rollouts).to(self.device)
        check_whole_length(model, sequences.tokens.size(1))
        with scoring_only(model, sequences.of_answers):
            logits = model(sequences.tokens).float() / self.temperature
        of_token = cross_entropy(logits.flatten(0, 1), sequences.answers.flatten(), reduction="none")
        counts = kept_of(rollouts, COUNTS, self.device)
        log_probs = -pad(of_token.view(sequences.answers.shape), (0, counts.size(1) - sequences.answers.size(1)))
        return torch.where(counts, log_probs, 0.0)

    def values(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts, new tokens]; what has no value is 0."""
        valued = kept_of(rollouts, VALUED, self.device)
        sequences = sequences_of(rollouts, valued.size(1)).to(self.device)
        check_whole_length(model, sequences.tokens.size(1))
        return torch.where(valued, sequences.of_answers(model(sequences.tokens)[..., 0]).float(), 0.0)

    def scores(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts]: what the model says once it has read a whole answer."""
        sequences = sequences_of(rollouts).to(self.device)
        check_whole_length(model, sequences.tokens.size(1))
        outputs: Tensor = model(sequences.tokens)[..., 0]
        return outputs.gather(1, sequences.last[:, None])[:, 0].float()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A pass without a backward: each rollout keeps what the model says of it."""

    model: nn.Module
    ask: Callable[[nn.Module, Sequence[Rollout]], Tensor]
    name: str

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        with torch.no_grad():
            found = self.ask(self.model, rollouts)
        keep(rollouts, self.name, found)
        return _nothing(answer_tokens(rollouts), found.device)


@dataclass(frozen=True, kw_only=True)
class TrainPolicy:
    """Adds the gradients of the policy's loss, summed over the tokens of answers."""

    model: nn.Module
    score: AnswerScorer
    loss: PPOLoss

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        device = self.score.device
        before, advantages = (kept_of(rollouts, name, device) for name in (LOG_PROBS, ADVANTAGES))
        counts = kept_of(rollouts, COUNTS, device)
        log_probs = self.score.log_probs(self.model, rollouts)
        sums = policy_sums(log_probs, before, advantages, counts, self.loss.epsilon)
        sums.loss.backward()
        figures = {name: figure for name, figure in sums._asdict().items() if name != "loss"}
        return Totals(sums.loss.detach(), int(kept_of(rollouts, COUNTS).sum()), figures)


@dataclass(frozen=True, kw_only=True)
class TrainValue:
    """Adds the gradients of the value model's loss, times its coefficient, summed over the tokens of answers."""

    model: nn.Module
    score: AnswerScorer
    loss: PPOLoss

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        device = self.score.device
        before, returns = (kept_of(rollouts, name, device) for name in (VALUES, RETURNS))
        valued = kept_of(rollouts, VALUED, device)
        values = self.score.values(self.model, rollouts)
        loss = value_sum(values, before, returns, valued, self.loss.value_clip_range)
        (loss * self.loss.value_coeff).backward()
        return Totals(loss.detach(), int(kept_of(rollouts, VALUED).sum()))


def _nothing(tokens: int, device: torch.device) -> Totals:
    return Totals(torch.zeros((), device=device), tokens)
