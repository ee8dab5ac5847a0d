"""Where a config leaves recovery off, and where asking for it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.microbatch import obstacle_to_recovery


def obstacle(recover: bool | None, settings: dict[str, Any]) -> str | None:
    adaptive = AdaptiveConfig(recover_from_oom=recover)
    return obstacle_to_recovery(Settings(**{**NEEDED, **settings, "adaptive": adaptive}))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_dim": 2}, "tensor_parallel_dim is 2"),
        ({"optimizer_in_bwd": True}, "optimizer_in_bwd is True"),
    ],
)
def test_recovery_is_off_and_cannot_be_asked_for(settings: dict[str, Any], named: str) -> None:
    for recover in (None, False):
        assert named in (obstacle(recover, settings) or "")
    with pytest.raises(ConfigError, match=rf"adaptive\.recover_from_oom is True, but .*{named}.*set it to null"):
        obstacle(True, settings)


def test_a_plain_config_recovers() -> None:
    assert obstacle(None, {}) is None
