"""Checkpoints with small files, as a run would write them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.atomic_files import directory_id
from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.store import Claim, Manifest, Position, record_files, write_manifest

CONTENT = {"model-00001-of-00001.bin": b"weights", "recipe_state.pt": b"state", "nested/config.json": b"{}"}


def manifest(serial: int = 0, **changes: Any) -> Manifest:
    position = Position(epochs=1, steps_in_epoch=0, step=4)
    run = {"finished": False, "distributed": False, "ranks": 2, "identity": {"seed": 0}}
    made: dict[str, Any] = {"position": position, **run, "saved_at": "2026-11-20T00:00:00+00:00", "files": {}}
    return Manifest(serial=serial, **{**made, **changes})


def claim(directory: Path) -> Claim:
    """Return the claim of the run that stages here."""
    directory.mkdir(parents=True, exist_ok=True)
    held = Claim(directory=directory, mark="made", directory_id=directory_id(directory))
    held.staging.mkdir(parents=True, exist_ok=True)
    (held.staging / store.MARKER_FILE).touch()
    return held


def stage(
    directory: Path, name: str, serial: int = 0, *, content: Mapping[str, bytes] = CONTENT, **changes: Any
) -> Path:
    folder = claim(directory).staging / name
    for file, data in content.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    write_manifest(folder, replace(manifest(serial, **changes), files=record_files(folder)))
    return folder


def save(directory: Path, name: str, serial: int = 0, **options: Any) -> Path:
    stage(directory, name, serial, **options)
    return store.publish(claim(directory), name)


def complete(directory: Path) -> list[str]:
    return [found.name for found in store.find_checkpoints(directory) if found.manifest]
