"""Why a checkpoint could not be written, in words that a user can act on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from torchtune_adaptive.checkpoints import folders
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.engine.oom import forget_frames, is_oom, release
from torchtune_adaptive.errors import Remedy
from torchtune_adaptive.text import format_bytes

Value = TypeVar("Value")
GATHERS_WITH_LESS = (Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
"""What helps a save, in which no rows are run."""

NEARLY_FULL_BYTES = 2**20
"""Bytes that may still be free after a write has failed for want of room: less than a block, on most systems."""


SHORT_WRITES = ("unexpected pos", "PytorchStreamWriter failed", "basic_ios::clear")
"""torch's words for a write that the operating system cut short; it drops the error that says why."""


def cause(error: BaseException, directory: Path) -> str:
    """Why a checkpoint could not be written. torch's writers fail with texts of their own when a disk is full."""
    if is_oom(error):
        return f"out of memory on rank {dist.get_rank()}: {' or '.join(KEYS[each] for each in GATHERS_WITH_LESS)}"
    if isinstance(error, MemoryError):
        return f"out of memory on the host of rank {dist.get_rank()}: free host memory"
    if not directory.is_dir() or (isinstance(error, FileNotFoundError) and error.errno is None):
        return "the folder is gone"
    free = folders.free_bytes(directory)
    number = _errno(error)
    if number is not None:
        text = os.strerror(number)
    elif free < NEARLY_FULL_BYTES:
        text = "no space left"
    elif any(sign in str(error) for sign in SHORT_WRITES):
        text = "a file was truncated while it was written: a quota, or a limit on the file size"
    else:
        text = in_a_line(error)
    return f"{text} ({format_bytes(free)} free)"


def tried(work: Callable[[], Value], directory: Path) -> tuple[Value | None, str | None]:
    """What this rank does alone for a checkpoint, or why it could not: the others are to hear of it."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, a rank that raised would leave the others waiting
        problem = cause(error, directory)
        forget_frames(error)
    release()
    return None, problem


def _errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error at the bottom of this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None
