"""Joining and leaving the process group, with torchrun or without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.devices import device_of
from torchtune_adaptive.tune.meeting import store_of_this_start
from torchtune_adaptive.tune.same_config import check_same_config

Meshes = Mapping[str, DeviceMesh]
"""`dp`: the ranks that have data of their own; `tp`: those that share theirs; `sharding`: what the model is sharded
over, and replicated."""
SHARDING = "sharding"
WHATEVER_IS_LEFT = -1
"""As many as are left, as a dimension of a mesh."""


class Place(NamedTuple):
    """Where this process works, and with whom."""

    device: torch.device
    mesh: Meshes

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: each trains on samples of its own."""
        return self.mesh["dp"].size()


def join(settings: Settings) -> Place:
    """Collective: takes the place in the run that torchrun and the config give this process."""
    device = device_of(settings)
    join_on(device)
    check_same_config(settings.config)
    return Place(device, mesh_of(device, settings))


def join_on(device: torch.device) -> None:
    """Collective: joins the group that torchrun describes, or makes a group of this one process."""
    backend = "gloo" if device.type == "cpu" else _accelerator_backend(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, **store_of_this_start())
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class MeshShape(NamedTuple):
    """How the ranks of a run share its model."""

    replicas: int
    shards: int
    tensor_parallel: int


def mesh_shape(settings: Settings, ranks: int) -> MeshShape:
    """The mesh for so many ranks; refuses what does not come out even."""
    replicas, given, tensor_parallel = (
        settings.data_parallel_replicate_dim,
        settings.data_parallel_shard_dim,
        settings.tensor_parallel_dim,
    )
    shards = ranks // (replicas * tensor_parallel) if given in (None, WHATEVER_IS_LEFT) else int(given)
    if replicas * shards * tensor_parallel == ranks and shards > 0:
        return MeshShape(replicas, shards, tensor_parallel)
    dims = {
        "data_parallel_replicate_dim": replicas,
        "data_parallel_shard_dim": given,
        "tensor_parallel_dim": tensor_parallel,
    }
    unset = {
        "data_parallel_replicate_dim": (1,),
        "data_parallel_shard_dim": (None, WHATEVER_IS_LEFT),
        "tensor_parallel_dim": (1,),
    }
    told = " × ".join(f"{key} is {dim}" for key, dim in dims.items() if dim not in unset[key])
    raise ConfigError(
        f"{told}, but the world size is {ranks}: data_parallel_replicate_dim × data_parallel_shard_dim × "
        "tensor_parallel_dim must equal it; -1 for data_parallel_shard_dim means all remaining ranks. Change one of "
        "them or the number of ranks (--nproc_per_node; for adaptive_plan, world_size)"
    )


def mesh_of(device: torch.device, settings: Settings) -> Meshes:
    """Collective: the meshes of this run."""
    replicas, shards, tensor_parallel = mesh_shape(settings, dist.get_world_size())
    if replicas == 1:
        whole = init_device_mesh(device.type, (shards, tensor_parallel), mesh_dim_names=("dp", "tp"))
        return {"dp": whole["dp"], "tp": whole["tp"], SHARDING: whole["dp"]}
    return replicated_mesh(device, replicas, shards)


def replicated_mesh(device: torch.device, replicas: int, shards: int) -> Meshes:
    """Collective: of replicas whose ranks follow one another."""
    whole = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    return {"dp": whole._flatten("dp"), SHARDING: whole}


def _accelerator_backend(device: torch.device) -> str:
    """The accelerator's own backend for its tensors, and gloo for what stays on the host."""
    backends = dist.Backend.default_device_backend_map
    if device.type not in backends:
        raise ConfigError(f"device is {device.type!r}: torch.distributed has no backend for it, use cuda or cpu")
    return f"{device.type}:{backends[device.type]},cpu:gloo"
