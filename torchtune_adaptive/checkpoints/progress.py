"""The progress of a run, which a checkpoint stores in addition to weights and optimizer state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from torchtune import training

from torchtune_adaptive.checkpoints.store import Position
from torchtune_adaptive.lifecycle.console import log_rank_0

TORCHTUNE_KEYS = {
    "seed": training.SEED_KEY,
    "epochs_run": training.EPOCHS_KEY,
    "total_epochs": training.TOTAL_EPOCHS_KEY,
    "max_steps_per_epoch": training.MAX_STEPS_KEY,
}
"""Maps fields of Progress to keys of torchtune's recipe state."""

SavedLimits: TypeAlias = Mapping[str, Any]
"""State of each stage's limit, by the stage's name."""

ADAPTIVE_KEY = "adaptive"
"""Key in the recipe state for all other fields. torchtune's recipes ignore it."""


@dataclass(frozen=True)
class EpochSizes:
    """Batch sizes and steps of one epoch, per rank."""

    epoch: int
    batch_size: int
    microbatches: int
    microbatch_rows: int
    """Rows of the largest microbatch: `batch_size`, or fewer if that does not fit."""
    samples_per_step: int
    steps: int
    refused_batch_size: int | None = None
    """The batch size that was requested, if it was rejected because it exceeds the maximum."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run, at a boundary between two steps."""

    seed: int
    epochs_run: int = 0
    total_epochs: int
    max_steps_per_epoch: int | None
    past: tuple[EpochSizes, ...] = ()
    """The completed epochs."""
    current_epoch: EpochSizes | None = None
    """The epoch that has begun, if there is one. After a resume, it keeps these sizes, even if others fit."""
    steps_in_epoch: int = 0
    samples_in_epoch: int = 0
    """Number of samples of this epoch on which all ranks together have trained. Prefetched samples do not count."""
    step: int = 0
    """Number of steps since the start of the run."""
    limit: SavedLimits | None = None
    """None before the first epoch."""
    ranks: int
    """Number of data-parallel ranks that have saved this progress."""
    validated_step: int = 0
    """The latest step that was followed by a validation."""
    dataset_samples: int | None = None

    @property
    def finished(self) -> bool:
        """True after the last epoch."""
        return self.epochs_run >= self.total_epochs

    @property
    def epochs_started(self) -> tuple[EpochSizes, ...]:
        """The completed epochs and, if there is one, the current epoch."""
        return self.past if self.current_epoch is None else (*self.past, self.current_epoch)

    @property
    def position(self) -> Position:
        """The position for a manifest."""
        return Position(epochs=self.epochs_run, steps_in_epoch=self.steps_in_epoch, step=self.step)

    def name_of_checkpoint(self) -> str:
        """Return the directory name of a checkpoint at this position."""
        return f"step_{self.step}" if self.steps_in_epoch else f"epoch_{self.epochs_run - 1}"

    def after_step(self, sizes: EpochSizes, ranks: int) -> Progress:
        """Return the progress after one more step."""
        return replace(
            self,
            current_epoch=sizes,
            steps_in_epoch=self.steps_in_epoch + 1,
            samples_in_epoch=self.samples_in_epoch + sizes.samples_per_step * ranks,
            step=self.step + 1,
        )

    def after_epoch(self, sizes: EpochSizes) -> Progress:
        """Return the progress at the end of the current epoch."""
        done, past = self.epochs_run + 1, (*self.past, sizes)
        return replace(self, epochs_run=done, past=past, current_epoch=None, steps_in_epoch=0, samples_in_epoch=0)

    def resumed(self, checkpoint: Mapping[str, Any]) -> Progress:
        """Return the progress of a checkpoint, but with the number of epochs of the config. Logs other keys whose value
        in the config differs, because the value of the checkpoint is used."""
        torchtune_fields = {field: checkpoint[key] for field, key in TORCHTUNE_KEYS.items()}
        other_fields = {"ranks": self.ranks, **json.loads(checkpoint[ADAPTIVE_KEY])}
        past = tuple(EpochSizes(**sizes) for sizes in other_fields.pop("past", ()))
        current = EpochSizes(**sizes) if (sizes := other_fields.pop("current_epoch", None)) else None
        saved = Progress(**torchtune_fields, past=past, current_epoch=current, **other_fields)
        for key in ("seed", "max_steps_per_epoch"):
            configured, kept = getattr(self, key), getattr(saved, key)
            if configured != kept:
                log_rank_0(f"{key}: config {configured}, checkpoint {kept}; using {kept}")
        return replace(saved, total_epochs=self.total_epochs)

    def recipe_state(self) -> dict[str, object]:
        """Return the progress under torchtune's keys and `ADAPTIVE_KEY`."""
        values = asdict(self)
        other_fields = {name: value for name, value in values.items() if name not in TORCHTUNE_KEYS}
        return {**{key: values[field] for field, key in TORCHTUNE_KEYS.items()}, ADAPTIVE_KEY: json.dumps(other_fields)}
