"""Check the command to rehearse, and run it in a process with null devices until it ends."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.device import NullCudaError, environment
from gpu_rehearsal.gpus import Gpu
from gpu_rehearsal.processes.server import execute
from gpu_rehearsal.report.result import MOST_READS, NEEDS_OTHERS, RehearsalResult


class CannotRehearse(NullCudaError):
    """The command cannot be rehearsed; the message is one line."""


MOST_RANKS = 16
"""Ranks that run together; each is a process of about 1 GiB."""
ONE_MACHINE = 8
"""The number of GPUs of a machine; with more ranks, there are several machines."""
LAUNCHERS = (
    "torchrun", "tune", "accelerate", "accelerate-launch",
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
)  # fmt: skip
"""Programs and modules whose arguments contain the number of ranks."""
_OTHER_LAUNCHERS = ("deepspeed", "deepspeed.launcher.runner", "mpirun", "mpiexec", "srun", "horovodrun")


def without_python(command: Sequence[str]) -> list[str]:
    """Return the command without the interpreter and `-u`, which has no effect on memory."""
    words = [*command[1:]] if command and re.fullmatch(r"python[\d.]*", Path(command[0]).name) else [*command]
    return words[1:] if words[:1] == ["-u"] else words


def script_of(word: str) -> str | None:
    """Return `word` if it is a file, else the path of a program in this environment or in PATH, else None."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return word if Path(word).is_file() else shutil.which(word, path=path)


def program_of(command: Sequence[str]) -> str:
    """Return the name of the program or module that a command runs."""
    words = without_python(command)
    return words[1] if words[:1] == ["-m"] and len(words) > 1 else Path(words[0]).name if words else ""


def likely_ranks(command: Sequence[str], rank: int) -> int:
    """Estimate the number of ranks before the launcher runs: accelerate counts devices before it reads its options."""
    if program_of(command) not in LAUNCHERS:
        return 1
    option = re.search(r"--num[_-]processes[ =](\d+)", " ".join(command))
    return max(rank + 1, int(option[1]) if option else 1)


def check_command(command: Sequence[str]) -> None:
    """Raise a ConfigError if the command cannot be rehearsed."""
    words = without_python(command)
    if not words or (words[0] == "-m" and len(words) < 2):
        raise ConfigError("no script to rehearse; for example: -- train.py --batch-size 12")
    if (launcher := program_of(command)) in _OTHER_LAUNCHERS:
        at_script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
        instead = " ".join(words[at_script:]) or "the script"
        raise ConfigError(f"{launcher} starts processes that cannot be followed: rehearse {instead}, with --ranks")
    if words[0] != "-m" and script_of(words[0]) is None:
        raise ConfigError(f"{words[0]} is neither a file nor a program in PATH: pass the path of the script")


CONTEXT_BYTES, CONTEXT_AND_NCCL_BYTES = 13 * 2**30 // 10, 3 * 2**30
"""Memory of a GPU that tensors cannot use: of the CUDA context and libraries and, with several ranks, of NCCL."""
DEFAULTS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
"""Hide warnings of torch's execution trace. Compile in each run, because peaks depend on Inductor's cache."""
_FIXED = {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN", "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS": "ATEN"}
"""Use ATen's kernels instead of comparing the time of several."""
_OF_OTHER_LAUNCH = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES)"
    r"|TORCH_DISTRIBUTED_DEBUG"  # wraps process groups, which does not work with fake ones
)
"""Variables of an earlier launch, which may still be set in the shell."""


def overhead_of(ranks: int) -> int:
    """Return the bytes of a GPU that tensors cannot use."""
    return CONTEXT_AND_NCCL_BYTES if ranks > 1 else CONTEXT_BYTES


