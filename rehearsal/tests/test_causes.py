"""The cause in the report of a hang is right, or absent."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_rehearsal import rehearse
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.report.verdict import Outcome
from tests.known_bugs import BEGINS, BUGS
from tests.processes import skip_without_null_device

CASES = {
    "outer branch depends on the rank": (
        "for step in range(4):\n    if RANK == 0:\n        if step % 2 == 0:\n            dist.all_reduce(x)\n"
        "dist.barrier()",
        r"only on rank 0, in the branch `if RANK == 0` at train.py:12",
    ),
    "branch was taken without a call": (
        "for step in range(4):\n    if step % 2 == 0:\n        if RANK == 1:\n            continue\n"
        "        dist.all_reduce(x)\ndist.barrier()",
        r"`if RANK == 1` at train.py:13 ends in a continue, before the call at train.py:15: rank 1 left there",
    ),
    "early return": (
        "def evaluate(rows):\n    if not rows:\n        return\n    if dist.get_rank() == 2:\n        return\n"
        "    dist.all_reduce(x)\nevaluate(3)\ndist.broadcast(x, 0)",
        r"`if dist.get_rank\(\) == 2` at train.py:14 ends in a return, .*: rank 2 left there",
    ),
    "count": (
        "tokens = counts[RANK]\nif yes[0]:\n    if tokens > 0:\n        dist.all_reduce(x)\ndist.barrier()",
        "only on ranks 0, 2, in the branch `if tokens > 0`",
    ),
    "group of members": (
        "if RANK < 2:\n    group = dist.new_group([0, 1])\n    dist.all_reduce(x, group=group)\ndist.barrier()",
        "rank 2 must call new_group for this group, too",
    ),
    "group of members that synchronize locally": (
        "if RANK < 2:\n    group = dist.new_group([0, 1], use_local_synchronization=True)\ndist.barrier()",
        "rank 2 must call new_group for this group, too",
    ),
    "loop that a rank did not reach": (
        "box = [None]\ntry:\n    if RANK == 0:\n        open('missing.json')\n    dist.broadcast_object_list(box)\n"
        "except OSError:\n    pass\nfor _ in range(2):\n    dist.all_reduce(x)",
        "^$",
    ),
    "monitored barrier": (
        "group = dist.new_group(backend='gloo')\nif RANK != 1:\n    dist.monitored_barrier(group)\ndist.all_reduce(x)",
        "only on ranks 0, 2, in the branch `if RANK != 1` at train.py:12",
    ),
    "different roots": (
        "dist.broadcast(x, RANK)\nprint(x)",
        "the ranks pass different roots: rank 0 .* root 0, rank 1 .* root 1",
    ),
    "different types": (
        "dist.all_reduce(x.double() if RANK else x)",
        "different types: rank 0 all_reduce of 64 float32, sum, rank 1 all_reduce of 64 float64",
    ),
    "caught error": (
        "try:\n    if RANK == 1:\n        raise ValueError\n    dist.all_reduce(x)\nexcept ValueError:\n    pass\n"
        "dist.barrier()",
        r"`if RANK == 1` at train.py:12 ends in a raise, before the call at train.py:14: rank 1 left there",
    ),
    "two conditions": (
        "def train(first, second):\n    if first:\n        if second:\n            dist.all_reduce(x)\n"
        "    dist.barrier()\ntrain(*[(1, 1), (1, 0), (0, 1)][RANK])",
        "^$",
    ),
    "condition inside an expression": ("RANK == 0 and dist.all_reduce(x)\ndist.barrier()", "^$"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RehearsalResult]]:
    """Return a function that rehearses a script on this many ranks, in one folder, so that torch is imported once."""
    skip_without_null_device()
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("causes"))

    def rehearse_script(script: str, ranks: int, once: bool = True) -> RehearsalResult:
        Path("train.py").write_text(BEGINS + script)
        return rehearse("train.py", ranks=ranks, together=True, once=once, quiet=True)

    yield rehearse_script
    os.chdir(before)


@pytest.mark.parametrize("name", CASES)
def test_cause_is_right_or_absent(run: Callable[..., RehearsalResult], name: str) -> None:
    script, cause = CASES[name]
    found = run(script, 3)
    assert found.outcome is Outcome.HANGS, found.verdict()
    assert re.search(cause, found.hang["cause"]), found.hang


@pytest.mark.parametrize("name", BUGS)
def test_known_bug_is_found_and_its_fix_is_not(run: Callable[..., RehearsalResult], name: str) -> None:
    bug = BUGS[name]
    found = run(bug.script, bug.ranks)
    assert found.verdict().startswith(bug.verdict), found.verdict()
    assert re.search(bug.cause, found.hang.get("cause", "")), found.hang
    assert bug.script.count(bug.fixed[0]) == 1
    fixed = run(bug.script.replace(*bug.fixed), bug.ranks)
    assert fixed.fits, (fixed.verdict(), fixed.output)


SPIKE = """
for step in range(4):
    loss = layer(x).mean()
    {first}
    if loss.item() > 10:
        {then}
    dist.all_reduce(x)
