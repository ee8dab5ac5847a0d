"""Runs a script as one rank of many: python -m torchtune_adaptive.rehearse.stage RECORD RANK RANKS STEPS script args

torchrun, `tune run` and `accelerate launch` are seen through: what they would start runs here, as that rank.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run
from torch._C._distributed_c10d import GradBucket, HashStore, _register_comm_hook
from torch.distributed.rendezvous import rendezvous as torch_rendezvous
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.rehearse.step_writer import StepWriter

ONE_MACHINE = 8
"""Ranks of a machine, where there are so many."""
LARGE = 2**20
"""Elements of a weight that is not drawn."""
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(record: str, rank: str, ranks: str, steps: str, *command: str) -> None:
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    if int(ranks) > 1:
        _become(int(rank), int(ranks))
    _send_nothing(int(rank), int(ranks))
    _take_first_choices()
    _draw_no_weights()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_local_scalar_dense", _number, "CUDA")
    library.impl("nonzero", _all_of_them, "CUDA")
    with StepWriter(Path(record), most_steps=int(steps)):
        run(command)


def _become(rank: int, ranks: int) -> None:
    """Sets the variables that torchrun gives a rank."""
    local = min(ranks, ONE_MACHINE)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local), MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="rehearsal",
    )  # fmt: skip


def _send_nothing(rank: int, ranks: int) -> None:
    """Makes all process groups torch's fake ones. Nothing is sent; others are taken to send what this rank does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    joined, made = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        joined("fake", store=FakeStore(), rank=rank, world_size=ranks)
        _save_alone()

    def new_group(ranks: Any = None, *_: Any, use_local_synchronization: bool = False, **__: Any) -> Any:
        return made(ranks, backend="fake", use_local_synchronization=use_local_synchronization)

    def broadcast_object_list(*_: Any, **__: Any) -> None:
        """What rank 0 would say is what this rank has."""

    def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        yield HashStore(), rank, ranks

    _replace(joined, init_process_group)
    _replace(torch_rendezvous, rendezvous)
    _replace(made, new_group)
    _replace(dist.broadcast_object_list, broadcast_object_list)
    # under a fake group a mesh would not make LOCAL_RANK's device the current one
    torch.distributed.device_mesh.get_backend = lambda *_: "nccl"  # type: ignore[attr-defined]

    made_parallel = DistributedDataParallel.__init__

    def parallel(self: Any, *args: Any, **kwargs: Any) -> None:
        made_parallel(self, *args, **kwargs)
        _register_comm_hook(self.reducer, None, _as_it_is)

    DistributedDataParallel.__init__ = parallel  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = lambda *_, **__: None  # type: ignore[method-assign]

    def run_here(args: Namespace) -> None:
        _become(rank, ranks)
        run([*(["-m"] if args.module else []), args.training_script, *args.training_script_args])

    def spawn(function: Any, args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
        _become(rank, ranks)
        function(rank % min(ranks, ONE_MACHINE), *args)

    _replace(torch.distributed.run.run, run_here)
    _replace(torch.multiprocessing.spawn, spawn)  # type: ignore[attr-defined]


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


def _number(tensor: torch.Tensor) -> Any:
    """Nobody has computed a loss, a norm or an answer to "is it finite?": 0 and False, so that the script goes on."""
    computed = tensor.is_floating_point() or tensor.dtype is torch.bool
    return torch.zeros((), dtype=tensor.dtype).item() if computed else tensor.cpu().item()


def _all_of_them(tensor: torch.Tensor) -> torch.Tensor:
    """A mask that the device has computed is unknown, so it selects everything: that needs the most memory."""
    return torch.ones(tensor.shape, dtype=torch.bool).nonzero().to(tensor.device)


def _draw_no_weights() -> None:
    """Skips random initialization of large weights in host memory: zeros serve as well, and take no memory."""
    for where, name in (torch.Tensor, "normal_"), (torch.Tensor, "uniform_"), (torch.nn.init, "_no_grad_trunc_normal_"):
        drawn = getattr(where, name)

        def draw(tensor: torch.Tensor, *args: Any, drawn: Any = drawn, **kwargs: Any) -> torch.Tensor:
            kept = tensor.device.type == "cpu" and tensor.numel() >= LARGE
            return tensor if kept else drawn(tensor, *args, **kwargs)

        setattr(where, name, draw)


def _take_first_choices() -> None:
    """Autotuning would compile every candidate to time kernels that do nothing."""
    try:
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-untyped]
    except ImportError:
        return
    tuned = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        tuned(self, fn, arg_names, list(configs or ())[:1], *args, **kwargs)

    Autotuner.__init__ = with_one
    compiles = torch.compile

    @functools.wraps(compiles)
    def compile_first(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import select_algorithm  # takes a second, and few scripts compile

        select_algorithm.clear_preprocessing_fns()
        select_algorithm.add_preprocessing_fn(lambda choices: choices[:1])
        return compiles(*args, **kwargs)

    _replace(compiles, compile_first)


def _replace(function: Any, by: Any) -> None:
    """In every module that has imported it."""
    for module in [each for each in sys.modules.values() if each is not None]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, by)


def run(command: list[str] | tuple[str, ...]) -> None:
    """Runs what a command line names in this process: a script, `-m module`, or a program that is written in Python."""
    if Path(command[0]).name.startswith("python"):
        command = command[1:]
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = script_of(command[0]) or command[0]
    sys.argv = [script, *command[1:]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def script_of(word: str) -> str | None:
    """A file, or a program of this environment or on the path; None if there is neither."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return word if Path(word).is_file() else shutil.which(word, path=beside)


if __name__ == "__main__":
    main(*sys.argv[1:])
