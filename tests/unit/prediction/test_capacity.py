"""From a law to rows; cards by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.prediction.made_up import MIB, POWERS, capacity, filling_holes
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.prediction.capacity import Budget, Capacity
from torchtune_adaptive.prediction.cards import CARDS, limit_bytes


@pytest.mark.parametrize(("limit_mib", "rows"), [(42, 0), (43, 1), (45, 1), (46, 2), (340, 100)])
def test_without_a_cache_the_answer_is_where_the_peak_meets_the_budget(limit_mib: int, rows: int) -> None:
    assert capacity(limit_mib).most_rows == rows
    assert capacity(limit_mib + 5, overhead_mib=5).most_rows == rows


def test_rows_halve_when_tokens_double() -> None:
    assert capacity(340, tokens=128).most_rows == 50


def test_the_choice_is_the_largest_that_may_be_chosen() -> None:
    assert capacity(340).chosen_rows == 64
    assert capacity(42).chosen_rows == 0


def test_an_allocator_reserves_more_than_tensors_need() -> None:
    """Where no cached block is large enough, the device has to have room for another, unless the cache is flushed."""
    cached = capacity(340, caches=True)
    for each in cached.predictions():
        assert each.reserved_bytes >= (each.peak.peak_bytes or 0)
        assert each.fits
        assert (each.retries > 0) == (each.rows > cached.most_rows)
    assert cached.most_rows < cached.most_rows_with_retries <= capacity(340).most_rows


@pytest.mark.parametrize("limit_mib", range(20, 150, 3))
@pytest.mark.parametrize("rungs", [range(1, 2**20), POWERS])
def test_more_rows_may_fit_where_fewer_do_not(limit_mib: int, rungs: Sequence[int]) -> None:
    """A block of 48 MiB fits into what three rows of 16 MiB or more have left behind, and beside that of two not."""
    cached = Capacity(filling_holes(), 64, Budget(limit_mib * MIB, 0), rungs)
    reserved = [cached.reserved_bytes(rows) for rows in range(1, 20)]
    assert reserved != sorted(reserved)
    fitting = [rows for rows, need in enumerate(reserved, start=1) if need <= cached.budget.usable_bytes]
    assert cached.most_rows == max(fitting, default=0)
    assert cached.chosen_rows == max({*fitting} & {*rungs}, default=0)


@pytest.mark.parametrize(("limit_mib", "at_once", "flushing"), [(67, 0, False), (70, 0, True), (84, 1, False)])
def test_a_row_that_runs_only_with_flushing_is_told_apart(limit_mib: int, at_once: int, flushing: bool) -> None:
    """20 MiB stay; 16 have to be returned before 48 are taken."""
    one = Capacity(filling_holes(), 64, Budget(limit_mib * MIB, 0), [1])
    assert (one.chosen_rows, one.fits_by_flushing) == (at_once, flushing)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("h100", 79.1), ("H100", 79.1), (4090, 23.6), ("a100-40", 39.4), ("24GiB", 24.0), ("80GB", 80e9 / 2**30)],
)
def test_a_limit_is_an_amount_or_a_card(value: object, expected: float) -> None:
    assert limit_bytes(value, "memory_limit") == int(expected * 2**30)


@pytest.mark.parametrize(
    ("value", "message"),
    [("h10", "h100"), ("much", "known:"), (0.9, "a fraction needs a device"), (17, "an amount needs a unit")],
)
def test_another_limit_is_refused_with_what_is_allowed(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        limit_bytes(value, "memory_limit")
    assert str(refused.value).startswith("memory_limit")
    assert "a fraction of the device" not in str(refused.value)


def test_cards_have_the_memory_that_their_names_say_or_less() -> None:
    named = {name: float(name.rpartition("-")[2]) for name in CARDS if name.startswith(("a100-", "v100-"))}
    assert named
    assert all(0.95 * gib < CARDS[name].gib < gib for name, gib in named.items())
