"""What probes have room for and measured, and the straight lines through it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtune_adaptive.limits.surface import Surface
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


def phase_points(probes: Sequence[Probe]) -> dict[str, dict[tuple[int, int], int]]:
    """Measured bytes by rows and length for each phase, from the probes that ran to their end."""
    points: dict[str, dict[tuple[int, int], int]] = {}
    complete = [probe for probe in probes if probe.peak.fits]
    for probe in complete:
        for phase, phase_bytes in probe.peak.phase_bytes.items():
            points.setdefault(phase, {})[probe.rows, probe.length] = phase_bytes
    if any(len(measured) != len(complete) for measured in points.values()):
        raise ValueError(f"every complete probe measures the same phases; got {list(points)} only in part")
    return points


def phase_rows(probes: Sequence[Probe]) -> dict[str, dict[int, int]]:
    """Measured bytes by rows alone, where all rows have one length."""
    return {phase: {rows: need for (rows, _), need in at.items()} for phase, at in phase_points(probes).items()}


def fit_line(points: Mapping[int, int]) -> Surface:
    """A line through the largest of two or more measurements, as steep as the steepest chord that ends there.

    The steepest, because a phase is the maximum of many points of the program, each affine in the rows, and
    so bends upwards if at all. One row is left out as soon as two other sizes are known: kernels and chunking
    may treat it differently. A phase holds no negative memory without rows, so a line that says so is
    replaced with the one through zero.
    """
    last = max(points)
    others = [rows for rows in points if 1 < rows < last] or [rows for rows in points if rows < last]
    slope = max(0.0, *((points[last] - points[rows]) / (last - rows) for rows in others))
    fixed_bytes = points[last] - slope * last
    return Surface(fixed_bytes, slope) if fixed_bytes >= 0 else Surface(0.0, points[last] / last)


def fit_lines(probes: Sequence[Probe]) -> dict[str, Surface]:
    """The line of each phase; empty before two sizes are measured."""
    return {phase: fit_line(points) for phase, points in phase_rows(probes).items() if len(points) > 1}
