"""Whether weights are worth saving: a checkpoint of NaN only pushes out those that are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


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
