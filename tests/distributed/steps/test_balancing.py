"""Samples of a step are dealt to the ranks: each runs once, in its step, and ranks have similar work."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.distributed.count_collectives import CountCollectives
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.data.balancing import Balancer
from torchtune_adaptive.data.loading import CheckedDataset
from torchtune_adaptive.data.samples import INDEX, TEXT

EACH = 6
STEPS = 4


class Numbered:
    """Samples of many lengths, with extra fields."""

    def __init__(self, broken: int | None = None) -> None:
        self._broken = broken
        self.read: list[int] = []

    def __len__(self) -> int:
        return STEPS * EACH * dist.get_world_size()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        if index == self._broken:
            raise OSError("bad sector")
        length = length_of(index)
        return {"tokens": [index] * length, "labels": torch.full((length,), index), "number": index}


def length_of(index: int) -> int:
    return random.Random(index).choice([1, 3, 40, 300])


def steps_here(dataset: CheckedDataset) -> Iterator[list[Any]]:
    """Yield the samples of each step as the loader deals them: ranks take turns."""
    ranks = dist.get_world_size()
    for step in range(STEPS):
        yield [dataset[(step * EACH + at) * ranks + dist.get_rank()] for at in range(EACH)]


class Epoch(NamedTuple):
    """A rank's view of an epoch."""

    steps: list[list[tuple[int, int, int]]]
    """Number, tokens and first label of every sample, by step."""
    read: list[int]
    """The samples that the rank has read, in order."""
    collectives: list[int]
    """Number of collectives of each kind."""


def deal() -> Epoch:
    """Collective."""
    numbered = Numbered()
    with CountCollectives() as counted:
        steps = list(Balancer(TEXT, cost=float).balanced(steps_here(CheckedDataset(numbered))))
    assert all(sample[INDEX] == sample["number"] for step in steps for sample in step)
    dealt = [[(s["number"], len(s["tokens"]), int(s["labels"][0])) for s in step] for step in steps]
    return Epoch(dealt, numbered.read, [*counted.seen.values()])


@pytest.mark.smoke("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_is_read_by_its_rank_and_runs_once_in_its_step(ranks: int) -> None:
    """Dealing costs one reduction and one exchange per step, and is deterministic."""
    epochs = run_on_ranks(ranks, deal)
    for rank, epoch in enumerate(epochs):
        assert epoch.read == [*range(rank, STEPS * EACH * ranks, ranks)]
        assert epoch.collectives == [STEPS, STEPS]
        assert [len(samples) for samples in epoch.steps] == [EACH] * STEPS
    for step, of_ranks in enumerate(zip(*(epoch.steps for epoch in epochs), strict=True)):
        samples = sorted(sample for each in of_ranks for sample in each)
        assert samples == [(n, length_of(n), n) for n in range(step * EACH * ranks, (step + 1) * EACH * ranks)]
        tokens = [sum(length for _, length, _ in each) for each in of_ranks]
        assert max(tokens) - min(tokens) <= max(length for _, length, _ in samples)
    assert run_on_ranks(ranks, deal) == epochs


def deal_with(numbered: Numbered) -> None:
    dataset = CheckedDataset(numbered)
    list(Balancer(TEXT, cost=float).balanced(steps_here(dataset)))


BAD = 2 * EACH + 5  # read by rank 1 in the second step


def test_sample_that_one_rank_cannot_read_is_named_and_ends_all_ranks() -> None:
    with pytest.raises(RankFailed, match=rf"sample {BAD} of the dataset cannot be read on rank 1 .*bad sector"):
        run_on_ranks(2, deal_with, Numbered(broken=BAD))
