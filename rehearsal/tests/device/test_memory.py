"""Memory is counted to the byte and runs out where a card's memory would."""

import ctypes
import os
import resource
from contextlib import nullcontext

import pytest
import torch

from gpu_rehearsal.device import set_memory, used_memory
from tests.processes import on_null_device

MIB, GIB = 2**20, 2**30
SEGMENT = 20 * MIB
"""The allocator reserves this much for 1 to 10 MiB."""

EXPANDABLE = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def use(expandable: bool) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"  # read when CUDA is initialized


def counters() -> tuple[int, int, int]:
    """Return the bytes allocated, reserved and used on the card."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free


@pytest.mark.smoke
@on_null_device()
def test_allocated_and_reserved_bytes_follow_the_allocators_rounding() -> None:
    held, rows = [], []
    for size in (1, 513, 3 * MIB, 700 * MIB):
        held.append(take(size))
        rows.append(counters())
    held.clear()
    torch.cuda.empty_cache()
    allocated, reserved, gone = zip(*rows, counters(), strict=True)
    assert allocated == (512, 1536, 1536 + 3 * MIB, 1536 + 703 * MIB, 0)
    assert reserved == gone == (2 * MIB, 2 * MIB, 2 * MIB + SEGMENT, 722 * MIB, 0)


@EXPANDABLE
@on_null_device()
def test_allocator_raises_its_error_at_the_limit_of_the_card(expandable: bool) -> None:
    use(expandable)
    held = [take(GIB) for _ in range(80)]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        take(GIB)
    stats = torch.cuda.memory_stats()
    assert (torch.cuda.memory_allocated(), stats["num_ooms"], stats["num_alloc_retries"]) == (len(held) * GIB, 1, 1)
    text = "Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 0 bytes is free."
    assert text in str(raised.value)


@on_null_device()
def test_address_space_limit_of_the_machine_is_not_reported_as_the_cards() -> None:
    take(MIB)
    resource.setrlimit(resource.RLIMIT_AS, (30 * GIB, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match=r"this machine gives a null device no more addresses"):
        take(40 * GIB)


@EXPANDABLE
@on_null_device()
def test_only_expandable_segments_use_fragmented_memory(expandable: bool) -> None:
    """Every second GiB of a segment of 64 GiB is used, and 16 GiB are free."""
    use(expandable)
    take(64 * GIB)
    held = [take(GIB) for _ in range(64)]
    del held[::2]
    with nullcontext() if expandable else pytest.raises(torch.OutOfMemoryError):
        take(40 * GIB)


@on_null_device()
def test_pinned_memory_is_tracked_and_can_run_out() -> None:
    host = torch.arange(3_000_000).pin_memory()
    assert torch.equal(host.to("cuda", non_blocking=True).cpu(), host)
    assert (host.is_pinned(), torch.ones(1).is_pinned()) == (True, False)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] > 0
    set_memory(0, pinned=True)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        torch.empty(10 * MIB).pin_memory()


@on_null_device()
def test_managed_memory_counts_as_the_hosts() -> None:
    before, at, attributes = used_memory(), ctypes.c_void_p(), (ctypes.c_int * 22)()
    cuda = ctypes.CDLL(None)
    assert cuda.cudaMallocManaged(ctypes.byref(at), ctypes.c_size_t(2**40), 1) == 0
    assert cuda.cudaPointerGetAttributes(attributes, at) == 0
    managed = 3
    assert (used_memory() - before, used_memory(managed=True), attributes[0]) == (0, 2**40, managed)


@pytest.mark.smoke
@on_null_device()
def test_copies_are_exact_and_other_memory_reads_as_zero() -> None:
    assert int(take(GIB)[-1]) == 0
    host = torch.randint(1, 255, (5 * MIB + 3,), dtype=torch.uint8)
    card = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    card[7 : 7 + host.numel()] = host  # across an odd boundary
    again = card.clone().cpu()
    assert torch.equal(again[7 : 7 + host.numel()], host)
    assert int(again[6]) == int(again[7 + host.numel()]) == 0
    card.copy_(torch.zeros(8 * MIB, dtype=torch.uint8))
    assert not card.cpu().any()


@on_null_device()
def test_card_memory_uses_no_host_memory() -> None:
    def now() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    torch.zeros(1, device="cuda").clone()
    before = now()
    held = torch.zeros(20 * GIB, dtype=torch.uint8, device="cuda")
    assert held.clone().numel() == held.numel()
    assert now() - before < 64 * MIB
