"""Formats amounts, counts and names for messages, and parses amounts of memory such as `24GiB`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torchtune_adaptive.errors import ConfigError

_UNITS: dict[str, int] = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
MOST_DECIMALS = 13
"""With this many decimals, a difference of one byte in a TiB is visible."""
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_AMOUNT = "allowed: an amount (24GiB, 500MiB, 80GB)"
_ALLOWED = f"{_AMOUNT} or a fraction of the device, above 0 and up to 1 (0.9)"


@dataclass(frozen=True)
class MemorySize:
    """An amount of memory in bytes, or a fraction of a device whose size is not known yet."""

    amount: float
    is_fraction: bool

    def bytes_of(self, total_bytes: int) -> int:
        """Return this amount on a device of `total_bytes`. An amount above `total_bytes` is reduced to it, because an
        "80 GB" GPU reports a little less than 80 GB."""
        requested_bytes = self.amount * total_bytes if self.is_fraction else self.amount
        return min(int(requested_bytes), total_bytes)


def parse_size(value: object, key: str) -> MemorySize:
    """Parse an amount of memory or a fraction. Errors name `key`."""
    number = _as_number(value)
    if number is not None:
        if not 0 < number <= 1:
            raise ConfigError(f"{key}: {value!r} is neither an amount of memory nor a fraction; {_ALLOWED}")
        return MemorySize(number, is_fraction=True)
    match = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    amount = float(match[1]) * _UNITS.get(match[2].lower(), math.nan) if match else math.nan
    if not math.isfinite(amount):
        raise ConfigError(f"{key}: cannot read {value!r} as an amount of memory; {_ALLOWED}")
    if amount < 1:
        raise ConfigError(f"{key}: {value!r} leaves no memory; {_ALLOWED}")
    return MemorySize(amount, is_fraction=False)


def parse_sizes(value: object, key: str) -> tuple[MemorySize, ...]:
    """Parse one amount for all ranks, or a list with one amount per rank."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (parse_size(value, key),)
    if not value:
        raise ConfigError(f"{key}: the list is empty; give one amount, or a list with one per rank")
    return tuple(parse_size(item, f"{key}[{rank}]") for rank, item in enumerate(value))


def size_for_rank(sizes: Sequence[MemorySize], rank: int, world_size: int, key: str) -> MemorySize:
    """Return the amount for `rank`. Raise the same error on every rank if the list has the wrong length."""
    if len(sizes) not in (1, world_size):
        raise ConfigError(
            f"{key}: {len(sizes)} amounts for {world_size} ranks; give one amount, or a list of one per rank"
        )
    return sizes[0] if len(sizes) == 1 else sizes[rank]


def format_bytes(count: float, decimals: int = 1) -> str:
    """Format an amount in the smallest unit in which it is below 1024, for example `38.4 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # rounded before the comparison, so that 1023.97 MiB becomes 1.0 GiB and not 1024.0 MiB
        if abs(round(value, decimals)) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.{decimals}f} {unit}"
        value /= 1024
    return f"{value:.{decimals}f} TiB"


def format_apart(first: float, second: float) -> tuple[str, str]:
    """Format two amounts with enough decimals to show that they differ: `2.21 MiB`, `2.19 MiB`."""
    for decimals in range(1, MOST_DECIMALS):
        texts = format_bytes(first, decimals), format_bytes(second, decimals)
        if texts[0] != texts[1]:
            return texts
    return format_bytes(first), format_bytes(second)


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


LONGEST_SHOWN = 200
"""Maximum number of characters of a value in a message."""


def count_of(count: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun: `1 row`, `2 rows`. `many` is the plural if it is irregular."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def ranks_named(ranks: Iterable[int]) -> str:
    """Format a list of ranks: `rank 1`, `ranks 1, 2`."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> str:
    """Return `; did you mean a or b?` with up to `most` similar names, or "" if no name is similar enough."""
    similar = difflib.get_close_matches(name, list(known), n=most, cutoff=likeness)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def printable(text: str) -> str:
    """Escape control characters, so that the text cannot control a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shown(value: object) -> str:
    """Format a config value as it is written in YAML, truncated to `LONGEST_SHOWN` characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def in_columns(lines: Iterable[Sequence[object]]) -> str:
    """Format lines of cells as an indented table whose columns are as wide as their longest cell."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  " + "   ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def is_whole(value: Any, *, at_least: int) -> bool:
    """Return True for an integer of at least `at_least`, including NumPy's integers but not bool."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= at_least
