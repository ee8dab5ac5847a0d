"""Preference training, compiled and quantized."""

import os
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.recipes.preferences.test_runs import FIGURES
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import SGD, demo_config, run_ours

BASE = (
    *SGD,
    "optimizer.lr=0.01",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "dataset.samples=48",
    "tokenizer.max_seq_len=96",
    "clip_grad_norm=inf",
    "shuffle=False",
)
COMPILED = {
    "full_dpo": ("compile=True", "enable_activation_checkpointing=True"),
    "lora_dpo": ("compile=True", "adaptive.token_budget=500"),
}
# so that a shard of each projection is a whole number of blocks of 64 weights and of 256 scalers
NF4_SIZES = ("embed_dim=256", "intermediate_dim=512", "num_kv_heads=4", "num_layers=1")
WIDE_ENOUGH_FOR_NF4 = [f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in NF4_SIZES]
FEW_PAIRS = ("batch_size=1", "dataset.samples=12")  # bf16 is slow on a CPU
QUANTIZED = ("dtype=bf16", "model.quantize_base=True", "model.apply_lora_to_output=False", *WIDE_ENOUGH_FOR_NF4)


def train(kind: str, folder: Path, *overrides: str) -> None:
    """Collective: train. Compiled models go through Dynamo and AOTAutograd, without code generation."""
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"
    run_ours(kind, demo_config(kind, folder, *BASE, *overrides))


def train_both(kind: str, folder: Path) -> None:
    train(kind, folder / "plain")
    train(kind, folder / "compiled", *COMPILED[kind])


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_run_has_the_figures_of_the_plain_run(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, train_both, kind, tmp_path, timeout_s=150, in_group=False)
    expected, found = (read_log(tmp_path / case / "log.jsonl") for case in ("plain", "compiled"))
    assert len(found) == len(expected) >= 3
    assert_same_figures(found, expected, FIGURES, rel=2e-5, abs=1e-5)


def test_quantized_weights_serve_as_reference_and_policy(tmp_path: Path) -> None:
    run_on_ranks(2, train, "lora_dpo", tmp_path / "run", *QUANTIZED, *FEW_PAIRS, timeout_s=90, in_group=False)
    losses = [step["loss"] for step in read_log(tmp_path / "run" / "log.jsonl")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "before the first update both are the same model"
    assert losses[-1] != losses[0]
