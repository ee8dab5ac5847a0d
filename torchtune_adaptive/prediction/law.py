"""What a step allocates for any rows and tokens, from recordings of a few.

The size of every block is affine in rows and in rows × tokens, so what is alive at any point of the program is too, and
the peak is the maximum of as many affine functions as there are points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from torchtune_adaptive.errors import PredictionError, Remedy
from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.prediction.allocator import GRAIN, rounded_up
from torchtune_adaptive.prediction.recorder import Recording


@dataclass(frozen=True, eq=False)
class MemoryLaw:
    """A recording whose sizes are functions of rows and tokens."""

    program: Recording
    """One of the recordings: the order of events, which is the same in all of them."""
    coefficients: Tensor
    """Bytes of each event per unit of 1 and rows, each alone and times tokens (and tokens², where that was fitted)."""
    tokens_multiple: int
    """Tokens are rounded up to this: what cuts sequences into chunks makes them of one length only then."""
    caches: bool
    """Whether memory goes through a caching allocator, as on a GPU."""

    def sizes(self, rows: int, tokens: int) -> Tensor:
        """Bytes that each event allocates, or minus what it frees, before the allocator rounds them."""
        degree = len(self.coefficients) // 2 - 1
        units = units_of(rows, self.rounded_up(tokens), degree)
        return (units @ self.coefficients).round().to(torch.int64)

    def rounded_up(self, tokens: int) -> int:
        return rounded_up(tokens, self.tokens_multiple)

    def peak(self, rows: int, tokens: int) -> Peak:
        """The most that is alive at once in each phase."""
        return peak_of(self.program.phases, self.sizes(rows, tokens), caches=self.caches)


def fit_law(recordings: Mapping[tuple[int, int], Recording], *, tokens_multiple: int, caches: bool) -> MemoryLaw:
    """The law through recordings of two numbers of rows at two lengths, or at three, by (rows, tokens)."""
    _check_alike(recordings)
    first = next(iter(recordings.values()))
    degree = len(recordings) // 2 - 1
    units = torch.stack([units_of(rows, tokens, degree) for rows, tokens in recordings])
    sizes = torch.stack([sizes_of(recording).double() for recording in recordings.values()])
    return MemoryLaw(first, torch.linalg.solve(units, sizes), tokens_multiple, caches)


def sizes_of(recording: Recording) -> Tensor:
    return torch.frombuffer(recording.bytes_change, dtype=torch.int64)


def peak_of(phases: Mapping[str, int], sizes: Tensor, *, caches: bool) -> Peak:
    grain_bytes = GRAIN if caches else 1
    rounded = (sizes.abs() + grain_bytes - 1) // grain_bytes * grain_bytes * sizes.sign()
    alive = rounded.cumsum(0)
    ends = [0, *phases.values()]
    spans = zip(phases, pairwise(ends), strict=True)
    return Peak({phase: int(alive[start:end].max()) for phase, (start, end) in spans if end > start}, fits=True)


def grows_faster_than_tokens(recordings: Mapping[tuple[int, int], Recording]) -> bool:
    """Whether a row of twice the length makes any block more than twice as large, as attention without a kernel does.

    Takes two numbers of rows at a length and at twice that, in ascending order: of what a further row adds, a part that
    does not depend on the length would only make it less than twice.
    """
    _check_alike(recordings)
    short, short_and_row, long, long_and_row = (sizes_of(recording) for recording in recordings.values())
    of_short, of_long = (short_and_row - short).abs(), (long_and_row - long).abs()
    return bool((of_long > 2.02 * of_short + GRAIN).any())


def units_of(rows: int, tokens: int, degree: int) -> Tensor:
    """1 and rows, each alone and times tokens, tokens² up to the degree."""
    return torch.tensor([x * tokens**power for power in range(degree + 1) for x in (1, rows)], dtype=torch.float64)


def _check_alike(recordings: Mapping[tuple[int, int], Recording]) -> None:
    """Refuses recordings of different programs."""
    first, *others = recordings.values()
    for (rows, tokens), other in zip(list(recordings)[1:], others, strict=True):
        what = f"{rows} rows of {tokens} tokens"
        for index, (ours, theirs) in enumerate(zip(_steps(first), _steps(other), strict=False)):
            if ours != theirs:
                where = f"{first.blocks[ours[0]].op} and {other.blocks[theirs[0]].op} at event {index}"
                raise _not_alike(what, where)
        if len(first.of_block) != len(other.of_block):
            raise _not_alike(what, f"{len(first.of_block)} and {len(other.of_block)} events")


def _steps(recording: Recording) -> zip[tuple[int, bool]]:
    return zip(recording.of_block, (change > 0 for change in recording.bytes_change), strict=True)


def _not_alike(what: str, where: str) -> PredictionError:
    return PredictionError(
        f"the step runs other operations for {what} than for other sizes ({where}), so its memory cannot be predicted: "
        "the operations of model and loss must not depend on the size of a microbatch",
        Remedy.MEASURE,
    )
