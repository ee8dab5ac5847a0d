"""Compare token budgets with stock's batches of rows and with `packed: True`: one model, one memory limit, one run.

Goal in one process: at least 3.2, 2.0 and 1.05 times the target tokens per second of stock's rows, and 1.3, 1.3 and 1.1
times those of its packs; on two ranks more, because ranks also wait less. Stock has the most rows or packs that fit, as
found by the search. The token budget is that of the profile, once without padding and once with it. No case runs out
of memory. Epochs of the four cases alternate, and a ratio compares two neighbouring epochs. Timed epochs neither limit
nor count memory, because this would slow all cases down. An epoch before them checks that all stay within the limit.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset

from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.engine.plans import Plan, SampleKind

RANKS = (1, 2)
LONGEST = 512
SHORTEST = 8
EPOCH_STEPS = 4
MEMORY_WITHIN = "torchtune_adaptive.loop.training_loop.memory_within"


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths, cut at the longest."""

    name: str
    median: int
    spread: float
    samples_per_step: int
    """Samples of one rank; fewer where they are longer."""
    longest: int = LONGEST

    def draw_length(self, draw: random.Random) -> int:
        return max(SHORTEST, min(self.longest, math.ceil(draw.lognormvariate(math.log(self.median), self.spread))))


INSTRUCTIONS = Lengths("instructions", LONGEST // 10, 1.0, 64)
"""Like mixed instruction data: a few samples are whole dialogues."""
DIALOGUES = Lengths("dialogues", LONGEST // 3, 0.6, 32)
DOCUMENTS = Lengths("documents", LONGEST, 0.5, 16)
"""Half of them are cut at the longest: there is little padding to save."""
ON_CPU = (INSTRUCTIONS, DIALOGUES, DOCUMENTS)
LONGEST_ON_GPU = 2048
ON_GPU = (
    Lengths("long instructions", LONGEST_ON_GPU // 10, 1.0, 128, LONGEST_ON_GPU),
    Lengths("long documents", LONGEST_ON_GPU, 0.5, 32, LONGEST_ON_GPU),
)
DISTRIBUTIONS = {lengths.name: lengths for lengths in (*ON_CPU, *ON_GPU)}

COMMON = (
    "adaptive.memory_limit=120MiB",  # room for 8 of the longest
    "dataset._component_=benchmarks.packing.random_tokens",
    "adaptive.sequence_length=null",
    f"tokenizer.max_seq_len={LONGEST}",
    "gradient_accumulation_steps=1",
    "clip_grad_norm=1.0",
    "metric_logger._component_=benchmarks.packing.Figures",
)
ROWS = ("use_maximum_batch_size=True", "adaptive.round_to=none")
TOKENS = ("adaptive.token_budget=auto",)
PADDED = ("adaptive.token_budget=auto", "adaptive.padding=True")
PACKS = (*ROWS, "dataset.packed=True")


def run(pairs: int) -> Result:
    rows = [measure(lengths, ranks, pairs) for lengths in ON_CPU for ranks in RANKS]
    note = (
        "target tokens per second of all ranks. stock: batches of rows; budget: adaptive.token_budget: auto, without "
        "padding; padded: the same with it; packs: torchtune's packed: True. ratio: budget over stock, by wall time "
        "and by CPU time of all ranks. balance: tokens of the fullest rank over their mean, padding included. "
        "there is to gain: the ratio if no token of stock's were padding and no rank waited. "
        "On a CPU, attention within packs is computed with a mask, not by a kernel that leaves out what is masked"
    )
    figures = [name for name in rows[0] if name not in ("lengths", "ranks")]
    shown = [{"figure": name, **{_column(row): row[name] for row in rows}} for name in figures]
    return Result(rows, note, shown)


def _column(row: Mapping[str, Any]) -> str:
    return f"{row['lengths']}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}"


def measure(lengths: Lengths, ranks: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        timeout_s = 300 + 60 * pairs
        measured = run_on_ranks(ranks, compare, lengths, Path(folder), pairs, timeout_s=timeout_s, in_group=False)[0]
    return {"lengths": lengths.name, "ranks": ranks, **measured}


class RandomTokens(Dataset[dict[str, list[int]]]):
    """Random tokens of which the first half is the prompt, and masked; the lengths are what matters."""

    def __init__(self, lengths: Lengths, samples: int, seed: int) -> None:
        draw = random.Random(seed)
        self.lengths = [lengths.draw_length(draw) for _ in range(samples)]
        self._seed = seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = self.lengths[index]
        tokens = random.Random(f"{self._seed}/{index}").choices(range(256), k=length)
        return {"tokens": tokens, "labels": [-100] * (length // 2) + tokens[length // 2 :]}


def random_tokens(
    tokenizer: Any, *, lengths: str, samples: int, seed: int = 0, packed: bool = False
) -> RandomTokens | PackedDataset:
    """Component for a config's `dataset:`."""
    drawn = DISTRIBUTIONS[lengths]
    dataset = RandomTokens(drawn, samples, seed)
    return PackedDataset(dataset, max_seq_len=drawn.longest) if packed else dataset


class Figures:
    """Metric logger that stores the figures of every step."""

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
    """Collective: a recipe that is set up once and trains one epoch per call."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.recipe = load_ours("full")(demo_config("full", folder, *COMMON, *overrides))
        self.recipe.setup()
        self.recipe.run.checkpoints.save = lambda *_: None
        self._run, self.recipe.runner.run = self.recipe.runner.run, self._count
        self._schedule = self.recipe.loop.schedule
        self.target_tokens = 0

    def _count(self, samples: Any, **options: Any) -> Any:
        result = self._run(samples, **options)
        self.target_tokens += result.target_tokens
        return result

    def epoch(self, *, limited: bool = False) -> Epoch:
        """Collective: train the next epoch, either under the memory limit, or without the cost of limit and start."""
        Figures.steps.clear()
        self.target_tokens = 0
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        self.recipe.loop.schedule = replace(
            self._schedule, epochs=self._schedule.epochs[: self.recipe.run.progress.epochs_run + 1]
        )
        with nullcontext() if limited else self._steps_alone():
            self.recipe.train()
        cpu_seconds = sum(_everywhere(time.process_time() - cpu_began))
        return Epoch(time.perf_counter() - began, cpu_seconds, self.target_tokens, list(Figures.steps))

    @contextmanager
    def _steps_alone(self) -> Iterator[None]:
        clean = "torchtune_adaptive.loop.training_loop.free_setup_memory"
        with mock.patch(MEMORY_WITHIN, return_value=nullcontext()), mock.patch(clean):
            yield


class Epoch(NamedTuple):
    seconds: float
    cpu_seconds: float
    """CPU time of all ranks."""
    target_tokens: int
    """Target tokens of all ranks."""
    steps: list[Mapping[str, Any]]
    """The steps that rank 0 logged; empty on other ranks."""

    @property
    def tokens_per_second(self) -> float:
        return self.target_tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.target_tokens / self.cpu_seconds

    def mean(self, figure: str) -> float:
        return statistics.mean(float(step[figure]) for step in self.steps)


class Round(NamedTuple):
    """One epoch of each contender."""

    stock: Epoch
    budget: Epoch
    padded: Epoch
    packs: Epoch


def compare(lengths: Lengths, folder: Path, pairs: int) -> dict[str, Any]:
    """Collective: compare all contenders in one process group; return the figures of rank 0."""
    contenders = set_up(lengths, folder, epochs=pairs + 1)
    recoveries = []
    for contender in contenders:
        contender.epoch(limited=True)
        recoveries.append(contender.recipe.runner.recoveries)
    rounds = [Round(*(contender.epoch() for contender in contenders)) for _ in range(pairs)]
    by_rows, by_tokens, padded, _ = (contender.recipe for contender in contenders)
    limit, balance = by_tokens.runner.limit, balance_of(budget=by_tokens, padded=padded, stock=by_rows)
    if not rounds[0].stock.steps:
        return {}
    assert all(each.stock.target_tokens == each.budget.target_tokens for each in rounds), "both train the same samples"
    rate = statistics.median(each.budget.tokens_per_second for each in rounds) / dist.get_world_size()
    figures = {**summary(rounds), "recoveries": recoveries, **balance, **packing_share(lengths, limit, rate)}
    return {**figures, "there is to gain": gain_of_all(figures)}


def set_up(lengths: Lengths, folder: Path, epochs: int) -> list[Contender]:
    """Collective: set up all contenders on the same samples, with about the same tokens per step."""
    ranks = int(os.environ["WORLD_SIZE"])
    samples = lengths.samples_per_step * EPOCH_STEPS * ranks
    packs = len(random_tokens(None, lengths=lengths.name, samples=samples, packed=True))
    data = (f"epochs={epochs}", f"dataset.samples={samples}", f"dataset.lengths={lengths.name}")
    by_samples, by_packs = (
        f"batch_size={count}" for count in (lengths.samples_per_step, packs // ranks // EPOCH_STEPS)
    )
    contenders = [Contender(folder / "rows", *data, by_samples, *ROWS)]
    with mock.patch("torch.distributed.init_process_group"):
        contenders.append(Contender(folder / "tokens", *data, by_samples, *TOKENS))
        contenders.append(Contender(folder / "padded", *data, by_samples, *PADDED))
        contenders.append(Contender(folder / "packs", *data, by_packs, *PACKS))
    return contenders


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    wall = Round(*([each.tokens_per_second for each in epochs] for epochs in zip(*rounds, strict=True)))
    cpu = Round(*([each.tokens_per_cpu_second for each in epochs] for epochs in zip(*rounds, strict=True)))
    first = rounds[0]
    return {
        "stock rows": int(first.stock.steps[0]["microbatch_rows"]),
        "packs rows": int(first.packs.steps[0]["microbatch_rows"]),
        **{f"{name} tokens/s": statistics.median(rates) for name, rates in wall._asdict().items()},
        **compared(list(zip(wall.stock, wall.budget, strict=True))),
        **_ratio(" to padded", wall.padded, wall.budget),
        **_ratio(" to packs", wall.packs, wall.budget),
        **_ratio(" by CPU time", cpu.stock, cpu.budget),
        **_ratio(" to padded by CPU time", cpu.padded, cpu.budget),
        **_ratio(" to packs by CPU time", cpu.packs, cpu.budget),
        "stock padding": statistics.mean(each.stock.mean("padding_fraction") for each in rounds),
        "padded padding": statistics.mean(each.padded.mean("padding_fraction") for each in rounds),
        "stock microbatches": first.stock.mean("microbatches"),
        "budget microbatches": first.budget.mean("microbatches"),
        "padded microbatches": first.padded.mean("microbatches"),
        "packs microbatches": first.packs.mean("microbatches"),
    }


def gain_of_all(figures: Mapping[str, Any]) -> float:
    """Return the speed relative to stock without padding and waiting, if the time per token stays the same."""
    return figures["stock balance"] / (1 - figures["stock padding"])


def _ratio(of: str, rates: Any, ours: Any) -> dict[str, float]:
    found = compared(list(zip(rates, ours, strict=True)))
    return {f"{figure}{of}": found[figure] for figure in ("ratio", "lowest", "highest")}


def balance_of(**runs: Any) -> dict[str, float]:
    """Collective: tokens of the fullest rank over the mean of the ranks, microbatch by microbatch, with padding."""
    return {f"{name} balance": _balance(recipe) for name, recipe in runs.items()}


def _balance(recipe: Any) -> float:
    schedule, runner = recipe.loop.schedule, recipe.runner
    fullest = mean = 0.0
    for samples, _ in schedule.steps(recipe.data.loader, schedule.epochs[0], recipe.run.progress):
        lengths = runner.kind.lengths(samples)
        split = _split(runner.kind, lengths, runner.limit)
        sizes = _everywhere([size.padded_tokens for size in runner.kind.sizes(split, lengths)])
        fullest += sum(map(max, zip(*sizes, strict=True)))
        mean += sum(map(sum, sizes)) / len(sizes)
    return fullest / mean


def _split(kind: SampleKind[Any], lengths: Sequence[int], limit: Limit) -> Plan:
    """Collective: return the plan that a runner makes for this rank."""
    own = kind.plan(lengths, limit)
    return kind.spread(own, lengths, limit, max(_everywhere(len(own)))) if limit.by_length else own


def _everywhere(mine: Any) -> list[Any]:
    """Collective: return the values of all ranks, in order of rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def packing_share(lengths: Lengths, limit: Limit, tokens_per_second: float) -> dict[str, float]:
    """Return the time to plan a step of 4096 samples on a rank, and its share of the time to train them."""
    draw = random.Random(0)
    drawn, times = [lengths.draw_length(draw) for _ in range(4096)], []
    kind: SampleKind[int] = SampleKind(length_of=int, filler=int, padded=False)
    for _ in range(9):
        began = time.perf_counter()
        plan = kind.plan(drawn, limit)
        kind.spread(plan, drawn, limit, len(plan) + 1)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    return {"pack 4096 ms": 1e3 * seconds, "share of a step %": 100 * seconds * tokens_per_second / (sum(drawn) / 2)}
