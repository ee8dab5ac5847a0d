"""Datasets that no step can be made of, or that are not one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune import data
from torchtune_adaptive.tune.culprits import NamedSamples
from torchtune_adaptive.tune.data import build_step_loader
from torchtune_adaptive.tune.loader import StepLoader

KEYS = {**NEEDED, "batch_size": 2, "gradient_accumulation_steps": 3}


def load(samples: int, ranks: int, **keys: int) -> StepLoader[Any]:
    mesh: Any = {"dp": SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: 0)}
    return build_step_loader(
        NamedSamples([{"tokens": [1], "labels": [1]}] * samples), Settings(**{**KEYS, **keys}), mesh
    )


def test_an_empty_dataset_is_said_to_be_empty() -> None:
    with pytest.raises(ConfigError, match=r"^dataset is empty: .* source, split and filter"):
        load(0, 2)


@pytest.mark.parametrize(
    ("samples", "ranks", "said"), [(1, 1, "1 sample, but one step takes 6: .* 1 rank;"), (9, 2, "9 samples.* 2 ranks;")]
)
def test_a_dataset_that_fills_no_step_is_told_with_the_arithmetic(samples: int, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dataset has {said} lower one of them$"):
        load(samples, ranks)


@pytest.mark.parametrize(("ranks", "said"), [(1, "1 rank; lower batch_size"), (2, "2 ranks; lower one of them")])
def test_only_what_can_be_lowered_is_told(ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"one step takes {2 * ranks}: batch_size 2 × {said}$"):
        load(1, ranks, gradient_accumulation_steps=1)


def test_a_dataset_of_one_step_is_taken() -> None:
    assert load(12, 2).samples_per_rank == 6


def test_ranks_that_have_other_datasets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "from_all_ranks", lambda mine: [mine, mine, mine + 8])
    with pytest.raises(
        ConfigError, match=r"^dataset has 12 samples on rank 0 and 20 on rank 2, .* the same on every node"
    ):
        load(12, 2)
