"""Joining and leaving the process group, with torchrun or without."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from torchtune_adaptive.errors import ConfigError


def join(device: torch.device) -> None:
    """Collective: joins the group that torchrun describes, or makes a group of this one process."""
    backend = "gloo" if device.type == "cpu" else _accelerator_backend(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, **_store_of_this_attempt())
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _store_of_this_attempt() -> dict[str, Any]:
    """Where torchrun has restarted the ranks of one node, a part of its store that holds nothing of those that died.

    torch 2.13 gives a restart a new store only with a dynamic rendezvous; without, ranks would call at the addresses of
    the dead. Several nodes count their restarts each for itself, so there the count cannot tell attempts apart.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    mine = dist.PrefixStore(f"restart_{restart}", store)  # type: ignore[attr-defined]
    return {"store": mine, "rank": rank, "world_size": world_size}


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def data_and_tensor_mesh(device: torch.device, tensor_parallel_dim: int) -> DeviceMesh:
    """Collective: the mesh of data parallel × tensor parallel ranks."""
    world_size = dist.get_world_size()
    check_divides(tensor_parallel_dim, world_size)
    shape = (world_size // tensor_parallel_dim, tensor_parallel_dim)
    return init_device_mesh(device.type, mesh_shape=shape, mesh_dim_names=("dp", "tp"))


def check_divides(tensor_parallel_dim: int, world_size: int) -> None:
    if world_size % tensor_parallel_dim != 0:
        raise ConfigError(
            f"tensor_parallel_dim is {tensor_parallel_dim}, but the world size is {world_size}: "
            "the world size must be a multiple of it; change tensor_parallel_dim or --nproc_per_node"
        )


def _accelerator_backend(device: torch.device) -> str:
    """The accelerator's own backend for its tensors, and gloo for what stays on the host."""
    backends = dist.Backend.default_device_backend_map
    if device.type not in backends:
        raise ConfigError(f"device is {device.type!r}: torch.distributed has no backend for it, use cuda or cpu")
    return f"{device.type}:{backends[device.type]},cpu:gloo"
