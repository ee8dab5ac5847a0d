"""From a law to rows, tables and figures; cards by name."""

from __future__ import annotations

import csv
import io
import json
from array import array

import pytest

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.prediction.answer import MOST_ROWS, Answer, Budget
from torchtune_adaptive.prediction.cards import CARDS, limit_bytes
from torchtune_adaptive.prediction.law import MemoryLaw, fit_law
from torchtune_adaptive.prediction.recorder import Allocation, Recording
from torchtune_adaptive.tune.plan import printed

MIB = 2**20
PHASES = {"weights": 1, "optimizer state": 2, "forward": 4, "update": 6}
POWERS = [1 << exponent for exponent in range(12)]


def law(*, caches: bool) -> MemoryLaw:
    """10 MiB for ever, 3 MiB a row for 64 tokens, and after those are freed 30 MiB more than that."""

    def step(rows: int, tokens: int) -> Recording:
        row_bytes = 3 * MIB * rows * tokens // 64
        changes = array("q", [6 * MIB, 4 * MIB, row_bytes, -row_bytes, 30 * MIB + row_bytes, -30 * MIB - row_bytes])
        return Recording(tuple(Allocation("op", 0) for _ in range(4)), array("q", [0, 1, 2, 2, 3, 3]), changes, PHASES)

    sizes = ((2, 64), (3, 64), (2, 128), (3, 128))
    return fit_law({size: step(*size) for size in sizes}, tokens_multiple=1, caches=caches)


def answer(limit_mib: int, *, overhead_mib: int = 0, caches: bool = False, tokens: int = 64) -> Answer:
    return Answer(law(caches=caches), tokens, Budget(limit_mib * MIB, overhead_mib * MIB), POWERS)


@pytest.mark.parametrize(("limit_mib", "rows"), [(42, 0), (43, 1), (45, 1), (46, 2), (340, 100)])
def test_without_a_cache_the_answer_is_where_the_peak_meets_the_budget(limit_mib: int, rows: int) -> None:
    assert answer(limit_mib).most_rows == rows
    assert answer(limit_mib + 5, overhead_mib=5).most_rows == rows


def test_rows_halve_when_tokens_double() -> None:
    assert answer(340, tokens=128).most_rows == 50


def test_the_choice_is_the_largest_that_may_be_chosen() -> None:
    assert answer(340).chosen_rows == 64
    assert answer(42).chosen_rows == 0


def test_an_allocator_reserves_more_than_tensors_need() -> None:
    """Where no cached block is large enough, the device has to have room for another, unless the cache is flushed."""
    cached = answer(340, caches=True)
    for each in cached.predictions():
        assert each.reserved_bytes >= (each.peak.peak_bytes or 0)
        assert each.fits
        assert (each.retries > 0) == (each.rows > cached.most_rows)
    assert cached.most_rows < cached.most_rows_with_retries <= answer(340).most_rows


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


@pytest.mark.parametrize(
    ("value", "expected"),
    [("h100", 79.1), ("H100", 79.1), (4090, 23.6), ("a100-40", 39.4), ("24GiB", 24.0), ("80GB", 80e9 / 2**30)],
)
def test_a_limit_is_an_amount_or_a_card(value: object, expected: float) -> None:
    assert limit_bytes(value, "memory_limit") == int(expected * 2**30)


@pytest.mark.parametrize(
    ("value", "message"),
    [("h10", "h100"), ("much", "known are"), (0.9, "a fraction needs a device"), (17, "neither an amount")],
)
def test_another_limit_is_refused_with_what_is_allowed(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        limit_bytes(value, "memory_limit")
    assert str(refused.value).startswith("memory_limit")


def test_cards_have_the_memory_that_their_names_say_or_less() -> None:
    named = {name: float(name.rpartition("-")[2]) for name in CARDS if name.startswith(("a100-", "v100-"))}
    assert named
    assert all(0.95 * gib < CARDS[name].gib < gib for name, gib in named.items())


def test_the_table_goes_on_until_memory_is_full_or_says_where_it_stops() -> None:
    full = answer(40 + 3 * 9000)
    assert full.most_rows == 9000
    assert "<- most without allocator retries" in printed.table(full).splitlines()[-1]
    endless = printed.table(answer(2**30)).splitlines()[-1]
    assert endless.split()[0] == str(MOST_ROWS)
    assert endless.endswith(f"<- at least {MOST_ROWS} rows fit, the search stops here")
