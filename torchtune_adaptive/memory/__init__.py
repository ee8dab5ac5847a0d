"""How much memory there is, how much a step needed, and how everything is put back. Never torch.distributed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtune_adaptive.memory.cpu_meter import MemoryMeter
    from torchtune_adaptive.memory.device import CudaMemory, MemorySource
    from torchtune_adaptive.memory.oom import forget_frames, is_oom, release

__all__ = [
    "CudaMemory",
    "MemoryMeter",
    "MemorySource",
    "forget_frames",
    "is_oom",
    "release",
]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: a `Peak` needs no torch, and is what searches and records are about."""
    if name in __all__:
        homes = {"MemoryMeter": "cpu_meter", "CudaMemory": "device", "MemorySource": "device"}
        return getattr(import_module(f"{__name__}.{homes.get(name, 'oom')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
