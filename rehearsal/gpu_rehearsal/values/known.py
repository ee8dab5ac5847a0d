"""Remember which values in the memory of a null device are known, and between which bounds the others are."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpu_rehearsal.device import settle

LARGE, LARGE_FLOATS = 2**23, 2**16
"""Tensors with at least this many elements are not computed: integers and masks, and others."""
Bounds = tuple[float, float]
"""The smallest and the largest value, or infinities."""


@dataclass
class _Fact:
    """What is known about the memory of a storage."""

    storage: StorageWeakRef
    address: int
    known: torch.Tensor | bool = False
    """True if all values are known; otherwise a tensor that is not zero for each byte of a known value."""
    bounds: Bounds | None = None
    """Of all values that are not known."""


class Known:
    """Facts about the values of tensors on the device. A fact ends with its storage, or if this moves.

    Each fact adds a reference to its storage, because `untyped_storage` does. Autograd adds gradients in place only if
    they have a single reference, so there are no facts about gradients.
    """

    def __init__(self) -> None:
        self._facts: dict[int, _Fact] = {}
        self._most = 4096
        self.check: Callable[[bool], bool] = bool
        """Returns the result of a check for NaN or infinity, given that for finite numbers."""
        atexit.register(self._facts.clear)  # at the end of the process, a StorageWeakRef cannot be deleted

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor's values are known: those of the host are."""
        if not tensor.is_cuda or not tensor.numel():
            return True
        fact = self._fact(tensor)
        if fact is None or isinstance(fact.known, bool):
            return fact is not None and fact.known is True
        return bool(_part(fact.known, tensor).all())

    def add(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's values are known, because they were written into its memory."""
        if not tensor.numel() or (is_gradient(tensor) and self._fact(tensor) is None):
            return
        size = tensor.untyped_storage().nbytes()
        if _is_whole(tensor):
            self._new_fact(tensor).known = True
        elif size <= 8 * LARGE:
            fact = self._fact(tensor) or self._new_fact(tensor)
            if not isinstance(fact.known, torch.Tensor):
                if fact.known:
                    return
                fact.known = torch.zeros(size, dtype=torch.uint8, device="cpu")
            _part(fact.known, tensor).fill_(1)

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's values have changed and are unknown."""
        if not self._facts or not tensor.is_cuda or not tensor.numel() or (fact := self._fact(tensor)) is None:
            return
        if fact.known is False or _is_whole(tensor):
            del self._facts[_key(tensor)]
            return
        fact.bounds = None
        if fact.known is True:
            fact.known = torch.ones(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")
        _part(fact.known, tensor).zero_()

    def bounds(self, tensor: torch.Tensor) -> Bounds | None:
        """Return the bounds of a tensor's values; None if it has none."""
        if not tensor.is_cuda or self.has(tensor):
            if not tensor.numel() or is_large(tensor) or tensor.is_complex():
                return None
            low, high = on_host(tensor).aminmax()
            return float(low), float(high)
        fact = self._fact(tensor)
        usual = (0, 1) if tensor.dtype is torch.bool else None
        return (fact.bounds if fact else None) or usual

    def set_bounds(self, tensor: torch.Tensor, bounds: Bounds) -> None:
        """Note the bounds of a tensor that is not known."""
        if tensor.is_cuda and bounds != (-inf, inf) and not is_gradient(tensor) and _is_whole(tensor):
            self._new_fact(tensor).bounds = bounds

    def _fact(self, tensor: torch.Tensor) -> _Fact | None:
        fact = self._facts.get(key := _key(tensor))
        if fact is not None and fact.address != _address(tensor):
            del self._facts[key]
            return None
        return fact

    def _new_fact(self, tensor: torch.Tensor) -> _Fact:
        storage = tensor.untyped_storage()
        if len(self._facts) > self._most:
            for key in [key for key, fact in self._facts.items() if fact.storage.expired()]:
                del self._facts[key]
            self._most = max(4096, 2 * len(self._facts))
        fact = self._facts[storage._cdata] = _Fact(StorageWeakRef(storage), storage.data_ptr())
        return fact


def is_large(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has too many elements to compute them on the host."""
    exact = tensor.dtype is torch.bool or not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() >= (LARGE if exact else LARGE_FLOATS)


def is_gradient(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that autograd may add another one to: it is computed in a backward pass."""
    in_backward = not torch.is_grad_enabled() and torch._C._current_autograd_node() is not None
    return in_backward and (tensor.is_floating_point() or tensor.is_complex())


def on_host(value: Any) -> Any:
    """Return a tensor of the host that uses the memory of one on the device, because no kernel could copy it."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return torch.device("cpu") if isinstance(value, torch.device) else value
    found = torch.empty(0, dtype=value.dtype, device="cpu")
    if not value.numel() or not _address(value):
        return found.new_empty(value.size())
    last = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    address, size = value.data_ptr(), (last + 1) * value.element_size()
    settle(address, size)
    memory = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), size)
    return found.set_(memory, 0, value.size(), value.stride())


def _key(tensor: torch.Tensor) -> int:
    """Return `_cdata` of a tensor's storage, without a new reference."""
    return torch._C._storage_id(tensor)  # type: ignore[attr-defined, no-any-return]


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor with elements."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if a tensor consists of all bytes of its storage."""
    return bool(tensor.nbytes == tensor.untyped_storage().nbytes()) and 0 not in tensor.stride()


def _part(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the first byte of each of a tensor's elements in a mask of its storage."""
    size = tensor.element_size()
    strides = [size * each for each in tensor.stride()]
    return mask.as_strided(tensor.size(), strides, size * tensor.storage_offset())
