"""What goes into a checkpoint: made ready on each rank, gathered on rank 0, in torchtune's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import peft
from torchtune.training._distributed import _gather_nf4_tensor

from torchtune_adaptive.checkpoints.optimizer_state import AnyOptimizer
from torchtune_adaptive.checkpoints.problems import tried
from torchtune_adaptive.checkpoints.random_state import RandomState, capture_random_state
from torchtune_adaptive.config.keys import LoraSettings
from torchtune_adaptive.engine.memory import plain_tensors
from torchtune_adaptive.engine.oom import forget_frames, is_oom, release
from torchtune_adaptive.engine.ranks import from_all_ranks

State = dict[str, Any]
Sharded = dict[str, dict[str, Tensor]]
"""Weights as a rank has them, by name; under the keys of what torchtune's checkpointer takes."""


class Checkpointer(Protocol):
    """What reads and writes weights: one of torchtune's, or what stands for several."""

    def load_checkpoint(self) -> State:
        """What is in the files, in torchtune's keys."""

    def save_checkpoint(self, state: State, *, epoch: int, intermediate_checkpoint: bool, **options: bool) -> None:
        """Writes into a folder of the epoch's name."""


class Contents(Protocol):
    """The weights that a recipe saves."""

    recipe: str
    adapter_only: bool
    """Whether only the adapter is saved, without the weights of the whole model."""

    def sharded(self, model: nn.Module) -> Sharded:
        """What rank 0 has to gather."""

    def finished(self, gathered: State, model: nn.Module) -> State:
        """On rank 0: what was gathered, as torchtune's checkpointer takes it."""


def saves_adapters(recipe: str) -> bool:
    """Whether a recipe trains adapters: a checkpoint of one is no place to go on from for another."""
    return recipe in ("lora", "lora_dpo")


@dataclass(frozen=True)
class FullContents:
    """A recipe that trains the whole model."""

    recipe: str = "full"
    adapter_only: bool = False

    def sharded(self, model: nn.Module) -> Sharded:
        return {training.MODEL_KEY: model.state_dict()}

    def finished(self, gathered: State, model: nn.Module) -> State:
        return gathered


@dataclass(frozen=True)
class LoraContents:
    """LoRA: the adapter, and the model with the adapter merged into it unless only the adapter is wanted."""

    lora: LoraSettings
    adapter_only: bool
    recipe: str = "lora"

    def sharded(self, model: nn.Module) -> Sharded:
        weights = model.state_dict()
        return {training.MODEL_KEY: peft.get_adapter_state_dict(weights, None) if self.adapter_only else weights}

    def finished(self, gathered: State, model: nn.Module) -> State:
        state: State = {training.ADAPTER_CONFIG: self._adapter_config()}
        if self.adapter_only:
            return {**state, training.ADAPTER_KEY: gathered[training.MODEL_KEY]}
        # What nothing had to be gathered for is the model's own, and torchtune merges in place.
        own = _copies_of_what_is_shared(gathered[training.MODEL_KEY], model)
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


def gather_weights(sharded: Sharded, device: torch.device) -> State:
    """Collective: these weights, whole and on the host of rank 0; elsewhere no weights.

    As torchtune gathers them, but without its barrier after each, which says nothing new: no rank has a whole weight
    before all have sent their parts, and none goes on before it has it. So rank 0, which copies them, is not left
    behind.
    """
    first, whole = dist.get_rank() == 0, {key: dict[str, Tensor]() for key in sharded}
    for key, name, weight in ((key, *item) for key, weights in sharded.items() for item in weights.items()):
        gathered = _gathered(weight.to(device) if weight.is_cpu else weight)
        if first:
            whole[key][name] = gathered.cpu()
        elif gathered.is_cuda:
            torch.cuda.current_stream().synchronize()
    return whole


def _gathered(weight: Tensor) -> Tensor:
    """Collective: the whole weight, in its own precision if it is quantized."""
    if isinstance(weight, DTensor):
        quantized = isinstance(weight.to_local(), NF4Tensor)
        weight = _gather_nf4_tensor(weight) if quantized else weight.full_tensor()
    return weight.to(weight.dtype) if isinstance(weight, NF4Tensor) else weight


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Whether no trained weight of this rank is NaN or infinite."""
    # A sum is NaN or infinite where any term is, and needs no memory to say so, as `isfinite` would.
    trained = (each for each in model.parameters() if each.requires_grad)
    shards = (each.to_local() if isinstance(each, DTensor) else each for each in trained)
    sums = [shard.sum(dtype=torch.float32) for shard in shards]
    return not sums or bool(torch.stack(sums).isfinite().all())


@dataclass(frozen=True)
class Ready:
    """What the ranks have told each other before a save, so that none begins what another cannot go through with."""

    finite: bool
    """Whether no weight of any rank is NaN or infinite."""
    random_states: list[RandomState]
    problem: str | None
    """The first that a rank has met."""


def make_ready(model: nn.Module, prepare: Callable[[], State | None], directory: Path) -> tuple[State | None, Ready]:
    """Collective, and one for all of it: what `prepare` returns here, and how it went everywhere."""

    def alone() -> tuple[bool, RandomState, State | None]:
        finite = weights_are_finite(model)
        return finite, capture_random_state(), prepare() if finite else None

    done, problem = tried(alone, directory)
    finite, random_state, prepared = done or (True, {}, None)
    told = from_all_ranks(Ready(finite, [random_state], problem))
    return prepared, Ready(
        finite=all(each.finite for each in told),
        random_states=[each.random_states[0] for each in told],
        problem=next((each.problem for each in told if each.problem is not None), None),
    )


def make_room_to_gather(sharded: Sharded, optimizer: AnyOptimizer, device: torch.device) -> None:
    """Raises where this rank has no memory for what gathering will take: in its midst no rank may fail alone."""
    try:
        _allocate_what_is_gathered(sharded, optimizer, device)
        return
    except Exception as error:
        if not is_oom(error):
            raise
        forget_frames(error)
    release()
    _allocate_what_is_gathered(sharded, optimizer, device)


def _allocate_what_is_gathered(sharded: Sharded, optimizer: AnyOptimizer, device: torch.device) -> None:
    tensors = [*tree_iter(sharded), *tree_iter(optimizer.state_dict())]
    sizes = [each.numel() * each.element_size() for each in tensors if isinstance(each, DTensor)]
    largest = max(sizes, default=0)
    # One tensor at a time: as it arrives, and as it is put together. What is on the host then stays there on rank 0.
    together = sum(sizes) if device.type == "cpu" and dist.get_rank() == 0 else largest
    for_a_moment = [torch.empty(size, dtype=torch.uint8, device=device) for size in (largest, together)]
    del for_a_moment


def _copies_of_what_is_shared(weights: Mapping[str, Tensor], model: nn.Module) -> State:
    tensors = [*model.parameters(), *model.buffers()]
    shared = {plain.untyped_storage().data_ptr() for tensor in tensors for plain in plain_tensors(tensor)}
    return {
        name: weight.clone() if weight.untyped_storage().data_ptr() in shared else weight
        for name, weight in weights.items()
    }
