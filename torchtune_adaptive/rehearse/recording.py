"""Adds what only Python knows to the recording of NCCL: the lines that communicate, and collectives of hosts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from torchtune_adaptive import null_cuda
from torchtune_adaptive.null_cuda import record_host_call, record_lines

_METHODS = {
    "allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "scatter",
}  # fmt: skip
"""Collective methods of a process group."""
_OTHER_CODE = (str(Path(torch.__file__).parent), contextlib.__file__, null_cuda.__file__, __file__, "<")


def start_recording() -> None:
    """Record lines and host collectives of this process from here on, into the folder NULL_CUDA_RECORD."""
    # a thread of autograd may have no frame; the main thread then waits for it
    main = threading.main_thread().ident or 0
    record_lines(lambda: _line(sys._getframe()) or _line(sys._current_frames().get(main)))
    for name in _METHODS & {*vars(dist.ProcessGroup)}:
        setattr(dist.ProcessGroup, name, _recorded(name, getattr(dist.ProcessGroup, name)))


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_host = not any(each.is_cuda for each in tensors) if tensors else dist.get_backend(group) == "gloo"
        if on_host and group.size() > 1:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
            record_host_call(
                f"{group.group_name} {ranks}", group.size(), f"{name} {[[*each.shape] for each in tensors]}"
            )
        return method(group, *args, **kwargs)

    return call


def _line(frame: FrameType | None) -> str:
    """Return the innermost line outside of torch."""
    while frame is not None and frame.f_code.co_filename.startswith(_OTHER_CODE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
