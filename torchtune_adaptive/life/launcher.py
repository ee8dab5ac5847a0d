"""What started this process: the command as it was typed, and torchrun, its patience, its folder and its end."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

TORCHRUN_WAITS_S = 30.0
LOOK_FOR_THE_LAUNCHER_S = 1.0
_STARTED = 19
"""Where a process began, behind its name in /proc/PID/stat."""
_SHUTDOWN_TIMEOUT = re.compile(r"--shutdown[-_]timeout[=\0](\d+)")
LAUNCHER_READS = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""Variables that decide how torchrun treats a lost node and a run that is asked to end."""
PID_FILE, TOLD_FILE = "pid", "told"


def command_to_go_on() -> str:
    """The command that was typed, for the run to go on where it has come to."""
    typed = as_typed()
    if "resume_from_checkpoint=auto" not in typed:
        changed = ("resume_from_checkpoint=", "overwrite_output_dir=")
        typed = [*(word for word in typed if not word.startswith(changed)), "resume_from_checkpoint=auto"]
    given = [f"{name}={os.environ[name]}" for name in LAUNCHER_READS if name in os.environ]
    return shlex.join([*given, *typed])


def as_typed() -> list[str]:
    """The launcher's command if there is one, else this process's, as somebody would have typed it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # no /proc: what the launcher was given is not known
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    interpreter, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return [os.path.basename(rest[0]), *rest[1:]]  # a script such as tune, which knows its interpreter
    return [os.path.basename(interpreter), *rest]


def launcher_waits_s() -> float | None:
    """How long torchrun leaves its workers to end once it is asked to; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    given = _SHUTDOWN_TIMEOUT.search("\0".join(as_typed()))
    variables = (os.environ.get(name) for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    return float(given[1]) if given else float(next(filter(None, variables), TORCHRUN_WAITS_S))


def this_launcher() -> str | None:
    """What tells the launcher of this rank from any other, on whatever machine and at whatever time; None without."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, began = os.getppid(), ""
    with suppress(OSError):  # no /proc: two of one number are taken for one
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[_STARTED]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {began}"


def end_with_the_launcher() -> None:
    """Ends this rank as soon as torchrun is gone, even by SIGKILL.

    A thread watches the process that has started this one. The kernel could (PR_SET_PDEATHSIG), but what it watches is
    the thread: a launcher that starts ranks from a thread which ends would kill healthy ones.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()


def _end_without(launcher: int) -> None:
    with suppress(OSError, AttributeError):  # it is gone, or the system has no such descriptors
        poll = select.poll()
        poll.register(os.pidfd_open(launcher), select.POLLIN)
        poll.poll()
    while os.getppid() == launcher:
        time.sleep(LOOK_FOR_THE_LAUNCHER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def attempt_folder(environment: Mapping[str, str]) -> Path | None:
    """Torchrun's folder for this machine's ranks; every restart has a new one."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] if error_file else None


def speaks_first() -> bool:
    """Whether this rank is the first of its machine to report a failure. From then on no SIGTERM cuts its message off:
    peers that end without one let the launcher end all others.

    The first to make a file in the launcher's own directory speaks. It is the one that failed: its peers lose their
    connections to it later, when its process ends. Without such a launcher ranks cannot know of each other, and each
    speaks.
    """
    folder = attempt_folder(os.environ)
    if folder is None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = makes_first(folder / TOLD_FILE)
    if in_main_thread and not first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return first


def tell_the_launcher(message: str) -> None:
    """Leaves the message with which this rank ends where torchrun looks for it. Its report, the last that is printed,
    has it then, and names this rank as the one that failed first."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


def makes_first(file: Path) -> bool:
    """Makes a file; whether nobody had before, or that cannot be told: a message twice is better than none."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def note_own_pid(environment: Mapping[str, str]) -> None:
    """Where the other ranks of this attempt find it."""
    folder = attempt_folder(environment)
    if folder is not None and "LOCAL_RANK" in environment:
        with suppress(OSError):
            (folder / environment["LOCAL_RANK"] / PID_FILE).write_text(str(os.getpid()))


def a_peer_has_failed(environment: Mapping[str, str]) -> bool:
    """Whether SIGTERM means that another rank of this machine is gone, and not that somebody asked the run to end."""
    folder = attempt_folder(environment)
    if folder is None:
        return False
    return (folder / TOLD_FILE).exists() or any(map(_is_gone, folder.glob(f"*/{PID_FILE}")))


def _is_gone(path: Path) -> bool:
    with suppress(OSError, ValueError):  # not written yet
        try:
            os.kill(int(path.read_text()), 0)
        except ProcessLookupError:
            return True
    return False
