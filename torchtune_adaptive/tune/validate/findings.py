"""What a check has found: what a run refuses, and what only the machine can tell on which it will run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchtune_adaptive.config.remedies import in_keys
from torchtune_adaptive.errors import AdaptiveError, RunFinished, SeveralErrors

T = TypeVar("T")


class Findings:
    """Collects, so that somebody who has made three mistakes hears of three."""

    def __init__(self, *, here: bool) -> None:
        self.wrong: list[str] = []
        """What a run would refuse."""
        self.notes: list[str] = []
        """What is well on this machine, or cannot be told on it."""
        self._here = here

    def collect(self, work: Callable[[], T]) -> T | None:
        """What the work returns; None where a run would refuse it, which is noted."""
        try:
            return work()
        except SeveralErrors as several:
            self._add(*several.errors)
        except AdaptiveError as error:
            self._add(error)
        except RunFinished as finished:
            self.notes.append(str(finished))
        return None

    def _add(self, *errors: AdaptiveError) -> None:
        """Each once: two checks may find the same."""
        self.wrong = list(dict.fromkeys([*self.wrong, *map(in_keys, errors)]))

    def note_missing_here(self, missing: str) -> None:
        """What this machine lacks: wrong if it is the one that the run will be on."""
        if self._here:
            self.wrong.append(missing)
        else:
            self.notes.append(f"on this machine: {missing}")
