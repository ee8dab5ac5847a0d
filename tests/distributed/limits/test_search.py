"""The search on several ranks with different budgets, compared with brute force over plain training."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import on_ranks
from tests.searched_model import (
    Shape,
    Trained,
    brute_force,
    drawn_budgets,
    measured_peaks,
    search_within,
)
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.probes import profile_memory
from torchtune_adaptive.engine.ranks import from_all_ranks, full_tensor
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.errors import OneRowDoesNotFitError

SIZES = range(1, 15)


def search_on_rank(trained: Trained, meter: MemoryMeter, budgets: list[int], **options: Any) -> SearchResult:
    gc.freeze()  # a probe collects garbage; imported modules are not garbage
    return search_within(trained.step(), meter, budgets[dist.get_rank()], **options)


def steep(seed: int) -> Shape:
    """A row needs much more than all parameters, of which gloo may keep some alive a moment too long."""
    return replace(Shape.drawn(seed), vocabulary=(64, 256)[seed % 2], dim=12 + seed, hidden=32, length=64)


def slack_of(trained: Trained) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in trained.model.parameters())


@pytest.mark.smoke("2-0")
@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 3)])
@on_ranks(lambda ranks, **_: ranks, timeout_s=150)
def test_all_ranks_find_the_brute_force_size_under_different_budgets(ranks: int, seed: int) -> None:
    with MemoryMeter() as meter:
        trained = Trained(steep(seed))
        peaks = measured_peaks(trained, meter, SIZES)
        for draw in range(3):
            budgets = drawn_budgets(peaks, draw, slack_of(trained))
            best = brute_force(peaks, budgets)
            linear = search_on_rank(trained, meter, budgets)
            binary = search_on_rank(trained, meter, budgets, strategy="binary")
            rounded = search_on_rank(trained, meter, budgets, round_to="power_of_two")
            first, *others = from_all_ranks((linear, binary, rounded))
            assert others == [first] * (ranks - 1)
            assert binary.rows == best
            assert 0.95 * best <= linear.rows <= best
            assert len(linear.probes) <= 4
            assert linear.out_of_memory_count == 0
            assert rounded.rows == 1 << (best.bit_length() - 1)


@on_ranks(2, timeout_s=100)
def test_all_ranks_agree_whether_a_step_is_one_microbatch() -> None:
    """Under a budget for 12 rows in one microbatch, or 10 with accumulated gradients; rank 0 has more."""
    with MemoryMeter() as meter:
        trained = Trained(Shape(vocabulary=64, dim=64, hidden=256, layers=16))
        need = measured_peaks(trained, meter, (12, 13), whole_step_rows=1)[1]
        budgets = [2 * need[0], (need[0] + need[1]) // 2]
        found = [search_on_rank(trained, meter, budgets, whole_step_rows=rows) for rows in (12, 13)]
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


SHORTEST, SHORTEST_AGAIN = 1, 3  # between them is the replay, which determines the remaining collectives
TOO_LARGE = pytest.raises(OneRowDoesNotFitError, match=r"^one row of 16 tokens runs out of memory on rank 1")


@pytest.mark.parametrize(
    ("at_calls", "is_reported"),
    [((SHORTEST,), False), ((3,), False), ((SHORTEST, SHORTEST_AGAIN), True)],
    ids=["the shortest", "the first whole row", "the shortest twice"],
)
@on_ranks(2)
def test_one_row_is_tried_again_before_it_is_reported_as_too_large(
    at_calls: tuple[int, ...], is_reported: bool
) -> None:
    calls = iter(range(1, 1000))

    class Failing(Trained):
        def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
            if next(calls) in at_calls and dist.get_rank() == 1:
                raise torch.OutOfMemoryError
            return super().forward_backward(samples)

    with MemoryMeter() as meter, TOO_LARGE if is_reported else nullcontext():
        assert search_on_rank(Failing(Shape()), meter, [10_000_000] * 2, max_rows=4).rows == 4


@on_ranks(2)
def test_ranks_whose_fits_differ_use_the_surfaces_of_rank_0() -> None:
    """The fits of rank 1 are 2 % too small."""
    if dist.get_rank() == 1:
        exact = np.linalg.lstsq
        np.linalg.lstsq = lambda *args, **options: (0.98 * exact(*args, **options)[0], None)
    with MemoryMeter() as meter:
        trained = Trained(Shape())
        meter.cap_bytes = meter.live_bytes + 1_000_000
        found = profile_memory(replace(trained.step(), cut=lambda sample, length: sample[:length]), memory=meter)
    first, second = from_all_ranks(found)
    assert first == second
