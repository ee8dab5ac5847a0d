"""One rank of many, alone: all process groups are torch's fake ones, and launchers start nothing."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.launcher.api as launcher
import torch.distributed.run
from torch._C._distributed_c10d import GradBucket, HashStore, _register_comm_hook
from torch.distributed.rendezvous import rendezvous as torch_rendezvous
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.rehearse.start import ONE_MACHINE, CannotRehearse


def become(rank: int, ranks: int) -> None:
    """Sets the variables that torchrun gives a rank."""
    local = min(ranks, ONE_MACHINE)
    cores = os.cpu_count() or 1
    os.cpu_count = lambda: max(cores, local)  # each rank of a machine is given some
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local), MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="rehearsal",
    )  # fmt: skip


def send_nothing(
    rank: int, given: int | None, run: Callable[[Sequence[str]], None], learn: Callable[[int], None]
) -> None:
    """Collectives go on as if all ranks sent what this one does. Launchers start nothing: they call `run` with the
    command that they would start on each rank, and `learn` with their number of ranks if `given` is None."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = given or 1
    joined, made = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        joined("fake", store=FakeStore(), rank=rank, world_size=ranks)
        _save_alone()

    def new_group(ranks: Any = None, *_: Any, use_local_synchronization: bool = False, **__: Any) -> Any:
        return made(ranks, backend="fake", use_local_synchronization=use_local_synchronization)

    def broadcast_object_list(objects: Sequence[Any], *_: Any, **__: Any) -> None:
        """What rank 0 would say is what this rank has."""
        if rank and all(each is None for each in objects):
            raise CannotRehearse(f"rank {rank} waits for objects of another one: rehearse rank 0, which has them")

    def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        yield HashStore(), rank, ranks

    replace(joined, init_process_group)
    replace(torch_rendezvous, rendezvous)
    replace(made, new_group)
    replace(dist.broadcast_object_list, broadcast_object_list)
    # under a fake group a mesh would not make LOCAL_RANK's device the current one
    torch.distributed.device_mesh.get_backend = lambda *_: "nccl"  # type: ignore[attr-defined]

    made_parallel = DistributedDataParallel.__init__

    def parallel(self: Any, *args: Any, **kwargs: Any) -> None:
        made_parallel(self, *args, **kwargs)
        _register_comm_hook(self.reducer, None, _as_it_is)

    DistributedDataParallel.__init__ = parallel  # type: ignore[method-assign]
    replace(_verify_param_shape_across_processes, lambda *_, **__: None)  # which reads numbers in C++
    DistributedDataParallel.register_comm_hook = lambda *_, **__: None  # type: ignore[method-assign]
    # a fake group cannot gather these layers' statistics, which are a few numbers
    torch.nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]

    def launched(told: int) -> None:
        nonlocal ranks
        if given is None:
            ranks = told
            learn(ranks)
        become(rank, ranks)

    def run_here(args: Namespace) -> None:
        launched(given or _ranks_of(args))
        run([*(["-m"] if args.module else []), args.training_script, *args.training_script_args])

    def start_processes(function: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        launched(nprocs)
        function(rank % min(ranks, ONE_MACHINE), *args)

    def elastic_launch(config: Any, entrypoint: Callable[..., Any]) -> Callable[..., dict[int, Any]]:
        def start(*args: Any) -> dict[int, Any]:
            launched(config.max_nodes * config.nproc_per_node)
            return {rank: entrypoint(*args)}

        return start

    replace(torch.distributed.run.run, run_here)
    replace(sys.modules["torch.multiprocessing.spawn"].start_processes, start_processes)
    replace(launcher.elastic_launch, elastic_launch)


def start_here(run: Callable[[Sequence[str]], None]) -> None:
    """The same for a single rank, which accelerate starts without torchrun's code."""
    from accelerate.commands import launch

    def simple_launcher(args: Namespace) -> None:
        command, variables = launch.prepare_simple_launcher_cmd_env(args)
        os.environ.update(variables)
        run(command)

    launch.simple_launcher = simple_launcher


def _ranks_of(args: Namespace) -> int:
    each = str(args.nproc_per_node)
    if not each.isdecimal():
        raise CannotRehearse(f"--nproc_per_node {each}: give the number of ranks as --ranks, before the command")
    return int(each) * int(str(args.nnodes).rpartition(":")[2])  # of machines that come and go, the most


def _save_alone() -> None:
    """Distributed checkpoints hold this rank's shards alone, and are not refused for it."""
    from torch.distributed.checkpoint import default_planner, utils
    from torch.distributed.checkpoint.metadata import Metadata

    made, validated = utils._DistWrapper.__init__, default_planner._validate_global_plan

    def alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        made(self, group, False, 0)

    utils._DistWrapper.__init__ = alone  # type: ignore[method-assign]
    default_planner._validate_global_plan = lambda *_: validated([], Metadata({}))


def _as_it_is(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's bucket, sent nowhere: of the fake group's own all-reduce DDP gets no tensor back."""
    sent: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


def replace(function: Any, by: Any) -> None:
    """In every module that has imported it."""
    for module in [each for each in sys.modules.values() if each is not None]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, by)
