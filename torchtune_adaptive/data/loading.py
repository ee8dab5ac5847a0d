"""The configured dataset, whose samples are checked when they are read, its collate function and its loader.

The loader returns the samples of whole steps. They are collated later, when the step is split into microbatches.
Samples come in the order of torchtune's loaders: a step has the samples of `gradient_accumulation_steps` batches of
`batch_size`, and an incomplete last step is dropped.

For torchtune's vision models, a transform cuts each image into tiles, up to a maximum number. torchtune's encoder does
not mask the empty tiles that pad an image, so losses depend on their number. Images are therefore padded before a step
is split: to the most tiles in the batch that torchtune would collate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig
from torch import nn
from torch.nn.functional import pad
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune.data import padded_collate_packed, padded_collate_sft, padded_collate_tiled_images_and_mask
from torchtune.datasets import ConcatDataset

from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.samples import INDEX, TEXT, Sample, TokenKind
from torchtune_adaptive.data.unpadded import Batch, concatenated
from torchtune_adaptive.engine.ranks import Agreement, from_all_ranks, rank
from torchtune_adaptive.errors import ConfigError, SampleError, SampleTooLargeError
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.console import progress_bar
from torchtune_adaptive.lifecycle.distributed import Meshes

Collate = Callable[[Sequence[Sample]], Batch]


class Longest(NamedTuple):
    """The longest sample of a dataset; the first one if several are equally long."""

    at: int
    """Its index in the dataset."""
    length: int


class CheckedDataset(Dataset[Sample]):
    """Wraps a dataset: adds the index to each sample, checks its length, and names it in errors."""

    def __init__(self, dataset: Any, kind: TokenKind = TEXT) -> None:
        self.kind = kind
        """The kind of the samples, padded or not."""
        self.most_tokens: int | None = None
        """The model's max_seq_len; None: unknown."""
        self.truncate_at: int | None = None
        """Prompts are truncated to this length, since not every dataset truncates them; None: never."""
        self.dataset = dataset
        self.length_limit: tuple[int, str] | None = None
        """Tokens that a microbatch can hold, and the end of the error about longer samples."""
        self._longest: Longest | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        index = int(index)  # the loader passes NumPy integers
        try:
            sample = {**self.dataset[index], INDEX: index}
            if self.truncate_at is not None:
                sample["tokens"] = sample["tokens"][: self.truncate_at]
            length = self.kind.length_of(sample)
        except (Exception, SystemExit) as error:
            cause = components.in_a_line(error)
            raise SampleError(
                f"sample {index} of the dataset cannot be read on rank {rank()} ({cause}): fix it or remove it; choose "
                "a dataset of the kind that this recipe trains on; or, if columns have other names, set the key that "
                "names them, such as dataset.column_map or dataset.conversation_column; "
                "TORCHTUNE_ADAPTIVE_TRACEBACK=1 shows the traceback"
            ) from error
        self.check_length(index, length)
        return sample

    def check_length(self, index: int, length: int) -> None:
        """Raise a SampleTooLargeError if a microbatch cannot hold a sample of this length."""
        if self.length_limit is not None and length > self.length_limit[0]:
            raise SampleTooLargeError(
                f"sample {index} of the dataset has {length} tokens{self.kind.length_suffix}, but a microbatch has "
                f"room for {self.length_limit[0]}{self.length_limit[1]}"
            )

    def longest(self) -> Longest:
        """Collective: return the longest sample. On the first call, each rank reads its share of the dataset."""
        if self._longest is None:
            own, ranks = Longest(0, 0), dist.get_world_size()
            with progress_bar("longest sample", len(self), "samples", shown=rank() == 0) as bar:
                for index in range(rank(), len(self), ranks):
                    own = max(own, Longest(index, self.kind.length_of(self[index])), key=attrgetter("length"))
                    bar.update(min(ranks, len(self) - bar.n))
            everyone = [Longest(int(at), int(length)) for at, length in Agreement(2).gather(own)]
            self._longest = max(everyone, key=lambda each: (each.length, -each.at))
        return self._longest


def max_seq_len_of(models: Iterable[nn.Module]) -> int | None:
    """Return the smallest max_seq_len of the models; None if unknown."""
    decoders: list[Any] = [getattr(model, "decoder", model) for model in models]
    return min((each.max_seq_len for each in decoders if hasattr(each, "max_seq_len")), default=None)


@dataclass
class Data:
    """The dataset of a run, its loader and its collate function."""

    dataset: CheckedDataset
    packed: bool
    """True if every row of the dataset contains several samples and all rows have one length."""
    collate: Collate
    """Turns `kind.rows_of(samples)` into a batch."""
    loader: StepLoader
    max_seq_len: int | None
    """The length to which the tokenizer truncates samples; None if it does not."""

    @property
    def kind(self) -> TokenKind:
        """Return the kind of the samples."""
        return self.dataset.kind

    def remove_padding(self) -> None:
        """Concatenate the samples of a microbatch from now on."""
        self.dataset.kind = replace(self.kind, padded=False)
        self.collate = partial(concatenated, ignored=self.kind.ignored_label)


def build_data(settings: Settings, tokenizer: Any, mesh: Meshes, kind: TokenKind = TEXT) -> Data:
    """Collective: build the dataset of `kind`, its collate function and its loader."""
    dataset, packed = build_dataset(settings.config, tokenizer)
    if packed and kind.rows > 1:
        raise ConfigError("dataset.packed is True, but pairs cannot be packed: set it to False")
    samples, collate = CheckedDataset(dataset, kind), build_collate(settings, tokenizer, kind, packed=packed)
    loader = build_step_loader(samples, settings, mesh)
    return Data(samples, packed, collate, loader, getattr(tokenizer, "max_seq_len", None))


