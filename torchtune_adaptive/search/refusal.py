"""One row that does not fit: the error in which every search may end, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.sizes import format_bytes

Refuse: TypeAlias = Callable[[str], OneRowDoesNotFitError]
"""The error for the row that was measured last, with this remedy: who measured it knows the rank and the numbers."""

NEEDS_LESS = "lower the sequence length, set enable_activation_checkpointing: True, or train on more ranks"
NEEDS_LESS_OR_IS_CUT = (
    "lower tokenizer.max_seq_len, set adaptive.oversize to truncate or skip, or enable_activation_checkpointing: True"
)


def one_row_error(
    *, length: int, need_bytes: int | None, budget_bytes: int, rank: int, remedy: str, of: str = ""
) -> OneRowDoesNotFitError:
    """`need_bytes` is None where the row ran out of memory; `of` names one of several training steps."""
    need = "runs out of memory" if need_bytes is None else f"needs {format_bytes(need_bytes)}"
    return OneRowDoesNotFitError(
        f"one row of {length} tokens{of and f' of {of}'} {need} on rank {rank}, "
        f"whose budget is {format_bytes(budget_bytes)}; {remedy}",
        need_bytes=need_bytes,
        budget_bytes=budget_bytes,
    )
