"""Memory is counted to the byte and runs out where a card's memory would."""

import ctypes
import os
import resource
from unittest import mock

import pytest
import torch

from tests.null.processes import OnNull
from tests.ranks import RankFailed
from torchtune_adaptive.engine.memory import FRAGMENTATION, CudaMemory
from torchtune_adaptive.null_cuda import set_memory, used_memory

MIB, GIB = 2**20, 2**30
SEGMENT = 20 * MIB
"""The allocator reserves this much for 1 to 10 MiB."""

EXPANDABLE = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def use(expandable: bool) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"  # read when CUDA is initialized


def counted() -> list[tuple[int, int, int]]:
    """Return bytes allocated, reserved and used on the card after each of several allocations."""
    held, rows = [], []
    for size in (1, 513, 3 * MIB, 700 * MIB):
        held.append(take(size))
        free, total = torch.cuda.mem_get_info()
        rows.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free))
    held.clear()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return [*rows, (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free)]


def test_allocated_and_reserved_bytes_follow_the_allocators_rounding(on_null: OnNull) -> None:
    allocated, reserved, gone = zip(*on_null(counted), strict=True)
    assert allocated == (512, 1536, 1536 + 3 * MIB, 1536 + 703 * MIB, 0)
    assert reserved == gone == (2 * MIB, 2 * MIB, 2 * MIB + SEGMENT, 722 * MIB, 0)


def fill() -> tuple[list[torch.Tensor], str]:
    """Allocate blocks of 1 GiB until memory runs out; return them and the error message."""
    held = []
    try:
        while True:
            held.append(take(GIB))
    except torch.OutOfMemoryError as error:
        return held, str(error)


def filled(expandable: bool) -> tuple[int, str, int, int, int]:
    use(expandable)
    held, text = fill()
    stats = torch.cuda.memory_stats()
    return len(held), text, torch.cuda.memory_allocated(), stats["num_ooms"], stats["num_alloc_retries"]


@EXPANDABLE
def test_allocator_raises_its_error_at_the_limit_of_the_card(on_null: OnNull, expandable: bool) -> None:
    blocks, text, allocated, errors, retries = on_null(filled, expandable)
    assert (blocks, allocated, errors) == (80, 80 * GIB, 1)
    assert retries == 1
    assert "Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 0 bytes is free." in text


def without_addresses() -> None:
    take(MIB)
    resource.setrlimit(resource.RLIMIT_AS, (30 * GIB, resource.RLIM_INFINITY))
    take(40 * GIB)


def test_address_space_limit_of_the_machine_is_not_reported_as_the_cards(on_null: OnNull) -> None:
    with pytest.raises(RankFailed, match=r"this machine gives a null device no more addresses"):
        on_null(without_addresses)


def in_pieces(expandable: bool) -> int:
    """Allocate 40 GiB if every second of a segment's 64 GiB is used and 16 GiB are free; return 0 if that fails."""
    use(expandable)
    take(64 * GIB)
    held = [take(GIB) for _ in range(64)]
    del held[::2]
    try:
        return take(40 * GIB).numel()
    except torch.OutOfMemoryError:
        return 0


@EXPANDABLE
def test_only_expandable_segments_use_fragmented_memory(on_null: OnNull, expandable: bool) -> None:
    assert on_null(in_pieces, expandable) == (40 * GIB if expandable else 0)


def under_a_fraction(expandable: bool) -> tuple[str, int]:
    use(expandable)
    torch.cuda.set_per_process_memory_fraction(0.25)
    held = take(15 * GIB)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        take(6 * GIB)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return str(raised.value), held.numel() + take(60 * GIB).numel()


@EXPANDABLE
def test_memory_fraction_is_enforced_and_lifted(on_null: OnNull, expandable: bool) -> None:
    text, allocated = on_null(under_a_fraction, expandable)
    assert "20.00 GiB allowed" in text
    assert allocated == 75 * GIB


def pinned() -> tuple[bool, bool, bool, bool, str]:
    host = torch.arange(3_000_000).pin_memory()
    same = torch.equal(host.to("cuda", non_blocking=True).cpu(), host)
    set_memory(0, pinned=True)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10 * MIB).pin_memory()
    return (
        host.is_pinned(),
        torch.ones(1).is_pinned(),
        same,
        torch.cuda.host_memory_stats()["num_host_alloc"] > 0,
        str(raised.value),
    )


