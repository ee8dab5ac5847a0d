"""Settings of a rehearsed process, and limits of ranks and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_rehearsal.errors import CannotRehearse

MOST_RANKS = 64
"""Ranks that run together. Each is a process of 0.1 GiB or more."""
MOST_UNASKED = 16
"""Ranks that run together without the option."""
MOST_SIMULATED = 100_000
"""Ranks of a job. All but those that run are only numbers, but scripts make lists of them."""
ONE_MACHINE = 8
"""The number of GPUs of a machine; with more ranks, there are several machines."""
CONTEXT_BYTES, CONTEXT_AND_NCCL_BYTES = 13 * 2**30 // 10, 3 * 2**30
"""Memory of a GPU that tensors cannot use: of the CUDA context and libraries and, with several ranks, of NCCL."""


def overhead_of(ranks: int) -> int:
    """Return the bytes of a GPU that tensors cannot use."""
    return CONTEXT_AND_NCCL_BYTES if ranks > 1 else CONTEXT_BYTES


class RankSettings(NamedTuple):
    """Settings of the rehearsed process."""

    rank: int = 0
    """The rank that runs, or the last of those that run together."""
    ranks: int | None = None
    """By default, the number that the launcher in the command starts."""
    memory: int = 0
    """Bytes of a GPU."""
    overhead_bytes: int | None = None
    steps: int = 0
    """Steps to run; 0: all."""
    devices: int | None = None
    """GPUs that the process sees; by default one per rank of the machine."""
    together: Sequence[int] | None = None
    """The ranks that run as processes and exchange messages; empty: all; None: only `rank` runs."""
    skew: float = 1
    """Tokens that a router sends to each expert that it uses, as a multiple of the average."""
    fixed: Mapping[str, float] = {}
    """Values that are read at `file:line`."""
    kept: Sequence[str] | None = None
    """Other unknown values are random, except at these places (`file:line`); None: all are the usual ones."""
    largest: Sequence[str] = ()
    """Places (`file:line`) whose unknown values are the largest within bounds, instead of the usual ones."""
    apart: int | None = None
    """The only rank whose unknown values are random."""
    not_finite: bool = False
    """True: unknown floats are NaN."""
    follows: bool = False
    """True: find out whether the numbers that the script reads decide anything."""
    timeout: float | None = None
    """The seconds after which the process is killed."""
    without_data: bool = False
    """True: a recipe gets stand-ins for its weights, tokenizer and data."""

    def running(self, ranks: int) -> Sequence[int]:
        """Return the ranks that run, if there are this many in total."""
        return [self.rank] if self.together is None else self.together or range(ranks)

    def devices_of(self, ranks: int) -> int:
        """Return how many GPUs each of this many ranks sees."""
        return self.devices or min(ranks, ONE_MACHINE)

    def memory_of_rank(self, ranks: int) -> dict[str, int]:
        """Return the memory that a rank can use, and the overhead, if there are this many ranks."""
        overhead = overhead_of(ranks) if self.overhead_bytes is None else self.overhead_bytes
        if ranks > MOST_SIMULATED:
            raise CannotRehearse(f"{ranks:,} ranks are too many: rehearse up to {MOST_SIMULATED:,}")
        if not 0 <= self.rank < ranks:
            raise CannotRehearse(f"there is no rank {self.rank}: the last of {ranks} is {ranks - 1}")
        if (running := len(self.running(ranks))) > MOST_RANKS:
            raise CannotRehearse(
                f"{running} ranks cannot run together: name up to {MOST_RANKS}, as in --together 0,8,16"
            )
        if self.memory <= overhead:
            raise CannotRehearse(
                f"the GPU has {self.memory / 2**30:.3g} GiB, of which {overhead / 2**30:.3g} GiB are not for tensors "
                "(--memory-overhead): raise --memory, or lower --memory-overhead"
            )
        return {"usable_bytes": self.memory - overhead, "overhead_bytes": overhead, "ranks": ranks}
