"""Which sample made a run fail: looked for after the failure, so that nothing is checked while all is well."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from torchtune_adaptive.comm.collectives import rank
from torchtune_adaptive.errors import AdaptiveError, SampleError, UnrecoverableError

MOST_REMEMBERED = 2**17
"""Samples, by index: more than the last steps have, and a megabyte."""


class NamedSamples(Dataset[Any]):
    """A dataset whose errors say which sample they are about. It remembers which samples it gave last."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._given: deque[int] = deque(maxlen=MOST_REMEMBERED)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._given.append(index)
        try:
            return self._dataset[index]
        except (Exception, SystemExit) as error:  # whose status would be that of the run
            what = f"{type(error).__name__}: {error}".replace("\n", " ")
            raise SampleError(
                f"sample {index} of the dataset cannot be read on rank {rank()} ({what}): repair it or leave it out; "
                "TORCHTUNE_ADAPTIVE_TRACEBACK=1 shows where that came from"
            ) from error

    def remember(self, indices: Sequence[int]) -> None:
        """Takes note of samples that another rank has read for this one."""
        self._given.extend(indices)

    def last(self, count: int) -> list[int]:
        """The indices of the samples given last, the latest first."""
        return list(islice(reversed(self._given), count))


@contextmanager
def naming_unknown_tokens(model: nn.Module, samples: NamedSamples, last: int) -> Iterator[None]:
    """Names the token that the model does not know, if one of so many last samples has one, where training fails.

    A CPU says "index out of range", a GPU that some assertion failed, in whatever it is asked to do next.
    """
    try:
        yield
    except Exception as error:
        known = _vocabulary_of(model)
        if known is None or (isinstance(error, AdaptiveError) and not isinstance(error, UnrecoverableError)):
            raise
        lacking = _find_lacking(samples, last)
        if lacking is not None:
            raise SampleError(
                f"sample {lacking} of the dataset (on rank {rank()}) has no tokens or no labels: see whether the "
                "dataset's columns and its transform are those of the data"
            ) from error
        found = _find(samples, last, known)
        if found is None:
            raise
        index, token = found
        raise SampleError(
            f"sample {index} of the dataset has token {token} (on rank {rank()}), but the model knows {known} tokens, "
            f"0 to {known - 1}: give model and tokenizer the same vocabulary, or leave the sample out"
        ) from error


def _vocabulary_of(model: nn.Module) -> int | None:
    embedding = getattr(getattr(model, "decoder", model), "tok_embeddings", None)
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _find_lacking(samples: NamedSamples, last: int) -> int | None:
    """The index of a sample without what a microbatch is made of."""
    for index in samples.last(last):
        sample = samples[index]
        if not isinstance(sample, Mapping) or not {"tokens", "labels"} <= sample.keys():
            return index
    return None


def _find(samples: NamedSamples, last: int, known: int) -> tuple[int, int] | None:
    """The index of a sample and its token beyond the vocabulary."""
    for index in samples.last(last):
        sample = samples[index]
        tokens, labels = (torch.as_tensor(sample[name]).flatten() for name in ("tokens", "labels"))
        # what the loss ignores is below 0, as a rule
        unknown = torch.cat([tokens[(tokens < 0) | (tokens >= known)], labels[labels >= known]])
        if len(unknown):
            return index, int(unknown[0])
    return None
