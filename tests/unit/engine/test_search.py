"""Results of the search for many memory functions, the rows it measures, and its table."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.simulated_memory import always_fits
from torchtune_adaptive.engine.limits import MAX_ROWS, Surface, candidate_rows
from torchtune_adaptive.engine.search import (
    STRATEGIES,
    Budget,
    Peak,
    SearchResult,
    fit_lines,
    one_row_error,
    search,
)
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.report.tables import search_table

MIB, GIB = 2**20, 2**30
PeakFunction = Callable[[int], dict[str, int]]


@dataclass
class Device:
    """Runs out of memory above the budget; a soft device only reports it."""

    peaks: PeakFunction
    budget_bytes: int
    soft: bool = False
    retries_above: float = float("inf")
    cached: Callable[[int], float] | None = None
    """Reserved bytes relative to allocated bytes, by rows. The device reserves at most 1/0.95 of the budget."""
    measured: list[int] = field(default_factory=list)

    def fits(self, rows: int) -> bool:
        within = max(self.peaks(rows).values()) <= self.budget_bytes and rows <= self.retries_above
        return within and (rows == 1 or self.fullness(rows) <= 1)

    def fullness(self, rows: int) -> float:
        reserved_bytes = 0 if self.cached is None else self.cached(rows) * max(self.peaks(rows).values())
        return reserved_bytes * 0.95 / self.budget_bytes

    def brute_force(self, candidates: Any = range(1, MAX_ROWS + 1)) -> int:
        best = 0
        for rows in candidates:
            if not self.fits(rows):
                break
            best = rows
        return best

    def measure(self, rows: int) -> Peak:
        self.measured.append(rows)
        phases = self.peaks(rows)
        if max(phases.values()) > self.budget_bytes and not self.soft:
            return Peak({}, fits=False)
        fullness = self.fullness(rows)
        retries = int(rows > self.retries_above or fullness > 1)
        return Peak(phases, fits=True, retries=retries, fullness=min(1.0, fullness))

    def search(self, **options: Any) -> SearchResult:
        return search(self.measure, Budget(self.budget_bytes), no_fit_error=self.no_fit_error, **options)

    def no_fit_error(self) -> OneRowDoesNotFitError:
        return one_row_error(length=1, need_bytes=None, budget_bytes=self.budget_bytes, rank=0)


def affine(*phases: tuple[int, int]) -> PeakFunction:
    """Return a memory function from (fixed, slope) of each phase, in MiB."""
    return lambda rows: {f"phase {i}": (a + b * rows) * MIB for i, (a, b) in enumerate(phases)}


def one_row_cheaper(lines: list[tuple[int, int]], share: float) -> PeakFunction:
    """Return a memory function with fewer activations at one row: chunking and other kernels save part of them."""
    plain = affine(*lines)

    def peaks(rows: int) -> dict[str, int]:
        return {
            name: need - int(share * slope * MIB) * (rows == 1)
            for (name, need), (_, slope) in zip(plain(rows).items(), lines, strict=True)
        }

    return peaks


def budget_for(peaks: PeakFunction, headroom: float, rows: int = 2) -> int:
    """Return a budget of at least `headroom` times the memory of `rows` rows."""
    return int(max(max(peaks(n).values()) for n in range(1, rows + 1)) * headroom)


phase = st.tuples(st.integers(0, 40_000), st.one_of(st.just(0), st.integers(20, 4000)))
phases = st.lists(phase, min_size=1, max_size=5).filter(lambda all_: any(slope for _, slope in all_))
headrooms = st.floats(1, 8)
roundings = st.sampled_from(["none", "power_of_two"])


@given(phases, headrooms)
@example([(0, 20)], 1.9999999999999991)  # one byte short of four rows
@example([(0, 20)], 2.0)
def test_linear_finds_95_percent_of_brute_force_in_four_probes_without_oom(
    lines: list[tuple[int, int]], headroom: float
) -> None:
    device = Device(affine(*lines), budget_for(affine(*lines), headroom))
    result = device.search(round_to="none")
    best = device.brute_force()
    assert 0.95 * best <= result.rows <= best
    assert fit_lines(result.probes) == {f"phase {i}": Surface(a * MIB, b * MIB) for i, (a, b) in enumerate(lines)}
    rounded = device.search()
    assert rounded.rows == 1 << (best.bit_length() - 1)
    for each in (result, rounded):
        assert (len(each.probes) <= 4, each.out_of_memory_count) == (True, 0)


bounds = st.fixed_dictionaries({"round_to": roundings, "max_rows": st.integers(1, 300)})


@given(
    st.lists(st.integers(0, 500), max_size=300), headrooms, bounds, st.booleans(), st.integers(1, 200) | st.just(inf)
)
def test_binary_equals_brute_force_for_any_memory_that_grows_with_the_rows(
    growth: list[int], headroom: float, asked: dict[str, Any], soft: bool, retries_above: float
) -> None:
    """Rows with allocator retries do not count as fitting."""
    needs = [*accumulate(growth, initial=1000)]

    def peaks(rows: int) -> dict[str, int]:
        return {"step": needs[min(rows, len(needs)) - 1]}

    device = Device(peaks, budget_for(peaks, headroom, rows=1), soft, retries_above)
    assert device.search(strategy="binary", **asked).rows == device.brute_force(candidate_rows(**asked))


@given(phases, headrooms, bounds)
def test_decrease_returns_the_first_halving_that_fits(
    lines: list[tuple[int, int]], headroom: float, asked: dict[str, Any]
) -> None:
    device = Device(affine(*lines), budget_for(affine(*lines), headroom, rows=1))
    result, candidates = device.search(strategy="decrease", **asked), candidate_rows(**asked)
    assert device.measured[0] == candidates[-1]
    assert device.measured[-1] == result.rows
    assert [device.fits(rows) for rows in device.measured] == [False] * (len(device.measured) - 1) + [True]
    for before, after in zip(device.measured, device.measured[1:], strict=False):
        assert after == max(rows for rows in candidates if rows <= before // 2)


def in_blocks(peaks: PeakFunction, granule: int, chunk: int = 1) -> PeakFunction:
    """Round memory up like an allocator with blocks of `granule` bytes that runs `chunk` rows at a time."""
    return lambda rows: {
        name: ceil(need / granule) * granule for name, need in peaks(ceil(rows / chunk) * chunk).items()
    }


@given(phases, headrooms, st.integers(1, 8), st.integers(1, 64 * MIB), bounds, st.booleans())
@settings(max_examples=200)
def test_every_strategy_returns_rows_that_fit_and_measures_none_above_the_bound(
    lines: list[tuple[int, int]], headroom: float, chunk: int, granule: int, asked: dict[str, Any], soft: bool
) -> None:
    peaks = in_blocks(affine(*lines), granule, chunk)
    device = Device(peaks, budget_for(peaks, headroom, rows=1), soft)
    for strategy in STRATEGIES:
        device.measured.clear()
        result = device.search(strategy=strategy, **asked)
        assert device.fits(result.rows)
        assert result.unrounded_rows >= result.rows
        assert result.rows in device.measured
        assert len(set(device.measured)) == len(device.measured), "measured twice"
        assert max(device.measured) <= asked["max_rows"]
        assert result.rows in candidate_rows(**asked)


def larger_of_two_lines(pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> PeakFunction:
    return lambda rows: {f"{i}": max(a + b * rows for a, b in pair) * MIB for i, pair in enumerate(pairs)}


pairs_of_lines = st.lists(st.tuples(phase, phase), min_size=1, max_size=3).filter(
    lambda pairs: any(a[1] or b[1] for a, b in pairs)
)
memory_functions = st.one_of(
    st.integers(0, 1000).map(lambda fixed: (lambda rows: {"attention": (fixed + rows * rows) * MIB}, 0)),
    pairs_of_lines.map(lambda pairs: (larger_of_two_lines(pairs), 0)),
    st.builds(lambda lines, granule: (in_blocks(affine(*lines), granule), 1), phases, st.integers(1, 16 * MIB)),
)
"""With the rows that rounding may cost."""


@given(memory_functions, headrooms, st.booleans(), st.integers(1, 200) | st.just(inf))
def test_bends_blocks_and_retries_cost_linear_at_most_a_twentieth_of_the_rows(
    function: tuple[PeakFunction, int], headroom: float, soft: bool, retries_above: float
) -> None:
    peaks, rounding_rows = function
    device = Device(peaks, budget_for(peaks, headroom), soft, retries_above)
    best = device.brute_force()
    assert 0.95 * best - rounding_rows <= device.search(round_to="none").rows <= best


@given(phases, st.floats(1.6, 8), st.floats(1.05, 1.25), st.integers(0, 1000), roundings)
@example([(245, 20)], 5.0625, 1.09375, 499, "none")  # took 6 probes and 2 flushes
def test_linear_needs_five_probes_and_one_flush_if_the_cache_fills_the_device_first(
    lines: list[tuple[int, int]], headroom: float, share: float, seed: int, round_to: str
) -> None:
    """Recorded with torch's allocator: it reserves up to 1.5 times the peak at two rows, and follows no line above."""

    def cached(rows: int) -> float:
        return 1.4 if rows <= 2 else share * (1 + random.Random(seed * rows).uniform(-0.02, 0.02))

    peaks = affine(*lines)
    device = Device(peaks, budget_for(peaks, headroom), cached=cached)
    result = device.search(round_to=round_to)
    flushes = sum(probe.peak.retries for probe in result.probes)
    assert len(result.probes) <= 5
    assert flushes + result.out_of_memory_count <= 1
    assert device.fits(result.rows)
    assert result.rows >= 0.45 * device.brute_force(candidate_rows(None, round_to))


