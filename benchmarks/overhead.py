"""Compare the step time of this package's recipes with stock, at the same batch, alternating in one process group.

Goal 1.00, bound 1.01 in the median of CPU seconds. Both recipes train the same model on the same samples, and epochs of
both alternate. A pair consists of two ratios of neighbouring epochs: of CPU seconds from the first step to the last,
which other work on the machine hardly changes, and of median step times in wall time. Both are measured on rank 0. On a
busy machine there are fewer pairs, which limits the duration.

On one rank, stock's LoRA recipe shards the model. Its full recipe does not, and neither do the adaptive recipes. So
LoRA is measured twice on one rank: unsharded as by default, and sharded like stock, which compares only the loops.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.fsdp import FSDPModule

from benchmarks.clock import Clock, Moment
from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours, load_stock, stock_on_cpu

SIZES = ("num_layers=4", "embed_dim=256", "intermediate_dim=512")
MODEL = (
    *(f"model.{size}" for size in SIZES),
    *(f"checkpointer.sizes.{size}" for size in SIZES),
    "batch_size=2",
    "gradient_accumulation_steps=2",
    "dataset.samples=96",
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
    """SHARDED if stock's recipe shards the model by FSDP, else WHOLE."""
    ours: str

    @property
    def sharded(self) -> bool:
        return self.ours == SHARDED

    def config(self, folder: Path, *overrides: str) -> DictConfig:
        return demo_config(self.recipe, folder, *MODEL, *overrides)


CASE_S, LEAST_PAIRS = 80, 3
"""After this time, a case measures no more pairs than the minimum."""
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
        "ratio: CPU seconds of ours over stock's; wall ratio: of median step times. stock, ours: whether the recipe "
        "shards the model by FSDP; on one rank, stock shards it for LoRA only. If both shard, or both do not, only "
        "the loops differ."
    )
    return Result([measure(case, pairs) for case in CASES], note)


def measure(case: Case, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        timeout_s = 120 + CASE_S
        times = run_on_ranks(case.ranks, time_both, case, Path(folder), pairs, timeout_s=timeout_s, in_group=False)[0]
    return {
        "recipe": case.recipe,
        "ranks": case.ranks,
        "stock": case.stock,
        "ours": case.ours,
        "stock cpu ms": statistics.median(stock.cpu_s for stock, _ in times) * 1e3,
        "ours cpu ms": statistics.median(ours.cpu_s for _, ours in times) * 1e3,
        **compared([(stock.cpu_s, ours.cpu_s) for stock, ours in times]),
        "stock ms": statistics.median(stock.wall_s for stock, _ in times) * 1e3,
        "ours ms": statistics.median(ours.wall_s for _, ours in times) * 1e3,
        "wall ratio": compared([(stock.wall_s, ours.wall_s) for stock, ours in times])["ratio"],
    }


def time_both(case: Case, folder: Path, pairs: int, device: str = "cpu") -> list[tuple[Moment, Moment]]:
    """Collective: return the time of a step with stock and with ours, for each pair of neighbouring epochs."""
    began = time.monotonic()
    ours = load_ours(case.recipe)(case.config(folder / "ours"))
    with sharding_always() if case.sharded else nullcontext():
        ours.setup()
    ours.run.checkpoints.save = lambda *_: None
    on_device = stock_on_cpu() if device == "cpu" else nullcontext()
    with on_device, mock.patch("torch.distributed.init_process_group"):
        config = case.config(folder / "stock")
        stock = load_stock(case.recipe)(config)
        stock.setup(config)
        assert isinstance(stock._model, FSDPModule) == (case.stock == SHARDED)
        stock.save_checkpoint = lambda epoch: None
        if case.recipe == "full":
            stock._checkpoint_client.save_checkpoint = lambda **_: None
        _pair(stock, ours, stock_first=False)  # warms up
        times: list[tuple[Moment, Moment]] = []
        while _goes_on(len(times), pairs, began):
            times.append(_pair(stock, ours, stock_first=bool(len(times) % 2)))
    ours.cleanup()
    return times


def _goes_on(done: int, pairs: int, began: float) -> bool:
    """Collective: return the decision of rank 0."""
    told = [done < min(pairs, LEAST_PAIRS) or (done < pairs and time.monotonic() - began < CASE_S)]
    dist.broadcast_object_list(told)
    return told[0]


@contextmanager
def sharding_always() -> Iterator[None]:
    """Make the adaptive recipe shard the model on one rank too, as stock's LoRA recipe does."""
    with mock.patch("torchtune_adaptive.models.model.is_sharded", return_value=True):
        yield


def _pair(stock: Any, ours: Any, stock_first: bool) -> tuple[Moment, Moment]:
    """Run an epoch of both recipes. The order alternates, so that a machine that slows down affects both."""
    if stock_first:
        before = _stock_epoch(stock)
        return before, time_of_our_epoch(ours)
    after = time_of_our_epoch(ours)
    return _stock_epoch(stock), after


def _stock_epoch(recipe: Any) -> Moment:
    recipe.total_epochs = recipe.epochs_run + 1
    return time_of_a_step(recipe)


def time_of_our_epoch(recipe: Any) -> Moment:
    done = recipe.run.progress.epochs_run
    epochs = tuple(replace(recipe.loop.schedule.epochs[0], epoch=epoch) for epoch in range(done + 1))
    recipe.loop.schedule = replace(recipe.loop.schedule, epochs=epochs)
    return time_of_a_step(recipe)


def time_of_a_step(recipe: Any) -> Moment:
    """Return the times of a step on rank 0, the only rank that logs. CPU seconds are a mean over all steps."""
    Clock.times.clear()
    recipe.train()
    if not Clock.times:
        return Moment(math.nan, math.nan)
    walls = [after.wall_s - before.wall_s for before, after in itertools.pairwise(Clock.times)]
    first, last = Clock.times[0], Clock.times[-1]
    return Moment(statistics.median(walls), (last.cpu_s - first.cpu_s) / len(walls))
