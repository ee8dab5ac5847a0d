"""A loader whose unit is one step.

    dataset -> sampler (this rank's share, shuffled by epoch) -> batches of samples_per_step samples, uncollated

The plan cuts a step into microbatches, so nothing is collated here. The order is that of torchtune's loaders: a step
holds exactly the samples that `gradient_accumulation_steps` batches of `batch_size` would hold, and an incomplete
last step is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

Sample = TypeVar("Sample")


class StepLoader(Generic[Sample]):
    """Yields this rank's samples of each step of an epoch."""

    def __init__(
        self, dataset: Dataset[Sample], *, samples_per_step: int, rank: int, world_size: int, shuffle: bool
    ) -> None:
        sampler = StatefulDistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self._loader = StatefulDataLoader(
            dataset, batch_size=samples_per_step, sampler=sampler, collate_fn=list, drop_last=True
        )

    def __len__(self) -> int:
        """Whole steps in an epoch."""
        return len(self._loader)

    def epoch(self, epoch: int, steps: int | None = None) -> Iterator[list[Sample]]:
        """The steps of one epoch, at most `steps` of them."""
        self._loader.sampler.set_epoch(epoch)
        return islice(iter(self._loader), steps)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state
