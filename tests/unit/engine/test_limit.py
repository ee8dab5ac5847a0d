import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchtune_adaptive.engine.limits import (
    UNBOUNDED_ROWS,
    Limit,
    MicrobatchSize,
    RowLimit,
    Surface,
    SurfaceLimit,
    TokenLimit,
    longest_row,
)


@pytest.mark.parametrize("count", [0, 2.5])
def test_invalid_count_is_refused(count: float):
    for kind, unit in ((RowLimit, "rows"), (TokenLimit, "tokens")):
        with pytest.raises(ValueError, match=f"whole number of {unit}.*{count}"):
            kind(count)


@given(st.integers(2, 10_000))
def test_shrinking_gives_the_largest_smaller_power_of_two(rows: int):
    smaller = RowLimit(rows).after_oom(rows, length=8).rows
    assert smaller < rows <= 2 * smaller
    assert smaller.bit_count() == 1


surfaces = st.builds(Surface, st.floats(0, 1e9), st.floats(0, 1e4), st.floats(1, 1e6), st.floats(0, 100))
surface_limits = st.builds(
    lambda layers, head, rows, length: SurfaceLimit(
        {"layers": layers, "head": head},
        int(max(layers.bytes_at(rows, length), head.bytes_at(rows, length))) + 1,
    ),
    surfaces,
    surfaces,
    st.integers(1, 64),
    st.integers(1, 4096),
)
limits = st.integers(1, 64).map(RowLimit) | st.integers(1, 100_000).map(TokenLimit) | surface_limits


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9))
def test_bytes_per_pair_of_tokens_are_an_upper_bound(lengths: list[int], row: float, token: float, pair: float):
    exact = sum(row + token * length + pair * length**2 for length in lengths)
    bound = Surface(0, row, token, pair).bytes_at(len(lengths), max(lengths), sum(lengths))
    assert bound >= exact * (1 - 1e-9)
    if len(set(lengths)) == 1:
        assert bound == pytest.approx(exact)


def test_surface_limit_checks_every_phase():
    limit = SurfaceLimit({"layers": Surface(100, 0, 1), "head": Surface(0, 10, 2)}, budget_bytes=200)
    assert limit.rows_at(10) == 6  # head: 6 × (10 + 20) = 180; layers: 100 + 6 × 10 = 160
    assert limit.rows_at(50) == 1  # head: 110; two rows would need 220
    assert limit.rows_at(96) == 0
    assert limit.rows_at(95) == 1
    assert SurfaceLimit({"layers": Surface(200)}, budget_bytes=200).rows_at(10) == UNBOUNDED_ROWS
    assert SurfaceLimit({"layers": Surface(201)}, budget_bytes=200).rows_at(10) == 0


@given(limits, st.integers(1, 100), st.integers(1, 5000))
def test_fits_agrees_with_rows_at_which_does_not_grow_with_length(limit: Limit, rows: int, length: int):
    assert limit.fits(rows, length) == (rows <= limit.rows_at(length))
    assert limit.rows_at(length + 1) <= limit.rows_at(length)


@example(SurfaceLimit({"layers": Surface(0.0, 0.0, 1.0), "head": Surface(1.5, 0.0, 1.0)}, 4), 2, 1, None)
@given(limits, st.integers(2, 100), st.integers(1, 5000), st.none() | st.floats(0, 1))
def test_failed_microbatch_does_not_fit_the_smaller_limit(limit: Limit, rows: int, length: int, joined: float | None):
    """`joined`: rows are not padded and at most this fraction shorter than the longest."""
    rows = min(rows, limit.rows_at(length))
    if rows < 2:
        return
    size = MicrobatchSize(rows, length, None if joined is None else length + math.ceil(joined * (rows - 1) * length))
    smaller = limit.after_oom(*size)
    assert smaller is not None
    assert not smaller.fits(*size)
    assert smaller == limit.resized(smaller.size)
    assert smaller.size < min(smaller.next_size, limit.size)


@given(limits, st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_shrinking_ends(limit: Limit, lengths: list[int]):
    smaller: Limit | None = limit
    for _ in range(400):
        smaller = smaller and smaller.after_oom(max(1, smaller.rows_at(max(lengths))), max(lengths))
    assert smaller is None


def test_sample_that_failed_alone_is_retried_in_smaller_microbatches():
    limit = TokenLimit(8192).after_oom(1, 600)
    assert limit == TokenLimit(512)
    assert limit.after_oom(1, 600) is None
    without_padding = TokenLimit(600)
    assert without_padding.format_need(3, 400, 555) == "555"
    assert without_padding.after_oom(3, 400, 555) == TokenLimit(512)


def test_surface_shrinks_its_growing_part_only():
    limit = SurfaceLimit({"layers": Surface(fixed_bytes=1000, bytes_per_token=1)}, budget_bytes=1400)
    assert limit.after_oom(4, 100) == SurfaceLimit(limit.surfaces, budget_bytes=1300)


def test_limits_are_printed_in_their_units():
    surface = SurfaceLimit({"layers": Surface(0, 0, 2**10)}, budget_bytes=2**21)
    assert (RowLimit(8).format_need(8, 100), str(RowLimit(4))) == ("8", "4 rows")
    assert (TokenLimit(8192).format_need(8, 1000), str(TokenLimit(4096))) == ("8000", "4096 tokens")
    assert (surface.format_need(2, 1024), str(surface)) == ("2.0 MiB", "2.0 MiB (predicted)")


@given(limits)
def test_longest_row_is_the_last_that_fits(limit: Limit):
    longest = longest_row(limit, at_most=10_000)
    assert longest == 0 or limit.fits(1, longest)
    assert longest == 10_000 or not limit.fits(1, longest + 1)
