"""What CudaMemory makes of what torch.cuda says; no GPU is needed to check that."""

from dataclasses import dataclass

import pytest
import torch

from torchtune_adaptive.engine.memory import FRAGMENTATION, CudaMemory
from torchtune_adaptive.text import parse_size

GIB = 2**30


@dataclass
class Gpu:
    """An 80 GiB GPU on which this process has reserved 10 GiB and another one holds 20."""

    fraction: float = 1.0
    total: int = 80 * GIB
    reserved: int = 10 * GIB
    others: int = 20 * GIB
    peak: int = 7 * GIB
    retries: int = 2

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def set_fraction(fraction: float, device: object = None) -> None:
            self.fraction = fraction

        def reset_peak(device: object = None) -> None:
            self.peak = 5 * GIB

        fakes = {
            "mem_get_info": lambda device=None: (self.total - self.reserved - self.others, self.total),
            "memory_reserved": lambda device=None: self.reserved,
            "max_memory_reserved": lambda device=None: self.reserved,
            "max_memory_allocated": lambda device=None: self.peak,
            "memory_stats": lambda device=None: {"num_alloc_retries": self.retries},
            "get_per_process_memory_fraction": lambda device=None: self.fraction,
            "set_per_process_memory_fraction": set_fraction,
            "reset_peak_memory_stats": reset_peak,
        }
        for name, fake in fakes.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    gpu.install(monkeypatch)
    return gpu


def test_the_budget_is_what_other_processes_leave_less_a_margin(gpu: Gpu):
    assert CudaMemory().budget_bytes == int(60 * GIB * (1 - FRAGMENTATION))
    gpu.others = 0
    assert CudaMemory().budget_bytes == int(80 * GIB * (1 - FRAGMENTATION))


@pytest.mark.parametrize("limit", ["24GiB", 0.3])
def test_a_limit_below_that_is_the_budget_and_is_enforced_by_the_allocator(gpu: Gpu, limit: object):
    memory = CudaMemory(parse_size(limit, "adaptive.memory_limit"))
    assert gpu.fraction == pytest.approx(0.3)
    assert memory.budget_bytes == pytest.approx(24 * GIB * (1 - FRAGMENTATION))


def test_a_limit_above_that_adds_nothing(gpu: Gpu):
    assert CudaMemory(parse_size("70GiB", "key")).budget_bytes == CudaMemory().budget_bytes


def test_fullness_is_the_share_that_the_allocator_took_of_what_it_may_take(gpu: Gpu):
    assert CudaMemory().fullness == pytest.approx(10 / 60)
    assert CudaMemory(parse_size("20GiB", "key")).fullness == pytest.approx(10 / 20)


def test_a_limit_is_suspended_and_comes_back_also_after_an_error(gpu: Gpu):
    seen = []

    def run_out_of_memory() -> None:
        with CudaMemory(parse_size("24GiB", "key")).unlimited():
            seen.append(gpu.fraction)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory()
    assert seen == [1.0]
    assert gpu.fraction == pytest.approx(0.3)


def test_peak_and_retries_are_those_of_the_allocator(gpu: Gpu):
    memory = CudaMemory()
    assert (memory.peak_bytes, memory.retries) == (7 * GIB, 2)
    memory.reset_peak()
    assert memory.peak_bytes == 5 * GIB
