"""The largest limit that fits, found before training. Only `find` and `probe_runner` need torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.search.profile import Profile
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.search.strategies import STRATEGIES, History

if TYPE_CHECKING:
    from torchtune_adaptive.search.find import find_max_batch_size, profile_memory
    from torchtune_adaptive.search.probe_runner import TrainingStep

__all__ = [
    "STRATEGIES",
    "History",
    "Profile",
    "SearchResult",
    "TrainingStep",
    "find_max_batch_size",
    "profile_memory",
]

_NEED_TORCH = {"TrainingStep": "probe_runner", "find_max_batch_size": "find", "profile_memory": "find"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first used: the keys of a config are listed without it."""
    if name in _NEED_TORCH:
        return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
