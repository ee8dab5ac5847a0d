"""Which rank runs which sample of a step, so that none waits for the fullest."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
