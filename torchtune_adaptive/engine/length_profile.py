"""What a microbatch needs at several lengths: a few measurements, the surfaces through them, and how far they are off.

1. The longest sample first, alone; if it fits, nothing shorter is in danger.
2. As many rows as what was measured proves to fit, at ever shorter lengths; few rows of a short length.
3. Two more that are excluded from the fit. They measure its error, and that share of the budget stays free.
4. If all of this stayed far below what the surfaces now allow, that is measured, too: a constant part, such as a
   gathered layer, may have hidden how rows grow. Running out of memory here costs a probe, not a training step.

Samples may grow in one way up to some length and in another from there on, as rollouts do from the longest answer on:
then the surfaces have a knee there.

Where nothing is padded, rows are samples one after another. Then a sample may cost something besides its tokens, so
many very short ones are measured too, a quarter of them first: that they fit is not proven by fewer long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtune_adaptive.engine.limits import Surface, SurfaceLimit, covering, fit_surface
from torchtune_adaptive.engine.search import NEEDS_LESS, Peak, Probe, Refuse, Room, phase_points

MOST_POINTS = 8
MOST_CHECKS = 6
"""Probes of what the surfaces allow, besides, and one of short rows."""
BEYOND = "beyond what was measured"
"""The surface that keeps to what was measured, where the others were refuted."""
_FAR, _NEAR = 1.3, 1.1
"""Surfaces are trusted with so many times the rows that were measured, once they have missed a check with fewer."""
_SURPRISE = 0.02
"""A check is missed if surfaces are off by more, in proportion to it: then other lengths are not trusted either."""
_LEAP = 8
"""A check has no more than so many times the rows that were measured."""

_FILL = 0.95
"""Share of the known-good size that a probe uses, so that it cannot fail."""
_LEAST_LENGTH = 2

_PADDED = (
    (1, 1.0, False),
    (4, 1.0, False),
    (16, 1.0, False),
    (16, 0.25, False),
    (2, 0.5, True),
    (8, 0.9, True),
)
"""Measurements after the first: the part of the longest sample, the share of proven rows, whether it is held out."""

_JOINED = (
    (1, 1.0, False),
    (4, 0.8, False),
    (64, 0.25, False),
    (64, 1.0, False),
    (2, 0.5, True),
    (8, 0.8, True),
)
"""Measurements after the first where nothing is padded."""


@dataclass(frozen=True)
class Profile:
    """What a profile measured and found."""

    budget_bytes: int
    points: tuple[Probe, ...]
    """Every probe, in the order they were measured."""
    surfaces: Mapping[str, Surface]
    """The surface of each phase, never below what was measured."""
    held_out_error: float
    """The most by which the first fit missed a peak that it had not seen, in proportion to that peak."""
    limit_bytes: int
    """What the surfaces may reach: the budget without that error, and less where a measurement was refused."""
    constant_tokens: int
    """rows × length that fits at every length: the least over the lengths of what fits at each."""

    @property
    def limit(self) -> SurfaceLimit:
        return SurfaceLimit(self.surfaces, self.limit_bytes)


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of samples, and how memory grows with them."""

    longest: int
    shortest: int = _LEAST_LENGTH
    knee: int = 0
    """Up to here samples need memory in another way than beyond it; 0: in one way throughout."""
    padded: bool = True
    """Whether rows are padded to the longest."""


