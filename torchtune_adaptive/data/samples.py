"""Kinds of sample. All code reads the fields of a sample through its `TokenKind`.

In finetuning, a sample is one sequence of tokens and labels. In preference training, it is a pair of sequences: the
chosen and the rejected answer, with their prompts. A sample is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from torchtune_adaptive.engine.plans import SampleKind

Sample = dict[str, Any]
Cost: TypeAlias = Callable[[int], float]

INDEX = "index in the dataset"
"""Key for the index of a sample; collate functions do not see it."""
FILLER = "filler in place of a sample"
"""Key that marks a filler: a small sample that a rank runs in place of a missing one, so that it issues the same
collectives as its peers. Its loss must not count, and may be nonzero even without labels."""
REFERENCE_LOG_PROBS = "reference_log_probs"
"""Key for the two reference log-probabilities of a pair, of the chosen and of the rejected answer. A stage sets it."""


class Fields(NamedTuple):
    """The keys under which a sample contains one of its sequences."""

    tokens: str
    labels: str
    others: tuple[str, ...] = ()
    """Further keys with one value per token."""


@dataclass(frozen=True, kw_only=True)
class TokenKind:
    """The sequences of a sample, and how they become rows of a microbatch.

    A pair has two sequences, so a microbatch of n pairs has 2 n rows; limits count pairs. With padding, the length of a
    sample is the length of its longest sequence. Without padding, it is the sum of the lengths of its sequences.
    """

    sequences: tuple[Fields, ...]
    ignored_label: int = CROSS_ENTROPY_IGNORE_IDX
    results: tuple[str, ...] = ()
    """Keys for a number per sequence, which one stage stores and a later one reads."""
    padded: bool = True
    """True: rows are padded to the longest. False: all sequences of a microbatch are concatenated in one row."""

    @property
    def rows(self) -> int:
        """Return the number of rows that a sample becomes."""
        return len(self.sequences)

    @property
    def noun(self) -> str:
        """Return the word for a sample in tables."""
        return "row" if self.rows == 1 else "pair"

    def for_steps(self, model: nn.Module) -> SampleKind[Sample]:
        """Return this kind for the engine, with the costs of this model."""
        return SampleKind(
            length_of=self.length_of,
            row_lengths_of=self.lengths_of if self.rows > 1 else None,
            filler=self.filler,
            padded=self.padded,
            cost_of=cost_of(model),
        )

    def lengths_of(self, sample: Sample) -> tuple[int, ...]:
        """Return the number of tokens of each sequence."""
        return tuple(len(sample[fields.tokens]) for fields in self.sequences)

    def length_of(self, sample: Sample) -> int:
        """Return the length of a sample, which is compared with limits."""
        lengths = self.lengths_of(sample)
        return max(lengths) if self.padded else sum(lengths)

    def length_at(self, longest: int) -> int:
        """Return the length of a sample whose sequences all have `longest` tokens."""
        return longest if self.padded else longest * self.rows

    def longest_at(self, length: int) -> int:
        """Return the most tokens per sequence with which the sample is not longer than `length`."""
        return length if self.padded else length // self.rows

    @property
    def length_suffix(self) -> str:
        """Return the text that follows a length in messages, if the length is a sum over both answers."""
        return "" if self.padded or self.rows == 1 else " in both answers together"

    def uniform(self, token: int, length: int) -> Sample:
        """Return a sample of this length, whose sequences repeat `token` and have every token as a target."""
        each = max(1, self.longest_at(length))
        tokens = {key: [token] * each for fields in self.sequences for key in fields[:2]}
        return tokens | {key: torch.zeros(self.rows) for key in self.results}

    def cut(self, sample: Sample, length: int) -> Sample:
        """Shorten a sample, whose sequences have equal lengths, to this length."""
        tokens = max(1, self.longest_at(length))
        keys = [key for fields in self.sequences for key in (fields.tokens, fields.labels, *fields.others)]
        short = {**sample, **{key: sample[key][:tokens] for key in keys if key in sample}}
        if "encoder_mask" in sample:  # for each image, which tokens attend to it
            short["encoder_mask"] = [mask[:tokens] for mask in sample["encoder_mask"]]
        return {**short, "seq_lens": torch.tensor([tokens])} if "seq_lens" in sample else short

    def filler(self, sample: Sample) -> Sample:
        """Return a filler: the first two tokens of each sequence, without labels, and all images.

        Two tokens are the fewest that run through the whole model.
        """
        return self.without_labels(self.cut(sample, self.length_at(2)))

    def without_labels(self, sample: Sample) -> Sample:
        """Return a filler that is as long as the sample."""
        filler, ignored = {**sample, FILLER: True}, self.ignored_label
        for key in (fields.labels for fields in self.sequences):
            labels = sample[key]
            filler[key] = torch.full_like(labels, ignored) if isinstance(labels, Tensor) else [ignored] * len(labels)
        return filler

    def rows_of(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the rows of a microbatch: the first sequences of all samples, followed by all second sequences.

        Models cannot run an empty sequence, so it becomes one token without a label.
        """
        rows: list[Sample] = []
        for tokens, labels, _ in self.sequences:
            for sample in samples:
                if not len(sample[tokens]):
                    rows.append({"tokens": [0], "labels": [self.ignored_label]})
                elif self.rows == 1:  # with all other fields, for example masks and images
                    rows.append({key: value for key, value in sample.items() if key not in (INDEX, FILLER)})
                else:
                    rows.append({"tokens": sample[tokens], "labels": sample[labels]})
        return rows


TEXT = TokenKind(sequences=(Fields("tokens", "labels", ("mask", "input_pos")),))
"""One sequence, as in torchtune's finetuning datasets."""

PAIR = TokenKind(
    sequences=(Fields("chosen_input_ids", "chosen_labels"), Fields("rejected_input_ids", "rejected_labels")),
    results=(REFERENCE_LOG_PROBS,),
)
"""A chosen and a rejected answer, as in torchtune's preference datasets."""


def cost_of(model: nn.Module) -> Cost:
    """Return a function from the length of a sequence to its cost in tokens; attention costs 0 for unknown models."""
    layer = next(iter(model.layers), None) if isinstance(model, TransformerDecoder) else None
    attention = getattr(layer, "attn", None)
    if layer is None or not isinstance(attention, MultiHeadAttention):
        return float
    # In a layer, a token is multiplied with every parameter, and twice with (on average) half of its sequence.
    width = attention.num_heads * attention.head_dim
    per_pair = width / sum(parameter.numel() for parameter in layer.parameters())
    return lambda length: length * (1 + per_pair * length)
