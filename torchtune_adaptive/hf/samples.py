"""The samples of a step: items of a dataset before collation, or rows that a trainer has generated."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, get_worker_info

from torchtune_adaptive.engine.ranks import from_all_ranks, rank, world_size
from torchtune_adaptive.errors import ConfigError

SAMPLES_KEY = "adaptive_samples"
"""The key under which the batch of a data loader contains its CollatedBatch."""
IGNORED = -100
"""Label of a token that does not count in the loss."""
ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids", "chosen_input_ids", "rejected_input_ids")
"""Fields of TRL's samples. Each of them becomes a row, after the `prompt_ids`, if there are any."""
TARGET_MASKS = ("completion_mask", "assistant_masks")
TOKENS = {"input_ids", "attention_mask", "labels", "token_type_ids", "position_ids", "seq_lengths", *TARGET_MASKS}
"""Fields that may be cut. A sample with others, except texts, answers and a label, is not cut."""


class Counts(NamedTuple):
    """The numbers by which the mean loss of a batch may be divided."""

    rows: int = 0
    labels: int = 0
    """Labels that count in the loss."""
    next_tokens: int = 0
    """Labels without the first position of each row."""

    @classmethod
    def of_rows(cls, rows: int) -> Counts:
        """Count the rows of a batch whose labels are not per token."""
        return cls(rows, rows, rows)

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        """Add up the counts of microbatches."""
        return cls(*map(sum, zip(*counts, strict=True)))


