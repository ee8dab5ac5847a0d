"""Datasets and collate functions as the config names them."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, cast

from omegaconf import DictConfig, ListConfig
from torch import nn
from torch.utils.data import Dataset
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.datasets import ConcatDataset

from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.culprits import NamedSamples, naming_bad_samples
from torchtune_adaptive.tune.loader import StepLoader
from torchtune_adaptive.tune.place import Meshes
from torchtune_adaptive.tune.samples import PAIR, TEXT, Kind, Sample
from torchtune_adaptive.tune.unpadded import Batch

Collate = Callable[[Sequence[Sample]], Batch]
PAIRS_ARE_NOT_PACKED = "dataset.packed is True, but pairs cannot be packed: set it to False"


class Tokenizer(Protocol):
    """What is asked of the config's; its datasets may ask for more."""

    pad_id: int


class Batching(NamedTuple):
    """How a microbatch is made of samples."""

    kind: Kind
    """Their kind as this run plans it: padded or not."""
    collate: Collate

    def batch_of(self, samples: Sequence[Sample]) -> Batch:
        return self.collate(self.kind.rows_of(samples))


@dataclass(frozen=True)
class Data:
    """The dataset of a run, and what stands between it and a microbatch."""

    dataset: NamedSamples
    packed: bool
    """All rows are of one length: several samples in each."""
    collate: Collate
    loader: StepLoader[Sample]
    max_seq_len: int | None
    """The length at which the tokenizer cuts samples; None if it does not."""
    kind: Kind

    def naming_bad_samples(self, model: nn.Module, *, last: int) -> AbstractContextManager[None]:
        """Where what is done in it fails, and one of so many last samples is why, the error names that."""
        return naming_bad_samples(model, self.dataset, last=last)


def build_data(settings: Settings, tokenizer: Tokenizer, loss_fn: nn.Module, mesh: Meshes) -> Data:
    """Samples of text, for finetuning."""
    dataset, packed = build_dataset(settings.config, tokenizer)
    kind = replace(TEXT, ignored_label=cast(int, loss_fn.ignore_index))
    collate = build_collate(settings, tokenizer, kind.ignored_label, packed=packed)
    return data_of(NamedSamples(dataset, kind), collate, settings, tokenizer, mesh, packed=packed)


def build_pairs(settings: Settings, tokenizer: Tokenizer, mesh: Meshes) -> Data:
    """Pairs of answers, for preference training."""
    dataset, packed = build_dataset(settings.config, tokenizer)
    if packed:
        raise ConfigError(PAIRS_ARE_NOT_PACKED)
    samples = NamedSamples(dataset, PAIR)
    needed = [key for fields in PAIR.sequences for key in (fields.tokens, fields.labels)]
    check_samples(samples, needed, settings.config, "pairs", "preference_dataset")
    collate = partial(padded_collate_sft, padding_idx=tokenizer.pad_id, ignore_idx=PAIR.ignored_label)
    return data_of(samples, collate, settings, tokenizer, mesh, packed=False)


def data_of(
    samples: NamedSamples, collate: Collate, settings: Settings, tokenizer: Tokenizer, mesh: Meshes, *, packed: bool
) -> Data:
    return Data(
        dataset=samples,
        packed=packed,
        collate=collate,
        loader=build_step_loader(samples, settings, mesh),
        max_seq_len=getattr(tokenizer, "max_seq_len", None),
        kind=samples.kind,
    )


def check_samples(samples: NamedSamples, needed: Sequence[str], cfg: DictConfig, what: str, such_as: str) -> None:
    """Refuses a dataset of another kind, by its first sample."""
    if len(samples) == 0:
        return  # build_step_loader reports an empty dataset
    found = samples[0]
    if not isinstance(found, Mapping) or not set(needed) <= found.keys():
        keys = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        component = cfg.dataset.get(COMPONENT) if isinstance(cfg.dataset, DictConfig) else cfg.dataset
        raise ConfigError(
            f"dataset is {component}, which does not return {what}: its first sample has {keys}, but needs "
            f"{', '.join(needed)}; use one such as torchtune.datasets.{such_as}"
        )


