"""What goes into a checkpoint: gathered from all ranks on rank 0, in torchtune's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.modules import peft

from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.tune.start.settings import LoraSettings

State = dict[str, Any]


class Contents(Protocol):
    """The weights that a recipe saves."""

    recipe: str
    adapter_only: bool
    """Whether only the adapter is saved, without the weights of the whole model."""

    def weights(self, model: nn.Module, device: torch.device) -> State:
        """Collective: under torchtune's keys, on rank 0."""


def is_lora(recipe: str) -> bool:
    """Whether a recipe trains adapters: a checkpoint of one is no place to go on from for another."""
    return recipe in ("lora", "lora_dpo")


@dataclass(frozen=True)
class FullContents:
    """A recipe that trains the whole model."""

    recipe: str = "full"
    adapter_only: bool = False

    def weights(self, model: nn.Module, device: torch.device) -> State:
        return {training.MODEL_KEY: training.gather_cpu_state_dict(model, dist.get_rank() == 0, device=device)}


@dataclass(frozen=True)
class LoraContents:
    """LoRA: the adapter, and the model with the adapter merged into it unless only the adapter is wanted."""

    lora: LoraSettings
    adapter_only: bool
    recipe: str = "lora"

    def weights(self, model: nn.Module, device: torch.device) -> State:
        first = dist.get_rank() == 0
        gathered = training.gather_cpu_state_dict(model, first, device=device, adapter_weights_only=self.adapter_only)
        if not first:
            return {}
        state: State = {training.ADAPTER_CONFIG: self._adapter_config()}
        if self.adapter_only:
            return {**state, training.ADAPTER_KEY: gathered}
        # What nothing had to be gathered for is the model's own, and torchtune merges in place.
        own = _copies_of_what_is_shared(gathered, model)
        state[training.ADAPTER_KEY] = peft.get_adapter_state_dict(own)
        state[training.MODEL_KEY] = peft.get_merged_lora_ckpt(own, rank=self.lora.lora_rank, alpha=self.lora.lora_alpha)
        return state

    def _adapter_config(self) -> State:
        """What PEFT wants to know to load the adapter."""
        lora = self.lora
        modules = list(lora.lora_attn_modules), lora.apply_lora_to_mlp, lora.apply_lora_to_output
        return {
            "r": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": peft.get_lora_module_names(*modules),
            "peft_type": "LORA",
        }


def weights_are_finite(model: nn.Module) -> bool:
    """Collective: whether no trained weight, on any rank, is NaN or infinite."""
    told = [True] * dist.get_world_size()
    dist.all_gather_object(told, _are_finite(each for each in model.parameters() if each.requires_grad))
    return all(told)


@torch.no_grad()
def _are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    # A sum is NaN or infinite where any term is, and needs no memory to say so, as `isfinite` would.
    shards = (each.to_local() if isinstance(each, DTensor) else each for each in parameters)
    sums = [shard.sum(dtype=torch.float32) for shard in shards]
    return not sums or bool(torch.stack(sums).isfinite().all())


def _copies_of_what_is_shared(weights: Mapping[str, torch.Tensor], model: nn.Module) -> State:
    tensors = [*model.parameters(), *model.buffers()]
    shared = {plain.untyped_storage().data_ptr() for tensor in tensors for plain in plain_tensors(tensor)}
    return {
        name: weight.clone() if weight.untyped_storage().data_ptr() in shared else weight
        for name, weight in weights.items()
    }
