"""Peaks and speeds that torchtune's README gives for Llama 3.2 3B: each line of its table adds a technique to the last.

"Peak memory active", one A100, bf16, 2 rows packed to 4096 tokens, torchtune 0.6.1. docs/published.md has the whole
table, and why some lines are not here. One line stays in the suite; `make published` asks for all.
"""

from __future__ import annotations

import os

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.recipes.running import STOCK
from tests.recipes.tracing import fake_step
from torchtune_adaptive.prediction.cards import CARDS
from torchtune_adaptive.prediction.law import peak_of, sizes_of
from torchtune_adaptive.prediction.roofline import Timing, as_tensor

ROWS, TOKENS = 2, 4096
TOLERANCE = 0.08
TOLERANCE_OF_SPEED = 0.05
ALL = "TORCHTUNE_ADAPTIVE_PUBLISHED" in os.environ

FULL = (
    "3B_full",
    "optimizer._component_=torch.optim.AdamW",
    "optimizer.fused=True",
    "optimizer_in_bwd=False",
    "enable_activation_checkpointing=False",
)
CHECKPOINTED = "enable_activation_checkpointing=True"
LOGITS_AT_ONCE = "loss._component_=torch.nn.CrossEntropyLoss"
OFFLOADED = "enable_activation_offloading=True"
LINES = {
    "packed": (60.0, 7075, (*FULL, LOGITS_AT_ONCE)),
    "compiled": (51.0, 8998, (*FULL, LOGITS_AT_ONCE, "compile=True")),
    "chunked loss": (42.9, 9174, (*FULL, "compile=True")),
    "checkpointing": (24.9, 7210, (*FULL, "compile=True", CHECKPOINTED)),
    "optimizer in the backward": (23.1, 7309, (*FULL, "compile=True", CHECKPOINTED, "optimizer_in_bwd=True")),
    "offloading": (21.8, 7301, (*FULL, "compile=True", CHECKPOINTED, "optimizer_in_bwd=True", OFFLOADED)),
    "lora": (8.5, 8210, ("3B_lora", "optimizer.fused=True", "compile=True", CHECKPOINTED, OFFLOADED)),
}
QUICK = {"packed"}


def predicted(name: str, *overrides: str) -> tuple[float, float]:
    """The peak in GiB, and tokens a second."""
    cfg = OmegaConf.load(STOCK / "configs" / "llama3_2" / f"{name}.yaml")
    packed = ("dataset.packed=True", "gradient_accumulation_steps=1", "clip_grad_norm=null")
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*packed, *overrides]))
    assert isinstance(cfg, DictConfig)
    with fake_step(cfg, world_size=1) as step:
        if step.settings.compile:
            step.compile_for(ROWS, TOKENS)
        recording = step.record(ROWS, TOKENS, counting=True)
    assert recording.work is not None
    work = as_tensor(recording.work)
    work[1] *= TOKENS  # of attention, counted by token
    seconds = Timing(CARDS["a100"], half=True, link_bytes_per_s=1.0, ranks=1).seconds(work).likely
    peak = peak_of(recording.phases, sizes_of(recording), caches=True).peak_bytes or 0
    return peak / 2**30, ROWS * TOKENS / seconds


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_torchtunes_readme(line: str) -> None:
    if line not in QUICK and not ALL:
        pytest.skip("one line stands for all: make published")
    gib, tokens_per_s, settings = LINES[line]
    assert predicted(*settings) == (
        pytest.approx(gib, rel=TOLERANCE),
        pytest.approx(tokens_per_s, rel=TOLERANCE_OF_SPEED),
    )
