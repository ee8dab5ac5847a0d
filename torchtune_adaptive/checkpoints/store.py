"""Finds, publishes and prunes the checkpoints of an output directory. In a run, only rank 0 calls these functions.

Each checkpoint is a directory, which is renamed when it is complete and before it is deleted:

.saving/MARK/epoch_1/…   a checkpoint that is being written, its manifest last; each run has its own MARK
step_40/                 a complete checkpoint, synced before the rename
.removing-step_20-…/     a checkpoint that is being deleted
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.atomic_files import DRAFTS, naming, read_json, sync
from torchtune_adaptive.formatting import count_of, printable

SAVING = ".saving"
REMOVING = ".removing-"
NAME = re.compile(r"(?:dist_)?epoch_\d+|step_\d+")
"""Names of checkpoint directories, including those that torchtune's recipes write."""
MANIFEST_FILE = "adaptive_checkpoint.json"
RECIPE_STATE, RECIPE_STATE_FILE = "recipe_state", "recipe_state.pt"
"""torchtune writes `recipe_state/recipe_state.pt` next to its checkpoints; here, each one has a `recipe_state.pt`."""
ADAPTER_FILE = "adapter_model.pt"
RANDOM_FILE = "adaptive_random.pt"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.(bin|safetensors)")

VERSION = 1
OWN_CHECKSUM = "crc32"
"""Key of the checksum of a manifest's other values."""
CHUNK_BYTES, PART_BYTES = 2**22, 2**26
"""A thread computes the checksum of one part of a file at a time, and reads the part in chunks."""

State = dict[str, Any]
"""The state dict that torchtune's checkpointers read and write."""
Checkpointer = Any
"""A checkpointer of torchtune, or an object with its methods `load_checkpoint` and `save_checkpoint`."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How many epochs and steps a run has completed. `epochs` is also the number of the epoch in progress, from 0."""

    epochs: int
    steps_in_epoch: int
    step: int

    def __str__(self) -> str:
        if not self.steps_in_epoch:
            return f"step {self.step}"
        return f"step {self.step}, {count_of(self.steps_in_epoch, 'step')} into epoch {self.epochs}"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksum of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a complete checkpoint, in its file `MANIFEST_FILE`."""

    serial: int
    """Number of the checkpoint in its output directory. The newest has the largest one. Names do not show the order,
    because a run that resumes from an earlier checkpoint uses the same names again."""
    position: Position
    finished: bool
    """True if all epochs were trained. The run can still continue, if `epochs` is raised."""
    ranks: int
    latest_step_samples: int
    """The samples of the latest step on all ranks together, more than the configured ones if a search enlarged it."""
    identity: Mapping[str, object]
    """The values that must not change when the run resumes (see `identity.py`)."""
    saved_at: str
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A directory with the name of a checkpoint, complete or not."""

    path: Path
    manifest: Manifest | None
    fault: str | None
    """Why the checkpoint cannot be used, as a sentence without its subject: `has no manifest`. None if it can."""

    @property
    def serial(self) -> int:
        """The serial in the manifest; -1 if there is no valid manifest."""
        return self.manifest.serial if self.manifest else -1


@dataclass(frozen=True, kw_only=True)
class OutputDirectory:
    """The directory of a run's checkpoints."""

    path: Path
    mark: str
    """The unique name of the run's staging directory. If the directory is renamed, its lock moves with it, and another
    run may start under the old name. Without the staging directory, this run then saves nothing there."""

    @property
    def staging(self) -> Path:
        """The directory in which this run writes its checkpoints, and no other run does."""
        return self.path / SAVING / self.mark


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files that a resumed run reads. Paths are absolute, because torchtune adds directories to relative ones."""

    folder: Path
    """The directory of the checkpoint, which also contains the random state."""
    weights: tuple[str, ...] = ()
    """The files of the full model; empty if only an adapter was saved."""
    adapter: str | None = None
    recipe_state: str | None = None


def files_of(folder: Path, manifest: Manifest) -> Files:
    """Return the files of a complete checkpoint."""
    folder = folder.absolute()
    paths = {name: str(folder / name) for name in manifest.files}
    return Files(
        folder=folder,
        weights=tuple(paths[name] for name in sorted(paths) if WEIGHTS.fullmatch(name)),
        adapter=paths.get(ADAPTER_FILE),
        recipe_state=paths.get(RECIPE_STATE_FILE),
    )


def find_checkpoints(directory: Path) -> list[FoundCheckpoint]:
    """Return all checkpoint directories, those with a valid manifest first, in descending order of serial. An OSError
    means that there may be some."""
    checkpoints = []
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path in (directory / name for name in names if NAME.fullmatch(name) and (directory / name).is_dir()):
        found = read_manifest(path)
        manifest, fault = (found, None) if isinstance(found, Manifest) else (None, found)
        checkpoints.append(FoundCheckpoint(path, manifest, fault))
    return sorted(checkpoints, key=lambda checkpoint: (-checkpoint.serial, checkpoint.path.name))


def newest_intact(checkpoints: Sequence[FoundCheckpoint]) -> tuple[FoundCheckpoint | None, list[FoundCheckpoint]]:
    """Verify checksums, and return the newest intact checkpoint and the faulty ones that were skipped."""
    skipped = [checkpoint for checkpoint in checkpoints if checkpoint.manifest is None]
    for candidate in (checkpoint for checkpoint in checkpoints if checkpoint.manifest):
        assert candidate.manifest is not None
        try:
            if (name := changed_file(candidate.path, candidate.manifest)) is None:
                return candidate, skipped
            fault = f"is damaged: the content of {name} has changed"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        skipped.append(FoundCheckpoint(candidate.path, None, fault))
    return None, skipped


def publish(directory: OutputDirectory, staged: Path, name: str) -> None:
    """Fsync a complete checkpoint, and rename it from the staging directory to its place."""
    for path in sorted(staged.rglob("*")):
        sync(path)
    sync(staged)
    # There may be a checkpoint of this name: an incomplete one, or one that this run saved before it resumed from an
    # earlier checkpoint. If the run is killed between removal and rename, it resumes from the previous checkpoint.
    place = directory.path / name
    replaced = _set_aside(place) if place.is_dir() else None
    staged.rename(place)
    sync(directory.path)
    if replaced is not None:
        with suppress(OSError):  # the next start deletes it
            _delete(replaced)


def prune(directory: Path, keep_last: int | None, resumed_from: str | None = None) -> None:
    """Remove complete checkpoints, except the newest `keep_last`, `resumed_from`, and those of finished runs. Does
    nothing if `keep_last` is None."""
    if keep_last is None:
        return
    complete = [(found.path, found.manifest) for found in find_checkpoints(directory) if found.manifest]
    for path, manifest in complete[keep_last:]:
        if path.name != resumed_from and not manifest.finished:
            remove(path)


def remove(folder: Path) -> None:
    """Delete a checkpoint."""
    _delete(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint before it is deleted, so that a partly deleted one does not look like a checkpoint."""
    renamed = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.rename(renamed)
    return renamed


