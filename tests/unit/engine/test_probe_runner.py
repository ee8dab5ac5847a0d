"""How a probe measures phases, retries and budgets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.searched_model import Shape, Trained, search_within
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.probes import (
    PhaseMeter,
    ProbeReport,
    agreed_peak,
    find_max_batch_size,
    phase_names,
)
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.search import Budget, Peak
from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy


@dataclass
class CountingMemory:
    """Memory whose peak is the number of its reads."""

    asked: int = 0
    retries: int = 0
    fullness: float = 0.0
    budget_bytes: int = 1_000_000
    limited: bool = True

    @property
    def peak_bytes(self) -> int:
        self.asked += 1
        return self.asked

    def reset_peak(self) -> None:
        pass

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        self.limited = False
        yield
        self.limited = True


def test_small_probes_and_the_update_are_measured_without_the_limit():
    memory = CountingMemory()
    limited: list[tuple[int, bool]] = []

    class Watched(Trained):
        def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
            limited.append((len(samples), memory.limited))
            return super().forward_backward(samples)

        def update(self, result: Any) -> None:
            assert not memory.limited
            super().update(result)

    find_max_batch_size(Watched(Shape()).step(), memory=memory, max_rows=4, strategy="binary")
    assert limited[1:] == [(1, False), (1, False), (1, False), (2, False), (1, True), (4, True)]


def test_retries_during_a_probe_count_as_its_own_and_reject_it():
    memory = CountingMemory(retries=7)

    class Retried(Trained):
        def forward_backward(self, samples: Sequence[Tensor]) -> Totals:
            memory.retries += len(samples) > 2
            return super().forward_backward(samples)

    result = find_max_batch_size(Retried(Shape()).step(), memory=memory, max_rows=8, strategy="binary")
    assert result.rows == 2
    assert [probe.peak.retries for probe in result.probes] == [0, 0, 1]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: self.norm(self.layer(y)), x, use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_phases_end_at_the_boundaries_even_with_checkpointing(microbatches: int):
    model = Checkpointed()
    boundaries = {"layer": model.layer, "head": model.head}
    memory = CountingMemory()
    with PhaseMeter(memory, model, boundaries) as meter:
        for _ in range(microbatches):
            model(torch.ones(2, 4)).sum().backward()
        meter.begin_update()
        meter.end()
    assert phase_names(boundaries) == [
        "layer forward",
        "head forward",
        "loss",
        "head backward",
        "layer backward",
        "update",
    ]
    assert sorted(meter.peaks, key=meter.peaks.__getitem__) == phase_names(boundaries)
    model(torch.ones(2, 4)).sum().backward()
    assert memory.asked == 1 + 6 + 5 * (microbatches - 1)  # the hooks are gone


def test_progress_is_reported_after_each_probe():
    seen: list[tuple[int, Peak]] = []
    with MemoryMeter() as meter:
        result = search_within(Trained(Shape()).step(), meter, 400_000, progress=lambda *message: seen.append(message))
    assert seen == [(probe.rows, probe.peak) for probe in result.probes]


def report(
    budget: int, resident: int, *peaks: int, retries: int = 0, seconds: float = 1.0, fullness: float = 0.0
) -> ProbeReport:
    return ProbeReport(Budget(budget, resident), retries, seconds, peaks, fullness)


def test_ranks_agree_on_the_largest_share_of_memory_per_phase():
    reports = [report(100, 10, 30, 50, 0, retries=1, fullness=0.5), report(100, 10, 40, 20, 0, seconds=3.0)]
    agreed = agreed_peak(["a", "b", "reached by none"], reports)
    assert agreed == Peak({"a": 40, "b": 50}, fits=True, retries=1, seconds=3.0, fullness=0.5)
    unequal = [report(110, 10, 20), report(210, 10, 160)]
    assert agreed_peak(["a"], unequal).phase_bytes["a"] == 10 + 75


@pytest.mark.parametrize("need", [80, 89, 90, 91, 93, 94, 99])
def test_agreed_peak_fits_the_tightest_budget_if_every_rank_fits_its_own(need: int):
    reports = [report(1000, 13, 400), report(90, 10, need), report(91, 7, need - 3)]
    within = need <= 90
    assert (agreed_peak(["a"], reports).phase_bytes["a"] <= 90) == within


@pytest.mark.parametrize("trains", [True, False])
def test_one_row_that_does_not_fit_names_the_limit_and_effective_remedies(trains: bool) -> None:
    trained = Trained(Shape())
    trained.runner.trains = trains
    with MemoryMeter() as meter:
        meter.count(trained.model.parameters())
        with pytest.raises(OneRowDoesNotFitError) as caught:
            search_within(trained.step(), meter, meter.live_bytes + 1, max_rows=4)
    helps = [Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS, Remedy.LARGER_BUDGET]
    assert list(caught.value.remedies) == [
        each for each in helps if trains or each is not Remedy.CHECKPOINT_ACTIVATIONS
    ]
