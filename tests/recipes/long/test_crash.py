"""A part of `make crash`; and tests that its hook strikes at the requested operation."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.ranks import RankFailed, run_on_ranks
from tests.recipes.crash import hook
from tests.recipes.crash.chain import follow
from tests.recipes.crash.hook import HUP, KILL, START, TERM, TWICE, Order, Point
from tests.recipes.crash.plans import (
    FULL,
    FULL_2,
    OPERATIONS,
    PPO,
    RANK_1,
    SEARCHED,
    Plan,
    at,
    at_the_start,
    in_a_save,
    in_a_step,
    in_the_last_save,
    in_the_last_step,
    in_the_search,
    one_of_each,
    scout,
)
from tests.recipes.crash.runs import KILLED, STOPPED, Variant

OTHERS = (
    *(("full", 2, limit) for limit in ("dropout", "growing")),
    *(("full", 1, "in backward"), ("lora", 1, "tokens and dropout"), ("lora", 2, "adapters")),
)
SIGNALLED = at(at_the_start, in_a_step, in_the_last_save, whom=(RANK_1,), blows=(TWICE, HUP))


@pytest.mark.smoke("full/2/searched forked signals-stopped-1", "full/2/dropout forked kills-killed-2")
@pytest.mark.parametrize(
    ("plan", "ended", "least"),  # fewer than planned: the run may finish before the last points
    [
        (Plan("one of each operation", FULL, one_of_each), KILLED, 5),
        (Plan("sample", FULL_2, at(*OPERATIONS[1:])), KILLED, 2),
        (Plan("signals", FULL_2, SIGNALLED), STOPPED, 4),
        (Plan("signals", SEARCHED, at(in_the_search, in_the_last_step, blows=(TERM,))), STOPPED, 1),
        # the second run resumes where batches grow, and the third within an epoch of grown batches
        *((Plan("kills", Variant(*variant), at(in_a_save, in_the_last_save)), KILLED, 2) for variant in OTHERS),
        (Plan("kills", PPO, at(in_a_step, in_the_last_save)), KILLED, 2),
        (Plan("both", Variant("full", 2, "validated"), at(in_a_step, in_a_save, blows=(KILL, TERM))), STOPPED, 2),
    ],
    ids=str,
)
def test_run_killed_or_stopped_repeatedly_ends_like_an_undisturbed_run(
    plan: Plan, ended: str, least: int, tmp_path: Path
) -> None:
    tally = follow(plan, scout(plan.variant, plan.way, tmp_path / "undisturbed"), tmp_path)
    assert tally.good, "\n".join([tally.summary(), *tally.faults])
    assert tally.counts[ended] >= least, tally.summary()


def hooked(order: Order) -> None:
    """Perform one of each operation of a save under the hook."""
    room = Path(order.watched) / "room"
    hook.install(order, 0)
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


OPERATIONS_OF_A_SAVE = [
    *("write room/draft.pt", "write room/draft.json", "fsync room/draft.json", "rename room/draft.json"),
    *("link room/latest", "mkdir room/old/inner", "mkdir room/old", "mkdir room/old/inner"),
    *("rmdir room/old/inner", "rmdir room/old", "unlink room/draft.pt"),
]


@pytest.mark.parametrize(
    ("label", "how", "left"),
    [
        ("write room/draft.pt", "", []),
        ("rename room/draft.json", "", ["draft.json", "draft.pt"]),
        ("link room/latest", "", ["draft.pt", "manifest.json"]),
        ("rmdir room/old", "", ["draft.pt", "latest", "manifest.json", "old"]),
        ("unlink room/draft.pt", "", ["draft.pt", "latest", "manifest.json"]),
        ("write room/draft.pt", "torn", ["draft.pt"]),
        ("write room/draft.json", "torn", ["draft.json", "draft.pt"]),
        ("mkdir room/old", "cut", ["draft.pt", "latest", "manifest.json"]),
    ],
)
def test_hook_counts_operations_and_kills_before_or_within_one_or_like_a_power_failure(
    label: str, how: str, left: list[str], tmp_path: Path
) -> None:
    point = Point(START, OPERATIONS_OF_A_SAVE.index(label) + 1, torn=how == "torn", cut=how == "cut")
    order = Order(point, str(tmp_path / "watched"), str(tmp_path / "notes"), after_step=0)
    (room := tmp_path / "watched" / "room").mkdir(parents=True)
    with pytest.raises(RankFailed, match="died"):
        run_on_ranks(1, hooked, order, in_group=False)
    assert f"{point.at} {label}" in order.struck_at()
    sizes = {path.name: path.stat().st_size for path in room.iterdir()}
    assert sorted(sizes) == left
    if how == "torn":
        assert 0 < sizes[Path(label).name] < (10 if "json" in label else 4000)
    if how == "cut":
        assert (sizes["draft.pt"], sizes["manifest.json"]) == (0, 10), "only the synced file is whole"
