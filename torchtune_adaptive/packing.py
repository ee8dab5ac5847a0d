"""Splits the samples of a step into microbatches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torchtune_adaptive.limits import Limit

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""The samples of a step, by index, in the microbatches that they run in."""


class Load(NamedTuple):
    """What a plan makes of the samples of a rank."""

    tokens: int
    padded_tokens: int
    most_rows: int
    """Of the microbatch that has the most."""
    most_tokens: int
    """Likewise, with padding."""


def plan_step(lengths: Sequence[int], limit: Limit) -> Plan:
    """As few microbatches as the limit allows; a sample that does not fit even alone is alone.

    Under a limit by rows, consecutive samples fill a microbatch, so that with `batch_size` rows these are exactly the
    batches of stock torchtune. Otherwise samples of like length share one, since each is padded to the longest. The
    longest go first: what fits the longest of a microbatch fits the rest of it, so filling up in that order takes the
    fewest microbatches that there can be. Each rank then also runs its large ones while its peers run theirs.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index]) if limit.by_length else range(len(lengths))
    plan: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        rows = max(1, limit.rows_at(lengths[order[start]]))
        plan.append(tuple(order[start : start + rows]))
        start += rows
    return tuple(plan)


def split_to(plan: Plan, lengths: Sequence[int], microbatches: int) -> Plan:
    """The plan with so many microbatches, if it has fewer: for a rank whose peers need more.

    Its largest are halved until there are enough. Where all of them are down to one row, the rest are empty.
    """
    if len(plan) >= microbatches:
        return plan
    heap = [_by_size(rows, lengths) for rows in plan]
    heapq.heapify(heap)
    whole: list[tuple[int, ...]] = []
    while heap and len(heap) + len(whole) < microbatches:
        rows = heapq.heappop(heap)[-1]
        if len(rows) == 1:
            whole.append(rows)
            continue
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            heapq.heappush(heap, _by_size(half, lengths))
    parts = sorted([*(_by_size(rows, lengths) for rows in whole), *heap])
    empty = [()] * (microbatches - len(parts))
    return (*(rows for _, _, rows in parts), *empty)


def load_of(plan: Plan, lengths: Sequence[int]) -> Load:
    sizes = [len(rows) * max(lengths[index] for index in rows) for rows in plan if rows]
    return Load(sum(lengths), sum(sizes), max(map(len, plan)), max(sizes))


def _by_size(rows: tuple[int, ...], lengths: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """Largest first; in the order of the samples where they are alike."""
    return -len(rows) * max(lengths[index] for index in rows), rows[0], rows
