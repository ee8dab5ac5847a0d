"""Who holds the others up: ranks meet in every collective, so a step takes as long as the slowest needs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from torchtune_adaptive.comm.collectives import rank

logger = logging.getLogger(__name__)

STEPS = 20
"""As many are looked at together: what happens in few of them, a save say, changes nothing."""
HELD_UP = 0.25
"""Share of the time that the others wait longer than the slowest rank, from which on it is told."""


class Pace:
    """The shares of the last steps that ranks have worked, and not waited for others."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._told: int | None = None
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
            logger.warning("step %d: %s", step, slow)

    def after_step(self, shares: Sequence[float]) -> str | None:
        """What there is to tell; of the same rank again only after it has kept up in between."""
        self._steps.append(tuple(shares))
        if len(shares) == 1 or len(self._steps) < STEPS:
            return None
        of_rank = [median(shares) for shares in zip(*self._steps, strict=True)]
        slowest = max(range(len(of_rank)), key=of_rank.__getitem__)
        others = median(share for rank, share in enumerate(of_rank) if rank != slowest)
        held_up = of_rank[slowest] - others >= HELD_UP
        told, self._told = self._told, slowest if held_up else None
        if not held_up or told == slowest:
            return None
        return (
            f"rank {slowest} holds the others up: in the last {STEPS} steps it worked {of_rank[slowest]:.0%} of the "
            f"time and the others {others:.0%}, waiting for it; look at its data, its processor and its network"
        )
