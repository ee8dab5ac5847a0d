"""Predictions as text, and as rows of figures: tables, remedies, speeds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.prediction.made_up import MIB, capacity, filling_holes, outcome
from torchtune_adaptive.prediction.capacity import MOST_ROWS, Budget, Capacity
from torchtune_adaptive.tune.plan import printed
from torchtune_adaptive.tune.plan.asked_token_budget import TokenBudget


def test_the_table_marks_the_answer_and_what_is_slow() -> None:
    cached = capacity(340, caches=True)
    lines = printed.table(cached).splitlines()
    marked = [line for line in lines if "<- most without allocator retries" in line]
    assert [int(line.split()[0]) for line in marked] == [cached.most_rows]
    assert "flushing the cache (slow)" in lines[-1]
    assert [int(line.split()[0]) for line in lines[1:]] == sorted(each.rows for each in cached.predictions())


def test_a_table_says_that_one_row_does_not_fit() -> None:
    _, line = printed.table(capacity(42)).splitlines()
    assert line.split() == ["1", "43.0", "MiB", "43.0", "MiB", "update", "does", "not", "fit"]


def test_figures_for_programs_name_the_choice() -> None:
    figures = printed.figures(capacity(340))
    assert json.loads(printed.as_json(figures, ["a note"])) == {"predictions": figures, "notes": ["a note"]}
    assert [row["rows"] for row in figures if row["chosen"]] == [64]


def test_the_table_goes_on_until_memory_is_full_or_says_where_it_stops() -> None:
    full = capacity(40 + 3 * 9000)
    assert full.most_rows == 9000
    assert "<- most without allocator retries" in printed.table(full).splitlines()[-1]
    endless = printed.table(capacity(2**30)).splitlines()[-1]
    assert endless.split()[0] == str(MOST_ROWS)
    assert endless.endswith(f"<- at least {MOST_ROWS} rows fit, the search stops here")


def test_a_line_says_what_to_append_what_fits_and_what_it_costs() -> None:
    lines = printed.fitting([outcome("compile=True", seconds=0.84), outcome("", rows=1, ranks=2)], ranks=1)
    first, second = lines.splitlines()
    assert first == "  compile=True             fits 4 rows   about 0.84 × the step time"
    assert second.startswith("  as it is  (on 2 ranks)   fits 1 row")


def test_where_nothing_fits_the_remedies_left_are_named() -> None:
    assert "lower sequence_length" in printed.fitting([], ranks=1)


def flushing() -> Capacity:
    """One row that fits only after the cache is flushed."""
    return Capacity(filling_holes(), 64, Budget(70 * MIB, 0), [1])


def test_a_row_that_fits_only_by_flushing_is_not_said_not_to_fit() -> None:
    texts = [
        printed.table(flushing()),
        printed.stages({"train": flushing()}),
        printed.shortfall(flushing()),
        printed.no_row(flushing(), ["do this", "do that"]),
    ]
    assert all("only by flushing the cache" in text and "not fit" not in text for text in texts)
    assert "one row of 64 tokens fits in 70.0 MiB only by flushing" in texts[2]
    assert texts[3].endswith("it needs 84.0 MiB: do this, or do that")
    assert printed.no_row(capacity(42), ["do this", "do that"]) == "one row does not fit: do this, or do that"


def test_the_choice_says_what_bounds_it() -> None:
    holes = Capacity(filling_holes(), 64, Budget(90 * MIB, 0), [1, 2, 5])
    assert (holes.most_rows, holes.chosen_rows) == (4, 1)
    assert printed.choice(holes) == "batch_size: 1 (4 fit, but not 2, which fragment the cache)"
    assert printed.choice(capacity(340)) == "batch_size: 64 (100 fit, rounded down by adaptive.round_to)"
    assert printed.choice(capacity(340), at_most=64) == "batch_size: 64 (100 fit, adaptive.max_batch_size is 64)"
    assert printed.choice(capacity(340), at_most=100) == "batch_size: 64 (100 fit, rounded down by adaptive.round_to)"


MOST = "(100 rows of 64 tokens)"


@pytest.mark.parametrize(
    ("budget", "samples", "told"),
    [
        ("auto", 4, f"6400 fit {MOST}; auto measures it on the device"),
        (6400, 200, f"6400 fits; the most is 6400 {MOST}"),
        (6400 + 63, 200, f"6463 fits; the most is 6400 {MOST}"),
        (6400 + 64, 200, f"6464 does not fit; the most is 6400 {MOST}"),
        (1_000_000, 100, f"1000000 fits; the most is 6400 {MOST}"),
        (63, 200, f"63 has no room for a row of 64 tokens; 6400 fit {MOST}"),
    ],
)
def test_a_token_budget_is_answered_in_tokens(budget: int | str, samples: int, told: str) -> None:
    asked = TokenBudget(budget, samples)
    assert printed.choice_of_tokens(capacity(340), 64, asked) == f"adaptive.token_budget: {told}"


def test_a_time_that_is_not_told_is_no_number() -> None:
    unknown = replace(outcome(""), seconds=None)
    (row,) = printed.alternatives([unknown])
    assert (row["tokens_per_s"], row["tokens_per_s_between"]) == (None, None)
    assert printed.by_ranks([unknown]).endswith("unknown")
    assert "unknown" in printed.speeds([unknown], ranks=1)


def test_stages_are_beside_each_other_for_each_number_of_ranks() -> None:
    told = printed.by_ranks([outcome("policy", ranks=2), outcome("reference", ranks=2, rows=0)])
    heading, first, second = (line.split() for line in told.splitlines())
    assert heading[:4] == ["ranks", "tokens", "stage", "rows"]
    assert (first[2:4], second[2:4]) == (["policy", "4"], ["reference", "-"])
    assert [row["stage"] for row in printed.by_ranks_for_programs([outcome("policy")])] == ["policy"]


def test_speeds_are_told_with_their_range() -> None:
    told = printed.speeds([outcome("", rows=2), outcome("ac_mode=selective", rows=0)], ranks=1)
    _, first, second = told.splitlines()
    assert first.split() == ["2048", "1024", "and", "2560", "2", "10", "B", "as", "it", "is"]
    assert second.split()[:3] == ["does", "not", "fit"]


def test_figures_of_alternatives_are_for_programs() -> None:
    (row,) = printed.alternatives([outcome("compile=True", ranks=2)])
    assert (row["overrides"], row["ranks"], row["fits"], row["tokens_per_s"]) == ("compile=True", 2, True, 8192)
