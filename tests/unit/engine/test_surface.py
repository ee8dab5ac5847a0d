"""Surfaces over rows and length, and the profile that fits them."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.simulated_memory import always_fits
from torchtune_adaptive.engine.length_profile import _PADDED, MOST_CHECKS, Profile, SampleLengths, measure_profile
from torchtune_adaptive.engine.limits import UNBOUNDED_ROWS, Limit, Surface
from torchtune_adaptive.engine.search import Budget, Peak, one_row_error
from torchtune_adaptive.errors import OneRowDoesNotFitError

surfaces = st.builds(Surface, st.floats(1e6, 1e9), st.floats(0, 1e3), st.floats(100, 1e6), st.floats(0, 50))


class Device:
    """A training step of several phases on a device with this much memory, equal on all ranks.

    `hidden_bytes` is the minimum of every phase, for example a gathered layer.
    """

    def __init__(self, budget_bytes: int, *phases: Surface, resident_bytes: int = 0, hidden_bytes: int = 0) -> None:
        self.budget_bytes, self.phases, self.resident_bytes = budget_bytes, phases, resident_bytes
        self.hidden_bytes = hidden_bytes
        self.out_of_memory = 0

    def need(self, rows: int, length: int) -> int:
        return max(self.hidden_bytes, *(int(phase.bytes_at(rows, length)) for phase in self.phases))

    def measure(self, rows: int, length: int) -> Peak:
        if self.need(rows, length) > self.budget_bytes and rows > 2:
            self.out_of_memory += 1
            return Peak({}, fits=False)
        need = {str(i): max(self.hidden_bytes, int(p.bytes_at(rows, length))) for i, p in enumerate(self.phases)}
        return Peak(need, fits=True)

    def no_fit_error(self) -> OneRowDoesNotFitError:
        need_bytes = self.need(1, 3000)
        return one_row_error(length=3000, need_bytes=need_bytes, budget_bytes=self.budget_bytes, rank=0)

    def profile(self, longest: int, most_rows: int = 4096, padded: bool = True, **grows: int) -> Profile:
        return measure_profile(
            self.measure,
            Budget(self.budget_bytes, self.resident_bytes),
            SampleLengths(longest, padded=padded, **grows),
            no_fit_error=self.no_fit_error,
            most_rows=most_rows,
        )


RESIDENT_HIDES_GROWTH = Device(
    int(Surface(940_000_000, 0, 577, 0.95).bytes_at(1, 4096)),
    *(Surface(23_000_000, 500, 930, 0.7), Surface(940_000_000, 0, 577, 0.95)),
    resident_bytes=23_000_000,
)
devices = st.builds(
    lambda layers, head, room: Device(
        int(max(2e6, layers.bytes_at(room, 4096), head.bytes_at(room, 4096))),
        *(layers, head, Surface(2e6)),
        resident_bytes=int(min(layers.fixed_bytes, head.fixed_bytes)),
    ),
    *(surfaces, surfaces, st.floats(1.0, 50)),
)


def fits_and_little_more_would(device: Device, limit: Limit, length: int) -> bool:
    rows = limit.rows_at(length)
    fits = device.need(rows, length) <= device.budget_bytes * 1.01
    return fits and (
        rows == UNBOUNDED_ROWS or device.need(math.ceil(rows * 1.1) + 1, length) >= 0.97 * device.budget_bytes
    )


@given(devices, st.integers(16, 4096))
@example(RESIDENT_HIDES_GROWTH, 1000)
@example(RESIDENT_HIDES_GROWTH, 4000)
@settings(max_examples=100)
def test_profile_never_runs_out_of_memory_and_allows_what_fits(device: Device, length: int) -> None:
    found = device.profile(4096)
    assert device.out_of_memory == 0
    assert fits_and_little_more_would(device, found.limit, length)
    assert found.limit.rows_at(length) >= 1 or length > 4000
    constant_rows = found.constant_tokens // max(256, length)
    assert constant_rows == 0 or found.limit.fits(constant_rows, max(256, length))
    # 7, and up to 4 checks if one row hides growth with rows: two at full length (each at most 8 times the previous
    # rows), one at half and one at a quarter of the length
    assert len(found.points) <= 7 + 4
    assert found.points[0].rows == 1
    assert found.points[0].length == max(point.length for point in found.points)


hiding_devices = st.builds(
    lambda room, hidden, most_rows: (
        Device(
            int(room * 1e6),
            *(Surface(0.4e6, 0, 250), Surface(0.5e6)),
            resident_bytes=500_000,
            hidden_bytes=int(hidden * room * 1e6),
        ),
        most_rows,
    ),
    *(st.floats(1.5, 50), st.floats(0.5, 0.95), st.sampled_from([8, 64, 512])),
)
"""A gathered layer hides the growth with rows for long."""


@given(hiding_devices, st.integers(13, 28), st.sampled_from([{}, {"knee": 12, "shortest": 13}, {"knee": 13}]))
@settings(max_examples=150)
def test_growth_hidden_at_small_sizes_does_not_run_out_of_memory_in_training(
    found: tuple[Device, int], length: int, grows: dict[str, int]
) -> None:
    device, most_rows = found
    profile = device.profile(28, most_rows, **grows)
    rows = min(most_rows, profile.limit.rows_at(length))
    assert device.need(rows, length) <= device.budget_bytes
    assert len(profile.points) <= 1 + len(_PADDED) + MOST_CHECKS + 1
    assert rows >= 1
    # a knee leaves few lengths to measure, and much of the budget free where those were missed
    assert grows or rows >= 0.9 * most_rows or device.need(3 * rows, length) >= 0.9 * device.budget_bytes


KNEE = 700
bent_devices = st.builds(
    lambda per_token, per_late_token, room: Device(
        int(1e6 + room * max(1e4, Surface(0, 0, per_token, 0, per_late_token, KNEE).bytes_at(1, 4096))),
        *(Surface(1e6, 10, per_token, 0, per_late_token, KNEE), Surface(1e6, 0, 90), Surface(2e5)),
        resident_bytes=200_000,
    ),
    *(st.floats(100, 1e6), st.floats(100, 1e6), st.floats(1.02, 50)),
)
"""If little more than one of the longest samples fits, few shorter ones are proven to fit."""


@given(bent_devices, st.integers(KNEE // 2, 4096))
@settings(max_examples=100)
def test_change_of_slope_at_some_length_is_found_without_running_out_of_memory(device: Device, length: int) -> None:
    """Like rows of rollouts: they grow first with the answer, then with the prompt only."""
    grows = device.phases[0]
    shortest = 2 if grows.bytes_per_token > grows.bytes_per_late_token else KNEE + 1
    length = max(length, shortest)
    limit = device.profile(4096, knee=KNEE, shortest=shortest).limit
    assert device.out_of_memory == 0
    assert limit.rows_at(4096) >= 1
    assert fits_and_little_more_would(device, limit, length)


def profile_of(measure: Callable[[int, int], Peak], longest: int) -> Profile:
    lengths = SampleLengths(longest)
    return measure_profile(measure, Budget(10_000_000), lengths, no_fit_error=always_fits, most_rows=4096)


def test_held_out_error_is_that_of_the_first_fit_and_stays_free() -> None:
    def measure(rows: int, length: int) -> Peak:
        strange = 1.1 if length in (512, 2048) else 1.0  # the held-out lengths
        return Peak({"step": int(strange * (1e6 + 100 * rows * length))}, fits=True)

    found = profile_of(measure, 4096)
    assert found.held_out_error == pytest.approx(0.1 / 1.1, rel=0.01)
    assert found.limit_bytes == pytest.approx(10_000_000 * (1 - found.held_out_error), abs=1)


def test_probe_with_allocator_retries_is_over_the_limit() -> None:
    def measure(rows: int, length: int) -> Peak:
        return Peak({"step": 1000 * rows * length}, fits=True, retries=int(rows * length > 6000))

    limit = profile_of(measure, 1024).limit
    assert all(limit.rows_at(length) * length <= 9000 for length in (64, 256, 1024))


def test_sample_too_long_for_the_device_is_an_error() -> None:
    with pytest.raises(OneRowDoesNotFitError):
        Device(1_000_000, Surface(10_000, 0, 1000)).profile(3000)


joined_devices = st.builds(
    lambda fixed, per_token, per_sample, room: Device(
        int(fixed + per_token * (4096 + per_sample) * room),
        *(Surface(fixed, per_sample * per_token, per_token), Surface(fixed, 0, per_token / 2)),
        resident_bytes=int(fixed),
    ),
    *(st.floats(1e6, 1e9), st.floats(100, 1e6), st.floats(0, 8), st.floats(1.1, 50)),
)
"""A sample costs up to 8 tokens more than its own: the temporary memory of flash attention's backward on a GPU, for
128 tokens of one layer, equals that of a few tokens in all layers.
"""


LONGEST = st.sampled_from([256, 1000, 4096])


@given(joined_devices, st.lists(st.integers(4, 256), min_size=1, max_size=999), LONGEST)
@settings(max_examples=100)
def test_profile_without_padding_includes_the_cost_per_sample(device: Device, lengths: list[int], longest: int):
    limit = device.profile(longest, padded=False).limit
    assert device.out_of_memory == 0
    need = max(phase.bytes_at(len(lengths), max(lengths), sum(lengths)) for phase in device.phases)
    if limit.fits(len(lengths), max(lengths), sum(lengths)):
        assert need <= device.budget_bytes * 1.01
    else:
        assert need >= device.budget_bytes * 0.97
