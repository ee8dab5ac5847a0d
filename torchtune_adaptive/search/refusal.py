"""One row that does not fit: the error in which every search may end, and what can be done about it."""

from __future__ import annotations

from typing import Protocol

from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy
from torchtune_adaptive.memory_sizes import format_apart, format_bytes

NEEDS_LESS = (Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
NEEDS_LESS_OR_IS_CUT = (Remedy.SHORTER_SAMPLES, Remedy.SHORTEN, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.LARGER_BUDGET)


class Refuse(Protocol):
    def __call__(self, *remedies: Remedy) -> OneRowDoesNotFitError:
        """The error for the row that was measured last: who measured it knows the rank and the numbers."""


def one_row_error(
    *remedies: Remedy, length: int, need_bytes: int | None, budget_bytes: int, rank: int, of: str = ""
) -> OneRowDoesNotFitError:
    """`need_bytes` is None where the row ran out of memory; `of` names one of several training steps."""
    need, budget = "runs out of memory", format_bytes(budget_bytes)
    if need_bytes is not None:
        needed, budget = format_apart(need_bytes, budget_bytes)
        need = f"needs {needed}"
    return OneRowDoesNotFitError(
        f"one row of {length} tokens{of and f' of {of}'} {need} on rank {rank}, whose budget is {budget}",
        *remedies,
        need_bytes=need_bytes,
        budget_bytes=budget_bytes,
    )
