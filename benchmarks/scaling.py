"""Measure how the cost of this package grows: planning a step, agreeing at its end, counting collectives.

Goal: linear or better. A power of the size is fitted to the upper half of each curve, where constant costs matter
least. An exponent of 1 is linear. All times are CPU times of the rank, because 64 ranks share the cores of this machine
and would wait for each other much longer than on separate machines.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.packing import INSTRUCTIONS
from benchmarks.results import Result
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.collectives import CollectiveLedger
from torchtune_adaptive.engine.fsdp import AllGather, ReduceScatter
from torchtune_adaptive.engine.limits import Limit, RowLimit, Surface, SurfaceLimit, TokenLimit
from torchtune_adaptive.engine.plans import load_of, plan_step, spread
from torchtune_adaptive.engine.ranks import Agreement
from torchtune_adaptive.engine.results import REPORT_COLUMNS, AttemptReport, AttemptReports

SAMPLES = [2**exponent for exponent in range(4, 17)]
RANKS = [2, 4, 8, 16, 32, 64]
SIMULATED_RANKS = [2**exponent for exponent in range(1, 11)]
MODULES = [4, 32, 250, 1000, 2000, 4000]

LIMITS: Mapping[str, Limit] = {
    "rows": RowLimit(8),
    "tokens": TokenLimit(8192),
    "measured": SurfaceLimit(
        {"layers": Surface(1e8, 1e3, 2e4, 1.0), "head": Surface(5e7, 0.0, 3e4), "update": Surface(2e8)}, 400_000_000
    ),
}


@dataclass(frozen=True)
class Curve:
    """The cost of an operation at several sizes."""

    name: str
    of: str
    """The noun that the sizes count."""
    ms: Mapping[int, float]

    @property
    def exponent(self) -> float:
        """Exponent of the size in the power law that fits the upper half best."""
        upper = list(self.ms.items())[len(self.ms) // 2 :]
        sizes, times = zip(*upper, strict=True)
        return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "of": self.of, "exponent": self.exponent, "ms": dict(self.ms)}

    def shown(self) -> dict[str, Any]:
        sizes = list(self.ms)
        return {
            "what": self.name,
            "sizes": f"{sizes[0]} to {sizes[-1]} {self.of}",
            "ms, smallest": self.ms[sizes[0]],
            "ms, largest": self.ms[sizes[-1]],
            "us each, largest": 1e3 * self.ms[sizes[-1]] / sizes[-1],
            "exponent": self.exponent,
        }


def run(pairs: int) -> Result:
    curves = [*planning(pairs), *agreement(pairs), *counting(pairs)]
    note = (
        "CPU time of a rank in one step; exponent: of the upper half of the sizes, 1 is linear. Ranks that agree are "
        f"processes, connected by gloo, and their table has {8 * REPORT_COLUMNS} bytes per rank; "
        "modules are those of one process, whose collectives return at once"
    )
    return Result([curve.to_json() for curve in curves], note, [curve.shown() for curve in curves])


def planning(rounds: int) -> list[Curve]:
    """Plan steps of several sizes as StepRunner does; spread them because other ranks need more microbatches."""
    draw = random.Random(0)
    lengths = [INSTRUCTIONS.draw_length(draw) for _ in range(SAMPLES[-1])]
    return [
        Curve(
            f"planning by {name}",
            "samples",
            {samples: milliseconds(partial(plan, lengths[:samples], limit), rounds) for samples in SAMPLES},
        )
        for name, limit in LIMITS.items()
    ]


def plan(lengths: Sequence[int], limit: Limit) -> None:
    planned = plan_step(lengths, limit)
    if limit.by_length:
        planned = spread(planned, lengths, limit, len(planned) + 1)
    load_of(planned, lengths)


def agreement(rounds: int) -> list[Curve]:
    """Time agreements of several numbers of ranks, with one process per rank, and the evaluation of the tables."""
    width = REPORT_COLUMNS
    measured = {ranks: run_on_ranks(ranks, time_agreements, rounds, width, timeout_s=120)[0] for ranks in RANKS}
    wide = run_on_ranks(FEW, time_tables, rounds, width, timeout_s=120)[0]
    read = {ranks: milliseconds(partial(conclude, ranks), rounds) for ranks in SIMULATED_RANKS}
    return [
        Curve("agreeing", "ranks", measured),
        Curve(f"{FEW} ranks agree on the table of so many", "ranks", wide),
        Curve("reading what was agreed on", "ranks", read),
    ]


AGREEMENTS = 10
FEW = 4


def time_tables(rounds: int, width: int) -> dict[int, float]:
    """Collective: time agreements with the table sizes of more ranks."""
    wide = [ranks for ranks in SIMULATED_RANKS if ranks >= FEW]
    return {ranks: time_agreements(rounds, width * ranks // FEW) for ranks in wide}


def time_agreements(rounds: int, width: int) -> float:
    """Collective: return this rank's CPU milliseconds per agreement, with gloo's threads, for rows of `width`."""
    agreement = Agreement(width)
    row = [1.0] * width
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.process_time()
        for _ in range(AGREEMENTS):
            agreement.gather(row)
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times[1:]) / AGREEMENTS  # the first connects the ranks


def conclude(ranks: int) -> None:
    """Compute the results that every rank derives from the reports of all ranks."""
    reports = AttemptReports([AttemptReport(position=7, target_tokens=rank) for rank in range(ranks)])
    reports.check_positions()
    assert not reports.failed
    assert reports.target_tokens == sum(range(ranks))
    assert sum(report.loss_sum for report in reports) == reports.upcoming_microbatches == 0


def counting(rounds: int) -> list[Curve]:
    """Time the ledger in a microbatch, by number of FSDP modules, in a process that is one of two ranks."""
    with two_ranks_of_which_one_exists(), no_garbage_collection():
        costs = {modules: time_ledger(modules, rounds) for modules in MODULES}
    return [
        Curve(what, "modules", {modules: cost[what] for modules, cost in costs.items()}) for what in costs[MODULES[0]]
    ]


def time_ledger(modules: int, rounds: int) -> dict[str, float]:
    """Return milliseconds in a step of one microbatch: of the ledger, of FSDP itself, and of a reset."""
    model = chain(modules)
    ledger, stopwatch = CollectiveLedger(model), Stopwatch()
    ledger.issue = stopwatch.around(ledger.issue)
    passes, counts = [], []
    for _ in range(2):  # the first initializes FSDP
        stopwatch.seconds = 0.0
        began = time.thread_time()
        stopwatch.around(ledger.begin_attempt)(1, [model])
        stopwatch.around(ledger.begin_microbatch)(0)
        model(torch.ones(1, 2)).sum().backward()
        stopwatch.around(ledger.end_microbatch)()
        passes.append(1e3 * (time.thread_time() - began))
        counts.append(1e3 * stopwatch.seconds)
    model.zero_grad(set_to_none=True)
    reset = milliseconds(ledger.reset, rounds)
    ledger.close()
    return {
        "counting collectives": counts[-1],
        "FSDP's own time": passes[-1] - counts[-1],
        "reset after a failure": reset,
    }


class Stopwatch:
    """Sums up the time spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def chain(modules: int) -> nn.Module:
    """Return a chain of tiny modules, each sharded separately."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(modules)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
        module.set_custom_all_gather(NoAllGather())
        module.set_custom_reduce_scatter(NoReduceScatter())
    return model


class Nothing:
    """A collective without effect, to exclude communication from the measurement."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, *tensors: Any, **options: Any) -> None:
        pass


class NoAllGather(Nothing, AllGather):
    pass


class NoReduceScatter(Nothing, ReduceScatter):
    pass


@contextmanager
def two_ranks_of_which_one_exists() -> Iterator[None]:
    """Create a process group without peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would add to the time of a random measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def milliseconds(function: Callable[[], object], rounds: int) -> float:
    """Return the median time of several rounds, each with enough calls for the resolution of the clock."""
    function()
    calls, seconds = 1, _seconds(function, 1)
    if seconds < SHORTEST_ROUND_S:
        calls = math.ceil(SHORTEST_ROUND_S / max(seconds, 1e-7))
    return 1e3 * statistics.median(_seconds(function, calls) / calls for _ in range(rounds))


SHORTEST_ROUND_S = 0.005


def _seconds(function: Callable[[], object], calls: int) -> float:
    began = time.thread_time()
    for _ in range(calls):
        function()
    return time.thread_time() - began
