"""All communication between ranks except FSDP's own. Without a process group, there is one rank.

This module also compares the replicas of a sharded model, because FSDP2 does not check that they start with equal
weights. Unequal replicas would stay different, because they get equal gradients.
"""

import re
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.errors import CollectiveFailedError, Remedy, UnrecoverableError

Value = TypeVar("Value")

LATE_S = 2.0
"""Seconds to wait for a peer's announcement. It may be late on a null device, which does not wait for collectives."""
UNCHANGED = "as before"
"""A rank whose step equals its previous one announces nothing. Errors show this text for it."""
_HOST_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()
"""Maps a training group to the gloo group that communicates tensors on the host; None if the group does so itself."""


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the backend of a group for tensors on this type of device, for example "nccl"."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(entry.split(":") for entry in config.split(",")).get(device_type)


def new_gloo_group() -> dist.ProcessGroup:
    """Collective: create a group of all ranks that communicates tensors on the host."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


@contextmanager
def explaining_failures(what: str, already_matched: Callable[[], bool] = bool) -> Iterator[None]:
    """Replace an error of a collective by a CollectiveFailedError that explains it.

    An out-of-memory error is raised unchanged if `already_matched` returns False: the collective can be issued again.
    If it returns True, peers have matched the collective, and the error is fatal.
    """
    try:
        yield
    except Exception as error:
        if is_oom(error) and not already_matched():
            raise
        raise _explanation(what, error) from error


def comes_from_a_collective(error: Exception) -> bool:
    """Return True for an error of NCCL or gloo."""
    # since torch 2.15, "nccl" raises a RuntimeError: "NCCL AllReduce failed: ..."
    return isinstance(error, dist.DistBackendError) or re.search(r"/gloo/|\bNCCL \w+ failed: ", str(error)) is not None


@contextmanager
def explaining_collectives(what: str) -> Iterator[None]:
    """As `explaining_failures`, for code in which other errors can occur, too. These are raised unchanged."""
    try:
        yield
    except Exception as error:
        if comes_from_a_collective(error):
            with explaining_failures(what):
                raise
        raise


def _explanation(what: str, error: Exception) -> CollectiveFailedError:
    failed = f"{what} failed on rank {rank()} ({error})"
    if is_oom(error):
        return CollectiveFailedError(
            f"{what} ran out of memory on rank {rank()} inside gloo, which cannot issue it again: restart from the "
            "last checkpoint, if there is one; NCCL does not need this memory"
        )
    # NCCL's text for any CUDA error, including out of memory, after which its communicator cannot be used
    if "unhandled cuda error" in str(error):
        return CollectiveFailedError(
            f"{failed}; NCCL's communicator is broken after this error: restart from the last checkpoint",
            Remedy.ROOM_FOR_NCCL,
        )
    text = re.split(r"\. |\s*\n", re.sub(r"^\[\S+\] ", "", str(error)))[0]  # without gloo's file and line
    other_causes = ", has raised an error, is in another collective," if "imed out" in text else ""
    return CollectiveFailedError(
        f"another rank has exited{other_causes} or the network has failed ({what} failed on rank {rank()}: {text}), "
        "so the ranks are out of step: restart, from the last checkpoint if there is one"
    )


def message_counters() -> Iterator[tuple[dist.ProcessGroup, Callable[[], int]]]:
    """Yield each process group with a function that returns the number of its messages on this rank.

    The number is the group's sequence number, an integer in C++ that costs little to read. It includes messages of
    autograd's threads and of compiled code. NCCL does not count point-to-point messages; gloo does.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group.size() == 1:
            continue
        # a group has one backend for each type of device, or one for all types
        for backend in {id(each): each for each in map(group._get_backend, group._device_types)}.values():
            counter: Callable[[], int] = backend._get_sequence_number_for_group  # type: ignore[attr-defined]
            try:
                counter()
            except RuntimeError:  # not supported, for example by the backend "fake"
                continue
            yield group, counter


