"""The norm of all gradients, and its bound."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Collective: the norm of all gradients, which are scaled so that it is at most `max_norm`, if there is one.

    Under tensor parallelism some are spread over more ranks than others, and torch takes no norm over both: it is
    taken of each kind, then of these norms.
    """
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    if len(kinds) < 2:
        same = next(iter(kinds.values()), [])
        if max_norm is not None:
            return float(_whole(nn.utils.clip_grad_norm_(same, max_norm)))
        return float(_whole(nn.utils.get_total_norm([each.grad for each in same if each.grad is not None])))
    gradients = ([each.grad for each in kind if each.grad is not None] for kind in kinds.values())
    norms = [_whole(nn.utils.get_total_norm(each)) for each in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        for kind in kinds.values():
            nn.utils.clip_grads_with_norm_(kind, max_norm, norm, foreach=False)
    return float(norm)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
