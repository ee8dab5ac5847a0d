"""An optimizer's state, whole on rank 0 to be saved, and shared out again.

torch does so, but not with what torchao keeps in few bits: such a tensor is cut into blocks, which need not end where a
shard does, so its shards are saved as they are. As many ranks go on with the same bits, others with the same values.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torchtune import training
from torchtune.training.memory import OptimizerInBackwardWrapper

from torchtune_adaptive.engine.memory import wraps_tensors
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.engine.snapshot import copied_to_host

StateDict: TypeAlias = dict[str, Any]
StateKey: TypeAlias = tuple[str, str]
"""The name of a parameter, and what of it is kept."""

AnyOptimizer: TypeAlias = Optimizer | OptimizerInBackwardWrapper
"""What torchtune's checkpointing takes as the optimizer."""

Shard: TypeAlias = tuple[tuple[int, ...], Tensor]
"""Where it begins in each dimension of the whole, and what it holds."""

SHARDS = "adaptive_shards"
"""Key of a list of shards, in the place of a tensor."""


def gather_state(model: nn.Module, optimizer: AnyOptimizer, device: torch.device) -> StateDict:
    """Collective: the whole state, on rank 0; of an optimizer for each parameter, by its name."""
    if isinstance(optimizer, OptimizerInBackwardWrapper):
        return {name: _gathered(model, one_of_many, device) for name, one_of_many in optimizer.optim_map.items()}
    return _gathered(model, optimizer, device)


def load_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], device: torch.device) -> None:
    """Collective: shares a whole state out into the optimizer."""
    plain, in_shards = _without_shards(state)
    training.load_from_full_optimizer_state_dict(model, optimizer, plain, device)
    loaded = _tensors(get_optimizer_state_dict(model, optimizer)) if in_shards else {}
    for entry, shards in in_shards.items():
        _fill(loaded[entry], shards)


def _gathered(model: nn.Module, optimizer: Optimizer, device: torch.device) -> StateDict:
    first = dist.get_rank() == 0
    states: Any = get_optimizer_state_dict(model, optimizer)
    whole: StateDict = {**states, "state": {name: dict(kept) for name, kept in states["state"].items()}}
    tensors = _tensors(states)
    # a rank whose shard is too small for blocks keeps plain numbers of what others keep in few bits
    mine = [
        key for key, value in tensors.items() if isinstance(value, DTensor) and wraps_tensors(type(value.to_local()))
    ]
    quantized = set().union(*from_all_ranks(mine)) if dist.get_world_size() > 1 else set()
    for (name, key), value in tensors.items():
        if (name, key) in quantized:
            whole["state"][name][key] = {SHARDS: _shards_on_rank_0(value)}
            continue
        gathered: Tensor = value.to(device).full_tensor() if isinstance(value, DTensor) else value  # type: ignore[attr-defined]
        whole["state"][name][key] = gathered.cpu() if first else None
    return whole if first else {}


def _tensors(states: Mapping[str, Any]) -> dict[StateKey, Any]:
    """The optimizer's own tensors, by names that do not depend on how the model is wrapped."""
    return {
        (name, key): value
        for name, kept in states["state"].items()
        for key, value in kept.items()
        if isinstance(value, Tensor)
    }


def _shards_on_rank_0(tensor: DTensor) -> list[Shard]:
    """Collective: on rank 0 each shard once, whoever else has it; nothing elsewhere."""
    local, coordinate = tensor.to_local(), tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    placed = zip(coordinate, tensor.placements, strict=True)
    is_first_replica = not any(at for at, placement in placed if placement.is_replicate())
    mine: tuple[tuple[int, ...], bytes] | None = None
    if is_first_replica and local.numel():
        file = io.BytesIO()  # pickle alone has no word for numbers of 8 bits
        torch.save(copied_to_host(local), file)
        mine = _begin(tensor), file.getvalue()
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    # ranks of another mesh than the tensor's, as under tensor parallelism, have the same shards
    shards = dict(sorted(shard for shard in gathered or [] if shard is not None))
    return [(begin, torch.load(io.BytesIO(shard), weights_only=True)) for begin, shard in shards.items()]


def _begin(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def _without_shards(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[StateKey, list[Shard]]]:
    """A state without what is in shards, or would have to be cut into some; and that."""
    in_shards: dict[StateKey, list[Shard]] = {}
    plain: dict[str, StateDict] = {}
    if not isinstance(state.get("state"), Mapping):
        return state, in_shards  # refused by its name where it is loaded
    for name, entries in state["state"].items():
        plain[name] = {}
        for key, value in entries.items():
            if isinstance(value, Mapping) and SHARDS in value:
                in_shards[name, key] = value[SHARDS]
            elif wraps_tensors(type(value)):
                in_shards[name, key] = [(_begin(value), value)]
            else:
                plain[name][key] = value
    return {**state, "state": plain}, in_shards


@torch.no_grad()
def _fill(target: Tensor, shards: Sequence[Shard]) -> None:
    """This rank's part of a tensor, which is there, from all shards of it."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if not local.numel():
        return
    mine = _begin(target)
    for begin, shard in shards:
        if tuple(begin) == mine and shard.shape == local.shape:
            local.copy_(shard)
            return
    whole = torch.empty(target.shape, device=local.device)
    for begin, shard in shards:
        plain: Tensor = shard.dequantize() if wraps_tensors(type(shard)) else shard
        whole[_box(begin, shard)] = plain.to(whole)
    local.copy_(whole[_box(mine, local)])


def _box(begin: Sequence[int], part: Tensor) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(begin, part.shape, strict=True))
