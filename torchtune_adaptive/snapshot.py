"""Everything that a training step changes, copied to the host and put back bit by bit.

Copying needs no assumption about the optimizer: what it does with gradients of zero, with a learning rate of zero or
with -0.0 does not matter. The host needs room for this rank's trainable parameters, and for the optimizer's state
where there is some already: less than a checkpoint takes.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchtune_adaptive.memory import RngState, plain_tensors


@contextmanager
def leaving_no_trace(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Puts parameters, buffers, optimizer state and random generators back; gradients were None before."""
    rng = RngState.capture()
    buffers = [
        (module, name, buffer)
        for model in models
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    states = [_OptimizerState(optimizer) for optimizer in optimizers]
    kept = [*parameters, *(buffer for _, _, buffer in buffers), *(t for state in states for t in state.tensors)]
    contents = _Contents(kept)
    try:
        yield
    finally:
        contents.put_back()
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for state in states:
            state.put_back()
        for model in models:
            model.zero_grad(set_to_none=True)
        rng.restore()


class _Contents:
    """The bytes of tensors, DTensors and quantized ones among them. Tensors that share storage are copied once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {s.data_ptr(): s for t in tensors for p in plain_tensors(t) if (s := p.untyped_storage()).nbytes()}
        self._copies = [(storage, _to_host(storage)) for storage in storages.values()]

    def put_back(self) -> None:
        for storage, copied in self._copies:
            storage.copy_(copied)


def _to_host(storage: UntypedStorage) -> UntypedStorage:
    # A storage without a tensor: a meter that stands in for device memory must not count the copy.
    return UntypedStorage(storage.nbytes()).copy_(storage)


class _OptimizerState:
    """State and options of an optimizer: which tensors they consist of, and all that is no tensor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors = [
            leaf
            for tree in (dict(optimizer.state), optimizer.param_groups)
            for leaf in tree_iter(tree)
            if isinstance(leaf, Tensor)
        ]
        same = {id(tensor): tensor for tensor in (*self.tensors, *optimizer.state)}
        # Containers and numbers are copied; tensors stay the same objects, whose contents come back by themselves.
        self._state: dict[Any, Any] = copy.deepcopy(dict(optimizer.state), dict(same))
        self._groups: list[dict[str, Any]] = copy.deepcopy(optimizer.param_groups, dict(same))

    def put_back(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
