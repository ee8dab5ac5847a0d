"""What torchtune, torchao and FSDP need so that a recipe can be set up on tensors without data, as rank 0 of many.

None of it changes what a step allocates. What does is in prediction/shims.py.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import _disable_current_modes
from torchao.dtypes.nf4tensor import NF4Tensor
from torchao.optim.subclass_8bit import OptimState8bit
from torchtune import training
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.training import _activation_offloading, activations

from torchtune_adaptive.comm.fsdp import computing_on, cutting_for_rank_0
from torchtune_adaptive.patching import replaced
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.parts.unpadded import kernels


@contextmanager
def rank_0_of(world_size: int) -> Iterator[None]:
    """A process group whose other ranks are imaginary."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        process_group.leave()


@contextmanager
def working_on_fakes() -> Iterator[None]:
    """While open, models can be built, sharded and filled without data."""
    with (
        replaced(
            (Llama3ScaledRoPE, "apply_scaling", _same_frequencies),
            (training._distributed, "distribute_tensor", own_shard),
            (torch.utils, "swap_tensors", _swap_fakes),
            # torchtune counts the layers of a process, of which it checkpoints every n-th: a new one begins here
            (activations.checkpoint_wrapper, "_count", 0),
        ),
        quantizing_at_once(),
        cutting_for_rank_0(),
        without_garbage_collection(),
        warnings.catch_warnings(),
    ):
        # torch says once that norms of bf16 weights are not fused, as on a GPU; torchao compares addresses of fakes
        for message in ("Mismatch dtype between input and weight", "Accessing the data pointer of FakeTensor"):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def joined_as_on_a_gpu() -> Iterator[None]:
    """While open, samples one after another go to the kernel of a GPU, which knows what it does with fakes."""
    with replaced((kernels, "is_on_gpu", _yes)):
        yield


@contextmanager
def apart_from_host(device: torch.device) -> Iterator[None]:
    """While open, FSDP computes on `device` and keeps what it offloads on the CPU, which otherwise is both."""
    with computing_on(device), replaced((training.precision, "verify_bf16_support", _yes)):
        yield


@contextmanager
def offloading_activations() -> Iterator[None]:
    """While open, torchtune's own code offloads the activations of fakes: to nowhere, on streams of the CPU."""
    with replaced(
        (_activation_offloading, "torch", _TorchOfOffloading()),
        # about the memory of this host, which has no part in it
        (_activation_offloading, "warn", nothing),
        # the caching allocator counts what another stream still uses as freed
        (Tensor, "record_stream", nothing),
    ):
        yield


class _TorchOfOffloading:
    """torch, but for the few names that need a GPU."""

    cuda = SimpleNamespace(default_stream=torch.cpu.current_stream, Stream=torch.cpu.Stream, stream=torch.cpu.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, activation: Tensor, **_: object) -> _Offloaded:
        return _Offloaded(activation)


class _Offloaded:
    """What is left of an activation while it is on the host."""

    def __init__(self, activation: Tensor) -> None:
        self._device = activation.device
        with _disable_current_modes():
            self._like = torch.empty_like(activation, device="cpu")

    def copy_(self, *_: object, **__: object) -> None:
        pass

    def to(self, *_: object, **__: object) -> Tensor:
        """The activation on the device again."""
        return torch.empty_like(self._like, device=self._device)


def nothing(*_: object, **__: object) -> None:
    pass


def _yes(*_: object, **__: object) -> bool:
    return True


@contextmanager
def quantizing_at_once() -> Iterator[None]:
    """While open, weights in NF4 are not looked up a million at a time: without data only their number counts."""
    with replaced((NF4Tensor, "convert_to_norm_float_weight", staticmethod(_pairs_of_weights))):
        yield


def fake_tables(tensors: Iterable[Tensor], fakes: FakeTensorMode) -> None:
    """Makes fakes of what has data inside of quantized tensors, their table of values: Dynamo mixes it with none."""
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # `to_local` gives a copy
        for quantized in (local, local._base):  # a shard is a view of what it was made from
            if not isinstance(quantized, NF4Tensor | OptimState8bit):
                continue
            for name in quantized.__tensor_flatten__()[0]:
                inner = getattr(quantized, name)
                if not isinstance(inner, FakeTensor):
                    setattr(quantized, name, fakes.from_tensor(inner))


def _pairs_of_weights(weight: Tensor, *_: object) -> Tensor:
    return torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)


def own_shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """What rank 0 keeps of a tensor. To distribute it would make the shards of all other ranks too."""
    shards = math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
    shard = whole.new_empty((-(-len(whole) // shards), *whole.shape[1:]))
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


_swap_tensors = torch.utils.swap_tensors


def _swap_fakes(first: Tensor, second: Tensor) -> None:
    """Tensors that something refers to weakly cannot be swapped, and a cache of the fake mode does."""
    if (fakes := detect_fake_mode()) is not None:
        fakes.fake_tensor_converter.tensor_memo.clear()
    _swap_tensors(first, second)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collections come at any time, and would free the same blocks at other points of each recording."""
    enabled = gc.isenabled()
    gc.disable()
    frozen_before = gc.get_freeze_count()
    gc.freeze()  # what there is by now need not be looked through before each recording
    try:
        yield
    finally:
        if not frozen_before:  # or it is not ours to look through again
            gc.unfreeze()
        if enabled:
            gc.enable()


def _same_frequencies(_: object, frequencies: torch.Tensor, *__: object) -> torch.Tensor:
    """Frequencies as they are, in place of scaled ones: scaling branches on values, and there are none."""
    return frequencies.clone()
