"""What `adaptive_plan` predicts beside what is allocated and reserved, on one device or on one of eight.

The peers of that one are made up: their collectives do nothing, and leave behind what FSDP allocates for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import pytest
import torch

from tests.gpu.real_steps import build, demo, metered, side_by_side, use
from tests.ranks import run_on_ranks
from torchtune_adaptive.prediction.allocator_replay import STEPS_UNTIL_STEADY
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.plan.capacities import predict
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.trace.shims import rank_0_of

ALLOCATED, RESERVED = 0.02, 0.05
ROWS = {"cpu": 4, "cuda": 8}
TOKENS = {"cpu": 256, "cuda": 2048}
SIZES = {
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
DTYPE = {"cpu": "fp32", "cuda": "bf16"}


class Case(NamedTuple):
    kind: str
    checkpointing: bool
    world_size: int

    def __str__(self) -> str:
        return f"{self.kind}{', checkpointing' if self.checkpointing else ''}, {self.world_size} ranks"


CASES = {
    "cpu": [Case("full", True, 8), Case("lora", False, 1)],
    "cuda": [Case(*values) for values in product(("full", "lora"), (False, True), (1, 8))],
}


class Compared(NamedTuple):
    planned_bytes: int
    allocated_bytes: int
    planned_reserved_bytes: int
    reserved_bytes: int

    @property
    def allocated_error(self) -> float:
        """Of the plan, as a share of what was measured."""
        return self.planned_bytes / self.allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        return self.planned_reserved_bytes / self.reserved_bytes - 1


def compare(name: str, case: Case) -> Compared:
    """The plan, and the first steps of a run, which is what a plan replays."""
    rows, tokens = ROWS[name], TOKENS[name]
    changes = (f"enable_activation_checkpointing={case.checkpointing}", f"dtype={DTYPE[name]}")
    cfg = demo(case.kind, name, *changes, **SIZES[name])
    plan = PlanSettings(world_size=case.world_size, memory_limit="100GiB", sequence_length=tokens)
    planned = predict(cfg, plan, traced=lambda: None).capacities[0].predict(rows)
    device = use(name)
    with group_of(case.world_size, device):
        step = build(cfg, device)
        with metered(step) as memory:
            for _ in range(STEPS_UNTIL_STEADY):
                step.train(rows, tokens)
            allocated_bytes = memory.peak_bytes
    reserved_bytes = torch.cuda.max_memory_reserved() if name == "cuda" else allocated_bytes
    return Compared(planned.peak.peak_bytes or 0, allocated_bytes, planned.reserved_bytes, reserved_bytes)


@contextmanager
def group_of(world_size: int, device: torch.device) -> Iterator[None]:
    """This process as rank 0 of so many."""
    if world_size > 1:
        with rank_0_of(world_size):
            yield
        return
    process_group.join_on(device)
    try:
        yield
    finally:
        process_group.leave()


@contextmanager
def comparisons(device: str) -> Iterator[Mapping[Case, Future[Compared]]]:
    """Of all cases, each in a process of its own, whose allocator has seen nothing else."""

    def compare_apart(case: Case) -> Compared:
        return run_on_ranks(1, compare, device, case, timeout_s=200, in_group=False)[0]

    with side_by_side(device, compare_apart, CASES[device]) as found:
        yield found


@pytest.fixture(scope="module")
def compared(device: str) -> Iterator[Mapping[Case, Future[Compared]]]:
    with comparisons(device) as found:
        yield found


@pytest.mark.parametrize("case", CASES["cuda"], ids=str)
def test_a_step_allocates_and_reserves_what_was_planned(compared: Mapping[Case, Future[Compared]], case: Case) -> None:
    if case not in compared:
        pytest.skip("two cases show on a CPU that this test works")
    found = compared[case].result()
    assert abs(found.allocated_error) <= ALLOCATED, found
    assert abs(found.reserved_error) <= RESERVED, found
