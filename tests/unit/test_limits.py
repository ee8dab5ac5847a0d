import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.limits import RowLimit, shrink_after_oom


def test_a_row_limit_looks_at_rows_alone():
    limit = RowLimit(4)
    assert limit.fits(4, length=100_000)
    assert not limit.fits(5, length=1)


def test_a_limit_below_one_row_is_refused():
    with pytest.raises(ValueError, match="at least 1 row, but the limit says 0"):
        RowLimit(0)


@given(st.integers(2, 10_000))
def test_shrinking_gives_the_largest_smaller_power_of_two(rows: int):
    smaller = RowLimit(rows).after_oom(rows, length=8).rows
    assert smaller < rows <= 2 * smaller
    assert smaller.bit_count() == 1


def test_one_row_cannot_shrink_and_the_error_says_what_to_do():
    with pytest.raises(AdaptiveError, match=r"1 row does not fit .* lower tokenizer.max_seq_len"):
        shrink_after_oom(RowLimit(1))
