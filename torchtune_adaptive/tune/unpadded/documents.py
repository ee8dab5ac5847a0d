"""Several samples as one row, and the value that tells attention where each of them ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchtune import utils

Batch = dict[str, Any]
"""What a model is given: the rows of a microbatch, and what belongs to them."""


class Documents(NamedTuple):
    """Where the samples of a row end. It travels through torchtune's decoder as the mask.

    A NamedTuple, because FSDP, activation checkpointing and torch.compile look for tensors inside of those.
    """

    ends: Tensor
    """int32, on the model's device; a 0 before the first."""
    longest: int
    """Tokens of the longest sample."""


def joined(samples: Sequence[dict[str, Any]], ignored: int) -> Batch:
    """A collate function: the samples one after another, without padding; positions begin anew with each.

    The first label of each sample is ignored: labels are shifted by one afterwards, and then it would be what the last
    token of the sample before has to predict.
    """
    lengths = [len(sample["tokens"]) for sample in samples]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    labels = _row(samples, "labels")
    labels[ends[:-1]] = ignored
    return {
        "tokens": _row(samples, "tokens")[None],
        "labels": labels[None],
        "input_pos": torch.cat([torch.arange(length) for length in lengths])[None],
        "mask": Documents(ends, max(lengths)),
    }


def _row(samples: Sequence[dict[str, Any]], key: str) -> Tensor:
    return torch.cat([torch.as_tensor(sample[key], dtype=torch.int64) for sample in samples])


def longest_of(batch: Batch) -> int:
    """Tokens of the longest sample of a batch; where it is padded, those of its rows."""
    mask = batch.get("mask")
    return mask.longest if isinstance(mask, Documents) else int(batch["tokens"].size(1))


def batch_to_device(batch: Batch, device: torch.device) -> None:
    """torchtune's function, which knows no other masks than its own."""
    documents = batch.pop("mask") if isinstance(batch.get("mask"), Documents) else None
    utils.batch_to_device(batch, device)
    if documents is not None:
        batch["mask"] = documents._replace(ends=documents.ends.to(device))


def targets_of(batch: Batch, labels: Tensor, ignored: int) -> Tensor | None:
    """Positions in the row whose label counts, or the first if none does; None where rows are padded.

    With padding every token has its logits: there, rows are stock's to the bit.
    """
    if not isinstance(batch.get("mask"), Documents):
        return None
    positions = labels[0].ne(ignored).nonzero()[:, 0]
    # a layer that gets no token at all is more than its kernels have been tried with
    return positions if len(positions) else positions.new_zeros(1)


@contextmanager
def taking_long_rows(model: nn.Module, batch: Batch) -> Iterator[None]:
    """While open, the model takes a row of any length if each sample in it is short enough.

    `max_seq_len` is as far as positions go, and these begin anew with each sample. torchtune compares it with the row.
    """
    most: Any = getattr(model, "max_seq_len", None)
    if most is None or not isinstance(batch.get("mask"), Documents):
        yield
        return
    row = int(batch["tokens"].size(1))
    model.max_seq_len = max(most, row)
    try:
        yield
    finally:
        model.max_seq_len = most
