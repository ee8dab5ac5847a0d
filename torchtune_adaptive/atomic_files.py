"""Small files that are whole or not there at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import reprlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CANNOT_SYNC_A_FOLDER = (errno.EINVAL, errno.ENOTSUP)
LONGEST_WAIT_MS = 2000


def replace_file(path: Path, content: bytes) -> None:
    """Puts a file in place, folders included: after a crash it holds the old content or the new. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Always the same name: what a kill leaves behind is overwritten by the next try.
    beside = path.with_name(f"{path.name}.tmp")
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _wait_for_others(folder)
        beside.unlink(missing_ok=True)  # a pipe of that name would be waited for
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or the name could reach the disk before what it stands for
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
    finally:
        os.close(folder)
    sync(path.parent)


def _wait_for_others(folder: int) -> None:
    """Takes the lock of a folder, since another process has the same name for its draft. Not for ever: a child that was
    forked meanwhile may keep it; and not where the file system has no such locks."""
    for _ in range(LONGEST_WAIT_MS):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        except OSError:
            pass
        return


def keep_file(path: Path, content: bytes, otherwise: str) -> bool:
    """Writes a file that a run can do without; if that fails, one line says why, and what it means. Returns whether it
    is there."""
    try:
        replace_file(path, content)
    except OSError as error:
        logger.warning("cannot write %s (%s): %s", path, reason(error), otherwise)
        return False
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file; None if there is no file. Raises ValueError, which does not name the file."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError("it is not a regular file")  # a pipe would be waited for
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, RecursionError) as error:
        raise ValueError(reason(error)) from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds {reprlib.repr(content)}, not a JSON object")
    return content


def reason(error: BaseException) -> str:
    """What went wrong, in a line; for an OSError only the cause, since the caller names the file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


def sync(path: Path) -> None:
    """Makes a file durable, or the names in a folder where the file system can sync a folder.

    Raises OSError where it can and fails, which means that what was written may be lost.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in CANNOT_SYNC_A_FOLDER:
            raise
    finally:
        os.close(descriptor)
