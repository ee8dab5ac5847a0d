"""Phrases that many messages share."""

import difflib
from collections.abc import Iterable, Sequence

LONGEST_SHOWN = 200
"""Characters of a value in a message."""


def count_of(count: int, one: str, many: str | None = None) -> str:
    """`1 row`, `2 rows`; `many` is the plural where it takes more than an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def times(count: int) -> str:
    """`once`, `2 times`."""
    return "once" if count == 1 else f"{count} times"


def ranks_named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> str:
    """`; did you mean a or b?` for names that are similar enough; nothing if there are none."""
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=likeness)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is most like this one; None if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def shown(value: object) -> str:
    """A value of a config as its author wrote it, cut where nobody would read on."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def in_columns(lines: Iterable[Sequence[object]]) -> str:
    """An indented table of lines with equally many cells, in columns as wide as their longest cell."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  " + "   ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
