"""Who holds the others up: ranks meet in every collective, so a step takes as long as the slowest needs."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from torchtune_adaptive.comm.collectives import rank
from torchtune_adaptive.limits.change import in_step

logger = logging.getLogger(__name__)

STEPS = 20
"""As many are looked at together: what happens in few of them, a save say, changes nothing."""
HELD_UP = 0.25
"""Share of the time that the others wait longer than the slowest rank, from which on it is told."""


class Pace:
    """The shares of the last steps that ranks have worked, and not waited for others."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._told: frozenset[int] = frozenset()
        self._reported_at_s = time.perf_counter()
        self._waited_s = 0.0

    def worked(self, waited_s: float) -> float:
        """The share of this rank since it was last asked; it has waited for so many seconds in its life."""
        now_s = time.perf_counter()
        waited, passed = waited_s - self._waited_s, now_s - self._reported_at_s
        self._waited_s, self._reported_at_s = waited_s, now_s
        return max(0.0, 1 - waited / passed) if passed else 1.0

    def tell(self, step: int, shares: Sequence[float]) -> None:
        """Logs on rank 0 who holds the others up, after a step with these shares of all ranks."""
        slow = self.after_step(shares) if rank() == 0 else None
        if slow is not None:
            logger.warning("%s: %s", in_step(step), slow)

    def after_step(self, shares: Sequence[float]) -> str | None:
        """What there is to tell; of the same ranks again only after they have kept up in between."""
        self._steps.append(tuple(shares))
        if len(shares) == 1 or len(self._steps) < STEPS:
            return None
        of_rank = [median(shares) for shares in zip(*self._steps, strict=True)]
        slow = _slow(of_rank, HELD_UP)
        if not _slow(of_rank, HELD_UP / 2):
            self._told = frozenset()
        if slow <= self._told:
            return None
        self._told |= slow
        held_up = median(share for rank, share in enumerate(of_rank) if rank not in slow)
        ranks = ("rank " if len(slow) == 1 else "ranks ") + ", ".join(map(str, sorted(slow)))
        holds, works = ("holds", "it worked") if len(slow) == 1 else ("hold", "they worked")
        least = min(of_rank[rank] for rank in slow)
        return (
            f"{ranks} {holds} the others up: in the last {STEPS} steps {works} {least:.0%} of the time and "
            f"the others {held_up:.0%}, waiting; look at their data, processors and network"
        )


def _slow(of_rank: Sequence[float], by: float) -> frozenset[int]:
    """The ranks for which at least as many others wait by so much, from the share of time in which each works.

    Those above the widest gap between two shares that follow one another: where a whole node is slow, the median would
    be one of its ranks.
    """
    order = sorted(range(len(of_rank)), key=of_rank.__getitem__)
    gaps = [of_rank[after] - of_rank[before] for before, after in itertools.pairwise(order)]
    widest = max(range(len(gaps)), key=gaps.__getitem__)
    above = order[widest + 1 :]
    return frozenset(above) if gaps[widest] >= by and 2 * len(above) <= len(order) else frozenset()
