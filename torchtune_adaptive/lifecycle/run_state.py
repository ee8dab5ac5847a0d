"""The state of the run in this process, its record `adaptive_run.json`, and the lock of the output directory.

The state is global, because signals and errors can end a run at any time. The record contains how the run has ended.
The lock ensures that only one run uses an output directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import IO

from torchtune_adaptive.atomic_files import read_json, reason, replace_file
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle.torchrun import launcher_timeout_s

logger = logging.getLogger(__name__)

RUN_FILE = "adaptive_run.json"
MAX_RECORDING_S = 2.0

SIGNALLED, STOPPED, FINISHED, ERROR = "asked", "stopped", "finished", "error"
"""How a run has ended. SIGNALLED is recorded when a signal arrives. It is replaced if the run can stop or finish."""

SAME_COMMAND = "the same command and resume_from_checkpoint=auto"

LOCK_FILE = ".adaptive_lock"
WAIT_S = 5.0
"""How long to wait for a lock, because a killed process may not have released it yet."""
EXTRA_WAIT_AFTER_RESTART_S = 10.0
"""After a restart, how long to wait in addition to the time that the launcher gives the previous ranks to end."""
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of `adaptive_run.json`."""

    serial: int
    """The number of this run's first checkpoint, counted over all runs in the output directory."""
    ended: str | None = None
    """One of the four constants above; None while the run trains, or if it was killed."""
    message: str = ""


def now() -> str:
    """Return the current time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_end(directory: Path, ended: str, message: str = "") -> None:
    """Add to the record how the run has ended. SIGNALLED does not replace another end."""
    record = read_record(directory)
    if record is not None and (ended != SIGNALLED or record.ended in (None, SIGNALLED)):
        write_record(directory, replace(record, ended=ended, message=message))


def read_record(directory: Path) -> RunRecord | None:
    """Read the record; return None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        record = RunRecord(**(read_json(directory / RUN_FILE) or {}))
        values = asdict(record).items()
        typed = all(isinstance(value, int if name == "serial" else str | None) for name, value in values)
        if typed:
            return record
    return None


def write_record(directory: Path, record: RunRecord) -> None:
    """Write the record. If that fails, log a warning, because the run can continue."""
    path = directory / RUN_FILE
    try:
        replace_file(path, json.dumps(asdict(record), indent=1).encode())
    except OSError as error:
        logger.warning(
            "cannot write %s (%s): `tune-adaptive status` cannot report how this run ended", path, reason(error)
        )


class RunPhase(Enum):
    """The phase of a run. Its value describes the effect of a signal in this phase."""

    SETTING_UP = "the run ends as soon as all ranks agree"
    TRAINING = "the run saves a checkpoint after this step, then ends"
    LAST_SAVE = "all steps are done, and the run ends after its last checkpoint"
    SAVED = "all steps are done, the last checkpoint is saved, and the run ends"


@dataclass
class ThisRun:
    """The state of the run in this process. There is one instance, `THIS_RUN`."""

    phase: RunPhase = RunPhase.SETTING_UP
    signal: signal.Signals | None = None
    """The first signal that this rank received."""
    stopped_by: str = ""
    """The signal that has stopped the run, when all ranks know it, for example `SIGTERM` or `SIGHUP on rank 1`."""
    newest_checkpoint: Path | None = None
    """The newest complete checkpoint."""
    record_directory: Path | None = None
    """The directory of `adaptive_run.json`, which may exist on rank 0's node only; None until the run has locked it."""
    _recording: threading.Lock = field(default_factory=threading.Lock)
    """Needed because a thread records signals, and the main thread records other ends."""

    def record_end(self, ended: str, message: str = "") -> None:
        """Record how the run has ended."""
        with self._recording:
            if self.record_directory is not None:
                record_end(self.record_directory, ended, message)

    def try_to_record_end(self, ended: str, message: str) -> None:
        """Record how the run has ended, but wait at most two seconds, because the file server may hang."""
        recording = threading.Thread(target=self.record_end, args=(ended, message), daemon=True)
        recording.start()
        recording.join(MAX_RECORDING_S)

    def stop_requested(self) -> bool:
        """Return True if this rank has received a signal."""
        return self.signal is not None

    @property
    def saved(self) -> str:
        """The text about the last checkpoint in messages."""
        return "nothing is saved" if self.newest_checkpoint is None else f"last checkpoint: {self.newest_checkpoint}"


THIS_RUN = ThisRun()


def saved_and_next_start() -> str:
    """Return the last part of the message of a run that ends early: the last checkpoint and how to continue."""
    verb = "restart" if THIS_RUN.newest_checkpoint is None else "resume"
    return f"{THIS_RUN.saved}. To {verb}: {SAME_COMMAND}"


def lock_directory(directory: Path) -> IO[bytes]:
    """Create the directory and lock it until the returned file is closed.

    If another process holds the lock, raise a ConfigError that names it. An fcntl lock works over NFS, and the kernel
    releases it when the process ends. Forked children do not inherit it, so they can outlive the process.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    until_s = time.monotonic() + (launcher_timeout_s() + EXTRA_WAIT_AFTER_RESTART_S if restarted else WAIT_S)
    path = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise unwritable(directory, error) from error
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > until_s:
                file.close()
                raise ConfigError(
                    f"output_dir {str(directory)!r} is in use by {lock_holder(directory) or 'another run'}: wait for "
                    "it to end, end it, or choose another output_dir"
                ) from error
            time.sleep(_POLL_S)
        except OSError as error:
            logger.warning(
                "%s does not support locks (%s): a second run there would not be detected", directory, error.strerror
            )
            return file
    with suppress(OSError):  # only messages need the content
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now()}".encode())
        os.fsync(file.fileno())
    return file


def lock_holder(directory: Path) -> str | None:
    """Describe the process that has locked the directory, or return None."""
    with suppress(OSError), (directory / LOCK_FILE).open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return printable(file.read().decode(errors="replace")) or "another run"
    return None


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """Return the error for a directory that this run cannot write to."""
    exists = isinstance(error, IsADirectoryError | FileExistsError)
    remedy = "remove it" if exists else "set output_dir to a folder that this user may write"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        remedy = "free space on this disk or repair it, or set output_dir to another one"
    cause = f"{error.filename or directory}: {error.strerror}"
    return ConfigError(f"cannot use output_dir {str(directory)!r}: {cause}; {remedy}")
