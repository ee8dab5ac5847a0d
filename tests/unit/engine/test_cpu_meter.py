import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.recipes.metering import profiled
from torchtune_adaptive.engine.meter import MemoryMeter

MIB = 1 << 20


def a_mebibyte() -> torch.Tensor:
    return torch.ones(MIB, dtype=torch.uint8)


def test_counts_what_is_alive_and_remembers_the_peak():
    with MemoryMeter() as meter:
        first = a_mebibyte()
        second = first + 1
        assert meter.live_bytes == 2 * MIB
        del first
        assert (meter.live_bytes, meter.peak_bytes) == (MIB, 2 * MIB)
        meter.reset_peak()
        assert meter.peak_bytes == MIB
        del second
    assert meter.live_bytes == 0


def test_views_and_in_place_operations_count_nothing():
    with MemoryMeter() as meter:
        whole = a_mebibyte()
        part = whole.view(2, -1)[0].detach()
        part.add_(1)
        del whole
        assert (meter.live_bytes, meter.peak_bytes) == (MIB, MIB)


def test_data_from_python_is_counted():
    with MemoryMeter() as meter:
        tokens = torch.tensor([1, 2, 3])
        assert meter.live_bytes == tokens.nbytes


def test_what_was_refused_is_not_in_the_peak_and_is_given_back_at_once():
    with MemoryMeter(cap_bytes=2 * MIB) as meter:
        kept = a_mebibyte()
        with pytest.raises(torch.OutOfMemoryError, match=f"to {5 * MIB} bytes") as refused:
            torch.cat([kept] * 4)
        assert refused.value.__traceback__ is not None
        assert (meter.live_bytes, meter.peak_bytes) == (MIB, MIB)


def test_growing_a_storage_in_place_is_counted():
    with MemoryMeter() as meter:
        tensor = a_mebibyte()
        tensor.untyped_storage().resize_(3 * MIB)
        assert meter.live_bytes == 3 * MIB
        tensor.untyped_storage().resize_(0)
        assert (meter.live_bytes, meter.peak_bytes) == (0, 3 * MIB)


def test_growing_a_storage_from_before_is_counted():
    tensor = a_mebibyte()
    tensor.untyped_storage().resize_(0)
    with MemoryMeter() as meter:
        tensor.untyped_storage().resize_(MIB)
        assert meter.live_bytes == MIB


def test_tensors_from_before_are_counted_when_given():
    parameter = nn.Parameter(torch.ones(MIB // 4))
    meter = MemoryMeter()
    meter.count([parameter, parameter.detach()])
    assert meter.live_bytes == MIB


def test_exceeding_the_cap_runs_out_of_memory_and_keeps_nothing():
    with MemoryMeter(cap_bytes=2 * MIB) as meter:
        first, second = a_mebibyte(), a_mebibyte()
        with pytest.raises(torch.OutOfMemoryError):
            a_mebibyte()
        assert meter.live_bytes == 2 * MIB
        first.add_(second)  # allocates nothing


def test_a_storage_that_cannot_grow_keeps_its_size():
    with MemoryMeter(cap_bytes=2 * MIB):
        tensor = a_mebibyte()
        with pytest.raises(torch.OutOfMemoryError):
            tensor.untyped_storage().resize_(3 * MIB)
        assert tensor.untyped_storage().size() == MIB


def test_the_cap_can_change_while_running():
    with MemoryMeter(cap_bytes=MIB) as meter:
        first = a_mebibyte()
        meter.cap_bytes = 2 * MIB
        second = first + 1
        meter.cap_bytes = MIB
        first.add_(1)  # more than the cap is alive, but this allocates nothing
        with pytest.raises(torch.OutOfMemoryError):
            second + 1


def test_memory_outside_of_the_meter_can_grow_again():
    with MemoryMeter(cap_bytes=MIB):
        tensor = a_mebibyte()
    tensor.untyped_storage().resize_(3 * MIB)
    assert tensor.untyped_storage().size() == 3 * MIB


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


def test_tensors_without_data_take_no_memory():
    with MemoryMeter(cap_bytes=MIB) as meter:
        with FakeTensorMode():
            torch.ones(3 * MIB) * 2
        assert (meter.live_bytes, meter.peak_bytes) == (0, 0)


def test_what_a_collective_returns_is_counted_and_does_not_fail_once_peers_have_matched_it():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with MemoryMeter(cap_bytes=MIB) as meter:
            mine = a_mebibyte()
            sums = torch.ops._c10d_functional.all_reduce(mine, "sum", dist.group.WORLD.group_name)
            torch.ops._c10d_functional.wait_tensor(sums)
            assert meter.live_bytes == mine.nbytes + sums.nbytes == 2 * MIB
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(1)
    finally:
        dist.destroy_process_group()
