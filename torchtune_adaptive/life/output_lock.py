"""One run at a time in an output directory.

The lock is the kernel's, so it ends with its process, however that ends; what lies in the file only says who has it.
It is one of fcntl: NFS carries those, and they are not handed on to forked children, which may outlive a rank.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.launcher import launcher_waits_s
from torchtune_adaptive.life.this_run import now, was_restarted

logger = logging.getLogger(__name__)

LOCK_FILE = ".adaptive_lock"
ANOTHER = "another run"
WAIT_S = 5.0
"""Seconds to wait for a process that was just ended: it takes a moment to give back what it has."""
MORE_AFTER_RESTART_S = 10.0
"""Beyond what the launcher gives the ranks of the attempt before, which may be on another node."""
_POLL_S = 0.1


class Lock:
    """What holds a directory until it is released, or its process ends."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        if self._descriptor is None:
            return
        with suppress(OSError):
            if _is_still(self._path, self._descriptor):  # nobody has deleted it by hand, so nobody holds another
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def take(directory: Path) -> Lock:
    """Makes the directory if it is not there. Raises ConfigError, which says who holds it."""
    path = directory / LOCK_FILE
    waits_s = (launcher_waits_s() or 0.0) + MORE_AFTER_RESTART_S if was_restarted() else WAIT_S
    until_s = time.monotonic() + waits_s
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except IsADirectoryError as error:
            raise ConfigError(
                f"{path} is a folder, but a run needs its lock file there: remove it, or choose another output_dir"
            ) from error
        except OSError as error:
            raise unwritable(directory, error) from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, descriptor):
                break
            os.close(descriptor)  # the last holder has removed it since it was opened
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            if time.monotonic() > until_s:
                raise in_use(directory, holder(directory) or ANOTHER) from error
            time.sleep(_POLL_S)
        except OSError as error:
            os.close(descriptor)
            logger.warning(
                "%s does not support locks (%s): a second run there would not be detected", directory, error.strerror
            )
            return Lock(path, None)
    with suppress(OSError):  # for people: that it is held does not depend on what it says
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {now()}".encode(), 0)
        os.fsync(descriptor)
    return Lock(path, descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def holder(directory: Path) -> str | None:
    """The run that holds a directory, if any; nothing is changed."""
    path = directory / LOCK_FILE
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return path.read_text(errors="replace") or ANOTHER
        finally:
            os.close(descriptor)
    return None


def in_use(directory: Path, who: str) -> ConfigError:
    host, advice = who.partition(" on ")[2].partition(",")[0], ""
    if host not in ("", socket.gethostname()):  # which cannot be asked whether the run is still there
        advice = (
            f". If {host} is gone, its lock expires with the file server's lease (1 to 2 minutes); on NFSv3, which "
            f"has no leases, delete {directory / LOCK_FILE}"
        )
    return ConfigError(
        f"output_dir {str(directory)!r} is in use by {who}: wait for it to end, end it, or choose another "
        f"output_dir{advice}"
    )


def unwritable(directory: Path, error: OSError) -> ConfigError:
    why = error.strerror
    if directory.is_symlink() and not directory.exists():
        why = f"it is a link to {os.readlink(directory)}, which does not exist"
    elif directory.exists() and not directory.is_dir():
        why = "it is not a folder"
    return ConfigError(
        f"cannot write to output_dir {str(directory)!r}: {why}; set output_dir to a folder that this user may write"
    )