@given(phases, headrooms, st.floats(-0.9, 0.9), st.booleans())
def test_cheaper_first_row_misleads_linear_only_if_a_third_probe_could_run_out(
    lines: list[tuple[int, int]], headroom: float, share: float, soft: bool
) -> None:
    peaks = one_row_cheaper(lines, share)
    device = Device(peaks, budget_for(peaks, headroom), soft)
    result = device.search(round_to="none")
    best = device.brute_force()
    assert result.rows <= best
    assert result.rows >= 0.95 * best or (share > 0 and result.rows == 2 and len(result.probes) == 2)
    if share >= 0:  # a dearer first row only costs probes
        assert len(result.probes) <= 4
        assert result.out_of_memory_count == 0


def one_row_differs(by: int, fixed: int, slope: int, at: int = 1) -> PeakFunction:
    """Return a line in MiB, except at these rows."""
    return lambda rows: {"step": (fixed + slope * rows + by * (rows == at)) * MIB}


Way = tuple[PeakFunction, int, list[int], dict[str, Any]]


def way(peaks: PeakFunction, budget_mib: int, measured: list[int], round_to: str = "none", **options: int | str) -> Way:
    return peaks, budget_mib * MIB, measured, {"round_to": round_to, **options}


FLAT, SECOND_ROW_DEARER = affine((40_000, 100)), one_row_differs(132, 3261, 672, at=2)
WAYS = {
    # as documented
    "measure a close result directly": way(affine((34_500, 4600)), 75_000, [1, 2, 8], "power_of_two"),
    "extrapolate to four times the rows": way(FLAT, 60_000, [1, 2, 8, 200]),
    "extrapolate to eight times if rounded": way(FLAT, 60_000, [1, 2, 16, 128], "power_of_two"),
    "safe for any crossing phase": way(affine((1000, 1000)), 90_000, [1, 2, 2 * 90_000 // 3000, 89]),
    "to the bound in steps of eight": way(affine((1000, 0)), 2000, [1, 2, 16, 128, 1024, MAX_ROWS], "power_of_two"),
    "binary doubles": way(affine((0, 1000)), 13_000, [1, 2, 4, 8, 16, 12, 14, 13], strategy="binary"),
    "three rows, if foreseen": way(one_row_differs(-10, 80, 20), 161, [1, 2, 3, 4], "power_of_two"),
    # noise at 18 rows makes the line through it predict 99; measured, these leave space for one more
    "no probe for a single additional row": way(one_row_differs(8, 1000, 100, at=18), 11_000, [1, 2, 18, 99]),
    "extend to a whole step": way(SECOND_ROW_DEARER, 12_058, [1, 2, 8, 12], max_rows=12, least_rows=12),
    "a whole step is too far": way(SECOND_ROW_DEARER, 9000, [1, 2], max_rows=12, least_rows=12),
    "step back by a sixteenth after retries": way(affine((1000, 1000)), 90_000, [1, 2, 60, 89, 84], retries_above=86),
}


@pytest.mark.parametrize("case", WAYS)
def test_measured_rows_end_with_the_result(case: str) -> None:
    peaks, budget_bytes, measured, given = WAYS[case]
    options = {"retries_above": inf, **given}
    device = Device(peaks, budget_bytes, retries_above=options.pop("retries_above"))
    assert device.search(**options).rows == measured[-1]
    assert device.measured == measured


def test_fully_measured_failure_guides_the_next_probe() -> None:
    """The first row needs more than its line, so the jump to 8 goes too far; 2 and 8 rows then lead to 5."""
    device = Device(one_row_differs(1, 5, 2), 16 * MIB, soft=True)
    assert device.search(round_to="none").rows == 5
    assert device.measured[:4] == [1, 2, 8, 5]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_row_is_the_result_if_two_do_not_fit_even_with_retries(strategy: str) -> None:
    device = Device(affine((0, 1000)), 1999 * MIB, retries_above=0)
    assert device.search(strategy=strategy, max_rows=4).rows == 1


def test_table_is_the_documented_one() -> None:
    def measure(rows: int) -> Peak:
        peak, seconds = {1: (38.4, 1.9), 2: (42.9, 2.2), 8: (69.7, 5.8)}[rows]
        return Peak({"backward": int(peak * GIB)}, fits=True, seconds=seconds)

    found = search(measure, Budget(int(75.2 * GIB)), no_fit_error=always_fits)
    assert search_table(found, 4096) == (
        "batch search · linear · 4096 tokens · budget 75.2 GiB a rank\n"
        "  rows   peak       of budget   time\n"
        "  1      38.4 GiB     51 %      1.9 s\n"
        "  2      42.9 GiB     57 %      2.2 s\n"
        "  8      69.7 GiB     93 %      5.8 s   <- chosen (9.2 fit, rounded down to a power of two)"
    )
