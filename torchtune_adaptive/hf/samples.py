"""The samples of a step: what a dataset of transformers or TRL returns, or what a trainer generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtune_adaptive.errors import ConfigError

KEPT = "adaptive_samples"
"""The key under which a batch carries its samples until the Trainer has it."""
IGNORED = -100
"""The label of a token that does not count in the loss."""
ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")
"""In TRL, a sample has a row for each of these, behind its `prompt_ids`."""
TARGET_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True)
class RawSample:
    """What the dataset returned, before it is collated."""

    features: Any

    @property
    def row_lengths(self) -> list[int]:
        """The tokens of each row; 1 where the sample has no tokens yet, such as an image."""
        features = self.features if isinstance(self.features, Mapping) else {}
        if answers := [features[name] for name in ANSWERS if name in features]:
            return [_tokens(features.get("prompt_ids", ())) + _tokens(answer) for answer in answers]
        return [_tokens(features["input_ids"])] if "input_ids" in features else [1]

    @property
    def length(self) -> int:
        return max(self.row_lengths)

    @property
    def label(self) -> Any:
        """The class of a sample that has one."""
        label = self.features.get("label", self.features.get("labels")) if isinstance(self.features, Mapping) else None
        return None if hasattr(label, "__len__") else label

    def as_targets(self, *, few: bool = False) -> RawSample:
        """The same with a loss on every token; with `few`, on the first two, whose labels are then alike."""
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
    """A row of what a trainer such as TRL's GRPOTrainer has generated and scored.

    Its features are tensors of one row each, and those without rows, which all rows of a step share.
    """

    @staticmethod
    def all_of(inputs: Mapping[str, Tensor | None]) -> list[GeneratedRow]:
        """The rows of a batch as such a trainer prepares it."""
        given = {name: value for name, value in inputs.items() if value is not None}
        rows = len(given["completion_ids"]) if "completion_ids" in given else 0
        for name, value in given.items():
            if not isinstance(value, Tensor) or (value.dim() and len(value) != rows):
                raise ConfigError(f"{name!r} of a prepared batch cannot be split: it has no row for each completion")
        return [
            GeneratedRow({name: value[row : row + 1] if value.dim() else value for name, value in given.items()})
            for row in range(rows)
        ]

    def scored(self, advantage: float, targets: int) -> RawSample:
        """With another score, and a loss on so many tokens."""
        mask, advantages = self.features["completion_mask"].clone(), self.features["advantages"]
        mask[:, :targets], mask[:, targets:] = 1, 0
        score = {"completion_mask": mask, "advantages": torch.full_like(advantages, advantage)}
        return replace(self, features={**self.features, **score})


@dataclass
class CollatedBatch:
    """A collated batch and what it was made of.

    Not a tuple, dict or tensor: accelerate and torch's pin_memory leave it in the inputs as it is.
    """

    samples: Sequence[RawSample]
    targets: tuple[int, int]
    """Tokens that count in the loss, and how many if the first of a row does not, as in causal language models; rows,
    where labels are not by token."""
    inputs: Any = None
    versions: Mapping[str, tuple[int, int]] | None = None
    """What `versions_of` said of the inputs when Trainer's step was called; None where they were generated."""

    @staticmethod
    def of(samples: Sequence[RawSample], collate: Callable[[list[Any]], Any]) -> CollatedBatch:
        """Any samples of a step, by the collator of its data loader."""
        features = [copy(sample.features) for sample in samples]
        if isinstance(samples[0], GeneratedRow):
            rows = {
                name: torch.cat([row[name] for row in features]) if value.dim() else value
                for name, value in features[0].items()
            }
            return CollatedBatch(samples, (len(samples),) * 2, rows)
        inputs = collate(features)
        batch: CollatedBatch = inputs.pop(KEPT)
        return replace(batch, samples=samples, inputs=inputs)

    def is_made_again(self, collate: Callable[[list[Any]], Any]) -> bool:
        """Whether collating its samples again makes the same batch. Waits for the device."""
        again = CollatedBatch.of(self.samples, collate).inputs
        mine, made = (
            {name: value for name, value in each.items() if value is not None} for each in (self.inputs, again)
        )
        return mine.keys() == made.keys() and all(
            torch.equal(value.cpu(), made[name].cpu()) for name, value in mine.items() if isinstance(value, Tensor)
        )


@dataclass(frozen=True)
class KeepSamples:
    """A collator that leaves in the inputs what they were made of."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, features: list[Any]) -> Any:
        samples = [RawSample(copy(each)) for each in features]  # some collators take parts out of them
        inputs = self.collate(features)
        if isinstance(inputs, MutableMapping):
            labels, targets = inputs.get("labels"), (len(samples),) * 2
            if isinstance(labels, Tensor) and labels.dim() > 1:
                counts = labels != IGNORED
                targets = int(counts.sum()), int(counts[..., 1:].sum())
            inputs[KEPT] = CollatedBatch(samples, targets)
        return inputs


def versions_of(inputs: Any) -> dict[str, tuple[int, int]]:
    """What tells each entry of a batch from another, and a tensor from itself once it is written to."""
    entries = inputs.items() if isinstance(inputs, MutableMapping) else ()
    return {
        name: (id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0)
        for name, value in entries
        if name != KEPT
    }


def _tokens(ids: Any) -> int:
    return ids.shape[-1] if isinstance(ids, Tensor) else len(ids)
