"""Measure how the memory of a microbatch depends on its rows and their length.

1. Measure the longest sample alone. If it fits, every shorter one does.
2. Measure ever shorter lengths, with all rows that earlier probes prove to fit, and fit a surface to each phase.
3. Two of these probes are held out: they measure the error of the fit, and that share of the budget stays free.
4. If the surfaces allow far more rows than were measured, measure that too. A constant part, such as a gathered layer,
   can hide how memory grows with the rows. Running out of memory here costs one probe, not a training step.

If memory grows differently from some length on, as in rollouts beyond the longest answer, the surfaces have a knee
there. Without padding, samples are concatenated, and each sample may need memory in addition to that of its tokens. So
many very short samples are measured, too. A quarter of them goes first, since probes of longer samples do not prove
that they fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torchtune_adaptive.engine.limits import Surface, SurfaceLimit, covering, fit_surface
from torchtune_adaptive.engine.search import Budget, NoRowFits, Peak, Probe, phase_points

# The probes after the first: divisor of the longest length, share of the proven rows, held out or not.
_PADDED = ((1, 1.0, False), (4, 1.0, False), (16, 1.0, False), (16, 0.25, False), (2, 0.5, True), (8, 0.9, True))
_JOINED = ((1, 1.0, False), (4, 0.8, False), (64, 0.25, False), (64, 1.0, False), (2, 0.5, True), (8, 0.8, True))
MOST_POINTS = 1 + len(_PADDED)
MOST_CHECKS = 6
"""Maximum number of checks of sizes that the surfaces allow. `restricted_profile` may add one."""

_FAR, _NEAR = 1.3, 1.1
"""Surfaces are trusted up to _FAR times the rows that are proven to fit; after a surprise, up to _NEAR times."""
_SURPRISE = 0.02
"""A check is a surprise if its peak differs from the prediction by more than this share."""
_LEAP = 8
"""A check has at most this many times the rows that are proven to fit."""
_FILL = 0.95
"""Share of the proven size that a probe uses."""
_LEAST_LENGTH = 2
BEYOND = "beyond what was measured"
"""Name of the surface that restricts the limit to measured sizes after a surprise."""


@dataclass(frozen=True)
class Profile:
    """The probes over rows and length, and the fitted surfaces."""

    budget_bytes: int
    points: tuple[Probe, ...]
    """All probes, in the order they were measured."""
    surfaces: Mapping[str, Surface]
    """The surface of each phase, at or above every measurement."""
    held_out_error: float
    """The largest error of the first fit at held-out probes, relative to their peaks."""
    limit_bytes: int
    """The bytes that surfaces may reach: the budget minus the error, or less if a probe was rejected."""

    @property
    def limit(self) -> SurfaceLimit:
        """The limit for microbatches."""
        return SurfaceLimit(self.surfaces, self.limit_bytes)

    @property
    def constant_tokens(self) -> int:
        """rows × length that fits at every measured length."""
        fitting = [
            point.length * surface.rows_within(self.limit_bytes, point.length)
            for point in self.points
            for surface in self.surfaces.values()
        ]
        return max(1, int(min(*fitting, 2**31)))


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of the samples to measure."""

    longest: int
    shortest: int = _LEAST_LENGTH
    knee: int = 0
    """The length at which memory starts to grow differently; 0 if it grows evenly."""
    padded: bool = True
    """True if rows are padded to the longest."""


