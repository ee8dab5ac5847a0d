"""Kinds of sample: what a dataset gives, and what is never split. Everything that looks into a sample asks its kind.

In finetuning a sample is one sequence of tokens with a label for each. In preference training it is a pair: two
sequences, the chosen and the rejected answer, each with its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from torchtune_adaptive.engine.step import SampleKind
from torchtune_adaptive.tune.cost import cost_of

Sample = dict[str, Any]


class Fields(NamedTuple):
    """The keys of one sequence of a sample."""

    tokens: str
    labels: str
    others: tuple[str, ...] = ()
    """Further keys that have a value for each token."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of sample.

    A microbatch of n samples is n rows for each of their sequences: limits count samples (`batch_size` is that of
    torchtune), and a limit that counts tokens is told how many rows a sample has. The length of a sample is that of its
    longest sequence, to which all rows of its microbatch are padded. Where nothing is padded, a limit has to know its
    tokens instead, so there its length is the sum of its sequences.
    """

    sequences: tuple[Fields, ...]
    ignored_label: int = CROSS_ENTROPY_IGNORE_IDX
    """The label that the loss ignores."""
    padded: bool = True
    """Whether the rows of a microbatch are padded to the longest, or its sequences follow each other in one row."""
    uncounted: str | None = None
    """The key of fillers of a kind whose loss is not zero where there is no label."""

    @property
    def rows(self) -> int:
        """Rows of a microbatch for each of its samples."""
        return len(self.sequences)

    @property
    def noun(self) -> str:
        """What a picture calls a sample."""
        return "row" if self.rows == 1 else "pair"

    @property
    def padded_rows(self) -> int:
        """Rows as long as the sample; without padding, all of its tokens are its length."""
        return self.rows if self.padded else 1

    def for_steps(self, model: nn.Module) -> SampleKind[Sample]:
        """What a step of this model asks of it."""
        return SampleKind(
            length_of=self.length_of,
            row_lengths_of=self.lengths_of if self.rows > 1 else None,
            stand_in=self.stand_in,
            filler=self.filler,
            padded=self.padded,
            cost_of=cost_of(model),
        )

    def lengths_of(self, sample: Sample) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(len(sample[fields.tokens]) for fields in self.sequences)

    def length_of(self, sample: Sample) -> int:
        """What a limit by length goes by."""
        lengths = self.lengths_of(sample)
        return max(lengths) if self.padded else sum(lengths)

    def length_at(self, longest: int) -> int:
        """The length of a sample whose sequences are all that long."""
        return longest if self.padded else longest * self.rows

    def longest_at(self, length: int) -> int:
        """The sequences of which a sample may have all that long, so that its length is no more than this."""
        return length if self.padded else length // self.rows

    @property
    def length_suffix(self) -> str:
        """What to add to a length, where it is that of several sequences."""
        return "" if self.padded or self.rows == 1 else " in both answers together"

    def uniform(self, token: int, length: int) -> Sample:
        """A sample of this length: sequences of like length in which every token is a target."""
        each = length if self.padded else max(1, length // self.rows)
        return {key: [token] * each for fields in self.sequences for key in fields[:2]}

    def cut(self, sample: Sample, length: int) -> Sample:
        """The beginnings of a sample's sequences, so that it is no longer than this."""
        shares = [length] * self.rows if self.padded else _shares(self.lengths_of(sample), length)
        return self._beginnings(sample, shares)

    def stand_in(self, sample: Sample) -> Sample:
        """The first two tokens of each sequence: the least that goes through the model like the whole.

        Samples with images stay whole: their masks tie every token to the images.
        """
        if "encoder_input" in sample:
            return sample
        short = self._beginnings(sample, [2] * self.rows)
        return {**short, "seq_lens": torch.tensor([2])} if "seq_lens" in sample else short

    def filler(self, sample: Sample) -> Sample:
        """A stand-in without any label: it goes through the model and counts nothing."""
        short = self.stand_in(sample)
        masked = {fields.labels: self._masked(short[fields.labels]) for fields in self.sequences}
        mark = {} if self.uncounted is None else {self.uncounted: True}
        return {**short, **masked, **mark}

    def counts(self, sample: Sample) -> bool:
        """Whether a sample is one of the step's own, and not a filler."""
        return self.uncounted is None or self.uncounted not in sample

    def learned_tokens(self, sample: Sample) -> tuple[int, ...]:
        """Labels of each sequence that the loss counts; the first is nobody's next token."""
        return tuple(
            sum(label != self.ignored_label for label in list(sample[fields.labels])[1:]) for fields in self.sequences
        )

    def repeats_itself(self, sample: Sample) -> bool:
        """Whether all sequences are the same."""
        first, *others = [list(sample[fields.tokens]) for fields in self.sequences]
        return any(others) and all(first == other for other in others)

    def rows_of(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows of a microbatch, each as a sample of text: the first sequences of all samples, then the second.

        A sequence without tokens, which no model can run alone, is one token that is not learned.
        """
        if self.rows == 1:
            fields = self.sequences[0]
            return [s if len(s[fields.tokens]) else self._nothing(fields) for s in samples]
        return [
            {"tokens": sample[fields.tokens], "labels": sample[fields.labels]}
            if len(sample[fields.tokens])
            else self._nothing(TEXT.sequences[0])
            for fields in self.sequences
            for sample in samples
        ]

    def _beginnings(self, sample: Sample, shares: Sequence[int]) -> Sample:
        share_of = {key: share for fields, share in zip(self.sequences, shares, strict=True) for key in _keys(fields)}
        return {key: value[: share_of[key]] if key in share_of else value for key, value in sample.items()}

    def _masked(self, labels: Tensor | list[int]) -> Tensor | list[int]:
        if isinstance(labels, Tensor):
            return torch.full_like(labels, self.ignored_label)
        return [self.ignored_label] * len(labels)

    def _nothing(self, fields: Fields) -> Sample:
        return {fields.tokens: [0], fields.labels: [self.ignored_label]}


def _keys(fields: Fields) -> tuple[str, ...]:
    return (fields.tokens, fields.labels, *fields.others)


def _shares(lengths: Sequence[int], total: int) -> list[int]:
    """What is left of each sequence if all together may have so many tokens: long ones are cut to one length."""
    shares = [0] * len(lengths)
    left = total
    for done, index in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        shares[index] = min(lengths[index], left // (len(lengths) - done))
        left -= shares[index]
    return shares


TEXT = Kind(sequences=(Fields("tokens", "labels", ("mask", "input_pos")),))
"""One sequence; the samples of torchtune's finetuning datasets."""

PAIR = Kind(
    sequences=(Fields("chosen_input_ids", "chosen_labels"), Fields("rejected_input_ids", "rejected_labels")),
    uncounted="filler",
)
"""A better and a worse answer; the samples of torchtune's preference datasets."""
