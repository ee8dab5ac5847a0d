"""Null devices: simulated GPUs, which run torch's CUDA code and its allocator on a machine without a GPU.

Device memory is counted but not allocated, kernels return without computing anything, and copies copy data.
docs/null-device.md describes the limits.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gpu_rehearsal.device.build import build
from gpu_rehearsal.errors import NullCudaError
from gpu_rehearsal.formatting import parse_bytes

__all__ = [
    "MAX_DEVICES", "NullCudaError", "build", "environment", "exchange", "record", "record_lines", "set_card",
    "set_memory", "settle", "used_convolutions", "used_memory", "used_workspaces",
]  # fmt: skip

MAX_DEVICES = 16
_callbacks: list[Any] = []  # must live as long as the library may call them
_PINNED, _MANAGED = MAX_DEVICES, MAX_DEVICES + 1  # as in null.h


def environment(
    *,
    memory: int | str | None = None,
    devices: int | str | None = None,
    capability: str | None = None,
) -> dict[str, str]:
    """Return the environment variables that give a child process null devices, and build the library if needed.

    Without arguments, a process has one device of 80 GiB and compute capability 9.0. Processes do not share memory.
    """
    size = parse_bytes(memory, "memory") if isinstance(memory, str) else memory
    options = {"MEMORY": size, "DEVICES": devices, "CAPABILITY": capability}
    library = build()
    return {
        "LD_PRELOAD": _prepended("LD_PRELOAD", str(library)),
        "LD_LIBRARY_PATH": _prepended("LD_LIBRARY_PATH", str(library.parent)),
        "PATH": _prepended("PATH", str(library.parent)),  # has the program nvidia-smi
        "NULL_CUDA_PYTHON": sys.executable,  # compiles stubs
        **{f"NULL_CUDA_{key}": str(value) for key, value in options.items() if value is not None},
    }


def _prepended(variable: str, path: str) -> str:
    rest = [each for each in os.environ.get(variable, "").split(":") if each and each != path]
    return ":".join([path, *rest])


def set_card(*, memory: int, devices: int) -> None:
    """Set the devices of this process and of its children. Call it before torch initializes CUDA."""
    os.environ.update(NULL_CUDA_MEMORY=str(memory), NULL_CUDA_DEVICES=str(devices))
    _function("null_cuda_read_environment")()


def set_memory(memory: int, *, device: int = 0, pinned: bool = False) -> None:
    """Set the memory limit of a device, or of pinned memory. Memory that is already allocated stays allocated."""
    _function("null_cuda_set_memory")(ctypes.c_int(_PINNED if pinned else device), ctypes.c_size_t(memory))


def record_lines(line: Callable[[], str]) -> None:
    """Add lines to the recording of NCCL: `line` returns the line of Python that this thread runs."""

    def find(out: int, size: int) -> None:
        text = line().encode()[: size - 1] + b"\0"
        ctypes.memmove(out, text, len(text))

    _callbacks.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(find))
    _function("null_cuda_set_caller")(_callbacks[-1])


def record(*fields: object) -> None:
    """Add a line to the recording."""
    _function("null_cuda_record")("\t".join(map(str, fields)).encode())


def exchange(
    kind: int, sent: int, received: int, count: int, dtype: int, what: int, group: int, rank: int,
    sources: Sequence[int], number: int,
) -> None:  # fmt: skip
    """Exchange small tensors with the ranks of a group that run. `sources` has for each rank the one that it equals."""
    _function("null_cuda_exchange")(
        kind, ctypes.c_void_p(sent), ctypes.c_void_p(received), ctypes.c_size_t(count), dtype, what,
        ctypes.c_uint64(group), len(sources), rank, (ctypes.c_int * len(sources))(*sources), number,
    )  # fmt: skip


def settle(address: int, size: int) -> None:
    """Wait until data that is sent to this memory, in a recording, has arrived."""
    _function("null_cuda_settle")(ctypes.c_void_p(address), ctypes.c_size_t(size))


def used_memory(*, managed: bool = False) -> int:
    """Return the bytes in use on the first device, or of managed memory."""
    used = _function("null_cuda_used")
    used.restype = ctypes.c_size_t
    return int(used(ctypes.c_int(_MANAGED if managed else 0)))


def used_convolutions() -> bool:
    """Return True if this process ran a convolution of cuDNN, whose workspace is not counted as memory."""
    return _counter("null_cuda_convolutions") > 0


def used_workspaces() -> bool:
    """Return True if this process asked cuFFT, cuSOLVER or cuSPARSE for the size of a workspace, and read 0."""
    return _counter("null_cuda_solvers") > 0


def _counter(name: str) -> int:
    """Return a counter of the library; 0 if the process has no null device."""
    library = ctypes.CDLL(None)
    return ctypes.c_int.in_dll(library, name).value if hasattr(library, name) else 0


def _function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except AttributeError:
        raise NullCudaError("this process has no null device: start it with device.environment()") from None