class RankSettings(NamedTuple):
    """Settings of the rehearsed process."""

    rank: int = 0
    """The rank that runs, or the last of those that run together."""
    ranks: int | None = None
    """By default, the number that the launcher in the command starts."""
    memory: int = 0
    """Bytes of a GPU."""
    overhead_bytes: int | None = None
    steps: int = 0
    """Steps to run; 0: all."""
    devices: int | None = None
    """GPUs that the process sees; by default one per rank of the machine."""
    together: Sequence[int] | None = None
    """The ranks that run as processes and exchange messages; empty: all; None: only `rank` runs."""
    skew: float = 1
    """Tokens that a router sends to each expert that it uses, as a multiple of the average."""
    fixed: Mapping[str, float] = {}
    """Values that are read at `file:line`."""
    kept: Sequence[str] | None = None
    """Other unknown values are random, except at these places (`file:line`); None: all are the usual ones."""
    not_finite: bool = False
    """True: unknown floats are NaN."""
    timeout: float | None = None
    """The seconds after which the process is killed."""
    without_data: bool = False
    """True: a recipe gets stand-ins for its weights, tokenizer and data."""

    def running(self, ranks: int) -> Sequence[int]:
        """Return the ranks that run, if there are this many in total."""
        return [self.rank] if self.together is None else self.together or range(ranks)

    def devices_of(self, ranks: int) -> int:
        """Return how many GPUs each of this many ranks sees."""
        return self.devices or min(ranks, ONE_MACHINE)

    def memory_of_rank(self, ranks: int) -> dict[str, int]:
        """Return the memory that a rank can use, and the overhead, if there are this many ranks."""
        overhead = overhead_of(ranks) if self.overhead_bytes is None else self.overhead_bytes
        if not 0 <= self.rank < ranks:
            raise CannotRehearse(f"there is no rank {self.rank}: the last of {ranks} is {ranks - 1}")
        if (running := len(self.running(ranks))) > MOST_RANKS:
            raise CannotRehearse(
                f"{running} ranks cannot run together: name up to {MOST_RANKS}, as in --together 0,8,16"
            )
        if self.memory <= overhead:
            raise CannotRehearse(
                f"the GPU has {self.memory / 2**30:.3g} GiB, of which {overhead / 2**30:.3g} GiB are not for tensors "
                "(--memory-overhead): raise --memory, or lower --memory-overhead"
            )
        return {"usable_bytes": self.memory - overhead, "overhead_bytes": overhead, "ranks": ranks}


def rehearse_once(
    command: Sequence[str], gpu: Gpu, settings: RankSettings, output: IO[Any] | None = None
) -> RehearsalResult:
    """Run a command as one rank of many on null devices, and return the result.

    If the rank cannot run without the others, as in a pipeline, rehearse them together: all ranks or, if there are too
    many, those of the process group that needs them. The output of the command is copied to `output`, by default
    standard error. Raises CannotRehearse, or a NullCudaError if a null device cannot be built.
    """
    settings = settings._replace(memory=gpu.memory)
    likely = settings.ranks or likely_ranks(command, settings.rank)
    memory = settings.memory_of_rank(likely)
    device = environment(memory=memory["usable_bytes"], devices=settings.devices_of(likely), capability=gpu.capability)
    device["NULL_CUDA_NAME"] = f"NVIDIA {gpu.name.upper()} (null device)"  # scripts look for parts such as H100
    environ = script_environment({**DEFAULTS, **os.environ, **_FIXED, **device})
    with tempfile.TemporaryDirectory() as folder:
        request = {"record": folder, "given": settings._asdict(), "command": command}
        ending = execute(request, environ, settings.timeout, output)
        found = RehearsalResult.read_ranks(Path(folder), **memory, gpu=gpu, **ending)
        if found.fits and len(found.reads) < MOST_READS - 1:  # the record is complete
            found.unread.extend(settings.fixed.keys() - found.places_read)
    if settings.together is None and NEEDS_OTHERS in str(found.end.get("error")):
        needed = list(found.end["needs_ranks"]) if found.ranks > MOST_RANKS else []
        which = f"ranks {', '.join(map(str, needed))}" if needed else "all ranks"
        print(f"rehearse: ranks send messages to each other, so {which} are rehearsed", file=sys.stderr)
        together = rehearse_once(command, gpu, settings._replace(together=needed), output)
        return replace(together, cpu_s=together.cpu_s + found.cpu_s)
    return found


def script_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of an earlier launch. Raise CannotRehearse for another CUDA allocator."""
    settings = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in variables or "cudaMallocAsync" in settings:
        raise CannotRehearse(
            "only torch's own caching allocator can be rehearsed: unset PYTORCH_NO_CUDA_MEMORY_CACHING, and remove "
            "backend:cudaMallocAsync from PYTORCH_ALLOC_CONF"
        )
    return {name: value for name, value in variables.items() if not _OF_OTHER_LAUNCH.fullmatch(name)}
