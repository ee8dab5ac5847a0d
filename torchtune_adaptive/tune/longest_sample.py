"""The worst sample that a dataset can put into a microbatch: as long as samples get, every token a target."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.atomic_files import keep_file, read_json
from torchtune_adaptive.config.keys import MOST_TOKENS
from torchtune_adaptive.engine.ranks import Agreement
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.console import progress_bar, say
from torchtune_adaptive.tune.bad_samples import NamedSamples
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.samples import INDEX, Kind, Sample

logger = logging.getLogger(__name__)

LENGTHS_FILE = "sample_lengths.json"


def worst_sample(cfg: DictConfig, data: Data, kind: Kind, sequence_length: int | None) -> Sample:
    """Collective: of the configured length, else of the longest sample there is; never above the tokenizer's limit."""
    sample: Sample = data.dataset[0]
    if "encoder_input" in sample:
        raise ConfigError(
            "use_maximum_batch_size is True, or adaptive.token_budget is auto, but the dataset has images: their "
            "memory differs from sample to sample, so there is no worst case to measure; set batch_size yourself"
        )
    if data.packed:
        return {**sample, "labels": sample["tokens"].clone()}
    longest = data.max_seq_len
    if not sequence_length and longest is not None and longest > MOST_TOKENS:
        raise ConfigError(
            f"tokenizer.max_seq_len is {longest}, which no model supports: lower it, or set it to null and set "
            "adaptive.sequence_length"
        )
    if sequence_length and longest is not None and sequence_length > longest:
        say(
            f"adaptive.sequence_length is {sequence_length}, but the tokenizer cuts samples to {longest} tokens "
            f"(tokenizer.max_seq_len): measuring {longest}"
        )
        sequence_length = longest
    known = sequence_length or longest
    tokens = sample[kind.sequences[0].tokens]
    token = int(tokens[0]) if len(tokens) else 0
    if known:
        return kind.uniform(token, kind.length_at(known))
    longest_read = longest_sample(cfg, data.dataset, kind)
    return {**kind.uniform(token, max(1, longest_read.length)), INDEX: longest_read.at}  # named where it is too long


class Longest(NamedTuple):
    """The longest sample of a dataset, the first of those that are alike."""

    length: int
    at: int
    """The index of the sample."""


def longest_sample(cfg: DictConfig, dataset: NamedSamples, kind: Kind) -> Longest:
    """Collective: the longest sample; each rank reads its share, and the result is kept for the next run."""
    path, rank, ranks = Path(cfg.output_dir) / LENGTHS_FILE, dist.get_rank(), dist.get_world_size()
    sections = OmegaConf.to_container(OmegaConf.create({"d": cfg.dataset, "t": cfg.tokenizer}), resolve=True)
    # of one sequence, the length is the same with and without padding
    counted = [len(dataset)] if kind.rows == 1 else [len(dataset), kind.sequences, kind.padded]
    key = hashlib.sha256(json.dumps([sections, *counted], sort_keys=True).encode()).hexdigest()
    longest = _read(path, key)
    if all(length for length, _ in Agreement(2).gather(longest)):
        return longest
    longest = Longest(0, 0)
    with progress_bar("longest sample", len(dataset), "samples", shown=rank == 0) as bar:
        for index in range(rank, len(dataset), ranks):
            if (length := kind.length_of(dataset[index])) > longest.length:
                longest = Longest(length, index)
            bar.update(min(ranks, len(dataset) - bar.n))
    everywhere = [Longest(int(length), int(index)) for length, index in Agreement(2).gather(longest)]
    longest = max(everywhere, key=lambda each: (each.length, -each.at))
    if rank == 0:
        record = json.dumps({"key": key, "longest": longest.length, "index": longest.at})
        keep_file(path, f"{record}\n".encode(), "the next run will search for the longest sample again")
    return longest


def _read(path: Path, key: str) -> Longest:
    """The result of an earlier scan of the same data; a sample of length 0 if there was none."""
    try:
        record = read_json(path) or {}
        return Longest(int(record["longest"]), int(record["index"])) if record.get("key") == key else Longest(0, 0)
    except (ValueError, KeyError, TypeError, OverflowError):  # the last one for Infinity, which JSON in Python can say
        return Longest(0, 0)
