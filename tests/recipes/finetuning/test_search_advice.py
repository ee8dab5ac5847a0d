"""The length that a search measures."""

from pathlib import Path
from typing import Any

import pytest

from tests.captured_logs import captured_log
from tests.recipes.running import start_in_process
from torchtune_adaptive.errors import ConfigError

SEARCHED = ("--config", "adaptive/demo/full", "use_maximum_batch_size=True")


class OfLengths:
    """Samples of the given lengths, repeated."""

    def __init__(self, lengths: list[int], samples: int) -> None:
        self._lengths = [lengths[at % len(lengths)] for at in range(samples)]

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": [1] * self._lengths[index], "labels": [1] * self._lengths[index]}


def of_lengths(tokenizer: Any, *, lengths: list[int], samples: int, packed: bool) -> OfLengths:
    """Component for the `dataset` section of a config."""
    return OfLengths(lengths, samples)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(lengths: str, *overrides: str) -> list[str]:
    """Return the log lines of a run with samples of these lengths, up to the start of training."""
    dataset = (f"dataset._component_={__name__}.of_lengths", "dataset.samples=64", f"dataset.lengths={lengths}")
    with captured_log() as lines:
        start_in_process("full", *SEARCHED, *dataset, *overrides)
    return lines


def test_length_above_the_tokenizers_maximum_is_not_measured() -> None:
    lines = started("[60]", "tokenizer.max_seq_len=64", "adaptive.sequence_length=256")
    assert any(line.startswith("batch search · linear · 64 tokens") for line in lines)


def test_sample_longer_than_the_model_allows_is_named() -> None:
    message = r"^sample 2 of the dataset \(on rank 0\) has 2250 tokens, .* to 2048 or less, which cuts longer samples$"
    with pytest.raises(ConfigError, match=message):
        started("[30,40,2250]", "tokenizer.max_seq_len=null", "adaptive.sequence_length=null")
