"""torchtitan's Trainer on null devices: calls of NCCL, and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from gpu_rehearsal.hangs.problems import problems_in
from gpu_rehearsal.hangs.replay import Replay

from tests.null.processes import null_processes, skip_without_null_device
from tests.null.recording import record_on_rank
from tests.titan.sweep import CASES, recovered_on_null

PLACES = 4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["TP × FSDP2", "HSDP, 2 batches"])
def test_ranks_issue_equal_calls_of_nccl_without_deadlock_when_one_runs_out_of_memory(
    name: str, tmp_path: Path
) -> None:
    skip_without_null_device()
    with null_processes() as on_null:
        arguments = str(tmp_path), "cuda:nccl,cpu:gloo", recovered_on_null, name, PLACES
        found = on_null(record_on_rank, *arguments, ranks=CASES[name].ranks, in_group=False, timeout_s=120)
    assert {*found} == {("ProcessGroupNCCL2", PLACES)}
    report = Replay(tmp_path)
    assert report.calls > 300
    assert problems_in(report) == []


def test_8b_model_on_8_gpus_has_the_peak_of_memory_that_it_has_in_torchtitan(tmp_path: Path) -> None:
    skip_without_null_device()
    config = "tests.titan.trainers"
    own, stock = (
        _rehearse(tmp_path, "--module", "torchtune_adaptive.titan", "--config", f"{config}.llama3_8b_on_random_tokens"),
        _rehearse(tmp_path, "--module", config, "--config", "llama3_8b_on_random_tokens"),
    )
    assert own == stock
    assert 35e9 < stock["allocated_bytes"] < stock["reserved_bytes"] < 50e9


def _rehearse(folder: Path, *flags: str) -> dict[str, int]:
    """Return the peaks of 2 steps on rank 0 of 8 H100s, with the allocator's setting in torchtitan's run_train.sh."""
    rehearse = [f"{Path(sys.executable).parent}/rehearse", "--once", "--steps", "2", "--ranks", "8", "--format", "json"]
    ran = subprocess.run(
        [*rehearse, "--", "-m", "torchtitan.train", *flags, "--dump_folder", str(folder)],
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        check=True,
        capture_output=True,
        text=True,
        timeout=900,
    )
    peaks: dict[str, int] = json.loads(ran.stdout)["rank_peaks"][0]
    return peaks
