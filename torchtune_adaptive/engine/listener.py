"""Find the operations that communicate, and the line of the user's code that calls them."""

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
"""Operations of these namespaces that do not communicate."""
_OTHERS_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Prefixes of files that do not belong to the user: torch, this package, generated code."""


class Listener(TorchDispatchMode):
    """Dispatch mode that calls `report` with each communicating operation and its caller, before it runs.

    A dispatch mode makes compiled code run eagerly, so use it for one microbatch only.
    """

    supports_higher_order_operators = True

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):  # DTensor and similar types dispatch their inner operations
            return NotImplemented
        if getattr(func, "namespace", "") in COMMUNICATING and func._opname not in SILENT:
            self._report(f"{func.namespace}::{func._opname}{caller()}")
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """Return the innermost line of the user's code, for example ` at model.py:57`; "" if there is none."""
    return place_of(sys._getframe(1))


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code from `frame` outwards, formatted as in `caller`."""
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS_CODE):
        frame = frame.f_back
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
