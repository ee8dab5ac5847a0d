"""Laws on which the peak of the whole step misleads, and those of its phases do not."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.laws import GIB, MIB, Device, affine


def llama_8b(rows: int) -> dict[str, int]:
    """Measured by tracing: activation checkpointing, 2048 tokens, 8 ranks."""
    return {
        "backward through the layers": int((10.97 + 0.945 * rows) * GIB),
        "head and loss": int((5.67 + 2.168 * rows) * GIB),
    }


def naive(device: Device) -> int:
    """The overall peak of 1 and 2 rows, extrapolated."""
    one, two = (max(device.law(rows).values()) for rows in (1, 2))
    return (device.budget_bytes - (2 * one - two)) // (two - one)


def test_llama_8b_is_not_promised_78_rows_where_31_fit() -> None:
    device = Device(llama_8b, int(74.8 * GIB))
    assert device.brute_force() == 31
    assert naive(device) >= 67
    result = device.search(round_to="none")
    assert result.rows == 31
    assert result.fits_rows == pytest.approx((74.8 - 5.67) / 2.168)
    assert len(result.probes) <= 4
    assert result.out_of_memory_count == 0


@given(st.integers(20, 400), st.integers(2, 10), st.integers(3, 40), st.integers(12, 100))
def test_linear_is_right_where_the_overall_peak_misleads_by_two(
    slope: int, steeper: int, crossing: int, rows: int
) -> None:
    """A flat, high phase hides a steep one until `crossing` rows."""
    steep = slope * steeper
    law = affine((steep * crossing, slope), (slope * crossing, steep))
    device = Device(law, (slope * crossing + steep * (crossing + rows)) * MIB)
    assume(naive(device) >= 2 * device.brute_force())
    result = device.search(round_to="none")
    assert result.rows == pytest.approx(device.brute_force(), rel=0.05)
    assert (len(result.probes) <= 4, result.out_of_memory_count) == (True, 0)


def test_llama_8b_as_one_phase_is_still_found_without_running_out() -> None:
    device = Device(lambda rows: {"step": max(llama_8b(rows).values())}, int(74.8 * GIB))
    result = device.search(round_to="none")
    assert (result.rows, result.out_of_memory_count) == (31, 0)
