"""A little of what `make crash` does to runs; and that it would notice what it is there to notice."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.ranks import RankFailed, run_on_ranks
from tests.recipes.crash import evidence, trap
from tests.recipes.crash.asked import faults_of_a_stop
from tests.recipes.crash.plans import (
    Plan,
    Scout,
    all_plans,
    one_of_each,
    random_operations,
)
from tests.recipes.crash.points import (
    INT,
    LAST_STEP,
    PROBE,
    START,
    STEP,
    TERM,
    TIME,
    TRAIN,
    Order,
    Point,
    parse_point,
)
from tests.recipes.crash.session import Session
from tests.recipes.crash.variants import ASYNC, FULL, STEPS, Variant
from tests.recipes.crash.victims import STOPPED, Life, struck_at
from torchtune_adaptive.checkpoints.store import MANIFEST_FILE
from torchtune_adaptive.report.journal import STEPS_FILE


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


@dataclass(frozen=True)
class Undisturbed(Scout):
    """As long as any."""

    def operations(self, stage: str) -> list[str]:
        return [f"write {stage}_{number}" for number in range(40)]


def cells(plan: Plan) -> Iterator[tuple[object, ...]]:
    """Which signal comes to whom, of how many ranks, in what."""
    for point in plan.aim(Undisturbed(Path(), 9000), random.Random(0)):
        assert not point.launcher or (plan.tune_run and (plan.variant.ranks > 1 or plan.launched)), str(plan)
        if point.asks:
            yield point.blow, point.launcher, plan.variant.ranks, point.stage


def test_signals_come_to_launcher_and_ranks_on_one_and_two_in_search_steps_saves_and_the_last_step() -> None:
    wanted = set(product((TERM, INT), (True, False), (1, 2), (PROBE, STEP, TRAIN, LAST_STEP)))
    assert wanted - {cell for plan in all_plans() for cell in cells(plan)} == set()


def change_files(room: Path) -> None:
    """One of each operation that a save may consist of."""
    torch.save({"weight": torch.ones(1000)}, room / "draft.pt")
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
    *("save room/draft.pt", "write room/draft.json", "fsync room/draft.json", "rename room/draft.json"),
    *("link room/latest", "mkdir room/old/inner", "mkdir room/old", "mkdir room/old/inner"),
    *("rmdir room/old/inner", "rmdir room/old", "unlink room/draft.pt"),
]


def trapped(order: Order) -> None:
    trap.install(order, 0)
    change_files(Path(order.watched) / "room")


def spring(tmp_path: Path, point: Point | None) -> Path:
    watched, notes = tmp_path / "watched", tmp_path / "notes"
    (watched / "room").mkdir(parents=True)
    order = Order(point, str(watched), str(notes), after_step=0)
    if point is None:
        run_on_ranks(1, trapped, order, in_group=False)
    else:
        with pytest.raises(RankFailed, match="died"):
            run_on_ranks(1, trapped, order, in_group=False)
        assert struck_at(notes)
    return watched / "room"


def test_the_trap_counts_every_operation(tmp_path: Path) -> None:
    spring(tmp_path, None)
    lines = (tmp_path / "notes" / "operations0").read_text().splitlines()
    assert lines == [f"start:{number} {label}" for number, label in enumerate(OPERATIONS, start=1)]


@pytest.mark.parametrize(
    ("label", "left"),
    [
        ("save room/draft.pt", []),
        ("rename room/draft.json", ["draft.json", "draft.pt"]),
        ("link room/latest", ["draft.pt", "manifest.json"]),
        ("rmdir room/old", ["draft.pt", "latest", "manifest.json", "old"]),
    ],
)
def test_the_trap_kills_before_the_operation(label: str, left: list[str], tmp_path: Path) -> None:
    room = spring(tmp_path, Point(START, OPERATIONS.index(label) + 1))
    assert sorted(path.name for path in room.iterdir()) == left


@pytest.mark.parametrize(
    ("label", "name"), [("save room/draft.pt", "draft.pt"), ("write room/draft.json", "draft.json")]
)
def test_the_trap_kills_with_half_of_a_file_written(label: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = (spring(tmp_path / "whole", None) / "manifest.json").stat().st_size if name == "draft.json" else 4000
    (tmp_path / "torn").mkdir()
    room = spring(tmp_path / "torn", Point(START, OPERATIONS.index(label) + 1, torn=True))
    assert 0 < (room / name).stat().st_size < whole


def test_where_the_power_fails_what_was_not_synced_is_empty(tmp_path: Path) -> None:
    room = spring(tmp_path, Point(START, OPERATIONS.index("mkdir room/old") + 1, cut=True))
    assert (room / "draft.pt").stat().st_size == 0
    assert (room / "manifest.json").read_text() == "0123456789"


@pytest.mark.parametrize(
    "text", ["train:17", "start:3/torn", "train:4/cut", "time:1250/rank1", "step:2/TERM", "last-save:1/INT/launcher"]
)
def test_a_point_is_read_as_it_is_printed(text: str) -> None:
    assert str(parse_point(text)) == text


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Path, Path]:
    """What two runs have left that are the same, as far as is looked at."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        last = folder / "out" / evidence.LAST_EPOCH
        last.mkdir(parents=True)
        torch.save({"weight": torch.ones(2)}, last / "model.bin")
        (folder / "out" / "step_18").mkdir()
        for checkpoint in (last, folder / "out" / "step_18"):
            (checkpoint / MANIFEST_FILE).touch()
        (folder / "out" / "latest").symlink_to(last.name)
        steps = range(1, STEPS + 1)
        (folder / "out" / STEPS_FILE).write_text("".join(f'{{"step": {step}}}\n' for step in steps))
        line = '{{"step": {}, "loss": 1.0, "lr": 0.1, "grad_norm": 2.0}}\n'
        (folder / "log.jsonl").write_text("".join(line.format(step) for step in steps))
    assert evidence.differences(*folders) == []
    return folders


