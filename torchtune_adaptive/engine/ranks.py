"""All communication between ranks except FSDP's own, and its errors. Without a process group, there is one rank."""

import atexit
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.tensors import wraps_tensors
from torchtune_adaptive.errors import CollectiveFailedError, Remedy

Value = TypeVar("Value")

_ASLEEP_S, _MAX_WAIT_S = 0.02, 10.0
"""A thread that waits for the GIL wakes up every 5 ms."""
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
def explaining_failures(
    what: str, already_matched: Callable[[], bool] = lambda: False, *, in_other_code: bool = False
) -> Iterator[None]:
    """Replace an error of a collective by a CollectiveFailedError that explains it.

    An out-of-memory error is raised unchanged if `already_matched` returns False: the collective can be issued again.
    If it returns True, peers have matched the collective, and the error is fatal. With `in_other_code`, errors that do
    not come from a collective are raised unchanged, too.
    """
    try:
        yield
    except Exception as error:
        if (is_oom(error) and not already_matched()) or (in_other_code and not comes_from_a_collective(error)):
            raise
        raise _explanation(what, error) from error


def comes_from_a_collective(error: Exception) -> bool:
    """Return True for an error of NCCL or gloo."""
    # since torch 2.15, "nccl" raises a RuntimeError: "NCCL AllReduce failed: ..."
    return isinstance(error, dist.DistBackendError) or re.search(r"/gloo/|\bNCCL \w+ failed: ", str(error)) is not None


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


def group_of(arguments: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of an operation, which may contain its name."""
    named: dict[str, dist.ProcessGroup] = {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}
    for each in arguments:
        if isinstance(each, str) and each in named:
            return named[each]
        if isinstance(each, dist.ProcessGroup):
            return each
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    return None


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Collective: return the same as `tensor.full_tensor()`, without the collective that corrupts gloo's memory."""
    with PlainGathers():
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


class PlainGathers(TorchDispatchMode):
    """Dispatch mode that issues functional all-gathers as `dist.all_gather_into_tensor`.

    gloo's threads write the name of a completed collective into one string without a lock. A name of more than 15
    characters is on the heap, so two threads can free it twice. Functional all-gathers have such a name.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(wraps_tensors, types)):
            return NotImplemented
        if func is not torch.ops._c10d_functional.all_gather_into_tensor.default:
            return func(*args, **(kwargs or {}))
        shard, ranks = args[0].contiguous(), args[1]
        gathered = shard.new_empty(ranks * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard, group_of(args))
        return gathered


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
        self.group = None if world is None else _HOST_GROUPS[world]
        """The group for tensors of the host."""

    def gather(self, row: Sequence[float]) -> list[tuple[float, ...]]:
        """Collective: return the rows of all ranks, in order of rank."""
        width, cells = self._columns, self._cells
        cells[:] = array("d", bytes(8 * len(cells)))
        cells[rank() * width : (rank() + 1) * width] = array("d", row)
        if world_size() > 1:
            with explaining_failures("the agreement at the end of a step"):
                dist.all_reduce(self._tensor, group=self.group)  # rows do not overlap: the sum is the table
        return [tuple(cells[start : start + width]) for start in range(0, len(cells), width)]

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Collective: return for each flag whether it is True on any rank."""
        on_ranks = torch.tensor(flags, dtype=torch.uint8)
        with explaining_failures("the agreement on gradients"):
            dist.all_reduce(on_ranks, dist.ReduceOp.MAX, group=self.group)
        return [*map(bool, on_ranks.tolist())]


def let_gloo_threads_finish() -> None:
    """Wait until gloo's threads have freed their tensors, for which they need Python's GIL.

    The process aborts if a thread waits for the GIL while the interpreter exits (pytorch #190489). Destroying the
    process group does not end its threads, because device meshes keep the group alive. So this function looks at the
    threads. If they were asleep for a while, they wait for a collective, perhaps with a peer that never answers.
    """
    before, end_s = None, time.monotonic() + _MAX_WAIT_S
    while (threads := _gloo_threads()) and time.monotonic() < end_s:
        if threads == before and all(state.startswith("S") for state, *_ in threads):
            return
        before = threads
        time.sleep(_ASLEEP_S)  # releases the GIL


atexit.register(let_gloo_threads_finish)


def _gloo_threads() -> list[list[str]]:
    """Return the state of each of gloo's worker threads, and how often it has been switched to."""
    states = []
    for thread in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError, ValueError, KeyError):  # the thread has ended, or a sandbox does not show these fields
            fields = dict(line.split(":\t", 1) for line in thread.read_text().splitlines())
            if fields["Name"] == "pt_gloo_runloop":
                states.append(
                    [fields["State"], fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]]
                )
    return states


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


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Collective: return the sum of a tensor over all ranks, on the training communicator or another group."""
    total = value.clone()
    if world_size() > 1:
        with explaining_failures("the reduction of the loss"):
            dist.all_reduce(total, group=group)
    return total
