import pytest

from tests.laws import MIB, Device, affine
from torchtune_adaptive.engine.limits import Surface
from torchtune_adaptive.engine.search import Peak, Probe, fit_line


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ({1: 7, 2: 9}, Surface(5, 2)),
        ({1: 1, 2: 9, 12: 29}, Surface(5, 2)),  # one row left out
        (
            {2: 9, 4: 13, 6: 21},
            Surface(0, 3.5),
        ),  # bends upwards: the steeper chord, and then no negative fixed part
        ({2: 9, 4: 11, 6: 15}, Surface(3, 2)),
        ({2: 9, 4: 15, 6: 17}, Surface(5, 2)),
        ({1: 1, 2: 9}, Surface(0, 4.5)),  # no negative fixed part
        ({1: 9, 2: 8}, Surface(8, 0)),  # shrinking is noise
    ],
)
def test_a_line_goes_through_the_largest_measurement_as_steeply_as_the_others_say(
    points: dict[int, int], line: Surface
) -> None:
    assert fit_line(points) == line


def test_a_phase_that_does_not_grow_is_within_the_budget_or_never() -> None:
    assert Surface(5, 0).rows_within(5) == float("inf")
    assert Surface(6, 0).rows_within(5) == 0


def test_the_lines_of_the_result_are_the_law() -> None:
    result = Device(affine((900, 7), (100, 50)), 3000 * MIB).search(round_to="none")
    assert result.lines["phase 0"] == Surface(900 * MIB, 7 * MIB)
    assert result.lines["phase 1"] == Surface(100 * MIB, 50 * MIB)
    assert result.fits_rows == pytest.approx(58)


def test_the_peak_of_a_probe_that_ran_out_is_unknown() -> None:
    assert Peak({"forward": 3}, fits=False).peak_bytes is None
    assert not Probe(rows=1, peak=Peak({"forward": 3}, fits=False)).accepted(10)
