"""The checkpoints of an output directory: found, published at one stroke, pruned. Rank 0 does all of it.

.saving/MARK/step_40/…   written here, with everything that belongs to it; the manifest last. Each run has a mark
step_40/                 synced, then renamed: a checkpoint is complete, or it does not exist
.removing-step_20-…/     renamed before anything in it is deleted
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
from typing import Any, Protocol

from torchtune_adaptive.atomic_files import of_its_types, read_json, sync
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.text import count_of, printable

SAVING = ".saving"
REMOVING = ".removing-"
NAME = re.compile(r"(?:dist_)?epoch_\d+|step_\d+")
"""Folders that hold checkpoints: ours, and those that torchtune's recipes write."""
MANIFEST_FILE = "adaptive_checkpoint.json"
MARKER_FILE = "run"
"""In the staging folder of a run; a save that makes the folder again does not make this."""
RECIPE_STATE, RECIPE_STATE_FILE = "recipe_state", "recipe_state.pt"
"""torchtune's folder for the state of a run, beside its checkpoints, and the file in it; ours lie in the checkpoint."""
ADAPTER_FILE = "adapter_model.pt"
RANDOM_FILE = "adaptive_random.pt"
WEIGHTS = re.compile(r"model-\d+-of-\d+\.(bin|safetensors)")

VERSION = 1
OWN_CHECKSUM = "crc32"
CHUNK_BYTES, PART_BYTES = 2**22, 2**26

State = dict[str, Any]
"""What torchtune's checkpointers read and write."""
Fault = str
"""Why a checkpoint cannot be used, as the rest of a sentence that begins with its name."""


class Checkpointer(Protocol):
    """What reads and writes weights: one of torchtune's, or what stands for several."""

    def load_checkpoint(self) -> State:
        """What is in the files, in torchtune's keys."""

    def save_checkpoint(self, state: State, *, epoch: int, intermediate_checkpoint: bool, **options: bool) -> None:
        """Writes into a folder of the epoch's name."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come. Any boundary between two steps is one. Epochs count from 0, as torchtune's folders do."""

    epochs: int
    steps_in_epoch: int
    step: int

    def __str__(self) -> str:
        if not self.steps_in_epoch:
            return f"step {self.step}"
        within = count_of(self.steps_in_epoch, "step")
        return f"step {self.step}, {within} into epoch {self.epochs}"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a complete checkpoint says of itself."""

    serial: int
    """Counts the checkpoints of an output directory, so the newest has the largest. Names do not tell: a run that was
    sent back to an earlier epoch passes the same ones again."""
    position: Position
    finished: bool
    """Whether the run had no epoch left. It can go on all the same if `epochs` is raised."""
    distributed: bool
    """Written by torch.distributed.checkpoint, a part from each rank, in place of torchtune's files."""
    ranks: int
    identity: Mapping[str, object]
    """The part of the config that makes the run this one and no other."""
    saved_at: str
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class FoundCheckpoint:
    path: Path
    manifest: Manifest | None
    fault: Fault | None
    """Why the checkpoint is not complete; None if it is."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def serial(self) -> int:
        """Serial of its manifest; below all others where it has none."""
        return self.manifest.serial if self.manifest else -1

    @property
    def size(self) -> int:
        return sum(record.bytes for record in self.manifest.files.values()) if self.manifest else 0


class NotOurs(Exception):
    """The output directory no longer belongs to this run. Reported with its name by whoever wanted to write into it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A run's hold on its output directory. The lock alone is not enough: it stays with a directory that is renamed,
    and another run may then start under the old name."""

    directory: Path
    mark: str
    device: int
    inode: int
    """Of the directory, on rank 0's machine."""

    @property
    def staging(self) -> Path:
        """Where this run, and no other, writes its checkpoints."""
        return self.directory / SAVING / self.mark

    def check(self) -> None:
        """On rank 0: raises NotOurs where the directory was moved, removed or replaced, or another run has cleaned it.
        The open lock file keeps the inode's number from being used again."""
        try:
            here = self.directory.stat()
        except (FileNotFoundError, NotADirectoryError):
            here = None
        if here is None or (here.st_dev, here.st_ino) != (self.device, self.inode):
            raise NotOurs(
                "is not the directory in which this run started: it was moved, removed or replaced, and the "
                "checkpoints with it; resume from where it is now (output_dir=..., resume_from_checkpoint=auto), or "
                "start over in another output_dir"
            )
        if not (self.staging / MARKER_FILE).is_file():
            raise NotOurs(
                f"no longer contains {self.staging.relative_to(self.directory)}, which marks it as this run's: it was "
                "removed, or another run has started there; see what is there (tune-adaptive status), then resume with "
                "resume_from_checkpoint=auto or another output_dir"
            )

    def release(self) -> None:
        """Removes what is staged; another run's is not touched."""
        shutil.rmtree(self.staging, ignore_errors=True)
        with suppress(OSError):
            (self.directory / SAVING).rmdir()


def claim(directory: Path) -> Claim:
    """Marks a directory, which must exist, as this run's."""
    here = directory.stat()
    claimed = Claim(directory=directory.absolute(), mark=uuid.uuid4().hex, device=here.st_dev, inode=here.st_ino)
    claimed.staging.mkdir(parents=True)
    (claimed.staging / MARKER_FILE).touch()
    return claimed


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


def files_of(folder: Path, manifest: Manifest) -> Files:
    """The files of a complete checkpoint."""
    folder = folder.absolute()
    paths = {name: str(folder / name) for name in manifest.files}
    return Files(
        folder=folder,
        distributed=manifest.distributed,
        weights=tuple(paths[name] for name in sorted(paths) if WEIGHTS.fullmatch(name)),
        adapter=paths.get(ADAPTER_FILE),
        recipe_state=paths.get(RECIPE_STATE_FILE),
        complete=True,
    )


