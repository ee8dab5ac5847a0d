"""What is said of a device before anything is built on it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.unit.tune.test_unpadded_support import SETTINGS
from torchtune_adaptive.config.keys import AdaptiveConfig
from torchtune_adaptive.text import parse_sizes
from torchtune_adaptive.tune.devices import prepare

LIMITED = AdaptiveConfig(memory_limit=parse_sizes("1GiB", "adaptive.memory_limit"))


@pytest.mark.parametrize(
    ("device", "compiled", "adaptive", "told"),
    [
        ("cpu", True, LIMITED, True),
        ("cpu", True, AdaptiveConfig(), False),
        ("cpu", False, LIMITED, False),
        ("cuda", True, LIMITED, False),
    ],
)
def test_who_asks_for_compiling_hears_that_a_limit_on_a_cpu_switches_it_off(
    device: str, compiled: bool, adaptive: AdaptiveConfig, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, device=device, compile=compiled, adaptive=adaptive)
    with caplog.at_level(logging.INFO):
        prepare(settings)
    assert ("no effect on a CPU with adaptive.memory_limit" in caplog.text) is told
