"""The checkpoints of an output directory: found, published at one stroke, linked and pruned. Rank 0 does all of it.

.saving/step_40/…        written here, with everything that belongs to it
step_40/                 synced, then renamed: a checkpoint is complete, or it does not exist
latest -> step_40        hints for people and for torchtune's recipes; nothing of ours relies on them
recipe_state -> epoch_1
.removing-step_20-…/     renamed before anything in it is deleted
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtune_adaptive.checkpoints.manifest import Manifest, changed_file, read_manifest
from torchtune_adaptive.rehearsal import REHEARSAL

SAVING = ".saving"
REMOVING = ".removing-"
LINKING = ".linking-"
LATEST = "latest"
RECIPE_STATE = "recipe_state"
RECIPE_STATE_FILE = "recipe_state.pt"

NAME = re.compile(r"(?:dist_)?epoch_\d+|step_\d+")
"""Folders that hold checkpoints: ours, and those that torchtune's recipes write."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that has the name of a checkpoint."""

    path: Path
    manifest: Manifest | None
    fault: str | None
    """Why the checkpoint is not complete; None if it is."""

    @property
    def name(self) -> str:
        return self.path.name


def find_checkpoints(directory: Path) -> list[FoundCheckpoint]:
    """All folders that look like checkpoints: the complete ones first, newest first."""
    found = [_examined(path) for path in named(directory) if path.is_dir()]
    return sorted(found, key=lambda each: (-each.manifest.serial if each.manifest else 1, each.name))


def newest_intact(found: Iterable[FoundCheckpoint]) -> tuple[FoundCheckpoint | None, list[FoundCheckpoint]]:
    """The newest checkpoint whose files are what was saved, and those that were skipped for their faults."""
    everything = list(found)
    passed_over = [each for each in everything if each.manifest is None]
    for each in everything:
        if each.manifest is None:
            continue
        if (looked := compared(each)).manifest is not None:
            return looked, passed_over
        passed_over.append(looked)
    return None, passed_over


def compared(complete: FoundCheckpoint) -> FoundCheckpoint:
    """A complete checkpoint, whose files are read: with its fault, where they are not what was saved."""
    assert complete.manifest is not None
    try:
        if (name := changed_file(complete.path, complete.manifest)) is None:
            return complete
        fault = f"is damaged: the content of {name} has changed"
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    return FoundCheckpoint(complete.path, None, fault)


def publish(directory: Path, name: str) -> Path:
    """Moves a checkpoint that lies complete in `.saving` to its place, so that it survives a crash of the machine."""
    staged, place = directory / SAVING / name, directory / name
    if REHEARSAL.on:  # no run is to resume from zeros
        discard_staged(directory)
        return place
    for path in sorted(staged.rglob("*")):
        _sync(path)
    _sync(staged)
    if os.path.lexists(place):  # incomplete, or of a way that the run was called back from
        remove(place)
    staged.rename(place)
    _sync(directory)
    return place


def link(directory: Path, newest_first: Sequence[FoundCheckpoint]) -> None:
    """Points `latest` at the newest of these, and `recipe_state` at the newest that torchtune can resume from."""
    if newest_first:
        _link(directory / LATEST, newest_first[0].name)
    for_stock = [each for each in newest_first if each.name.startswith("epoch_")]
    place = directory / RECIPE_STATE
    if for_stock and place.is_dir() and not place.is_symlink():  # torchtune's own: one file in it is the state
        _link(place / RECIPE_STATE_FILE, f"../{for_stock[0].name}/{RECIPE_STATE_FILE}")
    elif for_stock:
        _link(place, for_stock[0].name)
    elif place.is_symlink():
        place.unlink()


def to_keep(
    complete: Iterable[FoundCheckpoint], keep_last: int | None, resumed_from: str | None
) -> list[FoundCheckpoint]:
    """The newest so many, the one that this run was resumed from, and a finished run's last."""
    newest_first = sorted(complete, key=lambda each: -_serial(each))
    if keep_last is None:
        return newest_first
    others = newest_first[keep_last:]
    stays = (each for each in others if each.name == resumed_from or (each.manifest and each.manifest.finished))
    return [*newest_first[:keep_last], *stays]


def tidy(directory: Path, keep_last: int | None, resumed_from: str | None) -> None:
    """Links to what stays, then the removal of what does not: a link never points at nothing."""
    complete = [each for each in find_checkpoints(directory) if each.manifest]
    kept = to_keep(complete, keep_last, resumed_from)
    link(directory, kept)
    for each in complete:
        if each not in kept:
            remove(each.path)


def remove(folder: Path) -> None:
    """Renames first: what is half deleted must not look like a checkpoint."""
    condemned = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.rename(condemned)
    if condemned.is_symlink() or condemned.is_file():
        condemned.unlink()
    else:
        shutil.rmtree(condemned)


def leftovers(directory: Path) -> list[Path]:
    """The folders that a run removes before it ends, and a killed one leaves."""
    return [path for prefix in (SAVING, REMOVING, LINKING) for path in directory.glob(f"{prefix}*")]


def clean(directory: Path) -> None:
    """Removes what runs that were killed have left half written or half deleted."""
    for path in leftovers(directory):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def discard_staged(directory: Path) -> None:
    """Frees the space of a checkpoint that could not be finished."""
    staging = directory / SAVING
    shutil.rmtree(staging, ignore_errors=True)
    with suppress(OSError):
        staging.mkdir()


def remove_all(directory: Path) -> None:
    """Removes every checkpoint, of whatever run, and the links to them."""
    for path in [directory / LATEST, directory / RECIPE_STATE, *named(directory)]:
        if path.is_symlink() or (path.is_dir() and path.name != LATEST):
            remove(path)


def free_bytes(path: Path) -> int:
    """Free space of the file system that a path is on, or would be."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def named(directory: Path) -> list[Path]:
    """Everything in a directory that has the name of a checkpoint."""
    return [path for path in sorted(directory.glob("*")) if NAME.fullmatch(path.name)]


def _examined(path: Path) -> FoundCheckpoint:
    manifest = read_manifest(path)
    return (
        FoundCheckpoint(path, manifest, None)
        if isinstance(manifest, Manifest)
        else FoundCheckpoint(path, None, manifest)
    )


def _serial(found: FoundCheckpoint) -> int:
    return found.manifest.serial if found.manifest else -1


def _link(place: Path, target: str) -> None:
    """Sets a link where the file system has links: they are hints, and nothing depends on them."""
    draft = place.with_name(f"{LINKING}{uuid.uuid4().hex[:8]}")
    with suppress(OSError):
        draft.symlink_to(target)
        os.replace(draft, place)
    with suppress(OSError):
        draft.unlink()


def _sync(path: Path) -> None:
    """Syncs a folder, whose names are data too, where the file system can do so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def require_folder(path: Path) -> None:
    """Refuses a folder that is gone: torchtune would create the path anew, on whatever file system is left."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is gone")
