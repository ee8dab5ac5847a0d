"""Samples that cannot be read or that are too long are named by their index."""

from dataclasses import replace
from typing import Any

import pytest

from torchtune_adaptive.errors import SampleError, SampleTooLargeError
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.samples import INDEX, PAIR

JOINED = replace(PAIR, padded=False)


class Broken:
    def __getitem__(self, _: int) -> Any:
        raise OSError("the index is gone")


def test_unreadable_sample_is_named() -> None:
    with pytest.raises(SampleError, match=r"^sample 0 .* cannot be read on rank 0 \(OSError: the index is gone\): fix"):
        CheckedDataset(Broken())[0]


def test_pair_longer_than_a_microbatch_is_named_with_the_tokens_of_both_answers() -> None:
    pairs = [JOINED.uniform(1, length) for length in (886, 984)]
    samples = CheckedDataset(pairs, JOINED)
    samples.length_limit = 887, "; raise it"
    assert samples[0][INDEX] == 0
    with pytest.raises(
        SampleTooLargeError,
        match=r"^sample 1 of the dataset has 984 tokens in both answers together, but .* has room for 887; raise it$",
    ):
        samples[1]
