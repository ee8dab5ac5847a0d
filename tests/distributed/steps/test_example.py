import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked_commands import run_forked

ROOT = Path(__file__).parents[3]


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")
ON_FOUR = (*TORCHRUN[:-1], "--nproc_per_node=4")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0")
TRAINER, HALVED = "transformers_trainer.py --memory_limit 5MiB", "microbatch 16 -> 8"
RECOVERING = {
    "plain": (TORCHRUN, "plain_fsdp2.py", "torch", f"step 1: out of memory on rank 1 .*{HALVED}", 8),
    # torchtitan 0.3.0 is not a dependency: see docs/torchtitan.md
    "torchtitan": (ON_FOUR, "torchtitan_models.py llama", "torchtitan", "on rank 3 .*microbatch 8 -> 4", 6),
    "model of transformers": (TORCHRUN, "transformers_fsdp2.py", "transformers", "on rank 1 .*microbatch 8 -> 4", 6),
    "torchrun": (TORCHRUN, TRAINER, "transformers", HALVED, 3),
    "accelerate launch": (ACCELERATE, TRAINER, "accelerate", HALVED, 3),
    "FSDP2 without accelerate": (TORCHRUN, f"{TRAINER} --fsdp2", "transformers", HALVED, 3),
    "TRL": (TORCHRUN, "sft_trl.py --memory_limit 24MiB", "trl", HALVED, 3),
}
"""Launcher, example, the package that it needs, its recovery and its steps."""


def output_of(example: str, launcher: Sequence[str] = TORCHRUN) -> str:
    run = run_forked([sys.executable, "-m", *launcher, *f"examples/{example}".split()], cwd=ROOT, timeout_s=120)
    assert run.status == 0, run.output
    return run.output


@pytest.mark.smoke("plain", "torchrun")
@pytest.mark.parametrize("name", RECOVERING)
def test_example_recovers_from_running_out_of_memory_and_learns(name: str) -> None:
    launcher, example, package, recovery, steps = RECOVERING[name]
    pytest.importorskip(package)
    output = output_of(example, launcher)
    assert re.search(f"{recovery} rows, step repeated", output)
    losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?(\d+\.\d+)", output)]
    assert len(losses) == steps
    assert losses[-1] < losses[0]


def test_batch_size_example_trains_with_the_size_it_found():
    output = output_of("find_batch_size.py")
    assert re.search(r"batch search · linear · 64 tokens · budget 23\.8 MiB a rank", output)
    assert re.search(r"^  8 .*<- chosen \(.* fit, rounded down to a power of two; .*\)$", output, re.MULTILINE)
    assert re.findall(r"step (\d): .*, 8 rows, out of memory 0 times", output) == ["1", "2", "3"]


def test_library_page_shows_the_example():
    assert (ROOT / "examples" / "plain_fsdp2.py").read_text() in (ROOT / "docs" / "library.md").read_text()
