"""Less memory than there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchtune_adaptive.memory.device import CudaMemory, MemorySource
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.sizes import MemorySize


@contextmanager
def memory_cap(cap_bytes: int | None) -> Iterator[MemorySource]:
    """This process runs out of memory above so many bytes; None: it is only measured.

    On a GPU, the current one, the allocator enforces it. On a CPU a MemoryMeter does, for what is allocated inside.
    """
    if not torch.cuda.is_available():
        with MemoryMeter(cap_bytes) as meter:
            yield meter
        return
    fraction = torch.cuda.get_per_process_memory_fraction()
    try:
        yield CudaMemory(None if cap_bytes is None else MemorySize(cap_bytes, is_fraction=False))
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)
