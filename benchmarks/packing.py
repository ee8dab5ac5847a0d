"""Token budgets against stock's batches of rows: the same model, samples and memory limit, in turns in one run.

    python -m benchmarks.packing [--pairs 5] [--ranks 2 3]

Goal: at least 1.8 times the target tokens per second. Stock's rows are the most that fit for the longest sample, found
by the search; the token budget is the profile's. Neither runs out of memory. Epochs of one and of the other take turns;
a pair is the ratio of two neighbouring epochs. While they are timed nothing limits or counts memory, which would slow
both down; that each stays within the limit is measured in an epoch before.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch.utils.data import Dataset

from benchmarks.results import save, table
from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.limits import Limit
from torchtune_adaptive.packing import plan_step, spread

LONGEST = 1024
MEDIAN = 96
SPREAD = 1.0
"""Lengths are log-normal, cut at the longest: as in mixed instruction data, where a few samples are whole dialogues."""

COMMON = (
    "adaptive.memory_limit=240MiB",  # room for 8 of the longest
    "dataset._component_=benchmarks.packing.instructions",
    "adaptive.sequence_length=null",
    "adaptive.reuse_search=False",
    f"tokenizer.max_seq_len={LONGEST}",
    "dataset.samples=256",
    "batch_size=64",
    "gradient_accumulation_steps=1",
    "clip_grad_norm=1.0",
    "metric_logger._component_=benchmarks.packing.Figures",
)
ROWS = ("use_maximum_batch_size=True", "adaptive.round_to=none")
TOKENS = ("adaptive.token_budget=auto",)


def drawn_length(draw: random.Random) -> int:
    return max(8, min(LONGEST, math.ceil(draw.lognormvariate(math.log(MEDIAN), SPREAD))))


class Instructions(Dataset[dict[str, list[int]]]):
    """Random tokens of which the first half is the prompt, and masked; the lengths are what matters."""

    def __init__(self, samples: int, seed: int) -> None:
        draw = random.Random(seed)
        self._lengths = [drawn_length(draw) for _ in range(samples)]
        self._seed = seed

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = self._lengths[index]
        tokens = random.Random(f"{self._seed}/{index}").choices(range(256), k=length)
        return {"tokens": tokens, "labels": [-100] * (length // 2) + tokens[length // 2 :]}


def instructions(tokenizer: Any, *, samples: int, seed: int = 0, packed: bool = False) -> Instructions:
    """Component for a config's `dataset:`."""
    return Instructions(samples, seed)


class Figures:
    """A metric logger that keeps what every step logs."""

    steps: list[Mapping[str, Any]] = []  # noqa: RUF012 - the recipes build their loggers themselves and share it

    def __init__(self, path: str) -> None:
        pass

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self.steps.append(payload)

    def close(self) -> None:
        pass


class Contender:
    """Collective: a recipe that is set up once and trains its epochs one by one."""

    def __init__(self, folder: Path, epochs: int, *overrides: str) -> None:
        self.recipe = load_ours("full")(demo_config("full", folder, *COMMON, f"epochs={epochs}", *overrides))
        self.recipe.setup()
        self.recipe._save_checkpoint = lambda epoch: None
        self._run, self.recipe._runner.run = self.recipe._runner.run, self._count
        self._epochs = iter(self.recipe._plans)
        self.target_tokens = 0

    def _count(self, samples: Any, **options: Any) -> Any:
        result = self._run(samples, **options)
        self.target_tokens += result.target_tokens
        return result

    def epoch(self) -> Epoch:
        """Collective: the next one."""
        Figures.steps.clear()
        self.target_tokens = 0
        dist.barrier()
        began = time.perf_counter()
        self.recipe._train_epoch(next(self._epochs))
        dist.barrier()
        return Epoch(time.perf_counter() - began, self.target_tokens, list(Figures.steps))


class Epoch(NamedTuple):
    seconds: float
    target_tokens: int
    """Of all ranks."""
    steps: list[Mapping[str, Any]]
    """What rank 0 logged; empty on the others."""

    @property
    def tokens_per_second(self) -> float:
        return self.target_tokens / self.seconds

    def mean(self, figure: str) -> float:
        return statistics.mean(float(step[figure]) for step in self.steps)


