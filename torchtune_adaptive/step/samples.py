"""What a step asks about its samples, which it never looks into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True)
class SampleKind(Generic[Sample]):
    """How long a sample is, and what may take its place."""

    length_of: Callable[[Sample], int]
    """The tokens of a sample, which limits by length go by."""
    stand_in: Callable[[Sample], Sample]
    """The smallest version of a sample that still passes through the whole model, say its first two tokens: if the very
    first microbatch fails, a pass over it keeps the other ranks company."""
    row_lengths_of: Callable[[Sample], Sequence[int]] | None = None
    """The tokens of each row of a sample that is several, as a pair of answers is. Its length is then that of the
    longest, and limits count samples all the same."""
    filler: Callable[[Sample], Sample] | None = None
    """A stand-in without any label, run where a rank has fewer samples than the others have microbatches."""
    padded: bool = True
    """Whether rows are padded to the longest of their microbatch. Otherwise samples follow one another in a single row,
    and under a limit by length all their tokens count, whichever of them share a microbatch."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """A sample without tokens counts as one of padding: it takes room too, and no limit divides by its length."""
        return [max(1, self.length_of(sample)) for sample in samples]

    def row_lengths(self, samples: Sequence[Sample]) -> list[Sequence[int]] | None:
        """The tokens of every row; None where each sample is one."""
        return None if self.row_lengths_of is None else [*map(self.row_lengths_of, samples)]
