"""Steps of torchtitan's models recover. `python -m tests.distributed.faults --case torchtitan` tries more places."""

import re
import sys
from pathlib import Path

import pytest

from tests.distributed.faults.meshes import TORCHTITAN_CASES
from tests.distributed.faults.sweeps import sweep
from tests.forked_commands import run_forked
from tests.ranks import run_on_ranks

pytest.importorskip("torchtitan", reason="needs torchtitan 0.3.0, which is not a dependency: see docs/torchtitan.md")

CASES = {case.name: case for case in TORCHTITAN_CASES}


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def test_gradients_after_a_recovery_are_bitwise_equal_to_an_undisturbed_run(name: str):
    for outcome in run_on_ranks(CASES[name].world_size, sweep, CASES[name], 4, timeout_s=120):
        assert outcome == (4, 4, 0, 0)


def test_example_recovers_with_less_memory_on_one_rank():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    example = [*launcher, "examples/torchtitan_models.py", "llama"]
    run = run_forked(example, cwd=Path(__file__).parents[3], timeout_s=120)
    assert run.status == 0, run.output
    assert re.search(r"step \d: out of memory on rank 3 .*microbatch 8 -> 4 rows, step repeated", run.output)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.output)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
