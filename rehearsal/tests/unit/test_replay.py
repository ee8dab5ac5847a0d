"""A replay finds calls of NCCL that would hang, in recordings of small programs."""

from pathlib import Path

import pytest

from gpu_rehearsal.hangs.problems import problems_in
from gpu_rehearsal.hangs.replay import Recording, Replay

Line = tuple[object, ...]
ONE, TWO = "stream 1", "stream 2"


def create(group: str, rank: int) -> Line:
    return "host", group, rank, 2, "creates it", "", ""


def reduce(group: str, stream: str, launch: int, count: int = 8, *, at: str = "train.py:5") -> Line:
    return "call", group, "", "", f"all_reduce of {count} float32, sum", at, stream, launch


def send(peers: str, launch: int, *, verb: str = "sends") -> Line:
    return "call", "a", peers, verb, "a message of 4 int64", "", ONE, launch


def problems_of(folder: Path, *ranks: list[Line]) -> list[str]:
    for rank, lines in enumerate(ranks):
        (folder / f"rank{rank}").write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    report = Replay(folder)
    assert len(report.recordings) == len(ranks)
    return problems_in(report)


def both(*lines: Line) -> tuple[list[Line], ...]:
    return tuple([create("a", rank), create("b", rank), *lines] for rank in range(2))


def test_line_that_was_cut_inside_a_character_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank0").write_bytes("call\ta\t\t\tbarrier\té".encode()[:-1] + b"\t0\t0\n")
    assert Recording(tmp_path / "rank0").name == "rank 0"


STREAM_WAITS = ("stream", ONE, 0)


def test_call_that_one_rank_does_not_make_is_found(tmp_path: Path) -> None:
    one, other = both()
    assert problems_of(tmp_path, one, [*other, reduce("a", ONE, 0)]) == [
        "communicator of rank 0 and rank 1, call 1: rank 0: nothing; rank 1: all_reduce of 8 float32, sum at train.py:5"
    ]


def test_rank_that_does_not_create_a_communicator_is_found(tmp_path: Path) -> None:
    lines = [create("a", 0), reduce("a", ONE, 0), STREAM_WAITS]
    assert problems_of(tmp_path, lines) == ["only rank 0 create a communicator of 2 ranks"]


@pytest.mark.parametrize(("second", "hangs"), [(ONE, True), (TWO, False)])
def test_opposite_orders_of_communicators_hang_on_one_stream_only(tmp_path: Path, second: str, hangs: bool) -> None:
    one, _ = both(reduce("a", ONE, 0, at="a.py:1"), reduce("b", second, 1))
    _, other = both(reduce("b", second, 0, at="b.py:2"), reduce("a", ONE, 1))
    expected = (
        "deadlock: rank 0 waits in call 1 of rank 0 and rank 1: all_reduce of 8 float32, sum at a.py:1; "
        "rank 1 waits in call 1 of rank 0 and rank 1: all_reduce of 8 float32, sum at b.py:2"
    )
    assert problems_of(tmp_path, one, other) == [expected] * hangs


def test_event_wait_orders_streams(tmp_path: Path) -> None:
    """TWO waits for the call on ONE, so two streams hang as one does."""

    def ordered(first: str, second: str) -> list[Line]:
        return [reduce(first, ONE, 0), ("record", ONE, "event"), ("wait", TWO, "event"), reduce(second, TWO, 1)]

    one, other = both()
    assert problems_of(tmp_path, one + ordered("a", "b"), other + ordered("a", "b")) == []
    assert "deadlock" in problems_of(tmp_path, one + ordered("a", "b"), other + ordered("b", "a"))[0]


@pytest.mark.parametrize(
    "waits",
    [STREAM_WAITS, ("event", "done", 0), ("device", 0, 0), ("host", "hosts", -1, 2, "barrier", "", "")],
    ids=lambda each: each[0],
)
def test_synchronization_between_calls_in_different_orders_hangs(tmp_path: Path, waits: Line) -> None:
    one, other = both()
    one += [reduce("a", ONE, 0), ("record", ONE, "done"), waits, reduce("b", TWO, 1)]
    assert problems_of(tmp_path, one, [*other, reduce("b", TWO, 0), reduce("a", ONE, 1), waits]) == []
    other += [reduce("b", TWO, 0), ("stream", TWO, 0), reduce("a", ONE, 1), waits]
    assert "deadlock" in problems_of(tmp_path, one, other)[0]


def test_calls_of_one_communicator_run_in_their_order_on_all_streams(tmp_path: Path) -> None:
    one, other = both()
    one += [reduce("b", ONE, 0), reduce("a", ONE, 1), reduce("a", TWO, 2)]
    other += [reduce("a", TWO, 0), ("stream", TWO, 0), reduce("a", TWO, 1), reduce("b", ONE, 2)]
    assert "deadlock" in problems_of(tmp_path, one, other)[0]


@pytest.mark.parametrize(("grouped", "hangs"), [(True, False), (False, True)])
def test_ranks_that_both_send_first_hang_unless_grouped(tmp_path: Path, grouped: bool, hangs: bool) -> None:
    one, other = both()
    one += [send("0>1", 0), send("1>0", 0 if grouped else 1, verb="receives")]
    other += [send("1>0", 0), send("0>1", 0 if grouped else 1, verb="receives")]
    assert any("deadlock" in each for each in problems_of(tmp_path, one, other)) is hangs


def test_half_of_a_line_at_the_end_is_ignored(tmp_path: Path) -> None:
    """A recording may be read while it is written."""
    one, other = both(reduce("a", ONE, 0))
    assert problems_of(tmp_path, [*one, ("call", "a")], other) == []
