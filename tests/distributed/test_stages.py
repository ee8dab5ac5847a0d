"""Steps of several stages survive running out of memory. Every operation: `python -m tests.distributed.faults`."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.faults import sweep
from tests.distributed.models import ModelConfig
from tests.distributed.stages import STAGE_CASES, TRAIN, StageBench, StageCase, preferring_at_once
from tests.ranks import run_on_ranks
from torchtune_adaptive.limits.change import Change
from torchtune_adaptive.testing import FaultInjector

SAMPLED = 3  # operations of the stage that fails
CASES = [case for case in STAGE_CASES if case.stride == 1 or {"train policy", "hybrid"} & {*case.name.split(", ")}]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(", ", "-").replace(" ", "_"))
def test_a_stage_that_runs_out_of_memory_is_run_again_and_leaves_what_plain_fsdp_leaves(case: StageCase):
    for outcome in run_on_ranks(case.world_size, sweep, case, SAMPLED, timeout_s=150):
        assert outcome == (SAMPLED, SAMPLED, 0, 0)


def sums_of_a_step() -> tuple[list[float], list[float], str]:
    bench = StageBench(StageCase("sums", preferring_at_once, TRAIN, ModelConfig(dropout=0.0)))
    runner = bench.new_runner()
    told: list[Change] = []
    runner.on_change = told.append
    with FaultInjector(runner).fail_at(rank=1, step=3, operation=300):
        result = runner.run(bench.samples, step=3)
    mine = bench.work.stages[TRAIN].run(bench.samples)
    expected = torch.stack([mine.loss_sum, mine.sums["margin"]])
    dist.all_reduce(expected)
    assert told[0].stage == TRAIN
    return [result.loss_sum.item(), result.sums["margin"].item()], expected.tolist(), told[0].reason


def test_sums_are_those_of_all_ranks_and_messages_name_the_stage():
    for found, expected, reason in run_on_ranks(2, sums_of_a_step, timeout_s=100):
        assert found == pytest.approx(expected, rel=1e-5)
        assert reason.startswith("step 3, train policy: out of memory on rank 1 ")
