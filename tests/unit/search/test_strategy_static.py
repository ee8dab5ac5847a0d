"""The search that begins at what was predicted."""

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.laws import MIB, Device, affine, budget_for, headrooms, phases
from torchtune_adaptive.limits.rounding import MAX_ROWS


@given(phases, headrooms, st.floats(0.01, 1.0), st.booleans())
def test_a_prediction_that_fits_is_measured_once_and_is_the_answer(
    laws: list[tuple[int, int]], headroom: float, share: float, soft: bool
) -> None:
    law = affine(*laws)
    device = Device(law, budget_for(law, headroom), soft)
    expected = max(1, int(share * device.brute_force()))
    result = device.search(strategy="static", round_to="none", expected_rows=expected)
    assert (result.rows, device.measured) == (expected, [expected])


@given(phases, headrooms, st.integers(1, 300), st.booleans())
def test_a_prediction_that_does_not_fit_is_corrected_from_few_rows(
    laws: list[tuple[int, int]], headroom: float, too_many: int, soft: bool
) -> None:
    law = affine(*laws)
    device = Device(law, budget_for(law, headroom), soft)
    best = device.brute_force()
    assume(best + too_many <= MAX_ROWS)
    result = device.search(strategy="static", round_to="none", expected_rows=best + too_many)
    assert device.measured[0] == best + too_many
    assert 0.95 * best - 1 <= result.rows <= best


def test_what_was_predicted_is_said_before_it_is_rounded() -> None:
    device = Device(affine((100, 10)), 210 * MIB)
    result = device.search(strategy="static", expected_rows=11)
    assert (result.rows, result.fits_rows, device.measured) == (8, 11.0, [8])
    assert result.reason == "11 fit, rounded down to a power of two"


def test_without_a_prediction_static_goes_as_linear_does() -> None:
    law, budget_bytes = affine((100, 10)), 210 * MIB
    static, linear = (Device(law, budget_bytes) for _ in range(2))
    assert static.search(strategy="static").rows == linear.search(strategy="linear").rows
    assert static.measured == linear.measured
