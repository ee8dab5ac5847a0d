"""Validation: the loss on all of `dataset_val`, between two steps of training.

Its passes are stages without a backward, with their own limits. So running out of memory here does not change the
limits of training, and the training steps are bitwise equal to those of a run without validation.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.contexts import evaluating
from torchtune_adaptive.data.loading import Data, build_data, with_equal_tiles
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.engine.step import Stages
from torchtune_adaptive.errors import ConfigError, SampleError
from torchtune_adaptive.lifecycle.distributed import Meshes
from torchtune_adaptive.objectives.stages import StagePasses, stages_of

VALIDATION_STAGE = "validation"
"""The name of the stage that computes the loss."""
LOSS = "val_loss"
COUNT = "count"
"""Key of the number that sums are divided by: target tokens or, if a pass returns another number, for example pairs."""


def build_validation(
    passes_on: Callable[[Data], StagePasses],
    settings: Settings,
    training: Data,
    stages: Stages[Sample],
    tokenizer: Any,
    mesh: Meshes,
) -> Validation | None:
    """Collective: build `dataset_val` like `dataset`, without padding if training has none, and the validation on it,
    with the passes that `passes_on` returns. Return None if the config does not request validation."""
    if settings.run_val_every_n_steps is None:
        return None
    config = settings.config.copy()
    config.dataset = config.dataset_val
    own = replace(settings, config=config, shuffle=False, batch_size=1, gradient_accumulation_steps=1)
    with isolated_random_state(), _naming_dataset_val():
        data = build_data(own, tokenizer, mesh, replace(training.kind, padded=True))
    if not training.kind.padded and not data.packed:
        data.remove_padding()
    return Validation(settings, data, passes_on(data), stages.training.recovery)


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Seed the host's random generators within the context, and restore the states of all generators at the end."""
    rng, python, numpy = RngState.capture(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed the GPU's generator
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        rng.restore()
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _naming_dataset_val() -> Iterator[None]:
    """Prefix errors with the key `dataset_val`."""
    try:
        yield
    except (ConfigError, SampleError) as error:
        kind = SampleError if isinstance(error, SampleError) else ConfigError
        raise kind(f"dataset_val: {error}") from error


class Validation:
    """Evaluates the model on `dataset_val`."""

    def __init__(self, settings: Settings, data: Data, passes: StagePasses, recovery: Recovery) -> None:
        """Build the stages. `recovery` is that of training, whose models include those of `passes`."""
        self._every, self._rows, self._data = settings.run_val_every_n_steps or 0, settings.batch_size_val, data
        self.stages = stages_of(passes, data, 1, recovery)
        for runner in self.stages.values():
            runner.trains = False
        self._model = self.stages.training.model

    def is_due(self, progress: Progress) -> bool:
        """Return True after every `run_val_every_n_steps` steps, unless this step is already validated."""
        return progress.step % self._every == 0 and progress.validated_step < progress.step

    def use_limits_of(self, training: Stages[Sample]) -> None:
        """Use the current limits of training or, if it is configured, `batch_size_val`."""
        for runner, limit in zip(self.stages.values(), training.limits.values(), strict=True):
            runner.use_limit(limit if self._rows is None else RowLimit(self._rows))

    def run(self, step: int, samples_each: int) -> dict[str, float] | None:
        """Collective: return the loss, a mean over target tokens or pairs, and other means over pairs.

        Each rank runs `samples_each` samples at a time. After running out of memory, only these are repeated. Returns
        None if a rank was asked to stop during validation.
        """
        sums: dict[str, torch.Tensor | float] = defaultdict(float)
        shares = self._data.loader.all_samples(max(samples_each, self._rows or 0))
        with isolated_random_state(), evaluating(self._model), _naming_dataset_val():
            for share in shares:
                samples = [self._data.kind.without_labels(each) if repeated else each for each, repeated in share]
                *_, result = self.stages.run(with_equal_tiles(samples, len(samples)), step=step).values()
                if result.stop_requested:
                    return None
                counted = {COUNT: torch.tensor(result.target_tokens), **result.sums}
                for name, value in {LOSS: result.loss_sum, **counted}.items():
                    sums[name] += value.double()
        if not (count := float(sums.pop(COUNT))):
            raise ConfigError("dataset_val: no sample has a token to learn (all labels are masked); check its columns")
        return {name: float(value) / count for name, value in sums.items()}
