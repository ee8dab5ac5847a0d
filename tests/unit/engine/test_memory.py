"""Memory of the CPU meter, and gauges; tests/null/test_memory.py tests the memory of a card."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.recipes.allocation_profile import profiled
from torchtune_adaptive.engine.memory import Gauge, RetriesSeen
from torchtune_adaptive.engine.meter import MemoryMeter

MIB = 1 << 20


def a_mebibyte() -> torch.Tensor:
    return torch.ones(MIB, dtype=torch.uint8)


def test_data_from_python_is_counted_and_fake_tensors_are_not():
    with MemoryMeter(cap_bytes=MIB) as meter:
        tokens = torch.tensor([1, 2, 3])
        with FakeTensorMode():
            torch.ones(3 * MIB) * 2
        assert (meter.live_bytes, meter.peak_bytes) == (tokens.nbytes, tokens.nbytes)


def test_only_an_allocation_above_the_cap_is_refused_and_it_is_not_in_the_peak():
    with MemoryMeter(cap_bytes=2 * MIB) as meter:
        kept = a_mebibyte()
        with pytest.raises(torch.OutOfMemoryError, match=f"to {5 * MIB} bytes") as refused:
            torch.cat([kept] * 4)
        assert refused.value.__traceback__ is not None
        assert (meter.live_bytes, meter.peak_bytes) == (MIB, MIB)
        meter.cap_bytes = 0
        kept.add_(1)  # more than the cap is alive, but this allocates no memory


def test_growing_storage_is_counted_and_can_be_refused_while_the_meter_is_active():
    from_before = a_mebibyte().untyped_storage()
    from_before.resize_(0)
    with MemoryMeter(cap_bytes=5 * MIB) as meter:
        from_before.resize_(MIB)
        assert meter.live_bytes == MIB
        here = a_mebibyte().untyped_storage()
        here.resize_(3 * MIB)
        assert meter.live_bytes == 4 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            here.resize_(5 * MIB)
        assert here.size() == 3 * MIB
        here.resize_(0)
        assert (meter.live_bytes, meter.peak_bytes) == (MIB, 4 * MIB)
        meter.reset_peak()
        assert meter.peak_bytes == MIB
    here.resize_(6 * MIB)
    assert here.size() == 6 * MIB


def test_meter_cannot_be_entered_twice_at_a_time():
    resize = torch.UntypedStorage.resize_
    with MemoryMeter() as meter, pytest.raises(RuntimeError, match="already open"), meter:
        pass
    assert torch.UntypedStorage.resize_ is resize
    with meter:
        pass


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(64, 256)).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("foreach", [False, True])
def test_peak_of_a_training_step_agrees_with_the_profiler(foreach: bool):
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    train(model, optimizer)
    gc.collect()
    expected = profiled(lambda: train(model, optimizer)).peak_bytes
    with MemoryMeter() as meter:
        train(model, optimizer)
    assert meter.peak_bytes == pytest.approx(expected, rel=0.001)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_result_of_a_collective_is_counted_and_does_not_fail_after_peers_have_matched_it():
    with MemoryMeter(cap_bytes=MIB) as meter:
        mine = a_mebibyte()
        sums = torch.ops._c10d_functional.all_reduce(mine, "sum", dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(sums)
        assert meter.live_bytes == mine.nbytes + sums.nbytes == 2 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1)


@pytest.mark.parametrize(("several_stages", "expected"), [(True, 0), (False, 2)])
def test_gauge_counts_retries_between_steps_if_a_step_has_one_stage(several_stages: bool, expected: int) -> None:
    memory: Any = SimpleNamespace(retries=0, peak_bytes=1, budget_bytes=2)
    gauge = Gauge(memory, RetriesSeen(), several_stages=several_stages)
    memory.retries += 2
    gauge.begin_step()
    assert gauge.read().retries == expected


def test_gauge_does_not_count_retries_of_passes_between_steps() -> None:
    memory: Any = SimpleNamespace(retries=0, peak_bytes=1, budget_bytes=2)
    seen = RetriesSeen()
    training, generation = (Gauge(memory, seen, several_stages=several) for several in (False, True))
    for _ in range(2):
        generation.begin_step()
        memory.retries += 3
        assert generation.read().retries == 3
        Gauge(None, seen, several_stages=True)  # of a stage that is added without being measured
        training.begin_step()
        memory.retries += 1
        assert training.read().retries == 1
    memory.retries = 0
    assert training.read().retries == 0, "the count was reset"
