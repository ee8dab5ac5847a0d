"""Decisions of the profile and the governor with torch's allocator, for layers in full size."""

import pytest

from tests.null.full_size_models import budgeted, crowded, drift
from tests.null.processes import OnNull
from torchtune_adaptive.engine.governor import THRASHING

LAYERS, MEMORY = 4, 24 * 10**9
SEGMENTS = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


@SEGMENTS
def test_steps_of_mixed_lengths_reserve_as_much_as_the_longest_samples(on_null: OnNull, expandable: bool) -> None:
    found = on_null(drift, LAYERS, 8, 20, expandable)
    assert max(found.reserved_bytes) <= 1.01 * found.probe_reserved_bytes


def test_measured_token_budget_trains_without_running_out_of_memory(on_null: OnNull) -> None:
    found = on_null(budgeted, LAYERS, MEMORY, 2, False)
    assert found.recoveries == 0
    assert found.reserved_bytes > 0.9 * MEMORY


def test_two_steps_with_flushes_lower_the_limit(on_null: OnNull) -> None:
    found = on_null(crowded, LAYERS, MEMORY, 12)
    assert min(found.flushes[:2]) > 0
    assert found.changes == [THRASHING]
    assert found.rows == 8
