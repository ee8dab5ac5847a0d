"""Adaptive batching for torchtune, and for plain PyTorch + FSDP2 loops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtune_adaptive.engine.consistency import synchronize_replicas as synchronize_replicas
    from torchtune_adaptive.engine.length_profile import Profile as Profile
    from torchtune_adaptive.engine.limits import RowLimit as RowLimit
    from torchtune_adaptive.engine.limits import TokenLimit as TokenLimit
    from torchtune_adaptive.engine.memory import CudaMemory as CudaMemory
    from torchtune_adaptive.engine.memory import MemoryMeter as MemoryMeter
    from torchtune_adaptive.engine.plans import SampleKind as SampleKind
    from torchtune_adaptive.engine.probes import TrainingStep as TrainingStep
    from torchtune_adaptive.engine.probes import find_max_batch_size as find_max_batch_size
    from torchtune_adaptive.engine.probes import profile_memory as profile_memory
    from torchtune_adaptive.engine.recovery import Recovery as Recovery
    from torchtune_adaptive.engine.results import StepResult as StepResult
    from torchtune_adaptive.engine.results import Totals as Totals
    from torchtune_adaptive.engine.search import SearchResult as SearchResult
    from torchtune_adaptive.engine.step import Stages as Stages
    from torchtune_adaptive.engine.step import StepRunner as StepRunner
    from torchtune_adaptive.errors import AdaptiveError as AdaptiveError
    from torchtune_adaptive.errors import ConfigError as ConfigError
    from torchtune_adaptive.errors import LimitExhaustedError as LimitExhaustedError
    from torchtune_adaptive.errors import OneRowDoesNotFitError as OneRowDoesNotFitError
    from torchtune_adaptive.errors import RecoveryUnsupportedError as RecoveryUnsupportedError
    from torchtune_adaptive.errors import UnrecoverableError as UnrecoverableError
    from torchtune_adaptive.report.tables import profile_table as profile_table
    from torchtune_adaptive.report.tables import search_table as search_table

__version__ = "0.2.0"

_NAMES = {
    "errors": "AdaptiveError ConfigError LimitExhaustedError OneRowDoesNotFitError RecoveryUnsupportedError "
    "UnrecoverableError",
    "report.tables": "profile_table search_table",
    "engine.consistency": "synchronize_replicas",
    "engine.length_profile": "Profile",
    "engine.limits": "RowLimit TokenLimit",
    "engine.memory": "CudaMemory MemoryMeter",
    "engine.plans": "SampleKind",
    "engine.probes": "TrainingStep find_max_batch_size profile_memory",
    "engine.recovery": "Recovery",
    "engine.results": "StepResult Totals",
    "engine.search": "SearchResult",
    "engine.step": "Stages StepRunner",
}
"""The public names, by the module that defines them."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that commands without torch do not wait for its import."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