@dataclass
class _Measurements:
    """The probes of a profile, equal on all ranks, and the choice of the next one."""

    measure: Callable[[int, int], Peak]
    budget: Budget
    lengths: SampleLengths
    most_rows: int
    points: list[Probe] = field(default_factory=list)
    checks: list[Probe] = field(default_factory=list)

    def probe(self, rows: int, length: int, held_out: bool = False) -> Probe:
        return Probe(rows=rows, length=length, peak=self.measure(rows, length), held_out=held_out)

    def fits(self, probe: Probe) -> bool:
        return probe.accepted(self.budget.total_bytes)

    def add_point(self, part: int, share: float, held_out: bool) -> None:
        """Measure this share of the proven rows at this part of the longest length, unless it is measured already."""
        length = max(self.lengths.shortest, self.lengths.longest // part)
        # With a knee, little may be proven, but a second row is needed to separate fixed from growing memory.
        least = min(2, self.most_rows) if self.lengths.knee and part > 1 and share == 1 else 1
        rows = max(least, int(share * self._extrapolated_rows(length)))
        if self.measured(rows, length) is None:
            self.points.append(self.probe(rows, length, held_out))

    def checked_profile(self) -> Profile | None:
        """Measure larger sizes that the surfaces allow; return None if a check failed or was a surprise."""
        profile, trusted = self.fit(), _FAR
        while (size := self._next_check(profile.limit, trusted)) is not None:
            if len(self.checks) == MOST_CHECKS:
                return None
            check = self.probe(*size)
            if not self.fits(check) or _miss(profile.surfaces, check) > _SURPRISE:
                trusted = _NEAR
            self.checks.append(check)
            profile = self.fit()
        return profile if trusted == _FAR else None

    def restricted_profile(self) -> Profile:
        """Return a profile that allows, at every length, the number of tokens that was proven for the longest rows.

        The same number of tokens needs no more memory in shorter rows. With a knee, this may be wrong, because tokens
        before the knee may need more memory. Then short rows with this number of tokens are measured. If they fail,
        the number is that of the tokens before the knee.
        """
        longest, knee = self.lengths.longest, self.lengths.knee
        proven_rows = int(self._proven_rows(longest))
        if knee:
            length = max(self.lengths.shortest, longest // 4)
            rows = min(self.most_rows, proven_rows * longest // length)
            short = self.measured(rows, length)
            if short is None:
                short = self.probe(rows, length)
                self.checks.append(short)
            knee = 0 if self.fits(short) else knee
        profile = self.fit()
        proven_tokens = proven_rows * (min(longest, knee) if knee else longest)
        bound = Surface(0.0, bytes_per_token=profile.limit_bytes / proven_tokens, knee=knee)
        return replace(profile, surfaces={**profile.surfaces, BEYOND: bound})

    def fit(self) -> Profile:
        """Fit the surfaces to all probes."""
        probes, knee = (*self.points, *self.checks), self.lengths.knee
        first_fit = {
            name: fit_surface(at, knee) for name, at in phase_points([p for p in probes if not p.held_out]).items()
        }
        error = max((_miss(first_fit, probe) for probe in probes if probe.held_out and probe.peak.fits), default=0.0)
        # A fitted surface passes between the points, but a limit must be above all of them.
        surfaces = {name: covering(fit_surface(at, knee), at) for name, at in phase_points(probes).items()}
        budget_bytes = self.budget.total_bytes
        # The longest sample was measured and fits, even if the surfaces have a large error.
        alone_bytes = max(surface.bytes_at(1, self.lengths.longest) for surface in surfaces.values())
        limit = SurfaceLimit(surfaces, round(max(budget_bytes * (1 - error), min(alone_bytes, budget_bytes))))
        for point in self.points:
            # Exclude every rejected microbatch, except single rows: samples that are too long are refused elsewhere.
            if point.rows > 1 and not self.fits(point) and limit.fits(point.rows, point.length):
                limit = limit.after_oom(point.rows, point.length) or limit
        return Profile(budget_bytes, probes, surfaces, error, limit.budget_bytes)

    def _extrapolated_rows(self, length: int) -> int:
        """Return the rows of this length that fit, extrapolated from probes of rows at least as long.

        Shorter rows need no more memory per token than longer ones, and the fixed part does not grow. So the bytes per
        token of a probe, without resident memory, are an upper bound. A token beyond a knee may need less memory than
        one before it, so only tokens before the knee count.
        """
        bounding = [point for point in self.points if point.length >= length]
        if not self.lengths.padded:
            bounding = [point for point in bounding if point.length == length] or bounding
        proven = [
            point.rows
            * self._counted(point.length)
            * self.budget.free_bytes
            / (peak_bytes - self.budget.resident_bytes)
            for point in bounding
            if (peak_bytes := point.peak.peak_bytes or 0) > self.budget.resident_bytes
        ]
        return max(1, min(self.most_rows, int(_FILL * max(proven, default=0.0) / self._counted(length))))

    def _counted(self, length: int) -> int:
        """Return the tokens of a row that count in comparisons of lengths."""
        return min(length, self.lengths.knee) if self.lengths.knee > self.lengths.shortest else length

    def _next_check(self, limit: SurfaceLimit, trusted: float) -> tuple[int, int] | None:
        """Return rows and length of the next check, if the limit allows more than `trusted` times the proven rows."""
        for part in (1, 2, 4):
            length = max(self.lengths.longest // part, self.lengths.shortest)
            if (rows := self._rows_to_check(length, limit, trusted)) is not None:
                return rows, length
        return None

    def _rows_to_check(self, length: int, limit: SurfaceLimit, trusted: float) -> int | None:
        proven, allowed = self._proven_rows(length), min(self.most_rows, limit.rows_at(length))
        if allowed <= trusted * proven:
            return None
        rows = min(allowed if allowed == self.most_rows else max(2, _FILL * allowed), _LEAP * proven)
        refused = min(
            (check.rows for check in self.checks if not self.fits(check) and check.length <= length), default=math.inf
        )
        if rows >= refused:
            rows = math.sqrt(proven * refused)
        return int(rows) if int(rows) > proven else None

    def _proven_rows(self, length: int) -> float:
        """Return the most rows of this length that an accepted probe proves to fit.

        A probe of longer rows proves that shorter rows with as many counted tokens fit (see `_counted`).
        """
        probes = [probe for probe in (*self.points, *self.checks) if probe.length >= length and self.fits(probe)]
        most = max((probe.rows * self._counted(probe.length) for probe in probes), default=self._counted(length))
        return most / self._counted(length)

    def measured(self, rows: int, length: int) -> Probe | None:
        """Return the probe of this microbatch, if there is one."""
        probes = (*self.points, *self.checks)
        return next((probe for probe in probes if (probe.rows, probe.length) == (rows, length)), None)


def measure_profile(
    measure: Callable[[int, int], Peak],
    budget: Budget,
    lengths: SampleLengths,
    *,
    no_row_fits: NoRowFits,
    most_rows: int,
) -> Profile:
    """Measure microbatches of up to the longest sample, and fit surfaces over rows and length.

    `measure` is called with the same rows and length on every rank and returns the same agreed Peak. If one row does
    not fit, the error that `no_row_fits` returns is raised.
    """
    measurements = _Measurements(measure, budget, lengths, most_rows)
    alone = measurements.probe(1, lengths.longest)
    if not measurements.fits(alone):
        raise no_row_fits()
    measurements.points.append(alone)
    for point in _PADDED if lengths.padded else _JOINED:
        measurements.add_point(*point)
    return measurements.checked_profile() or measurements.restricted_profile()


def _miss(surfaces: Mapping[str, Surface], point: Probe) -> float:
    """Return the error of the predicted peak, relative to the measured one."""
    predicted = max(surface.bytes_at(point.rows, point.length) for surface in surfaces.values())
    measured = point.peak.peak_bytes or predicted
    return abs(predicted - measured) / measured
