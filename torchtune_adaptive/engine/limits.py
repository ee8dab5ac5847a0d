"""Limits on the size of a microbatch: by rows, by tokens or by predicted bytes. They are immutable.

A limit by bytes predicts the peak memory of each phase of a step by a formula, called its surface. A surface is a fixed
part plus bytes per row, per token and, if attention stores a matrix, per pair of tokens in a row. It is linear in the
rows. The most rows of a given length are therefore the budget minus the fixed part, divided by the bytes of one row. If
tokens beyond some length need a different amount of memory, the surface has a *knee* at that length.
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
"""The default upper bound of a search. Without a bound, it would not end if memory does not grow with the rows."""

ROUNDINGS = ("power_of_two", "none")


def candidate_rows(max_rows: int | None, round_to: str) -> Sequence[int]:
    """Return the numbers of rows that a search may choose, ascending: powers of two, or all up to `max_rows`."""
    check_choice("round_to", round_to, ROUNDINGS)
    if max_rows is not None and not is_whole(max_rows, at_least=1):
        raise ConfigError(f"max_rows: {max_rows!r} is not allowed; pass a whole number, 1 or more, or omit it")
    most = MAX_ROWS if max_rows is None else int(max_rows)
    if round_to == "none":
        return range(1, most + 1)
    return [1 << exponent for exponent in range(most.bit_length())]


Points: TypeAlias = Mapping[tuple[int, int], int]
"""Maps (rows, length) to measured bytes."""

_PAIR_TERM_THRESHOLD = 0.01
"""A surface gets a pair term if, without it, its error at some point exceeds this share of the range of the measured
bytes. The range, maximum minus minimum, does not contain resident memory, which would make any error seem small."""

_HALF_A_BYTE = 0.5
"""Tolerance for rounding errors of predictions. Memory that exceeds a budget exceeds it by at least a whole byte."""

_FIXED, _ROW, _TOKEN, _PAIR, _LATE = range(5)
"""Terms of a surface, in the order of its fields."""


@dataclass(frozen=True)
class Surface:
    """Predicts bytes: fixed + rows × (per row + per token × length + per pair × length²).

    A surface of measurements of a single length has only the first two terms, and its methods need no length. Tokens
    beyond the knee have another coefficient, `bytes_per_late_token`.
    """

    fixed_bytes: float
    bytes_per_row: float = 0.0
    bytes_per_token: float = 0.0
    bytes_per_pair: float = 0.0
    bytes_per_late_token: float = 0.0
    knee: int = 0
    """The length at which the knee is; 0 if there is no knee."""

    def bytes_at(self, rows: float, length: float = 0.0, tokens: float | None = None) -> float:
        """Return the predicted bytes of rows of this length. If rows are not padded, `tokens` is their total number of
        tokens, and `length` is that of the longest row."""
        if tokens is None:
            return self.fixed_bytes + rows * self._bytes_of_a_row(length)
        # an upper bound, because each token is paired with at most `length` tokens
        per_token = max(self.bytes_per_token, self.bytes_per_late_token) + length * self.bytes_per_pair
        return self.fixed_bytes + rows * self.bytes_per_row + tokens * per_token

    def rows_within(self, budget_bytes: float, length: float = 0.0) -> float:
        """Return the number of rows at which the prediction reaches the budget; infinite if it does not grow."""
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
    """Fit a surface to measurements; add a pair term only if the points require one."""

    def largest_error(surface: Surface) -> float:
        return max(abs(surface.bytes_at(*at) - measured) for at, measured in points.items())

    terms = [_FIXED, _ROW, _TOKEN, *([_LATE] if knee else [])]
    without_pairs = _fit(points, terms, knee)
    range_bytes = max(points.values()) - min(points.values())
    if len(points) < 4 or largest_error(without_pairs) <= _PAIR_TERM_THRESHOLD * range_bytes:
        return without_pairs
    return min(without_pairs, _fit(points, [*terms, _PAIR], knee), key=largest_error)


def raised_above(surface: Surface, points: Points) -> Surface:
    """Return the surface with a larger fixed part, so that no point is above it."""
    missing_bytes = max(0.0, *(measured - surface.bytes_at(*at) for at, measured in points.items()))
    return replace(surface, fixed_bytes=surface.fixed_bytes + missing_bytes)


def _fit(points: Points, terms: Sequence[int], knee: int) -> Surface:
    """Fit these terms by least squares of relative errors. Coefficients are not negative, so more rows never need less
    memory. All subsets of the terms are tried, because least squares alone may return negative ones."""
    basis = np.array([_factors(*at, knee) for at in points])
    measured = np.array([max(1, need) for need in points.values()], dtype=float)
    scale = np.maximum(basis.max(axis=0), 1.0)
    weighted = basis / scale / measured[:, None]
    best, best_error = np.zeros(len(scale)), math.inf
    for chosen in (list(some) for size in range(1, len(terms) + 1) for some in combinations(terms, size)):
        part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(measured)), rcond=None)
        error = float(np.square(weighted[:, chosen] @ part - 1).sum())
        # A further term must reduce the error by more than rounding.
        if (part >= 0).all() and error < best_error * (1 - 1e-9) - 1e-15:
            best, best_error = np.zeros(len(scale)), error
            best[chosen] = part
    return replace(Surface(*(best / scale).tolist()), knee=knee)


def _factors(rows: int, length: int, knee: int) -> list[float]:
    late = max(0, length - knee) if knee else 0
    return [1.0, rows, rows * (length - late), rows * length**2, rows * late]


UNBOUNDED_ROWS = 2**20
"""`SurfaceLimit.rows_at` returns this instead of infinity if memory does not grow with the rows."""

_SHRINK_FACTOR = 0.75
"""After an out-of-memory error, the part of the predicted memory that grows with the microbatch is multiplied by it."""


class MicrobatchSize(NamedTuple):
    """The size of a microbatch."""

    rows: int
    length: int
    """Tokens of the longest row."""
    tokens: int | None = None
    """Tokens of all rows if they are not padded; None if they are padded to rows × length."""

    @property
    def padded_tokens(self) -> int:
        """Number of tokens in memory, padding included."""
        return self.rows * self.length if self.tokens is None else self.tokens


class Limit(Protocol):
    """The largest microbatch that is allowed, described by a single number, its `size`.

    Methods take the fields of a `MicrobatchSize`. Longer rows never allow more rows. The methods defined here are for
    limits by rows or tokens; `SurfaceLimit` overrides those that do not apply to it.
    """

    unit: str
    """The unit of `size`."""
    by_length: bool
    """True if the limit depends on the length of rows. Ranks may then need different numbers of microbatches."""
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
        """Return the most rows of this length that are allowed; 0 if one row is too large."""

    def need(self, rows: int, length: int, tokens: int | None = None) -> float:
        """Return how much of `size` a microbatch needs, in the same unit."""

    @property
    def next_size(self) -> int:
        """The size of the next larger limit, a power of two."""
        return 1 << self.size.bit_length()

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        """Return True if the microbatch is within the limit."""
        return self.need(rows, length, tokens) <= self.size

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Self | None:
        """Return the next smaller limit after this microbatch ran out of memory, or None.

        Its size is the largest power of two below the need of the microbatch: 8 -> 4 and 6 -> 4. Returns None at size
        1, or if the microbatch exceeds the limit, because then it is a single sample, which cannot be split.
        """
        if self.size == 1 or not self.fits(rows, length, tokens):
            return None
        needed = max(2, int(self.need(rows, length, tokens)))
        return self.resized(1 << ((needed - 1).bit_length() - 1))

    def format_need(self, rows: int, length: int, tokens: int | None = None) -> str:
        """Format the need of a microbatch without the unit, such as the 8 in `microbatch 8 -> 4 rows`."""
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
    """At most `tokens` tokens in a microbatch. Padding counts: if sequences are padded, their number × the longest."""

    tokens: int
    rows_per_sample: int = 1
    """Sequences of each sample, for example 2 for a pair of answers. The limit counts the tokens of all sequences."""
    unit = sized_by = "tokens"
    by_length = True

    def __post_init__(self) -> None:
        _check_count(self.tokens, "token")
        _check_count(self.rows_per_sample, "row")

    def rows_at(self, length: int) -> int:
        """Return the most samples that are allowed if their longest sequence has this length."""
        return self.tokens // (length * self.rows_per_sample)

    def need(self, rows: int, length: int, tokens: int | None = None) -> int:
        """Return the tokens of the microbatch, padding included."""
        return rows * self.rows_per_sample * length if tokens is None else tokens

    def __str__(self) -> str:
        return count_of(self.tokens, "token")


@dataclass(frozen=True)
class SurfaceLimit(Limit):
    """At most `budget_bytes` of predicted memory in every phase of a step."""

    surfaces: Mapping[str, Surface]
    """The surface of each phase."""
    budget_bytes: int
    unit = "bytes"
    sized_by = "budget_bytes"
    by_length = True

    def rows_at(self, length: int) -> int:
        """Return the most rows of this length that fit in every phase."""
        rows = min(surface.rows_within(self.budget_bytes, length) for surface in self.surfaces.values())
        return int(min(UNBOUNDED_ROWS, rows))

    def need(self, rows: int, length: int, tokens: int | None = None) -> float:
        """Return the predicted bytes of the phase that needs the most."""
        return max(surface.bytes_at(rows, length, tokens) for surface in self.surfaces.values())

    @property
    def next_size(self) -> int:
        """The next larger budget, from which `after_oom` returns to this one."""
        fixed = [surface.fixed_bytes for surface in self.surfaces.values() if surface.fixed_bytes < self.budget_bytes]
        floor = max(fixed, default=0.0)
        return max(self.budget_bytes + 1, int(floor + (self.budget_bytes - floor) / _SHRINK_FACTOR))

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        """Return True if all phases are within the budget."""
        if tokens is None:
            return rows <= self.rows_at(length)
        return self.need(rows, length, tokens) <= self.budget_bytes + _HALF_A_BYTE

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Self | None:
        """Return a smaller limit that excludes this microbatch, which ran out of memory, or None. Its
        budget is the fixed part of the microbatch's predicted memory, plus 3/4 of the rest."""
        size = MicrobatchSize(rows, length, tokens)
        fullest = max(self.surfaces.values(), key=lambda surface: surface.bytes_at(*size))
        failed_bytes = fullest.bytes_at(*size)
        shrunk_bytes = fullest.fixed_bytes + _SHRINK_FACTOR * (failed_bytes - fullest.fixed_bytes)
        # If the growing part is small, rounding may let this budget admit the microbatch: stay a byte below its need.
        smaller = self.resized(int(min(shrunk_bytes, math.ceil(failed_bytes - _HALF_A_BYTE) - 1)))
        shrinks = self.fits(*size) and smaller.budget_bytes < self.budget_bytes and not smaller.fits(*size)
        return smaller if shrinks else None

    def format_need(self, rows: int, length: int, tokens: int | None = None) -> str:
        """Format the predicted bytes."""
        return format_bytes(self.need(rows, length, tokens))

    def __str__(self) -> str:
        return f"{format_bytes(self.budget_bytes)} (predicted)"


def _check_count(count: int, of: str) -> None:
    if not is_whole(count, at_least=1):
        raise ValueError(f"a limit is a whole number of {of}s, at least 1, but this one is {count!r}")


def most_that_fit(fits: Callable[[int], bool], at_most: int) -> int:
    """Return the largest number up to `at_most` that fits, or 0, by bisection: all smaller numbers must fit, too."""
    return bisect_left(range(1, at_most + 1), True, key=lambda number: not fits(number))


def longest_row(limit: Limit, at_most: int) -> int:
    """Return the length of the longest single row that fits, up to `at_most`, or 0."""
    return most_that_fit(lambda length: limit.fits(1, length), at_most)
