"""Whose steps are dealt, and why not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.unit.tune.parts.unpadded.models import build
from tests.unit.tune.parts.unpadded.test_support import BUDGET, SETTINGS
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.limits.limit import RowLimit, TokenLimit
from torchtune_adaptive.tune.run import dealing
from torchtune_adaptive.tune.run.dealing import dealer_of
from torchtune_adaptive.tune.start.sections import AdaptiveConfig

DATA: Any = SimpleNamespace(dataset="the dataset")
LIMIT = TokenLimit(4096)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """That do not exist; what rank 0 says."""
    said: list[str] = []
    monkeypatch.setattr(dealing, "world_size", lambda: 2)
    monkeypatch.setattr(dealing, "say", said.append)
    monkeypatch.setattr(dealing, "Dealer", lambda dataset, *_: dataset)
    return said


def test_steps_are_dealt_under_a_limit_by_length() -> None:
    assert dealer_of(build(), SETTINGS, BUDGET, DATA, LIMIT) == "the dataset"
    assert dealer_of(build(), SETTINGS, BUDGET, DATA, RowLimit(8)) is None
    assert dealer_of(build(), SETTINGS, AdaptiveConfig(), DATA, None) is None
    assert dealer_of(build(), SETTINGS, replace(BUDGET, deal=False), DATA, LIMIT) is None


def test_one_rank_has_nobody_to_deal_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "world_size", lambda: 1)
    assert dealer_of(build(), SETTINGS, replace(BUDGET, deal=True), DATA, LIMIT) is None


@pytest.mark.parametrize(
    ("model", "tensor_parallel_dim", "reason"),
    [(build(), 2, "tensor_parallel_dim is 2"), (nn.Linear(1, 1), 1, "the model takes more than text")],
    ids=["tensor-parallel", "images"],
)
def test_what_stands_in_the_way_is_said_and_samples_stay(
    model: nn.Module, tensor_parallel_dim: int, reason: str, two_ranks: list[str]
) -> None:
    settings = replace(SETTINGS, tensor_parallel_dim=tensor_parallel_dim)
    assert dealer_of(model, settings, BUDGET, DATA, LIMIT) is None
    assert two_ranks == [line for line in two_ranks if f"stay on the ranks that read them: {reason}" in line] != []
    with pytest.raises(ConfigError, match=f"adaptive.deal is True, but {reason}.*set adaptive.deal to null or False"):
        dealer_of(model, settings, replace(BUDGET, deal=True), DATA, LIMIT)
