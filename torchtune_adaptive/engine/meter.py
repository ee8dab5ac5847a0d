"""Measures the memory of a CPU by counting live storages: its allocator neither reports a peak nor enforces a limit.

With it, search and recovery work without a GPU, and can be tested there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine.tensors import plain_tensors, wraps_tensors
from torchtune_adaptive.errors import ConfigError, Remedy
from torchtune_adaptive.formatting import format_bytes

if TYPE_CHECKING:
    from torch._ops import OpOverload


class MemoryMeter(TorchDispatchMode):
    """Context manager that counts the bytes of all live storages, and raises an OOM error above `cap_bytes`.

    It counts storages that were allocated while it was open or passed to `count`. After an operation that exceeds the
    cap, it raises torch.OutOfMemoryError. The peak does not include that operation, because a GPU would have refused
    it. `cap_bytes` may be changed at any time.

    Temporary memory inside a kernel is not counted. Under any dispatch mode, autograd accumulates gradients out of
    place. Without FSDP, the peak is therefore higher by one parameter than without the meter.
    """

    retries, fullness = 0, 0.0  # because a CPU's allocator has no cache

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__()
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}
        self._resize: Callable[[UntypedStorage, int], object] | None = None

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count existing tensors, such as parameters and optimizer state. This never raises an OOM error."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self._update(plain.untyped_storage(), may_be_new=True)

    def reset_peak(self) -> None:
        """Set the peak to the memory that is in use now."""
        self.peak_bytes = self.live_bytes

    @property
    def budget_bytes(self) -> int:
        """The cap. Raises ConfigError without one."""
        if self.cap_bytes is None:
            raise ConfigError("a CPU has no memory limit to search within", Remedy.CAP_MEMORY)
        return self.cap_bytes

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Do not enforce the cap while open, to measure a peak above it."""
        cap_bytes, self.cap_bytes = self.cap_bytes, None
        try:
            yield
        finally:
            self.cap_bytes = cap_bytes

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):  # DTensor and similar types dispatch their inner operations
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        effect = _effect_of(func)
        if effect is _Effect.NONE:
            return result
        before, peak_before = self.live_bytes, self.peak_bytes
        for tensor in (result,) if type(result) is Tensor else tree_iter(result):
            if isinstance(tensor, Tensor):
                self._update(tensor.untyped_storage(), may_be_new=effect is not _Effect.CHANGES_SIZE)
        if self.live_bytes > before and effect is not _Effect.MATCHED:
            try:
                self._check(self.live_bytes, self.live_bytes - before, str(func))
            except torch.OutOfMemoryError:
                self.peak_bytes = peak_before
                del result, tensor  # the traceback would keep them alive
                raise
        return result

    def __enter__(self) -> MemoryMeter:
        if self._resize is not None:
            raise RuntimeError("this MemoryMeter is already open: enter it only once")
        # FSDP allocates parameters by growing their storages, which the dispatcher does not see.
        resize = self._resize = UntypedStorage.resize_

        def counted_resize(storage: UntypedStorage, size: int) -> object:
            extra_bytes = size - storage.size()
            if extra_bytes > 0:
                self._check(self.live_bytes + extra_bytes, extra_bytes, "UntypedStorage.resize_")
            result = resize(storage, size)
            self._update(storage, may_be_new=extra_bytes > 0)
            return result

        UntypedStorage.resize_ = counted_resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        UntypedStorage.resize_, self._resize = self._resize, None  # type: ignore[method-assign, assignment]
        super().__exit__(*error)

    def _check(self, wanted_bytes: int, added_bytes: int, what: str) -> None:
        if self.cap_bytes is not None and wanted_bytes > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"Tried to allocate {format_bytes(added_bytes)}: {what} would raise the memory in use to "
                f"{wanted_bytes} bytes, but the limit is {self.cap_bytes} bytes"
            )

    def _update(self, storage: UntypedStorage, *, may_be_new: bool) -> None:
        """Record the size of a storage. An unknown storage is only added if it `may_be_new`."""
        if storage.device.type == "meta":  # that of a fake tensor, too
            return
        key, size = storage._cdata, storage.size()
        known = self._storages.get(key)
        if known is not None:
            self._storages[key] = size, known[1]
            self.live_bytes += size - known[0]
        elif may_be_new:
            self._storages[key] = size, weakref.ref(storage, lambda _: self._forget(key))
            self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        size, _ = self._storages.pop(key)  # before `live_bytes` is read, because threads may switch here
        self.live_bytes -= size


class _Effect(Enum):
    """The effect of an operation on the storages of its results."""

    NONE = auto()
    CHANGES_SIZE = auto()
    ALLOCATES = auto()
    MATCHED = auto()
    """Allocates in a collective that peers have matched by now, so an OOM error must not be raised."""


@cache
def _effect_of(func: OpOverload) -> _Effect:
    if func.namespace == "c10d":  # a collective returns its arguments
        return _Effect.NONE
    if func.namespace == "_c10d_functional":
        return _Effect.MATCHED
    if func is torch.ops.aten.lift_fresh.default:
        # torch.tensor() allocates outside of dispatch modes and then passes the result to lift_fresh
        return _Effect.ALLOCATES
    aliases = [returned.alias_info for returned in func._schema.returns]
    if any(alias is None for alias in aliases):
        return _Effect.ALLOCATES
    return _Effect.CHANGES_SIZE if any(alias is not None and alias.is_write for alias in aliases) else _Effect.NONE
