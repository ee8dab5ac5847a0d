"""The dataset, the collate function and the loader that the config names.

The plan cuts a step into microbatches, so nothing is collated on the way. The order is that of torchtune's loaders: a
step holds exactly the samples that `gradient_accumulation_steps` batches of `batch_size` would hold, and an incomplete
last step is dropped.
"""

from __future__ import annotations

import glob
import inspect
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.datasets import ConcatDataset

from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.distributed import Meshes
from torchtune_adaptive.tune.fingerprint import Fingerprint, fingerprint_of
from torchtune_adaptive.tune.samples import PAIR, TEXT, Kind, Sample
from torchtune_adaptive.tune.unpadded import Batch, joined

Item = TypeVar("Item")
Collate = Callable[[Sequence[Sample]], Batch]
PAIRS_ARE_NOT_PACKED = "dataset.packed is True, but pairs cannot be packed: set it to False"


class Tokenizer(Protocol):
    """The tokenizer as it is needed here; the config's datasets may need more of it."""

    pad_id: int


@dataclass
class Data:
    """The dataset of a run, and what stands between it and a microbatch."""

    dataset: CheckedDataset
    packed: bool
    """All rows are of one length: several samples in each."""
    collate: Collate
    """Makes a batch of `kind.rows_of(samples)`."""
    loader: StepLoader[Sample]
    max_seq_len: int | None
    """The length at which the tokenizer cuts samples; None if it does not."""
    fingerprint: Fingerprint | None = None

    @property
    def kind(self) -> Kind:
        return self.dataset.kind

    def leave_padding_out(self) -> None:
        """From now on, samples stand one after another in a microbatch."""
        self.dataset.kind = replace(self.kind, padded=False)
        self.collate = partial(joined, ignored=self.kind.ignored_label)


def build_data(settings: Settings, tokenizer: Tokenizer, loss_fn: nn.Module, mesh: Meshes) -> Data:
    """Collective: samples of text, for finetuning."""
    dataset, packed = build_dataset(settings.config, tokenizer)
    kind = replace(TEXT, ignored_label=cast(int, loss_fn.ignore_index))
    collate = build_collate(settings, tokenizer, kind.ignored_label, packed=packed)
    return data_of(CheckedDataset(dataset, kind), collate, settings, tokenizer, mesh, packed=packed)


def build_pairs(settings: Settings, tokenizer: Tokenizer, mesh: Meshes) -> Data:
    """Collective: pairs of answers, for preference training."""
    dataset, packed = build_dataset(settings.config, tokenizer)
    if packed:
        raise ConfigError(PAIRS_ARE_NOT_PACKED)
    needed = [key for fields in PAIR.sequences for key in (fields.tokens, fields.labels)]
    samples = CheckedDataset(dataset, PAIR)
    check_samples(samples, needed, settings.config, "pairs", "preference_dataset")
    collate = partial(padded_collate_sft, padding_idx=tokenizer.pad_id, ignore_idx=PAIR.ignored_label)
    return data_of(samples, collate, settings, tokenizer, mesh, packed=False)


def data_of(
    samples: CheckedDataset, collate: Collate, settings: Settings, tokenizer: Tokenizer, mesh: Meshes, *, packed: bool
) -> Data:
    """Collective: with a loader that reads the samples."""
    loader, max_seq_len = build_step_loader(samples, settings, mesh), getattr(tokenizer, "max_seq_len", None)
    return Data(samples, packed, collate, loader, max_seq_len, fingerprint_of(samples, max_seq_len))


def check_samples(samples: CheckedDataset, needed: Sequence[str], cfg: DictConfig, what: str, such_as: str) -> None:
    """Refuses a dataset of another kind, by its first sample."""
    if len(samples) == 0:
        return  # build_step_loader reports an empty dataset
    first = samples.read(0)
    if not isinstance(first, Mapping) or not set(needed) <= first.keys():
        keys = ", ".join(map(str, first)) if isinstance(first, Mapping) else type(first).__name__
        component = cfg.dataset.get(COMPONENT) if isinstance(cfg.dataset, DictConfig) else cfg.dataset
        raise ConfigError(
            f"dataset is {component}, which does not return {what}: its first sample has {keys}, but needs "
            f"{', '.join(needed)}; use one such as torchtune.datasets.{such_as}"
        )


def build_dataset(cfg: DictConfig, tokenizer: Tokenizer) -> tuple[Dataset[Sample], bool]:
    """The dataset of `cfg.dataset`, several of them joined; and whether its rows are packed."""
    section = components.require_parts(cfg, "dataset")
    if not isinstance(section, ListConfig):
        return _built("dataset", section, tokenizer), is_packed(cfg)
    parts = [_built(f"dataset[{i}]", part, tokenizer) for i, part in enumerate(section)]
    try:
        joined = ConcatDataset(datasets=parts)
    except Exception as error:
        raise ConfigError(f"dataset: its {len(parts)} parts cannot be joined: {components.in_a_line(error)}") from error
    return joined, bool(getattr(joined, "packed", False))


def _built(key: str, section: Any, tokenizer: Tokenizer) -> Any:
    try:
        return components.build_section(key, section, tokenizer)
    except ConfigError as error:
        if isinstance(section, DictConfig) and (flaw := _flaw_of_files(section.get("data_files"))):
            raise ConfigError(f"{key}.data_files: {flaw}") from error
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if isinstance(section, DictConfig) and unexpected and unexpected[1] in section:
            raise ConfigError(f"{error}; remove it, on a command line by '~{key}.{unexpected[1]}'") from error
        raise


