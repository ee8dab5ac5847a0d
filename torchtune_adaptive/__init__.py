"""Adaptive batching for torchtune, and for plain PyTorch + FSDP2 loops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtune_adaptive.engine.consistency import synchronize_replicas
    from torchtune_adaptive.engine.length_profile import Profile
    from torchtune_adaptive.engine.limits import RowLimit, TokenLimit
    from torchtune_adaptive.engine.memory import CudaMemory
    from torchtune_adaptive.engine.meter import MemoryMeter
    from torchtune_adaptive.engine.plans import SampleKind
    from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size, profile_memory
    from torchtune_adaptive.engine.recovery import Recovery
    from torchtune_adaptive.engine.results import StepResult, Totals
    from torchtune_adaptive.engine.search import SearchResult
    from torchtune_adaptive.engine.step import Stages, StepRunner
    from torchtune_adaptive.errors import (
        AdaptiveError,
        ConfigError,
        LimitExhaustedError,
        OneRowDoesNotFitError,
        RecoveryUnsupportedError,
        UnrecoverableError,
    )
    from torchtune_adaptive.report.tables import search_table

__version__ = "0.2.0"
__all__ = [
    "AdaptiveError", "ConfigError", "CudaMemory", "LimitExhaustedError", "MemoryMeter", "OneRowDoesNotFitError",
    "Profile", "Recovery", "RecoveryUnsupportedError", "RowLimit", "SampleKind", "SearchResult", "Stages",
    "StepResult", "StepRunner", "TokenLimit", "Totals", "TrainingStep", "UnrecoverableError", "find_max_batch_size",
    "profile_memory", "search_table", "synchronize_replicas",
]  # fmt: skip
_MODULES = (
    "errors", "engine.limits", "report.tables", "engine.consistency", "engine.length_profile", "engine.memory",
    "engine.meter", "engine.plans", "engine.probes", "engine.recovery", "engine.results", "engine.search",
    "engine.step",
)  # fmt: skip
"""The modules that define these names; those without torch come first."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that commands without torch do not wait for its import."""
    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_module(f"{__name__}.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
