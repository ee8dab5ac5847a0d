"""Bytes over rows and length: the law of a phase's memory, fitted to what probes measured.

What a phase needs is what it finds, plus something for each row, for each token, and, where attention holds a matrix,
for each pair of tokens of a row. All of it is linear in the rows, so the most rows of a length follow without a search.
Where samples grow in one way up to some length and in another from there on, the surface has a knee at that length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias

import numpy as np

Points: TypeAlias = Mapping[tuple[int, int], int]
"""Measured bytes by rows and length."""

_BENT = 0.01
"""Points that are further than this from a surface without pairs of tokens, in proportion to how far the points lie
apart, ask for one with them: in proportion to their need, what is resident would hide what grows."""

_HALF_A_BYTE = 0.5
"""Bytes are whole: half of one keeps floating point from costing a row, and cannot add one."""

_FIXED, _ROW, _TOKEN, _PAIR, _LATE = range(5)
"""The parts of a surface, in the order of its fields."""


@dataclass(frozen=True)
class Surface:
    """fixed + rows × (per row + per token × length + per pair × length²)

    A straight line in the rows; where all have one length, only the first two parts are told apart, and no method
    needs the length. Behind a knee, a token needs what a late one does.
    """

    fixed_bytes: float
    bytes_per_row: float = 0.0
    bytes_per_token: float = 0.0
    bytes_per_pair: float = 0.0
    bytes_per_late_token: float = 0.0
    knee: int = 0
    """The tokens of a row that are not late; 0: none is."""

    def bytes_at(self, rows: float, length: float = 0.0, tokens: float | None = None) -> float:
        """`tokens` are those of all rows where these are not padded to the longest, which then has `length`."""
        if tokens is None:
            return self.fixed_bytes + rows * self._bytes_of_a_row(length)
        # the pairs of tokens of all rows are no more than if each token were in the longest
        return self.fixed_bytes + rows * self.bytes_per_row + tokens * self._bytes_of_a_token(length)

    def holds(self, budget_bytes: float, rows: float, length: float, tokens: float) -> bool:
        """Whether rows that are not padded are within the budget."""
        return self.bytes_at(rows, length, tokens) <= budget_bytes + _HALF_A_BYTE

    def rows_within(self, budget_bytes: float, length: float = 0.0) -> float:
        """The rows at which the phase reaches the budget; infinite for a phase that does not grow."""
        free_bytes = budget_bytes + _HALF_A_BYTE - self.fixed_bytes
        each_bytes = self._bytes_of_a_row(length)
        if each_bytes == 0:
            return math.inf if free_bytes >= 0 else 0.0
        return max(0.0, free_bytes / each_bytes)

    def _bytes_of_a_row(self, length: float) -> float:
        late = max(0.0, length - self.knee) if self.knee else 0.0
        of_late = late * (self.bytes_per_late_token - self.bytes_per_token)
        return self.bytes_per_row + length * self._bytes_of_a_token(length) + of_late

    def _bytes_of_a_token(self, length: float) -> float:
        return self.bytes_per_token + length * self.bytes_per_pair


def fit_surface(points: Points, knee: int = 0) -> Surface:
    """The surface that is closest to the points in proportion to them; with pairs of tokens only if they show."""
    terms = [_FIXED, _ROW, _TOKEN, *([_LATE] if knee else [])]
    plain = _fit(points, terms, knee)
    grown_bytes = max(points.values()) - min(points.values())
    if len(points) < 4 or _worst(plain, points) <= _BENT * grown_bytes:
        return plain
    bent = _fit(points, [*terms, _PAIR], knee)
    return bent if _worst(bent, points) < _worst(plain, points) else plain


def covering(surface: Surface, points: Points) -> Surface:
    """The surface raised as far as it lies below a point: a law for what fits must not promise what was refuted."""
    short_bytes = max(0.0, *(measured - surface.bytes_at(*at) for at, measured in points.items()))
    return replace(surface, fixed_bytes=surface.fixed_bytes + short_bytes)


def _fit(points: Points, terms: Sequence[int], knee: int) -> Surface:
    """Least squares of relative errors, without negative coefficients: memory is never given back by more rows."""
    basis = np.array([_basis(*at, knee) for at in points])
    measured = np.array([max(1, need) for need in points.values()], dtype=float)
    scale = np.maximum(basis.max(axis=0), 1.0)
    weighted = basis / scale / measured[:, None]
    best, best_error = np.zeros(len(scale)), math.inf
    for chosen in _subsets(terms):
        part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(measured)), rcond=None)
        error = float(np.square(weighted[:, chosen] @ part - 1).sum())
        # A solution with a negative part is not one; of those without, one that only adds noise is not better.
        if (part >= 0).all() and error < best_error * (1 - 1e-9) - 1e-15:
            best, best_error = np.zeros(len(scale)), error
            best[chosen] = part
    return replace(Surface(*(best / scale).tolist()), knee=knee)


def _basis(rows: int, length: int, knee: int) -> list[float]:
    """What each part of a surface is multiplied by."""
    late = max(0, length - knee) if knee else 0
    return [1.0, rows, rows * (length - late), rows * length**2, rows * late]


def _subsets(terms: Sequence[int]) -> Sequence[list[int]]:
    return [list(chosen) for size in range(1, len(terms) + 1) for chosen in combinations(terms, size)]


def _worst(surface: Surface, points: Points) -> float:
    """Bytes by which the surface misses a point at most."""
    return max(abs(surface.bytes_at(*at) - measured) for at, measured in points.items())
