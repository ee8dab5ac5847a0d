"""The cause in the report of a hang is right, or absent."""

import re

import pytest

from tests.conftest import Rehearse

BEGINS = """
import torch, torch.distributed as dist

dist.init_process_group("nccl")
RANK = dist.get_rank()
torch.cuda.set_device(RANK)
x, counts, yes = torch.ones(3, device="cuda"), [3, 0, 3], [True, True, True]
"""
CASES = {
    "outer branch depends on the rank": (
        "for step in range(4):\n    if RANK == 0:\n        if step % 2 == 0:\n            dist.all_reduce(x)\n"
        "dist.barrier()",
        r"only on rank 0, in the branch `if RANK == 0` at train.py:9",
    ),
    "branch was taken without a call": (
        "for step in range(4):\n    if step % 2 == 0:\n        if RANK == 1:\n            continue\n"
        "        dist.all_reduce(x)\ndist.barrier()",
        r"`if RANK == 1` at train.py:10 ends in a continue, before the call at train.py:12: rank 1 left there",
    ),
    "early return": (
        "def evaluate(rows):\n    if not rows:\n        return\n    if dist.get_rank() == 2:\n        return\n"
        "    dist.all_reduce(x)\nevaluate(3)\ndist.broadcast(x, 0)",
        r"`if dist.get_rank\(\) == 2` at train.py:11 ends in a return, .*: rank 2 left there",
    ),
    "count": (
        "tokens = counts[RANK]\nif yes[0]:\n    if tokens > 0:\n        dist.all_reduce(x)\ndist.barrier()",
        "only on ranks 0, 2, in the branch `if tokens > 0`",
    ),
    "group of members": (
        "if RANK < 2:\n    group = dist.new_group([0, 1])\n    dist.all_reduce(x, group=group)\ndist.barrier()",
        "rank 2 must call new_group for this group, too, or all pass use_local_synchronization=True",
    ),
    "different roots": (
        "dist.broadcast(x, RANK)\nprint(x)",
        "the ranks pass different roots: rank 0 .* root 0, rank 1 .* root 1",
    ),
    "caught error": (
        "try:\n    if RANK == 1:\n        raise ValueError\n    dist.all_reduce(x)\nexcept ValueError:\n    pass\n"
        "dist.barrier()",
        r"`if RANK == 1` at train.py:9 ends in a raise, before the call at train.py:11: rank 1 left there",
    ),
    "two conditions": (
        "def train(first, second):\n    if first:\n        if second:\n            dist.all_reduce(x)\n"
        "    dist.barrier()\ntrain(*[(1, 1), (1, 0), (0, 1)][RANK])",
        "^$",
    ),
    "condition inside an expression": ("RANK == 0 and dist.all_reduce(x)\ndist.barrier()", "^$"),
}


@pytest.mark.parametrize("name", CASES)
def test_cause_is_right_or_absent(rehearse: Rehearse, name: str) -> None:
    script, cause = CASES[name]
    answer = rehearse(BEGINS + script, "--ranks", "3", "--together", status=3)
    assert re.search(cause, answer.found["hang"]["cause"]), answer.found["hang"]
