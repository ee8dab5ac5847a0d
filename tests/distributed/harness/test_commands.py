"""What tests rely on where a command runs in processes that are forked."""

import sys
import time
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.ranks import PATIENCE

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
FAILS_ON_RANK_1 = """
import os, sys, time
print("rank", os.environ["RANK"], sys.argv[1:], "tests" in sys.modules)
if os.environ["RANK"] == "1":
    raise LookupError("as it was told to")
time.sleep(600)
"""


def command(folder: Path, program: str, *launcher: str) -> list[str]:
    (folder / "program.py").write_text(program)
    return [sys.executable, *launcher, "program.py", "this"]


def test_a_command_ends_with_its_status_and_takes_along_what_it_leaves_behind(tmp_path: Path) -> None:
    ended = run_here(command(tmp_path, LEAVES_A_PROCESS), cwd=tmp_path, timeout_s=60)
    assert (ended.status, ended.output) == (3, "asked for this\n")
    left = Path("/proc", (tmp_path / "left").read_text(), "fd")
    deadline = time.monotonic() + 10 * PATIENCE
    while left.exists() and list(left.iterdir()):
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.05)


def test_a_command_that_is_to_leave_nothing_and_does_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"left running: \[\d+\]\nasked for this"):
        run_here(command(tmp_path, LEAVES_A_PROCESS), cwd=tmp_path, timeout_s=60, leaves_nothing=True)


def test_a_command_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"still running after 4 s: .*program\.py this\nbegins"):
        run_here(
            command(tmp_path, "import time\nprint('begins', flush=True)\ntime.sleep(600)"), cwd=tmp_path, timeout_s=1
        )


def test_a_launcher_tells_of_the_rank_that_failed_and_ends_the_others(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ended = run_here(command(tmp_path, FAILS_ON_RANK_1, *launcher), cwd=tmp_path, timeout_s=60)
    assert ended.status == 1
    assert "rank 1 ['this'] False" in ended.output
    assert "LookupError: as it was told to" in ended.output
    assert "ChildFailedError" in ended.output
    assert "exitcode  : 1" in ended.output