def use_communicators(models: Iterable[nn.Module]) -> None:
    """Collective, on a GPU: use each communicator of these models once, because NCCL may create it in its first use. In
    a step, memory could be full, and NCCL allocates outside of torch's allocator."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    devices = {parameter.device.type for parameter in parameters} | {mesh.device_type for mesh in meshes}
    used = {dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())}
    for device in devices - {"cpu"} if world_size() > 1 else ():
        for group in dist.distributed_c10d._world.pg_map:  # in the order in which all ranks have created the groups
            if group in used and group.size() > 1:
                with explaining_failures("the first use of a communicator"):
                    dist.all_reduce(torch.zeros(1, device=device), group=group)


class Agreement:
    """Gathers a row of numbers from every rank, in one all-reduce on the host, so that it does not wait for the GPU."""

    def __init__(self, columns: int) -> None:
        """Collective if the training group has only NCCL: the first Agreement then creates a gloo group."""
        self._columns = columns
        # The tensor is allocated here, because `gather` must work on a rank that has just run out of memory. The
        # memoryview prevents a resize of the array, which would move it while the tensor uses it.
        self._cells = memoryview(array("d", bytes(8 * columns * world_size())))
        self._tensor = torch.frombuffer(self._cells, dtype=torch.float64)
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None and world not in _HOST_GROUPS:
            # shared by all Agreements, because each gloo group connects every rank with every other
            _HOST_GROUPS[world] = None if backend_for("cpu") == "gloo" else new_gloo_group()
        self._group = None if world is None else _HOST_GROUPS[world]

    def gather(self, row: Sequence[float]) -> list[tuple[float, ...]]:
        """Collective: return the rows of all ranks, in order of rank."""
        width, cells = self._columns, self._cells
        cells[:] = array("d", bytes(8 * len(cells)))
        cells[rank() * width : (rank() + 1) * width] = array("d", row)
        if world_size() > 1:
            with explaining_failures("the agreement at the end of a step"):
                dist.all_reduce(self._tensor, group=self._group)  # rows do not overlap: the sum is the table
        return [tuple(cells[start : start + width]) for start in range(0, len(cells), width)]

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Collective: return for each flag whether it is True on any rank."""
        on_ranks = torch.tensor(flags, dtype=torch.uint8)
        with explaining_failures("the agreement on gradients"):
            dist.all_reduce(on_ranks, dist.ReduceOp.MAX, group=self._group)
        return [*map(bool, on_ranks.tolist())]


class EqualSteps:
    """Checks that all ranks run the same number of samples and microbatches, without a collective.

    If the numbers differ, ranks wait for each other in different collectives until the group's timeout. Therefore a
    rank writes its numbers to the group's store when they change, before the first collective of the step. It reads
    those of its peers before the first collective of the run. In later steps, it reads them after the first collective
    of the step, because a peer may have announced nothing. Steps without a change cost nothing.
    """

    _instances = 0

    def __init__(self, *, enabled: bool) -> None:
        # a unique key, equal on all ranks, because they create their runners in the same order
        self._name = f"torchtune_adaptive/step/{EqualSteps._instances}"
        EqualSteps._instances += 1
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
                    "same limit on every rank, or use a TokenLimit and a SampleKind with a filler"
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


def let_gloo_threads_finish() -> None:
    """Give gloo's threads time to free their tensors, for which they need Python's GIL.

    The process aborts if a thread waits for the GIL while the interpreter exits. FSDP keeps the group alive after
    `destroy_process_group`, and with it these threads (pytorch #179291).
    """
    if dist.is_initialized() and backend_for("cpu") == "gloo":
        time.sleep(0.2)  # they need microseconds, or milliseconds on a busy machine


def from_all_ranks(value: Value) -> list[Value]:
    """Collective: return the value of every rank, in order of rank. Values are pickled."""
    values = [value] * world_size()
    if dist.is_initialized():
        with explaining_failures("an exchange between the ranks"):
            dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Value) -> Value:
    """Collective: return rank 0's value on every rank. The value is pickled."""
    values = [value]
    if dist.is_initialized():
        with explaining_failures("an exchange between the ranks"):
            dist.broadcast_object_list(values)
    return values[0]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Collective: return the sum of a tensor over all ranks, on the training communicator."""
    total = value.clone()
    if world_size() > 1:
        with explaining_failures("the reduction of the loss"):
            dist.all_reduce(total)
    return total


def compare_replicas(models: Iterable[nn.Module]) -> None:
    """Collective if there are replicas: raise on all ranks if the replicas of any shard differ in a bit."""
    replicated: dict[tuple[int, ...], list[Tensor]] = {}  # by the ranks that hold the same shards
    for parameter in (each for model in models for each in model.parameters()):
        # skips parameters without replicas, for example most of them under tensor parallelism
        if len(ranks := _ranks_with_same_shard(parameter)) > 1:
            replicated.setdefault(ranks, []).append(parameter)
    if not replicated or world_size() == 1:
        return
    checksums = from_all_ranks({ranks: checksum(shards) for ranks, shards in replicated.items()})
    for rank, own_checksums in enumerate(checksums):
        for ranks, own_checksum in own_checksums.items():
            if own_checksum != checksums[first := ranks[0]].get(ranks):
                raise UnrecoverableError(
                    f"the weights on rank {rank} differ from those on rank {first}, which holds the same shard: "
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
