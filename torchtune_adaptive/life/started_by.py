"""What started this process, and how to start the run again: the command as it was typed, torchrun and its patience."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

TORCHRUN_WAITS_S = 30.0
_STARTED = 19
"""Where a process began, behind its name in /proc/PID/stat."""
_SHUTDOWN_TIMEOUT = re.compile(r"--shutdown[-_]timeout[=\0](\d+)")
LAUNCHER_READS = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""Variables that decide how torchrun treats a lost node and a run that is asked to end."""


def command_to_go_on() -> str:
    """The command that was typed, for the run to go on where it has come to."""
    typed = as_typed()
    if "resume_from_checkpoint=auto" not in typed:
        changed = ("resume_from_checkpoint=", "overwrite_output_dir=")
        typed = [*(each for each in typed if not each.startswith(changed)), "resume_from_checkpoint=auto"]
    given = [f"{name}={os.environ[name]}" for name in LAUNCHER_READS if name in os.environ]
    return shlex.join([*given, *typed])


def launcher_waits_s() -> float | None:
    """How long torchrun leaves its workers to end once it is asked to; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 12):
        return TORCHRUN_WAITS_S  # nobody can say otherwise there
    given = _SHUTDOWN_TIMEOUT.search("\0".join(as_typed()))
    variables = (os.environ.get(name) for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    return float(given[1]) if given else float(next(filter(None, variables), TORCHRUN_WAITS_S))


def as_typed() -> list[str]:
    """The launcher's if there is one, else this process's, as somebody would have typed it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # no /proc: what the launcher was given is not known
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    interpreter, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return [os.path.basename(rest[0]), *rest[1:]]  # a script such as tune, which knows its interpreter
    return [os.path.basename(interpreter), *rest]


def this_launcher() -> str | None:
    """What tells the launcher of this rank from any other, on whatever machine and at whatever time; None without."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, began = os.getppid(), ""
    with suppress(OSError):  # no /proc: two of one number are taken for one
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[_STARTED]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {began}"