@dataclass(frozen=True)
class RawSample:
    """An item of the dataset, before collation."""

    features: Any
    collated_lengths: Sequence[int] = ()
    """The number of tokens of each row after collation, if the data collator makes or adds tokens; for a generated row,
    without padding after its answer."""

    @property
    def row_lengths(self) -> Sequence[int]:
        """Return the number of tokens of each row; 1 if the sample has no tokens, for example an image."""
        if self.collated_lengths:
            return self.collated_lengths
        features = self.features if isinstance(self.features, Mapping) else {}
        if answers := [features[name] for name in ANSWERS if name in features]:
            return [_tokens(features.get("prompt_ids", ())) + _tokens(answer) for answer in answers]
        return [_tokens(features["input_ids"])] if "input_ids" in features else [1]

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest row."""
        return max(self.row_lengths)

    @property
    def label(self) -> Any:
        """Return the label of a sample in classification; None if each token has a label."""
        label = self.features.get("label", self.features.get("labels")) if isinstance(self.features, Mapping) else None
        return None if hasattr(label, "__len__") else label

    def shortened(self, tokens: int) -> RawSample:
        """Return a copy with at most this many tokens in each sequence, or this sample if it has unknown fields."""
        features = self.features if isinstance(self.features, Mapping) else {}
        sequences = {name: value for name, value in features.items() if not isinstance(value, str)}
        if self.collated_lengths or not sequences.keys() <= TOKENS | {*ANSWERS, "prompt_ids", "label"}:
            return self
        cut = {
            name: value[-tokens:] if name == "prompt_ids" else value[:tokens]
            for name, value in sequences.items()
            if hasattr(value, "__len__") and getattr(value, "ndim", 1) == 1
        }
        if "seq_lengths" in cut:
            cut["seq_lengths"] = [len(cut["input_ids"])]
        return replace(self, features={**features, **cut})

    def with_targets(self, *, few: bool = False) -> RawSample:
        """Return a copy in which every token has a label; with `few`, only the first two, with the same label.

        With `few`, labels without an ignored token stay: the loss may not know the label of ignored tokens.
        """
        if not isinstance(self.features, Mapping) or "input_ids" not in self.features:
            return self
        features, tokens = dict(self.features), _tokens(self.features["input_ids"])
        labelled = min(2, tokens) if few else tokens
        if "labels" in features:
            features["labels"] = _with_labels(features["labels"], tokens, labelled, few=few)
        mask = [1] * labelled + [0] * (tokens - labelled)
        return replace(self, features={**features, **{name: mask for name in TARGET_MASKS if name in features}})


class GeneratedRow(RawSample):
    """A row that a trainer such as TRL's GRPOTrainer has generated and scored.

    Its features are tensors with one row, and scalar tensors that are equal for all rows of the batch.
    """

    @staticmethod
    def all_of(inputs: Mapping[str, Tensor | None]) -> list[GeneratedRow]:
        """Split the batch that `_prepare_inputs` returned into rows."""
        tensors = {name: value for name, value in inputs.items() if value is not None}
        rows = len(tensors["completion_ids"]) if "completion_ids" in tensors else 0
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or (value.dim() and len(value) != rows):
                raise ConfigError(
                    f"a batch from _prepare_inputs cannot be split: {name!r} does not have one row per completion; "
                    "return tensors with one row per completion, or scalars"
                )
        answers = lengths_of_answers(tensors)
        lengths = [[]] * rows if answers is None else [[tensors["prompt_ids"].shape[1] + each] for each in answers]
        return [
            GeneratedRow(
                {name: value[row : row + 1] if value.dim() else value for name, value in tensors.items()}, length
            )
            for row, length in enumerate(lengths)
        ]

    def shortened(self, tokens: int) -> RawSample:
        """Return a copy with the last tokens of the prompt and the first ones of the answer, or this row if it has
        unknown tensors."""
        return self.resized(*(min(tokens, self.features[name].shape[1]) for name in ("prompt_ids", "completion_ids")))

    def resized(self, prompt: int, answer: int) -> GeneratedRow:
        """Return a copy with the last tokens of the prompt and the first ones of the answer. If these are fewer, repeat
        tokens at the edge. Return this row if it has unknown tensors."""
        before, after = (self.features[name].shape[1] for name in ("prompt_ids", "completion_ids"))
        changed = {}
        for name, value in self.features.items():
            columns = value.shape[1] if value.dim() == 2 else 0
            if "prompt" in name and columns == before:
                changed[name] = value[:, torch.arange(before - prompt, before).clamp(min=0)]
            elif columns == after:
                changed[name] = value[:, torch.arange(answer).clamp(max=after - 1)]
            elif columns > 1 or value.dim() > 2:
                return self
        return replace(self, features={**self.features, **changed}, collated_lengths=())

    def scored(self, advantage: float, targets: int) -> GeneratedRow:
        """Return a copy with this advantage, in which only the first `targets` tokens count in the loss."""
        changed = {"completion_mask": self.features["completion_mask"].clone()}
        changed["completion_mask"][:, :targets], changed["completion_mask"][:, targets:] = 1, 0
        if "advantages" in self.features:  # not in distillation
            changed["advantages"] = torch.full_like(self.features["advantages"], advantage)
        return replace(self, features={**self.features, **changed})


@dataclass
class CollatedBatch:
    """A collated batch and its samples.

    It is no tuple, dict or tensor, so accelerate and torch's pin_memory leave it in the inputs unchanged.
    """

    samples: Sequence[RawSample]
    counts: Counts
    inputs: Any = None

    def __post_init__(self) -> None:
        self._versions = self._versions_now()

    @property
    def was_edited(self) -> bool:
        """Return True if a tensor of the inputs was changed in place since this object was created."""
        return self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        tensors = [each for each in tree_leaves(dict(self.inputs or {})) if isinstance(each, Tensor)]
        return [each._version for each in tensors if not each.is_inference()]

    def to(self, *_: Any, **__: Any) -> CollatedBatch:
        """Return this batch, because a training_step may move all values of its inputs to a device."""
        return self

    @staticmethod
    def of(samples: Sequence[RawSample], collate: Callable[[list[Any]], Any]) -> CollatedBatch:
        """Collate samples with the collator of their data loader; concatenate generated rows."""
        features = [copied(sample.features) for sample in samples]
        if isinstance(samples[0], GeneratedRow):
            rows = {
                name: torch.cat([row[name] for row in features]) if value.dim() else value
                for name, value in features[0].items()
            }
            return CollatedBatch.of_generated(samples, rows)
        inputs = collate(features)
        batch: CollatedBatch = inputs.pop(SAMPLES_KEY)
        return replace(batch, samples=samples, inputs=inputs)

    @staticmethod
    def of_generated(rows: Sequence[RawSample], inputs: Any) -> CollatedBatch:
        """Return a batch of generated rows. Waits for the device."""
        mask = inputs.get("completion_mask")
        if mask is None:
            return CollatedBatch(rows, Counts.of_rows(len(rows)), inputs)
        tokens = int((mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]).sum())
        return CollatedBatch(rows, Counts(len(rows), tokens, tokens), inputs)

    def without_padding(self) -> CollatedBatch:
        """Return the batch without the padding after the longest answer, if its rows were generated."""
        if not isinstance(self.samples[0], GeneratedRow):
            return self
        prompt, longest = self.inputs["prompt_ids"].shape[1], max(sample.length for sample in self.samples)
        return replace(self, inputs=GeneratedRow(self.inputs).resized(prompt, longest - prompt).features)

    def is_reproducible(self, collate: Callable[[list[Any]], Any]) -> bool:
        """Return True if collating the samples again gives the same batch. Waits for the device."""
        both = self.inputs, CollatedBatch.of(self.samples, collate).inputs
        first, second = ([each for each in tree_leaves({**inputs}) if each is not None] for inputs in both)
        tensors = [pair for pair in zip(first, second, strict=False) if isinstance(pair[0], Tensor)]
        same = (torch.equal(*(each.cpu().nan_to_num() for each in pair)) for pair in tensors)
        return len(first) == len(second) and all(same)


@dataclass(frozen=True)
class KeepSamples:
    """Wraps a data collator; adds the samples to its batch."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, features: list[Any]) -> Any:
        """Collate the features and add them to the batch."""
        samples = [RawSample(copied(each)) for each in features]
        inputs = self.collate(features)
        if isinstance(inputs, MutableMapping):
            samples = self._measured(samples, inputs)
            inputs[SAMPLES_KEY] = CollatedBatch(samples, counts_of(inputs, len(samples)))
            if get_worker_info() is not None:  # the queue of a worker would only print this error, and block
                pickle.dumps(samples)
        return inputs

    def _measured(self, samples: list[RawSample], inputs: Mapping[str, Any]) -> list[RawSample]:
        """Return the samples with their numbers of tokens, if the collator has made or added tokens.

        Samples are collated alone if the batch does not show their tokens. Without a mask, those of the dataset count.
        """
        rows, before = row_lengths_in(inputs), [sum(each.row_lengths) for each in samples]
        if len(rows) == len(samples):
            lengths = [[tokens] for tokens in rows]
        elif sum(rows) > sum(before) or (not rows and max(before) == 1 and "input_ids" in inputs):
            alone = (self.collate([copied(each.features)]) for each in samples)
            lengths = [row_lengths_in(one) or [one["input_ids"].shape[-1]] for one in alone]
        else:
            return samples
        after = zip(samples, lengths, before, strict=True)
        return [replace(each, collated_lengths=rows) if sum(rows) > tokens else each for each, rows, tokens in after]


