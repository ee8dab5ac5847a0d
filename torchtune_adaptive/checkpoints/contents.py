"""What goes into a checkpoint: made ready on each rank, gathered on rank 0, in torchtune's keys."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
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
from torchtune_adaptive.checkpoints.store import RANDOM_FILE, find_checkpoints
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.keys import LoraSettings
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.engine.memory import RngState, plain_tensors
from torchtune_adaptive.engine.oom import forget_frames, is_oom, release
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import Remedy
from torchtune_adaptive.text import count_of, format_bytes

Value = TypeVar("Value")
State = dict[str, Any]
Sharded = dict[str, dict[str, Tensor]]
"""Weights as a rank has them, by name; under the keys of what torchtune's checkpointer takes."""
RandomState = dict[str, Any]

GATHERS_WITH_LESS = (Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
"""What helps a save, in which no rows are run."""
NEARLY_FULL_BYTES = 2**20
"""Bytes that may still be free after a write has failed for want of room: less than a block, on most systems."""
SHORT_WRITES = ("unexpected pos", "PytorchStreamWriter failed", "basic_ios::clear")
"""torch's words for a write that the operating system cut short; it drops the error that says why."""


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
        lora = self.lora
        modules = list(lora.lora_attn_modules), lora.apply_lora_to_mlp, lora.apply_lora_to_output
        for_peft = {
            "r": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": peft.get_lora_module_names(*modules),
            "peft_type": "LORA",
        }
        state: State = {training.ADAPTER_CONFIG: for_peft}
        if self.adapter_only:
            return {**state, training.ADAPTER_KEY: gathered[training.MODEL_KEY]}
        # torchtune merges in place, and a weight that did not have to be gathered is the model's own.
        tensors = [*model.parameters(), *model.buffers()]
        shared = {plain.untyped_storage().data_ptr() for tensor in tensors for plain in plain_tensors(tensor)}
        own = {
            name: weight.clone() if weight.untyped_storage().data_ptr() in shared else weight
            for name, weight in gathered[training.MODEL_KEY].items()
        }
        state[training.ADAPTER_KEY] = peft.get_adapter_state_dict(own)
        state[training.MODEL_KEY] = peft.get_merged_lora_ckpt(own, rank=self.lora.lora_rank, alpha=self.lora.lora_alpha)
        return state


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
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    shards = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained)
    sums = [shard.sum(dtype=torch.float32) for shard in shards]
    return not sums or bool(torch.stack(sums).isfinite().all())


def capture_random_state() -> RandomState:
    """What this rank would draw next."""
    torch_state = RngState.capture()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch_state.cpu,
        "cuda": torch_state.cuda,
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, [int(key) for key in keys], *rest]),
    }


def restore_random_state(folder: Path) -> str | None:
    """Puts this rank's generators back. Returns why that cannot be, where it cannot."""
    path = folder / RANDOM_FILE
    if not path.is_file():
        return "the checkpoint has no random state"
    states = torch.load(path, weights_only=True)
    if len(states) != dist.get_world_size():
        return f"the checkpoint has the random state of {count_of(len(states), 'rank')}"
    state: RandomState = states[dist.get_rank()]
    RngState(cpu=state["torch"], cuda=state["cuda"] if torch.cuda.is_initialized() else None).restore()
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    return None


class Ready(NamedTuple):
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
    finites, random_states, problems = zip(*from_all_ranks((finite, random_state, problem)), strict=True)
    return prepared, Ready(all(finites), list(random_states), next(filter(None, problems), None))


def make_room_to_gather(sharded: Sharded, optimizer: AnyOptimizer, device: torch.device) -> None:
    """Raises where this rank has no memory for what gathering will take: in its midst no rank may fail alone."""
    tensors = [*tree_iter(sharded), *tree_iter(optimizer.state_dict())]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, DTensor)]
    largest = max(sizes, default=0)
    # One tensor at a time: as it arrives, and as it is put together. What is on the host then stays there on rank 0.
    together = sum(sizes) if device.type == "cpu" and dist.get_rank() == 0 else largest
    for attempt in range(2):
        try:
            for_a_moment = [torch.empty(size, dtype=torch.uint8, device=device) for size in (largest, together)]
            del for_a_moment
            return
        except Exception as error:
            if attempt or not is_oom(error):
                raise
            forget_frames(error)
        release()


def cause(error: BaseException, directory: Path) -> str:
    """Why a checkpoint could not be written, in words that a user can act on."""
    number = _errno(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't start new thread" in str(error):
        return f"out of memory on the host of rank {dist.get_rank()}: free host memory"
    if is_oom(error):
        return f"out of memory on rank {dist.get_rank()}: {' or '.join(KEYS[remedy] for remedy in GATHERS_WITH_LESS)}"
    if not directory.is_dir() or (isinstance(error, FileNotFoundError) and error.errno is None):
        return "the folder is gone"
    free = shutil.disk_usage(directory).free
    if number is not None:
        text = os.strerror(number)
    elif free < NEARLY_FULL_BYTES:
        number, text = errno.ENOSPC, "no space left"
    elif any(sign in str(error) for sign in SHORT_WRITES):
        text = "a file was truncated while it was written: a quota, a limit on the file size, or a failing disk"
    else:
        text = in_a_line(error)
    older = [checkpoint.name for checkpoint in find_checkpoints(directory) if checkpoint.manifest][1:]
    may_go = f"; {', '.join(older)} may be removed" if older and number in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{text} ({format_bytes(free)} free{may_go})"


def tried(work: Callable[[], Value], directory: Path) -> tuple[Value | None, str | None]:
    """What this rank does alone for a checkpoint, or why it could not: the others are to hear of it."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, a rank that raised would leave the others waiting
        problem = cause(error, directory)
        forget_frames(error)
    release()
    return None, problem


def _errno(error: BaseException | None) -> int | None:
    """The number of the operating system's error at the bottom of this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None