def test_pinned_memory_is_tracked_and_can_run_out(on_null: OnNull) -> None:
    is_pinned, other, same, counted, text = on_null(pinned)
    assert (is_pinned, other, same, counted) == (True, False, True, True)
    assert "CUDA error: out of memory" in text


def managed() -> tuple[int, int, int]:
    """What managed memory takes of the card and of the host, and its kind as CUDA reports it."""
    before, at, attributes = used_memory(), ctypes.c_void_p(), (ctypes.c_int * 22)()
    cuda = ctypes.CDLL(None)
    assert cuda.cudaMallocManaged(ctypes.byref(at), ctypes.c_size_t(2**40), 1) == 0
    assert cuda.cudaPointerGetAttributes(attributes, at) == 0
    return used_memory() - before, used_memory(managed=True), attributes[0]


def test_managed_memory_counts_as_the_hosts(on_null: OnNull) -> None:
    assert on_null(managed) == (0, 2**40, 3)


def copies() -> tuple[int, int, bool, bool]:
    """Return values read back: untouched memory, after a copy on the card, across an odd boundary, and zeros over
    ones.
    """
    untouched = int(take(GIB)[-1])
    host = torch.randint(1, 255, (5 * MIB + 3,), dtype=torch.uint8)
    card = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    card[7 : 7 + host.numel()] = host
    again = card.clone().cpu()
    edges = int(again[6]) + int(again[7 + host.numel()])
    card.copy_(torch.zeros(8 * MIB, dtype=torch.uint8))
    return untouched, edges, torch.equal(again[7 : 7 + host.numel()], host), bool(card.cpu().any())


def resident() -> int:
    """Return the host memory used by 40 GiB on the card, copied and set to zero."""

    def now() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    torch.zeros(1, device="cuda").clone()
    before = now()
    held = torch.zeros(20 * GIB, dtype=torch.uint8, device="cuda")
    other = held.clone()
    assert other.numel() == held.numel()
    return now() - before


def test_copies_are_exact_and_other_memory_reads_as_zero(on_null: OnNull) -> None:
    assert on_null(copies) == (0, 0, True, False)


def test_card_memory_uses_no_host_memory(on_null: OnNull) -> None:
    assert on_null(resident) < 64 * MIB


def beside_an_engine_of_this_process() -> list[tuple[int, int]]:
    """Read memory as TRL's colocated vLLM changes it: its pool sleeps, wakes up for a generation, and sleeps again.

    vLLM allocates weights and caches in a pool of torch. When it sleeps, it unmaps the memory, but torch counts it on.
    Return each time the room between peak and budget, and the memory that is free while the engine is awake.
    """
    in_use, engine, libraries = 4 * GIB, 30 * GIB, 2 * GIB
    pool, held = torch.cuda.MemPool(), [take(in_use)]
    with torch.cuda.use_mem_pool(pool):
        held.append(take(engine))
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == in_use + engine
    memory, (_, total) = CudaMemory(), torch.cuda.mem_get_info()
    free_awake, rooms = total - in_use - engine - libraries, []
    for free in (free_awake + engine, free_awake, free_awake + engine):
        with mock.patch("torch.cuda.mem_get_info", return_value=(free, total)):
            rooms.append((memory.budget_bytes - memory.peak_bytes, free_awake))
    return rooms


def test_room_beside_a_sleeping_engine_of_this_process_is_that_beside_the_awake_one(on_null: OnNull) -> None:
    for room, free_awake in on_null(beside_an_engine_of_this_process):
        assert 0.9 * free_awake < room <= free_awake


def beside_an_engine() -> list[int]:
    """Return the budget before another process takes 30 GiB, while it holds them, and after it has released 20."""
    memory, (free, total) = CudaMemory(), torch.cuda.mem_get_info()
    held, budgets = take(4 * GIB), []
    for others in (0, 30 * GIB, 10 * GIB):
        with mock.patch("torch.cuda.mem_get_info", return_value=(free - torch.cuda.memory_reserved() - others, total)):
            budgets.append(memory.budget_bytes)
    assert held.numel() == 4 * GIB
    return budgets


def test_budget_counts_the_most_memory_that_another_process_has_held(on_null: OnNull) -> None:
    before, most, after = on_null(beside_an_engine)
    assert before == int(80 * GIB * (1 - FRAGMENTATION))
    assert most == after == int(50 * GIB * (1 - FRAGMENTATION))
