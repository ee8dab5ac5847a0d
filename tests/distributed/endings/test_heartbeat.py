"""A rank that stops answering is named on all others; one that is busy is not."""

import os
import threading
import time
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

from tests.lateness import Lateness
from tests.ranks import run_on_ranks
from torchtune_adaptive.comm.heartbeat import Heartbeat, Silent

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


class Heard(NamedTuple):
    silent: Silent | None
    seconds: float
    late_s: float
    """How long the machine kept this rank from running."""


def hear_of(silent_ranks: tuple[int, ...]) -> Heard:
    """Some ranks beat no more, as if they were stopped; what the others hear, and after how long."""
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    time.sleep(1)
    with Lateness() as lateness:
        began = time.time()
        if dist.get_rank() in silent_ranks:
            heartbeat._on_silence = lambda silent: None
            heartbeat._store = mock.Mock(set=mock.Mock(side_effect=lambda *_: threading.Event().wait()))
            time.sleep(2 * TIMEOUT_S)
        else:
            assert told.heard.wait(10 * TIMEOUT_S)
        seconds = time.time() - began
    return Heard(told.silent[0] if told.silent else None, seconds, lateness.between(began, began + seconds))


def test_all_others_hear_the_name_of_a_silent_rank_in_time():
    ranks = run_on_ranks(3, hear_of, (1,))
    assert ranks[1].silent is None
    allowed_s = TIMEOUT_S + sum(rank.late_s for rank in ranks)
    for silent, seconds, _ in (ranks[0], ranks[2]):
        assert silent is not None
        assert silent.ranks == (1,)
        assert silent.where.startswith("pid ")
        assert silent.where.endswith(f" on {os.uname().nodename}")
        assert seconds < allowed_s


def test_a_whole_machine_that_is_silent_is_named_with_all_its_ranks():
    heard = [rank.silent for rank in run_on_ranks(4, hear_of, (2, 3))]
    assert [silent and silent.ranks for silent in heard] == [(2, 3), (2, 3), None, None]


def lose_a_connection() -> list[Silent]:
    """Longer than the time-out after an error of the store, which answers all the while."""
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    if dist.get_rank() == 1:
        heartbeat._store = mock.Mock(set=mock.Mock(side_effect=RuntimeError("connection reset by peer")))
    time.sleep(2 * TIMEOUT_S)
    dist.barrier()
    heartbeat.stop()
    return told.silent


def test_a_rank_that_loses_its_connection_once_is_heard_on_the_next():
    assert run_on_ranks(2, lose_a_connection) == [[], []]


def end_while_looking() -> list[Silent]:
    """Rank 0 ends while it looks twice at all ranks, of which none is silent."""
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    if dist.get_rank() == 0:
        heartbeat._stopping.set()
        heartbeat._find_silent()
    time.sleep(TIMEOUT_S)
    heartbeat.stop()
    return told.silent


def test_a_rank_that_ends_while_it_looks_accuses_nobody():
    assert run_on_ranks(3, end_while_looking) == [[], [], []]


def be_busy() -> list[Silent]:
    """Longer than the time-out in what holds up the main thread, but not the process."""
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    if dist.get_rank() == 1:
        until = time.monotonic() + 1.5 * TIMEOUT_S
        while time.monotonic() < until:  # a slow dataset, in Python
            sum(range(10_000))
    dist.barrier()
    heartbeat.stop()
    return told.silent


def test_a_rank_that_is_only_busy_is_not_silent():
    assert run_on_ranks(2, be_busy) == [[], []]


def end_early() -> list[Silent]:
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    if dist.get_rank() == 1:
        heartbeat.stop()
    time.sleep(2 * TIMEOUT_S)
    heartbeat.stop()
    return told.silent


def test_a_rank_that_has_ended_as_it_should_is_not_silent():
    assert run_on_ranks(2, end_early) == [[], []]


def fail() -> list[Silent]:
    told = Told()
    heartbeat = Heartbeat(TIMEOUT_S, told)
    if dist.get_rank() == 1:
        heartbeat.stop(as_it_should=False)
        time.sleep(2 * TIMEOUT_S)
    else:
        assert told.heard.wait(10 * TIMEOUT_S)
    return told.silent


def test_a_rank_that_has_failed_is_silent_to_a_peer_that_waits_for_it():
    waiting, failed = run_on_ranks(2, fail)
    assert [each.ranks for each in waiting[:1]] == [(1,)]
    assert failed == []


def lose_the_store() -> Heard:
    told = Told()
    with Lateness() as lateness:
        heartbeat = Heartbeat(TIMEOUT_S, told)
        began = time.time()
        if dist.get_rank() == 1:
            heartbeat._store = mock.Mock(set=mock.Mock(side_effect=lambda *_: threading.Event().wait()))
            assert told.heard.wait(10 * TIMEOUT_S)
        else:
            told.heard.wait(2 * TIMEOUT_S)
        seconds = time.time() - began
    return Heard(told.silent[0] if told.silent else None, seconds, lateness.between(began, began + seconds))


def test_a_store_that_does_not_answer_is_silent_too_and_within_the_time():
    _, (silent, seconds, late_s) = run_on_ranks(2, lose_the_store)
    assert silent.ranks == ()
    assert silent.where.startswith("pid ")
    assert silent.seconds == TIMEOUT_S
    assert seconds < TIMEOUT_S + late_s
