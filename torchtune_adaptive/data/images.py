"""Images in samples, for torchtune's vision models. A transform cuts each image into tiles, up to a maximum number.

torchtune's encoder does not mask the empty tiles that pad an image, so losses depend on their number. Images are
therefore padded before a step is split: to the most tiles in the batch that torchtune would collate.
"""

from __future__ import annotations

from itertools import chain

from torch.nn.functional import pad
from torchtune.data import padded_collate_tiled_images_and_mask

from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.data.unpadded import Batch


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
