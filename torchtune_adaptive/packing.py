"""Splits the samples of a step into microbatches."""

from collections.abc import Sequence
from typing import TypeAlias

from torchtune_adaptive.limits import RowLimit

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""The samples of a step, by index, in the microbatches that they run in."""


def plan_rows(lengths: Sequence[int], limit: RowLimit) -> Plan:
    """Fills microbatches with consecutive samples while they fit.

    Order is kept, so with `limit.rows == batch_size` these are exactly the batches of stock torchtune. Ranks
    with the same number of samples get the same number of microbatches.
    """
    plan: list[tuple[int, ...]] = []
    start, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and not limit.fits(index + 1 - start, longest):
            plan.append(tuple(range(start, index)))
            start, longest = index, length
    if lengths:
        plan.append(tuple(range(start, len(lengths))))
    return tuple(plan)
