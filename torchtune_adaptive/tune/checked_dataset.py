"""A dataset that checks every sample when it is read, so errors name the sample.

Without the check, a token outside the vocabulary raises "index out of range" on a CPU, and a device-side assertion in
a later kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.engine.ranks import Agreement, rank
from torchtune_adaptive.errors import SampleError, SampleTooLargeError, SampleTooLongError
from torchtune_adaptive.formatting import shown
from torchtune_adaptive.lifecycle.console import progress_bar
from torchtune_adaptive.tune.samples import INDEX, TEXT, Sample, TokenKind

CHECK_COLUMNS = "check that the dataset's columns and transform match the data"


class Longest(NamedTuple):
    """The longest sample of a dataset; the first one if several are equally long."""

    at: int
    """Its index in the dataset."""
    length: int


class CheckedDataset(Dataset[Sample]):
    """Wraps a dataset: checks each sample, adds its index, and names it in errors."""

    def __init__(self, dataset: Any, kind: TokenKind = TEXT, *, labelled: bool = True) -> None:
        self.kind = kind
        """The kind of the samples, padded or not."""
        self.labelled = labelled
        """False if samples have no labels: prompts."""
        self.vocabulary: int | None = None
        """Size of the model's vocabulary; None: unknown."""
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

    def read(self, index: int) -> Any:
        """Return a sample without checking it; an error names its index."""
        try:
            return self.dataset[index]
        except (Exception, SystemExit) as error:
            raise SampleError(
                f"sample {index} of the dataset cannot be read on rank {rank()} ({in_a_line(error)}): fix it or remove "
                "it or, if the dataset's columns have other names, set the key that names them, such as "
                "dataset.column_map or dataset.conversation_column; "
                "TORCHTUNE_ADAPTIVE_TRACEBACK=1 shows the traceback"
            ) from error

    def __getitem__(self, index: int) -> Sample:
        index = int(index)  # resumed epochs pass NumPy integers
        sample = self.read(index)
        for tokens, labels, _ in self.kind.sequences:
            keys = (tokens, labels) if self.labelled else (tokens,)
            if problem := _problem(sample, keys, self.vocabulary, self.kind.ignored_label):
                raise SampleError(f"{name_of({INDEX: index})} has {problem}")
        if not self.labelled and not len(sample["tokens"]):
            raise SampleError(
                f"{name_of({INDEX: index})} has no tokens, but a prompt needs at least one: remove it from the dataset"
            )
        sample = {**sample, INDEX: index}
        if self.truncate_at is not None:
            sample["tokens"] = sample["tokens"][: self.truncate_at]
        self.check_length(index, self.kind.length_of(sample))
        most, longest = self.most_tokens, max(self.kind.lengths_of(sample))
        if most is not None and longest > most:
            raise SampleTooLongError(
                f"{name_of(sample)} has {longest} tokens, but the model takes at most {most} (its max_seq_len): set "
                f"tokenizer.max_seq_len to {most} or less, which cuts longer samples"
            )
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


def _problem(sample: object, keys: Sequence[str], vocabulary: int | None, ignored: int) -> str | None:
    """Describe what is wrong with the tokens or labels of a sequence; None if nothing is."""
    if not isinstance(sample, Mapping) or not {*keys} <= sample.keys():
        return f"{' or '.join(f'no {key}' for key in keys)}: {CHECK_COLUMNS}"
    for key in keys:
        try:
            values = np.asarray(sample[key])
        except (TypeError, ValueError, RuntimeError):  # nested lists, or a tensor on another device
            values = np.asarray(None)
        if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
            return f"{key} that are not a list of integers ({shown(sample[key])}): {CHECK_COLUMNS}"
        # torchtune would silently pad or truncate the labels.
        if len(values) != len(sample[keys[0]]):
            return (
                f"{len(sample[keys[0]])} {keys[0]} and {len(values)} {key}: every token needs a label, or the one that "
                f"the loss ignores; {CHECK_COLUMNS}"
            )
        if vocabulary is None:
            continue
        invalid = (values < 0) | (values >= vocabulary)
        if key != keys[0]:
            invalid &= values != ignored
            invalid[:1] = False  # the shift drops the first label
        if len(unknown := values[invalid]):
            what, remedy = ("token", "use a tokenizer with the model's vocabulary, or remove the sample")
            if key != keys[0]:
                what, remedy = "label", f"use one of these, or {ignored}, which the loss ignores; or remove the sample"
            return (
                f"{what} {unknown[0]}, but the model's vocabulary has {vocabulary} tokens, 0 to {vocabulary - 1}: "
                f"{remedy}"
            )
    return None


def name_of(sample: Sample) -> str:
    """Return the name of a sample in messages; synthetic samples have no index."""
    return f"sample {sample[INDEX]} of the dataset (on rank {rank()})" if INDEX in sample else "a sample"


def max_seq_len_of(models: Iterable[nn.Module]) -> int | None:
    """Return the smallest max_seq_len of the models; None if unknown."""
    decoders: list[Any] = [getattr(model, "decoder", model) for model in models]
    return min((each.max_seq_len for each in decoders if hasattr(each, "max_seq_len")), default=None)


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the size of a model's vocabulary; None without an embedding of tokens."""
    embedding = getattr(getattr(model, "decoder", model), "tok_embeddings", None)
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
