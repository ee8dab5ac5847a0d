"""The samples of a step: items of a dataset before collation, or rows that a trainer has generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtune_adaptive.errors import ConfigError

SAMPLES_KEY = "adaptive_samples"
"""Key of a CollatedBatch in the batch that a data loader yields."""
IGNORED = -100
"""Label of a token that does not count in the loss."""
ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")
"""In TRL, a sample has a row for each of these, which follows its `prompt_ids`."""
TARGET_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True)
class RawSample:
    """An item of the dataset, before collation."""

    features: Any

    @property
    def row_lengths(self) -> list[int]:
        """Return the tokens of each row; 1 if the sample is not tokenized yet, such as an image."""
        features = self.features if isinstance(self.features, Mapping) else {}
        if answers := [features[name] for name in ANSWERS if name in features]:
            return [_tokens(features.get("prompt_ids", ())) + _tokens(answer) for answer in answers]
        return [_tokens(features["input_ids"])] if "input_ids" in features else [1]

    @property
    def length(self) -> int:
        """Return the tokens of the longest row."""
        return max(self.row_lengths)

    @property
    def label(self) -> Any:
        """Return the class of a sample with a single label, otherwise None."""
        label = self.features.get("label", self.features.get("labels")) if isinstance(self.features, Mapping) else None
        return None if hasattr(label, "__len__") else label

    def as_targets(self, *, few: bool = False) -> RawSample:
        """Return a copy with a loss on every token, or with `few` on the first two, which get equal labels."""
        if not isinstance(self.features, Mapping) or "input_ids" not in self.features:
            return self
        features, labels = dict(self.features), self.features.get("labels", 0)
        tokens = len(features["input_ids"])
        learned = 2 if few else tokens
        if hasattr(labels, "__len__") and len(labels) == tokens:
            known = next((label for label in labels if label != IGNORED), 0)
            filled = [known if few or label == IGNORED else label for label in labels]
            filled[learned:] = [IGNORED] * (len(filled) - learned)
            features["labels"] = labels.new_tensor(filled) if isinstance(labels, Tensor) else filled
        mask = [1] * min(learned, tokens) + [0] * (tokens - learned)
        masks = {name: mask for name in TARGET_MASKS if name in features}
        return replace(self, features={**features, **masks})


class GeneratedRow(RawSample):
    """A row that a trainer such as TRL's GRPOTrainer has generated and scored.

    Its features are tensors with one row, and scalar tensors that all rows of the batch share.
    """

    @staticmethod
    def all_of(inputs: Mapping[str, Tensor | None]) -> list[GeneratedRow]:
        """Return the rows of a batch that such a trainer has prepared."""
        given = {name: value for name, value in inputs.items() if value is not None}
        rows = len(given["completion_ids"]) if "completion_ids" in given else 0
        for name, value in given.items():
            if not isinstance(value, Tensor) or (value.dim() and len(value) != rows):
                raise ConfigError(
                    f"a batch from _prepare_inputs cannot be split: {name!r} does not have one row per completion; "
                    "return tensors with one row per completion, or scalars"
                )
        return [
            GeneratedRow({name: value[row : row + 1] if value.dim() else value for name, value in given.items()})
            for row in range(rows)
        ]

    def scored(self, advantage: float, targets: int) -> RawSample:
        """Return a copy with this advantage and a loss on the first `targets` tokens."""
        mask, advantages = self.features["completion_mask"].clone(), self.features["advantages"]
        mask[:, :targets], mask[:, targets:] = 1, 0
        score = {"completion_mask": mask, "advantages": torch.full_like(advantages, advantage)}
        return replace(self, features={**self.features, **score})


@dataclass
class CollatedBatch:
    """A collated batch and its samples.

    Not a tuple, dict or tensor: accelerate and torch's pin_memory leave such an object in the inputs unchanged.
    """

    samples: Sequence[RawSample]
    targets: tuple[int, int]
    """See `targets_of`."""
    inputs: Any = None

    @staticmethod
    def of(samples: Sequence[RawSample], collate: Callable[[list[Any]], Any]) -> CollatedBatch:
        """Collate samples with the collator of their data loader; join rows that were generated."""
        features = [copy(sample.features) for sample in samples]
        if isinstance(samples[0], GeneratedRow):
            rows = {
                name: torch.cat([row[name] for row in features]) if value.dim() else value
                for name, value in features[0].items()
            }
            return CollatedBatch(samples, (len(samples),) * 2, rows)
        inputs = collate(features)
        batch: CollatedBatch = inputs.pop(SAMPLES_KEY)
        return replace(batch, samples=samples, inputs=inputs)

    def is_reproducible(self, collate: Callable[[list[Any]], Any]) -> bool:
        """Return True if collating the samples again gives the same batch. Synchronizes with the device."""
        again = CollatedBatch.of(self.samples, collate).inputs
        mine, made = (
            {name: value for name, value in each.items() if value is not None} for each in (self.inputs, again)
        )
        return mine.keys() == made.keys() and all(
            torch.equal(value.cpu(), made[name].cpu()) for name, value in mine.items() if isinstance(value, Tensor)
        )


@dataclass(frozen=True)
class KeepSamples:
    """A data collator that adds the samples to the batch of another collator."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, features: list[Any]) -> Any:
        """Collate the features and add them to the batch."""
        samples = [RawSample(copy(each)) for each in features]  # some collators remove keys
        inputs = self.collate(features)
        if isinstance(inputs, MutableMapping):
            inputs[SAMPLES_KEY] = CollatedBatch(samples, targets_of(inputs, len(samples)))
        return inputs


def targets_of(inputs: Mapping[str, Any], samples: int) -> tuple[int, int]:
    """Return the number of labels in the loss, with and without the first position of each row.

    Without labels per token, both are the number of samples. Synchronizes with the device of the labels.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return samples, samples
    counts = labels != IGNORED
    return int(counts.sum()), int(counts[..., 1:].sum())


def _tokens(ids: Any) -> int:
    return ids.shape[-1] if isinstance(ids, Tensor) else len(ids)
