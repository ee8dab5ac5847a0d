"""Images in samples, for torchtune's vision models. A transform cuts each image into tiles, up to a maximum number.

torchtune's encoder does not mask the empty tiles that pad an image, so losses depend on their number. Images are
therefore padded before a step is split: to the most tiles in the batch that torchtune would collate.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch.nn.functional import pad
from torchtune.data import padded_collate_tiled_images_and_mask

from torchtune_adaptive.engine.ranks import Agreement, rank, world_size
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.console import log_if_slow, log_rank_0
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.unpadded import Batch

COUNTED_SAMPLES = 1000
"""The number of samples whose images are counted before a search. To read all images of a dataset may take hours."""


def tiles_of(sample: Sample) -> list[int]:
    """Return the number of tiles of each image."""
    return [len(image) for image in sample["encoder_input"]["images"]] if "encoder_mask" in sample else []


def with_equal_tiles(samples: list[Sample], rows: int) -> list[Sample]:
    """Pad the images of each batch of `rows` consecutive samples to the most tiles in this batch."""
    padded: list[Sample] = []
    for batch in (samples[start : start + rows] for start in range(0, len(samples), rows)):
        most = max(chain.from_iterable(map(tiles_of, batch)), default=0)
        padded += [sample if {*tiles_of(sample)} <= {most} else _padded(sample, most) for sample in batch]
    return padded


def _padded(sample: Sample, most: int) -> Sample:
    """Append empty tiles to each image, and mask them."""
    images, masks = [], []
    for image, mask in zip(sample["encoder_input"]["images"], sample["encoder_mask"], strict=True):
        missing, tokens_per_tile = most - len(image), mask.size(1) // len(image)
        images.append(pad(image, (0, 0) * 3 + (0, missing)))
        masks.append(pad(mask, (0, missing * tokens_per_tile)))
    return {**sample, "encoder_input": {**sample["encoder_input"], "images": images}, "encoder_mask": masks}


def collate_images(rows: list[Sample], **options: int) -> Batch:
    """Collate like torchtune, whose masks are only correct if no sample of the batch has several images."""
    batch: Batch = padded_collate_tiled_images_and_mask(rows, **options)
    masks, images = batch["encoder_mask"], batch["encoder_input"]["images"].size(1)
    # torchtune joins [rows, images, tokens, image tokens] to [rows, tokens, all image tokens] without a transposition.
    batch["encoder_mask"] = masks.view(len(rows), images, masks.size(1), -1).transpose(1, 2).flatten(2)
    return batch


@log_if_slow("counted images")
def with_most_images(text: Sample, dataset: CheckedDataset, max_tiles: int | None) -> Sample:
    """Collective: add as many images as the counted sample with the most, with `max_tiles` tiles or the most found."""
    first = dataset[0]
    if not tiles_of(first):
        raise ConfigError(
            "use_maximum_batch_size is True, or adaptive.token_budget is auto, but sample 0 of the dataset has no "
            "images as in torchtune's llama3_2_vision, so the worst case to measure is unknown: set batch_size yourself"
        )
    counted = range(0, len(dataset), -(-len(dataset) // COUNTED_SAMPLES))
    own = [tiles_of(dataset[index]) for index in counted[rank() :: world_size()]]
    everyone = Agreement(2).gather((max(map(len, own), default=0), max(chain(*own), default=0)))
    images, tiles = (int(max(column)) for column in zip(*everyone, (0, max_tiles or 0), strict=True))
    worst = f"{count_of(images, 'image')} of {count_of(tiles, 'tile')} a sample"
    log_rank_0(f"probes have {worst}, the most images in {count_of(len(counted), 'sample')}")
    padded = _padded(first, tiles)
    mask = torch.ones(len(text["tokens"]), padded["encoder_mask"][0].size(1), dtype=torch.bool)
    inputs = {key: values[:1] * images for key, values in padded["encoder_input"].items()}
    return {**text, "encoder_input": inputs, "encoder_mask": [mask] * images}
