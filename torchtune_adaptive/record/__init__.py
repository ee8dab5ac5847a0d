"""What happened in a run or a search, for people to read and for runs to resume from."""

from torchtune_adaptive.record.events import Event
from torchtune_adaptive.record.tables import profile_table, search_table
from torchtune_adaptive.record.timeline import Timeline, read_timeline

__all__ = [
    "Event",
    "Timeline",
    "profile_table",
    "read_timeline",
    "search_table",
]
