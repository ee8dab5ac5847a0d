"""The straight lines through what probes measured."""

from collections.abc import Mapping, Sequence

from torchtune_adaptive.limits.surface import Surface
from torchtune_adaptive.search.probe_result import Probe


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
