"""The files that a run goes on from, wherever they came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torchtune_adaptive.checkpoints.folders import RECIPE_STATE_FILE
from torchtune_adaptive.checkpoints.manifest import Manifest

ADAPTER_FILE = "adapter_model.pt"
RANDOM_FILE = "adaptive_random.pt"
WEIGHTS = re.compile(r"model-\d+-of-\d+\.(bin|safetensors)")
EPOCH_FOLDER = re.compile(r"epoch_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where a resumed run reads; paths are absolute, so that it does not matter what torchtune would add to them."""

    folder: Path
    """The checkpoint, for messages; and where the state of the random generators is, if it was saved."""
    distributed: bool = False
    """All of it is in the folder, in the format of torch.distributed.checkpoint."""
    weights: tuple[str, ...] = ()
    """Files of the whole model's weights; empty where only an adapter was saved."""
    adapter: str | None = None
    recipe_state: str | None = None
    complete: bool = False
    """Whether a manifest vouches for all of it. Otherwise weights and state may be of different epochs."""

    @property
    def epoch(self) -> int | None:
        """The epoch that the folder's name says, counted from 0."""
        match = EPOCH_FOLDER.fullmatch(self.folder.name)
        return int(match[1]) if match else None


def files_of(folder: Path, manifest: Manifest) -> Files:
    """The files of a complete checkpoint."""
    folder = folder.absolute()
    adapter = folder / ADAPTER_FILE
    return Files(
        folder=folder,
        distributed=manifest.distributed,
        weights=tuple(str(folder / name) for name in sorted(manifest.files) if WEIGHTS.fullmatch(name)),
        adapter=str(adapter) if ADAPTER_FILE in manifest.files else None,
        recipe_state=str(folder / RECIPE_STATE_FILE) if RECIPE_STATE_FILE in manifest.files else None,
        complete=True,
    )
