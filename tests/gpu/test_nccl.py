"""Steps of several ranks recover over NCCL, with one GPU for each rank or with all on one GPU."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.faults.scenarios import SCENARIOS, Scenario
from tests.distributed.faults.sweeps import Outcome, sweep
from tests.distributed.models import use_gpu
from tests.ranks import run_on_ranks

SAMPLED = 8  # operations of a step
CASES_OVER_NCCL = (
    SCENARIOS["plain"],
    replace(SCENARIOS["plain"], name="plain, 4 ranks", world_size=4),
    SCENARIOS["hybrid"],
    SCENARIOS["tensor parallel"],
    SCENARIOS["tensor parallel and sharded"],
)


def sweep_over_nccl(case: Scenario, folder: str) -> Outcome:
    os.environ["NULL_CUDA_RECORD"] = folder  # on a null device, to split communicators
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30 allows several ranks on one GPU
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timedelta(seconds=120))
    use_gpu()
    return sweep(case, SAMPLED)


@pytest.mark.parametrize("case", CASES_OVER_NCCL, ids=lambda case: case.name)
def test_gradient_after_recovery_over_nccl_is_bitwise_that_of_plain_fsdp(
    cuda: str, case: Scenario, tmp_path: Path
) -> None:
    """On a null device, gradients are not compared."""
    given = (case, str(tmp_path))
    for outcome in run_on_ranks(case.world_size, sweep_over_nccl, *given, timeout_s=60, in_group=False):
        assert outcome == (SAMPLED, SAMPLED, 0, 0)
