"""The loader of steps, beside torchtune's own loader of batches."""

from __future__ import annotations

from itertools import chain

import pytest
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.tune.loader import StepLoader

SAMPLES, BATCH_SIZE, ACCUMULATION = 53, 3, 2
SAMPLES_PER_STEP = BATCH_SIZE * ACCUMULATION


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def step_loader(rank: int, world_size: int, *, shuffle: bool, samples: int = SAMPLES) -> StepLoader[int]:
    return StepLoader(Numbers(samples), rank=rank, world_size=world_size, shuffle=shuffle)


def epoch_of(loader: StepLoader[int], epoch: int, steps: int = 1000) -> list[list[int]]:
    return list(loader.epoch(epoch, samples_per_step=SAMPLES_PER_STEP, steps=steps))


def steps_of_torchtune(rank: int, world_size: int, *, shuffle: bool, epoch: int) -> list[list[int]]:
    """The stock recipes' sampler and loader, with the batches of one optimizer step put together."""
    dataset = Numbers(SAMPLES)
    sampler = StatefulDistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
    loader = StatefulDataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=list, drop_last=True)
    sampler.set_epoch(epoch)
    batches = list(loader)
    whole = len(batches) // ACCUMULATION
    return [list(chain(*batches[step * ACCUMULATION : (step + 1) * ACCUMULATION])) for step in range(whole)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_a_step_holds_the_samples_that_torchtune_would_accumulate(rank: int, world_size: int, shuffle: bool) -> None:
    ours = step_loader(rank, world_size, shuffle=shuffle)
    for epoch in (0, 1, 2):
        expected = steps_of_torchtune(rank, world_size, shuffle=shuffle, epoch=epoch)
        assert epoch_of(ours, epoch) == expected
        assert ours.samples_per_rank // SAMPLES_PER_STEP == len(expected) > 1


def test_epochs_are_shuffled_differently_and_each_the_same_every_time() -> None:
    ours = step_loader(0, 2, shuffle=True)
    first, second = epoch_of(ours, 0), epoch_of(ours, 1)
    assert first != second
    assert epoch_of(ours, 0) == first
    assert epoch_of(step_loader(0, 2, shuffle=True), 1) == second


def test_ranks_share_the_samples_without_a_repeat() -> None:
    loaders = [step_loader(rank, 2, shuffle=True) for rank in range(2)]
    seen = [sample for loader in loaders for step in epoch_of(loader, 0) for sample in step]
    assert len(seen) == len(set(seen)) == 2 * (loaders[0].samples_per_rank // SAMPLES_PER_STEP) * SAMPLES_PER_STEP


def test_an_epoch_cut_short_does_not_shift_the_next() -> None:
    cut, whole = step_loader(0, 2, shuffle=True), step_loader(0, 2, shuffle=True)
    assert epoch_of(cut, 0, steps=2) == epoch_of(whole, 0)[:2]
    assert epoch_of(cut, 1) == epoch_of(whole, 1)


def test_an_incomplete_last_step_is_dropped() -> None:
    assert len(epoch_of(step_loader(0, 1, shuffle=False, samples=2 * SAMPLES_PER_STEP - 1), 0)) == 1
    assert epoch_of(step_loader(0, 1, shuffle=False, samples=SAMPLES_PER_STEP - 1), 0) == []


def test_a_step_may_have_another_size_in_every_epoch_and_none_loses_a_sample() -> None:
    loader = step_loader(0, 1, shuffle=True, samples=24)
    for epoch, size in enumerate((2, 4, 8)):
        steps = list(loader.epoch(epoch, samples_per_step=size, steps=1000))
        assert [len(step) for step in steps] == [size] * (24 // size)
        assert sorted(chain(*steps)) == list(range(24))


def test_samples_arrive_as_they_are() -> None:
    step = epoch_of(step_loader(0, 1, shuffle=False), 0)[0]
    assert step == list(range(SAMPLES_PER_STEP))
