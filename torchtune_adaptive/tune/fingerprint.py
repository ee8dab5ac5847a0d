"""Compare checksums of a few samples between ranks, and with those in the checkpoint of a resumed run.

If ranks had different data, or if the data had changed before a run is resumed, the run would train some samples twice
and skip others without an error.
"""

from __future__ import annotations

import json
import logging
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.tune.checked_dataset import CheckedDataset

logger = logging.getLogger(__name__)

COMPARED = 16
"""The number of samples that are compared, evenly spaced from the first to the last of the dataset."""
REREADS = 8
"""How often a sample that differs is read again, to distinguish a changed file from a random transform."""

Fingerprint = Mapping[str, Any]
"""The tokenizer's `max_seq_len`, and `crc32` of the compared samples. It is plain JSON."""


def fingerprint_of(samples: CheckedDataset, max_seq_len: int | None) -> Fingerprint | None:
    """Collective: return the fingerprint; None if samples are random. Raise ConfigError if samples of ranks differ."""
    if REHEARSAL.on or not len(samples):
        return None
    compared = _compared(len(samples))
    by_sample = list(zip(*from_all_ranks([_checksum_of(samples, index) for index in compared]), strict=True))
    for index, checksums in zip(compared, by_sample, strict=True):
        read = {rank: crc32 for rank, crc32 in enumerate(checksums) if crc32 is not None}
        first = min(read, default=0)
        if other := next((rank for rank in read if read[rank] != read[first]), None):
            if _is_random(samples, index):
                return None
            raise ConfigError(
                f"sample {index} of the dataset on rank {other} differs from that on rank {first}, but all ranks must "
                "read the same samples in the same order: check that files, filters and shuffling of the dataset are "
                "the same on every node"
            )
    # A sample that cannot be read has no checksum here. The step that reads it reports the error.
    return {"max_seq_len": max_seq_len, "crc32": [checksums[0] for checksums in by_sample]}


def check_same_data(samples: CheckedDataset, now: Fingerprint | None, progress: Progress) -> None:
    """Collective: raise ConfigError if the data have changed since the checkpoint was saved.

    If max_seq_len has changed, equal data give different samples and, if packed, another number of them. Then only the
    number is compared, and only if the checkpoint is from within an epoch.
    """
    saved, had = progress.dataset_fingerprint, progress.dataset_samples
    cut = now is not None and saved is not None and now["max_seq_len"] != saved["max_seq_len"]
    if had not in (None, len(samples)) and (progress.steps_in_epoch or not cut):
        raise ConfigError(
            f"cannot resume: the dataset has {len(samples)} samples, but had {had} when the checkpoint was saved; "
            "restore the dataset, or start a new run with another output_dir"
        )
    if now is None or saved is None or cut:
        return
    for index, current, before in zip(_compared(len(samples)), now["crc32"], saved["crc32"], strict=True):
        if None not in (current, before) and current != before:
            if _is_random(samples, index):
                return
            raise ConfigError(
                f"cannot resume: sample {index} of the dataset has changed since the checkpoint was saved; restore the "
                "dataset and its tokenizer, or start a new run with another output_dir"
            )


def _compared(samples: int) -> Sequence[int]:
    """Return the indices of the compared samples."""
    return sorted({(samples - 1) * at // (COMPARED - 1) for at in range(COMPARED)})


def _is_random(samples: CheckedDataset, index: int) -> bool:
    """Collective: return True if repeated reads of a sample give different values on any rank."""
    checksums = {_checksum_of(samples, index, seed) for seed in range(REREADS)}
    is_random = any(from_all_ranks(len(checksums) > 1))
    if is_random:
        logger.debug("repeated reads of sample %d differ: data are not compared", index)
    return is_random


def _checksum_of(samples: CheckedDataset, index: int, seed: int = 0) -> int | None:
    with seeded(seed):
        try:
            sample = samples[index]
        except AdaptiveError:
            return None
    keys = [key for fields in samples.kind.sequences for key in (fields.tokens, fields.labels) if key in sample]
    content = b"".join(np.asarray(sample[key]).tobytes() for key in keys)
    if not samples.labelled:  # a prompt, whose other columns are passed to reward functions
        columns = {key: value for key, value in sample.items() if key not in keys}
        # of objects, only the type is compared: their text may contain an address
        content += json.dumps(columns, skipkeys=True, default=lambda value: type(value).__name__).encode()
    return zlib.crc32(content)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generators of the host, and restore their states at the end."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed the GPU's generator
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