def build_dataset(cfg: DictConfig, tokenizer: Tokenizer) -> tuple[Dataset[Sample], bool]:
    """The dataset of `cfg.dataset`, several of them joined; and whether its rows are packed."""
    section = components.require_parts(cfg, "dataset")
    if not isinstance(section, ListConfig):
        return components.build_section("dataset", section, tokenizer), is_packed(cfg)
    parts = [components.build_section(f"dataset[{i}]", part, tokenizer) for i, part in enumerate(section)]
    try:
        joined = ConcatDataset(datasets=parts)
    except Exception as error:
        raise ConfigError(f"dataset: its {len(parts)} parts cannot be joined: {components.in_a_line(error)}") from error
    return joined, bool(getattr(joined, "packed", False))


def is_packed(cfg: DictConfig) -> bool:
    """Whether the config asks for packed rows; a list of datasets is asked once they are built."""
    section = cfg.get("dataset")
    return isinstance(section, DictConfig) and bool(section.get("packed"))


def build_collate(settings: Settings, tokenizer: Tokenizer, ignored_label: int, *, packed: bool) -> Collate:
    """Samples -> batch, padded to the longest of them; packed rows are of one length already."""
    if packed:
        collate: Collate = padded_collate_packed
        return collate
    if "left_pad_sequence" in settings.collate_fn:
        raise ConfigError(f"collate_fn is {settings.collate_fn!r}, which is for inference only")
    try:
        function = pkgutil.resolve_name(settings.collate_fn)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"collate_fn is {settings.collate_fn!r}, which cannot be imported: {error}") from error
    _check_callable(function, settings.collate_fn)
    return partial(function, padding_idx=tokenizer.pad_id, ignore_idx=ignored_label)


def _check_callable(function: Callable[..., object], path: str) -> None:
    """Refuses what no collate function is, by its signature where it has one."""
    try:
        inspect.signature(function).bind([], padding_idx=0, ignore_idx=0)
    except TypeError as error:
        raise ConfigError(
            f"collate_fn is {path!r}, which cannot be called with samples, padding_idx and ignore_idx ({error}): use "
            "a function such as torchtune.data.padded_collate_sft"
        ) from error
    except ValueError:  # it has none
        pass


def _check_alike(samples_by_rank: Sequence[int]) -> None:
    first = samples_by_rank[0]
    for rank, samples in enumerate(samples_by_rank):
        if samples != first:
            raise ConfigError(
                f"dataset has {count_of(first, 'sample')} on rank 0 and {samples} on rank {rank}, but all ranks must "
                "read the same dataset: check that its files and filters are the same on every node"
            )


def build_step_loader(dataset: NamedSamples, settings: Settings, mesh: Meshes) -> StepLoader[Sample]:
    """Collective: the loader of this data-parallel rank; a dataset that does not fill one configured step is an error,
    as is one that is another on another rank."""
    ranks, samples = mesh["dp"].size(), len(dataset)
    _check_alike(from_all_ranks(samples))
    if not samples:
        raise ConfigError("dataset is empty: check its source, split and filter")
    loader = StepLoader(dataset, rank=mesh["dp"].get_local_rank(), world_size=ranks, shuffle=settings.shuffle)
    if loader.samples_per_rank < settings.samples_per_step:
        raise ConfigError(
            f"dataset has {count_of(samples, 'sample')}, but one step takes {settings.samples_per_step * ranks}: "
            + _factors_of_step(settings, ranks)
        )
    return loader


def _factors_of_step(settings: Settings, ranks: int) -> str:
    """What the samples of a step are the product of, and what to lower."""
    accumulated = settings.gradient_accumulation_steps
    rows = f"batch_size {settings.batch_size}" + (
        f" × gradient_accumulation_steps {accumulated}" if accumulated > 1 else ""
    )
    lower = "one of them" if accumulated * ranks > 1 else "batch_size"
    return f"{rows} × {count_of(ranks, 'rank')}; lower {lower}"
