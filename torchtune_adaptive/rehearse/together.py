"""Run the ranks of a command together: forked from one process that has imported torch."""

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

from torchtune_adaptive.rehearse.start import end_with_parent

GRACE_S = 10
"""Seconds that the other ranks have to end by themselves after one has failed."""


def fork_ranks(ranks: Sequence[int], folder: Path) -> tuple[int, Callable[[], None]]:
    """Fork a process for each rank. Return, only there, its rank and a function that marks its last step.

    A rank runs on after its last step, because others may wait for it, until all have reached theirs. This process
    waits for that, and writes the exit status of each rank at the end of its record.
    """
    faulthandler.cancel_dump_traceback_later()  # a forked process would wait for its thread
    for path in folder.iterdir():  # this process has no record
        path.unlink()
    finished = mmap(-1, len(ranks))
    running = dict[int, int]()
    for at, rank in enumerate(ranks):
        if (process := os.fork()) == 0:
            end_with_parent()
            return rank, partial(finished.__setitem__, at, 1)
        running[process] = at
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks end by it
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
            record.write(json.dumps({"kind": "share", "status": code}) + "\n")
    os._exit(0)
