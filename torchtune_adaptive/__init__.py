"""Adaptive batching for torchtune, and for plain PyTorch + FSDP2 loops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtune_adaptive.errors import (
        AdaptiveError,
        ConfigError,
        LimitExhaustedError,
        OneRowDoesNotFitError,
        RecoveryUnsupportedError,
        UnrecoverableError,
    )
    from torchtune_adaptive.limits.limit import RowLimit, TokenLimit
    from torchtune_adaptive.memory.cpu_meter import MemoryMeter
    from torchtune_adaptive.memory.device import CudaMemory
    from torchtune_adaptive.report.tables import profile_table, search_table
    from torchtune_adaptive.search.find import find_max_batch_size, profile_memory
    from torchtune_adaptive.search.probe_runner import TrainingStep
    from torchtune_adaptive.search.profile import Profile
    from torchtune_adaptive.search.rows import SearchResult
    from torchtune_adaptive.step.reports import StepResult
    from torchtune_adaptive.step.runner import StepRunner, Totals
    from torchtune_adaptive.step.samples import SampleKind

__all__ = [
    "AdaptiveError",
    "ConfigError",
    "CudaMemory",
    "LimitExhaustedError",
    "MemoryMeter",
    "OneRowDoesNotFitError",
    "Profile",
    "RecoveryUnsupportedError",
    "RowLimit",
    "SampleKind",
    "SearchResult",
    "StepResult",
    "StepRunner",
    "TokenLimit",
    "Totals",
    "TrainingStep",
    "UnrecoverableError",
    "find_max_batch_size",
    "profile_memory",
    "profile_table",
    "search_table",
]

_ROOMS = ("errors", "limits", "memory", "report.tables", "search", "step")
"""Each hands on, by its own `__all__` or as a module, what of it is public."""


def __getattr__(name: str) -> Any:
    """What is public is imported when it is first used: a command that needs no torch does not wait seconds for it."""
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"{__name__}.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
