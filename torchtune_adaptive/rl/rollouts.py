"""Prompts with their answers, and what the stages of an iteration find for them.

Results are stored on the host, by rollout: a stage that is run again stores the same once more, and the split of a
stage has nothing to do with that of the next. A rollout has a number among those of all ranks, in the order in which
ranks take turns through the prompts, so nothing that goes by the number depends on how many ranks there are.
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
from torchtune_adaptive.tune.data import Data, Tokenizer, build_dataset, check_samples, data_of
from torchtune_adaptive.tune.distributed import Meshes
from torchtune_adaptive.tune.samples import TEXT, Sample

LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, SCORE = "log-probabilities", "reference", "values", "score"
ADVANTAGES, RETURNS, COUNTS, VALUED, WEIGHT = "advantages", "returns", "counts", "valued", "weight"
"""Results of a rollout: a number for each token of its answer, except for score and weight. COUNTS are the tokens that
the policy has chosen, VALUED one more, where there is one: the complete answer has a value."""


@dataclass
class Rollout:
    """One sample of reinforcement learning."""

    number: int
    iteration: int
    prompt: Tensor
    answer: Tensor
    """As many tokens as are generated at most; what follows a stop token is padding."""
    length: int = 0
    """Tokens of the answer that count; 0 until there is one."""
    results: dict[str, Tensor] = field(default_factory=dict)
    group: int | None = None
    """The number of its prompt, where others answer it too."""
    attempt: int = 0
    """How often its group was sampled before, in vain."""
    fills: bool = False
    """Whether it is there only because other ranks have more."""

    @property
    def attempted(self) -> tuple[int, ...]:
        """What tells this answer from all others of a run."""
        return (self.iteration, self.number, *[self.attempt] * (self.attempt > 0))

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.answer[: self.length]])

    @property
    def whole_length(self) -> int:
        return len(self.prompt) + self.length

    @property
    def most_length(self) -> int:
        """Tokens of the prompt and of all that is generated, whatever of it counts."""
        return len(self.prompt) + len(self.answer)

    def stand_in(self) -> Rollout:
        """The least that goes through a model like the whole. It generates as many tokens, since ranks do so together,
        and its results are its own: they must not become the sample's."""
        length, results = min(1, self.length), dict(self.results)
        return replace(self, prompt=self.prompt[:1], length=length, results=results, group=None)

    def filler(self) -> Rollout:
        """A stand-in that counts nothing."""
        nothing = torch.zeros_like(self.answer, dtype=torch.bool)
        return replace(self.stand_in(), results={**self.results, COUNTS: nothing, VALUED: nothing}, fills=True)

    def prompting(self, most_length: int) -> Rollout:
        """This rollout with its prompt cut, so that prompt and all new tokens have that length."""
        return replace(self, prompt=self.prompt[: max(1, most_length - len(self.answer))])

    def answered(self, whole_length: int) -> Rollout:
        """This rollout at that length, as much of it answer as possible: no other of that length needs more."""
        length = max(1, min(len(self.answer), whole_length - 1))
        counts = torch.arange(len(self.answer)) < length
        results = {**self.results, COUNTS: counts, VALUED: counts}
        return replace(self, prompt=self.prompt[: max(1, whole_length - length)], length=length, results=results)


def worst_rollout(prompt: Tensor, new_tokens: int) -> Rollout:
    """A rollout that needs the most: all new tokens, all of them counting, with results of every stage."""
    answer, everywhere = prompt[:1].repeat(new_tokens), torch.ones(new_tokens, dtype=torch.bool)
    results = {name: torch.zeros(new_tokens) for name in (LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, ADVANTAGES, RETURNS)}
    results |= {COUNTS: everywhere, VALUED: everywhere, SCORE: torch.zeros(()), WEIGHT: torch.ones(())}
    return Rollout(0, 0, prompt, answer, length=new_tokens, results=results)


