"""Outcomes of settings: in which order they are told, and which of them make the frontier."""

from __future__ import annotations

from tests.unit.prediction.made_up import outcome
from torchtune_adaptive.prediction.outcome import Outcome, cheapest_first, fastest_first, frontier_of


def names(outcomes: list[Outcome]) -> list[str]:
    return [each.name for each in outcomes]


def test_what_costs_least_comes_first_and_more_ranks_last() -> None:
    told = cheapest_first(
        [
            outcome("slow", seconds=1.3),
            outcome("does not fit", rows=0, seconds=0.5),
            outcome("", ranks=2, seconds=0.9),
            outcome("quick", seconds=0.8),
            outcome("as quick, more rows", seconds=0.801, rows=8),
        ]
    )
    assert names(told) == ["as quick, more rows", "quick", "slow", ""]


def test_by_speed_come_tokens_a_second_and_last_what_does_not_fit() -> None:
    told = fastest_first([outcome("none", rows=0, seconds=0.1), outcome("few", rows=1), outcome("many", rows=8)])
    assert names(told) == ["many", "few", "none"]


def test_the_frontier_gets_faster_with_more_memory() -> None:
    found = frontier_of(
        [
            outcome("small", rows=1, peak=5),
            outcome("larger and slower", rows=1, peak=6, seconds=2.0),
            outcome("large", rows=8, peak=9),
            outcome("does not fit", rows=0, peak=3),
        ]
    )
    assert names(found) == ["small", "large"]
