"""The replay of CUDA's caching allocator, rule by rule."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.prediction.allocator import MIB, CachingAllocator
from torchtune_adaptive.prediction.allocator_replay import replay
from torchtune_adaptive.prediction.recorder import Allocation, Recording

KIB = 1024


def allocated(allocator: CachingAllocator, wanted_bytes: int, stream: int = 0):
    block = allocator.allocate(wanted_bytes, stream)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("wanted_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (101 * MIB, 102 * MIB),
    ],
)
def test_what_a_first_request_takes_from_the_device(wanted_bytes: int, segment_bytes: int) -> None:
    allocator = CachingAllocator()
    allocated(allocator, wanted_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_requests_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    assert [allocated(allocator, wanted).size for wanted in (1, 512, 513)] == [512, 512, 1024]


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocated(allocator, 512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocated(allocator, 512)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_block_is_not_split_for_a_rest_of_up_to_a_mebibyte() -> None:
    allocator = CachingAllocator()
    assert allocated(allocator, 19 * MIB).size == 20 * MIB
    assert allocated(allocator, 5 * MIB).size == 5 * MIB


def test_freed_memory_is_used_again_on_its_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.free(allocated(allocator, 30 * MIB, stream=0))
    allocated(allocator, 30 * MIB, stream=0)
    assert allocator.reserved_bytes == 30 * MIB
    allocated(allocator, 30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB


def test_free_neighbours_join() -> None:
    allocator = CachingAllocator()
    blocks = [allocated(allocator, 4 * MIB) for _ in range(5)]
    for index in (1, 3, 2, 0, 4):
        allocator.free(blocks[index])
    allocated(allocator, 20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocated(allocator, 40 * MIB), allocated(allocator, 30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocated(allocator, 29 * MIB + 512 * KIB).address == small.address
    assert allocated(allocator, 40 * MIB).address == large.address


def test_a_flush_makes_room_and_is_counted() -> None:
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    allocator.free(allocated(allocator, 30 * MIB))
    allocated(allocator, 40 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (40 * MIB, 1)


def test_what_is_in_use_in_part_cannot_be_flushed() -> None:
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    first, second = allocated(allocator, 4 * MIB), allocated(allocator, 16 * MIB)
    allocator.free(second)
    assert first.free is False
    assert allocator.allocate(40 * MIB, 0) is None
    assert allocator.reserved_bytes == 20 * MIB


def expanding(capacity_bytes: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity_bytes, expandable_segments=True)


def test_an_expandable_segment_grows_by_what_is_missing() -> None:
    allocator = expanding()
    allocator.free(allocated(allocator, 30 * MIB))
    assert allocator.reserved_bytes == 40 * MIB
    assert allocated(allocator, 50 * MIB).address == 0
    assert allocator.reserved_bytes == 60 * MIB


def test_an_expandable_segment_is_split_for_any_rest() -> None:
    allocator = expanding()
    assert allocated(allocator, 19 * MIB + 512).size == 19 * MIB + 512
    allocated(allocator, 1 * MIB + 512)
    assert allocator.reserved_bytes == 40 * MIB, "the second reaches over the end of what was mapped"


def test_the_end_of_an_expandable_segment_is_kept_for_what_fits_nowhere_else() -> None:
    allocator = expanding()
    hole, _, end = (allocated(allocator, size * MIB) for size in (15, 2, 12))
    allocator.free(hole)
    allocator.free(end)
    assert allocated(allocator, 12 * MIB).address == hole.address


def test_pages_that_are_free_are_flushed_from_an_expandable_segment() -> None:
    allocator = expanding(capacity_bytes=100 * MIB)
    first, kept = allocated(allocator, 70 * MIB), allocated(allocator, 10 * MIB)
    allocator.free(first)
    assert allocator.reserved_bytes == 80 * MIB
    assert allocated(allocator, 75 * MIB).address > kept.address
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 100 * MIB, "60 MiB in front of the kept block went back"


def test_small_blocks_have_an_expandable_segment_of_their_own() -> None:
    allocator = expanding()
    small, large = allocated(allocator, MIB), allocated(allocator, MIB + 1)
    assert allocator.reserved_bytes == 22 * MIB
    assert small.pool != large.pool


def test_where_memory_ends_an_expandable_segment_does_too() -> None:
    allocator = expanding(capacity_bytes=50 * MIB)
    allocated(allocator, 30 * MIB)
    assert allocator.allocate(30 * MIB, 0) is None
    assert allocated(allocator, 10 * MIB).size == 10 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@given(st.lists(st.tuples(st.integers(1, 60 * MIB), st.integers(0, 2), st.booleans()), max_size=60))
def test_live_blocks_never_overlap_and_all_memory_comes_back(
    expandable: bool, requests: list[tuple[int, int, bool]]
) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    live = []
    for wanted, stream, free_first in requests:
        live.append(allocated(allocator, wanted, stream))
        if free_first:
            allocator.free(live.pop(0))
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(block.size for block in live) <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.flush()
    assert allocator.reserved_bytes == 0


def program(*changes: int, phases: dict[str, int], of_block: list[int]) -> Recording:
    blocks = tuple(Allocation("op", 0) for _ in range(max(of_block) + 1))
    return Recording(blocks, array("q", of_block), array("q", changes), phases)


def test_optimizer_state_comes_after_the_first_backward() -> None:
    """The first step has room where the state will be; from the second on it needs a segment of its own."""
    step = program(
        40 * MIB,
        40 * MIB,
        30 * MIB,
        -30 * MIB,
        of_block=[0, 1, 2, 2],
        phases={"weights": 1, "optimizer state": 2, "forward": 4, "update": 4},
    )
    reserved = replay(step, list(step.bytes_change))
    assert reserved is not None
    assert reserved.peak_bytes == 40 * MIB + 30 * MIB + 40 * MIB
    within = replay(step, list(step.bytes_change), capacity_bytes=110 * MIB)
    assert within is not None
    assert within.retries == 0
    assert replay(step, list(step.bytes_change), capacity_bytes=109 * MIB) is None


def test_what_a_step_leaves_is_freed_by_the_next() -> None:
    step = program(
        MIB,
        MIB,
        30 * MIB,
        of_block=[0, 1, 2],
        phases={"weights": 1, "optimizer state": 2, "forward": 3, "update": 3},
    )
    reserved = replay(step, list(step.bytes_change))
    assert reserved is not None
    assert reserved.peak_bytes == 2 * MIB + 30 * MIB