def clean(directory: Path) -> None:
    """Remove the files and directories that killed runs have partly written or partly deleted."""
    for path in [*directory.glob(SAVING), *directory.glob(f"{REMOVING}*"), *directory.glob(DRAFTS)]:
        _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint."""
    values = {"version": VERSION, **asdict(manifest)}
    text = json.dumps({**values, OWN_CHECKSUM: _checksum(values)}, indent=1)
    with naming(folder / MANIFEST_FILE):
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | str:
    """Read the manifest and check the size, but not the content, of each file. If there is a fault, return its text."""
    try:
        values = read_json(folder / MANIFEST_FILE)
    except ValueError as error:
        return f"has a damaged {MANIFEST_FILE}: {error}"
    if values is None:
        return f"has no {MANIFEST_FILE}: it is incomplete, or was not written by these recipes"
    try:
        if values.pop(OWN_CHECKSUM) != _checksum(values) or values.pop("version") != VERSION:
            raise ValueError("the checksum or the version of the manifest is wrong")
        files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
        position = Position(**values.pop("position"))
        manifest = Manifest(files=files, position=position, **values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"has a damaged {MANIFEST_FILE}"
    for name, record in manifest.files.items():
        path = folder / name
        # `Path.is_file` would raise for a name that is too long
        size = path.stat().st_size if os.path.isfile(path) else None
        if size != record.bytes:
            fault = "is missing" if size is None else f"has {size} bytes, not {record.bytes}"
            return f"is damaged: {printable(name)} {fault}"
    return manifest


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Return size and checksum of every file in a directory, except of an old manifest. torchtune copies all files
    of the folder of the initial weights. If this folder is a checkpoint of this package, they include a manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_FILE)
    return {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, crc32=crc32)
        for path, crc32 in zip(paths, _checksums(paths), strict=True)
    }


def changed_file(folder: Path, manifest: Manifest) -> str | None:
    """Read all files, and return the name of the first one whose checksum differs from the manifest, or None."""
    checksums = zip(manifest.files.items(), _checksums([folder / name for name in manifest.files]), strict=True)
    return next((name for (name, record), crc32 in checksums if crc32 != record.crc32), None)


def _checksums(paths: Sequence[Path]) -> list[int]:
    """Compute checksums of files on all cores. A checksum is the CRC-32 of the CRC-32s of the parts of a file."""

    def crc32_of(part: tuple[Path, int]) -> bytes:
        path, offset = part
        crc32 = 0
        with path.open("rb") as file:
            file.seek(offset)
            for _ in range(PART_BYTES // CHUNK_BYTES):
                crc32 = zlib.crc32(file.read(CHUNK_BYTES), crc32)
        return crc32.to_bytes(4, "big")

    parts = [(path, offset) for path in paths for offset in range(0, max(1, path.stat().st_size), PART_BYTES)]
    checksums = dict.fromkeys(paths, 0)
    with ThreadPoolExecutor() as pool:
        for (path, _), crc32 in zip(parts, pool.map(crc32_of, parts), strict=True):
            checksums[path] = zlib.crc32(crc32, checksums[path])
    return list(checksums.values())


def _checksum(values: Mapping[str, object]) -> int:
    """Return a checksum of a manifest's values, which does not depend on their order."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
