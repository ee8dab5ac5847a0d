"""A fresh start in a folder with checkpoints is refused, and removes no file."""

from pathlib import Path

import pytest

from tests.unit.checkpoints.checkpoint_files import complete, save
from tests.unit.checkpoints.run_starts import saved, start
from torchtune_adaptive.errors import ConfigError


def test_without_an_intact_checkpoint_no_refused_command_is_advised(tmp_path: Path) -> None:
    for serial, name in enumerate(["epoch_0", "step_6"]):
        (saved(tmp_path, name, serial) / "recipe_state.pt").write_bytes(b"stata")
    with pytest.raises(ConfigError, match="choose another output_dir") as error:
        start(tmp_path)
    assert "auto" not in str(error.value)


@pytest.mark.parametrize("mode", ["False", "auto"])
def test_folders_without_a_manifest_are_kept(tmp_path: Path, mode: str) -> None:
    (tmp_path / "epoch_0").mkdir()
    with pytest.raises(ConfigError, match=r"epoch_0.*another output_dir"):
        start(tmp_path, f"resume_from_checkpoint={mode}")
    assert (tmp_path / "epoch_0").is_dir()


def test_fresh_start_among_checkpoints_is_refused_with_ways_to_continue(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=auto.*another output_dir"):
        start(tmp_path, "resume_from_checkpoint=False")
    assert complete(tmp_path) == ["epoch_0"]


def test_file_with_the_name_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "step_3").write_text("my notes")
    assert not start(tmp_path).resumes
    with pytest.raises(NotADirectoryError):
        save(tmp_path, "step_3")
    assert (tmp_path / "step_3").read_text() == "my notes"
