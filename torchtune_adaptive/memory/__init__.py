"""How much memory there is, how much a step needed, and how everything is put back. Never torch.distributed."""

from torchtune_adaptive.memory.device import CudaMemory, MemorySource, forget_frames, is_oom, release
from torchtune_adaptive.memory.meter import MemoryMeter

__all__ = [
    "CudaMemory",
    "MemoryMeter",
    "MemorySource",
    "forget_frames",
    "is_oom",
    "release",
]
