"""Splits the samples of a step into microbatches without padding, where a microbatch needs what its tokens need."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from torchtune_adaptive.bisecting import most_that_fit
from torchtune_adaptive.limits.padded_plan import Plan, longest_first, split_largest, tokens_of_joined


class FitsJoined(Protocol):
    """What planning without padding asks of a limit."""

    def fits(self, rows: int, length: int, tokens: int | None = None) -> bool: ...


def join_step(lengths: Sequence[int], limit: FitsJoined) -> Plan:
    """Microbatches of about as many tokens, as few as the limit allows; what does not fit even alone is alone.

    Any samples may share one, so they are dealt: the longest first, each to the microbatch that is emptiest so far.
    More microbatches than there could be at best are rarely needed, and cost little: no token is computed more for it.
    """
    order = longest_first(lengths)
    microbatches = _fewest(lengths, limit)
    while True:
        plan = _dealt(order, lengths, microbatches)
        if microbatches >= len(lengths) or _all_fit(plan, lengths, limit):
            return tuple(rows for rows in plan if rows)
        microbatches = min(len(lengths), microbatches + max(1, microbatches // 64))


def spread_joined(plan: Plan, lengths: Sequence[int], limit: FitsJoined, microbatches: int) -> Plan:
    """Deals the samples of `plan`, made by `join_step`, to so many microbatches, no fewer; the last may be empty."""
    if len(plan) == microbatches:
        return plan
    dealt = _dealt(longest_first(lengths), lengths, microbatches)
    if _all_fit(dealt, lengths, limit):
        return dealt
    return split_largest(plan, microbatches, lambda rows: tokens_of_joined(rows, lengths))


def _fewest(lengths: Sequence[int], limit: FitsJoined) -> int:
    """No fewer microbatches can be enough: as if each were full to its last token."""
    total = sum(lengths)
    fullest = max(1, most_that_fit(lambda tokens: limit.fits(1, 1, tokens), total))
    return min(len(lengths), -(-total // fullest))


def _dealt(order: Sequence[int], lengths: Sequence[int], microbatches: int) -> Plan:
    """The samples in this order, each to the microbatch with the fewest tokens; the largest microbatch first."""
    parts: list[list[int]] = [[] for _ in range(microbatches)]
    emptiest = [(0, number) for number in range(microbatches)]
    for index in order:
        tokens, number = emptiest[0]
        parts[number].append(index)
        heapq.heapreplace(emptiest, (tokens + lengths[index], number))
    by_size = sorted(emptiest, key=lambda part: (-part[0], part[1]))
    return tuple(tuple(parts[number]) for _, number in by_size)


def _all_fit(plan: Plan, lengths: Sequence[int], limit: FitsJoined) -> bool:
    """Whether each microbatch is within the limit, or one sample; their longest come first."""
    return all(
        len(rows) <= 1 or limit.fits(len(rows), lengths[rows[0]], tokens_of_joined(rows, lengths)) for rows in plan
    )
