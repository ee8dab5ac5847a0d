"""What a step will allocate, worked out without a device."""

from torchtune_adaptive.prediction.answer import Answer, Budget
from torchtune_adaptive.prediction.cards import limit_bytes
from torchtune_adaptive.prediction.law import MemoryLaw
from torchtune_adaptive.prediction.replay import Run

__all__ = [
    "Answer",
    "Budget",
    "MemoryLaw",
    "Run",
    "limit_bytes",
]
