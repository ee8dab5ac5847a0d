"""The flag that marks this process as a rehearsal: a run of `rehearse/` without computation or communication."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Rehearsal:
    """Marks a process as a rehearsal, and holds the function that records its results."""

    def __init__(self) -> None:
        self.on = False
        self.record: Callable[[str, Mapping[str, Any]], object] = lambda kind, values: None
        """Adds a line to the record of the rehearsal. Does nothing in other processes."""
        self.folder_without_data: Path | None = None
        """With `--without-data`, an empty folder for the output of a recipe, which replaces its data by stand-ins."""


REHEARSAL = Rehearsal()
