"""What only a GPU can tell, in two tables.

    python -m benchmarks.gpu [--steps 150]

Throughput: the found size beside the powers of
two around it. Fragmentation: steps of mixed lengths at the size that a search finds for a margin; what the allocator
reserves beyond the peak, how often it flushes its cache, and what that costs. The last one is what FRAGMENTATION in
memory/device.py rests on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from benchmarks.results import save, table
from tests.gpu import test_search
from tests.gpu.real_steps import GIB, build, demo, fresh_processes, limit, live_bytes, metered, samples_of, use
from tests.ranks import run_on_ranks
from torchtune_adaptive import find_max_batch_size
from torchtune_adaptive.engine.oom import release

Row = dict[str, Any]

DTYPE = {"cpu": "fp32", "cuda": "bf16"}
SIZES: dict[str, dict[str, int]] = {
    "cpu": {},
    "cuda": {
        "num_layers": 4,
        "num_heads": 32,
        "num_kv_heads": 8,
        "embed_dim": 2048,
        "intermediate_dim": 8192,
        "vocab_size": 128_256,
    },
}
MARGINS = (0.0, 0.05, 0.1, 0.15)
ROOM_GIB = 10
"""Above what is resident: what a search fills, and what the limit leaves."""
TOKENS = 1024
"""Tokens of the longest sample; few enough for a margin to be worth some rows."""


def throughput_rows(device: str) -> list[Row]:
    judged = run_on_ranks(1, test_search.search_and_judge, device, timeout_s=240)[0]
    best = max(judged.tokens_per_second.values())
    return [
        {
            "rows": rows,
            "tokens/s": round(speed),
            "of the best": speed / best,
            "retries": judged.retries[rows],
            "found": judged.linear.rows,
            "brute force": judged.best,
            "probes": len(judged.linear.probes),
        }
        for rows, speed in judged.tokens_per_second.items()
    ]


def fragmentation_rows(device: str, steps: int) -> list[Row]:
    """Without a limit first, at the size that is found without a margin: what is reserved if nothing hinders."""
    runs = [(0.0, False), *((margin, True) for margin in MARGINS)]
    return [run_on_ranks(1, train_mixed, device, *run, steps, timeout_s=300)[0] for run in runs]


def train_mixed(name: str, margin: float, limited: bool, steps: int) -> Row:
    """Collective: steps of two microbatches' worth of samples, whose lengths are those of instruction data."""
    step = build(demo("full", name, f"dtype={DTYPE[name]}", **SIZES[name]), use(name))
    with metered(step) as memory, mock.patch("torchtune_adaptive.engine.memory.FRAGMENTATION", margin):
        step.train(1, TOKENS)
        release()
        limit(memory, live_bytes(memory) + ROOM_GIB * GIB)
        to_search = step.to_search(TOKENS)
        rows = find_max_batch_size(to_search, memory=memory, round_to="none", max_rows=64).rows
        to_search.runner.close()
        if not limited:
            limit(memory, math.inf)
        release()
        memory.reset_peak()
        retries, runner = memory.retries, step.runner(rows)
        tokens, began = 0, perf_counter()
        for number in range(steps):
            result = runner.run(samples_of(number, 2 * rows, TOKENS, mixed=True), step=number)
            step.optimization.update(result.target_tokens)
            tokens += result.target_tokens
        step.synchronize()
        seconds = perf_counter() - began
        peak_bytes = memory.peak_bytes
    reserved_bytes = torch.cuda.max_memory_reserved() if name == "cuda" else peak_bytes
    return {
        "limit GiB": f"{ROOM_GIB} above resident" if limited else "none",
        "margin": margin,
        "rows": rows,
        "peak GiB": peak_bytes / GIB,
        "reserved GiB": reserved_bytes / GIB,
        "reserved/peak": reserved_bytes / peak_bytes,
        "retries": memory.retries - retries,
        "out of memory": runner.recoveries,
        "tokens/s": round(tokens / seconds),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each run of the fragmentation table")
    steps = parser.parse_args(argv).steps
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu measures a GPU, and there is none")
    tables: dict[str, Callable[[], list[Row]]] = {
        "gpu_throughput": lambda: throughput_rows("cuda"),
        "gpu_fragmentation": lambda: fragmentation_rows("cuda", steps),
    }
    with fresh_processes():
        for name, rows_of in tables.items():
            rows = rows_of()
            written = save(name, rows, torch.cuda.get_device_name())
            print(f"\n{name} (written to {written})\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
