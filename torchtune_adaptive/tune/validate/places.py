"""Files and folders that a run reads and writes. Nothing is left behind in any of them."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.loading import check_what_saves_copy, finds_files_itself, missing_directory
from torchtune_adaptive.checkpoints.named import file_names
from torchtune_adaptive.checkpoints.resuming import checkpoint_directory, choose, places_of
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import RunFinished
from torchtune_adaptive.life.output_lock import holder, in_use, unwritable
from torchtune_adaptive.tune.validate.findings import Findings


def check_weights(cfg: DictConfig, findings: Findings) -> None:
    section = components.require(cfg, "checkpointer")
    if (problem := missing_directory(section)) is not None:
        findings.note_missing_here(problem)
        return
    if not finds_files_itself(section):
        return
    check_what_saves_copy(section)
    folder = section.checkpoint_dir
    missing = [name for name in file_names(section.get("checkpoint_files")) if not (Path(folder) / name).is_file()]
    if missing and not cfg.get("resume_from_checkpoint"):  # then they are looked for in output_dir, too
        findings.note_missing_here(
            f"checkpointer.checkpoint_files: {len(missing)} missing from {folder}, first: {missing[0]}; download them, "
            "or correct the names"
        )


def check_output(settings: Settings, recipe: str, findings: Findings) -> None:
    """What is in the folder for checkpoints, as a run would find it."""
    for place in places_of(settings):
        _check_writable(place, findings)
        if (who := holder(place)) is not None:
            raise in_use(place, who)
    with suppress(RunFinished):
        choose(settings, recipe, store.find_checkpoints(checkpoint_directory(settings)))


def _check_writable(place: Path, findings: Findings) -> None:
    """The folder, or the nearest above it in which it would be made."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        findings.note_missing_here(str(unwritable(place, error)))
