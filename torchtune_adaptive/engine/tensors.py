"""Tensor subclasses that consist of other tensors, such as DTensor."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """Return the plain tensors, each with its own storage, of which a tensor such as a DTensor consists."""
    if not wraps_tensors(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]  # since torch 2.13, this includes the mesh of a DTensor
    return [plain for each in inner if isinstance(each, Tensor) for plain in plain_tensors(each)]


def wraps_tensors(kind: type) -> bool:
    """Return True for tensor subclasses that consist of other tensors, such as DTensor."""
    return hasattr(kind, "__tensor_flatten__")
