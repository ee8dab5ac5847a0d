"""The launcher of this rank, torchrun: its timeout, its end, and the files that ranks share in its directory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from torchtune_adaptive import dependencies

LAUNCHER_CHECK_S = 1.0
"""Seconds between two checks whether the launcher still runs."""
PID_FILE, REPORTED_FILE = "pid", "reported"


def launcher_timeout_s() -> float:
    """Return how long torchrun waits for its workers after it has received a signal."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def exit_with_launcher() -> None:
    """Start a thread that kills this rank when torchrun has ended for any reason, including SIGKILL. PR_SET_PDEATHSIG
    is no alternative: it reacts to the end of the thread that started this rank, which may end before torchrun does."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.getppid() != dependencies.PARENT_PID:  # torchrun has ended while this rank imported torch
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=_kill_when_ended, args=(dependencies.PARENT_PID,), daemon=True).start()


def _kill_when_ended(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def attempt_directory() -> Path | None:
    """Return torchrun's directory for this machine's ranks, a new one after every restart; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] if error_file else None


def first_to_report() -> bool:
    """Return True if this rank is the first of its machine to report a failure, and must therefore print the error.

    The first rank that fails knows the cause. Its peers fail later, when its process ends and they lose their
    connections to it. The rank that creates a file in torchrun's directory is the first. Without torchrun, every rank
    reports. From then on, this rank ignores SIGTERM, which could interrupt the message.
    """
    folder = attempt_directory()
    if folder is None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        (folder / REPORTED_FILE).touch(exist_ok=False)
    except FileExistsError:
        if in_main_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return False
    except OSError:  # without the file, every rank reports
        pass
    return True


def write_error_file(message: str) -> None:
    """Write the error file from which torchrun quotes the message.

    torchrun reports the failure with the earliest timestamp as the root cause. The timestamp is set back by one second,
    because torchrun may end the peers in the same second.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()) - 1)}}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def write_pid_file() -> None:
    """Write this rank's PID for the other ranks of this attempt."""
    folder = attempt_directory()
    if folder is not None and "LOCAL_RANK" in os.environ:
        with suppress(OSError):
            (folder / os.environ["LOCAL_RANK"] / PID_FILE).write_text(str(os.getpid()))


def peer_has_exited() -> bool:
    """Return True if another rank of this machine has exited. torchrun then sends SIGTERM to the remaining ranks."""
    folder = attempt_directory()
    if folder is None:
        return False
    for file in folder.glob(f"*/{PID_FILE}"):
        with suppress(OSError, ValueError):  # not written yet
            try:
                os.kill(int(file.read_text()), 0)
            except ProcessLookupError:
                return True
    return (folder / REPORTED_FILE).exists()
