"""What is said of a device before anything is built on it."""

from __future__ import annotations

import logging

import pytest

from torchtune_adaptive.sizes import parse_sizes
from torchtune_adaptive.tune.parts.devices import prepare
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings

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
    settings = Settings(
        device=device,
        compile=compiled,
        adaptive=adaptive,
        dtype="fp32",
        output_dir="out",
        batch_size=2,
        gradient_accumulation_steps=1,
        epochs=1,
        shuffle=True,
    )
    with caplog.at_level(logging.INFO):
        prepare(settings)
    assert ("nothing is compiled on a CPU under adaptive.memory_limit" in caplog.text) is told
