"""Measure a ghost pass of Llama 3.1 8B on the null device: the duration for which peers wait, and its memory.

The other ranks are torch's fake ranks, whose collectives return at once. A real collective adds its transfer.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torchtune import modules, training
from torchtune.models.llama3_1 import llama3_1

from benchmarks.results import Result
from tests.distributed.faults.meshes import parallelize
from tests.null.processes import null_processes
from torchtune_adaptive.engine.ghost_ledger import GhostLedger

NOTE = (
    "rank 0 on the null device, bf16, activation checkpointing, 4 rows of 2,048 tokens, fastest of several passes. "
    "seconds are CPU time of the host. pass: the same pass with kernels that return at once. check: the two dry runs "
    "before the first ghost pass of a stage. memory: allocated on the device and on the host in addition to parameters"
)
ROWS, TOKENS = 4, 2048


class Case(NamedTuple):
    """A mesh."""

    layers: int = 32
    tensor_parallel: int = 8
    shards: int = 1


CASES = (Case(), Case(shards=8))


def run(pairs: int) -> Result:
    rows = []
    for case in CASES:
        with null_processes() as on_null:
            rows.append(on_null(measure, case, pairs, timeout_s=1200))
    return Result(rows, NOTE)


def measure(case: Case, passes: int) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = case.tensor_parallel * case.shards
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    torch.set_default_dtype(torch.bfloat16)
    model = _model(case)
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.long, device="cuda")

    def run_microbatch() -> None:
        with loss_parallel():
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    real = [_timed(run_microbatch) for _ in range(passes)]
    model.zero_grad(set_to_none=True)
    ghosts = GhostLedger(model)
    ghosts.begin_attempt(1, [model])
    ghosts.begin_microbatch(0)
    ghosts.end_microbatch()
    check = _timed(lambda: ghosts.check(run_microbatch))
    with ghosts.ghost_mode() as ghost:
        found = [_timed(lambda: ghosts.finish(ghost, run_microbatch)) for _ in range(passes)]
        collectives = len(ghost.seen) // passes
    return {
        "ranks": ranks,
        **case._asdict(),
        "collectives": collectives,
        "pass s": min(real).seconds,
        "check s": check.seconds,
        "ghost pass s": min(found).seconds,
        "pass GiB": max(each.device_bytes for each in real) / 2**30,
        "ghost pass GiB": max(each.device_bytes for each in found) / 2**30,
        "host MiB": max(each.host_bytes for each in [check, *found]) / 2**20,
    }


def _model(case: Case) -> nn.Module:
    mesh = init_device_mesh("cuda", (case.shards, case.tensor_parallel), mesh_dim_names=("shards", "shared"))
    with torch.device("meta"):
        model: nn.Module = llama3_1(
            vocab_size=128_256,
            num_layers=case.layers,
            num_heads=32,
            num_kv_heads=8,
            embed_dim=4096,
            max_seq_len=131_072,
            intermediate_dim=14_336,
        )
    model = parallelize(model, mesh["shared"])
    training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    if case.shards > 1:
        for each in (*model.layers, model):
            fully_shard(each, mesh=mesh["shards"])
    model.to_empty(device="cuda")
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
            module.to("cuda")
    return model


class Cost(NamedTuple):
    """Time and memory of a pass."""

    seconds: float
    device_bytes: int
    host_bytes: int


def _timed(run: Callable[[], object]) -> Cost:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    allocated, host = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    run()
    seconds = time.process_time() - began
    host_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host)
    return Cost(seconds, torch.cuda.max_memory_allocated() - allocated, host_bytes)
