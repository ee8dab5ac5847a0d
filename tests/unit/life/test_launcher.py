"""A rank lives as long as the process that has started it, and leaves its message where torchrun looks for it."""

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
from torchtune_adaptive.dependencies import LAUNCHER_PID, in_place_of_torchruns_report
from torchtune_adaptive.life.launcher import tell_the_launcher

RANK = """
import os, time
from torchtune_adaptive.life.launcher import end_with_the_launcher
end_with_the_launcher()
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


def test_a_rank_outlives_the_thread_that_started_it_and_not_the_process() -> None:
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", RANK]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "any"}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    try:
        rank = int(launcher.stdout.readline())
        time.sleep(0.5)
        state = Path(f"/proc/{rank}/status").read_text()
        assert "\nState:\tZ" not in state, "the thread that has started it is over, the process is not"
    finally:
        launcher.kill()
        launcher.wait()
    ended, _, _ = select.select([launcher.stdout], [], [], 10 * PATIENCE)  # nobody has its other end
    if not ended:
        os.kill(rank, signal.SIGKILL)
    assert ended


@pytest.mark.parametrize("parent_was_told", [False, True])
def test_a_rank_whose_launcher_is_gone_before_it_looks_ends_at_once(parent_was_told: bool) -> None:
    looks = "from torchtune_adaptive.life.launcher import end_with_the_launcher as end; end(); print('goes on')"
    started = [sys.executable, "-c", looks]
    if parent_was_told:  # another launcher, started by what `tune run` had started
        started = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *started]
    gone = {"TORCHELASTIC_RUN_ID": "any", LAUNCHER_PID: str(2**22 + 1)}
    ended = subprocess.run(started, env={**os.environ, **gone}, capture_output=True, text=True, timeout=30 * PATIENCE)
    assert (ended.returncode, ended.stdout) == ((0, "goes on\n") if parent_was_told else (-signal.SIGKILL, ""))


def test_tune_run_ends_with_the_message_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    tell_the_launcher("failed (rank 1): the disk is full")
    failures = {rank: ProcessFailure(rank, 9, 1, str(tmp_path / str(rank) / "error.json")) for rank in range(2)}
    in_place_of_torchruns_report(ChildFailedError, ChildFailedError("recipe", failures), None)
    assert capsys.readouterr().err == "\nfailed (rank 1): the disk is full\n"
    killed = ChildFailedError("recipe", {1: ProcessFailure(1, 9, -signal.SIGKILL, "none")})
    in_place_of_torchruns_report(ChildFailedError, killed, None)
    assert capsys.readouterr().err == "\nfailed (rank 1): Signal 9 (SIGKILL) received by PID 9\n"
    in_place_of_torchruns_report(LookupError, LookupError("else"), None)
    assert capsys.readouterr().err == "LookupError: else\n"


def test_ctrl_c_ends_a_recipe_that_is_still_imported_without_a_word() -> None:
    program = "import sys, time; sys.argv = ['tune', 'run', 'adaptive_mine']; import torchtune_adaptive.life; "
    then = "print('imported', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program + then], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "imported\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20 * PATIENCE) == ("", "")
    assert process.returncode == -signal.SIGINT
