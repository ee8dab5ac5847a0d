"""Samples with images: tokens attend to their own images, and a search with images is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.recipes.stock_configs import IMAGE_SIZE
from torchtune_adaptive.data.loading import collate_images, with_equal_tiles
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.loop.batch_size import worst_sample

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
