"""A rank lives as long as the process that has started it, and leaves its message where torchrun looks for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.ranks import PATIENCE
from torchtune_adaptive.life.launcher import tell_the_launcher

RANK = """
import sys, time
from pathlib import Path
from torchtune_adaptive.life.launcher import end_with_the_launcher
end_with_the_launcher()
Path(sys.argv[1]).write_text(str(__import__("os").getpid()))
time.sleep(600)
"""
LAUNCHER = """
import subprocess, sys, threading, time
starting = threading.Thread(target=lambda: subprocess.Popen(sys.argv[1:]))
starting.start()
starting.join()
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_rank_outlives_the_thread_that_started_it_and_not_the_process(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, "-c", RANK, str(started)],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "any"},
    )
    try:
        patience = time.monotonic() + 30 * PATIENCE
        while not started.exists() or not started.read_text():
            assert time.monotonic() < patience
            time.sleep(0.05)
        rank = int(started.read_text())
        time.sleep(0.5)
        assert is_there(rank), "the thread that has started it is over, the process is not"
    finally:
        launcher.kill()
        launcher.wait()
    try:
        patience = time.monotonic() + 10 * PATIENCE
        while is_there(rank) and time.monotonic() < patience:
            time.sleep(0.05)
        assert not is_there(rank)
    finally:
        if is_there(rank):
            os.kill(rank, signal.SIGKILL)


def test_torchrun_reports_the_message_of_the_rank_that_spoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1"))
    tell_the_launcher("error (rank 1): the disk is full")
    time.sleep(1.1)  # torch counts whole seconds
    failures = {rank: ProcessFailure(rank, 9, 1, str(tmp_path / str(rank))) for rank in range(2)}
    report = str(ChildFailedError("recipe", failures))
    assert "error (rank 1): the disk is full" in report.partition("Root Cause")[2]
