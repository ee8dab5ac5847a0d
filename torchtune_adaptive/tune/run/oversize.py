"""`adaptive.oversize`: samples that are too long for any microbatch, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from torchtune_adaptive.comm.collectives import sum_over_ranks
from torchtune_adaptive.errors import SampleTooLargeError
from torchtune_adaptive.tune.parts.samples import Kind, Sample
from torchtune_adaptive.tune.run.fitting import say

Item = TypeVar("Item")

REMEDY = (
    "raise adaptive.token_budget or lower tokenizer.max_seq_len, or set adaptive.oversize: truncate (cuts such "
    "samples) or skip (leaves them out)"
)


class Admission:
    """Admits the samples of a run to its microbatches, and counts those that had to be changed for that."""

    def __init__(self, kind: Kind, longest: int, oversize: str) -> None:
        self.done = "cut" if oversize == "truncate" else "left out"
        self._kind, self._longest, self._oversize = kind, longest, oversize
        self._seen = self._changed = 0

    def admit(self, sample: Sample) -> Sample:
        """The sample if it fits; else its beginning, or a stand-in without labels: no rank may be a sample short."""
        length = self._kind.length_of(sample)
        self._seen += 1
        if length <= self._longest:
            return sample
        if self._oversize == "error" or "encoder_input" in sample:
            raise SampleTooLargeError(
                f"a sample has {length} tokens, but a microbatch has room for {self._longest}; {REMEDY}"
            )
        self._changed += 1
        return self._kind.cut(sample, self._longest) if self._oversize == "truncate" else self._kind.filler(sample)

    def telling(self, steps: Iterable[Item], epoch: int) -> Iterator[Item]:
        """Collective: the steps of an epoch; once they are done, one line says how many samples were changed."""
        self._seen = self._changed = 0
        yield from steps
        seen, changed = (int(count) for count in sum_over_ranks(torch.tensor([self._seen, self._changed])))
        if changed:
            share = f"{changed} of {seen} samples ({changed / seen:.1%})"
            say(f"token budget · epoch {epoch + 1}: {share} were {self.done}, of more than {self._longest} tokens")
