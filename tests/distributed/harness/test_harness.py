"""Test properties of the helpers whose loss would go unnoticed."""

import gc
import os
import sys
import time
from pathlib import Path

import pytest

from tests import ranks
from tests.forked_commands import run_forked
from tests.ranks import RanksHung, run_on_ranks

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


def sleep_on_rank_1(seconds: float) -> int:
    time.sleep(seconds * int(os.environ["RANK"]))
    return 0


def test_a_hung_rank_ends_the_test_and_a_slow_one_on_a_loaded_machine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "patience", lambda: 1.0)
    with pytest.raises(RanksHung, match=r"ranks \[1\]"):
        run_on_ranks(2, sleep_on_rank_1, 60.0, timeout_s=1, in_group=False)
    monkeypatch.setattr(ranks, "patience", lambda: 30.0)
    assert run_on_ranks(2, sleep_on_rank_1, 4.0, timeout_s=1, in_group=False) == [0, 0]


def is_preloaded() -> bool:
    return "torchtune_adaptive.loop.training_loop" in sys.modules and gc.get_freeze_count() > 0


def test_ranks_are_forked_from_a_server_that_has_imported_all_modules() -> None:
    assert run_on_ranks(1, is_preloaded, timeout_s=10, in_group=False) == [True]
