"""Measure what recovery costs in steps without errors, for a tensor-parallel model (failed ranks use ghost passes).

Two runs alternate in one process group: with recovery, and with `Recovery(enabled=False)`. A figure is the CPU time of
a long run minus that of a short one, per step, on rank 0. What happens once per run cancels out.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.results import Result, compared
from tests.distributed.faults.meshes import OnMesh, tensor_parallel
from tests.distributed.models import VOCABULARY, runner_of
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.recovery import Recovery

NOTE = (
    "Llama of 2 layers under tensor, sequence and loss parallelism on gloo; steps of 16 rows of 64 tokens in 2 "
    "microbatches. CPU ms: of a step on rank 0, long run minus short run. ratio: with recovery over without"
)
SHORT, LONG = 2, 14
ROWS, SAMPLES, TOKENS = 8, 16, 64
RANKS = {"tensor parallel 2": 2, "FSDP2 2, tensor parallel 2": 4}


def run(pairs: int) -> Result:
    return Result([measure(mesh, ranks, pairs) for mesh, ranks in RANKS.items()], NOTE)


def measure(mesh: str, ranks: int, pairs: int) -> dict[str, Any]:
    times = run_on_ranks(ranks, time_pairs, pairs, timeout_s=900)[0]
    without, armed = zip(*times, strict=True)
    return {
        "mesh": mesh,
        "without CPU ms": 1e3 * statistics.median(without),
        "with CPU ms": 1e3 * statistics.median(armed),
        **compared(times),
    }


def time_pairs(pairs: int) -> list[tuple[float, float]]:
    """Collective: return the CPU seconds of a step without recovery and with it, for each pair."""
    (model,), forward_backward = OnMesh(tensor_parallel).parts()
    samples = [torch.arange(TOKENS) % VOCABULARY] * SAMPLES

    def seconds_of(steps: int, *, enabled: bool) -> float:
        runner = runner_of(model, ROWS, forward_backward, Recovery(model, enabled=enabled))
        began = time.process_time()
        for step in range(steps):
            runner.run(samples, step=step)
            model.zero_grad(set_to_none=True)
        seconds = time.process_time() - began
        runner.close()
        return seconds

    def step_seconds(*, enabled: bool) -> float:
        return (seconds_of(LONG, enabled=enabled) - seconds_of(SHORT, enabled=enabled)) / (LONG - SHORT)

    step_seconds(enabled=True)  # warms up
    times = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        found = {enabled: step_seconds(enabled=enabled) for enabled in order}
        times.append((found[False], found[True]))
    return times
