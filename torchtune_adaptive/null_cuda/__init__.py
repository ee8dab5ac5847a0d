"""A CUDA that computes nothing: torch's own CUDA code, its allocator and its errors, on a machine without a GPU.

Device memory is counted, not used; kernels return at once; copies are true. docs/null-device.md says what that shows
and what it does not. This room imports nothing else of the package.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

from torchtune_adaptive.null_cuda.build import NullCudaError, build

__all__ = ["NullCudaError", "build", "bytes_of", "environment", "set_memory", "used_memory"]

_PINNED = 16  # as null.h has it
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def environment(
    *, memory: int | None = None, devices: int | None = None, capability: str | None = None, name: str | None = None
) -> dict[str, str]:
    """The variables that put a child process on null devices; builds the library if need be.

    Unless the environment says otherwise there is one card of 80 GiB and compute capability 9.0. `memory` is in bytes,
    and every process has all of it: nothing is shared between processes.
    """
    library = build()
    card = {"MEMORY": memory, "DEVICES": devices, "CAPABILITY": capability, "NAME": name}
    return {
        "LD_PRELOAD": _before("LD_PRELOAD", str(library)),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", str(library.parent)),
        **{f"NULL_CUDA_{key}": str(value) for key, value in card.items() if value is not None},
    }


def _before(variable: str, path: str) -> str:
    rest = [each for each in os.environ.get(variable, "").split(":") if each and each != path]
    return ":".join([path, *rest])


def set_memory(memory: int, *, device: int = 0, pinned: bool = False) -> None:
    """From now on this process's card, or its pinned memory, has so many bytes; what is in use stays."""
    _function("null_cuda_set_memory")(ctypes.c_int(_PINNED if pinned else device), ctypes.c_size_t(memory))


def used_memory(*, device: int = 0, pinned: bool = False) -> int:
    """Bytes in use on this process's card, or of pinned memory."""
    used = _function("null_cuda_used")
    used.restype = ctypes.c_size_t
    return int(used(ctypes.c_int(_PINNED if pinned else device)))


def _function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except AttributeError:
        raise NullCudaError("this process does not run on a null device") from None


def bytes_of(size: str) -> int:
    """80GB, 24GiB, 85899345920."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", size)
    if found is None:
        raise ValueError(f"not an amount of memory: {size}; for example 80GB or 24GiB")
    amount = int(float(found[1]) * _UNITS[found[2] or "B"])
    if amount >= 2**47:
        raise ValueError(f"{size} is not below 128TiB")
    return amount
