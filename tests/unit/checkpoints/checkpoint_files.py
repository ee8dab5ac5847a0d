"""Checkpoints with small files, as a run would write them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.store import Manifest, OutputDirectory, Position, record_files, write_manifest

CONTENT = {"model-00001-of-00001.bin": b"weights", "recipe_state.pt": b"state", "nested/config.json": b"{}"}


def manifest(serial: int = 0, **changes: Any) -> Manifest:
    position = Position(epochs=1, steps_in_epoch=0, step=4)
    run = {"finished": False, "ranks": 2, "latest_step_samples": 0, "identity": {"seed": 0}}
    made: dict[str, Any] = {"position": position, **run, "saved_at": "2026-11-20T00:00:00+00:00", "files": {}}
    return Manifest(serial=serial, **{**made, **changes})


def marked(directory: Path) -> OutputDirectory:
    """Return the directory of the run that stages here."""
    directory.mkdir(parents=True, exist_ok=True)
    here = OutputDirectory(path=directory, mark="made")
    here.staging.mkdir(parents=True, exist_ok=True)
    return here


def stage(directory: Path, name: str, serial: int = 0, **changes: Any) -> Path:
    folder = marked(directory).staging / name
    for file, data in CONTENT.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    write_manifest(folder, replace(manifest(serial, **changes), files=record_files(folder)))
    return folder


def save(directory: Path, name: str, serial: int = 0, **options: Any) -> Path:
    staged = stage(directory, name, serial, **options)
    store.publish(marked(directory), staged, name)
    return directory / name


def complete(directory: Path) -> list[str]:
    return [found.path.name for found in store.find_checkpoints(directory) if found.manifest]
