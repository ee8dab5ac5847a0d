"""`adaptive_plan` for preference training: each stage beside what the recipe really allocates in it on CPUs."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.ranks import run_on_ranks
from tests.recipes.metering import metered, profiled
from tests.recipes.plan.test_plan import RNG_BYTES, WIDE_ENOUGH_FOR_NF4, ask
from tests.recipes.running import demo_config, load_ours
from tests.recipes.tracing import peaks_of
from torchtune_adaptive.memory.cpu_meter import MemoryMeter
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.parts.limited_memory import resident_tensors
from torchtune_adaptive.tune.parts.preference_stages import KEPT, PAIRS, POLICY, REFERENCE
from torchtune_adaptive.tune.parts.samples import PAIR
from torchtune_adaptive.tune.trace.steps import fake_steps

JOINED = replace(PAIR, padded=False)
SIZES = ((1, 256), (5, 192), (9, 128))
"""Pairs, and tokens of each answer."""
A_FEW_BYTES = 256
"""Sums of a microbatch that are not the loss."""
CHECKPOINTED = "enable_activation_checkpointing=True"
CASES = {
    "full": ("full_dpo",),
    "full, checkpointed": ("full_dpo", CHECKPOINTED),
    "full, no reshard": ("full_dpo", "fsdp_reshard_after_forward=False"),
    "full, one microbatch": ("full_dpo", "gradient_accumulation_steps=1", "clip_grad_norm=null"),
    "full, without padding": ("full_dpo", "adaptive.token_budget=4096"),
    "full, precomputed": ("full_dpo", "adaptive.precompute_reference=True", "tokenizer.max_seq_len=96"),
    "full, RSO": ("full_dpo", "loss._component_=torchtune.rlhf.loss.RSOLoss", "~loss.beta", "~loss.label_smoothing"),
    "lora": ("lora_dpo",),
    "lora, without padding, checkpointed": ("lora_dpo", "adaptive.token_budget=4096", CHECKPOINTED),
    "qlora": (
        "lora_dpo",
        "dtype=bf16",
        "model.quantize_base=True",
        "model.apply_lora_to_output=False",
        *WIDE_ENOUGH_FOR_NF4,
    ),
}
ON_TWO_RANKS = ("full", "full, no reshard", "full, without padding", "full, precomputed", "lora", "qlora")


def config_of(name: str, folder: Path) -> tuple[str, DictConfig]:
    kind, *overrides = CASES[name]
    cfg = demo_config(kind, folder, *(each for each in overrides if not each.startswith("~")))
    for section, _, key in (each[1:].partition(".") for each in overrides if each.startswith("~")):
        del cfg[section][key]
    return kind, cfg


@contextmanager
def stages_of(kind: str, cfg: DictConfig) -> Iterator[tuple[Any, dict[str, Callable[[int, int], None]]]]:
    """Collective: a recipe that is set up and warm, and its stages with so many pairs of so many tokens."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()

    def microbatches(runner: Any, rows: int, tokens: int) -> list[list[Any]]:
        longest = tokens if runner.kind.padded else 2 * tokens
        pair = {**(PAIR if runner.kind.padded else JOINED).uniform(0, longest), KEPT: torch.zeros(2)}
        first = [[PAIR.stand_in(pair)]] if cfg.gradient_accumulation_steps > 1 else []
        return [*first, [pair] * rows]

    def train(rows: int, tokens: int) -> None:
        policy = recipe.stages[POLICY]
        result = policy.attempt(microbatches(policy, rows, tokens)).result
        recipe.optimization.update(result.sums[PAIRS])

    def refer(rows: int, tokens: int) -> None:
        reference = recipe.stages[REFERENCE]
        assert reference.attempt(microbatches(reference, rows, tokens)).result is not None

    stages = {POLICY: train, REFERENCE: refer} if REFERENCE in recipe.stages else {POLICY: train}
    for stage in stages.values():
        stage(1, 16)
    gc.collect()
    try:
        yield recipe, stages
    finally:
        recipe.cleanup()


def resident_in(recipe: Any) -> list[torch.Tensor]:
    models = torch.nn.ModuleList(runner.model for runner in recipe.stages.values())
    return resident_tensors(models, recipe.optimization.optimizers)


