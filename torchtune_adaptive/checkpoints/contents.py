"""Gathers the contents of a checkpoint on rank 0 and loads them back: weights, optimizer state, random generators.

torch cannot gather the quantized optimizer state of torchao: such a tensor consists of blocks, and a shard may end
inside a block. Its shards are therefore saved as they are. The same number of ranks loads the same bits. Another number
of ranks loads dequantized values.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import peft
from torchtune.training._distributed import _gather_nf4_tensor
from torchtune.training.memory import OptimizerInBackwardWrapper

from torchtune_adaptive.checkpoints.store import RANDOM_FILE, State
from torchtune_adaptive.config.keys import LoraSettings
from torchtune_adaptive.engine.memory import resident_tensors
from torchtune_adaptive.engine.ranks import from_all_ranks, full_tensor
from torchtune_adaptive.engine.snapshot import RngState, copied_to_host
from torchtune_adaptive.engine.tensors import plain_tensors, wraps_tensors
from torchtune_adaptive.formatting import count_of

ShardedWeights: TypeAlias = dict[str, dict[str, Tensor]]
"""For each key of torchtune's checkpointer, this rank's weights by name."""
StateKey: TypeAlias = tuple[str, str]
"""The name of a parameter, and a key of its optimizer state."""
AnyOptimizer: TypeAlias = Optimizer | OptimizerInBackwardWrapper
"""Optimizers that torchtune can save."""
Shard: TypeAlias = tuple[tuple[int, ...], Tensor]
"""A local tensor, after its offset in each dimension of the full tensor."""
RandomState: TypeAlias = dict[str, Any]

SHARDS = "adaptive_shards"
"""Key under which a checkpoint has a list of shards instead of a tensor."""


@dataclass(frozen=True)
class Contents:
    """The weights that a recipe saves. With LoRA, these are the adapter and, unless `adapter_only`, the model with the
    adapter merged into it."""

    recipe: str = "full"
    lora: LoraSettings | None = None
    adapter_only: bool = False
    parts: tuple[tuple[str, str], ...] = (("", training.MODEL_KEY),)
    """The name of each trained submodule, and its key in torchtune's checkpointer."""

    def sharded(self, model: nn.Module) -> ShardedWeights:
        """Return this rank's part of the weights to save."""
        weights_of = {key: model.get_submodule(name).state_dict() for name, key in self.parts}
        if not self.adapter_only:
            return weights_of
        return {key: peft.get_adapter_state_dict(weights, None) for key, weights in weights_of.items()}

    def size(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> int:
        """Return the bytes of a checkpoint, estimated from the tensors of this rank."""
        weights = nn.ParameterList(each for each in model.parameters() if each.requires_grad or not self.adapter_only)
        return sum(map(_full_bytes, resident_tensors(weights, optimizers)))

    def for_checkpointer(self, gathered: State, model: nn.Module) -> State:
        """On rank 0: convert gathered weights to the state that torchtune's checkpointer saves."""
        if (lora := self.lora) is None:
            return gathered
        modules = list(lora.lora_attn_modules), lora.apply_lora_to_mlp, lora.apply_lora_to_output
        adapter_config = {
            "r": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": peft.get_lora_module_names(*modules),
            "peft_type": "LORA",
        }
        state: State = {training.ADAPTER_CONFIG: adapter_config}
        if self.adapter_only:
            return {**state, training.ADAPTER_KEY: gathered[training.MODEL_KEY]}
        # Copy weights that are on the host: they may be the model's own tensors, and torchtune merges in place.
        on_host = next(model.parameters()).is_cpu
        weights = {name: weight.clone() if on_host else weight for name, weight in gathered[training.MODEL_KEY].items()}
        state[training.ADAPTER_KEY] = peft.get_adapter_state_dict(weights)
        state[training.MODEL_KEY] = peft.get_merged_lora_ckpt(weights, rank=lora.lora_rank, alpha=lora.lora_alpha)
        return state


def gather_weights(sharded: ShardedWeights, device: torch.device) -> State:
    """Collective: return the full weights on the host of rank 0. Quantized weights are dequantized. torchtune has a
    barrier after each weight. It is not needed, because a gather ends only after all ranks have sent."""
    is_rank_0, full = dist.get_rank() == 0, {key: dict[str, Tensor]() for key in sharded}
    for key, name, weight in ((key, *item) for key, weights in sharded.items() for item in weights.items()):
        gathered = weight.to(device) if weight.is_cpu else weight
        if isinstance(gathered, DTensor):
            quantized = isinstance(gathered.to_local(), NF4Tensor)
            gathered = _gather_nf4_tensor(gathered) if quantized else full_tensor(gathered)
        if isinstance(gathered, NF4Tensor):
            gathered = gathered.to(gathered.dtype)
        if is_rank_0:
            full[key][name] = gathered.cpu()
        elif gathered.is_cuda:
            torch.cuda.current_stream().synchronize()
    return full


def _full_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # the size of an NF4Tensor is that of the weights that it stands for, which are saved
    parts = [local] if isinstance(local, NF4Tensor) else plain_tensors(local)
    return sum(each.nbytes for each in parts) * tensor.numel() // max(1, local.numel())


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Return True if the trained weights of this rank contain no NaN or infinity."""
    # a sum is NaN or infinite if one of its terms is, and unlike `isfinite` it needs no memory
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    shards = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained)
    sums = [shard.sum(dtype=torch.float32) for shard in shards]
    return not sums or bool(torch.stack(sums).isfinite().all())


def gather_optimizer_state(model: nn.Module, optimizer: AnyOptimizer, device: torch.device) -> State:
    """Collective: return the full optimizer state on rank 0, and {} on other ranks. If each parameter has its own
    optimizer, the result has one state per name of a parameter."""
    if isinstance(optimizer, OptimizerInBackwardWrapper):
        return {name: _gather_state(model, each, device) for name, each in optimizer.optim_map.items()}
    return _gather_state(model, optimizer, device)


def _gather_state(model: nn.Module, optimizer: Optimizer, device: torch.device) -> State:
    is_rank_0 = dist.get_rank() == 0
    states: Any = get_optimizer_state_dict(model, optimizer)
    full: State = {**states, "state": {name: dict(entries) for name, entries in states["state"].items()}}
    tensors = _tensors(states)
    # Ask all ranks: where a shard is smaller than a block, its rank has a plain tensor instead of a quantized one.
    quantized_here = [
        key for key, value in tensors.items() if isinstance(value, DTensor) and wraps_tensors(type(value.to_local()))
    ]
    quantized = set().union(*from_all_ranks(quantized_here)) if dist.get_world_size() > 1 else set()
    for (name, key), value in tensors.items():
        if (name, key) in quantized:
            full["state"][name][key] = {SHARDS: _shards_on_rank_0(value)}
            continue
        gathered = full_tensor(cast(DTensor, value.to(device))) if isinstance(value, DTensor) else value
        full["state"][name][key] = gathered.cpu() if is_rank_0 else None
    return full if is_rank_0 else {}


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], device: torch.device
) -> None:
    """Collective: load a full optimizer state; every rank keeps its shards."""
    plain, in_shards = _without_shards(state)
    training.load_from_full_optimizer_state_dict(model, optimizer, plain, device)
    loaded = _tensors(get_optimizer_state_dict(model, optimizer)) if in_shards else {}
    for entry, shards in in_shards.items():
        _copy_own_part(loaded[entry], shards)


def _tensors(states: Mapping[str, Any]) -> dict[StateKey, Any]:
    """Return the tensors of an optimizer's state, by parameter name and key."""
    return {
        (name, key): value
        for name, entries in states["state"].items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def _shards_on_rank_0(tensor: DTensor) -> list[Shard]:
    """Collective: return every distinct shard once on rank 0, and an empty list on other ranks."""
    local = tensor.to_local()
    own_shard: tuple[tuple[int, ...], bytes] | None = None
    if local.numel():
        file = io.BytesIO()  # `torch.save`, because pickle alone does not support 8-bit types
        torch.save(copied_to_host(local), file)
        own_shard = _offset(tensor), file.getvalue()
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own_shard, gathered)
    # a dictionary removes duplicates, which replicas have, and under tensor parallelism ranks outside the tensor's mesh
    shards = dict(sorted(shard for shard in gathered or [] if shard is not None))
    return [(offset, torch.load(io.BytesIO(shard), weights_only=True)) for offset, shard in shards.items()]


def _offset(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def _without_shards(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[StateKey, list[Shard]]]:
    """Split an optimizer state into the part that torchtune can load, and the quantized tensors as shards."""
    in_shards: dict[StateKey, list[Shard]] = {}
    plain: dict[str, State] = {}
    if not isinstance(state.get("state"), Mapping):
        return state, in_shards  # torchtune raises an error that names the missing key
    for name, entries in state["state"].items():
        plain[name] = {}
        for key, value in entries.items():
            if isinstance(value, Mapping) and SHARDS in value:
                in_shards[name, key] = value[SHARDS]
            elif wraps_tensors(type(value)):
                in_shards[name, key] = [(_offset(value), value)]
            else:
                plain[name][key] = value
    return {**state, "state": plain}, in_shards


@torch.no_grad()
def _copy_own_part(target: Tensor, shards: Sequence[Shard]) -> None:
    """Copy this rank's part of a tensor from the saved shards, whose boundaries may differ."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if not local.numel():
        return
    own_offset = _offset(target)
    for offset, shard in shards:
        if tuple(offset) == own_offset and shard.shape == local.shape:
            local.copy_(shard)
            return
    full = torch.empty(target.shape, device=local.device)
    for offset, shard in shards:
        plain: Tensor = shard.dequantize() if wraps_tensors(type(shard)) else shard
        full[_slices(offset, shard)] = plain.to(full)
    local.copy_(full[_slices(own_offset, local)])


def _slices(offset: Sequence[int], part: Tensor) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))


def capture_random_state() -> RandomState:
    """Return the state of this rank's generators: torch, CUDA, Python and NumPy."""
    torch_state = RngState.capture()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch_state.cpu,
        "cuda": torch_state.cuda,
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, [int(key) for key in keys], *rest]),
    }


def restore_random_state(folder: Path) -> str | None:
    """Restore this rank's generators from a checkpoint. If that is not possible, return the reason."""
    states = torch.load(folder / RANDOM_FILE, weights_only=True)
    if len(states) != dist.get_world_size():
        return f"the checkpoint has the random state of {count_of(len(states), 'rank')}"
    state: RandomState = states[dist.get_rank()]
    RngState(cpu=state["torch"], cuda=state["cuda"] if torch.cuda.is_initialized() else None).restore()
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    return None
