"""What a command line starts; nothing here waits for torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtune_adaptive.null_cuda import NullCudaError


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
