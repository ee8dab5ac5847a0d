"""The allocator at its limit; tests/null/ tests it in more detail."""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.real_steps import GIB, use
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.memory import FRAGMENTATION, CudaMemory
from torchtune_adaptive.engine.oom import release_memory
from torchtune_adaptive.formatting import parse_size


def limit_of_a_gpu(name: str) -> None:
    use(name)
    memory = CudaMemory(parse_size("2GiB", "adaptive.memory_limit"))
    assert memory.budget_bytes == pytest.approx(2 * GIB * (1 - FRAGMENTATION), rel=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * GIB, dtype=torch.uint8, device=name)
    with pytest.raises(torch.OutOfMemoryError), memory.unlimited():
        torch.empty(2**50, dtype=torch.uint8, device=name)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * GIB, dtype=torch.uint8, device=name)
    with memory.unlimited():
        held = torch.empty(3 * GIB, dtype=torch.uint8, device=name)
    assert memory.peak_bytes >= held.nbytes
    assert memory.retries > 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB // 2, dtype=torch.uint8, device=name)
    del held
    release_memory()
    memory.reset_peak()
    assert memory.peak_bytes == 0


def test_limit_is_the_budget_and_the_allocator_enforces_it(cuda: str) -> None:
    run_on_ranks(1, limit_of_a_gpu, cuda)


def budget_with_another_process(name: str) -> int:
    """Collective: return on each rank by how much its budget shrinks when rank 0 allocates several GiB."""
    device = use(name)
    memory = CudaMemory()
    torch.zeros(1, device=device)  # create every context first
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
def test_memory_of_another_process_is_excluded_from_the_budget(cuda: str) -> None:
    holder, other = run_on_ranks(2, budget_with_another_process, cuda)
    assert holder == pytest.approx(0, abs=GIB / 10)
    assert other == pytest.approx(8 * GIB * (1 - FRAGMENTATION), rel=0.02)
