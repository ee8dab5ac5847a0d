import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_plain_fsdp2_example_trains_on_with_less_memory_on_one_rank():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "examples/plain_fsdp2.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"step 1: out of memory on rank 1 .*microbatch 16 -> 8 rows, step repeated", run.stderr)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
