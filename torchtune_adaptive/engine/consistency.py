"""Checks that ranks run equal steps, and that replicas of a model have equal weights, which torch does not check.

Ranks with different steps would wait for each other. Replicas that start with different weights would stay different,
because they get equal gradients.
"""

import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.engine.ranks import explaining_failures, from_all_ranks, rank, world_size
from torchtune_adaptive.errors import UnrecoverableError

LATE_S = 2.0
"""Seconds to wait for a peer's announcement. It may be late on a null device, which does not wait for collectives."""
UNCHANGED = "as before"
"""A rank whose step equals its previous one announces nothing. Errors show this text for it."""


class EqualSteps:
    """Checks that all ranks run equally many microbatches (before ghost passes, also samples), without a collective.

    If the numbers differ, ranks wait for each other in different collectives until the group's timeout. Therefore a
    rank writes its numbers to the group's store when they change, before the first collective of the step. It reads
    those of its peers before the first collective of the run. In later steps, it reads them after the first collective
    of the step, because a peer may have announced nothing. With replicas, later steps are not compared, because that
    collective does not include all ranks. Steps without a change cost nothing.
    """

    _instances = 0

    def __init__(self, *, enabled: bool) -> None:
        # a unique key, equal on all ranks, because they create the runners of sharded models in the same order
        self._name = f"torchtune_adaptive/step/{EqualSteps._instances}"
        EqualSteps._instances += enabled
        self._announced, self._announcements, self._unchecked = "", 0, False
        self._enabled = enabled and world_size() > 1 and dist.get_backend() != "fake"  # fake groups have no peers

    def announce(self, sizes: str) -> None:
        """Announce the sizes of this rank's step, if they have changed. Call it before the first collective.

        The first call raises as `check` does.
        """
        if self._enabled and sizes != self._announced:
            self._announced, self._announcements, self._unchecked = sizes, self._announcements + 1, True
            _store().set(self._key(rank()), sizes)
            _store().check([self._key(rank())])  # waits for `set`, which TCPStore does not acknowledge
            if self._announcements == 1:
                self.check(waits=True)

    def check(self, *, waits: bool = False) -> None:
        """Raise UnrecoverableError if this rank has announced a step, and a peer did not announce the same one. Call it
        after a collective in which all ranks take part, or with `waits` to wait for their announcements."""
        if not self._unchecked:
            return
        self._unchecked = False
        if torch.cuda.is_initialized():  # the collective may still be queued
            torch.cuda.synchronize()
        until_s = time.monotonic() + (_store().timeout.total_seconds() if waits else LATE_S)
        while set(steps := self._steps()) != {self._announced}:
            if time.monotonic() > until_s or (waits and not set(steps) <= {self._announced, UNCHANGED}):
                raise UnrecoverableError(
                    f"the ranks have different numbers of microbatches in one step ({', '.join(steps)}, by "
                    "rank), so they would wait for each other in different collectives: pass the same number and the "
                    "same limit on every rank, or use a TokenLimit"
                )
            time.sleep(0.01)

    def _steps(self) -> list[str]:
        """Return the steps that the ranks have announced, in order of rank."""
        store, keys = _store(), [self._key(each) for each in range(world_size())]
        return [store.get(key).decode() if store.check([key]) else UNCHANGED for key in keys]

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._announcements}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def compare_replicas(models: Iterable[nn.Module]) -> None:
    """Collective if there are replicas: raise on all ranks if the replicas of any shard differ in a bit."""
    replicated: dict[tuple[int, ...], list[Tensor]] = {}  # by the ranks that hold the same shards
    for parameter in (each for model in models for each in model.parameters()):
        # skips parameters without replicas, for example most of them under tensor parallelism
        if len(ranks := _ranks_with_same_shard(parameter)) > 1:
            replicated.setdefault(ranks, []).append(parameter)
    if not replicated:
        return
    checksums = from_all_ranks({ranks: checksum(shards) for ranks, shards in replicated.items()})
    for here, own_checksums in enumerate(checksums):
        for ranks, own_checksum in own_checksums.items():
            if own_checksum != checksums[first := ranks[0]].get(ranks):
                raise UnrecoverableError(
                    f"the weights on rank {here} differ from those on rank {first}, which holds the same shard: "
                    "replicas get equal gradients, so they stay different; load the same weights on all ranks, or "
                    "call torchtune_adaptive.synchronize_replicas(model.parameters()) before the first step. If each "
                    "rank holds another part of the model, such as experts, make these parameters DTensors"
                )


def synchronize_replicas(parameters: Iterable[Tensor]) -> None:
    """Collective if there are replicas: copy the values of the first replica to the others. Call it after weights were
    initialized on sharded models, because ranks may draw different random numbers."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        for dim in _replicated_dims(parameter):
            with explaining_failures("the synchronization of replicas"):
                dist.broadcast(_local(parameter), group=parameter.device_mesh.get_group(dim), group_src=0)


def _replicated_dims(parameter: DTensor) -> tuple[int, ...]:
    """Return the dimensions of the mesh along which the parameter is replicated."""
    size = parameter.device_mesh.size
    return tuple(dim for dim, each in enumerate(parameter.placements) if each.is_replicate() and size(dim) > 1)


def _ranks_with_same_shard(parameter: Tensor) -> tuple[int, ...]:
    """Return the ranks that hold the same shard of this parameter as this rank, ascending."""
    if not isinstance(parameter, DTensor):
        return tuple(range(world_size()))
    mesh = parameter.device_mesh
    own_position = mesh.get_coordinate()
    assert own_position is not None, "this rank is in the mesh of its parameters"
    replicated = _replicated_dims(parameter)
    ranks = mesh.mesh[tuple(slice(None) if dim in replicated else at for dim, at in enumerate(own_position))]
    return tuple(sorted(ranks.flatten().tolist()))


def checksum(parameters: Iterable[Tensor]) -> int:
    """Return a CRC-32 of the bits of this rank's shards: NaN equals itself, and -0.0 differs from 0.0."""
    value = 0
    for parameter in parameters:
        local = _local(parameter)
        if type(local) is Tensor:  # skips tensor subclasses, whose bits are in several tensors
            # copied, because FSDP cannot resize a storage after `numpy()`, and in pieces to save memory
            for piece in local.flatten().split(2**20):
                value = zlib.crc32(piece.to("cpu", copy=True).view(torch.uint8).numpy().data, value)
    return value


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
