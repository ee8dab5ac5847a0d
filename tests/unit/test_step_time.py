"""Estimates of a step's duration from its work."""

import re

import pytest

from tests.unit.source import ROOT
from torchtune_adaptive.rehearse.gpus import GPUS, H100
from torchtune_adaptive.rehearse.step_time import (
    BANDWIDTH,
    BF16,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    FP32,
    HOST,
    LAUNCHES,
    MEMORY,
    UNCERTAINTY,
    Operation,
    Transfer,
    Work,
    estimate,
    time_lines,
)

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
        (work(MATMUL, collectives=(gather(10**13, hidden=True),)), COMMUNICATION),
        (work(MATMUL, Operation(HOST, 0, 10**12)), COPIES),
        (Work([(Operation(MEMORY, 0, 8), 1000)], [], 0, 0), LAUNCHES),
    ],
    ids=["compute", "bandwidth", "awaited communication", "hidden communication", "copies", "launches"],
)
def test_limit_is_the_largest_part(given: Work, limit: str) -> None:
    assert estimate(given, H100).limit == limit


def test_matmul_takes_the_time_of_its_flops_at_the_rate_of_its_type() -> None:
    assert estimate(work(MATMUL), H100).least_seconds == pytest.approx(1e15 / 989e12)
    in_fp32 = estimate(work(MATMUL._replace(kind=FP32)), H100)
    assert in_fp32.seconds / estimate(work(MATMUL), H100).seconds == pytest.approx(989 / 67)


def test_time_is_never_below_the_lower_bound() -> None:
    for card in GPUS.values():
        assert card.rates
        time = estimate(work(MATMUL, COPY), card.rates)
        assert time.range[0] > time.least_seconds > 0


def test_measured_times_are_within_the_range_of_the_estimate() -> None:
    page = (ROOT / "docs" / "rehearsing.md").read_text()
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


def test_optimizer_update_does_not_depend_on_the_batch() -> None:
    given = work(MATMUL, COPY._replace(update=True))
    once, twice = (estimate(given, H100, scale) for scale in (1, 2))
    assert twice.parts[COMPUTE] == 2 * once.parts[COMPUTE]
    assert twice.parts[BANDWIDTH] == once.parts[BANDWIDTH]


def test_ranks_that_share_samples_do_not_multiply_tokens() -> None:
    given = work(MATMUL)._replace(tokens=4096, ranks_per_sample=8)
    assert given.totals(ranks=16)["tokens_per_step"] == 2 * 4096
    seconds = estimate(given, H100).seconds
    assert f"{4096 / 8 / seconds:,.0f} each, {4096 * 2 / seconds:,.0f} on 16 ranks" in "\n".join(
        time_lines(estimate(given, H100), given, "h100", ranks=16)
    )


def test_work_survives_json() -> None:
    import json

    given = work(MATMUL, COPY, collectives=(gather(5),))
    assert Work.from_json(json.loads(json.dumps(given))) == given