def test_another_weight_is_noticed(finished: tuple[Path, Path]) -> None:
    torch.save({"weight": torch.tensor([1.0, 1 + 2**-20])}, finished[0] / "out" / evidence.LAST_EPOCH / "model.bin")
    assert "1 of 1 tensors differ" in evidence.differences(*finished)[0]


def test_checkpoints_that_pruning_has_left_or_taken_are_noticed(finished: tuple[Path, Path]) -> None:
    for name in ("step_14", "step_16"):
        shutil.copytree(finished[0] / "out" / "step_18", finished[0] / "out" / name)
    assert "checkpoints kept" in evidence.differences(*finished)[0]
    shutil.rmtree(finished[1] / "out" / "step_18")
    assert "checkpoints kept" in evidence.differences(finished[1], finished[0])[0]


def test_a_step_that_is_not_recorded_is_noticed(finished: tuple[Path, Path]) -> None:
    record = finished[0] / "out" / STEPS_FILE
    record.write_text(record.read_text().replace('{"step": 7}\n', ""))
    assert STEPS_FILE in evidence.differences(*finished)[0]


def test_another_loss_and_what_is_left_behind_are_noticed(finished: tuple[Path, Path]) -> None:
    log = finished[0] / "log.jsonl"
    log.write_text(log.read_text().replace('"step": 7, "loss": 1.0', '"step": 7, "loss": 1.1'))
    (finished[0] / "out" / ".saving").mkdir()
    assert evidence.differences(*finished) == ["figures differ from step 7 on", "left behind: .saving"]


def test_a_checkpoint_that_is_gone_is_noticed_unless_newer_ones_are_enough() -> None:
    before = {"step_2": 2, "step_4": 4}
    assert evidence.lost_to_pruning(before, {"step_4": 4, "epoch_0": 5}) == []
    assert evidence.lost_to_pruning(before, {"step_4": 4}) == ["step_2"]
    assert evidence.lost_to_pruning(before, {"step_2": 2, "epoch_0": 5}) == ["step_4"]


OUTPUT = (
    "SIGTERM: stopped after step {}; last checkpoint: /out/step_{}. "
    "To resume: tune run ... resume_from_checkpoint=auto\n"
)
UNSAVED = OUTPUT.replace("last checkpoint: /out/step_{}", "nothing is saved")
AT_STEP, LAUNCHED = Point(STEP, 1, blow=TERM), Point(STEP, 1, blow=INT, launcher=True)


def stop(output: str = OUTPUT.format(7, 7), *, cleanly: bool = True) -> Life:
    return Life(STOPPED, "step:1", output, cleanly=cleanly)


def test_a_stop_that_is_as_it_should_be_has_no_fault() -> None:
    assert list(faults_of_a_stop(AT_STEP, stop(), 7, 7)) == []
    assert list(faults_of_a_stop(LAUNCHED, stop(cleanly=False), 7, 7)) == []
    assert list(faults_of_a_stop(Point(TIME, 9, blow=TERM), stop("", cleanly=False), None, 4)) == []


@pytest.mark.parametrize(
    ("life", "trained", "saved", "fault"),
    [
        (stop(), 7, 6, "last checkpoint: step 6"),
        (stop(OUTPUT.format(6, 6)), 7, 7, "the last step was 7"),
        (stop(""), None, 4, "it says 0 times"),
        (stop(2 * OUTPUT.format(7, 7)), 7, 7, "it says 2 times"),
        (stop(f"SIGTERM again: ended immediately\n{OUTPUT.format(7, 7)}"), 7, 7, "taken for two"),
        (stop(cleanly=False), 7, 7, "the status is not 0"),
        (stop(OUTPUT.format(7, 7).replace("SIGTERM", "SIGINT")), 7, 7, "it was SIGINT"),
        (stop(OUTPUT.format(7, 7).replace("SIGTERM", "SIGTERM on rank 1")), 7, 7, "on rank 1"),
        (
            stop(UNSAVED.format(7)),
            7,
            7,
            "'nothing is saved'",
        ),
        (stop(OUTPUT.format(7, 7).replace("=auto", "=True")), 7, 7, "to go on with"),
    ],
)
def test_a_stop_that_has_lost_or_hidden_something_is_noticed(
    life: Life, trained: int | None, saved: int, fault: str
) -> None:
    assert fault in " ".join(faults_of_a_stop(AT_STEP, life, trained, saved))


@pytest.mark.parametrize(
    ("variant", "step", "safe"),
    [(FULL, 7, 6), (FULL, 6, 5), (FULL, 1, 0), (ASYNC, 7, 5), (ASYNC, 8, 5), (ASYNC, 9, 6), (ASYNC, 2, 0)],
)
def test_what_has_to_be_on_disk_is_the_save_that_training_has_waited_for(
    variant: Variant, step: int, safe: int
) -> None:
    """Saved is after steps 2, 4, 5, 6, 8, ..."""
    assert variant.safe_after(step) == safe