def build_dataset(cfg: DictConfig, tokenizer: Any) -> tuple[Dataset[Sample], bool]:
    """Build `cfg.dataset`; a list of datasets is concatenated. Return it, and True if its rows are packed."""
    if not isinstance(sections := cfg.get("dataset"), ListConfig):
        return components.build("dataset", cfg, tokenizer), bool(cfg.dataset.get("packed"))
    parts = [components.build_section(f"dataset[{i}]", part, tokenizer) for i, part in enumerate(sections)]
    try:
        joined = ConcatDataset(datasets=parts)
    except Exception as error:
        raise ConfigError(f"dataset: its {len(parts)} parts cannot be joined: {components.in_a_line(error)}") from error
    return joined, bool(getattr(joined, "packed", False))


def build_collate(settings: Settings, tokenizer: Any, kind: TokenKind, *, packed: bool) -> Collate:
    """Return a function that pads samples to the longest; packed rows already have equal lengths."""
    if packed:
        return cast(Collate, padded_collate_packed)
    # as in torchtune, `collate_fn` has no effect on pairs
    function = padded_collate_sft if kind.rows > 1 else components.imported("collate_fn", settings.collate_fn)
    function = collate_images if function is padded_collate_tiled_images_and_mask else function
    return partial(function, padding_idx=tokenizer.pad_id, ignore_idx=kind.ignored_label)


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


def build_step_loader(dataset: CheckedDataset, settings: Settings, mesh: Meshes) -> StepLoader:
    """Collective: return the loader of this data-parallel rank.

    Raises ConfigError if the datasets of the ranks differ in size, or have fewer samples than a step.
    """
    try:
        ranks, samples = mesh["dp"].size(), len(dataset)
    except Exception as error:
        raise ConfigError(
            f"dataset has no valid length ({components.in_a_line(error)}), but every epoch needs one: use one that "
            "is not streamed, and whose __len__ returns its number of samples"
        ) from error
    first, *others = from_all_ranks(samples)
    for at, other in enumerate(others, start=1):
        if other != first:
            raise ConfigError(
                f"dataset has {count_of(first, 'sample')} on rank 0 and {other} on rank {at}, but all ranks must "
                "read the same dataset: check that its files and filters are the same on every node"
            )
    if not samples:
        raise ConfigError("dataset is empty: check its source, split and filter")
    loader = StepLoader(dataset, rank=mesh["dp"].get_local_rank(), world_size=ranks, shuffle=settings.shuffle)
    if loader.samples_per_rank < settings.samples_per_step:
        accumulation = settings.gradient_accumulation_steps
        accumulated = f"gradient_accumulation_steps {accumulation} × " * (accumulation > 1)
        raise ConfigError(
            f"dataset has {count_of(samples, 'sample')}, but one step takes {settings.samples_per_step * ranks}: "
            f"batch_size {settings.batch_size} × {accumulated}{count_of(ranks, 'rank')}; add samples, or "
            "lower one of them in a new run"
        )
    return loader


class StepLoader:
    """Yields this rank's samples of each step; the samples per step may change between epochs."""

    def __init__(self, dataset: Dataset[Sample], *, rank: int, world_size: int, shuffle: bool) -> None:
        self._dataset, self._rank, self._ranks, self._shuffle = dataset, rank, world_size, shuffle
        self._samples: int = len(dataset)  # type: ignore[arg-type]
        self.samples_per_rank = math.ceil(self._samples / world_size)
        """The number of samples of a rank in an epoch."""
        self._loader: StatefulDataLoader | None = None

    def samples_left_per_rank(self, samples_done: int) -> int:
        """Return the number of samples left for each rank after all ranks together have used `samples_done`."""
        return (self.samples_per_rank * self._ranks - samples_done) // self._ranks

    def epoch(self, epoch: int, *, samples_per_step: int, steps: int, samples_done: int = 0) -> Iterator[list[Sample]]:
        """Yield up to `steps` steps of an epoch, without its first `samples_done` samples.

        Ranks take the samples in turn from one shuffled order. So the samples used so far are always the beginning of
        that order, and any number of ranks can resume with the rest.
        """
        sampler: Any = self._indices(epoch, samples_done)
        self._loader = StatefulDataLoader(
            self._dataset, batch_size=samples_per_step, sampler=sampler, collate_fn=list, drop_last=True
        )
        return islice(iter(self._loader), steps)

    def all_samples(self, samples_each: int) -> Iterator[list[tuple[Sample, bool]]]:
        """Yield this rank's part of the whole dataset without shuffling, in lists of up to `samples_each` samples.

        All ranks get the same number of samples; if necessary, some samples are repeated. The bool is True for a
        repeated sample, which must not count.
        """
        positions, samples = range(self._rank, self.samples_per_rank * self._ranks, self._ranks), self._samples
        for first in range(0, len(positions), samples_each):
            yield [(self._dataset[at % samples], at >= samples) for at in positions[first : first + samples_each]]

    def _indices(self, epoch: int, samples_done: int) -> np.ndarray[Any, Any]:
        """Return the indices of this rank's samples in the order of torchtune's sampler, without the first
        `samples_done` of all ranks. An array needs 8 bytes per sample, a list 40."""
        samples, generator = self._samples, torch.Generator().manual_seed(epoch)
        order = (torch.randperm(samples, generator=generator) if self._shuffle else torch.arange(samples)).numpy()
        positions = np.arange(samples_done + self._rank, self.samples_per_rank * self._ranks, self._ranks)
        indices: np.ndarray[Any, Any] = order[positions % samples]  # repeats the first samples, for equal shares
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the last epoch for torchtune's recipes; the adaptive recipes do not read it."""
        return {} if self._loader is None else dict(self._loader.state_dict())
