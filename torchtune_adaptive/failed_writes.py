"""Finds the operating system's reason for a checkpoint file that could not be written."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOENT}
"""Errors of a disk that is full, faulty, read-only or gone."""


@contextmanager
def python_opens_files() -> Iterator[None]:
    """Let torch.save write through Python's files, because errors of its own files lack the errno."""
    save = torch.save

    def save_to(obj: object, f: Any, *args: Any, **options: Any) -> None:
        with open(f, "wb") if isinstance(f, str | os.PathLike) else nullcontext(f) as file:
            save(obj, file, *args, **options)

    torch.save = save_to
    try:
        yield
    finally:
        torch.save = save


def cause_of_failed_write(error: BaseException) -> str | None:
    """Return the operating system's reason and the file, such as `No space left on device: a.pt`; None if the error has
    another cause. torch and safetensors raise errors of their own after a failed write."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    if isinstance(cause, OSError) and cause.errno in OF_DISKS:
        return os.strerror(cause.errno) + f": {cause.filename}" * bool(cause.filename)
    of_safetensors = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(of_safetensors[1])) if of_safetensors else None
