"""The samples of a step, as datasets and collators of transformers and TRL have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchtune_adaptive.engine.step import SampleKind
from torchtune_adaptive.errors import ConfigError

KEPT = "adaptive_samples"
"""The key under which a batch carries its samples until the Trainer has it."""
IGNORED = -100
"""The label of a token that does not count in the loss."""
ANSWERS = ("chosen_ids", "rejected_ids")
"""In TRL, preference training has these two rows in a sample, each behind its `prompt_ids`."""
TARGET_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True)
class RawSample:
    """What the dataset returned, before it is collated."""

    features: Any
    counts: bool = True
    """False for a filler, which leaves nothing in the gradients."""

    @property
    def row_lengths(self) -> list[int]:
        """The tokens of each row; 1 where the sample has no tokens yet, such as an image."""
        features = self.features if isinstance(self.features, Mapping) else {}
        if answers := [features[name] for name in ANSWERS if name in features]:
            prompt = len(features.get("prompt_ids", ()))
            return [prompt + len(answer) for answer in answers]
        return [len(features["input_ids"])] if "input_ids" in features else [1]

    @property
    def length(self) -> int:
        return max(self.row_lengths)

    def cut(self, length: int) -> RawSample:
        """The sample in so many tokens: lists that run along with the tokens are cut too."""
        if not isinstance(self.features, Mapping):
            return self
        features, now = dict(self.features), self.length
        prompt = min(len(features.get("prompt_ids", ())), length - 1)
        lengths = {"prompt_ids": prompt, **dict.fromkeys(ANSWERS, length - prompt)}
        for name, value in features.items():
            if name in lengths:
                features[name] = value[: lengths[name]]
            elif name == "seq_lengths":  # of the samples that are packed into this row
                features[name] = [length]
            elif not isinstance(value, str) and hasattr(value, "__len__") and len(value) == now:
                features[name] = value[:length]
        return replace(self, features=features)

    def as_targets(self) -> RawSample:
        """The same, with a loss on every token."""
        if not isinstance(self.features, Mapping) or "input_ids" not in self.features:
            return self
        features = dict(self.features)
        if "labels" in features and len(features["labels"]) == len(features["input_ids"]):
            features["labels"] = features["input_ids"]
        masks = {name: [1] * len(features[name]) for name in TARGET_MASKS if name in features}
        return replace(self, features={**features, **masks})


def sample_kind(*, padded: bool) -> SampleKind[RawSample]:
    """What the engine asks about samples."""
    return SampleKind(
        length_of=lambda sample: sample.length,
        row_lengths_of=lambda sample: sample.row_lengths,
        stand_in=lambda sample: sample.cut(2),
        filler=lambda sample: replace(sample.cut(2), counts=False),
        padded=padded,
    )


@dataclass
class CollatedBatch:
    """A collated batch and what it was made of.

    Not a tuple, dict or tensor: accelerate and torch's pin_memory leave it in the inputs as it is.
    """

    samples: tuple[RawSample, ...]
    targets: int
    """Tokens that count in the loss; rows, where labels are not by token."""
    inputs: Any = None

    @staticmethod
    def from_loader(inputs: Any) -> CollatedBatch:
        """Takes the batch out of what a data loader returned."""
        batch: CollatedBatch = inputs.pop(KEPT)
        return replace(batch, inputs=inputs)


@dataclass(frozen=True)
class KeepSamples:
    """A collator that leaves in the inputs what they were made of."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, features: list[Any]) -> Any:
        samples = tuple(RawSample(copy(each)) for each in features)  # some collators take parts out of them
        inputs = self.collate(features)
        if not isinstance(inputs, MutableMapping):
            raise ConfigError(
                f"the data collator returned {type(inputs).__name__}, and AdaptiveMixin needs a dict of tensors; "
                "trainers that generate during training (GRPO, RLOO) are not supported"
            )
        labels, targets = inputs.get("labels"), len(samples)
        if isinstance(labels, Tensor) and labels.dim() > 1:
            targets = int((labels[..., 1:] != IGNORED).sum())
        inputs[KEPT] = CollatedBatch(samples, targets)
        return inputs


def collated(collate: Callable[[list[Any]], Any], samples: Sequence[RawSample]) -> CollatedBatch:
    """Any samples as a batch."""
    return CollatedBatch.from_loader(KeepSamples(collate)([copy(sample.features) for sample in samples]))
