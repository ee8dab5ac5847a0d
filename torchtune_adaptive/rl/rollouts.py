"""Rollouts: a rollout is a prompt, its answer, and the results that the stages compute for them.

Results are stored on the host, per rollout. So each stage can split the rollouts into microbatches in its own way, and
a repeated stage overwrites its results with equal values. The number of a rollout does not depend on the number of
ranks, and neither does anything that is derived from it, for example random draws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.loading import Data, build_data
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.engine.ranks import rank, world_size
from torchtune_adaptive.lifecycle.distributed import Meshes

LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, SCORE = "log-probabilities", "reference", "values", "score"
ADVANTAGES, RETURNS = "advantages", "returns"
"""Names of a rollout's results. A result is one number per token of the answer; the score is one number per answer."""


@dataclass
class Rollout:
    """A prompt and its answer."""

    number: int
    iteration: int
    prompt: Tensor
    answer: Tensor
    """`max_generated_tokens` tokens; those after a stop token are padding."""
    length: int = 0
    """The number of tokens of the answer without padding; 0 before generation."""
    results: dict[str, Tensor] = field(default_factory=dict)
    is_filler: bool = False
    """True if the rollout only serves to issue the same collectives as peers, and its tokens do not count."""

    @property
    def tokens(self) -> Tensor:
        """Prompt and answer without padding."""
        return torch.cat([self.prompt, self.answer[: self.length]])

    @property
    def whole_length(self) -> int:
        """The number of tokens of prompt and answer without padding."""
        return len(self.prompt) + self.length

    @property
    def padded_length(self) -> int:
        """The number of tokens of the prompt and of the padded answer."""
        return len(self.prompt) + len(self.answer)

    def filler(self) -> Rollout:
        """Return a filler: a minimal rollout with a copy of the results, which generates the same number of tokens."""
        length, results = min(1, self.length), dict(self.results)
        return replace(self, prompt=self.prompt[:1], length=length, results=results, is_filler=True)

    def filler_to_generate(self) -> Rollout:
        """Return a filler that generates one token. Parameters stay gathered while a microbatch generates, so later
        tokens issue no collectives."""
        filler = self.filler()
        return replace(filler, answer=filler.answer[:1])

    def with_shorter_prompt(self, padded_length: int) -> Rollout:
        """Return this rollout with a prompt that is cut so that `padded_length` has the given value."""
        return replace(self, prompt=self.prompt[: max(1, padded_length - len(self.answer))])

    def shortened(self, whole_length: int) -> Rollout:
        """Return this rollout, cut so that `whole_length` has the given value, with the longest possible answer.

        Of all rollouts of this length, it needs the most memory.
        """
        length = max(1, min(len(self.answer), whole_length - 1))
        return replace(self, prompt=self.prompt[: max(1, whole_length - length)], length=length)


def worst_rollout(prompt: Tensor, new_tokens: int) -> Rollout:
    """Return the rollout that needs the most memory: an answer of full length with the results of all stages."""
    results = {name: torch.zeros(new_tokens) for name in (LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, ADVANTAGES, RETURNS)}
    results[SCORE] = torch.zeros(())
    return Rollout(0, 0, prompt, prompt[:1].repeat(new_tokens), length=new_tokens, results=results)


@dataclass(frozen=True)
class Sequences:
    """Model inputs: one row per rollout, padded on the right, where causal attention ignores the padding."""

    tokens: Tensor
    before: Tensor
    """[rollouts, answer tokens]: the position before each token of the answer, whose output predicts the token."""
    answers: Tensor
    last: Tensor
    """[rollouts]: the position of the last token."""

    def of_answers(self, outputs: Tensor) -> Tensor:
        """Select the outputs that predict the answer tokens."""
        return outputs[torch.arange(len(outputs), device=outputs.device)[:, None], self.before]


def sequences_of(rollouts: Sequence[Rollout], device: torch.device | str, width: int | None = None) -> Sequences:
    """Build model inputs; `width` is the number of answer columns (default: the longest answer)."""
    lengths = torch.tensor([rollout.whole_length for rollout in rollouts])
    prompts = torch.tensor([len(rollout.prompt) for rollout in rollouts])
    width = max(rollout.length for rollout in rollouts) if width is None else width
    before = torch.minimum(prompts[:, None] - 1 + torch.arange(width), lengths[:, None] - 1)
    tokens = pad_sequence([rollout.tokens for rollout in rollouts], batch_first=True)
    answers = torch.stack([rollout.answer[:width] for rollout in rollouts])
    return Sequences(*(tensor.to(device) for tensor in (tokens, before, answers, lengths - 1)))


def store(rollouts: Sequence[Rollout], name: str, results: Tensor) -> None:
    """Store row i of the results in rollout i, on the host."""
    for rollout, result in zip(rollouts, results.detach().cpu().unbind(), strict=True):
        rollout.results[name] = result.clone()


def results_of(rollouts: Sequence[Rollout], name: str, device: torch.device | str = "cpu") -> Tensor:
    """Stack the named results of all rollouts."""
    return torch.stack([rollout.results[name] for rollout in rollouts]).to(device)


def counts_of(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Tensor:
    """Return a mask [rollouts, new tokens] of the tokens that count: those of answers, without padding and fillers."""
    lengths = torch.tensor([0 if each.is_filler else each.length for each in rollouts], device=device)
    return torch.arange(len(rollouts[0].answer), device=device) < lengths[:, None]


def valued_of(counts: Tensor) -> Tensor:
    """Return `counts` plus, as in torchtune, the next token of each answer with two or more counted ones."""
    following = torch.roll(counts, 1, dims=1) & (counts.sum(1, keepdim=True) > 1)
    return counts | following


def answer_tokens(rollouts: Sequence[Rollout]) -> int:
    """Count the answer tokens, without those of fillers."""
    return sum(rollout.length for rollout in rollouts if not rollout.is_filler)


def rollouts_of(prompts: Sequence[Sample], iteration: int, new_tokens: int) -> list[Rollout]:
    """Create rollouts without answers, numbered over the prompts of all ranks in turn."""
    blank = torch.zeros(new_tokens, dtype=torch.long)
    return [
        Rollout(index * world_size() + rank(), iteration, torch.as_tensor(sample["tokens"]).long(), blank)
        for index, sample in enumerate(prompts)
    ]


def build_prompts(settings: Settings, tokenizer: Any, mesh: Meshes) -> Data:
    """Collective: build the data, where the tokens of each sample are a prompt."""
    data = build_data(settings, tokenizer, mesh)
    data.dataset.truncate_at = data.max_seq_len  # not every dataset truncates through its tokenizer
    return data


def updates_of(rollouts: Sequence[Rollout], samples: int, epochs: int, seed: int) -> Iterator[list[Rollout]]:
    """Shuffle the rollouts of all ranks in every epoch, and yield this rank's `samples` rollouts of each update."""
    size = samples * world_size()
    for epoch in range(epochs):
        order = random.Random(repr((seed, "updates", rollouts[0].iteration, epoch))).sample(rollouts, len(rollouts))
        for start in range(0, len(order), size):
            yield order[start : start + size][rank() :: world_size()]
