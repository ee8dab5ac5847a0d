"""Saves and restores what a step changes: random generators for a retry; models and optimizers, too, for a probe."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine.memory import plain_tensors, wraps_tensors


@dataclass(frozen=True)
class RngState:
    """State of torch's random generators on the host and on this rank's GPU."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @staticmethod
    def capture() -> RngState:
        """Return the current state."""
        # not `parameter.is_cuda`: parameters may be offloaded to the host
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RngState(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@contextmanager
def restoring_state(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Restore parameters, gradients, buffers, optimizer state and random generators at the end. Gradients are not
    copied, so the code inside must not accumulate into existing gradients."""
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
    copies = copies_on_host({id(tensor): tensor for tensor in contents}.values())
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for state in states:
            state.restore()
        for tensor, parts in copies:
            # `plain_tensors` again, because FSDP's first pass moves shards that need padding to new storages
            for plain, copied in zip(plain_tensors(tensor), parts, strict=True):
                plain.detach().copy_(copied)
        rng.restore()


def copies_on_host(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return each tensor, together with copies on the host of the plain tensors of which it consists."""
    return [(tensor, [_to_host(plain) for plain in plain_tensors(tensor)]) for tensor in tensors]


def _to_host(tensor: Tensor) -> Tensor:
    # the storage is not allocated by an operation, so a MemoryMeter does not count it
    storage = UntypedStorage(tensor.numel() * tensor.element_size())
    host: Tensor = torch.empty(0, dtype=tensor.dtype, device="cpu")
    host.set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
    return host.copy_(tensor.detach())


def copied_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of the same type, for example a DTensor of quantized shards, with all its tensors on the host.
    `copy.deepcopy`, which torch uses to stage a state dict, would also copy the mesh, and everything twice."""
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
    """The tensors in an optimizer's state and parameter groups, and a copy of everything else in them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        trees = dict(optimizer.state), optimizer.param_groups
        self.tensors = [leaf for leaf in tree_iter(trees) if isinstance(leaf, Tensor)]
        # The copy contains the same tensor objects. The caller saves and restores their values.
        not_copied = {id(tensor): tensor for tensor in (*self.tensors, *optimizer.state)}
        self._state: dict[Tensor, object]
        self._groups: list[dict[str, object]]
        self._state, self._groups = copy.deepcopy(trees, not_copied)

    def restore(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
