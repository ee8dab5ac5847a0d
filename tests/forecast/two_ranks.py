"""A question over time beside the run itself: two processes on null devices, which agree over gloo.

python -m tests.forecast.two_ranks        200 steps; writes benchmarks/results/over_time.json

NCCL sends nothing on a null device, but ranks agree for real: one that runs out of memory makes the other repeat its step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from benchmarks.results import save
from tests.null.processes import skip_without_null_device
from torchtune_adaptive.forecast.keys import PlanSettings
from torchtune_adaptive.forecast.measure import measure, rehearsed_config
from torchtune_adaptive.forecast.question import Question
from torchtune_adaptive.null_cuda import environment
from torchtune_adaptive.rehearse.answer import Rehearsed
from torchtune_adaptive.tune.start.command_line import locate

RANKS = 2
SIZES = ("model.num_layers=2", "model.embed_dim=1024", "model.intermediate_dim=4096", "model.max_seq_len=4096")
RUN = ("device=cuda", "use_maximum_batch_size=False", "gradient_accumulation_steps=1", "seed=3")


def question(steps: int, *words: str, lengths: str = "100:2000", memory: str = "4500MiB") -> Question:
    cfg = OmegaConf.load(locate("adaptive/demo/full"))
    given = (*SIZES, *RUN, "batch_size=16", *words)
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*given]))
    assert isinstance(cfg, DictConfig)
    settings = PlanSettings(world_size=RANKS, memory_limit=memory, lengths=lengths, steps=steps)
    return Question(cfg, settings, "adaptive/demo/full", given)


def trained(question: Question) -> list[Rehearsed]:
    """The same config on two ranks, each of which writes down its steps."""
    usable_bytes = question.gpu.memory - question.overhead_bytes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        OmegaConf.save(rehearsed_config(question, folder), folder / "config.yaml")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)]
        rank = ["-m", "tests.forecast.one_rank", str(folder), str(question.plan.steps), question.recipe]
        subprocess.run(
            [*launcher, *rank, "--config", str(folder / "config.yaml")],
            env={**os.environ, **environment(memory=usable_bytes, devices=RANKS), "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=3600,
            stdout=subprocess.DEVNULL,
        )
        about = {"usable_bytes": usable_bytes, "overhead_bytes": question.overhead_bytes, "ranks": RANKS, "status": 0}
        return [Rehearsed.read(folder / f"rank{rank}.jsonl", rank=rank, **about) for rank in range(RANKS)]


def errors_by_step(found: Rehearsed) -> list[int]:
    return [sum(each["step"] == step["step"] for each in found.errors) for step in found.steps]


def main(words: Sequence[str]) -> None:
    skip_without_null_device()
    steps = int(words[0]) if words else 200
    asked = question(steps, *words[1:])
    said, ranks = measure(asked).rehearsed, trained(asked)
    rows = [
        {
            "step": step["step"],
            "rehearsed reserved": step["reserved_bytes"],
            "trained reserved": [rank.steps[at]["reserved_bytes"] for rank in ranks],
            "rehearsed flushes": step["flushes"],
            "trained flushes": [rank.steps[at]["flushes"] for rank in ranks],
            "rehearsed errors": errors_by_step(said)[at],
            "trained errors": [errors_by_step(rank)[at] for rank in ranks],
        }
        for at, step in enumerate(said.steps)
    ]
    for row in rows:
        print(row)
    save("over_time", rows, "the rehearsed rank and the two ranks of a run, step by step; see tests/forecast/two_ranks.py")


if __name__ == "__main__":
    main(sys.argv[1:])
