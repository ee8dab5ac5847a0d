"""A model on tensors without data, over the real groups: what a pass of it would communicate, and nobody hears."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from torchtune_adaptive.patching import replaced

Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True)
class Rehearsal(Generic[Sample]):
    """How a microbatch is run without data: by the same code as with data, or its collectives would be others."""

    build: Callable[[], nn.Module]
    """The model once more: parallelized and sharded over the same meshes, without weights. It runs under a fake mode,
    in which every tensor is one without data, and must not communicate (`parallelize_module(src_data_rank=None)`)."""
    batch: Callable[[Sequence[Sample]], Any]
    """What a microbatch is for the model, on the host. It runs outside of the fake mode, so it may look at the data."""
    run: Callable[[nn.Module, Any], object]
    """Forward and backward of such a model on such a batch, whose tensors have no data by then."""
    key_of: Callable[[Sequence[Sample]], Hashable]
    """All of a microbatch that its collectives depend on: its padded shape, and whether it has any label, say."""


class Shadow(Generic[Sample]):
    """Runs microbatches without data. The model is built when the first of them is."""

    def __init__(
        self,
        rehearsal: Rehearsal[Sample],
        when_built: Callable[[nn.Module], object],
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._rehearsal = rehearsal
        self._around = around
        self._when_built = when_built
        self._built: tuple[FakeTensorMode, nn.Module] | None = None
        self._trained: list[bool] = []

    @property
    def is_built(self) -> bool:
        return self._built is not None

    def train(self, trained: list[bool]) -> None:
        """Freezes and unfreezes weights as the model's are, of which these are the flags."""
        self._trained = trained

    def run(self, microbatch: Sequence[Sample]) -> None:
        """A forward and backward of this microbatch. If it raises, the next one begins with a new model."""
        # Taken out until the pass is over: one that raises leaves FSDP in the middle of a forward or backward, and what
        # the next would communicate from there is not what a whole pass does.
        built, self._built = self._built or self._build(), None
        fakes, model = built
        for parameter, trained in zip(model.parameters(), self._trained, strict=True):
            parameter.requires_grad_(trained)
        batch = self._rehearsal.batch(microbatch)
        # Not under the modes of others: what a MemoryMeter counts here, nobody allocates.
        with _disable_current_modes(), self._around(), fakes:
            self._rehearsal.run(model, tree_map_only(Tensor, fakes.from_tensor, batch))
        for parameter in model.parameters():
            parameter.grad = None
        self._built = built

    def _build(self) -> tuple[FakeTensorMode, nn.Module]:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes(), _real_meshes(), fakes, torch.random.fork_rng(devices=[]):
            model = self._rehearsal.build()
        self._when_built(model)
        return fakes, model


@contextmanager
def _real_meshes() -> Iterator[None]:
    """While open, meshes are made of real numbers under a fake mode too: programs branch on them."""
    names = [name for name in ("__getitem__", "_concatenate") if hasattr(DeviceMesh, name)]
    with replaced(*((DeviceMesh, name, _without_fakes(vars(DeviceMesh)[name])) for name in names)):
        yield


def _without_fakes(method: Any) -> Any:
    function = method.__func__ if isinstance(method, staticmethod) else method

    @wraps(function)
    def really(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return staticmethod(really) if isinstance(method, staticmethod) else really
