"""Optimizer state in few bits: saved by some ranks, and gone on with by as many or others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from tests.ranks import run_on_ranks
from torchtune_adaptive.checkpoints.optimizer_state import SHARDS, gather_state, load_state
from torchtune_adaptive.engine.memory import plain_tensors, wraps_tensors

CPU = torch.device("cpu")
OPTIMIZERS = {"8 bits": AdamW8bit, "4 bits": AdamW4bit, "8 bits, floating": AdamWFp8}
ERRORS = {"8 bits": 0.02, "4 bits": 0.3, "8 bits, floating": 0.1}
"""By how much of its largest value a moment changes when it is cut into other blocks."""
SIZES = ((64, 384), (384, 131), (131, 5))
"""Layers that 2 and 3 ranks share evenly, unevenly, and in shards that are too small for blocks."""


ONE_DIMENSION, REPLICAS, TENSOR_PARALLEL = "", "replicate", "tensor"
TENSOR_PLAN = {"0": ColwiseParallel(), "1": RowwiseParallel()}


def trained(kind: str, mesh: str = ONE_DIMENSION) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Collective: after a step, the same on every number of ranks."""
    torch.manual_seed(0)
    torch.compiler.set_stance("force_eager")
    model = nn.Sequential(*(nn.Linear(*size) for size in SIZES))
    ranks = dist.get_world_size()
    if mesh == ONE_DIMENSION:
        shards = init_device_mesh("cpu", (ranks,))
    elif mesh == REPLICAS:
        shards = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=(REPLICAS, "shard"))
    else:
        both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", TENSOR_PARALLEL))
        parallelize_module(model, both[TENSOR_PARALLEL], TENSOR_PLAN)
        shards = both["shard"]
    fully_shard(model, mesh=shards)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 128).view(2, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of this rank."""
    return [each for state in optimizer.state.values() for key, each in state.items() if key != "step"]


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [plain.clone() for moment in moments(optimizer) for plain in plain_tensors(moment)]


def save(kind: str, path: Path, mesh: str = ONE_DIMENSION) -> set[bool]:
    """Collective: saves, and trains on. Whether shards of this rank are in few bits."""
    model, optimizer = trained(kind, mesh)
    state = gather_state(model, optimizer, CPU)
    if dist.get_rank() == 0:
        torch.save(state, path)
    assert len(moments(optimizer)) == 2 * 2 * len(SIZES)
    step(model, optimizer)
    return {wraps_tensors(type(local_of(moment))) for moment in moments(optimizer)}


def local_of(moment: Any) -> Tensor:
    return moment.to_local() if isinstance(moment, DTensor) else moment


def load_anew(kind: str, path: Path, mesh: str = ONE_DIMENSION) -> tuple[bool, float]:
    """Collective: a new optimizer with what was saved: whether it has the bits of one that trained as far; else by
    how much the whole moments differ, of the largest.
    """
    model, expected = trained(kind, mesh)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    load_state(model, optimizer, torch.load(path, weights_only=True), CPU)
    same = all(torch.equal(one, other) for one, other in zip(bits(optimizer), bits(expected), strict=True))
    apart = 0.0
    for one, other in zip(moments(optimizer), moments(expected), strict=True):
        found, wanted = in_full(local_of(one)), in_full(local_of(other))
        if found.numel():
            apart = max(apart, float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)))
    step(model, optimizer)
    return same, apart


def in_full(local: Any) -> Tensor:
    return local.dequantize() if wraps_tensors(type(local)) else local


def save_all(kinds: list[str], folder: Path) -> set[bool]:
    return set().union(*(save(kind, folder / kind) for kind in kinds))


def load_all(kinds: list[str], folder: Path) -> dict[str, tuple[bool, float]]:
    return {kind: load_anew(kind, folder / kind) for kind in kinds}


OTHERS = {1: [2], 2: [1, 3], 3: [1, 2]}


@pytest.mark.parametrize("ranks", OTHERS)
def test_as_many_ranks_go_on_with_the_same_bits_and_others_with_the_same_values(ranks: int, tmp_path: Path) -> None:
    kinds = ["8 bits"] if ranks == 1 else [*OPTIMIZERS]
    in_few_bits = set().union(*run_on_ranks(ranks, save_all, kinds, tmp_path, timeout_s=120))
    assert ranks == 1 or in_few_bits == {True, False}
    for again in (ranks, *OTHERS[ranks]):
        for found in run_on_ranks(again, load_all, kinds, tmp_path, timeout_s=120):
            for kind, (same, apart) in found.items():
                assert same if again == ranks else apart < ERRORS[kind], (kind, again)


def test_of_replicas_one_is_saved(tmp_path: Path) -> None:
    run_on_ranks(4, save, "8 bits", tmp_path / "state.pt", REPLICAS, timeout_s=120)
    state = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
    shards = state["0.weight"]["exp_avg"][SHARDS]
    assert [(begin, tuple(shard.shape)) for begin, shard in shards] == [((0, 0), (192, 64)), ((192, 0), (192, 64))]
    assert all(same for same, _ in run_on_ranks(4, load_anew, "8 bits", tmp_path / "state.pt", REPLICAS, timeout_s=120))


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_go_on_with_the_same_bits_and_others_with_the_same_values(
    ranks: int, tmp_path: Path
) -> None:
    path, timeout_s = tmp_path / "state.pt", 120
    run_on_ranks(ranks, save, "8 bits", path, TENSOR_PARALLEL, timeout_s=timeout_s)
    again = run_on_ranks(ranks, load_anew, "8 bits", path, TENSOR_PARALLEL, timeout_s=timeout_s)
    assert all(same for same, _ in again)
    for others, mesh in ((6 - ranks, TENSOR_PARALLEL), (2, ONE_DIMENSION), (1, ONE_DIMENSION)):
        for _, apart in run_on_ranks(others, load_anew, "8 bits", path, mesh, timeout_s=timeout_s):
            assert apart < ERRORS["8 bits"], (others, mesh)
