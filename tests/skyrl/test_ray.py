"""Adaptive workers as Ray actors, in SkyRL's own group of actors, with its dispatch of batches to ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl")

import ray
import torch
from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup

from tests.skyrl.actors import PolicyActor
from tests.skyrl.sweeps import relative
from tests.skyrl.workers import batch, config, tiny_model
from torchtune_adaptive.skyrl import adaptive

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two resources named GPU, which SkyRL requires, but no GPU."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    hook = "tests.skyrl.make_importable"
    runtime = {"env_vars": environment, "worker_process_setup_hook": hook}
    ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, runtime_env=runtime)
    yield
    ray.shutdown()


def run(actor: Any, path: str) -> tuple[Any, list[torch.Tensor]]:
    """Return the combined output of two actors, and the gradients of the first."""
    group = PPORayActorGroup(config("policy", path), 1, 2, actor)
    ray.get(group.async_init_model(path, 100))
    outputs = ray.get(group.async_run_ray_method("mesh", "forward_backward", data=batch(16)))
    first = ray.get(group.actor_infos[0].handle.gradients.remote())
    for each in group.actor_infos:
        ray.kill(each.handle)
    return outputs, first


def test_actors_recover_from_too_little_memory(tmp_path: Path) -> None:
    path = tiny_model(str(tmp_path))
    expected, gradients = run(PolicyActor, path)
    outputs, ours = run(adaptive(PolicyActor, memory_limit="450KiB"), path)
    assert outputs[0].metrics["oom_recoveries"] > 0
    assert relative(ours, gradients) < 1e-6
    assert [each.loss_fn_outputs for each in outputs] == [each.loss_fn_outputs for each in expected]
