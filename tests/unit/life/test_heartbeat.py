"""When a beat that does not change means that a rank is silent."""

from __future__ import annotations

from torchtune_adaptive.life.heartbeat import Silence, Silent


def test_silence_is_the_time_since_the_last_change() -> None:
    silence = Silence(interval_s=1.0)
    assert [silence.seconds("1", now) for now in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    assert silence.seconds("2", 13.5) == 0.0
    assert silence.seconds("2", 14.0) == 0.5


def test_who_was_away_himself_gives_the_others_time_to_come_back() -> None:
    silence = Silence(interval_s=1.0)
    silence.seconds("1", 0.0)
    assert silence.seconds("1", 3600.0) == 2.0


def test_the_message_names_ranks_and_where_they_are() -> None:
    assert str(Silent((3,), "pid 7 on node-b", 60)) == "rank 3 (pid 7 on node-b) has not responded for 60 s"
    assert str(Silent((2, 3), "x", 60)).startswith("ranks 2, 3 (x) have not responded")
    store = "the rendezvous store, hosted by rank 0 (pid 5 on node0) or its launcher, has not responded for 60 s"
    assert str(Silent((), "pid 5 on node0", 60)) == store
