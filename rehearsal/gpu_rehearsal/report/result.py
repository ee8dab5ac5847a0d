"""The result of a rehearsal, for users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_rehearsal.report import text, verdict
from gpu_rehearsal.report.record import Record
from gpu_rehearsal.report.verdict import Outcome


@dataclass(frozen=True)
class RehearsalResult(Record):
    """A record with its verdict and its report."""

    @property
    def outcome(self) -> Outcome:
        """How the rehearsal has ended."""
        return verdict.outcome(self)

    @property
    def fits(self) -> bool | None:
        """True if the script fits, False if it ran out of memory, None if there is no answer."""
        return verdict.fits(self)

    def verdict(self) -> str:
        """Return the result in one line."""
        return verdict.verdict(self)

    def as_text(self) -> str:
        """Return the verdict, the searches, the steps, and what holds the memory after an out-of-memory error."""
        return text.as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return text.as_dict(self)
