"""Peaks that torchtune's README gives for Llama 3.2 3B: each line of the table adds a technique to the previous one.

"Peak memory active", one A100, bf16, 2 rows packed to 4096 tokens, torchtune 0.6.1. docs/measured.md has the whole
table, and the reason for omitted lines. The suite runs one line; `make published` runs all.
"""

import os

import pytest
from gpu_rehearsal import rehearse

from tests.null.processes import skip_without_null_device
from tests.recipes.running import STOCK

ROWS, TOKENS = 2, 4096
TOLERANCE = 0.08
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
    "packed": (60.0, (*FULL, LOGITS_AT_ONCE)),
    "compiled": (51.0, (*FULL, LOGITS_AT_ONCE, "compile=True")),
    "chunked loss": (42.9, (*FULL, "compile=True")),
    "checkpointing": (24.9, (*FULL, "compile=True", CHECKPOINTED)),
    "optimizer in the backward": (23.1, (*FULL, "compile=True", CHECKPOINTED, "optimizer_in_bwd=True")),
    "offloading": (21.8, (*FULL, "compile=True", CHECKPOINTED, "optimizer_in_bwd=True", OFFLOADED)),
    "lora": (8.5, ("3B_lora", "optimizer.fused=True", "compile=True", CHECKPOINTED, OFFLOADED)),
}
QUICK = {"packed"}


@pytest.mark.parametrize("line", LINES)
def test_line_of_torchtunes_readme(line: str) -> None:
    if line not in QUICK and not ALL:
        pytest.skip("`make published` runs all lines")
    skip_without_null_device()
    gib, (name, *overrides) = LINES[line]
    recipe = f"adaptive_{'lora' if 'lora' in name else 'full'}_finetune_distributed"
    sizes = (f"batch_size={ROWS}", "gradient_accumulation_steps=1", "clip_grad_norm=null")
    command = ["-m", recipe, "--config", str(STOCK / "configs" / "llama3_2" / f"{name}.yaml"), *sizes, *overrides]
    command.append(f"tokenizer.max_seq_len={TOKENS}")
    found = rehearse(command, "a100", 1, steps=2, without_data=True, quiet=True)
    measured = max(step["allocated_bytes"] for step in found.steps) / 2**30
    print(f"{line}: {measured:.2f} GiB")
    assert measured == pytest.approx(gib, rel=TOLERANCE)
