"""The margin that a search has to leave free on a GPU: steps of mixed lengths through the replayed allocator.

    python -m benchmarks.fragmentation [--steps 100]

A search accepts rows whose probe needs no retry. So the tightest memory in which the probe needs none is looked for
first. In that, and in a little more, come steps whose longest samples differ, as in training, and those are counted in
which the allocator has to flush its cache: what they need more than the probe is the margin for fragmentation.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from benchmarks.results import save, table
from torchtune_adaptive.prediction import AllocatorRun, MemoryLaw
from torchtune_adaptive.tune.plan.capacities import predict
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.start.command_line import locate

MARGINS = (0.0, 0.02, 0.05)
MIB = 2**20


class Trained(NamedTuple):
    """A configuration, and the rows that one of its cards trains with."""

    config: str
    world_size: int
    memory_limit: str
    tokens: int


CASES = (
    Trained("adaptive/llama3_2/1B_full", 1, "4090", 2048),
    Trained("adaptive/llama3_1/8B_full", 8, "h100", 4096),
    Trained("adaptive/llama3_1/8B_lora", 2, "h100", 4096),
)


def law_and_rows(case: Trained) -> tuple[MemoryLaw, int]:
    cfg = OmegaConf.load(locate(case.config))
    assert isinstance(cfg, DictConfig)
    settings = PlanSettings(world_size=case.world_size, memory_limit=case.memory_limit, sequence_length=(case.tokens,))
    answer = predict(cfg, settings, traced=lambda: None).capacities[0]
    return answer.law, answer.chosen_rows


def lengths_of_steps(longest: int, rows: int, steps: int) -> list[int]:
    """The longest of so many samples, step by step: log-normal, as in instruction data."""
    draw = random.Random(0)
    median = longest / 8
    return [
        max(64, min(longest, int(max(median * draw.lognormvariate(0, 0.9) for _ in range(rows))))) for _ in range(steps)
    ]


def retries(law: MemoryLaw, rows: int, lengths: Sequence[int], capacity_bytes: int) -> list[int] | None:
    """Retries of each step; None where memory runs out."""
    run = AllocatorRun(law.program, capacity_bytes)
    counts = []
    for tokens in lengths:
        before = run.reserved.retries
        if not run.step(law.sizes(rows, tokens).tolist()):
            return None
        counts.append(run.reserved.retries - before)
    return counts


def tightest_bytes(law: MemoryLaw, rows: int, tokens: int, peak_bytes: int) -> int:
    """The least memory in which two steps as large as can be need no retry, to 8 MiB."""
    low, high = peak_bytes, 2 * peak_bytes
    while high - low > 8 * MIB:
        middle = (low + high) // 2
        counts = retries(law, rows, [tokens, tokens], middle)
        low, high = (low, middle) if counts == [0, 0] else (middle, high)
    return high


def measure(case: Trained, steps: int) -> dict[str, Any]:
    law, rows = law_and_rows(case)
    peak_bytes = law.peak(rows, case.tokens).peak_bytes or 0
    tight_bytes = tightest_bytes(law, rows, case.tokens, peak_bytes)
    lengths = [case.tokens, case.tokens, *lengths_of_steps(case.tokens, rows, steps)]
    found: dict[str, Any] = {
        "config": case.config,
        "ranks": case.world_size,
        "rows": rows,
        "allocated GiB": peak_bytes / 2**30,
        "tightest / allocated": tight_bytes / peak_bytes,
    }
    for margin in MARGINS:
        counts = retries(law, rows, lengths, int(tight_bytes * (1 + margin)))
        with_retries = "out of memory" if counts is None else sum(count > 0 for count in counts)
        found[f"steps with retries, {100 * margin:.0f} % more"] = with_retries
    return {**found, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    rows = [measure(case, steps) for case in CASES]
    print(table(rows))
    print(f"written to {save('fragmentation', rows)}")


if __name__ == "__main__":
    main()
