"""Files and folders that a run reads and writes. Nothing is left behind in any of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.checkpoints import folders
from torchtune_adaptive.checkpoints.loading import finds_files_itself, missing_directory
from torchtune_adaptive.checkpoints.named import file_names, named_files
from torchtune_adaptive.checkpoints.overwriting import check_fresh_start
from torchtune_adaptive.checkpoints.resuming import (
    check_names_are_free,
    check_same_run,
    checkpoint_directory,
    places_of,
)
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import AUTO, Settings
from torchtune_adaptive.life.output_lock import holder, in_use, unwritable
from torchtune_adaptive.tune.validate.findings import Findings


def check_weights(cfg: DictConfig, findings: Findings) -> None:
    section = components.require(cfg, "checkpointer")
    if (problem := missing_directory(section)) is not None:
        findings.note_missing_here(problem)
        return
    if not finds_files_itself(section):
        return
    folder = section.checkpoint_dir
    missing = [name for name in file_names(section.get("checkpoint_files")) if not (Path(folder) / name).is_file()]
    if missing and not cfg.get("resume_from_checkpoint"):  # then they are looked for in output_dir, too
        findings.note_missing_here(
            f"checkpointer.checkpoint_files: {len(missing)} missing from {folder}, first: {missing[0]}; download them, "
            "or correct the names"
        )


def check_output(settings: Settings, recipe: str, findings: Findings) -> None:
    """What is in the folder for checkpoints, as a run would find it."""
    directory = checkpoint_directory(settings)
    for place in places_of(settings):
        _check_writable(place, findings)
        if (who := holder(place)) is not None:
            raise in_use(place, who)
    check_names_are_free(directory)
    found = folders.find_checkpoints(directory)
    newest, _ = folders.newest_intact(found) if settings.resume_from_checkpoint == AUTO else (None, [])
    if newest is not None and newest.manifest is not None:
        check_same_run(newest.manifest, settings.config, recipe, directory)
    elif settings.resume_from_checkpoint is True:
        named_files(
            settings.config, recipe, asynchronous=settings.enable_async_checkpointing, directory=directory, found=found
        )
    else:
        check_fresh_start(found, settings, directory, recipe)


def _check_writable(place: Path, findings: Findings) -> None:
    """The folder, or the nearest above it in which it would be made."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        findings.note_missing_here(str(unwritable(place, error)))
