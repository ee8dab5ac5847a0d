"""Runs on a mesh of 2 replicas of 2 ranks each, beside the same ranks in one dimension."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune.modules.peft import LoRALinear

from tests.ranks import run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours, saved_weights
from tests.recipes.stops import stopped_before
from torchtune_adaptive.report.journal import read_timeline
from torchtune_adaptive.tune import model as model_builder

BASE = (
    *SGD,
    "optimizer.lr=0.05",
    "batch_size=2",
    "gradient_accumulation_steps=2",
    "clip_grad_norm=0.7",
    "epochs=2",
    "overwrite_output_dir=False",
    "resume_from_checkpoint=auto",
)
HYBRID = ("data_parallel_replicate_dim=2",)
LIMIT = ("adaptive.sequence_length=null", "adaptive.memory_limit=[120MiB,120MiB,120MiB,{little}]")
"""Little on a rank of the second replica."""
LITTLE = {"full": "10MiB", "lora_dpo": "17MiB"}
CASES: dict[str, tuple[str, ...]] = {
    "flat": (),
    "hybrid": HYBRID,
    "whole": ("data_parallel_replicate_dim=4", "data_parallel_shard_dim=1", "adaptive.recover_from_oom=False"),
    "searched": (*HYBRID, "use_maximum_batch_size=True", "adaptive.max_batch_size=4", "adaptive.memory_limit=60MiB"),
    "starved": (*HYBRID, "adaptive.token_budget=4000", *LIMIT),
}
RESUMED = {"onto a flat mesh": (HYBRID, ()), "onto a hybrid mesh": ((), (*HYBRID, "enable_async_checkpointing=True"))}
RUNS = {"full": (*CASES, *RESUMED), "lora_dpo": ("flat", "hybrid", "starved")}
STEPS = 8


@contextmanager
def adapters_like_those_of_one_process() -> Iterator[None]:
    """DTensor draws other adapters on every mesh, so that runs on two of them could not be compared."""

    def initialize(layer: LoRALinear) -> None:
        generator = torch.Generator().manual_seed(layer.lora_a.weight.numel())
        nn.init.zeros_(layer.lora_b.weight)
        weight = layer.lora_a.weight.detach()
        drawn = 0.1 * torch.randn(weight.shape, generator=generator)
        if isinstance(weight, DTensor):
            drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
        weight.copy_(drawn)

    with mock.patch.object(LoRALinear, "initialize_parameters", initialize):
        yield


def run_all(kind: str, folder: Path) -> None:
    def run(name: str, *overrides: str, stop: bool = False) -> None:
        with stopped_before(1) if stop else nullcontext():
            run_ours(kind, demo_config(kind, folder / name, *BASE, *overrides))

    with adapters_like_those_of_one_process():
        for case in (case for case in RUNS[kind] if case in CASES):
            run(case, *(each.format(little=LITTLE[kind]) for each in CASES[case]))
        for case in (case for case in RUNS[kind] if case in RESUMED):
            before, after = RESUMED[case]
            run(case, *before, stop=True)
            run(case, *after)


@pytest.fixture(scope="module", params=RUNS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(4, run_all, request.param, folder, timeout_s=250, in_group=False)
    return request.param, folder


def test_every_step_has_the_figures_of_a_mesh_of_one_dimension(runs: tuple[str, Path]) -> None:
    kind, folder = runs
    flat, *others = (read_log(folder / case / "log.jsonl") for case in RUNS[kind])
    assert [step["step"] for step in flat] == [*range(1, STEPS + 1)]
    for case, ours in zip(RUNS[kind][1:], others, strict=True):
        assert [step["step"] for step in ours] == [step["step"] for step in flat], case
        for expected, found in zip(flat, ours, strict=True):
            for figure in ("loss", "grad_norm"):
                assert found[figure] == pytest.approx(expected[figure], rel=RELATIVE), (case, figure, found["step"])


def test_the_saved_weights_are_those_of_a_mesh_of_one_dimension(runs: tuple[str, Path]) -> None:
    kind, folder = runs
    flat, *others = (saved_weights(folder / case, epoch=1) for case in RUNS[kind])
    for case, ours in zip(RUNS[kind][1:], others, strict=True):
        for name, weight in flat.items():
            torch.testing.assert_close(ours[name], weight, rtol=RELATIVE, atol=1e-6, msg=f"{case}: {name}")


def test_a_rank_of_one_replica_that_runs_out_of_memory_is_recovered_from(runs: tuple[str, Path]) -> None:
    _, folder = runs
    timeline = read_timeline(folder / "starved" / "out")
    recoveries = [event for event in timeline.events if event["kind"] == "recovery"]
    assert recoveries
    assert all("out of memory on rank 3" in event["reason"] for event in recoveries)


def train_with_adapters_of_its_own(kind: str, folder: Path, alike: bool) -> None:
    """Collective: as a user does, with adapters that every rank draws for itself."""
    unlike: Any = mock.patch.object(model_builder, "make_replicas_alike")
    with nullcontext() if alike else unlike:
        run_ours(kind, demo_config(kind, folder, *HYBRID, "dataset.samples=32"))


def test_replicas_begin_with_the_same_adapters(tmp_path: Path) -> None:
    run_on_ranks(4, train_with_adapters_of_its_own, "lora", tmp_path / "run", True, timeout_s=60, in_group=False)
    with pytest.raises(AssertionError, match="the weights on rank 2 differ from those on rank 0"):
        run_on_ranks(4, train_with_adapters_of_its_own, "lora", tmp_path / "un", False, timeout_s=60, in_group=False)
