"""Finds the operating system's reason for a checkpoint file that could not be written."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOENT}
"""Errors of a disk that is full, faulty, read-only or gone."""


@contextmanager
def python_opens_files() -> Iterator[None]:
    """Let torch.save write through Python's files, because errors of its own files lack the errno. Errors name the
    file."""
    save = torch.save

    def save_to(obj: object, f: Any, *args: Any, **options: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **options)
            return
        try:
            with open(f, "wb") as file:
                save(obj, file, *args, **options)
        except Exception as error:
            if (cause := _error_of_a_disk(error)) is not None:
                cause.filename = os.fspath(f)  # Python sets it only if `open` fails
            raise

    torch.save = save_to
    try:
        yield
    finally:
        torch.save = save


def cause_of_failed_write(error: BaseException) -> str | None:
    """Return the operating system's reason and the file, such as `No space left on device: a.pt`; None if the error has
    another cause. torch and safetensors raise errors of their own after a failed write."""
    if (cause := _error_of_a_disk(error)) is not None:
        return os.strerror(cause.errno or 0) + f": {cause.filename}" * bool(cause.filename)
    of_safetensors = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(of_safetensors[1])) if of_safetensors else None


def _error_of_a_disk(error: BaseException) -> OSError | None:
    found = [each for each in (error.__context__, error) if isinstance(each, OSError) and each.errno in OF_DISKS]
    return max(found, key=lambda each: bool(each.filename), default=None)
