"""`tune-adaptive status` reports the condition of a run's folder."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit.checkpoints.checkpoint_files import save
from tests.unit.lifecycle.test_run_state import another_run
from torchtune_adaptive.cli.main import main
from torchtune_adaptive.lifecycle import run_state

FINISHED, BROKEN, CAN_CONTINUE = 0, 1, 75

Status = Callable[[Path], tuple[Any, str]]


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Status:
    def report(directory: Path) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as left:
            main(["status", str(directory)])
        return left.value.code, capsys.readouterr().out

    return report


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a started run that has not recorded its end."""
    run_state.write_record(tmp_path, run_state.RunRecord(serial=0))
    return tmp_path


def test_killed_run_can_resume_from_its_newest_checkpoint_also_in_a_copy_of_its_folder(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, status: Status
) -> None:
    save(run_folder, "step_2", serial=0)
    save(run_folder, "step_4", serial=1)
    shutil.copytree(run_folder, copy := tmp_path_factory.mktemp("elsewhere") / "a copy")
    save(run_folder, "epoch_0", serial=2, finished=True)
    code, report = status(copy)
    assert code == CAN_CONTINUE
    first, newest, last_time, command = report.splitlines()
    assert last_time == "last time: killed or crashed; later steps are not saved"
    assert first == "can continue: step 4"
    assert newest.startswith(f"newest complete checkpoint: {copy / 'step_4'} (step 4, 20")
    assert command == f"resume with: {run_state.SAME_COMMAND}"


def test_run_without_a_checkpoint_can_restart(run_folder: Path, status: Status) -> None:
    run_state.record_end(run_folder, run_state.STOPPED, "SIGTERM: stopped during the search, before the first step")
    code, report = status(run_folder)
    assert code == CAN_CONTINUE
    assert report.splitlines()[-1] == f"start over with: {run_state.SAME_COMMAND}"
    assert "last time: SIGTERM: stopped during the search" in report


def test_finished_run_stays_finished_until_started_with_more_epochs(run_folder: Path, status: Status) -> None:
    save(run_folder, "epoch_1", serial=3, finished=True)
    code, report = status(run_folder)
    assert code == FINISHED
    assert report.startswith("finished: step 4\n")
    assert "resume with" not in report
    run_state.write_record(run_folder, run_state.RunRecord(serial=4))
    assert status(run_folder)[0] == CAN_CONTINUE
    save(run_folder, "epoch_2", serial=4, finished=True)
    assert status(run_folder)[0] == FINISHED


def test_user_error_is_not_restarted(run_folder: Path, status: Status) -> None:
    save(run_folder, "step_2", serial=0)
    run_state.record_end(run_folder, run_state.ERROR, "step 3: the loss is nan")
    code, report = status(run_folder)
    assert (code, report.splitlines()[0]) == (BROKEN, "broken: step 3: the loss is nan")
    assert str(run_folder / "step_2") in report
    run_state.write_record(
        run_folder, run_state.RunRecord(serial=1)
    )  # the user has fixed the error, and the run continues
    assert status(run_folder)[0] == CAN_CONTINUE


def test_run_without_a_complete_checkpoint_is_broken_and_advised_no_refused_command(
    run_folder: Path, status: Status
) -> None:
    (save(run_folder, "step_2", serial=0) / "recipe_state.pt").unlink()
    code, report = status(run_folder)
    assert code == BROKEN
    assert run_state.SAME_COMMAND not in report
    assert "start over with another output_dir" in report
    assert f"skipped: {run_folder / 'step_2'} is damaged: recipe_state.pt is missing" in report


def test_folder_without_a_run_is_reported_with_the_reason(
    tmp_path: Path, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(tmp_path / "none") == (BROKEN, f"{tmp_path / 'none'} is not a folder\n")
    assert status(tmp_path) == (BROKEN, f"{tmp_path} contains no run\n")
    monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    assert status(tmp_path) == (BROKEN, f"{tmp_path} cannot be read: Permission denied\n")


def test_running_run_is_reported_as_running(run_folder: Path, status: Status) -> None:
    with another_run(run_folder) as other:
        code, report = status(run_folder)
        assert code == CAN_CONTINUE
        assert report.startswith(f"running: process {other.pid} on {socket.gethostname()}, since 20")
    assert not status(run_folder)[1].startswith("running")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"serial": 3'])
def test_unreadable_run_file_is_ignored(content: str, tmp_path: Path, status: Status) -> None:
    save(tmp_path, "step_2", serial=0)
    (tmp_path / run_state.RUN_FILE).write_text(content)
    code, report = status(tmp_path)
    assert code == CAN_CONTINUE
    assert f"resume with: {run_state.SAME_COMMAND}" in report


def test_control_characters_from_a_folder_are_escaped(tmp_path: Path, status: Status) -> None:
    title = "\x1b]0;title\x07\rfinished"
    (tmp_path / run_state.RUN_FILE).write_text(json.dumps({"serial": 0, "ended": run_state.ERROR, "message": title}))
    save(tmp_path, "step_2", saved_at=title)
    _, report = status(tmp_path)
    assert report.count(r"\x1b]0;title\x07\rfinished") == 2
    assert all(each.isprintable() for each in report.splitlines())
