"""Runs on a mesh of 2 replicas of 2 ranks each, compared with a flat mesh of the same ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune.modules.peft import LoRALinear

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import stopped_before_epoch
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours, saved_weights
from tests.timeline import read_timeline

BASE = (
    *SGD,
    "optimizer.lr=0.05",
    "batch_size=2",
    "gradient_accumulation_steps=2",
    "clip_grad_norm=0.7",
    "epochs=2",
    "resume_from_checkpoint=auto",
)
HYBRID = ("data_parallel_replicate_dim=2",)


def starved(little: str) -> tuple[str, ...]:
    """Limit the memory of one rank of the second replica."""
    limit = f"adaptive.memory_limit=[120MiB,120MiB,120MiB,{little}]"
    return (*HYBRID, "adaptive.token_budget=4000", "adaptive.sequence_length=null", limit)


RUNS: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "full": {
        "flat": [()],
        "whole": [("data_parallel_replicate_dim=4", "data_parallel_shard_dim=1", "adaptive.recover_from_oom=False")],
        "searched": [
            (*HYBRID, "use_maximum_batch_size=True", "adaptive.max_batch_size=4", "adaptive.memory_limit=60MiB")
        ],
        "starved": [starved("10MiB")],
        "onto a flat mesh": [HYBRID, ()],
        "onto a hybrid mesh": [(), HYBRID],
    },
    "lora_dpo": {"flat": [()], "starved": [starved("17MiB")]},
}
"""Consecutive starts: the first of two stops after an epoch."""
STEPS = 8


@contextmanager
def adapters_like_those_of_one_process() -> Iterator[None]:
    """Initialize adapters equally on all meshes: DTensor draws different ones on each, and runs could not be
    compared.
    """

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
    with adapters_like_those_of_one_process():
        for case, (*stopped, last) in RUNS[kind].items():
            for overrides in stopped:
                with stopped_before_epoch(1):
                    run_ours(kind, demo_config(kind, folder / case, *BASE, *overrides))
            run_ours(kind, demo_config(kind, folder / case, *BASE, *last))


@pytest.fixture(scope="module", params=RUNS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(4, run_all, request.param, folder, timeout_s=250, in_group=False)
    return request.param, folder


def test_every_step_has_the_figures_of_a_flat_mesh(runs: tuple[str, Path]) -> None:
    kind, folder = runs
    logs = {case: read_log(folder / case / "log.jsonl") for case in RUNS[kind]}
    flat = logs.pop("flat")
    assert [step["step"] for step in flat] == [*range(1, STEPS + 1)]
    for case, ours in logs.items():
        print(case)  # pytest shows it if they differ
        assert_same_figures(ours, flat, ("step", "loss", "grad_norm"), rel=RELATIVE)


def test_saved_weights_are_those_of_a_flat_mesh(runs: tuple[str, Path]) -> None:
    kind, folder = runs
    flat = saved_weights(folder / "flat", epoch=1)
    for case in RUNS[kind]:
        ours = saved_weights(folder / case, epoch=1)
        for name, weight in flat.items():
            torch.testing.assert_close(ours[name], weight, rtol=RELATIVE, atol=1e-6, msg=f"{case}: {name}")


def test_oom_on_a_rank_of_one_replica_is_recovered(runs: tuple[str, Path]) -> None:
    _, folder = runs
    timeline = read_timeline(folder / "starved" / "out")
    recoveries = [event for event in timeline.events if event["kind"] == "recovery"]
    assert recoveries
    assert all("out of memory on rank 3" in event["reason"] for event in recoveries)


def train_with_adapters_of_its_own(folder: Path) -> None:
    """Collective: train as a user does, with adapters drawn separately on every rank."""
    run_ours("lora", demo_config("lora", folder, *HYBRID, "dataset.samples=32"))


def test_replicas_start_with_the_same_adapters(tmp_path: Path) -> None:
    """tests/distributed/sharding/test_fsdp.py checks that different ones are refused."""
    run_on_ranks(4, train_with_adapters_of_its_own, tmp_path / "run", timeout_s=60, in_group=False)
