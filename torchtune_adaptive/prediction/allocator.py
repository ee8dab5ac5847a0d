"""CUDA's caching allocator, replayed: what it reserves from the device for what a program allocates.

Requests are rounded up to 512 bytes. Each stream has a pool for small blocks and one for large ones. A request takes
the smallest free block that is large enough, and splits it; else it gets a new segment from the device. Neighbours join
when they are free. Segments return to the device only when it has no more: that flush, which waits for the device, is a
retry. Follows CUDACachingAllocator.cpp of torch 2.13 with its default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
GRAIN = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
OWN_SEGMENT_MULTIPLE = 2 * MIB


class Pool(NamedTuple):
    stream: int
    small: bool


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    address: int
    size: int
    pool: Pool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Without a capacity, the device never ends."""
        self._capacity_bytes = capacity_bytes
        self._free: dict[Pool, list[tuple[int, int, Block]]] = {}  # by size, then address
        self._next_address = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0

    def allocate(self, wanted_bytes: int, stream: int) -> Block | None:
        """A block; None if not even a flush made room for it."""
        size = max(GRAIN, _rounded_up(wanted_bytes, GRAIN))
        pool = Pool(stream, size <= SMALL)
        block = self._take(pool, size) or self._new_segment(pool, size)
        if block is None:
            return None
        rest = block.size - size
        if rest >= GRAIN if pool.small else rest > SMALL:
            self._split(block, size)
        block.free = False
        return block

    def free(self, block: Block) -> None:
        block.free = True
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = self._joined(block, block.after)
        self._insert(block)

    def _take(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough, of those the lowest."""
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size,))
        return free.pop(at)[2] if at < len(free) else None

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment = _segment_bytes(size)
        if not self._has_room(segment):
            self.retries += 1
            self._flush()
            if not self._has_room(segment):
                return None
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _has_room(self, segment: int) -> bool:
        return self._capacity_bytes is None or self.reserved_bytes + segment <= self._capacity_bytes

    def _flush(self) -> None:
        """Returns all segments to the device of which no part is in use."""
        for pool, free in self._free.items():
            whole = [block for _, _, block in free if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size for block in whole)
            self._free[pool] = [entry for entry in free if entry[2].before or entry[2].after]

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._insert(rest)

    def _joined(self, block: Block, after: Block) -> Block:
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block
        return block

    def _insert(self, block: Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.address)))


def _segment_bytes(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT_FROM else _rounded_up(size, OWN_SEGMENT_MULTIPLE)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
