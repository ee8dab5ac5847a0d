"""A little of what `make crash` does to runs; and that its trap strikes where it was told to."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import RankFailed, run_on_ranks
from tests.recipes.crash import trap
from tests.recipes.crash.plans import (
    Plan,
    Session,
    one_of_each,
    random_operations,
)
from tests.recipes.crash.points import (
    START,
    Order,
    Point,
)
from tests.recipes.crash.variants import ASYNC, FULL
from tests.recipes.crash.victims import struck_at


@pytest.mark.parametrize(
    ("plan", "least_killed"),  # fewer than are aimed at: what comes last may find a run that is done
    [
        (Plan("one of each operation", FULL, one_of_each), 5),
        (Plan("sample", ASYNC, random_operations(3, ranks=2)), 2),
    ],
    ids=str,
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    plan: Plan, least_killed: int, tmp_path: Path
) -> None:
    tally = Session(tmp_path, 0, time.monotonic() + 150).follow(plan)
    assert tally.good, "\n".join([tally.summary(), *tally.details()])
    assert tally.killed >= least_killed, tally.summary()


def change_files(room: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, room / "draft.pt")
    with (room / "draft.json").open("w") as file:
        file.write("0123456789")
        file.flush()
        os.fsync(file.fileno())
    os.replace(room / "draft.json", room / "manifest.json")
    (room / "latest").symlink_to("manifest.json")


SAVE, WRITE, LINK = 1, 2, 5
"""Which of the operations these are."""


def trapped(order: Order) -> None:
    trap.install(order, 0)
    change_files(Path(order.watched))


def spring(folder: Path, point: Point) -> Path:
    room = folder / "room"
    room.mkdir(parents=True)
    with pytest.raises(RankFailed, match="died"):
        run_on_ranks(1, trapped, Order(point, str(room), str(folder / "notes"), after_step=0), in_group=False)
    assert struck_at(folder / "notes")
    return room


def test_the_trap_strikes_where_it_was_told_to(tmp_path: Path) -> None:
    for at, name, whole in ((SAVE, "draft.pt", 4000), (WRITE, "draft.json", 10)):
        torn = spring(tmp_path / name, Point(START, at, torn=True))
        assert 0 < (torn / name).stat().st_size < whole
    cut = spring(tmp_path / "cut", Point(START, LINK, cut=True))
    assert sorted(path.name for path in cut.iterdir()) == ["draft.pt", "manifest.json"]
    assert (cut / "draft.pt").stat().st_size == 0, "it was not synced"
    assert (cut / "manifest.json").read_text() == "0123456789"
