"""Compare searches for the batch size: our strategies, accelerate and Lightning, on one model and memory limit.

A MemoryMeter simulates the device. All searches train the same model on rows of the same length, with two microbatches
a step, and start from the same weights. The correct result comes from brute force, which trains with 1, 2, 3, ... rows
and measures the peak. Results are not rounded, and no search exceeds `MOST_ROWS`. A round has one search of each kind.
A pair compares `linear` with another search of the same round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from benchmarks.peers import Found, by_accelerate, by_lightning
from benchmarks.results import Result, compared
from tests.searched_model import HEAD_DOMINATED, Shape, Trained
from torchtune_adaptive import MemoryMeter, find_max_batch_size
from torchtune_adaptive.engine.oom import clear_frames

MOST_ROWS = 128
"""The default first batch size of accelerate."""
MiB = 2**20

Search: TypeAlias = Callable[[Trained, "Device"], Found]


@dataclass(frozen=True)
class Case:
    """A model and a memory limit."""

    name: str
    shape: Shape
    limit_bytes: int


CASES = [
    Case("layers are largest", Shape(vocabulary=256, dim=96, hidden=384, layers=6, length=24), 36 * MiB),
    Case("head is largest", HEAD_DOMINATED, 24 * MiB),
]
"""Two models: in the second, what needs the most at one or two rows is not what needs the most at many."""


class Device(MemoryMeter):
    """Raises errors with the text of PyTorch's CPU allocator, by which accelerate and Lightning recognize them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            reason = str(error)
            clear_frames(error)  # they hold tensors that a real allocator would not have allocated
        raise torch.OutOfMemoryError(f"DefaultCPUAllocator: can't allocate memory: {reason}")


def by_us(strategy: str, trained: Trained, device: Device) -> Found:
    result = find_max_batch_size(trained.step(), memory=device, strategy=strategy, round_to="none", max_rows=MOST_ROWS)
    return Found(result.rows, len(result.probes), result.out_of_memory_count)


CONTENDERS: Mapping[str, Search] = {
    "linear": partial(by_us, "linear"),
    "binary": partial(by_us, "binary"),
    "accelerate": partial(by_accelerate, MOST_ROWS),
    "Lightning, power": partial(by_lightning, "power"),
    "Lightning, binsearch": partial(by_lightning, "binsearch"),
}


def run(pairs: int) -> Result:
    note = (
        "One process, because the other libraries do not coordinate a search over ranks. fits: the most rows, by brute "
        "force; ratio: seconds over linear's. The other libraries have their defaults: accelerate lowers the batch by "
        "10 % until training succeeds, here for 3 steps, as in Lightning; Lightning subtracts 5 % after its binsearch"
    )
    return Result([row for case in CASES for row in measure(case, pairs)], note)


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    torch.set_num_threads(1)
    fitting = brute_force(case)
    found: dict[str, Found] = {}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with only_new_garbage():
        for name, search in [*CONTENDERS.items()] * rounds:
            found[name], taken = timed(case, search)
            seconds[name].append(taken)
    return [
        {
            "model": case.name,
            "search": name,
            "rows": found[name].rows,
            "fits": fitting,
            "probes": found[name].probes,
            "out of memory": found[name].out_of_memory,
            "seconds": statistics.median(seconds[name]),
            **compared(list(zip(seconds["linear"], seconds[name], strict=True))),
        }
        for name in CONTENDERS
    ]


def timed(case: Case, search: Search) -> tuple[Found, float]:
    """Run a search with a new model; return its result and seconds."""
    with Device(case.limit_bytes) as device:
        trained = Trained(case.shape)
        began = time.perf_counter()
        found = search(trained, device)
        return found, time.perf_counter() - began


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Exclude imported objects from garbage collection, which would spend most of its time on them after each trial."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def brute_force(case: Case) -> int:
    """Return the most rows whose training steps stay within the limit."""
    with Device() as device:
        trained = Trained(case.shape)
        trained.train([1])  # creates the optimizer state
        for rows in range(1, MOST_ROWS + 1):
            device.reset_peak()
            trained.train([rows, rows])
            if device.peak_bytes > case.limit_bytes:
                return rows - 1
    raise ValueError(f"{case.name}: {MOST_ROWS} rows fit, so no search would have to stop; lower the limit")
