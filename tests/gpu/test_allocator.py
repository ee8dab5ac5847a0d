"""The allocator at its limit; tests/null/ tests it in more detail."""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.real_steps import GIB, use
from tests.ranks import on_ranks
from torchtune_adaptive.engine.memory import FRAGMENTATION, CudaMemory
from torchtune_adaptive.engine.oom import release_memory
from torchtune_adaptive.formatting import parse_size


@on_ranks(1)
def test_limit_is_the_budget_and_the_allocator_enforces_it(cuda: str) -> None:
    use(cuda)
    memory = CudaMemory(parse_size("2GiB", "adaptive.memory_limit"))
    assert memory.budget_bytes == pytest.approx(2 * GIB * (1 - FRAGMENTATION), rel=1e-6)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * GIB, dtype=torch.uint8, device=cuda)
    with pytest.raises(torch.OutOfMemoryError), memory.unlimited():
        torch.empty(2**50, dtype=torch.uint8, device=cuda)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * GIB, dtype=torch.uint8, device=cuda)
    with memory.unlimited():
        held = torch.empty(3 * GIB, dtype=torch.uint8, device=cuda)
    assert memory.peak_bytes >= held.nbytes
    assert memory.retries > 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB // 2, dtype=torch.uint8, device=cuda)
    del held
    release_memory()
    memory.reset_peak()
    assert memory.peak_bytes == 0


@pytest.mark.real_gpu
@on_ranks(2)
def test_memory_of_another_process_is_excluded_from_the_budget(cuda: str) -> None:
    """Rank 0 allocates several GiB."""
    device = use(cuda)
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
    expected = 8 * GIB * (1 - FRAGMENTATION) * (dist.get_rank() == 1)
    assert lost == pytest.approx(expected, abs=GIB / 10)
