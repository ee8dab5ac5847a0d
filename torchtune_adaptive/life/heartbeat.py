"""Which rank has stopped answering: each beats into the store that all of them share, and looks after all others.

A thread beats, so a rank that is only busy is heard. What is not heard is a process that is stopped, or a machine that
hangs, and so would never end what its peers wait for. Then the others end, and say which it was and how to go on.
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
from torchtune_adaptive.life.launcher import speaks_first, tell_the_launcher
from torchtune_adaptive.life.this_run import STOPPED, THIS_RUN, saved_and_what_next
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.text import ranks_named

BEATS_PER_TIMEOUT = 16
LONGEST_INTERVAL_S = 5.0
SPARE_BEATS = 2
"""Beats of a time-out that are not waited for: one until the first look without a new beat, and one look too late."""
LEFT = "left"
"""The last beat of a rank that has ended as it should."""


class Silent(NamedTuple):
    """Ranks that were not heard of for too long."""

    ranks: tuple[int, ...]
    """Silent ranks; empty where it is the store that does not answer, which is rank 0's or its launcher's."""
    where: str
    seconds: float
    """The time-out, within which it was found."""

    @property
    def fact(self) -> str:
        who, have = f"the rendezvous store, hosted by rank 0 ({self.where}) or its launcher,", "has"
        if self.ranks:
            who, have = f"{ranks_named(self.ranks)} ({self.where})", "has" if len(self.ranks) == 1 else "have"
        return f"{who} {have} not responded for {self.seconds:.0f} s"

    def __str__(self) -> str:
        without = "them" if len(self.ranks) > 1 else "it"
        waiting = "" if self.ranks else " (their launchers may wait for it indefinitely: end those first)"
        others = f"and the other ranks cannot continue without {without}{waiting}"
        return f"{self.fact} (adaptive.silent_rank_timeout), {others}"


def own_connection(attempt: str, timeout_s: float) -> Any:
    """A connection of its own to the group's store: on the group's, the main thread's waits would hold up the beats.
    `attempt` keeps apart what other attempts have left there."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]


class Heartbeat:
    """Beats for this rank until it is stopped, and tells of silent ones."""

    def __init__(
        self,
        timeout_s: float,
        on_silence: Callable[[Silent], None],
        connect: Callable[[str, float], Any] = own_connection,
    ) -> None:
        """Collective. `on_silence` is called in a thread, and is to end the process: its peers end as well."""
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / BEATS_PER_TIMEOUT)
        # Looks are counted and not seconds: whoever was suspended himself gives the others time to beat again.
        self._most_looks = int(timeout_s / self._interval_s) - SPARE_BEATS
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._connect = partial(connect, from_rank_0(uuid.uuid4().hex), timeout_s)
        self._store = self._connect()
        self._keys = [f"beat/{rank}" for rank in range(self._ranks)]
        self._store.set(self._keys[self._rank], "0")
        self._wheres = from_all_ranks(f"pid {os.getpid()} on {socket.gethostname()}")  # all have beaten once then
        self._stopping = threading.Event()
        self._says_so = True
        self._rounds = 0
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch_the_store)]
        for thread in self._threads:
            thread.start()

    def stop(self, *, as_it_should: bool = True) -> None:
        """The rank ends. Where it has failed, its peers may wait for it, and are to find it silent."""
        self._says_so = as_it_should
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * self._interval_s)  # no longer: the store may be gone, and with it its answer

    def _beat(self) -> None:
        last, unheard = [LEFT] * self._ranks, [0] * self._ranks
        while not self._stopping.wait(self._interval_s):
            # One broken connection is no reason to fall silent. Where the store is gone, this fails again and again,
            # and the other thread sees that there are no more rounds.
            try:
                self._store.set(self._keys[self._rank], str(self._rounds + 1))
                self._rounds += 1
                beats = [beat.decode() for beat in self._store.multi_get(self._keys)]
            except RuntimeError:
                with suppress(RuntimeError):
                    self._store = self._connect()
                continue
            looks = zip(beats, last, unheard, strict=True)
            unheard = [count + 1 if beat == before != LEFT else 0 for beat, before, count in looks]
            last = beats
            if max(unheard) >= self._most_looks:
                # where one has stopped, a whole machine may have, whose ranks did not beat at the same time
                silent = [rank for rank, count in enumerate(unheard) if count >= self._most_looks - 2]
                where = ", ".join(self._wheres[rank] for rank in silent)
                self._on_silence(Silent(tuple(silent), where, self._timeout_s))
                return
        if self._says_so:
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], LEFT)

    def _watch_the_store(self) -> None:
        last, unheard = 0, 0
        while not self._stopping.wait(self._interval_s):
            unheard = unheard + 1 if self._rounds == last else 0
            last = self._rounds
            if unheard >= self._most_looks:
                self._on_silence(Silent((), self._wheres[0], self._timeout_s))
                return


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


def _end(silent: Silent) -> None:
    """Ends the run from a thread: the main thread is in a collective that will never end."""
    if speaks_first():
        tell_the_launcher(f"error (rank {dist.get_rank()}): {silent}")
        with suppress(OSError):
            print(f"\nerror: {silent}; {saved_and_what_next()}", file=sys.stderr, flush=True)
        THIS_RUN.try_to_note(STOPPED, silent.fact)
    os._exit(1)