def lengths_of_answers(tensors: Mapping[str, Tensor]) -> list[int] | None:
    """Return the number of tokens of each generated answer, at least 1; None if it is unknown."""
    if not {"prompt_ids", "completion_mask"} <= tensors.keys():
        return None
    mask = tensors["completion_mask"] != 0
    answers: list[int] = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp(min=1).tolist()
    return answers


def copied(features: Any) -> Any:
    """Return a copy of an item of the dataset, because some collators remove its keys, or pad its lists in place."""
    copies = copy(features)
    if isinstance(copies, dict):
        copies |= {name: value[:] for name, value in copies.items() if isinstance(value, list)}
    return copies


def row_lengths_in(inputs: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each row of collated inputs; an empty list if tokens may be padding."""
    ids, labels, mask = (inputs.get(name) for name in ("input_ids", "labels", "attention_mask"))
    if ids is None and isinstance(labels, Tensor):  # the mask, if any, belongs to the audio
        ids, mask = labels, labels != IGNORED
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.dim() == 2 and ids.shape == mask.shape):
        return []
    return (mask != 0).sum(-1).tolist()


def share_of_rank(samples: int) -> range:
    """Return the indices of the samples that this rank reads."""
    return range(rank(), samples, world_size())


def indices_of_largest(
    dataset: Any, collate: Callable[[list[Any]], Any], workers: int, *, collated: bool
) -> tuple[int, int]:
    """Collective: return the indices of the sample with the most tokens, and of that with the largest images or audio.

    Each rank reads its share of the dataset. If `collated`, data workers collate each sample to measure it.
    """
    mine = share_of_rank(len(dataset))
    longest = largest = (0, 0, 0)
    if collated and rank() == 0:
        print(f"batch search · collates each of the {len(dataset)} samples, to measure them", flush=True)
    sizes = (
        DataLoader(dataset, sampler=mine, collate_fn=partial(_size_of_one, collate), num_workers=workers)
        if collated
        else ((RawSample(dataset[index]).length, 0) for index in mine)
    )
    for index, (length, media) in zip(mine, sizes, strict=True):
        longest, largest = max(longest, (length, media, -index)), max(largest, (media, length, -index))
    on_ranks = from_all_ranks((longest, largest))
    return -max(each[0] for each in on_ranks)[-1], -max(each[1] for each in on_ranks)[-1]


def _size_of_one(collate: Callable[[list[Any]], Any], features: list[Any]) -> tuple[int, int]:
    """Collate a sample; return its tokens, and the numbers in its images and audio."""
    inputs = collate(features)
    return inputs[SAMPLES_KEY].samples[0].length, sum(inputs[name].numel() for name in media_in(inputs))


def media_in(inputs: Mapping[str, Any]) -> set[str]:
    """Return the names of images and audio: matrices of floating-point numbers that are not one number per token."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 1}
    media = {name for name, value in tensors.items() if value.is_floating_point()} - {"labels", "attention_mask"}
    ids = tensors.get("input_ids")
    return media if ids is None else {name for name in media if tensors[name].shape != ids.shape}


def counts_of(inputs: Mapping[str, Any], samples: int) -> Counts:
    """Count the labels in collated inputs. Waits for the device of the labels."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
            samples = int(torch.count_nonzero(labels != IGNORED))
        return Counts.of_rows(samples)
    in_loss = labels != IGNORED
    return Counts(samples, int(in_loss.sum()), int(in_loss[..., 1:].sum()))


def _with_labels(labels: Any, tokens: int, labelled: int, *, few: bool) -> Any:
    """Return labels in which the first `labelled` tokens count: see `RawSample.with_targets`. Labels that are not one
    whole number per token stay."""
    values = labels.tolist() if hasattr(labels, "tolist") else labels
    if not (isinstance(values, list) and len(values) == tokens and all(isinstance(each, int) for each in values)):
        return labels
    if few and IGNORED not in values:
        return labels
    known = next((label for label in values if label != IGNORED), 0)
    filled = [known if few or label == IGNORED else label for label in values[:labelled]]
    filled += [IGNORED] * (tokens - labelled)
    if isinstance(labels, Tensor):
        return labels.new_tensor(filled)
    return np.array(filled) if isinstance(labels, np.ndarray) else filled


def _tokens(ids: Any) -> int:
    return ids.shape[-1] if hasattr(ids, "shape") else len(ids)
