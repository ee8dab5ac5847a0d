"""Progress of a run, which a checkpoint stores in addition to weights and optimizer state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from torchtune import training

from torchtune_adaptive.checkpoints.store import Position
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.lifecycle.console import log_rank_0

TORCHTUNE_KEYS = {
    "seed": training.SEED_KEY,
    "epochs_run": training.EPOCHS_KEY,
    "total_epochs": training.TOTAL_EPOCHS_KEY,
    "max_steps_per_epoch": training.MAX_STEPS_KEY,
}
"""Field -> key in torchtune's recipe state."""

SavedLimits: TypeAlias = Mapping[str, Any]
"""State of each stage's limit, by the stage's name."""

ADAPTIVE_KEY = "adaptive"
"""Key in torchtune's recipe state for the fields that torchtune's recipes do not have."""


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
    lr_factor: float
    """Factor on the learning rate for growth beyond the configured samples per step."""
    refused_batch_size: int | None = None
    """A requested batch size that was rejected because it exceeds the bound."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run. A resumed run keeps the checkpoint's seed and steps per epoch, but uses the config's
    epochs."""

    seed: int
    epochs_run: int = 0
    total_epochs: int
    max_steps_per_epoch: int | None
    past: tuple[EpochSizes, ...] = ()
    """Completed epochs; empty for torchtune's checkpoints."""
    current_epoch: EpochSizes | None = None
    """The current epoch, if any; it ends as planned, even if other sizes fit after a resume."""
    steps_in_epoch: int = 0
    samples_in_epoch: int = 0
    """Samples of this epoch that all ranks together have trained on, excluding prefetched ones."""
    step: int = 0
    """Steps since the start of the run; 0 for torchtune's checkpoints, which do not count them."""
    limit: SavedLimits | None = None
    """None before the first epoch and in torchtune's checkpoints."""
    ranks: int
    """Data-parallel ranks; in a resumed run, those of the earlier run."""
    validated_step: int = 0
    """The last step after which the run was validated."""
    best_val_loss: float = math.inf
    best_step: int | None = None
    """The step with the lowest validation loss."""
    dataset_samples: int | None = None
    dataset_fingerprint: Mapping[str, Any] | None = None
    """Fingerprint by which a resumed run detects changed data; None if unavailable."""

    @property
    def finished(self) -> bool:
        """True after the last epoch."""
        return self.epochs_run >= self.total_epochs

    @property
    def epochs_started(self) -> tuple[EpochSizes, ...]:
        """The completed epochs and the current one."""
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

    def after_validation(self, loss: float) -> Progress:
        """Return the progress after a validation of the current step."""
        best = replace(self, best_val_loss=loss, best_step=self.step) if loss < self.best_val_loss else self
        return replace(best, validated_step=self.step)

    def after_epoch(self, sizes: EpochSizes) -> Progress:
        """Return the progress at the end of the current epoch."""
        done, past = self.epochs_run + 1, (*self.past, sizes)
        return replace(self, epochs_run=done, past=past, current_epoch=None, steps_in_epoch=0, samples_in_epoch=0)

    def resumed(self, checkpoint: Mapping[str, Any]) -> Progress:
        """Return the progress of a checkpoint, with the config's epochs; log other keys that the config changes."""
        if absent := [key for key in TORCHTUNE_KEYS.values() if key not in checkpoint]:
            raise ConfigError(
                f"resume_from_checkpoint is True, but the checkpoint has no {', '.join(absent)}: "
                "set checkpointer.recipe_checkpoint to the recipe state of an unfinished run"
            )
        theirs = {field: checkpoint[key] for field, key in TORCHTUNE_KEYS.items()}
        ours = {"ranks": self.ranks, **json.loads(checkpoint.get(ADAPTIVE_KEY) or "{}")}
        past = tuple(EpochSizes(**sizes) for sizes in ours.pop("past", ()))
        current = EpochSizes(**sizes) if (sizes := ours.pop("current_epoch", None)) else None
        saved = Progress(**theirs, past=past, current_epoch=current, **ours)
        resumed = replace(saved, total_epochs=self.total_epochs)
        if resumed.finished:
            raise ConfigError(
                f"epochs is {self.total_epochs}, but the checkpoint to resume from already has "
                f"{resumed.epochs_run}: raise epochs, or set resume_from_checkpoint: False"
            )
        for key in ("seed", "max_steps_per_epoch"):
            configured, kept = getattr(self, key), getattr(saved, key)
            if configured != kept:
                log_rank_0(f"{key}: config {configured}, checkpoint {kept}; using {kept}")
        return resumed

    def recipe_state(self) -> dict[str, object]:
        """Return the progress in torchtune's keys, and in one more key that torchtune's recipes ignore."""
        values = asdict(self)
        ours = {name: value for name, value in values.items() if name not in TORCHTUNE_KEYS}
        return {**{key: values[field] for field, key in TORCHTUNE_KEYS.items()}, ADAPTIVE_KEY: json.dumps(ours)}


def start_progress(settings: Settings, ranks: int) -> Progress:
    """Collective: seed every rank and return the progress of a new run."""
    seed = training.set_seed(seed=settings.seed, debug_mode=settings.cudnn_deterministic_mode)
    epochs, most = settings.epochs, settings.max_steps_per_epoch
    return Progress(seed=seed, total_epochs=epochs, max_steps_per_epoch=most, ranks=ranks)
