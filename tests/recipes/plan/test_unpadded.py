"""`adaptive_plan` where nothing is padded. (test_plan.py compares it with what is really allocated on CPUs.)"""

from __future__ import annotations

from pathlib import Path

from tests.recipes.running import demo_config
from tests.recipes.tracing import fake_step
from torchtune_adaptive.prediction.recorder import Recording
from torchtune_adaptive.tune.plan.capacities import predict
from torchtune_adaptive.tune.plan.question import PlanSettings


def test_on_a_gpu_short_samples_one_after_another_need_what_the_kernel_takes_for_each(tmp_path: Path) -> None:
    cfg = demo_config("full", tmp_path, "device=cuda", "dtype=bf16", "adaptive.token_budget=4096")
    with fake_step(cfg, world_size=1) as step:
        many, one = (step.record(rows, tokens) for rows, tokens in ((64, 8), (1, 512)))
    heads, width = 4, 32
    assert largest_block(many, "_varlen_attn_backward") == 4 * (512 + 128 * 64) * heads * (width + 1)
    assert largest_block(one, "_varlen_attn_backward") == 4 * (512 + 128) * heads * (width + 1)
    assert not any("scaled_dot_product" in block.op for block in many.blocks)


def largest_block(recording: Recording, op: str) -> int:
    changes = zip(recording.of_block, recording.bytes_change, strict=True)
    return max(change for block, change in changes if op in recording.blocks[block].op)


def test_an_answer_without_padding_says_that_rows_are_samples(tmp_path: Path) -> None:
    cfg = demo_config("full", tmp_path, "device=cuda", "dtype=bf16", "adaptive.token_budget=auto")
    answer = predict(cfg, PlanSettings(memory_limit="2GiB", sequence_length=256), traced=lambda: None)
    assert any("samples one after another" in note for note in answer.notes)
    assert abs(answer.largest_error) < 0.005
