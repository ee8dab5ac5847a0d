"""`adaptive_plan`: its traces against what the recipes really allocate on CPUs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import adaptive_plan
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tests.ranks import run_on_ranks
from tests.recipes.metering import metered, profiled
from tests.recipes.running import STOCK, demo_config, load_ours
from tests.recipes.tracing import fake_step, peaks_of
from torchtune_adaptive.memory.cpu_meter import MemoryMeter
from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.prediction.law import peak_of, sizes_of
from torchtune_adaptive.prediction.recorder import Recorder, Workspace
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.parts.limited_memory import resident_tensors
from torchtune_adaptive.tune.parts.samples import TEXT
from torchtune_adaptive.tune.start.command_line import locate, read_command_line
from torchtune_adaptive.tune.trace import fakes
from torchtune_adaptive.tune.trace.fakes import FakeStep

TOLERANCE = 0.001
LAYERS = 3
# checkpointing keeps the random generator's state for each layer, and while it runs one again; it does so on the host,
# where a prediction for a GPU has nothing to count
RNG_BYTES = (LAYERS + 2) * torch.get_rng_state().nbytes
SIZES = ((1, 1024), (5, 512), (9, 384))
NO_ACCUMULATION = ("gradient_accumulation_steps=1", "clip_grad_norm=null")
# so that a shard of each projection is whole blocks of 64 weights in whole blocks of 256 scalers
NF4_SIZES = ("embed_dim=256", "intermediate_dim=512", "num_kv_heads=4")
WIDE_ENOUGH_FOR_NF4 = [f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in NF4_SIZES]
# torchtune counts the layers that it has met since the process began: only every third is the same one in each model
CONFIGS = {
    "full": ("full",),
    "full, checkpointed": ("full", "enable_activation_checkpointing=True"),
    "full, one microbatch": ("full", *NO_ACCUMULATION),
    "full, without padding": ("full", "adaptive.token_budget=4096", "enable_activation_checkpointing=True"),
    "full, for-loop optimizer, bf16": ("full", "optimizer.fused=False", "dtype=bf16"),
    "full, selective checkpointing": ("full", "ac_mode=selective", f"ac_option={LAYERS}"),
    "lora": ("lora",),
    "qlora": ("lora", "dtype=bf16", "model.quantize_base=True", *WIDE_ENOUGH_FOR_NF4),
    "lora, checkpointed": ("lora", "enable_activation_checkpointing=True", "model.apply_lora_to_output=True"),
}


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


def metered_peaks(kind: str, cfg: DictConfig, of: type[MemoryMeter] = MemoryMeter) -> list[int]:
    """Collective: what the recipes' own meter, or another, counts on this rank."""
    peaks = []
    with recipe_step(kind, cfg) as (recipe, step):
        for size in SIZES:
            resident = resident_tensors(recipe.model, recipe.optimization.optimizers)
            peaks.append(metered(lambda size=size: step(*size), resident, of))
    return peaks


def predicted_peaks(cfg: DictConfig, world_size: int, workspaces: Mapping[Any, Workspace] | None = None) -> list[int]:
    """`workspaces`: what kernels take for themselves, where the witness sees that."""
    recorder = mock.patch.object(fakes, "Recorder", lambda _, counter: Recorder(workspaces or {}, counter))
    with fake_step(cfg, world_size) as step, recorder:
        return peaks_of(step, SIZES)


def about(peak: int) -> Any:
    return pytest.approx(peak, rel=TOLERANCE, abs=RNG_BYTES)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process_allocates_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, *overrides = CONFIGS[name]
    cfg = demo_config(kind, tmp_path / "run", *overrides)
    try:
        real = profiled_peaks(kind, cfg)
    finally:
        process_group.leave()
    assert predicted_peaks(cfg, world_size=1) == [about(peak) for peak in real]


@pytest.mark.parametrize(
    "name", ["full", "full, checkpointed", "full, without padding", "full, one microbatch", "lora", "qlora"]
)
def test_two_ranks_with_fsdp_allocate_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, *overrides = CONFIGS[name]
    cfg = demo_config(kind, tmp_path / "run", *overrides)
    real = run_on_ranks(2, metered_peaks, kind, cfg, timeout_s=120, in_group=False)
    predicted = predicted_peaks(cfg, world_size=2)
    for rank in real:
        assert predicted == [about(peak) for peak in rank]


def direct_peak_gib(config: Path, rows: int, tokens: int, *overrides: str) -> float:
    """Of one step in one process, as it is traced, without a law."""
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist([*overrides]))
    assert isinstance(cfg, DictConfig)
    with fake_step(cfg, world_size=1) as step:
        recording = step.record(rows, tokens)
    peak_bytes = peak_of(recording.phases, sizes_of(recording), caches=True).peak_bytes
    assert peak_bytes is not None
    return peak_bytes / 2**30


