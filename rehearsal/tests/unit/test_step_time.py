"""Estimates of a step, cards compared, and the largest batch searched, with an imitation of a rehearsal."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_rehearsal.gpus import GPUS, H100, Gpu
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.report.step_time import (
    BANDWIDTH,
    BF16,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    FP32,
    HOST,
    LAUNCHES,
    MEMORY,
    OVERLAPPED,
    UNCERTAINTY,
    Operation,
    Transfer,
    Work,
    estimate,
    time_lines,
)
from gpu_rehearsal.sweep import SweepRow, as_table, compare, largest, range_in

ROOT = Path(__file__).parents[2]
MATMUL = Operation(BF16, 1e15, 10**9)
COPY = Operation(MEMORY, 0, 10**12)


def work(*operations: Operation, collectives: tuple[Transfer, ...] = ()) -> Work:
    return Work([(each, 1) for each in operations], [(each, 1) for each in collectives], tokens=0, samples=0)


def gather(size: int, *, ranks: int = 8, per_machine: int = 8, hidden: bool = False) -> Transfer:
    return Transfer(size, (ranks - 1) / ranks, ranks, per_machine, hidden)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (work(MATMUL), COMPUTE),
        (work(COPY), BANDWIDTH),
        (work(MATMUL, collectives=(gather(10**13),)), COMMUNICATION),
        (work(MATMUL, collectives=(gather(10**13, hidden=True),)), OVERLAPPED),
        (work(MATMUL, Operation(HOST, 0, 10**12)), COPIES),
        (Work([(Operation(MEMORY, 0, 8), 1000)], [], 0, 0), LAUNCHES),
    ],
    ids=["compute", "bandwidth", "awaited communication", "hidden communication", "copies", "launches"],
)
def test_limit_is_the_largest_part_and_a_step_that_the_host_limits_has_no_range(given: Work, limit: str) -> None:
    found = estimate(given, H100)
    assert found.limit == limit
    assert (found.range is None) == (limit == LAUNCHES)
    assert ("or more: the host limits it" in time_lines(found, given, "h100", 1)[0]) == (limit == LAUNCHES)


def test_matmul_takes_the_time_of_its_flops_at_the_rate_of_its_type() -> None:
    in_fp32 = estimate(work(MATMUL._replace(kind=FP32)), H100)
    assert in_fp32.seconds / estimate(work(MATMUL), H100).seconds == pytest.approx(989 / 67)


def test_measured_times_are_within_the_range_of_the_estimate() -> None:
    page = (ROOT / "docs" / "time.md").read_text()
    rows = re.findall(r"\| (\d+) ms \| (\d+) and (\d+) ms \| ([\d.]+) and ([\d.]+) \|", page)
    assert len(rows) == 4
    for estimated, *measured, low, high in rows:
        shares = [int(each) / int(estimated) for each in measured]
        assert shares == pytest.approx([float(low), float(high)], abs=0.006)
        assert UNCERTAINTY[0] < min(shares) <= max(shares) < UNCERTAINTY[1]


def test_hidden_communication_costs_nothing_until_it_takes_longer_than_computation() -> None:
    alone = estimate(work(MATMUL), H100).seconds
    assert estimate(work(MATMUL, collectives=(gather(10**9, hidden=True),)), H100).seconds == alone
    assert estimate(work(MATMUL, collectives=(gather(10**9),)), H100).seconds > alone


def test_group_with_one_rank_per_machine_is_limited_by_the_network() -> None:
    within, across, spread = (
        estimate(work(collectives=(gather(10**11, ranks=8, per_machine=near),)), H100).seconds for near in (8, 4, 1)
    )
    assert within < across < spread
    assert spread / within == pytest.approx(H100.link / H100.network, rel=0.01)


GIB = 2**30
CARDS = [GPUS["4090"], GPUS["a100-40"], GPUS["h100"]]
WORK = Work([(Operation(BF16, 1e15, 10**9), 1)], [], tokens=8192, samples=1)


def imitate(base: float, each: float, command: Sequence[str], card: Gpu, ranks: int | None) -> RehearsalResult:
    """Need `base` GiB, and `each` for a row, on each of the ranks."""
    needed = (base + each * int(command[-1].rpartition("=")[2])) / (ranks or 1)
    step = {"step": 1, "allocated_bytes": int(needed * GIB), "flushes": 0}
    fits = step["allocated_bytes"] <= card.memory
    step["reserved_bytes"] = min(step["allocated_bytes"], card.memory)
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


def imitation(base: float = 0, each: float = 1) -> functools.partial[RehearsalResult]:
    return functools.partial(imitate, base, each)


def test_table_mentions_estimates_only_if_it_has_times_and_a_verdict_only_if_no_case_is_named() -> None:
    rows = [SweepRow(CARDS[0], RehearsalResult(GIB, GIB, 0, 1, status=-9), name) for name in ("named", "")]
    verdict = rows[0].found.verdict()
    assert as_table(rows[:1]).count("\n") == 1
    assert as_table(rows[1:]).splitlines()[2:] == ["", verdict]
    assert "estimated" in as_table(compare(imitation(), ["train.py", "1"], CARDS, [1]))


def test_table_has_at_most_100_columns_and_json_the_same_rows() -> None:
    rows = compare(imitation(), ["train.py", "30"], CARDS, [1, 128], {"h100": 2.5})
    assert max(map(len, as_table(rows).splitlines())) <= 100
    assert [json.loads(json.dumps(row.as_dict()))["fits"] for row in rows] == [row.fits for row in rows]


def test_prices_give_the_cost_of_tokens_or_steps_and_the_gpus_that_fit() -> None:
    prices = {"4090": 0.4, "h100": 2.5}
    rows = compare(imitation(), ["train.py", "60"], CARDS, [1, 16], prices)
    assert [row.as_dict()["accelerators"] for row in rows] == [None, None, "H100:1", "RTX4090:8", "A100:8", "H100:8"]
    for row in rows:
        price, rate, found = prices.get(row.gpu.name), row.tokens_per_second, row.as_dict()
        expected = pytest.approx(price * row.found.ranks / 3600 / rate * 1e6) if price and rate else None
        assert (found["price"], found["cost_per_million_tokens"]) == (price, expected)
    table = as_table(rows).splitlines()
    assert [line.split()[-1] for line in table if re.match(" *(h100|4090) +16", line)] == ["0.126", "0.19"]
    assert table[-2:] == [
        "For SkyPilot: accelerators: {H100:1}",
        "For SkyPilot: accelerators: {RTX4090:8, A100:8, H100:8}, num_nodes: 2",
    ]
    no_tokens = json.loads(json.dumps(WORK._replace(tokens=0)))
    traced = {"step": 1, "work": no_tokens}
    by_step = as_table([row._replace(found=dataclasses.replace(row.found, traced=traced)) for row in rows[2:]])
    assert "cost/step" in by_step


@pytest.mark.parametrize("base", [0, 10, 38.05])
@pytest.mark.parametrize("each", [0.013, 0.31, 1.1, 30.1])
@pytest.mark.parametrize("word", ["{1:64}", "training.batch_size={1:64}"])
def test_search_finds_the_largest_value_that_fits(word: str, base: float, each: float) -> None:
    card, told = GPUS["a100-40"], list[str]()
    found = largest(imitation(base, each), ["train.py", word], card, None, told.append)
    expected = [rows for rows in range(1, 65) if int((base + each * rows) * GIB) <= card.memory]
    assert found.largest == (expected[-1] if expected else 0)
    assert found.fits == bool(expected)
    assert len(told) <= 10


def without_answer(command: Sequence[str], card: Gpu, ranks: int | None) -> RehearsalResult:
    timeout = 5 if int(command[-1]) == 22 else None
    return dataclasses.replace(imitate(0, 1, command, card, ranks), timeout=timeout)


def test_search_that_ends_without_an_answer_reports_what_is_known() -> None:
    told = list[str]()
    found = largest(without_answer, ["train.py", "{1:64}"], GPUS["a100-40"], None, told.append)
    assert "did not end within 5 s" in found.verdict()
    assert told[-1] in [f"the search has not ended; known so far: 1 fits, {high} does not fit" for high in (43, 64)]


@pytest.mark.parametrize("word", ["{5:5}", "{0:8}", "--rows={1:8} --more={1:8}"])
def test_wrong_range_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"\{"):
        range_in(["train.py", word])
