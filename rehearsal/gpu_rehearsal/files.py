"""Reads and atomically replaces small files: after a crash, a file has its old or its new content."""

from __future__ import annotations

import json
import os
import reprlib
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises OSError."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
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


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that contains an object. Return None if the file does not exist. Raises ValueError for any
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
