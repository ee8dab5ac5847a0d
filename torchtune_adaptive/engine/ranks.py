"""Communication between the ranks of a step, besides FSDP's. Without a process group, one rank is the world.

Replicas of a sharded model are compared here too: FSDP2 never checks that they start equal, and unequal ones never
become equal.
"""

import re
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.errors import RanksPartedError, Remedy, UnrecoverableError
from torchtune_adaptive.rehearsal_flag import REHEARSAL

Value = TypeVar("Value")

ASIDE: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups that no microbatch uses, but perhaps a thread that saves: their messages are not counted."""
LATE_S = 2.0
"""By how much a peer may be behind: on a null device no stream waits for what gloo still carries."""
SAME = "as many as before"
"""What the step of a rank is that has written nothing, or not yet."""
_HOST_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()
"""By the group of all ranks, one for tensors on the host; None is the training group."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """The backend that carries tensors of a device in a group, such as "nccl"; None if the group has none."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(entry.split(":") for entry in config.split(",")).get(device_type)


def gloo_group_aside() -> dist.ProcessGroup:
    """Collective: a group of all ranks for messages between microbatches."""
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    ASIDE.add(group)
    return group


@contextmanager
def explaining_failures(what: str, is_lost: Callable[[], bool] = bool) -> Iterator[None]:
    """Turns any error of a collective into one that explains it, except running out of memory while the collective can
    still be issued again (not `is_lost`)."""
    try:
        yield
    except Exception as error:
        remedies: tuple[Remedy, ...] = ()
        failed = f"{what} failed on rank {rank()} ({error})"
        if is_oom(error):
            if not is_lost():
                raise
            why = (
                f"{what} ran out of memory on rank {rank()} inside gloo, which cannot issue it again: restart from the "
                "last checkpoint, if there is one; NCCL does not need this memory"
            )
        # NCCL's text where a CUDA call failed inside it, perhaps for lack of memory, and left it half done.
        elif "unhandled cuda error" in str(error):
            why = f"{failed}; NCCL's communicator is broken after this error: restart from the last checkpoint"
            remedies = (Remedy.ROOM_FOR_NCCL,)
        else:
            said = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # gloo begins with its own source
            waited = ", has left a step by an error, is in another collective," * ("imed out" in said)
            why = (
                f"another rank has exited{waited} or the network has failed ({what} failed on rank {rank()}: {said}), "
                "so the ranks are out of step: restart, from the last checkpoint if there is one"
            )
        raise RanksPartedError(why, *remedies) from error


