"""Training steps through the allocator: what stays reserved, and what only fits after flushing its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtune_adaptive.prediction.allocator import Block, CachingAllocator
from torchtune_adaptive.prediction.recorder import Recording

STEPS = 3
"""In the first the optimizer gets its state; in the second that is in the way; the third is like all that follow."""


@dataclass(frozen=True)
class Reserved:
    peak_bytes: int
    retries: int
    """Times that the cache had to be flushed to go on."""


def replay(
    program: Recording,
    sizes: Sequence[int],
    capacity_bytes: int | None = None,
    *,
    expandable_segments: bool = False,
) -> Reserved | None:
    """What the first steps of a run reserve; None where they run out of memory."""
    allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
    live: dict[int, Block] = {}
    weights, state, update = program.phases["weights"], program.phases["optimizer state"], program.update_start
    spans = [(0, weights), (state, update), (weights, state), (update, len(sizes))]
    spans += [(state, len(sizes))] * (STEPS - 1)
    for start, end in spans:
        if start == state:
            _free_leftovers(allocator, live, state)
        if not _run(allocator, live, program, sizes, start, end):
            return None
    return Reserved(allocator.peak_reserved_bytes, allocator.retries)


def _run(
    allocator: CachingAllocator, live: dict[int, Block], program: Recording, sizes: Sequence[int], start: int, end: int
) -> bool:
    for event in range(start, end):
        number, size = program.of_block[event], sizes[event]
        if size > 0:
            block = allocator.allocate(size, program.blocks[number].stream)
            if block is None:
                return False
            live[number] = block
        elif number in live:
            allocator.free(live.pop(number))
    return True


def _free_leftovers(allocator: CachingAllocator, live: dict[int, Block], resident: int) -> None:
    """What a step leaves is freed by the next."""
    for number in [number for number in live if number >= resident]:
        allocator.free(live.pop(number))
