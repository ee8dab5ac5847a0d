"""`adaptive.measure_noise`: what a user sees of it, resumed too."""

import math
import os
from pathlib import Path

import pytest

from tests.hearing import listening
from tests.ranks import free_ports, run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import demo_config, run_ours

NOISY = (
    "adaptive.measure_noise=2",
    "lr_scheduler=null",
    "batch_size=1",
    "gradient_accumulation_steps=2",
    "clip_grad_norm=1.0",
)
SCALE = "gradient_noise_scale"


def whole_and_resumed(kind: str, folder: Path, ports: list[int]) -> list[str]:
    """Collective: two epochs at once, then in two runs; the last lines of the second of these."""
    for name, overrides, port in (
        ("whole", ("epochs=2",), ports[0]),
        ("resumed", ("epochs=1",), ports[1]),
        ("resumed", ("epochs=2", "resume_from_checkpoint=auto"), ports[2]),
    ):
        os.environ["MASTER_PORT"] = str(port)
        with listening() as lines:
            run_ours(kind, demo_config(kind, folder / name, *NOISY, *overrides))
    return lines


@pytest.mark.parametrize("kind", ["full", "lora_dpo"])
def test_a_resumed_run_goes_on_measuring(kind: str, tmp_path: Path) -> None:
    lines = run_on_ranks(2, whole_and_resumed, kind, tmp_path, free_ports(3), timeout_s=90, in_group=False)[0]
    whole, resumed = (read_log(tmp_path / name / "log.jsonl") for name in ("whole", "resumed"))
    # of 32 steps, 16 are measured, and 10 are needed
    assert [step["step"] for step in whole if SCALE in step] == [20, 22, 24, 26, 28, 30, 32]
    assert [step.get(SCALE) for step in resumed] == [step.get(SCALE) for step in whole]
    last = whole[-1]
    assert last[f"{SCALE}_low"] < last[SCALE] < last.get(f"{SCALE}_high", math.inf)
    (verdict,) = [line for line in lines if line.startswith("gradient noise · the noise scale is ")]
    assert "and a step has 4:" in verdict
