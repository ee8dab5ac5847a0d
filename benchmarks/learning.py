"""Train the PPO demo with several seeds, and compare the mean rewards of the first and the thirtieth iteration.

    python -m benchmarks --only learning

`adaptive/demo/ppo` runs in one process, with the batch sizes of two ranks together. `--pairs` has no effect. The run
fails unless the rise is more than three times the standard deviation over seeds, at the beginning and at the end, and
the lowest final reward is above the highest initial one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Result
from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.recorders import read_log
from tests.recipes.running import run_ours

SEEDS = (0, 1, 2, 3, 4)
ITERATIONS = 30
ANSWERS = 64
"""Answers of an iteration, as the demo has on two ranks."""
AS_THE_DEMO = (
    f"dataset.samples={ANSWERS * ITERATIONS}",
    "shuffle=True",
    f"batch_size={ANSWERS}",
    f"num_steps={ANSWERS * ITERATIONS}",
    f"ppo_batch_size={ANSWERS // 2}",
    f"forward_batch_size={ANSWERS}",
    "max_generated_tokens=12",
    "optimizer._component_=torch.optim.AdamW",
    "optimizer.lr=0.01",
    "optimizer.fused=True",
)
TIMES_WHAT_SEEDS_EXPLAIN = 3


def run(pairs: int) -> Result:
    rows = [row_of(seed) for seed in SEEDS]
    first, last = ([float(row[when]) for row in rows] for when in ("first", "last"))
    check(first, last)
    note = (
        f"mean reward of an iteration of {ANSWERS} answers, the share of small letters: in the first of {ITERATIONS} "
        f"{mean_and_spread(first)}, in the last {mean_and_spread(last)} (mean ± standard deviation over seeds)"
    )
    return Result(rows, note)


def row_of(seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(1, train, Path(folder) / "run", seed, timeout_s=300, in_group=False)
        scores = [float(line["scores"]) for line in read_log(Path(folder) / "run" / "log.jsonl")]
    assert len(scores) == ITERATIONS
    return {"seed": seed, "first": scores[0], "tenth": scores[9], "twentieth": scores[19], "last": scores[-1]}


def train(folder: Path, seed: int) -> None:
    """Collective: train the demo with this seed."""
    run_ours("full_ppo", ppo_config(folder, *AS_THE_DEMO, f"seed={seed}"))


def check(first: Sequence[float], last: Sequence[float]) -> None:
    """Fail if the difference between seeds could explain the rise."""
    rise = statistics.mean(last) - statistics.mean(first)
    explained = TIMES_WHAT_SEEDS_EXPLAIN * max(statistics.stdev(first), statistics.stdev(last))
    assert rise > explained, f"mean reward rises by {rise:.3f}, and seeds explain {explained:.3f}"
    assert min(last) > max(first), f"a seed ends at {min(last):.3f}, another begins at {max(first):.3f}"


def mean_and_spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
