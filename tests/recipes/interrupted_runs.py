"""Stop a run in a step, like a user's job queue."""

from collections.abc import Sequence
from typing import Any

from torchtune_adaptive.tune import distributed


class _Stopped(Exception):
    pass


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
