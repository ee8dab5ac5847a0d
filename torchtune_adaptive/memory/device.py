"""Device memory: how much there is and was needed."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from torchtune_adaptive.memory_sizes import MemorySize

FRAGMENTATION = 0.05
"""The share of a GPU that a search leaves free.

A probe shows what one step needs, and is not accepted if the allocator had to flush its cache for it. This is for
what a probe cannot show: holes that steps of different lengths leave between blocks (measured: docs/decisions.md).
"""


@dataclass(frozen=True)
class RngState:
    """The state of the random generators that dropout draws from, on the host and on this rank's GPU."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @staticmethod
    def capture() -> "RngState":
        # Asked of the process rather than of a parameter, which may be offloaded to the host.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RngState(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class MemorySource(Protocol):
    """What a search asks the memory of this rank's device."""

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once since the last reset."""

    @property
    def budget_bytes(self) -> int:
        """What `peak_bytes` may reach, with what is in use now."""

    @property
    def retries(self) -> int:
        """How often an allocation succeeded only after the allocator had returned cached blocks to the device."""

    def reset_peak(self) -> None:
        """Starts a new peak; the old one is lost."""

    def unlimited(self) -> AbstractContextManager[None]:
        """Suspends a limit that is lower than what the device has."""


class CudaMemory:
    """The memory of a GPU, the current one by default. What other processes hold of it is not available.

    A limit stays in force: the allocator itself runs out of memory there, so a big GPU can stand in for a small one.
    """

    def __init__(self, limit: MemorySize | None = None, device: torch.device | None = None) -> None:
        self._device = device
        if limit is not None:
            total_bytes = torch.cuda.mem_get_info(device)[1]
            fraction = limit.bytes_of(total_bytes) / total_bytes
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def budget_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        obtainable_bytes = free_bytes + torch.cuda.memory_reserved(self._device)
        allowed_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)
        return int(min(obtainable_bytes, allowed_bytes) * (1 - FRAGMENTATION))

    @property
    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)


def plain_tensors(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors with storages of their own that a tensor, say a DTensor, consists of."""
    if not wraps_tensors(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]  # from torch 2.13, also the mesh of a DTensor
    return [plain for each in inner if isinstance(each, torch.Tensor) for plain in plain_tensors(each)]


def wraps_tensors(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")
