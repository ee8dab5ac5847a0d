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
Step = TypeVar("Step")


def looking_ahead(steps: Iterable[Step]) -> Iterator[tuple[Step, Step | None]]:
    """Each step with the one that follows it; None follows the last."""
    nothing: list[Step | None] = [None]
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

    def epoch(self, epoch: int, *, samples_per_step: int, steps: int) -> Iterator[list[Sample]]:
        """The first `steps` whole steps of an epoch."""
        self._sampler.set_epoch(epoch)
        self._loader = StatefulDataLoader(
            self._dataset, batch_size=samples_per_step, sampler=self._sampler, collate_fn=list, drop_last=True
        )
        return islice(iter(self._loader), steps)

    def state_dict(self) -> dict[str, Any]:
        """Where the last epoch has come to, for torchtune's recipes; ours begin with a whole epoch."""
        return {} if self._loader is None else dict(self._loader.state_dict())
