"""CUDA's caching allocator, replayed: what it reserves from the device for what a program allocates.

Requests are rounded up to 512 bytes. Each stream has a pool for small blocks and one for large ones. A request takes
the smallest free block that is large enough, and splits it; else it gets a new segment from the device. Neighbours join
when they are free. Segments return to the device only when it has no more: that flush, which waits for the device, is a
retry.

With expandable segments each pool has one segment, of which as much is mapped as was needed: its end grows, so that a
request that is larger than what is free takes only the difference from the device, and flushing returns every whole
page that is free.

Follows CUDACachingAllocator.cpp of torch 2.13 with its default settings but this one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
GRAIN = 512
"""Bytes; sizes are rounded up to this."""
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
OWN_SEGMENT_MULTIPLE = 2 * MIB
ADDRESSES = LARGE_SEGMENT << 36
"""Size of an expandable segment in addresses: whole pages, and more than can ever be mapped."""


class Pool(NamedTuple):
    stream: int
    small: bool

    @property
    def page(self) -> int:
        """What an expandable segment maps at once."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    address: int
    size: int
    pool: Pool
    free: bool = True
    before: Block | None = None
    after: Block | None = None
    mapped: bool = True
    """False for the part of an expandable segment that has addresses, but no memory yet."""


class CachingAllocator:
    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        """Without a capacity, the device never ends."""
        self._capacity_bytes = capacity_bytes
        self._expandable = expandable_segments
        self._free: dict[Pool, list[tuple[int, int, Block]]] = {}  # by size, then address
        self._unmapped: dict[Pool, list[Block]] = {}
        self._next_address = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0

    def allocate(self, wanted_bytes: int, stream: int) -> Block | None:
        """A block; None if not even a flush made room for it."""
        size = max(GRAIN, rounded_up(wanted_bytes, GRAIN))
        pool = Pool(stream, size <= SMALL)
        block = self._take(pool, size) or self._from_device(pool, size)
        if block is None:
            return None
        # The allocator's own rule: what is left of a large block stays with it unless it is more than a small one,
        # since pieces that nothing fits into are fragments.
        rest = block.size - size
        if rest >= GRAIN if pool.small or self._expandable else rest > SMALL:
            self._insert(_cut(block, size))
        block.free = False
        return block

    def free(self, block: Block) -> None:
        block.free = True
        self._insert(self._joined_with_free(block))

    def _take(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough, of those the lowest; one that could grow counts as large."""
        # torch's get_free_block: best fit, where a block at the growing end counts with all that it could grow to. So a
        # request goes into a larger hole first, and the end stays whole for what fits nowhere else.
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size,))
        while self._expandable and at + 1 < len(free) and _room(free[at + 1][2]) < _room(free[at][2]):
            at += 1
        return free.pop(at)[2] if at < len(free) else None

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        taken = self._expand if self._expandable else self._new_segment
        block = taken(pool, size)
        if block is None:  # as cudaMalloc fails: the cache is flushed, and the device asked once more
            self.retries += 1
            self.flush()
            block = taken(pool, size)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment = _segment_bytes(size)
        if not self._reserve(segment):
            return None
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A free block with what is mapped behind it; None, with what could be mapped free, where memory ends."""
        # torch's try_allocate_expandable_block: flushing leaves holes, so what is free may alternate with what is
        # unmapped, and each round maps one hole. What was mapped before memory ended stays so, and the flush finds it.
        block = self._end_of_mapped(pool, size)
        while not block.mapped or block.size < size:
            unmapped = block.after if block.mapped else block
            assert unmapped is not None, "addresses behind a block that was found to have enough of them"
            mapped = self._map(unmapped, size - block.size if block.mapped else size)
            if mapped is None:
                return None
            block = mapped
        self._remove(block)
        return block

    def _end_of_mapped(self, pool: Pool, size: int) -> Block:
        """The lowest free addresses that suffice, of which some are not mapped yet."""
        # torch's find_expandable_block, which also takes what is free right before an unmapped part.
        if pool not in self._unmapped:
            self._unmapped[pool] = [Block(self._next_address, ADDRESSES, pool, mapped=False)]
            self._next_address += ADDRESSES
        starts = (_before_if_free(block) for block in sorted(self._unmapped[pool], key=lambda each: each.address))
        return next(start for start in starts if _free_addresses(start, size) >= size)

    def _map(self, block: Block, wanted: int) -> Block | None:
        """The block, as far as it is wanted, with memory, and joined with what is free around it."""
        size = min(block.size, rounded_up(wanted, block.pool.page))
        if not self._reserve(size):
            return None
        self._unmapped[block.pool].remove(block)
        if size < block.size:
            self._unmapped[block.pool].append(_cut(block, size))
        block.mapped = True
        block = self._joined_with_free(block)
        self._insert(block)
        return block

    def _reserve(self, size: int) -> bool:
        if self._capacity_bytes is not None and self.reserved_bytes + size > self._capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def flush(self) -> None:
        """Returns to the device all segments, or pages, of which no part is in use."""
        for pool, free in self._free.items():
            if self._expandable:
                for _, _, block in tuple(free):
                    self._unmap(block)
                continue
            whole = [block for _, _, block in free if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size for block in whole)
            self._free[pool] = [entry for entry in free if entry[2].before or entry[2].after]

    def _unmap(self, block: Block) -> None:
        # torch's unmap_block: only whole pages can be returned, so the ends of a block that share a page with something
        # in use stay mapped and free. Segments begin on pages, since ADDRESSES is a multiple of both sizes.
        page = block.pool.page
        start, end = rounded_up(block.address, page), (block.address + block.size) // page * page
        if start >= end:
            return
        self._remove(block)
        if start > block.address:
            kept, block = block, _cut(block, start - block.address)
            self._insert(kept)
        if end < block.address + block.size:
            self._insert(_cut(block, end - block.address))
        self.reserved_bytes -= block.size
        block.mapped = False
        unmapped = self._unmapped[block.pool]
        if block.before is not None and not block.before.mapped:
            unmapped.remove(block.before)
            block = _joined(block.before, block)
        if block.after is not None and not block.after.mapped:
            unmapped.remove(block.after)
            block = _joined(block, block.after)
        unmapped.append(block)

    def _joined_with_free(self, block: Block) -> Block:
        """A block, joined with whichever of its neighbours are free."""
        if block.before is not None and block.before.free and block.before.mapped:
            self._remove(block.before)
            block = _joined(block.before, block)
        if block.after is not None and block.after.free and block.after.mapped:
            self._remove(block.after)
            block = _joined(block, block.after)
        return block

    def _insert(self, block: Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.address)))


def _cut(block: Block, size: int) -> Block:
    """Cuts a block to a size; what is left of it."""
    rest = Block(block.address + size, block.size - size, block.pool, True, block, block.after, block.mapped)
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _joined(block: Block, after: Block) -> Block:
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
    return block


def _before_if_free(block: Block) -> Block:
    return block.before if block.before is not None and block.before.free else block


def _free_addresses(start: Block, wanted: int) -> int:
    size = start.size
    following = start.after
    while size < wanted and following is not None and following.free:
        size, following = size + following.size, following.after
    return size


def _room(block: Block) -> int:
    """What a block could grow to."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def _segment_bytes(size: int) -> int:
    # torch's get_allocation_size: small requests share 2 MiB, those below 10 MiB share 20 MiB, and a larger one gets a
    # segment of its own, in steps that let another of nearly its size use it again.
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT_FROM else rounded_up(size, OWN_SEGMENT_MULTIPLE)


def rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
