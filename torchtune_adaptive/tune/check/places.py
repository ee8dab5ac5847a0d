"""Files and folders that a run reads and writes. Nothing is left behind in any of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.check.findings import Findings
from torchtune_adaptive.tune.parts.checkpoints import folders
from torchtune_adaptive.tune.parts.checkpoints.lock import holder
from torchtune_adaptive.tune.parts.checkpoints.named import file_names, named_files
from torchtune_adaptive.tune.parts.checkpoints.overwriting import check_fresh_start
from torchtune_adaptive.tune.parts.checkpoints.start import check_names_are_free, check_same_run
from torchtune_adaptive.tune.start import components
from torchtune_adaptive.tune.start.settings import AUTO, Settings

TORCHTUNES = "torchtune.training."
"""Checkpointers that look for their files where the config says; ours of the demo makes them."""


def check_weights(cfg: DictConfig, findings: Findings) -> None:
    section = components.require(cfg, "checkpointer")
    folder = section.get("checkpoint_dir")
    if not isinstance(folder, str):
        raise ConfigError(f"checkpointer.checkpoint_dir is {folder!r}: give the directory that holds the weights")
    if not str(section.get("_component_")).startswith(TORCHTUNES):
        return
    if not Path(folder).is_dir():
        findings.of_this_machine(
            f"checkpointer.checkpoint_dir is {folder!r}, which is no directory: download the weights first "
            "(tune download) or correct the path"
        )
        return
    missing = [name for name in file_names(section.get("checkpoint_files")) if not (Path(folder) / name).is_file()]
    if missing and not cfg.get("resume_from_checkpoint"):  # then they are looked for in output_dir, too
        findings.of_this_machine(
            f"checkpointer.checkpoint_files: {len(missing)} are not in {folder}, the first is {missing[0]}: download "
            "them, or correct the names"
        )


def check_output(settings: Settings, recipe: str, findings: Findings) -> None:
    """What is in the folder for checkpoints, as a run would find it."""
    section = components.require(settings.config, "checkpointer")
    directory = Path(section.get("output_dir", None) or settings.output_dir)
    for place in dict.fromkeys((directory.absolute(), Path(settings.output_dir).absolute())):
        _check_writable(place, findings)
        if (who := holder(place)) is not None:
            raise ConfigError(f"output_dir {str(place)!r} is in use by {who}: wait, or choose another")
    check_names_are_free(directory)
    found = folders.find_checkpoints(directory)
    if settings.resume_from_checkpoint == AUTO:
        newest, _ = folders.newest_intact(found)
        if newest is not None and newest.manifest is not None:
            check_same_run(newest.manifest, settings.config, recipe, directory)
    elif settings.resume_from_checkpoint is True:
        named_files(
            settings.config, recipe, asynchronous=settings.enable_async_checkpointing, directory=directory, found=found
        )
    else:
        check_fresh_start(found, settings, directory)


def _check_writable(place: Path, findings: Findings) -> None:
    """The folder, or the nearest above it in which it would be made."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        findings.of_this_machine(f"output_dir is {str(place)!r}, which cannot be written to: {error.strerror}")
