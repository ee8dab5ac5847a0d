"""State of this process's run, its record `adaptive_run.json`, and the lock that admits one run to an output directory.

Signals and errors can end a run at any time, so the state is global. The record has the command and how the run ended.
The kernel releases the lock when its process ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import IO

from torchtune_adaptive.atomic_files import directory_id, read_json, write_optional_file
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import printable
from torchtune_adaptive.lifecycle.torchrun import launcher_timeout_s

logger = logging.getLogger(__name__)

RUN_FILE = "adaptive_run.json"
MAX_RECORDING_S = 2.0

SIGNALLED, STOPPED, FINISHED, ERROR = "asked", "stopped", "finished", "error"
"""How a run ended. SIGNALLED is recorded when a signal arrives, and replaced if the run lives on to stop or finish."""

LOCK_FILE = ".adaptive_lock"
WAIT_S = 5.0
"""Time for a killed process to release the lock."""
EXTRA_WAIT_AFTER_RESTART_S = 10.0
"""In addition to the launcher's timeout for the previous ranks, which may be on another node."""
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of `adaptive_run.json`."""

    command: str
    folder: str
    """Working directory of the command."""
    output_dir: str
    serial: int
    """Serial of this run's first checkpoint; a finished checkpoint with a smaller serial is from an earlier run."""
    started_at: str
    ended: str | None = None
    """One of the four constants above, unless the run still trains or was killed."""
    message: str = ""


def now() -> str:
    """Return the time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_start(directory: Path, command: str, serial: int) -> None:
    """Write the record of a run that starts."""
    record = RunRecord(
        command=command, folder=os.getcwd(), output_dir=str(directory.absolute()), serial=serial, started_at=now()
    )
    write_record(directory, record)


def record_end(directory: Path, how: str, message: str = "") -> None:
    """Add to the record how the run ended; a signal does not replace another end."""
    record = read_record(directory)
    if record is not None and (how != SIGNALLED or record.ended in (None, SIGNALLED)):
        write_record(directory, replace(record, ended=how, message=message))


def read_record(directory: Path) -> RunRecord | None:
    """Read the record; return None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        record = RunRecord(**(read_json(directory / RUN_FILE) or {}))
        if all(isinstance(value, int if name == "serial" else str | None) for name, value in asdict(record).items()):
            return record
    return None


def write_record(directory: Path, record: RunRecord) -> None:
    """Write the record; a failure is logged and does not end the run."""
    content = json.dumps(asdict(record), indent=1).encode()
    write_optional_file(directory / RUN_FILE, content, "`tune-adaptive status` cannot report how this run ended")


class RunPhase(Enum):
    """Phase of a run; the value describes the effect of a signal."""

    SETTING_UP = "the run ends as soon as all ranks agree"
    TRAINING = "the run saves a checkpoint after this step, then ends"
    LAST_SAVE = "all steps are done, and the run ends after its last checkpoint"
    SAVED = "all steps are done, the last checkpoint is saved, and the run ends"


@dataclass
class ThisRun:
    """State of the run in this process. There is one instance, as a process has one set of signal handlers."""

    phase: RunPhase = RunPhase.SETTING_UP
    signal: signal.Signals | None = None
    """The first signal that this rank received."""
    stopped_by: str = ""
    """The signal that stopped the run, once all ranks know it: `SIGTERM`, `SIGHUP on rank 1`."""
    newest: Path | None = None
    """The newest complete checkpoint."""
    record_directory: Path | None = None
    """Directory of `adaptive_run.json`, once the run knows where it starts."""
    record_directory_id: tuple[int, int] | None = None
    """Device and inode of that directory. If the path later names another directory, this run does not write there."""
    typed: list[str] = field(default_factory=list)
    """The command of the launcher, read at the start: if it is killed, its ranks belong to another process."""
    _recording: threading.Lock = field(default_factory=threading.Lock)
    """Signals are recorded by the thread that receives them, other ends by the main thread."""

    def keep_record_in(self, directory: Path) -> None:
        """Store the command and the directory of `adaptive_run.json`. It may not exist on nodes other than rank 0's."""
        self.record_directory, self.typed = directory, typed_command()
        with suppress(OSError):
            self.record_directory_id = directory_id(directory)

    def record_end(self, how: str, message: str = "") -> None:
        """Record how the run ends, unless its directory was replaced."""
        directory = self.record_directory
        with self._recording, suppress(OSError):
            if directory is not None and directory_id(directory) == self.record_directory_id:
                record_end(directory, how, message)

    def try_to_record_end(self, how: str, message: str) -> None:
        """Record the end, but give up after a while: the file server may hang."""
        recording = threading.Thread(target=self.record_end, args=(how, message), daemon=True)
        recording.start()
        recording.join(MAX_RECORDING_S)

    def stop_requested(self) -> bool:
        """Return True if this rank received a signal."""
        return self.signal is not None

    @property
    def saved(self) -> str:
        """The last checkpoint, for messages."""
        return "nothing is saved" if self.newest is None else f"last checkpoint: {self.newest}"


THIS_RUN = ThisRun()


def saved_and_next_command() -> str:
    """Return the end of the message of a run that ends early."""
    then = "restart" if THIS_RUN.newest is None else "resume"
    return f"{THIS_RUN.saved}. To {then}: {resume_command()}"


def resume_command() -> str:
    """Return the command that was typed, with `resume_from_checkpoint=auto`."""
    typed = THIS_RUN.typed or typed_command()
    if "resume_from_checkpoint=auto" not in typed:
        kept = (word for word in typed if not word.startswith("resume_from_checkpoint="))
        typed = [*kept, "resume_from_checkpoint=auto"]
    return shlex.join(typed)


def typed_command() -> list[str]:
    """Return the launcher's command, or this process's without a launcher, as the user typed it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # without /proc, the launcher's arguments are unknown
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    interpreter, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return [os.path.basename(rest[0]), *rest[1:]]  # a script such as tune, whose first line names its interpreter
    return [os.path.basename(interpreter), *rest]


def lock_directory(directory: Path) -> IO[bytes]:
    """Create the directory and lock it until the returned file is closed. Raises ConfigError, which names the holder.

    It is an fcntl lock: it works over NFS, and forked children, which may outlive a rank, do not inherit it.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    until_s = time.monotonic() + (launcher_timeout_s() + EXTRA_WAIT_AFTER_RESTART_S if restarted else WAIT_S)
    path = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a FIFO would block
            raise OSError(errno.EEXIST, "it is not a regular file", str(path))
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
    with suppress(OSError):  # for messages only
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now()}".encode())
        os.fsync(file.fileno())
    return file


def lock_holder(directory: Path) -> str | None:
    """Describe the process that has locked the directory, if any."""
    if not os.path.isfile(directory / LOCK_FILE):
        return None  # opening a FIFO would block
    with suppress(OSError), (directory / LOCK_FILE).open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return printable(file.read().decode(errors="replace")) or "another run"
    return None


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """Return the error for a directory that this run cannot write to."""
    in_the_way = isinstance(error, IsADirectoryError | FileExistsError)
    remedy = "remove it" if in_the_way else "set output_dir to a folder that this user may write"
    what = f"{error.filename or directory}: {error.strerror}"
    return ConfigError(f"cannot write to output_dir {str(directory)!r}: {what}; {remedy}")
