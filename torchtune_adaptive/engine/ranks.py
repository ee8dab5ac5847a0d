"""Communication between ranks, except FSDP's. Without a process group, the world is one rank.

Also compares the replicas of a sharded model. FSDP2 does not check that they start with equal weights. If they do not,
they stay different, because they get the same gradients.
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
from torchtune_adaptive.errors import RanksPartedError, Remedy, UnrecoverableError

Value = TypeVar("Value")

LATE_S = 2.0
"""Seconds to wait for a late announcement. On a null device, synchronizing does not wait for gloo's peers."""
SAME = "as before"
"""The step of a rank that has not announced a change."""
_HOST_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()
"""By training group, the group that communicates tensors on the host; None if the training group does."""


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
def explaining_failures(what: str, is_lost: Callable[[], bool] = bool) -> Iterator[None]:
    """Replace errors of a collective by ones that explain them.

    Out-of-memory errors are raised unchanged, because the collective can be issued again. If `is_lost` returns True,
    peers have already matched it, so it cannot, and the error is replaced.
    """
    try:
        yield
    except Exception as error:
        if is_oom(error) and not is_lost():
            raise
        raise _explanation(what, error) from error


def _explanation(what: str, error: Exception) -> RanksPartedError:
    failed = f"{what} failed on rank {rank()} ({error})"
    if is_oom(error):
        return RanksPartedError(
            f"{what} ran out of memory on rank {rank()} inside gloo, which cannot issue it again: restart from the "
            "last checkpoint, if there is one; NCCL does not need this memory"
        )
    # NCCL's text for a CUDA error inside it, which may be out of memory; the collective is then half done
    if "unhandled cuda error" in str(error):
        return RanksPartedError(
            f"{failed}; NCCL's communicator is broken after this error: restart from the last checkpoint",
            Remedy.ROOM_FOR_NCCL,
        )
    text = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # without gloo's file and line
    other_causes = ", has raised an error, is in another collective," if "imed out" in text else ""
    return RanksPartedError(
        f"another rank has exited{other_causes} or the network has failed ({what} failed on rank {rank()}: {text}), "
        "so the ranks are out of step: restart, from the last checkpoint if there is one"
    )


def message_counters() -> Iterator[tuple[dist.ProcessGroup, Callable[[], int]]]:
    """Yield each process group with a function that returns its number of messages on this rank.

    The numbers are the groups' sequence numbers; a call reads one integer in C++. They include messages of autograd's
    threads and of compiled code, without any hook. NCCL does not count point-to-point messages; gloo does.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group.size() == 1:
            continue
        # a group has one backend for each type of device, or one for all
        for backend in {id(each): each for each in map(group._get_backend, group._device_types)}.values():
            counter: Callable[[], int] = backend._get_sequence_number_for_group  # type: ignore[attr-defined]
            try:
                counter()
            except RuntimeError:  # not supported, for example by the backend "fake"
                continue
            yield group, counter


class Agreement:
    """Gathers one row of numbers from every rank, in one collective on the host, which does not wait for the GPU."""

    def __init__(self, columns: int) -> None:
        """Collective: the first agreement creates a gloo group, if the training group has only NCCL."""
        self._columns = columns
        # A rank that has just run out of memory takes part, so agreeing allocates no tensor. The memoryview keeps the
        # array from being resized, and thus moved, while the tensor uses it.
        self._cells = memoryview(array("d", bytes(8 * columns * world_size())))
        self._tensor = torch.frombuffer(self._cells, dtype=torch.float64)
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None and world not in _HOST_GROUPS:
            # shared, because a group opens a connection between every two ranks
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


class EqualSteps:
    """Checks that all ranks run the same number of samples and microbatches, without a collective.

    Otherwise ranks would wait for each other in different collectives until the group's timeout. A rank announces a
    change in the group's store, and reads the announcements of its peers after all have begun the step. Steps without
    a change are free.
    """

    _made = 0

    def __init__(self) -> None:
        self._name = f"torchtune_adaptive/step/{EqualSteps._made}"  # same order on every rank
        EqualSteps._made += 1
        self._own, self._changes, self._changed = "", 0, False

    def announce(self, step: str) -> None:
        """Announce this rank's step, if it differs from the previous one. Call it before the first collective."""
        if step != self._own and world_size() > 1 and dist.get_backend() != "fake":  # fake groups have no peers
            self._own, self._changes, self._changed = step, self._changes + 1, True
            _store().set(self._key(rank()), step)
            _store().check([self._key(rank())])  # waits for `set`, which TCPStore does not acknowledge

    def check(self, *, waits: bool = False) -> None:
        """Raise if a peer has announced another step. Call it after a collective of the step, or with `waits=True`."""
        if not self._changed:
            return
        self._changed = False
        if torch.cuda.is_initialized():  # the collective may still be queued
            torch.cuda.synchronize()
        until_s = time.monotonic() + LATE_S
        while set(steps := self._steps()) != {self._own}:
            if time.monotonic() > until_s and not (waits and set(steps) <= {self._own, SAME}):
                raise UnrecoverableError(
                    f"the ranks have different numbers of samples or microbatches in one step ({', '.join(steps)}, by "
                    "rank), so they would wait for each other in different collectives: pass the same number and the "
                    "same limit on every rank, or use a TokenLimit and a SampleKind with a filler"
                )
            time.sleep(0.01)

    def _steps(self) -> list[str]:
        """Return the announcements, in order of rank."""
        store, keys = _store(), [self._key(each) for each in range(world_size())]
        return [store.get(key).decode() if store.check([key]) else SAME for key in keys]

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._changes}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def let_gloo_threads_finish() -> None:
    """Give gloo's threads time to free their tensors, which requires the interpreter's lock.

    A thread that waits for the lock while the interpreter exits aborts the process. FSDP keeps the group, and thus
    its threads, alive after `destroy_process_group` (pytorch #179291).
    """
    if dist.is_initialized() and backend_for("cpu") == "gloo":
        time.sleep(0.2)  # microseconds suffice; milliseconds under load


