"""Detect a rank that has stopped responding. Each rank writes heartbeats to the rendezvous store and checks all others.

A thread writes the heartbeats, so a busy rank still beats. A stopped process or a hung machine does not, and its peers
would wait for it forever in a collective. They exit instead, and name the rank and the command that resumes the run.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0
from torchtune_adaptive.errors import RunFinished, RunStopped
from torchtune_adaptive.formatting import ranks_named
from torchtune_adaptive.lifecycle.run_state import STOPPED, THIS_RUN, saved_and_next_command
from torchtune_adaptive.lifecycle.torchrun import first_to_report, write_error_file
from torchtune_adaptive.rehearsal_flag import REHEARSAL

BEATS_PER_TIMEOUT = 16
LONGEST_INTERVAL_S = 5.0
SPARE_BEATS = 2
"""Intervals that pass without being counted as missed, at most: one before the first check, one for a late check."""
NAME = "heartbeat"
LEFT = "left"
"""The last heartbeat of a rank that exited normally."""


class SilentRanks(NamedTuple):
    """Ranks without a heartbeat within the timeout."""

    ranks: tuple[int, ...]
    """Empty if the store does not respond. Rank 0 or its launcher hosts it."""
    where: str
    seconds: float
    """The timeout."""

    def __str__(self) -> str:
        silent = f"not responded for {self.seconds:.0f} s (adaptive.silent_rank_timeout)"
        if not self.ranks:
            return (
                f"the rendezvous store, hosted by rank 0 ({self.where}) or its launcher, has {silent}; launchers may "
                "wait for it indefinitely: end them first"
            )
        have = "has" if len(self.ranks) == 1 else "have"
        return f"{ranks_named(self.ranks)} ({self.where}) {have} {silent}, and the other ranks cannot continue"


def connect_to_store(attempt: str, timeout_s: float) -> Any:
    """Open a separate connection to the group's store, on which waits of the main thread do not delay heartbeats.

    `attempt` is a prefix that separates the keys of this attempt from those of earlier ones.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]


class Heartbeat:
    """Write heartbeats of this rank and report silent ranks, until stopped."""

    def __init__(
        self,
        timeout_s: float,
        on_silence: Callable[[SilentRanks], None],
        connect: Callable[[str, float], Any] = connect_to_store,
    ) -> None:
        """Collective. `on_silence` is called in a thread and must end the process; all peers do the same."""
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / BEATS_PER_TIMEOUT)
        # Count checks, not seconds: after this process was suspended, its peers get time to beat again.
        self._max_missed = int(timeout_s / self._interval_s) - SPARE_BEATS
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._connect = partial(connect, from_rank_0(uuid.uuid4().hex), timeout_s)
        self._store = self._connect()
        self._keys = [f"beat/{rank}" for rank in range(self._ranks)]
        self._store.set(self._keys[self._rank], "0")
        self._locations = from_all_ranks(f"pid {os.getpid()} on {socket.gethostname()}")
        self._stopping = threading.Event()
        self._signs_off = True
        self._rounds = 0
        self._threads = [
            threading.Thread(target=work, name=NAME, daemon=True) for work in (self._beat, self._watch_the_store)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, *, normally: bool = True) -> None:
        """Stop. After a failure, this rank does not sign off, so that peers that wait for it detect its silence."""
        self._signs_off = normally
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * self._interval_s)  # limited, since the store may be gone

    def _beat(self) -> None:
        last, missed = [LEFT] * self._ranks, [0] * self._ranks
        while not self._stopping.wait(self._interval_s):
            # Reconnect after a broken connection. If the store is gone, this fails repeatedly, and the other thread
            # notices that no round completes.
            try:
                self._store.set(self._keys[self._rank], str(self._rounds + 1))
                self._rounds += 1
                beats = [beat.decode() for beat in self._store.multi_get(self._keys)]
            except RuntimeError:
                with suppress(RuntimeError):
                    self._store = self._connect()
                continue
            checks = zip(beats, last, missed, strict=True)
            missed = [count + 1 if beat == before != LEFT else 0 for beat, before, count in checks]
            last = beats
            if max(missed) >= self._max_missed:
                # a whole machine may have stopped; its ranks beat at slightly different times
                silent = [rank for rank, count in enumerate(missed) if count >= self._max_missed - 2]
                where = ", ".join(self._locations[rank] for rank in silent)
                self._on_silence(SilentRanks(tuple(silent), where, self._timeout_s))
                return
        if self._signs_off:
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], LEFT)

    def _watch_the_store(self) -> None:
        last, missed = 0, 0
        while not self._stopping.wait(self._interval_s):
            missed = missed + 1 if self._rounds == last else 0
            last = self._rounds
            if missed >= self._max_missed:
                self._on_silence(SilentRanks((), self._locations[0], self._timeout_s))
                return


def exit_if_blocked(status: int) -> None:
    """Exit at once if a heartbeat still waits for the store: in C++, its thread would abort the exiting interpreter."""
    if any(thread.name == NAME for thread in threading.enumerate()):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status)


@contextmanager
def exit_on_silent_rank(timeout_s: float | None) -> Iterator[None]:
    """Collective if there are several ranks: while open, exit this rank when another one is silent for `timeout_s`."""
    if timeout_s is None or REHEARSAL.on or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    heartbeat = Heartbeat(timeout_s, _exit)
    try:
        yield
    except BaseException as error:
        heartbeat.stop(normally=isinstance(error, RunFinished | RunStopped))  # all ranks raise these two
        raise
    heartbeat.stop(normally=True)


def _exit(silent: SilentRanks) -> None:
    """End the process from a thread, because the main thread is blocked in a collective."""
    if first_to_report():
        write_error_file(f"error (rank {dist.get_rank()}): {silent}")
        with suppress(OSError):
            print(f"\nerror: {silent}; {saved_and_next_command()}", file=sys.stderr, flush=True)
        THIS_RUN.try_to_record_end(STOPPED, str(silent))
    os._exit(1)
