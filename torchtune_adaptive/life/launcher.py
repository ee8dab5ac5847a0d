"""The launcher of this rank, torchrun: its patience, its folder and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from torchtune_adaptive import dependencies

LOOK_FOR_THE_LAUNCHER_S = 1.0
_STARTED = 19
"""Where a process began, behind its name in /proc/PID/stat."""
PID_FILE, TOLD_FILE = "pid", "told"


def launcher_waits_s() -> float:
    """How long torchrun leaves its workers to end once it is asked to."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def this_launcher() -> str | None:
    """What tells the launcher of this rank from any other, on whatever machine and at whatever time; None without."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, began = os.getppid(), ""
    with suppress(OSError):  # no /proc: two of one number are taken for one
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[_STARTED]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {began}"


def end_with_the_launcher() -> None:
    """End this rank when torchrun is gone, even after SIGKILL. PR_SET_PDEATHSIG would watch only the launcher's thread
    that started this rank, which may end earlier."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.getppid() != dependencies.PARENT_PID:  # it ended while this rank imported torch
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=_end_without, args=(dependencies.PARENT_PID,), daemon=True).start()


def _end_without(launcher: int) -> None:
    with suppress(OSError, AttributeError):  # it is gone, or the system has no such descriptors
        poll = select.poll()
        poll.register(os.pidfd_open(launcher), select.POLLIN)
        poll.poll()
    while os.getppid() == launcher:
        time.sleep(LOOK_FOR_THE_LAUNCHER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def attempt_folder() -> Path | None:
    """Torchrun's folder for this machine's ranks; every restart has a new one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] if error_file else None


def speaks_first() -> bool:
    """Whether this rank is the first of its machine to report a failure, by a file in the launcher's folder. That one
    failed: its peers lose their connections later, when its process ends. Without such a folder each speaks. From then
    on no SIGTERM cuts the message off: peers that end silently let the launcher end all others."""
    folder = attempt_folder()
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
    """Write the error file from which torchrun quotes the message. Its report calls the failure with the earliest
    timestamp the root cause; peers that torchrun ends in the same second come after this one."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()) - 1)}}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def makes_first(file: Path) -> bool:
    """Makes a file; whether nobody had before, or that cannot be told: a message twice is better than none."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def note_own_pid() -> None:
    """Where the other ranks of this attempt find it."""
    folder = attempt_folder()
    if folder is not None and "LOCAL_RANK" in os.environ:
        with suppress(OSError):
            (folder / os.environ["LOCAL_RANK"] / PID_FILE).write_text(str(os.getpid()))


def a_peer_has_failed() -> bool:
    """Whether SIGTERM means that another rank of this machine is gone, and not that somebody asked the run to end."""
    folder = attempt_folder()
    if folder is None:
        return False
    for file in folder.glob(f"*/{PID_FILE}"):
        with suppress(OSError, ValueError):  # not written yet
            try:
                os.kill(int(file.read_text()), 0)
            except ProcessLookupError:
                return True
    return (folder / TOLD_FILE).exists()
