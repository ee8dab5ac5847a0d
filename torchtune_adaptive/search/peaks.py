"""What probes measured, and the straight lines through it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtune_adaptive.memory.peak import Peak


@dataclass(frozen=True)
class Probe:
    """One measured number of rows."""

    rows: int
    peak: Peak

    def accepted(self, budget_bytes: int) -> bool:
        """Whether these rows can be trained with.

        One row is forgiven its allocator retries: there is nothing smaller to fall back on.
        """
        peak_bytes = self.peak.peak_bytes
        within = peak_bytes is not None and peak_bytes <= budget_bytes
        return within and (self.peak.retries == 0 or self.rows == 1)


@dataclass(frozen=True)
class Line:
    """Bytes that a phase needs, as a function of rows."""

    fixed_bytes: float
    bytes_per_row: float

    def bytes_at(self, rows: float) -> float:
        return self.fixed_bytes + self.bytes_per_row * rows

    def rows_within(self, budget_bytes: int) -> float:
        """The rows at which the phase reaches the budget; infinite for a phase that does not grow."""
        # Bytes are whole: half of one keeps floating point from costing a row, and cannot add one.
        free_bytes = budget_bytes + 0.5 - self.fixed_bytes
        if self.bytes_per_row == 0:
            return math.inf if free_bytes >= 0 else 0.0
        return max(0.0, free_bytes / self.bytes_per_row)


def phase_points(probes: Sequence[Probe]) -> dict[str, dict[int, int]]:
    """Measured bytes by rows for each phase, from the probes that ran to their end."""
    points: dict[str, dict[int, int]] = {}
    complete = [probe for probe in probes if probe.peak.fits]
    for probe in complete:
        for phase, phase_bytes in probe.peak.phase_bytes.items():
            points.setdefault(phase, {})[probe.rows] = phase_bytes
    if any(len(measured) != len(complete) for measured in points.values()):
        raise ValueError(f"every complete probe measures the same phases; got {list(points)} only in part")
    return points


def fit_line(points: Mapping[int, int]) -> Line:
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
    return Line(fixed_bytes, slope) if fixed_bytes >= 0 else Line(0.0, points[last] / last)


def fit_lines(probes: Sequence[Probe]) -> dict[str, Line]:
    """The line of each phase; empty before two sizes are measured."""
    return {phase: fit_line(points) for phase, points in phase_points(probes).items() if len(points) > 1}
