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


@pytest.mark.parametrize("offset", [0, 5 * MIB, 9 * MIB - 1])
def test_one_byte_of_a_small_file_is_another_model(tmp_path: Path, offset: int) -> None:
    path = sparse(tmp_path, 9 * MIB)
    before = fingerprint_of(tmp_path)
    change(path, offset, 1)
    assert difference(fingerprint_of(tmp_path), before) is not None


@pytest.mark.parametrize("offset", [5 * MIB, 50 * MIB + 3333, 66 * MIB])
def test_a_changed_matrix_in_the_middle_of_a_large_file_is_seen(tmp_path: Path, offset: int) -> None:
    size = identity.WHOLE_BYTES + 8 * MIB
    path = sparse(tmp_path, size)
    before = fingerprint_of(tmp_path)
    change(path, offset, size // identity.STRIPS)
    assert difference(fingerprint_of(tmp_path), before) is not None


def test_a_large_file_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHOLE_BYTES": 100, "ENDS_BYTES": 10, "STRIPS": 5, "STRIP_BYTES": 4}.items():
        monkeypatch.setattr(identity, name, value)
    content = bytes(range(200))
    (tmp_path / "base.pt").write_bytes(content)
    strips = b"".join(content[start : start + 4] for start in (0, 40, 80, 120, 160))
    crc32 = zlib.crc32(content[:10] + content[190:] + strips)
    assert fingerprint_of(tmp_path) == {KEY: f"200 bytes, CRC-32 {crc32:08x}"}
