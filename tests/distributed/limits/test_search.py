"""The search on several ranks with different budgets, compared with brute force over plain training."""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import PATIENCE, on_ranks, run_on_ranks
from tests.searched_model import (
    Shape,
    Trained,
    brute_force,
    drawn_budgets,
    measured_peaks,
    search_within,
    state_of,
)
from torchtune_adaptive.engine.length_profile import Profile
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.probes import profile_memory
from torchtune_adaptive.engine.ranks import full_tensor
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.errors import OneRowDoesNotFitError

SIZES = range(1, 15)

Found = dict[str, Any]


def search_on_rank(trained: Trained, meter: MemoryMeter, budgets: list[int], **options: Any) -> SearchResult:
    gc.freeze()  # a probe collects garbage; imported modules are not garbage
    return search_within(trained.step(), meter, budgets[dist.get_rank()], **options)


def steep(seed: int) -> Shape:
    """A row needs much more than all parameters, of which gloo may keep some alive a moment too long."""
    return replace(Shape.drawn(seed), vocabulary=(64, 256)[seed % 2], dim=12 + seed, hidden=32, length=64)


def slack_of(trained: Trained) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in trained.model.parameters())


def search_all(shape: Shape, draws: int) -> list[Found]:
    """Return what each strategy and brute force find under random budgets."""
    found = []
    with MemoryMeter() as meter:
        trained = Trained(shape)
        peaks = measured_peaks(trained, meter, SIZES)
        for draw in range(draws):
            budgets = drawn_budgets(peaks, draw, slack_of(trained))
            answers = {
                "linear": search_on_rank(trained, meter, budgets),
                "binary": search_on_rank(trained, meter, budgets, strategy="binary"),
                "rounded": search_on_rank(trained, meter, budgets, round_to="power_of_two"),
            }
            found.append({"best": brute_force(peaks, budgets), **answers})
    return found


@pytest.mark.smoke("2-0")
@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 3)])
def test_all_ranks_find_the_brute_force_size_under_different_budgets(ranks: int, seed: int):
    by_rank = run_on_ranks(ranks, search_all, steep(seed), 3, timeout_s=150)
    assert by_rank[1:] == by_rank[:-1]
    for found in by_rank[0]:
        best, linear = found["best"], found["linear"]
        power_of_two = 1 << (best.bit_length() - 1)
        assert found["binary"].rows == best
        assert 0.95 * best <= linear.rows <= best
        assert len(linear.probes) <= 4
        assert linear.out_of_memory_count == 0
        assert found["rounded"].rows == power_of_two


