"""Detects ranks that have stopped responding: each rank writes heartbeats to the rendezvous store and checks its peers.

A thread writes the heartbeats, so a busy rank still writes them. A stopped process or a hung machine does not. Its
peers, which would wait in a collective, then exit with a message that names the rank and the command to resume.
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
UNCOUNTED_BEATS = 2
"""Up to this many intervals of silence are not counted: one before the first check, and one because a check is late."""
NAME = "heartbeat"
LEFT = "left"
"""Replaces the heartbeat of a rank that has exited normally."""


class SilentRanks(NamedTuple):
    """The ranks without a heartbeat within the timeout."""

    ranks: tuple[int, ...]
    """Empty if the store itself does not respond. Rank 0 or its launcher hosts it."""
    locations: str
    """PID and host of each rank."""
    timeout_s: float

    def __str__(self) -> str:
        silent = f"not responded for {self.timeout_s:.0f} s (adaptive.silent_rank_timeout)"
        if not self.ranks:
            return (
                f"the rendezvous store, hosted by rank 0 ({self.locations}) or its launcher, has {silent}; launchers "
                "may wait for it indefinitely: end them first"
            )
        have = "has" if len(self.ranks) == 1 else "have"
        return f"{ranks_named(self.ranks)} ({self.locations}) {have} {silent}, and the other ranks cannot continue"


def connect_to_store(attempt: str, timeout_s: float) -> Any:
    """Open another connection to the group's store, so that waits of the main thread do not delay heartbeats. `attempt`
    is a prefix of all keys. It is unique, because a restarted run may use the same store."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]


class Heartbeat:
    """Writes heartbeats of this rank and reports silent ranks, until it is stopped."""

    def __init__(
        self,
        timeout_s: float,
        on_silence: Callable[[SilentRanks], None],
        connect: Callable[[str, float], Any] = connect_to_store,
    ) -> None:
        """Collective. `on_silence` is called in a thread and must end the process, as it does on all peers."""
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / BEATS_PER_TIMEOUT)
        # Missed beats are counted, not seconds: if this process was suspended, its peers get time to beat again.
        self._max_missed = int(timeout_s / self._interval_s) - UNCOUNTED_BEATS
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._connect = partial(connect, from_rank_0(uuid.uuid4().hex), timeout_s)
        self._store = self._connect()
        self._keys = [f"beat/{rank}" for rank in range(self._ranks)]
        self._store.set(self._keys[self._rank], "0")
        self._locations = from_all_ranks(f"pid {os.getpid()} on {socket.gethostname()}")
        self._stopping = threading.Event()
        self._ends_normally = True
        self._rounds = 0  # heartbeats written so far
        self._threads = [
            threading.Thread(target=work, name=NAME, daemon=True) for work in (self._beat, self._check_store)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, *, normally: bool = True) -> None:
        """Stop both threads. After a failure, do not write `LEFT`, so that peers that wait for this rank detect it."""
        self._ends_normally = normally
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * self._interval_s)  # with a timeout, because the store may be gone

    def _beat(self) -> None:
        last_beats, missed = [LEFT] * self._ranks, [0] * self._ranks
        while not self._stopping.wait(self._interval_s):
            # Reconnect if the connection is broken. If the store is gone, this fails each time, and `_check_store`
            # notices that `_rounds` does not grow.
            try:
                self._store.set(self._keys[self._rank], str(self._rounds + 1))
                self._rounds += 1
                beats = [beat.decode() for beat in self._store.multi_get(self._keys)]
            except RuntimeError:
                with suppress(RuntimeError):
                    self._store = self._connect()
                continue
            checks = zip(beats, last_beats, missed, strict=True)
            missed = [count + 1 if beat == before != LEFT else 0 for beat, before, count in checks]
            last_beats = beats
            if max(missed) >= self._max_missed:
                # if a whole machine has stopped, its ranks have slightly different numbers of missed beats
                silent = [rank for rank, count in enumerate(missed) if count >= self._max_missed - 2]
                locations = ", ".join(self._locations[rank] for rank in silent)
                self._on_silence(SilentRanks(tuple(silent), locations, self._timeout_s))
                return
        if self._ends_normally:
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], LEFT)

    def _check_store(self) -> None:
        last_rounds, missed = 0, 0
        while not self._stopping.wait(self._interval_s):
            missed = missed + 1 if self._rounds == last_rounds else 0
            last_rounds = self._rounds
            if missed >= self._max_missed:
                self._on_silence(SilentRanks((), self._locations[0], self._timeout_s))
                return


def exit_if_blocked(status: int) -> None:
    """Exit immediately if a thread of a Heartbeat still waits for the store in C++, where it would abort the exit."""
    if any(thread.name == NAME for thread in threading.enumerate()):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status)


@contextmanager
def exit_on_silent_rank(timeout_s: float | None) -> Iterator[None]:
    """Collective if there are several ranks: while open, exit this rank if another one is silent for `timeout_s`."""
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
