"""Rollouts: prompts, their answers, and the results that the stages compute for them.

Results are stored on the host, per rollout. A retried stage overwrites them with equal values, and each stage splits
rollouts into microbatches independently. Rollouts are numbered across ranks, round-robin through the prompts, so
anything derived from the number is independent of the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import from_all_ranks, rank, world_size
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.data import Data, Tokenizer, build_dataset, data_of
from torchtune_adaptive.tune.distributed import Meshes
from torchtune_adaptive.tune.samples import TEXT, Sample

LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, SCORE = "log-probabilities", "reference", "values", "score"
ADVANTAGES, RETURNS, WEIGHT = "advantages", "returns", "weight"
REWARDS = "reward/"
MODEL_SCORE = f"{REWARDS}reward_model"
"""Results of a rollout: one number per token of its answer, except for scores, rewards and weight. The names of the
rewards of functions begin with `REWARDS`."""


@dataclass
class Rollout:
    """A prompt and its answer."""

    number: int
    iteration: int
    prompt: Tensor
    answer: Tensor
    """Always `max_generated_tokens` long, padded after a stop token."""
    length: int = 0
    """Number of answer tokens that count; 0 before generation."""
    results: dict[str, Tensor] = field(default_factory=dict)
    fills: bool = False
    """True for a filler, whose tokens do not count."""

    @property
    def tokens(self) -> Tensor:
        """Prompt and answer without padding."""
        return torch.cat([self.prompt, self.answer[: self.length]])

    @property
    def whole_length(self) -> int:
        """Tokens of prompt and answer without padding."""
        return len(self.prompt) + self.length

    @property
    def most_length(self) -> int:
        """Tokens of the prompt and of the padded answer."""
        return len(self.prompt) + len(self.answer)

    def filler(self) -> Rollout:
        """Return a minimal rollout that issues the same collectives, without any token that counts.

        It generates the same number of tokens. Its results are a copy, so that the sample keeps its values.
        """
        length, results = min(1, self.length), dict(self.results)
        return replace(self, prompt=self.prompt[:1], length=length, results=results, fills=True)

    def prompting(self, most_length: int) -> Rollout:
        """Return this rollout with its prompt cut so that prompt and all new tokens have this length."""
        return replace(self, prompt=self.prompt[: max(1, most_length - len(self.answer))])

    def answered(self, whole_length: int) -> Rollout:
        """Return this rollout cut to this length, with the longest possible answer, which needs the most memory."""
        length = max(1, min(len(self.answer), whole_length - 1))
        return replace(self, prompt=self.prompt[: max(1, whole_length - length)], length=length)


def worst_rollout(prompt: Tensor, new_tokens: int) -> Rollout:
    """Return the rollout with the highest memory use: a full-length answer with the results of all stages."""
    results = {name: torch.zeros(new_tokens) for name in (LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, ADVANTAGES, RETURNS)}
    results |= {SCORE: torch.zeros(()), WEIGHT: torch.ones(())}
    return Rollout(0, 0, prompt, prompt[:1].repeat(new_tokens), length=new_tokens, results=results)


@dataclass(frozen=True)
class Sequences:
    """Model inputs: one row per rollout, padded on the right, which causal attention does not see."""

    tokens: Tensor
    before: Tensor
    """Position of the token before each token of an answer."""
    answers: Tensor
    last: Tensor
    """Position of a row's last token."""

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
    """Return a mask [rollouts, new tokens] of the tokens that the policy sampled."""
    lengths = torch.tensor([0 if each.fills else each.length for each in rollouts], device=device)
    return torch.arange(len(rollouts[0].answer), device=device) < lengths[:, None]


def valued_of(counts: Tensor) -> Tensor:
    """Return a mask of the tokens that have a value: as in torchtune, also the one after two or more counted tokens."""
    more = torch.roll(counts, 1, dims=1) & (counts.sum(1, keepdim=True) > 1)
    return counts | more


def answer_tokens(rollouts: Sequence[Rollout]) -> int:
    """Count the answer tokens, without fillers."""
    return sum(rollout.length for rollout in rollouts if not rollout.fills)


def share_cut_off(rollouts: Sequence[Rollout], stop_tokens: Sequence[int]) -> float:
    """Return the share of answers that reached the maximum length without a stop token."""
    whole = [each.answer.tolist() for each in rollouts if each.length == len(each.answer)]
    return sum(answer[-1] not in stop_tokens for answer in whole) / len(rollouts)


Group: TypeAlias = tuple[Sample, list[Rollout]]
"""A sample of the dataset and the answers to its prompt."""


def groups_of(prompts: Sequence[Sample], iteration: int, new_tokens: int, answers: int = 1) -> list[Group]:
    """Create numbered rollouts without answers, `answers` per prompt."""
    groups: list[Group] = []
    for place, sample in enumerate(prompts):
        prompt, first = torch.as_tensor(sample["tokens"]).long(), (place * world_size() + rank()) * answers
        blank = Rollout(first, iteration, prompt, torch.zeros(new_tokens, dtype=torch.long))
        groups.append((sample, [replace(blank, number=first + at, results={}) for at in range(answers)]))
    return groups


def build_prompts(settings: Settings, tokenizer: Tokenizer, mesh: Meshes) -> Data:
    """Build the data, with the tokens of each sample as the prompt."""

    def collate(_: object) -> NoReturn:
        raise NotImplementedError("rollouts make their own batches")

    dataset, packed = build_dataset(settings.config, tokenizer)
    samples = CheckedDataset(dataset, TEXT, labelled=False)
    data = data_of(samples, collate, settings, tokenizer, mesh, packed=packed)
    samples.cut_at = data.max_seq_len  # not every dataset truncates through its tokenizer
    return data


def gathered(mine: Sequence[Rollout]) -> list[Rollout]:
    """Collective: return the rollouts of all ranks in order of their numbers, on every rank."""
    shares = from_all_ranks(list(mine))
    return sorted((rollout for share in shares for rollout in share), key=lambda rollout: rollout.number)


def updates_of(everyone: Sequence[Rollout], samples: int, epochs: int, seed: int) -> Iterator[list[Rollout]]:
    """Yield this rank's rollouts of each update. All ranks use the same order, which changes every epoch."""
    size = samples * world_size()
    for epoch in range(epochs):
        order = random.Random(repr((seed, "updates", everyone[0].iteration, epoch))).sample(everyone, len(everyone))
        for start in range(0, len(order), size):
            yield order[start : start + size][rank() :: world_size()]
