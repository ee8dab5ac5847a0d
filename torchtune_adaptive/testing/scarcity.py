"""Makes memory scarcer than it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtune_adaptive.memory.cpu_meter import MemoryMeter
from torchtune_adaptive.memory.device import CudaMemory, MemorySource
from torchtune_adaptive.memory_sizes import MemorySize


@contextmanager
def memory_cap(cap_bytes: int | None, resident: Iterable[Tensor] = ()) -> Iterator[MemorySource]:
    """This process runs out of memory above so many bytes; None: it is only measured.

    `resident` is what is there already, say parameters. If it is on a GPU, or if there is none of it and this machine
    has a GPU, CUDA's allocator enforces the cap; otherwise a MemoryMeter does.
    """
    here = list(resident)
    on_gpu = any(tensor.is_cuda for tensor in here) if here else torch.cuda.is_available()
    if not on_gpu:
        meter = MemoryMeter(cap_bytes)
        meter.count(here)
        with meter:
            yield meter
        return
    fraction = torch.cuda.get_per_process_memory_fraction()
    try:
        yield CudaMemory(None if cap_bytes is None else MemorySize(cap_bytes, is_fraction=False))
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)
