"""Test properties of the helpers whose loss would go unnoticed."""

import sys
from pathlib import Path

import pytest

from tests.forked_commands import run_forked
from tests.ranks import free_ports

LEAVES_A_PROCESS = """
import os, sys, time
from pathlib import Path
if os.fork() == 0:
    os.setsid()
    Path("left").write_text(str(os.getpid()))
    time.sleep(600)
while not Path("left").exists() or not Path("left").read_text():
    time.sleep(0.01)
print("asked for", *sys.argv[1:])
sys.exit(3)
"""


def test_command_that_leaves_a_process_behind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LEAVES_A_PROCESS)
    command = [sys.executable, "program.py", "this"]
    with pytest.raises(AssertionError, match=r"left running: \[\d+\]\nasked for this"):
        run_forked(command, cwd=tmp_path, timeout_s=60, expect_no_leftovers=True)


def test_parallel_test_workers_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        assert {port % 3 for port in free_ports(50)} == {worker}
