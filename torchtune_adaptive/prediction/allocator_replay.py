"""Training steps through the allocator: what stays reserved, and what only fits after flushing its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtune_adaptive.prediction.allocator import Block, CachingAllocator
from torchtune_adaptive.prediction.recorder import Recording

STEPS_UNTIL_STEADY = 3
"""Steps until nothing new happens: the first makes the optimizer's state, which is in the way of the second; the third
is like all that follow."""


@dataclass(frozen=True)
class Reserved:
    peak_bytes: int
    retries: int
    """Times that the cache had to be flushed to go on."""


class AllocatorRun:
    """A run that goes through the allocator step by step."""

    def __init__(
        self, program: Recording, capacity_bytes: int | None = None, *, expandable_segments: bool = False
    ) -> None:
        self._program = program
        self._allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
        self._live: dict[int, Block] = {}
        self._started = False

    @property
    def reserved(self) -> Reserved:
        return Reserved(self._allocator.peak_reserved_bytes, self._allocator.retries)

    def step(self, sizes: Sequence[int]) -> bool:
        """Plays one step with these sizes; False where memory runs out."""
        phases, update, end = self._program.phases, self._program.update_start, len(sizes)
        weights, state = phases["weights"], phases["optimizer state"]
        if self._started:
            spans = [(state, end)]
        else:
            # The recording makes the optimizer's state right after the weights. A run makes it in its first update,
            # when gradients lie in between and activations have left segments to fill.
            spans = [(0, weights), (state, update), (weights, state), (update, end)]
            self._started = True
        return all(self._play(sizes, start, stop, resident=state) for start, stop in spans)

    def _play(self, sizes: Sequence[int], start: int, stop: int, resident: int) -> bool:
        if start == resident:  # only a forward starts there: the other spans of the first step need what it has left
            self._free_leftovers(resident)
        for event in range(start, stop):
            number, size = self._program.of_block[event], sizes[event]
            if size > 0:
                block = self._allocator.allocate(size, self._program.blocks[number].stream)
                if block is None:
                    return False
                self._live[number] = block
            elif number in self._live:
                self._allocator.free(self._live.pop(number))
        return True

    def _free_leftovers(self, resident: int) -> None:
        """What a step leaves is freed by the next."""
        for number in [number for number in self._live if number >= resident]:
            self._allocator.free(self._live.pop(number))


def replay(
    program: Recording,
    sizes: Sequence[int],
    capacity_bytes: int | None = None,
    *,
    expandable_segments: bool = False,
) -> Reserved | None:
    """What the first steps of a run reserve; None where they run out of memory."""
    run = AllocatorRun(program, capacity_bytes, expandable_segments=expandable_segments)
    return run.reserved if all(run.step(sizes) for _ in range(STEPS_UNTIL_STEADY)) else None
