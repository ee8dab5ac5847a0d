"""Choose ranks that stand for all ranks of a job that is too large to run together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_rehearsal.settings import MOST_RANKS


def representatives(groups: Iterable[Sequence[int]], ranks: int, whole: Sequence[int] = ()) -> list[int]:
    """Return the first, middle and last rank of each dimension, in all combinations, from the groups of a rank.

    A group that contains others, such as all ranks, is a dimension of what these do not reach. All ranks of the group
    `whole` are chosen, because they send messages to each other.
    """
    chosen = reached = {each - min(whole) for each in whole} or {0}
    dimensions = {tuple(rank - min(each) for rank in sorted(each)) for each in (*groups, range(ranks))}
    for group in sorted(dimensions, key=len):
        leaders, left = list[int](), [*group]
        while left:
            leaders.append(left[0])
            inside = {left[0] + each for each in reached}
            left = [each for each in left if each not in inside]
        offsets = {leaders[0], leaders[len(leaders) // 2], leaders[-1]}
        combined = {one + other for one in chosen for other in offsets}
        if len(combined) <= MOST_RANKS and max(combined) < ranks:
            chosen, reached = combined, {one + other for one in reached for other in leaders}
    return sorted(chosen)
