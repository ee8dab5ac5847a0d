"""What a microbatch may be so that it fits. A limit is a frozen value: a transition returns a new one.

A limit by bytes rests on a law. What a phase needs is what it finds, plus something for each row, for each token, and,
where attention holds a matrix, for each pair of tokens of a row. All of it is linear in the rows, so the most rows of
a length follow without a search. Where samples grow in one way up to some length and in another from there on, the
surface has a knee at that length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import count_of, format_bytes, is_whole

MAX_ROWS = 4096
"""Searched up to where the user sets no bound; ends the search on memory that does not grow with the rows."""

ROUNDINGS = ("power_of_two", "none", "divisor")


def rungs_up_to(max_rows: int | None, round_to: str, samples_per_step: int | None = None) -> Sequence[int]:
    """The rows that may be chosen, ascending: all of them, powers of two, or divisors of the step."""
    for name, count in {"max_rows": max_rows, "samples_per_step": samples_per_step}.items():
        if count is not None and not is_whole(count, at_least=1):
            raise ConfigError(f"{name}: {count!r} is no whole number from 1 on; allowed: 1 or more, or None")
    most = MAX_ROWS if max_rows is None else int(max_rows)
    if round_to == "none":
        return range(1, most + 1)
    if round_to == "power_of_two":
        return [1 << exponent for exponent in range(most.bit_length())]
    if round_to == "divisor" and samples_per_step is not None:
        return [rows for rows in range(1, min(most, samples_per_step) + 1) if samples_per_step % rows == 0]
    raise ConfigError(
        f"round_to: {round_to!r} is unknown, or samples_per_step is missing; allowed: {', '.join(ROUNDINGS)}"
    )


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
        per_token = self.bytes_per_token + length * self.bytes_per_pair
        return self.fixed_bytes + rows * self.bytes_per_row + tokens * per_token

    def rows_within(self, budget_bytes: float, length: float = 0.0) -> float:
        """The rows at which the phase reaches the budget; infinite for a phase that does not grow."""
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
    """The surface that is closest to the points in proportion to them; with pairs of tokens only if they show."""

    def farthest_off(surface: Surface) -> float:
        return max(abs(surface.bytes_at(*at) - measured) for at, measured in points.items())

    terms = [_FIXED, _ROW, _TOKEN, *([_LATE] if knee else [])]
    plain = _fit(points, terms, knee)
    grown_bytes = max(points.values()) - min(points.values())
    if len(points) < 4 or farthest_off(plain) <= _BENT * grown_bytes:
        return plain
    return min(plain, _fit(points, [*terms, _PAIR], knee), key=farthest_off)


def covering(surface: Surface, points: Points) -> Surface:
    """The surface raised as far as it lies below a point: a law for what fits must not promise what was refuted."""
    short_bytes = max(0.0, *(measured - surface.bytes_at(*at) for at, measured in points.items()))
    return replace(surface, fixed_bytes=surface.fixed_bytes + short_bytes)


def _fit(points: Points, terms: Sequence[int], knee: int) -> Surface:
    """Least squares of relative errors, without negative coefficients: memory is never given back by more rows."""
    basis = np.array([_factors(*at, knee) for at in points])
    measured = np.array([max(1, need) for need in points.values()], dtype=float)
    scale = np.maximum(basis.max(axis=0), 1.0)
    weighted = basis / scale / measured[:, None]
    best, best_error = np.zeros(len(scale)), math.inf
    for chosen in (list(some) for size in range(1, len(terms) + 1) for some in combinations(terms, size)):
        part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(measured)), rcond=None)
        error = float(np.square(weighted[:, chosen] @ part - 1).sum())
        # A solution with a negative part is not one; of those without, one that only adds noise is not better.
        if (part >= 0).all() and error < best_error * (1 - 1e-9) - 1e-15:
            best, best_error = np.zeros(len(scale)), error
            best[chosen] = part
    return replace(Surface(*(best / scale).tolist()), knee=knee)


def _factors(rows: int, length: int, knee: int) -> list[float]:
    """What each part of a surface is multiplied by."""
    late = max(0, length - knee) if knee else 0
    return [1.0, rows, rows * (length - late), rows * length**2, rows * late]


UNBOUNDED_ROWS = 2**20
"""What a surface that does not grow with the rows returns in place of infinity."""

_STEP_DOWN = 0.75
"""What is left of the predicted need that grows with a microbatch, after it ran out of memory."""


class Microbatch(NamedTuple):
    """The size of a microbatch: rows, the longest of them and, where nothing is padded, the tokens of all."""

    rows: int
    length: int
    tokens: int | None = None
    """None: rows × length."""

    @property
    def room_tokens(self) -> int:
        """Tokens that take room, padding included."""
        return self.rows * self.length if self.tokens is None else self.tokens


class Limit(Protocol):
    """What a microbatch may be: one number, `size`, in some unit. Its methods are those of a limit that counts.

    A microbatch is given by its rows and the length of the longest. Where nothing is padded, `tokens` are those of all
    rows; None: rows × length. A limit has never room for more rows of a longer one.
    """

    unit: str
    """What `size` counts."""
    by_length: bool
    """Whether it depends on the length, so that ranks with equally many samples may need more or less room."""

    @property
    def size(self) -> int:
        """The one number that changes when a limit shrinks or grows."""

    def resized(self, size: int) -> Self:
        """The limit of the same kind with this size."""

    def rows_at(self, length: int) -> int:
        """The most rows of this length; 0 where not even one fits."""

    def need(self, rows: int, length: int, tokens: int | None = None) -> float:
        """What a microbatch takes of `size`."""

    @property
    def next_size(self) -> int:
        """What to try when this has been enough for long."""
        return 1 << self.size.bit_length()

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        """Whether such a microbatch is within the limit."""
        return self.need(rows, length, tokens) <= self.size

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Self | None:
        """The next smaller limit, after such a microbatch ran out of memory: the next lower power of two, 8 -> 4 and
        6 -> 4. None if nothing smaller is left."""
        if self.size == 1 or not self.fits(rows, length, tokens):
            return None
        return self.resized(largest_power_of_two_below(max(2, int(self.need(rows, length, tokens)))))

    def size_of(self, rows: int, length: int, tokens: int | None = None) -> str:
        """A microbatch in the unit of the limit, without the unit: `microbatch 8 -> 4 rows`."""
        return str(self.need(rows, length, tokens))


@dataclass(frozen=True)
class RowLimit(Limit):
    """At most `rows` samples in a microbatch, however long they are."""

    rows: int
    unit = "rows"
    by_length = False

    def __post_init__(self) -> None:
        _check_count(self.rows, "row")

    @property
    def size(self) -> int:
        return self.rows

    def resized(self, size: int) -> Self:
        return replace(self, rows=size)

    def rows_at(self, length: int) -> int:
        return self.rows

    def need(self, rows: int, length: int, tokens: int | None = None) -> int:
        return rows

    def __str__(self) -> str:
        return count_of(self.rows, "row")


@dataclass(frozen=True)
class TokenLimit(Limit):
    """At most `tokens` in a microbatch, padding included: rows × longest row, where rows are padded."""

    tokens: int
    rows_per_sample: int = 1
    """More than 1 where a sample is several rows of a microbatch: the limit counts all of them, `rows` samples."""
    unit = "tokens"
    by_length = True

    def __post_init__(self) -> None:
        _check_count(self.tokens, "token")
        _check_count(self.rows_per_sample, "row")

    @property
    def size(self) -> int:
        return self.tokens

    def resized(self, size: int) -> Self:
        return replace(self, tokens=size)

    def rows_at(self, length: int) -> int:
        return self.tokens // (length * self.rows_per_sample)

    def need(self, rows: int, length: int, tokens: int | None = None) -> int:
        return rows * self.rows_per_sample * length if tokens is None else tokens

    def __str__(self) -> str:
        return count_of(self.tokens, "token")


@dataclass(frozen=True)
class SurfaceLimit(Limit):
    """As many rows as the measured need of every phase, fitted over rows and length, has room for."""

    surfaces: Mapping[str, Surface]
    """One surface for each phase, by its name."""
    budget_bytes: int
    unit = "bytes"
    by_length = True

    @property
    def size(self) -> int:
        return self.budget_bytes

    def resized(self, size: int) -> Self:
        return replace(self, budget_bytes=size)

    def rows_at(self, length: int) -> int:
        within = min(surface.rows_within(self.budget_bytes, length) for surface in self.surfaces.values())
        return int(min(UNBOUNDED_ROWS, within))

    def need(self, rows: int, length: int, tokens: int | None = None) -> float:
        return max(surface.bytes_at(rows, length, tokens) for surface in self.surfaces.values())

    @property
    def next_size(self) -> int:
        return max(self.budget_bytes + 1, int(self.budget_bytes / _STEP_DOWN))

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        if tokens is None:
            return rows <= self.rows_at(length)
        return self.need(rows, length, tokens) <= self.budget_bytes + _HALF_A_BYTE

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Self | None:
        """A limit with a smaller budget than was predicted for what failed; what does not grow with it stays."""
        size = Microbatch(rows, length, tokens)
        fullest = max(self.surfaces.values(), key=lambda surface: surface.bytes_at(*size))
        failed_bytes = fullest.bytes_at(*size)
        stepped_down = fullest.fixed_bytes + _STEP_DOWN * (failed_bytes - fullest.fixed_bytes)
        # Surfaces have fractions of bytes and are compared with half a byte to spare: of a few bytes, less than that
        # may be left of the step down.
        smaller = self.resized(int(min(stepped_down, math.ceil(failed_bytes - _HALF_A_BYTE) - 1)))
        shrinks = self.fits(*size) and smaller.budget_bytes < self.budget_bytes and not smaller.fits(*size)
        return smaller if shrinks else None

    def size_of(self, rows: int, length: int, tokens: int | None = None) -> str:
        return format_bytes(self.need(rows, length, tokens))

    def __str__(self) -> str:
        return f"{format_bytes(self.budget_bytes)} predicted"


def _check_count(count: int, of: str) -> None:
    if not is_whole(count, at_least=1):
        raise ValueError(f"a limit is a whole number of {of}s, at least 1, but this one is {count!r}")


def most_that_fit(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest number up to `at_most` that fits, where every smaller one fits too; 0 if 1 does not."""
    return bisect_left(range(1, at_most + 1), True, key=lambda number: not fits(number))


def longest_row(limit: Limit, at_most: int) -> int:
    """The longest sample, of no more than `at_most` tokens, that fits alone; 0 if none does."""
    return most_that_fit(lambda length: limit.fits(1, length), at_most)


def largest_power_of_two_below(count: int) -> int:
    """The largest power of two that is smaller than `count` (which is at least 2)."""
    return 1 << ((count - 1).bit_length() - 1)