def from_all_ranks(value: Value) -> list[Value]:
    """Collective: return the values of all ranks, in order of rank."""
    values = [value] * world_size()
    if dist.is_initialized():
        with explaining_failures("an exchange between the ranks"):
            dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Value) -> Value:
    """Collective: return rank 0's value on every rank."""
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


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Collective: average the gradients of whole models over all ranks, as FSDP would.

    A missing gradient counts as zeros; if all ranks lack it, it stays None.
    """
    every = list(parameters)
    has_gradient = torch.tensor([each.grad is not None for each in every], dtype=torch.int32, device=every[0].device)
    with explaining_failures("the mean of the gradients"):
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        for parameter, has in zip(every, has_gradient.tolist(), strict=True):
            if has:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size()


def compare_replicas(models: Iterable[nn.Module]) -> None:
    """Collective, if there are replicas: raise on all ranks if the replicas of any shard differ in a bit."""
    replicated: dict[tuple[int, ...], list[Tensor]] = {}  # by the ranks that hold the same shards
    for parameter in (each for model in models for each in model.parameters()):
        # parameters without replicas, such as most under tensor parallelism, are skipped
        if len(holders := _holders(parameter)) > 1:
            replicated.setdefault(holders, []).append(parameter)
    if not replicated or world_size() == 1:
        return
    checksums = from_all_ranks({holders: checksum(shards) for holders, shards in replicated.items()})
    for rank, own in enumerate(checksums):
        for holders, value in own.items():
            if value != checksums[first := holders[0]].get(holders):
                raise UnrecoverableError(
                    f"the weights on rank {rank} differ from those on rank {first}, which holds the same shard: "
                    "replicas get the same gradients, so they stay different; load the same weights on all ranks, or "
                    "call torchtune_adaptive.make_replicas_alike(model.parameters()) before the first step"
                )


def make_replicas_alike(parameters: Iterable[Tensor]) -> None:
    """Collective, if there are replicas: copy the first replica's values to the others.

    Needed for weights that were initialized after sharding, from different random generators.
    """
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


def _holders(parameter: Tensor) -> tuple[int, ...]:
    """Return the ranks that hold the same shard as this one, ascending."""
    if not isinstance(parameter, DTensor):
        return tuple(range(world_size()))
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    assert here is not None, "this rank is in the mesh of its parameters"
    same = _replicated_dims(parameter)
    holders = mesh.mesh[tuple(slice(None) if dim in same else at for dim, at in enumerate(here))]
    return tuple(sorted(holders.flatten().tolist()))


def checksum(parameters: Iterable[Tensor]) -> int:
    """Return a checksum of the bits of this rank's shards: NaN equals itself, and -0.0 differs from 0.0."""
    checked = 0
    for parameter in parameters:
        local = _local(parameter)
        if type(local) is Tensor:  # skips other tensor subclasses, whose bits are in several tensors
            # copied in pieces of 4 MiB, because FSDP cannot resize a storage after `numpy()`
            for piece in local.flatten().view(torch.uint8).split(2**22):
                checked = zlib.crc32(piece.to("cpu", copy=True).numpy().data, checked)
    return checked


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
