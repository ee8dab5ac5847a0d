"""`adaptive_plan` for preference training: each stage beside what the recipe really allocates in it on CPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from tests.ranks import run_on_ranks
from tests.recipes.metering import metered
from tests.recipes.plan.test_plan import ask
from tests.recipes.running import demo_config, load_ours
from tests.recipes.tracing import peaks_of
from torchtune_adaptive.tune.parts.limited_memory import resident_tensors
from torchtune_adaptive.tune.parts.preference_stages import KEPT, PAIRS, POLICY, REFERENCE
from torchtune_adaptive.tune.parts.samples import PAIR
from torchtune_adaptive.tune.trace.steps import fake_steps

JOINED = replace(PAIR, padded=False)
SIZES = ((1, 256), (5, 192), (9, 128))
"""Pairs, and tokens of each answer."""
A_FEW_BYTES = 256
"""Sums of a microbatch that are not the loss."""


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


def metered_peaks(kind: str, cfg: DictConfig) -> dict[str, list[int]]:
    """Collective: what the recipe's own meter counts on this rank."""
    peaks: dict[str, list[int]] = {}
    with stages_of(kind, cfg) as (recipe, stages):
        for stage, run in stages.items():
            for size in SIZES:
                peak = metered(lambda run=run, size=size: run(*size), resident_in(recipe))
                peaks.setdefault(stage, []).append(peak)
    return peaks


def predicted_peaks(cfg: DictConfig, world_size: int) -> dict[str, list[int]]:
    with fake_steps(cfg, world_size) as steps:
        return {name: peaks_of(step, SIZES) for name, step in steps.items()}


def check(predicted: dict[str, list[int]], real: dict[str, list[int]]) -> None:
    for stage, peaks in real.items():
        assert predicted[stage] == [pytest.approx(peak, rel=0, abs=A_FEW_BYTES) for peak in peaks], stage


def test_two_ranks_with_fsdp_allocate_what_was_predicted(tmp_path: Path) -> None:
    cfg = demo_config("full_dpo", tmp_path / "run", "adaptive.token_budget=4096")
    predicted = predicted_peaks(cfg, world_size=2)
    for real in run_on_ranks(2, metered_peaks, "full_dpo", cfg, timeout_s=120, in_group=False):
        check(predicted, real)


def test_the_command_answers_for_each_stage_and_what_to_run_next(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/dpo", "world_size=2")
    output = capsys.readouterr().out
    policy, reference = (output.index(f"demo_model · full · {stage} · 2 ranks") for stage in (POLICY, REFERENCE))
    assert policy < output.index(f"\nrows of {POLICY}: 4") < reference < output.index(f"\nrows of {REFERENCE}: ")
    assert "adaptive_full_dpo_distributed --config adaptive/demo/dpo batch_size=4" in output
    assert "note: rows are pairs" in output
