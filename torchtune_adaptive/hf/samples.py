"""The samples of a step: items of a dataset before collation, or rows that a trainer has generated."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.hf.losses import Counts

SAMPLES_KEY = "adaptive_samples"
"""The key under which the batch of a data loader contains its CollatedBatch."""
IGNORED = -100
"""Label of a token that does not count in the loss."""
ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")
"""Fields of TRL's samples. Each of them becomes a row, after the `prompt_ids`."""
TARGET_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True)
class RawSample:
    """An item of the dataset, before collation."""

    features: Any

    @property
    def row_lengths(self) -> list[int]:
        """Return the number of tokens of each row; 1 if the sample has no tokens yet, for example an image."""
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

    def with_targets(self, *, few: bool = False) -> RawSample:
        """Return a copy in which every token has a label; with `few`, only the first two, with the same label.

        With `few`, labels that are all in the loss stay, since the loss may not know the label of ignored tokens.
        """
        if not isinstance(self.features, Mapping) or "input_ids" not in self.features:
            return self
        features, labels = dict(self.features), self.features.get("labels", ())
        tokens, values = _tokens(features["input_ids"]), labels.tolist() if hasattr(labels, "tolist") else labels
        labelled = 2 if few else tokens
        is_list = isinstance(values, list) and len(values) == tokens and all(isinstance(each, int) for each in values)
        if is_list and (not few or IGNORED in values):
            known = next((label for label in values if label != IGNORED), 0)
            filled = [known if few or label == IGNORED else label for label in values]
            filled[labelled:] = [IGNORED] * (len(filled) - labelled)
            array = np.array(filled) if isinstance(labels, np.ndarray) else filled
            features["labels"] = labels.new_tensor(filled) if isinstance(labels, Tensor) else array
        mask = [1] * min(labelled, tokens) + [0] * (tokens - labelled)
        masks = {name: mask for name in TARGET_MASKS if name in features}
        return replace(self, features={**features, **masks})


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
        return [
            GeneratedRow({name: value[row : row + 1] if value.dim() else value for name, value in tensors.items()})
            for row in range(rows)
        ]

    def scored(self, advantage: float, targets: int) -> RawSample:
        """Return a copy with this advantage, in which only the first `targets` tokens count in the loss."""
        mask, advantages = self.features["completion_mask"].clone(), self.features["advantages"]
        mask[:, :targets], mask[:, targets:] = 1, 0
        score = {"completion_mask": mask, "advantages": torch.full_like(advantages, advantage)}
        return replace(self, features={**self.features, **score})


@dataclass
class CollatedBatch:
    """A collated batch and its samples.

    It is no tuple, dict or tensor, so accelerate and torch's pin_memory leave it in the inputs unchanged.
    """

    samples: Sequence[RawSample]
    counts: Counts
    inputs: Any = None

    def to(self, *_: Any, **__: Any) -> CollatedBatch:
        """Return this batch, because a training_step may move all values of its inputs to a device."""
        return self

    @staticmethod
    def of(samples: Sequence[RawSample], collate: Callable[[list[Any]], Any]) -> CollatedBatch:
        """Collate samples with the collator of their data loader; concatenate generated rows."""
        features = [copy(sample.features) for sample in samples]
        if isinstance(samples[0], GeneratedRow):
            rows = {
                name: torch.cat([row[name] for row in features]) if value.dim() else value
                for name, value in features[0].items()
            }
            return CollatedBatch(samples, Counts.of_rows(len(samples)), rows)
        inputs = collate(features)
        batch: CollatedBatch = inputs.pop(SAMPLES_KEY)
        return replace(batch, samples=samples, inputs=inputs)

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
        samples = [RawSample(copy(each)) for each in features]  # copies, because some collators remove keys
        inputs = self.collate(features)
        if isinstance(inputs, MutableMapping):
            inputs[SAMPLES_KEY] = CollatedBatch(samples, counts_of(inputs, len(samples)))
            if get_worker_info() is not None:  # the queue of a worker would only print this error, and block
                pickle.dumps(samples)
        return inputs


def counts_of(inputs: Mapping[str, Any], samples: int) -> Counts:
    """Count the labels in collated inputs. Waits for the device of the labels."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return Counts.of_rows(samples)
    in_loss = labels != IGNORED
    return Counts(samples, int(in_loss.sum()), int(in_loss[..., 1:].sum()))


def _tokens(ids: Any) -> int:
    return ids.shape[-1] if hasattr(ids, "shape") else len(ids)
