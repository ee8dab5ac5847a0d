"""Plans that have the same number of microbatches on every rank."""

from __future__ import annotations

from typing import NamedTuple

from torchtune_adaptive.comm.collectives import Agreement
from torchtune_adaptive.limits.limit import Limit
from torchtune_adaptive.limits.padded_plan import Plan, plan_step, spread
from torchtune_adaptive.limits.unpadded_plan import join_step, spread_joined
from torchtune_adaptive.step.reports import Report, exchange


class Ahead(NamedTuple):
    """The plan of a step to come."""

    limit: Limit
    lengths: list[int]
    plan: Plan


class Planner:
    """Plans steps, and keeps the plan of the next one where its samples are known already."""

    def __init__(self, agreement: Agreement, *, padded: bool) -> None:
        """`padded`: whether the rows of a microbatch are padded to the longest."""
        self._agreement = agreement
        self._padded = padded
        self._ahead: Ahead | None = None

    def plan(self, lengths: list[int], limit: Limit) -> Plan:
        """Collective, under a limit by length that was not planned for ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.limit == limit:
            if ahead.lengths != lengths:
                raise ValueError("the samples differ from those announced as `upcoming`; pass the same ones")
            return ahead.plan
        if not limit.by_length:
            return plan_step(lengths, limit)
        plan = self._fewest(lengths, limit)
        most = exchange(self._agreement, Report(upcoming_microbatches=len(plan))).upcoming_microbatches
        return self._spread(plan, lengths, limit, most)

    def look_ahead(self, lengths: list[int] | None, limit: Limit) -> Ahead | None:
        """What the next step needs on this rank, under a limit by length."""
        if lengths is None or not limit.by_length:
            return None
        return Ahead(limit, lengths, self._fewest(lengths, limit))

    def keep(self, ahead: Ahead | None, microbatches: int) -> None:
        """Keeps the plan of the next step, in as many microbatches as all ranks have agreed on."""
        if ahead is not None:
            ahead = ahead._replace(plan=self._spread(ahead.plan, ahead.lengths, ahead.limit, microbatches))
        self._ahead = ahead

    def _fewest(self, lengths: list[int], limit: Limit) -> Plan:
        """A plan in as few microbatches as this rank needs, under a limit by length."""
        return plan_step(lengths, limit) if self._padded else join_step(lengths, limit)

    def _spread(self, plan: Plan, lengths: list[int], limit: Limit, microbatches: int) -> Plan:
        """A plan in as many microbatches as all ranks have agreed on."""
        return (spread if self._padded else spread_joined)(plan, lengths, limit, microbatches)
