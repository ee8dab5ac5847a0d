"""Preference training in ways that finetuning knows too: compiled, saved beside training, quantized, on other ranks."""

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import SGD, demo_config, run_ours, saved_weights
from tests.recipes.signalled import Blow, live_on_ranks

KINDS = ("full_dpo", "lora_dpo")
RELATIVE = 2e-5
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
FIGURES = (
    "loss",
    "grad_norm",
    *(f"{what}/{answer}" for what in ("rewards", "log_probs") for answer in ("chosen", "rejected")),
)
COMPILED = ("compile=True", "enable_activation_checkpointing=True")
BY_TOKENS = ("compile=True", "adaptive.token_budget=500")
CASES = {
    "full_dpo": {"compiled": COMPILED},
    "lora_dpo": {"compiled, by tokens": BY_TOKENS},
}
# so that a shard of each projection is whole blocks of 64 weights in whole blocks of 256 scalers
NF4_SIZES = ("embed_dim=256", "intermediate_dim=512", "num_kv_heads=4")
WIDE_ENOUGH_FOR_NF4 = [f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in NF4_SIZES]
QUANTIZED = ("dtype=bf16", "model.quantize_base=True", "model.apply_lora_to_output=False", *WIDE_ENOUGH_FOR_NF4)


def run_ways(kind: str, folder: Path) -> None:
    """Collective: each case after the other. What is compiled goes through Dynamo and AOTAutograd, and is not fused."""
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"
    for case, overrides in {"plain": (), **CASES[kind]}.items():
        run_ours(kind, demo_config(kind, folder / case, *BASE, *overrides))


@pytest.fixture(scope="module", params=KINDS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, run_ways, kind, folder, timeout_s=150, in_group=False)
    return kind, folder


def check_same_figures(ours: Path, plain: Path, relative: float = RELATIVE) -> None:
    expected, found = (read_log(folder / "log.jsonl") for folder in (plain, ours))
    assert len(found) == len(expected) >= 3
    for step_of_plain, step in zip(expected, found, strict=True):
        for figure in FIGURES:
            assert step[figure] == pytest.approx(step_of_plain[figure], rel=relative, abs=1e-5), figure


def test_every_way_has_the_same_figures(runs: tuple[str, Path]) -> None:
    kind, folder = runs
    for case in CASES[kind]:
        check_same_figures(folder / case, folder / "plain")


def train(kind: str, folder: Path, *overrides: str) -> None:
    run_ours(kind, demo_config(kind, folder, *BASE, *overrides))


def test_quantized_weights_are_reference_and_policy(tmp_path: Path) -> None:
    """The figures of one split are those of another, but for what bf16 rounds."""
    for case, overrides in {"plain": (), "tokens": ("adaptive.token_budget=300",)}.items():
        run_on_ranks(2, train, "lora_dpo", tmp_path / case, *QUANTIZED, *overrides, timeout_s=90, in_group=False)
    plain, tokens = (read_log(tmp_path / case / "log.jsonl") for case in ("plain", "tokens"))
    for expected, found in zip(plain, tokens, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=0.02)
        assert found["log_probs/chosen"] == pytest.approx(expected["log_probs/chosen"], rel=0.02)
    assert plain[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "before the first update both are the same model"
    assert plain[-1]["loss"] != plain[0]["loss"]


RESUMED = (*BASE, "resume_from_checkpoint=auto", "overwrite_output_dir=False", "save_every_n_steps=2")


def test_a_run_that_is_asked_to_stop_in_the_policys_stage_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    kind, overrides = "lora_dpo", (*RESUMED, "epochs=2")
    stopped = live_on_ranks(2, kind, tmp_path / "stopped", *overrides, blow=Blow(2, ranks=(1,), skip=1))
    assert [each.status for each in stopped] == [0, 0], stopped
    assert "SIGTERM on rank 1: stopped after step 2" in stopped[0].lines
    for folder in ("stopped", "whole"):
        assert [each.status for each in live_on_ranks(2, kind, tmp_path / folder, *overrides)] == [0, 0]
    assert [step["step"] for step in read_log(tmp_path / "stopped" / "log.jsonl")] == [1, 2, 3, 4, 5, 6]
    resumed = saved_weights(tmp_path / "stopped", epoch=1)
    for name, weight in saved_weights(tmp_path / "whole", epoch=1).items():
        assert torch.equal(weight, resumed[name]), name