@dataclass(frozen=True)
class Sequences:
    """Prompts and answers as a model takes them: one row each, padded at its end, where attention never looks."""

    tokens: Tensor
    before: Tensor
    """Position of the token before each token of an answer."""
    answers: Tensor
    last: Tensor
    """Position of a row's last token."""

    def to(self, device: torch.device) -> Sequences:
        return Sequences(*(tensor.to(device) for tensor in vars(self).values()))

    def of_answers(self, outputs: Tensor) -> Tensor:
        """The outputs for the tokens before those of answers, out of those for all tokens."""
        return outputs[torch.arange(len(outputs), device=outputs.device)[:, None], self.before]


def sequences_of(rollouts: Sequence[Rollout], width: int | None = None) -> Sequences:
    """`width`: columns of the answers; by default those of the longest."""
    lengths = torch.tensor([rollout.whole_length for rollout in rollouts])
    prompts = torch.tensor([len(rollout.prompt) for rollout in rollouts])
    width = max(rollout.length for rollout in rollouts) if width is None else width
    before = torch.minimum(prompts[:, None] - 1 + torch.arange(width), lengths[:, None] - 1)
    tokens = pad_sequence([rollout.tokens for rollout in rollouts], batch_first=True)
    return Sequences(tokens, before, torch.stack([rollout.answer[:width] for rollout in rollouts]), lengths - 1)


def store(rollouts: Sequence[Rollout], name: str, results: Tensor) -> None:
    for rollout, result in zip(rollouts, results.detach().cpu().unbind(), strict=True):
        rollout.results[name] = result.clone()


def results_of(rollouts: Sequence[Rollout], name: str, device: torch.device | str = "cpu") -> Tensor:
    return torch.stack([rollout.results[name] for rollout in rollouts]).to(device)


def answer_tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.length for rollout in rollouts if not rollout.fills)


def share_cut_off(rollouts: Sequence[Rollout], stop_tokens: Sequence[int]) -> float:
    whole = [each.answer.tolist() for each in rollouts if each.length == len(each.answer)]
    return sum(answer[-1] not in stop_tokens for answer in whole) / len(rollouts)


Group: TypeAlias = tuple[Sample, list[Rollout]]
"""A prompt, with the columns that its dataset has for it, and the answers to it."""


def groups_of(prompts: Sequence[Sample], iteration: int, new_tokens: int, answers: int = 1) -> list[Group]:
    groups: list[Group] = []
    for place, sample in enumerate(prompts):
        prompt, first = torch.as_tensor(sample["tokens"]).long(), (place * world_size() + rank()) * answers
        group = first if answers > 1 else None
        blank = Rollout(first, iteration, prompt, torch.zeros(new_tokens, dtype=torch.long), group=group)
        groups.append((sample, [replace(blank, number=first + at, results={}) for at in range(answers)]))
    return groups


def differ(group: Sequence[Rollout]) -> bool:
    """Whether rewards do, so that there is something to learn from them."""
    return len({float(rollout.results[SCORE]) for rollout in group}) > 1


def build_prompts(settings: Settings, tokenizer: Tokenizer, mesh: Meshes) -> Data:
    """Samples of text, whose tokens are the prompts."""

    def collate(_: object) -> NoReturn:
        raise NotImplementedError("rollouts make their own batches")

    dataset, packed = build_dataset(settings.config, tokenizer)
    samples = CheckedDataset(dataset, TEXT, labelled=False)
    check_samples(samples, ["tokens"], settings.config, "prompts", "text_completion_dataset")
    data = data_of(samples, collate, settings, tokenizer, mesh, packed=packed)
    samples.cut_at = data.max_seq_len  # not every dataset has its tokenizer do so
    return data


def gathered(mine: Sequence[Rollout]) -> list[Rollout]:
    """Collective: the rollouts of all ranks, by number, on every rank: so all compute the same advantages."""
    shares = from_all_ranks(list(mine))
    return sorted((rollout for share in shares for rollout in share), key=lambda rollout: rollout.number)


def updates_of(everyone: Sequence[Rollout], samples: int, epochs: int, seed: int) -> Iterator[list[Rollout]]:
    """This rank's share of each update, `samples` a rank: one order for all ranks, another in every epoch."""
    size = samples * world_size()
    for epoch in range(epochs):
        order = random.Random(repr((seed, "updates", everyone[0].iteration, epoch))).sample(everyone, len(everyone))
        for start in range(0, len(order), size):
            yield order[start : start + size][rank() :: world_size()]
