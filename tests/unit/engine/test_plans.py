"""Steps cut into microbatches, of padded rows and of samples one after another; and samples dealt to ranks."""

import math
import random
import statistics
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.engine.limits import Limit, RowLimit, Surface, SurfaceLimit, TokenLimit
from torchtune_adaptive.engine.plans import Load, Plan, deal, load_of, plan_step, size_of, spread

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
"""Those under which a sample of 4096 tokens always fits."""


def numbers(plan: Plan) -> list[int]:
    return [index for microbatch in plan for index in microbatch]


def within(plan: Plan, lengths: list[int], limit: Limit, *, padded: bool) -> bool:
    """But for a sample that is alone, which nothing can make smaller."""
    return all(limit.fits(*size_of(rows, lengths, padded=padded)) for rows in plan if len(rows) > 1)


@given(lengths_of_a_step, st.integers(1, 70))
def test_microbatches_by_rows_are_those_of_stock_whatever_the_lengths(lengths: list[int], rows: int):
    stock = range(0, len(lengths), rows)
    assert plan_step(lengths, RowLimit(rows)) == tuple(
        tuple(range(first, min(first + rows, len(lengths)))) for first in stock
    )


@PADDED
@given(
    lengths=lengths_of_a_step,
    limit=limits_by_length | st.integers(1, LONGEST).map(TokenLimit),
    more=st.integers(0, 80),
)
def test_by_length_every_sample_runs_once_within_the_limit_however_far_it_is_spread(
    padded: bool, lengths: list[int], limit: Limit, more: int
):
    plan = plan_step(lengths, limit, padded=padded)
    assert all(plan)
    spread_out = spread(plan, lengths, limit, len(plan) + more, padded=padded)
    assert len(spread_out) == len(plan) + more
    for each in (plan, spread_out):
        assert sorted(numbers(each)) == list(range(len(lengths)))
        assert within(each, lengths, limit, padded=padded)
    assert all(spread_out) or all(len(microbatch) <= 1 for microbatch in spread_out), (
        "empty where others are not single"
    )


@PADDED
@given(lengths=lengths_of_a_step, limit=limits_by_length)
def test_spreading_makes_no_microbatch_larger_and_the_first_the_largest(padded: bool, lengths: list[int], limit: Limit):
    plan = plan_step(lengths, limit, padded=padded)
    sizes, before = (
        [size_of(rows, lengths, padded=padded).room_tokens for rows in each if rows]
        for each in (spread(plan, lengths, limit, len(plan), padded=padded), plan)
    )
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= max(before)


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


@given(lengths_of_a_step, limits_by_length)
def test_padded_microbatches_are_no_more_than_first_fit_decreasing_makes_and_sorted(lengths: list[int], limit: Limit):
    plan = plan_step(lengths, limit)
    assert len(plan) <= first_fit_decreasing(lengths, limit)
    assert [lengths[index] for index in numbers(plan)] == sorted(lengths, reverse=True)


@given(lengths_of_a_step, st.integers(LONGEST, 100_000))
def test_joined_microbatches_are_hardly_more_than_there_could_be_at_best(lengths: list[int], tokens: int):
    at_best = math.ceil(sum(lengths) / tokens)
    # longest first into the emptiest: 4/3 of the best is the worst there is (Graham, 1969), and then one more
    plan = plan_step(lengths, TokenLimit(tokens), padded=False)
    assert len(plan) <= max(at_best + 1, math.ceil(at_best * 4 / 3) + 1)


@PADDED
def test_microbatches_of_a_rank_become_equal(padded: bool):
    lengths = [100] * 12
    plan = plan_step(lengths, TokenLimit(1000), padded=padded)
    assert [len(rows) for rows in spread(plan, lengths, TokenLimit(1000), 2, padded=padded)] == [6, 6]


def test_the_load_counts_padding_to_the_longest_row_and_what_each_row_costs():
    plan, lengths = ((0, 1), (2,), ()), [5, 9, 3]
    assert load_of(plan, lengths) == Load(tokens=17, padded_tokens=21, most_rows=2, most_tokens=18, cost=21)
    assert load_of(plan, lengths, padded=False) == Load(17, 17, most_rows=2, most_tokens=14, cost=17)
    assert load_of(plan, lengths, cost=lambda length: length**2).cost == 2 * 81 + 9
    assert load_of(plan, lengths, padded=False, cost=lambda length: length**2).cost == 25 + 81 + 9


@PADDED
def test_65536_samples_are_planned_in_a_moment(padded: bool):
    draw = random.Random(0)
    lengths = [min(LONGEST, math.ceil(draw.lognormvariate(5.5, 0.9))) for _ in range(65_536)]
    limit = SurfaceLimit({"layers": Surface(1e6, 10.0, 100.0, 0.1), "head": Surface(1e5, 0.0, 250.0)}, 8_000_000)
    began = time.process_time()
    plan = plan_step(lengths, limit if padded else TokenLimit(65_536), padded=padded)
    spread(plan, lengths, limit if padded else TokenLimit(65_536), len(plan) + 5, padded=padded)
    assert time.process_time() - began < (1 if padded else 2)


def loads(costs: list[float], rank_of: tuple[int, ...], ranks: int) -> list[float]:
    return [sum(cost for cost, at in zip(costs, rank_of, strict=True) if at == rank) for rank in range(ranks)]


@given(st.integers(1, 9), st.integers(1, 16), st.randoms())
def test_every_rank_is_dealt_as_many_and_none_much_more(ranks: int, each: int, draw: random.Random):
    costs = [float(draw.randint(1, LONGEST)) for _ in range(ranks * each)]
    rank_of = deal(costs, ranks)
    assert Counter(rank_of) == dict.fromkeys(range(ranks), each)
    # the fullest is over the mean by less than one sample
    assert max(loads(costs, rank_of, ranks)) <= sum(costs) / ranks + max(costs)
    assert rank_of == deal(costs, ranks)


def test_samples_that_cannot_be_dealt_equally_are_refused():
    with pytest.raises(ValueError, match="7 samples cannot be dealt equally to 2 ranks"):
        deal([1.0] * 7, 2)


@pytest.mark.parametrize(("median", "spread_", "each"), [(51, 1.0, 64), (170, 0.6, 32), (512, 0.5, 16)])
@pytest.mark.parametrize("ranks", [2, 64])
def test_hardly_any_rank_waits(median: int, spread_: float, each: int, ranks: int):
    """Lengths as of instructions, dialogues and documents, cut at 512; a step of each rank."""
    draw = random.Random(ranks)
    worst = []
    for _ in range(max(1, 40 // ranks)):
        costs = [min(512.0, math.ceil(draw.lognormvariate(math.log(median), spread_))) for _ in range(ranks * each)]
        dealt = loads(costs, deal(costs, ranks), ranks)
        worst.append(max(dealt) / statistics.mean(dealt))
    assert statistics.mean(worst) <= 1.02


def test_planning_for_512_ranks_takes_a_moment():
    draw = random.Random(0)
    costs = [draw.random() for _ in range(512 * 64)]
    times = []
    for _ in range(5):
        began = time.process_time()
        deal(costs, 512)
        times.append(time.process_time() - began)
    assert min(times) < 0.1  # 30 ms on an idle core
