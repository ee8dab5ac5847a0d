"""Adaptive batching for torchtune, and for plain PyTorch + FSDP2 loops."""

from torchtune_adaptive.batch_size import find_max_batch_size
from torchtune_adaptive.cpu_memory import MemoryMeter
from torchtune_adaptive.errors import (
    AdaptiveError,
    ConfigError,
    LimitExhaustedError,
    OneRowDoesNotFitError,
    RecoveryUnsupportedError,
    UnrecoverableError,
)
from torchtune_adaptive.limits import RowLimit
from torchtune_adaptive.memory import CudaMemory
from torchtune_adaptive.probe import TrainingStep
from torchtune_adaptive.reports import StepResult
from torchtune_adaptive.search import SearchResult
from torchtune_adaptive.stepping import StepRunner, Totals

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
