"""Reports the operations that communicate, each with the line that called it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.engine.memory import wraps_tensors

if TYPE_CHECKING:
    from torch._ops import OpOverload

COMMUNICATING = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
"""Operations of those namespaces that only wait, or wrap what has been waited for."""
_OTHERS_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Files that are not the user's: torch, this package, code without a file."""


class Listener(TorchDispatchMode):
    """Reports every operation that communicates, with the line that called it, before it runs.

    Compiled code runs eagerly under a dispatch mode, so this is open for a single microbatch, or for a stand-in.
    """

    supports_higher_order_operators = True

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):  # DTensor and its like come back with what they do inside
            return NotImplemented
        if getattr(func, "namespace", "") in COMMUNICATING and func._opname not in SILENT:
            self._tell(f"{func.namespace}::{func._opname}{caller()}")
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """` at model.py:57`: the innermost line of the user's code, if there is one."""
    return place_of(sys._getframe(1))


def place_of(frame: FrameType | None) -> str:
    """The same from a frame outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS_CODE):
        frame = frame.f_back
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
