"""Runs a script as one rank of many: python -m torchtune_adaptive.rehearse.stage RECORD RANK RANKS STEPS script args

torchrun, `tune run` and `accelerate launch` are seen through: what they would start runs here, as that rank.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import signal
import sys
from argparse import Namespace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run

from torchtune_adaptive.rehearse.recorder import Recorder

ONE_MACHINE = 8
"""Ranks of a machine, where there are so many."""
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(record: str, rank: str, ranks: str, steps: str, *command: str) -> None:
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    if int(ranks) > 1:
        _become(int(rank), int(ranks))
    _send_nothing(int(rank), int(ranks))
    _take_first_choices()
    with Recorder(Path(record), most_steps=int(steps)):
        run(command)


def _become(rank: int, ranks: int) -> None:
    """Sets the variables that torchrun gives a rank."""
    local = min(ranks, ONE_MACHINE)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local), MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="rehearsal",
    )  # fmt: skip


def _send_nothing(rank: int, ranks: int) -> None:
    """All process groups are torch's fake ones: nothing is sent, and what others would have sent is like this rank's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    joined, made = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        joined("fake", store=FakeStore(), rank=rank, world_size=ranks)

    def new_group(ranks: Any = None, *_: Any, use_local_synchronization: bool = False, **__: Any) -> Any:
        return made(ranks, backend="fake", use_local_synchronization=use_local_synchronization)

    def broadcast_object_list(*_: Any, **__: Any) -> None:
        """What rank 0 would say is what this rank has."""

    _replace(joined, init_process_group)
    _replace(made, new_group)
    _replace(dist.broadcast_object_list, broadcast_object_list)

    def run_here(args: Namespace) -> None:
        run([*(["-m"] if args.module else []), args.training_script, *args.training_script_args])

    if ranks == 1:  # the launcher would have set them
        _replace(torch.distributed.run.run, lambda args: (_become(0, 1), run_here(args)))
    else:
        _replace(torch.distributed.run.run, run_here)


def _take_first_choices() -> None:
    """Autotuning would compile every candidate to time kernels that do nothing."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    tuned = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        tuned(self, fn, arg_names, list(configs or ())[:1], *args, **kwargs)

    Autotuner.__init__ = with_one


def _replace(function: Any, by: Any) -> None:
    """In every module that has imported it."""
    assert isinstance(function, FunctionType)
    for module in [each for each in sys.modules.values() if each is not None]:
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, by)


def run(command: list[str] | tuple[str, ...]) -> None:
    """Runs what a command line names in this process: a script, `-m module`, or a program that is written in Python."""
    if Path(command[0]).name.startswith("python"):
        command = command[1:]
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = command[0] if Path(command[0]).exists() else shutil.which(command[0]) or command[0]
    sys.argv = [script, *command[1:]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
