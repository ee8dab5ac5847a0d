"""Measures how the memory of a microbatch depends on its rows and their length.

1. Measure the longest sample alone. If it fits, every shorter sample fits alone.
2. Measure shorter and shorter samples, with as many rows as earlier probes prove to fit. Fit a surface to each phase.
3. Hold two of these probes out of the first fit to measure its relative error. Keep this share of the budget free.
4. If the surfaces allow far more rows than were measured, measure more rows. This is necessary because a constant part,
   such as a gathered layer, can hide how memory grows. An out-of-memory error here costs a probe, not a training step.

Tokens beyond some length may need a different amount of memory. Example: if rollouts of probes get longer, first their
answers grow, up to the longest answer, and then their prompts. The surfaces then have a knee at that length. If samples
are concatenated instead of padded, each may need memory in addition to that of its tokens. So many very short ones are
measured, too. Probes of longer samples do not prove that they fit, so a quarter of them is measured first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torchtune_adaptive.engine.limits import Surface, SurfaceLimit, fit_surface, raised_above
from torchtune_adaptive.engine.search import Budget, Peak, Probe, phase_points
from torchtune_adaptive.errors import OneRowDoesNotFitError

# The probes after the first one: divisor of the longest length, share of the proven rows, whether it is held out.
_PADDED = ((1, 1.0, False), (4, 1.0, False), (16, 1.0, False), (16, 0.25, False), (2, 0.5, True), (8, 0.9, True))
_CONCATENATED = ((1, 1.0, False), (4, 0.8, False), (64, 0.25, False), (64, 1.0, False), (2, 0.5, True), (8, 0.8, True))
MOST_CHECKS = 6
"""Maximum number of checks: probes with more rows than are proven to fit. `restricted_profile` may add one."""

_TRUSTED, _TRUSTED_AFTER_SURPRISE = 1.3, 1.1
"""Surfaces are trusted up to this multiple of the rows that are proven to fit."""
_SURPRISE = 0.02
"""A check is a surprise if its peak differs from the prediction by more than this share."""
_LARGEST_JUMP = 8
"""A check has at most this multiple of the rows that are proven to fit."""
_FILL = 0.95
"""Share of a predicted number of rows that a probe uses, as a safety margin."""
_LEAST_LENGTH = 2
BEYOND = "beyond what was measured"
"""Name of the surface that restricts the limit to sizes that are proven to fit, if there is no checked profile."""


@dataclass(frozen=True)
class Profile:
    """The probes over rows and length, and the fitted surfaces."""

    budget_bytes: int
    points: tuple[Probe, ...]
    """All probes: first those that are always measured, then the checks."""
    surfaces: Mapping[str, Surface]
    """The surface of each phase. No measurement is above it."""
    held_out_error: float
    """The largest error of the first fit at a held-out probe, relative to the measured peak."""
    limit_bytes: int
    """Maximum of predicted bytes: budget minus error; more if the longest sample needs more; less if a probe failed."""

    @property
    def limit(self) -> SurfaceLimit:
        """The limit of a microbatch, by predicted bytes."""
        return SurfaceLimit(self.surfaces, self.limit_bytes)

    @property
    def constant_tokens(self) -> int:
        """The largest rows × length that fits at every measured length, for a limit by tokens."""
        fitting = [
            point.length * surface.rows_within(self.limit_bytes, point.length)
            for point in self.points
            for surface in self.surfaces.values()
        ]
        return max(1, int(min(*fitting, 2**31)))


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of samples that a profile must cover."""

    longest: int
    shortest: int = _LEAST_LENGTH
    knee: int = 0
    """The length beyond which tokens need a different amount of memory; 0 if there is none."""
    padded: bool = True
    """True if rows are padded to the longest; False if samples are concatenated."""


