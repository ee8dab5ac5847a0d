"""A rank that stops answering is named on all others; one that is busy is not."""

import os
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.lateness import Lateness
from tests.ranks import run_on_ranks
from torchtune_adaptive.life.heartbeat import Heartbeat, Silent, own_connection

TIMEOUT_S = 4.0


class Told:
    """What a rank hears, and when."""

    def __init__(self) -> None:
        self.silent: list[Silent] = []
        self.heard = threading.Event()

    def __call__(self, silent: Silent) -> None:
        self.silent.append(silent)
        self.heard.set()
        threading.Event().wait(1)  # as long as a process takes to end


class Connection:
    """A connection to the store whose calls can be replaced."""

    def __init__(self, attempt: str, timeout_s: float) -> None:
        self.own = own_connection(attempt, timeout_s)
        self.set = self.own.set

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Connections(list[Connection]):
    """Those that a rank has made."""

    def __call__(self, attempt: str, timeout_s: float) -> Connection:
        self.append(Connection(attempt, timeout_s))
        return self[-1]

    def freeze(self) -> None:
        """From now on the rank beats no more, as if it were stopped."""
        self[-1].set = lambda *_: threading.Event().wait()


class Heard(NamedTuple):
    silent: Silent | None
    seconds: float
    late_s: float
    """How long the machine kept this rank from running."""


def hear_of(frozen_ranks: tuple[int, ...], hearing_ranks: tuple[int, ...]) -> Heard:
    """The connections of some ranks answer no more; what some hear, and after how long."""
    told, connections = Told(), Connections()
    hears = dist.get_rank() in hearing_ranks
    _heartbeat = Heartbeat(TIMEOUT_S, told if hears else lambda _: None, connections)
    time.sleep(1)
    with Lateness() as lateness:
        began = time.time()
        if dist.get_rank() in frozen_ranks:
            connections.freeze()
        assert told.heard.wait((10 if hears else 2) * TIMEOUT_S) == hears
        seconds = time.time() - began
    return Heard(told.silent[0] if told.silent else None, seconds, lateness.between(began, began + seconds))


@pytest.mark.smoke
def test_all_others_hear_the_name_of_a_silent_rank_in_time():
    """Here of a whole machine with all its ranks; tests/recipes/endings/test_silent_ranks.py has one alone."""
    ranks = run_on_ranks(4, hear_of, (2, 3), (0, 1))
    assert [rank.silent for rank in ranks[2:]] == [None, None]
    allowed_s = TIMEOUT_S + sum(rank.late_s for rank in ranks)
    for silent, seconds, _ in ranks[:2]:
        assert silent is not None
        assert silent.ranks == (2, 3)
        assert silent.where.startswith("pid ")
        assert silent.where.endswith(f" on {os.uname().nodename}")
        assert seconds < allowed_s


BUSY, DISCONNECTED, ENDED = 1, 2, 3


def seem_silent() -> list[Silent]:
    """Longer than the time-out: in what holds up the main thread, but not the process; after an error of the store,
    which answers all the while; and after the end."""
    told, connections, rank = Told(), Connections(), dist.get_rank()
    heartbeat = Heartbeat(TIMEOUT_S, told, connections)
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
    return told.silent


def _reset_by_peer(*_: object) -> None:
    raise RuntimeError("connection reset by peer")


def test_a_rank_that_is_busy_that_loses_its_connection_once_or_that_has_ended_as_it_should_is_not_silent():
    assert run_on_ranks(4, seem_silent) == [[]] * 4


def fail() -> list[Silent]:
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    if dist.get_rank() == 1:
        heartbeat.stop(as_it_should=False)
    else:
        assert told.heard.wait(10 * TIMEOUT_S)
    dist.barrier()
    return told.silent


def test_a_rank_that_has_failed_is_silent_to_a_peer_that_waits_for_it():
    waiting, failed = run_on_ranks(2, fail)
    assert [each.ranks for each in waiting[:1]] == [(1,)]
    assert failed == []


def test_a_store_that_does_not_answer_is_silent_too_and_within_the_time():
    _, (silent, seconds, late_s) = run_on_ranks(2, hear_of, (1,), (1,))
    assert silent.ranks == ()
    assert silent.where.startswith("pid ")
    assert silent.seconds == TIMEOUT_S
    assert seconds < TIMEOUT_S + late_s
