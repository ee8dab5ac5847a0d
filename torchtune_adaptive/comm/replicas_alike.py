"""Replicas of a sharded model. FSDP2 never checks that they start equal; if they differ, they stay different."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.comm.collectives import Agreement, explaining_failures
from torchtune_adaptive.errors import UnrecoverableError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 251
"""Numbers in a row of what is summed; prime, so that the rows of a matrix begin at different places."""
_ROWS_AT_ONCE = 4096
"""Eight megabytes, once they are 64 bits each."""
_MODULUS = 2**52
"""Every number below it is one of float64, in which the ranks agree."""


def compare_replicas(models: Iterable[nn.Module]) -> None:
    """Collective, where there are replicas: raises on all ranks if those of any shard differ in a bit."""
    of_holders: dict[object, list[DTensor]] = {}
    for parameter in (each for model in models for each in model.parameters()):
        # not those of which each rank has a part of its own, as most are under tensor parallelism
        if isinstance(parameter, DTensor) and (dims := _replicated_dims(parameter)):
            of_holders.setdefault((parameter.device_mesh, dims), []).append(parameter)
    if not of_holders:
        return
    row = [each for held in of_holders.values() for each in (_first_holder(held[0]), checksum(held))]
    table = Agreement(len(row)).gather(row)
    for column in range(0, len(row), 2):
        for rank, told in enumerate(table):
            first, found = int(told[column]), told[column + 1]
            if found != table[first][column + 1]:
                raise _unlike(rank, first)


def _unlike(rank: int, first: int) -> UnrecoverableError:
    return UnrecoverableError(
        f"the weights on rank {rank} differ from those on rank {first}, which holds the same shard: replicas get the "
        "same gradients, so they would never become equal; load the same weights on all ranks, or call "
        "torchtune_adaptive.comm.make_replicas_alike(model.parameters()) before the first step"
    )


def make_replicas_alike(parameters: Iterable[Tensor]) -> None:
    """Collective, where there are replicas: gives all of them the values of the first.

    For what is initialised after sharding, from random generators that differ from rank to rank.
    """
    for parameter in parameters:
        for group in _replica_groups(parameter):
            with explaining_failures("the synchronization of replicas"):
                dist.broadcast(_local(parameter), group=group, group_src=0)


def _replica_groups(parameter: Tensor) -> Iterator[dist.ProcessGroup]:
    """The groups whose ranks hold the same shard of a parameter."""
    if isinstance(parameter, DTensor):
        for dim in _replicated_dims(parameter):
            yield parameter.device_mesh.get_group(dim)


def _replicated_dims(parameter: DTensor) -> tuple[int, ...]:
    """Dimensions of a parameter's mesh along which all ranks hold the same."""
    size = parameter.device_mesh.size
    return tuple(dim for dim, each in enumerate(parameter.placements) if each.is_replicate() and size(dim) > 1)


def _first_holder(parameter: DTensor) -> int:
    """The first of the ranks that hold the same shard as this one."""
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    assert here is not None, "a rank trains what is on its own mesh"
    same = _replicated_dims(parameter)
    return int(mesh.mesh[tuple(slice(None) if dim in same else at for dim, at in enumerate(here))].min())


def checksum(parameters: Iterable[Tensor]) -> int:
    """A checksum of this rank's shards, bit by bit: NaN equals itself, and -0.0 is not 0.0."""
    total = 0
    for parameter in parameters:
        local = _local(parameter).contiguous()
        if type(local) is Tensor and local.numel():  # what wraps tensors has no bits of its own
            bits = local.view(_BITS[local.element_size()]).flatten()
            total = (31 * total + _weighted_sum(bits)) % _MODULUS
    return total


def _weighted_sum(bits: Tensor) -> int:
    """Other numbers, or the same ones in another order, have another sum.

    In pieces: torch makes a copy of what it sums in another type, and this may run where memory is tight.
    """
    weights = torch.arange(1, _ROWS_AT_ONCE + 1, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    rows = len(bits) // _WEIGHTS
    for piece in bits[: rows * _WEIGHTS].view(rows, _WEIGHTS).split(_ROWS_AT_ONCE):
        of_columns, of_rows = (piece.sum(dim, dtype=torch.int64) for dim in (0, 1))
        # each row and each column counts by its place, and each piece by that of what comes after it
        total = 31 * total + (of_columns * weights[:_WEIGHTS]).sum() + 7 * (of_rows * weights[: len(piece)]).sum()
    rest = bits[rows * _WEIGHTS :].to(torch.int64)
    return int(31 * total + (rest * weights[: len(rest)]).sum())


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
