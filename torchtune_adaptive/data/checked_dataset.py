"""A dataset that checks the length of every sample when it is read, and whose errors name the sample."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.data.samples import INDEX, TEXT, Sample, TokenKind
from torchtune_adaptive.engine.ranks import Agreement, rank
from torchtune_adaptive.errors import SampleError, SampleTooLargeError
from torchtune_adaptive.lifecycle.console import progress_bar


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
            raise SampleError(
                f"sample {index} of the dataset cannot be read on rank {rank()} ({in_a_line(error)}): fix it or remove "
                "it; choose a dataset of the kind that this recipe trains on; or, if columns have other names, set the "
                "key that names them, such as dataset.column_map or dataset.conversation_column; "
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
