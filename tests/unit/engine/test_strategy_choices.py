"""Which rows a strategy measures next."""

import pytest

from tests.laws import GIB, MIB, Device, affine
from torchtune_adaptive.engine.limits import MAX_ROWS
from torchtune_adaptive.engine.search import History, Peak, Probe


def test_a_near_answer_is_measured_at_once() -> None:
    """The table that users are promised: 1, 2, 8."""
    device = Device(affine((34_500, 4600)), 75_000 * MIB)
    device.search()
    assert device.measured == [1, 2, 8]


def test_a_jump_on_two_measurements_goes_no_further_than_four_times() -> None:
    device = Device(affine((40_000, 100)), 60_000 * MIB)
    device.search(round_to="none")
    assert device.measured == [1, 2, 8, 200]


def test_a_far_jump_goes_first_to_what_is_safe_for_every_crossing_phase() -> None:
    device = Device(affine((1000, 1000)), 90_000 * MIB)
    device.search(round_to="none")
    assert device.measured == [1, 2, 2 * 90_000 // 3000, 89]


def test_memory_that_never_grows_ends_at_the_bound_in_steps_of_four() -> None:
    device = Device(affine((1000, 0)), 2000 * MIB)
    assert device.search().rows == MAX_ROWS
    assert device.measured == [1, 2, 8, 32, 128, 512, 2048, 4096]


def test_after_an_unforeseen_failure_linear_steps_back_a_little_before_it_bisects() -> None:
    device = Device(affine((1000, 1000)), 90_000 * MIB, retries_above=86)
    result = device.search(round_to="none")
    assert device.measured == [1, 2, 60, 89, 87, 82]
    assert (result.rows, result.fits_rows, result.reason) == (82, 82, "87 did not fit")


def test_binary_doubles_and_then_bisects() -> None:
    device = Device(affine((0, 1000)), 13_000 * MIB)
    device.search(strategy="binary", round_to="none")
    assert device.measured == [1, 2, 4, 8, 16, 12, 14, 13]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("strategy", ["linear", "binary"])
def test_memory_that_grows_faster_than_the_rows_is_searched_to_the_end(strategy: str, soft: bool) -> None:
    device = Device(lambda rows: {"attention": rows * rows * MIB}, 1000 * MIB, soft)
    result = device.search(strategy=strategy, round_to="none")
    assert result.rows in (30, 31)
    assert result.fits_rows >= result.rows


def test_a_failure_that_was_measured_to_its_end_says_where_to_look_next() -> None:
    """The first row needs more than its line, so the jump to 8 goes too far; 2 and 8 rows then point at 5."""
    device = Device(lambda rows: {"step": (8 if rows == 1 else 5 + 2 * rows) * GIB}, 16 * GIB, soft=True)
    assert device.search(round_to="none").rows == 5
    assert device.measured[:4] == [1, 2, 8, 5]


def test_a_first_row_that_needs_less_does_not_halve_a_rounded_answer_if_three_rows_were_foreseen() -> None:
    device = Device(lambda rows: {"step": (90 if rows == 1 else 80 + 20 * rows) * GIB}, 161 * GIB)
    assert device.search().rows == 4
    assert device.measured == [1, 2, 3, 4]


def test_the_hundredth_row_is_not_worth_another_probe() -> None:
    """Noise at 18 rows lets the line through it promise 99; measured, they leave room for one more."""
    device = Device(lambda rows: {"step": (1000 + 100 * rows + 8 * (rows == 18)) * MIB}, 11_000 * MIB)
    assert device.search(round_to="none").rows == 99
    assert device.measured == [1, 2, 18, 99]


def test_a_step_on_the_way_need_not_be_a_possible_answer() -> None:
    device = Device(affine((40_000, 100)), 44_000 * MIB)
    assert device.search(round_to="divisor", samples_per_step=62).rows == 31
    assert device.measured == [1, 2, 8, 31]


def test_rows_that_fit_above_a_size_that_did_not_are_not_trusted() -> None:
    probes = [Probe(rows=rows, peak=Peak({"step": rows}, fits=rows != 4)) for rows in (1, 8, 4)]
    history = History(10, range(1, 11), 10, probes=tuple(probes))
    assert (history.fit_rows, history.too_many) == (1, 4)
