"""Step time of our recipes against the stock recipes at the same batch, alternating in one process group.

Goal 1.00, bound 1.01 in the median. Both recipes train the same model on the same samples; an epoch of one, an epoch
of the other, in turns. A pair is the ratio of the median step times of two neighbouring epochs.

With one rank stock's LoRA recipe shards the model, over that one rank; its full recipe does not, and neither do ours.
So LoRA is measured twice there: as our recipe is, and sharded like stock's, which compares the loops alone.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.fsdp import FSDPModule

from benchmarks.clock import Clock
from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours, load_stock, stock_on_cpu

SIZES = ("num_layers=4", "embed_dim=256", "intermediate_dim=512")
MODEL = (
    *(f"model.{size}" for size in SIZES),
    *(f"checkpointer.sizes.{size}" for size in SIZES),
    "batch_size=2",
    "gradient_accumulation_steps=2",
    "dataset.samples=128",
    "tokenizer.max_seq_len=256",
    "clip_grad_norm=1.0",
    "shuffle=False",
    "metric_logger._component_=benchmarks.clock.Clock",
)


@dataclass(frozen=True)
class Case:
    recipe: str
    ranks: int
    stock: str
    """Whether stock's recipe shards the model."""
    ours: str

    @property
    def sharded(self) -> bool:
        return self.ours == SHARDED


NOISY_PAIRS = 12
"""Ranks that share two cores disturb each other: from epoch to epoch their times vary by a tenth."""
WHOLE, SHARDED = "whole", "sharded"
CASES = [
    Case("full", 1, WHOLE, WHOLE),
    Case("full", 2, SHARDED, SHARDED),
    Case("lora", 1, SHARDED, WHOLE),
    Case("lora", 1, SHARDED, SHARDED),
    Case("lora", 2, SHARDED, SHARDED),
]


def run(pairs: int) -> Result:
    note = (
        "ratio: step time of ours over stock's. stock, ours: whether the recipe shards the model by FSDP; with one "
        "rank, which has nothing to shard, stock's does for LoRA only. Where both do alike, the loops are compared"
    )
    return Result([measure(case, pairs if case.ranks == 1 else max(pairs, NOISY_PAIRS)) for case in CASES], note)


def measure(case: Case, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        timeout_s = 120 + 60 * pairs
        times = run_on_ranks(case.ranks, time_both, case, Path(folder), pairs, timeout_s=timeout_s, in_group=False)[0]
    return {
        "recipe": case.recipe,
        "ranks": case.ranks,
        "stock": case.stock,
        "ours": case.ours,
        "stock ms": statistics.median(stock for stock, _ in times) * 1e3,
        "ours ms": statistics.median(ours for _, ours in times) * 1e3,
        **compared(times),
    }


def time_both(case: Case, folder: Path, pairs: int) -> list[tuple[float, float]]:
    """Collective: median step times of stock and ours, a pair for every two neighbouring epochs."""
    ours = load_ours(case.recipe)(demo_config(case.recipe, folder / "ours", *MODEL))
    with sharding_always() if case.sharded else nullcontext():
        ours.setup()
    ours.save_checkpoint = lambda: None
    with stock_on_cpu(), mock.patch("torch.distributed.init_process_group"):
        config = demo_config(case.recipe, folder / "stock", *MODEL)
        stock = load_stock(case.recipe)(config)
        stock.setup(config)
        assert isinstance(stock._model, FSDPModule) == (case.stock == SHARDED)
        stock.save_checkpoint = lambda epoch: None
        if case.recipe == "full":
            stock._checkpoint_client.save_checkpoint = lambda **_: None
        epochs = [_pair(stock, ours, stock_first=bool(index % 2)) for index in range(pairs + 1)]
    ours.cleanup()
    return epochs[1:]  # the first warms up


@contextmanager
def sharding_always() -> Iterator[None]:
    """Our recipe as stock's for LoRA, over one rank too."""
    with mock.patch("torchtune_adaptive.tune.parts.model._is_sharded", return_value=True):
        yield


def _pair(stock: Any, ours: Any, stock_first: bool) -> tuple[float, float]:
    """An epoch of each. Who goes first alternates: a machine that slows down slows both."""
    if stock_first:
        before = _stock_epoch(stock)
        return before, _our_epoch(ours)
    after = _our_epoch(ours)
    return _stock_epoch(stock), after


def _stock_epoch(recipe: Any) -> float:
    recipe.total_epochs = recipe.epochs_run + 1
    return _median_step(recipe)


def _our_epoch(recipe: Any) -> float:
    done = recipe.progress.epochs_run
    epochs = tuple(replace(recipe.course.epochs[0], epoch=epoch) for epoch in range(done + 1))
    recipe.course = replace(recipe.course, epochs=epochs)
    return _median_step(recipe)


def _median_step(recipe: Any) -> float:
    """Seconds; rank 0 is the only one to log, and so to know."""
    Clock.times.clear()
    recipe.train()
    if not Clock.times:
        return math.nan
    return statistics.median(after - before for before, after in itertools.pairwise(Clock.times))
