"""Run several ranks of a command together, in processes that are forked after torch is imported."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from pathlib import Path

import torch

from torchtune_adaptive.rehearse.start import CannotRehearse, end_with_parent

GRACE_S = 10
"""After a rank has failed, the others are killed if they have not ended within these seconds."""


def fork_ranks(ranks: Sequence[int], folder: Path) -> tuple[int, Callable[[], None]]:
    """Fork a process for each rank. In such a process, return its rank, and a function to call after its last step.

    A rank continues after its last step, because others may wait for it, until all ranks have reached theirs. The
    calling process waits for this, writes the exit status of each rank into its record, and then ends.
    """
    if torch.cuda.is_initialized():
        raise CannotRehearse("the command uses CUDA before it starts the ranks: add --ranks")
    faulthandler.cancel_dump_traceback_later()  # its thread does not exist in a forked process, which would wait for it
    for path in folder.iterdir():  # delete the record of this process
        path.unlink()
    finished = mmap(-1, len(ranks))
    running = dict[int, int]()
    for at, rank in enumerate(ranks):
        if (process := os.fork()) == 0:
            end_with_parent()
            return rank, partial(finished.__setitem__, at, 1)
        running[process] = at
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks receive it, too, and end
    until_s = float("inf")
    while running:
        if time.monotonic() > until_s or all(finished[at] for at in running.values()):
            for process in running:
                os.kill(process, signal.SIGKILL)
        process, status = os.waitpid(-1, os.WNOHANG)
        if process not in running:
            time.sleep(0.05)
            continue
        at = running.pop(process)
        code = 0 if finished[at] else os.waitstatus_to_exitcode(status)
        if code:
            until_s = min(until_s, time.monotonic() + GRACE_S)
        with (folder / str(ranks[at])).open("a") as record:
            record.write(json.dumps({"kind": "process", "status": code}) + "\n")
    os._exit(0)
