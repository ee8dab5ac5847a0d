import math
import random
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.engine.limits import Limit, Surface, SurfaceLimit, TokenLimit
from torchtune_adaptive.engine.plans import Load, Plan, load_of, plan_step, size_of, spread

lengths_of_a_step = st.lists(st.integers(1, 4096), min_size=1, max_size=64)
surface_limits = st.builds(
    lambda per_row, per_token, per_pair, spare: SurfaceLimit(
        {"layers": Surface(1e6, per_row, per_token, per_pair), "head": Surface(0.0, 0.0, 2 * per_token)},
        int(1e6 + per_row + 4096 * (per_token + per_pair * 4096) + 4096 * per_token + spare),
    ),
    st.integers(0, 10_000),
    st.integers(1, 1000),
    st.floats(0, 1),
    st.integers(0, 10**9),
)
limits = st.integers(4096, 100_000).map(TokenLimit) | surface_limits
"""Those under which a sample of 4096 tokens always fits."""


joined = partial(size_of, padded=False)


def join_step(lengths: list[int], limit: Limit) -> Plan:
    return plan_step(lengths, limit, padded=False)


def spread_joined(plan: Plan, lengths: list[int], limit: Limit, microbatches: int) -> Plan:
    return spread(plan, lengths, limit, microbatches, padded=False)


@given(lengths_of_a_step, limits, st.integers(0, 9))
def test_every_sample_runs_exactly_once_within_the_limit(lengths: list[int], limit: Limit, more: int):
    plan = join_step(lengths, limit)
    for each in (plan, spread_joined(plan, lengths, limit, len(plan) + more)):
        assert sorted(index for rows in each for index in rows) == list(range(len(lengths)))
        assert all(limit.fits(*joined(rows, lengths)) for rows in each if rows)
    assert len(spread_joined(plan, lengths, limit, len(plan) + more)) == len(plan) + more
    assert all(plan)


@given(lengths_of_a_step, st.integers(4096, 100_000))
def test_there_are_hardly_more_microbatches_than_there_could_be_at_best(lengths: list[int], tokens: int):
    at_best = math.ceil(sum(lengths) / tokens)
    # longest first into the emptiest: 4/3 of the best is the worst there is (Graham, 1969), and then one more
    assert len(join_step(lengths, TokenLimit(tokens))) <= max(at_best + 1, math.ceil(at_best * 4 / 3) + 1)


def test_short_samples_fill_what_a_long_one_leaves():
    lengths = [100, 20, 30, 50, 100]
    plan = join_step(lengths, TokenLimit(100))
    assert [sum(lengths[index] for index in rows) for rows in plan] == [100, 100, 100]


def test_a_sample_that_does_not_fit_even_alone_is_alone():
    plan = join_step([1000, 10, 10, 10], TokenLimit(512))
    assert plan[0] == (0,)
    assert all(0 not in rows for rows in plan[1:])


@given(lengths_of_a_step, limits)
def test_microbatches_come_the_largest_first(lengths: list[int], limit: Limit):
    sizes = [joined(rows, lengths).room_tokens for rows in join_step(lengths, limit)]
    assert sizes == sorted(sizes, reverse=True)


def test_of_more_microbatches_than_samples_the_last_are_empty():
    plan = join_step([5, 9], TokenLimit(100))
    assert spread_joined(plan, [5, 9], TokenLimit(100), 3) == ((1,), (0,), ())


def test_the_load_of_joined_samples_has_no_padding():
    load = load_of(((0, 1), (2,), ()), [5, 9, 3], padded=False)
    assert load == Load(tokens=17, padded_tokens=17, most_rows=2, most_tokens=14, cost=17)


def test_each_of_joined_samples_costs_what_it_costs_alone():
    assert load_of(((0, 1), (2,), ()), [5, 9, 3], padded=False, cost=lambda length: length**2).cost == 25 + 81 + 9


def test_a_surface_counts_samples_and_tokens():
    surface = Surface(100, bytes_per_row=7, bytes_per_token=2)
    assert surface.bytes_at(3, 50, 60) == 100 + 3 * 7 + 60 * 2
    assert surface.bytes_at(3, 50) == 100 + 3 * 7 + 150 * 2


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9))
def test_pairs_of_tokens_are_never_counted_short(lengths: list[int], row: float, token: float, pair: float):
    exact = sum(row + token * length + pair * length**2 for length in lengths)
    bound = Surface(0, row, token, pair).bytes_at(len(lengths), max(lengths), sum(lengths))
    assert bound >= exact * (1 - 1e-9)
    if len(set(lengths)) == 1:
        assert bound == pytest.approx(exact)


@given(lengths_of_a_step, limits)
def test_after_running_out_of_memory_the_microbatch_that_failed_does_not_fit_any_more(lengths: list[int], limit: Limit):
    size = joined(join_step(lengths, limit)[0], lengths)
    smaller = limit.after_oom(*size)
    if smaller is None or size.room_tokens == 1:
        assert isinstance(limit, SurfaceLimit) or smaller == TokenLimit(1)
        return
    assert smaller.size < limit.size
    assert not smaller.fits(*size)


def test_the_tokens_that_failed_are_those_of_the_samples():
    limit = TokenLimit(600)
    assert limit.size_of(3, 400, 555) == "555"
    assert str(limit.after_oom(3, 400, 555)) == "512 tokens"


def test_planning_a_step_of_many_thousand_samples_takes_a_moment():
    draw = random.Random(0)
    lengths = [min(4096, math.ceil(draw.lognormvariate(5, 1))) for _ in range(65_536)]
    began = time.process_time()
    plan = join_step(lengths, TokenLimit(65_536))
    spread_joined(plan, lengths, TokenLimit(65_536), len(plan) + 5)
    assert time.process_time() - began < 2
