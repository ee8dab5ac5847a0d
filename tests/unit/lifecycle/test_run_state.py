"""The lock of an output directory: one run at a time, and a dead run never blocks the next."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import PATIENCE
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import LOCK_FILE, RunRecord, lock_directory, lock_holder

HOLDS = """
import os, sys, time
from pathlib import Path
from torchtune_adaptive.lifecycle.run_state import lock_directory
held = lock_directory(Path(sys.argv[1]))
"""


@contextmanager
def another_run(
    directory: Path, then: str = "print('held', flush=True); time.sleep(600)"
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS + then, str(directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(20 * PATIENCE)


def test_surviving_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    fork = "print('held', flush=True); child = os.fork(); time.sleep(30 if child == 0 else 600)"
    with another_run(tmp_path, fork) as other:
        time.sleep(0.3)
        other.kill()
        lock_directory(tmp_path).close()


@pytest.mark.parametrize(("restarted", "wait_s"), [(False, run_state.WAIT_S), (True, 0.0)])
def test_dying_predecessor_is_waited_for_and_longer_after_a_restart(
    restarted: bool, wait_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "WAIT_S", wait_s)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(int(restarted)))
    with another_run(tmp_path, "print('held', flush=True); time.sleep(1.5); os._exit(1)"):
        began = time.monotonic()
        lock_directory(tmp_path).close()
        assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("content", [b"", b"{torn", b"[]", b"\xff"])
def test_stale_lock_file_does_not_block_a_new_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert lock_holder(tmp_path) is None
    lock_directory(tmp_path).close()
    assert lock_holder(tmp_path) is None


def test_file_system_without_locks_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuses)
    lock_directory(tmp_path).close()
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} does not support locks (No locks available)")


def test_unwritable_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out: Not a directory"):
        lock_directory(tmp_path / "file" / "out")
    (tmp_path / "out" / LOCK_FILE).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"out/{LOCK_FILE}: Is a directory; remove it"):
        lock_directory(tmp_path / "out")


@pytest.mark.parametrize("last", [run_state.STOPPED, run_state.FINISHED, run_state.ERROR])
def test_last_end_replaces_the_recorded_signal_but_a_signal_replaces_no_end(last: str, tmp_path: Path) -> None:
    run_state.write_record(tmp_path, run_state.RunRecord(serial=3))
    for ended in (run_state.SIGNALLED, last, run_state.SIGNALLED):
        run_state.record_end(tmp_path, ended, f"message of {ended}")
    assert run_state.read_record(tmp_path) == RunRecord(serial=3, ended=last, message=f"message of {last}")


def test_run_that_cannot_record_its_state_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / run_state.RUN_FILE).mkdir()
    run_state.write_record(tmp_path, run_state.RunRecord(serial=0))
    (line,) = caplog.messages
    assert line.startswith(f"cannot write {tmp_path / run_state.RUN_FILE} (Is a directory)")
    assert [path.name for path in tmp_path.iterdir()] == [run_state.RUN_FILE]
