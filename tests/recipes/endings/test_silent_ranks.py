"""A rank is stopped during a run: the others end in time, name it, and print the resume command."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.forked_commands import run_forked
from tests.ranks import PATIENCE
from tests.recipes.endings.test_launched_endings import tune_run_in_a_terminal
from tests.recipes.terminal import STARTS_S

TIMEOUT_S = 8
RUN = ("dataset.samples=320", "epochs=1", "use_maximum_batch_size=False", "output_dir=out", "save_every_n_steps=4")
"""20 steps."""


def rank_of(pid: int) -> int | None:
    """Return the rank that the launcher assigned."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


@pytest.mark.smoke("1")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_other_ranks_end_in_time_and_name_the_silent_rank_and_the_resume_command(rank: int, tmp_path: Path) -> None:
    silent = f"adaptive.silent_rank_timeout={TIMEOUT_S}"
    with tune_run_in_a_terminal(2, tmp_path, *RUN, silent, "resume_from_checkpoint=auto") as run:
        run.when(lambda: "step_4 saved in" in run.output, STARTS_S)
        (pid,) = (pid for pid in run.ranks() if rank_of(pid) == rank)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        run.when(lambda: "has not responded" in run.output, TIMEOUT_S * PATIENCE)
        seconds = time.monotonic() - began
        noted = tmp_path / "out" / "adaptive_run.json"
        run.when(lambda: "has not responded" in noted.read_text(encoding="utf-8"), PATIENCE)
    (message,) = re.findall(r"^error: (.*)$", run.output, re.MULTILINE)
    assert message.startswith(f"rank {rank} (pid {pid} on {os.uname().nodename}) has not responded for ")
    assert re.search(r"last checkpoint: \S+/out/step_\d+\. To resume: tune run --nproc_per_node 2 ", message), message
    assert seconds < TIMEOUT_S + PATIENCE
    tune, *command = shlex.split(message.partition("To resume: ")[2])
    assert tune == "tune"
    ended = run_forked([str(Path(sys.executable).parent / tune), *command], cwd=tmp_path, timeout_s=120)
    assert ended.status == 0, ended.output
    assert "resuming from" in ended.output, ended.output
