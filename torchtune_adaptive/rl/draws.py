"""Random numbers for stages that sample: they belong to a sample of a step, and not to the microbatch that it is in.

A generator that the rows of a microbatch share gives a row other numbers whenever the split changes: after a recovery,
under another limit, on another number of ranks. So each sample has a generator of its own, on the host, and the device
only compares: any device sees the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor


def draws(seed: int, step: int, samples: Sequence[int], each: int, *, stage: str = "") -> Tensor:
    """A row for each sample, of so many numbers from 0 up to 1, on the host.

    They depend on the seed, the stage, the step and the sample's own number, which has to be the one that it has among
    the samples of all ranks. Asking for more of them does not change the first ones.
    """
    # Not torch's generator: on the host it keeps 32 bits of a seed, so two samples in a long run would share theirs.
    generators = (Random(repr((int(seed), stage, int(step), int(sample)))) for sample in samples)
    rows = [[generator.random() for _ in range(each)] for generator in generators]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), each)


def choose(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """One choice a row: the first whose cumulated probability exceeds the number that was drawn for the row.

    Rows need not sum to one. What has no probability is never chosen.
    """
    cumulated = probabilities.double().cumsum(-1)
    wanted = drawn.to(cumulated.device)[..., None] * cumulated[..., -1:]
    found = torch.searchsorted(cumulated, wanted, right=True)[..., 0]
    # A number next to 1 may round up to the total, which nothing exceeds: then it is the last that adds to it.
    last = (cumulated < cumulated[..., -1:]).sum(-1)
    return torch.minimum(found, last)