def message_counters() -> Iterator[tuple[dist.ProcessGroup, Callable[[], int]]]:
    """Process groups that exist now, except those set aside, with their sequence numbers: the messages that this rank
    has taken part in.

    Each costs one read of a C++ integer. Nothing is hooked, so messages of autograd's threads and of compiled code
    count, and nothing runs differently for being watched. Point-to-point messages count on gloo, not on NCCL.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group.size() == 1 or group in ASIDE:
            continue
        # One per kind of device (for example, gloo for the host and NCCL for GPUs), unless one serves all.
        for backend in {id(each): each for each in map(group._get_backend, group._device_types)}.values():
            counter: Callable[[], int] = backend._get_sequence_number_for_group  # type: ignore[attr-defined]
            try:
                counter()
            except RuntimeError:  # a backend that does not count, such as "fake"
                continue
            yield group, counter


class Agreement:
    """A table with one row of numbers a rank, which every rank can read after one collective.

    It runs on the host, so on CUDA it does not wait for the GPU.
    """

    def __init__(self, columns: int) -> None:
        """Collective: the first creates a gloo group, where the training group cannot carry what is on the host."""
        self._columns = columns
        # A rank that has just run out of memory takes part, so agreeing allocates no tensor: the buffer
        # exists from the start, and is read and written as Python numbers. A view of it cannot change its size, which
        # would move it from under the tensor.
        self._cells = memoryview(array("d", bytes(8 * columns * world_size())))
        self._tensor = torch.frombuffer(self._cells, dtype=torch.float64)
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None and world not in _HOST_GROUPS:
            # all agreements share it, since a group opens a connection between any two of its ranks
            _HOST_GROUPS[world] = None if backend_for("cpu") == "gloo" else gloo_group_aside()
        self._group = None if world is None else _HOST_GROUPS[world]

    def gather(self, row: Sequence[float]) -> list[tuple[float, ...]]:
        """Collective: the rows of all ranks, in order of rank."""
        width, cells = self._columns, self._cells
        if REHEARSAL.on:  # all ranks are alike
            return [tuple(map(float, row))] * world_size()
        cells[:] = array("d", bytes(8 * len(cells)))
        cells[rank() * width : (rank() + 1) * width] = array("d", row)
        if world_size() > 1:
            with explaining_failures("the agreement at the end of a step"):
                dist.all_reduce(self._tensor, group=self._group)  # rows do not overlap: the sum is the table
        return [tuple(cells[start : start + width]) for start in range(0, len(cells), width)]


class EqualSteps:
    """Checks that all ranks have the same step before them, without a collective, and free while it stays as it is.

    A rank whose step changes writes that into the group's store, and reads what its peers have written once all of them
    have begun the step. Without the check, ranks with different numbers of samples, or limits, would wait for each
    other in different collectives until the group's timeout.
    """

    _made = 0

    def __init__(self) -> None:
        self._name = f"torchtune_adaptive/step/{EqualSteps._made}"  # made in the same order on every rank
        EqualSteps._made += 1
        self._own, self._changes, self._changed = "", 0, False

    def announce(self, step: str) -> None:
        """Before the first collective of a step."""
        if step != self._own and world_size() > 1 and dist.get_backend() != "fake":  # whose peers write nothing
            self._own, self._changes, self._changed = step, self._changes + 1, True
            _store().set(self._key(rank()), step)
            _store().check([self._key(rank())])  # a TCPStore does not acknowledge `set`: a peer might not find it yet

    def check(self, *, waits: bool = False) -> None:
        """After a collective of that step, so that every rank has begun it; or where this rank `waits` for them."""
        if not self._changed:
            return
        self._changed = False
        if torch.cuda.is_initialized():  # the host is ahead of what the GPU has communicated
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
        """What every rank has written, in order of rank."""
        store, keys = _store(), [self._key(each) for each in range(world_size())]
        return [store.get(key).decode() if store.check([key]) else SAME for key in keys]

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._changes}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def let_go() -> None:
    """Gives gloo's threads time to drop their tensors, for which they need the interpreter's lock.

    A thread that still waits for the lock when the interpreter ends aborts the process. FSDP keeps the group, and with
    it these threads, beyond `destroy_process_group` (pytorch #179291).
    """
    if dist.is_initialized() and backend_for("cpu") == "gloo":
        time.sleep(0.2)  # they need microseconds, and milliseconds on a crowded machine


def from_all_ranks(value: Value) -> list[Value]:
    """Collective: every rank's value, in order of rank."""
    values = [value] * world_size()
    if dist.is_initialized():
        with explaining_failures("an exchange between the ranks"):
            dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Value) -> Value:
    """Collective: rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        with explaining_failures("an exchange between the ranks"):
            dist.broadcast_object_list(values)
    return values[0]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Collective: the sum of a tensor over all ranks, on the training communicator."""
    total = value.clone()
    if world_size() > 1:
        with explaining_failures("the reduction of the loss"):
            dist.all_reduce(total)
    return total


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Collective: the mean over all ranks, as FSDP has it, where every rank holds the whole model.

    A gradient that some ranks lack counts as zeros there; one that all ranks lack stays None.
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
    """Collective, where there are replicas: raises on all ranks if those of any shard differ in a bit."""
    replicated: dict[object, list[Tensor]] = {}  # by the ranks that hold the same
    for parameter in (each for model in models for each in model.parameters()):
        if not isinstance(parameter, DTensor):
            replicated.setdefault("every rank", []).append(parameter)
        # not those of which each rank has a part of its own, as most are under tensor parallelism
        elif dims := _replicated_dims(parameter):
            replicated.setdefault((parameter.device_mesh, dims), []).append(parameter)
    if not replicated or world_size() == 1 or REHEARSAL.on:
        return
    row = [number for shards in replicated.values() for number in (_first_holder(shards[0]), checksum(shards))]
    table = Agreement(len(row)).gather(row)
    for column in range(0, len(row), 2):
        for rank, sums in enumerate(table):
            first = int(sums[column])
            if sums[column + 1] != table[first][column + 1]:
                raise UnrecoverableError(
                    f"the weights on rank {rank} differ from those on rank {first}, which holds the same shard: "
                    "replicas get the same gradients, so they would never become equal; load the same weights on all "
                    "ranks, or call torchtune_adaptive.make_replicas_alike(model.parameters()) before the first step"
                )


def make_replicas_alike(parameters: Iterable[Tensor]) -> None:
    """Collective, where there are replicas: gives all of them the values of the first.

    For what is initialised after sharding, from random generators that differ from rank to rank.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        for dim in _replicated_dims(parameter):
            with explaining_failures("the synchronization of replicas"):
                dist.broadcast(_local(parameter), group=parameter.device_mesh.get_group(dim), group_src=0)


def _replicated_dims(parameter: DTensor) -> tuple[int, ...]:
    """Dimensions of a parameter's mesh along which all ranks hold the same."""
    size = parameter.device_mesh.size
    return tuple(dim for dim, each in enumerate(parameter.placements) if each.is_replicate() and size(dim) > 1)


def _first_holder(parameter: Tensor) -> int:
    """The first of the ranks that hold the same shard as this one."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    assert here is not None, "a rank trains what is on its own mesh"
    same = _replicated_dims(parameter)
    return int(mesh.mesh[tuple(slice(None) if dim in same else at for dim, at in enumerate(here))].min())


def checksum(parameters: Iterable[Tensor]) -> int:
    """A checksum of this rank's shards, bit by bit: NaN equals itself, and -0.0 is not 0.0."""
    checked = 0
    for parameter in parameters:
        local = _local(parameter)
        if type(local) is Tensor:  # what wraps tensors has no bits of its own
            # A copy of 4 MiB at a time: `numpy()` makes a storage one that FSDP cannot resize any more.
            for piece in local.flatten().view(torch.uint8).split(2**22):
                checked = zlib.crc32(piece.to("cpu", copy=True).numpy().data, checked)
    return checked


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
