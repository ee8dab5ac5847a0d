"""What a step will allocate, and how long it takes, worked out without a device."""

from torchtune_adaptive.prediction.allocator_replay import AllocatorRun
from torchtune_adaptive.prediction.capacity import Budget, Capacity
from torchtune_adaptive.prediction.cards import ONE_CORE, Card, limit_bytes
from torchtune_adaptive.prediction.law import MemoryLaw
from torchtune_adaptive.prediction.roofline import Timing, as_tensor

__all__ = [
    "ONE_CORE",
    "AllocatorRun",
    "Budget",
    "Capacity",
    "Card",
    "MemoryLaw",
    "Timing",
    "as_tensor",
    "limit_bytes",
]
