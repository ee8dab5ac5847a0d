"""One run at a time in an output directory.

The lock is the kernel's, so it ends with its process, however that ends; what lies in the file only says who has it.
It is one of fcntl: NFS carries those, and they are not handed on to forked children, which may outlive a rank.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.life.run_file import now
from torchtune_adaptive.life.started_by import launcher_waits_s
from torchtune_adaptive.life.this_run import was_restarted

logger = logging.getLogger(__name__)

LOCK_FILE = ".adaptive_lock"
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
    until = time.monotonic() + _waits_s()
    while (lock := _tried(path)) is None:
        if time.monotonic() > until:
            raise in_use(directory, holder(directory) or "another run")
        time.sleep(_POLL_S)
    return lock


def _waits_s() -> float:
    return (launcher_waits_s() or 0.0) + MORE_AFTER_RESTART_S if was_restarted() else WAIT_S


def holder(directory: Path) -> str | None:
    """The run that holds a directory, if any; nothing is changed."""
    path = directory / LOCK_FILE
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return _named(path)
        finally:
            os.close(descriptor)
    return None


def in_use(directory: Path, who: str) -> ConfigError:
    return ConfigError(
        f"output_dir {str(directory)!r} is in use by {who}: wait for it to end, end it, or choose another "
        f"output_dir{_if_its_machine_is_gone(directory / LOCK_FILE)}"
    )


def unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write to output_dir {str(directory)!r}: {error.strerror}")


def _tried(path: Path) -> Lock | None:
    """The lock, taken; None if somebody else holds it."""
    descriptor = _opened(path)
    if descriptor is None:
        return Lock(path, None)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return None
    except OSError as error:
        logger.warning(
            "%s does not support locks (%s): a second run there would not be detected", path.parent, error.strerror
        )
        os.close(descriptor)
        return Lock(path, None)
    if not _is_still(path, descriptor):  # the last holder has removed it since it was opened
        os.close(descriptor)
        return _tried(path)
    _sign(descriptor)
    return Lock(path, descriptor)


def _opened(path: Path) -> int | None:
    """The lock file, open; None on a read-only file system: whatever is wrong with that turns out later."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except IsADirectoryError as error:
        raise ConfigError(
            f"{path} is a folder, but a run needs its lock file there: remove it, or choose another output_dir"
        ) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            return None
        raise unwritable(path.parent, error) from error


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Writes into the lock, for people, who holds it; that it is held does not depend on that."""
    signature = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(signature).encode(), 0)
        os.fsync(descriptor)


def _named(path: Path) -> str:
    signed = _signature(path)
    return f"process {signed.pid} on {signed.host}, since {signed.since}" if signed else "another run"


def _if_its_machine_is_gone(path: Path) -> str:
    """What to do about a holder on another machine, which cannot be asked whether it is still there."""
    signed = _signature(path)
    if signed is None or signed.host == socket.gethostname():
        return ""
    return (
        f". If {signed.host} is gone, its lock expires with the file server's lease (1 to 2 minutes); on NFSv3, which "
        f"has no leases, delete {path}"
    )


class _Signature(NamedTuple):
    """Who has signed a lock."""

    pid: object
    host: object
    since: object


def _signature(path: Path) -> _Signature | None:
    try:
        signed = json.loads(path.read_bytes())
        return _Signature(signed["pid"], signed["host"], signed["since"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
