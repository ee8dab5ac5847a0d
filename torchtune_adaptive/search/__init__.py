"""The largest limit that fits, found before training. Only `find` and `probe` need torch."""

from torchtune_adaptive.search.find import find_max_batch_size, profile_memory
from torchtune_adaptive.search.lengths import Profile
from torchtune_adaptive.search.probe import TrainingStep
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.search.strategies import STRATEGIES, History

__all__ = [
    "STRATEGIES",
    "History",
    "Profile",
    "SearchResult",
    "TrainingStep",
    "find_max_batch_size",
    "profile_memory",
]
