"""Replicas of a sharded model: nothing in FSDP2 looks whether they begin alike, and unlike ones stay so for ever."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.comm.collectives import Agreement, explaining_failures
from torchtune_adaptive.errors import UnrecoverableError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 251
"""One for each place, before they begin anew; prime, so that the rows of a matrix begin with different ones."""
_MODULUS = 2**52
"""Every number below it is one of float64, in which the ranks agree."""


def compare_replicas(models: Iterable[nn.Module]) -> None:
    """Collective, where there are replicas: raises on all ranks if those of any shard differ in a bit."""
    # not those of which each rank has a part of its own, as most are under tensor parallelism
    parameters = [each for model in models for each in model.parameters() if any(_replica_groups(each))]
    groups = {id(group): group for parameter in parameters for group in _replica_groups(parameter)}
    if not groups:
        return
    first = min(dist.get_process_group_ranks(group)[0] for group in groups.values())
    table = Agreement(2).gather([first, checksum(parameters)])
    of_first = {int(of): found for of, found in reversed(table)}
    different = [rank for rank, (of, found) in enumerate(table) if found != of_first[int(of)]]
    if different:
        raise UnrecoverableError(
            f"the weights on rank {different[0]} are not those on rank {int(table[different[0]][0])}, which holds the "
            "same shard: replicas that begin unlike are trained with the same gradients and stay unlike; load the "
            "same weights everywhere, or call torchtune_adaptive.comm.make_replicas_alike(model.parameters()) before "
            "the first step"
        )


def make_replicas_alike(parameters: Iterable[Tensor]) -> None:
    """Collective, where there are replicas: gives all of them the values of the first.

    For what is initialised after sharding, from random generators that differ from rank to rank.
    """
    for parameter in parameters:
        for group in _replica_groups(parameter):
            with explaining_failures("making replicas alike"):
                dist.broadcast(_local(parameter), group=group, group_src=0)


def _replica_groups(parameter: Tensor) -> Iterator[dist.ProcessGroup]:
    """The groups whose ranks hold the same shard of a parameter."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if placement.is_replicate() and mesh.size(dim) > 1:
                yield mesh.get_group(dim)


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
    """Other numbers, or the same ones in another order, have another sum; without a copy of them all."""
    weights = torch.arange(1, _WEIGHTS + 1, device=bits.device)
    rows = len(bits) // _WEIGHTS
    columns = bits[: rows * _WEIGHTS].view(rows, _WEIGHTS).sum(0, dtype=torch.int64)
    rest = bits[rows * _WEIGHTS :].to(torch.int64)
    return int((columns * weights).sum() + (rest * weights[: len(rest)]).sum())


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
