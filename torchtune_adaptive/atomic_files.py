"""Atomic writes of small files: after a crash a file has its old or its new content, never a part."""

from __future__ import annotations

import errno
import json
import logging
import os
import reprlib
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CANNOT_SYNC_A_FOLDER = (errno.EINVAL, errno.ENOTSUP)
DRAFTS = "*.????????.tmp"
"""Pattern of the names of unfinished files, which a killed process leaves."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically and create its parent directories. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise the rename could reach the disk before the content
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
    sync(path.parent)


def keep_file(path: Path, content: bytes, otherwise: str) -> bool:
    """Write an optional file; on failure log the cause and the consequence `otherwise`. Return True on success."""
    try:
        replace_file(path, content)
    except OSError as error:
        logger.warning("cannot write %s (%s): %s", path, reason(error), otherwise)
        return False
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON file that contains an object; return None if it does not exist.

    Raises ValueError without the file's name, which the caller adds.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError("it is not a regular file")  # reading a FIFO would block
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, RecursionError) as error:
        raise ValueError(reason(error)) from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds {reprlib.repr(content)}, not a JSON object")
    return content


def directory_id(path: Path) -> tuple[int, int]:
    """Return device and inode of a directory, which it keeps when it is renamed. Raises OSError."""
    here = path.stat()
    return here.st_dev, here.st_ino


def reason(error: BaseException) -> str:
    """Return the cause of an error in one line; for an OSError without the path, which the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


def sync(path: Path) -> None:
    """Fsync a file, or a directory if its file system supports that.

    Raises OSError if the sync fails; data may then be lost.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in CANNOT_SYNC_A_FOLDER:
            raise
    finally:
        os.close(descriptor)
