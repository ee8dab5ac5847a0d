"""A few samples show that data differ between ranks, or from those of the resumed run."""

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.config.keys import AUTO
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune import fingerprint, training_loop
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.fingerprint import COMPARED, Fingerprint, check_same_data, fingerprint_of

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


def saved_by(samples: CheckedDataset, found: Fingerprint | None, steps_in_epoch: int = 0) -> Progress:
    """Return the progress of a run with these data."""
    options: dict[str, Any] = {"seed": 0, "total_epochs": 2, "max_steps_per_epoch": None, "ranks": 1}
    data = {"dataset_samples": len(samples), "dataset_fingerprint": found}
    return Progress(**options, **data, steps_in_epoch=steps_in_epoch)


def resume(
    mode: object, steps_in_epoch: int, before: CheckedDataset, now: CheckedDataset, max_seq_len: int = 8
) -> Progress:
    """Return the progress with which the loop of any recipe begins."""
    run = mock.Mock(progress=saved_by(before, fingerprint_of(before, 8), steps_in_epoch))
    run.settings.resume_from_checkpoint = mode
    nothing: Any = mock.Mock()
    data = Data(now, False, nothing, nothing, max_seq_len, fingerprint_of(now, max_seq_len))
    with mock.patch.object(training_loop, "StepProfiler"):
        training_loop.TrainingLoop(run, nothing, data, nothing, nothing)
    progress: Progress = run.progress
    return progress


def test_resume_on_changed_data_is_an_error_that_names_the_sample() -> None:
    with pytest.raises(ConfigError, match=r"^cannot resume: sample 21 of the dataset has changed .* restore"):
        resume(AUTO, 0, CheckedDataset(LINES), CheckedDataset(OTHERS["other labels"]))


def test_resume_with_other_answers_to_the_prompts_is_an_error() -> None:
    before, now = ([{**line, "answer": {"value": answer, "of": object()}} for line in LINES] for answer in (3.5, 4))
    resume(AUTO, 0, CheckedDataset(before, labelled=False), CheckedDataset(before, labelled=False))
    with pytest.raises(ConfigError, match=r"^cannot resume: sample 0 of the dataset has changed"):
        resume(AUTO, 0, CheckedDataset(before, labelled=False), CheckedDataset(now, labelled=False))


@pytest.mark.parametrize(("mode", "steps_in_epoch"), [(AUTO, 0), (AUTO, 3), (True, 3)])
@pytest.mark.parametrize("samples", [65, 20])
@pytest.mark.parametrize("draw", [None, OWN_GENERATOR.random])
def test_resume_with_another_number_of_samples_is_an_error(
    mode: object, steps_in_epoch: int, samples: int, draw: Any
) -> None:
    lines: Any = LINES if draw is None else Drawn(draw)
    now = CheckedDataset(([*LINES, *LINES] if draw is None else [lines[0]] * 128)[:samples])
    message = rf"^cannot resume: the dataset has {samples} samples, but had 64 when .* restore"
    with pytest.raises(ConfigError, match=message):
        resume(mode, steps_in_epoch, CheckedDataset(lines), now)


def test_data_may_change_between_epochs_if_the_config_names_the_checkpoint() -> None:
    assert resume(True, 0, CheckedDataset(LINES), CheckedDataset(LINES[:20])).dataset_samples == 20


def test_resume_may_change_max_seq_len_which_changes_the_number_of_packs() -> None:
    cut = [{key: values[:1] for key, values in line.items()} for line in LINES]
    resume(AUTO, 3, CheckedDataset(LINES), CheckedDataset(cut), max_seq_len=1)
    assert resume(AUTO, 0, CheckedDataset(LINES), CheckedDataset(cut[:32]), max_seq_len=1).dataset_samples == 32
    with pytest.raises(ConfigError, match=r"has 32 samples, but had 64"):
        resume(AUTO, 3, CheckedDataset(LINES), CheckedDataset(cut[:32]), max_seq_len=1)


@pytest.mark.parametrize("draw", DRAWS)
def test_resume_may_draw_samples_at_random(draw: str) -> None:
    samples = CheckedDataset(Drawn(DRAWS[draw]))
    saved = {"max_seq_len": None, "crc32": [1] * COMPARED}
    check_same_data(samples, fingerprint_of(samples, None), saved_by(samples, saved))
