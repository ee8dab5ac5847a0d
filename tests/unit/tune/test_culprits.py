"""Which sample made a run fail."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.errors import ConfigError, SampleError, SampleTooLongError, UnrecoverableError
from torchtune_adaptive.tune.culprits import NamedSamples, check_length, naming_bad_samples


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(4, 2)


def look_up(samples: list[dict[str, list[int]]]) -> None:
    Decoder().tok_embeddings(torch.tensor([(sample["tokens"][-1], sample["labels"][-1]) for sample in samples]))


def naming(samples: NamedSamples) -> AbstractContextManager[None]:
    return naming_bad_samples(Decoder(), samples, last=2)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"text": "x"}, "has no tokens or no labels"),
        ({"tokens": [1]}, "has no tokens or no labels"),
        (None, "has no tokens or no labels"),
        ({"tokens": [1, 4], "labels": [1, 1]}, "has token 4, but the model's vocabulary has 4 tokens, 0 to 3"),
        ({"tokens": [1, -4], "labels": [1, 1]}, "has token -4, but"),
        (
            {"tokens": [1, 1], "labels": [1, 4]},
            "has label 4, but the model's vocabulary has 4 tokens, 0 to 3, and the loss",
        ),
        ({"tokens": [1, 1], "labels": [1, -7]}, "has label -7, but"),
        ({"tokens": None, "labels": [1]}, r"has tokens that are not a list of integers \(null\)"),
        ({"tokens": ["a", "b"], "labels": [1, 1]}, r"has tokens that are not a list of integers \(\['a', 'b'\]\)"),
        ({"tokens": [1], "labels": [None]}, "has labels that are not a list of integers"),
        ({"tokens": [[1], [2]], "labels": [1, 2]}, "has tokens that are not a list of integers"),
        ({"tokens": [[1], [2, 3]], "labels": [1, 2]}, "has tokens that are not a list of integers"),
        ({"tokens": [10**30], "labels": [1]}, "has tokens that are not a list of integers"),
        ({"tokens": [0.5], "labels": [1]}, "has tokens that are not a list of integers"),
    ],
)
def test_a_sample_that_no_microbatch_can_be_made_of_is_named(wrong: dict[str, object], says: str) -> None:
    samples = NamedSamples([{"tokens": [1], "labels": [1]}, wrong])
    with (
        pytest.raises(SampleError, match=rf"^sample 1 of the dataset \(on rank 0\) {says}"),
        naming(samples),
    ):
        look_up([samples[0], samples[1]])


def test_a_failure_that_no_sample_explains_is_left_as_it_is() -> None:
    samples = NamedSamples([{"tokens": [1], "labels": [1]}])
    with (
        pytest.raises(RuntimeError, match="elsewhere"),
        naming(samples),
    ):
        raise RuntimeError(f"elsewhere {samples[0]}")


def test_a_label_that_the_loss_ignores_and_a_sample_without_tokens_are_no_flaws() -> None:
    samples = NamedSamples([{"tokens": [1, 2], "labels": [-100, 2]}, {"tokens": [], "labels": []}])
    with pytest.raises(RuntimeError, match="elsewhere"), naming(samples):
        raise RuntimeError(f"elsewhere {samples[0]} {samples[1]}")


def test_labels_that_are_fewer_than_tokens_are_refused_where_they_are_read() -> None:
    samples = NamedSamples([{"tokens": [1, 2, 3], "labels": [1, 2]}])
    with pytest.raises(SampleError, match=r"^sample 0 of the dataset has 3 tokens and 2 labels \(on rank 0\)"):
        samples[0]


class Sized:
    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __len__(self) -> int:
        raise self._error("the index is gone")


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_dataset_without_a_length_is_told_by_its_key(error: type[BaseException]) -> None:
    with pytest.raises(
        ConfigError, match=rf"^dataset has no usable length \({error.__name__}: the index is gone\): use"
    ):
        len(NamedSamples(Sized(error)))
    with pytest.raises(ConfigError, match=r"^dataset has no usable length .* has no len\(\)\): use"):
        len(NamedSamples(iter([1])))


@pytest.mark.parametrize("told", [None, UnrecoverableError("out of memory in the optimizer step")])
def test_no_sample_is_to_blame_for_memory_that_ran_out(told: Exception | None) -> None:
    samples = NamedSamples([{"tokens": [1], "labels": [1]}])
    samples[0]

    def run_out(meter: MemoryMeter) -> None:
        with naming(samples):
            try:
                torch.ones(64)
            except torch.OutOfMemoryError as error:
                meter.cap_bytes = 0  # nor is there any to look at a sample
                raise (told or error) from (error if told else None)

    with MemoryMeter(cap_bytes=64) as meter, pytest.raises((torch.OutOfMemoryError, UnrecoverableError)):
        run_out(meter)


def test_a_sample_that_is_longer_than_the_model_takes_is_named() -> None:
    samples, model = NamedSamples([{"tokens": [1] * count, "labels": [1] * count} for count in (2, 5, 3)]), Decoder()
    model.max_seq_len = 4
    for index in range(3):
        samples[index]
    message = (
        r"^sample 1 of the dataset \(on rank 0\) has 5 tokens, .* at most 4 .* 4 or less, which cuts longer samples$"
    )
    with pytest.raises(SampleTooLongError, match=message), naming_bad_samples(model, samples, last=2):
        check_length(model, 5)
    samples[2]
    with pytest.raises(SampleTooLongError, match=r"^a sample has 5 tokens"), naming_bad_samples(model, samples, last=1):
        check_length(model, 5)
