"""Other settings, each rehearsed: first those that cost least time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.forecast.measure import Found, measure
from torchtune_adaptive.forecast.overrides import Overrides, combinations, savers, starts
from torchtune_adaptive.forecast.question import Question
from torchtune_adaptive.text import count_of, format_bytes, in_columns

ENOUGH = 2
"""Settings that fit, after which no more are tried unless all are asked for."""
MOST_MORE_RANKS = 8
"""Times as many as were asked about."""


class Tried(NamedTuple):
    overrides: Overrides
    found: Found

    def as_row(self) -> dict[str, object]:
        return {
            "overrides": " ".join(self.overrides),
            "ranks": self.found.question.ranks,
            "tokens": self.found.question.length,
            "rows": self.found.rows,
            "fits": self.found.fits,
            "reserved_bytes": self.found.most["reserved_bytes"],
        }


def advise(question: Question) -> Iterator[Tried]:
    """What fits where the config as it is does not; with `advise=True` all single changes, whether they fit or not."""
    fitting = 0
    for candidate, overrides in _candidates(question):
        if not starts(candidate.cfg):
            continue
        try:
            tried = Tried(overrides, measure(candidate))
        except AdaptiveError as error:
            print(f"{' '.join(overrides)}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        if tried.found.fits or question.plan.advise:
            yield tried
        fitting += tried.found.fits
        if fitting == ENOUGH and not question.plan.advise:
            return


def _candidates(question: Question) -> Iterator[tuple[Question, Overrides]]:
    single = savers(question.cfg, question.ranks)
    for overrides in single if question.plan.advise else [*single, *combinations(single)]:
        yield question.changed(overrides), overrides
    ranks = 2 * question.ranks
    while not question.plan.advise and ranks <= MOST_MORE_RANKS * question.ranks:
        yield question.on(ranks), (f"world_size={ranks}",)
        ranks *= 2


def text(tried: list[Tried]) -> str:
    if not tried:
        return "nothing else fits, not even on 8 times as many ranks: lower sequence_length, or take a larger card"
    lines: list[tuple[str, ...]] = [("with", "", "reserved")]
    for overrides, found in tried:
        fits = "does not fit" if not found.fits else f"fits {count_of(found.rows, 'row')}" if found.rows else "fits"
        lines.append((" ".join(overrides), fits, format_bytes(found.most["reserved_bytes"])))
    return in_columns(lines)
