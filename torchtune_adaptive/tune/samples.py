"""Kinds of sample: a dataset returns them, and nothing splits them. Everything that looks into a sample asks its kind.

In finetuning a sample is one sequence of tokens with a label for each. In preference training it is a pair: two
sequences, the chosen and the rejected answer, each with its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from torchtune_adaptive.engine.step import SampleKind

Sample = dict[str, Any]
Cost: TypeAlias = Callable[[int], float]

INDEX = "index in the dataset"
"""The key under which a sample carries its index; no collate function sees it."""
FILLER = "filler"
"""A key of samples that stand where a rank has none: a loss may not be zero where there is no label."""


class Fields(NamedTuple):
    """The keys of one sequence of a sample."""

    tokens: str
    labels: str
    others: tuple[str, ...] = ()
    """Further keys that have a value for each token."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A microbatch of n samples is n rows for each of their sequences: limits count samples, and one that counts tokens
    is told how many rows a sample has. The length of a sample is that of its longest sequence, to which all rows of its
    microbatch are padded; where nothing is padded, the sum of its sequences."""

    sequences: tuple[Fields, ...]
    ignored_label: int = CROSS_ENTROPY_IGNORE_IDX
    padded: bool = True
    """Whether the rows of a microbatch are padded to the longest, or its sequences follow each other in one row."""

    @property
    def rows(self) -> int:
        return len(self.sequences)

    @property
    def noun(self) -> str:
        """What a table calls a sample."""
        return "row" if self.rows == 1 else "pair"

    @property
    def padded_rows(self) -> int:
        """Rows as long as the sample; without padding, all of its tokens are its length."""
        return self.rows if self.padded else 1

    def for_steps(self, model: nn.Module) -> SampleKind[Sample]:
        return SampleKind(
            length_of=self.length_of,
            row_lengths_of=self.lengths_of if self.rows > 1 else None,
            stand_in=self.stand_in,
            filler=self.filler,
            padded=self.padded,
            cost_of=cost_of(model),
        )

    def lengths_of(self, sample: Sample) -> tuple[int, ...]:
        return tuple(len(sample[fields.tokens]) for fields in self.sequences)

    def length_of(self, sample: Sample) -> int:
        lengths = self.lengths_of(sample)
        return max(lengths) if self.padded else sum(lengths)

    def length_at(self, longest: int) -> int:
        """The length of a sample whose sequences are all that long."""
        return longest if self.padded else longest * self.rows

    def longest_at(self, length: int) -> int:
        """The longest sequences of which a sample may have all, so that its length is no more than this."""
        return length if self.padded else length // self.rows

    @property
    def length_suffix(self) -> str:
        """Ends a length that is that of several sequences."""
        return "" if self.padded or self.rows == 1 else " in both answers together"

    def uniform(self, token: int, length: int) -> Sample:
        """A sample of this length: sequences of like length in which every token is a target."""
        each = max(1, self.longest_at(length))
        return {key: [token] * each for fields in self.sequences for key in fields[:2]}

    def cut(self, sample: Sample, length: int) -> Sample:
        """A uniform sample as one of this length."""
        return self._beginnings(sample, max(1, self.longest_at(length)))

    def stand_in(self, sample: Sample) -> Sample:
        """The first two tokens of each sequence: the least that goes through the model like the whole. Samples with
        images stay whole: their masks tie every token to the images."""
        if "encoder_input" in sample:
            return sample
        short = self._beginnings(sample, 2)
        return {**short, "seq_lens": torch.tensor([2])} if "seq_lens" in sample else short

    def filler(self, sample: Sample) -> Sample:
        """A stand-in without any label: it goes through the model and counts nothing."""
        short = {**self.stand_in(sample), FILLER: True}
        for key in (fields.labels for fields in self.sequences):
            labels, ignored = short[key], self.ignored_label
            short[key] = torch.full_like(labels, ignored) if isinstance(labels, Tensor) else [ignored] * len(labels)
        return short

    def rows_of(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows of a microbatch: the first sequences of all samples, then the second. A sequence without tokens,
        which no model can run alone, is one token that is not learned."""
        rows: list[Sample] = []
        for tokens, labels, _ in self.sequences:
            for sample in samples:
                if not len(sample[tokens]):
                    rows.append({"tokens": [0], "labels": [self.ignored_label]})
                elif self.rows == 1:  # with masks and images
                    rows.append({key: value for key, value in sample.items() if key not in (INDEX, FILLER)})
                else:
                    rows.append({"tokens": sample[tokens], "labels": sample[labels]})
        return rows

    def _beginnings(self, sample: Sample, tokens: int) -> Sample:
        keys = [key for fields in self.sequences for key in (fields.tokens, fields.labels, *fields.others)]
        return {**sample, **{key: sample[key][:tokens] for key in keys if key in sample}}


TEXT = Kind(sequences=(Fields("tokens", "labels", ("mask", "input_pos")),))
"""One sequence; the samples of torchtune's finetuning datasets."""

PAIR = Kind(sequences=(Fields("chosen_input_ids", "chosen_labels"), Fields("rejected_input_ids", "rejected_labels")))
"""A better and a worse answer; the samples of torchtune's preference datasets."""


def cost_of(model: nn.Module) -> Cost:
    """The cost of a sequence in tokens: the products of the layers, and of the attention if it is torchtune's."""
    layer = next(iter(model.layers), None) if isinstance(model, TransformerDecoder) else None
    attention = getattr(layer, "attn", None)
    if layer is None or not isinstance(attention, MultiHeadAttention):
        return float
    # a token meets each parameter once; and, on average, half of the tokens of its sample in two products
    width = attention.num_heads * attention.head_dim
    per_pair = width / sum(parameter.numel() for parameter in layer.parameters())
    return lambda length: length * (1 + per_pair * length)