def search_whole_steps() -> list[SearchResult]:
    """Search a budget for 12 rows in one microbatch, or 10 with accumulated gradients; rank 0 has more."""
    with MemoryMeter() as meter:
        trained = Trained(Shape(vocabulary=64, dim=64, hidden=256, layers=16))
        need = measured_peaks(trained, meter, (12, 13), whole_step_rows=1)[1]
        budgets = [2 * need[0], (need[0] + need[1]) // 2]
        return [search_on_rank(trained, meter, budgets, whole_step_rows=rows) for rows in (12, 13)]


def test_all_ranks_agree_whether_a_step_is_one_microbatch():
    found, same = run_on_ranks(2, search_whole_steps, timeout_s=100)
    assert found == same
    assert [(each.rows, each.accumulates) for each in found] == [(12, False), (10, True)], found


@on_ranks(2)
def test_search_after_an_evaluation_keeps_the_weights() -> None:
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        weights = [full_tensor(each.detach()) for each in trained.model.parameters()]
        with torch.no_grad():
            trained.model(trained.sample[None])  # no backward follows, so FSDP leaves the root gathered
        search_on_rank(trained, meter, [10**9] * 2, max_rows=2)
        now = [full_tensor(each.detach()) for each in trained.model.parameters()]
        assert all(map(torch.equal, weights, now))


def train(searches: bool, resumed: bool, offload: bool) -> tuple[list[float], Any]:
    with MemoryMeter() as meter:
        trained = Trained(Shape(dim=31, hidden=33, offload=offload))  # uneven shards
        if resumed:
            trained.train([2])
        if searches:
            result = search_on_rank(trained, meter, [600_000, 550_000, 650_000], strategy="binary")
            assert result.out_of_memory_count > 0
        return [trained.train([2, 2]) for _ in range(3)], state_of(trained)


@pytest.mark.parametrize(("resumed", "offload"), [(False, False), (True, True)], ids=["fresh", "resumed and offloaded"])
def test_training_after_a_search_is_bitwise_unchanged(resumed: bool, offload: bool):
    with_search, without = (run_on_ranks(3, train, searches, resumed, offload) for searches in (True, False))
    assert with_search == without


def search_where_one_row_does_not_fit(strategy: str) -> list[tuple[str, float]]:
    """Return messages and seconds where the last rank lacks a few bytes, most of its memory, or more than exists."""
    text = []
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        need = measured_peaks(trained, meter, [1])[dist.get_rank()][0]
        for cap in (need - 4000, meter.live_bytes + 1000, 1000):
            budgets = [*[10 * need] * (dist.get_world_size() - 1), cap]
            started = time.monotonic()
            with pytest.raises(OneRowDoesNotFitError) as caught:
                search_on_rank(trained, meter, budgets, strategy=strategy, max_rows=64)
            text.append((str(caught.value), time.monotonic() - started))
    return text


@pytest.mark.parametrize("strategy", ["linear", "binary"])
def test_one_row_that_does_not_fit_is_the_same_error_on_all_ranks(strategy: str):
    for (first, seconds), *others in zip(*run_on_ranks(3, search_where_one_row_does_not_fit, strategy), strict=True):
        assert all(message == first for message, _ in others)
        assert first.startswith("one row of 16 tokens needs ")
        assert " on rank 2, whose budget is " in first
        assert seconds < 20 * PATIENCE


def search_where_rank_1_fails_in_passing(at_calls: tuple[int, ...]) -> tuple[int, str]:
    """Return the rows found, or the error."""
    calls = iter(range(1, 1000))

    class Failing(Trained):
        def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
            if next(calls) in at_calls and dist.get_rank() == 1:
                raise torch.OutOfMemoryError
            return super().forward_backward(samples)

    with MemoryMeter() as meter:
        try:
            return search_on_rank(Failing(Shape()), meter, [10_000_000] * 2, max_rows=4).rows, ""
        except OneRowDoesNotFitError as error:
            return 0, str(error)


SHORTEST, SHORTEST_AGAIN = 1, 3  # between them is the replay, which determines the remaining collectives


@pytest.mark.parametrize(
    ("at_calls", "rows", "message"),
    [
        ((SHORTEST,), 4, ""),
        ((3,), 4, ""),  # the first whole row
        ((SHORTEST, SHORTEST_AGAIN), 0, "one row of 16 tokens runs out of memory on rank 1"),
    ],
    ids=str,
)
def test_one_row_is_tried_again_before_it_is_reported_as_too_large(at_calls: tuple[int, ...], rows: int, message: str):
    first, second = run_on_ranks(2, search_where_rank_1_fails_in_passing, at_calls)
    assert first == second
    assert first[0] == rows
    assert first[1].startswith(message)


def profile_if_one_rank_rounds_badly() -> Profile:
    """Collective: return the profile of this rank, if the fits of rank 1 are 2 % too small."""
    if dist.get_rank() == 1:
        exact = np.linalg.lstsq
        np.linalg.lstsq = lambda *args, **options: (0.98 * exact(*args, **options)[0], None)
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        meter.cap_bytes = meter.live_bytes + 1_000_000
        return profile_memory(replace(trained.step(), cut=lambda sample, length: sample[:length]), memory=meter)


def test_ranks_whose_fits_differ_use_the_surfaces_of_rank_0():
    first, second = run_on_ranks(2, profile_if_one_rank_rounds_badly)
    assert first == second
