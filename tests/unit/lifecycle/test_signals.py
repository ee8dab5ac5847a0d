"""Signals of a process, and its launcher: a rank ends with it, and leaves its message where torchrun expects it."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tests.ranks import PATIENCE
from torchtune_adaptive.lifecycle import signals, torchrun

LISTENS = """
import os, signal, sys, time
from torchtune_adaptive.lifecycle.signals import listen
from torchtune_adaptive.lifecycle.run_state import THIS_RUN
listen()
me = os.getpid()
"""


def python(program: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that handles signals; the shell runs `before` first."""
    return subprocess.run(
        ["sh", "-c", f'{before}exec "$0" -c "$1"', sys.executable, LISTENS + textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE,
        check=False,
    )


def after_signal(number: signal.Signals, before: str = "", **environment: str) -> tuple[int, str, str]:
    """Return status, recorded signal and messages of a process that received this signal."""
    known = 'THIS_RUN.stop_requested(), getattr(THIS_RUN.signal, "name", None)'
    ended = python(f"os.kill(me, {int(number)}); time.sleep(0.5); print({known})", before, **environment)
    return ended.returncode, ended.stdout, ended.stderr


def test_signals_forwarded_by_the_launcher_are_handled() -> None:
    # an option since torch 2.12
    forwarded = getattr(LaunchConfig, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    assert {number.name for number in signals.HANDLED} == set(forwarded.split(","))


@pytest.mark.parametrize("number", signals.HANDLED)
def test_first_signal_is_recorded_without_interrupting(number: signal.Signals) -> None:
    status, known, printed = after_signal(number)
    assert (status, known) == (0, f"True {number.name}\n")
    assert printed.count(number.name) == 1


def test_only_rank_0_prints_the_message_and_an_ignored_signal_stays_ignored() -> None:
    assert after_signal(signal.SIGTERM, RANK="1") == (0, "True SIGTERM\n", "")
    assert after_signal(signal.SIGHUP, before="trap '' HUP; ") == (0, "False None\n", "")


def test_duplicate_of_a_slowly_recorded_signal_is_not_a_second_one() -> None:
    ended = python("""
        THIS_RUN.try_to_record_end = lambda *_: time.sleep(1.5)
        os.kill(me, signal.SIGINT)
        time.sleep(0.3)
        os.kill(me, signal.SIGINT)
        time.sleep(2)
    """)
    assert (ended.returncode, "ended immediately" in ended.stderr) == (0, False), ended.stderr


def test_signal_to_a_forked_worker_ends_only_the_worker() -> None:
    ended = python("""
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(7)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        time.sleep(0.5)
        print(os.WTERMSIG(status), THIS_RUN.signal)
    """)
    assert (ended.returncode, ended.stdout) == (0, f"{int(signal.SIGTERM)} None\n"), ended.stderr


@pytest.mark.parametrize("how", ["gone", "has reported it"])
def test_rank_with_a_failed_peer_ends_silently(how: str, tmp_path: Path) -> None:
    """The folder is torchrun's, with those of two ranks."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / torchrun.PID_FILE).write_text(str(os.getpid()))
    if how == "gone":
        peer = subprocess.Popen([sys.executable, "-c", ""])
        peer.wait(20 * PATIENCE)
        (tmp_path / "1" / torchrun.PID_FILE).write_text(str(peer.pid))
    else:
        (tmp_path / torchrun.REPORTED_FILE).touch()
    rank_0 = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "0" / "error.json"), "LOCAL_RANK": "0"}
    ended = python("os.kill(me, signal.SIGTERM); time.sleep(60)", **rank_0)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, "", "")


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


def test_process_that_was_forked_after_the_import_is_not_killed() -> None:
    code = (
        "import os; from torchtune_adaptive.lifecycle.torchrun import exit_with_launcher as end\nif not os.fork():\n "
    )
    command = [sys.executable, "-c", f"{code} end(); print('trains', flush=True); os._exit(0)\nos.wait()"]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "any"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30 * PATIENCE)
    assert ended.stdout == "trains\n"


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
