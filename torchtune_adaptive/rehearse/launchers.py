"""What a command line starts, and as how many ranks; nothing here waits for torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ONE_MACHINE = 8
"""Ranks of a machine, where there are so many."""
_PER_MACHINE, _MACHINES = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?"), re.compile(r"--nnodes(?:=(.*))?")
_IN_ALL = re.compile(r"--num[-_]processes(?:=(.*))?")
_OPTIONS = {
    "torchrun": (_PER_MACHINE, _MACHINES),
    "tune": (_PER_MACHINE, _MACHINES),
    "torch.distributed.run": (_PER_MACHINE, _MACHINES),
    "torch.distributed.launch": (_PER_MACHINE, _MACHINES),
    "accelerate": (_IN_ALL,),
    "accelerate.commands.launch": (_IN_ALL,),
}
"""By launcher, what multiplies to the number of ranks."""


def is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(word).name) is not None


def script_of(word: str) -> str | None:
    """A file, or a program of this environment or on the path; None if there is neither."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return word if Path(word).is_file() else shutil.which(word, path=beside)


def ranks_of(command: Sequence[str]) -> int:
    """As many as the launcher in the command would start, 1 if it names none. Raises ValueError."""
    name = _launched(command)
    ranks = 1
    for word, following in zip(command, [*command[1:], ""], strict=True):
        for option in _OPTIONS.get(name, ()):
            if (found := option.fullmatch(word)) is not None:
                number = (found[1] or following).rpartition(":")[2]  # of machines that come and go, the most
                if not number.isdigit() or number == "0":
                    raise ValueError(f"{word} {following}: give the number of ranks as --ranks, before the command")
                ranks *= int(number)
    return ranks


def _launched(command: Sequence[str]) -> str:
    words = command[1:] if is_python(command[0]) else command
    return words[1] if words[:1] == ["-m"] and len(words) > 1 else Path(words[0]).name if words else ""


def check(command: Sequence[str]) -> None:
    """Raises ValueError for what is no Python program."""
    words = command[1:] if is_python(command[0]) else command
    if not words or (words[0] == "-m" and len(words) < 2):
        raise ValueError(f"{' '.join(command)} names no script")
    named = {word.partition("=")[0].replace("_", "-") for word in words}
    if _launched(command).startswith("accelerate") and "--num-machines" in named and "--machine-rank" not in named:
        raise ValueError("accelerate needs --machine_rank beside --num_machines: add --machine_rank 0")
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
