"""A rank that stops responding is named on all other ranks; a busy rank is not."""

import os
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.scheduling_delays import SchedulingDelays
from torchtune_adaptive.lifecycle.heartbeat import Heartbeat, SilentRanks, connect_to_store

TIMEOUT_S = 4.0


class Told:
    """Records what a rank learns about silent ranks, and when."""

    def __init__(self) -> None:
        self.silent: list[SilentRanks] = []
        self.captured = threading.Event()

    def __call__(self, silent: SilentRanks) -> None:
        self.silent.append(silent)
        self.captured.set()
        threading.Event().wait(1)  # the time a process takes to end


class Connection:
    """A connection to the store with replaceable calls."""

    def __init__(self, attempt: str, timeout_s: float) -> None:
        self.own = connect_to_store(attempt, timeout_s)
        self.set = self.own.set

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Connections(list[Connection]):
    """The connections that a rank has opened."""

    def __call__(self, attempt: str, timeout_s: float) -> Connection:
        self.append(Connection(attempt, timeout_s))
        return self[-1]

    def freeze(self) -> None:
        """Stop the heartbeat of this rank, as if its process were stopped."""
        self[-1].set = lambda *_: threading.Event().wait()


class Heard(NamedTuple):
    silent: SilentRanks | None
    seconds: float
    late_s: float
    """Seconds for which the machine kept this rank from running."""


def hear_of(frozen_ranks: tuple[int, ...], hearing_ranks: tuple[int, ...]) -> Heard:
    """Freeze the connections of some ranks; return what this rank learns, and after how long."""
    message, connections = Told(), Connections()
    hears = dist.get_rank() in hearing_ranks
    _heartbeat = Heartbeat(TIMEOUT_S, message if hears else lambda _: None, connections)
    time.sleep(1)
    with SchedulingDelays() as delays:
        began = time.time()
        if dist.get_rank() in frozen_ranks:
            connections.freeze()
        assert message.captured.wait((10 if hears else 2) * TIMEOUT_S) == hears
        seconds = time.time() - began
    return Heard(message.silent[0] if message.silent else None, seconds, delays.between(began, began + seconds))


@pytest.mark.smoke
def test_all_other_ranks_learn_of_a_silent_rank_in_time():
    """Here a whole machine is silent; tests/recipes/endings/test_silent_ranks.py has a single rank."""
    ranks = run_on_ranks(4, hear_of, (2, 3), (0, 1))
    assert [rank.silent for rank in ranks[2:]] == [None, None]
    allowed_s = TIMEOUT_S + sum(rank.late_s for rank in ranks)
    for silent, seconds, _ in ranks[:2]:
        assert silent is not None
        assert silent.ranks == (2, 3)
        assert silent.locations.startswith("pid ")
        assert silent.locations.endswith(f" on {os.uname().nodename}")
        assert seconds < allowed_s


BUSY, DISCONNECTED, ENDED = 1, 2, 3


def seem_silent() -> list[SilentRanks]:
    """Seem silent for longer than the timeout: a busy main thread, an error of the store, and a stopped heartbeat."""
    message, connections, rank = Told(), Connections(), dist.get_rank()
    heartbeat = Heartbeat(TIMEOUT_S, message, connections)
    until = time.monotonic() + 2 * TIMEOUT_S
    if rank == DISCONNECTED:
        connections[0].set = _reset_by_peer
    elif rank == ENDED:
        heartbeat.stop()
    while rank == BUSY and time.monotonic() < until:  # a slow dataset, in Python
        sum(range(10_000))
    time.sleep(max(0.0, until - time.monotonic()))
    assert len(connections) == (2 if rank == DISCONNECTED else 1)
    dist.barrier()
    heartbeat.stop()
    return message.silent


def _reset_by_peer(*_: object) -> None:
    raise RuntimeError("connection reset by peer")


def test_busy_reconnected_and_finished_ranks_are_not_silent():
    assert run_on_ranks(4, seem_silent) == [[]] * 4


def fail() -> list[SilentRanks]:
    message = Told()
    heartbeat = Heartbeat(TIMEOUT_S, message)
    if dist.get_rank() == 1:
        heartbeat.stop(normally=False)
    else:
        assert message.captured.wait(10 * TIMEOUT_S)
    dist.barrier()
    return message.silent


def test_failed_rank_counts_as_silent_for_a_waiting_peer():
    waiting, failed = run_on_ranks(2, fail)
    assert [each.ranks for each in waiting[:1]] == [(1,)]
    assert failed == []


def test_unresponsive_store_is_reported_in_time():
    _, (silent, seconds, late_s) = run_on_ranks(2, hear_of, (1,), (1,))
    assert silent.ranks == ()
    assert silent.locations.startswith("pid ")
    assert silent.timeout_s == TIMEOUT_S
    assert seconds < TIMEOUT_S + late_s
