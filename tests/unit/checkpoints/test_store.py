"""Damaged checkpoints are not used, and pruning keeps required ones. tests/recipes/crash kills runs in a save."""

import errno
import json
import mmap
import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.checkpoints.checkpoint_files import complete, manifest, marked, save, stage
from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.store import (
    MANIFEST_FILE,
    Manifest,
    Position,
    read_manifest,
    record_files,
    write_manifest,
)


@pytest.mark.parametrize(("number", "supported"), [(errno.EIO, True), (errno.EINVAL, False), (errno.ENOTSUP, False)])
def test_folder_that_fails_to_sync_is_an_error_if_the_file_system_supports_it(
    number: int, supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    staged = stage(tmp_path, "epoch_0")
    here = marked(tmp_path)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error") if supported else nullcontext():
        replace_file(tmp_path / "file", b"")
    with pytest.raises(OSError, match="Input/output error") if supported else nullcontext():
        store.publish(here, staged, "epoch_0")
    assert complete(tmp_path) == ["epoch_0"] * (not supported)


def test_publishing_replaces_a_folder_of_the_same_name_and_mapped_files_keep_their_content(tmp_path: Path) -> None:
    place = save(tmp_path, "epoch_0", 2)
    (place / "torn.bin").write_bytes(b"half")
    with (place / "model-00001-of-00001.bin").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for serial, name in enumerate(["epoch_5", "step_40", "epoch_0"]):
        save(tmp_path, name, serial)
    assert complete(tmp_path) == ["epoch_0", "step_40", "epoch_5"], "the last saved one first"
    assert not (place / "torn.bin").exists()
    assert mapped[:] == b"weights"


def test_checkpoint_is_in_place_although_the_replaced_one_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "epoch_0", 2)
    monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
    place = save(tmp_path, "epoch_0", 3)
    found = read_manifest(place)
    assert isinstance(found, Manifest)
    assert found.serial == 3


@pytest.mark.parametrize(
    "change",
    [
        *({"version": 99}, {"files": [1]}, {"files": {"a": 1}}, {"position": {}}, {"x": 1}),
        {"files": {"a" * 300: {"bytes": 1, "crc32": 0}}},
    ],
)
def test_intact_manifest_of_another_version_or_format_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    path = save(tmp_path, "epoch_0") / MANIFEST_FILE
    values = {**json.loads(path.read_text(encoding="utf-8")), **change}
    del values[store.OWN_CHECKSUM]
    values[store.OWN_CHECKSUM] = store._checksum(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    assert isinstance(read_manifest(path.parent), str)
    save(tmp_path, "step_1", 1)
    assert complete(tmp_path) == ["step_1"]


def test_manifest_copied_with_the_initial_weights_is_replaced(tmp_path: Path) -> None:
    folder = stage(tmp_path, "epoch_0")
    (folder / MANIFEST_FILE).write_text("another run's")
    write_manifest(folder, manifest(files=record_files(folder)))
    assert isinstance(read_manifest(folder), Manifest)


@given(
    finished=st.lists(st.booleans(), min_size=1, max_size=8),
    keep_last=st.none() | st.integers(1, 9),
    resumed_from=st.none() | st.integers(0, 7),
)
def test_pruning_keeps_newest_final_resumed_and_incomplete_checkpoints(
    finished: list[bool], keep_last: int | None, resumed_from: int | None
) -> None:
    found = [store.FoundCheckpoint(Path("epoch_9"), None, "has no manifest")]
    for serial, last in enumerate(finished):
        position = Position(epochs=0, steps_in_epoch=serial, step=serial)
        found.insert(
            0, store.FoundCheckpoint(Path(f"step_{serial}"), manifest(serial, position=position, finished=last), None)
        )
    removed: list[Path] = []
    with mock.patch.multiple(store, find_checkpoints=lambda _: found, remove=removed.append):
        store.prune(Path(), keep_last, f"step_{resumed_from}")
    stays = {f"step_{serial}" for serial, last in enumerate(finished) if last or serial == resumed_from}
    newest = {each.path.name for each in found[:-1][:keep_last]}
    names = {each.path.name for each in found}
    assert {path.name for path in removed} == names - stays - newest - {"epoch_9"}


def test_linked_checkpoint_is_removed_without_its_files(tmp_path: Path) -> None:
    moved = save(tmp_path / "other", "epoch_0")
    (tmp_path / "epoch_0").symlink_to(moved)
    store.remove(tmp_path / "epoch_0")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert complete(tmp_path / "other") == ["epoch_0"]


def test_any_flipped_bit_in_a_manifest_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path, "step_6") / MANIFEST_FILE
    whole = path.read_bytes()
    assert isinstance(read_manifest(path.parent), Manifest)
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert isinstance(read_manifest(path.parent), str), (at, bit)
