"""Prompts with their answers, and what the stages of an iteration find for them.

What is found is kept on the host, by sample: a stage that is run again writes the same once more, and the split of a
stage has nothing to do with that of the next. A rollout is numbered among those of all ranks, in the order in which
ranks take turns through the prompts, so nothing that goes by the number depends on how many ranks there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.tune.samples import Sample

LOG_PROBS, REFERENCE_LOG_PROBS, VALUES, SCORE = "log-probabilities", "reference", "values", "score"
ADVANTAGES, RETURNS, COUNTS, VALUED = "advantages", "returns", "counts", "valued"
"""What is found for a rollout: a number for each token of its answer, except for the score."""


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
    kept: dict[str, Tensor] = field(default_factory=dict)
    fills: bool = False
    """Whether it is there only because other ranks have more microbatches."""

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.answer[: self.length]])

    @property
    def whole_length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + self.length

    @property
    def most_length(self) -> int:
        """Tokens of the prompt and of all that is generated, whatever of it counts."""
        return len(self.prompt) + len(self.answer)

    def stand_in(self) -> Rollout:
        """The least that goes through a model like the whole. It generates as many tokens, since ranks do so together.

        What is found for it is its own: it must not become the sample's.
        """
        return replace(self, prompt=self.prompt[:1], length=min(1, self.length), kept=dict(self.kept))

    def filler(self) -> Rollout:
        """A stand-in that counts nothing."""
        nothing = torch.zeros_like(self.answer, dtype=torch.bool)
        return replace(self.stand_in(), kept={**self.kept, COUNTS: nothing, VALUED: nothing}, fills=True)

    def prompting(self, most_length: int) -> Rollout:
        """This rollout with its prompt cut, so that prompt and all new tokens have that length."""
        return replace(self, prompt=self.prompt[: max(1, most_length - len(self.answer))])

    def answered(self, whole_length: int) -> Rollout:
        """This rollout at that length, as much of it answer as possible: no other of that length needs more."""
        length = max(1, min(len(self.answer), whole_length - 1))
        counts = torch.arange(len(self.answer)) < length
        kept = {**self.kept, COUNTS: counts, VALUED: counts}
        return replace(self, prompt=self.prompt[: max(1, whole_length - length)], length=length, kept=kept)


@dataclass(frozen=True)
class Sequences:
    """Prompts and answers as a model takes them: one row each, padded at its end, where attention never looks."""

    tokens: Tensor
    before: Tensor
    """Position of the token before each token of an answer."""
    answers: Tensor
    last: Tensor
    """Where a row's last token is."""

    def to(self, device: torch.device) -> Sequences:
        return Sequences(*(each.to(device) for each in vars(self).values()))

    def of_answers(self, outputs: Tensor) -> Tensor:
        """What a model has, of all tokens, for the token before each of an answer."""
        return outputs[torch.arange(len(outputs), device=outputs.device)[:, None], self.before]


def worst_rollout(prompt: Tensor, new_tokens: int) -> Rollout:
    """A rollout that needs the most: all new tokens, all of them counting, with whatever stages find."""
    answer, everywhere = prompt[:1].repeat(new_tokens), torch.ones(new_tokens, dtype=torch.bool)
    kept = {name: torch.zeros(new_tokens) for name in (LOG_PROBS, VALUES, ADVANTAGES, RETURNS)}
    kept |= {COUNTS: everywhere, VALUED: everywhere}
    return Rollout(0, 0, prompt, answer, length=new_tokens, kept=kept)


def sequences_of(rollouts: Sequence[Rollout], width: int | None = None) -> Sequences:
    """`width`: columns of the answers; by default those of the longest."""
    lengths = torch.tensor([len(each.prompt) + each.length for each in rollouts])
    prompts = torch.tensor([len(each.prompt) for each in rollouts])
    width = max(each.length for each in rollouts) if width is None else width
    before = torch.minimum(prompts[:, None] - 1 + torch.arange(width), lengths[:, None] - 1)
    tokens = pad_sequence([each.tokens for each in rollouts], batch_first=True)
    return Sequences(tokens, before, torch.stack([each.answer[:width] for each in rollouts]), lengths - 1)


def kept_of(rollouts: Sequence[Rollout], name: str, device: torch.device | str = "cpu") -> Tensor:
    return torch.stack([each.kept[name] for each in rollouts]).to(device)


def answer_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens of the answers of a microbatch."""
    return sum(each.length for each in rollouts if not each.fills)


def keep(rollouts: Sequence[Rollout], name: str, found: Tensor) -> None:
    for rollout, each in zip(rollouts, found.detach().cpu().unbind(), strict=True):
        rollout.kept[name] = each.clone()


def rollouts_of(prompts: Sequence[Sample], iteration: int, new_tokens: int) -> list[Rollout]:
    """Rollouts of this rank, still without their answers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    answer = torch.zeros(new_tokens, dtype=torch.long)
    return [
        Rollout(place * ranks + rank, iteration, _prompt(sample), answer.clone())
        for place, sample in enumerate(prompts)
    ]


def _prompt(sample: Sample) -> Tensor:
    tokens = torch.as_tensor(sample["tokens"])
    if tokens.is_floating_point():  # which would be cut to whole numbers; whoever names bad samples says more
        raise TypeError("the tokens of a prompt are not integers")
    return tokens.long()


def gathered(mine: Sequence[Rollout]) -> list[Rollout]:
    """Collective: the rollouts of all ranks, in order of their numbers, on every rank.

    They are small beside any model. With all of them, every rank computes the same advantages, whitened over all.
    """
    shares = from_all_ranks(list(mine))
    return sorted((each for share in shares for each in share), key=lambda rollout: rollout.number)


def updates_of(everything: Sequence[Rollout], ppo: PPOSettings, seed: int, iteration: int) -> Iterator[list[Rollout]]:
    """This rank's share of each update of an iteration: one order for all ranks, another in every epoch of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = ppo.ppo_batch_size * ranks
    for epoch in range(ppo.ppo_epochs):
        order = random.Random(repr((seed, "updates", iteration, epoch))).sample(everything, len(everything))
        for start in range(0, len(order), size):
            yield order[start : start + size][rank::ranks]
