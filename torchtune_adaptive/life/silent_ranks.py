"""What happens when a rank stops answering: the others end, and say which it was and how to go on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from torchtune_adaptive.errors import RunFinished, RunStopped
from torchtune_adaptive.life import run_file
from torchtune_adaptive.life.endings import speaks_first
from torchtune_adaptive.life.heartbeat import Heartbeat, Silent
from torchtune_adaptive.life.this_run import THIS_RUN, saved_and_what_next
from torchtune_adaptive.rehearsal import REHEARSAL


@contextmanager
def ending_when_a_rank_is_silent(timeout_s: float | None) -> Iterator[None]:
    """Collective, where there are several ranks: while open, no rank waits longer than that for one that hangs."""
    if timeout_s is None or REHEARSAL.on or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    heartbeat = Heartbeat(timeout_s, _end)
    with_all_others = True
    try:
        yield
    except BaseException as error:
        with_all_others = isinstance(error, RunFinished | RunStopped)
        raise
    finally:
        heartbeat.stop(as_it_should=with_all_others)


def message(silent: Silent) -> str:
    without = "them" if len(silent.ranks) > 1 else "it"
    waiting = "" if silent.ranks else " (their launchers may wait for it indefinitely: end those first)"
    return f"{silent} (adaptive.silent_rank_timeout), and the other ranks cannot continue without {without}{waiting}"


def _end(silent: Silent) -> None:
    """Ends the run from a thread: the main thread is in a collective that will never end."""
    if speaks_first():
        with suppress(OSError):
            print(f"\nerror: {message(silent)}; {saved_and_what_next()}", file=sys.stderr, flush=True)
        THIS_RUN.try_to_note(run_file.STOPPED, str(silent))
    os._exit(1)