"""


@pytest.mark.parametrize(
    ("first", "then", "hangs"),
    [
        ("", "continue", True),
        ("loss = loss.detach()\n    dist.all_reduce(loss)", "continue", False),
        ("", "print(loss.item())", False),
    ],
    ids=["own value", "all-reduced", "only printed"],
)
def test_rank_that_decides_by_its_own_value_is_found(
    run: Callable[..., RehearsalResult], first: str, then: str, hangs: bool
) -> None:
    found = run(SPIKE.format(first=first, then=then), 2, once=False)
    assert found.fits, (found.verdict(), found.output)
    assert ("hangs if one rank alone reads other values" in found.verdict()) == hangs == bool(found.hang_of_one)
    assert not hangs or found.hang_of_one["waits"][0]["ranks"] == [0]


MESH = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (128, 8), mesh_dim_names=("dp", "tp"))
for step in range(2):
    dist.all_reduce(x, group=mesh.get_group("tp"))
    if not ({skips}):
        dist.all_reduce(x, group=mesh.get_group("dp"))
    dist.all_reduce(x)
"""


@pytest.mark.parametrize(
    ("skips", "hangs"),
    [("RANK >= 1016", True), ("RANK == 0 and step == 1", True), ("step == 1", False), ("RANK == 517", False)],
    ids=["last replica", "rank 0", "all ranks", "rank that does not run"],
)
def test_representatives_stand_for_1024_ranks(run: Callable[..., RehearsalResult], skips: str, hangs: bool) -> None:
    found = run(MESH.format(skips=skips), 1024)
    ran = [each["rank"] for each in found.rank_peaks]
    assert ran == [0, 4, 7, 512, 516, 519, 1016, 1020, 1023]
    assert (found.outcome is Outcome.HANGS) == hangs, found.verdict()
    assert (found.kinds > 1) == hangs
    assert "9 of 1,024 ranks ran (ranks 0, 4, 7, 512, 516, 519, 1016, 1020, 1023)" in found.as_text()


AGREE = """
import tempfile
from torch.distributed import checkpoint
from torch.distributed.algorithms.join import Join
model, told, count = DistributedDataParallel(layer), [RANK], torch.tensor(3 + RANK, device="cuda")
folder = [tempfile.mkdtemp() if RANK == 0 else None]
dist.broadcast_object_list(folder)
checkpoint.save({"x": x}, checkpoint_id=folder[0])
dist.broadcast_object_list(told)
dist.all_reduce(count, dist.ReduceOp.MIN)
with Join([model]):
    for _ in range(count.item() + told[0] + RANK % 2):
        model(x).sum().backward()
"""


def test_representatives_decide_by_values_of_each_other(run: Callable[..., RehearsalResult]) -> None:
    found = run(AGREE, 1024)
    assert found.fits, (found.verdict(), found.output)
    assert [each["rank"] for each in found.rank_peaks] == [0, 512, 1023]
