"""Compare tokens and labels of a few samples across ranks, and with those of the resumed run, by checksums.

With different data on two ranks, or after a change of the data, a run would train some samples twice and skip others
without an error.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.tune.checked_dataset import CheckedDataset

logger = logging.getLogger(__name__)

PLACES = 16
"""Number of samples that are compared, evenly spaced from the first to the last of the dataset."""
AGAIN = 8
"""Number of rereads of a sample that differs, which distinguish a changed file from a random transform."""

Fingerprint = Mapping[str, Any]
"""Plain JSON: `samples` of the dataset, `max_seq_len` of its tokenizer, and `crc32` by place."""


def fingerprint_of(samples: CheckedDataset, max_seq_len: int | None) -> Fingerprint | None:
    """Collective: return the fingerprint; None if samples are random. Raise ConfigError if samples of ranks differ."""
    if REHEARSAL.on or not len(samples):
        return None
    places = _places(len(samples))
    by_place = list(zip(*from_all_ranks([_checksum_at(samples, place) for place in places]), strict=True))
    for place, checksums in zip(places, by_place, strict=True):
        read = {rank: crc32 for rank, crc32 in enumerate(checksums) if crc32 is not None}
        first = min(read, default=0)
        if other := next((rank for rank in read if read[rank] != read[first]), None):
            if _is_drawn(samples, place):
                return None
            raise ConfigError(
                f"sample {place} of the dataset on rank {other} differs from that on rank {first}, but all ranks must "
                "read the same samples in the same order: check that files, filters and shuffling of the dataset are "
                "the same on every node"
            )
    # an unreadable sample is reported when a step reads it
    return {"samples": len(samples), "max_seq_len": max_seq_len, "crc32": [checksums[0] for checksums in by_place]}


def check_same_data(samples: CheckedDataset, now: Fingerprint | None, saved: Fingerprint | None) -> None:
    """Collective: raise ConfigError if the data differ from those of the checkpoint's run.

    `set_batch_sizes` checks the number of samples. After a change of max_seq_len, equal data give different samples, so
    they are not compared.
    """
    if now is None or saved is None or any(now[key] != saved[key] for key in ("samples", "max_seq_len")):
        return
    for place, ours, theirs in zip(_places(len(samples)), now["crc32"], saved["crc32"], strict=True):
        if None not in (ours, theirs) and ours != theirs:
            if _is_drawn(samples, place):
                return
            raise ConfigError(
                f"cannot resume: sample {place} of the dataset has changed since the checkpoint was saved; restore the "
                "dataset and its tokenizer, or start a new run with another output_dir"
            )


def _places(samples: int) -> Sequence[int]:
    return sorted({(samples - 1) * at // (PLACES - 1) for at in range(PLACES)})


def _is_drawn(samples: CheckedDataset, place: int) -> bool:
    """Collective: return True if repeated reads of a sample give different values on any rank."""
    checksums = {_checksum_at(samples, place, seed) for seed in range(AGAIN)}
    drawn = any(from_all_ranks(len(checksums) > 1))
    if drawn:
        logger.debug("repeated reads of sample %d differ: data are not compared", place)
    return drawn


def _checksum_at(samples: CheckedDataset, place: int, seed: int = 0) -> int | None:
    with seeded(seed):
        try:
            sample = samples[place]
        except AdaptiveError:
            return None
    keys = [key for fields in samples.kind.sequences for key in (fields.tokens, fields.labels) if key in sample]
    return zlib.crc32(b"".join(np.asarray(sample[key]).tobytes() for key in keys))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generators of the host, then restore them."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)  # not that of a GPU, which may not be in use yet
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
