"""Whether samples in one row leave each other alone: tried once, since a model may look along a row anywhere.

An attention that was replaced can be seen. A hook that shifts tokens, or positions that are counted by place in the
row and not by `input_pos`, can not, and what such a model would learn without padding is silently something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtune_adaptive.comm.collectives import from_all_ranks
from torchtune_adaptive.comm.fsdp import settle
from torchtune_adaptive.tune.parts.unpadded.documents import batch_to_device, joined, taking_long_rows

SAMPLE, OTHERS = (1, 2, 3), ((4,), (5, 6))
"""One sample behind others and without; its tokens are in every vocabulary."""
MOST_DIFFERENCE = {torch.float32: 1e-3}
"""The difference of logits, in proportion to them, that may be rounding; of other types `ROUNDED`."""
ROUNDED = 0.05


def difference_by_place(model: nn.Module, device: torch.device) -> float | None:
    """Collective: how much a sample's logits depend on what stands before it in its row; None if that is rounding."""
    row = [SAMPLE, OTHERS[0], SAMPLE, OTHERS[1], SAMPLE]
    batch = joined([{"tokens": list(each), "labels": list(each)} for each in row], ignored=-100)
    del batch["labels"]
    begins = [int(batch["mask"].ends[at]) for at in (0, 2, 4)]
    batch_to_device(batch, device)
    with _judging(model), taking_long_rows(model, batch):
        logits = model(**batch)
    of_row = logits[0] if isinstance(logits, Tensor) else torch.cat(list(logits), dim=1)[0]
    alone, *behind_others = (of_row[at : at + len(SAMPLE)].float() for at in begins)
    apart = torch.stack([(each - alone).norm(dim=-1) for each in behind_others]) / alone.norm(dim=-1).clamp_min(1e-30)
    most = max(from_all_ranks(float(apart.max())))
    return most if most > MOST_DIFFERENCE.get(of_row.dtype, ROUNDED) else None


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
