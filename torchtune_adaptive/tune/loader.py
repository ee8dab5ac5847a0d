"""A loader whose unit is one step.

    dataset -> sampler (this rank's share, shuffled by epoch) -> batches of samples_per_step samples, uncollated

The plan cuts a step into microbatches, so nothing is collated here. The order is that of torchtune's loaders: a step
holds exactly the samples that `gradient_accumulation_steps` batches of `batch_size` would hold, and an incomplete
last step is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

Sample = TypeVar("Sample")
Item = TypeVar("Item")


def looking_ahead(steps: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Each step with the one that follows it; None follows the last."""
    nothing: list[Item | None] = [None]
    return pairwise(chain(steps, nothing))  # type: ignore[arg-type]


class StepLoader(Generic[Sample]):
    """Yields this rank's samples of each step; how many a step has may change from epoch to epoch."""

    def __init__(self, dataset: Dataset[Sample], *, rank: int, world_size: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._sampler = StatefulDistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self._loader: StatefulDataLoader | None = None

    @property
    def samples_per_rank(self) -> int:
        """Samples of this rank in an epoch, the same for all ranks."""
        return len(self._sampler)

    def samples_left_per_rank(self, samples_done: int) -> int:
        """What is left of an epoch for each rank after all ranks together have trained on so many samples."""
        return (int(self._sampler.total_size) - samples_done) // int(self._sampler.num_replicas)

    def epoch(self, epoch: int, *, samples_per_step: int, steps: int, samples_done: int = 0) -> Iterator[list[Sample]]:
        """The first `steps` whole steps of an epoch, or of what `samples_done` samples of all ranks have left of it."""
        self._sampler.set_epoch(epoch)
        sampler = self._rest(samples_done) if samples_done else self._sampler
        self._loader = StatefulDataLoader(
            self._dataset, batch_size=samples_per_step, sampler=sampler, collate_fn=list, drop_last=True
        )
        return islice(iter(self._loader), steps)

    def _rest(self, samples_done: int) -> list[int]:
        """This rank's share of the rest of an epoch.

        Ranks take turns through one order of all samples, so what any number of them has done is its beginning, and
        any other number can share what follows.
        """
        ours = self._sampler
        everything = StatefulDistributedSampler(self._dataset, num_replicas=1, rank=0, shuffle=ours.shuffle)
        everything.set_epoch(ours.epoch)
        order = list(everything)
        padded = [*order, *order[: ours.total_size - len(order)]]  # as the sampler pads, for equal shares
        return padded[samples_done + ours.rank :: ours.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """The position in the last epoch, for torchtune's recipes; ours do not read it."""
        return {} if self._loader is None else dict(self._loader.state_dict())
