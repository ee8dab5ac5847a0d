"""A rank ends with its launcher's process, and leaves its message where torchrun expects it."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.ranks import PATIENCE
from torchtune_adaptive.lifecycle.torchrun import write_error_file

RANK = """
import os, time
from torchtune_adaptive.lifecycle.torchrun import exit_with_launcher
exit_with_launcher()
print(os.getpid(), flush=True)
time.sleep(600)
"""
LAUNCHER = """
import subprocess, sys, threading, time
starting = threading.Thread(target=lambda: subprocess.Popen(sys.argv[1:]))
starting.start()
starting.join()
time.sleep(600)
"""


def test_rank_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", RANK]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "any"}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    try:
        rank = int(launcher.stdout.readline())
        time.sleep(0.5)
        state = Path(f"/proc/{rank}/status").read_text()
        assert "\nState:\tZ" not in state, "the starting thread has ended, the process has not"
    finally:
        launcher.kill()
        launcher.wait()
    ended, _, _ = select.select([launcher.stdout], [], [], 10 * PATIENCE)  # all writers have closed it
    if not ended:
        os.kill(rank, signal.SIGKILL)
    assert ended


def test_rank_whose_launcher_died_during_its_imports_ends_immediately() -> None:
    imports = "import os, time; from torchtune_adaptive.lifecycle.torchrun import exit_with_launcher as end; "
    waits = "parent = os.getppid(); print('imported', flush=True)\nwhile os.getppid() == parent: time.sleep(0.01)\n"
    code = f"{imports}{waits}end(); print('trains')"
    starts = "import subprocess, sys; rank = subprocess.Popen(sys.argv[1:]); sys.stdin.readline()"
    command = [sys.executable, "-c", starts, sys.executable, "-c", code]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "any"}
    launcher = subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "imported\n"
    launcher.kill()
    output, _ = launcher.communicate(timeout=30 * PATIENCE)  # until the rank closes its end of the pipe
    assert output == ""


def test_torchruns_report_names_the_message_of_the_rank_that_failed_first_as_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error_file("error (rank 1): the disk is full")
    ended_by_torchrun = ProcessFailure(0, 8, -signal.SIGTERM, "none")
    failed = ProcessFailure(1, 9, 1, str(tmp_path / "error.json"))
    report = str(ChildFailedError("recipe", {0: ended_by_torchrun, 1: failed}))
    assert "error (rank 1): the disk is full" in report.partition("Root Cause")[2]
