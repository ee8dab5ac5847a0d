"""What can go wrong when a checkpoint is written or read, in words that a user can act on."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune.utils import get_logger

from torchtune_adaptive.sizes import format_bytes
from torchtune_adaptive.tune.parts.checkpoints import folders
from torchtune_adaptive.tune.start.components import reason

NEARLY_FULL_BYTES = 2**20
"""Bytes that may still be free after a write has failed for want of room: less than a block, on most systems."""


SHORT_WRITES = ("unexpected pos", "PytorchStreamWriter failed", "basic_ios::clear")
"""torch's words for a write that the operating system cut short; it drops the error that says why."""


def cause(error: BaseException, directory: Path) -> str:
    """Why a checkpoint could not be written. torch's writers fail with texts of their own when a disk is full."""
    if not directory.is_dir() or (isinstance(error, FileNotFoundError) and error.errno is None):
        return "the folder is gone"
    free = folders.free_bytes(directory)
    number = _errno(error)
    if number is not None:
        text = os.strerror(number)
    elif free < NEARLY_FULL_BYTES:
        text = "no space left"
    elif any(sign in str(error) for sign in SHORT_WRITES):
        text = "a file was cut off while it was written: a quota, or a limit on the size of files"
    else:
        text = reason(error)
    return f"{text} ({format_bytes(free)} free)"


def require_folder(path: Path) -> None:
    """Refuses a folder that is gone: torchtune would create the path anew, on whatever file system is left."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is gone")


@contextmanager
def quiet_torchtune() -> Iterator[None]:
    """Silences torchtune's lines, which name the staging folder, where nothing stays."""
    talker = get_logger()
    level = talker.level
    talker.setLevel(logging.WARNING)
    try:
        yield
    finally:
        talker.setLevel(level)


@functools.cache
def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torchtune-adaptive", "torch", "torchtune", "torchao")}


def _errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error at the bottom of this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None