def _flaw_of_files(data_files: Any) -> str | None:
    """The first file without content, or the first line of a JSONL file that is no object; None where all can be read.
    Whatever reads them names neither file nor line."""
    files = [data_files] if isinstance(data_files, str) else data_files if isinstance(data_files, ListConfig) else []
    for path in (Path(str(file)) for file in files):
        if not os.path.isfile(path):  # of a name that is too long, it is False
            if not os.path.exists(path) and "://" not in str(path) and not glob.has_magic(str(path)):
                return f"{path} does not exist: correct the path"
            continue
        if path.stat().st_size == 0:
            return f"{path} is empty"
        if path.suffix not in (".jsonl", ".json"):
            continue
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip().startswith("["):
                    break  # one array, whose lines are no objects
                if not line.strip():
                    continue
                try:
                    sample = json.loads(line)
                    json.dumps(sample, ensure_ascii=False).encode()  # half of a surrogate pair is no text
                except ValueError as error:
                    return f"{path}, line {number}, is not JSON ({error}): fix it or remove it"
                if not isinstance(sample, dict):
                    return f"{path}, line {number}, is not a JSON object, {{...}}: fix it or remove it"
    return None


def is_packed(cfg: DictConfig) -> bool:
    """Whether the config asks for packed rows; a list of datasets is asked once they are built."""
    section = cfg.get("dataset")
    return isinstance(section, DictConfig) and bool(section.get("packed"))


def build_collate(settings: Settings, tokenizer: Tokenizer, ignored_label: int, *, packed: bool) -> Collate:
    """Samples -> batch, padded to the longest of them; packed rows are of one length already."""
    if packed:
        return cast(Collate, padded_collate_packed)
    path = settings.collate_fn
    if "left_pad_sequence" in path:
        raise ConfigError(f"collate_fn is {path!r}, which is for inference only")
    try:
        function = pkgutil.resolve_name(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"collate_fn is {path!r}, which cannot be imported: {error}") from error
    try:
        inspect.signature(function).bind([], padding_idx=0, ignore_idx=0)
    except TypeError as error:
        raise ConfigError(
            f"collate_fn is {path!r}, which cannot be called with samples, padding_idx and ignore_idx ({error}): use "
            "a function such as torchtune.data.padded_collate_sft"
        ) from error
    except ValueError:  # it has no signature
        pass
    return partial(function, padding_idx=tokenizer.pad_id, ignore_idx=ignored_label)


def build_step_loader(dataset: CheckedDataset, settings: Settings, mesh: Meshes) -> StepLoader[Sample]:
    """Collective: this data-parallel rank's loader. Ranks must have one dataset, with samples for a step of all."""
    ranks, samples = mesh["dp"].size(), len(dataset)
    first, *others = from_all_ranks(samples)
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise ConfigError(
                f"dataset has {count_of(first, 'sample')} on rank 0 and {other} on rank {rank}, but all ranks must "
                "read the same dataset: check that its files and filters are the same on every node"
            )
    if not samples:
        raise ConfigError("dataset is empty: check its source, split and filter")
    loader = StepLoader(dataset, rank=mesh["dp"].get_local_rank(), world_size=ranks, shuffle=settings.shuffle)
    if loader.samples_per_rank < settings.samples_per_step:
        several = settings.gradient_accumulation_steps
        accumulated = f"gradient_accumulation_steps {several} × " * (several > 1)
        raise ConfigError(
            f"dataset has {count_of(samples, 'sample')}, but one step takes {settings.samples_per_step * ranks}: "
            f"batch_size {settings.batch_size} × {accumulated}{count_of(ranks, 'rank')}; lower one of them"
        )
    return loader


class StepLoader(Generic[Item]):
    """Yields this rank's samples of each step; how many a step has may change from epoch to epoch."""

    def __init__(self, dataset: Dataset[Item], *, rank: int, world_size: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._sampler = Sampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self._loader: StatefulDataLoader | None = None

    @property
    def samples_per_rank(self) -> int:
        return len(self._sampler)

    def samples_left_per_rank(self, samples_done: int) -> int:
        """Samples left in an epoch for each rank after all ranks together have trained on so many."""
        return (int(self._sampler.total_size) - samples_done) // int(self._sampler.num_replicas)

    def epoch(self, epoch: int, *, samples_per_step: int, steps: int, samples_done: int = 0) -> Iterator[list[Item]]:
        """The first `steps` whole steps of an epoch, or of the rest. Ranks take turns through one order of its samples:
        those that any number of ranks has done are its beginning, and any other number can share the rest."""
        self._sampler.set_epoch(epoch)
        sampler: Any = self._sampler.share(samples_done) if samples_done else self._sampler
        self._loader = StatefulDataLoader(
            self._dataset, batch_size=samples_per_step, sampler=sampler, collate_fn=list, drop_last=True
        )
        return islice(iter(self._loader), steps)

    def state_dict(self) -> dict[str, Any]:
        """The position in the last epoch, for torchtune's recipes; ours do not read it."""
        return {} if self._loader is None else dict(self._loader.state_dict())


class Sampler(StatefulDistributedSampler):
    """torchtune's sampler, with its order in an array: 8 bytes a sample, where lists of numbers take 40."""

    def share(self, samples_done: int = 0) -> np.ndarray[Any, Any]:
        samples, generator = len(self.dataset), torch.Generator().manual_seed(self.seed + self.epoch)
        order = (torch.randperm(samples, generator=generator) if self.shuffle else torch.arange(samples)).numpy()
        places = np.arange(samples_done + self.rank, self.total_size, self.num_replicas)
        share: np.ndarray[Any, Any] = order[places % samples]  # the first come again, for equal shares
        return share

    def __iter__(self) -> Iterator[int]:
        self.yielded = 0  # no state of it is ever loaded
        for index in self.share():
            self.yielded += 1
            yield int(index)
