"""Which sample made a run fail: looked for after the failure, so that next to nothing is checked while all is well."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.ranks import rank
from torchtune_adaptive.errors import (
    AdaptiveError,
    ConfigError,
    RunStopped,
    SampleError,
    SampleTooLongError,
    UnrecoverableError,
)
from torchtune_adaptive.text import shown
from torchtune_adaptive.tune.samples import TEXT, Fields, Kind, Sample

MOST_REMEMBERED = 2**17
"""Samples, by index: more than the last steps have, and a megabyte."""
SEE_THE_DATASET = "check that the dataset's columns and transform match the data"


class NamedSamples(Dataset[Sample]):
    """A dataset whose errors say which sample they are about. It remembers which samples it gave last."""

    def __init__(self, dataset: Any, kind: Kind = TEXT) -> None:
        self.kind = kind
        self.complete: Callable[[int, Sample], Sample] | None = None
        """What is added to a sample that has been read, by its index."""
        self._dataset = dataset
        self._given: deque[int] = deque(maxlen=MOST_REMEMBERED)

    def __len__(self) -> int:
        try:
            return len(self._dataset)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"dataset has no usable length ({in_a_line(error)}): use one whose __len__ works"
            ) from error

    def __getitem__(self, index: int) -> Sample:
        self._given.append(index)
        try:
            sample: Sample = self._dataset[index]
        except (Exception, SystemExit) as error:  # whose status would be that of the run
            raise SampleError(
                f"sample {index} of the dataset cannot be read on rank {rank()} ({in_a_line(error)}): {_remedy(error)}"
            ) from error
        # The one flaw that no failure would tell of: torchtune pads the labels, and what is left of them is trained.
        if counts := _unlike_counts(sample, self.kind):
            raise SampleError(
                f"sample {index} of the dataset has {counts} (on rank {rank()}): every token needs a label, or the one "
                f"that the loss ignores; {SEE_THE_DATASET}"
            )
        return sample if self.complete is None else self.complete(index, sample)

    def remember(self, indices: Sequence[int]) -> None:
        """Takes note of samples that another rank has read for this one."""
        self._given.extend(indices)

    def last(self, count: int) -> list[int]:
        """The indices of the samples given last, the latest first."""
        return list(islice(reversed(self._given), count))


def _remedy(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        called = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"the dataset's code ends the process in {called.name} ({called.filename}, line {called.lineno}); "
            "raise an error there, or return"
        )
    if isinstance(error, KeyError):
        return (
            "fix it or, if the dataset's columns have other names, set dataset.column_map; "
            "TORCHTUNE_ADAPTIVE_TRACEBACK=1 shows the traceback"
        )
    return "fix it or remove it; TORCHTUNE_ADAPTIVE_TRACEBACK=1 shows the traceback"


def _unlike_counts(sample: Sample, kind: Kind) -> str | None:
    """`7 tokens and 4 labels`; None where they are as many, or cannot be counted, which a microbatch will find."""
    for fields in kind.sequences:
        try:
            tokens, labels = len(sample[fields.tokens]), len(sample[fields.labels])
        except (TypeError, LookupError):
            return None
        if tokens != labels:
            return f"{tokens} {fields.tokens} and {labels} {fields.labels}"
    return None


@contextmanager
def naming_bad_samples(model: nn.Module, samples: NamedSamples, *, last: int) -> Iterator[None]:
    """Names the sample, among so many last ones, that a model cannot take, if there is one where training fails.

    Of a token that it does not know a CPU says "index out of range", a GPU that some assertion failed, in whatever it
    is asked to do next.
    """
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:
        if isinstance(error, SampleTooLongError):
            _check_lengths(model, samples, last, error)
        if isinstance(error, AdaptiveError) and not isinstance(error, UnrecoverableError):
            raise
        if is_oom(error.__cause__ or error):  # looking at a sample takes memory, too
            raise
        known = vocabulary_of(model)
        for index in samples.last(last):
            check_sample(index, samples[index], samples.kind, known, cause=error)
        raise


def check_sample(
    index: int, sample: object, kind: Kind, known: int | None = None, cause: Exception | None = None
) -> None:
    """Raises an error that names a sample which a model that knows so many tokens cannot take."""
    if flaw := _flaw(sample, kind, known):
        raise SampleError(f"{_told_as(index)} has {flaw}") from cause


def _told_as(index: int) -> str:
    return f"sample {index} of the dataset (on rank {rank()})"


def check_length(model: nn.Module, tokens: int, what: str = "a sample", cause: Exception | None = None) -> None:
    """Refuses what is longer than the model takes."""
    taken = longest_taken([model])
    if taken is not None and tokens > taken:
        raise SampleTooLongError(
            f"{what} has {tokens} tokens, but the model takes at most {taken} (its max_seq_len): set "
            f"tokenizer.max_seq_len to {taken} or less, which cuts longer samples"
        ) from cause


def _check_lengths(model: nn.Module, samples: NamedSamples, last: int, cause: Exception) -> None:
    """Raises the error that names the sample that is longer than the model takes, if one of so many last ones is."""
    for index in samples.last(last):
        check_length(model, max(samples.kind.lengths_of(samples[index])), _told_as(index), cause)


def longest_taken(models: Iterable[nn.Module]) -> int | None:
    """The longest sequence that all of the models take; None where none of them says."""
    lengths: list[int] = [model.max_seq_len for model in models if hasattr(model, "max_seq_len")]  # type: ignore[misc]
    return min(lengths, default=None)


def vocabulary_of(model: nn.Module) -> int | None:
    """The tokens that a model knows; None where it has no table of them."""
    embedding = getattr(getattr(model, "decoder", model), "tok_embeddings", None)
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _flaw(sample: object, kind: Kind, known: int | None) -> str | None:
    """What is wrong with a sample, and what to do about it, for a model that knows so many tokens."""
    flaws = (_flaw_of_sequence(sample, fields, known, kind.ignored_label) for fields in kind.sequences)
    return next(filter(None, flaws), None)


def _flaw_of_sequence(sample: object, fields: Fields, known: int | None, ignored: int) -> str | None:
    if not isinstance(sample, Mapping) or not {fields.tokens, fields.labels} <= sample.keys():
        return f"no {fields.tokens} or no {fields.labels}: {SEE_THE_DATASET}"
    tokens, labels = (_numbers(sample[name]) for name in (fields.tokens, fields.labels))
    for name, numbers in ((fields.tokens, tokens), (fields.labels, labels)):
        if numbers is None:
            return f"{name} that are not a list of integers ({shown(sample[name])}): {SEE_THE_DATASET}"
    assert tokens is not None
    assert labels is not None
    if known is None:
        return None
    vocabulary = f"but the model's vocabulary has {known} tokens, 0 to {known - 1}"
    if len(unknown := tokens[(tokens < 0) | (tokens >= known)]):
        return (
            f"token {int(unknown[0])}, {vocabulary}: use a tokenizer with the model's vocabulary, or remove the sample"
        )
    if len(unknown := labels[((labels < 0) | (labels >= known)) & (labels != ignored)]):
        return (
            f"label {int(unknown[0])}, {vocabulary}, and the loss ignores {ignored}: use one of these, or remove the "
            "sample"
        )
    return None


def _numbers(values: Any) -> Tensor | None:
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    whole = not (numbers.is_floating_point() or numbers.is_complex()) or len(values) == 0
    return numbers if numbers.ndim == 1 and whole else None
