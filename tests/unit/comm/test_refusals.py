"""What ends a run where memory runs out, and no rank could finish what its peers expect of it."""

from __future__ import annotations

import pytest

from torchtune_adaptive.comm.foreign_messages import refusal
from torchtune_adaptive.comm.tensor import refusals
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy


@pytest.mark.parametrize("error", [refusal("c10d::allreduce_ at loss.py:7"), refusals.refused("why")])
def test_to_switch_recovery_off_is_no_advice_where_memory_runs_out_all_the_same(
    error: RecoveryUnsupportedError,
) -> None:
    assert error.remedies == (Remedy.SMALLER_LIMIT,)
