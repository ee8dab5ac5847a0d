"""Compare a rehearsal over time with a run: two processes on null devices, which agree over gloo.

NCCL transfers no data on a null device, but the agreement is real: an out-of-memory error on one rank makes the other
repeat its step.
"""

import math
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpu_rehearsal.device import environment
from gpu_rehearsal.gpus import GPUS
from gpu_rehearsal.processes.start import rehearse_once
from gpu_rehearsal.recording.steps import StepRecorder
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.settings import RankSettings, overhead_of
from omegaconf import OmegaConf

from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.registry import config_files
from torchtune_adaptive.rehearsing import with_stand_ins

RANKS = 2
SIZES = ("model.num_layers=2", "model.embed_dim=1024", "model.intermediate_dim=4096", "model.max_seq_len=4096")
RUN = ("device=cuda", "use_maximum_batch_size=False", "gradient_accumulation_steps=1", "seed=3", "batch_size=16")
RECIPE = "adaptive_full_finetune_distributed"
GPU = GPUS["h100"]._replace(memory=4500 * 2**20)

MEDIAN, LONGEST = 100, 2000
DRAWN = 4099
"""A prime, so that each pass through the lengths groups them into different steps."""


def command(config: Path, *overrides: str) -> list[str]:
    """Return the command of one rank."""
    return ["-m", RECIPE, "--config", str(config), *overrides]


@contextmanager
def training() -> Iterator[Path]:
    """Yield a folder with a config that recovers from out-of-memory errors. Its samples vary in length, equally on both
    ranks, so that neither waits for the other's recovery."""
    drawn, spread = random.Random(0), math.log(LONGEST / MEDIAN) / 3.09
    lengths = [max(1, min(LONGEST, round(MEDIAN * math.exp(spread * drawn.gauss(0, 1))))) for _ in range(DRAWN)]
    with tempfile.TemporaryDirectory() as name:
        overrides = (*SIZES, *RUN, f"adaptive.sequence_length={LONGEST}", "adaptive.memory_limit=null")
        cfg = with_stand_ins(read_config(config_files()["adaptive/demo/full"], overrides), Path(name))
        cfg.dataset.samples *= RANKS
        cfg.dataset.lengths = [length for length in lengths for _ in range(RANKS)]
        OmegaConf.save(cfg, Path(name, "config.yaml"))
        yield Path(name)


def rehearsed(steps: int) -> RehearsalResult:
    """Rehearse one of the two ranks."""
    settings = RankSettings(ranks=RANKS, steps=steps)
    with training() as folder, Path(os.devnull).open("w") as nowhere:
        return rehearse_once(command(folder / "config.yaml"), GPU, settings, nowhere)


def trained(steps: int) -> list[RehearsalResult]:
    """Run the config on two ranks that record their steps."""
    overhead_bytes = overhead_of(RANKS)
    usable_bytes = GPU.memory - overhead_bytes
    with training() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)]
        rank = ["-m", "tests.rehearsals.two_ranks", str(folder), str(steps + 1), RECIPE]
        subprocess.run(
            [*launcher, *rank, "--config", str(folder / "config.yaml")],
            env={**os.environ, **environment(memory=usable_bytes, devices=RANKS), "OMP_NUM_THREADS": "1"},
            check=False,  # one rank exits first, and the other fails in its last step
            timeout=3600,
            stdout=subprocess.DEVNULL,
        )
        about = {"usable_bytes": usable_bytes, "overhead_bytes": overhead_bytes, "ranks": RANKS, "status": 0}
        ranks = [RehearsalResult.read(folder / f"rank{rank}.jsonl", rank=rank, **about) for rank in range(RANKS)]
        return [replace(rank, steps=rank.steps[:steps]) for rank in ranks]


def run_rank(folder: str, steps: str, recipe: str, *args: str) -> None:
    """Run a recipe as one rank, and record its steps."""
    sys.argv = [recipe, *args]
    with StepRecorder(Path(folder) / f"rank{os.environ['RANK']}.jsonl", RankSettings(steps=int(steps))):
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)


def errors_and_flushes(found: RehearsalResult) -> list[tuple[int, int]]:
    """Return errors and flushes of each step."""
    return [(sum(error["step"] == step["step"] for error in found.errors), step["flushes"]) for step in found.steps]


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
