"""Adaptive batching for torchtune, and for plain PyTorch + FSDP2 loops."""

from torchtune_adaptive.errors import (
    AdaptiveError,
    ConfigError,
    LimitExhaustedError,
    OneRowDoesNotFitError,
    RecoveryUnsupportedError,
    UnrecoverableError,
)
from torchtune_adaptive.limits.limit import RowLimit
from torchtune_adaptive.memory.device import CudaMemory
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.search.find import find_max_batch_size
from torchtune_adaptive.search.probe import TrainingStep
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.step.reports import StepResult
from torchtune_adaptive.step.runner import StepRunner, Totals

__all__ = [
    "AdaptiveError",
    "ConfigError",
    "CudaMemory",
    "LimitExhaustedError",
    "MemoryMeter",
    "OneRowDoesNotFitError",
    "RecoveryUnsupportedError",
    "RowLimit",
    "SearchResult",
    "StepResult",
    "StepRunner",
    "Totals",
    "TrainingStep",
    "UnrecoverableError",
    "find_max_batch_size",
]
