"""Who holds the others up: ranks meet in every collective, so a step takes as long as the slowest needs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from torchtune_adaptive.comm.collectives import rank
from torchtune_adaptive.limits.change import BEFORE_THE_FIRST, in_step
from torchtune_adaptive.wording import ranks_named

logger = logging.getLogger(__name__)

STEPS_LOOKED_AT = 20
"""As many are looked at together: what happens in few of them, a save say, changes nothing."""
HELD_UP = 0.25
"""Share of the time that the others wait longer than the slowest rank, from which on it is told."""


class Waits(Protocol):
    @property
    def waited_s(self) -> float:
        """Seconds for which this rank has waited for others, in the life of whatever counts them."""


class Pace:
    """The shares of the last steps that ranks have worked, and not waited for others.

    Stages of one step share it: a rank that is slow in one of them is slow in the step.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS_LOOKED_AT)
        self._told: frozenset[int] = frozenset()
        self._waits: list[Waits] = []
        self._reported_at_s = time.perf_counter()
        self._waited_s = 0.0
        self._step: int | None = None
        self._told_at_s = time.perf_counter()
        self._passed_s = 0.0

    def add_waits(self, *waits: Waits) -> Pace:
        """This pace, with those counters of waits: each once, however many stages share it."""
        for each in waits:
            if not any(each is known for known in self._waits):
                self._waits.append(each)
                self._waited_s += each.waited_s
        return self

    def remove_waits(self, *waits: Waits) -> None:
        """No longer counts those, which may hold on to a whole model, of a stage that is over."""
        over = [each for each in self._waits if any(each is other for other in waits)]
        self._waits = [each for each in self._waits if not any(each is other for other in over)]
        self._waited_s -= sum(each.waited_s for each in over)

    def share_worked(self) -> float:
        """The share of this rank since it was last asked."""
        now_s, waited_s = time.perf_counter(), sum(each.waited_s for each in self._waits)
        waited, passed = waited_s - self._waited_s, now_s - self._reported_at_s
        self._waited_s, self._reported_at_s = waited_s, now_s
        return max(0.0, 1 - waited / passed) if passed else 1.0

    def tell(self, step: int, shares: Sequence[float]) -> None:
        """Logs on rank 0 who holds the others up, after a step or a stage of it with these shares of all ranks."""
        now_s = time.perf_counter()
        passed_s, self._told_at_s = now_s - self._told_at_s, now_s
        slow = self.message_after(step, shares, passed_s) if rank() == 0 else None
        if slow is not None:
            logger.warning("%s: %s", in_step(step), slow)

    def message_after(self, step: int, shares: Sequence[float], passed_s: float) -> str | None:
        """What there is to tell after so many seconds of a step; of the same ranks again only after they have kept up
        in between."""
        if step == self._step != BEFORE_THE_FIRST:
            before_s, self._passed_s = self._passed_s, self._passed_s + passed_s
            both = zip(self._steps.pop(), shares, strict=True)
            shares = [(before * before_s + share * passed_s) / (self._passed_s or 1) for before, share in both]
        else:
            self._step, self._passed_s = step, passed_s
        self._steps.append(tuple(shares))
        if len(shares) == 1 or len(self._steps) < STEPS_LOOKED_AT:
            return None
        of_rank = [median(shares) for shares in zip(*self._steps, strict=True)]
        slow = _slow(of_rank, HELD_UP)
        if not _slow(of_rank, HELD_UP / 2):
            self._told = frozenset()
        if slow <= self._told:
            return None
        self._told |= slow
        held_up = median(share for rank, share in enumerate(of_rank) if rank not in slow)
        holds, works = ("holds", "it worked") if len(slow) == 1 else ("hold", "they worked")
        least = min(of_rank[rank] for rank in slow)
        return (
            f"{ranks_named(slow)} {holds} the others up: in the last {STEPS_LOOKED_AT} steps {works} {least:.0%} of "
            f"the time and the others {held_up:.0%}, waiting; look at their data, processors and network"
        )


def _slow(of_rank: Sequence[float], by: float) -> frozenset[int]:
    """The ranks for which at least as many others wait by so much, from the share of time in which each works.

    Those above the widest gap between two shares that follow one another, among the upper half of the ranks: where a
    whole node is slow, the median would be one of its ranks.
    """
    order = sorted(range(len(of_rank)), key=of_rank.__getitem__)
    gap_below = {first: of_rank[order[first]] - of_rank[order[first - 1]] for first in range(1, len(order))}
    upper = [first for first in gap_below if 2 * (len(order) - first) <= len(order)]
    widest = max(upper, key=gap_below.__getitem__)
    return frozenset(order[widest:]) if gap_below[widest] >= by else frozenset()
