"""Steps without data, and the peaks predicted from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omegaconf import DictConfig

from torchtune_adaptive.prediction.law import peak_of, sizes_of
from torchtune_adaptive.tune.trace.fakes import FakeStep
from torchtune_adaptive.tune.trace.steps import fake_steps


@contextmanager
def fake_step(cfg: DictConfig, world_size: int) -> Iterator[FakeStep]:
    """The step of the recipe that this config is for; where that has several stages, the one that trains."""
    with fake_steps(cfg, world_size) as steps:
        yield next(iter(steps.values()))


def peaks_of(step: FakeStep, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The bytes that are predicted at each of these rows and tokens, without a caching allocator."""
    recordings = [step.record(*size) for size in sizes]
    return [peak_of(each.phases, sizes_of(each), caches=False).peak_bytes or 0 for each in recordings]
