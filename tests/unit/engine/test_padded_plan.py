import math
import random
import time

from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.engine.limits import Limit, RowLimit, Surface, SurfaceLimit, TokenLimit
from torchtune_adaptive.engine.plans import Load, load_of, plan_step, spread

lengths_of_a_step = st.lists(st.integers(1, 4096), min_size=1, max_size=64)


def test_microbatches_of_batch_size_rows_are_those_of_stock():
    assert plan_step([5, 9, 2, 7], RowLimit(2)) == ((0, 1), (2, 3))


def test_the_last_microbatch_takes_what_is_left():
    assert plan_step([5, 9, 2, 7, 1], RowLimit(2)) == ((0, 1), (2, 3), (4,))


def test_a_step_smaller_than_the_limit_is_one_microbatch():
    assert plan_step([5, 9], RowLimit(8)) == ((0, 1),)


@given(lengths_of_a_step, st.integers(1, 70))
def test_every_sample_runs_exactly_once_and_in_order(lengths: list[int], rows: int):
    plan = plan_step(lengths, RowLimit(rows))
    assert [index for microbatch in plan for index in microbatch] == list(range(len(lengths)))


@given(lengths_of_a_step, st.integers(1, 70))
def test_every_microbatch_is_within_the_limit(lengths: list[int], rows: int):
    assert all(0 < len(microbatch) <= rows for microbatch in plan_step(lengths, RowLimit(rows)))


@given(lengths_of_a_step, st.integers(1, 70), st.randoms())
def test_ranks_with_as_many_samples_get_as_many_microbatches(lengths: list[int], rows: int, random):
    others = random.sample(lengths, len(lengths))
    assert len(plan_step(lengths, RowLimit(rows))) == len(plan_step(others, RowLimit(rows)))


token_limits = st.integers(4096, 100_000).map(TokenLimit)
surface_limits = st.builds(
    lambda per_row, per_token, per_pair, spare: SurfaceLimit(
        {"layers": Surface(1e6, per_row, per_token, per_pair), "head": Surface(0.0, 0.0, 2 * per_token)},
        int(1e6 + 4096 * (per_row + per_token * 4096 + per_pair * 4096**2) + spare),
    ),
    st.integers(0, 1000),
    st.integers(1, 1000),
    st.floats(0, 1),
    st.integers(0, 10**9),
)
"""Those under which a sample of 4096 tokens always fits."""
limits_by_length = token_limits | surface_limits


def first_fit_decreasing(lengths: list[int], limit: Limit) -> int:
    """The microbatches that the textbook's way takes: each sample, the longest first, into the first that has room."""
    microbatches: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for each in microbatches:
            if limit.fits(len(each) + 1, each[0]):
                each.append(length)
                break
        else:
            microbatches.append([length])
    return len(microbatches)


def longest_of(lengths: list[int], microbatch: tuple[int, ...]) -> int:
    return max(lengths[index] for index in microbatch)


@given(lengths_of_a_step, limits_by_length)
def test_by_length_every_sample_runs_exactly_once(lengths: list[int], limit: Limit):
    plan = plan_step(lengths, limit)
    assert sorted(index for microbatch in plan for index in microbatch) == list(range(len(lengths)))


@given(lengths_of_a_step, limits_by_length)
def test_by_length_nothing_is_over_the_limit(lengths: list[int], limit: Limit):
    for microbatch in plan_step(lengths, limit):
        assert limit.fits(len(microbatch), longest_of(lengths, microbatch))


@given(lengths_of_a_step, st.integers(1, 4096).map(TokenLimit))
def test_only_a_sample_that_is_alone_may_be_over_the_limit(lengths: list[int], limit: TokenLimit):
    for microbatch in plan_step(lengths, limit):
        assert len(microbatch) == 1 or limit.fits(len(microbatch), longest_of(lengths, microbatch))


@given(lengths_of_a_step, limits_by_length)
def test_there_are_no_more_microbatches_than_first_fit_decreasing_makes(lengths: list[int], limit: Limit):
    assert len(plan_step(lengths, limit)) <= first_fit_decreasing(lengths, limit)


@given(lengths_of_a_step, limits_by_length)
def test_no_sample_is_shorter_than_one_of_a_later_microbatch(lengths: list[int], limit: Limit):
    in_order = [lengths[index] for microbatch in plan_step(lengths, limit) for index in microbatch]
    assert in_order == sorted(lengths, reverse=True)


@given(st.lists(lengths_of_a_step, min_size=2, max_size=4), limits_by_length)
def test_ranks_spread_their_samples_over_as_many_microbatches_as_the_one_that_needs_most(
    ranks: list[list[int]], limit: Limit
):
    plans = [plan_step(lengths, limit) for lengths in ranks]
    most = max(map(len, plans))
    for lengths, plan in zip(ranks, plans, strict=True):
        spread_out = spread(plan, lengths, limit, most)
        assert len(spread_out) == most
        assert sorted(index for microbatch in spread_out for index in microbatch) == list(range(len(lengths)))
        assert all(not m or limit.fits(len(m), longest_of(lengths, m)) for m in spread_out)


@given(lengths_of_a_step, limits_by_length, st.integers(0, 80))
def test_microbatches_are_empty_only_where_all_others_are_single(lengths: list[int], limit: Limit, more: int):
    plan = plan_step(lengths, limit)
    spread_out = spread(plan, lengths, limit, len(plan) + more)
    assert all(spread_out) or all(len(microbatch) <= 1 for microbatch in spread_out)


@given(lengths_of_a_step, limits_by_length)
def test_spreading_makes_no_microbatch_larger_and_the_first_the_largest(lengths: list[int], limit: Limit):
    plan = plan_step(lengths, limit)
    spread_out = spread(plan, lengths, limit, len(plan))
    sizes = [len(m) * longest_of(lengths, m) for m in spread_out if m]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= max(len(m) * longest_of(lengths, m) for m in plan)


def test_microbatches_of_a_rank_become_equal():
    lengths = [100] * 12
    plan = plan_step(lengths, TokenLimit(1000))
    assert [len(microbatch) for microbatch in plan] == [10, 2]
    assert [len(microbatch) for microbatch in spread(plan, lengths, TokenLimit(1000), 2)] == [6, 6]


def test_the_load_counts_padding_to_the_longest_row():
    load = load_of(((0, 1), (2,), ()), [5, 9, 3])
    assert load == Load(tokens=17, padded_tokens=21, most_rows=2, most_tokens=18, cost=21)


def test_the_cost_of_a_plan_is_that_of_its_rows_at_the_length_that_they_are_padded_to():
    assert load_of(((0, 1), (2,), ()), [5, 9, 3], cost=lambda length: length**2).cost == 2 * 81 + 9


def test_65536_samples_are_planned_in_less_than_a_second():
    draw = random.Random(0)
    lengths = [min(4096, math.ceil(draw.lognormvariate(5.5, 0.9))) for _ in range(65_536)]
    limit = SurfaceLimit({"layers": Surface(1e6, 10.0, 100.0, 0.1), "head": Surface(1e5, 0.0, 250.0)}, 8_000_000)
    began = time.process_time()
    plan = plan_step(lengths, limit)
    spread(plan, lengths, limit, len(plan) + 5)
    assert time.process_time() - began < 1