def profiled_peaks(kind: str, cfg: DictConfig) -> dict[str, list[int]]:
    """What torch's profiler sees of real stages, beside what is resident."""
    with stages_of(kind, cfg) as (recipe, stages):
        meter = MemoryMeter()
        meter.count(resident_in(recipe))
        resident = meter.live_bytes
        return {
            name: [resident + profiled(lambda stage=stage, size=size: stage(*size)).peak_bytes for size in SIZES]
            for name, stage in stages.items()
        }


def metered_peaks(name: str, folder: Path) -> dict[str, list[int]]:
    """Collective: what the recipe's own meter counts on this rank."""
    peaks: dict[str, list[int]] = {}
    with stages_of(*config_of(name, folder)) as (recipe, stages):
        for stage, run in stages.items():
            for size in SIZES:
                peak = metered(lambda run=run, size=size: run(*size), resident_in(recipe))
                peaks.setdefault(stage, []).append(peak)
    return peaks


def predicted_peaks(cfg: DictConfig, world_size: int) -> dict[str, list[int]]:
    with fake_steps(cfg, world_size) as steps:
        return {name: peaks_of(step, SIZES) for name, step in steps.items()}


def check(predicted: dict[str, list[int]], real: dict[str, list[int]], name: str) -> None:
    # checkpointing keeps the state of the random generators, which no GPU has
    allowed = RNG_BYTES if "checkpointed" in name else A_FEW_BYTES
    for stage, peaks in real.items():
        assert predicted[stage] == [pytest.approx(peak, rel=0, abs=allowed) for peak in peaks], stage


@pytest.mark.parametrize("name", CASES)
def test_one_process_allocates_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, cfg = config_of(name, tmp_path / "run")
    try:
        real = profiled_peaks(kind, cfg)
    finally:
        process_group.leave()
    check(predicted_peaks(cfg, world_size=1), real, name)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_with_fsdp_allocate_what_was_predicted(name: str, tmp_path: Path) -> None:
    _, cfg = config_of(name, tmp_path / "run")
    predicted = predicted_peaks(cfg, world_size=2)
    for real in run_on_ranks(2, metered_peaks, name, tmp_path / "run", timeout_s=120, in_group=False):
        check(predicted, real, name)


def test_the_command_answers_for_each_stage_and_what_to_run_next(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/dpo", "world_size=2")
    output = capsys.readouterr().out
    policy, reference = (output.index(f"demo_model · full · {stage} · 2 ranks") for stage in (POLICY, REFERENCE))
    assert policy < output.index(f"\nrows of {POLICY}: 4") < reference < output.index(f"\nrows of {REFERENCE}: ")
    assert "adaptive_full_dpo_distributed --config adaptive/demo/dpo batch_size=4" in output
    assert "note: rows are pairs" in output


@pytest.mark.parametrize("config", ["dpo", "lora_dpo"])
def test_pairs_without_padding_follow_a_law(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(f"adaptive/demo/{config}", "use_maximum_batch_size=False", "adaptive.token_budget=auto")
    output = capsys.readouterr().out
    assert "samples one after another" in output
    error = re.search(r"checked against a step traced directly: (.*) %", output)
    assert error
    assert abs(float(error[1])) < 0.5


def test_without_the_reference_more_pairs_fit(capsys: pytest.CaptureFixture[str]) -> None:
    def most_rows(*overrides: str) -> int:
        ask("adaptive/demo/dpo", "memory_limit=36.5MiB", "format=json", *overrides)
        answer = json.loads(capsys.readouterr().out)
        assert {row["stage"] for row in answer["predictions"]} == {POLICY, REFERENCE}
        return max(row["rows"] for row in answer["predictions"] if row["stage"] == POLICY and row["fits"])

    assert most_rows("adaptive.precompute_reference=True", "adaptive.round_to=none") > most_rows(
        "adaptive.round_to=none"
    )


def test_where_nothing_fits_doing_without_the_reference_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/dpo", "memory_limit=22MiB")
    output = capsys.readouterr().out
    assert "does not fit in 22.0 MiB" in output
    assert (
        output.index(f" · {REFERENCE} · ") < output.index(f"\nfor {POLICY}:\n") < output.index("precompute_reference=")
    )
    assert "note: step times are not predicted for steps of several stages" in output