@dataclass
class _Measurements:
    """The probes of a profile so far, equal on all ranks; chooses the next one and fits the surfaces."""

    measure: Callable[[int, int], Peak]
    budget: Budget
    lengths: SampleLengths
    most_rows: int
    agree: Callable[[Profile], Profile]
    points: list[Probe] = field(default_factory=list)
    checks: list[Probe] = field(default_factory=list)

    def probe(self, rows: int, length: int, held_out: bool = False) -> Probe:
        return Probe(rows=rows, length=length, peak=self.measure(rows, length), held_out=held_out)

    def fits(self, probe: Probe) -> bool:
        return probe.accepted(self.budget.total_bytes)

    def add_point(self, part: int, share: float, held_out: bool) -> None:
        """Measure `share` of the extrapolated rows with 1/`part` of the longest length, unless that is measured."""
        length = max(self.lengths.shortest, self.lengths.longest // part)
        # With a knee, maybe only one row is proven to fit. Measure two: one cannot separate fixed from growing memory.
        least = min(2, self.most_rows) if self.lengths.knee and part > 1 and share == 1 else 1
        rows = max(least, int(share * self._extrapolated_rows(length)))
        if self.measured(rows, length) is None:
            self.points.append(self.probe(rows, length, held_out))

    def checked_profile(self) -> Profile | None:
        """Collective: check sizes that surfaces allow.

        Return None if a check failed or was a surprise, or after MOST_CHECKS.
        """
        profile, trusted = self.fit(), _TRUSTED
        while (size := self._next_check(profile.limit, trusted)) is not None:
            if len(self.checks) == MOST_CHECKS:
                return None
            check = self.probe(*size)
            if not self.fits(check) or _relative_error(profile.surfaces, check) > _SURPRISE:
                trusted = _TRUSTED_AFTER_SURPRISE
            self.checks.append(check)
            profile = self.fit()
        return profile if trusted == _TRUSTED else None

    def restricted_profile(self) -> Profile:
        """Return a profile that allows, at every length, as many tokens as are proven to fit in the longest rows.

        The same number of tokens needs no more memory in shorter rows, unless there is a knee: tokens before it may
        need more memory than those beyond. If there is one, short rows with this number of tokens are measured. If they
        do not fit, only the tokens before the knee count.
        """
        longest, knee = self.lengths.longest, self.lengths.knee
        proven_rows = int(self._proven_rows(longest))
        if knee:
            length = max(self.lengths.shortest, longest // 4)
            rows = min(self.most_rows, proven_rows * longest // length)
            short_rows = self.measured(rows, length)
            if short_rows is None:
                short_rows = self.probe(rows, length)
                self.checks.append(short_rows)
            knee = 0 if self.fits(short_rows) else knee
        profile = self.fit()
        proven_tokens = proven_rows * (min(longest, knee) if knee else longest)
        bound = Surface(0.0, bytes_per_token=profile.limit_bytes / proven_tokens, knee=knee)
        return replace(profile, surfaces={**profile.surfaces, BEYOND: bound})

    def fit(self) -> Profile:
        """Collective: fit the surfaces to all probes, measure their error at held-out probes, and choose the limit."""
        probes, knee = (*self.points, *self.checks), self.lengths.knee
        fitted = [probe for probe in probes if not probe.held_out]
        first_fit = {name: fit_surface(points, knee) for name, points in phase_points(fitted).items()}
        error = max(
            (_relative_error(first_fit, probe) for probe in probes if probe.held_out and probe.peak.fits), default=0.0
        )
        # a fitted surface passes between the points, but a limit must not be below any of them
        surfaces = {name: raised_above(fit_surface(at, knee), at) for name, at in phase_points(probes).items()}
        budget_bytes = self.budget.total_bytes
        # always allow the longest sample alone, because it was measured and fits
        longest_bytes = max(surface.bytes_at(1, self.lengths.longest) for surface in surfaces.values())
        limit = SurfaceLimit(surfaces, round(max(budget_bytes * (1 - error), min(longest_bytes, budget_bytes))))
        for point in self.points:
            # exclude every rejected microbatch of several rows; single rows that are too long raise an error elsewhere
            if point.rows > 1 and not self.fits(point) and limit.fits(point.rows, point.length):
                limit = limit.after_oom(point.rows, point.length) or limit
        # linear algebra may round differently on each rank, but all ranks must run the same probes
        return self.agree(Profile(budget_bytes, probes, surfaces, error, limit.budget_bytes))

    def _extrapolated_rows(self, length: int) -> int:
        """Return how many rows of this length fit, extrapolated from probes of rows that are at least as long.

        A shorter row needs no more memory per token than a longer one. The non-resident bytes per token of a probe are
        therefore an upper bound. A token beyond a knee may need less memory than one before it, so only tokens before
        the knee count.
        """
        bounding = [point for point in self.points if point.length >= length]
        if not self.lengths.padded:
            bounding = [point for point in bounding if point.length == length] or bounding
        proven_tokens = [
            point.rows
            * self._counted(point.length)
            * self.budget.free_bytes
            / (peak_bytes - self.budget.resident_bytes)
            for point in bounding
            if (peak_bytes := point.peak.peak_bytes or 0) > self.budget.resident_bytes
        ]
        return max(1, min(self.most_rows, int(_FILL * max(proven_tokens, default=0.0) / self._counted(length))))

    def _counted(self, length: int) -> int:
        """Return how many tokens of a row of this length count: all, or only those before the knee if there is one."""
        return min(length, self.lengths.knee) if self.lengths.knee > self.lengths.shortest else length

    def _next_check(self, limit: SurfaceLimit, trusted: float) -> tuple[int, int] | None:
        """Return rows and length of the next check, or None if the limit never exceeds `trusted` × proven rows."""
        for part in (1, 2, 4):
            length = max(self.lengths.longest // part, self.lengths.shortest)
            if (rows := self._rows_to_check(length, limit, trusted)) is not None:
                return rows, length
        return None

    def _rows_to_check(self, length: int, limit: SurfaceLimit, trusted: float) -> int | None:
        proven, allowed = self._proven_rows(length), min(self.most_rows, limit.rows_at(length))
        if allowed <= trusted * proven:
            return None
        rows = min(allowed if allowed == self.most_rows else max(2, _FILL * allowed), _LARGEST_JUMP * proven)
        failed = [check.rows for check in self.checks if not self.fits(check) and check.length <= length]
        if rows >= (fewest_failed := min(failed, default=math.inf)):
            rows = math.sqrt(proven * fewest_failed)  # between both
        return int(rows) if int(rows) > proven else None

    def _proven_rows(self, length: int) -> float:
        """Return the most rows of this length that an accepted probe proves to fit. A probe proves that shorter rows
        fit, too, if they have no more tokens that count (see `_counted`)."""
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
    no_fit_error: Callable[[], OneRowDoesNotFitError],
    most_rows: int,
    agree: Callable[[Profile], Profile] = lambda profile: profile,
) -> Profile:
    """Collective: measure microbatches with rows of all lengths, and fit surfaces over rows and length.

    `measure` is called with the same rows and length on every rank and returns the same Peak. `agree` returns rank 0's
    profile on every rank. If a single row of the longest length does not fit, the error that `no_fit_error` returns is
    raised.
    """
    measurements = _Measurements(measure, budget, lengths, most_rows, agree)
    longest_alone = measurements.probe(1, lengths.longest)
    if not measurements.fits(longest_alone):
        raise no_fit_error()
    measurements.points.append(longest_alone)
    for point in _PADDED if lengths.padded else _CONCATENATED:
        measurements.add_point(*point)
    return measurements.checked_profile() or measurements.restricted_profile()


def _relative_error(surfaces: Mapping[str, Surface], point: Probe) -> float:
    """Return the error of the predicted peak, as a share of the measured peak."""
    predicted = max(surface.bytes_at(point.rows, point.length) for surface in surfaces.values())
    measured = point.peak.peak_bytes or predicted
    return abs(predicted - measured) / measured
