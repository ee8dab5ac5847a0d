"""The launcher of this rank (torchrun): its timeout, its exit, and the files that ranks share in its directory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from torchtune_adaptive import dependencies

LOOK_FOR_THE_LAUNCHER_S = 1.0
PID_FILE, REPORTED_FILE = "pid", "reported"


def launcher_timeout_s() -> float:
    """Return how long torchrun waits for its workers after it received a signal."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def exit_with_launcher() -> None:
    """End this rank when torchrun is gone, even after SIGKILL. PR_SET_PDEATHSIG would watch only the launcher's thread
    that started this rank, which may end earlier."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.getppid() != dependencies.PARENT_PID:  # it ended while this rank imported torch
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=_end_without, args=(dependencies.PARENT_PID,), daemon=True).start()


def _end_without(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_FOR_THE_LAUNCHER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def attempt_directory() -> Path | None:
    """Return torchrun's directory for the ranks of this machine; every restart has a new one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] if error_file else None


def first_to_report() -> bool:
    """Return True if this rank is the first of its machine to report a failure; a file in torchrun's directory decides.

    The first rank to fail has the cause; its peers fail later, when its process ends and they lose their connections.
    Without a launcher every rank reports. From here on SIGTERM is ignored so that it cannot cut off the message.
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
    except OSError:  # then every rank reports
        pass
    return True


def write_error_file(message: str) -> None:
    """Write the error file from which torchrun quotes the message.

    torchrun reports the failure with the earliest timestamp as the root cause. The timestamp is one second early, so
    that peers that torchrun ends in the same second come later.
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
    """Return True if another rank of this machine has exited, which explains a SIGTERM from torchrun."""
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
