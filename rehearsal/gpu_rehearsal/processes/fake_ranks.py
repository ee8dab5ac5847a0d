"""Stand-ins for the other ranks: torch's fake process groups, and launchers that run the script in this process."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run
from torch._C._distributed_c10d import FileStore, GradBucket, HashStore, _register_comm_hook
from torch.distributed.rendezvous import rendezvous
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gpu_rehearsal.errors import CannotRehearse
from gpu_rehearsal.recording.calls import record_description, record_fake, record_group, record_host_call
from gpu_rehearsal.recording.operations import RECORDER
from gpu_rehearsal.replacing import replace_everywhere
from gpu_rehearsal.settings import ONE_MACHINE


def set_rank_variables(rank: int, ranks: int) -> None:
    """Set the environment variables that torchrun sets for a rank."""
    local = min(ranks, ONE_MACHINE)
    cores = os.cpu_count() or 1
    os.cpu_count = lambda: max(cores, local)  # scripts divide the number of cores by the ranks of a machine
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local), MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="rehearsal",
    )  # fmt: skip


StartRanks = Callable[[int], tuple[int, Sequence[int]]]


class FakeRanks:
    """Replaces process groups and launchers.

    If all ranks of a group run as processes, they exchange tensors of the host, and small tensors of the device (see
    `device_values.py`). In other groups, a collective returns as if all ranks had sent the data of this one.
    """

    def __init__(self, run: Callable[[Sequence[str]], None]) -> None:
        """`run` runs the command that a launcher would start on each rank."""
        self._run = run
        self.on_group: Callable[[Sequence[int]], object] = lambda members: None
        """Called with the ranks of each group that this rank creates."""

    def install(self) -> None:
        """Replace torch's functions in all modules."""
        self._real_init, self._real_new_group = dist.init_process_group, dist.new_group
        self._real_split = dist.split_group
        self._real_broadcast = dist.broadcast_object_list
        replace_everywhere(
            {
                dist.init_process_group: self._init_process_group,
                rendezvous: self._rendezvous,
                dist.new_group: self._new_group,
                dist.split_group: self._split_group,
                dist.broadcast_object_list: self._broadcast_object_list,
                torch.distributed.run.run: self._run_torchrun,
                sys.modules["torch.multiprocessing.spawn"].start_processes: self._start_processes,
                # this function reads numbers of the device in C++
                _verify_param_shape_across_processes: lambda *_, **__: None,
            }
        )
        # with a fake backend, a mesh would not make LOCAL_RANK's device the current one
        torch.distributed.device_mesh.get_backend = lambda *_: "nccl"  # type: ignore[attr-defined]
        # a fake group cannot gather the statistics of these layers, which are a few numbers
        torch.nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
        _skip_reductions_of_ddp()

    def begin(self, rank: int, ranks: int | None, start_ranks: StartRanks, store: Path) -> None:
        """Start the ranks, or let the launcher do it if `ranks` is None.

        `start_ranks` is called with the number of ranks, and returns the rank of this process and the list of ranks
        that run as processes. These meet in the file `store`.
        """
        self._rank, self._ranks, self._given = rank, ranks or 1, ranks
        self._start_ranks, self._store = start_ranks, store
        self._running: Sequence[int] = [rank]
        if self._ranks > 1:
            self._start(self._ranks)

    def _start(self, ranks: int) -> None:
        self._ranks = ranks
        self._rank, self._running = self._start_ranks(ranks)
        set_rank_variables(self._rank, ranks)
        if 1 < len(self._running) < ranks:  # send objects from the device, because incomplete groups exchange only such
            c10d: Any = dist.distributed_c10d
            usual = c10d._get_object_coll_device
            c10d._get_object_coll_device = lambda group=None: (
                "cuda" if dist.get_backend(group) == "fake" else usual(group)
            )

    def _backend(self, ranks: Sequence[int]) -> str:
        return "cpu:gloo,cuda:nccl" if len(ranks) > 1 and {*ranks} <= {*self._running} else "fake"

    def _init_process_group(self, *_: Any, world_size: int = -1, **__: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if self._given is None and world_size not in (-1, self._ranks):
            raise CannotRehearse(f"init_process_group has world_size={world_size}: pass --ranks {world_size}")
        backend, together = self._backend(range(self._ranks)), len(self._running) > 1
        store = FileStore(str(self._store)) if together else FakeStore()
        waits_for = [self._rank] if backend == "fake" else range(self._ranks)
        record_host_call("init_process_group", waits_for, "init_process_group")
        record_description("all ranks")
        self._real_init(backend, store=store, rank=self._rank, world_size=self._ranks)
        record_group(dist.group.WORLD)
        if backend == "fake":
            _save_checkpoints_without_other_ranks()

    def _new_group(self, ranks: Any = None, *_: Any, **options: Any) -> Any:
        kept = {name: options[name] for name in ("use_local_synchronization", "group_desc") if name in options}
        members = [*(ranks or range(self._ranks))]
        if not kept.get("use_local_synchronization") and len(self._running) == self._ranks:
            record_host_call("new_group", self._running, f"new_group of ranks {members}")
        if self._rank in members:
            record_description(kept.get("group_desc") or "")
            self.on_group(members)
        group = self._real_new_group(ranks, backend=self._backend(members), **kept)
        record_group(group)
        return group

    def _split_group(self, parent_pg: Any = None, split_ranks: Any = None, *args: Any, **options: Any) -> Any:
        parent = parent_pg or dist.distributed_c10d._get_default_group()
        members = dist.get_process_group_ranks(parent)
        record_host_call(f"splits of {parent.group_name}", members, f"split_group into ranks {split_ranks}")
        record_description(options.get("group_desc") or "")
        for each in split_ranks if split_ranks and not isinstance(split_ranks[0], int) else [split_ranks or ()]:
            if self._rank in each:
                self.on_group(each)
        group = self._real_split(parent_pg, split_ranks, *args, **options)
        record_group(group)
        return group

    def _broadcast_object_list(
        self, object_list: Any, src: Any = None, group: Any = None, *args: Any, **kw: Any
    ) -> None:
        if dist.is_initialized() and len({*self._running}.intersection(dist.get_process_group_ranks(group))) > 1:
            self._real_broadcast(object_list, src, group, *args, **kw)
        elif self._rank and all(each is None for each in object_list):
            raise CannotRehearse(f"rank {self._rank} waits for objects of another rank: rehearse rank 0, or --together")

    def _rendezvous(self, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        yield HashStore(), self._rank, self._ranks

    def _launch(self, ranks: int) -> None:
        if self._given is None:
            self._start(ranks)
        set_rank_variables(self._rank, self._ranks)

    def _run_torchrun(self, args: Namespace) -> None:
        self._launch(self._given or _ranks_of(args))
        self._run([*(["-m"] if args.module else []), args.training_script, *args.training_script_args])

    def _start_processes(self, function: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        self._launch(nprocs)
        function(self._rank % min(self._ranks, ONE_MACHINE), *args)
        return SimpleNamespace(join=lambda *_, **__: True)


def replace_simple_launcher(run: Callable[[Sequence[str]], None]) -> None:
    """Let accelerate's launcher for a single rank, which does not use torchrun, run the script in this process."""
    from accelerate.commands import launch

    def simple_launcher(args: Namespace) -> None:
        command, variables = launch.prepare_simple_launcher_cmd_env(args)
        os.environ.update(variables)
        run(command)

    launch.simple_launcher = simple_launcher


def _ranks_of(args: Namespace) -> int:
    per_node = str(args.nproc_per_node)
    if not per_node.isdecimal():
        raise CannotRehearse(f"--nproc_per_node {per_node}: pass the number of ranks as --ranks, before the command")
    return int(per_node) * int(str(args.nnodes).rpartition(":")[2])  # with MIN:MAX nodes, the maximum


def _skip_reductions_of_ddp() -> None:
    construct, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if dist.get_backend(self.process_group) == "fake":
            _register_comm_hook(self.reducer, self.process_group, _bucket_unchanged)

    def register_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        if dist.get_backend(self.process_group) != "fake":
            register(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_hook  # type: ignore[method-assign]


def _bucket_unchanged(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return DDP's bucket unchanged. This replaces an all-reduce, because that of a fake group returns no tensor."""
    RECORDER.add_bucket(bucket.buffer().nbytes, dist.get_process_group_ranks(group))
    record_fake(group, "allreduce_", [bucket.buffer()])
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def _save_checkpoints_without_other_ranks() -> None:
    """Let a distributed checkpoint contain only the shards of this rank."""
    from torch.distributed.checkpoint import default_planner, filesystem, utils
    from torch.distributed.checkpoint.metadata import Metadata

    rename = filesystem.FileSystem.rename
    construct, validate = utils._DistWrapper.__init__, default_planner._validate_global_plan

    def init(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        construct(self, group, False, 0)

    def rename_once(*args: Any) -> None:
        with suppress(FileNotFoundError):  # another rank that runs has renamed it
            rename(*args)

    filesystem.FileSystem.rename = rename_once  # type: ignore[method-assign,assignment]
    utils._DistWrapper.__init__ = init  # type: ignore[method-assign]
    default_planner._validate_global_plan = lambda *_: validate([], Metadata({}))
