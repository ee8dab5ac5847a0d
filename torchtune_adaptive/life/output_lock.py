"""One run at a time in an output directory.

The lock is the kernel's, so it ends with its process, however that ends; what lies in the file only says who has it.
It is one of fcntl: NFS carries those, and they are not handed on to forked children, which may outlive a rank.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.launcher import launcher_timeout_s
from torchtune_adaptive.life.this_run import THIS_RUN, now
from torchtune_adaptive.text import printable

logger = logging.getLogger(__name__)

LOCK_FILE = ".adaptive_lock"
WAIT_S = 5.0
"""Seconds to wait for a process that was just ended: it takes a moment to give back what it has."""
MORE_AFTER_RESTART_S = 10.0
"""Beyond what the launcher gives the ranks of the attempt before, which may be on another node."""
_POLL_S = 0.1


def take(directory: Path) -> IO[bytes]:
    """Makes the directory and locks it until the file is closed. Raises ConfigError, which says who holds it."""
    until_s = time.monotonic() + (launcher_timeout_s() + MORE_AFTER_RESTART_S if THIS_RUN.restarted else WAIT_S)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_what_is_no_file(directory / LOCK_FILE)
        file = (directory / LOCK_FILE).open("a+b", buffering=0)
    except OSError as error:
        raise unwritable(directory, error) from error
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > until_s:
                file.close()
                raise in_use(directory, holder(directory) or "another run") from error
            time.sleep(_POLL_S)
        except OSError as error:
            logger.warning(
                "%s does not support locks (%s): a second run there would not be detected", directory, error.strerror
            )
            return file
    with suppress(OSError):  # for people: that it is held does not depend on what it says
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now()}".encode())
        os.fsync(file.fileno())
    return file


def holder(directory: Path) -> str | None:
    if not os.path.isfile(directory / LOCK_FILE):
        return None  # a pipe would be waited for
    with suppress(OSError), (directory / LOCK_FILE).open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return printable(file.read().decode(errors="replace")) or "another run"
    return None


def _refuse_what_is_no_file(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_dir():  # of a folder, the operating system says so
        raise OSError(errno.EEXIST, "it is not a regular file", str(path))


def in_use(directory: Path, who: str) -> ConfigError:
    return ConfigError(
        f"output_dir {str(directory)!r} is in use by {who}: wait for it to end, end it, or choose another output_dir"
    )


def unwritable(directory: Path, error: OSError) -> ConfigError:
    in_the_way = isinstance(error, IsADirectoryError | FileExistsError)
    remedy = "remove it" if in_the_way else "set output_dir to a folder that this user may write"
    what = f"{error.filename or directory}: {error.strerror}"
    return ConfigError(f"cannot write to output_dir {str(directory)!r}: {what}; {remedy}")
