"""The masks of DTensor's sharded embedding, which outlive a pass that ends early.

A rank that holds a part of the vocabulary masks the tokens of all others, from the lookup until its sum over the
ranks. In between the mask lies in a buffer of DTensor's cache of sharding decisions, by shape. If the pass ends there,
it stays, and the next tokens of that shape are refused: "MaskBuffer has been materialized with conflicting data".
docs/upstream/mask_buffer.py shows it in a page.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from torchtune_adaptive.patching import replaced

try:
    from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
except ImportError:  # a version of torch that keeps them elsewhere: recovery is refused there
    MaskBuffer = None  # type: ignore[assignment, misc]


KNOWN = MaskBuffer is not None
"""Whether this version of torch is one whose buffers can be found."""


class Masks:
    """Remembers which buffers were filled, so that those that are left over can be emptied."""

    def __init__(self) -> None:
        self._filled: dict[int, Any] = {}

    def noting(self) -> AbstractContextManager[None]:
        """While open, notes every buffer that is filled."""
        if MaskBuffer is None:
            return nullcontext()
        fill = MaskBuffer.materialize_mask

        def noting(buffer: Any, mask: Tensor) -> None:
            self._filled[id(buffer)] = buffer
            fill(buffer, mask)

        return replaced((MaskBuffer, "materialize_mask", noting))

    def forget(self) -> None:
        """After a pass that ran to its end, which has emptied them itself."""
        self._filled.clear()

    def empty(self) -> None:
        for buffer in self._filled.values():
            buffer.data, buffer.refcount = None, 0
        self._filled.clear()
