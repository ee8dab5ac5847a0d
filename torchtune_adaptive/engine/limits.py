"""Limits on the size of a microbatch. They are immutable: a smaller or larger limit is a new object.

A limit by bytes predicts the memory of each phase of a step by a formula, its surface: a fixed part, plus bytes per
row, per token and, if attention stores a matrix, per pair of tokens in a row. The formula is linear in the rows. So the
most rows of a length are the budget without the fixed part, divided by the bytes of one row. If tokens need a different
amount of memory from some length on, the surface has a knee at that length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from torchtune_adaptive.errors import ConfigError, check_choice
from torchtune_adaptive.formatting import count_of, format_bytes, is_whole

MAX_ROWS = 4096
"""The default upper bound of a search, which ends it if memory does not grow with the rows."""

ROUNDINGS = ("power_of_two", "none")


def rungs_up_to(max_rows: int | None, round_to: str) -> Sequence[int]:
    """Return the rows that may be chosen, ascending: powers of two, or all."""
    check_choice("round_to", round_to, ROUNDINGS)
    if max_rows is not None and not is_whole(max_rows, at_least=1):
        raise ConfigError(f"max_rows: {max_rows!r} is not allowed; pass a whole number, 1 or more, or omit it")
    most = MAX_ROWS if max_rows is None else int(max_rows)
    if round_to == "none":
        return range(1, most + 1)
    return [1 << exponent for exponent in range(most.bit_length())]


Points: TypeAlias = Mapping[tuple[int, int], int]
"""Measured bytes by rows and length."""

_BENT = 0.01
"""A pair term is added if a surface without it is off at any point by more than this share of the range of the measured
bytes. (The range does not include resident memory, compared with which any error would seem small.)"""

_HALF_A_BYTE = 0.5
"""Tolerance for rounding errors of a prediction. Needs are whole bytes, so half a byte never admits a larger one."""

_FIXED, _ROW, _TOKEN, _PAIR, _LATE = range(5)
"""Terms of a surface, in field order."""


@dataclass(frozen=True)
class Surface:
    """Predicted bytes: fixed + rows × (per row + per token × length + per pair × length²).

    It is linear in the rows. If all rows have one length, only the first two terms are used, and methods need no
    length. Tokens beyond the knee have their own coefficient.
    """

    fixed_bytes: float
    bytes_per_row: float = 0.0
    bytes_per_token: float = 0.0
    bytes_per_pair: float = 0.0
    bytes_per_late_token: float = 0.0
    knee: int = 0
    """Tokens of a row before the knee; 0 if there is no knee."""

    def bytes_at(self, rows: float, length: float = 0.0, tokens: float | None = None) -> float:
        """Return the predicted bytes. Without padding, `tokens` are those of all rows, and `length` is the longest."""
        if tokens is None:
            return self.fixed_bytes + rows * self._bytes_of_a_row(length)
        # an upper bound: each token is paired with at most `length` tokens
        per_token = self.bytes_per_token + length * self.bytes_per_pair
        return self.fixed_bytes + rows * self.bytes_per_row + tokens * per_token

    def rows_within(self, budget_bytes: float, length: float = 0.0) -> float:
        """Return the rows at which the phase reaches the budget; infinite if it does not grow."""
        free_bytes = budget_bytes + _HALF_A_BYTE - self.fixed_bytes
        each_bytes = self._bytes_of_a_row(length)
        if each_bytes == 0:
            return math.inf if free_bytes >= 0 else 0.0
        return max(0.0, free_bytes / each_bytes)

    def _bytes_of_a_row(self, length: float) -> float:
        late = max(0.0, length - self.knee) if self.knee else 0.0
        of_tokens = (length - late) * self.bytes_per_token + late * self.bytes_per_late_token
        return self.bytes_per_row + of_tokens + length**2 * self.bytes_per_pair


def fit_surface(points: Points, knee: int = 0) -> Surface:
    """Return the surface with the smallest relative errors; it has a pair term only if the points require one."""

    def farthest_off(surface: Surface) -> float:
        return max(abs(surface.bytes_at(*at) - measured) for at, measured in points.items())

    terms = [_FIXED, _ROW, _TOKEN, *([_LATE] if knee else [])]
    plain = _fit(points, terms, knee)
    grown_bytes = max(points.values()) - min(points.values())
    if len(points) < 4 or farthest_off(plain) <= _BENT * grown_bytes:
        return plain
    return min(plain, _fit(points, [*terms, _PAIR], knee), key=farthest_off)


def covering(surface: Surface, points: Points) -> Surface:
    """Return the surface, raised so that no point is above it."""
    short_bytes = max(0.0, *(measured - surface.bytes_at(*at) for at, measured in points.items()))
    return replace(surface, fixed_bytes=surface.fixed_bytes + short_bytes)


def _fit(points: Points, terms: Sequence[int], knee: int) -> Surface:
    """Fit non-negative coefficients by least squares of relative errors; more rows never need less memory."""
    basis = np.array([_factors(*at, knee) for at in points])
    measured = np.array([max(1, need) for need in points.values()], dtype=float)
    scale = np.maximum(basis.max(axis=0), 1.0)
    weighted = basis / scale / measured[:, None]
    best, best_error = np.zeros(len(scale)), math.inf
    for chosen in (list(some) for size in range(1, len(terms) + 1) for some in combinations(terms, size)):
        part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(measured)), rcond=None)
        error = float(np.square(weighted[:, chosen] @ part - 1).sum())
        # Require a real improvement: a further term that only fits noise is not better.
        if (part >= 0).all() and error < best_error * (1 - 1e-9) - 1e-15:
            best, best_error = np.zeros(len(scale)), error
            best[chosen] = part
    return replace(Surface(*(best / scale).tolist()), knee=knee)


def _factors(rows: int, length: int, knee: int) -> list[float]:
    late = max(0, length - knee) if knee else 0
    return [1.0, rows, rows * (length - late), rows * length**2, rows * late]


UNBOUNDED_ROWS = 2**20
"""Returned by `SurfaceLimit.rows_at` in place of infinity, if memory does not grow with the rows."""

_STEP_DOWN = 0.75
"""Factor on the growing part of the predicted need, after running out of memory."""


class MicrobatchSize(NamedTuple):
    """The size of a microbatch."""

    rows: int
    length: int
    """Tokens of the longest row."""
    tokens: int | None = None
    """Tokens of all rows, if they are not padded; by default, rows × length."""

    @property
    def padded_tokens(self) -> int:
        """Tokens in memory, padding included."""
        return self.rows * self.length if self.tokens is None else self.tokens


class Limit(Protocol):
    """The largest microbatch that is allowed, given by a single number, `size`.

    Methods take the fields of a `MicrobatchSize`. The allowed rows never increase with the length. The methods defined
    here are those of limits by rows or tokens; `SurfaceLimit` overrides them.
    """

    unit: str
    """The unit of `size`."""
    by_length: bool
    """True if the limit depends on the length, so that ranks may need different numbers of microbatches."""
    sized_by: str
    """Name of the field that holds `size`."""

    @property
    def size(self) -> int:
        """The number that changes when a limit shrinks or grows."""
        return int(getattr(self, self.sized_by))

    def resized(self, size: int) -> Self:
        """Return a limit of the same kind with this size."""
        return replace(self, **{self.sized_by: size})  # type: ignore[type-var]

    def rows_at(self, length: int) -> int:
        """Return the most rows of this length; 0 if one row does not fit."""

    def need(self, rows: int, length: int, tokens: int | None = None) -> float:
        """Return the part of `size` that a microbatch uses."""

    @property
    def next_size(self) -> int:
        """The next larger size, after enough clean steps."""
        return 1 << self.size.bit_length()

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        """Return True if the microbatch is within the limit."""
        return self.need(rows, length, tokens) <= self.size

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Self | None:
        """Return the next smaller limit, after this microbatch ran out of memory; None at the smallest.

        It is the next power of two below the need of the microbatch: 8 -> 4 and 6 -> 4.
        """
        if self.size == 1 or not self.fits(rows, length, tokens):
            return None
        needed = max(2, int(self.need(rows, length, tokens)))
        return self.resized(1 << ((needed - 1).bit_length() - 1))

    def format_need(self, rows: int, length: int, tokens: int | None = None) -> str:
        """Format a microbatch in the unit of the limit, without the unit: the 8 in `microbatch 8 -> 4 rows`."""
        return str(self.need(rows, length, tokens))


@dataclass(frozen=True)
class RowLimit(Limit):
    """At most `rows` samples in a microbatch, of any length."""

    rows: int
    unit = sized_by = "rows"
    by_length = False

    def __post_init__(self) -> None:
        _check_count(self.rows, "row")

    def rows_at(self, length: int) -> int:
        """Return the same rows for every length."""
        return self.rows

    def need(self, rows: int, length: int, tokens: int | None = None) -> int:
        """Return the rows of the microbatch."""
        return rows

    def __str__(self) -> str:
        return count_of(self.rows, "row")


@dataclass(frozen=True)
class TokenLimit(Limit):
    """At most `tokens` in a microbatch: rows × longest row, if rows are padded."""

    tokens: int
    rows_per_sample: int = 1
    """Rows of each sample, for example 2 for a pair; the limit counts the tokens of all of them."""
    unit = sized_by = "tokens"
    by_length = True

    def __post_init__(self) -> None:
        _check_count(self.tokens, "token")
        _check_count(self.rows_per_sample, "row")

    def rows_at(self, length: int) -> int:
        """Return the most samples whose longest row has this length."""
        return self.tokens // (length * self.rows_per_sample)

    def need(self, rows: int, length: int, tokens: int | None = None) -> int:
        """Return the tokens of the microbatch, padding included."""
        return rows * self.rows_per_sample * length if tokens is None else tokens

    def __str__(self) -> str:
        return count_of(self.tokens, "token")


@dataclass(frozen=True)
class SurfaceLimit(Limit):
    """Microbatches whose predicted need is within the budget in every phase."""

    surfaces: Mapping[str, Surface]
    """The surface of each phase."""
    budget_bytes: int
    unit = "bytes"
    sized_by = "budget_bytes"
    by_length = True

    def rows_at(self, length: int) -> int:
        """Return the most rows of this length that all phases allow."""
        within = min(surface.rows_within(self.budget_bytes, length) for surface in self.surfaces.values())
        return int(min(UNBOUNDED_ROWS, within))

    def need(self, rows: int, length: int, tokens: int | None = None) -> float:
        """Return the predicted bytes of the phase with the highest need."""
        return max(surface.bytes_at(rows, length, tokens) for surface in self.surfaces.values())

    @property
    def next_size(self) -> int:
        """The next larger budget."""
        return max(self.budget_bytes + 1, int(self.budget_bytes / _STEP_DOWN))

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        """Return True if all phases are within the budget."""
        if tokens is None:
            return rows <= self.rows_at(length)
        return self.need(rows, length, tokens) <= self.budget_bytes + _HALF_A_BYTE

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Self | None:
        """Return a smaller limit, or None if it would not exclude the microbatch.

        Its budget is the predicted need of the failed microbatch, with 3/4 of the part that grows with the microbatch.
        """
        size = MicrobatchSize(rows, length, tokens)
        fullest = max(self.surfaces.values(), key=lambda surface: surface.bytes_at(*size))
        failed_bytes = fullest.bytes_at(*size)
        stepped_down = fullest.fixed_bytes + _STEP_DOWN * (failed_bytes - fullest.fixed_bytes)
        # If the growing part is small, this budget may still admit the microbatch, due to rounding: go below its need.
        smaller = self.resized(int(min(stepped_down, math.ceil(failed_bytes - _HALF_A_BYTE) - 1)))
        shrinks = self.fits(*size) and smaller.budget_bytes < self.budget_bytes and not smaller.fits(*size)
        return smaller if shrinks else None

    def format_need(self, rows: int, length: int, tokens: int | None = None) -> str:
        """Format the predicted need."""
        return format_bytes(self.need(rows, length, tokens))

    def __str__(self) -> str:
        return f"{format_bytes(self.budget_bytes)} (predicted)"


def _check_count(count: int, of: str) -> None:
    if not is_whole(count, at_least=1):
        raise ValueError(f"a limit is a whole number of {of}s, at least 1, but this one is {count!r}")


def most_that_fit(fits: Callable[[int], bool], at_most: int) -> int:
    """Return the largest number up to `at_most` that fits, or 0. If a number fits, every smaller one must fit too."""
    return bisect_left(range(1, at_most + 1), True, key=lambda number: not fits(number))


def longest_row(limit: Limit, at_most: int) -> int:
    """Return the length of the longest row, up to `at_most`, that fits alone, or 0."""
    return most_that_fit(lambda length: limit.fits(1, length), at_most)
