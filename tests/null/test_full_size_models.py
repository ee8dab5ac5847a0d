"""Decisions of the profile and the limit policy with torch's allocator, for layers in full size, as rank 0 of 8."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gpu_rehearsal.device import set_memory
from omegaconf import DictConfig, OmegaConf

from tests.gpu.real_steps import RealStep, build, use, worst
from tests.null.processes import on_null_device
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.engine import ranks as collectives
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.oom import release_memory
from torchtune_adaptive.engine.probes import profile_memory

RANKS = 8
TOKENS = 2048
"""Tokens of the longest sample; the median is an eighth, as in instruction data."""
LAYERS, MEMORY = 4, 24 * 10**9


@contextmanager
def at_size(expandable: bool = False) -> Iterator[RealStep]:
    """Build the package's 1B config with LAYERS of its 16 layers. The other ranks are torch's fake ranks."""
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
        "num_layers": LAYERS,
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


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@on_null_device()
def test_steps_of_mixed_lengths_reserve_as_much_as_the_longest_samples(expandable: bool) -> None:
    with at_size(expandable) as step:
        train(step, [worst(TOKENS)])
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        train(step, [worst(TOKENS)] * 8)
        longest = torch.cuda.max_memory_reserved()
        for samples in mixed(8, steps=20):
            train(step, samples)
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
        assert torch.cuda.max_memory_reserved() <= 1.01 * longest


@on_null_device()
def test_measured_token_budget_trains_without_running_out_of_memory() -> None:
    set_memory(MEMORY)
    with at_size() as step:
        found = profile_memory(searched := step.to_search(TOKENS), most_rows=512)
        searched.runner.close()
        runner = step.runner(1)
        runner.use_limit(found.limit)
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        for number, samples in enumerate(mixed(512, steps=2)):
            step.optimization.update(runner.run(samples, step=number).target_tokens)
            step.optimization.optimizers[0].zero_grad(set_to_none=True)
        assert runner.recoveries == 0
        assert torch.cuda.max_memory_reserved() > 0.9 * MEMORY
