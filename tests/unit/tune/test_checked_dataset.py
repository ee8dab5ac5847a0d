"""Invalid samples are named by their index."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.tune.models import build
from torchtune_adaptive.errors import (
    SampleError,
    SampleTooLargeError,
    SampleTooLongError,
)
from torchtune_adaptive.tune.checked_dataset import CheckedDataset, vocabulary_of
from torchtune_adaptive.tune.samples import INDEX, PAIR

JOINED = replace(PAIR, padded=False)
WRONG: list[tuple[Any, str]] = [
    ({"text": "x"}, "no tokens or no labels"),
    ({"tokens": [1]}, "no tokens or no labels"),
    ({"tokens": [1, 4], "labels": [1, 1]}, "token 4, but the model's vocabulary has 4 tokens, 0 to 3"),
    ({"tokens": torch.tensor([1, -4]), "labels": torch.tensor([1, 1])}, "token -4, but"),
    (
        {"tokens": [1, 1], "labels": [1, 4]},
        "label 4, but the model's vocabulary has 4 tokens, 0 to 3: use one of these",
    ),
    ({"tokens": [1, 2, 3], "labels": [1, 2]}, "3 tokens and 2 labels: every token needs a label"),
    ({"tokens": None, "labels": [1]}, r"tokens that are not a list of integers \(null\)"),
    ({"tokens": ["a", "b"], "labels": [1, 1]}, r"tokens that are not a list of integers \(\['a', 'b'\]\)"),
    ({"tokens": [[1], [2]], "labels": [1, 2]}, "tokens that are not a list of integers"),
    ({"tokens": [[1], [2, 3]], "labels": [1, 2]}, "tokens that are not a list of integers"),
    ({"tokens": [10**30], "labels": [1]}, "tokens that are not a list of integers"),
    ({"tokens": [1.0, 2.0], "labels": [1, 2]}, "tokens that are not a list of integers"),
    ({"tokens": [1, 2], "labels": torch.tensor([1.0, 2.0])}, "labels that are not a list of integers"),
    ({"tokens": [1] * 5, "labels": [1] * 5}, "5 tokens, but the model takes at most 4 .* to 4 or less, which cuts"),
]


@pytest.mark.parametrize(("wrong", "expected"), WRONG, ids=str)
def test_invalid_sample_is_named_when_it_is_read(wrong: Any, expected: str) -> None:
    samples = CheckedDataset([{"tokens": [1] * 4, "labels": [1] * 4}, wrong])
    samples.vocabulary = samples.most_tokens = 4
    assert samples[0] == {"tokens": [1] * 4, "labels": [1] * 4, INDEX: 0}
    with pytest.raises(
        (SampleError, SampleTooLongError), match=rf"^sample 1 of the dataset \(on rank 0\) has {expected}"
    ):
        samples[1]


def test_both_answers_of_a_pair_are_checked() -> None:
    pair = {key: [1, 2] for fields in PAIR.sequences for key in fields[:2]}
    samples = CheckedDataset([pair, {**pair, "rejected_labels": [1]}], PAIR)
    assert samples[0] == {**pair, INDEX: 0}
    with pytest.raises(SampleError, match=r"^sample 1 .* has 2 rejected_input_ids and 1 rejected_labels"):
        samples[1]


@pytest.mark.parametrize(
    "sample",
    [
        {"tokens": [1, 2], "labels": [-100, 2]},
        {"tokens": [1, 2], "labels": [-7, 2]},
        {"tokens": [], "labels": []},
        {"tokens": torch.tensor([1, 2], dtype=torch.int32), "labels": torch.tensor([-100, 2])},
    ],
    ids=["ignored", "before all tokens", "empty", "tensors"],
)
def test_samples_accepted_by_stock_are_valid(sample: dict[str, Any]) -> None:
    samples = CheckedDataset([sample])
    samples.vocabulary = 4
    assert samples[0][INDEX] == 0


def test_vocabulary_is_that_of_the_embedding() -> None:
    assert vocabulary_of(build()) == 128
    assert vocabulary_of(nn.Linear(1, 1)) is None


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
