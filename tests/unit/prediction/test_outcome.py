"""Outcomes of settings: in which order they are told, and which of them make the frontier."""

from __future__ import annotations

from torchtune_adaptive.prediction.outcome import Outcome, cheapest_first, fastest_first, frontier_of
from torchtune_adaptive.prediction.roofline import Seconds
from torchtune_adaptive.tune.plan import printed


def outcome(name: str, *, rows: int = 4, seconds: float = 1.0, peak: int = 10, ranks: int = 1) -> Outcome:
    time = Seconds(seconds, 0.8 * seconds, 2 * seconds)
    return Outcome(name, ranks, 1024, rows, peak, peak, time, seconds)


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


def test_a_line_says_what_to_append_what_fits_and_what_it_costs() -> None:
    lines = printed.what_fits([outcome("compile=True", seconds=0.84), outcome("", rows=1, ranks=2)], ranks=1)
    first, second = lines.splitlines()
    assert first == "  compile=True           fits 4 rows   about 0.84 × the time of a step"
    assert second.startswith("  as it is, on 2 ranks   fits 1 row ")


def test_where_nothing_fits_the_remedies_left_are_named() -> None:
    assert "lower sequence_length" in printed.what_fits([], ranks=1)


def test_speeds_are_told_with_their_range() -> None:
    told = printed.speeds([outcome("", rows=2), outcome("ac_mode=selective", rows=0)], ranks=1)
    _, first, second = told.splitlines()
    assert first.split() == ["2048", "1024", "and", "2560", "2", "10", "B", "as", "it", "is"]
    assert second.split()[:3] == ["does", "not", "fit"]


def test_figures_of_alternatives_are_for_programs() -> None:
    (row,) = printed.alternatives([outcome("compile=True", ranks=2)])
    assert (row["overrides"], row["ranks"], row["fits"], row["tokens_per_s"]) == ("compile=True", 2, True, 8192)