def named(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.glob("*")) if NAME.fullmatch(path.name)]


def in_the_way(directory: Path) -> str | None:
    """What has the name of a checkpoint and is no folder, in words."""
    paths = (path for path in named(directory) if path.exists() and not path.is_dir())
    return next((f"{str(path)!r} is a file, but has the name of a checkpoint" for path in paths), None)


def find_checkpoints(directory: Path) -> list[FoundCheckpoint]:
    """All folders that look like checkpoints: the complete ones first, newest first."""
    checkpoints = []
    for path in filter(Path.is_dir, named(directory)):
        found = read_manifest(path)
        manifest, fault = (found, None) if isinstance(found, Manifest) else (None, found)
        checkpoints.append(FoundCheckpoint(path, manifest, fault))
    return sorted(checkpoints, key=lambda checkpoint: (-checkpoint.serial, checkpoint.name))


def newest_intact(checkpoints: Sequence[FoundCheckpoint]) -> tuple[FoundCheckpoint | None, list[FoundCheckpoint]]:
    """The newest checkpoint whose files are what was saved, and those that were skipped for their faults."""
    skipped = [checkpoint for checkpoint in checkpoints if checkpoint.manifest is None]
    for complete in (checkpoint for checkpoint in checkpoints if checkpoint.manifest):
        assert complete.manifest is not None
        try:
            if (name := changed_file(complete.path, complete.manifest)) is None:
                return complete, skipped
            fault = f"is damaged: the content of {name} has changed"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        skipped.append(FoundCheckpoint(complete.path, None, fault))
    return None, skipped


def publish(claim: Claim, name: str) -> Path:
    """Moves a checkpoint that lies complete in the staging folder to its place, so that it survives a crash of the
    machine. Raises NotOurs."""
    directory = claim.directory
    staged, place = claim.staging / name, directory / name
    if REHEARSAL.on:  # no run is to resume from zeros
        shutil.rmtree(staged, ignore_errors=True)
        return place
    for path in sorted(staged.rglob("*")):
        sync(path)
    sync(staged)
    claim.check()  # where the directory is replaced after this line, the rename finds no staging folder of this run
    # What has the name already is incomplete, or from before the run went back to an earlier checkpoint. After a kill
    # between these two lines it is gone, and the run resumes from the one before.
    if os.path.lexists(place):
        remove(place)
    staged.rename(place)
    sync(directory)
    return place


def prune(directory: Path, keep_last: int | None, resumed_from: str | None) -> None:
    """Removes all but the newest so many, the one that this run was resumed from, and a finished run's last."""
    complete = [checkpoint for checkpoint in find_checkpoints(directory) if checkpoint.manifest]
    for checkpoint in complete[len(complete) if keep_last is None else keep_last :]:
        if checkpoint.name != resumed_from and not (checkpoint.manifest and checkpoint.manifest.finished):
            remove(checkpoint.path)


def remove(folder: Path) -> None:
    """Renames first: what is half deleted must not look like a checkpoint."""
    condemned = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.rename(condemned)
    if condemned.is_symlink() or condemned.is_file():
        condemned.unlink()
    else:
        shutil.rmtree(condemned)


def remove_all(directory: Path) -> None:
    for path in named(directory):
        if path.is_symlink() or path.is_dir():
            remove(path)


def clean(directory: Path) -> None:
    """Removes what runs that were killed have left half written or half deleted."""
    for path in [*directory.glob(f"{SAVING}*"), *directory.glob(f"{REMOVING}*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    values = {"version": VERSION, **asdict(manifest)}
    text = json.dumps({**values, OWN_CHECKSUM: _checksum(values)}, indent=1)
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | Fault:
    """The manifest of a folder whose files are all there in full length. Their contents are not read."""
    try:
        values = read_json(folder / MANIFEST_FILE)
    except ValueError as error:
        return f"has a damaged {MANIFEST_FILE}: {error}"
    if values is None:
        return f"has no {MANIFEST_FILE}: it is incomplete, or was not written by these recipes"
    try:
        if values.pop(OWN_CHECKSUM) != _checksum(values) or values.pop("version") != VERSION:
            raise ValueError("the manifest is not what was saved")
        files = {name: of_its_types(FileRecord(**record)) for name, record in values.pop("files").items()}
        position = of_its_types(Position(**values.pop("position")))
        manifest = of_its_types(Manifest(files=files, position=position, **values))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"has a damaged {MANIFEST_FILE}"
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if os.path.isfile(path) else None  # of a name that is too long, it is False
        if size != record.bytes:
            what = "is missing" if size is None else f"has {size} bytes, not {record.bytes}"
            return f"is damaged: {printable(name)} {what}"
    return manifest


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file in a folder. A manifest that is there already is another checkpoint's: torchtune
    copies what lies beside a run's first weights."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_FILE)
    return {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, crc32=crc32)
        for path, crc32 in zip(paths, _checksums(paths), strict=True)
    }


def changed_file(folder: Path, manifest: Manifest) -> str | None:
    """The first file whose content is not what was saved: reads all of them."""
    sums = zip(manifest.files.items(), _checksums([folder / name for name in manifest.files]), strict=True)
    return next((name for (name, record), crc32 in sums if crc32 != record.crc32), None)


def _checksums(paths: Sequence[Path]) -> list[int]:
    """CRC-32 runs at the speed of a disk. A large file is read in parts, by all cores; its checksum is that of
    theirs."""

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
    """A checksum of a manifest's values, however they are laid out in the file."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
