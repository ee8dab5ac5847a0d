"""Runs work on rank 0 that may take longer than the timeout of the process group, such as writing a checkpoint."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from torchtune_adaptive.engine.ranks import from_rank_0
from torchtune_adaptive.errors import CollectiveFailedError

MESSAGE_EVERY_S = 2.0
"""Seconds between two messages to the ranks that wait. Less than any timeout of a process group."""
PATIENCE_S, LEAST_BYTES = 1800.0, 2**20
"""Rank 0 is stuck if it reads and writes fewer bytes than this in so many seconds."""

Result = TypeVar("Result")
Stuck = TypeVar("Stuck")


def no_progress() -> str:
    """Return what has happened if rank 0 is stuck."""
    return f"rank 0 has made no progress for {PATIENCE_S / 60:g} minutes"


def run(work: Callable[[], Result], if_stuck: Stuck) -> Result | Stuck:
    """Collective: call `work` in a thread of rank 0, and return its result, or `if_stuck`, on every rank. `work` must
    neither communicate nor raise."""
    message: list[Result | Stuck] = []
    if dist.get_rank() != 0:
        while not message:
            message = from_rank_0(message)
        return message[0]
    results: list[Result] = []
    thread = Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    moved, until = -LEAST_BYTES, 0.0
    while not message:
        thread.join(MESSAGE_EVERY_S)
        ended = not thread.is_alive()
        counters = Path("/proc/self/io").read_text().split()  # rchar: 4096 wchar: 4096 ...
        if (now := int(counters[1]) + int(counters[3])) >= moved + LEAST_BYTES:
            moved, until = now, time.monotonic() + PATIENCE_S
        message = [*results] or [if_stuck] * (ended or time.monotonic() > until)
        try:
            from_rank_0(message)
        except CollectiveFailedError:  # a peer has exited
            thread.join()
            raise
    return message[0]
