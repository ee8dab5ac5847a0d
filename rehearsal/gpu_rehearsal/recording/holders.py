"""Divide the memory of a GPU by holder."""

from __future__ import annotations

import gc
from collections import Counter

import torch
from torch.utils._pytree import tree_leaves

from gpu_rehearsal.report.record import GRADIENTS, OPTIMIZER, OTHER, PARAMETERS


def memory_by_holder(device: int) -> dict[str, int]:
    """Return the bytes of parameters, gradients, optimizer states and other tensors that are allocated on a device."""
    owners = _owners()
    held: Counter[str] = Counter()
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                held[owners.get(block["address"], OTHER)] += block["size"]
    return dict(held.most_common())


def _owners() -> dict[int, str]:
    """Return the purpose of each storage by address: of parameters, buffers, gradients and optimizer states."""
    owners: dict[int, str] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance reads __class__, which would import lazy modules
        if issubclass(kind, torch.Tensor) and isinstance(thing, torch.nn.Parameter):
            owners[_address(thing)] = PARAMETERS
            if thing.grad is not None:
                owners[_address(thing.grad)] = GRADIENTS
        elif issubclass(kind, torch.nn.Module):
            owners |= {_address(each): PARAMETERS for each in thing._buffers.values() if each is not None}
        elif issubclass(kind, torch.optim.Optimizer):
            state = tree_leaves(dict(thing.state))
            owners |= {_address(each): OPTIMIZER for each in state if isinstance(each, torch.Tensor)}
    return owners


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it is not on a GPU."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = local.untyped_storage()
        return int(storage.data_ptr()) if storage.device.type == "cuda" else 0
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return 0
