"""A part of `make crash`; and tests that its hook strikes at the requested operation."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import RankFailed, run_on_ranks
from tests.recipes.crash import kill_hook
from tests.recipes.crash.child_runs import struck_at
from tests.recipes.crash.kill_points import (
    START,
    Order,
    Point,
)
from tests.recipes.crash.plans import (
    Plan,
    one_of_each,
    random_operations,
)
from tests.recipes.crash.session import Session
from tests.recipes.crash.variants import FULL, Variant


@pytest.mark.parametrize(
    ("plan", "least_killed"),  # fewer than planned: the run may finish before the last points
    [
        (Plan("one of each operation", FULL, one_of_each), 5),
        (Plan("sample", Variant("full", 2), random_operations(3, ranks=2)), 2),
    ],
    ids=str,
)
def test_run_killed_repeatedly_ends_like_an_undisturbed_run(plan: Plan, least_killed: int, tmp_path: Path) -> None:
    tally = Session(tmp_path, 0, time.monotonic() + 150).follow(plan)
    assert tally.good, "\n".join([tally.summary(), *tally.details()])
    assert tally.killed >= least_killed, tally.summary()


def change_files(room: Path) -> None:
    """Perform one of each operation of a save."""
    with (room / "draft.pt").open("wb") as file:
        torch.save({"weight": torch.ones(1000)}, file)
    with (room / "draft.json").open("w") as file:
        file.write("0123456789")
        file.flush()
        os.fsync(file.fileno())
    os.replace(room / "draft.json", room / "manifest.json")
    (room / "latest").symlink_to("manifest.json")
    (room / "old" / "inner").mkdir(parents=True)
    shutil.rmtree(room / "old")
    (room / "draft.pt").unlink()


OPERATIONS = [
    *("write room/draft.pt", "write room/draft.json", "fsync room/draft.json", "rename room/draft.json"),
    *("link room/latest", "mkdir room/old/inner", "mkdir room/old", "mkdir room/old/inner"),
    *("rmdir room/old/inner", "rmdir room/old", "unlink room/draft.pt"),
]


def hooked(order: Order) -> None:
    kill_hook.install(order, 0)
    change_files(Path(order.watched) / "room")


def run_hooked(tmp_path: Path, point: Point | None) -> Path:
    watched, notes = tmp_path / "watched", tmp_path / "notes"
    (watched / "room").mkdir(parents=True)
    order = Order(point, str(watched), str(notes), after_step=0)
    if point is None:
        run_on_ranks(1, hooked, order, in_group=False)
    else:
        with pytest.raises(RankFailed, match="died"):
            run_on_ranks(1, hooked, order, in_group=False)
        assert struck_at(notes)
    return watched / "room"


def test_hook_counts_every_operation(tmp_path: Path) -> None:
    run_hooked(tmp_path, None)
    lines = (tmp_path / "notes" / "operations0").read_text().splitlines()
    assert lines == [f"start:{number} {label}" for number, label in enumerate(OPERATIONS, start=1)]


@pytest.mark.parametrize(
    ("label", "left"),
    [
        ("write room/draft.pt", []),
        ("rename room/draft.json", ["draft.json", "draft.pt"]),
        ("link room/latest", ["draft.pt", "manifest.json"]),
        ("rmdir room/old", ["draft.pt", "latest", "manifest.json", "old"]),
    ],
)
def test_hook_kills_before_the_operation(label: str, left: list[str], tmp_path: Path) -> None:
    room = run_hooked(tmp_path, Point(START, OPERATIONS.index(label) + 1))
    assert sorted(path.name for path in room.iterdir()) == left


@pytest.mark.parametrize(
    ("label", "name"), [("write room/draft.pt", "draft.pt"), ("write room/draft.json", "draft.json")]
)
def test_hook_kills_with_half_of_a_file_written(label: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = (run_hooked(tmp_path / "whole", None) / "manifest.json").stat().st_size if name == "draft.json" else 4000
    (tmp_path / "torn").mkdir()
    room = run_hooked(tmp_path / "torn", Point(START, OPERATIONS.index(label) + 1, torn=True))
    assert 0 < (room / name).stat().st_size < whole


def test_simulated_power_failure_empties_unsynced_files(tmp_path: Path) -> None:
    room = run_hooked(tmp_path, Point(START, OPERATIONS.index("mkdir room/old") + 1, cut=True))
    assert (room / "draft.pt").stat().st_size == 0
    assert (room / "manifest.json").read_text() == "0123456789"
