"""Splits the samples of a step into microbatches, padded or not, and deals them to ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple, Protocol, TypeAlias

from torchtune_adaptive.engine.limits import most_that_fit

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""The samples of a step, by index, in the microbatches that they run in."""


_HALVINGS = 6
"""Bisections of the size that all microbatches may have: they find it to a few percent of the largest."""


class Fits(Protocol):
    """What planning asks of a limit."""

    @property
    def by_length(self) -> bool: ...

    def rows_at(self, length: int) -> int: ...


class Load(NamedTuple):
    """What a plan makes of the samples of a rank."""

    tokens: int
    padded_tokens: int
    most_rows: int
    """Rows of the microbatch that has the most."""
    most_tokens: int
    """Tokens, padding included, of the microbatch that has the most."""
    cost: float
    """What there is to do, padding included."""


def plan_step(lengths: Sequence[int], limit: Fits) -> Plan:
    """The fewest microbatches that the limit allows; a sample that does not fit even alone is alone.

    Under a limit by rows, consecutive samples fill a microbatch, so that with `batch_size` rows these are exactly the
    batches of stock torchtune. Otherwise samples of like length share one, since each is padded to the longest. The
    longest go first: what fits the longest of a microbatch fits the rest of it, so filling up in that order takes the
    fewest microbatches that there can be.
    """
    order = longest_first(lengths) if limit.by_length else tuple(range(len(lengths)))
    return _filled(order, lengths, limit)


def longest_first(lengths: Sequence[int]) -> tuple[int, ...]:
    """Indices of the samples, the longest first; among samples of one length, the earlier first."""
    return tuple(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True))


def _filled(order: tuple[int, ...], lengths: Sequence[int], limit: Fits) -> Plan:
    """Microbatches of samples in this order, as many in each as its first one allows."""
    starts = _starts(order, lengths, limit)
    return tuple(order[start:end] for start, end in pairwise([*starts, len(order)]))


def _starts(order: Sequence[int], lengths: Sequence[int], limit: Fits) -> list[int]:
    """Places in `order` at which microbatches begin. Only those samples' lengths are read, so it is cheap."""
    starts = []
    start = 0
    while start < len(order):
        starts.append(start)
        start += max(1, limit.rows_at(lengths[order[start]]))
    return starts


def spread(plan: Plan, lengths: Sequence[int], limit: Fits, microbatches: int) -> Plan:
    """Deals the samples of `plan` to so many microbatches, no fewer than it has, as equal in padded tokens as can be.

    `plan` is that of `plan_step` under a limit by length, which puts the longest first.

    Ranks go through their microbatches side by side, so what one has more than its peers in each of them is time that
    they wait. Equal ones, the largest first, wait least; they also waste less on padding, and need less memory.
    """
    order = tuple(chain.from_iterable(plan))
    cap = max((_tokens_of_sorted(rows, lengths) for rows in plan), default=0)
    # The smallest cap on padded tokens under which there are still few enough microbatches, by bisection.
    too_low, lowest = 0, None
    for _ in range(_HALVINGS):
        smaller = _Capped(limit, (too_low + cap) // 2)
        if len(_starts(order, lengths, smaller)) > microbatches:
            too_low = smaller.tokens
        else:
            lowest, cap = smaller, smaller.tokens
    if lowest is not None:
        plan = _filled(order, lengths, lowest)
    # There may be fewer now than the ranks have agreed on, and every rank must run as many.
    return split_largest(plan, microbatches, lambda rows: _tokens_of_sorted(rows, lengths))


@dataclass(frozen=True)
class _Capped:
    """A limit by length, and no more padded tokens than that."""

    limit: Fits
    tokens: int
    by_length: bool = True

    def rows_at(self, length: int) -> int:
        return min(self.limit.rows_at(length), self.tokens // length)


def split_largest(plan: Plan, microbatches: int, tokens_of: Callable[[tuple[int, ...]], int]) -> Plan:
    """Halves the largest microbatch until there are enough; where all are down to one row, the rest are empty."""
    heap = [(-tokens_of(rows), rows) for rows in plan]
    heapq.heapify(heap)
    single: list[tuple[int, tuple[int, ...]]] = []
    while heap and len(heap) + len(single) < microbatches:
        largest = heapq.heappop(heap)
        rows = largest[1]
        if len(rows) == 1:
            single.append(largest)
            continue
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            heapq.heappush(heap, (-tokens_of(half), half))
    # Sizes are negative: the largest come first, beside the largest of the other ranks.
    parts = sorted(single + heap)
    empty = [()] * (microbatches - len(parts))
    return (*(rows for _, rows in parts), *empty)


def load_of(
    plan: Plan,
    lengths: Sequence[int],
    *,
    padded: bool = True,
    rows: Sequence[Sequence[int]] | None = None,
    cost: Callable[[int], float] = float,
) -> Load:
    """`rows` are the tokens of each row of each sample, where samples are several rows of a microbatch; `cost` is what
    a row of so many tokens takes: by default, its tokens."""
    tokens_of = padded_tokens if padded else tokens_of_joined
    each = len(rows[0]) if rows and padded else 1
    full = [indices for indices in plan if indices]
    sizes = [each * tokens_of(indices, lengths) for indices in full]
    own = rows or [(length,) for length in lengths]
    if padded:
        costs = [each * len(indices) * cost(max(map(lengths.__getitem__, indices))) for indices in full]
    else:
        costs = [cost(length) for of_sample in own for length in of_sample]
    return Load(sum(map(sum, own)), sum(sizes), max(map(len, plan)), max(sizes), sum(costs))


def _tokens_of_sorted(rows: Sequence[int], lengths: Sequence[int]) -> int:
    """Padded tokens of a microbatch that has its longest sample first."""
    return len(rows) * lengths[rows[0]]


def padded_tokens(rows: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a microbatch whose rows are padded to the longest."""
    return len(rows) * max(map(lengths.__getitem__, rows))


def tokens_of_joined(rows: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a microbatch without padding."""
    return sum(map(lengths.__getitem__, rows))


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


def deal(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The rank of each sample: the most expensive first, each to the rank that has least so far, equally many to all.

    A function of the costs and of their order, and so the same wherever it is computed.
    """
    each, left_over = divmod(len(costs), ranks)
    if left_over:
        raise ValueError(f"{len(costs)} samples cannot be dealt equally to {ranks} ranks")
    rank_of = [0] * len(costs)
    emptiest = [(0.0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        cost, count, rank = emptiest[0]
        rank_of[index] = rank
        if count + 1 < each:
            heapq.heapreplace(emptiest, (cost + costs[index], count + 1, rank))
        else:
            heapq.heappop(emptiest)
    return tuple(rank_of)
