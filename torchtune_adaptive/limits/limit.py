"""What a microbatch may be so that it fits. A limit is a frozen value: a transition returns a new one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torchtune_adaptive.bisecting import most_that_fit
from torchtune_adaptive.errors import LimitExhaustedError, Remedy
from torchtune_adaptive.limits.surface import Surface
from torchtune_adaptive.memory_sizes import format_bytes
from torchtune_adaptive.wording import count_of

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
    """How many rows may share a microbatch, for each length that they are padded to. Never more for a longer one.

    Where nothing is padded, `tokens` are those of all rows, and `length` is the longest; None: rows × length.
    """

    unit: str
    """What `size` counts."""
    by_length: bool
    """Whether it depends on the length, so that ranks with equally many samples may need more or less room."""

    @property
    def size(self) -> int:
        """The one number that changes when a limit shrinks or grows."""

    @property
    def next_size(self) -> int:
        """What to try when this has been enough for long."""

    def resized(self, size: int) -> Limit:
        """The limit of the same kind with this size."""

    def rows_at(self, length: int) -> int:
        """The most rows of this length; 0 where not even one fits."""

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        """Whether `rows` samples, padded to `length` tokens, are within the limit."""

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> Limit:
        """The next smaller limit, after a microbatch of this size ran out of memory; raises if there is none."""

    def size_of(self, rows: int, length: int, tokens: int | None = None) -> str:
        """A microbatch in the unit of the limit, without the unit: `microbatch 8 -> 4 rows`."""

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class RowLimit:
    """At most `rows` samples in a microbatch, however long they are."""

    rows: int
    unit = "rows"
    by_length = False

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a microbatch needs at least 1 row, but the limit is {self.rows}")

    @property
    def size(self) -> int:
        return self.rows

    @property
    def next_size(self) -> int:
        return smallest_power_of_two_above(self.rows)

    def resized(self, size: int) -> RowLimit:
        return RowLimit(size)

    def rows_at(self, length: int) -> int:
        return self.rows

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        return rows <= self.rows

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> RowLimit:
        """Always a power of two: 8 -> 4 and 6 -> 4."""
        if self.rows == 1:
            raise exhausted(length)
        return RowLimit(largest_power_of_two_below(max(2, min(rows, self.rows))))

    def size_of(self, rows: int, length: int, tokens: int | None = None) -> str:
        return str(rows)

    def __str__(self) -> str:
        return count_of(self.rows, "row")


@dataclass(frozen=True)
class TokenLimit:
    """At most `tokens` in a microbatch, padding included: rows × longest row, where rows are padded."""

    tokens: int
    rows_per_sample: int = 1
    """More than 1 where a sample is several rows of a microbatch: the limit counts all of them, `rows` samples."""
    unit = "tokens"
    by_length = True

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a microbatch needs at least 1 token, but the limit is {self.tokens}")

    @property
    def size(self) -> int:
        return self.tokens

    @property
    def next_size(self) -> int:
        return smallest_power_of_two_above(self.tokens)

    def resized(self, size: int) -> TokenLimit:
        return replace(self, tokens=size)

    def rows_at(self, length: int) -> int:
        return self.tokens // (length * self.rows_per_sample)

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        return self._room_tokens(rows, length, tokens) <= self.tokens

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> TokenLimit:
        """The largest power of two below the tokens that failed."""
        room_tokens = self._room_tokens(rows, length, tokens)
        if room_tokens > self.tokens or room_tokens < 2:
            raise exhausted(length)
        return replace(self, tokens=largest_power_of_two_below(room_tokens))

    def size_of(self, rows: int, length: int, tokens: int | None = None) -> str:
        return str(self._room_tokens(rows, length, tokens))

    def _room_tokens(self, rows: int, length: int, tokens: int | None) -> int:
        return rows * self.rows_per_sample * length if tokens is None else tokens

    def __str__(self) -> str:
        return f"{self.tokens} tokens"


@dataclass(frozen=True)
class SurfaceLimit:
    """As many rows as the measured need of every phase, fitted over rows and length, has room for."""

    surfaces: Mapping[str, Surface]
    """One surface for each phase, by its name."""
    budget_bytes: int
    unit = "bytes"
    by_length = True

    @property
    def size(self) -> int:
        return self.budget_bytes

    @property
    def next_size(self) -> int:
        return max(self.budget_bytes + 1, int(self.budget_bytes / _STEP_DOWN))

    def resized(self, size: int) -> SurfaceLimit:
        return replace(self, budget_bytes=size)

    def rows_at(self, length: int) -> int:
        within = min(surface.rows_within(self.budget_bytes, length) for surface in self.surfaces.values())
        return UNBOUNDED_ROWS if within == math.inf else min(UNBOUNDED_ROWS, int(within))

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool:
        if tokens is None:
            return rows <= self.rows_at(length)
        return all(surface.holds(self.budget_bytes, rows, length, tokens) for surface in self.surfaces.values())

    def after_oom(self, rows: int, length: int, tokens: int | None = None) -> SurfaceLimit:
        """A limit with a smaller budget than was predicted for what failed; what does not grow with it stays."""
        size = Microbatch(rows, length, tokens)
        if not self.fits(*size):
            raise exhausted(length)
        fullest = max(self.surfaces.values(), key=lambda surface: surface.bytes_at(*size))
        failed_bytes = fullest.bytes_at(*size)
        stepped_down = fullest.fixed_bytes + _STEP_DOWN * (failed_bytes - fullest.fixed_bytes)
        # Surfaces have fractions of bytes and are compared with half a byte to spare: of a few bytes, less than that
        # may be left of the step down.
        smaller = replace(self, budget_bytes=int(min(stepped_down, math.ceil(failed_bytes - 0.5) - 1)))
        if smaller.budget_bytes >= self.budget_bytes or smaller.fits(*size):
            raise exhausted(length)
        return smaller

    def size_of(self, rows: int, length: int, tokens: int | None = None) -> str:
        return format_bytes(max(surface.bytes_at(rows, length, tokens) for surface in self.surfaces.values()))

    def __str__(self) -> str:
        return f"{format_bytes(self.budget_bytes)} predicted"


def longest_row(limit: Limit, at_most: int) -> int:
    """The longest sample, of no more than `at_most` tokens, that fits alone; 0 if none does."""
    return most_that_fit(lambda length: limit.fits(1, length), at_most)


def exhausted(length: int) -> LimitExhaustedError:
    return LimitExhaustedError(
        f"a microbatch of 1 row of {length} tokens does not fit and cannot be made smaller",
        Remedy.SHORTER_SAMPLES,
        Remedy.CHECKPOINT_ACTIVATIONS,
        Remedy.MORE_RANKS,
    )


def largest_power_of_two_below(count: int) -> int:
    """The largest power of two that is smaller than `count` (which is at least 2)."""
    return 1 << ((count - 1).bit_length() - 1)


def smallest_power_of_two_above(count: int) -> int:
    return 1 << count.bit_length()
