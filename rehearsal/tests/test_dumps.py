"""Dumps of NCCL's flight recorder, written by torch on null devices, have the report of a rehearsal."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_rehearsal.device import environment
from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.hangs.dumps import read_dumps
from tests.processes import skip_without_null_device

SCRIPT = """
import os, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_nccl_trace, _dump_nccl_trace_json

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x, pair = torch.ones(4, device="cuda"), dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(x, group=pair)
if rank == 0:
    dist.broadcast(x, 0)
elif rank == 1:
    dist.all_reduce(x)
dist.isend(x, 1 - rank, group=pair)
open(f"pickle_{rank}", "wb").write(_dump_nccl_trace())
open(f"json_{rank}.json", "wb").write(_dump_nccl_trace_json())
os._exit(0)
"""


@pytest.mark.parametrize("prefix", ["pickle_", "json_"])
def test_dumps_of_torch_show_who_waits_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    skip_without_null_device()
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    variables = {**environment(devices=2), "TORCH_NCCL_TRACE_BUFFER_SIZE": "100", "TORCH_DIST_USE_NCCL2": "0"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    subprocess.run(torchrun, env={**os.environ, **variables}, check=True, timeout=200)
    ranks, _, hang = read_dumps(prefix)
    first, second = sorted(hang["waits"], key=lambda each: each["ranks"])[:2]
    assert (ranks, first["ranks"], first["call"]) == (2, [0], "broadcast of 4 float")
    assert (second["ranks"], second["call"]) == ([1], "all_reduce of 4 float")
    if prefix == "pickle_":  # JSON has no lines
        assert first["lines"] == [str(tmp_path / "train.py:12")]
        assert "in the branch `if rank == 0`" in hang["cause"]


def entry(number: int, operation: str = "all_reduce") -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": f"nccl:{operation}", "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "completed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "waiting"),
    [
        ([[3, 4, 5], [4, 5]], []),  # a full buffer has lost its first calls
        ([[1, 2], [1, 2, 3]], [[1]]),
    ],
)
def test_dumps_are_compared_by_the_numbers_of_calls(
    tmp_path: Path, ranks: list[list[int]], waiting: list[list[int]]
) -> None:
    for rank, numbers in enumerate(ranks):
        (tmp_path / f"trace_{rank}").write_text(json.dumps({"entries": [entry(each) for each in numbers]}))
    assert [each["ranks"] for each in read_dumps(str(tmp_path))[2].get("waits", [])] == waiting


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [Harmful()]}))
    with pytest.raises(ConfigError, match=r"is not a dump .* \(it names posix.mkdir"):
        read_dumps(str(tmp_path))
    assert not (tmp_path / "ran").exists()
