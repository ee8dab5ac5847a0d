"""A few samples show that data differ between ranks, or from those of the resumed run."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune import fingerprint
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.fingerprint import COMPARED, check_same_data, fingerprint_of

LINES = [{"tokens": [at, at + 1], "labels": torch.tensor([at, at])} for at in range(64)]


class Drawn(Sequence[dict[str, Any]]):
    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: Any) -> dict[str, Any]:
        drawn = int(1e6 * np.sum(np.asarray(self._draw())))
        return {"tokens": [index, drawn], "labels": [index, drawn]}


OWN_GENERATOR = np.random.default_rng()
"""Not seeded by a run."""
DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "numpy": lambda: np.random.rand(3),
    "torch": lambda: torch.rand(3),
    "own": OWN_GENERATOR.random,
}


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Holds the dataset of a second rank; the test appends it."""
    others: list[Any] = []

    def from_both(mine: Any) -> list[Any]:
        if isinstance(mine, bool):
            return [mine, mine]
        return [mine, [fingerprint._checksum_of(CheckedDataset(others[0]), at) for at in fingerprint._compared(64)]]

    monkeypatch.setattr(fingerprint, "from_all_ranks", from_both)
    return others


OTHERS: dict[str, Any] = {
    "another order": LINES[::-1],
    "other labels": [*LINES[:21], {**LINES[21], "labels": torch.tensor([1, 21])}, *LINES[22:]],
    "other tokens": [*LINES[:-1], {**LINES[-1], "tokens": [1, 64]}],
}


@pytest.mark.parametrize("other", OTHERS)
def test_different_samples_on_two_ranks_are_an_error(other: str, other_rank: list[Any]) -> None:
    other_rank.append(OTHERS[other])
    with pytest.raises(
        ConfigError, match=r"^sample \d+ of the dataset on rank 1 differs from that on rank 0, .*order:"
    ):
        fingerprint_of(CheckedDataset(LINES), None)


@pytest.mark.parametrize("draw", DRAWS)
def test_randomly_drawn_samples_are_not_an_error(draw: str, other_rank: list[Any]) -> None:
    other_rank.append(Drawn(DRAWS[draw]))
    for _ in range(10):
        found = fingerprint_of(CheckedDataset(Drawn(DRAWS[draw])), None)
        assert (found is None) == (draw == "own")


def test_unreadable_sample_is_not_compared(other_rank: list[Any]) -> None:
    other_rank.append(LINES)

    class Broken(Drawn):
        def __getitem__(self, index: Any) -> dict[str, Any]:
            if index == 63:
                raise OSError("bad sector")
            return LINES[index]

    found = fingerprint_of(CheckedDataset(Broken(random.random)), None)
    assert found is not None
    assert found["crc32"][-2:] == [fingerprint._checksum_of(CheckedDataset(LINES), fingerprint._compared(64)[-2]), None]


def test_fingerprint_reads_a_few_samples_and_restores_the_random_state(other_rank: list[Any]) -> None:
    reads: list[int] = []

    def draw() -> float:
        reads.append(1)
        return random.random() + float(np.random.rand()) + float(torch.rand(()))

    other_rank.append(Drawn(draw))
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]]
    fingerprint_of(CheckedDataset(Drawn(draw)), None)
    assert len(reads) == 2 * COMPARED
    for before, after in zip(states, [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]], strict=True):
        assert np.array_equal(np.asarray(before, dtype=object), np.asarray(after, dtype=object))


def test_resume_on_changed_data_is_an_error_that_names_the_sample() -> None:
    saved, changed = fingerprint_of(CheckedDataset(LINES), 8), CheckedDataset(OTHERS["other labels"])
    with pytest.raises(ConfigError, match=r"^cannot resume: sample 21 of the dataset has changed .* restore"):
        check_same_data(changed, fingerprint_of(changed, 8), saved)


def test_resume_may_change_max_seq_len() -> None:
    cut = CheckedDataset([{key: values[:1] for key, values in line.items()} for line in LINES])
    check_same_data(cut, fingerprint_of(cut, 1), fingerprint_of(CheckedDataset(LINES), 2))


@pytest.mark.parametrize("draw", DRAWS)
def test_resume_may_draw_samples_at_random(draw: str) -> None:
    samples = CheckedDataset(Drawn(DRAWS[draw]))
    saved = {"samples": 64, "max_seq_len": None, "crc32": [1] * COMPARED}
    check_same_data(samples, fingerprint_of(samples, None), saved)
