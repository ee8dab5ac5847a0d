"""Read the command to rehearse: its program, its launcher, and the number of ranks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_rehearsal.errors import ConfigError

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
