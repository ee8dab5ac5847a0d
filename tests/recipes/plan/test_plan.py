"""`adaptive_plan`: its traces against what the recipes really allocate on CPUs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import adaptive_plan
import pytest
import torch
from omegaconf import DictConfig

from tests.ranks import run_on_ranks
from tests.recipes.metering import metered, profiled
from tests.recipes.running import demo_config, load_ours
from tests.recipes.tracing import fake_step, peaks_of
from torchtune_adaptive.memory.cpu_meter import MemoryMeter
from torchtune_adaptive.prediction.recorder import Recorder
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.parts.limited_memory import resident_tensors
from torchtune_adaptive.tune.parts.samples import TEXT
from torchtune_adaptive.tune.start.command_line import read_command_line
from torchtune_adaptive.tune.trace import fakes

TOLERANCE = 0.001
LAYERS = 3
# checkpointing keeps the random generator's state for each layer, and while it runs one again; it does so on the host,
# where a prediction for a GPU has nothing to count
RNG_BYTES = (LAYERS + 2) * torch.get_rng_state().nbytes
SIZES = ((1, 1024), (5, 512), (9, 384))


@contextmanager
def recipe_step(kind: str, cfg: DictConfig) -> Iterator[tuple[Any, Callable[[int, int], None]]]:
    """Collective: a recipe that is set up and warm, and its step with so many rows of so many tokens."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()

    def step(rows: int, tokens: int) -> None:
        sample = {"tokens": [0] * tokens, "labels": [0] * tokens}
        first = [[TEXT.stand_in(sample)]] if cfg.gradient_accumulation_steps > 1 else []
        result = recipe.runner.attempt([*first, [sample] * rows]).result
        recipe.optimization.update(result.target_tokens)

    step(1, 16)
    gc.collect()
    try:
        yield recipe, step
    finally:
        recipe.cleanup()


def profiled_peaks(kind: str, cfg: DictConfig) -> list[int]:
    """What torch's profiler sees of real steps, beside what is resident."""
    with recipe_step(kind, cfg) as (recipe, step):
        meter = MemoryMeter()
        meter.count(resident_tensors(recipe.model, recipe.optimization.optimizers))
        return [meter.live_bytes + profiled(lambda size=size: step(*size)).peak_bytes for size in SIZES]


def metered_peaks(kind: str, cfg: DictConfig) -> list[int]:
    """Collective: what the recipes' own meter counts on this rank."""
    peaks = []
    with recipe_step(kind, cfg) as (recipe, step):
        for size in SIZES:
            resident = resident_tensors(recipe.model, recipe.optimization.optimizers)
            peaks.append(metered(lambda size=size: step(*size), resident))
    return peaks


def predicted_peaks(cfg: DictConfig, world_size: int) -> list[int]:
    # what kernels take for themselves is left out: a meter of memory does not see it
    recorder = mock.patch.object(fakes, "Recorder", lambda _, counter: Recorder({}, counter))
    with fake_step(cfg, world_size) as step, recorder:
        return peaks_of(step, SIZES)


def about(peak: int) -> Any:
    return pytest.approx(peak, rel=TOLERANCE, abs=RNG_BYTES)


def test_one_process_allocates_what_was_predicted(tmp_path: Path) -> None:
    cfg = demo_config("full", tmp_path / "run", "enable_activation_checkpointing=True")
    try:
        real = profiled_peaks("full", cfg)
    finally:
        process_group.leave()
    assert predicted_peaks(cfg, world_size=1) == [about(peak) for peak in real]


def test_two_ranks_with_fsdp_allocate_what_was_predicted(tmp_path: Path) -> None:
    cfg = demo_config("lora", tmp_path / "run", "adaptive.token_budget=4096")
    real = run_on_ranks(2, metered_peaks, "lora", cfg, timeout_s=120, in_group=False)
    predicted = predicted_peaks(cfg, world_size=2)
    for rank in real:
        assert predicted == [about(peak) for peak in rank]


def ask(*arguments: str) -> None:
    """The command in this process."""
    with mock.patch.object(sys, "argv", ["adaptive_plan", "--config", *arguments]):
        adaptive_plan.main(read_command_line(sys.argv))


ON_GPU = ("device=cuda", "dtype=bf16", "gradient_accumulation_steps=1", "clip_grad_norm=null")
