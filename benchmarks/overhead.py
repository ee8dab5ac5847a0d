"""Step time of our recipes against the stock recipes at the same batch, alternating in one process group.

    python -m benchmarks.overhead [--pairs 5]

Goal 1.00, bound 1.01 in the median. Both recipes train the same model on the same samples; an epoch of one, an epoch
of the other, in turns. A pair is the ratio of the median step times of two neighbouring epochs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.clock import Clock
from benchmarks.results import save, table
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


def time_both(kind: str, folder: Path, pairs: int) -> list[tuple[float, float]]:
    """Collective: median step times of stock and ours, a pair for every two neighbouring epochs."""
    ours = load_ours(kind)(demo_config(kind, folder / "ours", *MODEL))
    ours.setup()
    ours._save_checkpoint = lambda epoch: None
    with stock_on_cpu(), mock.patch("torch.distributed.init_process_group"):
        config = demo_config(kind, folder / "stock", *MODEL)
        stock = load_stock(kind)(config)
        stock.setup(config)
        stock.save_checkpoint = lambda epoch: None
        if kind == "full":
            stock._checkpoint_client.save_checkpoint = lambda **_: None
        epochs = [_pair(stock, ours, stock_first=bool(index % 2)) for index in range(pairs + 1)]
    ours.cleanup()
    return epochs[1:]  # the first warms up


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
    recipe._plans = tuple(replace(recipe._plans[0], epoch=epoch) for epoch in range(done + 1))
    return _median_step(recipe)


def _median_step(recipe: Any) -> float:
    """Seconds; rank 0 is the only one to log, and so to know."""
    Clock.times.clear()
    recipe.train()
    if not Clock.times:
        return math.nan
    return statistics.median(after - before for before, after in itertools.pairwise(Clock.times))


def measure(kind: str, ranks: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        times = run_on_ranks(ranks, time_both, kind, Path(folder), pairs, timeout_s=120 + 60 * pairs, in_group=False)[0]
    ratios = [ours / stock for stock, ours in times]
    return {
        "recipe": kind,
        "ranks": ranks,
        "stock ms": statistics.median(stock for stock, _ in times) * 1e3,
        "ours ms": statistics.median(ours for _, ours in times) * 1e3,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    rows = [measure(kind, ranks, pairs) for kind in ("full", "lora") for ranks in (1, 2)]
    print(table(rows))
    print(f"written to {save('overhead', rows)}")


if __name__ == "__main__":
    main()
