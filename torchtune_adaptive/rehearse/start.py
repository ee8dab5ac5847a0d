"""Starts a rehearsal: a process on a null device, watched until it ends."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from torchtune_adaptive.null_cuda import NullCudaError, environment
from torchtune_adaptive.rehearse.gpus import Gpu
from torchtune_adaptive.rehearse.result import RehearsalResult


class CannotRehearse(NullCudaError):
    """What is asked for has no answer; the message is one line."""


ONE_MACHINE = 8
"""Ranks of a machine, where there are so many."""
LAUNCHERS = (
    "torchrun", "tune", "accelerate", "accelerate-launch",
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
)  # fmt: skip
"""Programs and modules that say themselves as how many ranks they start a script."""

_START_OTHERS = ("deepspeed", "deepspeed.launcher.runner", "mpirun", "mpiexec", "srun", "horovodrun")


def is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(word).name) is not None


def without_python(command: Sequence[str]) -> list[str]:
    """What the interpreter runs; `-u` changes nothing that is rehearsed."""
    words = [*command[1:]] if is_python(command[0]) else [*command]
    return words[1:] if words[:1] == ["-u"] else words


def script_of(word: str) -> str | None:
    """A file, or a program of this environment or on the path; None if there is neither."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return word if Path(word).is_file() else shutil.which(word, path=beside)


def launched(command: Sequence[str]) -> str:
    """A program or module by its name."""
    words = without_python(command)
    return words[1] if words[:1] == ["-m"] and len(words) > 1 else Path(words[0]).name if words else ""


def likely_ranks(command: Sequence[str], rank: int) -> int:
    """Before a launcher has told; accelerate looks for several cards before it reads what it was told."""
    if launched(command) not in LAUNCHERS:
        return 1
    told = re.search(r"--num[_-]processes[ =](\d+)", " ".join(command))
    return max(rank + 1, int(told[1]) if told else 1)


def check(command: Sequence[str]) -> None:
    """Raises ValueError for what is no Python program."""
    words = without_python(command)
    if not words or (words[0] == "-m" and len(words) < 2):
        raise ValueError(f"{' '.join(command)} names no script")
    named = {word.partition("=")[0].replace("_", "-") for word in words}
    if launched(command).startswith("accelerate") and "--num-machines" in named and "--machine-rank" not in named:
        raise ValueError("accelerate needs --machine_rank beside --num_machines: add --machine_rank 0")
    if (launcher := launched(command)) in _START_OTHERS:
        at_script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
        instead = " ".join(words[at_script:]) or "the script"
        raise ValueError(f"{launcher} starts processes that cannot be followed: rehearse {instead}, with --ranks")
    if words[0] == "-m":
        return
    if words[0].startswith("-"):
        raise ValueError(f"{words[0]} is no script: give the script, or -m and a module, without options of python")
    script = script_of(words[0])
    if script is None:
        raise ValueError(f"{words[0]} is neither a file nor a program")
    with open(script, "rb") as file:
        first = file.readline(200)
    if not script.endswith((".py", ".pyc")) and b"python" not in first:
        raise ValueError(f"{words[0]} is not written in Python; give the script that it starts")


CONTEXT_BYTES, CONTEXT_AND_NCCL_BYTES = 2**30, 3 * 2**30
"""What no tensor can have of a card: the CUDA context and libraries, and with several ranks NCCL's buffers."""
MOST_S_TO_END = 10
"""A script that was interrupted may take so long."""
_AN_ERROR = re.compile("error|exception|fail|abort|cannot|invalid|refuse", re.IGNORECASE)
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LEFT_OVER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES)"
    r"|TORCH_DISTRIBUTED_DEBUG"  # wraps a process group in another that the fake one cannot be
)
"""Variables of another launch and of other cards, which a shell may still have."""


def overhead_of(ranks: int) -> int:
    return CONTEXT_AND_NCCL_BYTES if ranks > 1 else CONTEXT_BYTES


