"""Where a config leaves recovery off, and where it may ask for it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.config.adaptive import AdaptiveConfig
from torchtune_adaptive.tune.config.settings import Settings
from torchtune_adaptive.tune.parts.microbatch import obstacle_to_recovery

TENSOR = {**NEEDED, "tensor_parallel_dim": 2}


def obstacle(
    recover: bool | None, untested: bool = False, model: nn.Module | None = None, **settings: Any
) -> str | None:
    adaptive = AdaptiveConfig(recover_from_oom=recover, recover_untested=untested)
    return obstacle_to_recovery(Settings(**{**TENSOR, **settings, "adaptive": adaptive}), model)


def test_tensor_parallelism_has_it_off_unless_asked() -> None:
    for recover in (None, False):
        told = obstacle(recover)
        assert told is not None
        assert "tensor_parallel_dim is 2" in told
        assert "adaptive.recover_from_oom: True" in told
    assert obstacle(True) is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"compile": True}, "compile is True"),
        ({"enable_activation_offloading": True}, "enable_activation_offloading is True"),
        ({"device": "cuda"}, "adaptive.recover_untested: True"),
        ({"optimizer_in_bwd": True}, "optimizer_in_bwd is True"),
    ],
)
def test_what_cannot_be_asked_for_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"adaptive\.recover_from_oom is True, but .*{named}.*set it to null"):
        obstacle(True, **settings)


def test_a_model_that_draws_is_named_before_it_has_weights() -> None:
    assert obstacle(True, model=nn.Dropout(0.0)) is None
    assert obstacle(None, model=nn.Dropout(0.1)) is not None
    with pytest.raises(ConfigError, match=r"the model has dropout, .*; set it to null"):
        obstacle(True, model=nn.Dropout(0.1))


def test_a_key_says_that_one_knows() -> None:
    assert obstacle(True, untested=True, device="cuda") is None
    with pytest.raises(ConfigError, match="compile is True"):
        obstacle(True, untested=True, compile=True)
