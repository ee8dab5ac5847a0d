"""What a rehearsal changes in training code. `rehearse/` sets these hooks; recipes and trainers use them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class RunHooks:
    """The hooks of a run. Their defaults are those of real training."""

    def __init__(self) -> None:
        self.has_peers = True
        """False if stand-ins may replace the other ranks."""
        self.has_values = True
        """False if tensors have sizes, but no values. Then no file may remain from which a run could resume."""
        self.record: Callable[[str, Mapping[str, Any]], object] = lambda kind, values: None
        """Adds a line to the record of a rehearsal."""
        self.folder_without_data: Path | None = None
        """With `--without-data`, an empty folder for the output of a recipe, which replaces its data by stand-ins."""


HOOKS = RunHooks()
