"""Compare the step time of whole models on several ranks with that of DistributedDataParallel.

Goal: at most 1.02 in the median, in CPU seconds and in wall time. Both sides run the same forward and backward passes,
in turn, in one process group. A pair is the ratio of two neighbouring groups of steps. Figures are those of rank 0.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.clock import Moment
from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner

WIDTH = {30: 512, 600: 128}
"""By number of trained parameters: the width of the layers. A layer has two trained parameters."""
ROWS, STEPS, RANK_OF_LORA = 256, 4, 8
NOTE = (
    "ratio: CPU seconds of StepRunner over DistributedDataParallel, including the agreement at the end of a step; "
    "wall ratio: of wall time. Linear layers with weight and bias, or with LoRA of rank 8 on frozen weights"
)


class LoraLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, RANK_OF_LORA, bias=False)
        self.up = nn.Linear(RANK_OF_LORA, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.frozen(rows) + self.up(self.down(rows))
        return found


def run(pairs: int) -> Result:
    cases = itertools.product((2, 4), WIDTH, (False, True), (1, 4))
    return Result([measure(*case, pairs) for case in cases], NOTE)


def measure(ranks: int, parameters: int, lora: bool, microbatches: int, pairs: int) -> dict[str, Any]:
    times = run_on_ranks(ranks, time_pairs, parameters, lora, microbatches, pairs, timeout_s=600)[0]
    return {
        "ranks": ranks,
        "parameters": parameters,
        "trained": "LoRA" if lora else "full",
        "microbatches": microbatches,
        "stock cpu ms": 1e3 * statistics.median(stock.cpu_s for stock, _ in times),
        "ours cpu ms": 1e3 * statistics.median(ours.cpu_s for _, ours in times),
        **compared([(stock.cpu_s, ours.cpu_s) for stock, ours in times]),
        "wall ratio": compared([(stock.wall_s, ours.wall_s) for stock, ours in times])["ratio"],
    }


def time_pairs(parameters: int, lora: bool, microbatches: int, pairs: int) -> list[tuple[Moment, Moment]]:
    """Collective: return the times of a step with DistributedDataParallel and with a StepRunner, for each pair."""
    layer = LoraLinear if lora else lambda width: nn.Linear(width, width)
    width = WIDTH[parameters]
    batches = [torch.randn(ROWS, width) for _ in range(microbatches)]
    torch.manual_seed(0)
    models = [nn.Sequential(*(layer(width) for _ in range(parameters // 2))) for _ in range(2)]
    ddp = DistributedDataParallel(models[0])

    def stock(_: int) -> None:
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == microbatches else ddp.no_sync():
                ddp(batch).sum().backward()

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        loss = models[1](samples[0]).sum()
        loss.backward()
        return Totals(loss.detach(), 1)

    runner = StepRunner(
        models[1], forward_backward, kind=SampleKind(length_of=len, filler=lambda each: each), limit=RowLimit(1)
    )

    def ours(step: int) -> None:
        runner.run(batches, step=step)

    def timed(model: nn.Module, run_step: Callable[[int], None]) -> Moment:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for step in range(STEPS):
            run_step(step)
            model.zero_grad(set_to_none=True)
        return Moment((time.perf_counter() - wall_s) / STEPS, (time.process_time() - cpu_s) / STEPS)

    sides = (models[0], stock), (models[1], ours)
    times = []
    for pair in range(pairs + 1):  # the first one warms up
        order = sides if pair % 2 else sides[::-1]
        taken = {model: timed(model, run_step) for model, run_step in order}
        times.append((taken[models[0]], taken[models[1]]))
    return times[1:]
