"""Limits of microbatches; steps split into microbatches, padded or packed; samples dealt to ranks."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchtune_adaptive.engine.limits import (
    Limit,
    MicrobatchSize,
    RowLimit,
    Surface,
    SurfaceLimit,
    TokenLimit,
    longest_row,
)
from torchtune_adaptive.engine.plans import Load, Plan, SampleKind, assign_to_ranks, size_of


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


def test_limit_grows_back_by_the_rows_it_lost():
    limit = SurfaceLimit({"layers": Surface(fixed_bytes=60e9, bytes_per_row=1e9)}, budget_bytes=78_000_000_000)
    rows = [18, 13, 9, 6]
    for before, after in pairwise(rows):
        smaller = limit.after_oom(limit.rows_at(1), 1)
        assert smaller is not None
        assert (limit.rows_at(1), smaller.rows_at(1)) == (before, after)
        assert smaller.resized(smaller.next_size).rows_at(1) in (before - 1, before)  # one less by rounding
        limit = smaller


def test_failed_microbatch_lowers_the_budget_by_the_phase_that_needs_the_most():
    layers, head = Surface(fixed_bytes=60.0, bytes_per_row=10.0), Surface(fixed_bytes=1.0, bytes_per_row=1.0)
    smaller = SurfaceLimit({"layers": layers, "head": head}, budget_bytes=100).after_oom(4, 1)
    assert smaller is not None
    assert smaller.budget_bytes == 60 + 0.75 * 40


@given(limits)
def test_longest_row_is_the_last_that_fits(limit: Limit):
    longest = longest_row(limit, at_most=10_000)
    assert longest == 0 or limit.fits(1, longest)
    assert longest == 10_000 or not limit.fits(1, longest + 1)


LONGEST = 4096
PADDED = pytest.mark.parametrize("padded", [True, False], ids=["padded", "joined"])
lengths_of_a_step = st.lists(st.integers(1, LONGEST), min_size=1, max_size=64)
limits_by_length = st.integers(LONGEST, 100_000).map(TokenLimit) | st.builds(
    lambda per_row, per_token, per_pair, spare: SurfaceLimit(
        {"layers": Surface(1e6, per_row, per_token, per_pair), "head": Surface(0.0, 0.0, 2 * per_token)},
        int(1e6 + LONGEST * (per_row + per_token * LONGEST + per_pair * LONGEST**2) + spare),
    ),
    *(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 1), st.integers(0, 10**9)),
)
"""Limits under which a sample of 4096 tokens always fits."""


def kind(*, padded: bool = True, cost_of: Callable[[int], float] = float) -> SampleKind[None]:
    return SampleKind(length_of=lambda _: 1, filler=lambda _: None, padded=padded, cost_of=cost_of)


def numbers(plan: Plan) -> list[int]:
    return [index for microbatch in plan for index in microbatch]


@given(lengths_of_a_step, st.integers(1, 70))
def test_row_microbatches_equal_stock_for_any_lengths(lengths: list[int], rows: int):
    stock = range(0, len(lengths), rows)
    assert kind().plan(lengths, RowLimit(rows)) == tuple(
        tuple(range(first, min(first + rows, len(lengths)))) for first in stock
    )


@PADDED
@given(
    lengths=lengths_of_a_step,
    limit=limits_by_length | st.integers(1, LONGEST).map(TokenLimit),
    more=st.integers(0, 80),
)
def test_every_sample_runs_once_within_the_limit_after_spreading(
    padded: bool, lengths: list[int], limit: Limit, more: int
):
    plan = kind(padded=padded).plan(lengths, limit)
    assert all(plan)
    spread_out = kind(padded=padded).spread(plan, lengths, limit, len(plan) + more)
    assert len(spread_out) == len(plan) + more
    for each in (plan, spread_out):
        assert sorted(numbers(each)) == list(range(len(lengths)))
        # single samples cannot be made smaller
        assert all(limit.fits(*size_of(rows, lengths, padded=padded)) for rows in each if len(rows) > 1)
    assert all(spread_out) or all(len(microbatch) <= 1 for microbatch in spread_out), (
        "empty where others are not single"
    )


@PADDED
@given(lengths=lengths_of_a_step, limit=limits_by_length)
def test_spreading_enlarges_no_microbatch_and_puts_the_largest_first(padded: bool, lengths: list[int], limit: Limit):
    plan = kind(padded=padded).plan(lengths, limit)
    sizes, before = (
        [size_of(rows, lengths, padded=padded).padded_tokens for rows in each if rows]
        for each in (kind(padded=padded).spread(plan, lengths, limit, len(plan)), plan)
    )
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= max(before)


def first_fit_decreasing(lengths: list[int], limit: Limit) -> int:
    """Return the number of microbatches of first-fit decreasing: put each sample, longest first, into the first with
    space.
    """
    microbatches: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for each in microbatches:
            if limit.fits(len(each) + 1, each[0]):
                each.append(length)
                break
        else:
            microbatches.append([length])
    return len(microbatches)


@given(lengths_of_a_step, limits_by_length)
def test_padded_plan_needs_at_most_the_microbatches_of_first_fit_decreasing(lengths: list[int], limit: Limit):
    plan = kind().plan(lengths, limit)
    assert len(plan) <= first_fit_decreasing(lengths, limit)
    assert [lengths[index] for index in numbers(plan)] == sorted(lengths, reverse=True)


@given(lengths_of_a_step, st.integers(LONGEST, 100_000))
def test_joined_plan_needs_at_most_4_thirds_of_the_minimum_plus_one(lengths: list[int], tokens: int):
    at_best = math.ceil(sum(lengths) / tokens)
    # longest processing time first is at most 4/3 of the optimum (Graham, 1969), plus one
    plan = kind(padded=False).plan(lengths, TokenLimit(tokens))
    assert len(plan) <= max(at_best + 1, math.ceil(at_best * 4 / 3) + 1)


@PADDED
def test_microbatches_of_a_rank_become_equal(padded: bool):
    lengths = [100] * 12
    plan = kind(padded=padded).plan(lengths, TokenLimit(1000))
    assert [len(rows) for rows in kind(padded=padded).spread(plan, lengths, TokenLimit(1000), 2)] == [6, 6]


def test_load_counts_padding_and_costs_of_rows():
    plan, lengths = ((0, 1), (2,), ()), [5, 9, 3]
    assert kind().load(plan, lengths, ()) == Load(tokens=17, padded_tokens=21, most_rows=2, most_tokens=18, cost=21)
    assert kind(padded=False).load(plan, lengths, ()) == Load(17, 17, most_rows=2, most_tokens=14, cost=17)
    assert kind(cost_of=lambda length: length**2).load(plan, lengths, ()).cost == 2 * 81 + 9
    assert kind(padded=False, cost_of=lambda length: length**2).load(plan, lengths, ()).cost == 25 + 81 + 9


@PADDED
def test_planning_and_dealing_65536_samples_takes_at_most_two_seconds(padded: bool):
    draw = random.Random(0)
    lengths = [min(LONGEST, math.ceil(draw.lognormvariate(5.5, 0.9))) for _ in range(65_536)]
    limit = SurfaceLimit({"layers": Surface(1e6, 10.0, 100.0, 0.1), "head": Surface(1e5, 0.0, 250.0)}, 8_000_000)
    began = time.process_time()
    plan = kind(padded=padded).plan(lengths, limit if padded else TokenLimit(65_536))
    kind(padded=padded).spread(plan, lengths, limit if padded else TokenLimit(65_536), len(plan) + 5)
    assign_to_ranks(lengths, 512)
    assert time.process_time() - began < (1 if padded else 2)


def loads(costs: list[float], rank_of: tuple[int, ...], ranks: int) -> list[float]:
    return [sum(cost for cost, at in zip(costs, rank_of, strict=True) if at == rank) for rank in range(ranks)]


@given(st.integers(1, 9), st.integers(1, 16), st.randoms())
def test_every_rank_is_dealt_equally_many_samples_of_similar_cost(ranks: int, each: int, draw: random.Random):
    costs = [float(draw.randint(1, LONGEST)) for _ in range(ranks * each)]
    rank_of = assign_to_ranks(costs, ranks)
    assert Counter(rank_of) == dict.fromkeys(range(ranks), each)
    # the largest load exceeds the mean by less than one sample
    assert max(loads(costs, rank_of, ranks)) <= sum(costs) / ranks + max(costs)
    assert rank_of == assign_to_ranks(costs, ranks)


def test_samples_that_cannot_be_dealt_equally_are_refused():
    with pytest.raises(ValueError, match=r"7 samples .* 2 ranks"):
        assign_to_ranks([1.0] * 7, 2)
