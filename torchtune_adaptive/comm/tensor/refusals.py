"""Where a step under tensor parallelism cannot be run again, and what is said then."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from torchtune_adaptive.comm.collectives import rank
from torchtune_adaptive.comm.foreign_messages import what_is_foreign
from torchtune_adaptive.comm.fsdp import FSDPModule, has_replicas, why_recovery_is_off
from torchtune_adaptive.comm.tensor.masks import KNOWN
from torchtune_adaptive.errors import RecoveryUnsupportedError, Remedy

DROPOUT = "dropout, whose random numbers DTensor keeps apart from torch's, so they are not put back"
NEEDS_DATA = "what it communicates may depend on its data, so a pass without data does not tell"
SAYS_OTHERWISE = "a pass without data does not communicate what the one with data did"


def why_tensors_are_off(model: nn.Module, group: dist.ProcessGroup, untested_backends: bool) -> str | None:
    """Why a step of this model cannot be run again after running out of memory; None if it can."""
    if not KNOWN:
        return "this version of torch keeps the masks of sharded embeddings in a place that is not known"
    if (backend := dist.get_backend(group)) != "gloo" and not untested_backends:
        return f"under tensor parallelism it has been tested on gloo only, and this is {backend}"
    modules = list(model.modules())
    if any(getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in modules):
        return "it is compiled, so what its tensor parallelism communicates is not seen"
    if has_dropout(model):
        return f"it has {DROPOUT}"
    if isinstance(model, FSDPModule) and has_replicas(model):
        return "it has replicas beside tensor parallelism"
    return why_recovery_is_off(model, tensor_ranks=group.size())


def has_dropout(model: nn.Module) -> bool:
    return any(map(_drops, model.modules()))


def _drops(module: nn.Module) -> bool:
    """Attention draws inside of its kernel, so torchtune's has no module for it."""
    return (isinstance(module, _DropoutNd) and module.p > 0) or getattr(module, "attn_dropout", 0.0) > 0


def outside_of_the_script(names: tuple[str, ...], messages: int = 0) -> str:
    """`messages`: how many this rank itself has seen, where it has."""
    what = what_is_foreign(messages, names) if names or messages else "seen on another rank"
    return f"a microbatch communicates what no script of its shape has ({what}), so what peers expect is not known"


def refused(why: str) -> RecoveryUnsupportedError:
    return RecoveryUnsupportedError(
        f"out of memory on rank {rank()} under tensor parallelism: {why}", Remedy.SMALLER_LIMIT
    )
