"""The memory budget on a simulated GPU."""

from unittest import mock

import pytest
import torch

from tests.null.processes import on_null_device
from torchtune_adaptive.engine.memory import FRAGMENTATION, CudaMemory, memory_within
from torchtune_adaptive.formatting import parse_size

GIB = 2**30


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@on_null_device()
def test_room_beside_a_sleeping_engine_of_this_process_is_that_beside_the_awake_one() -> None:
    """Change memory as TRL's colocated vLLM does: its pool sleeps, wakes up for a generation, and sleeps again.

    vLLM allocates weights and caches in a pool of torch. When it sleeps, it unmaps the memory, but torch counts it on.
    """
    in_use, engine, libraries = 4 * GIB, 30 * GIB, 2 * GIB
    pool, held = torch.cuda.MemPool(), [take(in_use)]
    with torch.cuda.use_mem_pool(pool):
        held.append(take(engine))
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == in_use + engine
    memory, (_, total) = CudaMemory(), torch.cuda.mem_get_info()
    free_awake = total - in_use - engine - libraries
    for free in (free_awake + engine, free_awake, free_awake + engine):
        with mock.patch("torch.cuda.mem_get_info", return_value=(free, total)):
            assert 0.9 * free_awake < memory.budget_bytes - memory.peak_bytes <= free_awake


@on_null_device()
def test_budget_counts_the_most_memory_that_another_process_has_held() -> None:
    memory, (free, total) = CudaMemory(), torch.cuda.mem_get_info()
    held = take(4 * GIB)
    for others, counted in ((0, 0), (30 * GIB, 30 * GIB), (10 * GIB, 30 * GIB)):
        left = free - torch.cuda.memory_reserved() - others
        with mock.patch("torch.cuda.mem_get_info", return_value=(left, total)):
            assert memory.budget_bytes == int((80 * GIB - counted) * (1 - FRAGMENTATION))
    assert held.numel() == 4 * GIB


@on_null_device()
def test_memory_limit_ends_with_its_context_and_later_contexts_count_the_most_memory_held_elsewhere() -> None:
    free, total = torch.cuda.mem_get_info()
    limit, device = parse_size(0.5, "memory_limit"), torch.device("cuda", 0)
    with memory_within(limit, device, []) as memory:
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        assert memory is not None
        with mock.patch("torch.cuda.mem_get_info", return_value=(free - 30 * GIB, total)):
            assert memory.budget_bytes
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    with memory_within(None, device, [], memory) as later:
        assert later is not None
        assert later.budget_bytes == int(50 * GIB * (1 - FRAGMENTATION))


@pytest.mark.parametrize(
    ("limit", "others_gib", "room_gib"),
    [(None, 0, 80), (None, 20, 60), ("70GiB", 20, 60), ("24GiB", 20, 24), (0.3, 0, 24)],
)
@on_null_device()
def test_budget_is_the_smallest_of_limit_and_room_less_a_margin(
    limit: str | float | None, others_gib: int, room_gib: int
) -> None:
    memory = CudaMemory(None if limit is None else parse_size(limit, "memory_limit"))
    held, (free, total) = take(10 * GIB), torch.cuda.mem_get_info()
    with mock.patch("torch.cuda.mem_get_info", return_value=(free - others_gib * GIB, total)):
        assert memory.budget_bytes == pytest.approx(room_gib * GIB * (1 - FRAGMENTATION))
        assert memory.fullness == pytest.approx(held.nbytes / room_gib / GIB)
