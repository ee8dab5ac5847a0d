"""What a probe has room for, what it measured, and whether that is within the budget."""

from dataclasses import dataclass
from typing import NamedTuple

from torchtune_adaptive.memory.peak import Peak


class Room(NamedTuple):
    """What a rank has for its training steps."""

    budget_bytes: int
    resident_bytes: int = 0
    """What stays between two steps: weights and optimizer state."""

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.resident_bytes


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measured microbatch."""

    rows: int
    length: int = 0
    """Tokens of each row; 0 where all probes of a search have the same."""
    peak: Peak
    held_out: bool = False
    """Whether the first fit has not seen it, and so can be judged by it."""

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch, padding included."""
        return self.rows * self.length

    def accepted(self, budget_bytes: int) -> bool:
        """Whether this microbatch can be trained with.

        One row is forgiven its allocator retries: there is nothing smaller to fall back on.
        """
        peak_bytes = self.peak.peak_bytes
        within = peak_bytes is not None and peak_bytes <= budget_bytes
        return within and (self.peak.retries == 0 or self.rows == 1)
