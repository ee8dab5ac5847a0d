"""What the fullest rank of a step has to do over the mean of the ranks, in the cost by which samples are dealt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchtune_adaptive.engine.plans import load_of
from torchtune_adaptive.engine.reports import Report, Reports


def squares(length: int) -> float:
    """Attention and nothing else."""
    return length**2


def imbalance_of(*shares: list[int], cost: Callable[[int], float] = float, padded: bool = False) -> float:
    """Of ranks with samples of these lengths, each rank in a single microbatch."""
    loads = [load_of((tuple(range(len(lengths))),), lengths, padded=padded, cost=cost) for lengths in shares]
    return Reports(Report(**load._asdict()) for load in loads).imbalance


def test_of_ranks_with_equally_many_tokens_the_one_with_a_long_sample_has_more_to_do() -> None:
    assert imbalance_of([8], [4, 4]) == 1
    assert imbalance_of([8], [4, 4], cost=squares) == pytest.approx(64 / 48)
    assert imbalance_of([4, 4], [8], cost=squares) == pytest.approx(64 / 48)


def test_of_ranks_that_were_dealt_equal_cost_none_waits() -> None:
    assert imbalance_of([5], [3, 4], cost=squares) == 1


def test_padding_costs_as_much_as_what_it_fills_up_to() -> None:
    assert imbalance_of([3, 4], [4, 4], cost=squares, padded=True) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 49])
def test_ranks_that_do_the_same_are_even_whatever_the_unit_of_cost(ranks: int) -> None:
    assert imbalance_of(*[[7, 2]] * ranks, cost=lambda length: 1e-6 * length) == 1
    assert Reports([Report()] * ranks).imbalance == 1, "where nobody has anything to do, nobody waits"