@dataclass(frozen=True)
class _Known:
    """What the next measurement is decided from, the same on every rank."""

    room: Room
    lengths: SampleLengths
    most_rows: int
    points: tuple[Probe, ...] = ()
    checks: tuple[Probe, ...] = ()
    """Probes of what the surfaces allow, after all others."""

    def full_rows(self, length: int) -> int:
        """The most rows of this length that a measurement proves to fit.

        What a token needs does not grow when its row gets shorter, and what is fixed does not grow at all: in
        proportion to all but what is resident, a measured microbatch of rows at least as long bounds every other.
        Behind a knee a token may need less than before it: then only those before it are counted on.
        """
        bounding = [point for point in self.points if point.length >= length]
        if not self.lengths.padded:
            bounding = [point for point in bounding if point.length == length] or bounding
        proven = [
            point.rows * self._bounding(point.length) * self.room.free_bytes / (peak_bytes - self.room.resident_bytes)
            for point in bounding
            if (peak_bytes := point.peak.peak_bytes or 0) > self.room.resident_bytes
        ]
        return max(1, min(self.most_rows, int(_FILL * max(proven, default=0.0) / self._bounding(length))))

    def _bounding(self, length: int) -> int:
        return min(length, self.lengths.knee) if self.lengths.knee > self.lengths.shortest else length

    def next(self) -> tuple[int, int, bool] | None:
        """Rows, length and whether it is held out, of the next measurement."""
        for part, share, held_out in (_PADDED if self.lengths.padded else _JOINED)[len(self.points) - 1 :]:
            length = max(self.lengths.shortest, self.lengths.longest // part)
            # a second row shows what is fixed, and is measured whatever the limit: with a knee, little may be proven
            least = min(2, self.most_rows) if self.lengths.knee and part > 1 and share == 1 else 1
            rows = max(least, int(share * self.full_rows(length)))
            if self.measured(rows, length) is None:
                return rows, length, held_out
        return None

    def next_check(self, limit: SurfaceLimit, trusted: float) -> tuple[int, int] | None:
        """Rows and length to measure next, where more than `trusted` times what was measured may be."""
        for length in (self.lengths.longest, self.lengths.longest // 2, self.lengths.longest // 4):
            rows = self._rows_to_check(max(length, self.lengths.shortest), limit, trusted)
            if rows is not None:
                return rows, max(length, self.lengths.shortest)
        return None

    def _rows_to_check(self, length: int, limit: SurfaceLimit, trusted: float) -> int | None:
        proven, allowed = self.proven_rows(length), min(self.most_rows, limit.rows_at(length))
        if allowed <= trusted * proven:
            return None
        rows = min(allowed if allowed == self.most_rows else max(2, _FILL * allowed), _LEAP * proven)
        if rows >= (refused := self._refused_rows(length)):
            rows = math.sqrt(proven * refused)
        return int(rows) if int(rows) > proven else None

    def _refused_rows(self, length: int) -> float:
        """The fewest rows of this length, or of a shorter one, that a check was refused with."""
        refused = [each for each in self.checks if not each.accepted(self.room.budget_bytes) and each.length <= length]
        return min((each.rows for each in refused), default=math.inf)

    def proven_rows(self, length: int) -> float:
        """The most rows of this length that need no more than some that were measured to fit, at least as long."""
        probes = [each for each in (*self.points, *self.checks) if each.length >= length]
        fit = [each.rows * self._bounding(each.length) for each in probes if each.accepted(self.room.budget_bytes)]
        return max(fit, default=self._bounding(length)) / self._bounding(length)

    def measured(self, rows: int, length: int) -> Probe | None:
        """The probe of such a microbatch, if there was one."""
        return next((each for each in (*self.points, *self.checks) if (each.rows, each.length) == (rows, length)), None)


def measure_profile(
    measure: Callable[[int, int], Peak],
    room: Room,
    lengths: SampleLengths,
    *,
    refuse: Refuse,
    most_rows: int,
) -> Profile:
    """Measures microbatches of up to the longest samples, and fits surfaces over rows and length.

    `measure` is called with the same rows and length on every rank and returns the same agreed Peak on each. Where one
    row does not fit, raises what `refuse` makes of it.
    """

    def probe(rows: int, length: int, held_out: bool = False) -> Probe:
        return Probe(rows=rows, length=length, peak=measure(rows, length), held_out=held_out)

    alone = probe(1, lengths.longest)
    if not alone.accepted(room.budget_bytes) and not (alone.peak.retries and alone.peak.fits):
        raise refuse(*NEEDS_LESS)
    known = _Known(room, lengths, most_rows, points=(alone,))
    while len(known.points) < MOST_POINTS and (point := known.next()) is not None:
        known = replace(known, points=(*known.points, probe(*point)))
    # Probes of what the surfaces allow, where that is far from what was measured.
    result, trusted = _fitted(known), _FAR
    while (check := known.next_check(result.limit, trusted)) is not None and len(known.checks) < MOST_CHECKS:
        checked = probe(*check)
        if not checked.accepted(room.budget_bytes) or _miss(result.surfaces, checked) > _SURPRISE:
            trusted = _NEAR
        known = replace(known, checks=(*known.checks, checked))
        result = _fitted(known)
    if check is None and trusted == _FAR:
        return result
    # Surfaces were off, or are still far from what was measured: no more than that, in tokens. None needs more in a
    # shorter row, save that tokens up to a knee may need more than late ones.
    longest, knee = lengths.longest, lengths.knee
    proven_rows = int(known.proven_rows(longest))
    if knee:
        # short rows, with the tokens that fit in the longest
        length = max(lengths.shortest, longest // 4)
        rows = min(most_rows, proven_rows * longest // length)
        short = known.measured(rows, length)
        if short is None:
            short = probe(rows, length)
            known = replace(known, checks=(*known.checks, short))
        knee = 0 if short.accepted(room.budget_bytes) else knee
    result = _fitted(known)
    proven_tokens = proven_rows * (min(longest, knee) if knee else longest)
    bound = Surface(0.0, bytes_per_token=result.limit_bytes / proven_tokens, knee=knee)
    bounded = SurfaceLimit({**result.surfaces, BEYOND: bound}, result.limit_bytes)
    return replace(result, surfaces=bounded.surfaces, constant_tokens=_constant_tokens(bounded, known.points))


def _fitted(known: _Known) -> Profile:
    points = (*known.points, *known.checks)
    knee, not_held_out = known.lengths.knee, [point for point in points if not point.held_out]
    seen = {name: fit_surface(at, knee) for name, at in phase_points(not_held_out).items()}
    error = max((_miss(seen, point) for point in points if point.held_out and point.peak.fits), default=0.0)
    # Fitted surfaces pass between points; a limit has to lie above all of them, those held out included.
    surfaces = {name: covering(fit_surface(at, knee), at) for name, at in phase_points(points).items()}
    alone_bytes = max(surface.bytes_at(1, known.lengths.longest) for surface in surfaces.values())
    # However far off the surfaces are: the longest sample was measured, and fits.
    room_bytes = max(known.room.budget_bytes * (1 - error), min(alone_bytes, known.room.budget_bytes))
    limit = SurfaceLimit(surfaces, round(room_bytes))
    for point in known.points:
        # Below every microbatch that was refused, save one row: what is longer than fits is not the limit's to say.
        if point.rows > 1 and not point.accepted(known.room.budget_bytes) and limit.fits(point.rows, point.length):
            limit = limit.after_oom(point.rows, point.length) or limit
    return Profile(
        budget_bytes=known.room.budget_bytes,
        points=points,
        surfaces=surfaces,
        held_out_error=error,
        limit_bytes=limit.budget_bytes,
        constant_tokens=_constant_tokens(limit, known.points),
    )


def _constant_tokens(limit: SurfaceLimit, points: Sequence[Probe]) -> int:
    """A microbatch of no more tokens fits, whatever the length of its rows: the minimum over lengths and phases."""
    fitting = [
        point.length * surface.rows_within(limit.budget_bytes, point.length)
        for point in points
        for surface in limit.surfaces.values()
    ]
    return max(1, int(min(*fitting, 2**31)))


def _miss(surfaces: Mapping[str, Surface], point: Probe) -> float:
    predicted = max(surface.bytes_at(point.rows, point.length) for surface in surfaces.values())
    measured = point.peak.peak_bytes or predicted
    return abs(predicted - measured) / measured
