"""Formats amounts, counts and names for messages, and parses amounts of memory such as `24GiB`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from numbers import Integral
from typing import Any

from gpu_rehearsal.errors import ConfigError

_UNITS: dict[str, int] = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def parse_bytes(value: object, key: str) -> int:
    """Return bytes from a number of bytes or an amount of memory. Errors name `key`."""
    if is_whole(value, at_least=0) or value == "0":
        return int(str(value))
    match = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or (unit := _UNITS.get(match[2].lower())) is None or float(match[1]) * unit < 1:
        raise ConfigError(f"{key} is {value!r}: pass an amount of memory, for example 24GiB, 500MiB or 80GB")
    return int(float(match[1]) * unit)


def format_bytes(count: float, decimals: int = 1) -> str:
    """Format an amount in the smallest unit in which it is below 1024, for example `38.4 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # rounded before the comparison, so that 1023.97 MiB becomes 1.0 GiB and not 1024.0 MiB
        if abs(round(value, decimals)) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.{decimals}f} {unit}"
        value /= 1024
    return f"{value:.{decimals}f} TiB"


def count_of(count: int, one: str) -> str:
    """Format a count with its noun: `1 row`, `2 rows`."""
    return f"{count} {one if count == 1 else one + 's'}"


def ranks_named(ranks: Iterable[int]) -> str:
    """Format a list of ranks: `rank 1`, `ranks 1, 2, 8 to 63`."""
    runs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ends = [((run := [rank for _, rank in pairs])[0], run[-1]) for _, pairs in runs]
    names = [f"{first} to {last}" if last > first + 4 else ", ".join(map(str, range(first, last + 1)))
             for first, last in ends]  # fmt: skip
    return f"{'rank' if names == [str(ends[0][0])] else 'ranks'} {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean a?` with the most similar name, or "" if no name is similar enough."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def printable(text: str) -> str:
    """Escape control characters, so that the text cannot control a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def in_columns(lines: Iterable[Sequence[object]]) -> str:
    """Format lines of cells as an indented table whose columns are as wide as their longest cell."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  " + "   ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def is_whole(value: Any, *, at_least: int) -> bool:
    """Return True for an integer of at least `at_least`, including NumPy's integers but not bool."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= at_least