class RankSettings(NamedTuple):
    """What a rehearsed process is told."""

    rank: int
    ranks: int | None
    """None: as many as the launcher in the command starts."""
    memory: int
    """The whole card's."""
    overhead_bytes: int | None
    steps: int

    def share(self, ranks: int) -> dict[str, int]:
        """What one of so many ranks has of its card."""
        overhead = overhead_of(ranks) if self.overhead_bytes is None else self.overhead_bytes
        if self.rank >= ranks:
            raise CannotRehearse(f"--rank is {self.rank}, but the last of {ranks} is {ranks - 1}")
        if self.memory <= overhead:
            raise CannotRehearse(
                f"the card has {self.memory / 2**30:.3g} GiB, of which {overhead / 2**30:.3g} GiB are not for tensors "
                "(--memory-overhead): raise --memory, or lower --memory-overhead"
            )
        return {"usable_bytes": self.memory - overhead, "overhead_bytes": overhead, "ranks": ranks}


def rehearse(
    command: Sequence[str],
    gpu: Gpu,
    *,
    ranks: int | None = None,
    rank: int = 0,
    overhead_bytes: int | None = None,
    steps: int,
    output: IO[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> RehearsalResult:
    """Runs a command as one rank of many; raises NullCudaError where there is no null device, and CannotRehearse.

    What the command prints goes to `output`, by default to standard error.
    """
    settings = RankSettings(rank, ranks, gpu.memory, overhead_bytes, steps)
    likely = ranks or likely_ranks(command, rank)
    share = settings.share(likely)
    card = environment(memory=share["usable_bytes"], devices=min(likely, ONE_MACHINE), capability=gpu.capability)
    there = _checked({**os.environ, **card, **(variables or {})})
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # a standard stream that was closed: not for the record
        pass
    os.close(descriptor)
    printed, shown = bytearray(), output.fileno() if output else 2
    with tempfile.TemporaryFile() as file:  # which nobody has to remove
        record = Path(f"/proc/self/fd/{file.fileno()}")
        # -P: the script's own folder is put on the path, not this one
        runner = [sys.executable, "-P", "-m", "torchtune_adaptive.rehearse.run_script"]
        with _interrupted_by_signals():
            script = subprocess.Popen(
                [*runner, str(record), json.dumps(settings._asdict()), *command],
                env=there,
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=subprocess.PIPE,
                pass_fds=[file.fileno()],
                preexec_fn=partial(ctypes.CDLL(None).prctl, _END_WITH_PARENT, signal.SIGKILL),
                process_group=0,
            )
            copying = threading.Thread(target=_copy, args=(script.stderr, shown, printed), daemon=True)
            copying.start()
            try:
                status, interrupted = _ended(script)
            finally:
                _signal(script, signal.SIGKILL)
                script.wait()
                copying.join(1)
        said = _last_error(printed.decode(errors="replace"))
        return RehearsalResult.read(record, **share, rank=rank, status=status, interrupted=interrupted, said=said)


def _copy(source: IO[bytes], to: int, last: bytearray) -> None:
    """Copy what a script prints, and keep the end of it."""
    while part := os.read(source.fileno(), 2**16):
        last += part
        del last[: -(2**13)]
        with suppress(OSError):
            os.write(to, part)


def _last_error(printed: str) -> str:
    """Return the last line that looks like an error, else the last one."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if _AN_ERROR.search(line)), "".join(lines[-1:]))


def _checked(variables: Mapping[str, str]) -> dict[str, str]:
    """Without those that a rehearsed process must not see."""
    settings = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in variables or "cudaMallocAsync" in settings:
        raise CannotRehearse(
            "only torch's own caching allocator can be rehearsed: unset PYTORCH_NO_CUDA_MEMORY_CACHING, and take "
            "backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"
        )
    return {name: value for name, value in variables.items() if not _LEFT_OVER.fullmatch(name)}


def _ended(script: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Its exit status, and whether Ctrl-C ended it: then the answer is of the steps until then. A second one kills it,
    and so does time."""
    try:
        return script.wait(), False
    except KeyboardInterrupt:
        _signal(script, signal.SIGINT)
    with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        return script.wait(MOST_S_TO_END), True
    _signal(script, signal.SIGKILL)
    return script.wait(), True


def _signal(script: subprocess.Popen[bytes], number: int) -> None:
    """To the script and to what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(script.pid, number)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """While open, a signal that asks this process to end is as good as Ctrl-C."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
