"""Comparing cards and searching the largest batch, with an imitation of a rehearsal."""

import functools
import json
from collections.abc import Sequence

import pytest

from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rehearse.result import RehearsalResult
from torchtune_adaptive.rehearse.step_time import BF16, Operation, Work
from torchtune_adaptive.rehearse.sweep import SweepRow, as_table, compare, largest, range_in

GIB = 2**30
CARDS = [GPUS["4090"], GPUS["a100-40"], GPUS["h100"]]
WORK = Work([(Operation(BF16, 1e15, 10**9), 1)], [], tokens=8192, samples=1)


def imitate(
    base: float, each: float, slack: float, command: Sequence[str], card: Gpu, ranks: int | None
) -> RehearsalResult:
    """Need `base` GiB, and `each` for a row, on each of the ranks. Reserve `slack` more unless memory is short."""
    needed = (base + each * int(command[-1].rpartition("=")[2])) / (ranks or 1)
    step = {"step": 1, "allocated_bytes": int(needed * GIB), "flushes": 0, "flops": 1.0}
    fits = step["allocated_bytes"] <= card.memory
    step["reserved_bytes"] = min(int((needed + slack) * GIB), card.memory)
    error = {
        **step,
        "asked_bytes": 1,
        "has_optimizer": True,
        "allowed_bytes": card.memory,
        "free_bytes": 0,
        "in_search": False,
    }
    return RehearsalResult(
        card.memory, 0, 0, ranks or 1, int(not fits), steps=[step] if fits else [], errors=[] if fits else [error],
        end={} if fits else {"by_memory": True, "reserved_bytes": 0, "allocated_bytes": 0, "flushes": 0},
        traced={"step": 1, "work": json.loads(json.dumps(WORK))} if fits else {}, gpu=card,
    )  # fmt: skip


def imitation(base: float = 0, each: float = 1, slack: float = 0) -> functools.partial[RehearsalResult]:
    return functools.partial(imitate, base, each, slack)


def test_each_card_is_rehearsed_on_each_number_of_ranks() -> None:
    for rows in "20", "30", "100":
        found = compare(imitation(slack=5), ["train.py", rows], CARDS, [1, 2])
        alone = [imitation(slack=5)(["train.py", rows], card, ranks) for ranks in (1, 2) for card in CARDS]
        assert [(row.gpu, row.ranks) for row in found] == [(card, ranks) for ranks in (1, 2) for card in CARDS]
        assert [(row.fits, row.reserved_bytes) for row in found] == [
            (each.fits, each.run_peaks["reserved_bytes"]) for each in alone
        ]


def test_fastest_option_that_fits_is_marked() -> None:
    rows = compare(imitation(), ["train.py", "30"], CARDS, [1, 2])
    rates = {(row.gpu.name, str(row.ranks)): row.tokens_per_second for row in rows if row.tokens_per_second}
    assert ("4090", "1") not in rates
    (line,) = [line for line in as_table(rows).splitlines() if "fastest" in line]
    assert tuple(line.split()[:2]) == max(rates, key=lambda key: rates[key])


def test_table_mentions_estimates_only_if_it_has_times_and_a_verdict_only_if_no_case_is_named() -> None:
    rows = [SweepRow(CARDS[0], RehearsalResult(GIB, GIB, 0, 1, status=-9), name) for name in ("named", "")]
    verdict = rows[0].found.verdict()
    assert as_table(rows[:1]).count("\n") == 1
    assert as_table(rows[1:]).splitlines()[2:] == ["", verdict]
    assert "estimated" in as_table(compare(imitation(), ["train.py", "1"], CARDS, [1]))


def test_table_has_at_most_100_columns_and_json_the_same_rows() -> None:
    rows = compare(imitation(), ["train.py", "30"], CARDS, [1, 128])
    assert max(map(len, as_table(rows).splitlines())) <= 100
    assert [json.loads(json.dumps(row.as_dict()))["fits"] for row in rows] == [row.fits for row in rows]


@pytest.mark.parametrize("base", [0, 10, 38.05])
@pytest.mark.parametrize("each", [0.013, 0.31, 1.1, 30.1])
def test_search_finds_the_largest_value_that_fits(base: float, each: float) -> None:
    card, told = GPUS["a100-40"], list[str]()
    found = largest(imitation(base, each), ["train.py", "{1:64}"], card, None, told.append)
    expected = [rows for rows in range(1, 65) if int((base + each * rows) * GIB) <= card.memory]
    assert found.largest == (expected[-1] if expected else 0)
    assert found.fits == bool(expected)
    assert len(told) <= 10


@pytest.mark.parametrize("word", ["{5:5}", "{0:8}", "--rows={1:8} --more={1:8}"])
def test_wrong_range_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"\{"):
        range_in(["train.py", word])


def test_value_replaces_the_range_inside_any_argument() -> None:
    words = ["train.py", "training.batch_size={2:16}"]
    assert largest(imitation(), words, GPUS["a100-40"], None, lambda _: None).largest == 16
