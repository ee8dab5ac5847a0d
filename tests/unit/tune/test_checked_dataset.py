"""Invalid samples are named by their index."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.tune.models import build
from torchtune_adaptive.errors import (
    ConfigError,
    SampleError,
    SampleTooLargeError,
    SampleTooLongError,
    UnrecoverableError,
)
from torchtune_adaptive.tune.checked_dataset import CheckedDataset, vocabulary_of
from torchtune_adaptive.tune.samples import INDEX, PAIR

JOINED = replace(PAIR, padded=False)
WRONG: list[tuple[Any, str]] = [
    ({"text": "x"}, "no tokens or no labels"),
    ({"tokens": [1]}, "no tokens or no labels"),
    ({"tokens": [1, 4], "labels": [1, 1]}, "token 4, but the model's vocabulary has 4 tokens, 0 to 3"),
    ({"tokens": torch.tensor([1, -4]), "labels": torch.tensor([1, 1])}, "token -4, but"),
    ({"tokens": [1, 1], "labels": [1, 4]}, "label 4, but the model's vocabulary has 4 tokens, 0 to 3: the loss"),
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
    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __len__(self) -> int:
        raise self._error("the index is gone")

    def __getitem__(self, _: int) -> Any:
        raise self._error("the index is gone")


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_dataset_without_a_length_is_reported_by_its_key(error: type[BaseException]) -> None:
    with pytest.raises(
        ConfigError, match=rf"^dataset has no usable length \({error.__name__}: the index is gone\): use"
    ):
        len(CheckedDataset(Broken(error)))
    with pytest.raises(ConfigError, match=r"^dataset has no usable length .* has no len\(\)\): use"):
        len(CheckedDataset(iter([1])))


@pytest.mark.parametrize(
    ("error", "told_as", "message"),
    [
        (
            SystemExit,
            SampleError,
            r"sample 0 .* cannot be read on rank 0 \(SystemExit: .*: the dataset's code ends the pr",
        ),
        (MemoryError, UnrecoverableError, r"out of memory on rank 0 while sample 0 of the dataset was read \("),
    ],
)
def test_dataset_that_exits_or_exhausts_host_memory_is_reported(
    error: type[BaseException], told_as: type[Exception], message: str
) -> None:
    with pytest.raises(told_as, match=f"^{message}"):
        CheckedDataset(Broken(error))[0]


def test_pair_longer_than_a_microbatch_is_named_with_the_tokens_of_both_answers() -> None:
    pairs = [JOINED.uniform(1, length) for length in (886, 984)]
    samples = CheckedDataset(pairs, JOINED)
    samples.room = 887, "; raise it"
    assert samples[0][INDEX] == 0
    with pytest.raises(
        SampleTooLargeError,
        match=r"^sample 1 of the dataset has 984 tokens in both answers together, but .* has room for 887; raise it$",
    ):
        samples[1]
