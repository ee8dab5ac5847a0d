"""Who runs out of memory in a sweep, and where."""

from typing import Protocol

import torch
import torch.distributed as dist

from torchtune_adaptive.testing import FaultInjector


class Failing(Protocol):
    """The part of a case that says so."""

    @property
    def failing(self) -> tuple[int, ...]: ...

    @property
    def again(self) -> str: ...


def fail_there(faults: FaultInjector, case: Failing, step: int, place: int) -> None:
    """Ranks that fail in the same step do so in different places."""
    for number, rank in enumerate(case.failing):
        faults.fail_at(rank=rank, step=step, operation=max(1, place - 17 * number))
        if case.again == "retry":
            faults.fail_at(rank=rank, step=step, operation=37 * place % 900 + 1)
        elif case.again == "drain":
            faults.fail_in_drain(rank=rank, step=step, operation=5 * place % 60 + 1)


def over_ranks(mine: float) -> float:
    """Collective: the sum."""
    total = torch.tensor(float(mine), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
