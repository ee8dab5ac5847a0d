"""What would go unnoticed if ranks and commands of tests did it no more."""

import sys
from pathlib import Path

import pytest

from tests.commands import run_here
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


def test_a_command_that_is_to_leave_nothing_and_does_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LEAVES_A_PROCESS)
    command = [sys.executable, "program.py", "this"]
    with pytest.raises(AssertionError, match=r"left running: \[\d+\]\nasked for this"):
        run_here(command, cwd=tmp_path, timeout_s=60, leaves_nothing=True)


def test_processes_that_test_side_by_side_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        assert {port % 3 for port in free_ports(50)} == {worker}
