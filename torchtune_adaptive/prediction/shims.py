"""Where fake tensors on a CPU would not do what a GPU does: each difference that changes what is allocated.

Sharding propagation makes fakes of its own, but only for operations that it has not met before: the step that comes
before the traced ones meets them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional
from torch.nn.attention import varlen as varlen  # which makes its operations known
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchtune_adaptive.errors import PredictionError, Remedy
from torchtune_adaptive.memory.device import wraps_tensors
from torchtune_adaptive.patching import replaced
from torchtune_adaptive.prediction.allocator import rounded_up

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten
PRIVATE = ("_current_autograd_node", "_storage_Use_Count")
"""What this needs of `torch._C`, besides what it replaces."""
DEVICE_OF = torch.ops.prim.device.default

META = torch.device("meta")
HOST = torch.device("cpu")
UPLOAD = torch.device("cpu", 0)
"""Stands for the GPU where a program copies from the host: to torch another device than `cpu`, which is the host."""


class DeviceStandIn(TorchDispatchMode):
    """Between a program and fake tensors: the fakes stand for the device, real tensors for the host.

    What works on real tensors alone runs for real, since a program may branch on it. What is read from the device is 1.
    Copies to `UPLOAD` become fakes. Where the engine of autograd adds gradients in place, this does too: under any
    dispatch mode torch itself does not.

    With `offloads`, large tensors live on the host too, where they have no data either: fakes on `UPLOAD` are the
    device's then, fakes on `HOST` the host's, and what makes those is hidden from the modes around this one.
    """

    def __init__(self, *, host_is_device: bool, offloads: bool = False) -> None:
        super().__init__()
        self._on_host: Callable[[], AbstractContextManager[object]] = (
            unset_fake_temporarily if host_is_device else no_dispatch
        )
        self._offloads = offloads
        self._unshared: tuple[int, int, int] | None = None
        self._calibrating = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: without it torch.compile silently leaves eager whatever runs under a mode."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):
            return NotImplemented
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than anything is computed
        kwargs = kwargs or {}
        if func is aten.add.Tensor and not torch.is_grad_enabled() and self._adds_in_place(*args):
            return args[0]
        tensors = _tensors_of(args, kwargs)
        device = kwargs.get("device")
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if _stays_on_meta(tensors, device):
                with no_dispatch():
                    return func(*args, **kwargs)
            if tensors and not tensors[0].is_meta:
                return self._from_real(func, tensors, args, kwargs)
        elif func is aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        elif self._offloads and _makes_host_memory(tensors, device):
            if func is aten.is_pinned.default:
                return True  # fakes cannot be pinned, and it does not matter
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _from_real(self, func: OpOverload, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") == UPLOAD:
            dtype = kwargs.get("dtype") or tensors[0].dtype
            return torch.empty(tensors[0].shape, dtype=dtype, device=UPLOAD if self._offloads else HOST)
        with self._on_host():
            return func(*args, **kwargs)

    def _adds_in_place(self, total: Any, addend: object) -> bool:
        """Whether this is autograd adding to a gradient of which it is the only owner."""
        if torch._C._current_autograd_node() is None or not isinstance(addend, Tensor):
            return False
        storage = torch._C._storage_Use_Count(total.untyped_storage()._cdata)
        owners = (sys.getrefcount(total), total._use_count(), storage)
        if self._calibrating:
            self._unshared = owners
        alike = total.shape == addend.shape and total.dtype == addend.dtype and total.is_contiguous()
        return self._unshared is not None and alike and all(map(int.__le__, owners, self._unshared))

    def calibrate(self) -> None:
        """Notes how many owners a gradient seems to have here that has only one. Call it while this is active."""
        if missing := [name for name in PRIVATE if not hasattr(torch._C, name)]:
            raise _unknown(f"torch._C has no {missing[0]}")
        self._calibrating = True
        try:
            leaf = torch.empty(2, requires_grad=True)
            twice = leaf * 2
            (twice.sin() + twice.cos()).sum().backward()
        finally:
            self._calibrating = False
        if self._unshared is None:
            raise _unknown("autograd adds gradients differently")


def _unknown(why: str) -> PredictionError:
    return PredictionError(f"predictions do not support torch {torch.__version__} ({why})", Remedy.MEASURE)


def _tensors_of(args: tuple[object, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensor arguments of an operation, which are never nested deeper: a general search took a tenth of the time."""
    tensors = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, list | tuple):
            tensors += [each for each in argument if isinstance(each, Tensor)]
    return tensors


def _stays_on_meta(tensors: list[Tensor], device: torch.device | None) -> bool:
    """What is on meta has no data as it is; and to cut it into a thousand shards takes seconds with fakes."""
    if device is not None:
        return device == META
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _makes_host_memory(tensors: list[Tensor], device: torch.device | None) -> bool:
    """Where the result of an operation on fakes is."""
    if device is not None:
        return device == HOST
    return all(tensor.fake_device == HOST for tensor in tensors if isinstance(tensor, FakeTensor))


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """While open, torch chooses the kernels that it would choose for tensors on a GPU."""
    foreach_devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    with replaced(
        (functional, "scaled_dot_product_attention", _attention),
        (optimizer, "_get_foreach_kernels_supported_devices", lambda: foreach_devices),
        (optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor]),
        (_foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, FakeTensor]),
    ):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What a GPU takes: the flash kernel where there is no mask, else the memory-efficient one."""
    if attn_mask is None and query.dtype != torch.float32:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    efficient = aten._scaled_dot_product_efficient_attention
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    with_logsumexp = torch.is_grad_enabled()
    return efficient(query, key, value, bias, with_logsumexp, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernel takes it: added to the scores."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:3], key.shape[2])


def flash_backward_bytes(gradient: Tensor, query: Tensor, *_: object, **__: object) -> int:
    """FlashAttention 2 adds up the gradient of the queries in fp32, in tiles of 128 tokens, beside one number a row."""
    rows, heads, tokens, width = query.shape
    tile = 32 if width <= 128 else 64
    return 4 * rows * heads * rounded_up(tokens, 128) * (rounded_up(width, tile) + 1)


def joined_flash_backward_bytes(gradient: Tensor, *sides_and_more: Any) -> int:
    """Bytes for samples one after another: room for 128 tokens more of each, since they share no tile."""
    ends: Tensor = sides_and_more[5]
    tokens, heads, width = gradient.shape
    tile = 32 if width <= 128 else 64
    return 4 * (tokens + 128 * (len(ends) - 1)) * heads * (rounded_up(width, tile) + 1)


CUDA_WORKSPACES: dict[OpOverload, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward_bytes,
    torch.ops.torch_attn._varlen_attn_backward.default: joined_flash_backward_bytes,
}
