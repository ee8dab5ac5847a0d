"""What the stages of an iteration do with one microbatch of rollouts: generate answers, and ask models about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, pad
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.engine.reports import Totals
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.generation import Sampling, draws, generate
from torchtune_adaptive.rl.rollouts import (
    COUNTS,
    VALUED,
    Rollout,
    Sequences,
    answer_tokens,
    results_of,
    sequences_of,
    store,
)
from torchtune_adaptive.tune.bad_samples import longest_taken
from torchtune_adaptive.tune.finetuning import scoring_only

RolloutPass: TypeAlias = Callable[[Sequence[Rollout]], Totals]


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
        """Communicates like the whole. Where parameters stay gathered, so does a single token, and with less memory:
        a rank that has no room for all of them has to keep its peers company, too."""
        least = rollout.stand_in()
        return replace(least, answer=least.answer[:1]) if self.stays else least

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        prompts, width = [rollout.prompt for rollout in rollouts], len(rollouts[0].answer)
        numbers, groups = [rollout.number for rollout in rollouts], [rollout.group for rollout in rollouts]
        drawn = draws(self.sampling.seed, rollouts[0].iteration, numbers, width, stage="generate")
        check_whole_length(self.model, max(map(len, prompts)) + width)
        policy: Any = self.model
        # A single token has no next one for which parameters would have to stay.
        keeps = self.gathers and width > 1
        if keeps:
            policy.set_reshard_after_forward(False)
        try:
            with torch.compiler.set_stance("force_eager"):
                answers = generate(
                    policy, prompts, drawn, self.sampling, device=self.device, dtype=self.dtype, groups=groups
                ).cpu()
        finally:
            if keeps:
                policy.set_reshard_after_forward(True)
        counts, valued = answer_masks(answers, self.sampling.stop_tokens)
        for rollout, answer, length in zip(rollouts, answers, counts.sum(1).tolist(), strict=True):
            rollout.answer, rollout.length = answer.clone(), length
        store(rollouts, COUNTS, counts)
        store(rollouts, VALUED, valued)
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
        sequences = self._sequences(model, rollouts)
        with scoring_only(model, sequences.of_answers):
            logits = model(sequences.tokens).float() / self.temperature
        of_token = cross_entropy(logits.flatten(0, 1), sequences.answers.flatten(), reduction="none")
        counts = results_of(rollouts, COUNTS, self.device)
        log_probs = -pad(of_token.view(sequences.answers.shape), (0, counts.size(1) - sequences.answers.size(1)))
        return torch.where(counts, log_probs, 0.0)

    def values(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts, new tokens]; what has no value is 0."""
        valued = results_of(rollouts, VALUED, self.device)
        sequences = self._sequences(model, rollouts, valued.size(1))
        return torch.where(valued, sequences.of_answers(model(sequences.tokens)[..., 0]).float(), 0.0)

    def scores(self, model: nn.Module, rollouts: Sequence[Rollout]) -> Tensor:
        """[rollouts]: what the model says once it has read a whole answer."""
        sequences = self._sequences(model, rollouts)
        outputs: Tensor = model(sequences.tokens)[..., 0]
        return outputs.gather(1, sequences.last[:, None])[:, 0].float()

    def _sequences(self, model: nn.Module, rollouts: Sequence[Rollout], width: int | None = None) -> Sequences:
        sequences = sequences_of(rollouts, width).to(self.device)
        check_whole_length(model, sequences.tokens.size(1))
        return sequences


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A pass without a backward, which stores what the model says of each rollout."""

    model: nn.Module
    ask: Callable[[nn.Module, Sequence[Rollout]], Tensor]
    name: str

    def __call__(self, rollouts: Sequence[Rollout]) -> Totals:
        with torch.no_grad():
            results = self.ask(self.model, rollouts)
        store(rollouts, self.name, results)
        return Totals(torch.zeros((), device=results.device), answer_tokens(rollouts))


def check_whole_length(model: nn.Module, longest: int) -> None:
    """Refuses a rollout that is longer than the model takes."""
    most = longest_taken([model])
    if most is not None and longest > most:
        raise ConfigError(
            f"a prompt and its answer have {longest} tokens, but the model takes at most {most} (its max_seq_len): "
            "lower max_generated_tokens or tokenizer.max_seq_len"
        )
