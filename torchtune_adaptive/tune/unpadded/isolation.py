"""Whether samples in one row leave each other alone: tried once, since a model may look along a row anywhere.

An attention that was replaced can be seen. A hook that shifts tokens, or positions that are counted by place in the
row and not by `input_pos`, can not, and what such a model would learn without padding is silently something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtune_adaptive.engine.fsdp import settle
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.tune.unpadded.documents import batch_to_device, joined, taking_long_rows

SAMPLE, OTHERS = (1, 2, 3), ((4,), (5, 6))
"""One sample, by itself and among others; its tokens are in every vocabulary."""
ROUNDED = {torch.float32: 1e-3}
"""The difference of logits, in proportion to them, that may be rounding; of other types of weights `ROUNDED_HALF`."""
ROUNDED_HALF = 0.1


def difference_by_place(model: nn.Module, device: torch.device) -> float | None:
    """Collective: how much a sample's logits depend on what else is in its row; None if that is rounding."""
    alone = _logits(model, device, [SAMPLE])[0]
    among_others = _logits(model, device, [SAMPLE, OTHERS[0], SAMPLE, OTHERS[1], SAMPLE])[::2]
    apart = torch.stack([(each - alone).norm(dim=-1) for each in among_others]) / alone.norm(dim=-1).clamp_min(1e-30)
    most = max(from_all_ranks(float(apart.max())))
    return most if most > ROUNDED.get(next(model.parameters()).dtype, ROUNDED_HALF) else None


def _logits(model: nn.Module, device: torch.device, row: Sequence[Sequence[int]]) -> list[Tensor]:
    """Collective: of each sample of a row."""
    batch = joined([{"tokens": list(each), "labels": list(each)} for each in row], ignored=-100)
    del batch["labels"]
    batch_to_device(batch, device)
    with _judging(model), taking_long_rows(model, batch):
        logits = model(**batch)
    of_row = logits[0] if isinstance(logits, Tensor) else torch.cat(list(logits), dim=1)[0]
    return list(of_row.float().split([len(each) for each in row]))


@contextmanager
def _judging(model: nn.Module) -> Iterator[None]:
    """While open, the model drops nothing, keeps nothing for a backward, and nothing is compiled for it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
        if isinstance(model, FSDPModule):
            settle(model)
