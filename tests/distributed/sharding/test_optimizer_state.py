"""Quantized optimizer state: saved by some ranks and loaded by the same or another number."""

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
from torchtune_adaptive.checkpoints.contents import SHARDS, gather_optimizer_state, load_optimizer_state
from torchtune_adaptive.engine.tensors import plain_tensors, wraps_tensors

CPU = torch.device("cpu")
OPTIMIZERS = {"8 bits": AdamW8bit, "4 bits": AdamW4bit, "8 bits, floating": AdamWFp8}
ERRORS = {"8 bits": 0.02, "4 bits": 0.3, "8 bits, floating": 0.1}
"""How much a moment may change, relative to its maximum, if it is split into other blocks."""
SIZES = ((64, 384), (384, 131), (131, 5))
"""Layers that 2 and 3 ranks share evenly, unevenly, and in shards smaller than a block."""


ONE_DIMENSION, REPLICAS, TENSOR_PARALLEL = "", "replicate", "tensor"
TENSOR_PLAN = {"0": ColwiseParallel(), "1": RowwiseParallel()}


def trained(kind: str, mesh: str = ONE_DIMENSION) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Collective: return a model and optimizer after one step, equal for any number of ranks."""
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
    """Return this rank's moments."""
    return [each for state in optimizer.state.values() for key, each in state.items() if key != "step"]


def bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [plain.clone() for moment in moments(optimizer) for plain in plain_tensors(moment)]


def save(kind: str, path: Path, mesh: str = ONE_DIMENSION) -> set[bool]:
    """Collective: save, train on, and return whether shards of this rank are quantized."""
    model, optimizer = trained(kind, mesh)
    state = gather_optimizer_state(model, optimizer, CPU)
    if dist.get_rank() == 0:
        torch.save(state, path)
    assert len(moments(optimizer)) == 2 * 2 * len(SIZES)
    step(model, optimizer)
    return {wraps_tensors(type(local_of(moment))) for moment in moments(optimizer)}


def local_of(moment: Any) -> Tensor:
    return moment.to_local() if isinstance(moment, DTensor) else moment


def load_anew(kind: str, path: Path, mesh: str = ONE_DIMENSION) -> tuple[bool, float]:
    """Collective: load the state into a new optimizer; return whether its bits equal those of one trained equally
    long, and the largest relative difference.
    """
    model, expected = trained(kind, mesh)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    load_optimizer_state(model, optimizer, torch.load(path, weights_only=True), CPU)
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


def save_all(kinds: list[str], folder: Path, mesh: str) -> set[bool]:
    return set().union(*(save(kind, folder / kind, mesh) for kind in kinds))


def load_all(kinds: list[str], folder: Path, mesh: str) -> dict[str, tuple[bool, float]]:
    return {kind: load_anew(kind, folder / kind, mesh) for kind in kinds}


SAVED = [
    (1, ONE_DIMENSION, ["8 bits"], [(2, ONE_DIMENSION)]),
    (2, ONE_DIMENSION, [*OPTIMIZERS], [(1, ONE_DIMENSION), (3, ONE_DIMENSION)]),
    (3, ONE_DIMENSION, [*OPTIMIZERS], [(1, ONE_DIMENSION), (2, ONE_DIMENSION)]),
    (4, REPLICAS, ["8 bits"], []),
    *(
        (ranks, TENSOR_PARALLEL, ["8 bits"], [(6 - ranks, TENSOR_PARALLEL), (2, ONE_DIMENSION), (1, ONE_DIMENSION)])
        for ranks in (2, 4)
    ),
]
"""Ranks, mesh and optimizers, and other ranks and meshes that load their state."""


@pytest.mark.parametrize(("ranks", "mesh", "kinds", "others"), SAVED)
def test_loading_on_the_same_ranks_keeps_bits_and_on_others_keeps_values(
    ranks: int, mesh: str, kinds: list[str], others: list[tuple[int, str]], tmp_path: Path
) -> None:
    in_few_bits = set().union(*run_on_ranks(ranks, save_all, kinds, tmp_path, mesh, timeout_s=120))
    assert mesh or ranks == 1 or in_few_bits == {True, False}
    for loading, other_mesh in ((ranks, mesh), *others):
        for found in run_on_ranks(loading, load_all, kinds, tmp_path, other_mesh, timeout_s=120):
            for kind, (same, apart) in found.items():
                is_equal = (loading, other_mesh) == (ranks, mesh)
                assert same if is_equal else apart < ERRORS[kind], (kind, loading, other_mesh)
    if mesh == REPLICAS:  # only one replica is saved
        state = torch.load(tmp_path / "8 bits", weights_only=True)["state"]
        shards = state["0.weight"]["exp_avg"][SHARDS]
        assert [(begin, tuple(shard.shape)) for begin, shard in shards] == [((0, 0), (192, 64)), ((192, 0), (192, 64))]
