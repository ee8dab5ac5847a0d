"""Predictions as text, and as rows of figures: tables, remedies, speeds."""

from __future__ import annotations

import csv
import io
import json

from tests.unit.prediction.made_up import answer, outcome
from torchtune_adaptive.prediction.answer import MOST_ROWS
from torchtune_adaptive.tune.plan import printed


def test_the_table_marks_the_answer_and_what_is_slow() -> None:
    cached = answer(340, caches=True)
    lines = printed.table(cached).splitlines()
    marked = [line for line in lines if "<- most without allocator retries" in line]
    assert [int(line.split()[0]) for line in marked] == [cached.most_rows]
    assert "flushing the cache (slow)" in lines[-1]
    assert [int(line.split()[0]) for line in lines[1:]] == sorted(each.rows for each in cached.predictions())


def test_a_table_says_that_one_row_does_not_fit() -> None:
    _, line = printed.table(answer(42)).splitlines()
    assert line.split() == ["1", "43.0", "MiB", "43.0", "MiB", "update", "does", "not", "fit"]


def test_figures_are_the_same_in_csv_and_json() -> None:
    figures = printed.figures(answer(340))
    from_csv = list(csv.DictReader(io.StringIO(printed.as_csv(figures))))
    from_json = json.loads(printed.as_json(figures, ["a note"]))
    assert from_json == {"predictions": figures, "notes": ["a note"]}
    assert from_csv == [{key: str(value) for key, value in row.items()} for row in figures]
    assert [row["rows"] for row in figures if row["chosen"]] == [64]


def test_the_table_goes_on_until_memory_is_full_or_says_where_it_stops() -> None:
    full = answer(40 + 3 * 9000)
    assert full.most_rows == 9000
    assert "<- most without allocator retries" in printed.table(full).splitlines()[-1]
    endless = printed.table(answer(2**30)).splitlines()[-1]
    assert endless.split()[0] == str(MOST_ROWS)
    assert endless.endswith(f"<- at least {MOST_ROWS} rows fit, the search stops here")


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
