"""Device memory: how much there is, how much a step needed, and how everything that a step changes is put back."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchtune_adaptive.rehearsal import REHEARSAL
from torchtune_adaptive.text import MemorySize

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
    def capture() -> RngState:
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

    @property
    def fullness(self) -> float:
        """The largest share of obtainable memory that was taken since the last reset, cached blocks included; from 1 on
        the allocator flushes its cache. 0 where there is no cache."""

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
        return int(self._obtainable_bytes * (1 - FRAGMENTATION))

    @property
    def fullness(self) -> float:
        return torch.cuda.max_memory_reserved(self._device) / self._obtainable_bytes

    @property
    def _obtainable_bytes(self) -> float:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        allowed_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)
        return min(free_bytes + torch.cuda.memory_reserved(self._device), allowed_bytes)

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
    """The plain tensors inside a tensor (for example, a DTensor), each with its own storage."""
    if not wraps_tensors(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(tensor, name) for name in names]  # from torch 2.13, also the mesh of a DTensor
    return [plain for each in inner if isinstance(each, torch.Tensor) for plain in plain_tensors(each)]


def wraps_tensors(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


class Reading(NamedTuple):
    seconds: float
    """Seconds since the last step that counted; in the first step, since it began."""
    retries: int
    """Allocator retries since the last reading."""
    peak_bytes: int
    budget_bytes: int
    """0 where nothing measures memory."""


class Gauge:
    """Reads a clock, and a memory source where there is one."""

    def __init__(self, memory: MemorySource | None, *, shared: bool) -> None:
        """`shared`: other stages of a step use the memory too, so only what a stage sees while it runs is its own."""
        self._memory, self._shared = memory, shared
        self._budget_bytes = 0 if memory is None else memory.budget_bytes  # asking a GPU's driver takes time
        self._retries = 0 if memory is None else memory.retries
        self._since: float | None = None

    def begin_step(self) -> None:
        if self._shared and self._memory is not None:
            self._retries = self._memory.retries
        if self._since is None:
            self._since = time.perf_counter()

    def end_step(self) -> None:
        self._since = time.perf_counter()

    def read(self) -> Reading:
        seconds = 0.0 if self._since is None else time.perf_counter() - self._since
        if self._memory is None:
            return Reading(seconds, 0, 0, 0)
        before, self._retries = self._retries, self._memory.retries
        return Reading(seconds, self._retries - before, self._memory.peak_bytes, self._budget_bytes)


@contextmanager
def leaving_no_trace(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Puts parameters, gradients, buffers, optimizer state and random generators back.

    Gradients are not copied, so there must be none that anything could be added to.
    """
    rng = RngState.capture()
    gradients = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    buffers = [
        (module, name, buffer)
        for model in models
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    states = [_OptimizerState(optimizer) for optimizer in optimizers]
    contents = (
        *(parameter for model in models for parameter in model.parameters() if parameter.requires_grad),
        *(buffer for _, _, buffer in buffers),
        *(tensor for state in states for tensor in state.tensors),
    )
    distinct = {id(tensor): tensor for tensor in contents if not REHEARSAL.on}.values()
    copies = [(tensor, [_to_host(plain) for plain in plain_tensors(tensor)]) for tensor in distinct]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for state in states:
            state.put_back()
        for tensor, parts in copies:
            # Looked up again: FSDP's first pass moves shards that need padding to a storage of their own.
            for plain, copied in zip(plain_tensors(tensor), parts, strict=True):
                plain.detach().copy_(copied)
        rng.restore()


def _to_host(tensor: Tensor) -> Tensor:
    # In a storage of its own making: a meter that stands in for device memory must not count the copy.
    storage = UntypedStorage(tensor.numel() * tensor.element_size())
    host: Tensor = torch.empty(0, dtype=tensor.dtype, device="cpu")
    host.set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
    return host.copy_(tensor.detach())


def copied_to_host(tensor: Tensor) -> Tensor:
    """A copy of the same type (for example, a DTensor of quantized shards) with every part on the host.

    A deep copy, which torch uses to stage a state, would copy it twice, and its mesh as well.
    """
    if not wraps_tensors(type(tensor)):
        return _to_host(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names}
    copies = {name: copied_to_host(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    whole: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        copies, context, tensor.size(), tensor.stride()
    )
    return whole


class _OptimizerState:
    """State and options of an optimizer: the tensors in them, and a copy of all that is no tensor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        trees = dict(optimizer.state), optimizer.param_groups
        self.tensors = [leaf for leaf in tree_iter(trees) if isinstance(leaf, Tensor)]
        # Containers and numbers are copied. Tensors stay the same objects, whose contents are put back by themselves.
        same = {id(tensor): tensor for tensor in (*self.tensors, *optimizer.state)}
        self._state: dict[Tensor, object]
        self._groups: list[dict[str, object]]
        self._state, self._groups = copy.deepcopy(trees, same)

    def put_back(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