def test_a_peak_that_torchtunes_readme_gives() -> None:
    """Llama 3.2 3B, one A100, packed to 4096 tokens, 2 rows, nothing else: 60.0 GiB in bf16."""
    overrides = (
        "dataset.packed=True",
        "loss._component_=torch.nn.CrossEntropyLoss",
        "enable_activation_checkpointing=False",
        "gradient_accumulation_steps=1",
        "optimizer.fused=True",
    )
    peak = direct_peak_gib(locate("adaptive/llama3_2/3B_full"), 2, 4096, *overrides)
    assert peak == pytest.approx(60.0, rel=0.05)


class LossOfTorchtune01(nn.CrossEntropyLoss):
    """Recipes of that version kept a copy of the logits, without the last position, through the backward."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.kept = logits[:-4].contiguous()
        return super().forward(self.kept, labels[:-4])


def test_a_peak_that_a_pull_request_of_torchtunes_gives() -> None:
    """#961: Llama 2 7B, 7B_full_low_memory, 4 rows of 2048 tokens: 20.2 GB.

    The state of PagedAdamW is not the caching allocator's: SGD has as little there.
    """
    overrides = (
        "optimizer._component_=torch.optim.SGD",
        "enable_activation_offloading=False",
        f"loss._component_={__name__}.{LossOfTorchtune01.__name__}",
    )
    peak = direct_peak_gib(STOCK / "configs" / "llama2" / "7B_full_low_memory.yaml", 4, 2048, *overrides)
    assert peak == pytest.approx(20.2e9 / 2**30, rel=0.01)


def ask(*arguments: str) -> None:
    """The command in this process."""
    with mock.patch.object(sys, "argv", ["adaptive_plan", "--config", *arguments]):
        adaptive_plan.main(read_command_line(sys.argv))


ON_GPU = ("device=cuda", "dtype=bf16", "gradient_accumulation_steps=1", "clip_grad_norm=null")


def predicted_phases(cfg: DictConfig, world_size: int) -> tuple[dict[str, int], int, int]:
    """The peak of each phase; bytes of weights and optimizer state, wherever they are; what is kept on the host."""
    with fake_step(cfg, world_size) as step:
        recording = step.record(rows=4, tokens=512)
        peak = peak_of(recording.phases, sizes_of(recording), caches=False)
        return dict(peak.phase_bytes), weights_and_state(step), step.host_bytes


def weights_and_state(step: FakeStep) -> int:
    tensors = resident_tensors(step.model, step.optimizers)
    buffers = {id(buffer) for buffer in step.model.buffers()}
    plain = [each for tensor in tensors if id(tensor) not in buffers for each in plain_tensors(tensor)]
    return sum(each.untyped_storage().nbytes() for each in plain)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_offloading_takes_weights_and_optimizer_state_off_the_device(kind: str, tmp_path: Path) -> None:
    """Nothing else differs: the shards that come to be gathered are gone before anything peaks."""
    kept, stays, _ = predicted_phases(demo_config(kind, tmp_path / "run", *ON_GPU), 2)
    offloaded, goes, on_host = predicted_phases(
        demo_config(kind, tmp_path / "run", *ON_GPU, "fsdp_cpu_offload=True"), 2
    )
    assert stays == goes < on_host
    shared = [phase for phase in kept if phase.endswith(("ward", "loss"))]
    assert len(shared) == 5
    assert {phase: offloaded[phase] for phase in shared} == {phase: kept[phase] - stays for phase in shared}
    assert "update" not in offloaded, "the optimizer works on the host"


def test_offloaded_gradients_are_on_the_host(tmp_path: Path) -> None:
    """Full: weights, gradients and two moments are of the same size, but for the optimizer's numbers of steps."""
    cfg = demo_config("full", tmp_path / "run", *ON_GPU, "fsdp_cpu_offload=True")
    _, weights_and_moments, on_host = predicted_phases(cfg, 2)
    assert on_host == pytest.approx(4 / 3 * weights_and_moments, rel=0.001)


@pytest.mark.parametrize("found", ["use_maximum_batch_size=True", "adaptive.token_budget=4096"])
def test_where_a_run_may_split_its_step_gradients_lie_beside_the_largest_microbatch(found: str, tmp_path: Path) -> None:
    """As in the search's own probes, though the config says one microbatch."""
    rows = ("adaptive.padding=True",)
    once, several = (
        predicted_phases(demo_config("full", tmp_path / "run", *NO_ACCUMULATION[1:], *rows, steps, *more), 1)[0]
        for steps, more in (("gradient_accumulation_steps=1", (found,)), ("gradient_accumulation_steps=2", ()))
    )
    assert once == several


def test_shards_of_a_thousand_ranks_are_small(tmp_path: Path) -> None:
    cfg = demo_config("full", tmp_path / "run", *ON_GPU)
    (_, few, _), (_, many, _) = predicted_phases(cfg, 8), predicted_phases(cfg, 1024)
    assert few / 128 < many < few / 16, "rounded up to whole rows of each weight"
