"""A fresh start in a folder with checkpoints is refused, or allowed to remove only them."""

from pathlib import Path

import pytest

from tests.unit.checkpoints.checkpoint_files import complete, save
from tests.unit.checkpoints.run_starts import config, saved, start
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.lifecycle.run_state import RESTARTS, THIS_RUN


def test_without_an_intact_checkpoint_no_refused_command_is_advised(tmp_path: Path) -> None:
    for serial, name in enumerate(["epoch_0", "step_6"]):
        (saved(tmp_path, name, serial) / "recipe_state.pt").write_bytes(b"stata")
    with pytest.raises(ConfigError) as error:
        start(tmp_path)
    assert "auto" not in str(error.value)
    assert "overwrite_output_dir=True to remove them" in str(error.value)


@pytest.mark.parametrize("mode", ["False", "auto"])
def test_folders_without_a_manifest_are_kept(tmp_path: Path, mode: str) -> None:
    (tmp_path / "epoch_0").mkdir()
    with pytest.raises(ConfigError, match=r"epoch_0.*another output_dir, or set .*overwrite_output_dir=True"):
        start(tmp_path, f"resume_from_checkpoint={mode}")
    assert (tmp_path / "epoch_0").is_dir()


def test_fresh_start_among_checkpoints_is_refused_with_ways_to_continue(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    ways = r"resume_from_checkpoint=auto.*another output_dir.*overwrite_output_dir=True"
    with pytest.raises(ConfigError, match=ways):
        start(tmp_path, "resume_from_checkpoint=False")
    assert complete(tmp_path) == ["epoch_0"]


OVERWRITE = ("resume_from_checkpoint=False", "overwrite_output_dir=True")


def test_overwriting_waits_until_training_begins(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    decided = start(tmp_path, *OVERWRITE)
    assert (decided.resumes, decided.overwrites) == (False, 1)
    assert complete(tmp_path) == ["epoch_0"], "other config errors appear before any file is removed"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_restart_overwrites_no_checkpoint_whichever_launcher_counts_it(
    restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers count failures of their ranks only; after a failure on another node, this one starts its ranks
    with 0.
    """
    monkeypatch.setattr(THIS_RUN, "restarted", False)
    monkeypatch.setattr(THIS_RUN, "record_directory", None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv(RESTARTS, "0")
    fresh = read_full_settings(config(tmp_path, *OVERWRITE))
    saved(tmp_path, "epoch_0")
    find_start(fresh, "full").release()
    monkeypatch.setenv(RESTARTS, restarts)
    with pytest.raises(ConfigError, match=r"or of this one .* \(resume_from_checkpoint=auto\)") as error:
        find_start(fresh, "full")
    assert "overwrite_output_dir" not in str(error.value), "already set"
    assert complete(tmp_path) == ["epoch_0"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "the next job")
    monkeypatch.setenv(RESTARTS, "0")
    decided = find_start(fresh, "full")
    decided.release()
    assert decided.overwrites == 1


def test_automatic_resume_never_removes_files(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    assert start(tmp_path, "overwrite_output_dir=True").resumes
    with pytest.raises(ConfigError, match="seed is 7, but was 0"):
        start(tmp_path, "overwrite_output_dir=True", "seed=7")
    (tmp_path / "epoch_0" / "recipe_state.pt").unlink()
    with pytest.raises(ConfigError, match="resume_from_checkpoint=False and overwrite_output_dir=True"):
        start(tmp_path, "overwrite_output_dir=True")
    assert (tmp_path / "epoch_0").is_dir()


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("epoch_0", "checkpointer.checkpoint_files=[model.bin]"),
        (".", "checkpointer.checkpoint_files=[epoch_0/model.bin]"),
        ("elsewhere", "checkpointer.checkpoint_files=[../epoch_0/model.bin]"),
        (".", "checkpointer.adapter_checkpoint=epoch_0/adapter.pt"),
    ],
)
def test_files_that_the_config_reads_are_not_overwritten(tmp_path: Path, folder: str, named: str) -> None:
    saved(tmp_path, "epoch_0")
    (tmp_path / folder).mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=r"checkpointer reads .*epoch_0.* which would be removed"):
        start(tmp_path, *OVERWRITE, f"checkpointer.checkpoint_dir={tmp_path / folder}", named)
    assert complete(tmp_path) == ["epoch_0"]


def test_file_with_the_name_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "step_3").write_text("my notes")
    assert not start(tmp_path).resumes
    with pytest.raises(NotADirectoryError):
        save(tmp_path, "step_3")
    assert (tmp_path / "step_3").read_text() == "my notes"
