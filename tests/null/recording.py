"""Record the calls of NCCL on the ranks of a test."""

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from gpu_rehearsal.device import set_card
from gpu_rehearsal.recording.calls import start_recording
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

DEVICES = 4


def compute_sizes_of_objects() -> None:
    """Let object collectives compute the sizes of objects on the host, because a null device computes nothing."""
    for name, function in [(name, each) for name, each in vars(dist).items() if "_object" in name and callable(each)]:
        setattr(dist, name, _with_sizes(function))
        setattr(dist.distributed_c10d, name, getattr(dist, name))


def _with_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return function(*args, **kwargs)

    return call


class _OnHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__gt__", "__radd__", "add", "cat", "gt", "max", "sum"):
            return func(*args, **kwargs or {})
        device = next(each for each in tree_iter(args) if isinstance(each, torch.Tensor)).device
        return func(*tree_map(lambda each: each.cpu() if isinstance(each, torch.Tensor) else each, args)).to(device)


def replace_computed_values() -> None:
    """Let every condition on a tensor be true, such as the one that a cache has room, and find the elements of masks on
    the host, because a null device computes neither."""
    _overrides.append(own := torch.library.Library("aten", "IMPL"))
    own.impl("_local_scalar_dense", lambda asked: asked.dtype is torch.bool or asked.cpu().item(), "CUDA")
    own.impl("nonzero", lambda asked: asked.cpu().nonzero().to(asked.device), "CUDA")


_overrides: list[torch.library.Library] = []  # an override ends with its Library


def record_on_rank(folder: str, backend: str, function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Collective: run a function in a process group over NCCL, and record its calls."""
    os.environ.update(NULL_CUDA_RECORD=folder)
    set_card(memory=80 * 2**30, devices=DEVICES)
    start_recording()
    compute_sizes_of_objects()
    replace_computed_values()
    dist.init_process_group(backend)
    with suppress(ModuleNotFoundError):  # these models need torchtune
        import_module("tests.distributed.models").use_gpu()
    name = type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__
    found = function(*args)
    torch.cuda.synchronize()
    return name, found
