"""`adaptive_plan`: its traces against what the recipes really allocate on CPUs, and what a user gets to see."""

from __future__ import annotations

import csv
import gc
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_on_ranks
from tests.recipes.running import demo_config, load_ours, tune_run
from torchtune_adaptive.cpu_memory import MemoryMeter
from torchtune_adaptive.host import process_group
from torchtune_adaptive.host.memory_limit import resident_tensors
from torchtune_adaptive.host.microbatch import stand_in
from torchtune_adaptive.host.predict import fake_step
from torchtune_adaptive.prediction.law import peak_of, sizes_of

# checkpointing keeps 5 KB of the random generator's state for each layer on the host, which no prediction counts
TOLERANCE = 0.001
SIZES = ((1, 1024), (5, 512), (9, 384))
NO_ACCUMULATION = ("gradient_accumulation_steps=1", "clip_grad_norm=null")
CONFIGS = {
    "full": ("full",),
    "full, checkpointed": ("full", "enable_activation_checkpointing=True"),
    "full, one microbatch": ("full", *NO_ACCUMULATION),
    "full, for-loop optimizer, bf16": ("full", "optimizer.fused=False", "dtype=bf16"),
    "full, selective checkpointing": ("full", "ac_mode=selective", "ac_option=2"),
    "lora": ("lora",),
    "lora, checkpointed": ("lora", "enable_activation_checkpointing=True", "model.apply_lora_to_output=True"),
}


@contextmanager
def recipe_step(kind: str, cfg: DictConfig) -> Iterator[tuple[Any, Callable[[int, int], None]]]:
    """Collective: a recipe that is set up and warm, and its step with so many rows of so many tokens."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()

    def step(rows: int, tokens: int) -> None:
        sample = {"tokens": [0] * tokens, "labels": [0] * tokens}
        first = [[stand_in(sample)]] if cfg.gradient_accumulation_steps > 1 else []
        result = recipe._runner.attempt([*first, [sample] * rows]).result
        recipe._optimization.update(result.target_tokens)

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
        meter.count(resident_tensors(recipe._model, recipe._optimization.optimizers))
        return [meter.live_bytes + profiled(lambda size=size: step(*size)) for size in SIZES]


def profiled(step: Callable[[], None]) -> int:
    """The most that one step has allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def metered_peaks(kind: str, cfg: DictConfig) -> list[int]:
    """Collective: what the recipes' own meter counts on this rank, without what gloo takes for itself."""
    peaks = []
    with recipe_step(kind, cfg) as (recipe, step):
        for size in SIZES:
            gc.collect()
            with MemoryMeter() as meter:
                meter.count(resident_tensors(recipe._model, recipe._optimization.optimizers))
                step(*size)
            peaks.append(meter.peak_bytes)
    return peaks


def predicted_peaks(cfg: DictConfig, world_size: int) -> list[int]:
    with fake_step(cfg, world_size) as step:
        recordings = [step.record(*size) for size in SIZES]
    return [peak_of(each.phases, sizes_of(each), caches=False).peak_bytes for each in recordings]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process_allocates_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, *overrides = CONFIGS[name]
    cfg = demo_config(kind, tmp_path / "run", *overrides)
    try:
        real = profiled_peaks(kind, cfg)
    finally:
        process_group.leave()
    assert predicted_peaks(cfg, world_size=1) == [pytest.approx(peak, rel=TOLERANCE) for peak in real]


@pytest.mark.parametrize("name", ["full", "full, checkpointed", "full, one microbatch", "lora"])
def test_two_ranks_with_fsdp_allocate_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, *overrides = CONFIGS[name]
    cfg = demo_config(kind, tmp_path / "run", *overrides)
    real = run_on_ranks(2, metered_peaks, kind, cfg, timeout_s=120, in_group=False)
    predicted = predicted_peaks(cfg, world_size=2)
    for rank in real:
        assert predicted == [pytest.approx(peak, rel=TOLERANCE) for peak in rank]


def plan(cwd: Path, *arguments: str, timeout_s: float = 120) -> tuple[int, str]:
    ended = tune_run("adaptive_plan", "--config", *arguments, ranks=None, cwd=cwd, timeout_s=timeout_s)
    return ended.status, ended.output


def test_a_config_of_ours_is_answered_with_a_table_and_a_command(tmp_path: Path) -> None:
    status, output = plan(tmp_path, "adaptive/demo/full", "world_size=2")
    assert status == 0, output
    assert "demo_model · full · 2 ranks · 256 tokens · 64.0 MiB usable of 64.0 MiB" in output
    assert "<- most without allocator retries" in output
    assert "adaptive_full_finetune_distributed --config adaptive/demo/full batch_size=8" in output
    assert not list(tmp_path.iterdir()), "a prediction leaves nothing behind"


def test_a_config_of_torchtunes_needs_no_weights_tokenizer_or_data(tmp_path: Path) -> None:
    small = "model._component_=torchtune_adaptive.demo.model.demo_model"
    status, output = plan(tmp_path, "llama3_2/1B_full", small, "memory_limit=4090", "sequence_length=512")
    assert status == 0, output
    assert "22.6 GiB usable of 23.6 GiB" in output
    assert "context, NCCL, cuBLAS: 1.0 GiB are assumed" in output


@pytest.mark.parametrize("form", ["csv", "json"])
def test_figures_for_programs(form: str, tmp_path: Path) -> None:
    status, output = plan(tmp_path, "adaptive/demo/lora", f"format={form}", "sequence_length=[128,256]")
    assert status == 0, output
    text = output[output.index("{" if form == "json" else "tokens,") :]
    rows = json.loads(text)["predictions"] if form == "json" else list(csv.DictReader(io.StringIO(text)))
    chosen = [row for row in rows if str(row["chosen"]) == "True"]
    assert [int(row["tokens"]) for row in chosen] == [128, 256]
    most = [int(row["rows"]) for row in chosen]
    assert most[0] == 2 * most[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("memory_limit=h101",), "cannot read 'h101'"),
        (("memory_limit=0.9",), "fraction of no known device"),
        (("memory_limit=2MiB", "device=cuda", "dtype=bf16"), "are not for tensors"),
        (("adaptive=null",), "nothing to fit into"),
        (("adaptive=null", "memory_limit=1GiB", "tokenizer.max_seq_len=null"), "set sequence_length"),
        (("sequence_length=4096",), "takes at most 2048"),
        (("tensor_parallel_dim=2", "tensor_parallel_plan=x", "optimizer.fused=False"), "tensor_parallel_dim is 2"),
        (("dataset.packed=True",), "dataset.packed on a CPU"),
        (("format=yaml",), "allowed is table, csv, json"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_message(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    status, output = plan(tmp_path, "adaptive/demo/full", *overrides)
    assert status == 1
    assert message in output
    assert "Traceback" not in output
