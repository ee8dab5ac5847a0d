"""Whose a card's memory is, by torch's own snapshot of its allocator."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
BUFFERS, ACTIVATIONS, BACKWARD = "FSDP and DDP buffers", "activations", "backward pass"
STATE_DICT, OTHER = "state dict", "other"

_Frames = tuple[tuple[str, str], ...]
"""Ends of files and functions in them."""

_BEFORE_OWNERS: _Frames = (("_fully_shard/_fsdp_collectives.py", ""), ("_fully_shard/_fsdp_common.py", "alloc_storage"))
"""Where FSDP2 makes what it fills by communicating. Its parameters are there while they are whole."""
_FSDP_AND_DDP: _Frames = (
    ("/torch/distributed/fsdp/", ""),
    ("/torch/nn/parallel/distributed.py", "_ddp_init_helper"),
    ("/torch/nn/parallel/distributed.py", "_pre_forward"),  # makes other buckets, once it has seen a backward
)
_OPTIMIZER: _Frames = (("/torch/optim/", ""),)
_MODULES: _Frames = (("/torch/nn/modules/module.py", "_call_impl"), ("/torch/nn/functional.py", ""))
_STATE_DICT: _Frames = (("/torch/distributed/checkpoint/", ""),)


def holders(device: int) -> dict[str, int]:
    """Bytes in use on a device by what holds them."""
    owners = _owners(device)
    held: Counter[str] = Counter()
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                held[_holder(block, owners)] += block["size"]
    return dict(held.most_common())


def _holder(block: dict[str, Any], owners: dict[int, str]) -> str:
    frames, owner = block.get("frames", []), owners.get(block["address"])
    if owner != GRADIENTS and _any_in(frames, _BEFORE_OWNERS):
        return BUFFERS
    if owner is not None:
        return owner
    if not frames:  # autograd's own thread
        return BACKWARD
    # the innermost frame tells: FSDP1 calls the module, and an optimizer may call the whole forward
    by_frames = {BUFFERS: _FSDP_AND_DDP, OPTIMIZER: _OPTIMIZER, ACTIVATIONS: _MODULES, STATE_DICT: _STATE_DICT}
    told = (holder for frame in frames for holder, where in by_frames.items() if _any_in([frame], where))
    return next(told, OTHER)


def _any_in(frames: list[dict[str, Any]], where: _Frames) -> bool:
    return any(file in frame["filename"] and function in frame["name"] for frame in frames for file, function in where)


def _owners(device: int) -> dict[int, str]:
    """By the address of its storage: what parameters, buffers and optimizers refer to."""
    owners: dict[int, str] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would ask lazy modules what they are
        if issubclass(kind, torch.Tensor) and isinstance(thing, torch.nn.Parameter):
            owners[_address(thing, device)] = PARAMETERS
            if thing.grad is not None:
                owners[_address(thing.grad, device)] = GRADIENTS
        elif issubclass(kind, torch.nn.Module):
            owners |= {_address(each, device): PARAMETERS for each in thing._buffers.values() if each is not None}
        elif issubclass(kind, torch.optim.Optimizer):
            owners |= {_address(each, device): OPTIMIZER for each in _tensors(dict(thing.state))}
    return owners


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _address(tensor: torch.Tensor, device: int) -> int:
    """Where its memory begins; 0 for what is not on the device."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = local.untyped_storage()
        return int(storage.data_ptr()) if storage.device == torch.device("cuda", device) else 0
    except (RuntimeError, NotImplementedError):  # a subclass without storage of its own
        return 0
