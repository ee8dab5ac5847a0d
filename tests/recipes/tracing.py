"""A finetuning step without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig

from torchtune_adaptive.tune.trace.fakes import FakeStep
from torchtune_adaptive.tune.trace.steps import fake_steps


@contextmanager
def fake_step(cfg: DictConfig, world_size: int) -> Iterator[FakeStep]:
    """The step of the recipe that this config is for; where that has several stages, the one that trains."""
    with fake_steps(cfg, world_size) as steps:
        yield next(iter(steps.values()))
