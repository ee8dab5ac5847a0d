"""Differences that make a run another run, and their messages."""

import zlib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from torchtune_adaptive.checkpoints import identity
from torchtune_adaptive.checkpoints.identity import difference, weights_in


@pytest.mark.parametrize(
    ("configured", "saved", "message"),
    [
        ({"seed": 1}, {"seed": 2}, "seed is 1, but was 2"),
        ({"seed": 1}, {}, "seed is 1, but was not set"),
        ({}, {"model.attn_dropout": 0.1}, "model.attn_dropout is not set, but was 0.1"),
    ],
)
def test_both_values_are_shown_as_given(configured: dict[str, Any], saved: dict[str, Any], message: str) -> None:
    assert difference(configured, saved) == message


def test_weights_with_other_names_or_contents_are_another_run() -> None:
    ours = {"reward weights in b.pt": "2 bytes", "reference weights in c.pt": "3 bytes"}
    theirs = {"reward weights in a.pt": "2 bytes", "reference weights in c.pt": "4 bytes"}
    assert difference(ours, theirs) == (
        "reference weights in c.pt is '3 bytes', but was '4 bytes', "
        "and reward weights in a.pt is not set, but was '2 bytes', "
        "and reward weights in b.pt is '2 bytes', but was not set"
    )


def test_another_recipe_is_the_only_reported_change() -> None:
    ours = {"batch_size": 4, "recipe": "full"}
    saved = {"batch_size": 2, "frozen weights in demo.pt": "9 bytes", "recipe": "lora"}
    assert difference(ours, saved) == "recipe is 'full', but was 'lora'"


@pytest.mark.parametrize("size", [0, 5, 10, 15, 200])
def test_large_file_is_read_at_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(identity, "ENDS_BYTES", 10)
    content = bytes(range(size))
    (tmp_path / "base.pt").write_bytes(content)
    crc32 = zlib.crc32(content if size <= 20 else content[:10] + content[190:])
    section = DictConfig({"checkpoint_dir": str(tmp_path), "checkpoint_files": ["base.pt"]})
    message = f"{size} bytes, CRC-32 {crc32:08x}"
    assert weights_in("frozen weights", section) == {"frozen weights in base.pt": message}
