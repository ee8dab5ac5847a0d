"""Stop a run between two epochs or in a step, like a user's job queue."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune.training.checkpointing import _checkpointer

from tests.ranks import PATIENCE
from torchtune_adaptive.tune import distributed


class _Stopped(Exception):
    pass


@contextmanager
def stopped_before_epoch(epoch: int) -> Iterator[None]:
    """Collective: stop our recipe or the stock one where this epoch begins, once its checkpoint is on disk."""
    being_saved = []

    def save(*args: Any, **kwargs: Any) -> Any:
        being_saved.append(async_save(*args, **kwargs))
        return being_saved[-1]

    def begin(sampler: StatefulDistributedSampler, begun: int) -> None:
        if begun == epoch:
            for future in being_saved:
                future.result(timeout=60 * PATIENCE)
            raise _Stopped
        set_epoch(sampler, begun)

    async_save, set_epoch = _checkpointer.async_save, StatefulDistributedSampler.set_epoch
    with (
        mock.patch.object(_checkpointer, "async_save", save),
        mock.patch.object(StatefulDistributedSampler, "set_epoch", begin),
    ):
        try:
            yield
        except _Stopped:
            distributed.leave()
        else:
            raise AssertionError(f"the run ended before epoch {epoch}")


def train_until(recipe: Any, runner: Any, stop_before: int | None) -> None:
    """Collective: train our recipe to the end, or until this runner would run step `stop_before`."""
    run = runner.run

    def run_or_stop(samples: Sequence[Any], *, step: int, **options: Any) -> Any:
        if step == stop_before:
            raise _Stopped
        return run(samples, step=step, **options)

    runner.run = run_or_stop
    try:
        recipe.train()
        recipe.cleanup()
    except _Stopped:
        distributed.leave()
    else:
        assert stop_before is None
