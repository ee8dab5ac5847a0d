"""Steps and token budgets of a model in full size, as rank 0 of 8, with torch's allocator."""

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from tests.gpu.real_steps import RealStep, build, use, worst
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.engine import ranks as collectives
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.memory import CudaMemory
from torchtune_adaptive.engine.oom import release_memory
from torchtune_adaptive.engine.probes import profile_memory
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.null_cuda import set_memory
from torchtune_adaptive.tune.samples import Sample

RANKS = 8
TOKENS = 2048
"""Tokens of the longest sample; the median is an eighth, as in instruction data."""


@contextmanager
def at_size(layers: int, expandable: bool = False) -> Iterator[RealStep]:
    """Build the package's 1B config with this many of its 16 layers. The other ranks are torch's fake ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    device = use("cuda")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    cfg = OmegaConf.load(locate("adaptive/llama3_2/1B_full"))
    assert isinstance(cfg, DictConfig)
    cfg.enable_activation_checkpointing = True
    cfg.model = {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        "vocab_size": 128_256,
        "num_layers": layers,
        "num_heads": 32,
        "num_kv_heads": 8,
        "embed_dim": 2048,
        "max_seq_len": 131_072,
        "intermediate_dim": 8192,
    }
    with (
        mock.patch.object(collectives.Agreement, "gather", lambda _, row: [tuple(row)] * RANKS),
        mock.patch.object(collectives, "new_gloo_group", return_value=None),
        mock.patch.object(snapshot, "checksums_of", return_value=[]),  # values on a null device have no meaning
    ):
        yield build(cfg, device)
    dist.destroy_process_group()


def mixed(rows: int, steps: int) -> Iterator[list[Sample]]:
    draw = random.Random(0)
    for _ in range(steps):
        yield [worst(max(8, min(TOKENS, int(draw.lognormvariate(0, 0.9) * TOKENS / 8)))) for _ in range(rows)]


def train(step: RealStep, samples: list[Sample]) -> None:
    step.optimization.update(step.forward_backward(samples).target_tokens)
    step.optimization.optimizers[0].zero_grad(set_to_none=True)


class Drift(NamedTuple):
    """Reserved memory in steps of mixed lengths, after one step of only the longest samples."""

    probe_allocated_bytes: int
    probe_reserved_bytes: int
    reserved_bytes: tuple[int, ...]
    """The maximum up to the end of each step."""


def drift(layers: int, rows: int, steps: int, expandable: bool) -> Drift:
    with at_size(layers, expandable) as step:
        train(step, [worst(TOKENS)])
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        train(step, [worst(TOKENS)] * rows)
        probe = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        reserved = []
        for samples in mixed(rows, steps):
            train(step, samples)
            reserved.append(torch.cuda.max_memory_reserved())
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
        return Drift(*probe, tuple(reserved))


class Budgeted(NamedTuple):
    """A measured token budget, and steps of mixed lengths under it."""

    budget_bytes: int
    limit_bytes: int
    flushes: list[int]
    """Flushes of each step."""
    reserved_bytes: int
    recoveries: int


def budgeted(layers: int, memory: int, steps: int, expandable: bool) -> Budgeted:
    set_memory(memory)
    with at_size(layers, expandable) as step:
        found = profile_memory(searched := step.to_search(TOKENS), most_rows=512)
        searched.runner.close()
        runner = step.runner(1)
        runner.use_limit(found.limit)
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        flushes = run(step, runner, mixed(512, steps))
        reserved = torch.cuda.max_memory_reserved()
        return Budgeted(found.budget_bytes, found.limit_bytes, flushes, reserved, runner.recoveries)


def run(step: RealStep, runner: StepRunner[Sample], steps: Iterable[list[Sample]]) -> list[int]:
    """Return the flushes of each step."""
    memory, flushes = CudaMemory(), []
    for number, samples in enumerate(steps):
        before = memory.retries
        step.optimization.update(runner.run(samples, step=number).target_tokens)
        step.optimization.optimizers[0].zero_grad(set_to_none=True)
        flushes.append(memory.retries - before)
    return flushes


class Crowded(NamedTuple):
    """Steps of more rows than fit without a flush."""

    flushes: list[int]
    changes: list[str]
    rows: int
    """The final number of rows."""


def crowded(layers: int, memory: int, rows: int) -> Crowded:
    """Train with so many rows that the allocator flushes its cache in every step."""
    set_memory(memory)
    with at_size(layers) as step:
        changes = list[str]()
        runner = step.runner(rows, lambda change: changes.append(change.kind))
        runner.measure_memory(CudaMemory())
        flushes = run(step, runner, [[worst(TOKENS)] * rows] * 3)
        return Crowded(flushes, changes, runner.limit.size)
