"""The memory that a run may use: the device's, or less where `adaptive.memory_limit` says so."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine.memory import CudaMemory, MemorySource
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.text import MemorySize, size_for_rank


@contextmanager
def limited_memory(
    limits: Sequence[MemorySize] | None, device: torch.device, resident: Iterable[torch.Tensor]
) -> Iterator[MemorySource | None]:
    """Enforces this rank's limit while it is open: on CUDA through the allocator, on a CPU through a meter.

    `resident` is what lives on the device already. None where nothing limits memory and nothing measures it: on a CPU
    without a limit.
    """
    limit = None
    if limits is not None:
        limit = size_for_rank(limits, dist.get_rank(), dist.get_world_size(), "adaptive.memory_limit")
    if device.type == "cuda":
        yield CudaMemory(limit, device)
    elif limit is None:
        yield None
    else:
        # Under a dispatch mode nothing is compiled, and what insists on it fails: torchao's optimizers, for example.
        eagerly = torch.compiler.set_stance("force_eager")
        with eagerly, MemoryMeter(limit.bytes_of(_machine_bytes())) as meter:
            meter.count(resident)
            yield meter


def resident_tensors(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """What lives on the device between two steps."""
    states = [leaf for optimizer in optimizers for leaf in tree_iter(dict(optimizer.state))]
    return [*model.parameters(), *model.buffers(), *(leaf for leaf in states if isinstance(leaf, torch.Tensor))]


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
