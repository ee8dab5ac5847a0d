from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.limits import RowLimit
from torchtune_adaptive.packing import plan_rows

lengths_of_a_step = st.lists(st.integers(1, 4096), min_size=1, max_size=64)


def test_microbatches_of_batch_size_rows_are_those_of_stock():
    assert plan_rows([5, 9, 2, 7], RowLimit(2)) == ((0, 1), (2, 3))


def test_the_last_microbatch_takes_what_is_left():
    assert plan_rows([5, 9, 2, 7, 1], RowLimit(2)) == ((0, 1), (2, 3), (4,))


def test_a_step_smaller_than_the_limit_is_one_microbatch():
    assert plan_rows([5, 9], RowLimit(8)) == ((0, 1),)


@given(lengths_of_a_step, st.integers(1, 70))
def test_every_sample_runs_exactly_once_and_in_order(lengths: list[int], rows: int):
    plan = plan_rows(lengths, RowLimit(rows))
    assert [index for microbatch in plan for index in microbatch] == list(range(len(lengths)))


@given(lengths_of_a_step, st.integers(1, 70))
def test_every_microbatch_is_within_the_limit(lengths: list[int], rows: int):
    assert all(0 < len(microbatch) <= rows for microbatch in plan_rows(lengths, RowLimit(rows)))


@given(lengths_of_a_step, st.integers(1, 70), st.randoms())
def test_ranks_with_as_many_samples_get_as_many_microbatches(lengths: list[int], rows: int, random):
    others = random.sample(lengths, len(lengths))
    assert len(plan_rows(lengths, RowLimit(rows))) == len(plan_rows(others, RowLimit(rows)))
