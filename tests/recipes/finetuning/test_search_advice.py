"""What a search says of samples that it has not measured: shorter ones, and longer ones than there can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hearing import listening
from tests.recipes.running import start_here
from torchtune_adaptive.errors import ConfigError

SEARCHED = ("--config", "adaptive/demo/full", "use_maximum_batch_size=True")


class OfLengths:
    """Samples of given lengths, over and over."""

    def __init__(self, lengths: list[int], samples: int) -> None:
        self._lengths = [lengths[at % len(lengths)] for at in range(samples)]

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": [1] * self._lengths[index], "labels": [1] * self._lengths[index]}


def of_lengths(tokenizer: Any, *, lengths: list[int], samples: int, packed: bool) -> OfLengths:
    """Component for a config's `dataset:`."""
    return OfLengths(lengths, samples)


def started(lengths: str, *overrides: str) -> list[str]:
    """What a run of samples of these lengths says before it would train."""
    dataset = (f"dataset._component_={__name__}.of_lengths", "dataset.samples=64", f"dataset.lengths={lengths}")
    with listening() as lines:
        start_here("full", *SEARCHED, *dataset, *overrides)
    return lines


@pytest.mark.parametrize(
    ("lengths", "overrides", "line"),
    [
        (
            "[30,40,50,512]",
            (),
            "the median sample has 40 tokens, but rows were measured with 512: adaptive.token_budget=auto "
            "use_maximum_batch_size=False would run more samples at once",
        ),
        ("[400,512]", (), None),
        ("[30,512]", ("gradient_accumulation_steps=1", "batch_size=2"), None),  # the step is one microbatch
    ],
)
def test_one_line_says_that_most_samples_are_far_shorter_than_what_was_measured(
    lengths: str, overrides: tuple[str, ...], line: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    several = ("adaptive.sequence_length=null", "adaptive.memory_limit=48MiB", "gradient_accumulation_steps=16")
    lines = [each for each in started(lengths, *several, *overrides) if each.startswith("the median sample")]
    assert lines == ([] if line is None else [line])


def test_samples_that_the_tokenizer_does_not_let_through_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = started("[60]", "tokenizer.max_seq_len=64", "adaptive.sequence_length=256")
    assert [each for each in lines if "256" in each] == [
        "adaptive.sequence_length is 256, but the tokenizer cuts samples to 64 tokens (tokenizer.max_seq_len): "
        "measuring 64"
    ]
    assert any(line.startswith("batch search · linear · 64 tokens") for line in lines)


def test_the_longest_sample_of_a_dataset_is_named_where_the_model_does_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = r"^sample 2 of the dataset \(on rank 0\) has 2250 tokens, .* to 2048 or less, which cuts longer samples$"
    with pytest.raises(ConfigError, match=message):
        started("[30,40,2250]", "tokenizer.max_seq_len=null", "adaptive.sequence_length=null")
