"""`adaptive.oversize`: samples that are too long for any microbatch, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from torchtune_adaptive.comm.collectives import sum_over_ranks
from torchtune_adaptive.errors import SampleTooLargeError
from torchtune_adaptive.tune.parts.culprits import NamedSamples
from torchtune_adaptive.tune.parts.samples import Kind, Sample
from torchtune_adaptive.tune.run.fitting import say

Item = TypeVar("Item")

REMEDY = (
    "; raise adaptive.token_budget or lower tokenizer.max_seq_len, or set adaptive.oversize: truncate (cuts such "
    "samples) or skip (leaves them out)"
)


class Admission:
    """Admits the samples of a run to its microbatches, and counts those that had to be changed for that."""

    def __init__(self, dataset: NamedSamples, kind: Kind, longest: int, oversize: str, remedy: str = REMEDY) -> None:
        self.done = "cut" if oversize == "truncate" else "left out"
        self._dataset, self._kind, self._longest, self._oversize = dataset, kind, longest, oversize
        self._remedy = remedy
        self._seen = self._changed = 0

    def admit(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples that were read last, each if it fits; else its beginning, or a stand-in without labels: no rank
        may be a sample short."""
        indices = reversed(self._dataset.last(len(samples)))
        return [self._admitted(sample, index) for sample, index in zip(samples, indices, strict=True)]

    def _admitted(self, sample: Sample, index: int) -> Sample:
        length = self._kind.length_of(sample)
        self._seen += 1
        if length <= self._longest:
            return sample
        if self._oversize == "error" or "encoder_input" in sample:
            raise SampleTooLargeError(
                f"sample {index} of the dataset has {length} tokens, but a microbatch has room for {self._longest}"
                f"{self._remedy}"
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
