"""The allocator at its limit: what it refuses, and what it grants only after a flush of its cache, slowly."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.gpu.real_steps import GIB, RealStep, build, demo, limit, metered, use, worst
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.memory import FRAGMENTATION, CudaMemory
from torchtune_adaptive.engine.oom import release
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.text import parse_size
from torchtune_adaptive.tune.samples import Sample

ROWS = 8
LENGTHS = (1024, 2048)
"""What the shorter rows leave in the cache is too small for the longer ones."""
SIZES = {"num_layers": 4, "embed_dim": 512, "intermediate_dim": 1024, "vocab_size": 32_768}
SHARES = (1.1, 0.8, 0.6, 0.4, 0.2)


class NearLimit(NamedTuple):
    """A step of short and of long rows under a limit."""

    share: float
    """What the limit leaves of the bytes that are reserved, without one, beyond those that are allocated."""
    trained: bool
    retries: int


def train_near_the_limit(name: str) -> list[NearLimit]:
    """Collective: the same step with less and less room for the cache."""
    step = build(demo("full", name, "dtype=bf16", **SIZES), use(name))
    runner = step.runner(ROWS)
    with metered(step) as memory:
        assert trains(step, runner)  # optimizer state is there from now on
        release()
        torch.cuda.reset_peak_memory_stats()
        assert trains(step, runner)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found = []
        for share in SHARES:
            limit(memory, allocated + share * (reserved - allocated))
            before = memory.retries
            found.append(NearLimit(share, trains(step, runner), memory.retries - before))
    runner.close()
    return found


def trains(step: RealStep, runner: StepRunner[Sample]) -> bool:
    """Collective: one step, beginning with an empty cache; False if it runs out of memory."""
    release()
    result, _ = runner.attempt([[worst(tokens)] * ROWS for tokens in LENGTHS])
    if result is not None:
        step.optimization.update(result.target_tokens)
    return result is not None


def test_between_what_is_allocated_and_what_is_reserved_a_step_thrashes(cuda: str) -> None:
    with_all_room, *with_less = run_on_ranks(1, train_near_the_limit, cuda, timeout_s=120)[0]
    assert (with_all_room.trained, with_all_room.retries) == (True, 0)
    assert any(each.trained and each.retries > 0 for each in with_less), with_less


def limit_of_a_gpu(name: str) -> None:
    use(name)
    memory = CudaMemory(parse_size("2GiB", "adaptive.memory_limit"))
    assert memory.budget_bytes == pytest.approx(2 * GIB * (1 - FRAGMENTATION), rel=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * GIB, dtype=torch.uint8, device=name)
    with memory.unlimited():
        held = torch.empty(3 * GIB, dtype=torch.uint8, device=name)
    assert memory.peak_bytes >= held.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB // 2, dtype=torch.uint8, device=name)
    del held
    release()
    memory.reset_peak()
    assert memory.peak_bytes == 0


def test_a_limit_is_the_budget_and_the_allocator_enforces_it(cuda: str) -> None:
    run_on_ranks(1, limit_of_a_gpu, cuda)


def budget_beside_another_process(name: str) -> int:
    """Collective: on each rank, the budget that is lost when rank 0 takes some GiB."""
    device = use(name)
    memory = CudaMemory()
    torch.zeros(1, device=device)  # every context is there
    dist.barrier()
    before = memory.budget_bytes
    dist.barrier()
    held = torch.empty(8 * GIB, dtype=torch.uint8, device=device) if dist.get_rank() == 0 else None
    dist.barrier()
    lost = before - memory.budget_bytes
    dist.barrier()
    del held
    return lost


@pytest.mark.real_gpu
def test_what_another_process_holds_is_not_in_the_budget(cuda: str) -> None:
    holder, other = run_on_ranks(2, budget_beside_another_process, cuda)
    assert holder == pytest.approx(0, abs=GIB / 10)
    assert other == pytest.approx(8 * GIB * (1 - FRAGMENTATION), rel=0.02)
