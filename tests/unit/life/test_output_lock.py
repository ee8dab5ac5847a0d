"""Who may write into an output directory: one run at a time, and never nobody because of one that is gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import PATIENCE
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life import output_lock
from torchtune_adaptive.life.output_lock import LOCK_FILE, holder, take

# loaded by itself: nothing of torch, so that it is quick
HOLDS = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
held = lock.take(Path(sys.argv[2]))
"""


@contextmanager
def another_run(
    directory: Path, then: str = "print('held', flush=True); time.sleep(600)"
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS + then, output_lock.__file__, str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(20 * PATIENCE)


def test_the_second_run_says_who_holds_it_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "WAIT_S", 0.3)
    with another_run(tmp_path) as other:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        who = rf"in use by process {other.pid} on {re.escape(socket.gethostname())}, since 20\d\d-.*choose another"
        with pytest.raises(ConfigError, match=who):
            take(tmp_path)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
        assert f"process {other.pid}" in str(holder(tmp_path))


def test_of_a_machine_that_may_be_gone_it_says_what_becomes_of_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_lock, "WAIT_S", 0.3)
    with another_run(tmp_path):
        with pytest.raises(ConfigError) as here:
            take(tmp_path)
        monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
        with pytest.raises(ConfigError) as elsewhere:
            take(tmp_path)
    assert "is gone" not in str(here.value)
    assert re.search(rf"If \S+ is gone, its lock expires with .* delete {tmp_path / LOCK_FILE}$", str(elsewhere.value))


def test_who_comes_back_to_a_lock_that_was_deleted_leaves_that_of_the_next_alone(tmp_path: Path) -> None:
    held = take(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).write_text("the next run's")
    held.release()
    assert (tmp_path / LOCK_FILE).read_text() == "the next run's"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_process(number: signal.Signals, tmp_path: Path) -> None:
    with another_run(tmp_path) as other:
        other.send_signal(number)
        take(tmp_path).release()
    assert holder(tmp_path) is None


def test_a_forked_child_that_lives_on_does_not_hold_it(tmp_path: Path) -> None:
    fork = "print('held', flush=True); child = os.fork(); time.sleep(30 if child == 0 else 600)"
    with another_run(tmp_path, fork) as other:
        time.sleep(0.3)
        other.kill()
        take(tmp_path).release()


def test_a_predecessor_that_is_still_dying_is_waited_for(tmp_path: Path) -> None:
    with another_run(tmp_path, "print('held', flush=True); time.sleep(1.5); os._exit(1)"):
        began = time.monotonic()
        take(tmp_path).release()
        assert time.monotonic() - began > 0.5


def test_after_a_restart_it_is_waited_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "WAIT_S", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with another_run(tmp_path, "print('held', flush=True); time.sleep(1.5); os._exit(1)"):
        take(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"{torn", b"[]", b"\xff"])
def test_what_lies_in_a_file_that_nobody_holds_is_in_nobodys_way(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert holder(tmp_path) is None
    held = take(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_removed_while_it_was_waited_for_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or two runs would hold two files of one name."""
    first = take(tmp_path)
    opened = os.open

    def opened_just_before_the_release(*arguments: Any) -> int:
        descriptor = opened(*arguments)
        monkeypatch.setattr(os, "open", opened)
        first.release()
        return descriptor

    monkeypatch.setattr(os, "open", opened_just_before_the_release)
    second = take(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuses)
    take(tmp_path).release()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} does not support locks (No locks available): a second run there would not be detected"
    ]


def test_a_folder_in_place_of_the_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"\.adaptive_lock is a folder, .*: remove it"):
        take(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    for place, why in {"file/out": "Not a directory", "file": "not a folder", "link": "link to gone"}.items():
        with pytest.raises(ConfigError, match=f"cannot write to output_dir .*{place}': .*{why}"):
            take(tmp_path / place)
