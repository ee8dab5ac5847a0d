"""What a checkpoint says of itself. It is written last, so a checkpoint whose manifest holds true is complete."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.text import count_of

MANIFEST_FILE = "adaptive_checkpoint.json"
VERSION = 1
OWN_CHECKSUM = "crc32"
"""Key of the manifest's own checksum."""
CHUNK_BYTES = 2**22

Fault = str
"""Why a checkpoint cannot be used, as the rest of a sentence that begins with its name."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come. Any boundary between two steps is one. Epochs count from 0, as torchtune's folders do."""

    epochs: int
    """Epochs that are finished."""
    steps_in_epoch: int
    samples_in_epoch: int
    """Samples of this epoch that all ranks together have trained on, however many ranks there were."""
    step: int
    """Steps since the run began."""

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
    """One complete checkpoint."""

    run: str
    """The id of its run."""
    serial: int
    """Counts the checkpoints of an output directory. The newest is the one with the largest, whatever its name: a run
    that was sent back to an earlier epoch passes the same names again."""
    position: Position
    finished: bool
    """Whether the run had no epoch left. It can go on all the same if `epochs` is raised."""
    distributed: bool
    """Written by torch.distributed.checkpoint, a part from each rank, in place of torchtune's files."""
    ranks: int
    identity: Mapping[str, object]
    """The part of the config that makes the run this one and no other."""
    versions: Mapping[str, str]
    saved_at: str
    files: Mapping[str, FileRecord]
    """Every other file of the folder."""

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(each.bytes for each in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    values = {"version": VERSION, **asdict(manifest)}
    text = json.dumps({**values, OWN_CHECKSUM: _checksum(values)}, indent=1)
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | Fault:
    """The manifest of a folder whose files are all there in full length. Their contents are not read."""
    try:
        manifest = _parsed(json.loads((folder / MANIFEST_FILE).read_bytes()))
    except FileNotFoundError:
        return f"has no {MANIFEST_FILE}: it is incomplete, or was not written by these recipes"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"has a damaged {MANIFEST_FILE}"
    for name, record in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != record.bytes:
            return f"is damaged: {name} {'is missing' if found is None else f'has {found} bytes, not {record.bytes}'}"
    return manifest


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file in a folder, by its name in there.

    A manifest that is there already is another checkpoint's: torchtune copies what lies beside a run's first weights.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_FILE)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_crc32_of_file, paths))
    return {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, crc32=crc32)
        for path, crc32 in zip(paths, sums, strict=True)
    }


def changed_file(folder: Path, manifest: Manifest) -> str | None:
    """The first file whose content is not what was saved: reads all of them."""
    names = list(manifest.files)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(lambda name: _crc32_of_file(folder / name), names))
    changed = (name for name, crc32 in zip(names, sums, strict=True) if crc32 != manifest.files[name].crc32)
    return next(changed, None)


def _parsed(values: Any) -> Manifest:
    if values.pop(OWN_CHECKSUM) != _checksum(values):
        raise ValueError("it is not what was saved")
    version = values.pop("version")
    if not all(isinstance(values.get(name), dict) for name in ("identity", "versions", "files")):
        raise TypeError("identity, versions and files are mappings")
    if version != VERSION:
        raise ValueError(f"version {version}")
    if not values["files"]:
        raise ValueError("there is no checkpoint without a file")
    files = {str(name): FileRecord(**record) for name, record in values.pop("files").items()}
    position = Position(**values.pop("position"))
    manifest = Manifest(files=files, position=position, **values)
    counts = (manifest.serial, manifest.ranks, position.epochs, position.steps_in_epoch, position.step)
    if not all(type(count) is int for count in counts):
        raise TypeError("counts are whole numbers")
    return manifest


def _checksum(values: Mapping[str, object]) -> int:
    """A checksum of a manifest's values, however they are laid out in the file."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _crc32_of_file(path: Path) -> int:
    """A checksum against torn and rotten files; it runs at the speed of a disk, unlike a cryptographic one."""
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


@functools.cache
def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torchtune-adaptive", "torch", "torchtune", "torchao")}
