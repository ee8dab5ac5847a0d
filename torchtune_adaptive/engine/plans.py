"""Split the samples of a step into microbatches, padded or not, and distribute samples over the ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from torchtune_adaptive.engine.limits import Limit, MicrobatchSize, most_that_fit

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""For each microbatch of a step, the indices of its samples."""

_HALVINGS = 6
"""Bisection steps for the common size of microbatches: enough for a few percent of the largest."""


def plan_step(lengths: Sequence[int], limit: Limit, *, padded: bool = True) -> Plan:
    """Return a plan with the fewest microbatches. A sample that does not fit gets a microbatch for itself.

    Under a limit by rows, microbatches have consecutive samples: with `batch_size` rows, exactly the batches of stock
    torchtune. Under a limit by length, they are filled in descending order of length, which gives the fewest, because
    rows that fit at one length also fit at a shorter one. Without padding, samples are distributed by size; this may
    need slightly more microbatches than the minimum, but computes no additional tokens.
    """
    if padded or not limit.by_length:
        order = _longest_first(lengths) if limit.by_length else tuple(range(len(lengths)))
        return _cut(order, _starts(order, lengths, limit.rows_at))
    total = sum(lengths)
    fullest = max(1, most_that_fit(lambda tokens: limit.fits(1, 1, tokens), total))
    microbatches = min(len(lengths), -(-total // fullest))  # the minimum: all are full
    while True:
        plan = _filled_evenly(lengths, microbatches)
        if microbatches >= len(lengths) or _all_fit(plan, lengths, limit):
            return tuple(rows for rows in plan if rows)
        microbatches = min(len(lengths), microbatches + max(1, microbatches // 64))


def spread(plan: Plan, lengths: Sequence[int], limit: Limit, microbatches: int, *, padded: bool = True) -> Plan:
    """Return a plan with this number of microbatches (at least that of `plan`) of similar size, the largest first.

    Ranks run their microbatches in parallel, so differences in size are time that they wait for each other. If there
    are fewer samples than microbatches, the last ones are empty.
    """
    if padded:
        plan = _even(plan, lengths, limit, microbatches)
    elif len(plan) == microbatches:
        return plan
    elif _all_fit(even := _filled_evenly(lengths, microbatches), lengths, limit):
        return even
    return _split_largest(plan, microbatches, lengths, padded)


def _longest_first(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the samples in descending order of length; equal lengths keep their order."""
    return tuple(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True))


def _starts(order: Sequence[int], lengths: Sequence[int], rows_at: Callable[[int], int]) -> list[int]:
    """Return the positions in `order` at which microbatches begin. `rows_at` gets the length of the first sample."""
    starts, start = [], 0
    while start < len(order):
        starts.append(start)
        start += max(1, rows_at(lengths[order[start]]))
    return starts


def _cut(order: tuple[int, ...], starts: Sequence[int]) -> Plan:
    return tuple(order[start:end] for start, end in pairwise([*starts, len(order)]))


def _even(plan: Plan, lengths: Sequence[int], limit: Limit, microbatches: int) -> Plan:
    """Return a plan with this number of microbatches or fewer, whose largest microbatch is as small as possible.

    Bisection finds the smallest limit on padded tokens for which the number suffices.
    """
    order = tuple(chain.from_iterable(plan))

    def starts_under(tokens: int) -> list[int]:
        return _starts(order, lengths, lambda length: min(limit.rows_at(length), tokens // length))

    too_low, cap = 0, max((size_of(rows, lengths).padded_tokens for rows in plan), default=0)
    for _ in range(_HALVINGS):
        tokens = (too_low + cap) // 2
        starts = starts_under(tokens)
        if len(starts) > microbatches:
            too_low = tokens
        else:
            plan, cap = _cut(order, starts), tokens
    return plan


def _filled_evenly(lengths: Sequence[int], microbatches: int) -> Plan:
    """Assign each sample, longest first, to the smallest microbatch so far; return the largest microbatch first."""
    parts: list[list[int]] = [[] for _ in range(microbatches)]
    emptiest = [(0, number) for number in range(microbatches)]
    for index in _longest_first(lengths):
        tokens, number = emptiest[0]
        parts[number].append(index)
        heapq.heapreplace(emptiest, (tokens + lengths[index], number))
    by_size = sorted(emptiest, key=lambda part: (-part[0], part[1]))
    return tuple(tuple(parts[number]) for _, number in by_size)


def _all_fit(plan: Plan, lengths: Sequence[int], limit: Limit) -> bool:
    """Return True if each microbatch without padding is within the limit, or has one sample."""
    return all(len(rows) <= 1 or limit.fits(*size_of(rows, lengths, padded=False)) for rows in plan)


def _split_largest(plan: Plan, microbatches: int, lengths: Sequence[int], padded: bool) -> Plan:
    """Halve the largest microbatch until there are enough; if all have one row, add empty ones."""

    def keyed(rows: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return -size_of(rows, lengths, padded=padded).padded_tokens, rows

    heap = [keyed(rows) for rows in plan]
    heapq.heapify(heap)
    single: list[tuple[int, tuple[int, ...]]] = []
    while heap and len(heap) + len(single) < microbatches:
        largest = heapq.heappop(heap)
        rows = largest[1]
        if len(rows) == 1:
            single.append(largest)
            continue
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            heapq.heappush(heap, keyed(half))
    parts = sorted(single + heap)  # largest first on every rank, so that ranks run similar sizes at the same time
    return (*(rows for _, rows in parts), *[()] * (microbatches - len(parts)))


def size_of(rows: Sequence[int], lengths: Sequence[int], *, padded: bool = True) -> MicrobatchSize:
    """Return the size of a microbatch of these samples. An empty one counts as one row, the filler."""
    own = [lengths[index] for index in rows] or [1]
    return MicrobatchSize(len(own), max(own), None if padded else sum(own))


class Load(NamedTuple):
    """The amount of work in the plan of a rank."""

    tokens: int
    padded_tokens: int
    most_rows: int
    """Rows of the microbatch with the most rows."""
    most_tokens: int
    """Tokens, padding included, of the largest microbatch."""
    cost: float
    """Computing cost, padding included."""


def load_of(
    plan: Plan,
    lengths: Sequence[int],
    *,
    padded: bool = True,
    rows: Sequence[Sequence[int]] | None = None,
    cost: Callable[[int], float] = float,
) -> Load:
    """Return the load of a plan.

    `rows` has the length of each row of each sample, if samples have several rows. `cost` is the cost of a row by its
    length, by default the length.
    """
    each = len(rows[0]) if rows and padded else 1
    sizes = [size_of(indices, lengths, padded=padded) for indices in plan if indices]
    tokens = [each * size.padded_tokens for size in sizes]
    own = rows or [(length,) for length in lengths]
    if padded:
        costs = [each * size.rows * cost(size.length) for size in sizes]
    else:
        costs = [cost(length) for of_sample in own for length in of_sample]
    return Load(sum(map(sum, own)), sum(tokens), max(size.rows for size in sizes), max(tokens), sum(costs))


def assign_to_ranks(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Return the rank of each sample: the most expensive first, each to the rank with the lowest total cost.

    All ranks get the same number of samples. The result only depends on the costs and their order.
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
