"""What tells weights that a run does not train from others."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.checkpoints import identity
from torchtune_adaptive.checkpoints.identity import difference, weights_in

MIB = 2**20
KEY = "frozen weights in base.pt"


def fingerprint_of(folder: Path) -> dict[str, str]:
    section = OmegaConf.create({"checkpoint_dir": str(folder), "checkpoint_files": ["base.pt"]})
    assert isinstance(section, DictConfig)
    return weights_in("frozen weights", section)


def change(path: Path, offset: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\1" * count)


def sparse(folder: Path, size: int) -> Path:
    path = folder / "base.pt"
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("offset", [0, 6 * MIB - 1])
def test_another_byte_at_either_end_is_another_model(tmp_path: Path, offset: int) -> None:
    path = sparse(tmp_path, 6 * MIB)
    before = fingerprint_of(tmp_path)
    change(path, offset, 1)
    assert difference(fingerprint_of(tmp_path), before) is not None


@pytest.mark.parametrize("size", [0, 5, 10, 15, 200])
def test_a_large_file_is_read_at_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(identity, "ENDS_BYTES", 10)
    content = bytes(range(size))
    (tmp_path / "base.pt").write_bytes(content)
    crc32 = zlib.crc32(content if size <= 20 else content[:10] + content[190:])
    assert fingerprint_of(tmp_path) == {KEY: f"{size} bytes, CRC-32 {crc32:08x}"}
