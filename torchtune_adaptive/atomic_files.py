"""Atomic writes of small files: after a crash, a file has its old or its new content, never a part of it."""

from __future__ import annotations

import errno
import json
import os
import reprlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CANNOT_SYNC_A_FOLDER = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that do not support fsync of a directory."""
DRAFTS = "*.????????.adaptive.tmp"
"""Pattern for the names of unfinished files. A killed process leaves them behind."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically and create its parent directories. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.adaptive.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the content
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
    sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that has none, for example of a failed write."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON file that contains an object. Return None if the file does not exist. Raises ValueError for any
    fault. The caller adds the name of the file to its message."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, RecursionError) as error:
        raise ValueError(reason(error)) from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds {reprlib.repr(content)}, not a JSON object")
    return content


def reason(error: BaseException) -> str:
    """Return the cause of an error in one line. For an OSError, the path is left out: the caller names it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


def sync(path: Path) -> None:
    """Fsync a file, or a directory if its file system supports that. Raises OSError if data may be lost."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in CANNOT_SYNC_A_FOLDER:
            raise
    finally:
        os.close(descriptor)
