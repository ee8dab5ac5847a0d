"""The device of a process, its process group and its device meshes."""

from __future__ import annotations

import gc
import os
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torchtune import training, utils

from torchtune_adaptive.config.keys import Settings, flat
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import CollectiveFailedError, ConfigError
from torchtune_adaptive.formatting import ranks_named, shown

Meshes = Mapping[str, DeviceMesh]
"""`dp`: ranks with different data; `tp`: ranks with the same data; `sharding`: the mesh over which FSDP shards and
replicates the model."""
SHARDING = "sharding"
ALL_REMAINING_RANKS = -1
POLL_INTERVAL_S = 0.02
PER_NODE = re.compile(r"(metric_logger|profiler|adaptive\.memory_limit)\b|.*(dir|path|file|files)(\[\d+\])?$")
"""Keys that may differ between nodes: some sections, and keys whose values are paths. A value of another key is a path
if it begins like one."""
PATHS = ("/", "./", "../", "~")


class Devices(NamedTuple):
    """The device of this rank, and its device meshes."""

    device: torch.device
    mesh: Meshes

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks, which train on different samples."""
        return self.mesh["dp"].size()


def join(settings: Settings) -> Devices:
    """Collective: join the process group, compare the configs of all ranks, and create the meshes."""
    device = device_of(settings)
    join_on(device)
    check_same_config(settings.config)
    return Devices(device, mesh_of(device, settings))


def join_on(device: torch.device) -> None:
    """Collective: join torchrun's process group; without torchrun, create a group of one process."""
    backends = dist.Backend.default_device_backend_map
    if device.type not in backends:
        raise ConfigError(f"device is {device.type!r}: torch.distributed has no backend for it, use cuda or cpu")
    # gloo for tensors on the host
    backend = "gloo" if device.type == "cpu" else f"{device.type}:{backends[device.type]},cpu:gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # with `device_id`, NCCL creates its communicator now, and not in its first use
        dist.init_process_group(backend, device_id=None if device.type == "cpu" else device, **store_of_this_start())
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def leave() -> None:
    """Destroy the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def store_of_this_start() -> dict[str, Any]:
    """Collective: return arguments of `init_process_group` for a store without keys of earlier starts.

    After a restart, torchrun's store still contains the addresses of ranks that died. Therefore all ranks use a new
    key prefix, which rank 0 draws at random. The number of restarts cannot be the prefix, because each node counts its
    own. Each rank writes a random id into the store, and rank 0 writes the prefix under every id that it finds, until
    all ranks have confirmed it. It may find the id of a dead rank, whose answer is never read. Without torchrun, the
    result is empty.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    if rank == 0:
        prefix = _distribute_prefix(store, world_size)
    else:
        own_id = uuid.uuid4().hex
        store.set(f"id/{rank}", own_id)
        prefix = str(store.get(f"prefix/{own_id}").decode())
        store.set(f"{prefix}/confirmed/{rank}", "")
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return {"store": own, "rank": rank, "world_size": world_size}


def _distribute_prefix(store: Any, world_size: int) -> str:
    prefix, answered = uuid.uuid4().hex, dict.fromkeys(range(1, world_size), "")
    timeout_s = default_pg_timeout.total_seconds()
    end_s = time.monotonic() + timeout_s
    while waiting := [rank for rank in answered if not store.check([f"{prefix}/confirmed/{rank}"])]:
        if time.monotonic() > end_s:
            raise CollectiveFailedError(
                f"{ranks_named(waiting)} did not join within {timeout_s:.0f} s; check their logs"
            )
        for rank in waiting:
            if store.check([f"id/{rank}"]) and (found := store.get(f"id/{rank}").decode()) != answered[rank]:
                store.set(f"prefix/{found}", prefix)
                answered[rank] = found
        time.sleep(POLL_INTERVAL_S)
    return prefix


def check_same_config(cfg: DictConfig) -> None:
    """Collective: raise a ConfigError if ranks have different configs; paths may differ."""
    values = flat(OmegaConf.to_container(cfg)).items()
    own = {key: shown(each) for key, each in values if not (PER_NODE.match(key) or str(each).startswith(PATHS))}
    first, *others = from_all_ranks(own)
    for rank, theirs in enumerate(others, start=1):
        for key in sorted({*first, *theirs}):
            here, there = first.get(key, "null"), theirs.get(key, "null")
            if here != there:
                raise ConfigError(
                    f"{key} is {here} on rank 0 and {there} on rank {rank}: start all nodes with the same config and "
                    "overrides"
                )


def mesh_shape(settings: Settings, ranks: int) -> tuple[int, int, int]:
    """Return the numbers of replicas, shards and tensor-parallel ranks, whose product must be `ranks`."""
    replicas, tensor_parallel = settings.data_parallel_replicate_dim, settings.tensor_parallel_dim
    shard_dim = None if settings.data_parallel_shard_dim == ALL_REMAINING_RANKS else settings.data_parallel_shard_dim
    shards = ranks // (replicas * tensor_parallel) if shard_dim is None else shard_dim
    if replicas * shards * tensor_parallel == ranks and shards > 0:
        return replicas, shards, tensor_parallel
    raise ConfigError(
        f"data_parallel_replicate_dim {replicas} × data_parallel_shard_dim {-1 if shard_dim is None else shard_dim} × "
        f"tensor_parallel_dim {tensor_parallel} must equal the world size, which is {ranks}; -1 means all remaining "
        "ranks. Change one of them or the number of ranks (--nproc_per_node; in a rehearsal, --ranks)"
    )


def mesh_of(device: torch.device, settings: Settings) -> Meshes:
    """Collective: create the device meshes."""
    replicas, shards, tensor_parallel = mesh_shape(settings, dist.get_world_size())
    if replicas == 1:
        mesh = init_device_mesh(device.type, (shards, tensor_parallel), mesh_dim_names=("dp", "tp"))
        return {"dp": mesh["dp"], "tp": mesh["tp"], SHARDING: mesh["dp"]}
    # The ranks of a replica are consecutive.
    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    return {"dp": mesh._flatten("dp"), SHARDING: mesh}


def device_of(settings: Settings) -> torch.device:
    """Return the device of this process; under torchrun, that of its local rank."""
    try:
        device: torch.device = utils.get_device(device=settings.device)
        # Without an accelerator, torchtune silently returns the CPU.
        if device.type != torch.device(settings.device).type:
            raise RuntimeError(f"torch found only {device.type}")
    except (RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"device is {settings.device!r}, which this machine does not have ({error}): set device: cpu, or start at "
            "most one process per device"
        ) from error
    return device


def free_setup_memory(device: torch.device) -> None:
    """Free memory that is left over from setup, so that it does not count in the peak of training."""
    if device.type == "cpu":
        gc.collect()
    else:
        training.cleanup_before_training()