def compare(folder: Path, pairs: int) -> dict[str, Any]:
    """Collective: both ways in one process group; what rank 0 knows of them."""
    contenders = [Contender(folder / "rows", pairs + 2, *ROWS)]
    with mock.patch("torch.distributed.init_process_group"):
        contenders.append(Contender(folder / "tokens", pairs + 2, *TOKENS))
    recoveries = []
    for contender in contenders:
        with contender.recipe._limited_memory():
            contender.epoch()
        recoveries.append(contender.recipe._runner.recoveries)
        contender.epoch()  # warms up
    epochs = [(contenders[0].epoch(), contenders[1].epoch()) for _ in range(pairs)]
    by_rows, by_tokens = (contender.recipe for contender in contenders)
    limit, balance = by_tokens._runner.limit, balance_of(by_tokens, by_rows)
    if not epochs[0][0].steps:
        return {}
    assert all(rows.target_tokens == tokens.target_tokens for rows, tokens in epochs), "both train the same samples"
    rate = statistics.median(tokens.tokens_per_second for _, tokens in epochs) / dist.get_world_size()
    return {**summary(epochs), "recoveries": recoveries, **balance, **packing_share(limit, rate)}


def summary(epochs: Sequence[tuple[Epoch, Epoch]]) -> dict[str, Any]:
    ratios = [tokens.tokens_per_second / rows.tokens_per_second for rows, tokens in epochs]
    rows, tokens = epochs[0]
    return {
        "stock rows": int(rows.steps[0]["microbatch_rows"]),
        "stock tokens/s": statistics.median(rows.tokens_per_second for rows, _ in epochs),
        "budget tokens/s": statistics.median(tokens.tokens_per_second for _, tokens in epochs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "pairs": len(epochs),
        "stock padding": rows.mean("padding_fraction"),
        "budget padding": tokens.mean("padding_fraction"),
        "stock microbatches": rows.mean("microbatches"),
        "budget microbatches": tokens.mean("microbatches"),
    }


def balance_of(*recipes: Any) -> dict[str, float]:
    """Collective: padded tokens of the fullest rank over the mean of the ranks, microbatch by microbatch."""
    names = ("budget balance", "stock balance")
    return {name: _balance(recipe) for name, recipe in zip(names, recipes, strict=True)}


def _balance(recipe: Any) -> float:
    plan, runner = recipe._plans[0], recipe._runner
    fullest = mean = 0.0
    for samples, _ in recipe._microbatches.steps(recipe._data.loader, plan):
        lengths = [runner.length_of(sample) for sample in samples]
        sizes = [
            len(rows) * max(lengths[index] for index in rows) for rows in runner._planner.plan(lengths, runner.limit)
        ]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, sizes)
        fullest += sum(map(max, zip(*everywhere, strict=True)))
        mean += sum(map(sum, everywhere)) / len(everywhere)
    return fullest / mean


def packing_share(limit: Limit, tokens_per_second: float) -> dict[str, float]:
    """What planning a step of 4096 samples costs a rank, and its share of the time to train them at its rate."""
    draw = random.Random(0)
    lengths = [drawn_length(draw) for _ in range(4096)]
    times = []
    for _ in range(9):
        began = time.perf_counter()
        plan = plan_step(lengths, limit)
        spread(plan, lengths, limit, len(plan) + 1)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    return {"pack 4096 ms": 1e3 * seconds, "share of a step %": 100 * seconds * tokens_per_second / (sum(lengths) / 2)}


def measure(ranks: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        timeout_s = 300 + 60 * pairs
        measured = run_on_ranks(ranks, compare, Path(folder), pairs, timeout_s=timeout_s, in_group=False)[0]
    return {"ranks": ranks, **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    rows = [measure(ranks, options.pairs) for ranks in options.ranks]
    print(table([{"figure": name, **{f"{row['ranks']} ranks": row[name] for row in rows}} for name in rows[0]]))
    print(f"written to {save('packing', rows)}")


if __name__ == "__main__":
    from benchmarks import packing  # by its name, under which the recipes find the same `Figures`

    packing.main()
