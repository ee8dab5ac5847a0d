"""Samples that the model cannot take: each is looked at once, where it is read, and named in the error. A CPU would say
of an unknown token "index out of range", a GPU that some assertion failed, in whatever comes next."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.ranks import Agreement, rank
from torchtune_adaptive.errors import (
    ConfigError,
    SampleError,
    SampleTooLargeError,
    SampleTooLongError,
    UnrecoverableError,
)
from torchtune_adaptive.life.console import progress_bar
from torchtune_adaptive.text import shown
from torchtune_adaptive.tune.samples import INDEX, TEXT, Kind, Sample

SEE_THE_DATASET = "check that the dataset's columns and transform match the data"


class Longest(NamedTuple):
    """The longest sample of a dataset, the first of those that are alike."""

    at: int
    length: int


class CheckedDataset(Dataset[Sample]):
    """A dataset whose samples carry their index, and whose errors say which sample they are about."""

    def __init__(self, dataset: Any, kind: Kind = TEXT, *, labelled: bool = True) -> None:
        self.kind = kind
        """As this run plans them: padded or not."""
        self.labelled = labelled
        self.vocabulary: int | None = None
        """Tokens that the model knows; None: not known."""
        self.most_tokens: int | None = None
        """The longest sequence that the model takes; None: not known."""
        self.cut_at: int | None = None
        """The length at which prompts are cut, as the tokenizer cuts other samples; None: nowhere."""
        self._dataset = dataset
        self.room: tuple[int, str] | None = None
        """Tokens for which a microbatch has room, and what ends the error about a sample that has more."""
        self._longest: Longest | None = None

    def __len__(self) -> int:
        try:
            return len(self._dataset)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"dataset has no usable length ({in_a_line(error)}): use one whose __len__ works"
            ) from error

    def read(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except (Exception, SystemExit) as error:  # whose status would be that of the run
            if is_oom(error):
                raise UnrecoverableError(
                    f"out of memory on rank {rank()} while sample {index} of the dataset was read "
                    f"({in_a_line(error)}): use a machine with more memory, or a dataset that keeps less in it"
                ) from error
            raise SampleError(
                f"sample {index} of the dataset cannot be read on rank {rank()} ({in_a_line(error)}): {_remedy(error)}"
            ) from error

    def __getitem__(self, index: int) -> Sample:
        index = int(index)  # in the rest of an epoch it is one of numpy's
        sample = self.read(index)
        for tokens, labels, _ in self.kind.sequences:
            keys = (tokens, labels) if self.labelled else (tokens,)
            if flaw := _flaw(sample, keys, self.vocabulary, self.kind.ignored_label):
                raise SampleError(f"{name_of({INDEX: index})} has {flaw}")
        if not self.labelled and not len(sample["tokens"]):
            raise SampleError(
                f"{name_of({INDEX: index})} has no tokens, but a prompt needs at least one: remove it from the dataset"
            )
        sample = {**sample, INDEX: index}
        if self.cut_at is not None:
            sample["tokens"] = sample["tokens"][: self.cut_at]
        self.check_room(index, self.kind.length_of(sample))
        most, longest = self.most_tokens, max(self.kind.lengths_of(sample))
        if most is not None and longest > most:
            raise SampleTooLongError(
                f"{name_of(sample)} has {longest} tokens, but the model takes at most {most} (its max_seq_len): set "
                f"tokenizer.max_seq_len to {most} or less, which cuts longer samples"
            )
        return sample

    def check_room(self, index: int, length: int) -> None:
        if self.room is not None and length > self.room[0]:
            raise SampleTooLargeError(
                f"sample {index} of the dataset has {length} tokens{self.kind.length_suffix}, but a microbatch has "
                f"room for {self.room[0]}{self.room[1]}"
            )

    def longest(self) -> Longest:
        """Collective: the longest sample. Each rank reads its share of them all, once in a run."""
        if self._longest is None:
            own, ranks = Longest(0, 0), dist.get_world_size()
            with progress_bar("longest sample", len(self), "samples", shown=rank() == 0) as bar:
                for index in range(rank(), len(self), ranks):
                    own = max(own, Longest(index, self.kind.length_of(self[index])), key=attrgetter("length"))
                    bar.update(min(ranks, len(self) - bar.n))
            everyone = [Longest(int(at), int(length)) for at, length in Agreement(2).gather(own)]
            self._longest = max(everyone, key=lambda each: (each.length, -each.at))
        return self._longest


def _remedy(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        called = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"the dataset's code ends the process in {called.name} ({called.filename}, line {called.lineno}); "
            "raise an error there, or return"
        )
    columns = " or, if the dataset's columns have other names, set dataset.column_map"
    fix = f"fix it{columns}" if isinstance(error, KeyError) else "fix it or remove it"
    return f"{fix}; TORCHTUNE_ADAPTIVE_TRACEBACK=1 shows the traceback"


def _flaw(sample: object, keys: Sequence[str], known: int | None, ignored: int) -> str | None:
    """What is wrong with the tokens of a sequence, or its labels, for a model that knows so many tokens."""
    if not isinstance(sample, Mapping) or not {*keys} <= sample.keys():
        return f"{' or '.join(f'no {key}' for key in keys)}: {SEE_THE_DATASET}"
    for key in keys:
        try:
            values = np.asarray(sample[key])
        except (TypeError, ValueError, RuntimeError):  # lists of other lengths in it, or a tensor on another device
            values = np.asarray(None)
        if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
            return f"{key} that are not a list of integers ({shown(sample[key])}): {SEE_THE_DATASET}"
        # torchtune would pad the labels, or cut them, and train on what is left
        if len(values) != len(sample[keys[0]]):
            return (
                f"{len(sample[keys[0]])} {keys[0]} and {len(values)} {key}: every token needs a label, or the one that "
                f"the loss ignores; {SEE_THE_DATASET}"
            )
        if known is None:
            continue
        counts = (values < 0) | (values >= known)
        if key != keys[0]:
            counts &= values != ignored
            counts[:1] = False  # no token comes before the first label
        if len(unknown := values[counts]):
            what, remedy = ("token", "use a tokenizer with the model's vocabulary, or remove the sample")
            if key != keys[0]:
                what, remedy = "label", f"the loss ignores {ignored}: use one of these, or remove the sample"
            return f"{what} {unknown[0]}, but the model's vocabulary has {known} tokens, 0 to {known - 1}: {remedy}"
    return None


def name_of(sample: Sample) -> str:
    """The sample by its index; a search makes samples that have none."""
    return f"sample {sample[INDEX]} of the dataset (on rank {rank()})" if INDEX in sample else "a sample"


def longest_taken(models: Iterable[nn.Module]) -> int | None:
    """The longest sequence that all of the models take; None where none of them says."""
    lengths: list[int] = [model.max_seq_len for model in models if hasattr(model, "max_seq_len")]  # type: ignore[misc]
    return min(lengths, default=None)


def vocabulary_of(model: nn.Module) -> int | None:
    """The tokens that a model knows; None where it has no table of them."""
    embedding = getattr(getattr(model, "decoder", model), "tok_embeddings", None)
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
