"""When the samples of a step are dealt, and reasons against it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.unit.tune.models import build
from tests.unit.tune.test_unpadded_support import BUDGET, SETTINGS
from torchtune_adaptive.config.keys import AdaptiveConfig
from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit
from torchtune_adaptive.tune import dealing
from torchtune_adaptive.tune.dealing import dealer_of

DATA: Any = SimpleNamespace(kind="of samples", dataset=None, packed=False)
LIMIT = TokenLimit(4096)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend to be on two ranks; collect rank 0's log."""
    message: list[str] = []
    monkeypatch.setattr(dealing, "world_size", lambda: 2)
    monkeypatch.setattr(dealing, "log_rank_0", message.append)
    monkeypatch.setattr(dealing, "Dealer", lambda kind, *_: kind)
    return message


def dealer(
    adaptive: AdaptiveConfig,
    limit: Limit | None = LIMIT,
    *,
    model: nn.Module | None = None,
    tensor_parallel_dim: int = 1,
) -> Any:
    settings = replace(SETTINGS, adaptive=adaptive, tensor_parallel_dim=tensor_parallel_dim)
    return dealer_of(model or build(), settings, DATA, limit)


def test_steps_are_dealt_under_a_length_limit_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dealer(BUDGET) == "of samples"
    assert dealer(BUDGET, RowLimit(8)) is None
    assert dealer(AdaptiveConfig(), None) is None
    assert dealer(replace(BUDGET, deal=False)) is None
    monkeypatch.setattr(dealing, "world_size", lambda: 1)
    assert dealer(BUDGET) is None


@pytest.mark.parametrize(
    ("model", "tensor_parallel_dim", "reason"),
    [(build(), 2, "tensor_parallel_dim is 2"), (nn.Linear(1, 1), 1, "the model takes more than text")],
    ids=["tensor-parallel", "images"],
)
def test_obstacles_to_dealing_are_logged_and_samples_stay(
    model: nn.Module, tensor_parallel_dim: int, reason: str, two_ranks: list[str]
) -> None:
    assert dealer(BUDGET, model=model, tensor_parallel_dim=tensor_parallel_dim) is None
    assert two_ranks == [line for line in two_ranks if f"stay on the ranks that read them: {reason}" in line] != []
