"""`adaptive.token_budget` and `adaptive.oversize`: microbatches by tokens, and samples too long for any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from torchtune_adaptive.config.keys import Settings, value_at
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.ranks import sum_over_ranks
from torchtune_adaptive.errors import ConfigError, Remedy, SampleTooLargeError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.longest_sample import longest_sample
from torchtune_adaptive.tune.samples import INDEX, Kind, Sample

LONGEST_SAMPLE = 2**20
"""The longest sample that is compared with the limit, where nothing says less."""

Item = TypeVar("Item")


class Admission:
    """Admits the samples of a run to its microbatches, and counts those that had to be changed for that."""

    def __init__(self, kind: Kind, longest: int, oversize: str, remedy: str) -> None:
        """`remedy` ends the error about a sample of more than `longest` tokens."""
        self.done = "truncated" if oversize == "truncate" else "skipped"
        self._kind, self._longest, self._oversize = kind, longest, oversize
        self._remedy = remedy
        self._seen = self._changed = 0

    def admit(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, each if it fits; else its beginning, or a stand-in without labels: no rank may be a sample
        short."""
        return [self._admitted(sample) for sample in samples]

    def _admitted(self, sample: Sample) -> Sample:
        length = self._kind.length_of(sample)
        self._seen += 1
        if length <= self._longest:
            return sample
        if self._oversize == "error" or "encoder_input" in sample:
            raise self.too_large(sample[INDEX], length)
        self._changed += 1
        return self._kind.cut(sample, self._longest) if self._oversize == "truncate" else self._kind.filler(sample)

    def too_large(self, index: int, length: int) -> SampleTooLargeError:
        """An error for a sample that is longer than any microbatch has room for."""
        return SampleTooLargeError(
            f"sample {index} of the dataset has {length} tokens{self._kind.length_suffix}, but a microbatch has room "
            f"for {self._longest}{self._remedy}"
        )

    def counting(self, steps: Iterable[Item], epoch: int) -> Iterator[Item]:
        """Collective: the steps of an epoch; once they are done, one line says how many samples were changed."""
        self._seen = self._changed = 0
        yield from steps
        seen, changed = (int(count) for count in sum_over_ranks(torch.tensor([self._seen, self._changed])))
        if changed:
            share = f"{changed} of {seen} samples ({100 * changed / seen:.1f} %)"
            say(f"token budget · epoch {epoch}: {share} were longer than {self.tokens} and {self.done}")

    @property
    def tokens(self) -> str:
        """The most tokens of a sample, in words."""
        return f"{count_of(self._longest, 'token')}{self._kind.length_suffix}"


def admission_of(settings: Settings, data: Data, kind: Kind, longest: int, remedy: str | None = None) -> Admission:
    """Collective: what sees to it that no sample is longer than a microbatch has room for. `remedy` ends the error."""
    oversize = settings.adaptive.oversize
    admission = Admission(kind, longest, oversize, remedy or remedy_for(settings, kind.longest_at(longest)))
    # The tokenizer says how long samples are to be; a dataset may know nothing of it, and each sample is looked at.
    if data.max_seq_len is not None and kind.length_at(data.max_seq_len) <= longest:
        return admission
    if oversize != "error":
        say(f"token budget · samples of more than {admission.tokens} are {admission.done} (adaptive.oversize)")
    elif (worst := longest_sample(settings.config, data.dataset, kind)).length > longest:
        raise admission.too_large(worst.at, worst.length)
    return admission


def remedy_for(settings: Settings, shortest: int) -> str:
    """The end of the error; `shortest`: the tokenizer's limit under which all samples fit."""
    asked = value_at(settings.config, "tokenizer.max_seq_len")
    shorter = f"lower tokenizer.max_seq_len to {shortest}" if shortest else "lower tokenizer.max_seq_len"
    if isinstance(asked, int) and asked <= shortest:
        shorter = f"use a dataset that, unlike this one, truncates samples to tokenizer.max_seq_len ({asked})"
    oversize = "set adaptive.oversize: truncate (cuts such samples) or skip (drops them)"
    return f"; {', '.join(ways_to_make_room(settings, shorter))}, or {oversize}"


def ways_to_make_room(settings: Settings, shorter: str) -> list[str]:
    """Ways to make room for longer samples, or to have shorter ones."""
    if settings.adaptive.token_budget != "auto":
        return ["raise adaptive.token_budget", shorter]
    # then it is memory that says how many tokens fit
    checkpointing = [] if settings.enable_activation_checkpointing else [Remedy.CHECKPOINT_ACTIVATIONS]
    return [shorter, *(KEYS[each] for each in (*checkpointing, Remedy.MORE_RANKS, Remedy.LARGER_BUDGET))]


def rows_of_packs(limit: Limit, length: int) -> RowLimit:
    """Packed rows, all of one length: as many as fit, in the order of the data, with nothing to gain from sorting."""
    rows = limit.rows_at(length)
    if rows == 0:
        raise ConfigError(
            f"adaptive.token_budget is {limit}, but every packed row has {length}: "
            f"set it to {length} or more, or lower tokenizer.max_seq_len"
        )
    say(f"token budget · the dataset is packed, all rows have {length} tokens: microbatches of {RowLimit(rows)}")
    return RowLimit(rows)
