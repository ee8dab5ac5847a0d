"""Datasets too small for a step, the samples of steps, and images. Runs of recipes have the samples of torchtune's."""

import random
import tracemalloc
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.recipes.stock_configs import IMAGE_SIZE
from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.checkpoints.progress import EpochSizes, Progress
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data import loading
from torchtune_adaptive.data.loading import (
    CheckedDataset,
    Data,
    StepLoader,
    build_step_loader,
    collate_images,
    with_equal_tiles,
)
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.loop import training_loop
from torchtune_adaptive.loop.batch_size import worst_sample
from torchtune_adaptive.objectives.validation import isolated_random_state

KEYS = {**NEEDED, "batch_size": 2, "gradient_accumulation_steps": 3}
SIZES = "batch_size 2 × gradient_accumulation_steps 3 ×"


def load(dataset: Any, ranks: int) -> StepLoader:
    mesh: Any = {"dp": SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: 0)}
    return build_step_loader(CheckedDataset(dataset), Settings(**KEYS), mesh)


@pytest.mark.parametrize(("samples", "ranks"), [(1, 1), (9, 2), (0, 2)])
def test_dataset_smaller_than_a_step_is_reported_with_the_arithmetic(samples: int, ranks: int) -> None:
    arithmetic = f"has {samples} samples?.*: {SIZES} {ranks} rank" if samples else "is empty"
    with pytest.raises(ConfigError, match=f"^dataset {arithmetic}"):
        load(range(samples), ranks)
    assert load(range(12), 2).samples_per_rank == 6


def test_ranks_with_different_datasets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "from_all_ranks", lambda mine: [mine, mine, mine + 8])
    with pytest.raises(ConfigError, match=r"^dataset has 12 samples on rank 0 and 20 on rank 2"):
        load(range(12), 2)


@pytest.mark.parametrize(
    "dataset",
    [iter([]), *(type("Data", (), {"__len__": lambda _, length=length: length})() for length in (-1, 8.0))],
    ids=["streamed", "negative", "float"],
)
def test_dataset_without_a_valid_length_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigError, match=r"^dataset has no valid length"):
        load(dataset, 1)


def test_steps_may_change_size_every_epoch_without_losing_samples() -> None:
    loader = StepLoader(range(24), rank=0, world_size=1, shuffle=True)
    for epoch, size in enumerate((2, 4, 8)):
        steps = list(loader.epoch(epoch, samples_per_step=size, steps=1000))
        assert [len(step) for step in steps] == [size] * (24 // size)
        assert sorted(chain(*steps)) == list(range(24))


def test_sample_order_takes_at_most_20_bytes_per_sample() -> None:
    loader = StepLoader(range(10**6), rank=1, world_size=2, shuffle=True)
    tracemalloc.start()
    next(loader.epoch(0, samples_per_step=4, steps=1))
    next(loader.epoch(0, samples_per_step=4, steps=1, samples_done=8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 10**6


@pytest.mark.parametrize(
    ("steps_in_epoch", "samples_per_step", "fault"), [(0, 5, None), (3, 5, "had 64"), (0, 12, "a step takes 24")]
)
def test_resumed_run_needs_the_samples_of_a_step_and_within_an_epoch_the_same_number(
    steps_in_epoch: int, samples_per_step: int, fault: str | None
) -> None:
    values: dict[str, Any] = {"seed": 0, "total_epochs": 2, "max_steps_per_epoch": None, "ranks": 2}
    past = (EpochSizes(0, 5, 1, microbatch_rows=5, samples_per_step=samples_per_step, steps=2),)
    progress = Progress(**values, steps_in_epoch=steps_in_epoch, dataset_samples=64, past=past)
    run, dataset, unused = mock.Mock(progress=progress), CheckedDataset([{}] * 20), mock.Mock()
    run.settings, run.devices.ranks = Settings(**KEYS), 1
    data = Data(dataset, False, unused, StepLoader(dataset, rank=0, world_size=1, shuffle=False), max_seq_len=8)
    with (
        mock.patch.object(training_loop, "StepProfiler"),
        pytest.raises(ConfigError, match=f"20 samples, but {fault}.*start a new run") if fault else nullcontext(),
    ):
        training_loop.TrainingLoop(run, unused, data, unused, unused)
        assert run.progress.dataset_samples == 20


def test_validation_does_not_change_random_states() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    inside = []
    for _ in range(2):
        with isolated_random_state():
            inside.append(draw())
    assert inside[0] == inside[1]
    assert draw() == expected


TOKENS_PER_TILE = (IMAGE_SIZE // 14) ** 2 + 1


def sample_of(length: int, *tiles: int) -> Sample:
    """Return a sample with images of these numbers of tiles, each of which has a token."""
    draw = torch.Generator().manual_seed(length)
    masks = [torch.zeros(length, number * TOKENS_PER_TILE, dtype=torch.bool) for number in tiles]
    for at, mask in enumerate(masks):
        mask[at + 1 :] = True
    return {
        "tokens": torch.randint(200, (length,), generator=draw).tolist(),
        "labels": [*range(length)],
        "encoder_input": {
            "images": [torch.rand(number, 3, IMAGE_SIZE, IMAGE_SIZE, generator=draw) for number in tiles],
            "aspect_ratio": [torch.tensor([1, number]) for number in tiles],
        },
        "encoder_mask": masks,
    }


SAMPLES = [sample_of(9, 1), sample_of(5, 3), sample_of(12, 2, 1), sample_of(7, 1)]


def test_tokens_attend_to_their_own_images() -> None:
    collated: Any = collate_images(with_equal_tiles(SAMPLES[1:3], 2), padding_idx=0, ignore_idx=-100)
    masks = collated["encoder_mask"].unflatten(2, (2, 3, TOKENS_PER_TILE))
    assert masks[0, 1:5, 0].all()
    assert not masks[0, 0].any()
    assert not masks[0, :, 1].any(), "the first sample has one image"
    assert masks[1, 1:, 0, :2].all()
    assert masks[1, 2:, 1, :1].all()
    assert int(masks[1].sum()) == TOKENS_PER_TILE * (11 * 2 + 10)


def test_search_with_images_is_refused() -> None:
    data: Any = SimpleNamespace(dataset=SAMPLES)
    with pytest.raises(ConfigError, match="images"):
        worst_sample(data, None)
