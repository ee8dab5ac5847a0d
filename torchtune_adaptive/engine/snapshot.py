"""Saves and restores what a step changes: random generators for a retry; models and optimizers, too, for a probe."""

from __future__ import annotations

import copy
import socket
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.engine.tensors import plain_tensors, wraps_tensors
from torchtune_adaptive.errors import UnrecoverableError
from torchtune_adaptive.formatting import format_bytes


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
    """Collective: restore parameters, gradients, buffers, optimizer state and random generators at the end. Gradients
    are not copied, so the code inside must not accumulate into existing gradients. Weights are copied only if a step of
    their optimizer may change them (see `_idles`); a checksum verifies that the others are unchanged."""
    idling = [*filter(_idles, optimizers)]
    trained = [each for model in models for each in model.parameters() if each.requires_grad]
    of_idling = [each for optimizer in idling for group in optimizer.param_groups for each in group["params"]]
    unchanged = {id(each): each for each in (of_idling if optimizers else trained)}
    with _keeping_weights(unchanged.values(), idling), _restoring(models, optimizers, trained, unchanged):
        yield


@contextmanager
def _keeping_weights(weights: Iterable[Tensor], idling: Sequence[Optimizer]) -> Iterator[None]:
    """Collective: let steps of these optimizers change no weight. Raise on all ranks if `weights` have changed."""
    sums = checksums_of(weights)
    hooks = [optimizer.register_step_pre_hook(_idle) for optimizer in idling]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    with _disable_current_modes():
        changed = from_all_ranks(checksums_of(weights) != sums)
    if any(changed):
        raise UnrecoverableError(
            f"a search has changed the weights on rank {changed.index(True)}, and cannot restore them: in forward and "
            "update, change weights only by steps of the optimizers"
        )


@contextmanager
def _restoring(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], weights: Sequence[Tensor], unchanged: Container[int]
) -> Iterator[None]:
    """Collective: restore everything, but no tensor whose id is in `unchanged`."""
    rng, states = RngState.capture(), [*map(_OptimizerState, optimizers)]
    gradients = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for model in models for module in model.modules()]
    contents = [
        *weights,
        *tree_iter([before for _, before in buffers]),
        *(each for state in states for each in state.tensors),
    ]
    copies = copies_on_host(
        {id(each): each for each in contents if each is not None and id(each) not in unchanged}.values()
    )
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for current, before in buffers:
            current.update(before)
        for state in states:
            state.restore()
        for tensor, parts in copies:
            # `plain_tensors` again, because FSDP's first pass moves shards that need padding to new storages
            for plain, copied in zip(plain_tensors(tensor), parts, strict=True):
                plain.detach().copy_(copied)
        rng.restore()


def _idles(optimizer: Optimizer) -> bool:
    """Return True if a step with a learning rate, gradients and state of 0 changes no bit of the weights."""
    # `capturable` divides by the learning rate, `maximize` adds 0 instead of -0; hooks of a compiled step may not run
    unusual = any(group.get(name) for group in optimizer.param_groups for name in ("capturable", "maximize"))
    compiled = hasattr(optimizer.step, "_torchdynamo_orig_callable")
    return type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and not unusual and not compiled


@torch.no_grad()
def _idle(optimizer: Optimizer, *_: object) -> None:
    """Let the next step change no weight, although it needs as much memory: set everything that it multiplies to 0."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].zero_() if isinstance(group["lr"], Tensor) else 0.0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for tensor in (*(each.grad for each in parameters), *tree_iter(dict(optimizer.state))):
        if isinstance(tensor, Tensor):
            tensor.zero_()


@_disable_current_modes()  # here and below: a full MemoryMeter would refuse the few bytes of sums and messages
def checksums_of(tensors: Iterable[Tensor]) -> list[float]:
    """Return the sum of the bits of each plain tensor, computed on its device without a copy."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    plain = [each.detach() for tensor in tensors for each in plain_tensors(tensor)]
    bits = [each.view(integers.get(each.element_size(), torch.int64)) for each in plain]
    return [each.sum(dtype=each.dtype).item() for each in bits]  # one by one, because devices may differ


@_disable_current_modes()
def copies_on_host(tensors: Collection[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Collective: return each tensor, together with copies on the host of the plain tensors of which it consists.
    Raises an error on all ranks if they do not fit."""
    copied_bytes = sum(plain.nbytes for tensor in tensors for plain in plain_tensors(tensor))
    machines = from_all_ranks((socket.gethostname(), copied_bytes, free_host_bytes()))
    for machine, _, free in machines:
        if (total := sum(each for name, each, _ in machines if name == machine)) > free:
            raise UnrecoverableError(
                f"a search copies what it cannot keep unchanged to the host: {format_bytes(total)} on {machine}, which "
                f"has {format_bytes(free)} free. Search before the first step, with SGD, Adam or AdamW of torch.optim, "
                "whose weights need no copy, or train without a search"
            )
    return [(tensor, [_to_host(plain) for plain in plain_tensors(tensor)]) for tensor in tensors]


def free_host_bytes() -> int:
    """Return the memory of this machine that can be allocated, without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


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
