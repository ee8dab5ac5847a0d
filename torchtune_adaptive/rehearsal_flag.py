"""The flag of a rehearsal (started by `rehearse/`), which runs without computation or communication."""

from collections.abc import Callable, Mapping
from typing import Any


class Rehearsal:
    """Marks a process as a rehearsal, and gives access to its record."""

    def __init__(self) -> None:
        self.on = False
        self.record: Callable[[str, Mapping[str, Any]], object] = lambda kind, values: None
        """Adds a line to the record of the rehearsal; does nothing outside of one."""


REHEARSAL = Rehearsal()
